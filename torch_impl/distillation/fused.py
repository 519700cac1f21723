"""What Triton kernels do of a distillation. No mirror: XLA fuses what whole_rows.py and parts.py say."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from logitless.spec import LossOptions
from logitless.torch_impl.call import Inputs
from logitless.torch_impl.distillation.parts import Divergence, Hard, Part, Sums, TeacherTile
from logitless.torch_impl.distillation.teachers import raw_rows
from logitless.torch_impl.kernels.kernel_call import column_block
from logitless.torch_impl.kernels.launch import cdiv, launch
from logitless.torch_impl.kernels.rows import on_device

with contextlib.suppress(ImportError):  # without triton no call chooses the kernel
    from logitless.torch_impl.distillation import row_kernels

BLOCK, WARPS = 2048, 8  # 8 logits a thread, of both sides


def row_losses(
    inputs: Inputs, parts: list[Part], options: LossOptions, rows: slice, losses: Tensor, gradient: Tensor | None
) -> None:
    """The losses [C] of the tokens ``rows``, and the logits' gradient [C, V] but for logit_scale, if it is wanted."""
    divergence, hard = parts[-1], parts[0] if len(parts) > 1 else None
    assert isinstance(divergence, Divergence)
    assert hard is None or isinstance(hard, Hard)
    student, teacher = raw_rows(inputs, rows), divergence.teacher.raw(rows)
    each = None if inputs.temperature is None else inputs.temperature[rows]
    temperature = hard.temperature if hard is not None and isinstance(hard.temperature, float) else 1.0
    bias, teacher_bias = (None if b is None else b.contiguous() for b in (inputs.bias, teacher.bias))
    with on_device(student.device):
        launch(row_kernels.row_losses_kernel, student.shape[0])(
            student, teacher.r, bias, teacher_bias, inputs.valid[rows].view(torch.int8),
            None if hard is None else hard.ids[rows], each, losses, losses if gradient is None else gradient,
            student.shape[1], student.stride(0), teacher.r.stride(0), 0 if gradient is None else gradient.stride(0),
            *_scales(options), *_scales(teacher.options), float(divergence.beta),
            0.0 if hard is None else float(hard.coef), temperature,
            **_flags("", bias, options, each), **_flags("TEACHER_", teacher_bias, teacher.options, each),
            HAS_TEMPERATURE=each is not None, NORMALIZE=teacher.options is not None,
            KIND=_kind(divergence.beta), HARD=hard is not None, STORE=gradient is not None,
            BLOCK=column_block(student.shape[1], BLOCK), num_warps=WARPS,
        )  # fmt: skip


def tile_sums(z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, sums: Sums) -> None:
    """:meth:`TileFunctions.tile_sums`."""
    _tile(z, lse, teacher, beta, sums[0], sums[1], store=False)


def tile_gradient(z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, mean: Tensor) -> Tensor:
    """:meth:`TileFunctions.tile_gradient`."""
    _tile(z, lse, teacher, beta, mean, mean, store=True)
    return z


def _tile(z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, losses: Tensor, mean: Tensor, store: bool) -> None:
    t, teacher_lse = teacher
    with on_device(z.device):
        launch(row_kernels.tile_kernel, z.shape[0])(
            z, t, lse, teacher_lse, losses, mean, lse.stride(0), 0 if teacher_lse is None else teacher_lse.stride(0),
            z.shape[1], z.stride(0), t.stride(0), float(beta), NORMALIZE=teacher_lse is not None, KIND=_kind(beta),
            STORE=store, BLOCK=column_block(z.shape[1], BLOCK), num_warps=WARPS,
        )  # fmt: skip


def _kind(beta: float) -> int:
    """Which divergence, by the kernels' number for it."""
    kind = row_kernels.FORWARD if beta == 0 else row_kernels.REVERSE if beta == 1 else row_kernels.MIXED
    return int(kind.value)


def scaled(values: Tensor, unit: Tensor, out: Tensor) -> None:
    """out = values · unit, of matrices without gaps, rounded to out's dtype. PyTorch's own takes four times as long."""
    with on_device(out.device):
        launch(row_kernels.scaled_kernel, cdiv(values.numel(), BLOCK))(
            values, unit, out, values.numel(), BLOCK=BLOCK, num_warps=WARPS
        )


def _scales(options: LossOptions | None) -> tuple[float, float]:
    return (1.0, 1.0) if options is None else (float(options.logit_scale), float(options.softcap or 1.0))


def _flags(side: str, bias: Tensor | None, options: LossOptions | None, each: Tensor | None) -> dict[str, bool]:
    """What a side's logits are made with; ``each``: the tokens' own temperatures, which divide the scale."""
    return {
        f"HAS_{side}BIAS": bias is not None,
        f"HAS_{side}SCALE": options is not None and (options.logit_scale != 1.0 or each is not None),
        f"HAS_{side}CAP": options is not None and options.softcap is not None,
    }
