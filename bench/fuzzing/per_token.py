"""The truth of the functions on top of log-probabilities and entropies, and of the distillation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.fuzzing.data import Arrays
from bench.fuzzing.head import Expected, Head, head_of, inside, norm_of, products, scaled, wide_dtype
from bench.fuzzing.problems import Problem
from logitless.objectives import LARGEST_LOG_RATIO
from logitless.tolerances import TINY


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


def _log_softmax(z: Any) -> Any:
    index, best = np.arange(len(z)), z.argmax(1)
    z = z - z[index, best][:, None]
    e = np.exp(z)
    e[index, best] = 0.0  # log1p of the others' sum: the likeliest class keeps the digits of 1 − p
    return z - np.log1p(e.sum(1, keepdims=True))


def _values(problem: Problem, arrays: Arrays) -> _Values:
    head = head_of(problem, arrays)
    z, slope, scale = scaled(problem, head.raw)
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
    return outputs | products(
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


def policy(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
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


def dpo(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
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


def distillation(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    o, counted = problem.options, _counted(problem, arrays).reshape(-1)
    head, teacher = head_of(problem, arrays), head_of(problem, arrays, "teacher_")
    (z, slope, scale), (teacher_z, _, _) = scaled(problem, head.raw), scaled(problem, teacher.raw, "teacher_")
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
    g = np.where(counted, np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1), 0.0)
    factor = 1.0 / max(1, counted.sum()) if o["reduction"] == "mean" else 1.0
    losses = np.where(counted, losses, 0.0)
    loss = losses.reshape(problem.shape) if o["reduction"] == "none" else losses.sum() * factor
    rows = factor * (losses + counted * (1.0 + teacher.magnitude))
    dz = np.where(counted[:, None], dz * slope * (g * factor)[:, None], 0.0)
    gross = np.where(counted[:, None], gross * scale * (g * factor)[:, None], 0.0)
    head.magnitude = head.magnitude + teacher.magnitude
    return _on_top(problem, arrays, head, loss, rows, dz, gross, np.zeros(1, bool))


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
