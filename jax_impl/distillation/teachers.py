"""What a teacher says of a tile: log-probabilities [C, B]. Mirror of torch_impl/distillation/teachers.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from logitless.jax_impl.call import Inputs
from logitless.jax_impl.checks import info
from logitless.jax_impl.chunk import logits_block, rows_of
from logitless.jax_impl.slices import Index, take, take_tile
from logitless.objectives import check_teacher_rows
from logitless.spec import LossOptions

DenseRows = Callable[[Index, int], Array]
"""rows(start, count) → [count, V], the teacher's rows of ``count`` tokens from ``start`` on, which may be traced."""


class Teacher(Protocol):
    """A teacher's log-probabilities, a tile at a time."""

    def log_probs(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        """log p of a tile, [C, B]."""


class Head(NamedTuple):
    """A linear softmax: its arrays, and its logsumexps."""

    inputs: Inputs
    options: LossOptions
    lse: Array  # [2, N]: two parts, whose sum it is

    def log_probs(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        z = logits_block(rows_of(self.inputs, first, tokens), self.inputs, first, start, width, self.options)
        return normalized(z, self.lse, first).astype(self.lse.dtype)


class Spread(NamedTuple):
    """A few ids of every token, and the same probability for each of the others."""

    ids: Array  # [N, K] int32, −1 where not known
    log_p: Array  # [N, K]
    log_rest: Array  # [N]

    def log_probs(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        tile = jnp.broadcast_to(take(self.log_rest, first, tokens)[:, None], (tokens, width))
        return put_columns(tile, columns_of(self.ids, first, tokens, start, width), take(self.log_p, first, tokens))


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
        check_teacher_rows(info(made) if isinstance(made, jax.Array) else None, made, (count, vocab))
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

    def log_probs(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        if self.program is not None:
            tile = self.program.rows(self.source, first, tokens)  # type: ignore[arg-type]
        else:
            tile = take_tile(self.source, first, tokens, start, width)  # type: ignore[arg-type]
        return tile.astype(self.dtype) if self.log else jnp.log(tile.astype(self.dtype))


def normalized(z: Array, lse: Array, first: Index) -> Array:
    """log softmax(z) of a tile's logits, [C, B], with lse [2, N]."""
    anchor, rest = (take(part, first, z.shape[0])[:, None] for part in lse)
    return (z - anchor) - rest


def columns_of(ids: Array, first: Index, tokens: int, start: Index, width: int) -> Array:
    """The ids as columns of a tile, and the column behind the last one for those that lie elsewhere, [C, K]."""
    ids = take(ids, first, tokens)
    local = ids - start
    return jnp.where((local >= 0) & (local < width) & (ids >= 0), local, width)


def put_columns(tile: Array, columns: Array, values: Array | float) -> Array:
    """The tile with ``values`` in some columns of each row; what lies behind the last one is dropped."""
    return tile.at[jnp.arange(tile.shape[0])[:, None], columns].set(values, mode="drop")
