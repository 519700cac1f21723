"""The Triton kernels of the target-anchored chunk; torch_impl/kernels/fused.py launches them.

Rows and positions. Ignored tokens are left out: :func:`prepare_kernel` lists the valid tokens in ``order`` and their
number in ``count``, both on the device. A *position* p counts valid tokens; ``order[p]`` is the token. A chunk is the
positions first ≤ p < first + C; its *row* r is p − first. Kernels read ``count`` and work on the rows that exist, so a
chunk of ignored tokens costs a launch and nothing more, and the host never waits.

The matrices of a chunk, row-major with padded row strides:

    x  [C, D]   hidden states of the rows; the rows between the last one and the next multiple of a tile are zero
    e  [C, S]   exponentials (or the gradient itself, where lse is known) over S vocabulary entries

Every sum has a fixed order: the results are the same bit by bit from run to run.
"""

from __future__ import annotations

import math
import os

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from logitless import hardware, scratch, spec
from logitless.torch_impl.kernels.tiles import HiddenLaunch, WeightLaunch

LOG2E = tl.constexpr(1.4426950408889634)
# A row is done again when its sum says that one of its exponents may have passed the threshold.
RESCUE_SUM = tl.constexpr(math.exp(spec.RESCUE_NATS))
HELD_RESCUE_SUM = tl.constexpr(spec.HELD_RESCUE_SUM)
HELD_STEPS = tl.constexpr(spec.HELD_STEPS)
HELD_BELOW = tl.constexpr(spec.HELD_BELOW)
HELD_NOTHING = tl.constexpr(spec.HELD_NOTHING)
LOWEST_HELD = tl.constexpr(spec.LOWEST_HELD)
# A number of float32 whose neighbours are whole numbers apart.
WHOLE = tl.constexpr(1.5 * 2**23)
NO_ROW = tl.constexpr(spec.NO_ROW)
LOWEST_ANCHOR = tl.constexpr(spec.LOWEST_ANCHOR)
LOWEST_GAP = tl.constexpr(spec.LOWEST_GAP)
SQUARED_SCALE = tl.constexpr(spec.SQUARED_SCALE)
ALPHA_FLOOR = tl.constexpr(spec.ALPHA_FLOOR)

# Triton's interpreter multiplies the bits of bfloat16: there, products read float32.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# What is no entry of a vocabulary, and comes after all of them.
BIGGEST_INDEX = tl.constexpr(2147483647)

# Parts at most that a tile of a last, short turn is split into along its depth.
MOST_PARTS = tl.constexpr(hardware.HOPPER.most_parts)

# A row's target that another rank of a sharded call has; −1 is an id outside the vocabulary.
ELSEWHERE = tl.constexpr(-2)

# Sorted targets: entries of the vocabulary from one bound to the next (products.Targets), as many as a tile has at
# least, and places of the list that a product takes at a time.
TARGET_GRAIN = tl.constexpr(16)
TARGET_STEP = tl.constexpr(16)

# Numbers in which finish_kernel's programs share their work: two launches' tickets, how many rows are listed, how many
# tickets of each stage are done.
STATE = tl.constexpr(8)
TICKETS = tl.constexpr(0)
SHARED_TICKETS = tl.constexpr(1)
LISTED = tl.constexpr(2)
DONE = tl.constexpr(3)

LOW_ROW_ALIGNMENT = tl.constexpr(scratch.LOW_ROW_ALIGNMENT)

# What the epilogue of the first product makes.
SUMS = tl.constexpr(0)  # sums per row only
ANCHORED = tl.constexpr(1)  # sums, and exponentials relative to the anchor, 0 at the target
KNOWN = tl.constexpr(2)  # the gradient's matrix, from lse
HELD = tl.constexpr(3)  # sums, and logits relative to the anchor, that wait for held_kernel


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@triton.jit(do_not_specialize=["tokens", "share", "ignore_index", "shard_start"])
def prepare_kernel(
    given_ptr, given_weight_ptr, class_weight_ptr, target_ptr, valid_ptr, inside_ptr, weight_ptr, index_ptr, key_ptr,
    order_ptr, count_ptr, progress_ptr, relative_ptr, norm_ptr, largest_ptr, unit_ptr, tokens, share, vocab,
    shard_start, entries, ignore_index, scale, MEAN: tl.constexpr, BY_TOKEN: tl.constexpr, TURN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, ``share`` tokens: what torch_impl.call.Inputs knows of each, two more forms of its target, and its
    place in their order: see rows.Rows. What depends on all tokens each program finds for itself, TURN at a time.

    This device has the ids shard_start ≤ y < shard_start + entries of ``vocab``. class_weight is k by id or, BY_TOKEN,
    k_y by token; None: 1.

    order = the valid tokens, then the ignored ones, each in their own order; count = how many are valid.
    norm is what the sum of the losses is multiplied by: for a MEAN 1 / Σ t k_y, or 0 where no token counts. m is the
    largest finite |t|, or 1; relative = t / m; largest = m · scale; unit = norm · largest.
    """
    first = tl.program_id(0) * share
    count, before = 0, 0  # valid tokens: all of them, and those before this program's
    total = tl.zeros((TURN,), tl.float32)
    counting = tl.zeros((TURN,), tl.int32)
    largest = tl.zeros((TURN,), tl.float32)
    for start in range(0, tokens, TURN):
        token = start + tl.arange(0, TURN)
        mask = token < tokens
        target, valid, weight = given_token(given_ptr, given_weight_ptr, token, mask, ignore_index)
        keep = (valid & mask).to(tl.int32)
        count += tl.sum(keep, 0)
        before += tl.sum(tl.where(token < first, keep, 0), 0)
        largest = larger(largest, weight)
        if MEAN:
            if class_weight_ptr is not None:
                inside = (target >= 0) & (target < vocab)
                k_place = token if BY_TOKEN else tl.where(valid & inside, target, 0)
                # An ignored token stands for id 0, whose weight may be no number.
                weight = weight * tl.load(class_weight_ptr + k_place, mask=keep != 0, other=0.0)
            total += weight
            counting = tl.maximum(counting, (weight != 0).to(tl.int32))
    unit = largest_of(largest)
    if tl.program_id(0) == 0:
        norm = 1.0
        if MEAN:
            norm = tl.where(tl.max(counting, 0) > 0, 1.0 / tl.sum(total, 0), 0.0)
        tl.store(count_ptr, count)
        tl.store(progress_ptr + tl.arange(0, 2), 0)
        tl.store(norm_ptr, norm)
        tl.store(largest_ptr, unit * scale)
        tl.store(unit_ptr, norm * (unit * scale))
    for start in range(first, tl.minimum(first + share, tokens), BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = token < tokens
        target, valid, weight = given_token(given_ptr, given_weight_ptr, token, mask, ignore_index)
        inside = (target >= 0) & (target < vocab)
        target = tl.where(valid & inside, target, 0)
        tl.store(target_ptr + token, target, mask=mask)
        tl.store(valid_ptr + token, valid.to(tl.int8), mask=mask)
        tl.store(inside_ptr + token, (inside | ~valid).to(tl.int8), mask=mask)
        tl.store(weight_ptr + token, weight, mask=mask)
        tl.store(relative_ptr + token, weight / unit, mask=mask)
        place = target - shard_start
        here = (place >= 0) & (place < entries)
        index = tl.where(inside | ~valid, tl.where(here, place, ELSEWHERE), -1)
        tl.store(index_ptr + token, index.to(tl.int32), mask=mask)
        tl.store(key_ptr + token, tl.where(valid & inside & here, place, entries).to(tl.int32), mask=mask)
        keep = (valid & mask).to(tl.int32)
        valid_place = before + tl.cumsum(keep, 0) - 1
        ignored_place = count + token - valid_place - 1  # of the tokens before it, those that are not valid
        tl.store(order_ptr + tl.where(keep != 0, valid_place, ignored_place), token, mask=mask)
        before += tl.sum(keep, 0)


@triton.jit
def larger(largest, values):
    """The larger of both sizes, by element. One that is not finite counts as 0."""
    size = tl.abs(values)
    return tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))


@triton.jit
def largest_of(largest):
    """The largest of all sizes; 1 if all are 0."""
    unit = tl.max(largest, 0)
    return tl.where(unit > 0, unit, 1.0)


@triton.jit
def given_token(given_ptr, given_weight_ptr, token, mask, ignore_index):
    """Tokens' targets as they came, whether they count, and their weights, 0 where they do not."""
    target = tl.load(given_ptr + token, mask=mask, other=0).to(tl.int64)
    valid = target != ignore_index
    weight = tl.full(token.shape, 1.0, tl.float32)
    if given_weight_ptr is not None:
        weight = tl.load(given_weight_ptr + token, mask=mask, other=0.0).to(tl.float32)
    return target, valid, tl.where(valid & mask, weight, 0.0)


@triton.jit(do_not_specialize=["tokens"])
def upstream_kernel(
    upstream_ptr, valid_ptr, order_ptr, relative_ptr, token_value_ptr, factor_ptr, target_value_ptr, largest_ptr,
    unit_ptr, g_ptr, out_token_value_ptr, out_factor_ptr, out_target_value_ptr, tokens, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the row factors for upstream gradients u by token, from those for 1, relative to the largest |u|.

    m = the largest finite |u| of the valid tokens, or 1; unit = m · largest. relative and token_value, by token, and
    factor and target_value, by position, are multiplied by u / m, which is 0 for an ignored token.
    """
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        valid = tl.load(valid_ptr + token, mask=token < tokens, other=0) != 0
        largest = larger(largest, tl.load(upstream_ptr + token, mask=valid, other=0.0))
    unit = largest_of(largest)
    tl.store(unit_ptr, unit * tl.load(largest_ptr))
    for start in range(0, tokens, BLOCK):
        position = start + tl.arange(0, BLOCK)
        mask = position < tokens
        token = tl.load(order_ptr + position, mask=mask, other=0)
        valid = mask & (tl.load(valid_ptr + token, mask=mask, other=0) != 0)
        u = tl.load(upstream_ptr + token, mask=valid, other=0.0) / unit
        tl.store(g_ptr + token, tl.load(relative_ptr + token, mask=valid, other=0.0) * u, mask=mask)
        value = tl.load(token_value_ptr + token, mask=valid, other=0.0)
        tl.store(out_token_value_ptr + token, value * u, mask=mask)
        factor = tl.load(factor_ptr + position, mask=valid, other=0.0)
        tl.store(out_factor_ptr + position, factor * u, mask=mask)
        value = tl.load(target_value_ptr + position, mask=valid, other=0.0)
        tl.store(out_target_value_ptr + position, value * u, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def log_prob_rows_kernel(
    target_logit_ptr, anchor_ptr, log_total_ptr, entropy_ptr, others_squared_ptr, valid_ptr, temperature_ptr,
    g_log_prob_ptr, g_entropy_ptr, g_lse_ptr, g_squared_ptr, factor_ptr, target_ptr, alpha_ptr, gamma_ptr, delta_ptr,
    tokens, scale, cap, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens: numerics.known_log_prob_rows, from upstream gradients as they came; 0 for an ignored token.

    A pointer is None where there is no such upstream gradient, nor what only it needs.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    valid = mask & (tl.load(valid_ptr + token, mask=mask, other=0) != 0)
    scale, cap = tempered(temperature_ptr, token, valid, scale, cap, HAS_TEMPERATURE)
    target_logit, nll, _ = known_token(target_logit_ptr, anchor_ptr, log_total_ptr, token, valid)
    nll = tl.where(nll > -LOWEST_GAP, -LOWEST_GAP, nll)  # p log p is 0 where p is 0; a NaN stays
    p, q = tl.exp(-nll), one_minus_exp(nll)
    g = upstream_of(g_log_prob_ptr, token, valid, scale, BLOCK)
    target, factor = -q, -g
    if alpha_ptr is not None:
        # Scaled by the row's largest coefficient, so that the matrix holds numbers near probabilities.
        g_entropy = upstream_of(g_entropy_ptr, token, valid, scale, BLOCK)
        g_lse = upstream_of(g_lse_ptr, token, valid, scale, BLOCK)
        g_squared = upstream_of(g_squared_ptr, token, valid, scale, BLOCK)
        factor = tl.abs(g) + tl.abs(g_entropy) + tl.abs(g_lse) + tl.abs(g_squared)
        safe = tl.where(factor == 0, 1.0, factor)
        g = g / safe
        target, alpha = g * q, -g
        if g_entropy_ptr is not None:
            g_entropy, entropy = g_entropy / safe, tl.load(entropy_ptr + token, mask=valid, other=0.0)
            target -= g_entropy * p * (entropy - nll)
            alpha -= g_entropy * entropy
            tl.store(gamma_ptr + token, -g_entropy, mask=mask)
        if g_lse_ptr is not None:
            g_lse = g_lse / safe
            target += g_lse * p
            alpha += g_lse
        if g_squared_ptr is not None:
            delta = 2.0 * (g_squared / safe)
            others = tl.load(others_squared_ptr + token, mask=valid, other=0.0)
            # p − S = p (1 − p) − Σ_{j ≠ y} p_j², where p − S would cancel.
            target += delta * p * (p * q - others)
            alpha -= delta * (others + p * p)
            tl.store(delta_ptr + token, delta, mask=mask)
        tl.store(alpha_ptr + token, tl.where(valid, alpha, 0.0), mask=mask)
    if HAS_CAP:
        target = target * (1.0 - (target_logit / cap) * (target_logit / cap))
    tl.store(factor_ptr + token, factor, mask=mask)
    tl.store(target_ptr + token, tl.where(valid, target, 0.0), mask=mask)


@triton.jit
def upstream_of(g_ptr, token, valid, scale, BLOCK: tl.constexpr):
    """An upstream gradient in the raw logits' unit; 0 where there is none."""
    if g_ptr is not None:
        return tl.where(valid, tl.load(g_ptr + token, mask=valid, other=0.0) * scale, 0.0)
    else:
        return tl.zeros((BLOCK,), tl.float32)


@triton.jit
def known_token(target_logit_ptr, anchor_ptr, log_total_ptr, token, mask):
    """Tokens' target logits, nll and lse."""
    target_logit = tl.load(target_logit_ptr + token, mask=mask, other=0.0)
    anchor = tl.load(anchor_ptr + token, mask=mask, other=0.0)
    log_total = tl.load(log_total_ptr + token, mask=mask, other=0.0)
    return target_logit, (anchor - target_logit) + log_total, anchor + log_total


@triton.jit
def one_minus_exp(nll):
    """1 − exp(−nll) with full relative accuracy for small nll: Kahan's correction of the rounded exponential."""
    p = tl.exp(-nll)
    rest = 1.0 - p
    inside = (rest > 0) & (p > 0)
    log = tl.log(tl.where(inside, p, 0.5))
    return tl.where(rest == 0, nll, tl.where(inside, rest * (-nll / log), rest))


@triton.jit(do_not_specialize=["tokens", "length", "stride"])
def known_kernel(
    anchor_ptr, log_total_ptr, factor_ptr, target_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr, order_ptr, unit_ptr,
    out_ptr, tokens, length, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the known rows by position, one vector after the other in ``out``; 0 behind the last token.

    unit = the largest finite |factor| and |factor · target|, or 1. factor is divided by it, and target gets its factor.
    """
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        factor = tl.load(factor_ptr + token, mask=token < tokens, other=0.0)
        target = tl.load(target_ptr + token, mask=token < tokens, other=0.0)
        largest = larger(larger(largest, factor), factor * target)
    unit = largest_of(largest)
    tl.store(unit_ptr, unit)
    for start in range(0, length, BLOCK):
        position = start + tl.arange(0, BLOCK)
        mask = position < length
        exists = position < tokens
        token = tl.load(order_ptr + position, mask=exists, other=0)
        factor = tl.load(factor_ptr + token, mask=exists, other=0.0) / unit
        target = tl.load(target_ptr + token, mask=exists, other=0.0)
        tl.store(out_ptr + position, factor, mask=mask)
        tl.store(out_ptr + stride + position, factor * target, mask=mask)
        out = move_vector(anchor_ptr, token, exists, out_ptr + 2 * stride, position, mask, stride)
        out = move_vector(log_total_ptr, token, exists, out, position, mask, stride)
        out = move_vector(alpha_ptr, token, exists, out, position, mask, stride)
        out = move_vector(gamma_ptr, token, exists, out, position, mask, stride)
        out = move_vector(delta_ptr, token, exists, out, position, mask, stride)
        move_vector(sigma_ptr, token, exists, out, position, mask, stride)


@triton.jit
def move_vector(by_token_ptr, token, exists, out_ptr, position, mask, stride):
    """A vector by token as one by position; returns where the next one goes. None takes no room."""
    if by_token_ptr is not None:
        tl.store(out_ptr + position, tl.load(by_token_ptr + token, mask=exists, other=0.0), mask=mask)
        return out_ptr + stride
    else:
        return out_ptr


@triton.jit(do_not_specialize=["tokens"])
def loss_kernel(
    target_logit_ptr, anchor_ptr, log_total_ptr, weighted_ptr, valid_ptr, weight_ptr, target_ptr, class_weight_ptr,
    class_sum_ptr, norm_ptr, out_ptr, tokens, vocab, keep, z_loss, per_entry,
    HAS_CLASS: tl.constexpr, SMOOTHING: tl.constexpr, HAS_Z: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ℓ of BLOCK tokens a program; with SUM one program, and norm · Σ ℓ.

    ℓ_i = t_i [ (1−ε) k_y nll_i + (ε/V) (Σ_j k_j · lse_i − Σ_j k_j z_ij) + z_loss · lse_i² ]
    """
    total = tl.zeros((BLOCK,), tl.float32)
    stop = tokens if SUM else (tl.program_id(0) + 1) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = token < tokens
        _, nll, lse = known_token(target_logit_ptr, anchor_ptr, log_total_ptr, token, mask)
        loss = keep * nll
        if HAS_CLASS:
            target = tl.load(target_ptr + token, mask=mask, other=0)
            loss = loss * tl.load(class_weight_ptr + target, mask=mask, other=0.0)
        if SMOOTHING:
            weighted = tl.load(weighted_ptr + token, mask=mask, other=0.0)
            class_sum = vocab * 1.0
            if HAS_CLASS:
                class_sum = tl.load(class_sum_ptr)
            loss += per_entry * (class_sum * lse - weighted)
        if HAS_Z:
            loss += z_loss * lse * lse
        loss = loss * tl.load(weight_ptr + token, mask=mask, other=0.0)
        valid = tl.load(valid_ptr + token, mask=mask, other=0) != 0
        loss = tl.where(valid & mask, loss, 0.0)
        if SUM:
            total += loss
        else:
            tl.store(out_ptr + token, loss, mask=mask)
    if SUM:
        tl.store(out_ptr, tl.sum(total, 0) * tl.load(norm_ptr))


@triton.jit(do_not_specialize=["first", "chunk", "counters"])
def rows_kernel(
    hidden_ptr, w_ptr, bias_ptr, target_ptr, order_ptr, count_ptr, weighted_rows_ptr, temperature_ptr,
    x_ptr, row_target_ptr, anchor_ptr, highest_ptr, weighted_ptr, state_ptr, counter_ptr, target_w_ptr,
    first, chunk, counters, hidden_stride, w_stride, x_stride, target_w_stride, size, scale, cap,
    DOTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, WEIGHTED: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, one row: gather x, and make the anchor a = z_y (NaN for an id outside the vocabulary, which is −1; 0
    for ELSEWHERE).

    weighted = x · Σ_j k_j w_j, label smoothing's part of the loss. temperature, by position, divides both. A row past
    the last one becomes zero. target_w has w_y if the weight is TURNED: :func:`target_weight_kernel`. All programs
    together zero what later kernels count in: ``state``, and ``counter`` [counters] if there is one.
    """
    row = tl.program_id(0)
    position = first + row
    exists = (row < chunk) & (position < tl.load(count_ptr))
    token = tl.load(order_ptr + position, mask=exists, other=0).to(tl.int64)
    target = tl.load(target_ptr + token, mask=exists, other=-1).to(tl.int64)
    wanted = tl.maximum(target, 0)
    dot = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < tl.where(exists, size, 0)
        x = tl.load(hidden_ptr + token * hidden_stride + column, mask=mask, other=0.0)
        tl.store(x_ptr + row.to(tl.int64) * x_stride + column, x, mask=column < size)
        if DOTS:
            w_row = w_ptr + wanted * w_stride
            if TURNED:
                w_row = target_w_ptr + row.to(tl.int64) * target_w_stride
            w = tl.load(w_row + column, mask=mask, other=0.0)
            dot += x.to(tl.float32) * w.to(tl.float32)
        if WEIGHTED:
            weighted += x.to(tl.float32) * tl.load(weighted_rows_ptr + column, mask=column < size, other=0.0)
    tl.store(row_target_ptr + row, target.to(tl.int32))
    scale, cap = tempered(temperature_ptr, position, exists, scale, cap, HAS_TEMPERATURE)
    if DOTS:
        z = tl.sum(dot, 0)
        if HAS_BIAS:
            z += tl.load(bias_ptr + wanted).to(tl.float32)
        z = capped(z, scale, cap, HAS_SCALE or HAS_TEMPERATURE, HAS_CAP)
        z = tl.where(target < 0, tl.where(target == ELSEWHERE, 0.0, float("nan")), z)
        tl.store(anchor_ptr + row, tl.where(exists, z, NO_ROW))
        tl.store(highest_ptr + row, float("-inf"))
        if row == 0:
            tl.store(state_ptr + tl.arange(0, STATE), 0)
    if WEIGHTED:
        tl.store(weighted_ptr + token, tl.sum(weighted, 0) * scale, mask=exists)
    if counter_ptr is not None:
        for place in range(row, counters, chunk):
            tl.store(counter_ptr + place, 0)


@triton.jit(do_not_specialize=["first", "chunk"])
def target_weight_kernel(
    w_ptr, target_ptr, order_ptr, count_ptr, target_w_ptr, first, chunk, w_stride, target_w_stride, size,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BR rows and BC columns of target_w = w_y of the chunk's rows, from a weight that lies as [D, V].

    An element costs a read of 32 bytes of which it is two. So all rows' programs of some columns follow each other:
    they read the same lines of memory.
    """
    row_blocks = tl.cdiv(chunk, BR)
    row = tl.program_id(0) % row_blocks * BR + tl.arange(0, BR)
    column = tl.program_id(0) // row_blocks * BC + tl.arange(0, BC)
    position = first + row
    exists = (row < chunk) & (position < tl.load(count_ptr))
    token = tl.load(order_ptr + position, mask=exists, other=0).to(tl.int64)
    target = tl.maximum(tl.load(target_ptr + token, mask=exists, other=0), 0)
    here = (column < size)[None, :]
    w_place = w_ptr + column.to(tl.int64)[None, :] * w_stride + target[:, None]
    w = tl.load(w_place, mask=exists[:, None] & here, other=0.0)
    place = target_w_ptr + row.to(tl.int64)[:, None] * target_w_stride + column[None, :]
    tl.store(place, w, mask=(row < chunk)[:, None] & here)


@triton.jit(do_not_specialize=["first", "chunk"])
def scale_rows_kernel(x_ptr, factor_ptr, count_ptr, first, chunk, x_stride, size, BLOCK: tl.constexpr):
    """One program, one row: x = factor · x in place, rounded to x's dtype: the operand of dW = eᵀ (u ⊙ x)."""
    row = tl.program_id(0) + tl.arange(0, 1)
    exists = (row < chunk) & (first + row < tl.load(count_ptr))
    multiply_rows(x_ptr, x_stride, row, tl.load(factor_ptr + row, mask=exists, other=0.0), exists, size, BLOCK)


# ---------------------------------------------------------------------------------------------------------------------
# The first product


@triton.jit
def capped(z, scale, cap, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr):
    """f(r): logit_scale, then softcap."""
    if HAS_SCALE:
        z = z * scale
    if HAS_CAP:
        z = cap * tanh(z / cap)
    return z


@triton.jit
def tempered(temperature_ptr, place, mask, scale, cap, HAS_TEMPERATURE: tl.constexpr):
    """scale and cap of rows, divided by their temperatures, which lie at ``place``. So f(r) / T is f with these two."""
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + place, mask=mask, other=1.0)
        scale = scale / temperature
        cap = cap / temperature
    return scale, cap


@triton.jit
def tanh(t):
    """tanh in float32: an odd polynomial near 0, where 1 − e⁻²ᵗ would cancel."""
    magnitude = tl.abs(t)
    square = t * t
    small = t * (
        1.0 + square * (-0.333333333 + square * (0.133333333 + square * (-0.0539682540 + square * 0.0218694885)))
    )
    decay = tl.exp2(magnitude * LOG2E * -2.0)
    large = (1.0 - decay) / (1.0 + decay)
    large = tl.where(t < 0, -large, large)
    return tl.where(magnitude < 0.15, small, large)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b, accumulated in float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def add_part(value, part, k, DEEP: tl.constexpr):
    """Every DEEP steps a partial sum goes to the total: over 50,000 terms float32 would lose a digit. 0: one sum."""
    if DEEP:
        if k % DEEP == DEEP - 1:
            value += part
            part = tl.zeros_like(part)
    return value, part


@triton.jit
def reciprocal_of(column_tiles, GROUP: tl.constexpr):
    """What :func:`tile_of` multiplies by where it would divide, which takes a hundred cycles and more: (2³² − 1) over
    the tiles of a group. Made once."""
    return 0xFFFFFFFF // tl.cast(GROUP * tl.maximum(column_tiles, 1), tl.uint32)


@triton.jit
def tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP: tl.constexpr):
    """Tile number to (row tile, column tile): groups of GROUP row tiles walk the columns together, for the L2 cache."""
    width = GROUP * column_tiles
    group = tl.umulhi(tl.cast(tile, tl.uint32), reciprocal).to(tl.int32)  # the quotient, or one less
    inner = tile - group * width
    group = tl.where(inner >= width, group + 1, group)
    inner = tl.where(inner >= width, inner - width, inner)
    first = group * GROUP
    rows = tl.maximum(row_tiles - first, 1)
    row = inner % GROUP
    column = inner // GROUP
    if rows < GROUP:  # the last group
        row = inner % rows
        column = inner // rows
    return first + row, column


@triton.jit
def load_tile(source, pointer, row, column, rows, columns, stride, R: tl.constexpr, S: tl.constexpr, TMA: tl.constexpr):
    """[R, S] of a row-major matrix [rows, columns] from (row, column), zero outside: by descriptor, or by pointers."""
    if TMA:
        return source.load([row, column])
    else:
        i = row + tl.arange(0, R)
        j = column + tl.arange(0, S)
        place = pointer + i.to(tl.int64)[:, None] * stride + j[None, :]
        return tl.load(place, mask=(i < rows)[:, None] & (j < columns)[None, :], other=0.0)


@triton.jit
def load_weight(
    source, pointer, entry, column, entries, columns, stride, R: tl.constexpr, S: tl.constexpr, TMA: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """[R, S] of the weight [entries, columns] from (entry, column). TURNED: it lies in memory as [columns, entries]."""
    if TURNED:
        return load_tile(source, pointer, column, entry, columns, entries, stride, S, R, TMA).T
    else:
        return load_tile(source, pointer, entry, column, entries, columns, stride, R, S, TMA)


@triton.jit
def weight_place(entry, column, stride, TURNED: tl.constexpr):
    """Where the weight's elements (entry, column) lie, or those of a matrix like it. ``stride``: of its rows, or if it
    is TURNED of its columns."""
    if TURNED:
        return column.to(tl.int64) * stride + entry
    else:
        return entry.to(tl.int64) * stride + column


@triton.jit
def store_block(
    desc, pointer, tile, row, column, rows, columns, stride, BN: tl.constexpr, SPLIT: tl.constexpr,
    POINTERS: tl.constexpr,
):  # fmt: skip
    """A tile of e [rows, columns] to memory from (row, column) on: by pointers, or as :func:`store_tile`."""
    if POINTERS:
        i = row + tl.arange(0, tile.shape[0])
        j = column + tl.arange(0, BN)
        place = pointer + i.to(tl.int64)[:, None] * stride + j[None, :]
        mask = (i < rows)[:, None] & (j < columns)[None, :]
        tl.store(place, tile.to(pointer.dtype.element_ty), mask=mask)
    else:
        store_tile(desc, tile, row, column, BN, SPLIT, False)


@triton.jit
def store_tile(desc, tile, row, column, BN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr):
    """A tile to memory through its descriptor, in two halves where SPLIT (half the staging in shared memory)."""
    if SPLIT:
        halves = tl.permute(tl.reshape(tile, (tile.shape[0], 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        store_part(desc, left.to(desc.dtype), row, column, ADD)
        store_part(desc, right.to(desc.dtype), row, column + BN // 2, ADD)
    else:
        store_part(desc, tile.to(desc.dtype), row, column, ADD)


@triton.jit
def store_part(desc, part, row, column, ADD: tl.constexpr):
    """Store, or add to what is there: the memory adds, and no program waits for what it held."""
    if ADD:
        if INTERPRETED:
            desc.store([row, column], desc.load([row, column]) + part)
        else:
            desc.atomic_add([row, column], part)
    else:
        desc.store([row, column], part)


@triton.jit(do_not_specialize=["first", "chunk", "start"])
def logits_kernel(
    x_desc, w_desc, e_desc, x_ptr, w_ptr, e_ptr, bias_ptr, class_weight_ptr, row_target_ptr, anchor_ptr, count_ptr,
    temperature_ptr, sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr,
    log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr,
    first, chunk, size, x_stride, w_stride, e_stride, start, columns, scale, cap,
    MODE: tl.constexpr, ENTROPY: tl.constexpr, STATISTICS: tl.constexpr, SUM_LOGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_CLASS: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_SIGMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr, TMA: tl.constexpr, POINTERS: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """z = f(x wᵀ + b) for vocabulary entries start ≤ j < start + columns, never stored; one program owns every
    PROGRAMS-th tile [BM rows, BN entries], and of it the sums of its rows (column tile n writes line n of each [n, C]
    buffer) and its block of e.
    """
    rows = tl.minimum(tl.maximum(tl.load(count_ptr) - first, 0), chunk)
    row_tiles = tl.cdiv(rows, BM)
    column_tiles = tl.cdiv(columns, BN)
    steps = tl.cdiv(size, BK)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
        z = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            a = load_tile(x_desc, x_ptr, m * BM, k * BK, chunk, size, x_stride, BM, BK, not POINTERS)
            b = load_weight(w_desc, w_ptr, n * BN, k * BK, columns, size, w_stride, BN, BK, TMA, TURNED)
            z = dot(a, b.T, z, PRECISION)
        row = m * BM + tl.arange(0, BM)
        column = n * BN + tl.arange(0, BN)
        here = column < columns
        if HAS_BIAS:
            z += tl.load(bias_ptr + start + column, mask=here, other=0.0).to(tl.float32)[None, :]
        z_scale, z_cap = tempered(
            temperature_ptr, (first + row)[:, None], (row < chunk)[:, None], scale, cap, HAS_TEMPERATURE
        )
        z = capped(z, z_scale, z_cap, HAS_SCALE or HAS_TEMPERATURE, HAS_CAP)
        target = tl.load(row_target_ptr + row, mask=row < chunk, other=-1)
        anchor = tl.load(anchor_ptr + row, mask=row < chunk, other=NO_ROW)
        if MODE == KNOWN:
            e = known_values(
                z, z - anchor[:, None], row, start + column, target, log_total_ptr, factor_ptr, target_value_ptr,
                alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr, class_weight_ptr, here, rows, chunk, z_cap, HAS_CAP,
                HAS_CLASS, HAS_ALPHA, HAS_GAMMA, HAS_DELTA, HAS_SIGMA,
            )  # fmt: skip
            store_block(e_desc, e_ptr, e, m * BM, n * BN, chunk, columns, e_stride, BN, SPLIT, POINTERS)
        else:
            line = n * chunk + row
            inside = row < chunk
            # What is read of z alone comes first: then z and e need not be in registers side by side.
            if STATISTICS:
                above = tl.where(here[None, :], z, float("-inf"))
                top = tl.max(above, 1)
                tl.store(highest_ptr + line, top, mask=inside)
                where = tl.where(above == top[:, None], (start + column)[None, :], BIGGEST_INDEX)
                tl.store(argmax_ptr + line, tl.min(where, 1), mask=inside)
                tl.store(lowest_ptr + line, tl.min(tl.where(here[None, :], z, float("inf")), 1), mask=inside)
            if SUM_LOGITS:
                if HAS_CLASS:
                    weights = tl.load(class_weight_ptr + start + column, mask=here, other=0.0)
                    tl.store(
                        logit_sum_ptr + line, tl.sum(tl.where(here[None, :], z, 0.0) * weights[None, :], 1), mask=inside
                    )
                else:
                    tl.store(logit_sum_ptr + line, tl.sum(tl.where(here[None, :], z, 0.0), 1), mask=inside)
            gap = z - tl.maximum(anchor, LOWEST_ANCHOR)[:, None]
            e = tl.exp2(gap * LOG2E)
            # Few tiles hold a target or the end of the vocabulary: the others skip two comparisons an element.
            local = target - (start + n * BN)
            hits = tl.sum(((local >= 0) & (local < BN)).to(tl.int32), 0)
            if (hits > 0) | (n * BN + BN > columns):
                is_target = (start + column)[None, :] == target[:, None]
                e = tl.where(is_target | ~here[None, :], 0.0, e)
            tl.store(sum_ptr + line, tl.sum(e, 1), mask=inside)
            if ENTROPY:
                tl.store(gap_ptr + line, tl.sum(e * tl.maximum(gap, LOWEST_GAP), 1), mask=inside)
            if STATISTICS:
                tl.store(squares_ptr + line, tl.sum(e * e, 1) * (SQUARED_SCALE * SQUARED_SCALE), mask=inside)
            if MODE == HELD:
                e = held_of(gap, e_ptr.dtype.element_ty)
                store_block(e_desc, e_ptr, e, m * BM, n * BN, chunk, columns, e_stride, BN, SPLIT, POINTERS)
            if MODE == ANCHORED:
                if HAS_CAP:
                    e = e * (1.0 - (z / z_cap) * (z / z_cap))
                store_block(e_desc, e_ptr, e, m * BM, n * BN, chunk, columns, e_stride, BN, SPLIT, POINTERS)


@triton.jit
def known_values(
    z, gap, row, entry, target, log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr, sigma_ptr,
    class_weight_ptr, here, rows, chunk, z_cap, HAS_CAP: tl.constexpr, HAS_CLASS: tl.constexpr,
    HAS_ALPHA: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_SIGMA: tl.constexpr,
):  # fmt: skip
    """The gradient's matrix from logits z, which lie ``gap`` above the anchor, where lse is known: see
    numerics.KnownRows."""
    inside = row < chunk
    gap -= tl.load(log_total_ptr + row, mask=inside, other=0.0)[:, None]
    e = tl.exp2(gap * LOG2E)
    if HAS_ALPHA:
        coefficient = tl.load(alpha_ptr + row, mask=inside, other=0.0)[:, None]
        if HAS_GAMMA:
            gamma = tl.load(gamma_ptr + row, mask=inside, other=0.0)[:, None]
            coefficient = coefficient + gamma * tl.maximum(gap, LOWEST_GAP)
        if HAS_DELTA:
            coefficient = coefficient + tl.load(delta_ptr + row, mask=inside, other=0.0)[:, None] * e
        e = e * coefficient
    if HAS_SIGMA:
        k_column = 1.0
        if HAS_CLASS:
            k_column = tl.load(class_weight_ptr + entry, mask=here, other=0.0)[None, :]
        e = e - tl.load(sigma_ptr + row, mask=inside, other=0.0)[:, None] * k_column
    if HAS_CAP:
        e = e * (1.0 - (z / z_cap) * (z / z_cap))
    e = e * tl.load(factor_ptr + row, mask=inside, other=0.0)[:, None]
    is_target = entry[None, :] == target[:, None]
    e = tl.where(is_target, tl.load(target_value_ptr + row, mask=inside, other=0.0)[:, None], e)
    return tl.where((row < rows)[:, None], e, 0.0)


@triton.jit
def held_of(gap, DTYPE: tl.constexpr):
    """A logit relative to the anchor as it waits: in float32 as it is, else in the bits of a 16-bit float."""
    if tl.float32 == DTYPE:
        return gap
    else:
        # Rounded by being added to a number without fractions, of which the lower 16 bits are zeros.
        steps = (tl.maximum(gap, LOWEST_HELD) + HELD_BELOW) * HELD_STEPS + WHOLE
        return steps.to(tl.int32, bitcast=True).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit(do_not_specialize=["chunk"])
def held_kernel(
    e_ptr, row_target_ptr, anchor_ptr, log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr, gamma_ptr, delta_ptr,
    sigma_ptr, count_ptr, temperature_ptr, class_weight_ptr, chunk, vocab, e_stride, scale, cap,
    HAS_CAP: tl.constexpr, HAS_CLASS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_SIGMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient's matrix in place of the logits that waited (:func:`held_of`), all of them. One program owns a
    row. Those of ignored tokens become 0."""
    row = tl.program_id(0) + tl.arange(0, 1)
    rows = tl.minimum(tl.maximum(tl.load(count_ptr), 0), chunk)
    target = tl.load(row_target_ptr + row)
    anchor = tl.load(anchor_ptr + row)
    total = tl.load(log_total_ptr + row)
    _, z_cap = tempered(temperature_ptr, row[:, None], (row < chunk)[:, None], scale, cap, HAS_TEMPERATURE)
    e_ptr += row.to(tl.int64)[:, None] * e_stride
    for start in range(0, vocab, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        here = entry < vocab
        place, mask = e_ptr + entry[None, :], here[None, :] & (row < rows)[:, None]
        held = tl.load(place, mask=mask, other=0.0)
        gap = held.to(tl.float32)
        is_nothing = gap == float("-inf")
        if e_ptr.dtype.element_ty != tl.float32:
            steps = held.to(tl.int16, bitcast=True).to(tl.int32)
            gap = steps.to(tl.float32) * (1.0 / HELD_STEPS) - HELD_BELOW
            is_nothing = steps == HELD_NOTHING
        e = known_values(
            gap + anchor[:, None], gap, row, entry, target, log_total_ptr, factor_ptr, target_value_ptr, alpha_ptr,
            gamma_ptr, delta_ptr, sigma_ptr, class_weight_ptr, here, rows, chunk, z_cap, HAS_CAP, HAS_CLASS, HAS_ALPHA,
            HAS_GAMMA, HAS_DELTA, HAS_SIGMA,
        )  # fmt: skip
        # Where a row's logits are no numbers, neither is its logsumexp, nor any element of its gradient.
        e = tl.where(is_nothing & (entry[None, :] != target[:, None]), 0.0 * total[:, None], e)
        tl.store(place, e.to(e_ptr.dtype.element_ty), mask=here[None, :])


# ---------------------------------------------------------------------------------------------------------------------
# From sums to row factors, and the rescue


@triton.jit(do_not_specialize=["first", "chunk", "tokens"])
def finish_kernel(
    sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr, order_ptr, count_ptr,
    anchor_ptr, row_anchor_ptr, list_ptr, state_ptr, g_ptr, k_ptr, smooth_ptr, share_ptr, row_target_ptr, record_ptr,
    temperature_ptr, x_ptr, w_ptr, bias_ptr, e_ptr, weight_ptr, norm_ptr,
    out_target_ptr, out_anchor_ptr, out_total_ptr, out_weighted_ptr, out_entropy_ptr, out_argmax_ptr, out_highest_ptr,
    out_lowest_ptr, out_squared_ptr, factor_ptr, target_value_ptr, token_value_ptr, loss_ptr,
    tokens, first, chunk, lines, size, columns, x_stride, w_stride, e_stride, e_column_stride, keep, z_loss, scale, cap,
    ENTROPY: tl.constexpr, STATISTICS: tl.constexpr, SUM_LOGITS: tl.constexpr, FACTORS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, STORE: tl.constexpr, LOSS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_CLASS: tl.constexpr, SMOOTH: tl.constexpr,
    RECORD: tl.constexpr, SHARED: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
    BR: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What follows a chunk's first product, in tickets that programs draw in turn. The stages of tickets:

    0. BR rows: sum the column tiles' lines in order; write what the forward knows of each token, 0 of an ignored one;
       with FACTORS

           factor = u = g α / (e_y + s)      value = u T,   T = ((α − β) e_y − β s) / α

       and with SCALE_ROWS x = u x, rounded to x's dtype: the operand of dW = eᵀ (u ⊙ x). value is the target's element
       of the gradient, which is 0 in e: dX's epilogue adds it by position, dW's product by token. A row whose sum
       passed the threshold goes to ``list`` instead.
    1. BM listed rows and BN entries: the rows' largest logit, into row_anchor.
    2. The same tiles: sums, and relative to it what STORE says: nothing (SUMS), e (ANCHORED) or logits (HELD).
    3. BR listed rows: as stage 0, anchored there.
    4. With LOSS, one ticket: norm · Σ t (nll + z_loss · lse²), of all tokens of the call.

    Mostly no row is listed, and stages 1 to 3 have no tickets. A stage begins when the one before is done. A program
    waits only for tickets that were drawn before its own. Those are being worked on by programs that run, so no number
    of programs that run at a time is too small.

    Of a sharded call, RECORD: what this rank knows of the rows goes to ``record`` [8, C], in the order of
    parallel.RECORD, and nowhere else. Then SHARED, which has stage 0 alone: the lines are the ranks' records, relative
    to row_anchor; factor is multiplied by ``share``, which takes this rank's exponentials there; value is 0 where
    another rank has the target.
    """
    all_rows = tl.minimum(tokens - first, chunk)
    rows = tl.minimum(tl.maximum(tl.load(count_ptr) - first, 0), chunk)
    blocks = tl.cdiv(all_rows, BR)
    limit: tl.constexpr = HELD_RESCUE_SUM if STORE == HELD else RESCUE_SUM
    column_tiles = tl.cdiv(columns, BN)
    ticket = -1
    end = 0
    while ticket < end:
        ticket = tl.atomic_add(state_ptr + (SHARED_TICKETS if SHARED else TICKETS), 1, sem="relaxed")
        listed = 0
        if not SHARED:
            if ticket >= blocks:
                wait_until(state_ptr + DONE, blocks)
                listed = tl.load(state_ptr + LISTED)
        listed_blocks = tl.cdiv(listed, BR)
        tiles = tl.cdiv(listed, BM) * column_tiles
        end = blocks + 2 * tiles + listed_blocks
        stage = (ticket >= blocks).to(tl.int32) + (ticket >= blocks + tiles).to(tl.int32)
        stage += (ticket >= blocks + 2 * tiles).to(tl.int32) + (ticket >= end).to(tl.int32)
        if LOSS:
            end += 1
        if ticket < end:
            if stage >= 2:
                wait_until(state_ptr + DONE + stage - 1, tl.where(stage == 4, listed_blocks, tiles))
            if (stage == 1) | (stage == 2):
                tile = tl.where(stage == 1, ticket - blocks, ticket - blocks - tiles)
                rescue_tile(
                    tile // column_tiles, tile % column_tiles, stage == 1, listed, x_ptr, w_ptr, bias_ptr,
                    row_target_ptr, list_ptr, row_anchor_ptr, e_ptr, sum_ptr, gap_ptr, squares_ptr, temperature_ptr,
                    first, chunk, size, x_stride, w_stride, e_stride, e_column_stride, columns, scale, cap, STORE,
                    ENTROPY, STATISTICS, HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_TEMPERATURE, BM, BN, BK, PRECISION, TURNED,
                )  # fmt: skip
            elif stage == 4:
                if LOSS:
                    sum_losses(
                        out_target_ptr, out_anchor_ptr, out_total_ptr, weight_ptr, norm_ptr, loss_ptr, tokens, z_loss,
                        BLOCK,
                    )  # fmt: skip
            else:
                finish_rows(
                    tl.where(stage == 3, ticket - blocks - 2 * tiles, ticket), stage == 3, rows, all_rows, listed,
                    sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr, squares_ptr, order_ptr,
                    anchor_ptr, row_anchor_ptr, list_ptr, state_ptr, g_ptr, k_ptr, smooth_ptr, share_ptr,
                    row_target_ptr, record_ptr, temperature_ptr, x_ptr, out_target_ptr, out_anchor_ptr, out_total_ptr,
                    out_weighted_ptr, out_entropy_ptr, out_argmax_ptr, out_highest_ptr, out_lowest_ptr,
                    out_squared_ptr, factor_ptr, target_value_ptr, token_value_ptr, first, chunk, lines, size, x_stride,
                    keep, z_loss, cap, limit, ENTROPY, STATISTICS, SUM_LOGITS, FACTORS, SCALE_ROWS, HAS_CAP,
                    HAS_TEMPERATURE, HAS_CLASS, SMOOTH, RECORD, SHARED, BR, BL,
                )  # fmt: skip
            if not SHARED:
                tl.debug_barrier()  # all of the program has written
                tl.atomic_add(state_ptr + DONE + stage, 1, sem="release")


@triton.jit
def wait_until(counter_ptr, count):
    """Until so many tickets are done; what their programs wrote is there then."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def finish_rows(
    block, from_list, rows, all_rows, listed, sum_ptr, gap_ptr, highest_ptr, argmax_ptr, lowest_ptr, logit_sum_ptr,
    squares_ptr, order_ptr, anchor_ptr, row_anchor_ptr, list_ptr, state_ptr, g_ptr, k_ptr, smooth_ptr, share_ptr,
    row_target_ptr, record_ptr, temperature_ptr, x_ptr, out_target_ptr, out_anchor_ptr, out_total_ptr, out_weighted_ptr,
    out_entropy_ptr, out_argmax_ptr, out_highest_ptr, out_lowest_ptr, out_squared_ptr, factor_ptr, target_value_ptr,
    token_value_ptr, first, chunk, lines, size, x_stride, keep, z_loss, cap, limit, ENTROPY: tl.constexpr,
    STATISTICS: tl.constexpr, SUM_LOGITS: tl.constexpr, FACTORS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_CLASS: tl.constexpr, SMOOTH: tl.constexpr,
    RECORD: tl.constexpr, SHARED: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """BR rows of stage 0 or, ``from_list``, 3. row_anchor is the anchor that exponentials were taken at. A row whose
    sum is above ``limit`` is done again."""
    slot = block * BR + tl.arange(0, BR)
    is_listed = (tl.zeros((BR,), tl.int32) + from_list.to(tl.int32)) != 0
    exists = slot < tl.where(is_listed, listed, rows)
    row = tl.where(is_listed, tl.load(list_ptr + slot, mask=exists & is_listed, other=0), slot)
    ignored = (slot >= rows) & (slot < all_rows) & ~is_listed
    s = tl.zeros((BR,), tl.float32)
    gaps = tl.zeros((BR,), tl.float32)
    squares = tl.zeros((BR,), tl.float32)
    logit_sum = tl.zeros((BR,), tl.float32)
    highest = tl.full((BR,), float("-inf"), tl.float32)
    lowest = tl.full((BR,), float("inf"), tl.float32)
    best = tl.zeros((BR,), tl.int32)
    for start in range(0, tl.where(from_list | (block * BR < rows), lines, 0), BL):
        line = start + tl.arange(0, BL)
        mask = (line < lines)[:, None] & exists[None, :]
        place = line[:, None] * chunk + row[None, :]
        s += tl.sum(tl.load(sum_ptr + place, mask=mask, other=0.0), 0)
        if ENTROPY:
            gaps += tl.sum(tl.load(gap_ptr + place, mask=mask, other=0.0), 0)
        if STATISTICS:
            squares += tl.sum(tl.load(squares_ptr + place, mask=mask, other=0.0), 0)
            lowest = tl.minimum(lowest, tl.min(tl.load(lowest_ptr + place, mask=mask, other=float("inf")), 0))
            tops = tl.load(highest_ptr + place, mask=mask, other=float("-inf"))
            top = tl.max(tops, 0)
            indices = tl.load(argmax_ptr + place, mask=mask, other=BIGGEST_INDEX)
            first_best = tl.min(tl.where(tops == top[None, :], indices, BIGGEST_INDEX), 0)
            best = tl.where(top > highest, first_best, best)
            highest = tl.maximum(highest, top)
        if SUM_LOGITS:
            logit_sum += tl.sum(tl.load(logit_sum_ptr + place, mask=mask, other=0.0), 0)
    target_logit = tl.load(anchor_ptr + row, mask=exists, other=0.0)
    anchored = exists if SHARED else exists & is_listed
    anchor = tl.load(row_anchor_ptr + row, mask=anchored, other=0.0)
    anchor = tl.where(anchored, anchor, tl.maximum(target_logit, LOWEST_ANCHOR))
    done = exists
    if not SHARED:
        again = exists & ~is_listed & (s > limit)
        slots = tl.atomic_add(state_ptr + LISTED + tl.zeros((BR,), tl.int32), again.to(tl.int32), mask=again)
        tl.store(list_ptr + slots, row, mask=again)
        done = exists & ~again
    seen = exists & ~is_listed  # what is not relative to an anchor is known by stage 0
    if RECORD:
        tl.store(record_ptr + row, anchor, mask=done)
        tl.store(record_ptr + chunk + row, s, mask=done)
        if ENTROPY:
            tl.store(record_ptr + 2 * chunk + row, gaps, mask=done)
        if STATISTICS:
            tl.store(record_ptr + 3 * chunk + row, highest, mask=seen)
            tl.store(record_ptr + 4 * chunk + row, lowest, mask=seen)
            tl.store(record_ptr + 5 * chunk + row, best.to(tl.float32, bitcast=True), mask=seen)
            tl.store(record_ptr + 7 * chunk + row, squares, mask=done)
        if SUM_LOGITS:
            tl.store(record_ptr + 6 * chunk + row, logit_sum, mask=seen)
    else:
        token = tl.load(order_ptr + first + row, mask=exists | ignored, other=0)
        e_target = tl.exp2((target_logit - anchor) * LOG2E)
        total = s + e_target
        log_total = tl.where(anchor == target_logit, log1p(s), tl.log(total))
        put_result(out_target_ptr, token, target_logit, done, ignored)
        put_result(out_anchor_ptr, token, anchor, done, ignored)
        put_result(out_total_ptr, token, log_total, done, ignored)
        if ENTROPY:
            target_gap = tl.maximum(target_logit - anchor, LOWEST_GAP)
            entropy = log_total - (gaps + e_target * target_gap) / total
            put_result(out_entropy_ptr, token, entropy, done, ignored)
        if STATISTICS:
            put_result(out_argmax_ptr, token, best, seen, ignored)
            put_result(out_highest_ptr, token, highest, seen, ignored)
            put_result(out_lowest_ptr, token, lowest, seen, ignored)
            scaled = SQUARED_SCALE * total
            put_result(out_squared_ptr, token, squares / scaled / scaled, done, ignored)
        if SUM_LOGITS:
            put_result(out_weighted_ptr, token, logit_sum, seen, ignored)
        if FACTORS:
            k = 1.0
            if HAS_CLASS:
                k = tl.load(k_ptr + token, mask=done, other=1.0)
            beta = keep * k
            alpha = beta + 2.0 * z_loss * (anchor + log_total)
            if SMOOTH:
                alpha += tl.load(smooth_ptr)
            floor = tl.abs(beta) * ALPHA_FLOOR
            alpha = tl.where(tl.abs(alpha) < floor, tl.where(alpha < 0, -floor, floor), alpha)
            share = ((alpha - beta) * e_target - beta * s) / tl.where(alpha == 0, 1.0, alpha)
            if HAS_CAP:
                _, z_cap = tempered(temperature_ptr, first + row, done, 1.0, cap, HAS_TEMPERATURE)
                share = share * (1.0 - (target_logit / z_cap) * (target_logit / z_cap))
            u = tl.load(g_ptr + token, mask=done, other=0.0) * alpha / total
            value = u * share
            if SHARED:
                own = tl.load(share_ptr + row, mask=done, other=0.0)
                u = u * own
                target = tl.load(row_target_ptr + row, mask=done, other=-1)
                value = tl.where(target != ELSEWHERE, value, 0.0)
            tl.store(factor_ptr + row, u, mask=done)
            tl.store(target_value_ptr + row, value, mask=done)
            tl.store(token_value_ptr + token, value, mask=done)
            if SCALE_ROWS:
                multiply_rows(x_ptr, x_stride, row, u, done, size, 8192 // BR)


@triton.jit
def put_result(out_ptr, token, value, done, ignored):
    """A result of rows that are done, and 0 of ignored tokens."""
    tl.store(out_ptr + token, tl.where(ignored, 0, value), mask=done | ignored)


@triton.jit
def multiply_rows(x_ptr, x_stride, row, factor, mask, size, BC: tl.constexpr):
    """x = factor · x in place, for some rows."""
    for start in range(0, size, BC):
        column = start + tl.arange(0, BC)
        place = x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :]
        here = mask[:, None] & (column < size)[None, :]
        x = tl.load(place, mask=here, other=0.0).to(tl.float32) * factor[:, None]
        tl.store(place, x.to(x_ptr.dtype.element_ty), mask=here)


@triton.jit
def sum_losses(
    target_logit_ptr, anchor_ptr, log_total_ptr, weight_ptr, norm_ptr, loss_ptr, tokens, z_loss, BLOCK: tl.constexpr
):
    """loss = norm · Σ t (nll + z_loss · lse²). The weight t of an ignored token is 0, and so are its other numbers."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = token < tokens
        _, nll, lse = known_token(target_logit_ptr, anchor_ptr, log_total_ptr, token, mask)
        total += (nll + z_loss * lse * lse) * tl.load(weight_ptr + token, mask=mask, other=0.0)
    tl.store(loss_ptr, tl.sum(total, 0) * tl.load(norm_ptr))


@triton.jit
def rescue_tile(
    m, n, is_maximum, listed, x_ptr, w_ptr, bias_ptr, row_target_ptr, list_ptr, row_anchor_ptr, e_ptr, sum_ptr, gap_ptr,
    squares_ptr, temperature_ptr, first, chunk, size, x_stride, w_stride, e_stride, e_column_stride, columns, scale,
    cap, STORE: tl.constexpr, ENTROPY: tl.constexpr, STATISTICS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Tile (m, n) of the listed rows' logits once more, by pointers: their maximum, or sums and e relative to it."""
    slot = m * BM + tl.arange(0, BM)
    exists = slot < listed
    row = tl.load(list_ptr + slot, mask=exists, other=0).to(tl.int64)
    column = n * BN + tl.arange(0, BN)
    here = column < columns
    z = tl.zeros((BM, BN), tl.float32)
    for k in range(0, size, BK):
        d = k + tl.arange(0, BK)
        a_place = x_ptr + row[:, None] * x_stride + d[None, :]
        a = tl.load(a_place, mask=exists[:, None] & (d < size)[None, :], other=0.0)
        b_place = w_ptr + weight_place(column[None, :], d[:, None], w_stride, TURNED)
        b = tl.load(b_place, mask=here[None, :] & (d < size)[:, None], other=0.0)
        z = dot(a, b, z, PRECISION)
    if HAS_BIAS:
        z += tl.load(bias_ptr + column, mask=here, other=0.0).to(tl.float32)[None, :]
    z_scale, z_cap = tempered(temperature_ptr, first + row[:, None], exists[:, None], scale, cap, HAS_TEMPERATURE)
    z = capped(z, z_scale, z_cap, HAS_SCALE or HAS_TEMPERATURE, HAS_CAP)
    if is_maximum:
        top = tl.max(tl.where(here[None, :], z, float("-inf")), 1)
        tl.atomic_max(row_anchor_ptr + row, top, mask=exists)
    else:
        target = tl.load(row_target_ptr + row, mask=exists, other=-1)
        anchor = tl.load(row_anchor_ptr + row, mask=exists, other=0.0)
        gap = z - anchor[:, None]
        e = tl.where((column[None, :] == target[:, None]) | ~here[None, :], 0.0, tl.exp2(gap * LOG2E))
        tl.store(sum_ptr + n * chunk + row, tl.sum(e, 1), mask=exists)
        if ENTROPY:
            tl.store(gap_ptr + n * chunk + row, tl.sum(e * tl.maximum(gap, LOWEST_GAP), 1), mask=exists)
        if STATISTICS:
            squares = tl.sum(e * e, 1) * (SQUARED_SCALE * SQUARED_SCALE)
            tl.store(squares_ptr + n * chunk + row, squares, mask=exists)
        if STORE != SUMS:
            if STORE == HELD:
                e = held_of(gap, e_ptr.dtype.element_ty)
            elif HAS_CAP:
                e = e * (1.0 - (z / z_cap) * (z / z_cap))
            place = e_ptr + row[:, None] * e_stride + column.to(tl.int64)[None, :] * e_column_stride
            tl.store(place, e.to(e_ptr.dtype.element_ty), mask=exists[:, None] & here[None, :])


@triton.jit
def log1p(s):
    """log(1 + s) with full relative accuracy for small s: Kahan's correction of the rounded 1 + s."""
    one_more = 1.0 + s
    difference = one_more - 1.0
    safe = tl.where((difference == 0) | (difference == float("inf")), 1.0, difference)
    return tl.where(difference == 0, s, tl.where(s == float("inf"), s, tl.log(one_more) * (s / safe)))


# ---------------------------------------------------------------------------------------------------------------------
# The two products of the gradients


@triton.jit
def turns_of(tiles, steps, PROGRAMS: tl.constexpr):
    """(tiles of the full turns, tiles that are left, parts that each of these is split into)."""
    whole = tiles // PROGRAMS * PROGRAMS
    left = tiles - whole
    parts = tl.minimum(tl.minimum(PROGRAMS // tl.maximum(left, 1), MOST_PARTS), tl.maximum(steps // 8, 1))
    return whole, left, parts


@triton.jit
def programs_of(row_tiles, column_tiles, GROUP: tl.constexpr, PROGRAMS: tl.constexpr):
    """As few programs as take the tiles in as many turns, up to whole groups of tile_of: a turn's tiles then share as
    many rows and columns as they can."""
    tiles = row_tiles * column_tiles
    turns = tl.maximum(tl.cdiv(tiles, PROGRAMS), 1)
    enough = tl.cdiv(tl.maximum(tiles, 1), turns)
    group = GROUP * column_tiles
    group = tl.where(group > PROGRAMS, GROUP, group)
    return tl.minimum(tl.cdiv(enough, group) * group, PROGRAMS)


@triton.jit
def put_hidden(
    value, row, column, rows, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr, row_target_ptr, order_ptr,
    scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr, first, size, target_w_stride,
    ADD: tl.constexpr, FINAL: tl.constexpr, WAITS: tl.constexpr, ROWS: tl.constexpr, SMOOTH: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """e w of some rows and columns of a chunk's dX, to where it goes:

    with ROWS: value = factor ⊙ (e w) + target_value ⊙ w_y (the target's element, which is 0 in e). target_w is w; of a
               TURNED weight, whose rows lie scattered, it has w_y in the chunk's rows
    FINAL: out[order[p]] = scale · (value + sum[p] with ADD + smooth_p Σ_j k_j w_j)
    WAITS: out[order[p]] = value, for finish_hidden_kernel; an out of int16 takes its upper 16 bits, low[p] the next 8
    else:  sum[p] = value (+ sum[p] with ADD)              [N, D] float32, by position
    """
    exists = row < rows
    mask = exists[:, None] & (column < size)[None, :]
    if ROWS:
        value = value * tl.load(factor_ptr + row, mask=exists, other=0.0)[:, None]
        target = tl.load(row_target_ptr + row, mask=exists, other=0).to(tl.int64)
        entry = tl.maximum(target, 0)
        if TURNED:
            entry = row.to(tl.int64)
        w_place = target_w_ptr + entry[:, None] * target_w_stride + column[None, :]
        share = tl.load(target_value_ptr + row, mask=exists, other=0.0)
        value += share[:, None] * tl.load(w_place, mask=mask, other=0.0).to(tl.float32)
    position = first + row
    place = position.to(tl.int64)[:, None] * size + column[None, :]
    if ADD:
        value += tl.load(sum_ptr + place, mask=mask, other=0.0)
    if FINAL:
        token = tl.load(order_ptr + position, mask=exists, other=0).to(tl.int64)
        if SMOOTH:
            weights = tl.load(weighted_rows_ptr + column, mask=column < size, other=0.0)
            value += tl.load(smooth_ptr + token, mask=exists, other=0.0)[:, None] * weights[None, :]
        value = value * tl.load(scale_ptr)
        tl.store(out_ptr + token[:, None] * size + column[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)
    elif WAITS:
        token = tl.load(order_ptr + position, mask=exists, other=0).to(tl.int64)
        put_waiting(out_ptr + token[:, None] * size + column[None, :], low_ptr, place, value, mask)
    else:
        tl.store(sum_ptr + place, value, mask=mask)


@triton.jit
def put_waiting(out_place, low_ptr, place, value, mask):
    """Values of dX that wait for the upstream gradient where dX will be (products.waiting_layout)."""
    if low_ptr is None:
        tl.store(out_place, value.to(out_place.dtype.element_ty), mask=mask)
    else:
        bits = rounded(value, 8)
        tl.store(out_place, upper_bits(bits), mask=mask)
        tl.store(low_ptr + place, lower_bits(bits), mask=mask)


@triton.jit(do_not_specialize=["first", "chunk"])
def hidden_kernel(
    e_desc, w_desc, e_ptr, w_ptr, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr, row_target_ptr, order_ptr,
    count_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr,
    first, chunk, columns, size, e_stride, w_stride, target_w_ptr, target_w_stride,
    ADD: tl.constexpr, FINAL: tl.constexpr, WAITS: tl.constexpr, ROWS: tl.constexpr, SMOOTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, TMA: tl.constexpr, POINTERS: tl.constexpr, PRECISION: tl.constexpr, DEEP: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """dX of a chunk from S vocabulary entries; one program owns every PROGRAMS-th tile [BM rows, BN of D]."""
    rows = tl.minimum(tl.maximum(tl.load(count_ptr) - first, 0), chunk)
    row_tiles = tl.cdiv(rows, BM)
    column_tiles = tl.cdiv(size, BN)
    steps = tl.cdiv(columns, BK)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
        value = tl.zeros((BM, BN), tl.float32)
        part = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            a = load_tile(e_desc, e_ptr, m * BM, k * BK, chunk, columns, e_stride, BM, BK, not POINTERS)
            b = load_weight(w_desc, w_ptr, k * BK, n * BN, columns, size, w_stride, BK, BN, TMA, TURNED)
            part = dot(a, b, part, PRECISION)
            value, part = add_part(value, part, k, DEEP)
        value += part
        put_hidden(
            value, m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), rows, sum_ptr, out_ptr, low_ptr, factor_ptr,
            target_value_ptr, row_target_ptr, order_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr,
            first, size, target_w_stride, ADD, FINAL, WAITS, ROWS, SMOOTH, TURNED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "chunk"])
def combine_hidden_kernel(
    parts_ptr, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr, row_target_ptr, order_ptr, count_ptr,
    scale_ptr, smooth_ptr, weighted_rows_ptr, first, chunk, columns, size, target_w_ptr, target_w_stride,
    ADD: tl.constexpr, FINAL: tl.constexpr, WAITS: tl.constexpr, ROWS: tl.constexpr, SMOOTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    SLICE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """SLICE rows of a tile that hopper.hidden_kernel split: its parts, added in order, to where they go."""
    rows = tl.minimum(tl.maximum(tl.load(count_ptr) - first, 0), chunk)
    row_tiles = tl.cdiv(rows, BM)
    column_tiles = tl.cdiv(size, BN)
    whole, left, parts = turns_of(row_tiles * column_tiles, tl.cdiv(columns, BK), PROGRAMS)
    index = tl.program_id(0) // (BM // SLICE)
    if index < left:
        m, n = tile_of(whole + index, row_tiles, column_tiles, reciprocal_of(column_tiles, GROUP), GROUP)
        row = tl.program_id(0) % (BM // SLICE) * SLICE + tl.arange(0, SLICE)
        column = tl.arange(0, BN)
        value = tl.zeros((SLICE, BN), tl.float32)
        for part in range(parts):
            place = parts_ptr + (part * left + index) * (BM * BN)
            value += tl.load(place + row[:, None] * BN + column[None, :])
        put_hidden(
            value, m * BM + row, n * BN + column, rows, sum_ptr, out_ptr, low_ptr, factor_ptr, target_value_ptr,
            row_target_ptr, order_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, target_w_ptr, first, size,
            target_w_stride, ADD, FINAL, WAITS, ROWS, SMOOTH, TURNED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["done_from"])
def finish_hidden_kernel(
    sum_ptr, waiting_ptr, low_ptr, out_ptr, order_ptr, count_ptr, scale_ptr, smooth_ptr, weighted_rows_ptr, done_from,
    size, WAITS: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, one position: out[order[p]] = scale · (sum[p] + …) before ``done_from``, 0 for an ignored token.

    WAITS: in place of sum[p] what :func:`put_waiting` left in waiting, which may be out itself, and in low."""
    position = tl.program_id(0)
    count = tl.load(count_ptr)
    token = tl.load(order_ptr + position).to(tl.int64)
    scale = tl.load(scale_ptr)
    if (position < done_from) | (position >= count):
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < size
            kept = column < tl.where(position < count, size, 0)
            place = position.to(tl.int64) * size + column
            if WAITS:
                value = get_waiting(waiting_ptr + token * size + column, low_ptr, place, kept)
            else:
                value = tl.load(sum_ptr + place, mask=kept, other=0.0)
            if SMOOTH:
                weights = tl.load(weighted_rows_ptr + column, mask=kept, other=0.0)
                value += tl.load(smooth_ptr + token) * weights
            value = tl.where(position < count, value * scale, 0.0)
            tl.store(out_ptr + token * size + column, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def get_waiting(waiting_place, low_ptr, place, mask):
    """What :func:`put_waiting` stored."""
    value = tl.load(waiting_place, mask=mask, other=0)
    if low_ptr is None:
        return value.to(tl.float32)
    else:
        return joined(value, tl.load(low_ptr + place, mask=mask, other=0))


@triton.jit
def low_stride(width, LOW_BITS: tl.constexpr):
    """How many bytes apart the rows of ``width`` are in the matrix of a sum's lower bits (products.low_layout)."""
    row = (width * LOW_BITS + 7) // 8
    return (row + LOW_ROW_ALIGNMENT - 1) // LOW_ROW_ALIGNMENT * LOW_ROW_ALIGNMENT


@triton.jit
def get_low(
    low_ptr, entry, first, columns, size, width, TURNED: tl.constexpr, LOW_BITS: tl.constexpr, BN: tl.constexpr
):
    """What :func:`put_sum` stored of a tile [entries, BN of D] below the upper 16 bits: 8 bits, or 4 and zeros."""
    rows = entry[:, None]
    stride = low_stride(width, LOW_BITS)
    if LOW_BITS == 8:
        column = first + tl.arange(0, BN)[None, :]
        mask = (rows < columns) & (column < size)
        return tl.load(low_ptr + weight_place(rows, column, stride, TURNED), mask=mask, other=0)
    else:
        pair = first // 2 + tl.arange(0, BN // 2)[None, :]
        both = tl.load(
            low_ptr + weight_place(rows, pair, stride, False), mask=(rows < columns) & (pair < stride), other=0
        )
        return tl.reshape(tl.join(both & -16, both << 4), (both.shape[0], BN))


@triton.jit
def rounded(value, LOW_BITS: tl.constexpr):
    """The bits of float32, rounded to the upper 16 and so many more. (A NaN as it is: what is added would run into its
    sign.)"""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits + (1 << (15 - LOW_BITS)), bits)


@triton.jit
def upper_bits(bits):
    return (bits >> 16).to(tl.int16)


@triton.jit
def lower_bits(bits):
    """The 8 bits below the upper 16."""
    return (bits >> 8).to(tl.int8)


@triton.jit
def halves_of_byte(even, odd):
    """The 4 bits below the upper 16 of two neighbours, in one byte."""
    return (((even >> 8) & 0xF0) | ((odd >> 12) & 0xF)).to(tl.int8)


@triton.jit
def put_sum(sum_ptr, low_ptr, bits, entry, first, columns, size, width, TURNED: tl.constexpr, LOW_BITS: tl.constexpr):
    """A tile [entries, columns from ``first`` on] of rounded bits into the two matrices of a sum.

    Of 4 lower bits two neighbours share a byte: the even column has its upper half. There a row's bytes end with its
    padding and not with the last column, so that Triton sees whole words and stores many bytes at once.
    """
    rows = entry[:, None]
    column = first + tl.arange(0, bits.shape[1])[None, :]
    mask = (rows < columns) & (column < size)
    tl.store(sum_ptr + weight_place(rows, column, width, TURNED), upper_bits(bits), mask=mask)
    stride = low_stride(width, LOW_BITS)
    if LOW_BITS == 8:
        tl.store(low_ptr + weight_place(rows, column, stride, TURNED), lower_bits(bits), mask=mask)
    else:
        even, odd = tl.split(tl.reshape(bits, (bits.shape[0], bits.shape[1] // 2, 2)))
        pair = first // 2 + tl.arange(0, bits.shape[1] // 2)[None, :]
        mask = (rows < columns) & (pair < stride)
        tl.store(low_ptr + weight_place(rows, pair, stride, False), halves_of_byte(even, odd), mask=mask)


@triton.jit
def joined(high, low):
    """float32 from its upper 16 and the next 8 bits."""
    return ((high.to(tl.int32) << 16) | ((low.to(tl.int32) & 0xFF) << 8)).to(tl.float32, bitcast=True)


@triton.jit
def add_targets(
    total, begin, end, entry, column, key_ptr, token_ptr, value_ptr, hidden_ptr, hidden_stride, size, DEEP: tl.constexpr
):
    """total [entries, columns] + Σ value_i hidden_i over the places begin ≤ i < end of the sorted targets.

    value goes in as two numbers of the operands' dtype: in bfloat16 that loses 2⁻¹⁸ of it at most. hidden is exact.
    A target that all tokens have is as many terms as the product adds. So these are added in parts, too.
    """
    part = tl.zeros_like(total) if DEEP else total
    for place in range(begin, end, TARGET_STEP):
        i = place + tl.arange(0, TARGET_STEP)
        mine = i < end
        key = tl.load(key_ptr + i, mask=mine, other=-1)
        token = tl.load(token_ptr + i, mask=mine, other=0).to(tl.int64)
        x_place = hidden_ptr + token[:, None] * hidden_stride + column[None, :]
        x = tl.load(x_place, mask=mine[:, None] & (column < size)[None, :], other=0.0)
        value = tl.load(value_ptr + i, mask=mine, other=0.0)
        a = tl.where(entry[:, None] == key[None, :], value[None, :], 0.0)
        high = a.to(x.dtype)
        part = dot(high, x, part, "ieee")
        if x.dtype != tl.float32:
            part = dot((a - high.to(tl.float32)).to(x.dtype), x, part, "ieee")
        total, part = add_part(total, part, (place - begin) // TARGET_STEP, DEEP)
    return total + part if DEEP else part


@triton.jit(do_not_specialize=["first", "chunk", "start"])
def weight_kernel(
    e_desc, x_desc, e_ptr, x_ptr, sum_ptr, low_ptr, low_desc, out_desc, out_ptr, count_ptr, scale_ptr, class_weight_ptr,
    smooth_x_ptr, key_ptr, token_ptr, value_ptr, bounds_ptr, hidden_ptr, first, chunk, start, columns, size, out_width,
    e_stride, x_stride, hidden_stride,
    ADD: tl.constexpr, FINAL: tl.constexpr, INTO: tl.constexpr, PARTED: tl.constexpr, SMOOTH: tl.constexpr,
    HAS_CLASS: tl.constexpr, TARGETS: tl.constexpr, LOW_BITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr, TMA: tl.constexpr, POINTERS: tl.constexpr, PRECISION: tl.constexpr,
    DEEP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """dW of vocabulary entries start ≤ j < start + columns from a chunk; tiles [BM entries, BN of D].

    not FINAL: sum = eᵀ x (+ sum with ADD), float32
    FINAL:     out = scale · (eᵀ x + sum with ADD − k_j Σ_i smooth_i x_i)
    INTO too:  out = sum + scale · (eᵀ x − k_j Σ_i smooth_i x_i), in sum's own dtype; sum is out
    PARTED:    the sum has 24 or 20 bits of float32, in two matrices: the upper 16 (sum) and LOW_BITS more (low)
    TARGETS:   eᵀ x has Σ value_i hidden_i added, over the tokens of each entry (products.Targets): e is 0 there
    TURNED:    sum, low and out lie in memory as [D, V]; out_width is V, else D

    low_desc is what hopper.py writes the lower bits through.
    """
    rows = tl.minimum(tl.maximum(tl.load(count_ptr) - first, 0), chunk)
    row_tiles = tl.cdiv(columns, BM)
    column_tiles = tl.cdiv(size, BN)
    steps = tl.cdiv(rows, BK)
    reciprocal = reciprocal_of(column_tiles, GROUP)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        m, n = tile_of(tile, row_tiles, column_tiles, reciprocal, GROUP)
        value = tl.zeros((BM, BN), tl.float32)
        part = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            a = load_tile(e_desc, e_ptr, k * BK, m * BM, chunk, columns, e_stride, BK, BM, not POINTERS)
            b = load_tile(x_desc, x_ptr, k * BK, n * BN, chunk, size, x_stride, BK, BN, not POINTERS)
            part = dot(a.T, b, part, PRECISION)
            value, part = add_part(value, part, k, DEEP)
        value += part
        entry = m * BM + tl.arange(0, BM)
        column = n * BN + tl.arange(0, BN)
        if TARGETS:
            value = add_targets(
                value, tl.load(bounds_ptr + m * (BM // TARGET_GRAIN)),
                tl.load(bounds_ptr + (m + 1) * (BM // TARGET_GRAIN)), entry, column, key_ptr, token_ptr, value_ptr,
                hidden_ptr, hidden_stride, size, DEEP,
            )  # fmt: skip
        mask = (entry < columns)[:, None] & (column < size)[None, :]
        row, last = start + entry, start + columns
        place = weight_place(row[:, None], column[None, :], out_width, TURNED)
        if ADD and PARTED:
            high = tl.load(sum_ptr + place, mask=mask, other=0)
            value += joined(high, get_low(low_ptr, row, n * BN, last, size, out_width, TURNED, LOW_BITS, BN))
        elif ADD and (FINAL or not TMA) and not INTO:
            value += tl.load(sum_ptr + place, mask=mask, other=0.0)
        if FINAL:
            if SMOOTH:
                smooth_x = tl.load(smooth_x_ptr + column, mask=column < size, other=0.0)
                if HAS_CLASS:
                    weights = tl.load(class_weight_ptr + start + entry, mask=entry < columns, other=0.0)
                    value -= weights[:, None] * smooth_x[None, :]
                else:
                    value -= smooth_x[None, :]
            value = value * tl.load(scale_ptr)
        if INTO:
            value += tl.load(sum_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if PARTED and not FINAL:
            bits = rounded(value, LOW_BITS)
            put_sum(sum_ptr, low_ptr, bits, row, n * BN, last, size, out_width, TURNED, LOW_BITS)
        elif TMA:
            store_tile(out_desc, value, m * BM, n * BN, BN, SPLIT, ADD and not FINAL)
        else:
            tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "chunk"])
def column_sums_kernel(
    matrix_ptr, factor_ptr, order_ptr, count_ptr, out_ptr, key_ptr, value_ptr, bounds_ptr,
    first, chunk, stride, column_stride, columns,
    BY_TOKEN: tl.constexpr, HAS_FACTOR: tl.constexpr, TARGETS: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BC columns: out[j] += Σ_r factor_r matrix[r, j] over the chunk's rows; factor by token where BY_TOKEN.

    TARGETS: and Σ value_i over the tokens whose target is j (products.Targets).
    """
    rows = tl.minimum(tl.maximum(tl.load(count_ptr) - first, 0), chunk)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for begin in tl.range(0, rows, BR, num_stages=STAGES):
        row = begin + tl.arange(0, BR)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        place = matrix_ptr + row.to(tl.int64)[:, None] * stride + column.to(tl.int64)[None, :] * column_stride
        part = tl.load(place, mask=mask, other=0.0)
        part = part.to(tl.float32)
        if HAS_FACTOR:
            index = row
            if BY_TOKEN:
                index = tl.load(order_ptr + first + row, mask=row < rows, other=0)
            part = part * tl.load(factor_ptr + index, mask=row < rows, other=0.0)[:, None]
        total += part
    if TARGETS:
        end = tl.load(bounds_ptr + (tl.program_id(0) + 1) * (BC // TARGET_GRAIN))
        for begin in range(tl.load(bounds_ptr + tl.program_id(0) * (BC // TARGET_GRAIN)), end, BR):
            place = begin + tl.arange(0, BR)
            key = tl.load(key_ptr + place, mask=place < end, other=-1)
            value = tl.load(value_ptr + place, mask=place < end, other=0.0)
            total += tl.where(key[:, None] == column[None, :], value[:, None], 0.0)
    mask = column < columns
    tl.store(out_ptr + column, tl.load(out_ptr + column, mask=mask, other=0.0) + tl.sum(total, 0), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def sort_kernel(
    key_ptr, value_ptr, sorted_ptr, token_ptr, sorted_value_ptr, bounds_ptr, unit_ptr, upstream_ptr, scale_ptr, tokens,
    vocab, edges, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """BI tokens a program: each goes to its place among the sorted keys, with its value; tokens of one key in their own
    order. Further programs find the bounds: the first place whose key is at least 0, TARGET_GRAIN, 2 · TARGET_GRAIN, …
    Where there are no values, keys are sorted alone. With ``scale`` the first program makes it, unit · upstream: a
    launch less for a small step.

    A token's place is how many come before it, counted by comparing it with every other: N² comparisons, which for few
    tokens is less than the launches of a sort. A bound is the place of a key that comes before all that are equal.
    Tokens are compared BJ at a time, a multiple of BI. An equal key comes first if its block of BJ does. Within one
    block their places decide."""
    first_edge = tl.cdiv(tokens, BI)
    is_edge = tl.program_id(0) >= first_edge
    first = (tl.program_id(0) - tl.where(is_edge, first_edge, 0)) * BI
    i = first + tl.arange(0, BI)
    is_token, is_bound = i < tl.where(is_edge, 0, tokens), i < tl.where(is_edge, edges, 0)
    key = tl.load(key_ptr + i, mask=is_token, other=0)
    key = tl.where(is_edge, tl.minimum(i * TARGET_GRAIN, vocab), key)
    own = tl.where(is_edge, -BJ, first // BJ * BJ)
    before = tl.zeros((BI, BJ), tl.int32)
    for start in range(0, tokens, BJ):
        j = start + tl.arange(0, BJ)
        other = tl.load(key_ptr + j, mask=j < tokens, other=BIGGEST_INDEX)
        end = key + (start < own).to(tl.int32)
        before += (other[None, :] < end[:, None]).to(tl.int32)
    j = own + tl.arange(0, BJ)
    other = tl.load(key_ptr + j, mask=(j >= 0) & (j < tokens), other=BIGGEST_INDEX)
    before += ((other[None, :] == key[:, None]) & (j[None, :] < i[:, None])).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(sorted_ptr + place, key, mask=is_token)
    tl.store(token_ptr + place, i, mask=is_token)
    if value_ptr is not None:
        tl.store(sorted_value_ptr + place, tl.load(value_ptr + i, mask=is_token, other=0.0), mask=is_token)
        tl.store(bounds_ptr + i, place, mask=is_bound)
    if scale_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, tl.load(unit_ptr) * tl.load(upstream_ptr))


@triton.jit(do_not_specialize=["tokens", "chunk", "late"])
def group_kernel(
    key_ptr, position_ptr, order_ptr, group_ptr, token_ptr, tokens, vocab, chunk, late, BLOCK: tl.constexpr
):
    """BLOCK places of the sorted targets: whose target each is, and its group. That is its chunk of positions, if the
    chunk has the target twice or more and is not ``late``, the last one; else ``late``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tokens
    key, position = tl.load(key_ptr + i, mask=mask, other=0), tl.load(position_ptr + i, mask=mask, other=0)
    own, again = position // chunk, tl.zeros((BLOCK,), tl.int1)
    for step in tl.static_range(-1, 2, 2):
        beside = i + step
        exists = (beside >= 0) & (beside < tokens)
        other = tl.load(position_ptr + beside, mask=exists, other=0) // chunk
        again = again | (exists & (other == own) & (tl.load(key_ptr + beside, mask=exists, other=0) == key))
    group = tl.where(again & (key < vocab), own, late)
    tl.store(group_ptr + i, group.to(tl.int32), mask=mask)
    tl.store(token_ptr + i, tl.load(order_ptr + position, mask=mask, other=0).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["tokens", "steps", "edges", "bounds"])
def list_kernel(
    group_ptr, place_ptr, key_ptr, token_ptr, listed_key_ptr, listed_token_ptr, bounds_ptr, tokens, vocab, steps, edges,
    bounds, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK places of the targets sorted by group: keys and tokens from their places before. Further programs find the
    bounds of every group, as sort_kernel's are, in 2^steps > tokens halves."""
    first = tl.cdiv(tokens, BLOCK)
    is_bound = tl.program_id(0) >= first
    i = (tl.program_id(0) - tl.where(is_bound, first, 0)) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.where(is_bound, 0, tokens)
    place = tl.load(place_ptr + i, mask=mask, other=0)
    tl.store(listed_key_ptr + i, tl.load(key_ptr + place, mask=mask, other=0), mask=mask)
    tl.store(listed_token_ptr + i, tl.load(token_ptr + place, mask=mask, other=0), mask=mask)
    mask = i < tl.where(is_bound, bounds, 0)
    group, key = i // edges, tl.minimum(i % edges * TARGET_GRAIN, vocab)
    low, high = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32) + tokens
    for _ in range(tl.where(is_bound, steps, 0)):
        middle = (low + high) // 2
        open = mask & (low < high)
        own = tl.load(group_ptr + middle, mask=open, other=0)
        of = tl.load(key_ptr + tl.load(place_ptr + middle, mask=open, other=0), mask=open, other=0)
        before = open & ((own < group) | ((own == group) & (of < key)))
        low, high = tl.where(before, middle + 1, low), tl.where(open & ~before, middle, high)
    tl.store(bounds_ptr + i, low, mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# How the three products are launched


class Portable:
    """:class:`tiles.Products` of this file."""

    logits_kernel = logits_kernel
    hidden_kernel = hidden_kernel
    weight_kernel = weight_kernel

    def describe(self, matrix, rows, columns):
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])

    def logits(self, c, t, plain, known):
        return self.constants(c, t) | {"SPLIT": t.split, "TMA": c.tma}

    def hidden(self, c, t, sums, parts, smooth):
        constants = self.constants(c, t) | {"TMA": c.tma, "DEEP": t.deep}
        if smooth:
            constants["num_stages"] = 2
        return HiddenLaunch(constants, t.group)

    def weight(self, c, t, kind, low, aligned):
        by_descriptor = c.tma and aligned and (kind.final or not kind.parted) and not kind.turned
        values = {"SPLIT": t.split, "TMA": by_descriptor, "DEEP": t.deep, "low_desc": None}
        return WeightLaunch(self.constants(c, t) | values, by_descriptor, t.block_columns)

    def constants(self, c, t):
        own = {"FLATTEN": t.flatten, "PRECISION": c.precision, "num_warps": t.warps, "num_stages": t.stages}
        return t.sizes | own


PRODUCTS = Portable()
