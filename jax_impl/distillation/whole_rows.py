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
from logitless.jax_impl.distillation.parts import Kept, Losses
from logitless.jax_impl.slices import Index, for_slices, put, take
from logitless.objectives import WholeRows
from logitless.spec import LossOptions

Carry = tuple[Array, list[Kept]]


def forward(of: Losses, *, differentiate: bool) -> tuple[Array, list[Kept]]:
    """The losses of every token, 0 where it does not count, and what the backward needs of each part: nothing, or of
    all together the gradient of the logits, but for logit_scale."""
    order, size, of_rows = of.order, of.order.sizes.tokens, _functions(of).row_losses

    def made(first: Index, tokens: int) -> Carry:
        losses, kept, dz = of_rows(of, first, tokens, differentiate)
        if not differentiate:
            return losses, []
        return losses, kept if dz is None else [(dz,)]

    def chunk(carry: Carry, first: Index, tokens: int) -> Carry:
        whole: Carry = jax.tree.map(lambda array, own: put(array, own, first), carry, made(first, tokens))
        return whole

    shapes = jax.eval_shape(lambda: made(0, min(size, order.token_chunk)))
    zeros: Carry = jax.tree.map(lambda like: jnp.zeros((size, *like.shape[1:]), like.dtype), shapes)
    return for_slices(size, order.token_chunk, chunk, zeros)


class RowFunctions(Protocol):
    """What makes a distillation's rows: plain.py, or kernels that make it from raw logits r."""

    def row_losses(
        self, of: Losses, first: Index, tokens: int, differentiate: bool, /
    ) -> tuple[Array, list[Kept], Array | None]:
        """The losses [C] of the tokens from ``first``; if a gradient is wanted, either what the next function needs, if
        the order makes it again, or the logits' gradient [C, V] but for logit_scale."""

    def tile_gradient(
        self, of: Losses, kept: list[Kept], factor: Array, x: Array, first: Index, start: Index, columns: int, /
    ) -> Array:
        """The gradient of a tile [C, B], but for logit_scale, times ``factor`` [C]. x: the hidden states."""


def _functions(of: Losses) -> RowFunctions:
    if not of.order.by.kernel or not of.order.sizes.tokens:  # a kernel has at least one program
        return plain
    from logitless.jax_impl.distillation import fused  # imports Pallas

    return fused


def gradients(
    inputs: Inputs, options: LossOptions, order: WholeRows, gradient: Array, upstream: Array,
    weight_dtype: DTypeLike, needs: Needs,
) -> Gradients:  # fmt: skip
    """From a held gradient dX, dW and db, each None unless wanted: 4·N·D·V flops."""
    factor = numerics.row_upstream(XP, inputs, options, inputs.wide(upstream))
    (vocab, size), dtype = inputs.weight.shape, inputs.accumulation_dtype
    unit = numerics.largest_factor(XP, factor)
    x = (rows_of(inputs, 0, factor.shape[0]) * (factor / unit)[:, None]).astype(gradient.dtype)

    def block(carry: Gradients, start: Index, columns: int) -> Gradients:
        dw, db = carry.weight, carry.bias
        part = take(gradient, start, columns, axis=1)
        if dw is not None:
            dw = put(dw, (product(part.T, x, dtype) * unit).astype(weight_dtype), start)
        if db is not None:
            db = put(db, (part.astype(dtype) * factor[:, None]).sum(axis=0), start)
        return Gradients(None, dw, db)

    zeros = Gradients(
        hidden=None,
        weight=jnp.zeros((vocab, size), weight_dtype) if needs.weight else None,
        bias=jnp.zeros(vocab, dtype) if needs.bias else None,
    )
    made = for_slices(vocab, order.vocab_chunk, block, zeros) if needs.weight or needs.bias else zeros
    return made._replace(hidden=_hidden_gradient(inputs, order, gradient) * factor[:, None] if needs.hidden else None)


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
