"""The modelled time of a cut, relative to 6·N·D·V flops.

Plain operations: the extra flops of a second pass, and the accumulators that every further chunk reads and writes.

    tokens:  passes + (chunks − 1) · T / N          passes = 1, or 4/3 when lse must come first
    vocab:   4/3    + (chunks − 1) · T / V          T = tokens whose products take as long as one such read and write

Kernels: not flops but the turns that the products' tiles take on the multiprocessors, plus the time of the small
launches around a chunk. The slices of the vocabulary are those of a call that makes dW itself.
"""

from __future__ import annotations

import math

from logitless.hardware import ACCUMULATOR_TOKENS, HOPPER, Device
from logitless.scratch import Cut
from logitless.spec import ITEMSIZE


def relative_cost(cut: Cut, device: Device) -> float:
    """The modelled time, by the formula of this module."""
    if not cut.kernels:
        length = cut.tokens if cut.order == "tokens" else cut.vocab
        passes = 1.0 if cut.one_pass else 4.0 / 3.0
        return passes + max(0, cut.chunks - 1) * ACCUMULATOR_TOKENS[device] / max(1, length)
    if not cut.tokens:
        return 1.0
    flops = 6 * cut.tokens * cut.hidden * cut.vocab
    ideal = flops / (2 * math.prod(HOPPER.tile) * HOPPER.multiprocessors)
    blocks = _blocks(cut)
    depth = sum(_block_depth(cut, *block) for block in blocks)
    if not cut.one_pass:
        depth += _turns(cut.tokens, cut.vocab) * cut.hidden
    count, cost = len(blocks), depth / ideal
    if cut.order == "vocab":
        overhead = HOPPER.chunk_overhead_flops + count * HOPPER.slice_overhead_flops
        return cost + (count - 1) * HOPPER.accumulator_entries / cut.vocab + overhead / flops
    cost += count * HOPPER.chunk_overhead_flops / flops
    if count == 1:
        return cost
    sums = (count - 1) * HOPPER.accumulator_tokens[cut.kind] + HOPPER.last_sum_tokens[cut.kind]
    return cost + sums / cut.tokens


def _blocks(cut: Cut) -> list[tuple[int, int]]:
    """Tokens and vocabulary entries of every chunk, or of every slice where dW is a tensor of its own."""
    if cut.order == "tokens":
        return [(stop - start, cut.vocab) for start, stop in cut.token_slices]
    lends = cut.hidden * ITEMSIZE[cut.dtype] if cut.kind == "triton" else 0
    return [(cut.tokens, stop - start) for start, stop, _ in cut.lent_slices(lends)]


def _block_depth(cut: Cut, rows: int, columns: int) -> float:
    """Turns times depth of the three products of a block: logits, dX, dW."""
    hidden_turns: float = _turns(rows, cut.hidden)
    programs = HOPPER.multiprocessors
    if cut.splits_hidden:
        whole, left = divmod(cut.hidden_tiles(rows), programs)
        parts = min(programs // left, HOPPER.most_parts) if left else 1
        hidden_turns = whole + _turn(left * parts / programs) / parts + HOPPER.split_overhead_turns
    if cut.lends:  # whole rows of tiles at a time
        beside = math.ceil(cut.hidden / HOPPER.tile[1])
        programs = programs // beside * beside
    return _turns(rows, columns) * cut.hidden + hidden_turns * columns + _turns(columns, cut.hidden, programs) * rows


def _turns(rows: int, columns: int, programs: int = HOPPER.multiprocessors) -> float:
    """Turns of the programs for a product of this size."""
    tiles = math.ceil(rows / HOPPER.tile[0]) * math.ceil(columns / HOPPER.tile[1])
    whole, left = divmod(tiles, programs)
    return whole + _turn(left / programs)


def _turn(used: float) -> float:
    """How long a turn takes that this share of the multiprocessors works in."""
    return 1 - HOPPER.idle_gain * (1 - used) if used else 0
