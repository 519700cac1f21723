"""What Triton kernels do of a distillation from a few ids of every token and one class for all others. No mirror."""

from __future__ import annotations

import contextlib

from torch import Tensor

from logitless.objectives import KERNEL_CLASSES
from logitless.torch_impl.distillation.fused import kind, student_head, student_values
from logitless.torch_impl.distillation.parts import Kept, Losses, RestClass
from logitless.torch_impl.distillation.teachers import Raw
from logitless.torch_impl.kernels.kernel_call import column_block
from logitless.torch_impl.kernels.launch import launch_named
from logitless.torch_impl.kernels.rows import on_device

with contextlib.suppress(ImportError):  # without triton no call chooses the kernel
    from logitless.torch_impl.distillation import row_kernels


def row_losses(of: Losses, rows: slice, losses: Tensor, gradient: Tensor | None) -> list[Kept]:
    """:meth:`RowFunctions.row_losses`."""
    rest, student = _rest(of), student_head(of).raw(rows, 0, of.inputs.weight.shape[0])
    keep, (tokens, vocab), count = of.order.again is not None, student.r.shape, rest.ids.shape[1]
    kept, at_ids = losses, losses
    if keep:
        kept, at_ids = student.r.new_empty(tokens, row_kernels.KEPT.value), student.r.new_empty(tokens, count)
    with on_device(losses.device):
        values = _values(of, student, rows) | {
            "log_p_ptr": rest.log_p[rows],
            "loss_ptr": losses,
            "kept_ptr": kept,
            "at_ids_ptr": at_ids,
            "gradient_ptr": losses if gradient is None else gradient,
            "gradient_stride": 0 if gradient is None else gradient.stride(0),
            "vocab": vocab,
            "beta": float(rest.beta),
            "nll_coef": 0.0 if of.hard is None else float(of.hard.coef),
            "KIND": kind(rest.beta),
            "KEEP": keep,
            "STORE": gradient is not None,
        }
        launch_named(row_kernels.ids_losses_kernel, (tokens,), values)
    return [(kept, at_ids)]


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Tensor, rows: slice, x: Tensor, start: int, stop: int
) -> Tensor:
    """:meth:`RowFunctions.tile_gradient`."""
    student, (numbers, at_ids) = student_head(of).raw(rows, start, stop), kept[0]
    gradient = x.new_empty(student.r.shape)
    with on_device(x.device):
        values = _values(of, student, rows) | {
            "factor_ptr": factor,
            "kept_ptr": numbers,
            "at_ids_ptr": at_ids,
            "gradient_ptr": gradient,
            "gradient_stride": gradient.stride(0),
            "first": start,
            "width": stop - start,
        }
        launch_named(row_kernels.ids_tile_kernel, (x.shape[0],), values)
    return gradient


def _rest(of: Losses) -> RestClass:
    rest = of.parts[-1]
    assert isinstance(rest, RestClass)
    return rest


def _values(of: Losses, student: Raw, rows: slice) -> dict[str, object]:
    """What both kernels take, by its name there."""
    ids = _rest(of).ids[rows]
    count = ids.shape[1]
    return student_values(of, student, rows) | {
        "ids_ptr": ids,
        "count": count,
        "IDS": column_block(count + 1, KERNEL_CLASSES),
    }
