"""The accuracy rule where gradients cancel: targets are drawn from the model's own softmax. It holds over all of dW and
over the rows of the commonest targets, for every dtype and every kind of plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import (
    PLANS,
    TRAINED,
    TorchTriton,
    TorchTritonCuda,
    assert_rounded_once,
    assert_within,
    every_implementation,
    in_jax,
    in_turn,
    interpreted,
    problem_named,
    run_case,
)

from logitless import plan
from logitless.problems import Problem

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(34)
@every_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("problem", "kind"), in_turn(TRAINED, [*PLANS][1:], always=["one_chunk"]))
def test_dweight_keeps_its_digits(impl: Any, problem: Problem, kind: str, dtype: str) -> None:
    problem = problem.with_dtype(impl.takes(dtype))
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": dtype}
    chosen = plan(**sizes, fused=impl.fused, padded=impl.padded, **PLANS[kind])
    assert_within(problem, run_case(impl, problem.case(), plan=chosen))


@pytest.fixture
def rounds_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds float32 to the nearest bfloat16, as a GPU does."""
    torch = pytest.importorskip("torch", reason="this test is about PyTorch")
    triton = pytest.importorskip("triton", reason="triton is not installed")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    cut_off = interpreter._convert_float

    def convert(value: Any, source: Any, wanted: Any, mode: Any) -> Any:
        if (source, wanted) != (triton.language.float32, triton.language.bfloat16):
            return cut_off(value, source, wanted, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(value).view(np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(value.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.case(34)
@pytest.mark.usefixtures("rounds_to_bfloat16")
@pytest.mark.parametrize(
    "impl",
    [pytest.param(TorchTriton(), marks=interpreted), pytest.param(TorchTritonCuda(), marks=pytest.mark.gpu)],
    ids=["interpreted", "cuda"],
)
@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["chunks", "two_pass"])
@pytest.mark.parametrize("problem", TRAINED, ids=lambda problem: problem.name)
def test_a_narrow_sum_keeps_its_digits(impl: Any, problem: Problem, kind: str) -> None:
    """20 bits between chunks. Only dW knows of them."""
    problem = problem.with_dtype("bfloat16")
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": "bfloat16"}
    wide, narrow = (plan(**sizes, fused=True, lends=lends, **PLANS[kind]) for lends in (False, True))
    assert (wide.low_bits, narrow.low_bits) == (8, 4)
    outcome, other = (run_case(impl, problem.case(), plan=chosen) for chosen in (narrow, wide))
    assert_within(problem, outcome)
    assert np.array_equal(outcome.loss, other.loss)
    same = {name: np.array_equal(grad, other.grads[name]) for name, grad in outcome.grads.items() if grad is not None}
    assert same["hidden"]
    assert not same["weight"]


@pytest.mark.case(34)
def test_the_problems_cancel() -> None:
    """The commonest target's row of dW is small beside the two sums that it is the difference of."""
    case = problem_named("trained").case()
    (commonest,) = case.commonest_targets(1)
    x, target = case.hidden.reshape(case.target.size, -1).astype(np.float64), case.target.reshape(-1)
    z = x @ case.weight.T.astype(np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    predicted, found = p[:, commonest] @ x, x[target == commonest].sum(axis=0)
    assert np.linalg.norm(predicted - found) < 0.3 * np.linalg.norm(found)


@pytest.mark.case(34)
@interpreted
@pytest.mark.usefixtures("rounds_to_bfloat16")
@pytest.mark.parametrize(("chunk", "sum_bits"), [pytest.param(1024, 24, marks=pytest.mark.slow), (640, 24), (32, 20)])
def test_dweight_is_rounded_once(chunk: int, sum_bits: int) -> None:
    """A narrow sum is of as many chunks as it may be. If all targets came with the last one, it would lose digits."""
    assert_rounded_once(TorchTriton(), chunk, sum_bits)
