"""The Pallas Mosaic GPU kernels of the loss on given logits; jax_impl/given_logits/fused.py calls them. Mirror of
torch_impl/given_logits/kernels.py.

One program, a warpgroup of 128 threads, owns one row of V logits and goes over it piece by piece, in float32. The sums
are anchored at the target's logit, which is known before the row is read: one read, with no maximum in the way and one
exponential an element. Every thread keeps sums of its own and they are added at the end of the row, in a fixed order.

What V costs. A thread loads 8 bytes at once where every row begins at a multiple of 8 bytes: V % 4 == 0 in 16 bits,
V % 2 == 0 in float32. Else it loads what V allows, down to one logit: as many bytes, in up to four times as many
instructions. Nothing goes by TMA, whose rows all begin at multiples of 16 bytes. A row's last piece ends with the row
and may share columns with the piece before: up to 1 KiB of a row is read twice, and nothing is added twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from logitless import spec
from logitless.jax_impl.kernels.arithmetic import LOG2E, capped, sloped
from logitless.jax_impl.kernels.launch import Arguments, Ref, References, launch, load, written
from logitless.jax_impl.slices import Carry, Index

THREADS = 128
# Bytes that a thread moves at once, at most: every lane's sums take registers, and those take programs' places.
MOVED = 8
# Pieces of a row that are asked for before the first one is worked on: 64 bytes a thread are on their way.
PIECES = 8
# Of an argmax: behind every column.
NO_COLUMN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Row:
    """What is the same for every row."""

    vocab: int
    dtype: jnp.dtype
    scale: float = 1.0
    cap: float | None = None

    @property
    def width(self) -> int:
        """Logits that are stored of a row: a warpgroup loads no fewer than one a thread."""
        return max(self.vocab, THREADS)

    @property
    def vector(self) -> int:
        """Logits that a thread loads at once."""
        a_thread = self.width // THREADS
        return min(math.gcd(self.width, MOVED // int(self.dtype.itemsize)), 1 << (a_thread.bit_length() - 1))

    @property
    def lanes(self) -> int:
        """Logits of a piece."""
        least = THREADS * self.vector
        return min(THREADS * MOVED // int(self.dtype.itemsize), self.width // least * least)

    @property
    def layout(self) -> Any:  # plgpu has no public name for the type
        """How a piece lies in the threads' registers."""
        return plgpu.Layout.WG_STRIDED((self.lanes,), self.vector)

    def blocks(self, pieces: int) -> int:
        """How many blocks of so many pieces a row begins with. A last piece that shares columns has the one before
        beside it in the rest."""
        blocks, rest = divmod(self.width, pieces * self.lanes)
        return blocks - 1 if blocks and 0 < rest < self.lanes else blocks

    def rest(self, pieces: int) -> list[_Piece]:
        """The pieces behind the blocks; the last one ends with the row."""
        last = self.width - self.lanes
        starts = range(self.blocks(pieces) * pieces * self.lanes, self.width, self.lanes)
        return [_Piece(min(start, last), max(0, start - last)) for start in starts]

    def columns(self) -> Array:
        """[lanes]: a piece's columns, from its first."""
        return plgpu.broadcasted_iota(jnp.int32, (self.lanes,), 0, layout=self.layout)

    def filled(self, value: float) -> Array:
        """[lanes] of ``value``, an int32 or a float32."""
        dtype = jnp.int32 if isinstance(value, int) else jnp.float32
        filled: Array = plgpu.layout_cast(jnp.full(self.lanes, value, dtype), self.layout)
        return filled

    def inside(self, columns: Array, value: Array, otherwise: float) -> Array:
        """``value``, and ``otherwise`` past the vocabulary, where rows are padded: then they are one piece."""
        return jnp.where(columns < self.vocab, value, otherwise) if self.width > self.vocab else value


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Columns of a row from ``start``; the first ``shared`` were counted with the piece before."""

    start: Index
    shared: int = 0

    def of(self, vector: Ref, row: Row) -> Array:
        return load(vector, self.start, row.lanes, row.layout)

    def counted(self, columns: Array, row: Row, value: Array) -> Array:
        """``value`` at the columns that count here, 0 elsewhere."""
        return row.inside(columns, jnp.where(columns >= self.shared, value, 0.0) if self.shared else value, 0.0)


def _over(row: Row, work: Callable[[Sequence[_Piece], Carry], Carry], carry: Carry, pieces: int = PIECES) -> Carry:
    """carry = work(some pieces, carry) over a row, block by block."""
    starts = range(0, pieces * row.lanes, row.lanes)

    def block(number: Array, carry: Carry) -> Carry:
        return work([_Piece(number * pieces * row.lanes + start) for start in starts], carry)

    blocks, rest = row.blocks(pieces), row.rest(pieces)
    carry = lax.fori_loop(0, blocks, block, carry) if blocks else carry
    return work(rest, carry) if rest else carry


def _logits(r: References, number: Array, pieces: Sequence[_Piece], row: Row) -> list[Array]:
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

    def add(pieces: Sequence[_Piece], sums: dict[str, Array]) -> dict[str, Array]:
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

    return _added(_over(row, add, {name: row.filled(BEGIN[name]) for name in names}, at_once))


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

        def put(piece: _Piece, value: Array) -> None:
            out[number, pl.ds(piece.start, row.lanes)] = value.astype(out.dtype)

        def zeros(pieces: Sequence[_Piece], _: None) -> None:
            for piece in pieces:
                put(piece, row.filled(0.0))

        @pl.when(target >= 0)
        def _() -> None:
            known = {name: r[name][number] for name in (*KNOWN, "smooth") if name in r}

            def write(pieces: Sequence[_Piece], _: None) -> None:
                read = _logits(r, number, pieces, row)
                if any(piece.shared for piece in pieces):
                    plgpu.commit_smem()  # no thread writes over what two pieces share before all have read it
                for piece, values in zip(pieces, read, strict=True):
                    k = piece.of(r["class_weight"], row) if "class_weight" in r else 1.0
                    put(piece, _piece_gradient(row, known, target - piece.start, values, k))

            _over(row, write, None)

        pl.when(target < 0)(lambda: _over(row, zeros, None))

    results = launch(body, arguments, outputs, name="logit_gradient", options=row, grid=logits.shape[0])
    return written(logits) if isinstance(logits, jax.Ref) else results["out"]


def _piece_gradient(row: Row, known: dict[str, Array], target: Array, values: Array, k: Array | float) -> Array:
    """A piece of the gradient from its logits; ``target`` counts from its first column."""
    z = capped(values.astype(jnp.float32), row.scale, row.cap)
    dz = known["factor"] * jnp.exp2(((z - known["anchor"]) - known["log_total"]) * LOG2E)
    if "smooth" in known:
        dz = dz - known["smooth"] * k
    return jnp.where(row.columns() == target, known["value"], sloped(dz, z, row.cap))
