"""The modelled time of a cut, relative to 6·N·D·V flops.

Plain operations: the extra flops of a second pass, and the accumulators that every further chunk reads and writes.

    tokens:  passes + (chunks − 1) · T / N          passes = 1, or 4/3 when lse must come first
    vocab:   4/3    + (chunks − 1) · T / V          T = tokens whose products take as long as one such read and write

Kernels: not flops but the turns that the products' tiles take on the multiprocessors, plus the time of the small
launches around a chunk.
"""

from __future__ import annotations

import math

from logitless.hardware import ACCUMULATOR_TOKENS, HOPPER, Device
from logitless.scratch import Cut


def relative_cost(cut: Cut, device: Device) -> float:
    """The modelled time, by the formula of this module."""
    length = cut.tokens if cut.order == "tokens" else cut.vocab
    if not cut.kernels:
        passes = 1.0 if cut.one_pass else 4.0 / 3.0
        return passes + max(0, cut.chunks - 1) * ACCUMULATOR_TOKENS[device] / max(1, length)
    if not cut.tokens:
        return 1.0
    flops = 6 * cut.tokens * cut.hidden * cut.vocab
    ideal = flops / (2 * math.prod(HOPPER.tile) * HOPPER.multiprocessors)
    accumulator = HOPPER.accumulator_tokens if cut.order == "tokens" else HOPPER.accumulator_entries
    cost = _depth(cut) / ideal + (cut.chunks - 1) * accumulator / length
    chunks, slices = (cut.chunks, 0) if cut.order == "tokens" else (1, cut.chunks)
    return cost + (chunks * HOPPER.chunk_overhead_flops + slices * HOPPER.slice_overhead_flops) / flops


def _depth(cut: Cut) -> float:
    """Σ over the products of turns times depth."""
    if cut.order == "tokens":
        depth = sum(_block_depth(cut, stop - start, cut.vocab) for start, stop in cut.token_slices)
    else:
        depth = sum(_block_depth(cut, cut.tokens, stop - start) for start, stop in cut.vocab_slices)
    if not cut.one_pass:
        depth += _turns(cut.tokens, cut.vocab) * cut.hidden
    return depth


def _block_depth(cut: Cut, rows: int, columns: int) -> float:
    """The three products of a block: logits, dX, dW."""
    hidden_turns: float = _turns(rows, cut.hidden)
    if cut.splits_hidden:
        hidden_turns = cut.hidden_tiles(rows) / HOPPER.multiprocessors + HOPPER.split_overhead_turns
    programs = HOPPER.multiprocessors
    if cut.lends:  # whole rows of tiles at a time
        beside = math.ceil(cut.hidden / HOPPER.tile[1])
        programs = programs // beside * beside
    return _turns(rows, columns) * cut.hidden + hidden_turns * columns + _turns(columns, cut.hidden, programs) * rows


def _turns(rows: int, columns: int, programs: int = HOPPER.multiprocessors) -> int:
    """Whole turns of the programs for a product of this size."""
    tiles = math.ceil(rows / HOPPER.tile[0]) * math.ceil(columns / HOPPER.tile[1])
    return math.ceil(tiles / programs)
