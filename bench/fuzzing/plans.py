"""The plan that a problem asks for, by arguments of the call."""

from __future__ import annotations

from typing import Any

from bench.fuzzing.problems import Problem
from logitless import plan


def plan_arguments(problem: Problem) -> dict[str, Any]:
    """``plan`` or ``memory_budget`` for the call; nothing for the default plan."""
    if problem.plan == "default" or (problem.backend == "triton" and problem.dtype == "float64"):
        return {}
    order = problem.plan if problem.plan != "budget" else "vocab" if problem.plan_at < 0.5 else "tokens"
    length = problem.vocab if order == "vocab" else problem.tokens
    chunk = max(1, round(length * max(problem.plan_at, 0.1)))
    made = plan(
        tokens=problem.tokens, hidden=problem.hidden, vocab=problem.vocab, dtype=problem.dtype, order=order,
        chunk=chunk, one_pass=_one_pass(problem), device="cpu" if problem.device == "cpu" else "gpu",
        fused=problem.fused, padded=problem.backend == "pallas",
    )  # fmt: skip
    if problem.plan != "budget":
        return {"plan": made}
    # A call takes its chunks in whole tiles: what the smallest of those needs always fits.
    least = plan(
        tokens=problem.tokens, hidden=problem.hidden, vocab=problem.vocab, dtype=problem.dtype, order=order,
        chunk=128, one_pass=_one_pass(problem), device="cpu" if problem.device == "cpu" else "gpu",
        fused=problem.fused, padded=problem.backend == "pallas",
    )  # fmt: skip
    return {"memory_budget": max(least.scratch_bytes, made.scratch_bytes)}


def _one_pass(problem: Problem) -> bool:
    options = problem.options
    if problem.function != "linear_cross_entropy" or options["reduction"] == "none":
        return False
    return "softcap" not in options or "label_smoothing" not in options
