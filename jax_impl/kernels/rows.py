"""A chunk's rows, and their targets' logits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from logitless.jax_impl.call import Inputs
from logitless.jax_impl.chunk import capped, weight_at
from logitless.jax_impl.slices import Carry, put
from logitless.spec import LossOptions


class Rows(NamedTuple):
    """A chunk's rows; vectors [tiles of C]."""

    first: Array  # [1] int32: the first one's position
    number: Array  # [1] int32: how many there are
    exists: Array
    token: Array
    target: Array  # −1 for an id outside the vocabulary or on another device, and where there is no row
    x: Array  # [C, D]
    tiles: Array  # [1 + …] int32: how many row tiles there are, and which

    def put(self, vectors: Carry, parts: Carry) -> Carry:
        """Vectors by position with ``parts`` in the rows' places."""
        first = self.first[0]
        filled: Carry = jax.tree.map(lambda vector, part: put(vector, part, first), vectors, parts)
        return filled

    def pick(self, by_token: Array, nothing: float = 0.0) -> Array:
        """The rows' part of a vector by token; ``nothing`` where there is no row."""
        return jnp.where(self.exists, by_token[self.token], nothing)


def dots(a: Array, b: Array) -> Array:
    """Σ_d a_id b_id in float32. It is no product of matrices, which could be rounded to TF32."""
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(axis=-1)


def row_logits(
    x: Array, rows: Array, bias: Array | None, target: Array, options: LossOptions, temperature: Array | None
) -> Array:
    """z_{i, target_i} of the hidden states x and the weight's rows of their targets; temperature: the rows' own."""
    z = dots(x, rows)
    if bias is not None:
        z = z + bias[target].astype(jnp.float32)
    return capped(z, options, temperature)


def own_target_logits(inputs: Inputs, options: LossOptions) -> Array:
    """The anchors [N] of the targets whose rows are on this device, 0 elsewhere."""
    place = inputs.shard.place(inputs.target)
    x = jnp.where(inputs.valid[:, None], inputs.hidden, 0)
    wanted = jnp.maximum(place, 0)
    z = row_logits(x, weight_at(inputs, wanted), inputs.bias, wanted, options, inputs.temperature)
    return jnp.where(place >= 0, z, 0.0)
