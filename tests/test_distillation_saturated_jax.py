"""Divergences between sides that are both sure of classes far from id 0, in JAX (case 44)."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

from distilling import IN_EITHER_ORDER, take_order  # noqa: E402

from logitless.jax_impl import distillation_loss  # noqa: E402
from logitless.tolerances import ON_TOP_LOSS, error  # noqa: E402

N, D, V = 6, 4, 70


@IN_EITHER_ORDER
@pytest.mark.case(44)
@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("far", [100.0, 16384.0])
def test_saturated_student(far: float, beta: float, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes are ``far`` nats above id 0. Numbers are multiples of 1/8, so float32 holds every logit exactly."""
    take_order(monkeypatch, order)
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return (rng.integers(-8, 9, shape) / 8.0).astype(np.float32)

    def log_softmax(z: np.ndarray) -> np.ndarray:
        z = z - z.max(axis=1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    x, w, b, tx, tw = some(N, D), some(V, D), some(V), some(N, D), some(V, D)
    b[[41, 53]] += far
    log_q = log_softmax(x.astype(np.float64) @ w.T.astype(np.float64) + b)
    log_p = log_softmax(tx.astype(np.float64) @ tw.T.astype(np.float64))
    p, q = np.exp(log_p), np.exp(log_q)
    if beta == 1:
        true = (q * (log_q - log_p)).sum()
    else:
        log_m = np.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
        true = beta * (p * (log_p - log_m)).sum() + (1 - beta) * (q * (log_q - log_m)).sum()
    made = distillation_loss(x, w, tx, tw, b, beta=beta, reduction="sum")
    assert error(made, true) <= ON_TOP_LOSS["float32"]
