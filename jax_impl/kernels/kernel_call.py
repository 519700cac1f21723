"""What the launches of one call share: its rows, its matrices, its constants."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.jax_impl.call import Inputs, ValidFirst
from logitless.jax_impl.kernels.architecture import HOPPER
from logitless.jax_impl.kernels.rows import Rows
from logitless.jax_impl.slices import Carry, Index
from logitless.planning import ChunkPlan
from logitless.scratch import PADDED_HIDDEN, PADDED_VOCAB, round_up
from logitless.spec import LossOptions

with contextlib.suppress(ImportError):  # without absl, fused.unavailable() says so before a kernel is launched
    from logitless.jax_impl.kernels import hopper, launch
    from logitless.jax_impl.kernels.pieces import THREADS

# Row tiles that walk the vocabulary together share the first product's weight tiles; their hidden states stay in L2.
GROUP_BYTES = 8 * 2**20


class KernelCall:
    """Everything that the launches of one call share: its rows, its matrices, its constants."""

    def __init__(self, inputs: Inputs, options: LossOptions, plan: ChunkPlan) -> None:
        self.inputs, self.options, self.plan = inputs, options, plan
        self.dtype = inputs.hidden.dtype
        # Devices' shares of dX are rounded after they are summed.
        self.hidden_dtype = jnp.float32 if inputs.shard.active else self.dtype
        self.tokens, (self.vocab, self.size) = inputs.hidden.shape[0], inputs.weight.shape
        self.padded_size = round_up(self.size, PADDED_HIDDEN)
        self.turned = inputs.turned
        self.padded_vocab = round_up(self.vocab, PADDED_HIDDEN if self.turned else PADDED_VOCAB)
        more = self.padded_size - self.size
        self.hidden = jnp.pad(inputs.hidden, ((0, 0), (0, more)))
        paddings = (0, self.padded_vocab - self.vocab), (0, more)
        # As it lies: [V, D], or [D, V] if it is turned.
        lying = inputs.weight if inputs.turned_weight is None else inputs.turned_weight
        self.weight = jnp.pad(lying, paddings[::-1] if self.turned else paddings)
        self.bias = self._along_vocab(inputs.bias)
        self.class_weight = self._along_vocab(inputs.class_weight)
        limit = inputs.shard.limit()
        self.limit = None if limit is None else limit.reshape(1)
        self.chunk = _rounded_down(plan.token_chunk, self.tokens)
        self.columns = _rounded_down(plan.fused_columns, self.vocab, HOPPER.step if self.turned else HOPPER.tiling)
        self.rows = round_up(self.chunk, HOPPER.tile_rows)
        self.chunks = -(-self.tokens // self.chunk)
        self.group = min(64, max(8, GROUP_BYTES // (HOPPER.tile_rows * self.padded_size * 2)))
        self._compact()
        if self.turned:
            self._sort_by_column()

    @property
    def sums_logits(self) -> bool:
        """Whether a chunk's forward also sums k z: label smoothing that is part of the matrix."""
        return self.options.label_smoothing > 0 and not self.options.separable

    def _along_vocab(self, values: Array | None) -> Array | None:
        """A vector along the vocabulary in whole tiles, wherever a slice begins, in float32."""
        if values is None:
            return None
        return jnp.pad(values.astype(jnp.float32), (0, round_up(self.vocab, 256) + 256 - self.vocab))

    def weight_rows(self, rows: Rows) -> Array:
        """The weight's rows of a chunk's targets, [tiles of C, D]; any row where there is no target."""
        entries = jnp.maximum(rows.target, 0)
        if not self.turned:
            return self.weight[entries]
        chunk = rows.first[0] // self.chunk
        gathered = self.weight.T.at[entries[self.nearby[chunk]]].get(mode="promise_in_bounds")
        by_row: Array = lax.optimization_barrier(gathered).at[self.place[chunk]].get(mode="promise_in_bounds")
        return by_row

    def along_size(self, values: Array) -> Array:
        """A vector along D in whole tiles, however wide they are."""
        length = max(round_up(self.size, width) for width in HOPPER.gradient_columns)
        return jnp.pad(values, (0, length - self.size))

    def _compact(self) -> None:
        """order: the tokens, the valid ones first, in whole chunks; position: its inverse; count: the valid ones."""
        order = ValidFirst.of(self.inputs.valid)
        self.position, self.count = order.position, order.number
        self.order = jnp.pad(order.token, (0, (self.chunks + 1) * self.chunk + self.rows - self.tokens))

    def _sort_by_column(self) -> None:
        """nearby [chunks, tiles of C]: each chunk's rows in the order of their targets; place: its inverse.

        An element of a column costs a read of 32 bytes of which it is two. Neighbours in this order share such reads.
        """
        number = jnp.arange(self.chunks * self.rows, dtype=jnp.int32)
        chunk, row = number // self.rows, number % self.rows
        target = self.inputs.shard.place(self.inputs.target)[self.order[chunk * self.chunk + row]]
        # One sort for all chunks. Its key is an int32: of very many chunks, a few neighbours count as one.
        together = 1 + self.chunks * self.vocab // 2**30
        column = jnp.clip(target, 0, self.vocab - 1) // together
        _, number_at = lax.sort((chunk * -(-self.vocab // together) + column, number), num_keys=1)
        place = jnp.zeros_like(row).at[number_at].set(row, unique_indices=True)
        self.nearby, self.place = (v.reshape(self.chunks, self.rows) for v in (number_at % self.rows, place))

    def rows_at(self, first: Index) -> Rows:
        """The rows of the chunk from position ``first``."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        number = jnp.clip(self.count - first, 0, self.chunk).astype(jnp.int32)
        exists = row < number
        token = jnp.where(exists, lax.dynamic_slice_in_dim(self.order, first, self.rows), 0)
        i = self.inputs
        target = jnp.where(exists & i.inside[token], i.shard.place(i.target)[token], -1)
        place = jnp.arange(1 + self.rows // HOPPER.tile_rows, dtype=jnp.int32)
        tiles = jnp.where(place == 0, -(-number // HOPPER.tile_rows), place - 1)
        start, number, x = jnp.asarray(first, jnp.int32).reshape(1), number.reshape(1), self._gathered(exists, token)
        return Rows(start, number, exists, token, target, x, tiles)

    def gathered_again(self, rows: Rows, after: Array) -> Rows:
        """The same rows. Their hidden states are gathered once ``after`` is there."""
        token: Array = lax.optimization_barrier((rows.token, after))[0]
        return rows._replace(x=self._gathered(rows.exists, token))

    def _gathered(self, exists: Array, token: Array) -> Array:
        """The hidden states of a chunk's rows, zeros where there is none."""
        return jnp.where(exists[:, None], self.hidden[token], jnp.zeros((), self.dtype))[: round_up(self.chunk, 8)]

    def by_token(self, values: Carry) -> Carry:
        """Vectors by position to vectors by token."""
        vectors: Carry = jax.tree.map(lambda vector: vector[self.position], values)
        return vectors

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, rows: Rows | None = None) -> Array:
        """An array that holds anything, tied to the inputs, and in a loop to the chunk's ``rows``."""
        arrays = (self.hidden if rows is None else rows.x, self.weight, *(() if self.bias is None else (self.bias,)))
        return launch.empty_beside(shape, dtype, *arrays)

    def by_position(self, like: Carry) -> Carry:
        """Vectors by position for the chunks to fill; ``like``: vectors of the same dtypes."""
        length = self.chunks * self.chunk + self.rows
        vectors: Carry = jax.tree.map(lambda vector: self.empty((length,), vector.dtype), like)
        return vectors

    @property
    def in_place(self) -> bool:
        """Whether e lies in dW's memory: eᵀ in its first columns, or e in the first rows of one that is turned."""
        return self.plan.in_place

    @property
    def across(self) -> bool:
        """Whether e is stored transposed."""
        return self.in_place and not self.turned

    @property
    def gradient(self) -> jax.ShapeDtypeStruct:
        """Shape of dW as it lies, padded."""
        size = (self.padded_vocab, self.padded_size)
        return jax.ShapeDtypeStruct(size[::-1] if self.turned else size, self.dtype)

    @property
    def matrix(self) -> jax.ShapeDtypeStruct:
        """Shape of e, or of dW where e lies in it."""
        if self.in_place:
            return self.gradient
        return jax.ShapeDtypeStruct((round_up(self.chunk, 8), round_up(self.columns, HOPPER.step)), self.dtype)

    @property
    def held(self) -> jax.ShapeDtypeStruct:
        """Shape of e where logits wait in it, which a warpgroup turns row by row: one for each thread at least."""
        rows, columns = self.matrix.shape
        return jax.ShapeDtypeStruct((rows, max(columns, THREADS)), self.dtype)

    @property
    def sliced(self) -> bool:
        """Whether the vocabulary is cut into slices."""
        return self.columns < self.vocab

    def slice_at(self, start: Index) -> dict[str, Array]:
        """How wide the slice from ``start`` is, as kernels read it. The last one may be narrower. The width is a
        number on the device, so that one kernel does for all slices."""
        return {"columns": as_index(jnp.minimum(self.columns, self.vocab - start))} if self.sliced else {}

    def config(self, mode: str, columns: int | None = None, **more: bool) -> hopper.Logits:
        """Of a first product; ``more``: what its epilogue sums."""
        o = self.options
        columns, turned = columns or self.vocab, self.turned
        more["each"] = self.inputs.temperature is not None
        more["across"] = self.across and mode == hopper.ANCHORED
        return hopper.Logits(mode, columns, o.logit_scale, o.softcap, group=self.group, turned=turned, **more)

    def line(self, config: hopper.Logits) -> jax.ShapeDtypeStruct:
        """Shape of partial sums that a first product writes."""
        return jax.ShapeDtypeStruct((config.column_tiles, self.rows), jnp.float32)

    def temperatures(self, rows: Rows) -> Array | None:
        """The rows' own, if each token has one."""
        given = self.inputs.temperature
        return None if given is None else rows.pick(given, 1.0)

    def first_product(self, config: hopper.Logits, rows: Rows, start: Index = 0) -> dict[str, Array]:
        """What every first product reads."""
        operands = {"tiles": rows.tiles, "start": as_index(start), "target": rows.target}
        operands |= {"x": rows.x, "w": self.weight}
        if not config.seldom:
            height, width = config.shape
            tile = jnp.where(rows.target >= start, (rows.target - start) // width, -1).reshape(-1, height, 1)
            number = jnp.arange(config.column_tiles, dtype=jnp.int32)
            operands["hits"] = (tile == number[None, None, :]).sum(axis=1, dtype=jnp.int32)
        temperature = self.temperatures(rows)
        if temperature is not None:
            operands["temperature"] = temperature
        if self.limit is not None:
            operands["limit"] = self.limit
        return operands if self.bias is None else operands | {"bias": self.bias}


def as_index(value: Index) -> Array:
    """A row's or an entry's number as kernels read it: [1] int32."""
    return jnp.asarray(value, jnp.int32).reshape(1)


def _rounded_down(size: int, length: int, together: int = HOPPER.tiling) -> int:
    """A chunk's size: all of ``length``, or a multiple of what is moved together."""
    return max(1, length) if size >= length else max(together, size // together * together)
