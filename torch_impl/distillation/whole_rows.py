"""A distillation's losses by whole rows: a few tokens' logits of both sides at a time. Mirror of
jax_impl/distillation/whole_rows.py.

The gradient of the student's logits [N, V] is made with the losses and held, in the dtype of the products' operands: no
logit is made twice, 2·N·V·(D + D_teacher) flops forward and 4·N·D·V backward. Where it may not be held, the forward
keeps a few numbers of every token, and the backward makes both sides' logits again, a tile at a time:
2·N·V·(D + D_teacher) flops more.

Rounding: as in eager.py. On a GPU the gradient is rounded to the student's dtype. A held one is multiplied by the
upstream gradient after the product for dX; for dW the hidden states are multiplied, which rounds nothing where all
tokens have the same. One that is made again has the upstream gradient in it before it is rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from logitless import numerics
from logitless.objectives import FEW_ROWS, LARGEST_TILE, WholeRows
from logitless.scratch import row_stride, slices
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import NOTHING, XP, Gradients, Inputs, Needs, empty_like_weight
from logitless.torch_impl.distillation import plain
from logitless.torch_impl.distillation.parts import Kept, Losses, RestClass


def forward(of: Losses, *, differentiate: bool) -> tuple[Tensor, list[Kept]]:
    """The losses of every token, 0 where it does not count, and what the backward needs of each part: nothing, or of
    all together the gradient of the logits, but for logit_scale."""
    inputs, order = of.inputs, of.order
    losses, gradient = inputs.hidden.new_zeros(inputs.tokens, dtype=inputs.accumulation_dtype), None
    if differentiate and order.again is None:
        vocab = inputs.weight.shape[0]
        shape = inputs.tokens, row_stride(vocab, inputs.operand_dtype.itemsize)
        gradient = inputs.hidden.new_empty(shape, dtype=inputs.operand_dtype)[:, :vocab]
    of_rows, kept = _functions(of).row_losses, []
    for first, last in order.token_slices:
        rows = slice(first, last)
        kept.append(of_rows(of, rows, losses[rows], None if gradient is None else gradient[rows]))
    if gradient is not None:
        return losses, [(gradient,)]
    if not differentiate or not kept:
        return losses, []
    return losses, [tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*kept, strict=True)]


class RowFunctions(Protocol):
    """What makes a distillation's rows: plain.py, or kernels that make it from raw logits r."""

    def row_losses(self, of: Losses, rows: slice, losses: Tensor, gradient: Tensor | None, /) -> list[Kept]:
        """The losses [C] of the tokens ``rows``, the logits' gradient [C, V] but for logit_scale, if it is wanted, and
        what the next function needs."""

    def tile_gradient(
        self, of: Losses, kept: list[Kept], factor: Tensor, rows: slice, x: Tensor, start: int, stop: int, /
    ) -> Tensor:
        """The gradient of a tile [C, B], but for logit_scale, times ``factor`` [C]. x: the hidden states."""


def _functions(of: Losses) -> RowFunctions:
    if not of.order.by.kernel:
        return plain
    from logitless.torch_impl.distillation import fused, fused_ids  # imports Triton

    return fused_ids if isinstance(of.parts[-1], RestClass) else fused


def gradients(
    inputs: Inputs, options: LossOptions, order: WholeRows, gradient: Tensor, upstream: Tensor, needs: Needs
) -> Gradients:
    """From a held gradient dX, dW and db: 4·N·D·V flops."""
    factor = numerics.row_upstream(XP, inputs, options, inputs.wide(upstream))
    dtype, alike = inputs.accumulation_dtype, gradient.dtype == inputs.weight.dtype
    if not (needs.hidden or needs.weight):
        made = NOTHING
    elif order.by.kernel and inputs.tokens and alike and gradient.dtype.itemsize == 2:
        from logitless.torch_impl.distillation import fused  # imports Triton

        made = fused.held_gradients(inputs, gradient, factor, needs)
    else:
        made = _held_gradients(inputs, order, gradient, factor, needs)
    if not needs.bias:
        return made
    bias = inputs.weight.new_zeros(inputs.weight.shape[0], dtype=dtype)
    for first, last in slices(inputs.tokens, FEW_ROWS[0]):  # of which a wider copy is made
        bias += chunk.vector_product(gradient[first:last].t().to(dtype), factor[first:last])
    return dataclasses.replace(made, bias=bias)


def _held_gradients(inputs: Inputs, order: WholeRows, gradient: Tensor, factor: Tensor, needs: Needs) -> Gradients:
    """dX and dW in plain operations."""
    vocab, dtype = inputs.weight.shape[0], inputs.accumulation_dtype
    dx, dw = None, None
    if needs.hidden:
        dx = inputs.hidden.new_zeros(inputs.hidden.shape, dtype=dtype)
        for start, stop in slices(vocab, vocab if inputs.weight.dtype == gradient.dtype else LARGEST_TILE):
            chunk.product(gradient[:, start:stop], inputs.weight[start:stop].to(gradient.dtype), dx, add=start > 0)
        dx.mul_(factor.unsqueeze(1))
    if needs.weight:
        dw = empty_like_weight(inputs.weight, needs.weight)
        unit = numerics.largest_factor(XP, factor)
        x = (chunk.rows_of(inputs, slice(None)) * (factor / unit).unsqueeze(1)).to(gradient.dtype)
        for start, stop in order.vocab_slices:
            part = x.new_empty((stop - start, x.shape[1]), dtype=dtype)
            chunk.product(gradient[:, start:stop].t(), x, part, add=False)
            torch.mul(part, unit, out=dw[start:stop])
    return Gradients(dx, dw, None)


def gradients_again(of: Losses, kept: list[Kept], upstream: Tensor, needs: Needs) -> Gradients:
    """From what the forward kept dX, dW and db: 6·N·D·V + 2·N·D_teacher·V flops."""
    inputs, tile = of.inputs, of.order.again
    assert tile is not None
    factor = numerics.row_upstream(XP, inputs, of.options, inputs.wide(upstream))
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, factor)
    of_tile, factor = _functions(of).tile_gradient, factor / unit

    def logit_gradient(rows: slice, x: Tensor, start: int, stop: int) -> Tensor:
        own = [tuple(values[rows] for values in each) for each in kept]
        return of_tile(of, own, factor[rows], rows, x, start, stop)

    return chunk.tile_gradients(inputs, tile, needs, unit, logit_gradient)
