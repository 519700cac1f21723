"""The Pallas kernels of a distillation's rows without a GPU: interpreted, lowered for CUDA under both lines of jax, and
compiled for a GPU that is not there."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")
pytest.importorskip("absl", reason="absl-py is not installed, which JAX's Pallas modules for GPUs import")

import jax.numpy as jnp  # noqa: E402
from compiled_text import copies  # noqa: E402
from distilling import IN_EITHER_ORDER, JaxRows, needs_interpreter, take_order  # noqa: E402
from implementations import ARGUMENTS  # noqa: E402
from test_pallas import INTERPRET, interpreter, lowered  # noqa: E402, F401
from test_pallas_memory import MIB, SPILLED_BYTES, sharding_of  # noqa: E402

from logitless import objectives, reference  # noqa: E402
from logitless.jax_impl import (  # noqa: E402
    dense_distillation_loss,
    distillation_loss,
    sparse_distillation_loss,
)
from logitless.jax_impl.kernels import arithmetic  # noqa: E402
from logitless.jax_impl.kernels import lowered as kernels  # noqa: E402
from logitless.objectives import DistillationSizes, distillation_order  # noqa: E402
from logitless.rounding import round_to  # noqa: E402
from logitless.tolerances import (  # noqa: E402
    ELEMENTS,
    ON_TOP_GRADIENT,
    ON_TOP_LOSS,
    ROUNDED_ONCE,
    TINY,
    error,
)

PALLAS = JaxRows()
ROWS, TILE = "distillation_rows", "distillation_tile"
OTHERS = {"distillation_others", "distillation_others_gradient"}
N, D, D_TEACHER = 6, 8, 5
IDS = 7
HARD = {"nll_coef": 0.4}
CAPPED = {"softcap": 4.0, "logit_scale": 0.8}
# (vocabulary, dtype, options). A piece has 128 or 256 logits, four of them are one block. Shorter than a warpgroup,
# one piece and a shared one, odd, two blocks and a rest.
PROBLEMS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "float32", {"beta": 0.3}),
    "short": (70, "bfloat16", {"beta": 0.0, **HARD}),
    "piece": (256, "float16", {"beta": 1.0, **CAPPED}),
    "shared": (300, "float32", {"beta": 0.3, **HARD, **CAPPED}),
    "odd": (1031, "float32", {"beta": 0.0, **HARD, "temperature": 1.7}),
    "blocks": (2300, "bfloat16", {"beta": 0.6, **HARD, "temperature": "each", "softcap": 4.0}),
    "reverse": (1540, "float32", {"beta": 1.0, "temperature": "each"}),
}


def problem(name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Arrays of a call with a teacher's head, its options and its dtype; of tokens that do not count NaN."""
    vocab, dtype, options = PROBLEMS[name]
    rng = np.random.default_rng(1)
    shapes = {"hidden": (N, D), "weight": (vocab, D), "bias": (vocab,)}
    shapes |= {"teacher_hidden": (N, D_TEACHER), "teacher_weight": (vocab, D_TEACHER), "teacher_bias": (vocab,)}
    a: dict[str, Any] = {key: round_to(rng.standard_normal(shape), dtype) for key, shape in shapes.items()}
    a["mask"] = np.array([1, 0, 1, 1, 1, 0])
    if "nll_coef" in options:
        a["target"] = np.array([vocab - 1, 3, -100, 0, vocab // 2, 5]) % vocab
        a["target"][2] = -100
    if options.get("temperature") == "each":
        options = {key: value for key, value in options.items() if key != "temperature"}
        a["temperature"] = rng.uniform(0.5, 3.0, N).astype(np.float32)
    return a, options, dtype


def truth(a: dict[str, Any], options: dict[str, Any]) -> Any:
    """Of a given teacher, or of the dense one whose probabilities the head gives, in float64."""
    if "ids" in a:
        return reference.sparse_distillation_loss(**a, **options)
    z = a["teacher_hidden"].astype(np.float64) @ a["teacher_weight"].T.astype(np.float64) + a["teacher_bias"]
    z = z / (a["temperature"][:, None] if "temperature" in a else options.get("temperature", 1.0))
    p = np.exp(z - z.max(-1, keepdims=True))
    own = {key: values for key, values in a.items() if not key.startswith("teacher")}
    return reference.dense_distillation_loss(**own, teacher=p / p.sum(-1, keepdims=True), **options)


def with_ids(a: dict[str, Any]) -> dict[str, Any]:
    """In place of the teacher's head up to 5 ids a token with 0.8 of the mass, the last column and the target among
    those of some. One place has no id."""
    a = {key: values for key, values in a.items() if not key.startswith("teacher")}
    rng, vocab = np.random.default_rng(4), len(a["weight"])
    ids = np.stack([rng.permutation(vocab)[: min(5, vocab)] for _ in range(N)])
    ids[0, 0], ids[3, 0] = vocab - 1, 0
    for row in ids:  # those places may have had the id already
        row[1:][row[1:] == row[0]] = -100
    ids[4, 1:2] = -100
    return a | {"ids": ids, "probs": np.full(ids.shape, 0.8 / ids.shape[1], np.float32)}


@needs_interpreter
@pytest.mark.late(where=lambda p: p["name"] in ("piece", "reverse", "one"))
@pytest.mark.case(44)
@IN_EITHER_ORDER
@pytest.mark.parametrize("teacher", ["head", "ids"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_within_the_rule(
    name: str,
    teacher: str,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
    interpreter: None,  # noqa: F811
) -> None:
    """Losses of both signs. Tokens in two chunks, of which the second has fewer. Tiles of half the vocabulary."""
    function: Callable[..., Any] = distillation_loss
    a, options, dtype = problem(name)
    if teacher == "ids":
        function, a = sparse_distillation_loss, with_ids(a)
        options = options | {"rest": "class" if options["beta"] in (0.3, 1.0) else "drop"}
    vocab = len(a["weight"])
    take_order(monkeypatch, order, 4)
    monkeypatch.setattr("logitless.objectives.KERNEL_TILE", (4, -(-vocab // 2)))
    monkeypatch.setattr("logitless.objectives.VOCAB_TILE", 1)
    monkeypatch.setattr("logitless.objectives.TOKEN_TILE", 1)
    upstream = np.random.default_rng(2).standard_normal(N).astype(np.float32)
    true = truth(a, options | {"reduction": "none", "upstream": upstream})
    for key in ("hidden", "teacher_hidden", "temperature", "probs"):
        if key in a:
            a[key][a["mask"] == 0] = np.nan
    own = {key: PALLAS.array(a[key], dtype) for key in ARGUMENTS}
    known = {key: PALLAS.array(a[key], dtype if key.startswith("teacher") else None) for key in a if key not in own}

    def loss(own: dict[str, Any]) -> Any:
        losses = function(**own, **known, reduction="none", backend="pallas", **options)
        return (losses * upstream).sum(), losses

    (_, losses), grads = jax.value_and_grad(loss, has_aux=True)(own)
    assert error(losses, true.losses) <= ON_TOP_LOSS[dtype]
    for key, grad in grads.items():
        expected = getattr(true, f"{key}_grad")
        assert error(grad, expected) <= ON_TOP_GRADIENT[dtype], key
        assert vocab == 1 or np.abs(expected).max() > 0, key
    assert not np.asarray(grads["hidden"][a["mask"] == 0]).any()


@needs_interpreter
@pytest.mark.parametrize(("sizes", "dtype"), [((70, 64, 200), "bfloat16"), ((40, 128, 264), "float16")])
def test_dw_of_a_held_gradient_is_rounded_once(
    sizes: tuple[int, int, int],
    dtype: str,
    interpreter: None,  # noqa: F811
) -> None:
    """Tiles with an edge along every axis."""
    from logitless.jax_impl.distillation import fused

    tokens, size, vocab = sizes
    rng = np.random.default_rng(3)
    gradient, x = (jnp.asarray(rng.standard_normal((tokens, width)), dtype) for width in (vocab, size))
    assert fused.has_product(gradient, x, dtype)
    made, unit = fused.weight_gradient(gradient, x, jnp.float32(1 / 7)), np.float32(1 / 7)
    true = np.asarray(gradient, np.float64).T @ np.asarray(x, np.float64) * np.float64(unit)
    assert made.dtype == dtype
    assert error(made, true) <= ROUNDED_ONCE * error(jnp.asarray(true, dtype), true)


def test_which_dw_has_a_kernel() -> None:
    """Rows that start on 16 bytes, and operands of dW's own 16 bits."""
    from logitless.jax_impl.distillation import fused

    for sizes, dtype, wanted, expected in (
        ((8, 64, 72), "bfloat16", "bfloat16", True),
        ((8, 64, 70), "bfloat16", "bfloat16", False),
        ((8, 60, 72), "bfloat16", "bfloat16", False),
        ((0, 64, 72), "bfloat16", "bfloat16", False),
        ((8, 64, 72), "bfloat16", "float32", False),
        ((8, 64, 72), "float32", "float32", False),
    ):
        tokens, size, vocab = sizes
        gradient, x = (jnp.zeros((tokens, width), dtype) for width in (vocab, size))
        assert fused.has_product(gradient, x, wanted) == expected, (sizes, dtype, wanted)


@needs_interpreter
@pytest.mark.case(32)
def test_vmap_goes_over_one_problem_after_the_other(interpreter: None) -> None:  # noqa: F811
    a, _, _ = problem("shared")
    teacher = {key: values for key, values in a.items() if key.startswith("teacher")}

    def loss(x: Any, w: Any) -> Any:
        return distillation_loss(x, w, **teacher, target=a["target"], beta=0.3, nll_coef=0.4, backend="pallas")

    step, (x, w) = jax.grad(loss, (0, 1)), map(jnp.asarray, (a["hidden"], a["weight"]))
    mapped = jax.vmap(step, in_axes=(0, None))(jnp.stack([x, 2 * x]), w)
    for number, one in enumerate((x, 2 * x)):
        for expected, many in zip(step(one, w), mapped, strict=True):
            np.testing.assert_allclose(many[number], expected, **ELEMENTS["mapped"])


def test_the_arithmetic_has_its_digits() -> None:
    """Near 0 and near 1, where a GPU's own functions lose them."""
    small = np.concatenate([-np.logspace(-12, 1, 200), [0.0]]).astype(np.float32)
    sums = np.concatenate([1 + np.logspace(-6, 0, 100), np.logspace(0, 9, 200)]).astype(np.float32)
    shares = np.concatenate([np.logspace(-12, 0, 200), [0.0]]).astype(np.float32)
    below = np.concatenate([-np.logspace(-12, -0.01, 200), [0.0]]).astype(np.float32)
    for function, like, values in (
        (arithmetic.expm1_below, np.expm1, small),
        (arithmetic.log_of_sum, np.log, sums),
        (arithmetic.log1p_of_share, np.log1p, shares),
        (arithmetic.log1p_below, np.log1p, below),
    ):
        found, true = np.asarray(function(jnp.asarray(values)), np.float64), like(values.astype(np.float64))
        np.testing.assert_allclose(found, true, rtol=TINY["float32"], atol=0.0)
    assert arithmetic.log_of_sum(jnp.float32(0.0)) == -np.inf


# ---------------------------------------------------------------------------------------------------------------------
# Lowered for CUDA


def array(*shape: int, dtype: Any = jnp.bfloat16, sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def step_of(
    way: str, tokens: int, sizes: tuple[int, int, int], dtype: Any = "bfloat16", sharding: Any = None, **options: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Loss and gradients of a distillation from "head", "spread", "class" or "dense", and what they take."""
    hidden, teacher_hidden, vocab = sizes
    of = functools.partial(array, dtype=dtype, sharding=sharding)
    number = functools.partial(array, tokens, dtype=jnp.float32, sharding=sharding)
    known = {
        "head": [of(tokens, teacher_hidden), of(vocab, teacher_hidden)],
        "dense": [of(tokens, vocab)],
    }.get(way, [array(tokens, IDS, dtype=jnp.int32, sharding=sharding), number(IDS)])
    function: Any = {"head": distillation_loss, "dense": dense_distillation_loss}.get(way, sparse_distillation_loss)
    options = {"beta": 0.5, "softcap": 30.0, "backend": "pallas", **options}
    options |= {"rest": way} if way in ("spread", "class") else {}

    def loss(x: Any, w: Any, b: Any, y: Any, tau: Any, *teacher: Any) -> Any:
        hard = {"target": y} if options.get("nll_coef") else {}
        return function(x, w, *teacher, b, temperature=tau, **hard, **options)

    ids = array(tokens, dtype=jnp.int32, sharding=sharding)
    arrays = [of(tokens, hidden), of(vocab, hidden), of(vocab), ids, number()]
    return jax.value_and_grad(loss, (0, 1, 2)), [*arrays, *known]


def kernels_of(function: Any, arrays: list[Any]) -> set[str]:
    """The names of the kernels that a program calls."""
    called = set()
    with pytest.MonkeyPatch.context() as patch:
        call = kernels.call
        patch.setattr(kernels, "call", lambda s, *rest: (called.add(s.name), call(s, *rest))[1])
        jax.jit(function).trace(*arrays)
    return called


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are lowered. What was traced for the interpreter is forgotten."""
    monkeypatch.setenv(INTERPRET, "0")
    jax.clear_caches()


@IN_EITHER_ORDER
@pytest.mark.parametrize("way", ["head", "spread", "dense", "class"])
def test_which_calls_take_the_kernels(way: str, order: str, monkeypatch: pytest.MonkeyPatch, compiled: None) -> None:
    """Of every teacher, in both orders."""
    take_order(monkeypatch, order)
    wanted = {ROWS} if order == "held" else {ROWS, TILE}
    assert kernels_of(*step_of(way, 20, (16, 24, 300))) == (OTHERS if way == "class" else wanted)
    assert kernels_of(*step_of(way, 20, (16, 24, 300), backend="xla")) == set()


@pytest.mark.parametrize("order", ["held", "again"])
@pytest.mark.parametrize(
    ("way", "vocab", "dtype", "options"),
    [
        ("head", 300, "bfloat16", {"nll_coef": 0.5}),
        ("head", 1031, "float32", {"beta": 0.0, "teacher_softcap": 20.0}),
        ("dense", 70, "float16", {"beta": 1.0, "nll_coef": 0.5, "softcap": None}),
        ("spread", 2300, "float32", {"beta": 0.0, "nll_coef": 0.5}),
        ("class", 1031, "float32", {"nll_coef": 0.5}),
        ("class", 70, "bfloat16", {"softcap": None}),
    ],
)
def test_lowers_for_cuda(
    way: str, vocab: int, dtype: str, options: dict[str, Any], order: str, monkeypatch: pytest.MonkeyPatch,
    compiled: None,
) -> None:  # fmt: skip
    take_order(monkeypatch, order, 16)
    with jax.enable_x64(way == "dense"), jax.numpy_dtype_promotion("strict" if way == "spread" else "standard"):
        step, arrays = step_of(way, 40, (16, 24, vocab), dtype, **options)
        assert "mosaic_gpu" in lowered(step, *arrays)


@pytest.mark.case(32)
def test_vmap_lowers_or_says_why_not(compiled: None) -> None:
    step, arrays = step_of("head", 16, (16, 24, 300))
    mapped = jax.vmap(step, (0, *(None,) * (len(arrays) - 1)))
    batch = array(3, *arrays[0].shape), *arrays[1:]
    if jax.__version_info__ >= (0, 11):
        assert "mosaic_gpu" in lowered(mapped, *batch)
        return
    with pytest.raises(NotImplementedError, match=r"under jax.vmap needs jax 0\.11 or newer.*backend='xla'"):
        lowered(mapped, *batch)


@pytest.mark.case(32)
@IN_EITHER_ORDER
def test_checkpoint_and_scan_lower(order: str, monkeypatch: pytest.MonkeyPatch, compiled: None) -> None:
    take_order(monkeypatch, order, 16)
    x, w, teacher = array(40, 16), array(300, 16), (array(40, 24), array(300, 24))

    @jax.checkpoint
    def model(x: Any, w: Any, *teacher: Any) -> Any:
        def layer(h: Any, _: Any) -> Any:
            h = jnp.tanh(h)
            return h, distillation_loss(h, w, *teacher, backend="pallas")

        return jax.lax.scan(layer, x, None, length=3)[1].sum()

    assert "mosaic_gpu" in lowered(jax.grad(model, (0, 1)), x, w, *teacher)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on JAX's first device, a GPU, the kernels run")
def test_a_device_without_kernels_is_refused(compiled: None) -> None:
    x, w = jnp.ones((3, 4)), jnp.ones((20, 4))
    with pytest.raises(NotImplementedError, match="its kernels need a CUDA device, not cpu"):
        distillation_loss(x, w, x, w, backend="pallas")


def test_a_dtype_without_kernels_is_refused(compiled: None) -> None:
    wide = r"'pallas' cannot run here: .* bfloat16, float16 and float32, not float64.*backend='xla' can"
    with jax.enable_x64(True):
        step, arrays = step_of("head", 8, (4, 4, 20), "float64")
        with pytest.raises(NotImplementedError, match=wide):
            lowered(step, *arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled for a GPU that is not there

ROWS_BY: dict[str, objectives.RowsBy] = {
    "head": "pallas",
    "dense": "pallas, probabilities",
    "class": "pallas, ids",
}
# (way, dtype, tokens, hidden, teacher's hidden, vocabulary, budget [MiB]): a held gradient, and tiles with few and with
# many bytes in rows of the weights.
CALLS: dict[str, tuple[str, str, int, int, int, int, int | None]] = {
    "held": ("head", "bfloat16", 2048, 64, 64, 128256, None),
    "held float32": ("head", "float32", 2048, 64, 64, 128256, None),
    "tiles": ("head", "bfloat16", 2048, 64, 64, 128256, 100),
    "rows of weights": ("head", "float32", 200, 1024, 8192, 32769, 80),
    "probabilities": ("dense", "float32", 2048, 64, 0, 128256, 150),
    "held ids": ("class", "bfloat16", 2048, 64, 0, 128256, None),
    "ids": ("class", "bfloat16", 2048, 64, 0, 128256, 100),
}


@pytest.mark.late(where=lambda p: p["name"] in ("held float32", "rows of weights", "probabilities"))
@pytest.mark.case(31)
@pytest.mark.parametrize("name", CALLS)
def test_within_the_promise_of_an_h200(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], compiled: None
) -> None:
    """Scratch, spilled registers, and copies of a chunk's matrix."""
    sharding = sharding_of("described")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    way, dtype, tokens, hidden, teacher_hidden, vocab, budget = CALLS[name]
    memory_budget = None if budget is None else budget * MIB
    sizes = DistillationSizes(tokens, hidden, vocab, dtype, teacher_hidden, IDS + 1 if way == "class" else 0)
    by = ROWS_BY[way]
    itemsize = jnp.dtype(dtype).itemsize
    order = distillation_order(sizes, operand_itemsize=itemsize, by=by, memory_budget=memory_budget)
    assert (order.again is None) == name.startswith("held"), name
    step, arrays = step_of(
        way, tokens, (hidden, teacher_hidden, vocab), dtype, sharding, nll_coef=0.5, memory_budget=memory_budget
    )
    program = jax.jit(step).lower(*arrays).compile()
    used, promised = program.memory_analysis().temp_size_in_bytes, order.scratch_bytes
    told = f"{used / MIB:.0f} MiB of {promised / MIB:.0f} promised"
    assert used <= promised, told
    assert promised <= 1.4 * used + MIB, told
    tile = order.again
    matrix = itemsize * (tile.token_chunk * tile.vocab_chunk if tile else order.token_chunk * vocab)
    assert copies(program.as_text(), matrix) == []
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))]
    assert spilled
    assert max(spilled) <= SPILLED_BYTES
