"""The Triton kernels of the loss on given logits; torch_impl/given_logits/fused.py launches them.

One program owns one row of V logits and goes over it in blocks, in float32. The sums are anchored at the target's
logit, which is known before the row is read: one read, with no maximum in the way and one exponential an element. Every
lane keeps sums of its own and they are added at the end of the row, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless import spec
from logitless.torch_impl.kernels.portable import (
    BIGGEST_INDEX,
    LOG2E,
    LOWEST_ANCHOR,
    LOWEST_GAP,
    SQUARED_SCALE,
    capped,
    log1p,
)

RESCUE_NATS = tl.constexpr(spec.RESCUE_NATS)


@triton.jit
def row_sums(
    row_ptr, k_ptr, target, anchor, stop, scale, cap, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_CLASS: tl.constexpr, SUM_LOGITS: tl.constexpr, STATISTICS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One read of a row up to ``stop``: Σ e, Σ e · gap and Σ (SQUARED_SCALE e)² without the target, for
    gap = z − anchor and e = exp(gap); the maximum, its first index, the minimum, and Σ k z."""
    s = tl.zeros((BLOCK,), tl.float32)
    gaps = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, stop, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < stop
        z = capped(tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32), scale, cap, HAS_SCALE, HAS_CAP)
        gap = z - anchor
        e = tl.where(mask & (column != target), tl.exp2(gap * LOG2E), 0.0)
        s += e
        here = tl.where(mask, z, float("-inf"))
        if STATISTICS:
            gaps += e * tl.maximum(gap, LOWEST_GAP)
            squares += (SQUARED_SCALE * e) * (SQUARED_SCALE * e)
            best = tl.where(here > highest, column, best)
            lowest = tl.minimum(lowest, tl.where(mask, z, float("inf")))
        highest = tl.maximum(highest, here)
        if SUM_LOGITS:
            if HAS_CLASS:  # a class of weight 0 may have a logit of -inf
                k = tl.load(k_ptr + column, mask=mask, other=0.0)
                weighted += tl.where(k == 0, 0.0, k * z)
            else:
                weighted += tl.where(mask, z, 0.0)
    top = tl.max(highest, 0)
    first = tl.min(tl.where(highest == top, best, BIGGEST_INDEX), 0)
    return tl.sum(s, 0), tl.sum(gaps, 0), tl.sum(squares, 0), top, first, tl.min(lowest, 0), tl.sum(weighted, 0)


@triton.jit
def sums_kernel(
    logits_ptr, target_ptr, valid_ptr, inside_ptr, k_ptr, out_target_ptr, out_anchor_ptr, out_total_ptr,
    out_weighted_ptr, out_entropy_ptr, out_argmax_ptr, out_highest_ptr, out_lowest_ptr, out_squared_ptr, vocab, stride,
    scale, cap, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_CLASS: tl.constexpr, SUM_LOGITS: tl.constexpr,
    STATISTICS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's lse in two parts, anchor and log_total, and its statistics; zeros for an ignored token, read nowhere.

    A row that has a logit more than RESCUE_NATS above the target's is read again, anchored at its maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + row) != 0
    stop = tl.where(valid, vocab, 0)
    target = tl.load(target_ptr + row)
    row_ptr = logits_ptr + row * stride
    inside = tl.load(inside_ptr + row) != 0
    target_logit = capped(
        tl.load(row_ptr + target, mask=valid, other=0.0).to(tl.float32), scale, cap, HAS_SCALE, HAS_CAP
    )
    target_logit = tl.where(inside, target_logit, float("nan"))
    anchor = tl.maximum(target_logit, LOWEST_ANCHOR)
    s, gaps, squares, top, best, lowest, weighted = row_sums(
        row_ptr, k_ptr, target, anchor, stop, scale, cap, HAS_SCALE, HAS_CAP, HAS_CLASS, SUM_LOGITS, STATISTICS, BLOCK
    )  # fmt: skip
    again = top - anchor > RESCUE_NATS
    anchor = tl.where(again, top, anchor)
    again_s, again_gaps, again_squares, _, _, _, _ = row_sums(
        row_ptr, k_ptr, target, anchor, tl.where(again, stop, 0), scale, cap, HAS_SCALE, HAS_CAP, HAS_CLASS, False,
        STATISTICS, BLOCK,
    )  # fmt: skip
    s = tl.where(again, again_s, s)
    gaps = tl.where(again, again_gaps, gaps)
    squares = tl.where(again, again_squares, squares)
    e_target = tl.exp2((target_logit - anchor) * LOG2E)
    total = s + e_target
    log_total = tl.where(anchor == target_logit, log1p(s), tl.log(total))
    tl.store(out_target_ptr + row, target_logit)
    tl.store(out_anchor_ptr + row, anchor)
    tl.store(out_total_ptr + row, log_total)
    if SUM_LOGITS:
        tl.store(out_weighted_ptr + row, weighted)
    if STATISTICS:
        target_gap = tl.maximum(target_logit - anchor, LOWEST_GAP)
        tl.store(out_entropy_ptr + row, log_total - (gaps + e_target * target_gap) / total)
        tl.store(out_argmax_ptr + row, best)
        tl.store(out_highest_ptr + row, top)
        tl.store(out_lowest_ptr + row, lowest)
        scaled = SQUARED_SCALE * total
        tl.store(out_squared_ptr + row, squares / scaled / scaled)


@triton.jit
def gradient_kernel(
    logits_ptr, out_ptr, target_ptr, valid_ptr, k_ptr, anchor_ptr, total_ptr, factor_ptr, value_ptr, smooth_ptr,
    vocab, stride, out_stride, scale, cap,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_CLASS: tl.constexpr, SMOOTH: tl.constexpr,
    NARROWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of the gradient, exactly 0 for an ignored token. ``out`` may be the logits: a block is written by the
    program that has read it. NARROWED: a row of half as many bytes begins where the logits' row does. So a block is
    written over the logits of the same place and of earlier ones, all of which must have been read."""
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + row) != 0
    target = tl.load(target_ptr + row)
    anchor = tl.load(anchor_ptr + row)
    log_total = tl.load(total_ptr + row)
    factor = tl.load(factor_ptr + row)
    value = tl.load(value_ptr + row)
    read = tl.where(valid, vocab, 0)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < vocab
        r = tl.load(logits_ptr + row * stride + column, mask=column < read, other=0.0).to(tl.float32)
        z = capped(r, scale, cap, HAS_SCALE, HAS_CAP)
        dz = factor * tl.exp2(((z - anchor) - log_total) * LOG2E)
        if SMOOTH:
            smooth = tl.load(smooth_ptr + row)
            if HAS_CLASS:
                dz -= smooth * tl.load(k_ptr + column, mask=mask, other=0.0)
            else:
                dz -= smooth
        if HAS_CAP:
            dz = dz * (1.0 - (z / cap) * (z / cap))
        dz = tl.where(valid, tl.where(column == target, value, dz), 0.0)
        if NARROWED:
            tl.debug_barrier()
        tl.store(out_ptr + row * out_stride + column, dz.to(out_ptr.dtype.element_ty), mask=mask)
