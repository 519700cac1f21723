"""Every option and every gradient in NumPy float64. Slow; all other implementations are compared with it.

It follows docs/design.md line by line. Exponentials are anchored at the target's logit. A row whose exponent would
overflow is anchored at its maximum. Row factors never touch the matrix, and label smoothing is a rank-one correction.
Inputs of any dtype (bfloat16 through ml_dtypes) are converted to float64 first. Only tokens are chunked: the order of
chunks changes no value.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from logitless.spec import ALPHA_FLOOR, RESCUE_NATS, STATISTICS, LossOptions, TokenStats, check_shift

Array = NDArray[np.float64]
Stats = TokenStats[NDArray[np.generic]]


@dataclasses.dataclass(frozen=True)
class LossResult:
    """The loss (scalar, or [...] for "none"), the gradients of Σ loss · upstream + Σ lse · lse_upstream, and the
    statistics, lse among them."""

    loss: Array
    hidden_grad: Array
    weight_grad: Array
    bias_grad: Array
    stats: Stats


@dataclasses.dataclass(frozen=True)
class LogitsResult:
    """The loss (scalar, or [...] for "none"), the logits' gradient of Σ loss · upstream + Σ lse · lse_upstream, and the
    statistics, lse among them."""

    loss: Array
    logits_grad: Array
    stats: Stats


@dataclasses.dataclass(frozen=True)
class LogProbResult:
    """log p(target), the entropy and the statistics, [...] each, and the gradients of their sums times the upstream
    gradients."""

    log_prob: Array
    entropy: Array
    hidden_grad: Array
    weight_grad: Array
    bias_grad: Array
    stats: Stats


@dataclasses.dataclass(frozen=True)
class TokenLogProbResult:
    """log p of K given ids a token, [..., K], and the gradients of their sum times the upstream gradients."""

    log_prob: Array
    logits_grad: Array
    """[N, V], of hidden weightᵀ + bias."""
    hidden_grad: Array
    weight_grad: Array
    bias_grad: Array


@dataclasses.dataclass(frozen=True)
class DistillationResult:
    """The loss (scalar, or [...] for "none"), and the gradients of Σ loss · upstream."""

    loss: Array
    losses: Array
    """[...], of every token, 0 where it does not count."""
    logits_grad: Array
    """[N, V], of hidden weightᵀ + bias."""
    hidden_grad: Array
    weight_grad: Array
    bias_grad: Array


@dataclasses.dataclass(frozen=True)
class _Inputs:
    x: Array  # [N, D]
    w: Array  # [V, D]
    b: Array  # [V]
    y: NDArray[np.int64]  # [N], an ignored token's id replaced by 0
    valid: NDArray[np.bool_]  # [N]
    t: Array  # [N], 0 for an ignored token
    k: Array  # [V]
    tau: Array  # [N] the tokens' own temperatures, 1 for an ignored token


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk's anchored exponentials, [C, V] with 0 at the target, and their sums."""

    z: Array
    e: Array
    anchor: Array
    e_target: Array
    s: Array
    target_logit: Array
    nll: Array
    lse: Array
    tau: Array


def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    token_weight: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    normalizer: ArrayLike | None = None,
    shift: int = 0,
    upstream: ArrayLike = 1.0,
    lse_upstream: ArrayLike = 0.0,
    chunk: int = 128,
) -> LossResult:
    """Loss, its gradients times ``upstream`` (a scalar, or [...] for "none"), and statistics; all float64.

    ``temperature``: a number, or one per token [...]. The gradients of every token's lse times ``lse_upstream`` (a
    scalar or [...]) are added: ∂lse / ∂z_j = p_j. With a ``shift``, position i is scored against target[..., i +
    shift], and the last ones are ignored. The formula is in :mod:`logitless.spec`. ``chunk``: tokens worked on at a
    time; it changes no value beyond rounding.
    """
    options = LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap)  # type: ignore[arg-type]
    target = _shifted(np.asarray(target), shift, ignore_index)
    inputs = _inputs(hidden, weight, target, bias, token_weight, class_weight, ignore_index)
    options, inputs = _tempered(options, inputs, temperature)
    tokens = inputs.y.size
    g = np.broadcast_to(np.asarray(upstream, np.float64), np.shape(target) if reduction == "none" else ())
    norm = _norm(inputs, options, normalizer)
    g_rows = g.reshape(-1) if reduction == "none" else np.full(tokens, float(g) * norm)
    g_rows = g_rows * inputs.t * options.logit_scale / inputs.tau
    g_lse = np.broadcast_to(np.asarray(lse_upstream, np.float64), np.shape(target)).reshape(-1)

    loss = np.zeros(tokens)
    dx, dw, db = np.zeros_like(inputs.x), np.zeros_like(inputs.w), np.zeros_like(inputs.b)
    stats = []
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        part = _exponentials(inputs, rows, options)
        loss[rows] = _loss_rows(inputs, rows, options, part)
        stats.append(_stats_rows(inputs, rows, part))
        dx[rows], chunk_dw, chunk_db = _products(inputs, rows, options, part, g_rows[rows])
        dw += chunk_dw
        db += chunk_db
        if np.any(g_lse[rows]):
            dz = _lse_gradient(inputs, rows, options, part, g_lse[rows])
            dx[rows] += dz @ inputs.w
            dw += dz.T @ np.where(inputs.valid[rows, None], inputs.x[rows], 0.0)
            db += dz.sum(0)
    shape = np.shape(target)
    return LossResult(
        loss.reshape(shape) if reduction == "none" else np.asarray(np.sum(loss) * norm),
        dx.reshape(np.shape(hidden)),
        dw,
        db,
        _shaped_stats(stats, shape),
    )


def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    ignore_index: int = -100,
    log_prob_upstream: ArrayLike = 1.0,
    entropy_upstream: ArrayLike = 0.0,
    lse_upstream: ArrayLike = 0.0,
    squared_upstream: ArrayLike = 0.0,
    chunk: int = 128,
) -> LogProbResult:
    """log p(target), the entropy and the statistics, and the gradients of the sum of log_prob, entropy, lse and
    sum_p_squared, each times its upstream gradient.

    ∂ log p_y / ∂z_j = δ_jy − p_j, ∂H / ∂z_j = −p_j (log p_j + H), ∂ lse / ∂z_j = p_j and, with S = Σ_j p_j²,
    ∂S / ∂z_j = 2 p_j (p_j − S); ignored tokens give 0 and no gradient.
    """
    inputs = _inputs(hidden, weight, target, bias, None, None, ignore_index)
    options = LossOptions("none", ignore_index, logit_scale=logit_scale, softcap=softcap)
    options, inputs = _tempered(options, inputs, temperature)
    tokens, shape = inputs.y.size, np.shape(target)
    upstreams = log_prob_upstream, entropy_upstream, lse_upstream, squared_upstream
    g1, g2, g3, g4 = (np.broadcast_to(np.asarray(g, np.float64), shape).reshape(-1, 1) for g in upstreams)
    log_prob, entropy, stats = np.zeros(tokens), np.zeros(tokens), []
    dx, dw, db = np.zeros_like(inputs.x), np.zeros_like(inputs.w), np.zeros_like(inputs.b)
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        part = _exponentials(inputs, rows, options)
        valid = inputs.valid[rows]
        log_p = part.z - part.lse[:, None]
        p = np.exp(log_p)
        h = -np.sum(p * np.where(p > 0, log_p, 0.0), axis=1)
        log_prob[rows], entropy[rows] = np.where(valid, -part.nll, 0.0), np.where(valid, h, 0.0)
        stats.append(_stats_rows(inputs, rows, part))
        dz = -p * (g1[rows] + g2[rows] * (np.where(p > 0, log_p, 0.0) + h[:, None]))
        dz += p * (g3[rows] + 2.0 * g4[rows] * _less_square_sum(p))
        dz[np.arange(valid.size), inputs.y[rows]] += g1[rows, 0]
        dz = np.where(valid[:, None], dz * _slope(part, options), 0.0)
        dx[rows] = dz @ inputs.w
        dw += dz.T @ np.where(valid[:, None], inputs.x[rows], 0.0)
        db += dz.sum(0)
    return LogProbResult(
        log_prob.reshape(shape), entropy.reshape(shape), dx.reshape(np.shape(hidden)), dw, db,
        _shaped_stats(stats, shape),
    )  # fmt: skip


def linear_token_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    ids: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    ignore_index: int = -100,
    upstream: ArrayLike = 1.0,
    chunk: int = 128,
) -> TokenLogProbResult:
    """log p of ids [..., K], or [K] for all tokens, and gradients of Σ log_prob · upstream.

    ∂ log p_k / ∂z_j = δ_jk − p_j. Ignored ids give 0 and no gradient, and a token without another id is never read.
    """
    shape = (*np.shape(hidden)[:-1], np.shape(ids)[-1])
    given = np.broadcast_to(np.asarray(ids), shape).reshape(-1, shape[-1]).astype(np.int64)
    known = given != ignore_index
    some = np.where(known.any(1), given[np.arange(len(given)), known.argmax(1)], ignore_index)
    inputs = _inputs(hidden, weight, some, bias, None, None, ignore_index)
    options = LossOptions("none", ignore_index, logit_scale=logit_scale, softcap=softcap)
    options, inputs = _tempered(options, inputs, temperature)
    g = np.where(known, np.broadcast_to(np.asarray(upstream, np.float64), shape).reshape(-1, shape[-1]), 0.0)
    given, x = np.where(known, given, inputs.y[:, None]), np.where(inputs.valid[:, None], inputs.x, 0.0)
    log_prob, dz = np.zeros(given.shape), np.zeros((len(given), inputs.b.size))
    for start in range(0, len(given), chunk):
        rows = slice(start, start + chunk)
        r, index = x[rows] @ inputs.w.T + inputs.b, np.arange(len(x[rows]))
        best = given[rows][index, np.take_along_axis(r, given[rows], 1).argmax(1)]
        part = _anchored(r, best, options, inputs.tau[rows])
        z = np.take_along_axis(part.z, given[rows], 1)
        highest, total = part.target_logit[:, None], part.s + part.e_target
        log_prob[rows] = np.where(z == highest, 0.0, z - np.where(np.isinf(highest), 0.0, highest)) - part.nll[:, None]
        sums = g[rows].sum(1)
        dz[rows] = -sums[:, None] * part.e / total[:, None]
        np.add.at(dz[rows], (index[:, None], given[rows]), g[rows])
        others = np.where(given[rows] == best[:, None], 0.0, g[rows]).sum(1)
        dz[rows][index, best] = sums * part.s / total - others  # 1 − p is no difference
        dz[rows] *= _slope(part, options)
    dz[~inputs.valid] = 0.0
    return TokenLogProbResult(
        np.where(known, log_prob, 0.0).reshape(shape),
        dz,
        (dz @ inputs.w).reshape(np.shape(hidden)),
        dz.T @ x,
        dz.sum(0),
    )


def linear_top_k(
    hidden: ArrayLike,
    weight: ArrayLike,
    k: int,
    bias: ArrayLike | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
) -> tuple[Array, NDArray[np.int64]]:
    """log p and ids of the k largest logits of every token, [..., k] each, largest first; of equal ones the first."""
    options = LossOptions("none", logit_scale=logit_scale, softcap=softcap)
    tokens, w = np.shape(hidden)[:-1], _float64(weight)
    r = _float64(hidden).reshape(-1, w.shape[1]) @ w.T + (0.0 if bias is None else _float64(bias))
    z = _anchored(r, r.argmax(1), options, np.ones(len(r))).z  # the order of a token's logits has no temperature
    ids = np.argsort(-z, axis=1, kind="stable")[:, :k].reshape(*tokens, k)
    result = linear_token_log_probs(
        hidden, weight, ids, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature, upstream=0.0
    )
    return result.log_prob, ids


def sparse_distillation_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    ids: ArrayLike,
    probs: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    rest: str = "class",
    target: ArrayLike | None = None,
    nll_coef: float = 0.0,
    mask: ArrayLike | None = None,
    beta: float = 0.0,
    temperature: ArrayLike = 1.0,
    reduction: str = "mean",
    normalizer: ArrayLike | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    upstream: ArrayLike = 1.0,
) -> DistillationResult:
    """The divergence from K given probabilities a token [..., K] and what ``rest`` makes of the rest, on all classes.

    The formulas are those of the public function. Ids and probabilities are believed, but for the rounding of a sum.
    """
    tokens = np.shape(hidden)[:-1]
    given, vocab = np.asarray(ids).reshape(-1, np.shape(ids)[-1]), len(_float64(weight))
    known = given != ignore_index
    p = np.where(known, _float64(probs).reshape(given.shape), 0.0)
    total, rows = p.sum(1), np.arange(len(given))[:, None]
    p = p / (np.where(total > 0, total, 1.0) if rest == "drop" else np.maximum(total, 1.0))[:, None]
    others = np.zeros(len(p)) if rest == "drop" else np.maximum(1.0 - total, 0.0)
    # A padded place is class V + its own number, which no id belongs to.
    place = np.where(known, given, vocab + np.arange(given.shape[1]))
    classes = np.tile(np.arange(vocab), (len(p), 1))
    teacher = np.zeros((len(p), vocab + given.shape[1]))
    if rest == "class":
        # The first id that is not given stands for all of them.
        inside = np.zeros(teacher.shape, bool)
        inside[rows, place] = True
        first = np.where(inside[:, :vocab].all(1), 0, inside[:, :vocab].argmin(1))
        classes = np.where(inside[:, :vocab], classes, first[:, None])
        teacher[rows[:, 0], first] = others
    else:
        teacher += (others / np.maximum(vocab - known.sum(1), 1))[:, None]
    teacher[rows, place] = p
    counted = known.any(1).reshape(tokens)
    return _distilled(
        _Distillation(hidden, weight, bias, target, mask, temperature, ignore_index, beta, nll_coef),
        LossOptions(reduction, logit_scale=logit_scale, softcap=softcap),  # type: ignore[arg-type]
        _TeacherClasses(teacher[:, :vocab], classes, counted), normalizer, upstream,
    )  # fmt: skip


def dense_distillation_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    log_teacher: bool = False,
    target: ArrayLike | None = None,
    nll_coef: float = 0.0,
    mask: ArrayLike | None = None,
    beta: float = 0.0,
    temperature: ArrayLike = 1.0,
    reduction: str = "mean",
    normalizer: ArrayLike | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    upstream: ArrayLike = 1.0,
) -> DistillationResult:
    """The divergence from all probabilities of every token, [..., V]."""
    p = _float64(teacher).reshape(-1, np.shape(teacher)[-1])
    return _distilled(
        _Distillation(hidden, weight, bias, target, mask, temperature, ignore_index, beta, nll_coef),
        LossOptions(reduction, logit_scale=logit_scale, softcap=softcap),  # type: ignore[arg-type]
        _TeacherClasses(np.exp(p) if log_teacher else p, np.tile(np.arange(p.shape[1]), (len(p), 1)),
                        np.ones(np.shape(hidden)[:-1], bool)),
        normalizer, upstream,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Distillation:
    """The student's side, and what is asked for."""

    hidden: ArrayLike
    weight: ArrayLike
    bias: ArrayLike | None
    target: ArrayLike | None
    mask: ArrayLike | None
    temperature: ArrayLike
    ignore_index: int
    beta: float
    nll_coef: float


@dataclasses.dataclass(frozen=True)
class _TeacherClasses:
    """Probabilities of classes, [N, V], the class of every id, [N, V], and which tokens are known, [...]."""

    p: Array
    classes: NDArray[np.int64]
    known: NDArray[np.bool_]


def _distilled(
    student: _Distillation, options: LossOptions, teacher: _TeacherClasses, normalizer: ArrayLike | None,
    upstream: ArrayLike,
) -> DistillationResult:  # fmt: skip
    counted = teacher.known
    if student.mask is not None:
        counted = counted & (np.asarray(student.mask) != 0)
    y = np.zeros(counted.shape, np.int64) if student.target is None else np.asarray(student.target)
    if student.target is not None:
        counted = counted & (y != student.ignore_index)
    scored = np.where(counted, y, -1)
    inputs = _inputs(student.hidden, student.weight, scored, student.bias, None, None, -1)
    tempered, inputs = _tempered(options, inputs, student.temperature)
    tau = inputs.tau * options.logit_scale / tempered.logit_scale
    x = np.where(inputs.valid[:, None], inputs.x, 0.0)
    part = _anchored(x @ inputs.w.T + inputs.b, inputs.y, tempered, inputs.tau)
    losses, dz = _class_divergence(teacher, part.z, student.beta)
    if student.target is not None:
        hard = _anchored(x @ inputs.w.T + inputs.b, inputs.y, options, np.ones(len(x)))
        losses = losses + student.nll_coef * hard.nll
        d_hard = hard.e / (hard.s + hard.e_target)[:, None]
        d_hard[np.arange(len(x)), inputs.y] = -hard.s / (hard.s + hard.e_target)
        dz = dz + student.nll_coef * tau[:, None] * d_hard
    norm = 1.0
    if options.reduction == "mean":
        norm = 1.0 / (max(1, int(counted.sum())) if normalizer is None else float(_float64(normalizer)))
    g = np.broadcast_to(np.asarray(upstream, np.float64), counted.shape).reshape(-1) * norm
    dz = np.where(inputs.valid[:, None], dz * _slope(part, tempered) * g[:, None], 0.0)
    losses = np.where(inputs.valid, losses, 0.0)
    loss = losses.reshape(counted.shape) if options.reduction == "none" else np.asarray(losses.sum() * norm)
    gradients = (dz @ inputs.w).reshape(np.shape(student.hidden)), dz.T @ x, dz.sum(0)
    return DistillationResult(loss, losses.reshape(counted.shape), dz, *gradients)


def _class_divergence(teacher: _TeacherClasses, z: Array, beta: float) -> tuple[Array, Array]:
    """The divergence [N] between classes, and its gradient in the logits of the ids, [N, V]."""
    rows = np.arange(len(z))[:, None]
    with np.errstate(all="ignore"):  # a class without mass: 0 · log 0 is 0
        best = np.argmax(z, axis=1)[:, None]
        e = np.exp(z - np.take_along_axis(z, best, 1))
        rest = e.copy()
        rest[rows, best] = 0.0
        log_p, own = np.log(teacher.p), z - np.take_along_axis(z, best, 1) - np.log1p(rest.sum(1))[:, None]
        members, others = np.zeros(z.shape), np.zeros(z.shape)
        np.add.at(members, (rows, teacher.classes), np.exp(own))
        lonely = np.zeros(z.shape)
        np.add.at(lonely, (rows, teacher.classes), 1.0)
        log_q = np.where(lonely == 1, own, np.log(members))  # an id alone keeps its logarithm
        others[rows, teacher.classes] = 1.0
        p, q = teacher.p, np.where(others > 0, np.exp(log_q), 0.0)
        log_q = np.where(others > 0, log_q, -np.inf)

        def weighted(share: Array, log_ratio: Array) -> Array:
            return np.where(share == 0, 0.0, share * log_ratio)

        if beta == 0:
            losses, slopes = (weighted(p, log_p - log_q) - p + q).sum(1), q - p
        elif beta == 1:
            terms = weighted(q, log_q - log_p)
            losses = (terms - q + p).sum(1)
            slopes = weighted(q, log_q - log_p - terms.sum(1)[:, None])
        else:
            log_m = np.logaddexp(np.log(beta) + log_p, np.log1p(-beta) + log_q)
            terms = weighted(q, log_q - log_m)
            losses = beta * weighted(p, log_p - log_m).sum(1) + (1 - beta) * terms.sum(1)
            slopes = (1 - beta) * weighted(q, log_q - log_m - terms.sum(1)[:, None])
        share = np.where(lonely[rows, teacher.classes] == 1, 1.0, np.exp(own - log_q[rows, teacher.classes]))
        return losses, slopes[rows, teacher.classes] * np.where(np.isfinite(share), share, 0.0)


def cross_entropy(
    logits: ArrayLike,
    target: ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    token_weight: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: ArrayLike = 1.0,
    normalizer: ArrayLike | None = None,
    upstream: ArrayLike = 1.0,
    lse_upstream: ArrayLike = 0.0,
    chunk: int = 128,
) -> LogitsResult:
    """:func:`linear_cross_entropy` of logits that exist: they replace hidden weightᵀ + bias."""
    options = LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap)  # type: ignore[arg-type]
    nothing = np.zeros((np.shape(logits)[-1], 1))
    inputs = _inputs(np.zeros((np.size(target), 1)), nothing, target, None, token_weight, class_weight, ignore_index)
    options, inputs = _tempered(options, inputs, temperature)
    r, tokens, shape = _float64(logits).reshape(-1, len(nothing)), inputs.y.size, np.shape(target)
    g = np.broadcast_to(np.asarray(upstream, np.float64), shape if reduction == "none" else ())
    norm = _norm(inputs, options, normalizer)
    g_rows = g.reshape(-1) if reduction == "none" else np.full(tokens, float(g) * norm)
    g_lse = np.broadcast_to(np.asarray(lse_upstream, np.float64), shape).reshape(-1)
    loss, gradient, stats = np.zeros(tokens), np.zeros_like(r), []
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        part = _anchored(r[rows], inputs.y[rows], options, inputs.tau[rows])
        loss[rows] = _loss_rows(inputs, rows, options, part)
        stats.append(_stats_rows(inputs, rows, part))
        gradient[rows] = _logit_gradient(inputs, rows, options, part, g_rows[rows] * inputs.t[rows])
        if np.any(g_lse[rows]):
            gradient[rows] += _lse_gradient(inputs, rows, options, part, g_lse[rows])
    total_loss = loss.reshape(shape) if reduction == "none" else np.asarray(np.sum(loss) * norm)
    return LogitsResult(total_loss, gradient.reshape(np.shape(logits)), _shaped_stats(stats, shape))


def _float64(values: ArrayLike) -> Array:
    return np.asarray(values).astype(np.float64)


def _shifted(target: NDArray[np.generic], shift: int, ignore_index: int) -> NDArray[np.generic]:
    check_shift(shift, target.shape)
    if not shift:
        return target
    moved = np.full_like(target, ignore_index)
    moved[..., :-shift] = target[..., shift:]
    return moved


def _inputs(
    hidden: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    bias: ArrayLike | None,
    token_weight: ArrayLike | None,
    class_weight: ArrayLike | None,
    ignore_index: int,
) -> _Inputs:
    w = _float64(weight)
    vocab, size = w.shape
    y = np.asarray(target).reshape(-1).astype(np.int64)
    valid = y != ignore_index
    t = np.ones(y.size) if token_weight is None else _float64(token_weight).reshape(-1)
    return _Inputs(
        x=_float64(hidden).reshape(-1, size),
        w=w,
        b=np.zeros(vocab) if bias is None else _float64(bias),
        y=np.where(valid, y, 0),
        valid=valid,
        t=np.where(valid, t, 0.0),
        k=np.ones(vocab) if class_weight is None else _float64(class_weight),
        tau=np.ones(y.size),
    )


def _tempered(options: LossOptions, inputs: _Inputs, temperature: ArrayLike) -> tuple[LossOptions, _Inputs]:
    """One temperature for all tokens goes into the options, one per token into the inputs."""
    if not np.ndim(temperature) and not isinstance(temperature, np.ndarray):
        return options.tempered(float(temperature)), inputs  # type: ignore[arg-type]
    tau = np.where(inputs.valid, _float64(temperature).reshape(-1), 1.0)
    return options, dataclasses.replace(inputs, tau=tau)


def _norm(inputs: _Inputs, options: LossOptions, normalizer: ArrayLike | None) -> float:
    """The factor of the sum of the token losses; 0 when no token counts."""
    if options.reduction != "mean":
        return 1.0
    if normalizer is not None:
        return 1.0 / float(_float64(normalizer))
    counts = inputs.t * inputs.k[inputs.y]
    return 1.0 / float(counts.sum()) if np.any(counts != 0) else 0.0


def _slope(part: _Chunk, options: LossOptions) -> Array:
    """∂z/∂r: scale / τ, with a softcap times 1 − (z τ / cap)²."""
    return _bent(part, options) * options.logit_scale / part.tau[:, None]


def _bent(part: _Chunk, options: LossOptions) -> Array | float:
    """The softcap's slope."""
    return 1.0 if options.softcap is None else 1.0 - (part.z * part.tau[:, None] / options.softcap) ** 2


def _exponentials(inputs: _Inputs, rows: slice, options: LossOptions) -> _Chunk:
    return _anchored(inputs.x[rows] @ inputs.w.T + inputs.b, inputs.y[rows], options, inputs.tau[rows])


def _anchored(r: Array, y: NDArray[np.int64], options: LossOptions, tau: Array) -> _Chunk:
    index = np.arange(y.size)
    z = options.logit_scale * r
    if options.softcap is not None:
        z = options.softcap * np.tanh(z / options.softcap)
    z = z / tau[:, None]
    a = z[index, y]
    with np.errstate(invalid="ignore", over="ignore"):  # NaN or −inf in a row gives NaN in that row alone
        highest = z.max(axis=1)
        anchor = np.where(highest - a > RESCUE_NATS, highest, a)
        e = np.exp(z - anchor[:, None])
        e[index, y] = 0.0
        e_target = np.exp(a - anchor)
        s = e.sum(axis=1)
        # log1p keeps full relative accuracy where p is near 1. In a row that is anchored at its maximum p is small.
        nll = np.where(anchor == a, np.log1p(s), (anchor - a) + np.log(s + e_target))
        lse = np.where(anchor == a, a + np.log1p(s), anchor + np.log(s + e_target))
    return _Chunk(z, e, anchor, e_target, s, a, nll, lse, tau)


def _loss_rows(inputs: _Inputs, rows: slice, options: LossOptions, part: _Chunk) -> Array:
    y, t, k = inputs.y[rows], inputs.t[rows], inputs.k
    loss = (1.0 - options.label_smoothing) * k[y] * part.nll
    if options.label_smoothing:
        gaps = np.where(k == 0, 0.0, k * (part.lse[:, None] - part.z))
        loss = loss + options.label_smoothing / k.size * gaps.sum(axis=1)
    if options.z_loss:
        loss = loss + options.z_loss * part.lse**2
    return np.where(inputs.valid[rows], t * loss, 0.0)


def _stats_rows(inputs: _Inputs, rows: slice, part: _Chunk) -> Stats:
    valid, z = inputs.valid[rows], part.z
    log_p = z - part.lse[:, None]
    p = np.exp(log_p)
    entropy = -np.sum(p * np.where(p > 0, log_p, 0.0), axis=1)
    best = np.argmax(z, axis=1)
    stats: Stats = TokenStats(
        nll=part.nll,
        lse=part.lse,
        target_logit=part.target_logit,
        entropy=entropy,
        argmax=best,
        correct=best == inputs.y[rows],
        max_logit=z.max(axis=1),
        min_logit=z.min(axis=1),
        sum_p_squared=np.sum(p**2, axis=1),
    )
    return TokenStats(*(np.where(valid, v, row.ignored) for v, row in zip(stats, STATISTICS.values(), strict=True)))


def _less_square_sum(p: Array) -> Array:
    """p_j − Σ_i p_i², [C, V], where the largest p may be near 1: there it is p (1 − p) less the others' squares."""
    index, best = np.arange(len(p)), p.argmax(axis=1)
    others = p.copy()
    others[index, best] = 0.0
    difference: Array = p - np.sum(p**2, axis=1)[:, None]
    difference[index, best] = p[index, best] * others.sum(axis=1) - np.sum(others**2, axis=1)
    return difference


def _shaped_stats(parts: list[Stats], shape: tuple[int, ...]) -> Stats:
    """The chunks' statistics joined, in their dtypes. Without a token there is no chunk."""
    columns = zip(*parts, strict=True) if parts else ([np.zeros(0)] for _ in STATISTICS)
    rows = zip(columns, STATISTICS.values(), strict=True)
    return TokenStats(*(np.concatenate(column).reshape(shape).astype(row.dtype or np.float64) for column, row in rows))


def _logit_gradient(inputs: _Inputs, rows: slice, options: LossOptions, part: _Chunk, g: Array) -> Array:
    """∂ Σ g ℓ / ∂r: g (α p_j − (ε/V) k_j − β δ_jy) times the slope. At the target p − 1 is −s / Σ, no difference."""
    y, k, valid = inputs.y[rows], inputs.k, inputs.valid[rows]
    index = np.arange(y.size)
    smooth = options.label_smoothing / k.size
    beta = (1.0 - options.label_smoothing) * k[y]
    rest = smooth * k.sum() + 2.0 * options.z_loss * part.lse
    total = part.s + part.e_target
    dz = (beta + rest)[:, None] * (part.e / total[:, None]) - smooth * k
    dz[index, y] = (rest * part.e_target - beta * part.s) / total - smooth * k[y]
    dz = dz * _slope(part, options) * g[:, None]
    return np.where(valid[:, None], dz, 0.0)


def _lse_gradient(inputs: _Inputs, rows: slice, options: LossOptions, part: _Chunk, g: Array) -> Array:
    """∂ Σ g lse / ∂r: g p_j times the slope."""
    total = part.s + part.e_target
    p = part.e / total[:, None]
    p[np.arange(len(p)), inputs.y[rows]] = part.e_target / total
    dz = p * _slope(part, options) * g[:, None]
    return np.where(inputs.valid[rows, None], dz, 0.0)


def _products(inputs: _Inputs, rows: slice, options: LossOptions, part: _Chunk, g: Array) -> tuple[Array, Array, Array]:
    """A chunk's dX, and its shares of dW and db."""
    k, x = inputs.k, np.where(inputs.valid[rows, None], inputs.x[rows], 0.0)
    e, u = _matrix(inputs, rows, options, part, g)
    dx, dw, db = u[:, None] * (e @ inputs.w), e.T @ (u[:, None] * x), e.T @ u
    if options.label_smoothing and options.separable:  # −(ε/V) t g k_j has rank one
        smooth = options.label_smoothing / k.size
        dx = dx - smooth * g[:, None] * (k @ inputs.w)
        dw = dw - smooth * np.outer(k, g @ x)
        db = db - smooth * k * g.sum()
    return dx, dw, db


def _matrix(inputs: _Inputs, rows: slice, options: LossOptions, part: _Chunk, g: Array) -> tuple[Array, Array]:
    """E and u with dz = u ⊙ E, without smoothing's rank-one part. Softcap and smoothing together: E = dz, u = 1."""
    y, k, valid = inputs.y[rows], inputs.k, inputs.valid[rows]
    index = np.arange(y.size)
    smooth = options.label_smoothing / k.size
    beta = (1.0 - options.label_smoothing) * k[y]
    alpha = beta + smooth * k.sum() + 2.0 * options.z_loss * part.lse
    total = part.s + part.e_target
    if not options.separable:
        p = part.e / total[:, None]
        p[index, y] = part.e_target / total
        dz = alpha[:, None] * p - smooth * k
        dz[index, y] -= beta
        return np.where(valid[:, None], dz * _bent(part, options) * g[:, None], 0.0), np.ones(y.size)
    floor = ALPHA_FLOOR * np.abs(beta)
    alpha = np.where(np.abs(alpha) < floor, np.copysign(floor, alpha), alpha)
    divisor = np.where(alpha == 0.0, 1.0, alpha)
    e = part.e.copy()
    e[index, y] = ((alpha - beta) * part.e_target - beta * part.s) / divisor
    return np.where(valid[:, None], e * _bent(part, options), 0.0), np.where(valid, g * alpha / total, 0.0)
