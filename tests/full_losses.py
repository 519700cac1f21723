"""The losses of ``losses.py`` on full logits, as their papers write them, for any array library with NumPy's names.

``xp`` is torch or jax.numpy; everything is meant for float64 and small logits. Masks are arrays of 0 and 1.
"""

from __future__ import annotations

from typing import Any


def logits(x: Any, w: Any, b: Any, xp: Any, logit_scale: float = 1.0, softcap: float | None = None) -> Any:
    """Logits [..., V]."""
    z = logit_scale * (x @ w.T + b)
    return z if softcap is None else softcap * xp.tanh(z / softcap)


def log_softmax(z: Any, xp: Any) -> Any:
    return z - xp.log(xp.exp(z).sum(-1))[..., None]


def log_probs(z: Any, onehot: Any, xp: Any) -> Any:
    """log p(target), 0 where the target's row of ``onehot`` is 0."""
    return (log_softmax(z, xp) * onehot).sum(-1)


def entropy(z: Any, xp: Any) -> Any:
    log_p = log_softmax(z, xp)
    return -(xp.exp(log_p) * log_p).sum(-1)


def dpo(z: Any, onehot: Any, mask: Any, reference: Any, xp: Any, beta: float, label_smoothing: float) -> Any:
    """arXiv:2305.18290, eq. 7, with label smoothing: [B]."""
    reference = reference if len(reference.shape) == 1 else (reference * mask).sum(-1)
    gap = (log_probs(z, onehot, xp) * mask).sum(-1) - reference
    half = gap.shape[0] // 2
    h = beta * (gap[:half] - gap[half:])
    return (1 - label_smoothing) * xp.log1p(xp.exp(-h)) + label_smoothing * xp.log1p(xp.exp(h))


def clipped_policy(
    z: Any, onehot: Any, mask: Any, advantage: Any, old: Any, reference: Any, xp: Any, *,
    clip_low: float, clip_high: float, entropy_coef: float, kl_coef: float, aggregation: str,
) -> Any:  # fmt: skip
    """arXiv:1707.06347, eq. 7, minus an entropy bonus, plus k3; arXiv:2402.03300, eq. 3, where by sequence."""
    lp = log_probs(z, onehot, xp)
    ratio = xp.exp(lp - old)
    a = advantage if len(advantage.shape) == len(lp.shape) else advantage[..., None]
    per_token = -xp.minimum(ratio * a, xp.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    per_token = per_token - entropy_coef * entropy(z, xp)
    if kl_coef:
        d = reference - lp
        per_token = per_token + kl_coef * (xp.exp(d) - d - 1)
    per_token = per_token * mask
    if aggregation == "token_mean":
        return per_token.sum() / mask.sum()
    counts = mask.sum(-1)
    return (per_token.sum(-1) / xp.clip(counts, 1, None)).sum() / (counts > 0).sum()


def divergence(z: Any, teacher_z: Any, xp: Any, beta: float, temperature: float) -> Any:
    """arXiv:2306.13649, eq. 1 and its limits: [...]."""
    log_q, log_p = log_softmax(z / temperature, xp), log_softmax(teacher_z / temperature, xp)
    p, q = xp.exp(log_p), xp.exp(log_q)
    if beta == 0:
        return (p * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (q * (log_q - log_p)).sum(-1)
    log_m = xp.log(beta * p + (1 - beta) * q)
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)
