"""The Triton and the Pallas kernels on identical bytes: loss, dX, dW and db, values per token and statistics, option by
option. Both are held against float64 elsewhere; here they are held against each other.

The portable backends take the same way through this file, for one case of each test, wherever there is no GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from implementations import (
    HAVE_BOTH,
    JaxPallasCuda,
    JaxXla,
    TorchEager,
    TorchTritonCuda,
    ideal_errors,
    run_case,
)  # fmt: skip

from logitless import plan
from logitless.problems import Problem
from logitless.rounding import round_to
from logitless.spec import LossOptions
from logitless.tolerances import ON_TOP_GRADIENT, TINY, allowance, error

pytestmark = pytest.mark.skipif(not HAVE_BOTH, reason="needs both torch and jax")

KERNELS, PORTABLE = (TorchTritonCuda(), JaxPallasCuda()), (TorchEager(), JaxXla())
SIZES: Any = ((3, 100), 192, 3001)
EVERYTHING = Problem(
    "agree_everything", *SIZES, options=LossOptions("mean", 7, 0.1, 1e-3, 1.3), bias=True, ignored=0.2,
    class_weight="positive", token_weight="random", normalizer=77.0, upstream=-2.5,
)  # fmt: skip
NOT_SEPARABLE = dataclasses.replace(EVERYTHING, name="agree_softcap_smoothing").with_options(softcap=5.0)

PROBLEMS = (
    Problem("agree_plain", *SIZES),
    Problem("agree_bias", *SIZES, bias=True),
    Problem("agree_ignore", *SIZES, options=LossOptions(ignore_index=7), ignored=0.3),
    Problem("agree_smoothing", *SIZES, options=LossOptions(label_smoothing=0.1), class_weight="positive"),
    Problem("agree_z_loss", *SIZES, options=LossOptions(z_loss=1e-2), token_weight="random", normalizer=77.0),
    Problem("agree_softcap", *SIZES, options=LossOptions(softcap=5.0), class_weight="signed"),
    Problem("agree_scale", *SIZES, options=LossOptions("sum", logit_scale=1.7), token_weight="mask"),
    Problem("agree_none", *SIZES, options=LossOptions("none", z_loss=1e-3), bias=True, ignored=0.2),
    EVERYTHING,
    NOT_SEPARABLE,
)
# The lean plan knows lse first and goes through slices of the vocabulary, in torch larger ones where dW lends memory
# ("lent"); the other one through chunks of tokens.
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"order": "tokens", "chunk": 128},
    "lean": {"order": "vocab", "chunk": 1024},
    "lent": {"order": "vocab", "chunk": 128},
}


def on(pair: Any, *values: Any) -> Any:
    """A parameter set for a pair of implementations, with its marks."""
    name = "-".join(getattr(value, "name", str(value)).removeprefix("agree_") for value in values)
    kind, marks = ("kernels", [pytest.mark.gpu]) if pair is KERNELS else ("portable", [])
    return pytest.param(pair, *values, id="-".join(filter(None, (kind, name))), marks=marks)


BFLOAT16 = [(problem, "bfloat16", "default") for problem in PROBLEMS]
PLANNED = [(EVERYTHING, "bfloat16", "chunks"), (EVERYTHING, "bfloat16", "lean"), (NOT_SEPARABLE, "bfloat16", "lean")]
PLANNED += [(EVERYTHING, "bfloat16", "lent"), (NOT_SEPARABLE, "bfloat16", "lent")]
# float16 knows lse first whatever the options: fewer of them tell all.
FLOAT16 = [(EVERYTHING, "float16", "default"), (EVERYTHING, "float16", "lean"), (PROBLEMS[7], "float16", "default")]
CASES = [on(KERNELS, *case) for case in (*BFLOAT16, *PLANNED, *FLOAT16)]
CASES.append(on(PORTABLE, PROBLEMS[1], "bfloat16", "lean"))


@pytest.mark.parametrize(("pair", "problem", "dtype", "kind"), CASES)
def test_loss_and_gradients(pair: Any, problem: Problem, dtype: str, kind: str) -> None:
    problem = problem.with_dtype(dtype)
    case, ideal = problem.case(), ideal_errors(problem)
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": dtype}
    chosen = plan(**sizes, **PLANS[kind], fused=pair is KERNELS)
    one, other = (run_case(impl, case, plan=chosen) for impl in pair)
    pairs = {"loss": (one.loss, other.loss)}
    pairs |= {f"d{name}": (one.grads[name], other.grads[name]) for name in one.grads if one.grads[name] is not None}
    assert ("dbias" in pairs) == problem.bias
    for name, (a, b) in pairs.items():
        assert np.any(a), name
        assert error(a, b) <= 2 * allowance(ideal[name], dtype), name


def some(dtype: str) -> tuple[Any, ...]:
    """x, w, b of the dtype's values, and y with ignored tokens."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape) for shape in ((200, 192), (3001, 192), (3001,)))
    y = rng.integers(0, 3001, 200)
    y[::7] = -100
    return round_to(x, dtype), round_to(w * 192**-0.5, dtype), y, round_to(b, dtype)


PER_TOKEN = [on(KERNELS, "bfloat16"), on(KERNELS, "float16"), on(PORTABLE, "bfloat16")]


@pytest.mark.parametrize(("pair", "dtype"), PER_TOKEN)
def test_log_probs_and_entropy(pair: Any, dtype: str) -> None:
    g1, g2 = np.random.default_rng(1).standard_normal((2, 200)).astype(np.float32)
    options = {"log_prob_upstream": g1, "entropy_upstream": g2, "logit_scale": 0.7, "softcap": 30.0}
    one, other = (impl.run_log_probs(*some(dtype), dtype=dtype, **options) for impl in pair)
    for name in ("log_prob", "entropy"):
        a, b = getattr(one, name), getattr(other, name)
        assert np.any(a), name
        assert error(a, b) <= 2 * TINY[dtype], name
    for name, a in one.grads.items():
        assert np.any(a), name
        assert error(a, other.grads[name]) <= 2 * ON_TOP_GRADIENT[dtype], name


@pytest.mark.parametrize("pair", [on(KERNELS), on(PORTABLE)])
def test_statistics(pair: Any) -> None:
    one, other = (
        impl.run(*some("bfloat16"), dtype="bfloat16", logit_scale=1.5, return_stats=True).stats for impl in pair
    )
    for name in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        assert error(getattr(one, name), getattr(other, name)) <= 2 * TINY["bfloat16"], name
    # float32 logits on either side of a tie may swap.
    for name in ("argmax", "correct"):
        assert (getattr(one, name) == getattr(other, name)).mean() >= 0.99, name


@pytest.mark.parametrize(("pair", "dtype"), PER_TOKEN)
def test_the_bytes_are_identical(pair: Any, dtype: str) -> None:
    import torch

    torch_side, jax_side = pair
    for values in some(dtype)[:2]:
        one = torch_side.array(values, dtype).cpu().view(torch.int16).numpy()
        assert np.array_equal(one, np.asarray(jax_side.array(values, dtype)).view(np.int16))
