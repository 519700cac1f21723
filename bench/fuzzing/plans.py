"""The plan that a problem asks for, by arguments of the call."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from bench.fuzzing.problems import OF_IDS, Problem
from logitless import ChunkPlan, plan
from logitless.given_ids import ids_cut
from logitless.planning import LATER_GRAIN


def plan_arguments(problem: Problem) -> dict[str, Any]:
    """``plan`` or ``memory_budget`` for the call; nothing for the default plan."""
    if problem.plan == "default":
        return {}
    order = problem.plan if problem.plan != "budget" else "vocab" if problem.plan_at < 0.5 else "tokens"
    length = problem.vocab if order == "vocab" else problem.tokens
    sizes: dict[str, Any] = {
        "tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": problem.dtype,
        "one_pass": _one_pass(problem), "device": "cpu" if problem.device == "cpu" else "gpu",
        "fused": problem.fused, "padded": problem.backend == "pallas",
    }  # fmt: skip
    if problem.turned != (problem.torch and problem.layouts.get("weight") == "transposed"):
        sizes["weight_layout"] = "dv"  # PyTorch's weight lies as its strides say
    if problem.function in OF_IDS:
        return {"memory_budget": _budget_of_ids(problem, sizes)}
    chosen = plan(**sizes, order=order, chunk=max(1, round(length * max(problem.plan_at, 0.1))))
    if problem.backend == "triton":
        chosen = dataclasses.replace(chosen, sum_bits=20 if problem.plan_at > 0.4 else 24)
        chosen = _in_parts(problem, chosen) if problem.plan == "both" else chosen
    if problem.plan != "budget":
        return {"plan": chosen}
    budget = chosen.scratch_bytes
    try:
        plan(**sizes, memory_budget=budget)
    except ValueError as error:  # less than any plan in whole tiles needs: it says how much that is
        budget = int(re.findall(r"\d+", str(error))[-1])
    return {"memory_budget": budget}


def _in_parts(problem: Problem, chosen: ChunkPlan) -> ChunkPlan:
    """The plan with a dW that is a sum over chunks, and exponentials in its memory, where the call may have these."""
    if problem.plan_at < 0.3 or "accumulate_own" in problem.extras:
        return chosen
    summed = dataclasses.replace(chosen, weight_tokens=-(-problem.tokens // 3), vocab_chunk=-(-problem.vocab // 5))
    turned = problem.layouts.get("weight") == "transposed"
    if problem.vocab > LATER_GRAIN and problem.plan_at > 0.6 and not turned:
        summed = dataclasses.replace(summed, summed=problem.vocab - LATER_GRAIN)
    lent = dataclasses.replace(summed, lends=True)
    makes = "weight" in problem.needs and problem.transform in ("plain", "twice", "autograd_grad", "downstream")
    return lent if makes and not problem.extras and lent.lent_bytes <= lent.room_bytes else summed


def _budget_of_ids(problem: Problem, sizes: dict[str, Any]) -> int:
    """From the least that the cut and the plan need to twice as much."""
    own = {name: sizes[name] for name in ("tokens", "hidden", "vocab", "dtype")} | {"ids": problem.count}
    least = max(_least(ids_cut, own), _least(plan, sizes) + ids_cut(**own).kept_bytes)
    return round(least * (1.0 + problem.plan_at))


def _least(function: Any, sizes: dict[str, Any]) -> int:
    """What the error for a budget of one byte says that is needed."""
    try:
        function(**sizes, memory_budget=1)
    except ValueError as error:
        return int(re.findall(r"\d+", str(error))[-1])
    return 1


def _one_pass(problem: Problem) -> bool:
    options = problem.options
    if problem.function != "linear_cross_entropy" or options["reduction"] == "none":
        return False
    return "softcap" not in options or "label_smoothing" not in options
