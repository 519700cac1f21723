"""Results per token belong to the caller. Changed in place they give right gradients, and nothing saved changes with
them (case 39)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from implementations import in_every_torch_place  # noqa: E402

from logitless import TokenStats  # noqa: E402
from logitless.torch_impl import cross_entropy, distillation_loss, linear_cross_entropy, linear_log_probs  # noqa: E402

B, T, D, V = 2, 3, 8, 19
RESULTS = ("none", "log_prob", "entropy", "log_prob_of_two", "logits", "distillation")


def some(device: str, *shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device)


def make(name: str, device: str, backend: str, shape: tuple[int, ...]) -> Callable[[Any, Any], Any]:
    """A result per token, as a function of (x, w)."""
    y = torch.randint(0, V, shape, generator=torch.Generator().manual_seed(1)).to(device)
    budget = {"memory_budget": 2**24}
    if name == "log_prob":
        return lambda x, w: linear_log_probs(x, w, y, backend=backend, **budget)[0]
    if name in ("entropy", "log_prob_of_two"):
        number = int(name == "entropy")
        return lambda x, w: linear_log_probs(x, w, y, with_entropy=True, backend=backend)[number]
    if name == "logits":
        return lambda x, w: cross_entropy(x @ w.T, y, reduction="none", backend=backend)  # type: ignore[return-value]
    if name == "distillation":
        teacher = some(device, *shape, 5), some(device, V, 5)
        return lambda x, w: distillation_loss(x, w, *teacher, reduction="none", backend=backend)
    return lambda x, w: linear_cross_entropy(x, w, y, reduction="none", backend=backend)


@pytest.mark.every_value(where=lambda p: p["backend"] == "triton")
@pytest.mark.case(39)
@in_every_torch_place
@pytest.mark.parametrize("shape", [(B, T), (B * T,)], ids=["2d", "1d"])
@pytest.mark.parametrize("name", RESULTS)
def test_changed_in_place(name: str, shape: tuple[int, ...], device: str, backend: str) -> None:
    f = make(name, device, backend, shape)
    leaves = [some(device, *shape, D).requires_grad_(), some(device, V, D).requires_grad_()]
    mask = torch.linspace(-1, 2, B * T, device=device).reshape(shape)
    expected = torch.autograd.grad((f(*leaves) * mask).sum(), leaves)
    values = f(*leaves)
    values *= mask
    made = torch.autograd.grad(values.sum(), leaves)
    for gradient, right in zip(made, expected, strict=True):
        torch.testing.assert_close(gradient, right)

    with torch.no_grad():  # what the backward needs is not in what the caller has
        values = f(*leaves)
    kept = f(*leaves)
    kept.detach().fill_(torch.nan)
    del values
    made = torch.autograd.grad(kept, leaves, mask)
    for gradient, right in zip(made, expected, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.case(39)
@in_every_torch_place
@pytest.mark.parametrize("function", ["hidden", "logits"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_changed_in_place(function: str, reduction: Any, device: str, backend: str) -> None:
    x, w = some(device, B, T, D).requires_grad_(), some(device, V, D)
    y = torch.arange(B * T, device=device).reshape(B, T)

    def run() -> tuple[Any, TokenStats[Any]]:
        if function == "logits":
            return cross_entropy(x @ w.T, y, reduction=reduction, return_stats=True, backend=backend)  # type: ignore[return-value]
        loss, stats = linear_cross_entropy(x, w, y, reduction=reduction, return_stats=True, backend=backend)
        return loss, stats

    loss, stats = run()
    (expected,) = torch.autograd.grad(loss.sum(), x)
    before = [loss.detach().clone(), *(value.clone() for value in stats)]
    loss, stats = run()
    for number, value in enumerate(stats, 1):
        value.zero_()  # each alone: no other result changes
        for other, old in list(zip((loss.detach(), *stats), before, strict=True))[number + 1 :]:
            torch.testing.assert_close(other, old)
    torch.testing.assert_close(loss.detach(), before[0])
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], expected)
