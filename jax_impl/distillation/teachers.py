"""What a teacher says of a tile: log-probabilities [C, B]. Mirror of torch_impl/distillation/teachers.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

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


class Dense(NamedTuple):
    """All probabilities of every token: an array [N, V], or what generates rows."""

    source: Array | DenseRows
    log: bool
    """Whether it has log-probabilities."""
    vocab: int
    dtype: jnp.dtype

    def log_probs(self, first: Index, tokens: int, start: Index, width: int) -> Array:
        if callable(self.source):
            made = self.source(first, tokens)
            check_teacher_rows(info(made) if isinstance(made, jax.Array) else None, made, (tokens, self.vocab))
            made = jax.lax.stop_gradient(made)
            tile = made if width == self.vocab else jax.lax.dynamic_slice_in_dim(made, start, width, axis=1)
        else:
            tile = take_tile(self.source, first, tokens, start, width)
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
