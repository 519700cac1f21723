"""The Pallas kernels without a GPU: every configuration lowered for CUDA, under both lines of jax, and, where jax has
the interpreter, small problems under the same rule as everywhere, with races looked for.

On a GPU of compute capability 9, tests/implementations.py adds the kernels to every test (marker ``gpu``).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")
pytest.importorskip("absl", reason="absl-py is not installed, which JAX's Pallas modules for GPUs import")

import jax.numpy as jnp  # noqa: E402
from implementations import (  # noqa: E402
    JaxPallas,
    JaxPallasCuda,
    assert_rounded_once,
    assert_within,
    plan_for,
    problem_named,
    run_case,
    truth,
)

from logitless import plan, reference  # noqa: E402
from logitless.jax_impl import linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.jax_impl.kernels import arithmetic, launch, pieces, row_kernels  # noqa: E402
from logitless.jax_impl.kernels import hopper as products  # noqa: E402
from logitless.jax_impl.kernels import lowered as kernels  # noqa: E402
from logitless.jax_impl.kernels.architecture import can_interpret  # noqa: E402
from logitless.rounding import round_to  # noqa: E402
from logitless.spec import HELD_STEPS  # noqa: E402
from logitless.tolerances import BOUND, GRADIENT, ON_TOP_GRADIENT, ON_TOP_LOSS, RATIO, THREE_DIGITS, TINY, error  # noqa: E402

PALLAS = JaxPallas()
INTERPRET = "LOGITLESS_PALLAS_INTERPRET"
HERE = f"this is {jax.__version__} on {jax.default_backend()}"
needs_interpreter = pytest.mark.skipif(
    not can_interpret() or jax.default_backend() != "cpu",
    reason=f"interpreting takes jax 0.11 and a CPU as JAX's device, {HERE}",
)


def holding_anything(shape: tuple[int, ...], dtype: Any) -> Any:
    """What :func:`launch.empty` may give."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else -1, dtype)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Interpreted kernels, in memory that holds NaN; a race that the interpreter reports fails the test."""
    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.setattr(launch, "empty", holding_anything)
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture(
    params=[pytest.param("interpreter", marks=needs_interpreter), pytest.param("hopper", marks=pytest.mark.gpu)]
)
def either(request: pytest.FixtureRequest) -> JaxPallas:
    """The kernels interpreted, or on the GPU that is there."""
    request.getfixturevalue(request.param)
    return PALLAS if request.param == "interpreter" else JaxPallasCuda()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET, "0")


# ---------------------------------------------------------------------------------------------------------------------
# Lowered for CUDA

ALL = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4, "logit_scale": 1.5}
SMOOTH = {"label_smoothing": 0.1, "z_loss": 1e-4}
TWO_PASS = {"order": "tokens", "chunk": 136, "one_pass": False}
ONE_CHUNK = {"order": "tokens", "chunk": 200}
# Every kernel with everything that changes its code: plan, bias, class weights, statistics, dtype, sizes, options.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias_statistics": {"bias": True, "return_stats": True},
    "two_pass_smooth": {"plan": TWO_PASS, "bias": True, "class_weight": True, **SMOOTH},
    "vocab_all": {
        "sizes": (200, 192, 1024),
        "plan": {"order": "vocab", "chunk": 512},
        "bias": True,
        "class_weight": True,
        **ALL,
    },
    "all": {"bias": True, "class_weight": True, "return_stats": True, **ALL},
    "chunks_smooth": {"plan": {"order": "tokens", "chunk": 72}, "bias": True, "class_weight": True, **SMOOTH},
    "none": {"reduction": "none", "class_weight": True, **ALL},
    "none_held": {"reduction": "none", "plan": ONE_CHUNK, "bias": True, "class_weight": True, **SMOOTH},
    "float16": {"dtype": "float16", "bias": True},
    "wide": {"weight_dtype": "float32", "plan": {"order": "tokens", "chunk": 136}, "bias": True},
    "wide_one_chunk": {"weight_dtype": "float32", "bias": True},
    "each": {"temperature": True, "bias": True, "class_weight": True, **ALL},
    "each_one_chunk": {"temperature": True, "return_stats": True, **SMOOTH},
    "odd": {"sizes": (188, 31, 123)},
    "one": {"sizes": (1, 7, 1)},
    "head": {"sizes": (4096, 4096, 128256)},
}


def lowered(function: Any, *arguments: Any) -> str:
    text: str = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text


def lowered_configuration(name: str, ids: str = "int32") -> str:
    """A loss and its gradients, lowered for CUDA."""
    options = dict(CONFIGURATIONS[name])
    tokens, hidden, vocab = options.pop("sizes", (200, 192, 1000))
    dtype, wanted = options.pop("dtype", "bfloat16"), options.pop("plan", None)
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": dtype, "fused": True}
    chosen = None if wanted is None else plan(**sizes, **wanted)
    with_bias, with_classes = options.pop("bias", False), options.pop("class_weight", False)
    shape, wide = jax.ShapeDtypeStruct, options.pop("weight_dtype", dtype)
    x, w, y = shape((tokens, hidden), dtype), shape((vocab, hidden), wide), shape((tokens,), ids)
    b = shape((vocab,), wide) if with_bias else None
    k = shape((vocab,), jnp.float32) if with_classes else None
    tau = shape((tokens,), jnp.float32) if options.pop("temperature", False) else None

    def loss(x: Any, w: Any, b: Any, y: Any, k: Any, tau: Any) -> Any:
        more = options if tau is None else options | {"temperature": tau}
        made = linear_cross_entropy(x, w, y, b, class_weight=k, plan=chosen, backend="pallas", **more)
        return made[0].sum() if isinstance(made, tuple) else made.sum()

    return lowered(jax.value_and_grad(loss, (0, 1, 2) if with_bias else (0, 1)), x, w, b, y, k, tau)


# Each kernel is in one of the others, with the options that change it most; none_held is lowered under x64.
SLOW = (
    *("plain", "two_pass_smooth", "chunks_smooth", "all", "none", "none_held", "bias_statistics", "wide", "odd", "one"),
    "each_one_chunk",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CONFIGURATIONS]
)
def test_lowers_for_cuda(name: str, compiled: None) -> None:
    text = lowered_configuration(name)
    assert "mosaic_gpu" in text
    assert "dot_general" not in text  # no product is left to XLA
    two_passes = name in ("two_pass_smooth", "vocab_all", "all", "none", "float16", "each")
    assert ("logits_known" in text) == two_passes


@pytest.mark.case(32)
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("chunks_smooth", "vocab_all")), "none_held"]
)
def test_lowers_with_x64_and_strict_promotion(name: str, compiled: None) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        text = lowered_configuration(name, "int64")
    assert "mosaic_gpu" in text
    assert not re.search(r"\dxf64>", text)  # but for scalars, nothing is wider than without


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what JAX's first device, a GPU, runs is compiled for it")
def test_compiled_for_a_cpu_says_what_can(compiled: None) -> None:
    """A traced program might be compiled for a GPU, so the error comes when it is known that it is not."""
    x, w, y = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((9, 4), jnp.bfloat16), jnp.zeros(3, jnp.int32)

    def loss(x: Any) -> Any:
        return linear_cross_entropy(x, w, y, backend="pallas")

    words = "'pallas' cannot run here: its kernels need a CUDA device, not cpu; backend='xla' can"
    for run in (loss, jax.grad(loss), jax.jit(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(NotImplementedError, match=words):
            run(x)
    if jax.__version_info__ >= (0, 11):  # before, jax.vmap refuses the kernels wherever they would run
        with pytest.raises(NotImplementedError, match=words):
            jax.vmap(jax.grad(loss))(x[None])


def test_log_probs_lower_for_cuda(compiled: None) -> None:
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((200, 192), jnp.bfloat16), shape((1000, 192), jnp.bfloat16), shape((200,), jnp.int32)

    def total(x: Any, w: Any, y: Any) -> Any:
        log_prob, entropy, stats = linear_log_probs(x, w, y, return_stats=True, backend="pallas")
        return log_prob.sum() + entropy.sum() + stats.sum_p_squared.sum()

    text = lowered(jax.value_and_grad(total, (0, 1)), x, w, y)
    assert "mosaic_gpu" in text
    assert "logits_known" in text  # no exponentials wait


@pytest.mark.parametrize(
    ("budget", "entropy", "waits"),
    [
        (2**30, False, True),
        pytest.param(None, False, False, marks=pytest.mark.slow),
        (2**30, True, True),
    ],
)
def test_log_probs_wait_where_a_budget_holds_them(
    budget: int | None, entropy: bool, waits: bool, monkeypatch: pytest.MonkeyPatch, compiled: None
) -> None:
    called, call = set(), kernels.call
    monkeypatch.setattr(kernels, "call", lambda s, *rest: (called.add(s.name), call(s, *rest))[1])
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((200, 192), jnp.bfloat16), shape((1000, 192), jnp.bfloat16), shape((200,), jnp.int32)

    def total(x: Any, w: Any, y: Any) -> Any:
        return linear_log_probs(x, w, y, with_entropy=entropy, memory_budget=budget, backend="pallas")[0].sum()

    lowered(jax.grad(total, (0, 1)), x, w, y)
    assert ("logits_known" in called) == (not waits)
    assert ("logits_held" in called) == (waits and entropy)


@pytest.mark.parametrize(
    ("row_tiles", "size", "width"), [(32, 4096, 256), (64, 2304, 192), (256, 768, 256), (1002, 4096, 256)]
)
def test_gradients_are_as_wide_as_their_turns_are_short(
    row_tiles: int, size: int, width: int, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "programs", lambda: 66)  # pairs on an H100 or H200
    assert products.gradient_columns(row_tiles, size) == width


@pytest.mark.parametrize("width", [64, 320])
def test_a_row_is_stored_no_further_than_its_matrix(
    width: int, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that lies in one piece is stored as so many bytes: a wider one would run on into the row below."""
    stored = []
    copy = row_kernels.plgpu.copy_smem_to_gmem

    def recorded(source: Any, destination: Any, **more: Any) -> None:
        stored.append((source.shape, destination.shape))
        copy(source, destination, **more)

    monkeypatch.setattr(row_kernels.plgpu, "copy_smem_to_gmem", recorded)
    shape = jax.ShapeDtypeStruct
    places = jnp.zeros(2 * row_kernels.RUN, jnp.int32)

    def targets(x: Any) -> Any:
        lists = {"key": places, "token": places, "x": x}
        lists |= {name: jnp.ones(places.shape) for name in row_kernels.TARGET_VECTORS}
        reference = jax.new_ref(jnp.zeros((100, width), jnp.bfloat16))
        part = row_kernels.add_targets(lists | {"out": reference})
        row_kernels.add_long_runs({"key": places, "part": part, "out": reference})
        return reference[...]

    assert "mosaic_gpu" in lowered(targets, shape((20, width), jnp.bfloat16))
    wanted = [(1, 64)] if width == 64 else [(1, 256), (1, 64)]
    assert stored == 2 * [(one, one) for one in wanted]


# ---------------------------------------------------------------------------------------------------------------------
# jax's transformations


def batch() -> tuple[Any, Any, Any]:
    shape = jax.ShapeDtypeStruct
    return shape((3, 40, 64), jnp.bfloat16), shape((300, 64), jnp.bfloat16), shape((3, 40), jnp.int32)


@pytest.mark.case(32)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_of_grad_lowers_or_says_why_not(reduction: Any, compiled: None) -> None:
    def total(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, reduction=reduction, backend="pallas").sum()

    mapped = jax.vmap(jax.value_and_grad(total, (0, 1)), (0, None, 0))
    if jax.__version_info__ >= (0, 11):
        assert "mosaic_gpu" in lowered(mapped, *batch())
        return
    with pytest.raises(NotImplementedError, match=r"under jax.vmap needs jax 0\.11 or newer.*backend='xla'"):
        lowered(mapped, *batch())


@pytest.mark.case(32)
@pytest.mark.parametrize(
    "cut", [{}, {"order": "tokens", "chunk": 24}, {"order": "tokens", "chunk": 8}, {"order": "vocab", "chunk": 128}],
    ids=["one_chunk", "two_chunks", "chunks", "slices"],
)  # fmt: skip
def test_checkpoint_scan_and_donation_lower(cut: dict[str, Any], compiled: None) -> None:
    x, w, y = batch()
    x, y = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.ShapeDtypeStruct(y.shape[1:], y.dtype)
    chosen = plan(tokens=len(y), hidden=w.shape[1], vocab=w.shape[0], dtype="bfloat16", fused=True, padded=True, **cut)

    @jax.checkpoint
    def model(x: Any, w: Any, y: Any) -> Any:
        def layer(h: Any, _: Any) -> Any:
            h = jnp.tanh(h)
            return h, linear_cross_entropy(h, w, y, plan=chosen, backend="pallas")

        return jax.lax.scan(layer, x, None, length=3)[1].sum()

    def step(x: Any, w: Any, y: Any) -> Any:
        dx, dw = jax.grad(model, (0, 1))(x, w, y)
        return x - dx, w - dw

    text = jax.jit(step, donate_argnums=(0, 1)).trace(x, w, y).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert text.count("tf.aliasing_output") == 2


# ---------------------------------------------------------------------------------------------------------------------
# Interpreted

# Interpreting is slow: 6 to 17 s each.
RUNS = (
    ("odd_all", "bfloat16", "default"),
    ("odd_most", "bfloat16", "tokens"),
    ("odd_softcap", "bfloat16", "vocab"),
    ("confident_wrong", "bfloat16", "default"),
    ("odd_none_all", "float16", "default"),
    ("odd_none_most", "bfloat16", "held"),
)


@needs_interpreter
@pytest.mark.case(1)
@pytest.mark.case(23)
@pytest.mark.parametrize(("name", "dtype", "order"), RUNS)
def test_within_the_rule(name: str, dtype: str, order: str, interpreter: None) -> None:
    problem = problem_named(name).with_dtype(dtype)
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": dtype, "fused": True}
    plans = {"default": {}, "tokens": {"order": "tokens", "chunk": 96}, "vocab": {"order": "vocab", "chunk": 64}}
    plans["held"] = {"order": "tokens", "chunk": problem.tokens}
    chosen = plan(**sizes, **plans[order])
    with_statistics = name == "odd_all"
    outcome = run_case(PALLAS, problem.case(), plan=chosen, return_stats=with_statistics)
    assert_within(problem, outcome)
    if not with_statistics:
        return
    made, true = outcome.stats, truth(problem).stats
    for field in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        assert error(getattr(made, field), getattr(true, field)) <= TINY[dtype], field
    assert (made.argmax == true.argmax).all()


@pytest.mark.parametrize(
    "cut",
    [{"chunk": 24, "one_pass": True}, {"chunk": 40, "one_pass": True, "lends": True}, {"chunk": 24, "one_pass": False}],
    ids=["chunks", "in place", "two passes"],
)
def test_hidden_in_parts(either: JaxPallas, cut: dict[str, Any]) -> None:
    """Few tiles of dX come in parts along the vocabulary, of which the last may reach behind its end."""
    rng, sizes = np.random.default_rng(7), {"tokens": 40, "hidden": 128, "vocab": 2100}
    x, w = (round_to(rng.standard_normal(shape), "bfloat16") for shape in ((40, 128), (2100, 128)))
    w = round_to(w * 128**-0.5, "bfloat16")
    y = np.where(rng.random(40) < 0.3, -100, rng.integers(0, 2100, 40))
    chosen = plan(**sizes, dtype="bfloat16", fused=True, padded=True, order="tokens", **cut)
    chosen = dataclasses.replace(chosen, lends="lends" in cut)
    assert chosen.hidden_parts == 2
    options = {"label_smoothing": 0.1, "reduction": "sum" if cut["one_pass"] else "none"}
    made = either.run(x, w, y, dtype="bfloat16", plan=chosen, **options)
    true = reference.linear_cross_entropy(x, w, y, **options)
    assert error(made.grads["hidden"], true.hidden_grad) <= GRADIENT["bfloat16"]
    assert error(made.grads["weight"], true.weight_grad) <= GRADIENT["bfloat16"]


@needs_interpreter
@pytest.mark.case(34)
@pytest.mark.parametrize("chunk", [1024, 640])
def test_dweight_is_rounded_once(chunk: int, interpreter: None) -> None:
    assert_rounded_once(PALLAS, chunk)


@needs_interpreter
@pytest.mark.case(41, 46)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", ["loss", "loss in two passes", "log-probs"])
def test_a_temperature_per_token(name: str, softcap: float | None, interpreter: None) -> None:
    """What is at an ignored token is never read. Logits far above the target's go through the rescue."""
    rng = np.random.default_rng(3)
    x, w, b = (round_to(rng.standard_normal(s), "bfloat16") for s in ((20, 12), (70, 12), (70,)))
    y = rng.integers(0, 70, 20)
    y[::6] = -100
    tau = np.where(y == -100, np.nan, rng.uniform(0.4, 2.5, 20)).astype(np.float32)
    tau[1] = 0.02
    more: dict[str, Any] = {"softcap": softcap, "logit_scale": 1.5}
    if name == "log-probs":
        more |= dict(zip(("log_prob_upstream", "entropy_upstream"), rng.standard_normal((2, 20)), strict=True))
        made = PALLAS.run_log_probs(x, w, y, b, dtype="bfloat16", temperature=jnp.asarray(tau), **more)
        true = reference.linear_log_probs(x, w, y, b, temperature=tau, **more)
        assert error(made.log_prob, true.log_prob) <= ON_TOP_LOSS["bfloat16"]
        assert error(made.entropy, true.entropy) <= 2 * ON_TOP_LOSS["bfloat16"]
    else:
        k = rng.uniform(0.2, 2.0, 70).astype(np.float32)
        more |= {"z_loss": 1e-3, "label_smoothing": 0.1, "class_weight": k}
        sizes = {"tokens": 20, "hidden": 12, "vocab": 70, "dtype": "bfloat16", "fused": True}
        in_two = plan(**sizes, order="tokens", one_pass=False) if name.endswith("passes") else None
        made = PALLAS.run(x, w, y, b, dtype="bfloat16", temperature=jnp.asarray(tau), plan=in_two, **more)
        true = reference.linear_cross_entropy(x, w, y, b, temperature=tau, **more)
        assert error(made.loss, true.loss) <= ON_TOP_LOSS["bfloat16"]
    for argument, grad in made.grads.items():
        assert error(grad, getattr(true, f"{argument}_grad")) <= ON_TOP_GRADIENT["bfloat16"], argument


@needs_interpreter
def test_log_probs_and_entropy(interpreter: None) -> None:
    rng = np.random.default_rng(3)
    x, w = (np.asarray(jnp.asarray(rng.standard_normal(s), jnp.bfloat16), np.float32) for s in ((20, 12), (70, 12)))
    y = rng.integers(0, 70, 20)
    y[::6] = -100
    g1, g2, g3, g4 = rng.standard_normal((4, 20)).astype(np.float32)
    upstream = {"log_prob_upstream": g1, "entropy_upstream": g2, "logit_scale": 0.7}
    made = PALLAS.run_log_probs(x, w, y, dtype="bfloat16", stats_upstream={"lse": g3, "sum_p_squared": g4}, **upstream)
    true = reference.linear_log_probs(x, w, y, lse_upstream=g3, squared_upstream=g4, **upstream)
    for name in ("lse", "max_logit", "min_logit", "sum_p_squared"):
        assert error(getattr(made.stats, name), getattr(true.stats, name)) <= TINY["bfloat16"], name
    assert (made.stats.argmax == true.stats.argmax).all()
    assert error(made.log_prob, true.log_prob) <= TINY["bfloat16"]
    assert error(made.entropy, true.entropy) <= TINY["bfloat16"]


@needs_interpreter
@pytest.mark.parametrize(
    "cut", [{"order": "tokens", "chunk": 16}, {"order": "vocab", "chunk": 64}], ids=["tokens", "vocab"]
)
def test_sums_begin_with_blocks_without_a_row(cut: dict[str, Any], interpreter: None) -> None:
    """Every token is ignored. What the sums' memory held before is in no gradient."""
    x, w, b = (jnp.ones(shape, jnp.bfloat16) for shape in ((40, 64), (130, 64), (130,)))
    chosen = plan(tokens=40, hidden=64, vocab=130, dtype="bfloat16", fused=True, padded=True, **cut)

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, jnp.full(40, -100), b, plan=chosen, backend="pallas")

    for grad in jax.grad(loss, (0, 1, 2))(x, w, b):
        assert (grad == 0).all()


@pytest.mark.late(where=lambda p: p["scale"] < 1)
@pytest.mark.parametrize(
    ("size", "vocab", "scale", "options"),
    [
        (64, 264, 0.1, {}),
        (40, 301, 0.2, {"softcap": 3.0, "logit_scale": 1.5}),
        (64, 264, 0.1, {"temperature": "each"}),
        (64, 300, 3.0, {}),
        (64, 60, 0.1, {}),
    ],
    ids=["plain", "capped, odd", "temperatures", "done again", "small"],
)
def test_statistics_whose_logits_wait(
    size: int, vocab: int, scale: float, options: dict[str, Any], either: JaxPallas
) -> None:
    """They add little to what rounding the gradient's matrix does, once, from float32 logits. Targets are drawn from
    the softmax, or, with logits far apart, without looking at it. A token that is ignored has NaN."""
    rng, dtype = np.random.default_rng(5), "bfloat16"
    x, w, b = (rng.standard_normal(shape) for shape in ((40, size), (vocab, size), (vocab,)))
    x, w, b = round_to(x, dtype), round_to(scale * w, dtype), round_to(0.1 * b, dtype)
    y = (x @ w.T + b + rng.gumbel(size=(40, vocab))).argmax(1) if scale < 1 else rng.integers(0, vocab, 40)
    y[::7] = -100
    given = dict(options)
    if given.get("temperature") == "each":
        given["temperature"] = rng.uniform(0.5, 3.0, 40).astype(np.float32)
    g = rng.standard_normal((4, 40))
    true = reference.linear_log_probs(
        x, w, y, b, log_prob_upstream=g[0], entropy_upstream=g[1], lse_upstream=g[2], squared_upstream=g[3], **given
    )
    assert (true.log_prob < -25).any() == (scale > 1)
    x[y == -100] = np.nan
    upstream = {"log_prob_upstream": np.where(y == -100, np.nan, g[0]), "entropy_upstream": g[1]}
    upstream["stats_upstream"] = {"lse": g[2], "sum_p_squared": g[3]}
    if "temperature" in given:
        given["temperature"] = jnp.asarray(given["temperature"])
    made, again = (
        either.run_log_probs(x, w, y, b, dtype=dtype, plan=prefer, **upstream, **given)
        for prefer in ("fast", "balanced")
    )
    assert error(made.log_prob, true.log_prob) <= TINY["float32"]
    assert error(made.entropy, true.entropy) <= RATIO * error(again.entropy, true.entropy) + TINY["float32"]
    for name in ("hidden", "weight", "bias"):
        expected = getattr(true, f"{name}_grad")
        assert error(made.grads[name], expected) <= RATIO * error(again.grads[name], expected) + TINY[dtype], name


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize(("width", "vocab"), [(128, 60), (320, 301), (4480, 4480)], ids=["padded", "shared", "blocks"])
def test_logits_that_waited_become_the_gradient(width: int, vocab: int, cap: float | None, either: JaxPallas) -> None:
    """Of a row in one piece, in two that share columns, and in blocks. Two of eight rows do not exist."""
    rng = np.random.default_rng(width)
    row = pieces.Row(width, jnp.dtype("bfloat16"), 1.0, cap)
    gap = rng.uniform(-12.0, 8.0, (8, width)).astype(np.float32)
    gap[:, 7] = -np.inf
    held = arithmetic.held_of(jnp.asarray(gap), row.dtype)
    vectors = {name: rng.uniform(0.5, 1.5, 8).astype(np.float32) for name in ("alpha", "gamma", "delta", "factor")}
    vectors |= {"anchor": rng.uniform(-5.0, 5.0, 8).astype(np.float32), "log_total": np.full(8, 12.0, np.float32)}
    vectors |= {"element": rng.standard_normal(8).astype(np.float32), "target": rng.integers(8, vocab, 8, np.int32)}
    at = {name: vector[:, None].astype(np.float64) for name, vector in vectors.items()}
    gap[:, 7] = 0.0
    gap = np.round(gap.astype(np.float64) * HELD_STEPS) / HELD_STEPS
    log_p = gap - at["log_total"]
    p = np.exp(log_p)
    true = p * (at["alpha"] + at["gamma"] * log_p + at["delta"] * p) * at["factor"]
    true = true if cap is None else true * (1.0 - ((gap + at["anchor"]) / cap) ** 2)
    true[:, 7] = 0.0
    true[np.arange(8), vectors["target"]] = vectors["element"]
    true[:, vocab:] = 0.0
    true[6:] = 0.0

    e = launch.reference(held)
    arguments = {name: jnp.asarray(vector) for name, vector in vectors.items()}
    row_kernels.held_gradient(row, vocab, arguments | {"e": e, "rows": jnp.full(1, 6, jnp.int32)})
    made = np.asarray(launch.written(e).astype(jnp.float32), np.float64)
    assert error(made, true) <= GRADIENT["bfloat16"]
    assert (made[true == 0.0] == 0.0).all()


@needs_interpreter
def test_tiles_of_one_piece_wait_for_each_other(interpreter: None) -> None:
    """A vocabulary of one piece: a program's tiles are all staged in the same slot."""
    x, w = jnp.ones((768, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    config = products.Logits(products.ANCHORED, columns=64)
    tile = jnp.arange(768) // 128
    rows = {"target": jnp.full(768, -1, jnp.int32), "anchor": 64.0 + tile * math.log(2)}
    arguments = rows | {"tiles": jnp.arange(-1, 6, dtype=jnp.int32).at[0].set(6), "start": jnp.zeros(1, jnp.int32)}
    arguments |= {"x": x, "w": w, "hits": jnp.zeros((6, 1), jnp.int32)}
    out = {"e": jax.ShapeDtypeStruct((768, 64), jnp.bfloat16), "sum": jax.ShapeDtypeStruct((1, 768), jnp.float32)}
    made = products.logits(config, arguments, out)
    assert np.allclose(made["e"].astype(jnp.float32), 0.5 ** tile[:, None], rtol=BOUND["block of ones bfloat16"])
    assert np.allclose(made["sum"], 64 * 0.5**tile, rtol=THREE_DIGITS)


@needs_interpreter
def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The interpreter can go red: a tile stored over the one before, which is still on its way."""
    monkeypatch.setenv(INTERPRET, "1")
    wait = products.plgpu.wait_smem_to_gmem
    monkeypatch.setattr(products.plgpu, "wait_smem_to_gmem", lambda n, **more: None if n else wait(n, **more))
    e, x = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((8, 256), jnp.bfloat16)
    numbers = {"rows": jnp.full(1, 8, jnp.int32), "start": jnp.zeros(1, jnp.int32)}
    out = {"out": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), "low": jax.ShapeDtypeStruct((64, 256), jnp.int8)}
    jax.block_until_ready(products.weight(numbers | {"e": e, "x": x}, out, columns=64, adds=False, turned=False))
    assert "RACE DETECTED" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# On the GPU: what the tests of all implementations do not show


@pytest.fixture
def hopper(compiled: None) -> None:
    JaxPallasCuda.skip_unless_hopper()


def problem(count: int = 3) -> tuple[Any, Any, Any]:
    """Hidden states [count, 300, 320] and ids of several problems, one weight [3001, 320]."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (count, 300, 320), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (3001, 320)) * 320**-0.5).astype(jnp.bfloat16)
    y = jax.random.randint(keys[2], (count, 300), 0, 3001)
    return x, w, jnp.where(jax.random.uniform(keys[3], y.shape) < 0.2, -100, y)


def loss(x: Any, w: Any, y: Any) -> Any:
    return linear_cross_entropy(x, w, y, z_loss=1e-3, label_smoothing=0.1, backend="pallas")


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(np.asarray(a), np.asarray(b))


def assert_close(one: Any, other: Any) -> None:
    """For two programs that XLA fuses differently: a float32 sum may take another order, and so round otherwise."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) <= THREE_DIGITS


@pytest.mark.gpu
@pytest.mark.case(32)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("order", [None, "tokens", "vocab"])
@pytest.mark.parametrize("needs", [(0,), (1,), (0, 1)])
def test_vmap_of_grad_is_each_problem_by_itself(needs: Any, order: Any, reduction: Any, hopper: None) -> None:
    """``order``: of several chunks, whose sums wait in the residuals for kernels that add to them; None: one chunk."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("jax.vmap over the kernels needs jax 0.11")
    x, w, y = problem()
    sizes = {"tokens": y[0].size, "hidden": w.shape[1], "vocab": len(w), "dtype": "bfloat16"}
    chunk = 64 if order == "tokens" else 256
    chosen = plan(**sizes, order=order, chunk=chunk, fused=True, padded=True) if order else None

    def total(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, reduction=reduction, plan=chosen, backend="pallas").sum()

    one = jax.value_and_grad(total, needs)
    mapped = jax.jit(jax.vmap(one, (0, None, 0)))(x, w, y)
    for i in range(len(x)):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), jax.jit(one)(x[i], w, y[i]))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 38.0}, {"softcap": 38.0, "label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_statistics_of_whole_tiles(options: dict[str, Any], biased: bool, layout: str, hopper: None) -> None:
    """A kernel that spilled registers added the bias of other columns, in sizes that no interpreted test has."""
    rng = np.random.default_rng(5)
    x, w, b = (round_to(rng.standard_normal(shape), "bfloat16") for shape in ((512, 128), (4096, 128), (4096,)))
    w, b = round_to(w * 128**-0.5, "bfloat16"), b if biased else None
    y = np.where(rng.random(512) < 0.7, -100, rng.integers(0, 4096, 512))
    given = np.ascontiguousarray(w.T) if layout == "dv" else w
    made = JaxPallasCuda().run(
        x, given, y, b, dtype="bfloat16", return_stats=True, weight_layout=layout, reduction="sum", **options
    )
    true = reference.linear_cross_entropy(x, w, y, b, reduction="sum", **options)
    for name in ("nll", "lse", "entropy", "max_logit", "min_logit", "sum_p_squared"):
        assert error(getattr(made.stats, name), getattr(true.stats, name)) <= TINY["bfloat16"], name
    assert (made.stats.argmax == true.stats.argmax).all()
    dweight = made.grads["weight"].T if layout == "dv" else made.grads["weight"]
    assert error(dweight, true.weight_grad) <= GRADIENT["bfloat16"]


@pytest.mark.gpu
@pytest.mark.case(32)
@pytest.mark.parametrize("order", ["tokens", "vocab"])
@pytest.mark.parametrize("name", ["odd_most", "odd_none_all"])
def test_x64_changes_nothing(name: str, order: Any, hopper: None) -> None:
    one = problem_named(name).with_dtype("bfloat16")
    chosen = plan_for(one, order=order, chunk=64, fused=True, padded=True, one_pass=False)
    impl = JaxPallasCuda()
    impl.x64 = True
    assert_within(one, run_case(impl, one.case(), plan=chosen, return_stats=True))


@pytest.mark.gpu
@pytest.mark.case(32)
def test_runs_jit_checkpoint_and_donation(hopper: None) -> None:
    """The same bits from run to run; the same gradients however they are asked for."""
    (x,), w, (y,) = problem(1)

    def step(one_loss: Any) -> Any:
        def run(x: Any, w: Any, y: Any) -> Any:
            return jax.value_and_grad(one_loss, (0, 1))(x, w, y)

        return run

    jitted = jax.jit(step(loss))
    plain = jitted(x, w, y)
    for _ in range(3):
        assert_same_bits(plain, jitted(x, w, y))
    assert_close(plain, step(loss)(x, w, y))
    assert_close(plain, jax.jit(step(jax.checkpoint(loss)))(x, w, y))
    given = jnp.copy(x), jnp.copy(w)
    assert_close(plain, jax.jit(step(loss), donate_argnums=(0, 1))(*given, y))
    assert all(array.is_deleted() for array in given)


@pytest.mark.gpu
@pytest.mark.case(32)
def test_scan_over_layers(hopper: None) -> None:
    (x,), w, (y,) = problem(1)

    def gradients(backend: str) -> Any:
        def run(x: Any, w: Any) -> Any:
            def layer(h: Any, _: Any) -> Any:
                h = jnp.tanh(h)
                return h, linear_cross_entropy(h, w, y, backend=backend)

            return jax.lax.scan(layer, x, None, length=3)[1].sum()

        return jax.jit(jax.grad(run, (0, 1)))(x, w)

    for ours, portable in zip(gradients("pallas"), gradients("xla"), strict=True):
        assert error(ours, portable) <= ON_TOP_GRADIENT["bfloat16"]  # dW is summed in bfloat16 by the scan's derivative


@pytest.mark.gpu
@pytest.mark.case(5)
def test_two_backwards_of_one_forward(hopper: None) -> None:
    (x,), w, (y,) = problem(1)
    _, backward = jax.vjp(lambda x, w: loss(x, w, y), x, w)
    first, second, again = (backward(jnp.float32(scale)) for scale in (4.0, -0.5, 4.0))
    assert_same_bits(first, again)
    for one, two in zip(first, second, strict=True):
        assert error(two, -np.asarray(one, np.float64) / 8) <= BOUND["scaled backwards bfloat16"]


@pytest.mark.gpu
@pytest.mark.case(9)
def test_ids_outside_the_vocabulary_make_nan(hopper: None) -> None:
    (x,), w, (y,) = problem(1)
    y = y.at[jnp.array([1, 2, 3])].set(jnp.array([3001, -1, 2**31 - 1]))
    losses = linear_cross_entropy(x, w, y, reduction="none", backend="pallas")
    assert np.flatnonzero(np.isnan(losses)).tolist() == [1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 64, 5), (5, 192, 64), (127, 320, 63), (129, 64, 257), (200, 72, 1000)])
def test_edges_of_tiles(sizes: tuple[int, int, int], hopper: None) -> None:
    """Sizes around those of tiles and of the pieces that are stored, against plain operations."""
    tokens, hidden, vocab = sizes
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (vocab, hidden)) * hidden**-0.5).astype(jnp.bfloat16)
    y = jax.random.randint(keys[2], (tokens,), 0, vocab)

    def gradients(backend: str) -> Any:
        return jax.grad(lambda x, w: linear_cross_entropy(x, w, y, backend=backend), (0, 1))(x, w)

    for ours, portable in zip(gradients("pallas"), gradients("xla"), strict=True):
        assert error(ours, portable) <= BOUND["pallas beside xla bfloat16"]
