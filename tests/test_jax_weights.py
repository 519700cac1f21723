"""Weights as JAX's programs hold them: wrapped (anything with ``__jax_array__``), and float32 beside narrower hidden
states, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import logitless  # noqa: E402
import logitless.jax_impl as lj  # noqa: E402
from logitless import reference  # noqa: E402
from logitless.tolerances import GRADIENT, ON_TOP_LOSS, TINY, error  # noqa: E402

N, D, V = 24, 16, 61


class Wrapped:
    """An array with a name, as libraries of layers have them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> Any:
        return self.value


def inputs(dtype: str = "float32", wide: bool = False) -> tuple[Any, Any, Any, Any]:
    """hidden in steps of 2, weight a transpose; in float32 if ``wide``."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(N, 2 * D)), dtype)[:, ::2]
    weight = jnp.asarray(rng.normal(size=(D, V)) * 0.3, "float32" if wide else dtype).T
    bias = jnp.asarray(rng.normal(size=V), "float32" if wide else dtype)
    target = rng.integers(0, V, N).astype(np.int32)
    target[3] = -100
    return hidden, weight, jnp.asarray(target), bias


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers


CALLS: dict[str, Callable[..., Any]] = {
    "loss": lambda x, w, y, b: lj.linear_cross_entropy(x, w, y, b, label_smoothing=0.1),
    "log probs": lambda x, w, y, b: lj.linear_log_probs(x, w, y, bias=b, with_entropy=True)[0].sum(),
    "sharded": lambda x, w, y, b: lj.sharded_linear_cross_entropy(
        Mesh(np.array(jax.devices()[:1]), "v"), vocab_axis="v"
    )(x, w, y, b),
    "given ids": lambda x, w, y, b: lj.linear_token_log_probs(x, w, jnp.stack([y, y], 1), b).sum(),
    "policy": lambda x, w, y, b: lj.clipped_policy_loss(
        x, w, y, bias=b, old_log_prob=jnp.full(N, -4.0), advantage=jnp.ones(N)
    ),
    "distillation": lambda x, w, y, b: lj.distillation_loss(
        x, w, teacher_hidden=jnp.ones((N, 4)), teacher_weight=Wrapped(jnp.ones((V, 4))), bias=b
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_has_jax_array_is_taken(name: str) -> None:
    call, (x, w, y, b) = CALLS[name], inputs()
    plain = jax.value_and_grad(call, argnums=(0, 1, 3))(x, w, y, b)
    wrapped = jax.value_and_grad(
        lambda x, w, b: call(Wrapped(x), Wrapped(w), Wrapped(y), Wrapped(b)), argnums=(0, 1, 2)
    )(x, w, b)
    for made, right in zip(jax.tree.leaves(wrapped), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(made, right)


def test_given_logits_gathers_and_normalizers_take_them() -> None:
    z, ids = jnp.ones((N, V)), jnp.arange(N)
    assert lj.cross_entropy(Wrapped(z), Wrapped(ids)) == lj.cross_entropy(z, ids)
    made = lj.padded_index_gather(Wrapped(z), Wrapped(ids), pad_to_multiple=8)
    np.testing.assert_array_equal(made, lj.padded_index_gather(z, ids, pad_to_multiple=8))


def test_flax_parameters() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    x, w, y, _ = inputs()
    loss, gradient = nnx.value_and_grad(lambda weight: lj.linear_cross_entropy(x, weight, y))(nnx.Param(w))
    right, expected = jax.value_and_grad(lambda weight: lj.linear_cross_entropy(x, weight, y))(w)
    assert loss == right
    np.testing.assert_array_equal(jax.tree.leaves(gradient)[0], expected)
    jitted = jax.jit(lambda weight: lj.linear_cross_entropy(x, weight, y))(nnx.Param(w))
    assert error(jitted, right) <= TINY["float32"]


def test_equinox_layers() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    x, w, y, b = inputs()
    layer = eqx.tree_at(
        lambda one: (one.weight, one.bias), eqx.nn.Linear(D, V, key=jax.random.key(0)), (Wrapped(w), Wrapped(b))
    )
    right = lj.linear_cross_entropy(x, w, y, b)
    assert lj.linear_cross_entropy(x, layer.weight, y, layer.bias) == right


def test_something_else_is_refused() -> None:
    x, w, y, _ = inputs()
    with pytest.raises(TypeError, match=r"^weight: got list, allowed is a jax.Array or a NumPy array"):
        lj.linear_cross_entropy(x, w.tolist(), y)
    with pytest.raises(TypeError, match=r"^weight: got type"):
        lj.linear_cross_entropy(x, Wrapped, y)


# ---------------------------------------------------------------------------------------------------------------------
# float32 weights


@pytest.mark.every_value
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_float32_weights(dtype: str, reduction: Any, chunk: int | None) -> None:
    x, w, y, b = inputs(dtype, wide=True)
    sizes: dict[str, Any] = {"tokens": N, "hidden": D, "vocab": V, "dtype": dtype, "device": "cpu"}
    cut = {"order": "tokens", "chunk": chunk, "one_pass": reduction == "mean"}
    plan = None if chunk is None else logitless.plan(**sizes, **cut)
    upstream = jnp.linspace(0.5, 1.5, N) if reduction == "none" else jnp.ones(())

    def total(x: Any, w: Any, b: Any) -> Any:
        return (upstream * lj.linear_cross_entropy(x, w, y, b, reduction=reduction, z_loss=0.01, plan=plan)).sum()

    loss, gradients = jax.value_and_grad(total, argnums=(0, 1, 2))(x, w, b)
    assert [str(g.dtype) for g in gradients] == [dtype, "float32", "float32"]
    wide = [np.asarray(v.astype(dtype), np.float64) for v in (x, w, b)]
    right = reference.linear_cross_entropy(
        wide[0], wide[1], np.asarray(y), wide[2], reduction=reduction, z_loss=0.01, upstream=np.asarray(upstream)
    )
    expected = right.loss if reduction == "mean" else (np.asarray(upstream) * right.loss).sum()
    assert error(loss, expected) <= ON_TOP_LOSS[dtype]
    for made, exact in zip(gradients, (right.hidden_grad, right.weight_grad, right.bias_grad), strict=True):
        assert error(np.asarray(made, np.float64), exact) <= GRADIENT[dtype]
    # dW was not rounded to the narrow dtype on its way.
    narrow = gradients[1].astype(dtype).astype("float32")
    assert (narrow != gradients[1]).mean() > 0.5


@pytest.mark.parametrize("name", CALLS)
def test_every_function_takes_them(name: str) -> None:
    """The loss is that of rounded weights, and gradients have each argument's dtype."""
    call, (x, w, y, b) = CALLS[name], inputs("bfloat16", wide=True)
    loss, gradients = jax.value_and_grad(call, argnums=(0, 1, 3))(x, w, y, b)
    narrow, expected = jax.value_and_grad(call, argnums=(0, 1, 3))(x, w.astype("bfloat16"), y, b.astype("bfloat16"))
    assert error(loss, narrow) <= TINY["float32"]
    for made, right, given in zip(gradients, expected, (x, w, b), strict=True):
        assert made.dtype == given.dtype
        assert error(np.asarray(made, np.float64), np.asarray(right, np.float64)) <= GRADIENT["bfloat16"]


@pytest.mark.parametrize(
    ("hidden", "weight"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")]
)
def test_other_pairs_are_refused(hidden: str, weight: str) -> None:
    x, w, y, _ = inputs()
    with pytest.raises(TypeError, match=rf"^weight: got dtype {weight} beside hidden's {hidden}, allowed is"):
        lj.linear_cross_entropy(x.astype(hidden), w.astype(weight), y)
