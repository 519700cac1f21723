"""Every implementation, every problem, every dtype, every order of the plan: one rule (logitless.tolerances)."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import (
    HAVE_BOTH,
    JaxXla,
    TorchEager,
    assert_within,
    every_implementation,
    ideal_errors,
    in_its_own_dtype,
    in_jax,
    in_turn,
    plan_for,
    problem_named,
    run_case,
    truth,
)  # fmt: skip

from logitless import reference
from logitless.problems import PROBLEMS, Problem
from logitless.tolerances import OUTPUTS, TINY, allowance, error

LOW = ("float32", "bfloat16", "float16")

# What a plan can get wrong: every option, ragged chunks, anchors that move, odd vocabularies.
PLANNED = (
    *("odd_bias", "odd_all", "odd_most", "odd_softcap", "odd_none_all", "odd_none_most", "signed_smooth", "ragged"),
    *("confident", "confident_wrong", "shifted_up", "tied", "minus_inf", "gpt2"),
)

PLANNED_RUNS = [(name, order) for name in PLANNED for order in ("tokens", "tokens_two_pass", "vocab", "both")]
# One chunk in one pass: where the upstream gradient comes per token, kernels hold their exponentials until then.
PLANNED_RUNS += [(name, "one_chunk") for name in ("odd_none", "odd_none_all", "odd_none_most")]
# Each has its options or its values in common with another one.
LATE = ("odd_bias", "odd_most", "odd_none_all", "confident", "tied")
# Within the rule each, the two are within twice the allowance of each other: a few show that on one run's bytes.
TOGETHER = ("odd_all", "odd_none_most", "ragged")


def plans(problem: Problem) -> dict[str, Any]:
    """For each order a chunk size that leaves a ragged rest, in one pass and with lse known first."""
    wide = 4999 if problem.vocab > 5000 else 50
    return {
        "tokens": plan_for(problem, order="tokens", chunk=37 if problem.tokens < 500 else 300),
        "tokens_two_pass": plan_for(problem, order="tokens", chunk=64, one_pass=False),
        "vocab": plan_for(problem, order="vocab", chunk=wide),
        "both": plan_for(problem, order="both", chunk=37 if problem.tokens < 500 else 300),
        "one_chunk": plan_for(problem, order="tokens", chunk=problem.tokens),
    }


# The plans that XLA compiles in make test: the others' plans are cut in the same way.
PLANNED_IN_XLA = [
    *(("odd_all", order) for order in ("tokens", "tokens_two_pass", "vocab", "both")),
    *(("odd_none_most", "tokens_two_pass"), ("odd_none_most", "one_chunk"), ("confident_wrong", "tokens")),
    *(("signed_smooth", "tokens"), ("minus_inf", "vocab"), ("ragged", "vocab"), ("gpt2", "vocab")),
]


def is_late(parameters: dict[str, Any]) -> bool:
    """The largest problems; with XLA those that plans are tried on or test_trained.py is about, and of the
    others every other one in float32 alone, the rest in their other dtype."""
    problem, dtype = parameters["problem"], parameters["dtype"]
    if problem.name == "qwen" or "large" in problem.tags:
        return True
    if not in_jax(parameters):
        return False
    odd = PROBLEMS.index(problem) % 2 == 1
    return problem.name in dict(PLANNED_IN_XLA) or "trained" in problem.tags or (dtype == "float32") == odd


@pytest.mark.late(where=is_late)
@every_implementation
@pytest.mark.parametrize(("problem", "dtype"), in_turn(PROBLEMS, [*LOW, "float64"], always=["float32"]))
@pytest.mark.case(1)
@pytest.mark.case(11)
@pytest.mark.case(13)
@pytest.mark.case(17)
@pytest.mark.case(22)
@pytest.mark.case(23)
def test_within_the_rule_by_default(impl: Any, problem: Problem, dtype: str) -> None:
    problem = problem.with_dtype(dtype)
    assert_within(problem, run_case(impl, problem.case()))


@pytest.mark.late(where=lambda p: p["run"][0] in LATE or (in_jax(p) and p["run"] not in PLANNED_IN_XLA))
@every_implementation
@pytest.mark.parametrize(("run", "dtype"), in_turn(PLANNED_RUNS, ["float32", "bfloat16"]))
def test_within_the_rule_for_every_plan(impl: Any, run: tuple[str, str], dtype: str) -> None:
    name, order = run
    problem = problem_named(name).with_dtype(dtype)
    assert_within(problem, run_case(impl, problem.case(), plan=plans(problem)[order]))


@pytest.mark.skipif(not HAVE_BOTH, reason="needs both torch and jax")
@pytest.mark.late(where=lambda p: p["problem"].name not in TOGETHER)
@pytest.mark.parametrize(("problem", "dtype"), in_turn([p for p in PROBLEMS if "odd" in p.tags], LOW))
def test_torch_and_jax_agree_on_identical_bytes(problem: Problem, dtype: str) -> None:
    problem = problem.with_dtype(dtype)
    case, ideal = problem.case(), ideal_errors(problem)
    one, other = run_case(TorchEager(), case), run_case(JaxXla(), case)
    pairs = {"loss": (one.loss, other.loss)}
    pairs |= {f"d{name}": (one.grads[name], other.grads[name]) for name in one.grads if one.grads[name] is not None}
    for name, (a, b) in pairs.items():
        assert error(a, b) <= 2 * allowance(ideal[name], dtype), name


@pytest.mark.late(where=lambda p: in_jax(p) and p["name"] not in ("odd_all", "confident_wrong", "gpt2"))
@every_implementation
@pytest.mark.parametrize(
    ("name", "dtype"),
    in_turn(["odd_bias", "odd_softcap", "odd_all", "confident_wrong", "ragged", "gpt2"], ["float32", "bfloat16"]),
)
def test_statistics(impl: Any, name: str, dtype: str) -> None:
    problem = next(p for p in PROBLEMS if p.name == name).with_dtype(dtype)
    case, true = problem.case(), truth(problem).stats
    for plan in (None, plans(problem)["vocab"]):
        made = run_case(impl, case, return_stats=True, plan=plan).stats
        # float32 logits on either side of a tie may swap: where argmax differs, the maxima must be equal to rounding.
        for field in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit", "sum_p_squared"):
            assert error(getattr(made, field), getattr(true, field)) <= 2 * TINY["float32"], field
        assert (made.argmax == true.argmax).mean() >= 0.99
        assert ((made.argmax == -1) == (true.argmax == -1)).all()
        assert (made.correct == true.correct).mean() >= 0.99


@in_its_own_dtype
@pytest.mark.parametrize("name", ["odd_none", "odd_all"])
def test_the_rule_can_fail(impl: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is not blind: a truth moved by three times the allowance is refused, for every output."""
    import implementations

    problem = problem_named(name).with_dtype(impl.dtype)
    outcome = run_case(impl, problem.case())
    true = implementations.truth_outputs(problem)
    for output in OUTPUTS:
        moved = true | {output: true[output] * (1 + 3 * allowance(ideal_errors(problem)[output], problem.dtype))}
        monkeypatch.setattr(implementations, "truth_outputs", lambda *_, moved=moved: moved)
        with pytest.raises(AssertionError, match=output):
            assert_within(problem, outcome)


def test_reference_is_not_an_implementation_under_test() -> None:
    """The truth is computed from the same rounded arrays that the implementations see."""
    problem = next(p for p in PROBLEMS if p.name == "odd").with_dtype("bfloat16")
    case = problem.case()
    again = reference.linear_cross_entropy(case.hidden, case.weight, case.target)
    assert float(again.loss) == float(truth(problem).loss)
    assert case.hidden.dtype == "float32"
