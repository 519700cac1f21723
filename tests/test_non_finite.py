"""A value that is not finite stays with its token, or with a class that no token has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import ALL, MORE_DTYPES, TorchTriton, interpreted

from logitless import reference
from logitless.rounding import round_to
from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error

N, V = 40, 60


class Interpreted(TorchTriton):
    """Triton's interpreter cuts float32 off where it should round to bfloat16."""

    dtypes = ("float32", "float16")


# The portable backends round at other places than the kernels, so that here the interpreted ones stand beside them.
IMPLEMENTATIONS = [*ALL, pytest.param(Interpreted(), id="torch_triton", marks=interpreted)]
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def late(value: Any) -> Any:
    """A value that is left to the slow tests: another one of the list takes the same path."""
    return pytest.param(value, marks=pytest.mark.slow)


def some(dtype: str) -> tuple[Any, ...]:
    """Tokens that have none of the classes 0, 7 and 59; every fifth is ignored."""
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((N, 16)), 0.3 * rng.standard_normal((V, 16)), rng.standard_normal(V)
    y = rng.integers(1, V - 1, N)
    y[y == 7] = 8
    y[::5] = -100
    return round_to(x, dtype), round_to(w, dtype), y, round_to(b, dtype)


def assert_right(made: Any, true: Any, dtype: str) -> None:
    assert error(made.loss, true.loss) <= ON_TOP_LOSS[dtype]
    for name, grad in made.grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= GRADIENT[dtype], name


@pytest.mark.every_value(each="impl")
@pytest.mark.case(43)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, late(-np.inf), late(3e38)])
def test_weights_of_classes_that_no_token_has(impl: Any, value: float, dtype: str) -> None:
    arrays = some(impl.takes(dtype))
    k = np.random.default_rng(1).uniform(0.2, 1.2, V).astype(np.float32)
    true = reference.linear_cross_entropy(*arrays, class_weight=k)
    k[[0, 7, 59]] = value
    assert_right(impl.run(*arrays, dtype=dtype, class_weight=k), true, dtype)


@pytest.mark.every_value(each="impl")
@pytest.mark.case(35)
@every_implementation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-5, late(1.0), 1e5, late("sum to 1")])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}], ids=["plain", "not_separable"])
def test_class_weights_of_any_size(impl: Any, size: Any, options: Any, dtype: str) -> None:
    arrays = some(impl.takes(dtype))
    k = np.random.default_rng(1).uniform(0.2, 1.2, V)
    k = (k / k.sum() if size == "sum to 1" else k * size).astype(np.float32)
    true = reference.linear_cross_entropy(*arrays, class_weight=k, **options)
    assert_right(impl.run(*arrays, dtype=dtype, class_weight=k, **options), true, dtype)


@pytest.mark.every_value(each="impl")
@pytest.mark.case(36)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, late(-np.inf)])
@pytest.mark.parametrize("entropy", [False, True])
def test_one_upstream_gradient_that_is_no_number(impl: Any, value: float, entropy: bool, dtype: str) -> None:
    arrays = some(impl.takes(dtype))
    g = np.full(N, 1e5 if dtype == "float16" else 1.0, np.float32)
    rows = np.arange(N) != 3
    options: dict[str, Any] = {"entropy_upstream": 0.0 * g} if entropy else {}
    true = reference.linear_log_probs(*arrays, log_prob_upstream=g, **options).hidden_grad[rows]
    rows &= np.concatenate([np.abs(true).max(axis=1) < 6e4, [True]])[np.cumsum(rows) - 1]  # float16 ends there
    expected = reference.linear_log_probs(*arrays, log_prob_upstream=g, **options).hidden_grad[rows]
    g[3] = value
    made = impl.run_log_probs(*arrays, dtype=dtype, wrt=("hidden",), log_prob_upstream=g, **options)
    assert error(made.grads["hidden"][rows], expected) <= GRADIENT[dtype]
    loss = impl.run(*arrays, dtype=dtype, wrt=("hidden",), reduction="none", upstream=-g)
    assert error(loss.grads["hidden"][rows], expected) <= GRADIENT[dtype]


@pytest.mark.case(38)
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, *MORE_DTYPES])
@pytest.mark.parametrize("banned", [0, 7])
@pytest.mark.parametrize("hit", [False, True])
def test_entropy_of_banned_classes(impl: Any, banned: int, hit: bool) -> None:
    x, w, y, b = some(impl.dtype)
    b[banned] = -np.inf
    if hit:
        y[3] = banned
    g = np.random.default_rng(2).standard_normal(N).astype(np.float32)
    made = impl.run_log_probs(x, w, y, b, log_prob_upstream=0.0, entropy_upstream=g)
    z = x.astype(np.float64) @ w.T.astype(np.float64) + b
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    log_p = np.log(np.where(p > 0, p, 1.0))
    entropy = -(p * log_p).sum(axis=1)
    valid = y != -100
    dz = np.where(valid[:, None], -p * (log_p + entropy[:, None]) * g[:, None], 0.0)
    assert error(made.entropy, np.where(valid, entropy, 0.0)) <= ON_TOP_LOSS[impl.dtype]
    for name, expected in {"hidden": dz @ w, "weight": dz.T @ x, "bias": dz.sum(axis=0)}.items():
        assert error(made.grads[name], expected) <= GRADIENT[impl.dtype], name


@pytest.mark.case(43)
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, *MORE_DTYPES])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_beside_no_class_at_all(impl: Any, reduction: str) -> None:
    """Every class −inf: an ignored token has a loss of 0 and no gradient, whatever the others have."""
    x, w, y, b = some(impl.dtype)
    made = impl.run(x, w, y, np.full_like(b, -np.inf), reduction=reduction, wrt=("hidden",))
    ignored = y == -100
    assert not made.grads["hidden"][ignored].any()
    if reduction == "none":
        assert not made.loss[ignored].any()
    every = impl.run(x, w, np.full_like(y, -100), np.full_like(b, -np.inf), reduction=reduction)
    assert not np.any(every.loss)
    for grad in every.grads.values():
        assert not grad.any()
