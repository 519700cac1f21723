"""The three products on Hopper (compute capability 9.x), in Gluon: what portable.py's do, for 16-bit operands whose
rows start on 16 bytes, and faster.

One program is three groups of warps. One warp loads: it walks the program's tiles and, within a tile, the steps of the
product's depth, and asks the tensor memory accelerator for each step's operands, as many steps ahead as there are
stages. Two groups of four warps multiply: each owns the upper or the lower half of every tile, [BM/2, BN], and reads
what it shares with the other (the tile's columns) from the same stage. Neither waits for the other, only for what is
loaded; so that one's epilogue runs beside the other's products, the second starts a tile SKEW steps behind the first.

``ready[s]``: stage s was loaded; ``free[s]``: both groups have multiplied it; ``turn``: the second group may start.
Results leave through shared memory and the accelerator, which stores or adds while the next tile is multiplied.

With PACE the programs keep step: their loading warps look every PACE steps at how far all have come, and nobody gets
far ahead (:func:`keep_pace`). What several programs read they then read within microseconds of each other, which takes
less energy, and so less time. No result depends on it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from logitless.hardware import HOPPER
from logitless.torch_impl.kernels import portable as kernels
from logitless.torch_impl.kernels.portable import (
    halves_of_byte,
    held_of,
    joined,
    low_stride,
    lower_bits,
    programs_of,
    put_waiting,
    reciprocal_of,
    rounded,
    tile_of,
    turns_of,
    upper_bits,
    weight_place,
)
from logitless.torch_impl.kernels.tiles import SQUARE_GROUP, HiddenLaunch, WeightLaunch

LOG2E = gl.constexpr(kernels.LOG2E.value)
LOWEST_ANCHOR = gl.constexpr(kernels.LOWEST_ANCHOR.value)
LOWEST_GAP = gl.constexpr(kernels.LOWEST_GAP.value)
SQUARED_SCALE = gl.constexpr(kernels.SQUARED_SCALE.value)
NO_ROW = gl.constexpr(kernels.NO_ROW.value)
SUMS = gl.constexpr(kernels.SUMS.value)
ANCHORED = gl.constexpr(kernels.ANCHORED.value)
KNOWN = gl.constexpr(kernels.KNOWN.value)
HELD = gl.constexpr(kernels.HELD.value)
# Beyond it an anchor in units of log 2 is not corrected for its rounding: it is no logit.
CORRECTED_ANCHOR = gl.constexpr(1e20)
MOST_PARTS = gl.constexpr(kernels.MOST_PARTS.value)
BIGGEST_INDEX = gl.constexpr(kernels.BIGGEST_INDEX.value)
TARGET_GRAIN = gl.constexpr(kernels.TARGET_GRAIN.value)
TARGET_STEP = gl.constexpr(kernels.TARGET_STEP.value)
# Steps of gathered hidden states that are in shared memory at once, and the warps that gather them.
TARGET_SLOTS = gl.constexpr(2)
GATHERING_WARPS = gl.constexpr(2)
# Looks at the others' progress before a program stops to wait for them: about a millisecond.
PATIENCE = gl.constexpr(2000)


@builtin
def _add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    """Memory at ``coord`` += a tile of shared memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)


# Triton 3.6 has no name for the addition, and had others for the two copies.
tma_add = getattr(tma, "async_atomic_add", _add)
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# ---------------------------------------------------------------------------------------------------------------------
# What the three products share


@gluon.jit
def unit_of(unit, tiles, steps, PROGRAMS: gl.constexpr, SPLIT: gl.constexpr):
    """A program's piece of work: (tile, its first step, how many steps, whether it is a part of a tile).

    Without SPLIT units are tiles. With it, the tiles that would leave most programs idle in a last turn are split along
    their depth, so that the last turn is as short as it has few tiles.
    """
    if SPLIT:
        whole, left, parts = turns_of(tiles, steps, PROGRAMS)
        index = unit - whole
        part = index // gl.maximum(left, 1)
        is_part = unit >= whole
        begin = gl.where(is_part, part * steps // parts, 0)
        end = gl.where(is_part, (part + 1) * steps // parts, steps)
        return gl.where(is_part, whole + index % gl.maximum(left, 1), unit), begin, end - begin, is_part
    else:
        return unit, 0, steps, False


@gluon.jit
def units_of(tiles, steps, PROGRAMS: gl.constexpr, SPLIT: gl.constexpr):
    """How many units there are."""
    if SPLIT:
        whole, left, parts = turns_of(tiles, steps, PROGRAMS)
        return whole + left * parts
    else:
        return tiles


@gluon.jit
def share_of(
    units, row_tiles, column_tiles,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, SPLIT: gl.constexpr, PACE: gl.constexpr,
):  # fmt: skip
    """(The program's first unit, how many programs take units); a program that takes none begins behind the last."""
    if PACE > 0 and not SPLIT:
        programs = programs_of(row_tiles, column_tiles, GROUP, PROGRAMS)
        return gl.where(gl.program_id(0) < programs, gl.program_id(0), units), programs
    else:
        return gl.program_id(0), PROGRAMS


@gluon.jit
def keep_pace(progress_ptr, patience, unit, step, tiles, steps, programs, PACE: gl.constexpr):
    """Count this program's PACE steps from ``step`` on, and wait until all have come, on the average, to those before.

    progress[0]: such counts of all programs. ``patience``: how often to look, at most. Afterwards none is left, for
    then not all programs run at a time, and who waits for the others would wait for their whole work.
    """
    # Nothing needs this count to order other accesses; but with one that does not ("relaxed") dX was 1.4 % slower.
    gl.atomic_add(progress_ptr, 1)
    turn = unit // programs
    running = gl.minimum(tiles - turn * programs, programs)
    due = turn * programs * ((steps + PACE - 1) // PACE) + running * (step // PACE - 1)
    left = patience
    while (left > 0) & (gl.load(progress_ptr, volatile=True) < due):
        left -= 1
    return gl.where(left > 0, patience, 0)


@gluon.jit
def end_pace(progress_ptr, PROGRAMS: gl.constexpr):
    """The last program to come here leaves zeros for the next launch. progress[1]: how many look no more."""
    if gl.atomic_add(progress_ptr + 1, 1) == PROGRAMS - 1:
        gl.store(progress_ptr, 0)
        gl.store(progress_ptr + 1, 0)


@gluon.jit
def load_tiles(
    a_desc, b_desc, a_smem, b_smem, ready, free, progress_ptr, count_ptr, first, chunk, other, width,
    COUNTS_DEPTH: gl.constexpr, A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, PACE: gl.constexpr,
):  # fmt: skip
    """The loading warp: a's two halves and b of every step. DEPTH_FIRST: the depth is the matrix's first axis.

    Parts of tiles, whose depths differ, are not paced.
    """
    i = 0
    patience = gl.to_tensor(PATIENCE)
    _rows, row_tiles, column_tiles, steps = extents(count_ptr, first, chunk, other, width, COUNTS_DEPTH, BM, BN, BK)
    tiles = row_tiles * column_tiles
    units = units_of(tiles, steps, PROGRAMS, SPLIT)
    begins, programs = share_of(units, row_tiles, column_tiles, GROUP, PROGRAMS, SPLIT, PACE)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    for unit in range(begins, units, programs):
        tile, begin, depth, is_part = unit_of(unit, tiles, steps, PROGRAMS, SPLIT)
        m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
        for k in range(begin, begin + depth):
            if PACE:
                looks = k % PACE == 0
                if SPLIT:
                    looks &= ~is_part
                if looks:
                    patience = keep_pace(progress_ptr, patience, unit, k, tiles, steps, programs, PACE)
            slot = i % STAGES
            mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            for half in gl.static_range(2):
                row = m * BM + half * (BM // 2)
                if A_DEPTH_FIRST:
                    tma_load(a_desc, [k * BK, row], bar, a_smem.index(2 * slot + half))
                else:
                    tma_load(a_desc, [row, k * BK], bar, a_smem.index(2 * slot + half))
            if B_DEPTH_FIRST:
                tma_load(b_desc, [k * BK, n * BN], bar, b_smem.index(slot))
            else:
                tma_load(b_desc, [n * BN, k * BK], bar, b_smem.index(slot))
            i += 1
    if PACE:
        end_pace(progress_ptr, PROGRAMS)


@gluon.jit
def multiply(
    a_smem, b_smem, ready, free, turn, turns, done, depth,
    HALF: gl.constexpr, A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SKEW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One group's half of one of the program's units, [BM/2, BN] in float32: ``depth`` steps, after ``done``. The last
    one is still under way: :func:`finished` waits for it, and what comes before that takes no time.

    Units of fewer steps than stages are not paced: the first group could be two turns ahead, and a turn's two phases
    could no longer be told apart. ``turns``: paced units before this one.
    """
    paced = depth >= STAGES
    if HALF == 1:
        mbarrier.wait(turn, turns & 1, pred=paced)
    total = gl.zeros((BM // 2, BN), gl.float32, layout)
    for k in range(depth):
        i = done + k
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        a = a_smem.index(2 * slot + HALF)
        b = b_smem.index(slot)
        if A_DEPTH_FIRST:
            a = a.permute((1, 0))
        if not B_DEPTH_FIRST:
            b = b.permute((1, 0))
        total = warpgroup_mma(a, b, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=k > 0)
        if HALF == 0:
            mbarrier.arrive(turn, pred=paced & (k == SKEW))
    return total


@gluon.jit
def finished(total, free, done, depth, STAGES: gl.constexpr):
    """The result of :func:`multiply`."""
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(free.index((done + depth + STAGES - 1) % STAGES), pred=depth > 0)
    return total


@gluon.jit
def piece_of(tile, INDEX: gl.constexpr, PIECES: gl.constexpr):
    """One of 1, 2, 4 or 8 pieces of a tile's columns: an epilogue of many values goes by pieces, for its registers."""
    if PIECES == 1:
        return tile
    else:
        left, right = gl.split(gl.permute(gl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))
        if INDEX < PIECES // 2:
            return piece_of(left, INDEX, PIECES // 2)
        else:
            return piece_of(right, INDEX - PIECES // 2, PIECES // 2)


@gluon.jit
def put(
    desc, stage, piece, row, column, INDEX: gl.constexpr, PIECES: gl.constexpr, ADD: gl.constexpr, TURNED: gl.constexpr
):
    """A piece of a tile on its way to memory (or to be added to it); the tile starts at (row, column).

    It is staged, and what is staged leaves when the stage is full. TURNED: it is staged transposed, as memory has it.
    """
    WIDTH: gl.constexpr = piece.shape[1]
    FULL: gl.constexpr = stage.shape[0 if TURNED else 1] // WIDTH
    if INDEX % FULL == 0:
        tma.store_wait(0)  # until what was staged before has been read
    stage_piece(stage, piece.to(desc.dtype), INDEX % FULL, TURNED)
    if INDEX % FULL == FULL - 1:
        fence_async_shared()
        place = column + (INDEX // FULL) * (FULL * WIDTH)
        if ADD:
            tma_add(desc, [place, row] if TURNED else [row, place], stage)
        else:
            tma_store(desc, [place, row] if TURNED else [row, place], stage)


@gluon.jit
def stage_piece(stage, piece, INDEX: gl.constexpr, TURNED: gl.constexpr):
    """A piece to its place in a stage, which holds one or several."""
    WIDTH: gl.constexpr = piece.shape[1]
    if TURNED:
        stage.slice(INDEX * WIDTH, WIDTH, dim=0).permute((1, 0)).store(piece)
    elif stage.shape[1] == WIDTH:
        stage.store(piece)
    else:
        stage.slice(INDEX * WIDTH, WIDTH, dim=1).store(piece)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """ready, free and turn."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    mbarrier.init(turn, count=1)
    fence_async_shared()
    return ready, free, turn


@gluon.jit
def pairs_of_barriers(SLOTS: gl.constexpr):
    """So many and so many, at each of which one group or warp arrives."""
    first = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(first.index(i), count=1)
        mbarrier.init(second.index(i), count=1)
    fence_async_shared()
    return first, second


@gluon.jit
def extents(
    count_ptr, first, chunk, other, width,
    COUNTS_DEPTH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """How many rows of the chunk exist, and the product's row tiles, column tiles and steps.

    These rows are the height of its result, ``other`` its depth, or with COUNTS_DEPTH the other way round. Every group
    reads the count for itself: what groups are handed beside the kernel's arguments goes through shared memory.
    """
    rows = gl.minimum(gl.maximum(gl.load(count_ptr) - first, 0), chunk)
    height = rows
    depth = other
    if COUNTS_DEPTH:
        height = other
        depth = rows
    return rows, (height + BM - 1) // BM, (width + BN - 1) // BN, (depth + BK - 1) // BK


# ---------------------------------------------------------------------------------------------------------------------
# The first product


@gluon.jit
def row_values(pointer, row, mask, other: gl.constexpr):
    return gl.load(pointer + row, mask=mask, other=other)


@gluon.jit
def exp2(x):
    """2ˣ by the instruction itself, subnormal results being 0. In Triton 3.6 gl.exp2 comes to the same, but through a
    library that LLVM links and inlines for every element: a fifth of its time with the first product."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(t):
    """tanh in float32: an odd polynomial near 0, where 1 − e⁻²ᵗ would cancel."""
    magnitude = gl.abs(t)
    square = t * t
    small = t * (
        1.0 + square * (-0.333333333 + square * (0.133333333 + square * (-0.0539682540 + square * 0.0218694885)))
    )
    decay = exp2(magnitude * LOG2E * -2.0)
    large = (1.0 - decay) / (1.0 + decay)
    return gl.where(magnitude < 0.15, small, gl.where(t < 0, -large, large))


@gluon.jit
def known_piece(
    z, row, column, target, anchor, log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr,
    sigma_ptr, class_weight_ptr, rows, chunk, start, columns, cap,
    HAS_CAP: gl.constexpr, HAS_CLASS: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_GAMMA: gl.constexpr,
    HAS_DELTA: gl.constexpr, HAS_SIGMA: gl.constexpr,
):  # fmt: skip
    """The gradient's matrix from logits whose lse is known: see numerics.KnownRows."""
    inside = row < chunk
    gap = (z - anchor[:, None]) - row_values(log_total_ptr, row, inside, 0.0)[:, None]
    e = exp2(gap * LOG2E)
    if HAS_ALPHA:
        coefficient = row_values(alpha_ptr, row, inside, 0.0)[:, None]
        if HAS_GAMMA:
            gamma = row_values(gamma_ptr, row, inside, 0.0)[:, None]
            coefficient = coefficient + gamma * gl.maximum(gap, LOWEST_GAP)
        if HAS_DELTA:
            coefficient = coefficient + row_values(delta_ptr, row, inside, 0.0)[:, None] * e
        e = e * coefficient
    if HAS_SIGMA:
        sigma = row_values(sigma_ptr, row, inside, 0.0)[:, None]
        if HAS_CLASS:
            sigma = sigma * gl.load(class_weight_ptr + start + column, mask=column < columns, other=0.0)[None, :]
        e = e - sigma
    if HAS_CAP:
        e = e * (1.0 - (z / cap) * (z / cap))
    e = e * row_values(factor_ptr, row, inside, 0.0)[:, None]
    is_target = (start + column)[None, :] == target[:, None]
    e = gl.where(is_target, row_values(target_value_ptr, row, inside, 0.0)[:, None], e)
    return gl.where((row < rows)[:, None], e, 0.0)


@gluon.jit
def known_shift(anchor, log_total):
    """lse · log2 e, and the factor that puts its rounding right: exp2(z · log2 e − shift) · right is p.

    The larger product is made by multiply-adds alone: a compiler that fuses others changes nothing.
    """
    total2 = log_total * LOG2E
    shift = gl.fma(anchor, LOG2E, total2)
    lost = gl.where(gl.abs(anchor) < CORRECTED_ANCHOR, gl.fma(anchor, LOG2E, -shift) + total2, 0.0)
    return shift, exp2(-lost)


@gluon.jit
def plain_known_piece(z, entry, target, shift, factor, target_value, edge):
    """:func:`known_piece` with factor and target alone, as :func:`anchored_piece` one multiply-add an element."""
    layout: gl.constexpr = target.type.layout
    shift = gl.convert_layout(shift, layout)
    e = exp2(gl.fma(z, LOG2E, -shift[:, None])) * gl.convert_layout(factor, layout)[:, None]
    if edge:
        e = gl.where(entry[None, :] == target[:, None], gl.convert_layout(target_value, layout)[:, None], e)
    return e


@gluon.jit
def anchored_piece(z, entry, here, target, anchor, edge, ENTROPY: gl.constexpr, STATISTICS: gl.constexpr):
    """e = exp(z − anchor), 0 at the target; its sums per row; with ENTROPY the sums of e (z − anchor); with STATISTICS
    those of (SQUARED_SCALE e)².

    One multiply-add an element: exp2(z · log2 e − a · log2 e), where the rounding of a · log2 e is put right per row.
    """
    anchor = gl.maximum(anchor, LOWEST_ANCHOR)
    shift, right = known_shift(anchor, 0.0)
    e = exp2(gl.fma(z, LOG2E, -shift[:, None]))
    if edge:
        e = gl.where((entry[None, :] == target[:, None]) | ~here[None, :], 0.0, e)
    gaps = right
    if ENTROPY:
        gaps = gl.sum(e * gl.maximum(z - anchor[:, None], LOWEST_GAP), 1) * right
    squares = right
    if STATISTICS:
        squares = gl.sum(e * e, 1) * (right * SQUARED_SCALE) * (right * SQUARED_SCALE)
    return e, gl.sum(e, 1) * right, gaps, squares


@gluon.jit
def extremes(z, entry, here):
    """Largest logit of each row, the first entry that has it, and the smallest."""
    above = gl.where(here[None, :], z, float("-inf"))
    highest = gl.max(above, 1)
    first = gl.min(gl.where(above == highest[:, None], entry[None, :], BIGGEST_INDEX), 1)
    return highest, first, gl.min(gl.where(here[None, :], z, float("inf")), 1)


@gluon.jit
def logits_tiles(
    e_desc, x_smem, w_smem, staging, ready, free, turn, bias_ptr, class_weight_ptr, row_target_ptr, anchor_ptr,
    sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr,
    log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr,
    count_ptr, first, chunk, size, start, columns, scale, cap, HALF: gl.constexpr,
    MODE: gl.constexpr, ENTROPY: gl.constexpr, STATISTICS: gl.constexpr, SUM_LOGITS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_CAP: gl.constexpr, HAS_CLASS: gl.constexpr,
    HAS_ALPHA: gl.constexpr, HAS_GAMMA: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_SIGMA: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SKEW: gl.constexpr, PIECES: gl.constexpr, LENT: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    """A multiplying group of :func:`logits_kernel`: products, then everything kernels.logits_kernel makes of them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    WIDTH: gl.constexpr = BN // PIECES
    PLAIN: gl.constexpr = MODE == KNOWN and not (HAS_CAP or HAS_ALPHA or HAS_SIGMA)
    rows, row_tiles, column_tiles, steps = extents(count_ptr, first, chunk, size, columns, False, BM, BN, BK)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    turns = gl.to_tensor(0)  # tiles before this one
    next_m, next_n = tile_of(gl.program_id(0), row_tiles, column_tiles, reciprocal, GROUP)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        m = next_m
        n = next_n
        top = m * BM + HALF * (BM // 2)
        row = top + gl.arange(0, BM // 2, layout=row_layout)
        inside = row < chunk
        # Asked for here, waited for after the products.
        target = gl.load(row_target_ptr + row, mask=inside, other=-1)
        anchor = gl.load(anchor_ptr + row, mask=inside, other=NO_ROW)
        if PLAIN:
            log_total = gl.load(log_total_ptr + row, mask=row < rows, other=0.0)
            factor = gl.load(factor_ptr + row, mask=row < rows, other=0.0)
            target_value = gl.load(target_value_ptr + row, mask=row < rows, other=0.0)
        whole = multiply(
            x_smem, w_smem, ready, free, turn, turns, turns * steps, steps, HALF, False, TURNED, BM, BN, STAGES, SKEW,
            layout,
        )  # fmt: skip
        next_m, next_n = tile_of(tile + PROGRAMS, row_tiles, column_tiles, reciprocal, GROUP)
        whole = finished(whole, free, turns * steps, steps, STAGES)
        # Few tiles hold a target or the end of the vocabulary: the others skip two comparisons an element.
        local = target - (start + n * BN)
        hits = gl.sum(((local >= 0) & (local < BN)).to(gl.int32), 0)
        edge = (hits > 0) | (n * BN + BN > columns)
        sums = gl.zeros((BM // 2,), gl.float32, row_layout)
        gap_sums = sums
        square_sums = sums
        logit_sums = sums
        highest = sums + float("-inf")
        lowest = sums + float("inf")
        best = gl.zeros((BM // 2,), gl.int32, row_layout)
        if PLAIN:
            shift, right = known_shift(anchor, log_total)
            shift = gl.where(row < rows, shift, NO_ROW)
            factor *= right
        for q in gl.static_range(PIECES):
            z = piece_of(whole, q, PIECES)
            column = n * BN + q * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, z.type.layout))
            here = column < columns
            target_q = gl.convert_layout(target, gl.SliceLayout(1, z.type.layout))
            anchor_q = gl.convert_layout(anchor, gl.SliceLayout(1, z.type.layout))
            if HAS_BIAS:
                z += gl.load(bias_ptr + start + column, mask=here, other=0.0).to(gl.float32)[None, :]
            if HAS_SCALE:
                z = z * scale
            if HAS_CAP:
                z = cap * tanh(z / cap)
            if PLAIN:
                e = plain_known_piece(z, start + column, target_q, shift, factor, target_value, edge)
            elif MODE == KNOWN:
                e = known_piece(
                    z, gl.convert_layout(row, target_q.type.layout), column, target_q, anchor_q, log_total_ptr,
                    factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr, class_weight_ptr, rows,
                    chunk, start, columns, cap, HAS_CAP, HAS_CLASS, HAS_ALPHA, HAS_GAMMA, HAS_DELTA, HAS_SIGMA,
                )  # fmt: skip
            else:
                e, s, gaps, squares = anchored_piece(
                    z, start + column, here, target_q, anchor_q, edge, ENTROPY, STATISTICS
                )  # fmt: skip
                sums += gl.convert_layout(s, row_layout)
                if ENTROPY:
                    gap_sums += gl.convert_layout(gaps, row_layout)
                if STATISTICS:
                    square_sums += gl.convert_layout(squares, row_layout)
                    top_q, first_q, low_q = extremes(z, start + column, here)
                    top_q = gl.convert_layout(top_q, row_layout)
                    best = gl.where(top_q > highest, gl.convert_layout(first_q, row_layout), best)
                    highest = gl.maximum(highest, top_q)
                    lowest = gl.minimum(lowest, gl.convert_layout(low_q, row_layout))
                if SUM_LOGITS:
                    weighed = gl.where(here[None, :], z, 0.0)
                    if HAS_CLASS:
                        weighed *= gl.load(class_weight_ptr + start + column, mask=here, other=0.0)[None, :]
                    logit_sums += gl.convert_layout(gl.sum(weighed, 1), row_layout)
                if HAS_CAP and MODE == ANCHORED:
                    e = e * (1.0 - (z / cap) * (z / cap))
                if MODE == HELD:
                    e = held_of(z - gl.maximum(anchor_q, LOWEST_ANCHOR)[:, None], e_desc.dtype)
            if MODE != SUMS:
                put(e_desc, staging.index(HALF), e, top, n * BN, q, PIECES, False, LENT)
        if MODE != KNOWN:
            line = n * chunk + row
            gl.store(sum_ptr + line, sums, mask=inside)
            if ENTROPY:
                gl.store(gap_ptr + line, gap_sums, mask=inside)
            if STATISTICS:
                gl.store(highest_ptr + line, highest, mask=inside)
                gl.store(argmax_ptr + line, best, mask=inside)
                gl.store(lowest_ptr + line, lowest, mask=inside)
                gl.store(squares_ptr + line, square_sums, mask=inside)
            if SUM_LOGITS:
                gl.store(logit_sum_ptr + line, logit_sums, mask=inside)
        turns += 1
    if MODE != SUMS:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "chunk", "start"])
def logits_kernel(
    x_desc, w_desc, e_desc, w_ptr, bias_ptr, class_weight_ptr, row_target_ptr, anchor_ptr, count_ptr,
    sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr,
    log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr,
    first, chunk, size, w_stride, start, columns, scale, cap,
    MODE: gl.constexpr, ENTROPY: gl.constexpr, STATISTICS: gl.constexpr, SUM_LOGITS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_CAP: gl.constexpr, HAS_CLASS: gl.constexpr,
    HAS_ALPHA: gl.constexpr, HAS_GAMMA: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_SIGMA: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SKEW: gl.constexpr, REGISTERS: gl.constexpr,
    PIECES: gl.constexpr, LENT: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """kernels.logits_kernel: z = f(x wᵀ + b) for entries start ≤ j < start + columns, never stored; sums and e of it.

    The arguments are the same (w_ptr and w_stride are what a kernel without descriptors reads). LENT: e_desc describes
    eᵀ, which lies in dW's rows (products.matrix_of).
    """
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, BM // 2, BK], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BK, BN] if TURNED else [STAGES, BN, BK], w_desc.layout)
    staging = x_smem
    if MODE != SUMS:
        staging = gl.allocate_shared_memory(e_desc.dtype, [2, BN, BM // 2] if LENT else [2, BM // 2, BN], e_desc.layout)
    ready, free, turn = barriers(STAGES)
    gl.warp_specialize(
        [
            (logits_tiles, (
                e_desc, x_smem, w_smem, staging, ready, free, turn, bias_ptr, class_weight_ptr, row_target_ptr,
                anchor_ptr, sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr,
                log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr,
                count_ptr, first, chunk, size, start, columns, scale, cap, 0,
                MODE, ENTROPY, STATISTICS, SUM_LOGITS, HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_CLASS, HAS_ALPHA, HAS_GAMMA,
                HAS_DELTA, HAS_SIGMA, BM, BN, BK, GROUP, PROGRAMS, STAGES, SKEW, PIECES, LENT,
                TURNED,
            )),
            (logits_tiles, (
                e_desc, x_smem, w_smem, staging, ready, free, turn, bias_ptr, class_weight_ptr, row_target_ptr,
                anchor_ptr, sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr,
                log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr,
                count_ptr, first, chunk, size, start, columns, scale, cap, 1,
                MODE, ENTROPY, STATISTICS, SUM_LOGITS, HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_CLASS, HAS_ALPHA, HAS_GAMMA,
                HAS_DELTA, HAS_SIGMA, BM, BN, BK, GROUP, PROGRAMS, STAGES, SKEW, PIECES, LENT,
                TURNED,
            )),
            (load_tiles, (
                x_desc, w_desc, x_smem, w_smem, ready, free, None, count_ptr, first, chunk, size, columns, False,
                False, TURNED, BM, BN, BK, GROUP, PROGRAMS, STAGES, False, 0,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The two products of the gradients


@gluon.jit
def scale_rows(
    value, row, column, mask, exists, factor_ptr, target_value_ptr, row_target_ptr, target_w_ptr, target_w_stride,
    TURNED: gl.constexpr,
):  # fmt: skip
    """factor ⊙ value + target_value ⊙ w_y: the row factors, and the target's element, which is 0 in e."""
    value = value * gl.load(factor_ptr + row, mask=exists, other=0.0)[:, None]
    target = gl.load(row_target_ptr + row, mask=exists, other=0).to(gl.int64)
    entry = gl.maximum(target, 0)
    if TURNED:
        entry = row.to(gl.int64)
    w_place = target_w_ptr + entry[:, None] * target_w_stride + column[None, :]
    share = gl.load(target_value_ptr + row, mask=exists, other=0.0)
    return value + share[:, None] * gl.load(w_place, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def hidden_piece(
    value, m, n, inner_top, inner_left, rows, is_part, part, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr,
    row_target_ptr, order_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr, first, size, target_w_stride,
    ADD: gl.constexpr, FINAL: gl.constexpr, WAITS: gl.constexpr, ROWS: gl.constexpr, SMOOTH: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """A piece of the tile (m, n), stored if it is a part's or finished; else what is to be summed.

    Where it lies within the tile is no constant, so that it is one function for all pieces of both groups.
    """
    inner_row = inner_top + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
    inner_column = inner_left + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    row = m * BM + inner_row
    column = n * BN + inner_column
    exists = row < rows
    mask = exists[:, None] & (column < size)[None, :]
    if SPLIT and is_part:
        gl.store(part + inner_row[:, None] * BN + inner_column[None, :], value)
    else:
        if ROWS:
            value = scale_rows(
                value, row, column, mask, exists, factor_ptr, target_value_ptr, row_target_ptr, target_w_ptr,
                target_w_stride, TURNED,
            )  # fmt: skip
        position = first + row
        place = position.to(gl.int64)[:, None] * size + column[None, :]
        if WAITS:
            token = gl.load(order_ptr + position, mask=exists, other=0).to(gl.int64)
            put_waiting(out_ptr + token[:, None] * size + column[None, :], low_ptr, place, value, mask)
        if FINAL:
            if ADD:
                value += gl.load(sum_ptr + place, mask=mask, other=0.0)
            token = gl.load(order_ptr + position, mask=exists, other=0).to(gl.int64)
            if SMOOTH:
                weights = gl.load(weighted_rows_ptr + column, mask=column < size, other=0.0)
                value += gl.load(smooth_ptr + token, mask=exists, other=0.0)[:, None] * weights[None, :]
            result = (value * gl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
            gl.store(out_ptr + token[:, None] * size + column[None, :], result, mask=mask)
    return value


@gluon.jit
def hidden_tiles(
    sum_desc, staging, e_smem, w_smem, ready, free, turn, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr,
    row_target_ptr, order_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr, parts_ptr,
    count_ptr, first, chunk, columns, size, target_w_stride, HALF: gl.constexpr,
    ADD: gl.constexpr, FINAL: gl.constexpr, WAITS: gl.constexpr, ROWS: gl.constexpr, SMOOTH: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, SKEW: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr, PACE: gl.constexpr,
    LENT: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """A multiplying group of :func:`hidden_kernel`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    rows, row_tiles, column_tiles, steps = extents(count_ptr, first, chunk, columns, size, False, BM, BN, BK)
    tiles = row_tiles * column_tiles
    units = units_of(tiles, steps, PROGRAMS, SPLIT)
    begins, programs = share_of(units, row_tiles, column_tiles, GROUP, PROGRAMS, SPLIT, PACE)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    turns = gl.to_tensor(0)  # units before this one
    for unit in range(begins, units, programs):
        tile, _, depth, is_part = unit_of(unit, tiles, steps, PROGRAMS, SPLIT)
        m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
        whole = multiply(
            e_smem, w_smem, ready, free, turn, turns, turns * steps, depth, HALF, LENT, not TURNED, BM, BN, STAGES,
            SKEW, layout,
        )  # fmt: skip
        whole = finished(whole, free, turns * steps, depth, STAGES)
        part = parts_ptr
        if SPLIT:
            part += (unit - tiles // PROGRAMS * PROGRAMS) * (BM * BN)
        top = first + m * BM + HALF * (BM // 2)
        for q in gl.static_range(PIECES):
            value = hidden_piece(
                piece_of(whole, q, PIECES), m, n, gl.to_tensor(HALF * (BM // 2)), gl.to_tensor(q * (BN // PIECES)),
                rows, is_part, part, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr, row_target_ptr, order_ptr,
                scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr, first, size, target_w_stride,
                ADD, FINAL, WAITS, ROWS, SMOOTH, BM, BN, SPLIT, TURNED,
            )  # fmt: skip
            if not (FINAL or WAITS) and not (SPLIT and is_part):
                put(sum_desc, staging.index(HALF), value, top, n * BN, q, PIECES, ADD, False)
        turns += 1
    if not (FINAL or WAITS):
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "chunk"])
def hidden_kernel(
    e_desc, w_desc, w_ptr, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr, row_target_ptr, order_ptr,
    count_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr,
    first, chunk, columns, size, target_w_stride, target_w_ptr, parts_ptr, sum_desc, progress_ptr,
    ADD: gl.constexpr, FINAL: gl.constexpr, WAITS: gl.constexpr, ROWS: gl.constexpr, SMOOTH: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, SKEW: gl.constexpr, REGISTERS: gl.constexpr, PIECES: gl.constexpr,
    SPLIT: gl.constexpr, PARTS: gl.constexpr, PACE: gl.constexpr, LENT: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """kernels.hidden_kernel, with the same arguments: dX of a chunk from S vocabulary entries.

    Beside its arguments: the sum's descriptor, so that the memory itself adds; with SPLIT ``parts`` [PROGRAMS, BM, BN],
    where the parts of split tiles are left for kernels.combine_hidden_kernel; and with PACE ``progress`` [2], zeros
    before and after. LENT: e_desc describes eᵀ.
    """
    e_smem = gl.allocate_shared_memory(
        e_desc.dtype, [2 * STAGES, BK, BM // 2] if LENT else [2 * STAGES, BM // 2, BK], e_desc.layout
    )
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK] if TURNED else [STAGES, BK, BN], w_desc.layout)
    staging = e_smem
    if not (FINAL or WAITS):
        staging = gl.allocate_shared_memory(gl.float32, [2, BM // 2, BN // PARTS], sum_desc.layout)
    ready, free, turn = barriers(STAGES)
    gl.warp_specialize(
        [
            (hidden_tiles, (
                sum_desc, staging, e_smem, w_smem, ready, free, turn, sum_ptr, out_ptr, low_ptr, factor_ptr,
                target_value_ptr, row_target_ptr, order_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr,
                parts_ptr, count_ptr, first, chunk, columns, size, target_w_stride, 0, ADD, FINAL, WAITS, ROWS, SMOOTH,
                BM, BN, BK, GROUP, PROGRAMS, STAGES, SKEW, PIECES, SPLIT, PACE, LENT, TURNED,
            )),
            (hidden_tiles, (
                sum_desc, staging, e_smem, w_smem, ready, free, turn, sum_ptr, out_ptr, low_ptr, factor_ptr,
                target_value_ptr, row_target_ptr, order_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr,
                parts_ptr, count_ptr, first, chunk, columns, size, target_w_stride, 1, ADD, FINAL, WAITS, ROWS, SMOOTH,
                BM, BN, BK, GROUP, PROGRAMS, STAGES, SKEW, PIECES, SPLIT, PACE, LENT, TURNED,
            )),
            (load_tiles, (
                e_desc, w_desc, e_smem, w_smem, ready, free, progress_ptr, count_ptr, first, chunk, columns,
                size, False, LENT, not TURNED, BM, BN, BK, GROUP, PROGRAMS, STAGES, SPLIT, PACE,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def targets_of(bounds_ptr, m, exists, BM: gl.constexpr):
    """Where the targets of row tile m begin and end in the sorted list (products.Targets)."""
    place = bounds_ptr + m * (BM // TARGET_GRAIN)
    return gl.load(place, mask=exists, other=0), gl.load(place + BM // TARGET_GRAIN, mask=exists, other=0)


@gluon.jit
def load_targets(
    gathered, filled, spent, token_ptr, bounds_ptr, hidden_ptr, hidden_stride, count_ptr, first, chunk, columns, size,
    TARGETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The gathering warps: hidden states of the tokens whose targets lie in a tile, TARGET_STEP tokens a step."""
    if TARGETS:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [GATHERING_WARPS, 1], [1, 0])
        _rows, row_tiles, column_tiles, _steps = extents(count_ptr, first, chunk, columns, size, True, BM, BN, BK)
        reciprocal = reciprocal_of(column_tiles, GROUP)
        step = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
            m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
            begin, end = targets_of(bounds_ptr, m, True, BM)
            column = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            for place in range(begin, end, TARGET_STEP):
                i = place + gl.arange(0, TARGET_STEP, layout=gl.SliceLayout(1, layout))
                token = gl.load(token_ptr + i, mask=i < end, other=0).to(gl.int64)
                mask = (i < end)[:, None] & (column < size)[None, :]
                x = gl.load(hidden_ptr + token[:, None] * hidden_stride + column[None, :], mask=mask, other=0.0)
                slot = step % TARGET_SLOTS
                mbarrier.wait(spent.index(slot), ((step // TARGET_SLOTS) & 1) ^ 1)
                gathered.index(slot).store(x)
                fence_async_shared()
                mbarrier.arrive(filled.index(slot))
                step += 1


@gluon.jit
def target_step(key_ptr, value_ptr, place, end, left: gl.constexpr):
    """Entries and values of the next TARGET_STEP places; −1 and 0 behind the last."""
    i = place + gl.arange(0, TARGET_STEP, layout=gl.SliceLayout(0, left))
    return gl.load(key_ptr + i, mask=i < end, other=-1), gl.load(value_ptr + i, mask=i < end, other=0.0)


@gluon.jit
def multiply_targets(
    total, gathered, filled, spent, key_ptr, value_ptr, key, value, begin, end, done, top, left: gl.constexpr
):
    """total + Σ value_i x_i over the places begin ≤ i < end, each in its target's row; and how many steps are done.

    ``key`` and ``value`` are the first step's. value goes in as two bf16 numbers, which loses 2⁻¹⁸ of it at most. The
    hidden state x_i is exact.
    """
    entry = top + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, left))
    for place in range(begin, end, TARGET_STEP):
        a = gl.where(entry[:, None] == key[None, :], value[None, :], 0.0)
        key, value = target_step(key_ptr, value_ptr, place + TARGET_STEP, end, left)
        high = a.to(gathered.dtype)
        low = (a - high.to(gl.float32)).to(gathered.dtype)
        slot = done % TARGET_SLOTS
        mbarrier.wait(filled.index(slot), (done // TARGET_SLOTS) & 1)
        total = warpgroup_mma(high, gathered.index(slot), total, is_async=True)
        total = warpgroup_mma(low, gathered.index(slot), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(spent.index(slot))
        done += 1
    return total, done


@gluon.jit
def put_aside(stage, staged, emptied, turns, piece, INDEX: gl.constexpr, PIECES: gl.constexpr, TURNED: gl.constexpr):
    """A piece of a tile into shared memory, for :func:`store_over` to store; ``turns``: tiles before this one."""
    if INDEX == 0:
        mbarrier.wait(emptied, (turns & 1) ^ 1)
    stage_piece(stage, piece.to(stage.dtype), INDEX, TURNED)
    if INDEX == PIECES - 1:
        fence_async_shared()
        mbarrier.arrive(staged)


@gluon.jit
def store_over(
    out_desc, staging, staged, emptied, counter_ptr, count_ptr, first, chunk, columns, size,
    LENT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """The storing warp of dW in place. A half of a tile is stored over rows of eᵀ when the programs of all column tiles
    have read them: each counts itself in ``counter`` [2 · row tiles] when its last step's operands have come.

    The multiplying groups do not wait for that, but work on their next tile. Nobody waits for ever: the launch is
    cooperative, so all programs run at a time, or it fails. They take tiles in ascending order, and tiles of one row
    are neighbours. So of the rows that are not complete, the first one's tiles wait for nothing but their own products.
    """
    if LENT:
        _rows, row_tiles, column_tiles, _steps = extents(count_ptr, first, chunk, columns, size, True, BM, BN, BK)
        reciprocal = reciprocal_of(column_tiles, GROUP)
        phase = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
            m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
            for half in gl.static_range(2):
                mbarrier.wait(staged.index(half), phase)
                counter = counter_ptr + 2 * m + half
                while gl.load(counter, volatile=True) < column_tiles:
                    pass
                gl.atomic_add(counter, 0, sem="acquire")
                # Orders what is known by now before the accelerator's store.
                gl.inline_asm_elementwise(
                    "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                )
                top = m * BM + half * (BM // 2)
                tma_store(out_desc, [n * BN, top] if TURNED else [top, n * BN], staging.index(half))
                tma.store_wait(0)
                mbarrier.arrive(emptied.index(half))
            phase ^= 1


@gluon.jit
def move_sums(
    high_desc, low_desc, high_slots, low_slots, loaded, added, count_ptr, first, chunk, columns, size,
    ADD: gl.constexpr, FINAL: gl.constexpr, SLOTS: gl.constexpr, LOW_BITS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """The warp that moves a sum over chunks, piece by piece of both halves of the tiles: into shared memory, ahead of
    :func:`add_piece`, and back. So the multiplying groups wait for no store. The descriptors are of pairs of elements
    (:func:`sum_of_pairs`). Without ADD nothing comes in. With FINAL the result goes out, where the upper bits lay."""
    if SLOTS > 0:
        WIDTH: gl.constexpr = BN // PIECES
        _rows, row_tiles, column_tiles, _steps = extents(count_ptr, first, chunk, columns, size, True, BM, BN, BK)
        reciprocal = reciprocal_of(column_tiles, GROUP)
        tiles = row_tiles * column_tiles
        pieces = gl.maximum(gl.cdiv(tiles - gl.program_id(0), PROGRAMS), 0) * PIECES
        for i in range(pieces + SLOTS):
            slot = i % SLOTS
            back = i - SLOTS  # the piece that the slots hold
            if back >= 0:
                tile = gl.program_id(0) + back // PIECES * PROGRAMS
                m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
                column = (n * BN + back % PIECES * WIDTH) // 2
                for half in gl.static_range(2):
                    mbarrier.wait(added.index(half * SLOTS + slot), (back // SLOTS) & 1)
                    row = m * BM + half * (BM // 2)
                    tma_store(high_desc, [row, column], high_slots.index(half * SLOTS + slot))
                    if not FINAL:
                        tma_store(low_desc, [row, column], low_slots.index(half * SLOTS + slot))
                tma.store_wait(0)
            if i < pieces:
                tile = gl.program_id(0) + i // PIECES * PROGRAMS
                m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
                column = (n * BN + i % PIECES * WIDTH) // 2
                for half in gl.static_range(2):
                    row = m * BM + half * (BM // 2)
                    bar = loaded.index(half * SLOTS + slot)
                    if ADD:
                        mbarrier.expect(bar, (BM // 2) * WIDTH * (16 + LOW_BITS) // 8)
                        tma_load(high_desc, [row, column], bar, high_slots.index(half * SLOTS + slot))
                        tma_load(low_desc, [row, column], bar, low_slots.index(half * SLOTS + slot))
                    else:
                        mbarrier.arrive(bar)


@gluon.jit
def store_or_move(
    out_desc, low_desc, staging, low_staging, staged, emptied, counter_ptr, count_ptr, first, chunk, columns, size,
    LENT: gl.constexpr, ADD: gl.constexpr, FINAL: gl.constexpr, SLOTS: gl.constexpr, LOW_BITS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    PIECES: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """The warp beside those that multiply and load operands: one of its two tasks, or none."""
    store_over(
        out_desc, staging, staged, emptied, counter_ptr, count_ptr, first, chunk, columns, size,
        LENT, BM, BN, BK, GROUP, PROGRAMS, TURNED,
    )  # fmt: skip
    move_sums(
        out_desc, low_desc, staging, low_staging, staged, emptied, count_ptr, first, chunk, columns, size,
        ADD, FINAL, SLOTS, LOW_BITS, BM, BN, BK, GROUP, PROGRAMS, PIECES,
    )  # fmt: skip


@gluon.jit
def add_piece(
    high_slots, low_slots, loaded, added, slot, phase, piece, scale,
    ADD: gl.constexpr, FINAL: gl.constexpr, LOW_BITS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """A piece of a product added to the sum over chunks that :func:`move_sums` loads and stores. With FINAL the sum
    times ``scale``, in the result's dtype, takes the place of the upper bits."""
    high = high_slots.index(slot)
    low = low_slots.index(slot)
    mbarrier.wait(loaded.index(slot), phase)
    first, second = gl.split(gl.reshape(piece, (piece.shape[0], piece.shape[1] // 2, 2)))
    layout: gl.constexpr = first.type.layout
    if ADD:
        first, second = sum_of_pairs(first, second, high.load(layout), low.load(layout).to(gl.int16), LOW_BITS)
    elif not FINAL:  # a sum that is NaN has no sign, as parts_of_pairs wants it
        first += 0.0
        second += 0.0
    if FINAL:
        high.store(pair_of(first * scale, second * scale, OUT))
    else:
        upper, lower = parts_of_pairs(first, second, LOW_BITS)
        high.store(upper)
        low.store(lower.to(low.dtype))
    fence_async_shared()
    mbarrier.arrive(added.index(slot))


# How the sums of a pair are made of $4, their upper bits, and c, the lower ones of both: the next 8 of each, or in the
# lower byte the next 4 of each, as portable.halves_of_byte puts them; and c of the sums. Bytes are moved, where shifts
# and masks take twice as many instructions.
JOIN_PAIR = {
    8: "prmt.b32 c, c, 0, 0x1404; prmt.b32 a, c, $4, 0x5410; prmt.b32 b, c, $4, 0x7632;",
    4: "shl.b32 a, c, 8; shl.b32 b, c, 12; and.b32 a, a, 0xf000; and.b32 b, b, 0xf000;"
    " prmt.b32 a, a, $4, 0x5410; prmt.b32 b, b, $4, 0x7610;",
}
LOWER_PAIR = {
    8: "prmt.b32 c, a, b, 0x0051;",
    4: "shr.u32 c, b, 4; lop3.b32 c, a, c, 0xf000, 0xe4; shr.u32 c, c, 8;",
}


def sum_assembly(bits):
    """The instructions of :func:`sum_of_pairs`."""
    return gl.constexpr(f"""
        {{
        .reg .b32 a, b, c;
        cvt.u32.u16 c, $5;
        {JOIN_PAIR[bits]}
        add.rn.f32 $0, a, $2;
        add.rn.f32 $1, b, $3;
        }}
        """)


def parts_assembly(bits):
    """The instructions of :func:`parts_of_pairs`."""
    half = 1 << (15 - bits)  # of the last bit
    return gl.constexpr(f"""
        {{
        .reg .b32 a, b, c;
        min.s32 a, $2, {0x7FFFFFFF - half:#x};
        min.s32 b, $3, {0x7FFFFFFF - half:#x};
        add.s32 a, a, {half:#x};
        add.s32 b, b, {half:#x};
        {LOWER_PAIR[bits]}
        prmt.b32 $0, a, b, 0x7632;
        cvt.u16.u32 $1, c;
        }}
        """)


WIDE_SUM, NARROW_SUM = sum_assembly(8), sum_assembly(4)
WIDE_PARTS, NARROW_PARTS = parts_assembly(8), parts_assembly(4)


@gluon.jit
def sum_of_pairs(first, second, high, low, LOW_BITS: gl.constexpr):
    """value + joined(high, low), two neighbours at a time: the upper 16 bits of both are an int32, the lower ones of
    both an int16."""
    return gl.inline_asm_elementwise(
        WIDE_SUM if LOW_BITS == 8 else NARROW_SUM,
        "=&f,=&f,f,f,r,h", [first, second, high, low], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def parts_of_pairs(first, second, LOW_BITS: gl.constexpr):
    """The parts of rounded(value), as :func:`sum_of_pairs` reads them. The values are sums.

    A sum that is NaN has all bits but the sign: min keeps it from running into the sign when half a unit is added.
    """
    return gl.inline_asm_elementwise(
        WIDE_PARTS if LOW_BITS == 8 else NARROW_PARTS,
        "=&r,=&h,r,r", [first.to(gl.int32, bitcast=True), second.to(gl.int32, bitcast=True)],
        dtype=(gl.int32, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pair_of(first, second, OUT: gl.constexpr):
    """Two neighbours, rounded to the dtype, as one int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == OUT else "cvt.rn.f16x2.f32 $0, $2, $1;",
        "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def put_low_piece(
    desc, stage, bits, row, column, INDEX: gl.constexpr, PIECES: gl.constexpr, TURNED: gl.constexpr,
    LOW_BITS: gl.constexpr,
):  # fmt: skip
    """The lower bits of a piece of a sum on their way to memory."""
    if LOW_BITS == 8:
        put(desc, stage, lower_bits(bits), row, column, INDEX, PIECES, False, TURNED)
    else:
        even, odd = gl.split(gl.reshape(bits, (bits.shape[0], bits.shape[1] // 2, 2)))
        put(desc, stage, halves_of_byte(even, odd), row, column // 2, INDEX, PIECES, False, False)


@gluon.jit
def piece_axes(top, left, layout: gl.constexpr, piece, INDEX: gl.constexpr):
    """The vocabulary entries and the columns of a tile's piece; the tile starts at (top, left)."""
    entry = top + gl.arange(0, piece.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, layout))
    return entry, left + INDEX * piece.shape[1] + column


@gluon.jit
def low_bits_of(low_ptr, entry, column, mask, width, TURNED: gl.constexpr, LOW_BITS: gl.constexpr):
    """The 8 bits below the upper 16 of a sum's elements (entry, column). If it has 4 of them, the others are 0: even
    columns have a byte's upper half, odd ones its lower half."""
    if LOW_BITS == 8:
        return gl.load(low_ptr + weight_place(entry, column, low_stride(width, 8), TURNED), mask=mask, other=0)
    else:
        both = gl.load(low_ptr + weight_place(entry, column // 2, low_stride(width, 4), False), mask=mask, other=0)
        return gl.where(column % 2 == 1, both << 4, both) & -16


@gluon.jit
def parts_of_sum(
    sum_ptr, low_ptr, top, left, start, columns, size, stride, piece, INDEX: gl.constexpr, TURNED: gl.constexpr,
    LOW_BITS: gl.constexpr,
):  # fmt: skip
    """The upper 16 and the next 8 bits of a sum's elements that belong to a tile's piece.

    A thread reads the elements whose sums it has, so a warp reads 16 bytes of each of 8 rows at a time, which is slow.
    """
    layout: gl.constexpr = piece.type.layout
    entry, column = piece_axes(top, left, layout, piece, INDEX)
    mask = (entry < columns)[:, None] & (column < size)[None, :]
    high_place = weight_place((start + entry)[:, None], column[None, :], stride, TURNED)
    high = gl.load(sum_ptr + high_place, mask=mask, other=0)
    return high, low_bits_of(low_ptr, (start + entry)[:, None], column[None, :], mask, stride, TURNED, LOW_BITS)


@gluon.jit
def weight_tiles(
    out_desc, low_desc, e_smem, x_smem, staging, low_staging, ready, free, turn, gathered, filled, spent, staged,
    emptied, sum_ptr, low_ptr, scale_ptr, class_weight_ptr, smooth_x_ptr, key_ptr, value_ptr, bounds_ptr, count_ptr,
    counter_ptr, first, chunk, start, columns, size, out_width,
    HALF: gl.constexpr, ADD: gl.constexpr, FINAL: gl.constexpr, INTO: gl.constexpr, PARTED: gl.constexpr,
    SMOOTH: gl.constexpr, HAS_CLASS: gl.constexpr, TARGETS: gl.constexpr, LOW_BITS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, SKEW: gl.constexpr, PIECES: gl.constexpr, LENT: gl.constexpr, TURNED: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """A multiplying group of :func:`weight_kernel`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    # A float32 buffer is added to by the memory, too; a narrow one is read, so that its sum is rounded once.
    IN_MEMORY: gl.constexpr = INTO and out_desc.dtype == gl.float32
    ADDS: gl.constexpr = (ADD and not FINAL) or IN_MEMORY
    SUMS: gl.constexpr = PARTED and ADD and SLOTS == 0
    like = piece_of(gl.zeros((BM // 2, BN), gl.float32, layout), 0, PIECES)  # of all pieces' shape and layout
    spread: gl.constexpr = like.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    OUT: gl.constexpr = x_smem.dtype
    _rows, row_tiles, column_tiles, steps = extents(count_ptr, first, chunk, columns, size, True, BM, BN, BK)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    tiles = row_tiles * column_tiles
    next_m, next_n = tile_of(gl.program_id(0), row_tiles, column_tiles, reciprocal, GROUP)
    if TARGETS:
        target_steps = 0
        begin, end = targets_of(bounds_ptr, next_m, gl.program_id(0) < tiles, BM)
    if FINAL:
        scale = gl.load(scale_ptr)
    turns = gl.to_tensor(0)  # tiles before this one
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        m = next_m
        n = next_n
        top = m * BM + HALF * (BM // 2)
        if TARGETS:  # asked for before the products, so that nobody waits for memory behind them
            key, value = target_step(key_ptr, value_ptr, begin, end, left)
        if SUMS:  # each piece is asked for before the work that comes before it
            next_high, next_low = parts_of_sum(
                sum_ptr, low_ptr, top, n * BN, start, columns, size, out_width, like, 0, TURNED, LOW_BITS
            )
        whole = multiply(
            e_smem, x_smem, ready, free, turn, turns, turns * steps, steps, HALF, not LENT or TURNED, True, BM, BN,
            STAGES, SKEW, layout,
        )  # fmt: skip
        next_m, next_n = tile_of(tile + PROGRAMS, row_tiles, column_tiles, reciprocal, GROUP)
        if TARGETS:
            next_begin, next_end = targets_of(bounds_ptr, next_m, tile + PROGRAMS < tiles, BM)
        whole = finished(whole, free, turns * steps, steps, STAGES)
        if TARGETS:
            whole, target_steps = multiply_targets(
                whole, gathered, filled, spent, key_ptr, value_ptr, key, value, begin, end, target_steps, top, left
            )
            begin = next_begin
            end = next_end
        if LENT:
            gl.atomic_add(counter_ptr + 2 * m + HALF, 1, sem="release")
        for q in gl.static_range(PIECES):
            value = piece_of(whole, q, PIECES)
            if SUMS:
                value += joined(next_high, next_low)
                if q + 1 < PIECES:
                    next_high, next_low = parts_of_sum(
                        sum_ptr,
                        low_ptr,
                        top,
                        n * BN,
                        start,
                        columns,
                        size,
                        out_width,
                        like,
                        q + 1,
                        TURNED,
                        LOW_BITS,
                    )
            if FINAL and SLOTS == 0:
                entry, column = piece_axes(top, n * BN, spread, like, q)
                mask = (entry < columns)[:, None] & (column < size)[None, :]
                place = weight_place((start + entry)[:, None], column[None, :], out_width, TURNED)
                if ADD and not INTO and not PARTED:
                    value += gl.load(sum_ptr + place, mask=mask, other=0.0)
                if SMOOTH:
                    smooth_x = gl.load(smooth_x_ptr + column, mask=column < size, other=0.0)[None, :]
                    if HAS_CLASS:
                        weights = gl.load(class_weight_ptr + start + entry, mask=entry < columns, other=0.0)
                        smooth_x = weights[:, None] * smooth_x
                    value -= smooth_x
                value = value * scale
                if INTO and not IN_MEMORY:
                    value += gl.load(sum_ptr + place, mask=mask, other=0.0).to(gl.float32)
            if LENT:
                put_aside(staging.index(HALF), staged.index(HALF), emptied.index(HALF), turns, value, q, PIECES, TURNED)
            elif SLOTS > 0:
                done = turns * PIECES + q
                slot = HALF * SLOTS + done % SLOTS
                add_piece(
                    staging, low_staging, staged, emptied, slot, (done // SLOTS) & 1, value, scale if FINAL else 1.0,
                    ADD, FINAL, LOW_BITS, OUT,
                )  # fmt: skip
            elif PARTED and not FINAL:
                bits = rounded(value, LOW_BITS)
                put(out_desc, staging.index(HALF), upper_bits(bits), top, n * BN, q, PIECES, False, TURNED)
                put_low_piece(low_desc, low_staging.index(HALF), bits, top, n * BN, q, PIECES, TURNED, LOW_BITS)
            else:
                put(out_desc, staging.index(HALF), value, top, n * BN, q, PIECES, ADDS, TURNED)
        turns += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "chunk", "start"])
def weight_kernel(
    e_desc, x_desc, sum_ptr, low_ptr, low_desc, out_desc, out_ptr, count_ptr, scale_ptr, class_weight_ptr, smooth_x_ptr,
    key_ptr, token_ptr, value_ptr, bounds_ptr, hidden_ptr, counter_ptr, first, chunk, start, columns, size, out_width,
    hidden_stride,
    ADD: gl.constexpr, FINAL: gl.constexpr, INTO: gl.constexpr, PARTED: gl.constexpr, SMOOTH: gl.constexpr,
    HAS_CLASS: gl.constexpr, TARGETS: gl.constexpr, LOW_BITS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, SKEW: gl.constexpr, REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
    PIECES: gl.constexpr, PARTS: gl.constexpr, LENT: gl.constexpr, TURNED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """kernels.weight_kernel, with the same arguments: dW of vocabulary entries from a chunk. A sum in one matrix is
    added to by the memory itself, so that no group waits for what it held.

    With TARGETS a fourth group of warps gathers the hidden states of a tile's targets, a tile ahead of the products.
    ``filled[s]``: slot s of them was gathered; ``spent[s]``: both groups have multiplied it.

    LENT: eᵀ lies in the result's own rows, or e itself in those of a TURNED one, and one more warp stores
    (:func:`store_over`). ``counter`` is 0 before.
    ``staged[h]``: half h of a tile waits in shared memory; ``emptied[h]``: it was stored.

    SLOTS: that warp moves the sum that the product is added to, in so many pieces of each half that are in shared
    memory at once; 0: it does not. ``staged[s]``: slot s has come, or is free; ``emptied[s]``: it was added to.
    """
    E_DEPTH_FIRST: gl.constexpr = not LENT or TURNED
    STAGES_OUT: gl.constexpr = 2 * SLOTS if SLOTS > 0 else 2
    WIDTH: gl.constexpr = BN // PARTS // 2 if SLOTS > 0 else BN // PARTS
    STAGED: gl.constexpr = [STAGES_OUT, WIDTH, BM // 2] if TURNED else [STAGES_OUT, BM // 2, WIDTH]
    LOW_WIDTH: gl.constexpr = WIDTH // 2 if LOW_BITS == 4 and SLOTS == 0 else WIDTH
    LOW_STAGED: gl.constexpr = STAGED if TURNED else [STAGES_OUT, BM // 2, LOW_WIDTH]
    e_smem = gl.allocate_shared_memory(
        e_desc.dtype, [2 * STAGES, BK, BM // 2] if E_DEPTH_FIRST else [2 * STAGES, BM // 2, BK], e_desc.layout
    )
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BK, BN], x_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, STAGED, out_desc.layout)
    low_staging = staging
    if PARTED and (SLOTS > 0 or not FINAL):
        low_staging = gl.allocate_shared_memory(low_desc.dtype, LOW_STAGED, low_desc.layout)
    ready, free, turn = barriers(STAGES)
    gathered = x_smem
    filled = ready
    spent = free
    staged = ready
    emptied = free
    if LENT or SLOTS > 0:
        staged, emptied = pairs_of_barriers(STAGES_OUT)
    if TARGETS:
        gathered = gl.allocate_shared_memory(x_desc.dtype, [TARGET_SLOTS, TARGET_STEP, BN], x_desc.layout)
        filled, spent, _turn = barriers(TARGET_SLOTS)
    gl.warp_specialize(
        [
            (weight_tiles, (
                out_desc, low_desc, e_smem, x_smem, staging, low_staging, ready, free, turn, gathered, filled, spent,
                staged, emptied, sum_ptr, low_ptr, scale_ptr, class_weight_ptr, smooth_x_ptr, key_ptr, value_ptr,
                bounds_ptr, count_ptr, counter_ptr, first, chunk, start, columns, size, out_width,
                0, ADD, FINAL, INTO, PARTED, SMOOTH, HAS_CLASS, TARGETS, LOW_BITS,
                BM, BN, BK, GROUP, PROGRAMS, STAGES, SKEW, PIECES, LENT, TURNED, SLOTS,
            )),
            (weight_tiles, (
                out_desc, low_desc, e_smem, x_smem, staging, low_staging, ready, free, turn, gathered, filled, spent,
                staged, emptied, sum_ptr, low_ptr, scale_ptr, class_weight_ptr, smooth_x_ptr, key_ptr, value_ptr,
                bounds_ptr, count_ptr, counter_ptr, first, chunk, start, columns, size, out_width,
                1, ADD, FINAL, INTO, PARTED, SMOOTH, HAS_CLASS, TARGETS, LOW_BITS,
                BM, BN, BK, GROUP, PROGRAMS, STAGES, SKEW, PIECES, LENT, TURNED, SLOTS,
            )),
            (load_tiles, (
                e_desc, x_desc, e_smem, x_smem, ready, free, None, count_ptr, first, chunk, columns, size,
                True, E_DEPTH_FIRST, True, BM, BN, BK, GROUP, PROGRAMS, STAGES, False, 0,
            )),
            (load_targets, (
                gathered, filled, spent, token_ptr, bounds_ptr, hidden_ptr, hidden_stride, count_ptr, first, chunk,
                columns, size, TARGETS, BM, BN, BK, GROUP, PROGRAMS,
            )),
            (store_or_move, (
                out_desc, low_desc, staging, low_staging, staged, emptied, counter_ptr, count_ptr, first, chunk,
                columns, size, LENT, ADD, FINAL, SLOTS, LOW_BITS, BM, BN, BK, GROUP, PROGRAMS, PIECES, TURNED,
            )),
        ],
        [4, 1, GATHERING_WARPS, 1], [REGISTERS, LOADING_REGISTERS, LOADING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# How the three products are launched

# Registers of a thread of the second multiplying group; the first has what is left of 504 beside the loading one's 24.
GROUP_REGISTERS = 232


@functools.lru_cache
def swizzled(bits, columns):
    """The layout in shared memory of a block of so many columns, whose elements have so many bits."""
    width = min(128, bits * columns // 8)
    return NVMMASharedLayout(width if width >= 32 else 0, bits, 2)


class Hopper:
    """:class:`tiles.Products` of this file."""

    logits_kernel = logits_kernel
    hidden_kernel = hidden_kernel
    weight_kernel = weight_kernel

    def describe(self, matrix, rows, columns):
        layout = swizzled(8 * matrix.element_size(), columns)
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)

    def logits(self, c, t, plain, known):
        # By halves, as LLVM takes 1.7 times as long over a branch (at a target, at the end) of all the values; but
        # where lse is known, halves made the step 0.2 to 0.6 % slower.
        return self.constants(t) | {"PIECES": 4 if not plain else 1 if known else 2}

    def hidden(self, c, t, sums, parts, smooth):
        split = c.plan.splits_hidden
        if split and parts is None:
            parts = c.empty(c.programs, t.bm, t.bn)
        summed = None if sums is None else self.describe(sums, t.block_rows, t.block_columns)
        values = {"PIECES": 4, "PARTS": t.bn // t.block_columns, "SPLIT": split, "PACE": t.pace}
        values |= {"parts_ptr": parts, "sum_desc": summed, "progress_ptr": c.inputs.progress}
        rows, columns = HOPPER.tile
        is_wide = triton.cdiv(c.size, columns) >= SQUARE_GROUP
        group = SQUARE_GROUP * rows // t.bm if is_wide else t.group
        return HiddenLaunch(self.constants(t) | values, group, parts)

    def weight(self, c, t, kind, low, aligned):
        parts = t.bn // t.block_columns
        several = kind.final and (kind.reads or kind.smooth)
        pieces = 4 if several else parts
        streamed = kind.parted and not (kind.turned or (kind.final and kind.smooth))
        if kind.parted:  # four pieces are faster where nothing more has to be in registers
            pieces = 4 if streamed else 8
        parts, described = pieces if streamed else parts, None
        columns = t.bn // parts // (2 if streamed else 1)
        if kind.parted and (streamed or not kind.final):
            # Of 4 bits each, two neighbours are a byte; of 8 bits 16, where pairs are moved.
            narrow = kind.low_bits == 4
            pairs = low.view(torch.int16) if streamed and not narrow else low
            width = columns // 2 if narrow and not streamed else columns
            described = c.describe_matrix(pairs, t.block_rows, width)
        values = {"PARTS": parts, "PIECES": pieces, "SLOTS": self.slots(kind) if streamed else 0}
        values |= {"low_desc": described}
        return WeightLaunch(self.constants(t) | self.registers(kind) | values, True, columns, streamed)

    def slots(self, kind):
        """Pieces of a sum over chunks that are in shared memory at once for each group: on their way in, added to, on
        their way out. Three of 24 bits leave no room for gathered hidden states."""
        return 2 if kind.targets and kind.low_bits == 8 else 3

    def constants(self, t):
        return t.sizes | {"STAGES": t.stages, "SKEW": t.skew, "REGISTERS": GROUP_REGISTERS, "num_warps": 4}

    def registers(self, kind):
        """Of dW's groups. Gathering hidden states takes more of them than asking the accelerator, and storing over what
        others read takes more again."""
        if kind.lent:
            return {"REGISTERS": 208, "LOADING_REGISTERS": 88}
        return {"REGISTERS": 224, "LOADING_REGISTERS": 56} if kind.targets else {"LOADING_REGISTERS": 24}


PRODUCTS = Hopper()
