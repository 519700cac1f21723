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


# Log odds, and logarithms of ratios, are cut off here, as the docstrings say.
CUT = 20.0


def softplus(x: Any, xp: Any) -> Any:
    """−log σ(−x), at any size."""
    return xp.maximum(x, 0 * x) + xp.log1p(xp.exp(-xp.abs(x)))


def pairs(
    z: Any, onehot: Any, mask: Any, reference: Any, xp: Any, *, loss_type: str = "dpo", beta: float = 0.1,
    label_smoothing: float = 0.0, margin: float = 0.0, nll_coef: float | None = None,
) -> Any:  # fmt: skip
    """[B]. DPO, arXiv:2305.18290, eq. 7; IPO, arXiv:2310.12036, eq. 17, per token; CPO, arXiv:2401.08417, eq. 3;
    SimPO, arXiv:2405.14734, eq. 6; ORPO, arXiv:2403.07691, eqs. 6 and 7."""
    total, number = (log_probs(z, onehot, xp) * mask).sum(-1), mask.sum(-1)
    mean, half = total / xp.clip(number, 1, None), total.shape[0] // 2
    if reference is not None:
        gap = total - (reference if len(reference.shape) == 1 else (reference * mask).sum(-1))
    if loss_type == "ipo":
        gap = gap / xp.clip(number, 1, None)
        losses = (gap[:half] - gap[half:] - 1 / (2 * beta)) ** 2
    elif loss_type == "orpo":
        mean = xp.where(number > 0, mean, -xp.exp(0 * mean - CUT))  # no token: odds of CUT nats
        odds = 1 / xp.expm1(-mean)  # p / (1 − p)
        losses = beta * softplus(-xp.log(odds[:half] / odds[half:]), xp)
    else:
        score = {"dpo": gap if reference is not None else None, "cpo": total, "simpo": mean}[loss_type]
        h = beta * (score[:half] - score[half:]) - margin
        losses = (1 - label_smoothing) * softplus(-h, xp) + label_smoothing * softplus(h, xp)
    coef = (1.0 if loss_type in ("cpo", "orpo") else 0.0) if nll_coef is None else nll_coef
    return losses - coef * total[:half] * half / number[:half].sum()


def kto(
    z: Any, onehot: Any, mask: Any, reference: Any, desirable: Any, kl: Any, xp: Any, *,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Any:  # fmt: skip
    """arXiv:2402.01306, eq. 7: [B]."""
    known = reference if len(reference.shape) == 1 else (reference * mask).sum(-1)
    gain = beta * ((log_probs(z, onehot, xp) * mask).sum(-1) - known - kl)
    good, bad = xp.exp(-softplus(gain, xp)), xp.exp(-softplus(-gain, xp))  # 1 − σ(gain), 1 − σ(−gain)
    return desirable * desirable_weight * good + (1 - desirable) * undesirable_weight * bad


def stopped(x: Any) -> Any:
    """The value without gradient."""
    if hasattr(x, "detach"):
        return x.detach()
    import jax

    return jax.lax.stop_gradient(x)


def policy_ratio(lp: Any, old: Any, mask: Any, xp: Any, ratio: str) -> tuple[Any, Any]:
    """Of a token or of its sequence (GSPO, arXiv:2507.18071, eq. 7): in the objective (eq. 14) and as it is."""
    difference = lp - old
    if ratio == "token":
        plain = xp.exp(xp.clip(difference, -CUT, CUT))
        return plain, plain
    mean = ((difference * mask).sum(-1) / xp.clip(mask.sum(-1), 1, None))[..., None]
    inside = 1.0 * (xp.abs(stopped(mean)) < CUT)
    plain = xp.exp(xp.clip(mean, -CUT, CUT))
    return stopped(plain) * xp.exp((lp - stopped(lp)) * inside), plain


def sampler_weight(gap: Any, mask: Any, xp: Any, correction: str, limit: float) -> Any:
    """Truncated or masked importance weights, per token or of the whole sequence, as TRL's four modes."""
    level, how = correction.split("_")
    gap = gap * mask if level == "token" else (gap * mask).sum(-1)[..., None]
    weight = xp.exp(xp.clip(gap, -CUT, CUT))
    return xp.clip(weight, None, limit) if how == "truncate" else weight * (weight <= limit)


def clipped_policy(
    z: Any, onehot: Any, mask: Any, advantage: Any, old: Any, reference: Any, sampler: Any, xp: Any, *,
    clip_low: float = 0.2, clip_high: float = 0.2, entropy_coef: float = 0.0, kl_coef: float = 0.0,
    aggregation: str = "token_mean", objective: str = "clip", ratio: str = "token", dual_clip: float | None = None,
    kl_estimator: str = "k3", kl_times_ratio: bool = False, sampler_correction: str | None = None,
    sampler_limit: float = 2.0,
) -> Any:  # fmt: skip
    """arXiv:1707.06347, eq. 7, minus an entropy bonus, plus a KL estimate; arXiv:2402.03300, eq. 3, where by sequence.

    Dual clip: arXiv:1912.09729. CISPO: arXiv:2506.13585, eq. 4. k1 to k3: joschu.net/blog/kl-approx.html.
    """
    lp = log_probs(z, onehot, xp)
    rho, plain = policy_ratio(lp, old, mask, xp, ratio)
    a = advantage if len(advantage.shape) == len(lp.shape) else advantage[..., None]
    bounded = xp.clip(rho, 1 - clip_low, 1 + clip_high)
    gain = stopped(bounded) * a * lp if objective == "cispo" else xp.minimum(rho * a, bounded * a)
    if dual_clip is not None:
        gain = xp.where(a < 0, xp.maximum(gain, dual_clip * a), gain)
    if sampler_correction is not None:
        gain = gain * sampler_weight(old - sampler, mask, xp, sampler_correction, sampler_limit)
    per_token = -gain - entropy_coef * entropy(z, xp)
    if kl_coef:
        d = reference - lp
        cut = xp.clip(d, -CUT, CUT)
        kl = {"k1": -d, "k2": d**2 / 2, "k3": xp.exp(cut) - cut - 1}[kl_estimator]
        per_token = per_token + kl_coef * kl * (plain if kl_times_ratio else 1.0)
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
