"""dW added to a buffer (accumulate_into), and dW made after hidden's gradient (defer_weight_grad), against float64."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from logitless import plan as make_plan  # noqa: E402
from logitless import reference  # noqa: E402
from logitless.jax_impl import (  # noqa: E402
    DeferredWeightGrad,
    WeightGradQueue,
    checks,
    linear_cross_entropy,
    linear_cross_entropy_value_and_grad,
)
from logitless.jax_impl.kernels.architecture import can_interpret  # noqa: E402
from logitless.tolerances import GRADIENT, ROUNDED_ONCE, TINY, error  # noqa: E402

TOKENS, SIZE, VOCAB = 40, 16, 70
UPSTREAM = 3.0
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}
GRADIENTS = ("hidden", "weight", "bias")


def arrays(dtype: str = "float32", weight_dtype: str | None = None) -> dict[str, Any]:
    """Numbers that ``dtype`` holds, whatever the weight's dtype."""
    rng = np.random.default_rng(1)
    head = weight_dtype or dtype
    return {
        "hidden": jnp.asarray(rng.normal(size=(TOKENS, SIZE)), dtype),
        "weight": jnp.asarray(rng.normal(size=(VOCAB, SIZE)) * 0.3, dtype).astype(head),
        "target": jnp.asarray(rng.integers(0, VOCAB, TOKENS), jnp.int32),
        "bias": jnp.asarray(rng.normal(size=VOCAB), dtype).astype(head),
    }


def sizes(**more: Any) -> Any:
    return make_plan(tokens=TOKENS, hidden=SIZE, vocab=VOCAB, **({"dtype": "float32", "device": "cpu"} | more))


def cut(columns: int, **more: Any) -> Any:
    """A plan of the tokens order whose blocks of the vocabulary are narrower than it."""
    return dataclasses.replace(sizes(order="tokens", **more), vocab_chunk=columns)


TEMPERATURE = np.linspace(0.5, 2.0, TOKENS).astype(np.float32)
# name → (dtype, dtype of the weight, dtype of the buffer, further options)
WAYS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "plain": ("float32", "float32", "float32", OPTIONS),
    "no smoothing": ("float32", "float32", "float32", {"reduction": "sum", "shift": 1}),
    "blocks": ("float32", "float32", "float32", OPTIONS | {"plan": cut(30)}),
    "chunks": ("float32", "float32", "float32", OPTIONS | {"plan": cut(30, chunk=16)}),
    "chunks, two passes": ("float32", "float32", "float32", OPTIONS | {"plan": cut(30, chunk=16, one_pass=False)}),
    "vocab": ("float32", "float32", "float32", OPTIONS | {"softcap": 3.0, "plan": sizes(order="vocab", chunk=30)}),
    "both": ("float32", "float32", "float32", OPTIONS | {"plan": sizes(order="both", chunk=16)}),
    "none": ("float32", "float32", "float32", OPTIONS | {"reduction": "none"}),
    "temperatures": ("float32", "float32", "float32", OPTIONS | {"temperature": TEMPERATURE}),
    "class weights": (
        "float32", "float32", "float32",
        OPTIONS | {"class_weight": np.linspace(0.5, 2, VOCAB), "token_weight": np.linspace(0, 1, TOKENS)},
    ),
    "wide": ("bfloat16", "bfloat16", "float32", OPTIONS),
    "wide, chunks": ("bfloat16", "bfloat16", "float32", OPTIONS | {"plan": cut(30, chunk=16, dtype="bfloat16")}),
    "wide weight": ("bfloat16", "float32", "float32", OPTIONS),
    "half": ("float16", "float16", "float32", OPTIONS | {"plan": cut(30, chunk=16, dtype="float16")}),
    "narrow": ("bfloat16", "bfloat16", "bfloat16", OPTIONS),
    "narrow, vocab": (
        "bfloat16", "bfloat16", "bfloat16", OPTIONS | {"plan": sizes(order="vocab", chunk=30, dtype="bfloat16")},
    ),
}  # fmt: skip
# test_deferred has them all.
ALONE = ("plain", "no smoothing", "vocab", "both", "none", "wide weight", "half")
ADDED = (
    "plain",
    "chunks, two passes",
    "vocab",
    "both",
    "none",
    "class weights",
    "wide, chunks",
    "wide weight",
    "narrow, vocab",
)
for each in WAYS.values():
    for name in ("class_weight", "token_weight"):
        if name in each[3]:
            each[3][name] = each[3][name].astype(np.float32)


def truth(given: dict[str, Any], options: dict[str, Any]) -> Any:
    exact = {name: np.asarray(a, np.int64 if name == "target" else np.float64) for name, a in given.items()}
    known = {name: value for name, value in options.items() if name not in ("plan", "backend")}
    upstream = np.full(TOKENS, UPSTREAM) if options.get("reduction") == "none" else UPSTREAM
    return reference.linear_cross_entropy(**exact, upstream=upstream, **known)


def assert_close(made: Any, true: Any, dtype: str) -> None:
    assert error(np.asarray(made, np.float64), true) <= GRADIENT[dtype]


@pytest.mark.late(where=lambda p: p["way"] not in ALONE)
@pytest.mark.parametrize("way", WAYS)
def test_without_either_it_is_value_and_grad(way: str) -> None:
    dtype, head, _, options = WAYS[way]
    given, true = arrays(dtype, head), truth(arrays(dtype, head), options)
    loss, gradients = linear_cross_entropy_value_and_grad(**given, upstream=UPSTREAM, **options)
    assert error(loss, true.loss) <= 4 * TINY["float32"]
    for name, made in zip(GRADIENTS, gradients, strict=True):
        assert (made.shape, made.dtype) == (given[name].shape, given[name].dtype)
        assert_close(made, getattr(true, f"{name}_grad"), dtype)


@pytest.mark.late(where=lambda p: p["way"] not in ADDED)
@pytest.mark.parametrize("way", WAYS)
def test_added_to_what_is_there(way: str) -> None:
    dtype, head, buffer_dtype, options = WAYS[way]
    given, true = arrays(dtype, head), truth(arrays(dtype, head), options)
    start = 0.0 if buffer_dtype == "bfloat16" else 0.5  # beside 0.5 bfloat16 has no room for a gradient
    buffer = jnp.full((VOCAB, SIZE), start, buffer_dtype)
    loss, (dhidden, added, dbias) = linear_cross_entropy_value_and_grad(
        **given, upstream=UPSTREAM, accumulate_into=buffer, **options
    )
    assert error(loss, true.loss) <= 4 * TINY["float32"]
    assert added.dtype == buffer_dtype
    assert bool((buffer == start).all())
    assert_close(np.asarray(added, np.float64) - start, true.weight_grad, dtype)
    assert_close(dhidden, true.hidden_grad, dtype)
    assert_close(dbias, true.bias_grad, dtype)


@pytest.mark.every_value
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_deferred(way: str, into: bool) -> None:
    """In a jit of its own, from a pytree that left another."""
    dtype, head, buffer_dtype, options = WAYS[way]
    given, true = arrays(dtype, head), truth(arrays(dtype, head), options)

    @jax.jit
    def first(given: dict[str, Any]) -> Any:
        return linear_cross_entropy_value_and_grad(**given, upstream=UPSTREAM, defer_weight_grad=True, **options)

    loss, (dhidden, deferred) = first(given)
    assert isinstance(deferred, DeferredWeightGrad)
    assert error(loss, true.loss) <= 4 * TINY["float32"]
    assert_close(dhidden, true.hidden_grad, dtype)
    start = 0.5 if into and buffer_dtype != "bfloat16" else 0.0
    buffer = jnp.full((VOCAB, SIZE), start, buffer_dtype) if into else None
    dweight, dbias = jax.jit(lambda later, w, into: later.compute(w, accumulate_into=into))(
        deferred, given["weight"], buffer
    )
    assert dweight.dtype == (buffer_dtype if into else head)
    assert_close(np.asarray(dweight, np.float64) - start, true.weight_grad, dtype)
    assert_close(dbias, true.bias_grad, dtype)


@jax.jit
def first_half(given: dict[str, Any]) -> Any:
    return linear_cross_entropy_value_and_grad(**given, upstream=UPSTREAM, defer_weight_grad=True)[1][1]


def microbatch(number: int, dtype: str = "float32") -> dict[str, Any]:
    """The call's arguments, with hidden states of the number's own."""
    given = arrays(dtype)
    return given | {"hidden": given["hidden"] * (1 + number)}


def assert_sums(made: Any, numbers: list[int], start: float = 0.0) -> None:
    true = [truth(microbatch(number), {}) for number in numbers]
    assert_close(np.asarray(made[0], np.float64) - start, sum(each.weight_grad for each in true), "float32")
    assert_close(made[1], sum(each.bias_grad for each in true), "float32")


@pytest.mark.parametrize("into", [False, True])
def test_a_queue_computes_the_oldest_and_holds_no_more_than_its_limit(into: bool) -> None:
    buffer = jnp.full((VOCAB, SIZE), 0.5) if into else None
    queue, weight = WeightGradQueue(2, accumulate_into=buffer), arrays()["weight"]
    with queue:
        for number in (0, 1):
            queue.put(first_half(microbatch(number)), weight)
        assert len(queue) == 2
        queue.put(first_half(microbatch(2)), weight)  # the third: the oldest is computed at once
        assert len(queue) == 2
        if not into:
            assert_sums(queue.gradients(), [0])
        assert queue.compute(1) == 1
        if not into:
            assert_sums(queue.gradients(), [1])
        assert (queue.compute(0), len(queue)) == (0, 1)
        queue.put(first_half(microbatch(3)), weight)
    assert (len(queue), queue.compute()) == (0, 0)  # the end has computed the rest
    assert_sums(queue.gradients(), [0, 1, 2, 3] if into else [2, 3], 0.5 if into else 0.0)
    assert queue.gradients() == (None, None)


def test_an_exception_drops_all_that_wait() -> None:
    queue, weight = WeightGradQueue(3), arrays()["weight"]

    def fill() -> list[Any]:
        held = [first_half(microbatch(number)) for number in range(3)]
        for each in held:
            queue.put(each, weight)
        assert len(queue) == 3
        return [weakref.ref(each) for each in held]

    def fail_in_the_block() -> None:
        with queue:
            raise KeyError(fill())

    with pytest.raises(KeyError) as caught:
        fail_in_the_block()
    assert not any(reference() is not None for reference in caught.value.args[0])
    assert (len(queue), queue.gradients()) == (0, (None, None))
    queue.put(first_half(microbatch(0)), weight)
    queue.put(first_half(microbatch(1)), weight[:-1])
    queue.put(first_half(microbatch(2)), weight)
    with pytest.raises(ValueError, match=r"weight: got shape .* allowed is the call's"):
        queue.compute()
    assert len(queue) == 0
    assert_sums(queue.gradients(), [0])


def test_what_a_queue_refuses() -> None:
    for limit, kind in ((0, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(kind, match="limit: got "):
            WeightGradQueue(limit)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="accumulate_into: got "):
        WeightGradQueue(1, accumulate_into=[1.0])  # type: ignore[arg-type]
    queue, deferred = WeightGradQueue(1), first_half(microbatch(0))
    with pytest.raises(TypeError, match="weight_grad: got int, allowed is a DeferredWeightGrad"):
        queue.put(3, arrays()["weight"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight: got "):
        queue.put(deferred, None)  # type: ignore[arg-type]
    for count, wrong in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(wrong, match="count: got "):
            queue.compute(count)  # type: ignore[arg-type]


def test_what_is_kept() -> None:
    """Beside the arguments three numbers a token and the upstream gradient; not the weight."""
    given = arrays()
    _, (_, deferred) = linear_cross_entropy_value_and_grad(**given, defer_weight_grad=True)
    kept = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(deferred)}
    arguments = sum(given[name].nbytes for name in ("hidden", "target", "bias"))
    assert sum(kept.values()) == arguments + 12 * TOKENS + 4


def test_no_bias_upstream_per_token_and_statistics() -> None:
    given = arrays()
    del given["bias"]
    upstream = jnp.linspace(0, 2, TOKENS)
    (loss, stats), (_, dweight, dbias) = linear_cross_entropy_value_and_grad(
        **given, upstream=upstream, reduction="none", return_stats=True
    )
    true = reference.linear_cross_entropy(
        *(np.asarray(given[name]) for name in ("hidden", "weight", "target")), upstream=upstream, reduction="none"
    )
    assert dbias is None
    assert error(loss, true.loss) <= 4 * TINY["float32"]
    assert error(stats.lse, true.stats.lse) <= 4 * TINY["float32"]
    assert_close(dweight, true.weight_grad, "float32")


def test_micro_batches_and_float64() -> None:
    """Two halves with one normalizer add up to the whole, in lax.scan and in float64."""
    with jax.enable_x64(True):
        given, true = arrays("float64"), truth(arrays("float64"), {})
        halves = [given[name].reshape(2, TOKENS // 2, *given[name].shape[1:]) for name in ("hidden", "target")]

        def step(buffer: Any, half: Any) -> Any:
            loss, (dhidden, buffer, _) = linear_cross_entropy_value_and_grad(
                half[0], given["weight"], half[1], given["bias"], upstream=UPSTREAM, accumulate_into=buffer,
                normalizer=TOKENS,
            )  # fmt: skip
            return buffer, (loss, dhidden)

        buffer, (losses, dhidden) = jax.lax.scan(step, jnp.zeros((VOCAB, SIZE)), tuple(halves))
        assert buffer.dtype == jnp.float64
        assert error(losses.sum(), true.loss) <= TINY["float64"]
        assert error(buffer, true.weight_grad) <= TINY["float64"]
        assert error(dhidden.reshape(TOKENS, SIZE), true.hidden_grad) <= TINY["float64"]


@pytest.mark.every_value
@pytest.mark.parametrize("how", ["at once", "deferred", "a reference"])
@pytest.mark.parametrize(
    ("chunks", "dtype", "buffer_dtype"),
    [
        ({"order": "tokens", "chunk": 16}, "float32", "float32"),
        ({"order": "tokens", "chunk": 16, "one_pass": False}, "float32", "float32"),
        ({"order": "tokens", "chunk": 6}, "float32", "float32"),
        ({"order": "tokens", "chunk": 6, "one_pass": False}, "bfloat16", "float32"),
        ({"order": "vocab", "chunk": 250}, "float32", "float32"),
        ({"order": "vocab", "chunk": 250}, "bfloat16", "float32"),
        ({"order": "vocab", "chunk": 250}, "bfloat16", "bfloat16"),
    ],
)
def test_a_donated_buffer_is_the_result(chunks: dict[str, Any], dtype: str, buffer_dtype: str, how: str) -> None:
    """dW is added in the buffer's own memory, and nothing of its size is made."""
    tokens, size, vocab = 16, 256, 4000
    plan = make_plan(tokens=tokens, hidden=size, vocab=vocab, dtype=dtype, device="cpu", **chunks)
    plan = dataclasses.replace(plan, vocab_chunk=250)

    def step(x: Any, w: Any, y: Any, buffer: Any) -> Any:
        options: dict[str, Any] = {"plan": plan, "label_smoothing": 0.1}
        if how == "deferred":
            _, (dhidden, deferred) = linear_cross_entropy_value_and_grad(x, w, y, defer_weight_grad=True, **options)
            return dhidden, deferred.compute(w, accumulate_into=buffer)
        if how == "at once":
            return linear_cross_entropy_value_and_grad(x, w, y, accumulate_into=buffer, **options)
        reference = jax.new_ref(buffer)
        value, (dhidden, added, _) = linear_cross_entropy_value_and_grad(
            x, w, y, accumulate_into=reference[...], **options
        )
        reference[...] = added
        return value, dhidden, jax.freeze(reference)

    def like(*shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    buffer = like(vocab, size, dtype=buffer_dtype)
    given = (like(tokens, size), like(vocab, size), like(tokens, dtype="int32"), buffer)
    memory = jax.jit(step, donate_argnums=3).lower(*given).compile().memory_analysis()
    whole = buffer.size * buffer.dtype.itemsize
    assert memory.alias_size_in_bytes == whole
    assert memory.output_size_in_bytes - whole < whole / 2
    assert memory.temp_size_in_bytes < whole / 2


def test_mapped() -> None:
    given = arrays()
    xs = jnp.stack([given["hidden"], 2 * given["hidden"]])

    def one(x: Any) -> Any:
        loss, (dhidden, deferred) = linear_cross_entropy_value_and_grad(
            x, given["weight"], given["target"], defer_weight_grad=True
        )
        return loss, dhidden, deferred.compute(given["weight"])[0]

    losses, dhidden, dweight = jax.vmap(one)(xs)
    for i in range(2):
        true = reference.linear_cross_entropy(
            *(np.asarray(array, np.float64) for array in (xs[i], given["weight"])), np.asarray(given["target"])
        )
        assert error(losses[i], true.loss) <= 4 * TINY["float32"]
        assert_close(dhidden[i], true.hidden_grad, "float32")
        assert_close(dweight[i], true.weight_grad, "float32")


@pytest.mark.case(32)
def test_a_derivative_is_refused() -> None:
    given = arrays()

    def loss(hidden: Any) -> Any:
        return linear_cross_entropy_value_and_grad(hidden, given["weight"], given["target"])[0]

    with pytest.raises(NotImplementedError, match="got arrays that are differentiated, allowed are constants"):
        jax.grad(loss)(given["hidden"])
    _, (_, deferred) = linear_cross_entropy_value_and_grad(**given, defer_weight_grad=True)
    with pytest.raises(NotImplementedError, match="got arrays that are differentiated, allowed are constants"):
        jax.grad(lambda weight: deferred.compute(weight)[0].sum())(given["weight"])


@pytest.mark.case(9)
@pytest.mark.parametrize(
    ("buffer", "kind", "words"),
    [
        (jnp.zeros((VOCAB, SIZE + 1)), ValueError, "got shape (70, 17), allowed is weight's (70, 16)"),
        (jnp.zeros((VOCAB, SIZE), "float16"), TypeError, "got dtype float16, allowed are float32 and weight's float32"),
        ([1.0], TypeError, "got list, allowed is a jax.Array"),
    ],
)
def test_other_buffers_are_refused(buffer: Any, kind: Any, words: str) -> None:
    given = arrays()
    _, (_, deferred) = linear_cross_entropy_value_and_grad(**given, defer_weight_grad=True)
    for call in (
        lambda: linear_cross_entropy_value_and_grad(**given, accumulate_into=buffer),
        lambda: deferred.compute(given["weight"], accumulate_into=buffer),
    ):
        with pytest.raises(kind, match="accumulate_into: ") as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.case(9)
def test_what_does_not_go_together() -> None:
    given, buffer = arrays(), jnp.zeros((VOCAB, SIZE))
    with pytest.raises(ValueError, match="accumulate_into: got a buffer beside defer_weight_grad"):
        linear_cross_entropy_value_and_grad(**given, accumulate_into=buffer, defer_weight_grad=True)
    with pytest.raises(NotImplementedError, match="backend: 'pallas' cannot run here: its kernels add dW to no buffer"):
        linear_cross_entropy_value_and_grad(**given, accumulate_into=buffer, backend="pallas")
    low, narrow = arrays("bfloat16"), jnp.zeros((VOCAB, SIZE), "bfloat16")
    plan = sizes(order="tokens", chunk=16, dtype="bfloat16")
    words = "plan: got one of 3 chunks of tokens beside accumulate_into of bfloat16, allowed is one chunk"
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy_value_and_grad(**low, accumulate_into=narrow, plan=plan)
    _, (_, deferred) = linear_cross_entropy_value_and_grad(**low, defer_weight_grad=True, plan=plan)
    with pytest.raises(ValueError, match=words):
        deferred.compute(low["weight"], accumulate_into=narrow)
    for upstream, kind in (
        (jnp.ones(TOKENS), ValueError), (float("nan"), ValueError), ("1", TypeError), (jnp.ones((), "int32"), TypeError)
    ):  # fmt: skip
        with pytest.raises(kind, match=r"upstream: got .+ allowed"):
            linear_cross_entropy_value_and_grad(**given, upstream=upstream)


def test_where_the_kernels_would_run_a_warning_says_why_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = checks.chosen_backend

    def on_a_gpu(name: str | None, array: Any, reason: str | None, unavailable: Any) -> str:
        return "pallas" if name is None and reason is None else chosen(name, array, reason, unavailable)

    monkeypatch.setattr(checks, "chosen_backend", on_a_gpu)
    given, buffer = arrays(), jnp.zeros((VOCAB, SIZE))
    with pytest.warns(RuntimeWarning, match="the Pallas kernels are not used, for its kernels add dW to no buffer"):
        _, (_, made, _) = linear_cross_entropy_value_and_grad(**given, accumulate_into=buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, (_, same, _) = linear_cross_entropy_value_and_grad(**given, accumulate_into=buffer, backend="xla")
    np.testing.assert_array_equal(made, same)


def test_another_weight_is_refused() -> None:
    _, (_, deferred) = linear_cross_entropy_value_and_grad(**arrays(), defer_weight_grad=True)
    with pytest.raises(ValueError, match=r"weight: got shape \(3, 16\), allowed is the call's \(70, 16\)"):
        deferred.compute(jnp.zeros((3, SIZE)))
    with pytest.raises(TypeError, match="weight: got dtype bfloat16, allowed is the call's float32"):
        deferred.compute(jnp.zeros((VOCAB, SIZE), "bfloat16"))
    with pytest.raises(TypeError, match=r"weight: got list, allowed is a jax\.Array"):
        deferred.compute([1.0])


def test_a_narrow_buffer_gets_a_plan_that_rounds_once() -> None:
    """The default plan of these sizes would cut the tokens."""
    tokens, size, vocab = 2048, 16, 1000
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((tokens, size), (vocab, size)))
    y = jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)
    own = make_plan(tokens=tokens, hidden=size, vocab=vocab, dtype="bfloat16", device="cpu")
    assert len(own.token_slices) > 1
    _, (_, added, _) = linear_cross_entropy_value_and_grad(
        x, w, y, accumulate_into=jnp.zeros((vocab, size), "bfloat16")
    )
    true = reference.linear_cross_entropy(*(np.asarray(a, np.float64) for a in (x, w)), np.asarray(y)).weight_grad
    assert error(added, true) <= ROUNDED_ONCE * error(jnp.asarray(true, "bfloat16"), true)


@pytest.mark.every_value
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices of JAX")
@pytest.mark.parametrize("buffer_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("deferred", [False, True])
def test_on_a_mesh(buffer_dtype: str | None, deferred: bool) -> None:
    """The vocabulary over two devices and the tokens over two; every device has a buffer of its own."""
    mesh = jax.make_mesh((2, 2), ("data", "vocab"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    dtype = "bfloat16" if buffer_dtype == "bfloat16" else "float32"
    given = arrays(dtype)
    x, w, y, b = given.values()

    def body(x: Any, w: Any, y: Any, b: Any) -> Any:
        options: dict[str, Any] = {"upstream": UPSTREAM, "normalizer": TOKENS, "axis_name": "vocab"}
        own = None
        if buffer_dtype is not None:
            own = jax.lax.pcast(jnp.zeros(w.shape, buffer_dtype), ("data", "vocab"), to="varying")
        if deferred:
            loss, (dx, later) = linear_cross_entropy_value_and_grad(x, w, y, b, defer_weight_grad=True, **options)
            dw, db = later.compute(w, accumulate_into=own)
        else:
            loss, (dx, dw, db) = linear_cross_entropy_value_and_grad(x, w, y, b, accumulate_into=own, **options)
        return jax.lax.psum(loss, "data"), dx, dw if own is None else jax.lax.psum(dw, "data"), db

    specs = (P("data"), P("vocab"), P("data"), P("vocab"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P("data"), P("vocab"), P("vocab")))
    loss, dx, dw, db = jax.jit(run)(x, w, y, b)
    true = truth(given, {})
    assert error(loss, true.loss) <= 4 * TINY["float32"]
    for made, right in ((dx, true.hidden_grad), (dw, true.weight_grad), (db, true.bias_grad)):
        assert_close(made, right, dtype)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices of JAX")
def test_a_buffer_that_devices_share_is_refused() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "vocab"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x, w, y, _ = arrays().values()

    def body(x: Any, w: Any, y: Any, into: Any) -> Any:
        return linear_cross_entropy_value_and_grad(x, w, y, accumulate_into=into, axis_name="vocab")[1][1]

    def run(spec: Any, out: Any) -> Any:
        specs = (P("data"), P("vocab"), P("data"), spec)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out))(x, w, y, jnp.zeros_like(w))

    with pytest.raises(ValueError, match=r"accumulate_into: got a buffer that is the same on all devices of \('data',"):
        run(P("vocab"), P("vocab"))


@pytest.mark.skipif(
    not can_interpret() or jax.default_backend() != "cpu", reason="interpreting takes jax 0.11 and a CPU"
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_deferred_on_the_kernels(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "1")
    given, options = arrays("bfloat16"), {"label_smoothing": 0.1, "reduction": reduction}
    _, (dhidden, deferred) = linear_cross_entropy_value_and_grad(
        **given, backend="pallas", upstream=UPSTREAM, defer_weight_grad=True, **options
    )
    dweight, dbias = deferred.compute(given["weight"])
    true = truth(given, options)
    for made, name in ((dhidden, "hidden"), (dweight, "weight"), (dbias, "bias")):
        assert_close(made, getattr(true, f"{name}_grad"), "bfloat16")
    with pytest.raises(NotImplementedError, match="accumulate_into: got a buffer for a call with backend='pallas'"):
        deferred.compute(given["weight"], accumulate_into=jnp.zeros((VOCAB, SIZE)))


def test_the_arguments_are_those_of_the_loss() -> None:
    import inspect

    plain = inspect.signature(linear_cross_entropy).parameters
    here = inspect.signature(linear_cross_entropy_value_and_grad).parameters
    assert set(plain) - set(here) == {"return_lse", "weight_layout"}
    assert set(here) - set(plain) == {"upstream", "accumulate_into", "defer_weight_grad"}
    assert all(here[name].default == plain[name].default for name in set(plain) & set(here))
