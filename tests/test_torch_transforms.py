"""What surrounds a call in PyTorch: torch.func's transforms, checkpoints, export, loss scaling (cases 24, 25)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from implementations import in_every_torch_place  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.tolerances import ELEMENTS  # noqa: E402
from logitless.torch_impl import (  # noqa: E402
    LinearCrossEntropy,
    cross_entropy,
    distillation_loss,
    linear_cross_entropy,
    linear_log_probs,
)

TOKENS, HIDDEN, VOCAB = 20, 8, 50


def arrays(device: str = "cpu") -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator) for s in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    y = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    y[::4] = -100
    return tuple(tensor.to(device) for tensor in (x, w, b, y))  # type: ignore[return-value]


def plan_named(name: str, backend: str) -> Any:
    order = {"chunks": {"order": "tokens", "chunk": 8}, "slices": {"order": "vocab", "chunk": 16}}[name]
    return plan(tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype="float32", fused=backend == "triton", **order)


def _with_lse(made: Any) -> Any:
    return made[0] + (made[1] ** 2).sum()


def losses(backend: str) -> dict[str, Callable[..., Any]]:
    """Scalars of (x, w, b, y)."""

    def loss(**options: Any) -> Callable[..., Any]:
        return lambda x, w, b, y: linear_cross_entropy(x, w, y, b, backend=backend, **options)

    def log_probs(x: Any, w: Any, b: Any, y: Any) -> Any:
        log_prob, entropy = linear_log_probs(x, w, y, b, with_entropy=True, backend=backend)
        return (log_prob * 2 + entropy**2).sum()

    def all_of_log_probs(x: Any, w: Any, b: Any, y: Any) -> Any:
        log_prob, entropy, stats = linear_log_probs(x, w, y, b, return_stats=True, backend=backend)
        return (log_prob * 2 + entropy**2 + stats.lse**2 + stats.sum_p_squared.log()).sum()

    return {
        "mean": loss(z_loss=1e-3),
        "smooth": loss(label_smoothing=0.1, softcap=5.0),
        "none": lambda *given: (loss(reduction="none")(*given) ** 2).sum(),
        "lse": lambda *given: _with_lse(loss(return_lse=True, shift=1)(*given)),
        "lse_statistics": lambda *given: _with_lse(loss(return_lse=True, return_stats=True, softcap=5.0)(*given)),
        "statistics": lambda *given: loss(return_stats=True)(*given)[0],
        "chunks": loss(plan=plan_named("chunks", backend)),
        "slices": loss(plan=plan_named("slices", backend)),
        "log_probs": log_probs,
        "log_probs_statistics": all_of_log_probs,
        "log_prob": lambda x, w, b, y: linear_log_probs(x, w, y, b, backend=backend)[0].sum(),
    }


# With interpreted kernels in make test: both results, every order, and what holds most.
INTERPRETED = ("lse", "slices", "log_probs_statistics")


@pytest.mark.case(24)
@in_every_torch_place
@pytest.mark.late(where=lambda p: p["backend"] == "triton" and p["name"] not in INTERPRETED)
@pytest.mark.parametrize("name", losses("eager"))
def test_grad_is_autograds(device: str, backend: str, name: str) -> None:
    function, (x, w, b, y) = losses(backend)[name], arrays(device)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    value = function(*leaves, y)
    truth = torch.autograd.grad(value, leaves)
    made, same = torch.func.grad_and_value(function, argnums=(0, 1, 2))(x, w, b, y)
    assert torch.equal(same, value)
    for one, other in zip(made, truth, strict=True):
        torch.testing.assert_close(one, other, **ELEMENTS["the same sums"])
    torch.testing.assert_close(torch.func.grad(function, argnums=1)(x, w, b, y), truth[1], **ELEMENTS["the same sums"])


def test_vjp_and_a_module() -> None:
    x, w, b, y = arrays()
    value, pull = torch.func.vjp(lambda x: linear_cross_entropy(x, w, y, b), x)
    (one,), (three,) = pull(torch.ones_like(value)), pull(3 * torch.ones_like(value))
    torch.testing.assert_close(three, 3 * one)
    head = LinearCrossEntropy(HIDDEN, VOCAB, bias=True)
    parameters = {"weight": w, "bias": b}
    made = torch.func.grad(lambda given: torch.func.functional_call(head, given, (x, y)))(parameters)
    truth = torch.func.grad(lambda w, b: linear_cross_entropy(x, w, y, b), argnums=(0, 1))(w, b)
    assert torch.equal(made["weight"], truth[0])
    assert torch.equal(made["bias"], truth[1])


def test_other_transforms_are_refused() -> None:
    x, w, b, y = arrays()
    several = torch.stack([x, x])
    refused = pytest.raises(
        NotImplementedError, match=r"torch\.func's transforms \(.*\), allowed is one torch\.func\.grad"
    )

    def loss(x: Any) -> Any:
        return linear_cross_entropy(x, w, y, b)

    for call in (
        lambda: torch.func.vmap(loss)(several),
        lambda: torch.func.vmap(torch.func.grad(loss))(several),
        lambda: torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x),
        lambda: torch.func.jvp(loss, (x,), (x,)),
        lambda: torch.func.vmap(lambda x: linear_log_probs(x, w, y)[0])(several),
    ):
        with refused:
            call()
    with pytest.raises(NotImplementedError, match=r"^cross_entropy: .*\(grad\), use torch.autograd.grad"):
        torch.func.grad(lambda z: cross_entropy(z, y))(x @ w.T)
    with pytest.raises(NotImplementedError, match=r"^distillation_loss: .*\(grad\), use torch.autograd.grad"):
        torch.func.grad(lambda x: distillation_loss(x, w, x, w))(x)


@pytest.mark.case(25)
@in_every_torch_place
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(device: str, backend: str, reentrant: bool) -> None:
    *given, y = arrays(device)
    leaves = [tensor.requires_grad_() for tensor in given]

    def part(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(torch.tanh(x), w, y, b, backend=backend)

    truth = torch.autograd.grad(part(*leaves), leaves)
    checkpoint(part, *leaves, use_reentrant=reentrant).backward()
    for leaf, other in zip(leaves, truth, strict=True):
        assert torch.equal(leaf.grad, other)


@pytest.mark.case(25)
@in_every_torch_place
def test_loss_scaling(device: str, backend: str) -> None:
    """A power of two leaves float32 gradients as they are; an infinite one is noticed and skipped."""
    x, w, b, y = arrays(device)
    weight = torch.nn.Parameter(w.clone())
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler(device, init_scale=2.0**10)
    (truth,) = torch.autograd.grad(linear_cross_entropy(x, weight, y, b, backend=backend), weight)
    scaler.scale(linear_cross_entropy(x, weight, y, b, backend=backend)).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weight.detach(), w - 0.1 * truth, **ELEMENTS["the same sums"])
    before = weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(linear_cross_entropy(x * float("inf"), weight, y, b, backend=backend)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before)
    assert scaler.get_scale() < 2.0**10


@in_every_torch_place
def test_export_of_the_forward(device: str, backend: str) -> None:
    """One exported program for every number of tokens."""
    head = LinearCrossEntropy(HIDDEN, VOCAB, bias=True, backend=backend).to(device)
    x, _, _, y = arrays(device)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(head, (x, y), dynamic_shapes=({0: tokens}, {0: tokens}))
    for number in (TOKENS, 3):
        assert torch.equal(exported.module()(x[:number], y[:number]), head(x[:number], y[:number]))
