"""Distillations whose vocabulary lies in parts on several ranks or devices: the problems, and the parts of the arrays.

Beside the problems of test_teachers.py there are those of a teacher's head. Their truth is that of a dense teacher with
the head's probabilities.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from test_losses import ARGUMENTS, made
from test_teachers import PROBLEMS, SHAPE, Problem, V, arrays, poisoned, truth

from logitless.rounding import round_to

TOKENS = int(np.prod(SHAPE))
HEAD_OPTIONS = {"teacher_logit_scale": 1.3, "teacher_softcap": 6.0}
HEADS = [
    *(Problem(f"head-{beta}", "dense", {"beta": beta}) for beta in (0, 0.3, 1)),
    Problem("head-options", "dense", {"beta": 0.6, "temperature": 1.7, "logit_scale": 0.8, "softcap": 4.0}),
    Problem("head-hard", "dense", {"beta": 1, "nll_coef": 0.4, "temperature": 1.7, "reduction": "sum"}),
    Problem("head-tau", "dense", {"beta": 0.3, "softcap": 4.0, "nll_coef": 0.4}, data="temperatures"),
]
EVERY = [*PROBLEMS, *HEADS]


def is_head(problem: Problem) -> bool:
    return problem.name.startswith("head")


def case_of(problem: Problem, dtype: str) -> tuple[dict[str, Any], Any]:
    """The arrays of the call, poisoned where a token does not count, and the float64 truth."""
    a = arrays(problem, dtype)
    if not is_head(problem):
        return poisoned(problem, a), truth(problem, a)
    rng = np.random.default_rng(5)
    head = {"hidden": rng.standard_normal((*SHAPE, 7)), "weight": rng.standard_normal((V, 7)), "bias": np.ones(V)}
    head["bias"][::3] = -0.5
    head = {name: round_to(values, dtype).astype(np.float64) for name, values in head.items()}
    z = HEAD_OPTIONS["teacher_logit_scale"] * (head["hidden"] @ head["weight"].T + head["bias"])
    z = HEAD_OPTIONS["teacher_softcap"] * np.tanh(z / HEAD_OPTIONS["teacher_softcap"])
    z = z / (a["temperature"][..., None] if "temperature" in a else problem.options.get("temperature", 1.0))
    a["teacher"] = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    true = truth(problem, a)
    del a["teacher"]
    a = poisoned(problem, a) | {f"teacher_{name}": values for name, values in head.items()}
    a["teacher_hidden"][a["mask"] == 0] = np.nan
    return a, true


def part_of(a: dict[str, Any], own: slice) -> dict[str, Any]:
    """The arrays that a rank with these entries is given."""
    rows = {name: a[name][own] for name in a if name.endswith(("weight", "bias"))}
    return a | rows | ({"teacher": a["teacher"][..., own]} if "teacher" in a else {})


def outcome_of(impl: Any, problem: Problem, a: dict[str, Any], dtype: str, **more: Any) -> Any:
    """Loss and gradients."""
    constants = [name for name in a if name not in ARGUMENTS]
    if not is_head(problem):
        return made(impl, problem.function, a, constants, dtype, **(problem.call | more))
    return made(impl, "distillation_loss", a, constants, dtype, **(problem.options | HEAD_OPTIONS | more))


def without_options(problem: Problem, **options: Any) -> Problem:
    """The problem with other options."""
    return dataclasses.replace(problem, options=problem.options | options)
