"""The modelled time of a cut, relative to 6·N·D·V flops.

Plain operations: the extra flops of a second pass, and the accumulators that every further chunk reads and writes.

    tokens:  passes + (chunks − 1) · T / N          passes = 1, or 4/3 when lse must come first
    vocab:   4/3    + (chunks − 1) · T / V          T = tokens whose products take as long as one such read and write
    both:    4/3 or 5/3, and as much more for the chunks of either half, which read the weight or the hidden states

Kernels: not flops but the turns that the products' tiles take on the multiprocessors, plus the time of the small
launches around a chunk. The slices of the vocabulary are those of a call that makes dW itself.
"""

from __future__ import annotations

import collections
import math

from logitless.hardware import ACCUMULATOR_TOKENS, HOPPER, Device
from logitless.scratch import Cut, Tile
from logitless.spec import ITEMSIZE


def relative_cost(cut: Cut, device: Device) -> float:
    """The modelled time, by the formula of this module."""
    halves = cut.halves if cut.order == "both" else (cut,)
    return sum(_by_turns(half) if cut.kernels else _by_flops(half, device) for half in halves)


def _by_flops(cut: Cut, device: Device) -> float:
    """Of plain operations."""
    length = cut.tokens if cut.order == "tokens" else cut.vocab
    products = (2 if cut.alone else 3) + (not cut.one_pass and not cut.knows_sums)  # no part of dW is a sum there
    return products / 3 + max(0, cut.chunks - 1) * ACCUMULATOR_TOKENS[device] / max(1, length)


def _by_turns(cut: Cut) -> float:
    """Of the kernels."""
    if not cut.tokens:
        return 1.0
    flops = 6 * cut.tokens * cut.hidden * cut.vocab
    ideal = flops / (2 * math.prod(HOPPER.tile) * HOPPER.multiprocessors)
    blocks = _blocks(cut)
    depth = sum(count * _block_depth(cut, *block) for block, count in collections.Counter(blocks).items())
    if not (cut.one_pass or cut.knows_sums):
        depth += _turns(cut.tokens, cut.vocab) * cut.hidden
    count, cost = len(blocks), depth / ideal
    if cut.order == "vocab":
        return cost + _slices_cost(cut, count, flops)
    return cost + count * HOPPER.chunk_overhead_flops / flops + _sum_cost(cut, flops)


def _sum_cost(cut: Cut, flops: int) -> float:
    """What it costs that chunks of tokens add up to dW; ``flops``: of all products."""
    chunks = len(cut.token_slices)
    if chunks == 1:
        return 0.0
    sums = (chunks - 1) * HOPPER.accumulator_tokens[cut.kind] + HOPPER.last_sum_tokens[cut.kind]
    lists = cut.one_pass and cut.low_bits < 8 and cut.weight_entries > 0
    listing = HOPPER.listing_flops if lists else 0.0
    return sums / cut.tokens * (cut.weight_entries / cut.vocab) + listing / flops


def _slices_cost(cut: Cut, count: int, flops: int) -> float:
    """What slices of the vocabulary cost beside their products; ``count``: of their blocks."""
    overhead = HOPPER.tile_overhead_flops if cut.sums_slices else HOPPER.slice_overhead_flops[cut.kind]
    cost = (HOPPER.chunk_overhead_flops + count * overhead) / flops + _sum_cost(cut, flops)
    widths = count // len(cut.token_slices)
    return cost if cut.alone else cost + (widths - 1) * HOPPER.accumulator_entries / cut.vocab


def _blocks(cut: Cut) -> list[tuple[int, int]]:
    """Tokens and vocabulary entries of every chunk, or of every slice where dW is a tensor of its own."""
    if cut.order == "tokens":
        return [(stop - start, cut.vocab) for start, stop in cut.token_slices]
    lends = cut.hidden * ITEMSIZE[cut.dtype] if cut.kind == "triton" else 0
    widths = [stop - start for start, stop, _ in cut.lent_slices(lends)]
    return [(last - first, width) for width in widths for first, last in cut.token_slices]


def _block_depth(cut: Cut, rows: int, columns: int) -> float:
    """Turns times depth of the products of a block: logits, dX, dW."""
    programs, tile = HOPPER.multiprocessors, cut.gradient_tile
    hidden_turns: float = _turns(rows, cut.hidden, tile)
    if cut.splits_hidden:
        whole, left = divmod(cut.hidden_tiles(rows), programs)
        parts = min(programs // left, HOPPER.most_parts) if left else 1
        hidden_turns = whole + _turn(left * parts / programs) / parts + HOPPER.split_overhead_turns
    elif cut.hidden_parts > 1:
        tiles, parts = cut.hidden_tiles(rows), cut.hidden_parts
        whole, left = divmod(tiles * parts, programs)
        hidden_turns = (whole + _turn(left / programs)) / parts + parts * HOPPER.split_overhead_turns
    weight_rows = rows
    if cut.in_place:  # whole rows of tiles at a time
        beside = math.ceil(cut.hidden / HOPPER.tile[1]) * HOPPER.programs_together[cut.kind]
        programs, tile = programs // beside * beside, HOPPER.tile
        weight_rows += HOPPER.in_place_tokens
    logits, hidden = _turns(rows, columns) * cut.hidden, 0 if cut.knows_sums else hidden_turns * columns
    entries = min(columns, cut.weight_entries)
    return logits + hidden + _turns(entries, cut.hidden, tile, programs) * weight_rows


def _turns(rows: int, columns: int, tile: Tile = HOPPER.tile, programs: int = HOPPER.multiprocessors) -> float:
    """Turns of the programs for a product of this size."""
    tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    whole, left = divmod(tiles, programs)
    return whole + _turn(left / programs)


def _turn(used: float) -> float:
    """How long a turn takes that this share of the multiprocessors works in."""
    return 1 - HOPPER.idle_gain * (1 - used) if used else 0
