"""What Pallas kernels do of a distillation from a few ids of every token and one class for all others. Mirror of
torch_impl/distillation/fused_ids.py.

The kernels go over the others. XLA takes the ids' logits out of the rows, has −∞ in their places, and puts the ids'
gradients there: K numbers of a token. What is made of those is that of parts.py.
"""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
from jax import Array, lax

from logitless.jax_impl.chunk import capped, slope, temperature_column
from logitless.jax_impl.distillation.fused import (
    hard_temperature,
    held_gradient,
    row_of,
    student_arguments,
    student_head,
)
from logitless.jax_impl.distillation.parts import Kept, Losses, RestClass
from logitless.jax_impl.distillation.teachers import Raw, columns_of
from logitless.jax_impl.kernels.loops import one_by_one
from logitless.jax_impl.slices import Index, take

with contextlib.suppress(ImportError):  # without absl no call chooses the kernels
    from logitless.jax_impl.distillation import row_kernels
    from logitless.jax_impl.kernels.launch import reference, written

__all__ = ["held_gradient", "row_losses", "tile_gradient"]


def row_losses(
    of: Losses, first: Index, tokens: int, keep: bool, held: Array | None
) -> tuple[Array, list[Kept], Array | None]:
    """:meth:`RowFunctions.row_losses`."""
    vocab, inputs = of.inputs.weight.shape[0], of.inputs
    raw = student_head(of).raw(first, tokens, 0, vocab)
    columns = columns_of(_rest(of).ids, first, tokens, 0, vocab)
    z = jnp.where(columns < vocab, _logits(of, raw, columns, first), -jnp.inf)
    target = None if of.hard is None else take(of.hard.ids, first, tokens)
    target_logit = None if target is None else _logits(of, raw, target, first)
    r, z, target_logit = lax.optimization_barrier((raw.r, z, target_logit))  # read before they are marked, in place
    others, arguments = _marked(of, raw._replace(r=r), columns, first, 0)
    sums = one_by_one(lambda given: row_kernels.others_sums(others, given))(arguments)
    losses, (anchor, log_total, slopes) = _rest(of).of_classes(z, sums["anchor"], sums["log_total"], first)
    numbers, at_ids = {"anchor": anchor, "log_total": log_total, "slope": slopes[:, -1]}, slopes[:, :-1]
    if of.hard is not None:
        own = columns == target
        rest = jnp.where(own, -jnp.inf, of.hard.scaled(z, first))
        highest, log_sum = _joined(sums["others_anchor"], sums["others_log_total"], rest)
        more, kept = of.hard.of_classes(of.hard.scaled(target_logit, first), highest, log_sum, first)
        numbers |= {"others_anchor": kept[0], "others_log_total": kept[1], "gone": kept[2][:, 1]}
        q = jnp.exp((rest - kept[0][:, None]) - kept[1][:, None])
        losses, at_ids = losses + more, at_ids + jnp.where(own, kept[2][:, :1], q * kept[2][:, 1:])
    if of.options.softcap is not None:
        at_ids = at_ids * slope(z, of.options, temperature_column(inputs, first, tokens))
    valid = take(inputs.valid, first, tokens)
    at_ids = jnp.where((columns < vocab) & valid[:, None], at_ids, 0.0)
    if held is not None:
        held = _stored(others, arguments | numbers, held, first)
        held = _put(held, columns, at_ids, first)
    kept_numbers = tuple(numbers[name] for name in others.kept)
    return jnp.where(valid, losses, 0.0), [(*kept_numbers, at_ids)] if keep else [], held


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Array, x: Array, first: Index, start: Index, columns: int
) -> Array:
    """:meth:`RowFunctions.tile_gradient`."""
    (*numbers, at_ids), places = kept[0], columns_of(_rest(of).ids, first, x.shape[0], start, columns)
    others, arguments = _marked(of, student_head(of).raw_of(x, start, columns), places, first, start)
    arguments |= dict(zip(others.kept, numbers, strict=True)) | {"factor": factor}

    def launch(given: dict[str, Array]) -> Array:
        return row_kernels.others_gradient(others, given, x.dtype)["gradient"]

    gradient = one_by_one(launch)(arguments)[:, :columns]
    return _put(gradient, places, at_ids * factor[:, None], 0)


def _rest(of: Losses) -> RestClass:
    rest = of.parts[-1]
    assert isinstance(rest, RestClass)
    return rest


def _logits(of: Losses, raw: Raw, columns: Array, first: Index) -> Array:
    """The student's z in these columns, [C, K]; past the last one anything."""
    columns = jnp.minimum(columns, raw.r.shape[1] - 1)
    z = jnp.take_along_axis(raw.r, columns, axis=1)
    if raw.bias is not None:
        z = z + raw.bias[columns].astype(z.dtype)
    return capped(z, of.options, temperature_column(of.inputs, first, columns.shape[0]))


def _marked(
    of: Losses, raw: Raw, columns: Array, first: Index, start: Index
) -> tuple[row_kernels.Others, dict[str, Array]]:
    """What the kernels read of the student's columns from ``start``, with −∞ in the ids'."""
    marked = raw._replace(r=_put(raw.r, columns, jnp.full(columns.shape, -jnp.inf, raw.r.dtype), 0))
    others = row_kernels.Others(student=row_of(marked), hard=of.hard is not None, temperature=hard_temperature(of))
    return others, student_arguments(of, marked, first, start)


def _put(matrix: Array, columns: Array, values: Array, first: Index) -> Array:
    """The matrix with ``values`` in these columns of the rows from ``first``; what lies behind the last is dropped."""
    rows = first + jnp.arange(columns.shape[0], dtype=columns.dtype)[:, None]
    return matrix.at[rows, columns].set(values.astype(matrix.dtype), mode="drop")


def _stored(others: row_kernels.Others, arguments: dict[str, Array], held: Array, first: Index) -> Array:
    """The held gradient with that of the others of the tokens from ``first``."""

    def launch(given: dict[str, Array]) -> Array:
        gradient = reference(given["gradient"])
        row_kernels.others_gradient(others, {**given, "gradient": gradient}, None)
        return written(gradient)

    arguments |= {"first": jnp.asarray(first, jnp.int32).reshape(1), "gradient": held}
    stored: Array = one_by_one(launch)(arguments)
    return stored


def _joined(anchor: Array, log_total: Array, z: Array) -> tuple[Array, Array]:
    """The logsumexp of what has this one, and of z [C, K], in two parts, [C] each."""
    top = jnp.maximum(anchor, z.max(axis=1))
    return top, jnp.log(jnp.exp((anchor - top) + log_total) + jnp.exp(z - top[:, None]).sum(axis=1))
