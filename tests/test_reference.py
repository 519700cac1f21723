"""The float64 reference against two other routes (explicit full logits; PyTorch's autograd) and finite differences."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import options_of, truth_outputs

from logitless import reference
from logitless.ideal import ideal_gradients
from logitless.problems import PROBLEMS, Case, Problem
from logitless.spec import LossOptions
from logitless.tolerances import BOUND, DIFFERENCES, ELEMENTS, OUTPUTS, TINY, error

SLACK = BOUND["bounds of float64, absolute"]
DOUBLE = [problem.with_dtype("float64") for problem in PROBLEMS]
# The large ones differ from the others in nothing but size.
every_problem = pytest.mark.parametrize(
    "problem",
    [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if "large" in p.tags else []) for p in DOUBLE],
)


@every_problem
def test_equals_explicit_full_logits(problem: Problem) -> None:
    true, other = truth_outputs(problem), ideal_gradients(problem.case())
    for name in OUTPUTS:
        # Full logits lose log 2 beside 2²⁴ and p − 1 near p = 1: there the anchored side is the better one.
        limit = BOUND.get(f"{problem.name} float64", TINY["float64"])
        assert error(other[name], true[name]) <= limit, name


def autograd_outputs(case: Case) -> dict[str, Any]:
    """The same by PyTorch's own operations and autograd, in float64."""
    torch = pytest.importorskip("torch", reason="the independent route is PyTorch's autograd")
    o, problem = case.problem.options, case.problem
    x = torch.tensor(case.hidden, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(case.weight, dtype=torch.float64, requires_grad=True)
    b = torch.tensor(
        np.zeros(problem.vocab) if case.bias is None else case.bias, dtype=torch.float64, requires_grad=True
    )
    y = torch.tensor(case.target).reshape(-1)
    z = (x.reshape(-1, problem.hidden) @ w.T + b) * o.logit_scale
    if o.softcap is not None:
        z = o.softcap * torch.tanh(z / o.softcap)
    k = None if case.class_weight is None else torch.tensor(case.class_weight, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(
        z, y, weight=k, ignore_index=o.ignore_index, reduction="none", label_smoothing=o.label_smoothing
    )
    loss = loss + o.z_loss * torch.where(y == o.ignore_index, 0.0, torch.logsumexp(z, 1).square())
    if case.token_weight is not None:
        loss = loss * torch.tensor(case.token_weight, dtype=torch.float64).reshape(-1)
    loss = loss.reshape(problem.shape) if o.reduction == "none" else loss.sum() / case.normalizer()
    loss.backward(torch.tensor(case.upstream, dtype=torch.float64).reshape(loss.shape))
    grads = {"dhidden": x.grad, "dweight": w.grad, "dbias": b.grad}
    return {"loss": loss.detach().numpy(), **{name: grad.numpy() for name, grad in grads.items()}}


@every_problem
def test_equals_torch_autograd(problem: Problem) -> None:
    true, other = truth_outputs(problem), autograd_outputs(problem.case())
    for name in OUTPUTS:
        limit = BOUND.get(f"{problem.name} float64 autograd", TINY["float64"])
        assert error(other[name], true[name]) <= limit, name


small_problems = st.builds(
    Problem,
    name=st.just("drawn"),
    shape=st.tuples(st.integers(1, 6)),
    hidden=st.integers(1, 5),
    vocab=st.integers(1, 9),
    dtype=st.just("float64"),
    options=st.builds(
        LossOptions,
        reduction=st.sampled_from(["mean", "sum", "none"]),
        ignore_index=st.sampled_from([-100, 0, 2]),
        label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
        z_loss=st.sampled_from([0.0, 1e-2]),
        logit_scale=st.sampled_from([1.0, 0.5, 2.0]),
        softcap=st.sampled_from([None, 1.5, 30.0]),
    ),
    bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.4]),
    token_weight=st.sampled_from(["none", "mask", "random"]),
    class_weight=st.sampled_from(["none", "positive"]),
    upstream=st.sampled_from([1.0, -2.0]),
    seed=st.integers(0, 10**6),
)


@settings(max_examples=60, deadline=None)
@given(small_problems)
def test_drawn_problems_equal_full_logits_and_finite_differences(problem: Problem) -> None:
    case = problem.case()
    true, other = truth_outputs(problem), ideal_gradients(case)
    for name in OUTPUTS:
        assert np.allclose(other[name], true[name], **ELEMENTS["float64"]), name

    rng = np.random.default_rng(problem.seed)
    step = 1e-5
    for argument in ("hidden", "weight") + (("bias",) if case.bias is not None else ()):
        base = getattr(case, argument)
        direction = rng.standard_normal(base.shape)

        def shifted(sign: float, argument: str = argument, base: Any = base, direction: Any = direction) -> float:
            moved = dataclasses.replace(case, **{argument: base + sign * step * direction})
            loss = reference.linear_cross_entropy(
                moved.hidden, moved.weight, moved.target, moved.bias, **options_of(moved)
            ).loss
            return float(np.sum(loss * case.upstream))

        slope = (shifted(1.0) - shifted(-1.0)) / (2 * step)
        analytic = float(np.sum(true[f"d{argument}"] * direction))
        assert slope == pytest.approx(analytic, **DIFFERENCES), argument


@settings(max_examples=40, deadline=None)
@given(small_problems, st.booleans())
def test_log_probs_and_entropy_against_finite_differences(problem: Problem, with_cap: bool) -> None:
    case, rng = problem.case(), np.random.default_rng(problem.seed)
    options = {"logit_scale": 1.5, "softcap": 2.0 if with_cap else None, "ignore_index": problem.options.ignore_index}
    g1, g2 = rng.standard_normal(problem.shape), rng.standard_normal(problem.shape)
    arrays = {"hidden": case.hidden, "weight": case.weight}

    def total(**changed: Any) -> float:
        a = arrays | changed
        result = reference.linear_log_probs(a["hidden"], a["weight"], case.target, case.bias, **options)
        return float(np.sum(result.log_prob * g1 + result.entropy * g2))

    made = reference.linear_log_probs(
        case.hidden, case.weight, case.target, case.bias, log_prob_upstream=g1, entropy_upstream=g2, **options
    )
    assert np.all(made.log_prob <= SLACK)
    assert np.all((made.entropy >= -SLACK) & (made.entropy <= np.log(problem.vocab) + SLACK))
    for argument, grad in (("hidden", made.hidden_grad), ("weight", made.weight_grad)):
        direction = rng.standard_normal(grad.shape)
        up = total(**{argument: arrays[argument] + 1e-5 * direction})
        down = total(**{argument: arrays[argument] - 1e-5 * direction})
        assert (up - down) / 2e-5 == pytest.approx(float(np.sum(grad * direction)), **DIFFERENCES), argument


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_size_changes_nothing_but_rounding(chunk: int) -> None:
    problem = next(problem for problem in DOUBLE if problem.name == "odd_most")
    case, true = problem.case(), truth_outputs(problem)
    made = reference.linear_cross_entropy(
        case.hidden, case.weight, case.target, case.bias, upstream=case.upstream, chunk=chunk, **options_of(case)
    )
    for name, value in zip(OUTPUTS, (made.loss, made.hidden_grad, made.weight_grad, made.bias_grad), strict=True):
        assert error(value, true[name]) <= TINY["float64"], name


def test_it_does_not_use_what_it_judges() -> None:
    """A mistake in the frameworks' row mathematics must not be in the truth as well."""
    source = Path(reference.__file__).read_text(encoding="utf-8")
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("logitless")} == {"logitless.spec"}
