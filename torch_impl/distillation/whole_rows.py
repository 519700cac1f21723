"""A distillation's losses by whole rows: a few tokens' logits of both sides at a time, and the gradient at once.

Mirror of jax_impl/distillation/whole_rows.py. No logit is made twice: 2·N·V·(D + D_teacher) flops forward and 4·N·D·V
backward. The gradient of the student's logits lies between them, [N, V], in the dtype of the products' operands.

Rounding: as in eager.py. On a GPU the gradient is rounded to the student's dtype. dX is made of it and then multiplied
by the upstream gradient; for dW the hidden states are multiplied, which rounds nothing where all tokens have the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless import numerics
from logitless.objectives import LARGEST_TILE, WholeRows
from logitless.scratch import row_stride, slices
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import XP, Inputs, empty_like_weight
from logitless.torch_impl.distillation.parts import Divergence, Part
from logitless.torch_impl.distillation.teachers import whole_logits


def forward(
    inputs: Inputs, parts: list[Part], options: LossOptions, order: WholeRows, *, kernel: bool, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """The losses of every token, 0 where it does not count; the gradient of the logits, but for logit_scale."""
    dtype, vocab = inputs.accumulation_dtype, inputs.weight.shape[0]
    losses, gradient = inputs.hidden.new_zeros(inputs.tokens, dtype=dtype), None
    if differentiate:
        shape = inputs.tokens, row_stride(vocab, inputs.operand_dtype.itemsize)
        gradient = inputs.hidden.new_empty(shape, dtype=inputs.operand_dtype)[:, :vocab]
    of_rows = _row_losses
    # The kernel makes lse and losses in one pass. Of several ranks lse is exchanged between the two.
    if kernel and isinstance(parts[-1], Divergence) and not inputs.shard.split:
        from logitless.torch_impl.distillation import fused  # imports Triton

        of_rows = fused.row_losses
    for first, last in order.token_slices:
        rows = slice(first, last)
        of_rows(inputs, parts, options, rows, losses[rows], None if gradient is None else gradient[rows])
    return losses, gradient


def _row_losses(
    inputs: Inputs, parts: list[Part], options: LossOptions, rows: slice, losses: Tensor, gradient: Tensor | None
) -> None:
    """:func:`fused.row_losses` in plain operations."""
    z = whole_logits(inputs, rows, options)
    slope = None if options.softcap is None else chunk.slope(z, options, inputs.temperature_column(rows))
    dz = None
    for part in parts:
        own, slopes = part.of_rows(z, rows)
        losses += own
        dz = slopes if dz is None else slopes.add_(dz)
    losses.masked_fill_(~inputs.valid[rows], 0.0)
    if gradient is not None:
        assert dz is not None
        dz = dz if slope is None else dz.mul_(slope)
        gradient.copy_(dz.masked_fill_(~inputs.valid[rows].unsqueeze(1), 0.0))


def gradients(
    inputs: Inputs, options: LossOptions, order: WholeRows, gradient: Tensor, upstream: Tensor,
    weight_dtype: torch.dtype, needs: tuple[bool, ...], kernel: bool,
) -> list[Tensor | None]:  # fmt: skip
    """dX, dW and db, each None unless wanted: 4·N·D·V flops."""
    factor = numerics.row_upstream(XP, inputs, options, inputs.wide(upstream))
    (vocab, _), dtype = inputs.weight.shape, inputs.accumulation_dtype
    dx = inputs.hidden.new_zeros(inputs.hidden.shape, dtype=dtype) if needs[0] else None
    dw = empty_like_weight(inputs.weight, weight_dtype) if needs[1] else None
    db = inputs.weight.new_zeros(vocab, dtype=dtype) if needs[2] else None
    if dx is not None:
        for start, stop in slices(vocab, vocab if inputs.weight.dtype == gradient.dtype else LARGEST_TILE):
            chunk.product(gradient[:, start:stop], inputs.weight[start:stop].to(gradient.dtype), dx, add=start > 0)
        dx.mul_(factor.unsqueeze(1))
    if dw is not None:
        unit = numerics.largest_factor(XP, factor)
        x = (chunk.rows_of(inputs, slice(None)) * (factor / unit).unsqueeze(1)).to(gradient.dtype)
        scaled = _scaled
        if kernel and dw.is_contiguous():
            from logitless.torch_impl.distillation import fused  # imports Triton

            scaled = fused.scaled
        for start, stop in order.vocab_slices:
            part = x.new_empty((stop - start, x.shape[1]), dtype=dtype)
            chunk.product(gradient[:, start:stop].t(), x, part, add=False)
            scaled(part, unit, dw[start:stop])
    if db is not None:
        for first, last in order.token_slices:
            db += torch.mv(gradient[first:last].t().to(dtype), factor[first:last])
    return [dx, dw, db]


def _scaled(values: Tensor, unit: Tensor, out: Tensor) -> None:
    """:func:`fused.scaled` in plain operations."""
    torch.mul(values, unit, out=out)
