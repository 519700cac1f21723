"""What Triton kernels do of a distillation from a few ids of every token and one class for all others. No mirror.

The ids' logits are gathered and marked with −inf in the raw rows. The kernels go over the others. What there is of each
id, [C, K], takes plain operations.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from logitless.torch_impl import chunk
from logitless.torch_impl.distillation.fused import of_student
from logitless.torch_impl.distillation.parts import Hard, Kept, Losses, RestClass
from logitless.torch_impl.distillation.teachers import Head, Raw, columns_of
from logitless.torch_impl.kernels.kernel_call import column_block
from logitless.torch_impl.kernels.launch import launch, launch_named
from logitless.torch_impl.kernels.rows import on_device

with contextlib.suppress(ImportError):  # without triton no call chooses the kernel
    from logitless.torch_impl.distillation import row_kernels


def row_losses(of: Losses, rows: slice, losses: Tensor, gradient: Tensor | None) -> list[Kept]:
    """:meth:`RowFunctions.row_losses`."""
    rest, vocab, hard = of.parts[-1], of.inputs.weight.shape[0], of.hard
    assert isinstance(rest, RestClass)
    student, columns = _student(of, rows, 0, vocab), columns_of(rest.ids[rows], 0, vocab)
    logits = _logits_at(of, student, columns.clamp(max=vocab - 1), rows)
    own = None if hard is None else _logits_at(of, student, hard.ids[rows], rows)
    _put(student.r, columns, None)
    sums = student.r.new_empty((len(columns), 4))
    with on_device(losses.device):
        values = of_student(of, student, rows) | {"sums_ptr": sums, "vocab": vocab}
        launch_named(row_kernels.others_kernel, (len(columns),), values)
    highest, log_total, *of_hard = sums.unbind(1)
    made, (highest, log_total, slopes) = rest.of_classes(logits, highest, log_total, rows)
    known, at_ids = [highest, log_total, slopes[:, -1]], slopes[:, :-1]
    if hard is not None and own is not None:
        hard_made, hard_known, hard_at_ids = _hard(hard, rest, logits, own, of_hard, rows)
        made, known, at_ids = made + hard_made, known + hard_known, at_ids + hard_at_ids
    else:
        known += known  # which nobody reads
    losses.copy_(made.masked_fill_(~of.inputs.valid[rows], 0.0))
    if of.options.softcap is not None:
        at_ids = at_ids * chunk.slope(logits, of.options, of.inputs.temperature_column(rows))
    kept = torch.stack(known, dim=1), at_ids.masked_fill(~of.inputs.valid[rows].unsqueeze(1), 0.0)
    if gradient is not None:
        _store_gradient(of, student, columns, kept, None, rows, 0, gradient)
    return [kept]


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Tensor, rows: slice, x: Tensor, start: int, stop: int
) -> Tensor:
    """:meth:`RowFunctions.tile_gradient`."""
    rest, student = of.parts[-1], _student(of, rows, start, stop)
    assert isinstance(rest, RestClass)
    columns = columns_of(rest.ids[rows], start, stop - start)
    _put(student.r, columns, None)
    gradient = x.new_empty(student.r.shape)
    _store_gradient(of, student, columns, kept[0], factor, rows, start, gradient)
    return gradient


def _student(of: Losses, rows: slice, start: int, stop: int) -> Raw:
    return Head(of.inputs, of.options, of.inputs.accumulation_dtype).raw(rows, start, stop)


def _logits_at(of: Losses, student: Raw, columns: Tensor, rows: slice) -> Tensor:
    """z of some columns of whole rows, [C, K]."""
    z = student.r.gather(1, columns)
    if student.bias is not None:
        z += student.bias[columns]
    return chunk.capped(z, of.options, of.inputs.temperature_column(rows))


def _hard(
    hard: Hard, rest: RestClass, logits: Tensor, own: Tensor, of_others: list[Tensor], rows: slice
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The hard loss [C], what others_gradient_kernel needs of it, and its gradient at the ids, [C, K].

    ``of_others``: the kernel's sums of what is neither an id nor the target. The ids are added here.
    """
    ids, target = rest.ids[rows], hard.ids[rows]
    scaled = hard.scaled(logits, rows).masked_fill(ids < 0, -torch.inf)
    of_ids, (highest, log_total) = scaled.masked_fill(ids == target, -torch.inf), of_others
    above = torch.maximum(highest, of_ids.amax(dim=1))
    total = torch.exp((highest - above) + log_total) + torch.exp(of_ids - above.unsqueeze(1)).sum(dim=1)
    losses, (highest, log_total, slopes) = hard.of_classes(hard.scaled(own, rows), above, total.log(), rows)
    at_ids = torch.exp((of_ids - highest.unsqueeze(1)) - log_total.unsqueeze(1)) * slopes[:, 1:]
    at_ids = torch.where(ids == target, slopes[:, :1], at_ids)
    return losses, [highest, log_total, slopes[:, 1]], at_ids


def _store_gradient(
    of: Losses, student: Raw, columns: Tensor, kept: Kept, factor: Tensor | None, rows: slice, start: int,
    gradient: Tensor,
) -> None:  # fmt: skip
    """The gradient of a tile from the entry ``start`` on, [C, B], times the tokens' factors. ``columns``: where the ids
    are in it, which are marked."""
    known, at_ids = kept
    with on_device(gradient.device):
        values = of_student(of, student, rows) | {
            "factor_ptr": factor,
            "known_ptr": known,
            "gradient_ptr": gradient,
            "gradient_stride": gradient.stride(0),
            "first": start,
            "width": gradient.shape[1],
            "HAS_FACTOR": factor is not None,
        }
        launch_named(row_kernels.others_gradient_kernel, (len(gradient),), values)
    _put(gradient, columns, at_ids if factor is None else at_ids * factor.unsqueeze(1))


def _put(matrix: Tensor, columns: Tensor, values: Tensor | None) -> None:
    """matrix[i, columns[i, k]] = values[i, k], or −inf; columns behind the last one are of ids that lie elsewhere."""
    (rows, count), values = columns.shape, None if values is None else values.contiguous()
    with on_device(matrix.device):
        launch(row_kernels.put_kernel, rows)(
            matrix, columns, values, matrix.shape[1], count, matrix.stride(0), HAS_VALUES=values is not None,
            BLOCK=column_block(count, 1024), num_warps=4,
        )  # fmt: skip
