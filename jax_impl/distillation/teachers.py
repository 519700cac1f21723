"""What a teacher says of a tile, [C, B]: logits or log-probabilities. Mirror of
torch_impl/distillation/teachers.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from logitless import objectives
from logitless.jax_impl.call import Inputs
from logitless.jax_impl.checks import info
from logitless.jax_impl.chunk import (
    by_blocks_on_cpu,
    capped,
    logits_block,
    product,
    rows_of,
    temperature_column,
    weight_rows,
)
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.slices import Index, for_slices, put, take, take_tile
from logitless.spec import LOWEST_ANCHOR, LossOptions

DenseRows = Callable[[Index, int], Array]
"""rows(start, count) → [count, V], the teacher's rows of ``count`` tokens from ``start`` on, which may be traced."""


class Raw(NamedTuple):
    """A tile of r, [C, B], and what makes logits f(r + b) of them, or log-probabilities if they are none yet."""

    r: Array
    bias: Array | None = None  # [B]
    options: LossOptions | None = None
    """Of logits. None: r are log-probabilities."""


class Teacher(Protocol):
    """A teacher, a tile at a time."""

    @property
    def has_logits(self) -> bool:
        """Whether it has logits, not log-probabilities."""

    def tile(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        """Its logits or log-probabilities, [C, B]; in padding anything."""

    def raw(self, first: Index, tokens: int, start: Index, width: int) -> Raw:
        """What the kernel makes log p of. Of a token that does not count, which it does not read, anything."""


class Head(NamedTuple):
    """A linear softmax."""

    inputs: Inputs
    options: LossOptions
    dtype: jnp.dtype

    @property
    def has_logits(self) -> bool:
        return True

    def tile(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        if width == self.inputs.weight.shape[0]:
            return whole_logits(self.inputs, first, tokens, self.options).astype(self.dtype)
        x = rows_of(self.inputs, first, tokens)
        return logits_block(x, self.inputs, first, start, width, self.options).astype(self.dtype)

    def raw(self, first: Index, tokens: int, start: Index, width: int) -> Raw:
        return self.raw_of(rows_of(self.inputs, first, tokens), start, width)

    def raw_of(self, x: Array, start: Index, width: int) -> Raw:
        """:meth:`raw` of tokens with the hidden states x."""
        bias = None if self.inputs.bias is None else take(self.inputs.bias, start, width)
        return Raw(raw_logits(x, self.inputs, start, width).astype(self.dtype), bias, self.options)


class Spread(NamedTuple):
    """A few ids of every token, and the same probability for each of the others."""

    ids: Array  # [N, K] int32, −1 where not known
    log_p: Array  # [N, K]
    log_rest: Array  # [N]
    shard: Shard

    @property
    def has_logits(self) -> bool:
        return False

    def tile(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        tile = jnp.broadcast_to(take(self.log_rest, first, tokens)[:, None], (tokens, width))
        columns = columns_of(self.ids, first, tokens, id_of(self.shard, start), width)
        return put_columns(tile, columns, take(self.log_p, first, tokens))

    def raw(self, first: Index, tokens: int, start: Index, width: int) -> Raw:
        return Raw(self.tile(first, tokens, start, width))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A teacher's function as it was traced: what it closes over is handed to it. Hashable, a program of its own."""

    jaxprs: tuple[tuple[int, Jaxpr], ...]
    """By the number of tokens."""

    @staticmethod
    def of(rows: DenseRows, counts: Iterable[int], vocab: int) -> tuple[Program, tuple[list[Array], ...]]:
        """The program for these numbers of tokens, and what it closes over for each of them, without gradient."""
        closed = [(count, _traced(rows, count, vocab)) for count in counts]
        values = tuple([jax.lax.stop_gradient(value) for value in each.consts] for _, each in closed)
        return Program(tuple((count, each.jaxpr) for count, each in closed)), values

    def rows(self, values: tuple[list[Array], ...], first: Index, tokens: int) -> Array:
        """[C, V]"""
        for (count, jaxpr), own in zip(self.jaxprs, values, strict=True):
            if count == tokens:
                (made,) = jaxpr_as_fun(ClosedJaxpr(jaxpr, own))(jnp.asarray(first, jnp.int32))
                return made  # type: ignore[no-any-return]
        raise AssertionError(tokens)


def _traced(rows: DenseRows, count: int, vocab: int) -> ClosedJaxpr:
    def checked(start: Array) -> Array:
        made = rows(start, count)
        objectives.check_teacher_rows(info(made) if isinstance(made, jax.Array) else None, made, (count, vocab))
        return made

    return jax.make_jaxpr(checked)(jnp.int32(0))


class Dense(NamedTuple):
    """All probabilities of every token: an array [N, V], or what generates rows."""

    source: Array | tuple[list[Array], ...]
    """The array, or what the program closes over."""
    program: Program | None
    log: bool
    """Whether it has log-probabilities."""
    dtype: jnp.dtype

    @property
    def has_logits(self) -> bool:
        return False

    def tile(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        if self.program is not None:
            tile = self.program.rows(self.source, first, tokens)  # type: ignore[arg-type]
        else:
            tile = take_tile(self.source, first, tokens, start, width)  # type: ignore[arg-type]
        return tile.astype(self.dtype) if self.log else jnp.log(tile.astype(self.dtype))

    def raw(self, first: Index, tokens: int, start: Index, width: int) -> Raw:
        return Raw(self.tile(first, tokens, start, width))


def raw_logits(x: Array, inputs: Inputs, start: Index, width: int) -> Array:
    """r of tokens with the hidden states x, [C, B], in the accumulation dtype."""
    if width == inputs.weight.shape[0]:
        return _raw_rows(x, inputs)
    return product(x, weight_rows(inputs, start, width).T, inputs.accumulation_dtype)


def _raw_rows(x: Array, inputs: Inputs) -> Array:
    """:func:`raw_logits` of the whole vocabulary."""
    dtype, tokens = inputs.accumulation_dtype, x.shape[0]

    def whole(x: Array, weight: Array) -> Array:
        return product(x, weight.T, dtype)

    def by_blocks(x: Array, weight: Array) -> Array:
        def block(r: Array, start: Index, columns: int) -> Array:
            return put(r, whole(x, take(weight, start, columns)), start, axis=1)

        vocab = weight.shape[0]
        return for_slices(vocab, min(vocab, objectives.LARGEST_TILE), block, jnp.zeros((tokens, vocab), dtype))

    return by_blocks_on_cpu(whole, by_blocks, x, inputs.weight)


def whole_logits(inputs: Inputs, first: Index, tokens: int, options: LossOptions) -> Array:
    """z of the tokens from ``first``, [C, V]."""
    z = _raw_rows(rows_of(inputs, first, tokens), inputs)
    if inputs.bias is not None:
        z = z + inputs.bias.astype(z.dtype)[None, :]
    return capped(z, options, temperature_column(inputs, first, tokens))


def row_sums(z: Array, shard: Shard) -> tuple[Array, Array]:
    """Of whole rows the largest logit, and Σ_j exp(z_j − largest), [C] each."""
    anchor = jnp.maximum(z.max(axis=1), LOWEST_ANCHOR)
    total = jnp.exp(z - anchor[:, None]).sum(axis=1)
    if not shard.active:
        return anchor, total
    highest = shard.largest(anchor)
    return highest, shard.total(total * jnp.exp(anchor - highest))


def row_lse(z: Array, shard: Shard) -> tuple[Array, Array]:
    """log Σ_j exp(z_j) of whole rows in two parts, [C] each, of which the first is the largest logit.

    Where logits are large, the sum of the parts would lose what divergences need.
    """
    anchor, total = row_sums(z, shard)
    return anchor, jnp.log(total)


def id_of(shard: Shard, start: Index) -> Index:
    """The id of this device's column ``start``."""
    return shard.first() + start if shard.active else start


def normalized(z: Array, lse: tuple[Array, ...]) -> Array:
    """log softmax(z) of a tile's logits, [C, B]; without lse: they are log-probabilities already."""
    for part in lse:
        z = z - part[:, None]
    return z


def columns_of(ids: Array, first: Index, tokens: int, start: Index, width: int) -> Array:
    """The ids as columns of a tile whose first has the id ``start``, and the column behind the last one for those that
    lie elsewhere, [C, K]."""
    ids = take(ids, first, tokens)
    local = ids - start
    return jnp.where((local >= 0) & (local < width) & (ids >= 0), local, width)


def put_columns(tile: Array, columns: Array, values: Array | float) -> Array:
    """The tile with ``values`` in some columns of each row; what lies behind the last one is dropped."""
    if columns.shape[1] == 1:  # fused with what is around it; a scatter copies the tile
        return jnp.where(columns == jnp.arange(tile.shape[1], dtype=columns.dtype)[None, :], values, tile)
    return tile.at[jnp.arange(tile.shape[0])[:, None], columns].set(values, mode="drop")
