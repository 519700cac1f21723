"""The tiles that ``filter_eps`` leaves out, in plain operations: what torch_impl/eager.py masks.

No product is saved here, and none of the meaning is missing: a block of the gradient's matrix is judged as it is
rounded for the products, and its low tiles become zero. Mirror of jax_impl/filtering.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.spec import FILTER_COLUMNS, FILTER_ROWS


class TileFilter:
    """Zeros the low tiles of a call's matrix, block by block, and counts them. See LossOptions.filter_eps.

    A tile is low where every element has |G_ij| < eps · |g_i|; a NaN is not below a threshold, and a row without weight
    reaches none.
    """

    def __init__(self, eps: float, g: Tensor, target: Tensor, *, keeps_targets: bool) -> None:
        """g, target: [N]. keeps_targets: whether a target's element keeps its tile; else it alone is kept."""
        self.eps, self.g, self.target, self.keeps_targets = eps, g, target, keeps_targets
        self.left, self.tiles = torch.zeros((), dtype=torch.int64, device=g.device), 0

    def start_chunk(self, rows: slice, factor: Tensor) -> None:
        """Begin the tokens ``rows``; factor, [C] or []: what their elements lack of G."""
        g = self.g[rows]
        self.rows, self.counts = rows, g != 0
        self.limit = torch.where(self.counts, self.eps * g.abs() / factor.abs(), torch.inf).unsqueeze(1)

    def leave_out(self, e: Tensor, start: int) -> None:
        """The low tiles of a block [C, B] of the matrix, from the vocabulary entry ``start`` on, become zero."""
        local = (self.target[self.rows] - start).unsqueeze(1)
        here, index = (local >= 0) & (local < e.shape[1]), local.clamp(0, e.shape[1] - 1)
        target_element = e.gather(1, index)
        reached = ~(e.abs() < self.limit)
        keeps = self.counts.unsqueeze(1) if self.keeps_targets else torch.zeros_like(here)
        reached.scatter_(1, index, torch.where(here, keeps, reached.gather(1, index)))
        kept = _any_in_tiles(reached)
        self.left, self.tiles = self.left + (~kept).sum(), self.tiles + kept.numel()
        wide = kept.repeat_interleave(FILTER_COLUMNS, 1)[:, : e.shape[1]]
        e.masked_fill_(~wide.repeat_interleave(FILTER_ROWS, 0)[: e.shape[0]], 0.0)
        e.scatter_(1, index, torch.where(here, target_element, e.gather(1, index)))

    @property
    def share(self) -> Tensor:
        """Of the tiles that were judged, how many became zero: float32, without axes."""
        return self.left.float() / max(1, self.tiles)


def _any_in_tiles(reached: Tensor) -> Tensor:
    """[C, B] to whether any of a tile's elements is set, [C / FILTER_ROWS, B / FILTER_COLUMNS], rounded up."""
    rows, columns = (-size % tile for size, tile in zip(reached.shape, (FILTER_ROWS, FILTER_COLUMNS), strict=True))
    whole = torch.nn.functional.pad(reached, (0, columns, 0, rows))
    rows, columns = (size // tile for size, tile in zip(whole.shape, (FILTER_ROWS, FILTER_COLUMNS), strict=True))
    return whole.view(rows, FILTER_ROWS, columns, FILTER_COLUMNS).any(3).any(1)
