"""What Pallas kernels do of a distillation. Mirror of torch_impl/distillation/fused.py."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from logitless.jax_impl.distillation.parts import Divergence, Kept, Losses
from logitless.jax_impl.distillation.teachers import Head, Raw
from logitless.jax_impl.kernels import architecture
from logitless.jax_impl.kernels.loops import one_by_one
from logitless.jax_impl.slices import Index, take
from logitless.scratch import PADDED_HIDDEN, PADDED_VOCAB

with contextlib.suppress(ImportError):  # without absl unavailable() says so before anything here is called
    from logitless.jax_impl.distillation import row_kernels
    from logitless.jax_impl.kernels import hopper
    from logitless.jax_impl.kernels.launch import empty_beside, reference, written
    from logitless.jax_impl.kernels.pieces import Row

DTYPES = ("bfloat16", "float16", "float32")


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Why these kernels cannot run on ``device`` (None: not known while tracing), or None."""
    return architecture.unusable(device, dtype, DTYPES)


def held_gradient(of: Losses) -> Array:
    """:meth:`RowFunctions.held_gradient`, which holds anything."""
    inputs = of.inputs
    shape = inputs.hidden.shape[0], Row(inputs.weight.shape[0], inputs.accumulation_dtype).width
    return empty_beside(shape, inputs.hidden.dtype, inputs.hidden, inputs.weight)


def row_losses(
    of: Losses, first: Index, tokens: int, keep: bool, held: Array | None
) -> tuple[Array, list[Kept], Array | None]:
    """:meth:`RowFunctions.row_losses`."""
    vocab = of.inputs.weight.shape[0]
    student = student_head(of).raw(first, tokens, 0, vocab)
    teacher = _divergence(of).teacher.raw(first, tokens, 0, vocab)
    sides = _sides(of, student, teacher)

    def launch(arguments: dict[str, Array]) -> dict[str, Array]:
        if held is None:
            return row_kernels.row_losses(sides, arguments, keep=keep)
        gradient = reference(arguments["gradient"])
        made = row_kernels.row_losses(sides, {**arguments, "gradient": gradient}, keep=keep)
        return made | {"gradient": written(gradient)}

    arguments = _both_sides(of, student, teacher, first, 0)
    if held is not None:
        arguments |= {"first": jnp.asarray(first, jnp.int32).reshape(1), "gradient": held}
    made = one_by_one(launch)(arguments)
    kept = [tuple(made[name] for name in sides.kept)] if keep else []
    return made["loss"], kept, made.get("gradient")


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Array, x: Array, first: Index, start: Index, columns: int
) -> Array:
    """:meth:`RowFunctions.tile_gradient`."""
    student = student_head(of).raw_of(x, start, columns)
    teacher = _divergence(of).teacher.raw(first, x.shape[0], start, columns)
    sides = _sides(of, student, teacher)

    def launch(arguments: dict[str, Array]) -> Array:
        return row_kernels.tile_gradient(sides, arguments, x.dtype)

    arguments = _both_sides(of, student, teacher, first, start) | dict(zip(sides.kept, kept[0], strict=True))
    gradient: Array = one_by_one(launch)(arguments | {"factor": factor})
    return gradient[:, :columns]


def has_product(gradient: Array, x: Array, dtype: DTypeLike) -> bool:
    """Whether there is a kernel for a dW of this dtype: whole tiles of 16 bits."""
    sizes = gradient.shape[1] % PADDED_VOCAB, x.shape[1] % PADDED_HIDDEN
    return not any((*sizes, x.shape[0] == 0)) and gradient.dtype == dtype and gradient.dtype.itemsize == 2


def weight_gradient(gradient: Array, x: Array, unit: Array) -> Array:
    """dW = unit · gradientᵀ x, rounded once, from a held gradient of the logits [N, V] and x [N, D]."""
    (tokens, vocab), size = gradient.shape, x.shape[1]
    out = {"out": jax.ShapeDtypeStruct((vocab, size), gradient.dtype)}

    def launch(arguments: dict[str, Array]) -> Array:
        return hopper.weight(arguments, out, columns=vocab, adds=False, turned=False)["out"]

    arguments = {"rows": jnp.full(1, tokens, jnp.int32), "start": jnp.zeros(1, jnp.int32), "e": gradient, "x": x}
    made: Array = one_by_one(launch)(arguments | {"scale": unit.reshape(1)})
    return made


def _divergence(of: Losses) -> Divergence:
    divergence = of.parts[-1]
    assert isinstance(divergence, Divergence)
    return divergence


def student_head(of: Losses) -> Head:
    return Head(of.inputs, of.options, of.inputs.accumulation_dtype)


def _sides(of: Losses, student: Raw, teacher: Raw) -> row_kernels.Sides:
    return row_kernels.Sides(
        student=row_of(student),
        teacher=row_of(teacher),
        normalize=teacher.options is not None,
        beta=float(_divergence(of).beta),
        hard=of.hard is not None,
        nll_coef=0.0 if of.hard is None else float(of.hard.coef),
        temperature=hard_temperature(of),
    )


def hard_temperature(of: Losses) -> float:
    """What all tokens' logits were divided by that the hard loss multiplies them by."""
    return of.hard.temperature if of.hard is not None and isinstance(of.hard.temperature, float) else 1.0


def row_of(raw: Raw) -> Row:
    if raw.options is None:
        return Row(raw.r.shape[1], raw.r.dtype)
    return Row(raw.r.shape[1], raw.r.dtype, float(raw.options.logit_scale), raw.options.softcap)


def _both_sides(of: Losses, student: Raw, teacher: Raw, first: Index, start: Index) -> dict[str, Array]:
    """What both kernels read of columns from ``start``."""
    return student_arguments(of, student, first, start) | _side("teacher", teacher)


def student_arguments(of: Losses, student: Raw, first: Index, start: Index) -> dict[str, Array]:
    """What kernels read of the tokens from ``first`` and of the student's columns from ``start``."""
    hard, tokens = of.hard, student.r.shape[0]
    arguments = {"valid": take(of.inputs.valid, first, tokens).astype(jnp.int32), **_side("student", student)}
    if hard is not None:
        arguments["target"] = (take(hard.ids[:, 0], first, tokens) - start).astype(jnp.int32)
    if of.inputs.temperature is not None:
        arguments["temperature"] = take(of.inputs.temperature, first, tokens)
    return arguments


def _side(name: str, raw: Raw) -> dict[str, Array]:
    """Rows shorter than a warpgroup are padded."""
    missing = row_of(raw).width - raw.r.shape[1]
    side = {name: jnp.pad(raw.r, ((0, 0), (0, missing)))}
    return side if raw.bias is None else side | {f"{name}_bias": jnp.pad(raw.bias.astype(raw.r.dtype), (0, missing))}
