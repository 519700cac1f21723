"""A distillation's rows and tiles in plain operations. Mirror of jax_impl/distillation/plain.py."""

from __future__ import annotations

from torch import Tensor

from logitless.torch_impl import chunk
from logitless.torch_impl.distillation.parts import Kept, Losses
from logitless.torch_impl.distillation.teachers import logits


def row_losses(of: Losses, rows: slice, losses: Tensor, gradient: Tensor | None) -> list[Kept]:
    """:meth:`RowFunctions.row_losses`."""
    inputs, options, dz, kept = of.inputs, of.options, None, []
    z = logits(inputs, rows, 0, inputs.weight.shape[0], options)
    capped = gradient is not None and options.softcap is not None
    slope = chunk.slope(z, options, inputs.temperature_column(rows)) if capped else None
    for part in of.parts:
        own, own_kept, slopes = part.of_rows(z, rows, gradient is not None)
        losses += own
        kept.append(own_kept)
        dz = slopes if dz is None or slopes is None else slopes.add_(dz)
    losses.masked_fill_(~inputs.valid[rows], 0.0)
    if gradient is not None:
        assert dz is not None
        dz = dz if slope is None else dz.mul_(slope)
        gradient.copy_(dz.masked_fill_(~inputs.valid[rows].unsqueeze(1), 0.0))
    return kept


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Tensor, rows: slice, x: Tensor, start: int, stop: int
) -> Tensor:
    """:meth:`RowFunctions.tile_gradient`."""
    inputs, options = of.inputs, of.options
    z = x.new_empty((x.shape[0], stop - start), dtype=factor.dtype)
    chunk.logits_block(x, inputs, rows, start, stop, options, z)
    slope = None if options.softcap is None else chunk.slope(z, options, inputs.temperature_column(rows))
    dz = None
    for part, own in zip(of.parts, kept, strict=True):
        slopes = part.gradient(own, z, rows, start)
        dz = slopes if dz is None else slopes.add_(dz)
    assert dz is not None
    if slope is not None:
        dz.mul_(slope)
    return dz.mul_(factor.unsqueeze(1)).masked_fill_(~inputs.valid[rows].unsqueeze(1), 0.0)
