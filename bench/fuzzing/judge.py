"""One problem from its number to a verdict."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import numpy as np

from bench.fuzzing import data, head, truth
from bench.fuzzing.problems import Problem


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``wrong``: what is wrong with it, in words; empty where nothing is."""

    problem: Problem
    wrong: tuple[str, ...]


def judged(problem: Problem) -> Verdict:
    """The problem carried out, and held against the truth."""
    arrays = data.make(problem)
    runner = importlib.import_module(f"bench.fuzzing.run_{'torch' if problem.torch else 'jax'}")
    try:
        outputs = runner.run(problem, arrays)
    except Exception as error:  # whatever is raised is the finding
        return Verdict(problem, _refusal(problem, error))
    if problem.transform == "second":
        return Verdict(problem, ("a second derivative was not refused",))
    if problem.blemish == "outside" and _looked_at(problem):
        return Verdict(problem, ("target: an id outside of the vocabulary was not refused",))
    if problem.turned and "dweight" in outputs:
        outputs["dweight"] = outputs["dweight"].T
    return Verdict(problem, tuple(compared(problem, arrays, outputs)))


def _looked_at(problem: Problem) -> bool:
    """Whether an id outside of the vocabulary is an error, and not a loss of NaN."""
    return problem.device == "cpu" and problem.transform not in ("jit", "vmap", "compile", "checkpoint", "func")


def _refusal(problem: Problem, error: Exception) -> tuple[str, ...]:
    if problem.blemish == "outside" and isinstance(error, ValueError) and str(error).startswith("target: got id"):
        return ()
    if problem.transform == "second" and isinstance(error, (RuntimeError, NotImplementedError)):
        return ()
    if problem.arrays.get("class_weight") == "unused" and str(error).startswith("class_weight: got"):
        return ()
    if "accumulate_own" in problem.extras and "beside accumulate_into" in str(error):
        return ()
    return (f"{type(error).__name__}: {error}"[:300],)


def compared(problem: Problem, arrays: data.Arrays, outputs: dict[str, Any]) -> list[str]:
    """What is wrong with the outputs, in words."""
    wrong = []
    if outputs.pop("written", 0):
        wrong.append("an argument was written to")
    for name, true in truth.expected(problem, arrays).items():
        source = name.removesuffix(" of common ids")
        if source not in outputs:
            if source.startswith("d") and problem.transform == "no_grad":
                continue
            wrong.append(f"{name}: missing")
            continue
        actual = outputs[source]
        if source != name:
            target = arrays["target"].reshape(-1)
            valid = target != problem.options.get("ignore_index", -100)
            actual = actual[head.common_ids(target[valid], problem.vocab)]
        wrong += _against(name, actual, true)
    return wrong + _argmax(problem, arrays, outputs)


def _against(name: str, actual: Any, true: head.Expected) -> list[str]:
    if actual.shape != true.values.shape:
        return [f"{name}: shape {actual.shape}, for {true.values.shape}"]
    if true.undecided:
        return []
    sizes, largest = np.abs(np.nan_to_num(true.values)), 0.999 * head.LARGEST[true.dtype]
    known = np.isfinite(true.values) & (sizes < largest)
    # What may be so far off that it leaves the dtype's range may be infinite, but no NaN.
    known &= (sizes + true.allowed < largest) | ~np.isinf(actual)
    wrong = []
    if not np.isfinite(actual[known]).all():
        wrong.append(f"{name}: {int((~np.isfinite(actual[known])).sum())} of {known.sum()} elements are not finite")
    elif (distance := float(np.linalg.norm(actual[known] - true.values[known]))) > true.allowed:
        norm = float(np.linalg.norm(true.values[known]))
        wrong.append(f"{name}: off by {distance:.3g}, allowed {true.allowed:.3g}, of {norm:.3g}")
    lost = ~np.isfinite(true.values) & np.isfinite(actual)
    if true.poison and lost.any():
        wrong.append(f"{name}: {int(lost.sum())} elements are finite where the truth is not")
    return wrong


def _argmax(problem: Problem, arrays: data.Arrays, outputs: dict[str, Any]) -> list[str]:
    """argmax names a class whose logit is the largest but for rounding, -1 where a token is ignored."""
    best = outputs.get("stats.argmax")
    if best is None or problem.blemish != "none":
        return []
    ignored = arrays["target"] == problem.options.get("ignore_index", -100)
    inside = (best >= 0) & (best < problem.vocab)
    if (best[ignored] != -1).any() or not inside[~ignored].all():
        return ["stats.argmax: outside of the vocabulary, or not -1 for an ignored token"]
    hit = (best == arrays["target"]) & ~ignored
    return [] if (outputs["stats.correct"].astype(bool) == hit).all() else ["stats.correct: not argmax == target"]
