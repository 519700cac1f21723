"""The Triton kernels of a distillation; torch_impl/distillation/fused.py launches them. Mirror of
jax_impl/distillation/row_kernels.py.

One program of row_losses_kernel owns one token: a row of V raw logits of the student and one of the teacher, in
float32. It goes over them in blocks, once for the logsumexps and once or twice for the divergence and its gradient.
Every lane keeps sums of its own. They are added at the end of the row, in a fixed order. tile_gradient_kernel makes the
gradient of a tile of such rows from what was kept of them. tile_kernel makes sums and gradient of a tile of logits
whose logsumexps are known. ids_losses_kernel and ids_tile_kernel are for a teacher of a few ids and one class for all
others. The formulas are those of parts.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.torch_impl.kernels.portable import LOG2E, LOWEST_ANCHOR, capped, log1p, tempered

# Which divergence: β = 0, between 0 and 1, 1.
FORWARD, MIXED, REVERSE = (tl.constexpr(kind) for kind in range(3))
# How many numbers of a token its gradient needs.
KEPT = tl.constexpr(8)


@triton.jit
def logits_of(
    raw_ptr, bias_ptr, column, mask, scale, cap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr
):
    """f(r + b) of columns of a row, −inf beside the mask."""
    z = tl.load(raw_ptr + column, mask=mask, other=0.0)
    if HAS_BIAS:
        z += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    z = capped(z, scale, cap, HAS_SCALE, HAS_CAP)
    return tl.where(mask, z, float("-inf"))


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def expm1(x):
    """exp(x) − 1 for x ≤ 0, of full relative precision near 0: its series there. (A division would cost more.)"""
    near = tl.maximum(x, -0.25)
    series = 1.0 + near * (1 / 5) * (1.0 + near * (1 / 6))
    series = near * (1.0 + near * 0.5 * (1.0 + near * (1 / 3) * (1.0 + near * 0.25 * series)))
    return tl.where(x > -0.25, series, exp(x) - 1.0)


@triton.jit
def log1p_below(s):
    """log(1 + s) for −1 < s ≤ 0, of full relative precision near 0: its series there."""
    near = tl.maximum(s, -0.125)
    series = 1 / 5 - near * (1 / 6 - near * (1 / 7 - near * (1 / 8)))
    series = near * (1.0 - near * (0.5 - near * (1 / 3 - near * (0.25 - near * series))))
    return tl.where(s > -0.125, series, tl.log(1.0 + s))


@triton.jit
def more(highest, total, z):
    """The largest logit and Σ exp(z − largest) of every lane with one logit more."""
    above = tl.maximum(highest, z)
    return above, total * exp(highest - above) + exp(z - above)


@triton.jit
def joined(highest, total):
    """The lanes' as those of the row: the largest logit, and log Σ exp(z − largest)."""
    top = tl.max(highest, 0)
    return top, tl.log(tl.sum(total * exp(highest - top), 0))


@triton.jit
def weighted(p, log_ratio):
    """p · log_ratio, 0 where p is 0 (there log_ratio may be infinite or NaN)."""
    return tl.where(p == 0, 0.0, p * log_ratio)


@triton.jit
def mixture_ratios(log_p, log_q, beta):
    """log (p / m) and log (q / m), of full relative precision where p and q are close."""
    gap = log_q - log_p
    log_m = log1p_below(tl.where(gap > 0, beta, 1.0 - beta) * expm1(-tl.abs(gap)))  # log (m / max(p, q))
    return -tl.maximum(gap, 0.0) - log_m, tl.minimum(gap, 0.0) - log_m


@triton.jit
def divergence_terms(log_p, log_q, beta, KIND: tl.constexpr):
    """Each entry's share of the divergence, and of Σ_j q (log q − log m), which is 0 for the forward KL."""
    p, q = exp(log_p), exp(log_q)
    if KIND == FORWARD:
        own = tl.zeros_like(p)
        terms = (weighted(p, log_p - log_q) - p) + q
    elif KIND == MIXED:
        from_p, from_q = mixture_ratios(log_p, log_q, beta)
        own = weighted(q, from_q)
        terms = beta * weighted(p, from_p) + (1.0 - beta) * own
    else:
        own = weighted(q, log_q - log_p)
        terms = (own - q) + p
    return terms, own


@triton.jit
def divergence_slope(log_p, log_q, mean, beta, KIND: tl.constexpr):
    """The divergence's gradient in the student's logits."""
    if KIND == FORWARD:
        slope = exp(log_q) - exp(log_p)
    elif KIND == MIXED:
        _, gap = mixture_ratios(log_p, log_q, beta)
        slope = (1.0 - beta) * weighted(exp(log_q), gap - mean)
    else:
        slope = weighted(exp(log_q), (log_q - log_p) - mean)
    return slope


@triton.jit
def log_prob(z, anchor, log_total, NORMALIZE: tl.constexpr):
    """log softmax of logits, or of log-probabilities nothing."""
    if NORMALIZE:
        z = (z - anchor) - log_total
    return z


@triton.jit
def both_sides(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, column, mask, scale, cap, teacher_scale, teacher_cap, anchor,
    log_total, teacher_anchor, teacher_log_total, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_CAP: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Columns of a row whose logsumexps are known: the student's logits, log q, and log p."""
    z = logits_of(student_ptr, bias_ptr, column, mask, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP)
    t = logits_of(
        teacher_ptr, teacher_bias_ptr, column, mask, teacher_scale, teacher_cap, HAS_TEACHER_BIAS, HAS_TEACHER_SCALE,
        HAS_TEACHER_CAP,
    )  # fmt: skip
    return z, log_prob(z, anchor, log_total, True), log_prob(t, teacher_anchor, teacher_log_total, NORMALIZE)


@triton.jit
def hard_loss(own_logit, others_anchor, others_log, nll_coef, hard_temperature):
    """nll_coef · −log q of the target, from its logit and the logsumexp of all others in two parts; and for the
    gradient nll_coef · (1 − q) · hard_temperature, and the second part, of no others 0."""
    odds = (others_anchor - own_logit) + others_log  # log ((1 − q) / q)
    loss = nll_coef * (tl.maximum(odds, 0.0) + log1p(exp(-tl.abs(odds))))
    gone = nll_coef * hard_temperature / (1.0 + exp(-odds))  # 1 − q: no difference
    return loss, gone, tl.where(others_log == float("-inf"), 0.0, others_log)


@triton.jit
def whole_gradient(
    dz, z, own, gone, others_anchor, others_log, hard_temperature, cap, HARD: tl.constexpr,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    """The divergence's gradient with the hard loss's, through the softcap. ``own``: where the target is."""
    if HARD:
        dz += gone * tl.where(own, -1.0, exp((z * hard_temperature - others_anchor) - others_log))
    if HAS_CAP:
        ratio = z / cap
        dz = dz * (1.0 - ratio * ratio)
    return dz


@triton.jit
def store_gradient(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, gradient_ptr, width, stop, target, scale, cap, teacher_scale,
    teacher_cap, beta, hard_temperature, factor, anchor, log_total, teacher_anchor, teacher_log_total, mean,
    others_anchor, others_log, gone,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr, HAS_TEACHER_CAP: tl.constexpr, NORMALIZE: tl.constexpr, KIND: tl.constexpr,
    HARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of ``width`` columns of a row times ``factor``; zeros from the column ``stop`` on."""
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < stop
        z, log_q, log_p = both_sides(
            student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, column, mask, scale, cap, teacher_scale, teacher_cap,
            anchor, log_total, teacher_anchor, teacher_log_total, HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_TEACHER_BIAS,
            HAS_TEACHER_SCALE, HAS_TEACHER_CAP, NORMALIZE,
        )  # fmt: skip
        dz = whole_gradient(
            divergence_slope(log_p, log_q, mean, beta, KIND), z, column == target, gone, others_anchor, others_log,
            hard_temperature, cap, HARD, HAS_CAP,
        )  # fmt: skip
        dz = tl.where(mask, dz * factor, 0.0).to(gradient_ptr.dtype.element_ty)
        tl.store(gradient_ptr + column, dz, mask=column < width)


@triton.jit
def row_losses_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, valid_ptr, hard_ptr, temperature_ptr, loss_ptr, kept_ptr,
    gradient_ptr, vocab, student_stride, teacher_stride, gradient_stride, scale, cap, teacher_scale, teacher_cap, beta,
    nll_coef, hard_temperature,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr, HAS_TEACHER_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    NORMALIZE: tl.constexpr, KIND: tl.constexpr, HARD: tl.constexpr, KEEP: tl.constexpr, STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's loss; if STORE, the gradient of the student's r + b but for logit_scale, and if KEEP, what
    tile_gradient_kernel needs. For a token that does not count, of which nothing is read, loss and gradient are zeros.

    NORMALIZE: the teacher's rows are raw logits, else log-probabilities. HARD: nll_coef times the hard loss is added,
    of the logits times hard_temperature. HAS_TEMPERATURE: temperature_ptr has the token's own, in place of it.
    """
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + row) != 0
    stop = tl.where(valid, vocab, 0)
    scale, cap = tempered(temperature_ptr, row, valid, scale, cap, HAS_TEMPERATURE)
    teacher_scale, teacher_cap = tempered(temperature_ptr, row, valid, teacher_scale, teacher_cap, HAS_TEMPERATURE)
    if HAS_TEMPERATURE:
        hard_temperature = tl.load(temperature_ptr + row)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    gradient_ptr += row * gradient_stride
    target = vocab
    if HARD:
        target = tl.load(hard_ptr + row)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), LOWEST_ANCHOR, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    teacher_highest, teacher_total, others_highest, others = highest, total, highest, total
    for start in range(0, stop, BLOCK):
        column = start + lanes
        mask = column < stop
        z = logits_of(student_ptr, bias_ptr, column, mask, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP)
        highest, total = more(highest, total, z)
        if NORMALIZE:
            t = logits_of(
                teacher_ptr, teacher_bias_ptr, column, mask, teacher_scale, teacher_cap, HAS_TEACHER_BIAS,
                HAS_TEACHER_SCALE, HAS_TEACHER_CAP,
            )  # fmt: skip
            teacher_highest, teacher_total = more(teacher_highest, teacher_total, t)
        if HARD:
            hard = tl.where(column == target, float("-inf"), z * hard_temperature)
            others_highest, others = more(others_highest, others, hard)
    anchor, log_total = joined(highest, total)
    teacher_anchor, teacher_log_total = joined(teacher_highest, teacher_total)
    others_anchor, others_log = joined(others_highest, others)
    loss, gone = 0.0, 0.0
    if HARD:
        own_logit = hard_temperature * logits_of(
            student_ptr, bias_ptr, target, valid, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP
        )
        loss, gone, others_log = hard_loss(own_logit, others_anchor, others_log, nll_coef, hard_temperature)
    divergence = tl.zeros((BLOCK,), tl.float32)
    student_sum = tl.zeros((BLOCK,), tl.float32)
    # The forward KL's gradient needs no sum over the row. So it is stored here, zeros for a token that does not count.
    for start in range(0, vocab if STORE and KIND == FORWARD else stop, BLOCK):
        column = start + lanes
        mask = column < stop
        z, log_q, log_p = both_sides(
            student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, column, mask, scale, cap, teacher_scale, teacher_cap,
            anchor, log_total, teacher_anchor, teacher_log_total, HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_TEACHER_BIAS,
            HAS_TEACHER_SCALE, HAS_TEACHER_CAP, NORMALIZE,
        )  # fmt: skip
        terms, own = divergence_terms(log_p, log_q, beta, KIND)
        divergence += tl.where(mask, terms, 0.0)
        student_sum += tl.where(mask, own, 0.0)
        if STORE and KIND == FORWARD:
            dz = whole_gradient(
                divergence_slope(log_p, log_q, 0.0, beta, KIND), z, column == target, gone, others_anchor, others_log,
                hard_temperature, cap, HARD, HAS_CAP,
            )  # fmt: skip
            dz = tl.where(mask, dz, 0.0).to(gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + column, dz, mask=column < vocab)
    tl.store(loss_ptr + row, tl.where(valid, loss + tl.sum(divergence, 0), 0.0))
    mean = tl.sum(student_sum, 0)
    if STORE and KIND != FORWARD:
        store_gradient(
            student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, gradient_ptr, vocab, stop, target, scale, cap,
            teacher_scale, teacher_cap, beta, hard_temperature, 1.0, anchor, log_total, teacher_anchor,
            teacher_log_total, mean, others_anchor, others_log, gone, HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_TEACHER_BIAS,
            HAS_TEACHER_SCALE, HAS_TEACHER_CAP, NORMALIZE, KIND, HARD, BLOCK,
        )  # fmt: skip
    if KEEP:
        kept_ptr += row * KEPT
        tl.store(kept_ptr, anchor)
        tl.store(kept_ptr + 1, log_total)
        tl.store(kept_ptr + 2, teacher_anchor)
        tl.store(kept_ptr + 3, teacher_log_total)
        tl.store(kept_ptr + 4, mean)
        tl.store(kept_ptr + 5, others_anchor)
        tl.store(kept_ptr + 6, others_log)
        tl.store(kept_ptr + 7, gone)


@triton.jit
def tile_gradient_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, valid_ptr, hard_ptr, temperature_ptr, factor_ptr, kept_ptr,
    gradient_ptr, first, width, student_stride, teacher_stride, gradient_stride, scale, cap, teacher_scale,
    teacher_cap, beta, hard_temperature,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr, HAS_TEACHER_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    NORMALIZE: tl.constexpr, KIND: tl.constexpr, HARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's row of a tile from the entry ``first`` on: the gradient of row_losses_kernel times the token's factor,
    from what that kernel has kept."""
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + row) != 0
    stop = tl.where(valid, width, 0)
    scale, cap = tempered(temperature_ptr, row, valid, scale, cap, HAS_TEMPERATURE)
    teacher_scale, teacher_cap = tempered(temperature_ptr, row, valid, teacher_scale, teacher_cap, HAS_TEMPERATURE)
    if HAS_TEMPERATURE:
        hard_temperature = tl.load(temperature_ptr + row)
    target = width
    if HARD:
        target = tl.load(hard_ptr + row) - first
    kept_ptr += row * KEPT
    store_gradient(
        student_ptr + row * student_stride, teacher_ptr + row * teacher_stride, bias_ptr, teacher_bias_ptr,
        gradient_ptr + row * gradient_stride, width, stop, target, scale, cap, teacher_scale, teacher_cap, beta,
        hard_temperature, tl.load(factor_ptr + row), tl.load(kept_ptr), tl.load(kept_ptr + 1), tl.load(kept_ptr + 2),
        tl.load(kept_ptr + 3), tl.load(kept_ptr + 4), tl.load(kept_ptr + 5), tl.load(kept_ptr + 6),
        tl.load(kept_ptr + 7), HAS_BIAS, HAS_SCALE, HAS_CAP, HAS_TEACHER_BIAS, HAS_TEACHER_SCALE, HAS_TEACHER_CAP,
        NORMALIZE, KIND, HARD, BLOCK,
    )  # fmt: skip


@triton.jit
def others_of(
    raw_ptr, bias_ptr, column, mask, scale, cap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr
):
    """f(r + b) of columns of a row, −inf where r is: the given ids are marked with it."""
    r = tl.load(raw_ptr + column, mask=mask, other=float("-inf"))
    z = r
    if HAS_BIAS:
        z += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    z = capped(z, scale, cap, HAS_SCALE, HAS_CAP)
    return tl.where(r == float("-inf"), r, z)


@triton.jit
def store_others(
    student_ptr, bias_ptr, gradient_ptr, width, stop, target, scale, cap, hard_temperature, factor, anchor, log_total,
    slope, others_anchor, others_log, gone,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of ``width`` columns of a row times ``factor``, as if none were an id; zeros from the column
    ``stop`` on. ``slope``: the gradient of the others' class, whose logsumexp is anchor + log_total."""
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < stop
        z = others_of(student_ptr, bias_ptr, column, mask, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP)
        dz = whole_gradient(
            slope * exp((z - anchor) - log_total), z, column == target, gone, others_anchor, others_log,
            hard_temperature, cap, HARD, HAS_CAP,
        )  # fmt: skip
        dz = tl.where(mask, dz * factor, 0.0).to(gradient_ptr.dtype.element_ty)
        tl.store(gradient_ptr + column, dz, mask=column < width)


@triton.jit
def ids_losses_kernel(
    student_ptr, bias_ptr, ids_ptr, log_p_ptr, valid_ptr, hard_ptr, temperature_ptr, loss_ptr, kept_ptr, at_ids_ptr,
    gradient_ptr, vocab, count, student_stride, gradient_stride, scale, cap, beta, nll_coef, hard_temperature,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    KIND: tl.constexpr, HARD: tl.constexpr, KEEP: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """As row_losses_kernel, of a teacher of ``count`` ids and one class for all others, whose log p are [C, count + 1].
    It marks the ids in the student's row.

    The classes lie in IDS lanes: the ids', −inf where an id is not known, and then the others'.
    """
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + row) != 0
    stop = tl.where(valid, vocab, 0)
    scale, cap = tempered(temperature_ptr, row, valid, scale, cap, HAS_TEMPERATURE)
    if HAS_TEMPERATURE:
        hard_temperature = tl.load(temperature_ptr + row)
    student_ptr += row * student_stride
    gradient_ptr += row * gradient_stride
    lane = tl.arange(0, IDS)
    own = tl.load(ids_ptr + row * count + lane, mask=lane < tl.where(valid, count, 0), other=-1)
    known = own >= 0
    z = logits_of(student_ptr, bias_ptr, own, known, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP)
    target, target_logit = vocab, 0.0
    if HARD:
        target = tl.load(hard_ptr + row)
        target_logit = hard_temperature * logits_of(
            student_ptr, bias_ptr, target, valid, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP
        )
    # Other threads read what these write.
    tl.debug_barrier()
    tl.store(student_ptr + own, tl.full((IDS,), float("-inf"), tl.float32), mask=known)
    tl.debug_barrier()
    highest = tl.full((BLOCK,), LOWEST_ANCHOR, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    others_highest, others = highest, total
    for start in range(0, stop, BLOCK):
        column = start + tl.arange(0, BLOCK)
        other = others_of(student_ptr, bias_ptr, column, column < stop, scale, cap, HAS_BIAS, HAS_SCALE, HAS_CAP)
        highest, total = more(highest, total, other)
        if HARD:
            hard = tl.where(column == target, float("-inf"), other * hard_temperature)
            others_highest, others = more(others_highest, others, hard)
    anchor, log_total = joined(highest, total)
    others_anchor, others_log = joined(others_highest, others)
    top = tl.maximum(anchor, tl.max(z, 0))
    log_q = tl.where(lane == count, (anchor - top) + log_total, z - top)
    log_q -= tl.maximum(tl.max(log_q, 0), LOWEST_ANCHOR)
    likeliest = tl.min(tl.where(log_q >= 0.0, lane, IDS), 0)  # it keeps the digits of 1 − q
    log_q -= log1p(tl.sum(tl.where(lane == likeliest, 0.0, exp(log_q)), 0))
    log_p = tl.load(log_p_ptr + row * (count + 1) + lane, mask=lane <= count, other=float("-inf"))
    terms, student_terms = divergence_terms(log_p, log_q, beta, KIND)
    loss, gone = tl.sum(terms, 0), 0.0
    at_ids = divergence_slope(log_p, log_q, tl.sum(student_terms, 0), beta, KIND)
    slope = tl.sum(tl.where(lane == count, at_ids, 0.0), 0)
    log_total = tl.where(log_total == float("-inf"), 0.0, log_total)
    if HARD:
        of_ids = tl.where(own == target, float("-inf"), z * hard_temperature)
        above = tl.maximum(others_anchor, tl.max(of_ids, 0))
        others_log = tl.log(exp((others_anchor - above) + others_log) + tl.sum(exp(of_ids - above), 0))
        others_anchor = above
        more_loss, gone, others_log = hard_loss(target_logit, others_anchor, others_log, nll_coef, hard_temperature)
        loss += more_loss
    at_ids = whole_gradient(
        at_ids, z, own == target, gone, others_anchor, others_log, hard_temperature, cap, HARD, HAS_CAP
    )
    tl.store(loss_ptr + row, tl.where(valid, loss, 0.0))
    if STORE:
        store_others(
            student_ptr, bias_ptr, gradient_ptr, vocab, stop, target, scale, cap, hard_temperature, 1.0, anchor,
            log_total, slope, others_anchor, others_log, gone, HAS_BIAS, HAS_SCALE, HAS_CAP, HARD, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(gradient_ptr + own, at_ids.to(gradient_ptr.dtype.element_ty), mask=known)
    if KEEP:
        kept_ptr += row * KEPT
        tl.store(kept_ptr, anchor)
        tl.store(kept_ptr + 1, log_total)
        tl.store(kept_ptr + 2, slope)
        tl.store(kept_ptr + 3, others_anchor)
        tl.store(kept_ptr + 4, others_log)
        tl.store(kept_ptr + 5, gone)
        tl.store(at_ids_ptr + row * count + lane, at_ids, mask=known)


@triton.jit
def ids_tile_kernel(
    student_ptr, bias_ptr, ids_ptr, valid_ptr, hard_ptr, temperature_ptr, factor_ptr, kept_ptr, at_ids_ptr,
    gradient_ptr, first, width, count, student_stride, gradient_stride, scale, cap, hard_temperature,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HARD: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """A token's row of a tile from the entry ``first`` on: the gradient of ids_losses_kernel times the token's factor,
    from what that kernel has kept."""
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_ptr + row) != 0
    stop = tl.where(valid, width, 0)
    scale, cap = tempered(temperature_ptr, row, valid, scale, cap, HAS_TEMPERATURE)
    if HAS_TEMPERATURE:
        hard_temperature = tl.load(temperature_ptr + row)
    target = width
    if HARD:
        target = tl.load(hard_ptr + row) - first
    gradient_ptr += row * gradient_stride
    kept_ptr += row * KEPT
    factor = tl.load(factor_ptr + row)
    store_others(
        student_ptr + row * student_stride, bias_ptr, gradient_ptr, width, stop, target, scale, cap, hard_temperature,
        factor, tl.load(kept_ptr), tl.load(kept_ptr + 1), tl.load(kept_ptr + 2), tl.load(kept_ptr + 3),
        tl.load(kept_ptr + 4), tl.load(kept_ptr + 5), HAS_BIAS, HAS_SCALE, HAS_CAP, HARD, BLOCK,
    )  # fmt: skip
    lane = tl.arange(0, IDS)
    own = tl.load(ids_ptr + row * count + lane, mask=lane < tl.where(valid, count, 0), other=-1)
    known = (own >= first) & (own < first + width)
    at_ids = tl.load(at_ids_ptr + row * count + lane, mask=known, other=0.0) * factor
    tl.debug_barrier()  # after what other threads have stored there
    tl.store(gradient_ptr + (own - first), at_ids.to(gradient_ptr.dtype.element_ty), mask=known)


@triton.jit
def tile_kernel(
    student_ptr, teacher_ptr, lse_ptr, teacher_lse_ptr, loss_ptr, mean_ptr, rest_stride, teacher_rest_stride, width,
    student_stride, teacher_stride, beta,
    NORMALIZE: tl.constexpr, KIND: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of a tile of logits, whose logsumexps are known in two parts: its share of the token's divergence and of
    Σ_j q (log q − log m); or, if STORE, with the whole of the latter, the gradient in place of the student's logits.

    NORMALIZE: the teacher's are logits, else log-probabilities.
    """
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    anchor, log_total = tl.load(lse_ptr + row), tl.load(lse_ptr + rest_stride + row)
    teacher_anchor, teacher_log_total = 0.0, 0.0
    if NORMALIZE:
        teacher_anchor = tl.load(teacher_lse_ptr + row)
        teacher_log_total = tl.load(teacher_lse_ptr + teacher_rest_stride + row)
    mean = 0.0
    if STORE:
        mean = tl.load(mean_ptr + row)
    divergence = tl.zeros((BLOCK,), tl.float32)
    student_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        log_q = log_prob(tl.load(student_ptr + column, mask=mask, other=0.0), anchor, log_total, True)
        t = tl.load(teacher_ptr + column, mask=mask, other=0.0)
        log_p = log_prob(t, teacher_anchor, teacher_log_total, NORMALIZE)
        if STORE:
            tl.store(student_ptr + column, divergence_slope(log_p, log_q, mean, beta, KIND), mask=mask)
        else:
            terms, own = divergence_terms(log_p, log_q, beta, KIND)
            divergence += tl.where(mask, terms, 0.0)
            student_sum += tl.where(mask, own, 0.0)
    if not STORE:
        tl.store(loss_ptr + row, tl.sum(divergence, 0))
        tl.store(mean_ptr + row, tl.sum(student_sum, 0))
