"""How far a gradient of hidden states, weight and bias may be from the truth; what all truths share.

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
from logitless.tolerances import GRADIENT, RATIO, ROUNDING, TINY

LARGEST = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": np.inf}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 1e-40, "float32": 1e-45, "float64": 0.0}
COMMON_ROWS = 10


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
    tau: Any
    """The temperature, a number or [N, 1]."""


def head_of(problem: Problem, arrays: Arrays, side: str = "") -> Head:
    x = arrays[f"{side}hidden"].astype(np.float64).reshape(problem.tokens, arrays[f"{side}hidden"].shape[-1])
    w = arrays[f"{side}weight"].astype(np.float64)
    b = arrays.get(f"{side}bias", np.zeros(len(w))).astype(np.float64)
    y = arrays["target"].reshape(-1) if "target" in arrays else np.zeros(problem.tokens, np.int64)
    valid = y != problem.options.get("ignore_index", -100)
    finite = np.where(np.isfinite(b), b, 0.0)
    sums = np.abs(np.nan_to_num(x)) @ np.abs(w).T + np.abs(finite)
    tau = problem.options.get("temperature", 1.0)
    if "temperature" in arrays:
        tau = arrays["temperature"].astype(np.float64).reshape(-1, 1)
    scale = problem.options.get(f"{side}logit_scale", 1.0) / np.reshape(tau, -1)
    x = np.where(valid[:, None], x, 0.0)
    return Head(x, w, np.where(valid, y, 0), valid, x @ w.T + b, scale * sums.max(1, initial=0.0), tau)


def scaled(problem: Problem, raw: Any, tau: Any, side: str = "") -> tuple[Any, Any, Any]:
    """Logits behind scale, softcap and temperature; their slope in ``raw``, and the largest slope that there can be.

    ``tau``: the temperature, a number or [N, 1].
    """
    o = problem.options
    scale, cap = o.get(f"{side}logit_scale", 1.0), o.get(f"{side}softcap")
    if cap is None:
        return scale / tau * raw, scale / tau, scale / tau
    bent = np.tanh(scale * raw / cap)
    return cap * bent / tau, scale / tau * (1.0 - bent**2), scale / tau


@dataclasses.dataclass
class Factors:
    """Of a loss: every token's t, k at its target, and what the sum of the losses is multiplied by."""

    t: Any
    k: Any
    at_target: Any
    norm: float
    cancelled: float
    """How many times larger mean's denominator would be if its signed weights did not cancel."""


def factors_of(problem: Problem, arrays: Arrays) -> Factors:
    o, target = problem.options, arrays["target"].reshape(-1)
    known = (target != o.get("ignore_index", -100)) & (target >= 0) & (target < problem.vocab)
    k = arrays.get("class_weight", np.ones(problem.vocab)).astype(np.float64)
    t = arrays.get("token_weight", np.ones(problem.shape)).astype(np.float64).reshape(-1)
    t = np.where(target != o.get("ignore_index", -100), t, 0.0)
    at_target = k[np.where(known, target, 0)]
    counts = t * at_target
    if o["reduction"] != "mean":
        return Factors(t, k, at_target, 1.0, 1.0)
    if "normalizer" in o:
        return Factors(t, k, at_target, 1.0 / o["normalizer"], 1.0)
    total = counts.sum()
    return Factors(t, k, at_target, 1.0 / total if total else 0.0, np.abs(counts).sum() / abs(total) if total else 1.0)


def products(
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
    outputs = {}
    for name in problem.needs:
        known = norm_of(ideal[f"d{name}"] - true[name]) if ideal else 0.0
        sums = Sums.of(name, square, large, x, w)
        output = bounded(problem, true[name], known, sums, head.magnitude, outside)
        if ideal is None:
            output.allowed += 2 * GRADIENT[problem.dtype] * max(sums.rough, norm_of(true[name]))
            # No common factor keeps the logits' gradients of confident tokens above float16's smallest number.
            largest = float(np.max(np.abs(np.nan_to_num(arrays["upstream"], posinf=0.0)), initial=0.0))
            output.allowed += RATIO * SMALLEST[problem.dtype] * largest * Sums.of(name, 0 * dz, 0 * dz + 1.0, x, w).most
        output.poison = name == "hidden"
        outputs[f"d{name}"] = output
    if problem.data == TRAINED and "weight" in problem.needs and ideal:
        ids = common_ids(head.y[head.valid], problem.vocab)
        sums = Sums.of("weight", square[:, ids], large[:, ids], x, w)
        known = norm_of(ideal["dweight"][ids] - true["weight"][ids])
        outputs["dweight of common ids"] = bounded(problem, true["weight"][ids], known, sums, head.magnitude, outside)
    return outputs


@dataclasses.dataclass(frozen=True)
class Sums:
    """Norms of the terms that a gradient is the sum of."""

    rough: float
    """As if they were independent."""
    most: float
    """The same of what the terms are sums of."""
    all: float
    """Of these, magnitudes added up, as if what float32 loses in long sums were a larger part of each."""

    @staticmethod
    def of(name: str, square: Any, large: Any, x: Any, w: Any) -> Sums:
        """``square``: dz², [N, V]; ``large``: magnitudes of what dz is the sum of."""

        def added(values: Any, other: Any) -> Any:
            if name == "bias":
                return values.sum(0)
            return values @ other(w) if name == "hidden" else values.T @ other(x)

        rough, most = (float(np.sqrt(added(of, np.square).sum())) for of in (square, large**2))
        # TINY is 16 roundings of float32: what adding up 256 terms one after another loses on average.
        longer = max(1.0, np.sqrt(large.shape[1] if name == "hidden" else large.shape[0]) / 16.0)
        return Sums(rough, most, longer * norm_of(added(large, np.abs)))


def common_ids(y: Any, vocab: int) -> Any:
    """The ids that are a target most often: in their rows of dW most cancels."""
    return np.argsort(-np.bincount(y, minlength=vocab), kind="stable")[:COMMON_ROWS]


def bounded(problem: Problem, true: Any, ideal: float, sums: Sums, magnitude: Any, outside: Any) -> Expected:
    """``ideal``: the norm of the ideal path's error."""
    dtype, tiny = problem.dtype, TINY[wide_dtype(problem.dtype)]
    norm = norm_of(np.where(np.abs(true) < LARGEST[dtype], true, 0.0))
    # One rounding is off by a quarter of its largest error, in the mean of squares; those of few tokens may be large.
    # Tokens that share one hidden state share their roundings.
    tokens = 1 if problem.layouts.get("hidden") in ("expanded", "broadcast") else problem.tokens
    few = 6.0 / np.sqrt(max(1, min(tokens, true.size)))
    roundings = 0.25 * ROUNDING[dtype] * (np.hypot(sums.rough, norm) + few * np.hypot(sums.most, norm))
    roundings += SMALLEST[dtype] * np.sqrt(true.size)
    logits = 1.0 + float(np.max(np.nan_to_num(magnitude), initial=0.0))
    wide = tiny * (logits * max(sums.most, norm) + sums.all)
    allowed = RATIO * max(ideal, float(roundings)) + TINY[dtype] * norm + wide
    return Expected(true, allowed, dtype, undecided=bool(np.any(outside)))


def inside(problem: Problem, target: Any) -> tuple[Any, Any]:
    """The targets with 0 for an id outside of the vocabulary, and where that was."""
    outside = ((target < 0) | (target >= problem.vocab)) & (target != problem.options.get("ignore_index", -100))
    other = min(i for i in range(3) if i != problem.options.get("ignore_index", -100))
    return np.where(outside, other, target), outside


def wide_dtype(dtype: str) -> str:
    """Of losses, sums and statistics."""
    return "float64" if dtype == "float64" else "float32"


def norm_of(values: Any) -> float:
    values = np.asarray(values, np.float64)
    return float(np.linalg.norm(np.where(np.isfinite(values), values, 0.0)))
