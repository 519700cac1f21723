"""What Triton kernels do of a distillation from a few ids of every token and one class for all others. Mirror of
jax_impl/distillation/fused_ids.py.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from logitless.objectives import KERNEL_CLASSES
from logitless.torch_impl.distillation.fused import kind, losses_values, student_head, student_values, tile_values
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
    values = _values(of, student, rows) | losses_values(of, losses, gradient)
    kept, at_ids = losses, losses
    if values["KEEP"]:
        kept = losses.new_empty(len(losses), row_kernels.KEPT.value)
        at_ids = losses.new_empty(len(losses), rest.ids.shape[1])
    values |= {"log_p_ptr": rest.log_p[rows], "beta": float(rest.beta), "KIND": kind(rest.beta)}
    with on_device(losses.device):
        of_kernel = values | {"kept_ptr": kept, "at_ids_ptr": at_ids}
        launch_named(row_kernels.ids_losses_kernel, (len(losses),), of_kernel)
    return [(kept, at_ids)]


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Tensor, rows: slice, x: Tensor, start: int, stop: int
) -> Tensor:
    """:meth:`RowFunctions.tile_gradient`."""
    student, (numbers, at_ids) = student_head(of).raw(rows, start, stop), kept[0]
    gradient = x.new_empty(student.r.shape)
    values = _values(of, student, rows) | tile_values(gradient, factor, start)
    with on_device(x.device):
        of_kernel = values | {"kept_ptr": numbers, "at_ids_ptr": at_ids}
        launch_named(row_kernels.ids_tile_kernel, (len(x),), of_kernel)
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
