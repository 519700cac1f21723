"""jax_impl.integrations.tokamax: an entry of tokamax's IMPLEMENTATIONS, against full logits in float64 and, where it is
installed, against its own implementation and its op's VJP."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stand_ins
from limits import check_refusals, note_plans

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402

from logitless.jax_impl.integrations import tokamax as ours  # noqa: E402
from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error  # noqa: E402

B, H, V = 24, 16, 61


@pytest.fixture(autouse=True)
def tokamax() -> Iterator[Any]:
    """Its ``linear_softmax_cross_entropy_loss``, with our entry; in float64."""
    with stand_ins.without("tokamax", ""), jax.enable_x64(True):
        stand_ins.tokamax()
        if stand_ins.is_installed("tokamax"):
            from absl import flags

            flags.FLAGS.mark_as_parsed()  # else tokamax reads pytest's arguments
        ours.register_tokamax(memory_budget=2**20)
        module = importlib.import_module(ours.REGISTRY)
        yield module
        module.IMPLEMENTATIONS.pop(ours.NAME, None)


def inputs(dtype: str = "float64") -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (B, H), dtype), 0.3 * jax.random.normal(keys[1], (H, V), dtype)
    return x, jax.random.randint(keys[2], (B,), 0, V), w


def full(x: Any, labels: Any, w: Any, reduction: str) -> tuple[Any, Any]:
    z = x @ w
    lse = jax.nn.logsumexp(z, axis=-1)
    losses = lse - jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return {"sum": losses.sum(), "mean": losses.mean(), "none": losses}[reduction], lse


def value_and_vjp(function: Callable[..., Any], dout: Any, x: Any, w: Any) -> list[Any]:
    loss, back = jax.vjp(function, x, w)
    return [loss, *back(dout)]


@pytest.mark.every_value
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_against_full_logits(tokamax: Any, reduction: str, jit: bool) -> None:
    x, labels, w = inputs()
    dout = jnp.linspace(0.5, 1.5, B) if reduction == "none" else jnp.asarray(0.7)

    def theirs(x: Any, w: Any) -> Any:
        return tokamax.linear_softmax_cross_entropy_loss(x, labels, w, reduction=reduction, implementation=ours.NAME)

    made = value_and_vjp(jax.jit(theirs) if jit else theirs, dout, x, w)
    right = value_and_vjp(lambda x, w: full(x, labels, w, reduction)[0], dout, x, w)
    for number, (a, b) in enumerate(zip(made, right, strict=True)):
        assert a.shape == b.shape
        assert error(a, b) <= (GRADIENT if number else ON_TOP_LOSS)["float64"], number


def test_residuals_are_tokamaxs(tokamax: Any) -> None:
    x, labels, w = inputs()
    loss, (lse,) = tokamax.IMPLEMENTATIONS[ours.NAME](x, labels, w, return_residuals=True)
    for made, right in zip((loss, lse), full(x, labels, w, "sum"), strict=True):
        assert error(made, right) <= ON_TOP_LOSS["float64"]
    gradient = jax.grad(
        lambda x: ours.linear_softmax_cross_entropy_loss(x, labels, w, return_residuals=True)[1][0].sum()
    )
    assert not gradient(x).any()


def test_a_label_that_is_ignored() -> None:
    x, labels, w = inputs()
    kept = jnp.arange(B) % 3 != 0
    made, back = jax.vjp(
        lambda x: ours.linear_softmax_cross_entropy_loss(x, jnp.where(kept, labels, -100), w, reduction="mean"), x
    )
    losses, _ = full(x, labels, w, "none")
    assert error(made, losses[kept].mean()) <= ON_TOP_LOSS["float64"]
    assert not back(jnp.ones(()))[0][~kept].any()


def test_dtypes_are_those_of_the_arguments() -> None:
    x, labels, w = inputs("bfloat16")
    loss, back = jax.vjp(lambda x, w: ours.linear_softmax_cross_entropy_loss(x, labels, w), x, w)
    assert loss.dtype == "float32"
    assert [gradient.dtype for gradient in back(jnp.ones((), "float32"))] == ["bfloat16", "bfloat16"]


def test_what_is_refused(tokamax: Any) -> None:
    x, labels, w = inputs()
    with pytest.raises(NotImplementedError, match="precision"):  # by tokamax itself
        tokamax.linear_softmax_cross_entropy_loss(x, labels, w, precision="highest", implementation=ours.NAME)
    with pytest.raises(ValueError, match=r"^reduction: got 'max'"):
        tokamax.linear_softmax_cross_entropy_loss(x, labels, w, reduction="max", implementation=ours.NAME)
    with pytest.raises(ValueError, match=r"^target: got id 61 at"):
        ours.linear_softmax_cross_entropy_loss(x, labels.at[3].set(V), w)
    with pytest.raises(ValueError, match=r"^backend: got 'fast'"):
        ours.register_tokamax(backend="fast")
    check_refusals(ours.register_tokamax)
    with pytest.raises(TypeError, match=r"^memory_budget: got str '1 GB'"):
        ours.register_tokamax(memory_budget="1 GB")  # type: ignore[arg-type]


def test_a_plan_by_name(tokamax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.register_tokamax(plan="lean")
    plans = note_plans(monkeypatch, ours)
    x, labels, w = inputs()
    made = tokamax.linear_softmax_cross_entropy_loss(x, labels, w, implementation=ours.NAME)
    assert error(made, full(x, labels, w, "sum")[0]) <= ON_TOP_LOSS["float64"]
    assert plans == ["lean"]


def test_it_is_taken_back(tokamax: Any) -> None:
    ours.unregister_tokamax()
    with pytest.raises(ValueError, match="Unsupported implementation"):
        tokamax.linear_softmax_cross_entropy_loss(*inputs(), implementation=ours.NAME)
    with pytest.raises(RuntimeError, match=r"^tokamax: has no entry of ours"):
        ours.unregister_tokamax()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_against_tokamaxs_op(tokamax: Any, reduction: str) -> None:
    """Loss, residuals and the gradients of the op's own ``vjp(residuals, out, dout, x, labels, w)``."""
    if not stand_ins.is_installed("tokamax"):
        pytest.skip("tokamax is not installed")
    x, labels, w = inputs("float32")
    op = tokamax.IMPLEMENTATIONS["xla"]
    dout = jnp.linspace(0.5, 1.5, B, dtype="float32") if reduction == "none" else jnp.asarray(0.7, "float32")
    try:
        out, residuals = op(x, labels, w, reduction=reduction, return_residuals=True)
    except ValueError:
        pytest.skip(f"this tokamax has no reduction {reduction!r} itself")
    dx, _, dw = op.vjp(residuals, out, dout, x, labels, w, reduction=reduction)
    entry = tokamax.IMPLEMENTATIONS[ours.NAME]
    loss, (lse,) = entry(x, labels, w, reduction=reduction, return_residuals=True)
    made = value_and_vjp(lambda x, w: entry(x, labels, w, reduction=reduction), dout, x, w)
    for a, b in zip([loss, lse, *made], [out, *residuals, out, dx, dw], strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) <= ON_TOP_LOSS["float32"]


def test_its_arguments_are_tokamaxs(tokamax: Any) -> None:
    if not stand_ins.is_installed("tokamax"):
        pytest.skip("tokamax is not installed")
    own = inspect.signature(type(tokamax.IMPLEMENTATIONS["xla"])._fwd).parameters
    expected = [(name, value.default) for name, value in own.items() if name not in ("self", "config")]
    found = list(inspect.signature(ours.linear_softmax_cross_entropy_loss).parameters.items())
    assert [name for name, _ in found[:5]] == [name for name, _ in expected]
    assert found[3][1].default == dict(expected)["reduction"]
