"""jax_impl.integrations.levanter: an entry of levanter's IMPLEMENTATIONS, under what levanter makes of it, against full
logits in float64. Where levanter is installed its own implementation is compared too."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import stand_ins
from limits import check_refusals, note_plans

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from logitless.jax_impl.integrations import levanter as ours  # noqa: E402
from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error  # noqa: E402

B, H, V = 24, 16, 61


@pytest.fixture(autouse=True)
def levanter() -> Iterator[Any]:
    """Its ``fused_cross_entropy_loss_and_logsumexp_penalty``, with our entry; in float64."""
    with stand_ins.without("levanter", ""), jax.enable_x64(True):
        stand_ins.levanter()
        ours.register_levanter(memory_budget=2**20)
        module = importlib.import_module(ours.REGISTRY)
        yield module
        module.IMPLEMENTATIONS.pop(ours.NAME, None)


def inputs(dtype: str = "float64") -> tuple[Any, Any, Any, Any]:
    """x, labels, w, and levanter's weights, one of which masks its token."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = 2 * jax.random.normal(keys[0], (B, H), dtype), jax.random.normal(keys[1], (H, V), dtype)
    return x, jax.random.randint(keys[2], (B,), 0, V), w, jnp.linspace(0.0, 1.5, B)


def logits(x: Any, w: Any, cap: float | None) -> Any:
    z = x @ w
    return z if cap is None else cap * jnp.tanh(z / cap)


def full(x: Any, labels: Any, w: Any, weight: Any, reduction: str | None, penalty: float, cap: float | None) -> Any:
    z = logits(x, w, cap)
    lse = jax.nn.logsumexp(z, axis=-1)
    losses = weight * (lse - jnp.take_along_axis(z, labels[:, None], 1)[:, 0] + penalty * lse**2)
    return {"sum": losses.sum(), "mean": losses.sum() / weight.sum(), None: losses}[reduction]


def value_and_gradients(function: Any, x: Any, w: Any) -> list[Any]:
    loss, back = jax.vjp(function, x, w)
    return [loss, *back(jnp.linspace(0.5, 1.5, max(loss.size, 2))[: loss.size].reshape(loss.shape))]


def compared(made: list[Any], right: list[Any], dtype: str = "float64") -> None:
    for number, (a, b) in enumerate(zip(made, right, strict=True)):
        assert a.shape == b.shape
        assert error(a, b) <= (GRADIENT if number else ON_TOP_LOSS)[dtype], number


@pytest.mark.every_value
@pytest.mark.parametrize("penalty", [0.0, 1e-2])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", None])
def test_against_full_logits(levanter: Any, reduction: str | None, cap: float | None, penalty: float) -> None:
    x, labels, w, weight = inputs()

    def theirs(x: Any, w: Any) -> Any:
        return levanter.fused_cross_entropy_loss_and_logsumexp_penalty(
            x, labels, w, reduction=reduction, weight=weight, logsumexp_weight=penalty, logit_soft_cap=cap,
            implementation=ours.NAME,
        )  # fmt: skip

    right = value_and_gradients(lambda x, w: full(x, labels, w, weight, reduction, penalty, cap), x, w)
    compared(value_and_gradients(jax.jit(theirs), x, w), right)
    assert not right[1][0].any()  # what is masked has no gradient


def test_argmax(levanter: Any) -> None:
    x, labels, w, weight = inputs()
    loss, argmax = levanter.fused_cross_entropy_loss_and_logsumexp_penalty(
        x, labels, w, weight=weight, implementation=ours.linear_softmax_cross_entropy_loss, return_argmax=True
    )
    assert error(loss, full(x, labels, w, weight, "mean", 0.0, None)) <= ON_TOP_LOSS["float64"]
    assert argmax.dtype == "int32"
    np.testing.assert_array_equal(argmax, (x @ w).argmax(-1))


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_of_shard_map(levanter: Any, check_vma: bool) -> None:
    """As levanter calls it: tokens cut over the devices, the weight on all of them, its gradient JAX's sum."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    x, labels, w, weight = inputs()
    mesh, tokens = Mesh(np.array(jax.devices()[:2]), "data"), P("data")

    def part(x: Any, labels: Any, w: Any) -> Any:
        return levanter.fused_cross_entropy_loss_and_logsumexp_penalty(
            x, labels, w, reduction=None, logsumexp_weight=1e-2, implementation=ours.NAME
        )

    loss_of = jax.shard_map(part, mesh=mesh, in_specs=(tokens, tokens, P()), out_specs=tokens, check_vma=check_vma)
    made = value_and_gradients(jax.jit(lambda x, w: weight * loss_of(x, labels, w)), x, w)
    compared(made, value_and_gradients(lambda x, w: full(x, labels, w, weight, None, 1e-2, None), x, w))


def test_dtypes(levanter: Any) -> None:
    x, labels, w, _ = inputs("bfloat16")
    (loss, lse), back = jax.vjp(lambda x, w: ours.linear_softmax_cross_entropy_loss(x, labels, w, dtype=None), x, w)
    assert (loss.dtype, lse.dtype) == ("float32", "float32")
    assert [gradient.dtype for gradient in back((loss, lse))] == ["bfloat16", "bfloat16"]


def test_what_is_refused() -> None:
    x, labels, w, _ = inputs()
    with pytest.raises(NotImplementedError, match=r"^dtype: got bfloat16, allowed are None, float32"):
        ours.linear_softmax_cross_entropy_loss(x, labels, w, dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"^precision: got 'highest', allowed is None"):
        ours.linear_softmax_cross_entropy_loss(x, labels, w, precision="highest")
    with pytest.raises(ValueError, match=r"^softcap: got -1"):
        ours.linear_softmax_cross_entropy_loss(x, labels, w, logit_soft_cap=-1.0)
    with pytest.raises(ValueError, match=r"^backend: got 'fast'"):
        ours.register_levanter(backend="fast")
    check_refusals(ours.register_levanter)


def test_a_plan_by_name(levanter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.register_levanter(plan="lean")
    plans = note_plans(monkeypatch, ours)
    x, labels, w, weight = inputs()
    made = levanter.fused_cross_entropy_loss_and_logsumexp_penalty(
        x, labels, w, weight=weight, implementation=ours.NAME
    )
    assert error(made, full(x, labels, w, weight, "mean", 0.0, None)) <= ON_TOP_LOSS["float64"]
    assert plans == ["lean"]


def test_it_is_taken_back(levanter: Any) -> None:
    ours.unregister_levanter()
    assert ours.NAME not in levanter.IMPLEMENTATIONS
    with pytest.raises(RuntimeError, match=r"^levanter: has no entry of ours"):
        ours.unregister_levanter()


def test_its_arguments_and_results_are_levanters(levanter: Any) -> None:
    if not stand_ins.is_installed("levanter"):
        pytest.skip("levanter is not installed")
    theirs = levanter.IMPLEMENTATIONS["reference"]
    own = inspect.signature(theirs).parameters
    found = inspect.signature(ours.linear_softmax_cross_entropy_loss).parameters
    assert {name: value.default for name, value in own.items()} == {name: found[name].default for name in own}
    x, labels, w, _ = inputs("float32")
    for cap in (None, 3.0):
        expected = theirs(x, labels, w, logit_soft_cap=cap, return_argmax=True)
        made = ours.linear_softmax_cross_entropy_loss(x, labels, w, logit_soft_cap=cap, return_argmax=True)
        for a, b in zip(made, expected, strict=True):
            assert a.dtype == b.dtype
            assert error(a, b) <= ON_TOP_LOSS["float32"]
