"""Rows of logits that a kernel goes over piece by piece: a warpgroup of 128 threads has one row to itself.

What V costs. A thread loads 8 bytes at once where every row begins at a multiple of 8 bytes: V % 4 == 0 in 16 bits,
V % 2 == 0 in float32. Else it loads what V allows, down to one logit: as many bytes, in up to four times as many
instructions. Nothing goes by TMA, whose rows all begin at multiples of 16 bytes. A row's last piece ends with the row
and may share columns with the piece before: up to 1 KiB of a row is read twice, and nothing is added twice.

No mirror: Triton masks what lies behind a row's end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from logitless.jax_impl.kernels.launch import Ref, load
from logitless.jax_impl.slices import Carry, Index

THREADS = 128
# Bytes that a thread moves at once, at most: every lane's sums take registers, and those take programs' places.
MOVED = 8
# Pieces of a row that are asked for before the first one is worked on: 64 bytes a thread are on their way.
PIECES = 8


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

    def rest(self, pieces: int) -> list[Piece]:
        """The pieces behind the blocks; the last one ends with the row."""
        last = self.width - self.lanes
        starts = range(self.blocks(pieces) * pieces * self.lanes, self.width, self.lanes)
        return [Piece(min(start, last), max(0, start - last)) for start in starts]

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
class Piece:
    """Columns of a row from ``start``; the first ``shared`` were counted with the piece before."""

    start: Index
    shared: int = 0

    def of(self, vector: Ref, row: Row) -> Array:
        return load(vector, self.start, row.lanes, row.layout)

    def counted(self, columns: Array, row: Row, value: Array, otherwise: float = 0.0) -> Array:
        """``value`` at the columns that count here, and ``otherwise`` elsewhere."""
        value = jnp.where(columns >= self.shared, value, otherwise) if self.shared else value
        return row.inside(columns, value, otherwise)


def over(row: Row, work: Callable[[Sequence[Piece], Carry], Carry], carry: Carry, pieces: int = PIECES) -> Carry:
    """carry = work(some pieces, carry) over a row, block by block."""
    starts = range(0, pieces * row.lanes, row.lanes)

    def block(number: Array, carry: Carry) -> Carry:
        return work([Piece(number * pieces * row.lanes + start) for start in starts], carry)

    blocks, rest = row.blocks(pieces), row.rest(pieces)
    carry = lax.fori_loop(0, blocks, block, carry) if blocks else carry
    return work(rest, carry) if rest else carry
