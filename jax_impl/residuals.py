"""Residuals of a custom VJP whose structure does not depend on what is differentiated.

JAX traces a function once for every set of differentiated arguments, but remembers the structure of the residuals only
for the last set. If the structures differed, a later derivative would be silently wrong, or fail. So the structure is
always the same, and the shapes of the residuals say what depends on the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

# The shape that stands for None. No array of ours has as many axes.
_NONE = (0,) * 9

Pytree = Any
"""A pytree whose structure no type describes, as jax.tree's functions take and return it."""

Packed = tuple[Pytree, tuple[Array, ...]]
"""The arrays, and a flag for each argument."""


def packed(kept: Pytree, needs: Sequence[bool]) -> Packed:
    """``kept``, a pytree of arrays and None, and ``needs``, which arguments are differentiated, as arrays only."""

    def array(leaf: Array | None) -> Array:
        return jnp.zeros(_NONE, bool) if leaf is None else leaf

    flags = tuple(jnp.zeros((1 if needed else 0,), bool) for needed in needs)
    return jax.tree.map(array, kept, is_leaf=lambda leaf: leaf is None), flags


def unpacked(residuals: Packed) -> tuple[Pytree, tuple[bool, ...]]:
    """What was packed."""
    arrays, flags = residuals
    kept = jax.tree.map(lambda leaf: None if leaf.shape == _NONE else leaf, arrays)
    return kept, tuple(flag.shape == (1,) for flag in flags)
