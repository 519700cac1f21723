"""The accuracy rule on a real LM head and text: where a trained model's gradients cancel, over all of dW and over the
rows of the ten commonest tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the truth is made by PyTorch on the GPU")

from logitless import plan  # noqa: E402
from logitless.tolerances import TINY, allowance, error  # noqa: E402

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


def _to_jax(x: Any, w: Any, y: Any) -> list[Any]:
    import jax.numpy as jnp

    floats = (jnp.asarray(array.float().numpy()).astype(jnp.bfloat16) for array in (x, w))
    return [*floats, jnp.asarray(y.numpy().astype(np.int32))]


def _to_torch(array: Any) -> Any:
    return torch.from_numpy(np.array(array.astype("float32")))


def _jax_grads(x: Any, w: Any, y: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    jax = pytest.importorskip("jax", reason="this part is about JAX")

    from logitless.jax_impl import linear_cross_entropy

    *arrays, ids = _to_jax(x, w, y)

    def loss(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, ids, backend="pallas", **options).mean()

    dx, dw = map(_to_torch, jax.jit(jax.grad(loss, (0, 1)))(*arrays))
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


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities with the entropy, as a policy takes them


# Of the log-probability, and of the entropy: a policy gradient with a bonus, and the entropy alone.
UPSTREAMS = {"policy": (1.0, 0.01), "entropy": (0.0, 1.0)}


@pytest.fixture(scope="module", params=UPSTREAMS)
def policy(request: pytest.FixtureRequest, head: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Upstream gradients, the true values and gradients in float64, and the errors of float32 logits."""
    x, w, y = (array.cuda() for array in head)
    of_log_prob, of_entropy = UPSTREAMS[request.param]
    advantage = torch.randn(len(y), generator=torch.Generator().manual_seed(3)).cuda() * of_log_prob
    bonus = torch.full_like(advantage, of_entropy)
    log_p = torch.log_softmax(x.double() @ w.double().T, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1)
    dz = -advantage.double()[:, None] * p - bonus.double()[:, None] * p * (log_p + entropy[:, None])
    rows = torch.arange(len(y), device=y.device)
    dz[rows, y] += advantage.double()
    true = _named(dz @ w.double(), dz.T @ x.double(), head[2])
    low = dz.bfloat16().float()
    ideal = _named((low @ w.float()).bfloat16(), (low.T @ x.float()).bfloat16(), head[2])
    return {
        "upstream": (advantage.cpu(), bonus.cpu()),
        "values": (log_p[rows, y].cpu().numpy(), entropy.cpu().numpy()),
        "true": true,
        "ideal": {name: error(value, true[name]) for name, value in ideal.items()},
    }


def _torch_policy(x: Any, w: Any, y: Any, upstream: tuple[Any, Any], name: str) -> tuple[Any, ...]:
    from logitless.torch_impl import linear_log_probs

    x, w = x.cuda().requires_grad_(), w.cuda().requires_grad_()
    values = linear_log_probs(x, w, y.cuda(), with_entropy=True, backend="triton", plan=name)
    torch.autograd.backward(values, [g.cuda() for g in upstream])
    return *(v.detach().cpu().numpy() for v in values), x.grad, w.grad


def _jax_policy(x: Any, w: Any, y: Any, upstream: tuple[Any, Any], name: str) -> tuple[Any, ...]:
    jax = pytest.importorskip("jax", reason="this part is about JAX")
    import jax.numpy as jnp

    from logitless.jax_impl import linear_log_probs

    *arrays, ids = _to_jax(x, w, y)

    @jax.jit
    def both(x: Any, w: Any, *upstream: Any) -> Any:
        def values(x: Any, w: Any) -> Any:
            return linear_log_probs(x, w, ids, with_entropy=True, backend="pallas", plan=name)

        made, backward = jax.vjp(values, x, w)
        return *made, *backward(upstream)

    log_prob, entropy, *grads = both(*arrays, *(jnp.asarray(g.numpy()) for g in upstream))
    return np.array(log_prob), np.array(entropy), *map(_to_torch, grads)


@pytest.mark.gpu
@pytest.mark.case(34)
@pytest.mark.parametrize("name", ["balanced", "fast", "lean"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_policy_gradients_of_a_real_head_keep_their_digits(head: Any, policy: Any, framework: str, name: str) -> None:
    run = {"torch": _torch_policy, "jax": _jax_policy}[framework]
    *values, dx, dw = run(*head, policy["upstream"], name)
    for value, true in zip(values, policy["values"], strict=True):
        assert error(value, true) <= TINY["bfloat16"]
    for kind, value in _named(dx, dw, head[2]).items():
        wrong = error(value, policy["true"][kind])
        print(f"{framework} {name} {kind}: {wrong / policy['ideal'][kind]:.3f} times the ideal path's error")
        assert wrong <= allowance(policy["ideal"][kind], "bfloat16"), kind
