"""Every way to a second derivative in PyTorch is right or refused, never 0, None or a first-order number (case 37)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from implementations import in_every_torch_place, slow_where_interpreted  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.torch_impl import (  # noqa: E402
    LinearCrossEntropy,
    clipped_policy_loss,
    cross_entropy,
    distillation_loss,
    dpo_loss,
    kto_loss,
    linear_cross_entropy,
    linear_log_probs,
    padded_index_gather,
)

B, T, D, V = 2, 3, 4, 9
FUNCTIONS = (
    "mean", "slices", "none", "lse", "module", "accumulate", "log_prob", "entropy", "logits", "logits_none", "dpo",
    "kto", "policy", "sequence", "distillation",
)  # fmt: skip
# With interpreted kernels in make test: each autograd function once. The others call these.
INTERPRETED = ("mean", "slices", "lse", "accumulate", "log_prob", "logits")


def is_late(parameters: dict[str, Any]) -> bool:
    return parameters["backend"] == "triton" and parameters["name"] not in INTERPRETED


REFUSED = "is differentiable once"


def make(name: str, device: str, backend: str) -> tuple[Callable[[Any], Any], Any]:
    """A scalar function of the hidden states, and these."""
    dtype = torch.float64 if backend == "eager" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=dtype).to(device)

    x, w, tx, tw, known = some(B, T, D), some(V, D), some(B, T, D), some(V, D), some(B, T) - 2
    y = torch.randint(0, V, (B, T), generator=generator).to(device)
    slices = plan(
        tokens=B * T, hidden=D, vocab=V, dtype=str(dtype)[6:], order="vocab", chunk=4, fused=backend != "eager"
    )
    head = LinearCrossEntropy(D, V, backend=backend, device=device, dtype=dtype)

    def accumulated(x: Any) -> Any:
        weight = w.clone().requires_grad_()
        return linear_cross_entropy(x, weight, y, accumulate_into=torch.zeros_like(w), backend=backend)

    made: dict[str, Callable[[Any], Any]] = {
        "mean": lambda x: linear_cross_entropy(x, w, y, backend=backend),
        "slices": lambda x: linear_cross_entropy(x, w, y, plan=slices, backend=backend),
        "none": lambda x: linear_cross_entropy(x, w, y, reduction="none", backend=backend).sum(),
        "lse": lambda x: linear_cross_entropy(x, w, y, return_lse=True, shift=1, backend=backend)[1].sum(),
        "module": lambda x: head(x, y),
        "accumulate": accumulated,
        "log_prob": lambda x: linear_log_probs(x, w, y, backend=backend)[0].sum(),
        "entropy": lambda x: linear_log_probs(x, w, y, with_entropy=True, backend=backend)[1].sum(),
        "squares": lambda x: linear_log_probs(x, w, y, return_stats=True, backend=backend)[2].sum_p_squared.sum(),
        "logits": lambda x: cross_entropy(x @ w.T, y, backend=backend),
        "logits_none": lambda x: cross_entropy(x @ w.T, y, reduction="none", backend=backend).sum(),
        "dpo": lambda x: dpo_loss(x, w, y, reference_log_prob=known, backend=backend),
        "kto": lambda x: kto_loss(x, w, y, reference_log_prob=known, desirable=known[:, 0], kl=0.1, backend=backend),
        "sequence": lambda x: clipped_policy_loss(
            x, w, y, advantage=known, old_log_prob=known, ratio="sequence", backend=backend
        ),
        "policy": lambda x: clipped_policy_loss(x, w, y, advantage=known, old_log_prob=known, backend=backend),
        "distillation": lambda x: distillation_loss(x, w, tx, tw, beta=0.4, backend=backend),
    }
    return made[name], x


def backward_twice(f: Callable[[Any], Any], x: Any) -> Any:
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    g.square().sum().backward()
    return leaf.grad


def grad_of_named(f: Callable[[Any], Any], x: Any) -> Any:
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    return torch.autograd.grad(g.sum(), leaf, allow_unused=True)


def through_a_body(f: Callable[[Any], Any], x: Any) -> Any:
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(torch.tanh(leaf)), leaf, create_graph=True)
    return torch.autograd.grad(g.sum(), leaf)


def by_the_factor(f: Callable[[Any], Any], x: Any) -> Any:
    """The derivative of the gradient in the factor of the loss."""
    leaf, factor = x.clone().requires_grad_(), torch.ones((), dtype=x.dtype, device=x.device, requires_grad=True)
    (g,) = torch.autograd.grad(f(leaf) * factor, leaf, create_graph=True)
    return torch.autograd.grad(g.sum(), factor, allow_unused=True)


WAYS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "backward twice": backward_twice,
    "grad of named inputs": grad_of_named,
    "through a body": through_a_body,
    "by the factor": by_the_factor,
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda f, x: torch.autograd.functional.vhp(f, x, torch.ones_like(x)),
    "hessian": torch.autograd.functional.hessian,
    "jvp": lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
}


@pytest.mark.late(where=is_late)
@pytest.mark.case(37)
@in_every_torch_place
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_way_is_refused(name: str, device: str, backend: str) -> None:
    f, x = make(name, device, backend)
    for way, take in WAYS.items():
        with pytest.raises(RuntimeError, match=REFUSED):
            pytest.fail(f"{way} gave {take(f, x)}")


@pytest.mark.case(37)
@slow_where_interpreted
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradgradcheck_is_refused(name: str, device: str, backend: str) -> None:
    """It takes a numerical derivative of the gradient first, which is 48 calls."""
    f, x = make(name, device, backend)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.gradgradcheck(f, x.clone().requires_grad_())


@pytest.mark.late(where=is_late)
@pytest.mark.case(37)
@in_every_torch_place
@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_derivatives_with_a_graph_stay(name: str, device: str, backend: str) -> None:
    """create_graph alone takes no second derivative. Its gradients have the same values and may be changed in place."""
    f, x = make(name, device, backend)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf)
    (again,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    torch.testing.assert_close(again, first)
    with torch.no_grad():
        again.mul_(2)
    torch.testing.assert_close(again.detach(), 2 * first)


@pytest.mark.case(37)
@in_every_torch_place
def test_a_gradient_of_what_is_elsewhere(device: str, backend: str) -> None:
    """The gradient may be part of a loss that is differentiated in something it does not depend on."""
    f, x = make("mean", device, backend)
    leaf, other = x.clone().requires_grad_(), torch.ones_like(x).requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (made,) = torch.autograd.grad((g * other).sum(), other)
    torch.testing.assert_close(made, g.detach())


@pytest.mark.case(32, 37)
@in_every_torch_place
@pytest.mark.parametrize("name", ["mean", "none", "entropy"])
def test_transforms(name: str, device: str, backend: str) -> None:
    """torch.func: two levels, forward mode, and a graph outside of a transform."""
    f, x = make(name, device, backend)
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(torch.func.grad(f)(leaf).sum(), leaf)
    for take in (torch.func.hessian(f), torch.func.grad(lambda x: torch.func.grad(f)(x).sum())):
        with pytest.raises(NotImplementedError, match=r"torch\.func's transforms"):
            take(x)
    with pytest.raises(NotImplementedError, match=r"torch\.func's transforms"):
        torch.func.jvp(f, (x,), (x,))


@pytest.mark.case(32, 37)
@in_every_torch_place
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode_is_refused(name: str, frozen: bool, device: str, backend: str) -> None:
    """Also where nothing wants a gradient in reverse mode."""
    f, x = make(name, device, backend)
    x = x.detach().requires_grad_(not frozen)
    with (
        torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(not frozen),
        pytest.raises(NotImplementedError, match="reverse mode"),
    ):  # fmt: skip
        f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.case(37)
@pytest.mark.parametrize("name", ["mean", "none", "entropy", "logits"])
def test_compiled(name: str) -> None:
    """Where the upstream gradient is constant torch.compile itself gives None, for PyTorch's functions as well."""
    f, x = make(name, "cpu", "eager")
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="aot_eager")
    with pytest.raises(RuntimeError, match=f"{REFUSED}|double backward"):
        grad_of_named(lambda x: compiled(x) ** 2, x)


@pytest.mark.case(37)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gather_has_them_all(device: str) -> None:
    """It is linear: any derivative is right, also where ids repeat and places are padding."""
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    index = torch.tensor([4, 0, 4, 2], device=device)

    def f(x: Any) -> Any:
        return padded_index_gather(x, index, pad_to_multiple=3)

    def full(x: Any) -> Any:
        return torch.cat([x[index], x.new_zeros(2, 3)])

    leaf = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, leaf)
    assert torch.autograd.gradgradcheck(f, leaf)
    for take in (torch.autograd.functional.hessian, lambda f, x: torch.autograd.functional.hvp(f, x, x)[1]):
        torch.testing.assert_close(take(lambda x: (f(x) ** 3).sum(), x), take(lambda x: (full(x) ** 3).sum(), x))
    jvp = torch.autograd.functional.jvp
    torch.testing.assert_close(jvp(f, x, x + 1)[1], jvp(full, x, x + 1)[1])


@pytest.mark.case(31)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "accumulate"])
def test_gradcheck_without_a_tolerance_for_chance(name: str) -> None:
    """A second backward through a retained graph has the first one's bits."""
    f, x = make(name, "cpu", "eager")
    assert torch.autograd.gradcheck(f, x.clone().requires_grad_(), nondet_tol=0.0)
