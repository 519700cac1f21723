"""The Pallas kernels without a GPU: every configuration lowered for CUDA, under both lines of jax, and, where jax has
the interpreter, small problems under the same rule as everywhere, with races looked for.

On a GPU of compute capability 9, tests/implementations.py adds the kernels to every test (marker ``gpu``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")
pytest.importorskip("absl", reason="absl-py is not installed, which JAX's Pallas modules for GPUs import")

import jax.numpy as jnp  # noqa: E402
from implementations import JaxPallas, assert_within, problem_named, run_case, truth  # noqa: E402

from logitless import plan, reference  # noqa: E402
from logitless.jax_impl import kernels, linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.tolerances import TINY, error  # noqa: E402

PALLAS = JaxPallas()
INTERPRET = "LOGITLESS_PALLAS_INTERPRET"
HERE = f"this is {jax.__version__} on {jax.default_backend()}"
needs_interpreter = pytest.mark.skipif(
    not kernels.can_interpret() or jax.default_backend() != "cpu",
    reason=f"interpreting takes jax 0.11 and a CPU as JAX's device, {HERE}",
)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Interpreted kernels; a race that the interpreter reports fails the test."""
    monkeypatch.setenv(INTERPRET, "1")
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET, "0")


# ---------------------------------------------------------------------------------------------------------------------
# Lowered for CUDA

ALL = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4, "logit_scale": 1.5}
SMOOTH = {"label_smoothing": 0.1, "z_loss": 1e-4}
TWO_PASS = {"order": "tokens", "chunk": 64, "one_pass": False}
# Every kernel with everything that changes its code: plan, bias, class weights, statistics, dtype, sizes, options.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias_statistics": {"bias": True, "return_stats": True},
    "two_pass_smooth": {"plan": TWO_PASS, "bias": True, "class_weight": True, **SMOOTH},
    "vocab_all": {"plan": {"order": "vocab", "chunk": 256}, "bias": True, "class_weight": True, **ALL},
    "all": {"bias": True, "class_weight": True, "return_stats": True, **ALL},
    "chunks_smooth": {"plan": {"order": "tokens", "chunk": 72}, "bias": True, "class_weight": True, **SMOOTH},
    "none": {"reduction": "none", "class_weight": True, **ALL},
    "float16": {"dtype": "float16", "bias": True},
    "odd": {"sizes": (188, 31, 123)},
    "one": {"sizes": (1, 7, 1)},
    "head": {"sizes": (4096, 4096, 128256)},
}


def lowered(function: Any, *arguments: Any) -> str:
    text: str = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_lowers_for_cuda(name: str, compiled: None) -> None:
    options = dict(CONFIGURATIONS[name])
    tokens, hidden, vocab = options.pop("sizes", (200, 192, 1000))
    dtype, wanted = options.pop("dtype", "bfloat16"), options.pop("plan", None)
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": dtype, "fused": True}
    chosen = None if wanted is None else plan(**sizes, **wanted)
    with_bias, with_classes = options.pop("bias", False), options.pop("class_weight", False)
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((tokens, hidden), dtype), shape((vocab, hidden), dtype), shape((tokens,), jnp.int32)
    b = shape((vocab,), dtype) if with_bias else None
    k = shape((vocab,), jnp.float32) if with_classes else None

    def loss(x: Any, w: Any, b: Any, y: Any, k: Any) -> Any:
        made = linear_cross_entropy(x, w, y, b, class_weight=k, plan=chosen, backend="pallas", **options)
        return made[0].sum() if isinstance(made, tuple) else made.sum()

    text = lowered(jax.value_and_grad(loss, (0, 1, 2) if with_bias else (0, 1)), x, w, b, y, k)
    assert "mosaic_gpu" in text
    assert "dot_general" not in text  # no product is left to XLA


def test_log_probs_lower_for_cuda(compiled: None) -> None:
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((200, 192), jnp.bfloat16), shape((1000, 192), jnp.bfloat16), shape((200,), jnp.int32)

    def total(x: Any, w: Any, y: Any) -> Any:
        log_prob, entropy = linear_log_probs(x, w, y, with_entropy=True, backend="pallas")
        return log_prob.sum() + entropy.sum()

    assert "mosaic_gpu" in lowered(jax.value_and_grad(total, (0, 1)), x, w, y)


@pytest.mark.parametrize("width", [64, 320])
def test_a_row_is_stored_no_further_than_its_matrix(
    width: int, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that lies in one piece is stored as so many bytes: a wider one would run on into the row below."""
    stored = []
    copy = kernels.plgpu.copy_smem_to_gmem

    def recorded(source: Any, destination: Any, **more: Any) -> None:
        stored.append((source.shape, destination.shape))
        copy(source, destination, **more)

    monkeypatch.setattr(kernels.plgpu, "copy_smem_to_gmem", recorded)
    shape = jax.ShapeDtypeStruct
    places = jnp.zeros(2 * kernels.RUN, jnp.int32)

    def targets(x: Any, out: Any) -> Any:
        reference = jax.new_ref(out)
        lists = {"key": places, "token": places, "value": jnp.ones(places.shape)}
        arguments = {"x": x, "out": reference, "scale": jnp.ones(1)}
        part = kernels.add_targets(lists | arguments)["part"]
        kernels.add_long_runs({"key": places, "scale": arguments["scale"], "part": part, "out": reference})
        return reference[...]

    assert "mosaic_gpu" in lowered(targets, shape((20, width), jnp.bfloat16), shape((100, width), jnp.bfloat16))
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
def test_checkpoint_scan_and_donation_lower(compiled: None) -> None:
    x, w, y = batch()
    x, y = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.ShapeDtypeStruct(y.shape[1:], y.dtype)

    @jax.checkpoint
    def model(x: Any, w: Any, y: Any) -> Any:
        def layer(h: Any, _: Any) -> Any:
            h = jnp.tanh(h)
            return h, linear_cross_entropy(h, w, y, backend="pallas")

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
)


@needs_interpreter
@pytest.mark.case(1)
@pytest.mark.case(23)
@pytest.mark.parametrize(("name", "dtype", "order"), RUNS)
def test_within_the_rule(name: str, dtype: str, order: str, interpreter: None) -> None:
    problem = problem_named(name).with_dtype(dtype)
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": dtype, "fused": True}
    plans = {"default": {}, "tokens": {"order": "tokens", "chunk": 96}, "vocab": {"order": "vocab", "chunk": 64}}
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


@needs_interpreter
def test_log_probs_and_entropy(interpreter: None) -> None:
    rng = np.random.default_rng(3)
    x, w = (np.asarray(jnp.asarray(rng.standard_normal(s), jnp.bfloat16), np.float32) for s in ((20, 12), (70, 12)))
    y = rng.integers(0, 70, 20)
    y[::6] = -100
    g1, g2 = rng.standard_normal((2, 20)).astype(np.float32)
    upstream = {"log_prob_upstream": g1, "entropy_upstream": g2, "logit_scale": 0.7}
    made = PALLAS.run_log_probs(x, w, y, dtype="bfloat16", **upstream)
    true = reference.linear_log_probs(x, w, y, **upstream)
    assert error(made.log_prob, true.log_prob) <= TINY["bfloat16"]
    assert error(made.entropy, true.entropy) <= TINY["bfloat16"]


@needs_interpreter
def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The interpreter can go red: a tile stored over the one before, which is still on its way."""
    monkeypatch.setenv(INTERPRET, "1")
    wait = kernels.plgpu.wait_smem_to_gmem
    monkeypatch.setattr(kernels.plgpu, "wait_smem_to_gmem", lambda n, **more: None if n else wait(n, **more))
    e, x = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((8, 256), jnp.bfloat16)
    numbers = {"rows": jnp.full(1, 8, jnp.int32), "start": jnp.zeros(1, jnp.int32)}
    out = {"out": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    jax.block_until_ready(kernels.weight(numbers | {"e": e, "x": x}, out, columns=64, adds=False))
    assert "RACE DETECTED" in capsys.readouterr().out
