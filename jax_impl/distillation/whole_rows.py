"""A distillation's losses by whole rows: a few tokens' logits of both sides at a time. Mirror of
torch_impl/distillation/whole_rows.py.

The gradient of the student's logits [N, V] is made with the losses and held, in the dtype of the products' operands: no
logit is made twice, 2·N·V·(D + D_teacher) flops forward and 4·N·D·V backward. Where it may not be held, the forward
keeps a few numbers of every token, and the backward makes both sides' logits again, a tile at a time:
2·N·V·(D + D_teacher) flops more.

Rounding: as in xla.py. The gradient is rounded to the student's dtype. A held one is multiplied by the upstream
gradient after the product for dX; for dW the hidden states are multiplied, which rounds nothing where all tokens have
the same. One that is made again has the upstream gradient in it before it is rounded.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, Needs
from logitless.jax_impl.chunk import (
    by_blocks_on_cpu,
    product,
    rows_of,
    tile_gradients,
)
from logitless.jax_impl.distillation import plain
from logitless.jax_impl.distillation.parts import Kept, Losses, RestClass
from logitless.jax_impl.slices import Index, for_slices, put, take
from logitless.objectives import WholeRows
from logitless.spec import LossOptions

Carry = tuple[Array, list[Kept], Array | None]


def forward(of: Losses, *, differentiate: bool) -> tuple[Array, list[Kept]]:
    """The losses of every token, 0 where it does not count, and what the backward needs of each part: nothing, or of
    all together the gradient of the logits, but for logit_scale."""
    order, size, functions = of.order, of.order.sizes.tokens, _functions(of)
    holds, keep = differentiate and order.again is None, differentiate and order.again is not None

    def chunk(carry: Carry, first: Index, tokens: int) -> Carry:
        losses, kept, held = functions.row_losses(of, first, tokens, keep, carry[2])
        whole: tuple[Array, list[Kept]]
        whole = jax.tree.map(lambda array, own: put(array, own, first), carry[:2], (losses, kept))
        return *whole, held

    shapes = jax.eval_shape(lambda: functions.row_losses(of, 0, min(size, order.token_chunk), keep, None)[:2])
    zeros = jax.tree.map(lambda like: jnp.zeros((size, *like.shape[1:]), like.dtype), shapes)
    begin = (*zeros, functions.held_gradient(of) if holds else None)
    losses, kept, held = for_slices(size, order.token_chunk, chunk, begin)
    return losses, kept if held is None else [(held[:, : of.inputs.weight.shape[0]],)]


class RowFunctions(Protocol):
    """What makes a distillation's rows: plain.py, or kernels that make it from raw logits r."""

    def held_gradient(self, of: Losses, /) -> Array:
        """What the next function writes the gradient of all logits to, [N, V] or wider."""

    def row_losses(
        self, of: Losses, first: Index, tokens: int, keep: bool, held: Array | None, /
    ) -> tuple[Array, list[Kept], Array | None]:
        """The losses [C] of the tokens from ``first``; if ``keep``, what the last function needs; and ``held`` with the
        logits' gradient but for logit_scale, if there is one."""

    def tile_gradient(
        self, of: Losses, kept: list[Kept], factor: Array, x: Array, first: Index, start: Index, columns: int, /
    ) -> Array:
        """The gradient of a tile [C, B], but for logit_scale, times ``factor`` [C]. x: the hidden states."""


def _functions(of: Losses) -> RowFunctions:
    if not of.order.by.kernel or not of.order.sizes.tokens:  # a kernel has at least one program
        return plain
    from logitless.jax_impl.distillation import fused, fused_ids  # they import Pallas

    return fused_ids if isinstance(of.parts[-1], RestClass) else fused


def gradients(
    inputs: Inputs, options: LossOptions, order: WholeRows, gradient: Array, upstream: Array,
    weight_dtype: DTypeLike, needs: Needs,
) -> Gradients:  # fmt: skip
    """From a held gradient dX, dW and db, each None unless wanted: 4·N·D·V flops."""
    factor = numerics.row_upstream(XP, inputs, options, inputs.wide(upstream))
    hidden = _hidden_gradient(inputs, order, gradient) * factor[:, None] if needs.hidden else None
    weight = _weight_gradient(inputs, order, gradient, factor, weight_dtype) if needs.weight else None
    bias = _bias_gradient(inputs, order, gradient, factor) if needs.bias else None
    return Gradients(hidden, weight, bias)


def _weight_gradient(
    inputs: Inputs, order: WholeRows, gradient: Array, factor: Array, weight_dtype: DTypeLike
) -> Array:
    (vocab, size), dtype = inputs.weight.shape, inputs.accumulation_dtype
    unit = numerics.largest_factor(XP, factor)
    x = (rows_of(inputs, 0, factor.shape[0]) * (factor / unit)[:, None]).astype(gradient.dtype)
    if order.by.kernel:
        from logitless.jax_impl.distillation import fused  # imports Pallas

        if fused.has_product(gradient, x, weight_dtype):
            return fused.weight_gradient(gradient, x, unit)

    def block(dw: Array, start: Index, columns: int) -> Array:
        part = take(gradient, start, columns, axis=1)
        return put(dw, (product(part.T, x, dtype) * unit).astype(weight_dtype), start)

    return for_slices(vocab, order.vocab_chunk, block, jnp.zeros((vocab, size), weight_dtype))


def _bias_gradient(inputs: Inputs, order: WholeRows, gradient: Array, factor: Array) -> Array:
    vocab, dtype = inputs.weight.shape[0], inputs.accumulation_dtype

    def block(db: Array, start: Index, columns: int) -> Array:
        part = take(gradient, start, columns, axis=1)
        return put(db, (part.astype(dtype) * factor[:, None]).sum(axis=0), start)

    return for_slices(vocab, order.vocab_chunk, block, jnp.zeros(vocab, dtype))


def _hidden_gradient(inputs: Inputs, order: WholeRows, gradient: Array) -> Array:
    """dX before the upstream gradient."""
    dtype = inputs.accumulation_dtype

    def whole(gradient: Array, weight: Array) -> Array:
        return product(gradient, weight, dtype)

    def by_blocks(gradient: Array, weight: Array) -> Array:
        def block(dx: Array, start: Index, columns: int) -> Array:
            return dx + whole(take(gradient, start, columns, axis=1), take(weight, start, columns))

        vocab, size = weight.shape
        return for_slices(vocab, order.vocab_chunk, block, jnp.zeros((gradient.shape[0], size), dtype))

    return by_blocks_on_cpu(whole, by_blocks, gradient, inputs.weight)


def gradients_again(of: Losses, kept: list[Kept], upstream: Array, needs: Needs) -> Gradients:
    """From what the forward kept dX, dW and db, each None unless wanted: 6·N·D·V + 2·N·D_teacher·V flops."""
    inputs, tile, of_tile = of.inputs, of.order.again, _functions(of).tile_gradient
    assert tile is not None
    factor = numerics.row_upstream(XP, inputs, of.options, inputs.wide(upstream))
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, factor)
    factor = factor / unit

    def logit_gradient(x: Array, first: Index, start: Index, columns: int) -> Array:
        own, rows = jax.tree.map(lambda values: take(values, first, x.shape[0]), (kept, factor))
        return of_tile(of, own, rows, x, first, start, columns)

    return tile_gradients(inputs, tile, needs, unit, logit_gradient)
