"""JAX: arguments of every NumPy layout (case 33), and every road to a second derivative (case 37)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402

from logitless import reference  # noqa: E402
from logitless.jax_impl import (  # noqa: E402
    cross_entropy,
    distillation_loss,
    linear_cross_entropy,
    linear_log_probs,
    padded_index_gather,
)
from logitless.jax_impl.kernels.architecture import can_interpret  # noqa: E402
from logitless.rounding import round_to  # noqa: E402
from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error  # noqa: E402

N, D, V = 24, 16, 40
HERE = f"this is {jax.__version__} on {jax.default_backend()}"

# Each holds the same numbers as its argument, elsewhere in memory.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "step": lambda a: np.repeat(a, 2, axis=0)[::2],
    "offset": lambda a: np.concatenate([a[:1], a, a[:1]])[1:-1],
    "transposed": np.asfortranarray,
    "last_step": lambda a: np.repeat(a, 3, axis=-1)[..., ::3],
}
BROADCAST = ("hidden", "weight", "bias", "target", "token_weight", "class_weight")


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pallas" and jax.default_backend() == "cpu":
        if not can_interpret():
            pytest.skip(f"interpreting takes jax 0.11, {HERE}")
        monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "1")
    return request.param


every_backend = pytest.mark.parametrize(
    "backend", ["xla", pytest.param("pallas", marks=pytest.mark.gpu if jax.default_backend() != "cpu" else ())],
    indirect=True,
)  # fmt: skip


def numbers(dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, V, N)
    y[::5] = -100
    return {
        "hidden": round_to(rng.standard_normal((N, D)), dtype),
        "weight": round_to(rng.standard_normal((V, D)), dtype),
        "target": y,
        "bias": round_to(rng.standard_normal(V), dtype),
        "token_weight": rng.uniform(0.5, 2.0, N).astype(np.float32),
        "class_weight": rng.uniform(0.5, 2.0, V).astype(np.float32),
    }


def assert_right(backend: str, given: dict[str, Any], plain: dict[str, Any]) -> None:
    """Loss and gradients of ``given`` are the float64 truth of ``plain``."""
    dtype = "bfloat16" if backend == "pallas" else "float32"
    names = ("hidden", "weight", "bias")
    typed = {name: given[name].astype(jnp.dtype(dtype)) if name in names else given[name] for name in given}
    typed = {name: relaid(typed[name], given[name]) for name in typed}

    def loss(floats: dict[str, Any], rest: dict[str, Any]) -> Any:
        return linear_cross_entropy(**floats, **rest, backend=backend)

    floats = {name: typed.pop(name) for name in names}
    grads = jax.grad(loss)(floats, typed)  # JAX converts what is differentiated, the package the rest
    true = reference.linear_cross_entropy(**plain)
    assert error(loss(floats, typed), true.loss) <= ON_TOP_LOSS[dtype]
    for name, grad in grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= GRADIENT[dtype], name


def relaid(a: Any, like: Any) -> Any:
    """``a`` with the strides of ``like``, in elements, and an offset. A change of dtype would lose them."""
    steps = [stride // like.itemsize for stride in like.strides]
    low = sum(min(0, (size - 1) * step) for size, step in zip(like.shape, steps, strict=True))
    high = sum(max(0, (size - 1) * step) for size, step in zip(like.shape, steps, strict=True))
    room = np.full(high - low + 3, 3).astype(a.dtype)  # one element before the first
    made = np.ndarray(a.shape, a.dtype, room, (1 - low) * a.itemsize, [step * a.itemsize for step in steps])
    if a.size:
        made[...] = a
    assert made.strides == tuple(step * a.itemsize for step in steps)
    return made


@pytest.mark.case(33)
@every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_of_every_layout(backend: str, layout: str) -> None:
    plain = numbers("bfloat16")
    assert_right(backend, {name: LAYOUTS[layout](a) for name, a in plain.items()}, plain)


@pytest.mark.case(33)
@every_backend
@pytest.mark.parametrize("name", BROADCAST)
def test_broadcast_arguments(backend: str, name: str) -> None:
    plain = numbers("bfloat16")
    axis = 1 if name == "weight" else 0  # classes that are all the same have no gradient
    first = plain[name].take([1], axis)
    given = np.broadcast_to(first, plain[name].shape)
    plain[name] = given.copy()
    assert given.strides[axis] == 0
    assert_right(backend, plain | {name: given}, plain)


@pytest.mark.case(33)
@every_backend
def test_no_tokens(backend: str) -> None:
    dtype = jnp.bfloat16 if backend == "pallas" else jnp.float32
    x, w = np.zeros((0, D), dtype)[::-1], np.ones((V, D), dtype).T.copy().T
    y = np.zeros(0, np.int32)[::-1]
    value, (dx, dw) = jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, y, backend=backend), (0, 1))(x, w)
    assert float(value) == 0.0
    assert dx.shape == (0, D)
    assert not np.asarray(dw, np.float32).any()
    assert linear_log_probs(x, w, y, backend=backend)[0].shape == (0,)


@pytest.mark.case(33)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_logits_of_every_layout(layout: str) -> None:
    rng = np.random.default_rng(0)
    z, y = rng.standard_normal((N, V)).astype(np.float32), rng.integers(0, V, N)
    given = LAYOUTS[layout](z), LAYOUTS[layout](y)
    made = cross_entropy(*given), jax.grad(cross_entropy)(*given)
    p = np.exp(z.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    assert error(made[0], -np.log(p[np.arange(N), y]).mean()) <= ON_TOP_LOSS["float32"]
    assert error(made[1], (p - np.eye(V)[y]) / N) <= GRADIENT["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives

X, W, B, Y = (jnp.asarray(numbers()[name]) for name in ("hidden", "weight", "bias", "target"))
TEACHER = jnp.asarray(np.random.default_rng(1).standard_normal((N, D)).astype(np.float32))

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "loss_of_hidden": lambda x: linear_cross_entropy(x, W, Y),
    "loss_of_weight": lambda x: linear_cross_entropy(X, jnp.tile(x, (2, 1))[:V], Y),
    "loss_of_bias": lambda x: linear_cross_entropy(X, W, Y, jnp.resize(x, V)),
    "losses": lambda x: linear_cross_entropy(x, W, Y, reduction="none").sum(),
    "lse": lambda x: linear_cross_entropy(x, W, Y, return_lse=True, shift=1)[1].sum(),  # type: ignore[union-attr]
    "two_pass": lambda x: linear_cross_entropy(x, W, Y, softcap=5.0, label_smoothing=0.1),
    "log_probs": lambda x: linear_log_probs(x, W, Y)[0].sum(),
    "entropy": lambda x: linear_log_probs(x, W, Y, with_entropy=True)[1].sum(),
    "given_logits": lambda x: cross_entropy(x, jnp.zeros(N, jnp.int32)),
    "given_logits_none": lambda x: cross_entropy(x, jnp.zeros(N, jnp.int32), reduction="none").sum(),
    "distillation": lambda x: distillation_loss(x, W, TEACHER, W),
}


def squared_gradient(f: Any) -> Any:
    return lambda x: jnp.square(jax.grad(f)(x)).sum()


ROADS: dict[str, Callable[[Any, Any], Any]] = {
    "grad_of_grad": lambda f, x: jax.grad(squared_gradient(f))(x),
    "grad_of_jitted_grad": lambda f, x: jax.grad(squared_gradient(jax.jit(f)))(x),
    "grad_of_grad_in_jit": lambda f, x: jax.jit(jax.grad(squared_gradient(f)))(x),
    "grad_of_checkpoint": lambda f, x: jax.grad(squared_gradient(jax.checkpoint(f)))(x),
    "jvp_of_grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "linearize_of_grad": lambda f, x: jax.linearize(jax.grad(f), x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jacrev_of_jacrev": lambda f, x: jax.jacrev(jax.jacrev(f))(x),
    "of_the_upstream": lambda f, x: jax.grad(lambda g: jnp.square(jax.vjp(f, x)[1](g)[0]).sum())(jnp.float32(1.0)),
    "vmap": lambda f, x: jax.vmap(jax.grad(squared_gradient(f)))(x[None]),
    "grad_of_scan": lambda f, x: jax.grad(
        squared_gradient(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])
    )(x),
}  # fmt: skip


@pytest.mark.every_value
@pytest.mark.case(37)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_derivatives_are_refused(function: str, road: str) -> None:
    """The kernels' loops move 16-bit floats as integers, whose derivative is 0. Such a silent 0 must never come out."""
    with pytest.raises(NotImplementedError, match="differentiated once"):
        ROADS[road](FUNCTIONS[function], X)


@pytest.mark.every_value
@pytest.mark.case(37)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("road", ["jvp", "linearize", "jacfwd"])
def test_forward_mode_is_refused(function: str, road: str) -> None:
    f = FUNCTIONS[function]
    roads = {"jvp": lambda: jax.jvp(f, (X,), (X,)), "linearize": lambda: jax.linearize(f, X)[1](X)}
    with pytest.raises(TypeError, match="forward-mode"):
        roads.get(road, lambda: jax.jacfwd(f)(X))()


@pytest.mark.case(37)
@pytest.mark.parametrize("group_sizes", [None, (1, 2)])
def test_a_gathers_second_derivatives_are_right(group_sizes: Any) -> None:
    index = jnp.array([3, 0, 5])

    def total(x: Any) -> Any:
        return (padded_index_gather(x, index, pad_to_multiple=4, group_sizes=group_sizes) ** 3).sum()

    x = X[:, :2]
    direction = jnp.ones_like(x)
    made = jax.grad(lambda x: jnp.vdot(jax.grad(total)(x), direction))(x)
    expected = np.zeros(x.shape)
    expected[index] = 6.0 * np.asarray(x, np.float64)[index]
    assert error(made, expected) <= GRADIENT["float32"]
