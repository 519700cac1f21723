"""The forward's sums per token, and the first product that they are made from."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from logitless import numerics
from logitless.jax_impl.call import XP, KnownRows, TokenSums
from logitless.jax_impl.chunk import RunningSums, Smoothing
from logitless.jax_impl.kernels.architecture import HOPPER
from logitless.jax_impl.kernels.arithmetic import LINES
from logitless.jax_impl.kernels.kernel_call import KernelCall
from logitless.jax_impl.kernels.rows import Rows, dots, row_logits
from logitless.jax_impl.slices import Index
from logitless.scratch import round_up
from logitless.spec import CLASS_SUMS, HELD_RESCUE_SUM, LOWEST_ANCHOR, NO_ROW, RESCUE_NATS, Statistics

with contextlib.suppress(ImportError):  # without absl, fused.unavailable() says so before a kernel is launched
    from logitless.jax_impl.kernels import hopper, launch, row_kernels
    from logitless.jax_impl.kernels.pieces import Row

# A row is done again when its sum says that one of its exponents may have passed the threshold.
RESCUE_SUM = math.exp(RESCUE_NATS)
# The largest target's value that is stored in e: no product of it overflows.
LARGEST_STORED = 2.0**60


class Factors(NamedTuple):
    """A chunk's row factors, or all tokens', relative to the unit: dz = factor · e, and ``value`` at the target."""

    factor: Array  # u
    value: Array  # u T
    stored: Array  # T as e has it

    @property
    def rest(self) -> Array:
        """What e's rounding left out of the target's element."""
        return self.value - self.factor * self.stored

    def times(self, upstream: Array) -> Factors:
        """For upstream gradients that many times as large."""
        return self._replace(factor=self.factor * upstream, value=self.value * upstream)

    def operand(self, rows: Rows, dtype: jnp.dtype) -> Array:
        """u ⊙ x, for dW."""
        return (rows.x.astype(jnp.float32) * self.factor[: rows.x.shape[0], None]).astype(dtype)


class Forwarded(NamedTuple):
    """What the forward of one chunk gives."""

    rows: Rows
    sums: TokenSums
    factors: Factors
    e: Array


def forward(c: KernelCall, first: Index, g: Array, statistics: bool) -> Forwarded:
    """A chunk's exponentials, with the target's value in place of its own, and what follows from their sums.

    ``g`` [N] by token, relative to the unit.
    """
    rows = c.rows_at(first)
    running, weighted, e = chunk_sums(c, rows, statistics, hopper.ANCHORED)
    assert e is not None
    sums = running.finish(weighted)
    factors = _factors(c, rows, running, sums, g)
    number = min(c.rows, round_up(c.chunk, HOPPER.tiling))
    row, behind = jnp.arange(number), e.shape[0 if c.across else 1]
    column = jnp.where(rows.target >= 0, rows.target, behind)[:number]
    place = (column, row) if c.across else (row, column)
    e = e.at[place].set(factors.stored[:number].astype(e.dtype), mode="drop", unique_indices=True)
    return Forwarded(rows, sums, factors, e)


def chunk_sums(
    c: KernelCall, rows: Rows, statistics: Statistics, mode: str
) -> tuple[RunningSums, Array | None, Array | None]:
    """The first product of a chunk: its sums, Σ k z where label smoothing asks for it, and what ``mode`` stores. Of a
    sharded vocabulary the sums are those of all devices."""
    extremes = statistics is True
    config = c.config(mode, entropy=bool(statistics), extremes=extremes, sum_logits=c.sums_logits)
    target_logit = _target_logits(c, rows)
    anchor = jnp.maximum(target_logit, LOWEST_ANCHOR)
    arguments = c.first_product(config, rows)
    if c.sums_logits and c.class_weight is not None:
        arguments["class_weight"] = c.class_weight
    outputs = dict.fromkeys(config.lines, c.line(config))
    if mode != hopper.SUMS:
        outputs["e"] = c.held if mode == hopper.HELD else c.matrix

    def exponentiate(made: dict[str, Array], tiles: Array, anchor: Array) -> tuple[dict[str, Array], RunningSums]:
        """``made`` with the exponentials and lines of these tiles in place, and the sums of all."""
        references = {name: launch.reference(value) for name, value in made.items()}
        at = jnp.where(rows.exists, anchor, NO_ROW)
        hopper.logits(config, {**arguments, "anchor": at, "tiles": tiles, **references}, {})
        made = {name: launch.written(reference) for name, reference in references.items()}
        return made, _line_sums(rows, {name: made[name] for name in config.lines}, anchor, target_logit)

    # The first time it is in place, too: one kernel for both.
    made = {name: c.empty(shape.shape, shape.dtype, rows) for name, shape in outputs.items()}
    made, sums = exponentiate(made, rows.tiles, anchor)
    limit = HELD_RESCUE_SUM if mode == hopper.HELD else RESCUE_SUM
    made, sums = exponentiate(made, *_rescued(c, rows, sums, extremes, limit))
    weighted = sums.sums.pop("logit_sum", None)
    if extremes:
        sums = sums.extremes(c.inputs.shard)
    sums, weighted = sums.total(c.inputs.shard, weighted)
    return sums, weighted, made.get("e")


def _target_logits(c: KernelCall, rows: Rows) -> Array:
    """The anchors a = z_y: NaN for an id outside the vocabulary, 0 where there is no row."""
    if c.inputs.shared is not None:
        return rows.pick(c.inputs.shared.target_logit)
    wanted = jnp.maximum(rows.target, 0)
    x, weight = c.hidden[rows.token], c.weight_rows(rows)
    z = row_logits(x, weight, c.inputs.bias, wanted, c.options, c.temperatures(rows))
    return jnp.where(rows.exists, jnp.where(rows.target < 0, jnp.nan, z), 0.0)


def _line_sums(rows: Rows, lines: dict[str, Array], anchor: Array, target_logit: Array) -> RunningSums:
    """The column tiles' lines together, in a fixed order; zeros where there is no row."""
    sums = {"highest": jnp.zeros_like(anchor)}
    for line, values in lines.items():
        name = LINES.get(line, line)
        how = CLASS_SUMS[name].merge if name in CLASS_SUMS else None
        if how == "sum":
            sums[name] = jnp.where(rows.exists, values.sum(axis=0), 0.0)
        elif how == "first":
            tile = lines["highest"].argmax(axis=0).astype(jnp.int32)
            place = jnp.take_along_axis(values, tile[None], axis=0)[0]
            sums[name] = tile * HOPPER.logits.columns + place.astype(jnp.int32)
        elif how:
            sums[name] = values.max(axis=0) if how == "max" else values.min(axis=0)
    return RunningSums(target_logit, rows.target, anchor, sums)


def _rescued(c: KernelCall, rows: Rows, sums: RunningSums, extremes: bool, limit: float) -> tuple[Array, Array]:
    """Row tiles to be done again, and every row's anchor: its maximum where its exponents grew too large.

    ``extremes``: whether the sums have the maximum. ``limit``: the largest sum that stays.
    """
    flagged = rows.exists & (sums.s > limit)
    again = _tiles_of(flagged)
    highest = sums.highest
    if not extremes:
        config = c.config(hopper.HIGHEST)
        lines = hopper.logits(config, c.first_product(config, rows) | {"tiles": again}, {"highest": c.line(config)})
        highest = lines["highest"].max(axis=0)
    moved = jnp.where(flagged, highest, sums.anchor)
    if c.inputs.shard.active:  # a row that one device flags moves on all of them
        moved = c.inputs.shard.largest(moved)
        again = _tiles_of(rows.exists & (moved > sums.anchor))
    return again, moved


def _tiles_of(flagged: Array) -> Array:
    """[1 + tiles]: how many row tiles hold a flagged row, then which.

    The k-th of the list, from 0, is how many tiles have at most k flagged ones up to and with themselves: the next one
    is flagged. There are few tiles, and XLA takes four times as long to compile a sort as such sums.
    """
    tiles = flagged.reshape(-1, HOPPER.tile_rows).any(axis=1)
    number = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    so_far = (tiles[None, :] & (number[None, :] <= number[:, None])).sum(axis=1, dtype=jnp.int32)
    which = (so_far[:, None] <= number[None, :]).sum(axis=0, dtype=jnp.int32)
    return jnp.concatenate([so_far[-1:], which])


def _factors(c: KernelCall, rows: Rows, running: RunningSums, sums: TokenSums, g: Array) -> Factors:
    """u = g α / (e_y + s), and u T with T = ((α − β) e_y − β s) / α; 0 where there is no row.

    T rounded is what e is to have at the target: where gradients cancel, dW must hold the targets before it is rounded.
    """
    alpha, beta = numerics.alpha_beta(XP, c.inputs, c.options, sums.lse, _class_weights(c, rows))
    share = numerics.target_over_alpha(XP, alpha, beta, running.e_target(), running.s)
    share = numerics.sloped(XP, share, sums.target_logit, c.options, c.temperatures(rows))
    factor = g[rows.token] * alpha / (running.s + running.e_target())
    factor = jnp.where(rows.exists, factor, 0.0)
    here = rows.exists & (rows.target >= 0) if c.inputs.shard.active else rows.exists
    fits = rows.exists & (rows.target >= 0) & (jnp.abs(share) < LARGEST_STORED)
    info = jnp.finfo(c.dtype)  # type: ignore[no-untyped-call]
    # Not a cast and back: XLA may leave such a pair out.
    stored = lax.reduce_precision(jnp.where(fits, share, 0.0), info.nexp, info.nmant)
    return Factors(factor, jnp.where(here, factor * share, 0.0), stored)


def _class_weights(c: KernelCall, rows: Rows) -> Array | float:
    """The class weights of the rows' targets."""
    if c.inputs.class_weight is None:
        return 1.0
    if c.inputs.shared is not None and c.inputs.shared.class_weight is not None:
        return c.inputs.shared.class_weight[rows.token]
    return c.inputs.class_weight[jnp.maximum(rows.target, 0)]


def known_matrix(c: KernelCall, unit: Array, known: KnownRows, rows: Rows, start: Index) -> Array:
    """The gradient's matrix of a block, relative to the unit."""
    vectors = _known_vectors(c, unit, known, rows)
    config = c.config(hopper.KNOWN, c.columns)
    arguments = c.first_product(config, rows, start) | c.slice_at(start) | vectors
    return hopper.logits(config, arguments, {"e": c.matrix})["e"]


def held_matrix(c: KernelCall, unit: Array, known: KnownRows, rows: Rows, logits: Array) -> Array:
    """:func:`known_matrix` of the whole vocabulary, from logits that waited (arithmetic.held_of), in their place."""
    assert known.sigma is None  # label smoothing's, which log-probabilities have not
    temperatures = c.temperatures(rows)
    vectors = _known_vectors(c, unit, known, rows) | {"rows": rows.number, "target": rows.target}
    if temperatures is not None:
        vectors["temperature"] = temperatures
    e = launch.reference(logits)
    row = Row(logits.shape[1], logits.dtype, cap=c.options.softcap)
    row_kernels.held_gradient(row, c.vocab, vectors | {"e": e})
    return launch.written(e)


def _known_vectors(c: KernelCall, unit: Array, known: KnownRows, rows: Rows) -> dict[str, Array]:
    """What the rows of the gradient's matrix are made of, by the kernels' names."""
    factor = rows.pick(known.factor / unit)
    vectors = {
        "anchor": rows.pick(known.anchor, NO_ROW),
        "log_total": rows.pick(known.log_total),
        "factor": factor,
        "element": factor * rows.pick(known.target),
    }
    for name in ("alpha", "gamma", "delta", "sigma"):
        values = getattr(known, name)
        if values is not None:
            vectors[name] = rows.pick(values)
    if known.sigma is not None and c.class_weight is not None:
        vectors["class_weight"] = c.class_weight
    return vectors


def smoothing_of(c: KernelCall) -> Smoothing | None:
    """Label smoothing's sums over the vocabulary, each by one operation of XLA, in float32."""
    i, k = c.inputs, c.inputs.class_weight

    def sums() -> tuple[Array, Array]:
        w = i.weight.astype(jnp.float32)
        bias = jnp.zeros((), jnp.float32)
        if i.bias is not None:
            b = i.bias.astype(jnp.float32)
            bias = (b if k is None else b * k).sum()
        return (w if k is None else w * k[:, None]).sum(axis=0), bias

    return Smoothing.prepare(i, c.options, sums)


def with_weighted(c: KernelCall, sums: TokenSums, smoothing: Smoothing | None) -> TokenSums:
    """The sums with Σ_j k_j z_ij, where label smoothing is no part of the matrix."""
    if smoothing is None:
        return sums
    weighted = dots(c.inputs.hidden, smoothing.weighted_rows[None, :]) + smoothing.weighted_bias
    weighted = weighted * c.options.logit_scale
    if c.inputs.temperature is not None:
        weighted = weighted / c.inputs.temperature
    return sums._replace(weighted_logits=c.inputs.shard.total(weighted))
