"""A temperature divides the logits last of all, after a softcap, in every function of both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import every_implementation, in_its_own_dtype

from logitless import reference
from logitless.rounding import round_to
from logitless.spec import LossOptions
from logitless.tolerances import BOUND, GRADIENT, ON_TOP_LOSS, TINY, error

T, CAP = 0.7, 3.0


def some(dtype: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((24, 16)), rng.standard_normal((60, 16)), rng.standard_normal(60)
    return round_to(x, dtype), round_to(w, dtype), rng.integers(0, 60, 24), round_to(b, dtype)


def true_log_probs(x: Any, w: Any, y: Any, b: Any, softcap: float | None, scale: float = 1.0) -> Any:
    """log softmax(f(x wᵀ + b) / T) of the targets in float64: the distribution that a sampler at temperature T draws
    from."""
    z = scale * (x.astype(np.float64) @ w.T.astype(np.float64) + b)
    z = (z if softcap is None else softcap * np.tanh(z / softcap)) / T
    z = z - z.max(axis=1, keepdims=True)
    return (z - np.log(np.exp(z).sum(axis=1, keepdims=True)))[np.arange(len(y)), y]


@pytest.mark.case(41)
@in_its_own_dtype
@pytest.mark.parametrize("softcap", [None, CAP])
def test_log_probs_are_those_of_the_sampler(impl: Any, softcap: float | None) -> None:
    arrays, dtype = some(impl.dtype), impl.dtype
    g = np.random.default_rng(1).standard_normal(24).astype(np.float32)
    options = {"softcap": softcap, "temperature": T, "logit_scale": 1.5}
    made = impl.run_log_probs(*arrays, log_prob_upstream=g, **options)
    assert error(made.log_prob, true_log_probs(*arrays, softcap, 1.5)) <= 2 * TINY[dtype]
    true = reference.linear_log_probs(*arrays, log_prob_upstream=g, **options)
    for name, grad in made.grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= GRADIENT[dtype], name


@pytest.mark.case(41)
@every_implementation
@pytest.mark.parametrize("softcap", [None, CAP])
def test_the_loss_is_that_of_tempered_logits(impl: Any, softcap: float | None) -> None:
    arrays, dtype = some(impl.dtype), impl.dtype
    made = impl.run(*arrays, softcap=softcap, temperature=T, z_loss=1e-3)
    plain = impl.run(*arrays, softcap=softcap, temperature=T)
    assert error(plain.loss, -true_log_probs(*arrays, softcap).mean()) <= ON_TOP_LOSS[dtype]
    true = reference.linear_cross_entropy(*arrays, softcap=softcap, temperature=T, z_loss=1e-3)
    assert error(made.loss, true.loss) <= ON_TOP_LOSS[dtype]
    for name, grad in made.grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= GRADIENT[dtype], name


@pytest.mark.case(41)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_functions_on_top_take_it(framework: str) -> None:
    """The loss on given logits, preferences and policies, against log-probabilities at the temperature."""
    x, w, y, b = some("float32")
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="needs torch")
        from logitless import torch_impl as module

        array: Any = torch.as_tensor
    else:
        jnp = pytest.importorskip("jax.numpy", reason="needs jax")
        from logitless import jax_impl as module  # type: ignore[no-redef]

        array = jnp.asarray
    log_p = true_log_probs(x, w, y, b, CAP)
    logits = (x.astype(np.float64) @ w.T + b).astype(np.float32)
    loss = module.cross_entropy(array(logits), array(y), softcap=CAP, temperature=T)
    assert error(np.asarray(loss), -log_p.mean()) <= ON_TOP_LOSS["float32"]
    x, y = x.reshape(4, 6, 16), y.reshape(4, 6)
    given = tuple(array(a.astype(np.float32) if a.dtype.kind == "f" else a.astype(np.int32)) for a in (x, w, y, b))
    common = {"softcap": CAP, "temperature": T}
    old = log_p.reshape(4, 6).astype(np.float32)
    advantage = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    # At the policy that sampled the ratio is 1, whatever the advantage is.
    loss = module.clipped_policy_loss(*given, advantage=array(advantage), old_log_prob=array(old), **common)
    assert error(np.asarray(loss), -advantage.mean()) <= BOUND["policy from rounded probabilities"]
    loss = module.dpo_loss(*given, reference_log_prob=array(np.zeros((4, 6), np.float32)), beta=0.1, **common)
    sums = 0.1 * log_p.reshape(4, 6).sum(axis=1)
    assert error(np.asarray(loss), np.log1p(np.exp(-(sums[:2] - sums[2:]))).mean()) <= ON_TOP_LOSS["float32"]


def test_one_changes_nothing() -> None:
    options = LossOptions(logit_scale=1.5, softcap=30.0)
    assert options.tempered(1.0) == options


@pytest.mark.parametrize("value", [0.0, -1.0, 1e300, 1e39, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["logit_scale", "softcap", "temperature"])
def test_what_float32_cannot_do_is_refused(name: str, value: float) -> None:
    given = {"temperature": 1.0, name: value}
    temperature = given.pop("temperature")
    with pytest.raises(ValueError, match=f"{name}: got .*allowed"):
        LossOptions(**given).tempered(temperature)


def test_quotients_are_checked() -> None:
    with pytest.raises(ValueError, match=r"temperature: got 1e-10 beside logit_scale=10000000000.0.*quotients"):
        LossOptions(logit_scale=1e10).tempered(1e-10)
