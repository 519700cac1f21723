"""A temperature divides the logits last of all, after a softcap, in every function of both frameworks."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import pytest
from implementations import and_interpreted, every_implementation, in_its_own_dtype, in_jax, plan_for

from logitless import reference
from logitless.problems import Problem
from logitless.rounding import round_to
from logitless.spec import LossOptions
from logitless.tolerances import BOUND, ELEMENTS, GRADIENT, ON_TOP_GRADIENT, ON_TOP_LOSS, TINY, error

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


# ---------------------------------------------------------------------------------------------------------------------
# One per token

BOTH_CAPS = pytest.mark.parametrize("softcap", [None, CAP])
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"return_stats": True},
    "smooth": {"label_smoothing": 0.2, "z_loss": 1e-2, "reduction": "sum"},
    "none": {"reduction": "none", "label_smoothing": 0.1, "return_lse": True},
    "one pass": {"z_loss": 1e-2, "logit_scale": 1.5},
}


def per_token(y: Any, seed: int = 7) -> Any:
    """A temperature for every token, no number where a token is ignored."""
    values = np.random.default_rng(seed).uniform(0.4, 2.5, y.shape).astype(np.float32)
    return np.where(y == -100, np.float32(np.nan), values)


def with_ignored(y: Any) -> Any:
    y = y.copy()
    y.reshape(-1)[::5] = -100
    return y


@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(41, 46)
@and_interpreted
@BOTH_CAPS
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_a_loss_with_one_per_token(impl: Any, name: str, order: Any, softcap: float | None) -> None:
    x, w, y, b = some(impl.dtype)
    y, rng, options = with_ignored(y), np.random.default_rng(2), dict(OPTIONS[name])
    tau, k = per_token(y), rng.uniform(0.2, 2.0, 60).astype(np.float32)
    t, g, h = rng.uniform(0.2, 2.0, 24).astype(np.float32), rng.standard_normal(24), rng.standard_normal(24)
    lse, none = options.get("return_lse", False), options.get("reduction") == "none"
    upstreams = {"upstream": g if none else 1.5, "lse_upstream": h if lse else 0.0}
    chosen = plan_for(
        Problem("", (24,), 16, 60), order=order, chunk=10, one_pass=not (none or (softcap and "smooth" in name))
    )
    made = impl.run(
        x, w, y, b, softcap=softcap, temperature=impl.array(tau), token_weight=t, class_weight=k,
        plan=None if impl.on_gpu else chosen, **upstreams, **options,
    )  # fmt: skip
    for other in ("return_lse", "return_stats"):
        options.pop(other, None)
    true = reference.linear_cross_entropy(
        x, w, y, b, softcap=softcap, temperature=tau, token_weight=t, class_weight=k, **upstreams, **options
    )
    assert error(made.loss, true.loss) <= ON_TOP_LOSS[impl.dtype]
    for argument, grad in made.grads.items():
        assert error(grad, getattr(true, f"{argument}_grad")) <= ON_TOP_GRADIENT[impl.dtype], argument
    if lse:
        assert error(made.lse, true.stats.lse) <= ON_TOP_LOSS[impl.dtype]
    for statistic, values in zip(made.stats._fields, made.stats, strict=True) if made.stats else ():
        assert error(values, getattr(true.stats, statistic)) <= ON_TOP_LOSS[impl.dtype], statistic


@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(41, 46)
@and_interpreted
@BOTH_CAPS
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_log_probs_with_one_per_token(impl: Any, dtype: str, softcap: float | None) -> None:
    x, w, y, b = some(impl.takes(dtype))
    y, (g, h) = with_ignored(y), np.random.default_rng(1).standard_normal((2, 24)).astype(np.float32)
    tau = per_token(y).astype(np.float64 if dtype == "float64" else np.float32)
    options = {"softcap": softcap, "logit_scale": 1.5, "log_prob_upstream": g, "entropy_upstream": h}
    with impl.precision(dtype) if hasattr(impl, "precision") else contextlib.nullcontext():
        made = impl.run_log_probs(x, w, y, b, dtype=dtype, temperature=impl.array(tau), **options)
    true = reference.linear_log_probs(x, w, y, b, temperature=tau, **options)
    assert error(made.log_prob, true.log_prob) <= ON_TOP_LOSS[dtype]
    assert error(made.entropy, true.entropy) <= 2 * ON_TOP_LOSS[dtype]
    for name, grad in made.grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= ON_TOP_GRADIENT[dtype], name


@pytest.mark.case(41, 46)
@and_interpreted
def test_a_last_chunk_that_is_not_full(impl: Any) -> None:
    """The rows that are not there have no temperature, and are no number in no sum."""
    x, w, y, b = some(impl.dtype)
    tau, chosen = per_token(y), plan_for(Problem("", (24,), 16, 60), order="tokens", chunk=10)
    made = impl.run(x, w, y, b, temperature=impl.array(tau), plan=None if impl.on_gpu else chosen)
    true = reference.linear_cross_entropy(x, w, y, b, temperature=tau)
    for name, grad in made.grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= ON_TOP_GRADIENT[impl.dtype], name


@pytest.mark.case(41, 46)
@and_interpreted
@BOTH_CAPS
def test_exponentials_that_wait_with_one_per_token(impl: Any, softcap: float | None) -> None:
    """A budget lets log-probabilities hold their exponentials for the upstream gradients."""
    x, w, y, b = some(impl.dtype)
    y, g = with_ignored(y), np.random.default_rng(1).standard_normal(24).astype(np.float32)
    tau = per_token(y)
    options = {"softcap": softcap, "logit_scale": 1.5, "log_prob_upstream": g}
    made = impl.run_log_probs(x, w, y, b, temperature=impl.array(tau), memory_budget=2**30, **options)
    true = reference.linear_log_probs(x, w, y, b, temperature=tau, **options)
    assert error(made.log_prob, true.log_prob) <= ON_TOP_LOSS[impl.dtype]
    for name, grad in made.grads.items():
        assert error(grad, getattr(true, f"{name}_grad")) <= ON_TOP_GRADIENT[impl.dtype], name


def framework_of(impl: Any) -> Any:
    return importlib.import_module("logitless.torch_impl" if impl.name.startswith("torch") else "logitless.jax_impl")


def value_and_gradients(impl: Any, call: Any, arrays: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """``call(hidden, weight, bias)``, and the gradients of its sum weighted by 1, 2, 3, …"""
    leaves = [impl.array(values, impl.dtype) for values in arrays]
    if impl.name.startswith("torch"):
        import torch

        for leaf in leaves:
            leaf.requires_grad_()
        values = call(*leaves)
        g = torch.arange(1.0, values.numel() + 1, device=values.device).reshape(values.shape)
        return impl.numpy(values), [impl.numpy(grad) for grad in torch.autograd.grad(values, leaves, g)]
    import jax
    import jax.numpy as jnp

    values, pull = jax.vjp(call, *leaves)
    g = jnp.arange(1.0, values.size + 1, dtype=values.dtype).reshape(values.shape)
    return impl.numpy(values), [impl.numpy(grad) for grad in pull(g)]


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "token log-probs": ("linear_token_log_probs", {}),
    "largest": ("linear_top_k", {"k": 7}),
    "policy": ("clipped_policy_loss", {"entropy_coef": 0.1, "aggregation": "sequence_mean"}),
    "dpo": ("dpo_loss", {"reduction": "none", "loss_type": "simpo"}),
    "kto": ("kto_loss", {"reduction": "none", "kl": 0.1}),
    "forward KL": ("distillation_loss", {"beta": 0.0, "reduction": "none"}),
    "JSD": ("distillation_loss", {"beta": 0.4, "reduction": "none", "teacher_softcap": 2.0}),
    "reverse KL": ("distillation_loss", {"beta": 1.0, "reduction": "none"}),
}


@pytest.mark.late(where=lambda p: in_jax(p) and p["name"] in ("kto", "forward KL", "reverse KL"))
@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(41, 46)
@and_interpreted
@BOTH_CAPS
@pytest.mark.parametrize("name", CALLS)
def test_one_per_sequence_is_a_call_for_each(impl: Any, name: str, softcap: float | None) -> None:
    """Four sequences, two with one temperature and two with another: the calls with these numbers, put together. What
    is at masked places is never read."""
    function, options = CALLS[name]
    rng, module = np.random.default_rng(3), framework_of(impl)
    x, w, b = (round_to(rng.standard_normal(shape), impl.dtype) for shape in ((4, 6, 16), (60, 16), (60,)))
    known: dict[str, Any] = {"target": rng.integers(0, 60, (4, 6))}
    mask = (rng.random((4, 6)) < 0.8).astype(np.int64)
    if function == "linear_token_log_probs":
        known = {"ids": rng.integers(0, 60, (4, 6, 3))}
    elif function == "linear_top_k":
        known = {}
    elif function == "distillation_loss":
        known = {"mask": mask, "teacher_hidden": rng.standard_normal((4, 6, 9))}
        known["teacher_weight"] = rng.standard_normal((60, 9))
    else:
        known["mask"] = mask
    if function == "clipped_policy_loss":
        known["advantage"] = (2.0 + rng.standard_normal((4, 6))).astype(np.float32)  # so the parts do not cancel
    if function == "kto_loss":
        known |= {"desirable": np.arange(4) % 2, "reference_log_prob": rng.standard_normal(4).astype(np.float32)}

    def of_dtype(key: str, value: Any) -> Any:
        return impl.array(value, impl.dtype if key.startswith("teacher") else None)

    def run(rows: Any, temperature: Any) -> Any:
        cut = {key: values if key == "teacher_weight" else values[rows] for key, values in known.items()}

        def call(hidden: Any, weight: Any, bias: Any) -> Any:
            values = getattr(module, function)(
                hidden, weight, bias=bias, **{key: of_dtype(key, value) for key, value in cut.items()},
                softcap=softcap, temperature=temperature, backend=impl.backend, **options,
            )  # fmt: skip
            return (values[0] if isinstance(values, tuple) else values).reshape(-1)

        return value_and_gradients(impl, call, (x[rows], w, b))

    pairs = np.array([0, 2]), np.array([1, 3])  # a pair of dpo_loss has its own temperature
    taus = (0.6, 1.7)
    each = np.where(np.isin(np.arange(4), pairs[0])[:, None], taus[0], taus[1]) * np.ones((4, 6))
    each = np.where(mask == 0, np.nan, each) if "mask" in known else each
    values, grads = run(slice(None), impl.array(each.astype(np.float32)))
    if function == "clipped_policy_loss":
        parts = [run(rows, tau) for rows, tau in zip(pairs, taus, strict=True)]
        assert error(values, np.mean([part[0] for part in parts], axis=0)) <= ON_TOP_LOSS[impl.dtype]
        for place in (1, 2):
            joint = np.mean([part[1][place] for part in parts], axis=0)
            assert error(grads[place], joint) <= ON_TOP_GRADIENT[impl.dtype]
        return
    wholes = [run(slice(None), tau) for tau in taus]
    groups = values.reshape(2 if function == "dpo_loss" else 4, -1)
    first = np.array([True, False]) if function == "dpo_loss" else np.isin(np.arange(4), pairs[0])
    joint = np.where(first[:, None], *(whole[0].reshape(groups.shape) for whole in wholes))
    assert error(groups, joint) <= ON_TOP_LOSS[impl.dtype]
    hidden = np.where(np.isin(np.arange(4), pairs[0])[:, None, None], *(whole[1][0] for whole in wholes))
    assert error(grads[0], hidden) <= ON_TOP_GRADIENT[impl.dtype]


@pytest.mark.case(9, 46)
@every_implementation
def test_which_temperatures_are_refused(impl: Any) -> None:
    module = framework_of(impl)
    x, w, y = (impl.array(values) for values in some("float32")[:3])
    right = np.full(24, 0.7, np.float32)

    def loss(values: Any, backend: str | None = impl.backend) -> Any:
        return module.linear_cross_entropy(x, w, y, temperature=impl.array(values), backend=backend)

    for values, words in (
        (right[:5], r"temperature: got shape \(5,\), allowed is a number, or one per token, target's shape \(24,\)"),
        (right[:1].reshape(()), r"temperature: got shape \(\)"),
        (right.astype(np.int32), "temperature: got dtype int32, allowed are bfloat16, float16, float32, float64"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            loss(values)
    if not impl.on_gpu:
        for value in (0.0, -1.0, np.nan, np.inf, 1e-20):
            with pytest.raises(
                ValueError, match=r"temperature: got \S+ at index \(3\), allowed is a number in \[1e-15"
            ):
                loss(np.where(np.arange(24) == 3, np.float32(value), right))
    if impl.name.startswith("torch"):
        with pytest.raises(ValueError, match="temperature: got a tensor that requires grad, allowed is a constant"):
            module.linear_log_probs(x, w, y, temperature=impl.array(right).requires_grad_())
        return
    import jax

    with pytest.raises(ValueError, match="temperature: got an array that is differentiated, allowed is a constant"):
        jax.grad(lambda tau: module.linear_cross_entropy(x, w, y, temperature=tau))(impl.array(right))


@pytest.mark.case(46)
def test_torchs_transforms_take_one_per_token() -> None:
    torch = pytest.importorskip("torch", reason="torch.compile and torch.func are PyTorch's")
    from logitless.torch_impl import linear_cross_entropy, linear_log_probs

    x, w, y, b = (torch.tensor(values) for values in some("float32"))
    tau = torch.tensor(per_token(y.numpy()))

    def loss(x: Any, tau: Any) -> Any:
        log_prob, entropy = linear_log_probs(x, w, y, b, temperature=tau, with_entropy=True)
        return linear_cross_entropy(x, w, y, b, temperature=tau) + (log_prob * entropy).sum()

    leaf = x.clone().requires_grad_()
    value = loss(leaf, tau)
    (grad,) = torch.autograd.grad(value, leaf)
    by_func, of_func = torch.func.grad_and_value(loss)(x, tau)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf, tau)
    (of_compiled,) = torch.autograd.grad(compiled, leaf)
    for made, expected in ((of_func, value), (by_func, grad), (compiled, value), (of_compiled, grad)):
        torch.testing.assert_close(made, expected, **ELEMENTS["the same sums"])


@pytest.mark.case(46)
def test_jaxs_transforms_take_one_per_token() -> None:
    jax = pytest.importorskip("jax", reason="jit and vmap are JAX's")
    from logitless.jax_impl import linear_cross_entropy

    x, w, y, b = some("float32")
    tau = per_token(y)
    step = jax.value_and_grad(lambda x, tau: linear_cross_entropy(x, w, y, b, temperature=tau, softcap=CAP))
    true = reference.linear_cross_entropy(x, w, y, b, temperature=tau, softcap=CAP)
    doubled = [np.stack([values, values]) for values in (x, tau)]
    values, grads = jax.jit(jax.vmap(step))(*doubled)
    for value, grad in [jax.jit(step)(x, tau), *zip(values, grads, strict=True)]:
        assert error(value, true.loss) <= TINY["float32"]
        assert error(grad, true.hidden_grad) <= ON_TOP_GRADIENT["float32"]
