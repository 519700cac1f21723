"""The losses on top of per-token values, on every implementation, against full logits in float64 with autograd."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import full_losses
import numpy as np
import pytest
from distilling import DISTILLING, DISTILLING_DTYPES, IN_EITHER_ORDER, ORDERS, cut_raggedly, take_order
from implementations import every_implementation, in_its_own_dtype, in_jax, in_turn

from logitless.rounding import round_to
from logitless.tolerances import BOUND, CANCELLED, CHAIN, GRADIENT, ON_TOP_GRADIENT, ON_TOP_LOSS, TINY, error

ARGUMENTS = ("hidden", "weight", "bias")
SEQUENCES, T, D, V, D_TEACHER = 6, 9, 12, 70, 17
DTYPES = ("float64", "float32", "bfloat16", "float16")


def arrays(dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    """hidden, weight, bias, target with ignored tokens, mask, and everything a loss knows of other models."""
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {
        "hidden": rng.standard_normal((SEQUENCES, T, D)),
        "weight": rng.standard_normal((V, D)) * D**-0.5,
        "bias": rng.standard_normal(V),
        "teacher_hidden": rng.standard_normal((SEQUENCES, T, D_TEACHER)),
        "teacher_weight": rng.standard_normal((V, D_TEACHER)) * D_TEACHER**-0.5,
        "teacher_bias": rng.standard_normal(V),
    }
    made = {name: round_to(values, dtype) for name, values in made.items()}
    made["target"] = rng.integers(0, V, (SEQUENCES, T))
    made["mask"] = (rng.random((SEQUENCES, T)) < 0.7).astype(np.int64)
    made["mask"][2] = 0  # a sequence without a token that counts
    made["target"][:, -2:] = -100
    made["target"][made["mask"] == 0] = V + 5  # what a masked token's id is does not matter
    side = "float64" if dtype == "float64" else "float32"
    near = -4.0 + rng.standard_normal((3, SEQUENCES, T))
    made["old_log_prob"], made["reference_log_prob"], made["advantage"] = (round_to(values, side) for values in near)
    made["advantage"] += np.float32(4.0)
    made["sampler_log_prob"] = round_to(made["old_log_prob"] + 0.5 * rng.standard_normal((SEQUENCES, T)), side)
    made["desirable"] = np.arange(SEQUENCES) % 2
    return made


def counted(a: dict[str, Any]) -> Any:
    return ((a["mask"] != 0) & (a["target"] != -100)).astype(np.float64)


def onehot(a: dict[str, Any]) -> Any:
    return np.eye(V)[np.where(counted(a) > 0, a["target"], 0)] * counted(a)[..., None]


def poisoned(values: Any, a: dict[str, Any]) -> Any:
    """The values, with NaN where a token does not count: nothing may read it."""
    values = np.array(values)
    values[counted(a) == 0] = np.nan
    return values


class Torch:
    """A framework's gradient, for the truth and for what is tested."""

    @staticmethod
    def value_and_grads(
        impl: Any, function: Callable[[dict[str, Any]], Any], floats: dict[str, Any], dtype: str
    ) -> Any:
        given = {name: impl.array(values, dtype).requires_grad_() for name, values in floats.items()}
        value = function(given)
        value.backward()
        return impl.numpy(value), {name: impl.numpy(tensor.grad) for name, tensor in given.items()}


class Jax:
    @staticmethod
    def value_and_grads(
        impl: Any, function: Callable[[dict[str, Any]], Any], floats: dict[str, Any], dtype: str
    ) -> Any:
        import jax

        given = {name: impl.array(values, dtype) for name, values in floats.items()}
        value, grads = jax.value_and_grad(function)(given)
        return impl.numpy(value), {name: impl.numpy(array) for name, array in grads.items()}


def tools(impl: Any) -> tuple[Any, Any, Any, Any]:
    """The implementation's package, array library and gradient, and the context that a dtype needs."""
    if impl.name.startswith("torch"):
        import torch

        from logitless import torch_impl

        return torch_impl, torch, Torch, lambda dtype: contextlib.nullcontext()
    import jax.numpy as jnp

    from logitless import jax_impl

    return jax_impl, jnp, Jax, impl.precision


def made(
    impl: Any, name: str, a: dict[str, Any], constants: Any, dtype: str, wrt: Any = ARGUMENTS, **options: Any
) -> Any:
    """Loss and gradients of the implementation's function ``name``; ``constants`` names the arrays of ``a`` that it
    also gets."""
    package, _, framework, context = tools(impl)
    loss, dtype = getattr(package, name), impl.takes(dtype)
    with context(dtype):
        known = {key: impl.array(a[key]) for key in constants if not key.startswith("teacher")}
        known |= {key: impl.array(a[key], dtype) for key in constants if key.startswith("teacher")}
        rest = {key: impl.array(a[key], dtype) for key in ARGUMENTS if key not in wrt}

        def function(given: dict[str, Any]) -> Any:
            return loss(**(given | rest | known), backend=impl.backend, **options)

        return framework.value_and_grads(impl, function, {key: a[key] for key in wrt}, dtype)


def true(impl: Any, a: dict[str, Any], full: Callable[..., Any]) -> Any:
    """Loss and gradients of ``full(z-making arrays, xp, array)`` in float64."""
    _, xp, framework, context = tools(impl)
    with context("float64"):
        return framework.value_and_grads(
            impl, lambda given: full(given, xp, lambda values: impl.array(values, "float64")),
            {key: a[key] for key in ARGUMENTS}, "float64",
        )  # fmt: skip


def assert_close(result: Any, truth: Any, dtype: str) -> None:
    (loss, grads), (true_loss, true_grads) = result, truth
    assert np.isfinite(true_loss).all()
    assert error(loss, true_loss) <= ON_TOP_LOSS[dtype]
    for name, grad in grads.items():
        assert np.abs(true_grads[name]).max() > 0, name
        assert error(grad, true_grads[name]) <= ON_TOP_GRADIENT[dtype], name


# ---------------------------------------------------------------------------------------------------------------------
# DPO

DPO_CONSTANTS = ("target", "mask", "reference_log_prob")


def full_dpo(a: dict[str, Any], **options: Any) -> Callable[..., Any]:
    """The mean over pairs of full_losses.pairs."""
    reference = a["reference_log_prob"] if a["reference_log_prob"].ndim == 1 else a["reference_log_prob"] * counted(a)
    shape = {name: options.pop(name) for name in ("logit_scale", "softcap") if name in options}

    def loss(given: dict[str, Any], xp: Any, array: Callable[[Any], Any]) -> Any:
        z = full_losses.logits(given["hidden"], given["weight"], given["bias"], xp, **shape)
        return full_losses.pairs(z, *map(array, (onehot(a), counted(a), reference)), xp, **options).mean()

    return loss


@pytest.mark.every_value(where=in_jax)
@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.7, "label_smoothing": 0.2, "logit_scale": 0.8, "softcap": 4.0}],
    ids=["plain", "options"],
)  # fmt: skip
def test_dpo(impl: Any, options: dict[str, Any], sums: bool, dtype: str) -> None:
    a = arrays(dtype)
    if sums:
        a["reference_log_prob"] = (a["reference_log_prob"] * counted(a)).sum(1).astype(a["old_log_prob"].dtype)
    truth = true(impl, a, full_dpo(a, **options))
    a["hidden"] = poisoned(a["hidden"], a)
    if not sums:
        a["reference_log_prob"] = poisoned(a["reference_log_prob"], a)
    result = made(impl, "dpo_loss", a, DPO_CONSTANTS, dtype, **options)
    assert_close(result, truth, dtype)
    assert not result[1]["hidden"][counted(a) == 0].any()


PAIRS: dict[str, dict[str, Any]] = {
    "dpo with nll": {"nll_coef": 0.3, "margin": 0.2},
    "ipo": {"loss_type": "ipo"},
    "ipo options": {"loss_type": "ipo", "beta": 0.8, "nll_coef": 0.5, "logit_scale": 0.8, "softcap": 4.0},
    "cpo": {"loss_type": "cpo"},
    "cpo options": {"loss_type": "cpo", "beta": 0.4, "label_smoothing": 0.2, "margin": 0.3, "nll_coef": 0.0},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "margin": 0.5},
    "simpo options": {"loss_type": "simpo", "beta": 2.5, "label_smoothing": 0.1, "nll_coef": 0.2, "softcap": 4.0},
    "orpo": {"loss_type": "orpo"},
    "orpo alone": {"loss_type": "orpo", "beta": 0.5, "nll_coef": 0.0, "logit_scale": 1.2},
}


def pair_constants(options: dict[str, Any]) -> tuple[str, ...]:
    """What dpo_loss also gets: a reference where the loss has one."""
    return DPO_CONSTANTS if options.get("loss_type", "dpo") in ("dpo", "ipo") else DPO_CONSTANTS[:2]


@pytest.mark.every_value(where=in_jax)
@every_implementation
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(impl: Any, name: str, dtype: str) -> None:
    """A chosen sequence is empty; here a rejected one is, too."""
    a, options = arrays(dtype), PAIRS[name]
    a["mask"][4] = 0
    truth = true(impl, a, full_dpo(a, **options))
    for key in ("hidden", "reference_log_prob"):
        a[key] = poisoned(a[key], a)
    result = made(impl, "dpo_loss", a, pair_constants(options), dtype, **options)
    assert_close(result, truth, dtype)
    assert not result[1]["hidden"][counted(a) == 0].any()


def shifted(a: dict[str, Any], names: tuple[str, ...], nats: float) -> dict[str, Any]:
    """Known log-probabilities moved by so many nats, up in one half of the sequences and down in the other."""
    sign = np.where(np.arange(SEQUENCES) % 2, 1.0, -1.0)[:, None]
    return a | {name: (a[name] + nats * sign).astype(a[name].dtype) for name in names}


def assert_rows_close(result: Any, truth: Any, dtype: str) -> None:
    """As :func:`assert_close`, and of every token by itself: a huge one must not hide the others."""
    (loss, grads), (true_loss, true_grads) = result, truth
    assert error(loss, true_loss) <= max(CHAIN, ON_TOP_LOSS[dtype])
    largest = ON_TOP_GRADIENT[dtype] * TINY[dtype] * np.abs(true_grads["hidden"]).max()
    for row, true_row in zip(grads["hidden"].reshape(-1, D), true_grads["hidden"].reshape(-1, D), strict=True):
        assert np.linalg.norm(row - true_row) <= CANCELLED * np.linalg.norm(true_row) + largest
    for name, grad in grads.items():
        assert error(grad, true_grads[name]) <= max(CHAIN, ON_TOP_GRADIENT[dtype]), name


@in_its_own_dtype
@pytest.mark.parametrize("beta", [1e-15, 0.1, 1e15])
@pytest.mark.parametrize("loss_type", ["dpo", "ipo", "cpo", "simpo", "orpo"])
def test_pairs_at_the_ends_of_beta_and_of_log_ratios(impl: Any, loss_type: str, beta: float) -> None:
    a = shifted(arrays("float32"), ("reference_log_prob",), 100.0)
    dtype, options = impl.takes("float32"), {"loss_type": loss_type, "beta": beta, "nll_coef": 0.0}
    truth = true(impl, a, full_dpo(a, **options))
    result = made(impl, "dpo_loss", a, pair_constants(options), dtype, **options)
    assert np.isfinite(result[0])
    assert_rows_close(result, truth, dtype)


@in_its_own_dtype
def test_orpo_of_sequences_that_are_certain(impl: Any) -> None:
    """A mean log p of -1e-7 leaves 1 - p only by expm1; at 0 the odds are cut off, and the gradient is."""
    a = arrays("float32")
    a["mask"][:], a["target"][:] = 1, 0
    a["hidden"][:], a["weight"][:] = 0.0, 0.0
    a["hidden"][..., 0], a["weight"][0, 0] = 1.0, 1.0
    dtype, options = impl.takes("float32"), {"loss_type": "orpo", "nll_coef": 0.0, "beta": 1.0}
    for nats in (20.0, 15.0, 200.0):  # above the others' log-sum
        a["bias"] = np.where(np.arange(V) == 0, nats - 1.0 + np.log(V - 1), 0.0).astype(np.float32)
        a["hidden"][3:, :, 0] = 1.0 - 2.0 if nats < 100 else 1.0
        loss, grads = made(impl, "dpo_loss", a, DPO_CONSTANTS[:2], dtype, **options)
        assert np.isfinite(loss)
        assert all(np.isfinite(grad).all() for grad in grads.values())
        if nats < 100:
            truth = true(impl, a, full_dpo(a, **options))
            assert error(loss, truth[0]) <= CHAIN
            assert error(grads["hidden"], truth[1]["hidden"]) <= CHAIN
        else:
            assert error(loss, np.log(2.0)) <= CHAIN
            assert not any(grad.any() for grad in grads.values())


@in_its_own_dtype
def test_dpo_statistics_and_reductions(impl: Any) -> None:
    a = arrays(impl.dtype)
    package = tools(impl)[0]
    floats = [impl.array(a[name], impl.dtype) for name in ("hidden", "weight")]
    given = [*floats, impl.array(a["target"]), impl.array(a["bias"], impl.dtype)]
    known = {"reference_log_prob": impl.array(a["reference_log_prob"]), "mask": impl.array(a["mask"]), "beta": 0.3}
    losses, stats = package.dpo_loss(*given, **known, reduction="none", return_stats=True, backend=impl.backend)
    log_prob, _ = package.linear_log_probs(
        *given[:2], impl.array(np.where(counted(a) > 0, a["target"], -100)), given[3]
    )
    sums = impl.numpy(log_prob).sum(1)
    rewards = 0.3 * (sums - (a["reference_log_prob"] * counted(a)).sum(1))
    for values, expected in zip(stats, (sums[:3], sums[3:], rewards[:3], rewards[3:]), strict=True):
        assert error(impl.numpy(values), expected) <= TINY["float32"]
    losses = impl.numpy(losses)
    assert losses.shape == (3,)
    assert error(losses, np.log1p(np.exp(rewards[3:] - rewards[:3]))) <= TINY["float32"]
    for reduction, expected in (("sum", losses.sum()), ("mean", losses.mean())):
        value = package.dpo_loss(*given, **known, reduction=reduction, backend=impl.backend)
        assert error(impl.numpy(value), expected) <= TINY["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# KTO

KTO_CONSTANTS = ("target", "mask", "reference_log_prob", "desirable")


def full_kto(a: dict[str, Any], kl: Any, reduction: str = "mean", **options: Any) -> Callable[..., Any]:
    reference = a["reference_log_prob"] if a["reference_log_prob"].ndim == 1 else a["reference_log_prob"] * counted(a)
    shape = {name: options.pop(name) for name in ("logit_scale", "softcap") if name in options}

    def loss(given: dict[str, Any], xp: Any, array: Callable[[Any], Any]) -> Any:
        z = full_losses.logits(given["hidden"], given["weight"], given["bias"], xp, **shape)
        known = map(array, (onehot(a), counted(a), reference, np.asarray(a["desirable"] != 0, float), np.asarray(kl)))
        losses = full_losses.kto(z, *known, xp, **options)
        return losses.sum() if reduction == "sum" else losses.mean()

    return loss


@pytest.mark.every_value(where=in_jax)
@every_implementation
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"kl": 0.0}, {"kl": 0.3, "beta": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.6, "softcap": 4.0},
     {"kl": 1.5, "reduction": "sum", "logit_scale": 0.8}],
    ids=["plain", "options", "sum"],
)  # fmt: skip
def test_kto(impl: Any, options: dict[str, Any], sums: bool, dtype: str) -> None:
    a = arrays(dtype)
    if sums:
        a["reference_log_prob"] = (a["reference_log_prob"] * counted(a)).sum(1).astype(a["old_log_prob"].dtype)
        a["desirable"] = a["desirable"].astype(bool)
    truth = true(impl, a, full_kto(a, **options))
    a["hidden"] = poisoned(a["hidden"], a)
    if not sums:
        a["reference_log_prob"] = poisoned(a["reference_log_prob"], a)
    result = made(impl, "kto_loss", a, KTO_CONSTANTS, dtype, **options)
    assert_close(result, truth, dtype)
    assert not result[1]["hidden"][counted(a) == 0].any()


@in_its_own_dtype
@pytest.mark.parametrize("beta", [1e-15, 0.1, 1e15])
def test_kto_at_the_ends_of_beta_and_of_log_ratios(impl: Any, beta: float) -> None:
    a, dtype = arrays("float32"), impl.takes("float32")
    for nats in (0.0, 100.0):
        moved = shifted(a, ("reference_log_prob",), nats)
        result = made(impl, "kto_loss", moved, KTO_CONSTANTS, dtype, beta=beta, kl=0.0)
        truth = true(impl, moved, full_kto(moved, 0.0, beta=beta))
        assert error(result[0], truth[0]) <= ON_TOP_LOSS[dtype]
        for name in ARGUMENTS:
            smallest = np.finfo(np.float32).tiny
            assert np.abs(result[1][name] - truth[1][name]).max() <= max(
                ON_TOP_GRADIENT[dtype] * np.abs(truth[1][name]).max(), smallest
            ), name


@in_its_own_dtype
def test_kto_statistics_reductions_and_kl(impl: Any) -> None:
    a, (package, _, _, _) = arrays(impl.dtype), tools(impl)
    given = {key: impl.array(a[key], impl.dtype) for key in ARGUMENTS} | {"backend": impl.backend, "beta": 0.3}
    given |= {key: impl.array(a[key]) for key in KTO_CONSTANTS}
    losses, stats = package.kto_loss(**given, kl=0.4, reduction="none", return_stats=True)
    log_prob, _ = package.linear_log_probs(
        given["hidden"], given["weight"], impl.array(np.where(counted(a) > 0, a["target"], -100)), given["bias"]
    )
    sums = impl.numpy(log_prob).sum(1)
    score = sums - (a["reference_log_prob"] * counted(a)).sum(1)
    assert error(impl.numpy(stats.log_prob), sums) <= TINY["float32"]
    assert error(impl.numpy(stats.reward), 0.3 * score) <= TINY["float32"]
    sign = np.where(a["desirable"], 1.0, -1.0)
    expected = 1 / (1 + np.exp(0.3 * sign * (score - 0.4)))
    assert error(impl.numpy(losses), expected) <= CHAIN
    for kl in (np.float32(0.4), np.full(SEQUENCES, 0.4, np.float32)):
        assert error(impl.numpy(package.kto_loss(**given, kl=impl.array(kl))), expected.mean()) <= CHAIN
    below = impl.numpy(package.kto_loss(**given, kl=-0.4))
    assert below == impl.numpy(package.kto_loss(**given, kl=0.0))


# ---------------------------------------------------------------------------------------------------------------------
# Policies

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"aggregation": "sequence_mean", "clip_high": 0.28},
    "everything": {"entropy_coef": 0.05, "kl_coef": 0.1, "clip_low": 0.3, "logit_scale": 1.5, "softcap": 5.0},
    "kl": {"kl_coef": 0.04, "aggregation": "sequence_mean"},
}
MORE_POLICIES: dict[str, dict[str, Any]] = {
    "dual clip": {"dual_clip": 1.5},
    "dual clip within": {"dual_clip": 1.1, "clip_high": 0.3, "aggregation": "sequence_mean"},
    "cispo": {"objective": "cispo", "clip_high": 0.28},
    "cispo without a lower bound": {"objective": "cispo", "clip_low": 1.0, "clip_high": 3.0, "kl_coef": 0.1},
    "gspo": {"ratio": "sequence", "clip_low": 0.3, "clip_high": 0.4, "aggregation": "sequence_mean"},
    "gspo cispo": {"ratio": "sequence", "objective": "cispo", "entropy_coef": 0.1},
    "gspo kl": {"ratio": "sequence", "kl_coef": 0.3, "kl_times_ratio": True, "dual_clip": 1.2},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1"},
    "k1 ratio": {"kl_coef": 0.1, "kl_estimator": "k1", "kl_times_ratio": True, "clip_low": 0.5},
    "k2": {"kl_coef": 0.1, "kl_estimator": "k2", "softcap": 5.0},
    "k2 ratio": {"kl_coef": 0.1, "kl_estimator": "k2", "kl_times_ratio": True},
    "k3 ratio": {"kl_coef": 0.1, "kl_times_ratio": True, "objective": "cispo"},
    "sampler": {"sampler_correction": "token_truncate", "sampler_limit": 1.2, "entropy_coef": 0.1, "kl_coef": 0.1},
    "sampler mask": {"sampler_correction": "token_mask", "sampler_limit": 1.5},
    "sampler sequences": {"sampler_correction": "sequence_truncate", "sampler_limit": 1.3, "ratio": "sequence"},
    "sampler mask sequences": {"sampler_correction": "sequence_mask", "sampler_limit": 3.0, "objective": "cispo"},
}


def full_policy(a: dict[str, Any], **options: Any) -> Callable[..., Any]:
    shape = {name: options.pop(name) for name in ("logit_scale", "softcap") if name in options}
    names = ("advantage", "old_log_prob", "reference_log_prob", "sampler_log_prob")

    def loss(given: dict[str, Any], xp: Any, array: Callable[[Any], Any]) -> Any:
        z = full_losses.logits(given["hidden"], given["weight"], given["bias"], xp, **shape)
        known = map(array, (onehot(a), counted(a), *(a[name] for name in names)))
        return full_losses.clipped_policy(z, *known, xp, **options)

    return loss


def policy_constants(options: dict[str, Any]) -> tuple[str, ...]:
    reference = ("reference_log_prob",) if options.get("kl_coef") else ()
    sampler = ("sampler_log_prob",) if "sampler_correction" in options else ()
    return ("target", "mask", "old_log_prob", "advantage", *reference, *sampler)


def held_policy(impl: Any, options: dict[str, Any], per_sequence: bool, dtype: str) -> None:
    a = arrays(dtype)
    if per_sequence:
        first = a["advantage"][:, 0]
        a["advantage"] = np.where(first > 0, 2 * first, first)  # so that the sequences do not cancel
    truth, constants = true(impl, a, full_policy(a, **options)), policy_constants(options)
    for key in ("hidden", *constants[2:]):
        a[key] = a[key] if a[key].ndim == 1 else poisoned(a[key], a)
    result = made(impl, "clipped_policy_loss", a, constants, dtype, **options)
    assert_close(result, truth, dtype)
    assert not result[1]["hidden"][counted(a) == 0].any()


@pytest.mark.every_value(where=in_jax)
@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_clipped_policy(impl: Any, name: str, per_sequence: bool, dtype: str) -> None:
    held_policy(impl, POLICIES[name], per_sequence, dtype)


@pytest.mark.every_value(where=in_jax)
@every_implementation
@pytest.mark.parametrize(("dtype", "per_sequence"), [("float64", False), ("bfloat16", True)])
@pytest.mark.parametrize("name", MORE_POLICIES)
def test_more_policies(impl: Any, name: str, per_sequence: bool, dtype: str) -> None:
    held_policy(impl, MORE_POLICIES[name], per_sequence, dtype)


@pytest.mark.late(where=lambda p: in_jax(p) and p["name"] in MORE_POLICIES)
@in_its_own_dtype
@pytest.mark.parametrize("name", [*POLICIES, *MORE_POLICIES])
def test_policies_of_ratios_of_100_nats(impl: Any, name: str) -> None:
    options, dtype = POLICIES.get(name) or MORE_POLICIES.get(name, {}), impl.takes("float32")
    for names in (("old_log_prob",), ("reference_log_prob",), ("sampler_log_prob",)):
        a = shifted(arrays("float32"), names, 100.0)
        truth = true(impl, a, full_policy(a, **options))
        result = made(impl, "clipped_policy_loss", a, policy_constants(options), dtype, **options)
        assert_rows_close(result, truth, dtype)


@in_its_own_dtype
def test_the_gradient_of_a_sequence_ratio_is_its_own_with_one_advantage(impl: Any) -> None:
    """Of min(s A, clip(s) A) itself, without the detour of GSPO-token."""
    a, dtype = arrays("float32"), impl.takes("float32")
    a["advantage"] = a["advantage"][:, 0] + np.float32(2.0)  # few cancel in the loss

    def full(given: dict[str, Any], xp: Any, array: Callable[[Any], Any]) -> Any:
        z = full_losses.logits(given["hidden"], given["weight"], given["bias"], xp)
        mask, advantage, old = map(array, (counted(a), a["advantage"], a["old_log_prob"]))
        number = xp.clip(mask.sum(-1), 1, None)
        s = xp.exp(((full_losses.log_probs(z, array(onehot(a)), xp) - old) * mask).sum(-1) / number)
        gain = xp.minimum(s * advantage, xp.clip(s, 0.7, 1.4) * advantage)
        return -(gain * (mask.sum(-1) > 0)).sum() / (mask.sum(-1) > 0).sum()

    result = made(
        impl, "clipped_policy_loss", a, policy_constants({}), dtype, ratio="sequence", clip_low=0.3, clip_high=0.4,
        aggregation="sequence_mean",
    )  # fmt: skip
    assert_close(result, true(impl, a, full), dtype)


@in_its_own_dtype
def test_more_policy_statistics(impl: Any) -> None:
    """Where a bound was taken, the sampler's weights, and an entropy that has no gradient, beside the same loss."""
    a, (package, _, _, _) = arrays(impl.dtype), tools(impl)
    ones, given = counted(a) > 0, {key: impl.array(a[key], impl.dtype) for key in ARGUMENTS}
    constants = policy_constants({"sampler_correction": "token_mask"})
    given |= {key: impl.array(a[key]) for key in constants} | {"backend": impl.backend}
    log_prob, entropy = package.linear_log_probs(
        *(given[key] for key in ("hidden", "weight")), impl.array(np.where(ones, a["target"], -100)), given["bias"],
        with_entropy=True,
    )  # fmt: skip
    ratio = np.exp((impl.numpy(log_prob) - a["old_log_prob"]) * ones)

    def stats(**options: Any) -> Any:
        return package.clipped_policy_loss(**given, return_stats=True, **options)[1]

    seen = stats(dual_clip=1.5, with_entropy=True, sampler_correction="token_mask", sampler_limit=1.4)
    assert error(impl.numpy(seen.entropy), impl.numpy(entropy)) <= TINY["float32"]
    weight = np.exp((a["old_log_prob"] - a["sampler_log_prob"]) * ones)
    assert error(impl.numpy(seen.sampler_weight), weight * (weight <= 1.4) * ones) <= TINY["float32"]
    low, high = (ratio < 0.8) & (a["advantage"] < 0), (ratio > 1.2) & (a["advantage"] > 0)
    beyond = (ratio > 1.5) & (a["advantage"] < 0)
    assert beyond[ones].any()
    assert np.array_equal(impl.numpy(seen.clipped), (low | high | beyond) & ones)
    assert np.array_equal(impl.numpy(stats(objective="cispo").clipped), ((ratio < 0.8) | (ratio > 1.2)) & ones)
    mean = np.exp((np.log(ratio) * ones).sum(1) / np.maximum(ones.sum(1), 1))
    assert error(impl.numpy(stats(ratio="sequence").ratio), mean[:, None] * ones) <= CHAIN
    result = made(impl, "clipped_policy_loss", a, constants, impl.dtype)
    assert result[0] == impl.numpy(package.clipped_policy_loss(**given, with_entropy=True))
    with_kl = package.clipped_policy_loss(
        **given, kl_coef=0.1, kl_estimator="k1", kl_times_ratio=True, return_stats=True,
        reference_log_prob=impl.array(a["reference_log_prob"]),
    )[1]  # fmt: skip
    expected = (impl.numpy(log_prob) - a["reference_log_prob"]) * ones
    assert error(impl.numpy(with_kl.kl), expected) <= TINY["float32"]


@in_its_own_dtype
def test_policy_on_its_own_samples_and_statistics(impl: Any) -> None:
    """Without old_log_prob the ratio is 1 and the gradient that of −A log p."""
    a, (package, _, _, _) = arrays(impl.dtype), tools(impl)
    log_prob, entropy = package.linear_log_probs(
        *(impl.array(a[n], impl.dtype) for n in ("hidden", "weight")),
        impl.array(np.where(counted(a) > 0, a["target"], -100)), impl.array(a["bias"], impl.dtype), with_entropy=True,
    )  # fmt: skip
    constants = ("target", "mask", "advantage")
    own = made(impl, "clipped_policy_loss", a, constants, impl.dtype, clip_low=0.0, clip_high=0.0)
    a["old_log_prob"] = impl.numpy(log_prob).astype(np.float32)
    upstream = -a["advantage"] * counted(a) / counted(a).sum()
    expected = impl.run_log_probs(
        a["hidden"], a["weight"], np.where(counted(a) > 0, a["target"], -100), a["bias"], log_prob_upstream=upstream
    )
    assert error(own[0], (upstream * 1.0).sum()) <= TINY["float32"]
    for name in ARGUMENTS:
        assert error(own[1][name], expected.grads[name]) <= 2 * GRADIENT[impl.dtype], name
    a["old_log_prob"] = a["old_log_prob"] - np.where(np.arange(T) % 2, 0.5, 0.1).astype(np.float32)
    given = {key: impl.array(a[key]) for key in ("target", "mask", "advantage", "old_log_prob", "reference_log_prob")}
    given |= {key: impl.array(a[key], impl.dtype) for key in ARGUMENTS}
    _, stats = package.clipped_policy_loss(
        **given, kl_coef=0.1, entropy_coef=0.1, return_stats=True, backend=impl.backend
    )  # fmt: skip
    stats = type(stats)(*map(impl.numpy, stats))
    ones = counted(a)
    ratio = np.broadcast_to(np.exp(np.where(np.arange(T) % 2, 0.5, 0.1)), ones.shape)
    d = (a["reference_log_prob"] - impl.numpy(log_prob)) * ones
    assert error(stats.log_prob, impl.numpy(log_prob)) <= TINY["float32"]
    assert error(stats.ratio, ratio * ones) <= TINY["float32"]
    assert error(stats.entropy, impl.numpy(entropy)) <= TINY["float32"]
    assert error(stats.kl, np.exp(d) - d - 1) <= CHAIN
    assert np.array_equal(stats.clipped, (ratio > 1.2) & (a["advantage"] > 0) & (ones > 0))
    assert 0 < stats.clipped.sum() < ones.sum()


@in_its_own_dtype
def test_policy_ratios_out_of_any_range_stay_finite(impl: Any) -> None:
    a = arrays(impl.dtype)
    a["old_log_prob"][:] = -500.0
    a["old_log_prob"][1::2] = 500.0
    a["reference_log_prob"][:] = 400.0
    constants = ("target", "mask", "old_log_prob", "advantage", "reference_log_prob")
    loss, grads = made(impl, "clipped_policy_loss", a, constants, impl.dtype, kl_coef=0.1)
    assert np.isfinite(loss)
    for name in ARGUMENTS:
        assert np.isfinite(grads[name]).all(), name


@in_its_own_dtype
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_policy_normalizer_joins_micro_batches(impl: Any, aggregation: str) -> None:
    a = arrays(impl.dtype)
    ones = counted(a)
    total = float(ones.sum() if aggregation == "token_mean" else (ones.sum(1) > 0).sum())
    constants = ("target", "mask", "old_log_prob", "advantage")
    whole = made(impl, "clipped_policy_loss", a, constants, impl.dtype, aggregation=aggregation)
    per_sequence = {key for key in a if key not in ("weight", "bias") and not key.startswith("teacher")}
    parts = [
        made(impl, "clipped_policy_loss", {k: v[rows] if k in per_sequence else v for k, v in a.items()}, constants,
             impl.dtype, aggregation=aggregation, normalizer=total)
        for rows in (slice(0, 2), slice(2, 6))
    ]  # fmt: skip
    assert error(parts[0][0] + parts[1][0], whole[0]) <= TINY["float32"]
    assert error(parts[0][1]["weight"] + parts[1][1]["weight"], whole[1]["weight"]) <= GRADIENT[impl.dtype]


# ---------------------------------------------------------------------------------------------------------------------
# Distillation

DISTILLATION_CONSTANTS = ("mask", "teacher_hidden", "teacher_weight", "teacher_bias")
# In make test; eager PyTorch runs them all.
DISTILLED_IN_XLA = (("plain", 0.0), ("plain", 1.0), ("options", 0.3))
DISTILLATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {
        "temperature": 1.7, "logit_scale": 0.8, "softcap": 4.0, "teacher_logit_scale": 1.3, "teacher_softcap": 6.0,
    },
}  # fmt: skip


def full_distillation(
    a: dict[str, Any], beta: float, reduce: Callable[[Any, Any], Any], temperature: float = 1.0, **options: Any
) -> Callable[..., Any]:
    own = {key: value for key, value in options.items() if not key.startswith("teacher")}
    others = {key.removeprefix("teacher_"): value for key, value in options.items() if key.startswith("teacher")}

    def loss(given: dict[str, Any], xp: Any, array: Callable[[Any], Any]) -> Any:
        z = full_losses.logits(given["hidden"], given["weight"], given["bias"], xp, **own)
        teacher = (array(a[f"teacher_{name}"]) for name in ARGUMENTS)
        teacher_z = full_losses.logits(*teacher, xp, **others)
        return reduce(full_losses.divergence(z, teacher_z, xp, beta, temperature), array(a["mask"].astype(float)))

    return loss


@pytest.mark.late(where=lambda p: in_jax(p) and p["run"] not in DISTILLED_IN_XLA)
@pytest.mark.every_value(where=in_jax)
@DISTILLING
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("run", "dtype"), in_turn(itertools.product(DISTILLATIONS, [0.0, 0.3, 1.0]), DTYPES, always=["float32"])
)
def test_distillation(
    impl: Any, run: tuple[str, float], dtype: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against full logits, on rows and tiles that cut tokens and vocabulary raggedly."""
    name, beta = run
    cut_raggedly(monkeypatch, order, SEQUENCES * T, V)
    a, options = arrays(dtype), DISTILLATIONS[name]
    truth = true(impl, a, full_distillation(a, beta, lambda d, m: (d * m).sum() / m.sum(), **options))
    a["hidden"][a["mask"] == 0] = np.nan
    a["teacher_hidden"][a["mask"] == 0] = np.nan
    result = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, dtype, beta=beta, **options)
    assert_close(result, truth, dtype)
    assert not result[1]["hidden"][a["mask"] == 0].any()


@IN_EITHER_ORDER
@DISTILLING_DTYPES
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_from_itself_is_zero(impl: Any, beta: float, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_order(monkeypatch, order)
    a = arrays(impl.dtype)
    for name in ARGUMENTS:
        a[f"teacher_{name}"] = a[name]
    loss, grads = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, impl.dtype, beta=beta)
    assert abs(loss) <= BOUND["zero divergence, absolute"]
    assert max(np.abs(grad).max() for grad in grads.values()) <= BOUND["zero divergence, absolute"]


@DISTILLING_DTYPES
@pytest.mark.parametrize("wrt", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_distillation_subsets_of_gradients(impl: Any, wrt: tuple[str, ...]) -> None:
    a = arrays(impl.dtype)
    options = {"beta": 0.4, "reduction": "sum"}
    _, every = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, impl.dtype, **options)
    _, some = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, impl.dtype, wrt=wrt, **options)
    assert set(some) == set(wrt)
    for name in wrt:
        assert error(some[name], every[name]) <= GRADIENT[impl.dtype]


@IN_EITHER_ORDER
@DISTILLING_DTYPES
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_distillation_with_an_upstream_gradient_per_token(
    impl: Any, beta: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all signs and sizes, in ragged rows and tiles."""
    cut_raggedly(monkeypatch, order, SEQUENCES * T, V)
    a = arrays(impl.dtype)
    upstream = np.random.default_rng(7).standard_normal((SEQUENCES, T)) * 10.0 ** -np.arange(T)
    truth = true(impl, a, full_distillation(a, beta, lambda d, m: (d * m * impl.array(upstream, "float64")).sum()))
    package, _, framework, context = tools(impl)
    with context(impl.dtype):
        known = {key: impl.array(a[key], impl.dtype) for key in DISTILLATION_CONSTANTS if key.startswith("teacher")}
        known |= {"mask": impl.array(a["mask"]), "beta": beta, "reduction": "none", "backend": impl.backend}
        weights = impl.array(upstream, "float64" if impl.dtype == "float64" else "float32")
        result = framework.value_and_grads(
            impl, lambda given: (package.distillation_loss(**given, **known) * weights).sum(),
            {key: a[key] for key in ARGUMENTS}, impl.dtype,
        )  # fmt: skip
    assert_close(result, truth, impl.dtype)


@DISTILLING_DTYPES
def test_distillation_reductions_and_normalizer(impl: Any) -> None:
    a = arrays(impl.dtype)
    truth = true(impl, a, full_distillation(a, 0.0, lambda d, m: (d * m).sum()))
    for options, factor in (({"reduction": "sum"}, 1.0), ({"normalizer": 7.0}, 1 / 7.0)):
        loss, grads = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, impl.dtype, **options)
        assert error(loss, truth[0] * factor) <= TINY["float32"]
        assert error(grads["weight"], truth[1]["weight"] * factor) <= 2 * GRADIENT[impl.dtype]
    package, _, _, context = tools(impl)
    with context(impl.dtype):
        given = {name: impl.array(a[name], impl.dtype) for name in (*ARGUMENTS, *DISTILLATION_CONSTANTS[1:])}
        losses = package.distillation_loss(**given, mask=impl.array(a["mask"]), reduction="none", backend=impl.backend)
        losses = impl.numpy(losses)
    assert losses.shape == (SEQUENCES, T)
    assert not losses[a["mask"] == 0].any()
    assert (losses[a["mask"] != 0] > 0).all()
    assert error(losses.sum(), truth[0]) <= TINY["float32"]


@IN_EITHER_ORDER
@DISTILLING_DTYPES
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_with_ids_that_neither_side_has(
    impl: Any, beta: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of −inf takes an id out of a vocabulary. Out of both, it is as if it did not exist."""
    take_order(monkeypatch, order)
    a = arrays(impl.dtype)
    gone = np.isin(np.arange(V), [0, 31, V - 2, V - 1])
    few = {name: values[~gone] if name.endswith(("weight", "bias")) else values for name, values in a.items()}
    a["bias"][gone] = a["teacher_bias"][gone] = -np.inf
    expected = made(impl, "distillation_loss", few, DISTILLATION_CONSTANTS, impl.dtype, beta=beta)
    result = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, impl.dtype, beta=beta)
    assert np.isfinite(expected[0])
    assert error(result[0], expected[0]) <= TINY["float32"]
    assert error(result[1]["hidden"], expected[1]["hidden"]) <= GRADIENT[impl.dtype]
    assert error(result[1]["weight"][~gone], expected[1]["weight"]) <= GRADIENT[impl.dtype]
    assert not result[1]["weight"][gone].any()


@IN_EITHER_ORDER
@pytest.mark.case(11)
@DISTILLING
@pytest.mark.parametrize("shift", [-1024.0, 1024.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_of_shifted_logits_near_the_teachers(
    impl: Any, beta: float, shift: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits near ±1000 and a divergence near 1e-4: neither loss nor gradient loses it to the rounding of lse.

    All numbers are multiples of 1/64, so that float32 holds every logit exactly. Rows that do not count have the bias
    alone as logits, whose exponentials overflow.
    """
    take_order(monkeypatch, order)
    a = arrays()
    for name in ("hidden", "weight"):
        a[name] = np.round(a[name] * 8) / 8
        a[f"teacher_{name}"] = a[name]
    a["bias"] = np.round(a["bias"] * 64) / 64
    a["teacher_bias"] = a["bias"] + np.random.default_rng(3).integers(-1, 2, V).astype(np.float32) / 64
    truth = true(impl, a, full_distillation(a, beta, lambda d, m: (d * m).sum() / m.sum()))
    assert 1e-3 > truth[0] > 1e-5
    a["bias"] = a["bias"] + np.float32(shift)
    loss, grads = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, "float32", beta=beta)
    assert error(loss, truth[0]) <= CANCELLED
    for name in ARGUMENTS:
        assert error(grads[name], truth[1][name]) <= CANCELLED, name


@every_implementation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_distillation_small_factors_survive(impl: Any, dtype: str) -> None:
    """A mean over many tokens makes row factors that float16 cannot hold; they must stay out of its operands.

    Large hidden states (and a small weight) bring the weight's gradient itself back into range.
    """
    a = arrays(dtype)
    a["hidden"], a["weight"] = a["hidden"] * np.float32(2**10), round_to(a["weight"] * np.float32(2**-10), dtype)
    truth = true(impl, a, full_distillation(a, 0.0, lambda d, m: (d * m).sum() / 2.0**16))
    grads = made(impl, "distillation_loss", a, DISTILLATION_CONSTANTS, dtype, normalizer=2.0**16, wrt=("weight",))[1]
    assert error(grads["weight"], truth[1]["weight"]) <= ON_TOP_GRADIENT[dtype]


# ---------------------------------------------------------------------------------------------------------------------
# Nothing to count, bad input

LOSSES: dict[str, tuple[str, ...]] = {
    "dpo_loss": DPO_CONSTANTS,
    "kto_loss": KTO_CONSTANTS,
    "clipped_policy_loss": ("target", "mask", "old_log_prob", "advantage"),
    "distillation_loss": DISTILLATION_CONSTANTS,
}


NEEDED: dict[str, dict[str, Any]] = {"kto_loss": {"kl": 0.0}}
WITHOUT_TOKENS: list[tuple[str, dict[str, Any]]] = [
    *((name, NEEDED.get(name, {})) for name in LOSSES),
    *(("dpo_loss", {"loss_type": loss_type}) for loss_type in ("ipo", "cpo", "simpo", "orpo")),
    ("clipped_policy_loss", {"ratio": "sequence", "dual_clip": 2.0}),
    ("clipped_policy_loss", {"objective": "cispo", "aggregation": "sequence_mean", "ratio": "sequence"}),
]


@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(7)
@in_its_own_dtype
@pytest.mark.parametrize(("name", "options"), WITHOUT_TOKENS, ids=[f"{n}-{o}" for n, o in WITHOUT_TOKENS])
@pytest.mark.parametrize("empty", [False, True])
def test_no_token_counts(impl: Any, name: str, options: dict[str, Any], empty: bool) -> None:
    a = arrays(impl.dtype)
    a["mask"][:] = 0
    if empty:
        none = {key for key in a if key not in ("weight", "bias", "teacher_weight", "teacher_bias")}
        a = {key: values[:0] if key in none else values for key, values in a.items()}
    constants = pair_constants(options) if name == "dpo_loss" else LOSSES[name]
    loss, grads = made(impl, name, a, constants, impl.dtype, **options)
    if name not in ("dpo_loss", "kto_loss") or empty:
        assert loss == 0
    assert np.isfinite(loss)
    for argument in ARGUMENTS:
        assert not grads[argument].any(), argument


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("dpo_loss", {"beta": 0.0}, r"beta: got 0.0, allowed is a finite number in \[1e-15, 1e\+15\]"),
    ("dpo_loss", {"label_smoothing": 0.6}, r"label_smoothing: got 0.6, allowed .* \[0, 0.5\]"),
    ("dpo_loss", {"reduction": "batch"}, "reduction: got 'batch', allowed are 'mean', 'sum', 'none'"),
    ("dpo_loss", {"mask": np.ones((SEQUENCES, T - 1))}, r"mask: got shape \(6, 8\), allowed is .* \(6, 9\)"),
    ("dpo_loss", {"reference_log_prob": np.zeros(3, np.float32)}, r"reference_log_prob: got shape \(3,\), allowed is"),
    (
        "dpo_loss",
        {"loss_type": "sigmoid"},
        "loss_type: got 'sigmoid', allowed are 'dpo', 'ipo', 'cpo', 'simpo', 'orpo'",
    ),
    ("dpo_loss", {"loss_type": "cpo"}, "reference_log_prob: got an array beside loss_type='cpo', allowed is None"),
    (
        "dpo_loss",
        {"loss_type": "ipo", "label_smoothing": 0.1},
        "label_smoothing: got 0.1 beside loss_type='ipo', allow",
    ),
    ("dpo_loss", {"loss_type": "ipo", "margin": 0.1}, "margin: got 0.1 beside loss_type='ipo', allowed is 0"),
    ("dpo_loss", {"margin": -0.1}, r"margin: got -0.1, allowed is a finite number in \[0, inf\)"),
    ("dpo_loss", {"nll_coef": -1.0}, "nll_coef: got -1.0, allowed is"),
    ("kto_loss", {"beta": 1e16}, "beta: got 1e.16, allowed"),
    ("kto_loss", {"undesirable_weight": -1.0}, "undesirable_weight: got -1.0, allowed"),
    ("kto_loss", {"kl": float("nan")}, "kl: got nan, allowed"),
    ("kto_loss", {"desirable": np.ones(3)}, r"desirable: got shape \(3,\), allowed is one per sequence \[B\] = \(6,\)"),
    ("kto_loss", {"reference_log_prob": np.zeros(3, np.float32)}, r"reference_log_prob: got shape \(3,\), allowed is"),
    ("clipped_policy_loss", {"objective": "ppo"}, "objective: got 'ppo', allowed are 'clip', 'cispo'"),
    ("clipped_policy_loss", {"ratio": "batch"}, "ratio: got 'batch', allowed are 'token', 'sequence'"),
    ("clipped_policy_loss", {"dual_clip": 1.0}, r"dual_clip: got 1.0, allowed is a finite number in \(1, inf\)"),
    (
        "clipped_policy_loss",
        {"dual_clip": 2.0, "objective": "cispo"},
        "dual_clip: got 2.0 beside objective='cispo', all",
    ),
    ("clipped_policy_loss", {"kl_estimator": "k4"}, "kl_estimator: got 'k4', allowed are 'k1', 'k2', 'k3'"),
    ("clipped_policy_loss", {"sampler_correction": "mask"}, "sampler_correction: got 'mask', allowed are 'token_trunc"),
    ("clipped_policy_loss", {"sampler_limit": 0.0}, "sampler_limit: got 0.0, allowed"),
    ("clipped_policy_loss", {"clip_low": 1.5}, r"clip_low: got 1.5, allowed is a finite number in \[0, 1\]"),
    ("clipped_policy_loss", {"aggregation": "mean"}, "aggregation: got 'mean', allowed are 'token_mean', 'seq"),
    ("clipped_policy_loss", {"kl_coef": 0.1}, "reference_log_prob: got None beside kl_coef=0.1"),
    (
        "clipped_policy_loss",
        {"reference_log_prob": np.zeros((SEQUENCES, T), np.float32)},
        "kl_coef: got 0 beside a reference_log_prob",
    ),
    (
        "clipped_policy_loss",
        {"advantage": np.zeros(T, np.float32)},
        r"advantage: got shape \(9,\), allowed is target's",
    ),
    ("clipped_policy_loss", {"normalizer": 0.0}, "normalizer: got 0"),
    ("distillation_loss", {"beta": 1.1}, r"beta: got 1.1, allowed is a finite number in \[0, 1\]"),
    ("distillation_loss", {"temperature": 0.0}, "temperature: got 0.0"),
    ("distillation_loss", {"teacher_softcap": -1.0}, "teacher_softcap: got -1.0"),
    ("distillation_loss", {"memory_budget": 1000}, "memory_budget: got 1000 bytes, allowed for"),
    ("distillation_loss", {"normalizer": 2.0, "reduction": "sum"}, "normalizer: got a value beside reduction='sum'"),
    ("distillation_loss", {"teacher_weight": np.zeros((V + 2, D_TEACHER))}, "teacher_weight: got V = 72, .* slice"),
    ("distillation_loss", {"teacher_hidden": np.zeros((SEQUENCES, 2, D_TEACHER))}, "teacher_hidden: got leading axes"),
    ("distillation_loss", {"teacher_bias": np.zeros(3)}, r"teacher_bias: got shape \(3,\)"),
    ("distillation_loss", {"teacher_hidden": np.zeros((SEQUENCES, T, 3))}, "teacher_hidden: got last axis 3"),
]


@in_its_own_dtype
@pytest.mark.parametrize(("name", "changes", "words"), BAD, ids=[f"{n}-{next(iter(c))}" for n, c, _ in BAD])
def test_bad_arguments(impl: Any, name: str, changes: dict[str, Any], words: str) -> None:
    a = arrays(impl.dtype) | {key: value for key, value in changes.items() if isinstance(value, np.ndarray)}
    options = {key: value for key, value in changes.items() if not isinstance(value, np.ndarray)}
    constants = dict.fromkeys((*LOSSES[name], *(key for key in changes if key not in options)))
    with pytest.raises(ValueError, match=words):
        made(impl, name, a, constants, impl.dtype, **(NEEDED.get(name, {}) | options))


@in_its_own_dtype
def test_bad_types_and_pairs(impl: Any) -> None:
    a, (package, _, _, _) = arrays(impl.dtype), tools(impl)
    target = impl.array(np.where(counted(a) > 0, a["target"], -100))
    given = {key: impl.array(a[key], impl.dtype) for key in ARGUMENTS} | {"target": target}
    with pytest.raises(ValueError, match="reference_log_prob: got None beside loss_type='dpo', allowed is an array"):
        package.dpo_loss(**given)
    with pytest.raises(TypeError, match="desirable: got list, allowed is a"):
        package.kto_loss(**given, desirable=[1], reference_log_prob=impl.array(np.zeros(6, np.float32)), kl=0.0)
    for name, known in (("dpo_loss", "reference_log_prob"), ("clipped_policy_loss", "advantage")):
        with pytest.raises(TypeError, match=rf"{known}: got list, allowed is a"):
            getattr(package, name)(**given, **{known: [1.0]})
        with pytest.raises(TypeError, match=rf"{known}: got dtype int32, allowed are bfloat16, "):
            getattr(package, name)(**given, **{known: impl.array(np.zeros((SEQUENCES, T), np.int32))})
        with pytest.raises(TypeError, match=r"target: got list, allowed is a"):
            getattr(package, name)(**(given | {"target": [1]}), **{known: impl.array(a[known])})
    odd = {key: values[:5] if key in ("hidden", "target") else values for key, values in given.items()}
    with pytest.raises(ValueError, match=r"target: got shape \(5, 9\), allowed is \[2 B, T\]: B chosen"):
        package.dpo_loss(**odd, reference_log_prob=impl.array(np.zeros(5, np.float32)))
    with pytest.raises(TypeError, match="teacher_hidden: got list"):
        package.distillation_loss(given["hidden"], given["weight"], [1.0], given["weight"])


def test_signatures_are_the_same_in_both_frameworks() -> None:
    pytest.importorskip("torch", reason="compares both frameworks")
    pytest.importorskip("jax", reason="compares both frameworks")
    import inspect

    from logitless import jax_impl, torch_impl

    own = {"process_group", "axis_name", "vocab"}  # how a framework says which devices share the vocabulary
    for name in LOSSES:
        one, other = (
            {
                key: value
                for key, value in inspect.signature(getattr(package, name)).parameters.items()
                if key not in own
            }
            for package in (torch_impl, jax_impl)
        )
        assert list(one) == list(other)
        assert [(p.kind, p.default) for p in one.values()] == [(p.kind, p.default) for p in other.values()]
        after_bias = list(one)[list(one).index("bias") + 1 :]
        assert all(one[key].kind is inspect.Parameter.KEYWORD_ONLY for key in after_bias)
