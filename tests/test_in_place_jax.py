"""Exponentials in dW's memory, where dW is then made in place, in JAX: the same as from a matrix of their own.

Mirror of test_in_place.py. The interpreter has no semaphores: there dW's kernel reads a copy of the exponentials, and
everything else is as on a GPU. What XLA makes of it at large sizes is in test_pallas_memory.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")
pytest.importorskip("absl", reason="absl-py is not installed, which JAX's Pallas modules for GPUs import")

import jax.numpy as jnp  # noqa: E402
from implementations import JaxPallas, JaxPallasCuda  # noqa: E402
from test_pallas import compiled, either, hopper, interpreter  # noqa: E402, F401 (fixtures)

from logitless import ChunkPlan, plan  # noqa: E402
from logitless.jax_impl import (  # noqa: E402
    linear_cross_entropy,
    linear_cross_entropy_value_and_grad,
    linear_log_probs,
)
from logitless.jax_impl.kernels import hopper as products  # noqa: E402
from logitless.tolerances import GRADIENT, error  # noqa: E402

Sizes = tuple[int, int, int]


def arrays(sizes: Sizes, ignored: float = 0.2, turned: bool = False) -> tuple[Any, ...]:
    """hidden, weight, bias and target in bfloat16; some targets come several times."""
    tokens, hidden, vocab = sizes
    drawn = np.random.default_rng(sum(sizes))
    x, b = drawn.standard_normal((tokens, hidden)), drawn.standard_normal(vocab)
    w = drawn.standard_normal((vocab, hidden)) * hidden**-0.5
    y = np.minimum(drawn.zipf(1.3, tokens), vocab) - 1
    y[drawn.random(tokens) < ignored] = -100
    x, w, b = (jnp.asarray(a, jnp.bfloat16) for a in (x, w.T if turned else w, b))
    return x, w, b, jnp.asarray(y, jnp.int32)


def one_chunk(sizes: Sizes, lends: bool, turned: bool = False) -> ChunkPlan:
    tokens, hidden, vocab = sizes
    named = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16", "fused": True, "padded": True}
    made = plan(**named, order="tokens", chunk=tokens, weight_layout="dv" if turned else "vd")
    return dataclasses.replace(made, lends=lends)


def gradients(of: tuple[Any, ...], chosen: ChunkPlan | None, wanted: Any = (0, 1, 2), **options: Any) -> Any:
    """The results' sum, each times a number, and gradients."""
    function = options.pop("function", linear_cross_entropy)
    options = options if chosen is None else options | {"plan": chosen}

    def total(x: Any, w: Any, b: Any, y: Any) -> Any:
        made = function(x, w, y, b, backend="pallas", **options)
        made = made[0] if isinstance(made, tuple) else made
        return (made * (jnp.arange(made.size).reshape(made.shape) % 7 - 2.5)).sum()

    return jax.tree.leaves(jax.jit(jax.value_and_grad(total, wanted))(*of))


def assert_same(one: Any, other: Any) -> None:
    for a, c in zip(one, other, strict=True):
        assert a.dtype == c.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(c, np.float32))


def assert_same_but_bias(one: Any, other: Any) -> None:
    """db sums the rows of eᵀ by one operation of XLA, in another order than the kernel that sums e's columns."""
    assert_same(one[:3], other[:3])
    assert error(*(np.asarray(a[3], np.float64) for a in (one, other))) <= GRADIENT["bfloat16"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"},
    "cap": {"softcap": 20.0, "logit_scale": 1.5, "return_stats": True},
    "none": {"reduction": "none"},
    "log-probs": {"function": linear_log_probs},
    "turned": {"weight_layout": "dv"},
    "turned, none": {"weight_layout": "dv", "reduction": "none"},
}
SMALL, LARGE = (72, 128, 200), (1000, 1024, 5003)
# What the interpreter, which takes long, has to say of it.
FEW = "smooth", "log-probs", "turned, none"


def assert_as_beside(cuda_or_not: JaxPallas, sizes: Sizes, name: str, of: tuple[Any, ...] | None = None) -> Any:
    turned = OPTIONS[name].get("weight_layout") == "dv"
    of = arrays(sizes, turned=turned) if of is None else of
    with cuda_or_not.precision("bfloat16"):
        one, other = (gradients(of, one_chunk(sizes, lends, turned), **OPTIONS[name]) for lends in (True, False))
    assert_same_but_bias(one, other)
    return one


@pytest.mark.parametrize("name", FEW)
def test_same_bits_as_beside_dw(either: JaxPallas, name: str) -> None:  # noqa: F811
    assert_as_beside(either, SMALL, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(100, 100, 301), (70, 72, 301), (140, 192, 515), LARGE, (2048, 2304, 9000)], ids=str)
def test_same_bits_at_other_sizes(sizes: Sizes, name: str) -> None:
    assert_as_beside(JaxPallasCuda(), sizes, name)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("kind", ["all ignored", "done again"])
def test_unusual_rows(sizes: Sizes, kind: str) -> None:
    x, w, b, y = arrays(sizes)
    if kind == "all ignored":
        assert_as_beside(JaxPallasCuda(), sizes, "plain", (x, w, b, jnp.full_like(y, -100)))
    else:  # their exponents are too large, so their exponentials are written once more
        assert_as_beside(JaxPallasCuda(), sizes, "plain", (x.at[::3].multiply(60), w, b, y))


def test_rows_that_are_no_numbers(either: JaxPallas) -> None:  # noqa: F811
    """NaN in what is ignored stays out. A NaN that counts, and an id outside the vocabulary, are seen."""
    x, w, b, y = arrays(SMALL, ignored=0.0)
    x, y = x.at[:5].set(jnp.nan), y.at[:5].set(-100)
    with either.precision("bfloat16"):
        chosen = one_chunk(SMALL, True)
        loss, *made = gradients((x, w, b, y), chosen)
        outside, *_ = gradients((x, w, b, y.at[6].set(SMALL[2] + 5)), chosen)
    assert all(bool(jnp.isfinite(values).all()) for values in (loss, *made))
    assert not bool(jnp.isfinite(outside))


# ---------------------------------------------------------------------------------------------------------------------
# Who may be stored when


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2000, 2048, 32000), (1000, 2304, 50257)], ids=str)
def test_every_run_gives_the_same_bits(sizes: Sizes) -> None:
    """Nothing hangs, nothing is stored too early."""
    of, cuda = arrays(sizes), JaxPallasCuda()
    with cuda.precision("bfloat16"):
        step = jax.jit(
            jax.value_and_grad(
                lambda x, w, b, y: linear_cross_entropy(x, w, y, b, plan=one_chunk(sizes, True), backend="pallas"),
                (0, 1, 2),
            )
        )
        first = jax.tree.leaves(step(*of))
        for _ in range(200):
            assert all(bool((a == c).all()) for a, c in zip(first, jax.tree.leaves(step(*of)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("road", ["two programs", "checkpoint", "vmap", "scan", "value and grad", "twice"])
def test_every_road_to_a_gradient(road: str) -> None:
    """Also where forward and backward are programs of their own, and where several calls wait for one backward."""
    x, w, b, y = arrays(LARGE)
    chosen = {lends: one_chunk(LARGE, lends) for lends in (True, False)}

    def made(lends: bool) -> Any:
        def loss(x: Any, w: Any, b: Any) -> Any:
            return linear_cross_entropy(x, w, y, b, plan=chosen[lends], backend="pallas")

        one = jax.value_and_grad(loss, (0, 1, 2))
        if road == "two programs":
            return one(x, w, b)
        if road == "checkpoint":
            return jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)))(x, w, b)
        if road == "vmap":
            return jax.jit(jax.vmap(one, (0, None, None)))(jnp.stack([x, 2 * x]), w, b)
        if road == "scan":
            many = jnp.stack([x, 2 * x, x])

            def total(w: Any, b: Any) -> Any:
                return jax.lax.scan(lambda sum, x: (sum + loss(x, w, b), None), jnp.zeros(()), many)[0]

            return jax.jit(jax.value_and_grad(total, (0, 1)))(w, b)
        if road == "value and grad":
            given = {"plan": chosen[lends], "backend": "pallas", "upstream": 3.0}
            return jax.jit(lambda *of: linear_cross_entropy_value_and_grad(*of, y, b, **given))(x, w)
        return jax.jit(jax.value_and_grad(lambda x, w, b: loss(x, w, b) + loss(2 * x, w, b), (0, 1, 2)))(x, w, b)

    with JaxPallasCuda().precision("bfloat16"):
        for one, other in zip(*(jax.tree.leaves(made(lends)) for lends in (True, False)), strict=True):
            assert error(*(np.asarray(v, np.float64) for v in (one, other))) <= GRADIENT["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [4, 7])
def test_few_programs(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    """As many programs as a row of tiles has columns, on a GPU that is smaller than it was taken for."""
    sizes = (500, 1024, 4000)
    with JaxPallasCuda().precision("bfloat16"):
        first = gradients(arrays(sizes), one_chunk(sizes, True))
        jax.clear_caches()
        monkeypatch.setattr(products, "programs", lambda: pairs)
        assert_same(first, gradients(arrays(sizes), one_chunk(sizes, True)))
    jax.clear_caches()


def traced(
    sizes: Sizes, function: Any = linear_cross_entropy, wide: bool = False, lends: bool = False, **options: Any
) -> None:
    """What a call does before it runs. What is traced may be for another device."""
    options |= {"plan": one_chunk(sizes, True)} if lends else {}

    def step(x: Any, w: Any, b: Any, y: Any) -> Any:
        return function(x, w.astype(jnp.float32) if wide else w, y, None if wide else b, backend="pallas", **options)

    jax.eval_shape(step, *arrays(sizes))


def test_a_device_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All column tiles of a row are made at a time, or nobody could begin to store."""
    monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "0")
    monkeypatch.setattr(products, "programs", lambda: 3)
    jax.clear_caches()
    sizes = (64, 1024, 1000)

    def gradient(x: Any, w: Any, y: Any, b: Any, **options: Any) -> Any:
        return jax.grad(lambda w: linear_cross_entropy(x, w, y, b, **options))(w)

    with pytest.raises(ValueError, match=r"plan: got one with lends=True .* needs 8"):
        traced(sizes, gradient, lends=True)
    jax.clear_caches()


# ---------------------------------------------------------------------------------------------------------------------
# Who may ask for it


REFUSED: dict[str, dict[str, Any]] = {
    "more tokens": {"sizes": (130, 128, 200)},
    "narrow rows": {"sizes": (40, 64, 200)},
    "lse": {"return_lse": True},
    "entropy": {"function": linear_log_probs, "with_entropy": True},
    "deferred": {"function": linear_cross_entropy_value_and_grad, "defer_weight_grad": True},
    "float32 weight": {"wide": True},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_call_without_free_rows_refuses_the_plan(kind: str) -> None:
    with pytest.raises(ValueError, match="plan: got one with lends=True"):
        traced(**{"sizes": SMALL, "lends": True} | REFUSED[kind])
    traced(**{"sizes": SMALL} | REFUSED[kind])  # by default another plan


@pytest.mark.parametrize(
    ("name", "chosen"), [("plain", one_chunk(SMALL, True)), ("log-probs", "lean")], ids=("plan", "lean")
)
def test_a_frozen_weight_needs_another_plan(either: JaxPallas, name: str, chosen: Any) -> None:  # noqa: F811
    """Whether the weight gets a gradient is known once a plan was chosen."""
    of = arrays(SMALL)
    with either.precision("bfloat16"):
        one = gradients(of, chosen, (0, 2), **OPTIONS[name])
        other = gradients(of, one_chunk(SMALL, False), (0, 2), **OPTIONS[name])
    for a, c in zip(one, other, strict=True):
        assert error(*(np.asarray(v, np.float64) for v in (a, c))) <= GRADIENT["bfloat16"]


def test_plain_operations_take_the_plan() -> None:
    """A plan of the kernels, as always: they keep no promise of it."""
    x, w, b, y = arrays(SMALL)
    made = linear_cross_entropy(x, w, y, b, backend="xla", plan=one_chunk(SMALL, True))
    assert np.isfinite(float(made))
