"""What a problem's outputs are in float64 on full logits, and how far from it an implementation may be.

The rule is that of :mod:`logitless.tolerances`: RATIO times the error of the dtype's ideal path. In a small array the
ideal path's error is a matter of luck; there what its roundings cause on average counts where that is more. What
float32 leaves of a logit is proportional to the sum of its products' magnitudes, M: TINY times M is added.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.fuzzing.data import Arrays
from bench.fuzzing.problems import TRAINED, Problem
from logitless import reference
from logitless.ideal import ideal_gradients
from logitless.objectives import LARGEST_LOG_RATIO
from logitless.problems import Case
from logitless.problems import Problem as ListedProblem
from logitless.rounding import round_to
from logitless.spec import LossOptions
from logitless.tolerances import GRADIENT, RATIO, ROUNDING, TINY

LARGEST = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": np.inf}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 1e-40, "float32": 1e-45, "float64": 0.0}
COMMON_ROWS = 10
LOSS_OPTIONS = (
    "reduction", "ignore_index", "label_smoothing", "z_loss", "logit_scale", "softcap",
)  # fmt: skip


@dataclasses.dataclass
class Expected:
    """An output: its values, and the largest norm of a difference that passes."""

    values: Any
    allowed: float
    dtype: str
    poison: bool = True
    """Whether an element that is no number in the truth must be none in the output either."""
    undecided: bool = False
    """Whether nothing is said of the values."""


@dataclasses.dataclass
class Head:
    """A linear function's arrays in float64 and in rows, and its logits before and after scale and softcap."""

    x: Any
    w: Any
    y: Any
    valid: Any
    raw: Any
    magnitude: Any
    """[N]: the largest sum of magnitudes of products that a logit is the sum of."""


def expected(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    """Every output by name: results, and "d" before the name of an argument for its gradient."""
    with np.errstate(all="ignore"):
        return _TRUTHS[problem.function](problem, arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Losses of logits


def _head(problem: Problem, arrays: Arrays, side: str = "") -> Head:
    x = arrays[f"{side}hidden"].astype(np.float64).reshape(problem.tokens, arrays[f"{side}hidden"].shape[-1])
    w = arrays[f"{side}weight"].astype(np.float64)
    b = arrays.get(f"{side}bias", np.zeros(len(w))).astype(np.float64)
    y = arrays["target"].reshape(-1) if "target" in arrays else np.zeros(problem.tokens, np.int64)
    valid = y != problem.options.get("ignore_index", -100)
    finite = np.where(np.isfinite(b), b, 0.0)
    sums = np.abs(np.nan_to_num(x)) @ np.abs(w).T + np.abs(finite)
    scale = problem.options.get(f"{side}logit_scale", 1.0) / problem.options.get("temperature", 1.0)
    x = np.where(valid[:, None], x, 0.0)
    return Head(x, w, np.where(valid, y, 0), valid, x @ w.T + b, scale * sums.max(1, initial=0.0))


def _cross_entropy(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    linear = problem.function == "linear_cross_entropy"
    options = {name: problem.options[name] for name in LOSS_OPTIONS if name in problem.options}
    raw = None
    if linear:
        head = _head(problem, arrays)
        raw, magnitude = head.raw, head.magnitude
    else:
        raw = arrays["logits"].astype(np.float64).reshape(problem.tokens, problem.vocab)
        magnitude = np.abs(np.where(np.isfinite(raw), raw, 0.0)).max(1, initial=0.0)
    target, outside = _inside(problem, arrays["target"])
    if problem.arrays.get("class_weight") == "unused":  # what no target has may be anything
        arrays = arrays | {"class_weight": np.where(np.abs(arrays["class_weight"]) < 1e30, arrays["class_weight"], 1.0)}
    upstream = _zero_outside(arrays["upstream"], outside, options)
    made = reference.cross_entropy(
        raw.reshape(*problem.shape, problem.vocab), target, upstream=upstream,
        token_weight=arrays.get("token_weight"), class_weight=arrays.get("class_weight"),
        normalizer=problem.options.get("normalizer"), **options,
    )  # fmt: skip
    factors = _factors(problem, arrays)
    allowed = _loss_allowance(problem, factors, made, magnitude)
    loss = np.where(outside, np.nan, made.loss) if made.loss.ndim else np.where(outside.any(), np.nan, made.loss)
    outputs = {"loss": Expected(loss, allowed, _wide(problem.dtype))}
    if problem.options.get("return_stats"):
        outputs |= _stats(problem, made.stats, magnitude, outside)
    dz = made.logits_grad.reshape(problem.tokens, problem.vocab)
    gross = _gross(problem, arrays, factors, raw, made.stats)
    if not linear:
        gradient = made.logits_grad
        known = _norm(round_to(gradient, problem.dtype) - gradient)
        outputs["dlogits"] = _gradient(problem, gradient, known, _Sums(0.0, _norm(gross), 0.0), magnitude, outside)
        return outputs
    return outputs | _products(problem, arrays, head, dz, gross, outside, _ideal(problem, arrays, options))


def _inside(problem: Problem, target: Any) -> tuple[Any, Any]:
    """The targets with 0 for an id outside of the vocabulary, and where that was."""
    outside = ((target < 0) | (target >= problem.vocab)) & (target != problem.options.get("ignore_index", -100))
    inside = min(i for i in range(3) if i != problem.options.get("ignore_index", -100))
    return np.where(outside, inside, target), outside


def _zero_outside(upstream: Any, outside: Any, options: dict[str, Any]) -> Any:
    return np.where(outside, 0.0, upstream) if options.get("reduction") == "none" else upstream


@dataclasses.dataclass
class _Factors:
    """Of a loss: every token's t, k at its target, and what the sum of the losses is multiplied by."""

    t: Any
    k: Any
    at_target: Any
    norm: float
    cancelled: float
    """How many times larger mean's denominator would be if its signed weights did not cancel."""


def _factors(problem: Problem, arrays: Arrays) -> _Factors:
    o, target = problem.options, arrays["target"].reshape(-1)
    known = (target != o.get("ignore_index", -100)) & (target >= 0) & (target < problem.vocab)
    k = arrays.get("class_weight", np.ones(problem.vocab)).astype(np.float64)
    t = arrays.get("token_weight", np.ones(problem.shape)).astype(np.float64).reshape(-1)
    t = np.where(target != o.get("ignore_index", -100), t, 0.0)
    at_target = k[np.where(known, target, 0)]
    counts = t * at_target
    if o["reduction"] != "mean":
        return _Factors(t, k, at_target, 1.0, 1.0)
    if "normalizer" in o:
        return _Factors(t, k, at_target, 1.0 / o["normalizer"], 1.0)
    total = counts.sum()
    return _Factors(t, k, at_target, 1.0 / total if total else 0.0, np.abs(counts).sum() / abs(total) if total else 1.0)


def _loss_allowance(problem: Problem, of: _Factors, made: Any, magnitude: Any) -> float:
    """TINY of each token's loss and of what its logits are sums of; with signed weights, of the sums before they
    cancel."""
    o, tiny = problem.options, TINY[_wide(problem.dtype)]
    smooth, lse = o.get("label_smoothing", 0.0), np.abs(made.stats.lse.reshape(-1))
    each = (1 - smooth) * np.abs(of.at_target) + smooth * np.abs(of.k).mean()
    span = np.abs(made.stats.nll.reshape(-1)) + magnitude
    rows = np.abs(of.t) * (each * (1.0 + span) + o.get("z_loss", 0.0) * (lse + magnitude) * (lse + magnitude + 1))
    rows = tiny * abs(of.norm) * of.cancelled**2 * np.where(np.isfinite(rows), rows, 0.0)
    return _norm(rows) if o["reduction"] == "none" else float(rows.sum())


def _gross(problem: Problem, arrays: Arrays, of: _Factors, raw: Any, stats: Any) -> Any:
    """Magnitudes of what the logits' gradient is a sum of, [N, V]: where they cancel, float32 has fewer digits."""
    o, lse = problem.options, stats.lse.reshape(-1)
    z = o.get("logit_scale", 1.0) * raw
    if (
        "softcap" in o
    ):  # its slope, 1 less a square near 1, is off by what that square is: it makes nothing smaller here
        z = o["softcap"] * np.tanh(z / o["softcap"])
    smooth = o.get("label_smoothing", 0.0)
    beta = (1 - smooth) * np.abs(of.at_target)
    rest = smooth * np.abs(of.k).mean() + 2 * o.get("z_loss", 0.0) * np.abs(lse)
    g = np.abs(np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1) * of.norm * of.t)
    target = arrays["target"].reshape(-1)
    p, index, y = np.exp(z - lse[:, None]), np.arange(len(z)), np.where((target >= 0) & (target < len(of.k)), target, 0)
    gross = (beta + rest)[:, None] * p + smooth / problem.vocab * np.abs(of.k)
    # Of the target's own part only what is left of p − 1 is there to be rounded.
    gross[index, y] += beta * (-np.expm1(-stats.nll.reshape(-1)) - p[index, y])
    gross = gross * o.get("logit_scale", 1.0) * (g * of.cancelled)[:, None]
    return np.where(np.isfinite(gross), gross, 0.0)


def _stats(problem: Problem, stats: Any, magnitude: Any, outside: Any) -> dict[str, Expected]:
    """Values per token. argmax and correct are looked at by the judge of ties: not here."""
    tiny = TINY[_wide(problem.dtype)]
    made = {}
    for name in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        values = np.where(outside, np.nan, getattr(stats, name))
        rows = tiny * (
            1.0 + 2.0 * magnitude.reshape(problem.shape) + np.abs(np.where(np.isfinite(values), values, 0.0))
        )
        if name == "entropy":  # a sum of p · log p, whose p is off by its logit's error
            rows = rows * (1.0 + np.log(max(2, problem.vocab)))
        made[f"stats.{name}"] = Expected(values, _norm(rows), _wide(problem.dtype), poison=name in ("nll", "lse"))
        made[f"stats.{name}"].undecided = bool(outside.any())
    return made


def _ideal(problem: Problem, arrays: Arrays, options: dict[str, Any]) -> dict[str, Any]:
    """The ideal path's gradients; none where it is not made for what the problem has."""
    if problem.blemish != "none" or problem.tokens == 0:
        return {}
    listed = ListedProblem(
        "", problem.shape, problem.hidden, problem.vocab, problem.dtype, LossOptions(**options),
        normalizer=problem.options.get("normalizer"),
    )  # fmt: skip
    upstream = np.asarray(arrays["upstream"])
    case = Case(
        listed, arrays["hidden"], arrays["weight"], arrays["target"], arrays.get("bias"), arrays.get("token_weight"),
        arrays.get("class_weight"), upstream,
    )  # fmt: skip
    return dict(ideal_gradients(case))


def _products(
    problem: Problem, arrays: Arrays, head: Head, dz: Any, gross: Any, outside: Any, ideal: dict[str, Any] | None
) -> dict[str, Expected]:
    """The gradients that the logits' gradient dz [N, V] gives, and what roundings cost; ``ideal`` may be missing."""
    square = np.where(np.isfinite(dz), dz, 0.0) ** 2
    large = np.maximum(np.where(np.isfinite(gross), np.abs(gross), 0.0), np.sqrt(square))
    x, w = np.nan_to_num(head.x), head.w
    true = {
        "hidden": (dz @ w).reshape(arrays["hidden"].shape),
        "weight": np.where(head.valid[:, None], dz, 0.0).T @ head.x,
        "bias": dz.sum(0),
    }
    slack = _filter_slack(problem, arrays, head)
    outputs = {}
    for name in problem.needs:
        known = _norm(ideal[f"d{name}"] - true[name]) if ideal else 0.0
        sums = _Sums.of(name, square, large, x, w)
        made = _gradient(problem, true[name], known, sums, head.magnitude, outside)
        if ideal is None:
            made.allowed += 2 * GRADIENT[problem.dtype] * max(sums.rough, _norm(true[name]))
        made.allowed += slack.get(name, 0.0)
        made.poison = name == "hidden"
        outputs[f"d{name}"] = made
    if problem.data == TRAINED and "weight" in problem.needs and ideal and not slack:
        ids = common_ids(head.y[head.valid], problem.vocab)
        sums = _Sums.of("weight", square[:, ids], large[:, ids], x, w)
        known = _norm(ideal["dweight"][ids] - true["weight"][ids])
        outputs["dweight of common ids"] = _gradient(problem, true["weight"][ids], known, sums, head.magnitude, outside)
    return outputs


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Norms of the terms that a gradient is the sum of."""

    rough: float
    """As if they were independent."""
    most: float
    """The same of what the terms are sums of."""
    all: float
    """Of these, magnitudes added up."""

    @staticmethod
    def of(name: str, square: Any, large: Any, x: Any, w: Any) -> _Sums:
        """``square``: dz², [N, V]; ``large``: magnitudes of what dz is the sum of."""

        def added(values: Any, other: Any) -> Any:
            if name == "bias":
                return values.sum(0)
            return values @ other(w) if name == "hidden" else values.T @ other(x)

        rough, most = (float(np.sqrt(added(of, np.square).sum())) for of in (square, large**2))
        return _Sums(rough, most, _norm(added(large, np.abs)))


def common_ids(y: Any, vocab: int) -> Any:
    """The ids that are a target most often: in their rows of dW most cancels."""
    return np.argsort(-np.bincount(y, minlength=vocab), kind="stable")[:COMMON_ROWS]


def _gradient(problem: Problem, true: Any, ideal: float, sums: _Sums, magnitude: Any, outside: Any) -> Expected:
    """``ideal``: the norm of the ideal path's error."""
    dtype, tiny = problem.dtype, TINY[_wide(problem.dtype)]
    norm = _norm(np.where(np.abs(true) < LARGEST[dtype], true, 0.0))
    # One rounding is off by a quarter of its largest error, in the mean of squares; those of few tokens may be large.
    few = 6.0 / np.sqrt(max(1, min(problem.tokens, true.size)))
    roundings = 0.25 * ROUNDING[dtype] * (np.hypot(sums.rough, norm) + few * np.hypot(sums.most, norm))
    roundings += SMALLEST[dtype] * np.sqrt(true.size)
    logits = 1.0 + float(np.max(np.nan_to_num(magnitude), initial=0.0))
    wide = tiny * (logits * max(sums.most, norm) + sums.all)
    allowed = RATIO * max(ideal, float(roundings)) + TINY[dtype] * norm + wide
    return Expected(true, allowed, dtype, undecided=bool(np.any(outside)))


def _filter_slack(problem: Problem, arrays: Arrays, head: Head) -> dict[str, float]:
    """Norms of what filter_eps may change in each element."""
    eps = problem.options.get("filter_eps")
    if eps is None:
        return {}
    of = _factors(problem, arrays)
    g = np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1) * of.t * of.norm
    g = np.abs(g * problem.options.get("logit_scale", 1.0))
    g, x = np.where(np.isfinite(g), g, 0.0), np.abs(np.nan_to_num(head.x))
    return {
        "hidden": eps * _norm(g[:, None] * np.abs(head.w).sum(0)),
        "weight": eps * _norm(g @ x) * len(head.w) ** 0.5,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Losses of values per token


@dataclasses.dataclass
class _Values:
    """log p(target), the entropy and what their gradients need; 0 for a token that does not count."""

    head: Head
    log_p: Any
    p: Any
    slope: Any
    scale: float
    log_prob: Any
    entropy: Any

    def gross(self, g1: Any, g2: Any) -> Any:
        """Magnitudes of what :meth:`gradient` is a sum of."""
        g1, g2 = (np.abs(np.asarray(g, np.float64).reshape(-1, 1)) for g in (g1, g2))
        rows, target = np.arange(len(self.p)), self.head.y
        of_target = np.where(target[:, None] == np.arange(self.p.shape[1]), self.p, 0.0)
        of_target[rows, target] -= np.abs(np.expm1(self.log_p[rows, target]))  # 1 − p is no difference
        of_entropy = np.abs(np.where(self.p > 0, self.log_p, 0.0)) + self.entropy.reshape(-1, 1)
        return np.where(
            self.head.valid[:, None], ((self.p - of_target) * g1 + self.p * g2 * of_entropy) * self.scale, 0.0
        )

    def gradient(self, g1: Any, g2: Any) -> Any:
        """Of Σ g1 · log_prob + g2 · entropy in the logits before scale and softcap."""
        g1, g2 = np.asarray(g1, np.float64).reshape(-1, 1), np.asarray(g2, np.float64).reshape(-1, 1)
        rows = np.arange(len(self.p))
        dz = -self.p * g1
        gone = -np.expm1(self.log_p[rows, self.head.y])  # 1 − p
        dz[rows, self.head.y] = g1[:, 0] * gone
        entropy = -self.p * (np.where(self.p > 0, self.log_p, 0.0) + self.entropy.reshape(-1, 1))
        dz = (dz + np.where(g2 == 0, 0.0, entropy * g2)) * self.slope
        return np.where(self.head.valid[:, None], dz, 0.0)


def _log_softmax(raw: Any, scale: float, cap: float | None) -> tuple[Any, Any]:
    """log p, and the slope of what it is the softmax of."""
    z, slope = scale * raw, scale
    if cap is not None:
        z = cap * np.tanh(z / cap)
        slope = scale * (1.0 - (z / cap) ** 2)
    index, best = np.arange(len(z)), z.argmax(1)
    z = z - z[index, best][:, None]
    e = np.exp(z)
    e[index, best] = 0.0  # log1p of the others' sum: the likeliest class keeps the digits of 1 − p
    return z - np.log1p(e.sum(1, keepdims=True)), slope


def _values(problem: Problem, arrays: Arrays) -> _Values:
    head = _head(problem, arrays)
    log_p, slope = _log_softmax(head.raw, problem.options.get("logit_scale", 1.0), problem.options.get("softcap"))
    p = np.exp(log_p)
    log_prob = np.where(head.valid, log_p[np.arange(len(p)), head.y], 0.0).reshape(problem.shape)
    entropy = np.where(head.valid, -(p * np.where(p > 0, log_p, 0.0)).sum(1), 0.0).reshape(problem.shape)
    return _Values(head, log_p, p, slope, problem.options.get("logit_scale", 1.0), log_prob, entropy)


def _log_probs(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    target, outside = _inside(problem, arrays["target"])
    values = _values(problem, arrays | {"target": target})
    tiny, magnitude = TINY[_wide(problem.dtype)], values.head.magnitude.reshape(problem.shape)
    wide = _wide(problem.dtype)
    known = np.where(np.isfinite(values.log_prob), np.abs(values.log_prob), 0.0)
    log_prob = Expected(np.where(outside, np.nan, values.log_prob), tiny * _norm(1 + known + 2 * magnitude), wide)
    outputs = {"log_prob": log_prob}
    g1, g2 = np.where(outside, 0.0, arrays["upstream"]), np.zeros(problem.shape)
    if "upstream_entropy" in arrays:
        allowed = tiny * _norm((1 + 2 * magnitude) * (1 + np.log(max(2, problem.vocab))))
        outputs["entropy"] = Expected(values.entropy, allowed, wide, undecided=bool(outside.any()))
        g2 = np.where(outside, 0.0, arrays["upstream_entropy"])
    return outputs | _products(
        problem, arrays, values.head, values.gradient(g1, g2), values.gross(g1, g2), outside, None
    )


def _aggregate(losses: Any, counted: Any, aggregation: str, normalizer: float | None) -> Any:
    """The factor of every token's loss in the total."""
    counts = counted.astype(np.float64)
    if aggregation == "sequence_mean":
        lengths = counts.sum(-1, keepdims=True)
        counts = counts / np.maximum(lengths, 1.0)
        total = float((lengths > 0).sum())
    else:
        total = counts.sum()
    return counts / (normalizer or max(total, 1.0))


def _counted(problem: Problem, arrays: Arrays) -> Any:
    counted = np.ones(problem.shape, bool)
    if "target" in arrays:
        counted = arrays["target"] != problem.options.get("ignore_index", -100)
    return counted & (arrays["mask"] != 0) if "mask" in arrays else counted


def _policy(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted, values = problem.options, _counted(problem, arrays), _values(problem, arrays)
    a = arrays["advantage"].astype(np.float64)
    a = a if a.shape == problem.shape else np.broadcast_to(a[..., None], problem.shape)
    lp = np.where(counted, values.log_prob, 0.0)
    old = np.where(counted, arrays["old_log_prob"], 0.0) if "old_log_prob" in arrays else lp
    difference = lp - old
    ratio = np.exp(np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    held = np.clip(ratio, 0.8, 1.2) * a
    clipped = held < ratio * a
    losses = -np.minimum(held, ratio * a)
    d_lp = np.where(clipped | (np.abs(difference) > LARGEST_LOG_RATIO), 0.0, -ratio * a)
    losses = losses - o.get("entropy_coef", 0.0) * values.entropy
    near = np.abs(ratio - 0.8) < 1e-3 * ratio
    near |= np.abs(ratio - 1.2) < 1e-3 * ratio
    if "reference_log_prob" in arrays:
        d = np.where(counted, arrays["reference_log_prob"], 0.0) - lp
        cut = np.clip(d, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        losses = losses + o["kl_coef"] * (np.expm1(cut) - cut)
        d_lp = d_lp - np.where(np.abs(d) > LARGEST_LOG_RATIO, 0.0, o["kl_coef"] * np.expm1(cut))
    factor = _aggregate(losses, counted, o["aggregation"], o.get("normalizer"))
    g = arrays["upstream"]
    gs = g * factor * d_lp, -g * factor * o.get("entropy_coef", 0.0) * np.ones(problem.shape)
    dz, gross = values.gradient(*gs), values.gross(*gs)
    rows = factor * np.abs(np.where(counted, losses, 0.0)) + factor * (np.abs(d_lp) + o.get("entropy_coef", 0.0))
    return _on_top(
        problem, arrays, values.head, (np.where(counted, losses, 0.0) * factor).sum(), rows, dz, gross, near & counted
    )


def _dpo(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted, values = problem.options, _counted(problem, arrays), _values(problem, arrays)
    ref = arrays["reference_log_prob"].astype(np.float64)
    ref = ref if ref.ndim == 1 else np.where(counted, ref, 0.0).sum(1)
    half, eps = problem.shape[0] // 2, o.get("label_smoothing", 0.0)
    rewards = o["beta"] * (np.where(counted, values.log_prob, 0.0).sum(1) - ref)
    margin = rewards[:half] - rewards[half:]
    losses = (1 - eps) * np.logaddexp(0.0, -margin) + eps * np.logaddexp(0.0, margin)
    factor = 1.0 / half if o["reduction"] == "mean" else 1.0
    slope = -(1 - eps) / (1 + np.exp(margin)) + eps / (1 + np.exp(-margin))
    d_margin = np.broadcast_to(arrays["upstream"], (half,)) * factor * slope * o["beta"]
    g1 = np.where(counted, np.concatenate([d_margin, -d_margin])[:, None], 0.0)
    loss = losses if o["reduction"] == "none" else losses.sum() * factor
    sums = o["beta"] * np.abs(np.where(counted, values.log_prob, 0.0)).sum() + np.abs(rewards).sum()
    rows = factor * (losses + sums) if half else losses
    return _on_top(
        problem,
        arrays,
        values.head,
        loss,
        rows,
        values.gradient(g1, 0.0 * g1),
        values.gross(g1, 0.0 * g1),
        np.zeros(1, bool),
    )


def _distillation(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted = problem.options, _counted(problem, arrays).reshape(-1)
    head, teacher = _head(problem, arrays), _head(problem, arrays, "teacher_")
    tau, beta = o.get("temperature", 1.0), o["beta"]

    def side(of: Head, prefix: str) -> tuple[Any, Any]:
        cap = o.get(f"{prefix}softcap")
        return _log_softmax(of.raw, o.get(f"{prefix}logit_scale", 1.0) / tau, None if cap is None else cap / tau)

    (log_q, slope), (log_p, _) = side(head, ""), side(teacher, "teacher_")
    p, q = np.exp(log_p), np.exp(log_q)
    if beta == 0.0:
        losses, dz, gross = (p * (log_p - log_q)).sum(1), q - p, p + q
    else:
        log_m = log_p if beta == 1.0 else np.logaddexp(np.log(beta) + log_p, np.log1p(-beta) + log_q)
        a = log_q - log_m
        factor = 1.0 if beta == 1.0 else 1.0 - beta
        losses = factor * (q * a).sum(1) + (0.0 if beta == 1.0 else beta * (p * (log_p - log_m)).sum(1))
        mean = (q * a).sum(1, keepdims=True)
        dz, gross = factor * q * (a - mean), factor * q * (np.abs(a) + np.abs(mean) + 1e-3)
    g = np.where(counted, np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1), 0.0)
    factor = 1.0 / max(1, counted.sum()) if o["reduction"] == "mean" else 1.0
    losses = np.where(counted, losses, 0.0)
    loss = losses.reshape(problem.shape) if o["reduction"] == "none" else losses.sum() * factor
    rows = factor * (losses + counted * (1.0 + teacher.magnitude))
    scale = o.get("logit_scale", 1.0) / tau
    dz = np.where(counted[:, None], dz * slope * (g * factor)[:, None], 0.0)
    gross = np.where(counted[:, None], gross * scale * (g * factor)[:, None], 0.0)
    head.magnitude = head.magnitude + teacher.magnitude
    return _on_top(problem, arrays, head, loss, rows, dz, gross, np.zeros(1, bool))


def _on_top(
    problem: Problem, arrays: Arrays, head: Head, loss: Any, rows: Any, dz: Any, gross: Any, near: Any
) -> dict[str, Expected]:
    """``rows``: magnitudes of what the loss is the sum of; ``near``: tokens whose side of a clip is undecided."""
    wide = _wide(problem.dtype)
    magnitude = 1.0 + float(np.max(head.magnitude, initial=0.0))
    outputs = {"loss": Expected(np.asarray(loss), 2 * TINY[wide] * magnitude * float(np.sum(rows)), wide)}
    products = _products(problem, arrays, head, dz, gross, near, None)
    for made in products.values():  # one more rounding, of an operand on the way
        made.allowed *= 2.0
    return outputs | products


# ---------------------------------------------------------------------------------------------------------------------


def _gather(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    index, up = arrays["index"], arrays["upstream"].astype(np.float64)
    padded = np.zeros(up.shape)
    padded[: len(index)] = arrays["input"][index]
    gradient, rough = np.zeros(arrays["input"].shape), np.zeros(arrays["input"].shape)
    np.add.at(gradient, index, up[: len(index)])
    np.add.at(rough, index, up[: len(index)] ** 2)
    made = {"output": Expected(padded, 0.0, problem.dtype)}
    known = _norm(round_to(gradient, problem.dtype) - gradient)
    wide = float(np.sqrt(rough.sum()))
    made["dinput"] = _gradient(problem, gradient, known, _Sums(0.0, 0.0, 0.0), np.zeros(1), np.zeros(0, bool))
    made["dinput"].allowed += TINY[_wide(problem.dtype)] * wide
    return made


def _wide(dtype: str) -> str:
    """Of losses, sums and statistics."""
    return "float64" if dtype == "float64" else "float32"


def _norm(values: Any) -> float:
    values = np.asarray(values, np.float64)
    return float(np.linalg.norm(np.where(np.isfinite(values), values, 0.0)))


_TRUTHS = {
    "linear_cross_entropy": _cross_entropy, "cross_entropy": _cross_entropy, "linear_log_probs": _log_probs,
    "clipped_policy_loss": _policy, "dpo_loss": _dpo, "distillation_loss": _distillation,
    "padded_index_gather": _gather,
}  # fmt: skip
