"""The accuracy rule on a real LM head and text: where a trained model's gradients cancel, over all of dW and over the
rows of the ten commonest tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the truth is made by PyTorch on the GPU")

from logitless import plan  # noqa: E402
from logitless.tolerances import allowance, error  # noqa: E402

FILE = Path(__file__).parent.parent / ".scratch" / "real_head.npz"
COMMON = 10
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"order": "tokens", "chunk": 768},
    "chunks of a narrow sum": {"order": "tokens", "chunk": 128, "lends": True},
    "vocab": {"order": "vocab", "chunk": 8192},
    "per_token": {"reduction": "none"},
    "per_token_held": {"reduction": "none", "memory_budget": 2**31},
}
Grads = dict[str, Any]


@pytest.fixture(scope="module")
def head() -> tuple[Any, Any, Any]:
    """Hidden states [N, D] and weight [V, D] in bfloat16, targets [N]."""
    if not FILE.exists():
        pytest.skip("no .scratch/real_head.npz: python -m bench real_head makes it")
    arrays = np.load(FILE)
    weight = torch.from_numpy(arrays["weight"]).float() * torch.from_numpy(arrays["scale"])
    hidden = torch.from_numpy(arrays["hidden"]).view(torch.bfloat16)
    return hidden, weight.bfloat16(), torch.from_numpy(arrays["target"]).long()


@pytest.fixture(scope="module")
def known(head: tuple[Any, Any, Any]) -> tuple[Grads, dict[str, float]]:
    """The mean's true gradients in float64, and the errors of the path that holds float32 logits."""
    x, w, y = (array.cuda() for array in head)
    dz = torch.softmax(x.double() @ w.double().T, dim=1)
    dz[torch.arange(len(y)), y] -= 1
    true = _named(dz @ w.double() / len(y), dz.T @ x.double() / len(y), y)
    dz = dz.bfloat16().float()
    ideal = _named((dz @ w.float() / len(y)).bfloat16(), (dz.T @ x.float() / len(y)).bfloat16(), y)
    return true, {name: error(value, true[name]) for name, value in ideal.items()}


def _named(dx: Any, dw: Any, y: Any) -> Grads:
    common = torch.bincount(y, minlength=len(dw)).argsort(descending=True, stable=True)[:COMMON]
    made = {"hidden": dx, "weight": dw, "weight of the commonest": dw[common.to(dw.device)]}
    return {name: value.double().cpu().numpy() for name, value in made.items()}


def _torch_grads(x: Any, w: Any, y: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    from logitless.torch_impl import linear_cross_entropy

    x, w = x.cuda().requires_grad_(), w.cuda().requires_grad_()
    linear_cross_entropy(x, w, y.cuda(), backend="triton", **options).mean().backward()
    return x.grad, w.grad


def _jax_grads(x: Any, w: Any, y: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    jax = pytest.importorskip("jax", reason="this part is about JAX")
    import jax.numpy as jnp

    from logitless.jax_impl import linear_cross_entropy

    ids = jnp.asarray(y.numpy().astype(np.int32))
    arrays = [jnp.asarray(array.float().numpy()).astype(jnp.bfloat16) for array in (x, w)]

    def loss(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, ids, backend="pallas", **options).mean()

    made = jax.jit(jax.grad(loss, (0, 1)))(*arrays)
    dx, dw = (torch.from_numpy(np.array(array.astype(jnp.float32))) for array in made)
    return dx, dw


@pytest.mark.gpu
@pytest.mark.case(34)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_dweight_of_a_real_head_keeps_its_digits(head: Any, known: Any, framework: str, kind: str) -> None:
    x, w, y = head
    options = dict(KINDS[kind])
    if "order" in options:
        sizes = {"tokens": len(x), "hidden": x.shape[1], "vocab": len(w), "dtype": "bfloat16"}
        options = {"plan": plan(**sizes, fused=True, padded=framework == "jax", **options)}
    made = _named(*{"torch": _torch_grads, "jax": _jax_grads}[framework](x, w, y, options), y)
    true, ideal = known
    for name, value in made.items():
        wrong = error(value, true[name])
        print(f"{framework} {kind} {name}: {wrong / ideal[name]:.3f} times the ideal path's error")
        assert wrong <= allowance(ideal[name], "bfloat16"), name
