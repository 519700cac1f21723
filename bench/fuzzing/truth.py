"""What a problem's outputs are in float64 on full logits, and how far from it an implementation may be (head.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.fuzzing import per_token
from bench.fuzzing.data import Arrays
from bench.fuzzing.head import (
    Expected,
    Factors,
    Sums,
    bounded,
    factors_of,
    head_of,
    inside,
    norm_of,
    products,
    scaled,
    wide_dtype,
)
from bench.fuzzing.problems import Problem
from logitless import reference
from logitless.ideal import ideal_gradients
from logitless.problems import Case
from logitless.problems import Problem as ListedProblem
from logitless.rounding import round_to
from logitless.spec import LossOptions
from logitless.tolerances import TINY

LOSS_OPTIONS = (
    "reduction", "ignore_index", "label_smoothing", "z_loss", "logit_scale", "softcap", "temperature",
)  # fmt: skip


def expected(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    """Every output by name: results, and "d" before the name of an argument for its gradient."""
    with np.errstate(all="ignore"):
        return _TRUTHS[problem.function](problem, arrays)


def _cross_entropy(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    linear = problem.function == "linear_cross_entropy"
    options = {name: problem.options[name] for name in LOSS_OPTIONS if name in problem.options}
    tau = problem.options.get("temperature", 1.0)
    if linear:
        head = head_of(problem, arrays)
        raw, magnitude, tau = head.raw, head.magnitude, head.tau
        options |= {"temperature": arrays["temperature"]} if "temperature" in arrays else {}
    else:
        raw = arrays["logits"].astype(np.float64).reshape(problem.tokens, problem.vocab)
        scale = problem.options.get("logit_scale", 1.0) / problem.options.get("temperature", 1.0)
        magnitude = scale * np.abs(np.where(np.isfinite(raw), raw, 0.0)).max(1, initial=0.0)
    target, outside = inside(problem, arrays["target"])
    if problem.arrays.get("class_weight") == "unused":  # what no target has may be anything
        arrays = arrays | {"class_weight": np.where(np.abs(arrays["class_weight"]) < 1e30, arrays["class_weight"], 1.0)}
    upstream = _zero_outside(arrays["upstream"], outside, options)
    h = np.where(outside, 0.0, arrays.get("upstream_lse", 0.0))
    true = reference.cross_entropy(
        raw.reshape(*problem.shape, problem.vocab), target, upstream=upstream, lse_upstream=h,
        token_weight=arrays.get("token_weight"), class_weight=arrays.get("class_weight"),
        normalizer=problem.options.get("normalizer"), **options,
    )  # fmt: skip
    factors = factors_of(problem, arrays)
    allowed = _loss_allowance(problem, factors, true, magnitude)
    loss = np.where(outside, np.nan, true.loss) if true.loss.ndim else np.where(outside.any(), np.nan, true.loss)
    outputs = {"loss": Expected(loss, allowed, wide_dtype(problem.dtype))}
    if problem.options.get("return_stats"):
        outputs |= _stats(problem, true.stats, magnitude, outside)
    if problem.options.get("return_lse"):
        outputs["lse"] = _stats(problem, true.stats, magnitude, outside)["stats.lse"]
    dz = true.logits_grad.reshape(problem.tokens, problem.vocab)
    gross = _gross(problem, arrays, factors, scaled(problem, raw, tau), true.stats)
    if not linear:
        gradient = true.logits_grad
        known = norm_of(round_to(gradient, problem.dtype) - gradient)
        outputs["dlogits"] = bounded(problem, gradient, known, Sums(0.0, norm_of(gross), 0.0), magnitude, outside)
        return outputs
    ideal = None if "upstream_lse" in arrays or "temperature" in arrays else _ideal(problem, arrays, options)
    return outputs | products(problem, arrays, head, dz, gross, outside, ideal)


def _log_probs(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    outputs = per_token.log_probs(problem, arrays)
    if not problem.options.get("return_stats"):
        return outputs
    head, (target, outside) = head_of(problem, arrays), inside(problem, arrays["target"])
    options = {name: problem.options[name] for name in LOSS_OPTIONS if name in problem.options}
    options |= {"temperature": arrays["temperature"]} if "temperature" in arrays else {}
    raw = head.raw.reshape(*problem.shape, problem.vocab)
    stats = reference.cross_entropy(raw, target, **options | {"reduction": "none"}).stats
    found = _stats(problem, stats, head.magnitude, outside)
    return outputs | {name: found[f"stats.{name}"] for name in ("lse", "sum_p_squared")} | found


def _zero_outside(upstream: Any, outside: Any, options: dict[str, Any]) -> Any:
    return np.where(outside, 0.0, upstream) if options.get("reduction") == "none" else upstream


def _loss_allowance(problem: Problem, of: Factors, true: Any, magnitude: Any) -> float:
    """TINY of each token's loss and of what its logits are sums of; with signed weights, of the sums before they
    cancel."""
    o, tiny = problem.options, TINY[wide_dtype(problem.dtype)]
    smooth, lse = o.get("label_smoothing", 0.0), np.abs(true.stats.lse.reshape(-1))
    each = (1 - smooth) * np.abs(of.at_target) + smooth * np.abs(of.k).mean()
    span = np.abs(true.stats.nll.reshape(-1)) + magnitude
    rows = np.abs(of.t) * (each * (1.0 + span) + o.get("z_loss", 0.0) * (lse + magnitude) * (lse + magnitude + 1))
    rows = tiny * abs(of.norm) * of.cancelled**2 * np.where(np.isfinite(rows), rows, 0.0)
    return norm_of(rows) if o["reduction"] == "none" else float(rows.sum())


def _gross(problem: Problem, arrays: Arrays, of: Factors, logits: tuple[Any, Any, Any], stats: Any) -> Any:
    """Magnitudes of what the logits' gradient is a sum of, [N, V]: where they cancel, float32 has fewer digits."""
    o, lse = problem.options, stats.lse.reshape(-1)
    z, _, scale = logits
    smooth = o.get("label_smoothing", 0.0)
    beta = (1 - smooth) * np.abs(of.at_target)
    rest = smooth * np.abs(of.k).mean() + 2 * o.get("z_loss", 0.0) * np.abs(lse)
    g = np.abs(np.broadcast_to(arrays["upstream"], problem.shape).reshape(-1) * of.norm * of.t)
    target = arrays["target"].reshape(-1)
    p, index, y = np.exp(z - lse[:, None]), np.arange(len(z)), np.where((target >= 0) & (target < len(of.k)), target, 0)
    gross = (beta + rest)[:, None] * p + smooth / problem.vocab * np.abs(of.k)
    # Of the target's own part only what is left of p − 1 is there to be rounded.
    gross[index, y] += beta * (-np.expm1(-stats.nll.reshape(-1)) - p[index, y])
    # A softcap's slope, 1 less a square near 1, is off by what that square is: it makes nothing smaller.
    gross = gross * scale * (g * of.cancelled)[:, None]
    if "upstream_lse" in arrays:
        gross = gross + scale * np.abs(arrays["upstream_lse"].reshape(-1))[:, None] * p
    return np.where(np.isfinite(gross), gross, 0.0)


def _stats(problem: Problem, stats: Any, magnitude: Any, outside: Any) -> dict[str, Expected]:
    """Values per token. argmax and correct are looked at by the judge of ties: not here."""
    tiny = TINY[wide_dtype(problem.dtype)]
    outputs = {}
    for name in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit", "sum_p_squared"):
        values = np.where(outside, np.nan, getattr(stats, name))
        rows = tiny * (
            1.0 + 2.0 * magnitude.reshape(problem.shape) + np.abs(np.where(np.isfinite(values), values, 0.0))
        )
        if name == "entropy":  # a sum of p · log p, whose p is off by its logit's error
            rows = rows * (1.0 + np.log(max(2, problem.vocab)))
        outputs[f"stats.{name}"] = Expected(
            values, norm_of(rows), wide_dtype(problem.dtype), poison=name in ("nll", "lse")
        )
        outputs[f"stats.{name}"].undecided = bool(outside.any())
    return outputs


def _ideal(problem: Problem, arrays: Arrays, options: dict[str, Any]) -> dict[str, Any]:
    """The ideal path's gradients; none where it does not cover what the problem has."""
    if problem.blemish != "none" or problem.tokens == 0:
        return {}
    tempered = {name: value for name, value in options.items() if name != "temperature"}
    loss_options = LossOptions(**tempered).tempered(options.get("temperature", 1.0))
    listed = ListedProblem(
        "", problem.shape, problem.hidden, problem.vocab, problem.dtype, loss_options,
        normalizer=problem.options.get("normalizer"),
    )  # fmt: skip
    upstream = np.asarray(arrays["upstream"])
    case = Case(
        listed, arrays["hidden"], arrays["weight"], arrays["target"], arrays.get("bias"), arrays.get("token_weight"),
        arrays.get("class_weight"), upstream,
    )  # fmt: skip
    return dict(ideal_gradients(case))


def _gather(problem: Problem, arrays: Arrays) -> dict[str, Expected]:
    index, up = arrays["index"], arrays["upstream"].astype(np.float64)
    padded, real = np.zeros(up.shape), problem.padded_places >= 0
    padded[real] = arrays["input"][index]
    gradient, rough = np.zeros(arrays["input"].shape), np.zeros(arrays["input"].shape)
    np.add.at(gradient, index, up[real])
    np.add.at(rough, index, up[real] ** 2)
    outputs = {"output": Expected(padded, 0.0, problem.dtype)}
    known = norm_of(round_to(gradient, problem.dtype) - gradient)
    wide = float(np.sqrt(rough.sum()))
    outputs["dinput"] = bounded(problem, gradient, known, Sums(0.0, 0.0, 0.0), np.zeros(1), np.zeros(0, bool))
    outputs["dinput"].allowed += TINY[wide_dtype(problem.dtype)] * wide
    return outputs


_TRUTHS = {
    "linear_cross_entropy": _cross_entropy, "cross_entropy": _cross_entropy, "linear_log_probs": _log_probs,
    "clipped_policy_loss": per_token.policy, "dpo_loss": per_token.dpo, "kto_loss": per_token.kto,
    "distillation_loss": per_token.distillation,
    "sparse_distillation_loss": per_token.from_targets, "dense_distillation_loss": per_token.from_targets,
    "linear_token_log_probs": per_token.token_log_probs, "linear_top_k": per_token.top_k,
    "padded_index_gather": _gather,
}  # fmt: skip
