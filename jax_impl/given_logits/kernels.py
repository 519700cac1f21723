"""The Pallas Mosaic GPU kernels of the loss on given logits; jax_impl/given_logits/fused.py calls them. Mirror of
torch_impl/given_logits/kernels.py.

One program, a warpgroup of 128 threads, owns one row of V logits and goes over it piece by piece (pieces.py), in
float32. The sums are anchored at the target's logit, which is known before the row is read: one read, with no maximum
in the way and one exponential an element. Every thread keeps sums of its own and they are added at the end of the row,
in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from logitless import spec
from logitless.jax_impl.kernels.arithmetic import LOG2E, capped, sloped
from logitless.jax_impl.kernels.launch import Arguments, References, launch, written
from logitless.jax_impl.kernels.pieces import PIECES, Piece, Row, over

# Of an argmax: behind every column.
NO_COLUMN = 2**31 - 1


def _logits(r: References, number: Array, pieces: Sequence[Piece], row: Row) -> list[Array]:
    """The pieces of row ``number``, all asked for before the first is used."""
    return [piece.of(r["logits"].at[number], row) for piece in pieces]


# ---------------------------------------------------------------------------------------------------------------------
# Sums

# What a lane holds before its first logit.
BEGIN: dict[str, float] = {
    "sum": 0.0, "gap": 0.0, "squares": 0.0, "highest": -math.inf, "argmax": 0, "lowest": math.inf, "weighted": 0.0,
}  # fmt: skip
STATISTICS = ("gap", "squares", "argmax", "lowest")
# What depends on the anchor; all but the first are statistics.
RESCUED = ("sum", "gap", "squares")


def _row_sums(
    row: Row, r: References, number: Array, target: Array, anchor: Array, names: Sequence[str], at_once: int
) -> dict[str, Array]:
    """One read of a row, for ``names``: sum Σ e, gap Σ e · gap and squares Σ (SQUARED_SCALE e)² without the target, for
    gap = z − anchor and e = exp(gap); highest, argmax (the first column that holds it) and lowest; weighted Σ k z."""
    columns = row.columns()

    def add(pieces: Sequence[Piece], sums: dict[str, Array]) -> dict[str, Array]:
        for piece, values in zip(pieces, _logits(r, number, pieces, row), strict=True):
            z = capped(values.astype(jnp.float32), row.scale, row.cap)
            gap = z - anchor
            e = jnp.where(columns == target - piece.start, 0.0, jnp.exp2(gap * LOG2E))
            e = piece.counted(columns, row, e)
            more = {"sum": sums["sum"] + e}
            if "gap" in names:
                more["gap"] = sums["gap"] + e * jnp.maximum(gap, spec.LOWEST_GAP)
            if "squares" in names:
                scaled = spec.SQUARED_SCALE * e
                more["squares"] = sums["squares"] + scaled * scaled
            # What is the largest does not change when it is seen twice.
            if "highest" in names:
                above = row.inside(columns, z, -math.inf)
                if "argmax" in names:
                    more["argmax"] = jnp.where(above > sums["highest"], columns + piece.start, sums["argmax"])
                more["highest"] = jnp.maximum(sums["highest"], above)
            if "lowest" in names:
                more["lowest"] = jnp.minimum(sums["lowest"], row.inside(columns, z, math.inf))
            if "weighted" in names:
                k = piece.of(r["class_weight"], row) if "class_weight" in r else None
                # A class of weight 0 may have a logit of −inf.
                weighted = z if k is None else jnp.where(k == 0.0, 0.0, k * z)
                more["weighted"] = sums["weighted"] + piece.counted(columns, row, weighted)
            sums = more
        return sums

    return _added(over(row, add, {name: row.filled(BEGIN[name]) for name in names}, at_once))


def _added(lanes: dict[str, Array]) -> dict[str, Array]:
    """The sums of a row from those of its lanes."""
    added = ("sum", "gap", "squares", "weighted")
    row_sums: dict[str, Array] = {name: jnp.sum(lanes[name]) for name in added if name in lanes}
    if "highest" in lanes:
        row_sums["highest"] = jnp.max(lanes["highest"])
    if "lowest" in lanes:
        row_sums["lowest"] = -jnp.max(-lanes["lowest"])
    if "argmax" in lanes:
        first = jnp.where(lanes["highest"] == row_sums["highest"], -lanes["argmax"], -NO_COLUMN)
        row_sums["argmax"] = -jnp.max(first)
    return row_sums


def sums(row: Row, arguments: Arguments, *, statistics: bool, weighted: bool) -> dict[str, Array]:
    """A row's target_logit, its anchor, and :func:`_row_sums` relative to it: [N] each. What stands where a token is
    ignored means nothing; nothing of its row is read.

    Arguments: logits [N, width]; target [N] int32, −1 for an ignored token; class_weight [width] float32, or none.
    A row that has a logit more than RESCUE_NATS above the target's is read again, anchored at its maximum.
    """
    names = ("sum", "highest", *(STATISTICS if statistics else ()), *(("weighted",) if weighted else ()))

    def body(r: References) -> None:
        number = lax.axis_index("program")
        target = r["target"][number]

        @pl.when(target >= 0)
        def _() -> None:
            target_logit = capped(r["logits"][number, target].astype(jnp.float32), row.scale, row.cap)
            anchor = jnp.maximum(target_logit, spec.LOWEST_ANCHOR)
            row_sums = _row_sums(row, r, number, target, anchor, names, PIECES)
            for name, value in {**row_sums, "target_logit": target_logit, "anchor": anchor}.items():
                r[name][number] = value

            @pl.when(row_sums["highest"] - anchor > spec.RESCUE_NATS)
            def _() -> None:
                moved, dependent = row_sums["highest"], RESCUED if statistics else RESCUED[:1]
                # Piece by piece: seldom, and a program half as long. Between its writes and those above, which several
                # threads do, stand the barriers of its sums.
                again = _row_sums(row, r, number, target, moved, dependent, 1)
                for name, value in {**again, "anchor": moved}.items():
                    r[name][number] = value

    tokens = arguments["logits"].shape[0]
    outputs = {
        name: jax.ShapeDtypeStruct((tokens,), jnp.int32 if name == "argmax" else jnp.float32)
        for name in ("target_logit", "anchor", *names)
    }
    return launch(body, arguments, outputs, name="logit_sums", options=(row, statistics, weighted), grid=tokens)


# ---------------------------------------------------------------------------------------------------------------------
# The gradient

# What is known of a row.
KNOWN = ("anchor", "log_total", "factor", "value")


def gradient(row: Row, arguments: Arguments) -> Array:
    """A row of the gradient, [N, width] in the logits' dtype; exactly 0 for an ignored token, of which nothing is read.

        (1 − (z / cap)²) (factor exp(z − anchor − log_total) − smooth k), and ``value`` at the target

    Arguments: logits [N, width], where they are a reference the gradient is written over them; target, class_weight as
    for :func:`sums`; anchor, log_total, factor, value and, with label smoothing, smooth [N] float32.
    """
    logits = arguments["logits"]
    outputs = {} if isinstance(logits, jax.Ref) else {"out": jax.ShapeDtypeStruct(logits.shape, logits.dtype)}

    def body(r: References) -> None:
        number, out = lax.axis_index("program"), r["out" if "out" in r else "logits"]
        target = r["target"][number]

        def put(piece: Piece, value: Array) -> None:
            out[number, pl.ds(piece.start, row.lanes)] = value.astype(out.dtype)

        def zeros(pieces: Sequence[Piece], _: None) -> None:
            for piece in pieces:
                put(piece, row.filled(0.0))

        @pl.when(target >= 0)
        def _() -> None:
            known = {name: r[name][number] for name in (*KNOWN, "smooth") if name in r}

            def write(pieces: Sequence[Piece], _: None) -> None:
                read = _logits(r, number, pieces, row)
                if any(piece.shared for piece in pieces):
                    plgpu.commit_smem()  # no thread writes over what two pieces share before all have read it
                for piece, values in zip(pieces, read, strict=True):
                    k = piece.of(r["class_weight"], row) if "class_weight" in r else 1.0
                    put(piece, _piece_gradient(row, known, target - piece.start, values, k))

            over(row, write, None)

        pl.when(target < 0)(lambda: over(row, zeros, None))

    results = launch(body, arguments, outputs, name="logit_gradient", options=row, grid=logits.shape[0])
    return written(logits) if isinstance(logits, jax.Ref) else results["out"]


def _piece_gradient(row: Row, known: dict[str, Array], target: Array, values: Array, k: Array | float) -> Array:
    """A piece of the gradient from its logits; ``target`` counts from its first column."""
    z = capped(values.astype(jnp.float32), row.scale, row.cap)
    dz = known["factor"] * jnp.exp2(((z - known["anchor"]) - known["log_total"]) * LOG2E)
    if "smooth" in known:
        dz = dz - known["smooth"] * k
    return jnp.where(row.columns() == target, known["value"], sloped(dz, z, row.cap))
