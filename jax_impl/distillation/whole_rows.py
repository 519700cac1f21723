"""A distillation's losses by whole rows: a few tokens' logits of both sides at a time, and the gradient at once.

Mirror of torch_impl/distillation/whole_rows.py. No logit is made twice: 2·N·V·(D + D_teacher) flops forward and 4·N·D·V
backward. The gradient of the student's logits lies between them, [N, V], in the dtype of the products' operands.

Rounding: as in xla.py. The gradient is rounded to the student's dtype. dX is made of it and then multiplied by the
upstream gradient; for dW the hidden states are multiplied, which rounds nothing where all tokens have the same.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, Needs
from logitless.jax_impl.chunk import by_blocks_on_cpu, product, rows_of, slope, temperature_column, unpadded
from logitless.jax_impl.distillation.parts import Part
from logitless.jax_impl.distillation.teachers import whole_logits
from logitless.jax_impl.slices import Index, for_slices, put, take
from logitless.objectives import WholeRows
from logitless.spec import LossOptions

Carry = tuple[Array, Array | None]


def forward(
    inputs: Inputs, parts: list[Part], options: LossOptions, order: WholeRows, *, differentiate: bool
) -> tuple[Array, Array | None]:
    """The losses of every token, 0 where it does not count; the gradient of the logits, but for logit_scale."""
    tokens, vocab = order.sizes.tokens, order.sizes.vocab

    def chunk(carry: Carry, first: Index, tokens: int) -> Carry:
        losses, gradient = carry
        own, dz = _row_losses(inputs, parts, options, first, tokens)
        if gradient is not None:
            gradient = put(gradient, dz.astype(gradient.dtype), first)
        return put(losses, own, first), gradient

    losses = jnp.zeros(tokens, inputs.accumulation_dtype)
    gradient = jnp.zeros((tokens, vocab), inputs.hidden.dtype) if differentiate else None
    return for_slices(tokens, order.token_chunk, chunk, (losses, gradient))


def _row_losses(
    inputs: Inputs, parts: list[Part], options: LossOptions, first: Index, tokens: int
) -> tuple[Array, Array]:
    """The losses of a chunk, [C], and the gradient of its logits, [C, V]."""
    z = unpadded(whole_logits(inputs, first, tokens, options), inputs.shard.limit(), 0)
    losses, slopes = zip(*(part.of_rows(z, first) for part in parts), strict=True)
    dz = sum(slopes[1:], slopes[0])
    if options.softcap is not None:
        dz = dz * slope(z, options, temperature_column(inputs, first, tokens))
    valid, dz = take(inputs.valid, first, tokens), unpadded(dz, inputs.shard.limit(), 0, 0.0)
    return jnp.where(valid, sum(losses[1:], losses[0]), 0.0), jnp.where(valid[:, None], dz, 0.0)


def gradients(
    inputs: Inputs, options: LossOptions, order: WholeRows, gradient: Array, upstream: Array,
    weight_dtype: DTypeLike, needs: Needs,
) -> Gradients:  # fmt: skip
    """dX, dW and db, each None unless wanted: 4·N·D·V flops."""
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
