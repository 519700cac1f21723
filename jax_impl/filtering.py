"""The tiles that ``filter_eps`` leaves out, in plain operations: what jax_impl/xla.py masks.

No product is saved here, and none of the meaning is missing: a block of the gradient's matrix is judged as it is
rounded for the products, and its low tiles become zero. Mirror of torch_impl/filtering.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from logitless.spec import FILTER_COLUMNS, FILTER_ROWS


class TileFilter(NamedTuple):
    """Zeros the low tiles of a chunk's matrix, block by block, and counts them. See LossOptions.filter_eps.

    A tile is low where every element has |G_ij| < eps · |g_i|; a NaN is not below a threshold, and a row without weight
    reaches none.
    """

    threshold: Array  # eps |g_i| in the unit of what is judged, [C]
    counts: Array  # g_i != 0, [C]
    target: Array  # [C]; outside of all blocks where there is none
    keeps_targets: bool  # whether a target's element keeps its tile; else it alone is kept

    @staticmethod
    def of(eps: float, g: Array, unit: Array | None, target: Array, *, keeps_targets: bool) -> TileFilter:
        """g, target: [C]; unit: what is divided out of what is judged."""
        return TileFilter(eps * jnp.abs(g if unit is None else g / unit), g != 0, target, keeps_targets)

    def leave_out(self, e: Array, factor: Array | None, start: Any) -> tuple[Array, Array]:
        """A block [C, B] from the vocabulary entry ``start`` on with 0 in its low tiles, and [2] int32: how many these
        are, and of how many. ``factor``, [C]: what e still lacks of G, if anything."""
        tokens, columns = e.shape
        places: Array = start + jnp.arange(columns, dtype=jnp.int32)
        at_target = jnp.equal(self.target[:, None], places)
        size = jnp.abs(e.astype(self.threshold.dtype))
        if factor is not None:
            size = size * jnp.abs(factor)[:, None]
        reached = jnp.where(at_target, self.keeps_targets, ~(size < self.threshold[:, None]))
        kept = any_in_tiles(reached & self.counts[:, None])
        wide = jnp.repeat(jnp.repeat(kept, FILTER_ROWS, axis=0), FILTER_COLUMNS, axis=1)[:tokens, :columns]
        count = jnp.stack([(~kept).sum(dtype=jnp.int32), jnp.int32(kept.size)])
        return jnp.where(wide | at_target, e, jnp.zeros((), e.dtype)), count


def any_in_tiles(reached: Array) -> Array:
    """[C, B] to whether any of a tile's elements is set, [C / FILTER_ROWS, B / FILTER_COLUMNS], rounded up."""
    rows, columns = (-(-size // tile) for size, tile in zip(reached.shape, (FILTER_ROWS, FILTER_COLUMNS), strict=True))
    more = rows * FILTER_ROWS - reached.shape[0], columns * FILTER_COLUMNS - reached.shape[1]
    whole = jnp.pad(reached, ((0, more[0]), (0, more[1])))
    return whole.reshape(rows, FILTER_ROWS, columns, FILTER_COLUMNS).any(axis=3).any(axis=1)
