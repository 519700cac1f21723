"""Random problems against float64 (``python -m bench fuzz``), with another seed in every run.

The fuzzer itself is tested too: it finds faults, goes on where it was stopped, and repeats a problem.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.doctor import cuda_device_count

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import fuzz, registry
from bench.fuzzing import data, judge
from bench.fuzzing.problems import Problem, draw

HAVE_TORCH = importlib.util.find_spec("torch") is not None
HAVE_JAX = importlib.util.find_spec("jax") is not None
BACKENDS = ("eager", "triton", "xla") if HAVE_TORCH and HAVE_JAX else ("eager", "triton") if HAVE_TORCH else ("xla",)
PARTS = 4
# A problem of XLA takes ten times as long as the mean of all.
PROBLEMS = 200 if HAVE_TORCH else 60

needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="breaks and runs a function of torch, which is not installed")


@pytest.mark.case(4, 5, 6, 33, 34, 35, 36)
@pytest.mark.skipif(cuda_device_count() > 0, reason="on a GPU python -m bench fuzz --device cuda is run by itself")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems_are_right(part: int) -> None:
    seed = int(os.environ["LOGITLESS_FUZZ_SEED"])
    backends = BACKENDS if len(BACKENDS) < 3 else ()
    made = fuzz.run_batch(seed, list(range(part, PROBLEMS, PARTS)), "cpu", backends)
    assert made["problems"] == PROBLEMS // PARTS
    assert not made["wrong"], json.dumps(made["wrong"], indent=1, ensure_ascii=False)


@functools.cache
def drawn(count: int, **wanted: Any) -> list[Problem]:
    """The first problems of the eager backend that have the wanted fields."""
    problems = (draw(5, number, backends=("eager",)) for number in range(100 * count))
    return [p for p in problems if all(getattr(p, name) == value for name, value in wanted.items())][:count]


def scaled_weight_grad(function: Any) -> Any:
    """The function with dW too large by a tenth."""

    def broken(hidden: Any, weight: Any, *arguments: Any, **options: Any) -> Any:
        weight = weight.view_as(weight)
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient * 1.1)
        return function(hidden, weight, *arguments, **options)

    return broken


def last_token_lost(function: Any) -> Any:
    def broken(hidden: Any, weight: Any, target: Any, *arguments: Any, **options: Any) -> Any:
        target = target.clone()
        target[-1:] = options.get("ignore_index", -100)
        return function(hidden, weight, target, *arguments, **options)

    return broken


def hidden_written(function: Any) -> Any:
    def broken(hidden: Any, *arguments: Any, **options: Any) -> Any:
        made = function(hidden, *arguments, **options)
        hidden.data.mul_(2.0)  # unseen by autograd
        return made

    return broken


@needs_torch
@pytest.mark.parametrize(
    ("broken", "output"),
    [(scaled_weight_grad, "dweight"), (last_token_lost, "loss"), (hidden_written, "an argument was written to")],
)
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, broken: Any, output: str) -> None:
    from logitless import torch_impl

    wanted = {"function": "linear_cross_entropy", "transform": "plain", "blemish": "none", "extras": (), "ignored": 0.0}
    problems = [p for p in drawn(60, data="random", **wanted) if "weight" in p.needs and p.tokens > 1]
    problems = [p for p in problems if p.vocab > 1 and "token_weight" not in p.arrays and p.hidden > 1]
    problems = [p for p in problems if p.layouts["hidden"] not in ("expanded", "broadcast")]
    assert not any(judge.judged(p).wrong for p in problems)
    monkeypatch.setattr(torch_impl, "linear_cross_entropy", broken(torch_impl.linear_cross_entropy))
    found = [any(line.startswith(output) for line in judge.judged(p).wrong) for p in problems]
    assert len(found) >= 10
    assert np.mean(found) >= 0.75  # a target may be ignored, and many may be one token


@needs_torch
def test_an_id_outside_that_is_not_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from logitless.torch_impl import checks

    problem = drawn(3, function="linear_cross_entropy", transform="plain", blemish="outside")[0]
    assert judge.judged(problem).wrong == ()
    monkeypatch.setattr(checks, "check_ids", lambda *_: None)
    assert judge.judged(problem).wrong != ()


def test_what_the_judge_says_of_float16s_range() -> None:
    """An element may leave it if the allowed error may take it there; then it is infinite, and no NaN."""
    from bench.fuzzing.head import Expected

    values = np.array([1.0, 6e4, 1e6])
    for actual, allowed, wrong in (
        ([1.0, 6e4, np.inf], 1.0, False),
        ([1.0, np.inf, np.inf], 1.0, True),
        ([1.0, np.inf, np.inf], 1e4, False),
        ([1.0, np.nan, np.inf], 1e4, True),
        ([np.inf, 6e4, np.inf], 1e4, True),
    ):
        found = judge._against("dweight", np.array(actual), Expected(values, allowed, "float16"))
        assert bool(found) == wrong, (actual, allowed, found)


def test_a_problem_is_a_function_of_its_numbers() -> None:
    numbers = range(50)
    assert len({repr(draw(7, number).options) for number in numbers}) > 20
    for number in numbers:
        one, again = draw(7, number), draw(7, number)
        assert one == again
        first, second = data.make(one), data.make(again)
        assert all(np.array_equal(first[name], second[name], equal_nan=first[name].dtype.kind == "f") for name in first)


@pytest.mark.parametrize(("device", "backends"), [("cpu", ()), ("cpu", ("xla",)), ("cuda", ("triton", "pallas"))])
def test_the_printed_command_is_that_problem(device: str, backends: tuple[str, ...]) -> None:
    command = fuzz.reproducing(11, 42, device, backends)
    asked = registry.parser().parse_args(command.split()[3:])
    again = draw(asked.seed, asked.only, asked.device, tuple(filter(None, asked.backends.split(","))))
    assert again == draw(11, 42, device, backends)


def test_a_shards_results_have_their_own_file() -> None:
    for more, name in (([], "fuzz_cpu"), (["--shard", "1/2"], "fuzz_cpu_1_of_2"), (["--device", "cuda"], "fuzz_gpu")):
        assert fuzz.file_of(registry.parser().parse_args(["fuzz", *more])) == f"{name}.json"


def test_a_stopped_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    carried_out: list[int] = []

    def run_batch(seed: int, numbers: list[int], device: str, backends: tuple[str, ...]) -> dict[str, Any]:
        if len(carried_out) == stop_at:
            raise KeyboardInterrupt
        carried_out.append(numbers[0])
        counts = {"seed": {str(seed): len(numbers)}}
        wrong = [{"command": str(n), "wrong": ["loss"]} for n in numbers if n % 97 == 0]
        return {"numbers": [numbers[0], numbers[-1]], "problems": len(numbers), "counts": counts, "wrong": wrong}

    monkeypatch.setattr(fuzz, "run_batch", run_batch)
    asked = registry.parser().parse_args(["fuzz", "--problems", "330", "--seed", "3", "--shard", "1/2"])
    part, header = tmp_path / "fuzz.json.part", {"machine": {"commit": "a"}}
    stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        fuzz.fuzz(asked, header, part)
    with part.open("a") as lines:
        lines.write('{"numbers": [')  # stopped while it wrote
    stop_at = -1
    made = fuzz.fuzz(asked, header, part)
    assert carried_out == [1, 101, 201, 301]
    assert made["problems"] == 165
    assert made["counts"] == {"seed": {"3": 165}}
    assert [one["command"] for one in made["rows"]] == ["97", "291"]
    with pytest.raises(SystemExit, match="other arguments or at another commit"):
        fuzz.fuzz(asked, {"machine": {"commit": "b"}}, part)


def test_shards_are_all_problems() -> None:
    numbers = [n for part in range(3) for batch in fuzz.batches(1000, f"{part}/3") for n in batch]
    assert sorted(numbers) == list(range(1000))
    with pytest.raises(SystemExit, match="--shard: got 3/3"):
        fuzz.batches(10, "3/3")
