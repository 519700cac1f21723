"""The truth of the functions on top of log-probabilities and entropies, and of the distillation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.fuzzing.data import Arrays
from bench.fuzzing.head import Expected, Head, head_of, inside, norm_of, products, scaled, wide_dtype
from bench.fuzzing.problems import Problem
from logitless import reference
from logitless.objectives import LARGEST_LOG_RATIO
from logitless.tolerances import TINY


@dataclasses.dataclass
class _Values:
    """log p(target), the entropy and what their gradients need; 0 for a token that does not count."""

    head: Head
    log_p: Any
    p: Any
    slope: Any
    scale: Any
    log_prob: Any
    entropy: Any

    def of_statistics(self, g3: Any, g4: Any) -> tuple[Any, Any]:
        """The gradient of Σ g3 · lse + g4 · Σ_j p_j², and magnitudes of what it is a sum of."""
        g3, g4 = (np.asarray(g, np.float64).reshape(-1, 1) for g in (g3, g4))
        rows, y, best = np.arange(len(self.p)), self.head.y, self.p.argmax(1)
        total = (self.p**2).sum(1, keepdims=True)

        def apart(at: Any) -> tuple[Any, Any]:
            """1 − p there, and the others' squares."""
            others = self.p.copy()
            others[rows, at] = 0.0
            return others.sum(1), (others**2).sum(1)

        less, size = self.p - total, self.p + total
        left, squares = apart(best)
        less[rows, best] = self.p[rows, best] * left - squares
        left, squares = apart(y)  # of the target p − Σ p² is no difference
        size[rows, y] = self.p[rows, y] * left + squares
        dz = np.where(g3 == 0, 0.0, self.p * g3) + np.where(g4 == 0, 0.0, 2 * g4 * self.p * less)
        gross = self.p * np.abs(g3) + 2 * np.abs(g4) * self.p * size
        valid = self.head.valid[:, None]
        return np.where(valid, dz * self.slope, 0.0), np.where(valid, gross * self.scale, 0.0)

    def gross(self, g1: Any, g2: Any) -> Any:
        """Magnitudes of what :meth:`gradient` is a sum of."""
        g1, g2 = (np.abs(np.asarray(g, np.float64).reshape(-1, 1)) for g in (g1, g2))
        rows, target = np.arange(len(self.p)), self.head.y
        of_target = np.where(target[:, None] == np.arange(self.p.shape[1]), self.p, 0.0)
        of_target[rows, target] -= np.abs(np.expm1(self.log_p[rows, target]))  # 1 − p is no difference
        of_entropy = np.abs(np.where(self.p > 0, self.log_p, 0.0)) + self.entropy.reshape(-1, 1)
        # Logits are told apart from the target's: where that is far below, log p of the likeliest is a difference.
        of_entropy = of_entropy + np.minimum(1.0, -self.log_p[rows, target])[:, None]
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


def _log_softmax(z: Any) -> Any:
    index, best = np.arange(len(z)), z.argmax(1)
    z = z - z[index, best][:, None]
    e = np.exp(z)
    e[index, best] = 0.0  # log1p of the others' sum: the likeliest class keeps the digits of 1 − p
    return z - np.log1p(e.sum(1, keepdims=True))


def _values(problem: Problem, arrays: Arrays) -> _Values:
    head = head_of(problem, arrays)
    z, slope, scale = scaled(problem, head.raw, head.tau)
    log_p = _log_softmax(z)
    p = np.exp(log_p)
    log_prob = np.where(head.valid, log_p[np.arange(len(p)), head.y], 0.0).reshape(problem.shape)
    entropy = np.where(head.valid, -(p * np.where(p > 0, log_p, 0.0)).sum(1), 0.0).reshape(problem.shape)
    return _Values(head, log_p, p, slope, scale, log_prob, entropy)


def log_probs(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    target, outside = inside(problem, arrays["target"])
    values = _values(problem, arrays | {"target": target})
    tiny, magnitude = TINY[wide_dtype(problem.dtype)], values.head.magnitude.reshape(problem.shape)
    wide = wide_dtype(problem.dtype)
    known = np.where(np.isfinite(values.log_prob), np.abs(values.log_prob), 0.0)
    log_prob = Expected(np.where(outside, np.nan, values.log_prob), tiny * norm_of(1 + known + 2 * magnitude), wide)
    outputs = {"log_prob": log_prob}
    g1, g2 = np.where(outside, 0.0, arrays["upstream"]), np.zeros(problem.shape)
    if "upstream_entropy" in arrays:
        allowed = tiny * norm_of((1 + 2 * magnitude) * (1 + np.log(max(2, problem.vocab))))
        outputs["entropy"] = Expected(values.entropy, allowed, wide, undecided=bool(outside.any()))
        g2 = np.where(outside, 0.0, arrays["upstream_entropy"])
    gradient, gross = values.gradient(g1, g2), values.gross(g1, g2)
    if "upstream_squared" in arrays:
        of_stats = (np.where(outside, 0.0, arrays[name]) for name in ("upstream_lse", "upstream_squared"))
        more, more_gross = values.of_statistics(*of_stats)
        gradient, gross = gradient + more, gross + more_gross
    return outputs | products(problem, arrays, values.head, gradient, gross, outside, None)


def token_log_probs(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    """Of given ids."""
    return _of_ids(problem, arrays, arrays["ids"], undecided=False)


def top_k(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    """Where two of the largest logits are nearly the same, either may come first, and has the other's gradient."""
    head = head_of(problem, arrays)
    z, _, _ = scaled(problem, head.raw, head.tau)
    ids = np.argsort(-z, axis=1, kind="stable")
    largest = np.take_along_axis(z, ids, 1)[:, : problem.count + 1]
    gaps = np.where(largest[:, :-1] == largest[:, 1:], 0.0, largest[:, :-1] - largest[:, 1:])
    near = bool((gaps < 8 * TINY[wide_dtype(problem.dtype)] * (1 + head.magnitude[:, None])).any())
    ids = ids[:, : problem.count].reshape(*problem.shape, problem.count)
    found = Expected(ids, 0.0, "float64", undecided=near)
    return _of_ids(problem, arrays, ids, undecided=near) | {"stats.ids": found}


def _of_ids(problem: Problem, arrays: Arrays, ids: Any, undecided: bool) -> dict[str, Expected]:
    """``undecided``: whether nothing is said of the gradients."""
    o, wide = problem.options, wide_dtype(problem.dtype)
    names = ("logit_scale", "softcap", "temperature", "ignore_index")
    options = {name: o[name] for name in names if name in o}
    options |= {"temperature": arrays["temperature"]} if "temperature" in arrays else {}
    true = reference.linear_token_log_probs(
        arrays["hidden"], arrays["weight"], ids, arrays.get("bias"), upstream=arrays["upstream"], **options
    )
    given = np.broadcast_to(ids, true.log_prob.shape).reshape(problem.tokens, problem.count)
    known = given != o.get("ignore_index", -100)
    target = np.where(known.any(1), given[np.arange(len(given)), known.argmax(1)], o.get("ignore_index", -100))
    head = head_of(problem, arrays | {"target": target})
    z, _, scale = scaled(problem, head.raw, head.tau)
    p = np.exp(_log_softmax(z))
    g = np.where(known, np.abs(arrays["upstream"].reshape(given.shape)), 0.0)
    gross = p * g.sum(1, keepdims=True)
    np.add.at(gross, (np.arange(len(given))[:, None], np.where(known, given, 0)), g)
    magnitude = head.magnitude.reshape(problem.shape)[..., None]
    size = np.where(np.isfinite(true.log_prob), np.abs(true.log_prob), 0.0)
    outputs = {"log_prob": Expected(true.log_prob, TINY[wide] * norm_of(1 + size + 2 * magnitude), wide)}
    rows = arrays | {"upstream": g.sum(1)}
    gradients = products(problem, rows, head, true.logits_grad, gross * scale, np.zeros(1, bool), None)
    for gradient in gradients.values():
        gradient.undecided = undecided
    return outputs | gradients


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


def _ratio(o: dict[str, Any], difference: Any, counted: Any) -> tuple[Any, Any]:
    """Every token's ρ, and where its logarithm is not cut off."""
    if o.get("ratio") == "sequence":
        number = np.maximum(counted.sum(-1, keepdims=True), 1)
        difference = np.where(counted, difference, 0.0).sum(-1, keepdims=True) / number + 0.0 * difference
    return np.exp(np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)), np.abs(difference) <= LARGEST_LOG_RATIO


def _objective(o: dict[str, Any], ratio: Any, free: Any, a: Any, lp: Any) -> tuple[Any, Any, Any]:
    """J, its derivative in log p, and where the side of a bound is undecided."""
    low, high, most = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", 0.2), o.get("dual_clip")
    bounded = np.clip(ratio, low, high)
    if o.get("objective") == "cispo":
        return bounded * a * lp, bounded * a, np.zeros(ratio.shape, bool)
    gain, free = np.minimum(bounded * a, ratio * a), free & ~(bounded * a < ratio * a)
    if most is not None:
        below = (a < 0) & (gain < most * a)
        gain, free = np.where(below, most * a, gain), free & ~below
    near = [np.abs(ratio - bound) < 1e-3 * ratio for bound in (low, high, most) if bound is not None]
    return gain, np.where(free, ratio * a, 0.0), np.any(near, axis=0)


def _sampler(o: dict[str, Any], gap: Any, counted: Any) -> tuple[Any, Any]:
    """w, and where the side of its limit is undecided."""
    level, how = o["sampler_correction"].split("_")
    gap = np.where(counted, gap, 0.0)
    gap = gap if level == "token" else gap.sum(-1, keepdims=True) + 0.0 * gap
    weight, limit = np.exp(np.clip(gap, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)), o["sampler_limit"]
    if how == "truncate":
        return np.minimum(weight, limit), np.zeros(gap.shape, bool)
    return np.where(weight > limit, 0.0, weight), np.abs(weight - limit) < 1e-3 * weight


def _penalty(o: dict[str, Any], d: Any, ratio: Any, free: Any, counted: Any) -> tuple[Any, Any, Any]:
    """The KL term of a token; its derivative in the token's own log p, and what ρ adds to that of all its tokens."""
    cut = np.clip(d, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    kl, own = {
        "k1": (-d, np.ones(d.shape)),
        "k2": (d * d / 2, -d),
        "k3": (np.expm1(cut) - cut, np.where(np.abs(d) > LARGEST_LOG_RATIO, 0.0, -np.expm1(cut))),
    }[o.get("kl_estimator", "k3")]
    kl, own = o["kl_coef"] * kl, o["kl_coef"] * own
    if not o.get("kl_times_ratio"):
        return kl, own, np.zeros(d.shape)
    return kl * ratio, own * ratio, np.where(counted & free, kl * ratio, 0.0)


def _shared(o: dict[str, Any], by_ratio: Any, counted: Any) -> Any:
    """What the ratio's gradient gives every token, from what it gives the tokens that have it."""
    if o.get("ratio") != "sequence":
        return by_ratio
    return by_ratio.sum(-1, keepdims=True) / np.maximum(counted.sum(-1, keepdims=True), 1) * counted


def policy(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted, values = problem.options, _counted(problem, arrays), _values(problem, arrays)
    a = arrays["advantage"].astype(np.float64)
    a = a if a.shape == problem.shape else np.broadcast_to(a[..., None], problem.shape)
    lp = np.where(counted, values.log_prob, 0.0)
    old = np.where(counted, arrays["old_log_prob"], 0.0) if "old_log_prob" in arrays else lp
    ratio, free = _ratio(o, lp - old, counted)
    gain, d_gain, near = _objective(o, ratio, free, a, lp)
    factor = _aggregate(lp, counted, o["aggregation"], o.get("normalizer"))
    if "sampler_log_prob" in arrays:
        weight, undecided = _sampler(o, old - arrays["sampler_log_prob"], counted)
        gain, d_gain, near = gain * weight, d_gain * weight, near | undecided
    losses, parts = -gain - o.get("entropy_coef", 0.0) * values.entropy, [-factor * d_gain]
    if "reference_log_prob" in arrays:
        d = np.where(counted, arrays["reference_log_prob"], 0.0) - lp
        kl, own, by_ratio = _penalty(o, d, ratio, free, counted)
        losses, parts = losses + kl, [*parts, factor * own, _shared(o, factor * by_ratio, counted)]
    g, d_entropy = arrays["upstream"], -factor * o.get("entropy_coef", 0.0)
    dz = values.gradient(g * sum(parts), g * d_entropy)
    gross = values.gross(g * sum(map(np.abs, parts)), g * d_entropy)
    rows = factor * np.abs(np.where(counted, losses, 0.0)) + sum(map(np.abs, parts)) + np.abs(d_entropy)
    loss = (np.where(counted, losses, 0.0) * factor).sum()
    return _on_top(problem, arrays, values.head, loss, rows, dz, gross, near & counted)


@dataclasses.dataclass
class _Scores:
    """A pair's score of either side, [B] each, and the most that the parts of a score add up to."""

    chosen: Any
    rejected: Any
    most: Any


def _pairs(o: dict[str, Any], s: _Scores) -> tuple[Any, Any, Any, Any]:
    """Losses [B], derivatives in both scores and the most that float32's terms of them are; and what is undecided."""
    beta, eps = o["beta"], o.get("label_smoothing", 0.0)
    nothing = np.zeros(s.chosen.shape, bool)
    if o.get("loss_type") == "ipo":
        gap = s.chosen - s.rejected - 0.5 / beta
        most = 2 * (s.most + 0.5 / beta)
        return gap * gap, (2 * gap, -2 * gap), most, nothing
    if o.get("loss_type") == "orpo":
        edge = -np.exp(-LARGEST_LOG_RATIO)
        sides = [np.minimum(side, edge) for side in (s.chosen, s.rejected)]
        odds = [side - np.log(-np.expm1(side)) for side in sides]
        slopes = [
            np.where(side > edge, 0.0, -1.0 / np.expm1(np.minimum(side, edge))) for side in (s.chosen, s.rejected)
        ]
        h = odds[0] - odds[1]
        down = -beta / (1 + np.exp(h))
        # Near certainty the odds are a quotient of what rounding leaves; a sequence without tokens is not.
        near = np.any([(side > -1e-2) & (side < 0) for side in (s.chosen, s.rejected)], axis=0)
        most = beta * (slopes[0] + slopes[1]) * (1 + s.most)
        return beta * np.logaddexp(0.0, -h), (down * slopes[0], -down * slopes[1]), most, near
    h = beta * (s.chosen - s.rejected) - o.get("margin", 0.0)
    losses = (1 - eps) * np.logaddexp(0.0, -h) + eps * np.logaddexp(0.0, h)
    slope = beta * (eps / (1 + np.exp(-h)) - (1 - eps) / (1 + np.exp(h)))
    return losses, (slope, -slope), beta * (1 + beta * s.most), nothing


def dpo(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted, values = problem.options, _counted(problem, arrays), _values(problem, arrays)
    half, kind = problem.shape[0] // 2, o.get("loss_type", "dpo")
    lp, number = np.where(counted, values.log_prob, 0.0), np.maximum(counted.sum(1), 1)
    score, most = lp.sum(1), np.abs(lp).sum(1)
    if "reference_log_prob" in arrays:
        ref = arrays["reference_log_prob"].astype(np.float64)
        ref = ref if ref.ndim == 1 else np.where(counted, ref, 0.0).sum(1)
        score, most = score - ref, most + np.abs(ref)
    share = 1.0 / number if kind in ("ipo", "simpo", "orpo") else np.ones(2 * half)
    score, most = score * share, most * share
    losses, slopes, bound, near = _pairs(o, _Scores(score[:half], score[half:], most[:half] + most[half:]))
    d_sums, gross = np.concatenate(slopes) * share, np.concatenate([bound, bound]) * share
    coef = o.get("nll_coef")
    coef = (1.0 if kind in ("cpo", "orpo") else 0.0) if coef is None else coef
    per_pair = coef * half / max(1, counted[:half].sum())
    losses = losses - per_pair * lp[:half].sum(1)
    d_sums[:half], gross[:half] = d_sums[:half] - per_pair, gross[:half] + per_pair
    factor = 1.0 / half if o["reduction"] == "mean" else 1.0
    up = np.tile(np.broadcast_to(arrays["upstream"], (half,)), 2) * factor
    g1, g1_gross = (np.where(counted, (up * d)[:, None], 0.0) for d in (d_sums, gross))
    loss = losses if o["reduction"] == "none" else losses.sum() * factor
    rows = factor * (
        np.abs(losses).sum() + (np.concatenate([bound, bound]) * (1 + most)).sum() + per_pair * np.abs(lp).sum()
    )
    dz, all_of_it = values.gradient(g1, 0.0 * g1), values.gross(g1_gross, 0.0 * g1)
    return _on_top(problem, arrays, values.head, loss, rows, dz, all_of_it, near)


def kto(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted, values = problem.options, _counted(problem, arrays), _values(problem, arrays)
    ref = arrays["reference_log_prob"].astype(np.float64)
    ref = ref if ref.ndim == 1 else np.where(counted, ref, 0.0).sum(1)
    lp, good = np.where(counted, values.log_prob, 0.0), arrays["desirable"] != 0
    sign = np.where(good, 1.0, -1.0)
    weight = np.where(good, o.get("desirable_weight", 1.0), o.get("undesirable_weight", 1.0))
    gain = sign * o["beta"] * (lp.sum(1) - ref - max(o["kl"], 0.0))
    losses = weight * np.exp(-np.logaddexp(0.0, gain))
    factor = 1.0 / max(1, problem.shape[0]) if o["reduction"] == "mean" else 1.0
    up = np.broadcast_to(arrays["upstream"], losses.shape) * factor
    slope = -up * sign * o["beta"] * losses / (1 + np.exp(-gain))
    g1 = np.where(counted, slope[:, None], 0.0)
    most = o["beta"] * (1 + np.abs(lp).sum(1) + np.abs(ref) + abs(o["kl"]))
    loss = losses if o["reduction"] == "none" else losses.sum() * factor
    dz, gross = values.gradient(g1, 0.0 * g1), values.gross(g1 * (1 + most)[:, None], 0.0 * g1)
    rows = factor * (losses * (1 + most)).sum()
    return _on_top(problem, arrays, values.head, loss, rows, dz, gross, np.zeros(1, bool))


def distillation(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted = problem.options, _distilled(problem, arrays)
    head, teacher = head_of(problem, arrays), head_of(problem, arrays, "teacher_")
    (z, slope, scale), (teacher_z, _, _) = (
        scaled(problem, head.raw, head.tau),
        scaled(problem, teacher.raw, teacher.tau, "teacher_"),
    )
    log_q, log_p, beta = _log_softmax(z), _log_softmax(teacher_z), o["beta"]
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
    losses, dz, gross = _with_hard(problem, arrays, _Divergence(losses, dz * slope, gross * scale, head))
    g = np.where(counted, np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1), 0.0)
    factor = 1.0 / max(1, counted.sum()) if o["reduction"] == "mean" else 1.0
    losses = np.where(counted, losses, 0.0)
    loss = losses.reshape(problem.shape) if o["reduction"] == "none" else losses.sum() * factor
    rows = factor * (losses + counted * (1.0 + teacher.magnitude))
    dz = np.where(counted[:, None], dz * (g * factor)[:, None], 0.0)
    gross = np.where(counted[:, None], gross * (g * factor)[:, None], 0.0)
    head.magnitude = head.magnitude + teacher.magnitude
    return _on_top(problem, arrays, head, loss, rows, dz, gross, np.zeros(1, bool))


def _distilled(problem: Problem, arrays: Arrays) -> Any:
    """[N]: which tokens of a distillation count."""
    counted = np.ones(problem.shape, bool) if "mask" not in arrays else arrays["mask"] != 0
    ignore = problem.options.get("ignore_index", -100)
    if "target" in arrays:
        counted = counted & (arrays["target"] != ignore)
    if "ids" in arrays:
        counted = counted & (arrays["ids"] != ignore).any(-1)
    return counted.reshape(-1)


@dataclasses.dataclass
class _Divergence:
    """Of every token the divergence, its gradient in the logits before scale and softcap, and what that is a sum of."""

    losses: Any
    dz: Any
    gross: Any
    head: Head


def _with_hard(problem: Problem, arrays: Arrays, soft: _Divergence) -> tuple[Any, Any, Any]:
    """The same with the hard loss, which has no temperature."""
    if "target" not in arrays:
        return soft.losses, soft.dz, soft.gross
    coef, y = problem.options["nll_coef"], soft.head.y
    z, slope, scale = scaled(problem, soft.head.raw, 1.0)
    rows, log_q = np.arange(len(z)), _log_softmax(z)
    q = np.exp(log_q)
    q[rows, y] = -np.expm1(log_q[rows, y])
    signed = q.copy()
    signed[rows, y] *= -1.0
    return soft.losses - coef * log_q[rows, y], soft.dz + coef * signed * slope, soft.gross + coef * q * scale


def from_targets(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    """The reference's values; here is what they are sums of."""
    o, counted, head = problem.options, _distilled(problem, arrays), head_of(problem, arrays)
    head.valid, head.y = counted, np.where(counted, head.y, 0)
    head.x = np.where(counted[:, None], arrays["hidden"].astype(np.float64).reshape(head.x.shape), 0.0)
    head.raw = head.x @ head.w.T + arrays.get("bias", np.zeros(problem.vocab)).astype(np.float64)
    names = ("hidden", "weight", "bias", "ids", "probs", "teacher", "target", "mask", "temperature", "upstream")
    true = getattr(reference, problem.function)(**{name: arrays[name] for name in names if name in arrays}, **o)
    z, _, scale = scaled(problem, head.raw, head.tau)
    log_q, beta = _log_softmax(z), o["beta"]
    p, log_c, lost = _teacher_classes(problem, arrays, log_q)
    share, q = np.exp(log_q - log_c), np.exp(log_c)
    if beta == 0.0:
        gross = share * (p + q)
    else:
        log_p = np.log(np.maximum(p, 1e-300))
        a = log_c - (log_p if beta == 1.0 else np.logaddexp(np.log(beta) + log_p, np.log1p(-beta) + log_c))
        mean = (np.exp(log_q) * np.abs(a)).sum(1, keepdims=True)
        gross = share * q * (np.abs(a) + mean + lost[:, None] + 1e-3)
    _, _, gross = _with_hard(problem, arrays, _Divergence(0.0 * z[:, 0], 0.0 * z, gross * scale, head))
    factor = 1.0 / max(1, counted.sum()) if o["reduction"] == "mean" else 1.0
    g = np.abs(np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1)) * factor
    rows = factor * (np.abs(true.losses.reshape(-1)) + counted * (1.0 + lost) * (1.0 + o.get("nll_coef", 0.0)))
    gross = np.where(counted[:, None], gross * g[:, None], 0.0)
    return _on_top(problem, arrays, head, true.loss, rows, true.logits_grad, gross, np.zeros(1, bool))


def _teacher_classes(problem: Problem, arrays: Arrays, log_q: Any) -> tuple[Any, Any, Any]:
    """The teacher's mass and the logarithm of the student's of the class that each id is in, [N, V] both; and how much
    of the rest's mass a rounding of 1 is, [N]."""
    nothing = np.zeros(len(log_q))
    if "teacher" in arrays:
        teacher = arrays["teacher"].astype(np.float64).reshape(log_q.shape)
        return np.exp(teacher) if problem.options["log_teacher"] else teacher, log_q, nothing
    ids, rows = arrays["ids"].reshape(-1, problem.count), np.arange(len(log_q))[:, None]
    known = ids != problem.options.get("ignore_index", -100)
    probs = np.where(known, arrays["probs"].astype(np.float64).reshape(ids.shape), 0.0)
    padded = np.zeros((len(log_q), problem.vocab + 1))
    place = np.where(known, ids, problem.vocab)
    padded[rows, place] = probs
    inside = np.zeros(padded.shape, bool)
    inside[rows, place] = True
    inside, p = inside[:, :-1], padded[:, :-1]
    rest, others = np.maximum(1.0 - probs.sum(1), 0.0), np.maximum(1, (~inside).sum(1))
    lost = np.where(rest > 0, 1.0 / np.maximum(rest, 1e-12), 0.0) if problem.options["beta"] else nothing
    if problem.options["rest"] == "drop":
        return p / np.where(probs.sum(1) > 0, probs.sum(1), 1.0)[:, None], log_q, nothing
    if problem.options["rest"] == "spread":
        return np.where(inside, p, (rest / others)[:, None]), log_q, lost
    log_rest = np.log(np.where(inside, 0.0, np.exp(log_q)).sum(1))
    return np.where(inside, p, rest[:, None]), np.where(inside, log_q, log_rest[:, None]), lost


def _on_top(
    problem: Problem, arrays: Arrays, head: Head, loss: Any, rows: Any, dz: Any, gross: Any, near: Any
) -> dict[str, Expected]:
    """``rows``: magnitudes of what the loss is the sum of; ``near``: tokens whose side of a clip is undecided."""
    wide = wide_dtype(problem.dtype)
    magnitude = 1.0 + float(np.max(head.magnitude, initial=0.0))
    outputs = {"loss": Expected(np.asarray(loss), 2 * TINY[wide] * magnitude * float(np.sum(rows)), wide)}
    gradients = products(problem, arrays, head, dz, gross, near, None)
    for gradient in gradients.values():  # one more rounding, of an operand on the way
        gradient.allowed *= 2.0
    return outputs | gradients
