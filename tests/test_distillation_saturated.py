"""Divergences between sides that are both sure of classes far from id 0, in PyTorch (case 44)."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from distilling import IN_EITHER_ORDER, take_order  # noqa: E402
from implementations import in_every_torch_place  # noqa: E402

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl import distillation_loss  # noqa: E402

N, D, V = 6, 4, 70


@IN_EITHER_ORDER
@pytest.mark.case(44)
@in_every_torch_place
@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("far", [100.0, 16384.0])
def test_saturated_student(
    far: float, beta: float, device: str, backend: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two classes are ``far`` nats above id 0. Numbers are multiples of 1/8, so float32 holds every logit exactly."""
    take_order(monkeypatch, order)
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator) / 8.0

    x, w, b, tx, tw = some(N, D), some(V, D), some(V), some(N, D), some(V, D)
    b[41] += far
    b[53] += far
    leaves = [v.double().requires_grad_() for v in (x, w, b)]
    z, tz = leaves[0] @ leaves[1].T + leaves[2], (tx @ tw.T).double()
    log_q, log_p = torch.log_softmax(z, -1), torch.log_softmax(tz, -1)
    if beta == 1:
        truth = (log_q.exp() * (log_q - log_p)).sum()
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        truth = beta * (log_p.exp() * (log_p - log_m)).sum() + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum()
    expected = torch.autograd.grad(truth, leaves)

    own = [v.to(device).requires_grad_() for v in (x, w, b)]
    teacher = tx.to(device), tw.to(device)
    loss = distillation_loss(own[0], own[1], *teacher, own[2], beta=beta, reduction="sum", backend=backend)
    assert error(loss.detach().cpu(), truth.detach()) <= ON_TOP_LOSS["float32"]
    if beta < 1:  # near 0, below what float32 holds
        return
    for made, right in zip(torch.autograd.grad(loss, own), expected, strict=True):
        assert error(made.cpu(), right) <= ON_TOP_GRADIENT["float32"]
