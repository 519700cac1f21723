"""What JAX asks of the losses on top: jit, vmap, checkpoint, one derivative, NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402

from logitless.jax_impl import (  # noqa: E402
    clipped_policy_loss,
    dense_distillation_loss,
    distillation_loss,
    dpo_loss,
    kto_loss,
    sparse_distillation_loss,
)
from logitless.tolerances import ELEMENTS  # noqa: E402

NAMES = (
    "dpo",
    "ipo",
    "simpo",
    "orpo",
    "kto",
    "policy",
    "cispo",
    "sequence",
    "distillation",
    "class",
    "spread",
    "dense",
)
# The others go the same ways through the function: dpo's, policy's and class's.
LATE = ("ipo", "simpo", "cispo", "sequence", "spread", "dense")
POLICIES: dict[str, dict[str, Any]] = {
    "policy": {"entropy_coef": 0.1},
    "cispo": {"objective": "cispo", "kl_estimator": "k1", "kl_times_ratio": True, "with_entropy": True},
    "sequence": {
        "ratio": "sequence",
        "dual_clip": 2.0,
        "kl_estimator": "k2",
        "sampler_correction": "sequence_truncate",
    },
}


def make(name: str) -> tuple[Any, Any, Any]:
    """A loss as a function of hidden and weight, and these two, as NumPy arrays."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    target = rng.integers(0, 50, (4, 6))
    target[:, 4:] = -100
    known = {"reference_log_prob": some(4, 6) - 4, "mask": np.arange(6) < np.array([[5], [3], [6], [0]])}
    arrays = some(4, 6, 8), some(50, 8)
    if name in ("dpo", "ipo", "simpo", "orpo"):
        if name not in ("dpo", "ipo"):
            del known["reference_log_prob"]
        return lambda x, w: dpo_loss(x, w, target, **known, loss_type=name, nll_coef=0.5), *arrays
    if name == "kto":
        known |= {"desirable": np.array([1, 0, 1, 0])}
        return lambda x, w: kto_loss(x, w, target, **known, kl=0.2), *arrays
    if name in POLICIES:
        known |= {"advantage": some(4), "old_log_prob": some(4, 6) - 4}
        if name == "sequence":
            known["sampler_log_prob"] = some(4, 6) - 4
        return lambda x, w: clipped_policy_loss(x, w, target, **known, kl_coef=0.1, **POLICIES[name]), *arrays
    if name in ("class", "spread", "dense"):
        hard = {"target": target, "mask": known["mask"], "nll_coef": 0.5, "beta": 0.4}
        teacher = np.asarray(jax.nn.softmax(some(4, 6, 50)))
        if name == "dense":
            return lambda x, w: dense_distillation_loss(x, w, teacher, **hard), *arrays
        ids = np.argsort(-teacher, axis=-1)[..., :3]
        probs = np.take_along_axis(teacher, ids, -1)
        return lambda x, w: sparse_distillation_loss(x, w, ids, probs, rest=name, **hard), *arrays
    teacher = some(4, 6, 5), some(50, 5)
    return lambda x, w: distillation_loss(x, w, *teacher, beta=0.4, mask=known["mask"]), *arrays


@pytest.mark.late(where=lambda p: p["name"] in LATE)
@pytest.mark.case(32)
@pytest.mark.parametrize("name", NAMES)
def test_transformations(name: str) -> None:
    loss, x, w = make(name)
    expected = jax.grad(loss, (0, 1))(x, w)
    jitted = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(x, w)
    mapped = jax.vmap(jax.grad(loss, (0, 1)), in_axes=(0, None))(jnp.stack([x, 2 * x]), w)
    for one, other, many in zip(expected, jitted, mapped, strict=True):
        np.testing.assert_allclose(one, other, **ELEMENTS["compiled"])
        np.testing.assert_allclose(one, many[0], **ELEMENTS["mapped"])
        assert np.abs(many[1] - many[0]).max() > 1e-4
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(jax.grad(loss, (0, 1))(x, w)[1], expected[1], **ELEMENTS["compiled"])


@pytest.mark.case(32)
@pytest.mark.parametrize("name", NAMES)
def test_one_derivative_in_reverse_mode(name: str) -> None:
    loss, x, w = make(name)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: loss(x, w), (x,), (x,))
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        jax.grad(lambda x: (jax.grad(loss)(x, w) ** 2).sum())(x)


def test_the_others_get_no_gradient() -> None:
    rng = np.random.default_rng(0)
    x, w, tx, tw = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (50, 8), (6, 5), (50, 5)))
    teacher = jax.grad(lambda *arrays: distillation_loss(x, w, *arrays), (0, 1))(tx, tw)
    assert not any(np.asarray(grad).any() for grad in teacher)
    target, a = rng.integers(0, 50, 6), rng.standard_normal(6).astype(np.float32)
    known = jax.grad(lambda a: clipped_policy_loss(x, w, target, advantage=a, old_log_prob=a, sampler_log_prob=a))(a)
    assert not np.asarray(known).any()
    x, target = x.reshape(2, 3, 8), target.reshape(2, 3)
    known = jax.grad(
        lambda a: kto_loss(x, w, target, desirable=np.ones(2), reference_log_prob=a.reshape(2, 3), kl=a.sum())
    )(a)
    assert not np.asarray(known).any()


def test_an_id_of_64_bits_does_not_wrap_into_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 8)).astype(np.float32), rng.standard_normal((50, 8)).astype(np.float32)
    target = np.array([[1, 2, 3], [2**32 + 1, 4, 5]])
    for mask in (np.ones((2, 3)), jnp.ones((2, 3))):
        with pytest.raises(ValueError, match=r"target: got id \d+ at index \(1, 0\), allowed are 0 to 49"):
            dpo_loss(x, w, target, reference_log_prob=np.zeros(2, np.float32), mask=mask)
