"""Vectors that are slices, expanded or moved, and matrices whose rows are one row, give what contiguous copies give
(case 33)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from implementations import in_every_torch_place  # noqa: E402

from logitless.torch_impl import (  # noqa: E402
    cross_entropy,
    distillation_loss,
    linear_cross_entropy,
    linear_log_probs,
    padded_index_gather,
)

B, T, D, V = 4, 6, 8, 19


def step(v: Any) -> Any:
    return torch.stack([v, v, v], dim=-1)[..., 1]


def moved(v: Any) -> Any:
    return v.movedim(0, -1).contiguous().movedim(-1, 0)


def offset(v: Any) -> Any:
    flat = torch.cat([torch.zeros_like(v).reshape(-1)[:1]] * 3 + [v.reshape(-1)])
    return flat[3:].view(v.shape)


def negative(v: Any) -> Any:
    """With PyTorch's negative bit, where the dtype has one."""
    if not v.is_floating_point() or v.dtype not in (torch.float32, torch.float64):
        return step(v)
    made = torch.complex(torch.zeros_like(v), -v).conj().imag
    assert made.is_neg()
    return made


LAYOUTS: dict[str, Callable[[Any], Any]] = {"step": step, "moved": moved, "offset": offset, "negative": negative}


def given(device: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(B, T, D, generator=g), "weight": torch.randn(V, D, generator=g),
        "bias": torch.randn(V, generator=g), "target": torch.randint(0, V, (B, T), generator=g),
        "token_weight": torch.rand(B, T, generator=g), "class_weight": torch.rand(V, generator=g),
    }  # fmt: skip
    return {name: value.to(device) for name, value in made.items()}


def run(name: str, arrays: dict[str, Any], backend: str, upstream: Callable[[Any], Any] = lambda v: v) -> list[Any]:
    """Values and gradients."""
    leaves = [arrays[key] for key in ("hidden", "weight", "bias")]
    for leaf in leaves:
        leaf.requires_grad_()
    x, w, b = leaves
    weights = {key: arrays[key] for key in ("token_weight", "class_weight")}
    y: Any = arrays["target"]
    if name == "mean":
        values = [linear_cross_entropy(x, w, y, b, **weights, backend=backend)]
    elif name == "none":
        values = [linear_cross_entropy(x, w, y, b, **weights, reduction="none", label_smoothing=0.1, backend=backend)]
    elif name == "log_probs":
        values = list(linear_log_probs(x, w, y, b, with_entropy=True, backend=backend))
    elif name == "held":
        values = [linear_log_probs(x, w, y, b, memory_budget=2**24, backend=backend)[0]]
    elif name == "logits":
        values = [cross_entropy(x @ w.T + b, y, **weights, backend=backend)]
    elif name == "distillation":
        mask = arrays["token_weight"] > 0.5
        values = [distillation_loss(x, w, x.detach() * 2, w.detach(), b, mask=mask, reduction="none", backend=backend)]
    else:
        values = [
            linear_cross_entropy(
                x, w, y, b, **weights, backend=backend, accumulate_into=torch.zeros(w.shape, device=w.device)
            )
        ]
    ups = [upstream(torch.linspace(-1, 2, v.numel(), device=v.device).reshape(v.shape)) for v in values]
    wanted = leaves if name != "accumulate" else [x, b]
    return [*(v.detach() for v in values), *torch.autograd.grad(values, wanted, ups)]


@functools.cache
def contiguous(name: str, device: str, backend: str) -> list[Any]:
    """What every layout is compared with, run once."""
    return run(name, given(device), backend)


NAMES = ("mean", "none", "log_probs", "held", "logits", "distillation", "accumulate")


@pytest.mark.every_value(where=lambda p: p["backend"] == "triton")
@pytest.mark.case(33)
@in_every_torch_place
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_argument(name: str, layout: str, device: str, backend: str) -> None:
    change = LAYOUTS[layout]
    expected = contiguous(name, device, backend)
    changed = {key: change(value) for key, value in given(device).items()}
    for made, right in zip(run(name, changed, backend, upstream=change), expected, strict=True):
        torch.testing.assert_close(made, right)


@pytest.mark.case(33)
@in_every_torch_place
def test_expanded(device: str, backend: str) -> None:
    """One id, one weight and one row for all; a sum's upstream gradients."""
    a = given(device)
    row = a["weight"][:1].clone().requires_grad_()
    for expand in (lambda v: v, lambda v: v.contiguous()):
        target = expand(torch.tensor(3, device=device).expand(B, T))
        weight, hidden = expand(row.expand(V, D)), expand(a["hidden"][:1, :1].expand(B, T, D))
        token_weight = expand(a["token_weight"][:, :1].expand(B, T))
        losses = linear_cross_entropy(
            hidden, weight, target, expand(a["bias"][:1].expand(V)), token_weight=token_weight, reduction="none",
            class_weight=expand(a["class_weight"][:1].expand(V)), backend=backend,
        )  # fmt: skip
        made = [losses.detach(), *torch.autograd.grad(losses.sum(), row)]
        if target.is_contiguous():
            break
        first = made
    torch.testing.assert_close(first, made)


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and p["name"] == "mean")
@pytest.mark.case(24, 33)
@in_every_torch_place
@pytest.mark.parametrize("name", ["mean", "log_probs", "logits"])
def test_in_a_graph(name: str, device: str, backend: str) -> None:
    """Also compiled, where the graph itself takes the slices, and in torch.func."""
    a = given(device)
    y, t = torch.stack([a["target"]] * 2, -1), torch.stack([a["token_weight"]] * 2, -1)

    def loss(x: Any) -> Any:
        target, weights = y[..., 0], {"token_weight": t[..., 0]}
        if name == "mean":
            return linear_cross_entropy(x, a["weight"], target, **weights, backend=backend)
        if name == "log_probs":
            return linear_log_probs(x, a["weight"], target, backend=backend)[0].sum()
        return cross_entropy(x @ a["weight"].T, target, **weights, backend=backend)

    x = a["hidden"].clone().requires_grad_()
    whole = {"mean": {"token_weight": a["token_weight"]}, "logits": {"token_weight": a["token_weight"]}}.get(name, {})
    z = x @ a["weight"].T
    right = cross_entropy(z, a["target"], reduction="mean" if whole else "sum", **whole, backend="eager")
    right = right if whole else -right  # type: ignore[operator]
    (expected,) = torch.autograd.grad(right, x)
    torch._dynamo.reset()
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        value = call(x)
        torch.testing.assert_close(value, right)
        torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected)
    if name != "logits":
        torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)


@pytest.mark.case(33)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather(layout: str, device: str) -> None:
    x, index = torch.randn(5, 3, device=device), torch.tensor([4, 0, 4], device=device)
    made = padded_index_gather(LAYOUTS[layout](x).requires_grad_(), LAYOUTS[layout](index), pad_to_multiple=2)
    torch.testing.assert_close(made, torch.cat([x[index], x.new_zeros(1, 3)]))


@pytest.mark.parametrize("with_entropy", [False, True])
def test_transforms_without_tokens(with_entropy: bool) -> None:
    """No token and a memory budget: the call returns only what was asked for."""
    x, w, y = torch.randn(0, D), torch.randn(V, D), torch.zeros(0, dtype=torch.long)

    def f(x: Any) -> Any:
        values = linear_log_probs(x, w, y, with_entropy=with_entropy, memory_budget=2**24)
        return [v for v in values if v is not None]

    made, pull = torch.func.vjp(f, x)
    assert len(made) == 1 + with_entropy
    assert pull(made)[0].shape == (0, D)


@pytest.mark.case(43)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_normalizer_dtypes(dtype: Any) -> None:
    a = given("cpu")
    normalizer = torch.ones((), dtype=dtype)
    for call in (
        lambda: linear_cross_entropy(a["hidden"], a["weight"], a["target"], normalizer=normalizer),
        lambda: cross_entropy(a["hidden"] @ a["weight"].T, a["target"], normalizer=normalizer),
    ):
        with pytest.raises(TypeError, match=f"normalizer: got dtype {str(dtype)[6:]}, allowed are"):
            call()
    counted = linear_cross_entropy(a["hidden"], a["weight"], a["target"], normalizer=torch.tensor(5))
    torch.testing.assert_close(counted, linear_cross_entropy(a["hidden"], a["weight"], a["target"], normalizer=5.0))
