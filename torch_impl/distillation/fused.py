"""What Triton kernels do of a distillation. Mirror of jax_impl/distillation/fused.py."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import Tensor

from logitless import numerics, planning
from logitless.torch_impl.call import XP, Arrays, Gradients, Inputs, Needs
from logitless.torch_impl.checks import dtype_name
from logitless.torch_impl.distillation.parts import Divergence, Kept, Losses, TeacherTile
from logitless.torch_impl.distillation.teachers import Head, Raw, Teacher
from logitless.torch_impl.kernels.kernel_call import KernelCall, column_block
from logitless.torch_impl.kernels.launch import launch, launch_named
from logitless.torch_impl.kernels.products import GradientProducts
from logitless.torch_impl.kernels.rows import NO_OPTIONS, on_device, prepare
from logitless.torch_impl.kernels.sums import Factors

with contextlib.suppress(ImportError):  # without triton no call chooses the kernel
    from logitless.torch_impl.distillation import row_kernels

BLOCK, WARPS = 2048, 8  # 8 logits a thread, of both sides


def row_losses(of: Losses, rows: slice, losses: Tensor, gradient: Tensor | None) -> list[Kept]:
    """:meth:`RowFunctions.row_losses`, of a teacher of the whole vocabulary."""
    student, teacher = (side.raw(rows, 0, of.inputs.weight.shape[0]) for side in (student_head(of), _teacher(of)))
    values = _both_sides(of, student, teacher, rows) | losses_values(of, losses, gradient)
    kept = student.r.new_empty((len(losses), row_kernels.KEPT.value)) if values["KEEP"] else losses
    with on_device(losses.device):
        launch_named(row_kernels.row_losses_kernel, (len(losses),), values | {"kept_ptr": kept})
    return [(kept,)]


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Tensor, rows: slice, x: Tensor, start: int, stop: int
) -> Tensor:
    """:meth:`RowFunctions.tile_gradient`, of a teacher of the whole vocabulary."""
    student, teacher = (side.raw(rows, start, stop) for side in (student_head(of), _teacher(of)))
    gradient = x.new_empty(student.r.shape)
    values = _both_sides(of, student, teacher, rows) | tile_values(gradient, factor, start)
    with on_device(x.device):
        launch_named(row_kernels.tile_gradient_kernel, (len(x),), values | {"kept_ptr": kept[0][0]})
    return gradient


def losses_values(of: Losses, losses: Tensor, gradient: Tensor | None) -> dict[str, object]:
    """What a kernel of whole rows takes of its results, by its name there."""
    return {
        "loss_ptr": losses,
        "gradient_ptr": losses if gradient is None else gradient,
        "gradient_stride": 0 if gradient is None else gradient.stride(0),
        "vocab": of.inputs.weight.shape[0],
        "nll_coef": 0.0 if of.hard is None else float(of.hard.coef),
        "KEEP": of.order.again is not None,
        "STORE": gradient is not None,
    }


def tile_values(gradient: Tensor, factor: Tensor, start: int) -> dict[str, object]:
    """What a kernel of a tile from the entry ``start`` on takes of its result, by its name there."""
    return {
        "factor_ptr": factor,
        "gradient_ptr": gradient,
        "gradient_stride": gradient.stride(0),
        "first": start,
        "width": gradient.shape[1],
    }


def _divergence(of: Losses) -> Divergence:
    divergence = of.parts[-1]
    assert isinstance(divergence, Divergence)
    return divergence


def _teacher(of: Losses) -> Teacher:
    return _divergence(of).teacher


def student_head(of: Losses) -> Head:
    return Head(of.inputs, of.options, of.inputs.accumulation_dtype)


def _both_sides(of: Losses, student: Raw, teacher: Raw, rows: slice) -> dict[str, object]:
    """What the kernels take of both sides, by its name there."""
    beta = _divergence(of).beta
    both = student_values(of, student, rows) | _side("teacher", "teacher_", teacher, of.inputs.temperature is not None)
    return both | {"beta": float(beta), "NORMALIZE": teacher.options is not None, "KIND": kind(beta)}


def student_values(of: Losses, student: Raw, rows: slice) -> dict[str, object]:
    """What the kernels take of the tokens ``rows`` and of the student, by its name there."""
    hard, each = of.hard, None if of.inputs.temperature is None else of.inputs.temperature[rows]
    return {
        "valid_ptr": of.inputs.valid[rows].view(torch.int8),
        "hard_ptr": None if hard is None else hard.ids[rows],
        "temperature_ptr": each,
        "hard_temperature": hard.temperature if hard and isinstance(hard.temperature, float) else 1.0,
        **_side("student", "", student, each is not None),
        "HAS_TEMPERATURE": each is not None,
        "HARD": hard is not None,
        "BLOCK": column_block(student.r.shape[1], BLOCK),
        "num_warps": WARPS,
    }


def _side(name: str, prefix: str, raw: Raw, tempered: bool) -> dict[str, object]:
    """``tempered``: the tokens' own temperatures divide the scale."""
    options, bias, flag = raw.options, raw.bias, prefix.upper()
    return {
        f"{name}_ptr": raw.r,
        f"{name}_stride": raw.r.stride(0),
        f"{prefix}bias_ptr": None if bias is None else bias.contiguous(),
        f"{prefix}scale": 1.0 if options is None else float(options.logit_scale),
        f"{prefix}cap": 1.0 if options is None else float(options.softcap or 1.0),
        f"HAS_{flag}BIAS": bias is not None,
        f"HAS_{flag}SCALE": options is not None and (options.logit_scale != 1.0 or tempered),
        f"HAS_{flag}CAP": options is not None and options.softcap is not None,
    }


def logits_sums(z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float) -> tuple[Tensor, Tensor]:
    """:meth:`TileFunctions.logits_sums`."""
    losses, mean = z.new_empty(2, z.shape[0])
    _tile(z, lse, teacher, beta, losses, mean, store=False)
    return losses, mean


def logits_gradient(z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, mean: Tensor) -> Tensor:
    """:meth:`TileFunctions.logits_gradient`."""
    _tile(z, lse, teacher, beta, mean, mean, store=True)
    return z


def _tile(z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, losses: Tensor, mean: Tensor, store: bool) -> None:
    t, teacher_lse = teacher
    with on_device(z.device):
        launch(row_kernels.tile_kernel, z.shape[0])(
            z, t, lse, teacher_lse, losses, mean, lse.stride(0), 0 if teacher_lse is None else teacher_lse.stride(0),
            z.shape[1], z.stride(0), t.stride(0), float(beta), NORMALIZE=teacher_lse is not None, KIND=kind(beta),
            STORE=store, BLOCK=column_block(z.shape[1], BLOCK), num_warps=WARPS,
        )  # fmt: skip


def kind(beta: float) -> int:
    """Which divergence, by the kernels' number for it."""
    kind = row_kernels.FORWARD if beta == 0 else row_kernels.REVERSE if beta == 1 else row_kernels.MIXED
    return int(kind.value)


def held_gradients(inputs: Inputs, gradient: Tensor, factor: Tensor, needs: Needs) -> Gradients:
    """dX and dW by the products' kernels, from a held gradient of the logits; factor [N] is what its rows still lack.

    Both are rounded once, to the dtypes of ``needs``. Every token is worked on: the rows of those that do not count are
    zeros. The kernels take them for tokens with the target 0, of which nothing is added to the products.
    """
    unit = numerics.largest_factor(XP, factor)
    relative, (tokens, vocab) = factor / unit, gradient.shape
    arrays = Arrays(inputs.hidden, inputs.weight, None, factor.new_zeros(tokens, dtype=torch.int64))
    one_chunk = planning.plan(
        tokens=tokens, hidden=inputs.hidden.shape[1], vocab=vocab, dtype=dtype_name(gradient.dtype), fused=True,
        order="tokens", chunk=tokens,
    )  # fmt: skip
    c = KernelCall(prepare(arrays, NO_OPTIONS, gradient.dtype), NO_OPTIONS, one_chunk)
    products = GradientProducts(c, dataclasses.replace(needs, bias=None), None, relative, unit)
    entries = slice(0, vocab)
    with c.on_device():
        if needs.weight:
            x = c.operand()
            torch.mul(inputs.hidden, relative.unsqueeze(1), out=x)
            x.masked_fill_(~inputs.valid.unsqueeze(1), 0.0)  # whatever such a token holds
            products.add_weight(0, x, gradient, entries, unit, None)
        if needs.hidden:
            c.row_target.zero_()
            rows = torch.nn.functional.pad(relative, (0, len(c.row_target) - tokens))
            products.add_hidden(0, gradient, entries, Factors.of_rows(rows), unit)
    return Gradients(products.hidden, products.weight, None)
