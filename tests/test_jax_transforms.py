"""What only JAX has: its transformations, tracers, donation, x64 and type promotion (case 32)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
from implementations import JaxXla, assert_within, problem_named, run_case  # noqa: E402

from logitless import plan, reference  # noqa: E402
from logitless.jax_impl import distillation_loss, linear_cross_entropy, linear_log_probs, xla  # noqa: E402
from logitless.jax_impl.chunk import most_valid  # noqa: E402
from logitless.tolerances import BOUND, CHAIN, TINY, error  # noqa: E402

N, D, V = 24, 8, 50


def arrays(seed: int = 0, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((N, D)).astype(dtype), rng.standard_normal((V, D)).astype(dtype)
    y = rng.integers(0, V, N).astype(np.int32)
    y[::5] = -100
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(y)


def loss(x: Any, w: Any, y: Any) -> Any:
    return linear_cross_entropy(x, w, y, z_loss=1e-3)


def truth(x: Any, w: Any, y: Any, **options: Any) -> Any:
    return reference.linear_cross_entropy(np.asarray(x), np.asarray(w), np.asarray(y), z_loss=1e-3, **options)


@pytest.mark.case(32)
def test_jit_and_no_jit() -> None:
    x, w, y = arrays()
    plain, jitted = (f(x, w, y) for f in (jax.value_and_grad(loss, (0, 1)), jax.jit(jax.value_and_grad(loss, (0, 1)))))
    true = truth(x, w, y)
    for value, (dx, dw) in (plain, jitted):
        assert float(value) == pytest.approx(float(true.loss), rel=TINY["float32"])
        assert error(dx, true.hidden_grad) <= TINY["float32"]
        assert error(dw, true.weight_grad) <= TINY["float32"]


@pytest.mark.case(32)
@pytest.mark.parametrize("function", ["mean", "none", "log_probs"])
def test_a_second_derivative_is_refused(function: str) -> None:
    """Silence would be a wrong number: the loops move 16-bit floats as integers, whose derivative is 0."""
    x, w, y = arrays()

    def total(x: Any) -> Any:
        if function == "log_probs":
            return linear_log_probs(x, w, y)[0].sum()
        return linear_cross_entropy(x, w, y, reduction=function).sum()

    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        jax.grad(lambda x: jnp.square(jax.grad(total)(x)).sum())(x)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        jax.jvp(jax.grad(total), (x,), (x,))


@pytest.mark.case(32)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_of_grad(reduction: Any) -> None:
    batches = [arrays(seed) for seed in range(3)]
    xs, ys = jnp.stack([x for x, _, _ in batches]), jnp.stack([y for _, _, y in batches])
    w = batches[0][1]

    def total(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, z_loss=1e-3, reduction=reduction).sum()

    dxs, dws = jax.vmap(jax.grad(total, (0, 1)), (0, None, 0))(xs, w, ys)
    for i in range(3):
        true = truth(xs[i], w, ys[i], reduction=reduction)
        assert error(dxs[i], true.hidden_grad) <= TINY["float32"]
        assert error(dws[i], true.weight_grad) <= TINY["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# Ignored tokens


CHUNKED = plan(tokens=N, hidden=D, vocab=V, dtype="float32", order="tokens", chunk=5)
TWO_PASS = plan(tokens=N, hidden=D, vocab=V, dtype="float32", order="tokens", chunk=5, one_pass=False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the chunks that were computed, each as often as it was."""
    sizes: list[int] = []
    rows_of = xla.rows_of

    def recorded(inputs: Any, first: Any, size: int) -> Any:
        jax.debug.callback(lambda: sizes.append(size))
        return rows_of(inputs, first, size)

    monkeypatch.setattr(xla, "rows_of", recorded)
    jax.clear_caches()  # what was traced before
    return sizes


def per_token(x: Any, w: Any, y: Any) -> Any:
    log_prob, entropy = linear_log_probs(x, w, y, with_entropy=True, plan=TWO_PASS)
    return (log_prob * jnp.arange(N) + entropy).sum()


def in_chunks(x: Any, w: Any, y: Any) -> Any:
    return linear_cross_entropy(x, w, y, z_loss=1e-3, plan=CHUNKED)


@pytest.mark.case(3)
@pytest.mark.parametrize(("function", "passes"), [(in_chunks, 1), (per_token, 2)])
@pytest.mark.parametrize("valid", [0, 1, 5, 11, 23, 24])
def test_chunks_behind_the_last_valid_token_are_not_computed(
    function: Any, passes: int, valid: int, computed: list[int]
) -> None:
    """Four chunks of five tokens and one of four; what is ignored lies anywhere."""
    x, w, y = arrays(valid)
    y = np.abs(np.asarray(y)) % V
    y[np.random.default_rng(1).permutation(N)[valid:]] = -100
    x = jnp.where(jnp.asarray(y == -100)[:, None], jnp.nan, x)
    made = jax.value_and_grad(function, (0, 1))(x, w, jnp.asarray(y))
    jax.effects_barrier()
    full = min(-(-valid // 5), 4)
    assert sorted(computed) == sorted(passes * ([5] * full + [4] * (valid > 20)))
    some = y != -100
    expected = jax.value_and_grad(full_logits(function), (0, 1))(jnp.where(some[:, None], x, 0.0), w, jnp.asarray(y))
    assert float(made[0]) == pytest.approx(float(expected[0]), rel=CHAIN, abs=CHAIN)
    for grad, true in zip(made[1], expected[1], strict=True):
        assert error(grad, true) <= CHAIN
    assert (np.asarray(made[1][0])[~some] == 0).all()


def full_logits(function: Any) -> Any:
    """The same from logits."""

    def value(x: Any, w: Any, y: Any) -> Any:
        z = x @ w.T
        lse, log_p, valid = jax.nn.logsumexp(z, axis=1), jax.nn.log_softmax(z), y != -100
        own = jnp.take_along_axis(log_p, jnp.maximum(y, 0)[:, None], 1)[:, 0]
        if function is in_chunks:
            return jnp.where(valid, 1e-3 * lse**2 - own, 0.0).sum() / jnp.maximum(valid.sum(), 1)
        return jnp.where(valid, own * jnp.arange(N) - (jnp.exp(log_p) * log_p).sum(1), 0.0).sum()

    return value


@pytest.mark.case(32)
@pytest.mark.parametrize("function", [in_chunks, per_token])
def test_vmap_goes_on_until_the_longest_problem_is_done(function: Any) -> None:
    """Of four problems along two axes. The number is one for all of them: else every step would choose between the old
    and the new of all that a loop carries."""
    made = [arrays(seed) for seed in range(4)]
    x, y = (jnp.stack([problem[i] for problem in made]).reshape(2, 2, *made[0][i].shape) for i in (0, 2))
    w = made[0][1]
    y = y.at[..., 3:].set(-100).at[1, 1, :9].set(7)
    both = jax.vmap(jax.vmap(jax.grad(function, (0, 1)), (0, None, 0)), (0, None, 0))
    assert int(jax.vmap(jax.vmap(most_valid, out_axes=None), out_axes=None)(y != -100)) == 9
    dx, dw = both(x, w, y)
    for i, j in np.ndindex(2, 2):
        one, other = jax.grad(function, (0, 1))(x[i, j], w, y[i, j])
        assert error(dx[i, j], one) <= TINY["float32"]
        assert error(dw[i, j], other) <= TINY["float32"]


@pytest.mark.case(32)
@pytest.mark.parametrize("function", [loss, in_chunks, per_token])
def test_grad_under_checkpoint(function: Any) -> None:
    x, w, y = arrays()
    plain = jax.grad(lambda x, w: function(jnp.tanh(x), w, y), (0, 1))(x, w)
    remade = jax.jit(jax.grad(jax.checkpoint(lambda x, w: function(jnp.tanh(x), w, y)), (0, 1)))(x, w)
    for one, other in zip(plain, remade, strict=True):
        assert error(one, other) <= TINY["float32"]


@pytest.mark.case(32)
def test_scan_over_layers_and_over_losses() -> None:
    """A scan below the loss (layers), and the loss inside a scan whose gradient is taken (deep supervision)."""
    x, w, y = arrays()
    layers = jnp.asarray(np.random.default_rng(1).standard_normal((3, D, D)).astype(np.float32) * 0.3)

    def full(x: Any, w: Any, y: Any) -> Any:
        z = x @ w.T
        lse, valid = jax.nn.logsumexp(z, -1), y != -100
        rows = lse - jnp.take_along_axis(z, jnp.where(valid, y, 0)[:, None], 1)[:, 0] + 1e-3 * lse**2
        return jnp.sum(jnp.where(valid, rows, 0)) / valid.sum()

    def model(one_loss: Any) -> Any:
        def run(layers: Any, x: Any, w: Any) -> Any:
            def layer(h: Any, m: Any) -> Any:
                h = jnp.tanh(h @ m)
                return h, one_loss(h, w, y)

            h, inner = jax.lax.scan(layer, x, layers)
            return inner.sum() + one_loss(h, w, y)

        return jax.jit(jax.grad(run, (0, 1, 2)))

    for ours, theirs in zip(model(loss)(layers, x, w), model(full)(layers, x, w), strict=True):
        assert error(ours, theirs) <= CHAIN


@pytest.mark.case(32)
def test_donated_buffers() -> None:
    x, w, y = arrays()

    def step(x: Any, w: Any, y: Any) -> Any:
        value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w, y)
        return value, x - 0.1 * dx, w - 0.1 * dw

    kept = step(x, w, y)
    given = jnp.copy(x), jnp.copy(w)
    made = jax.jit(step, donate_argnums=(0, 1))(*given, y)
    assert all(array.is_deleted() for array in given)
    for one, other in zip(kept, made, strict=True):
        assert error(one, other) <= TINY["float32"]


@pytest.mark.every_value
@pytest.mark.case(32)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x64_changes_nothing_for_lower_dtypes(x64: bool, dtype: str) -> None:
    problem = problem_named("odd_most").with_dtype(dtype)
    case = problem.case()
    impl = JaxXla()
    impl.x64 = x64
    outcome = run_case(impl, case, return_stats=True)
    assert_within(problem, outcome)
    with jax.enable_x64(x64):
        x, w, y = arrays()
        value = loss(x.astype(dtype), w.astype(dtype), y)
        assert value.dtype == jnp.float32
        ids = y.astype(jnp.int64) if x64 else y
        assert float(loss(x.astype(dtype), w.astype(dtype), ids)) == float(value)


@pytest.mark.case(32)
def test_x64_on_gives_float64_for_float64() -> None:
    with jax.enable_x64(True):
        x, w, y = (jnp.asarray(np.asarray(a), jnp.float64 if a.dtype == jnp.float32 else None) for a in arrays())
        value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w, y)
        assert value.dtype == dx.dtype == dw.dtype == jnp.float64
        assert error(dw, truth(x, w, y).weight_grad) <= TINY["float64"]


@pytest.mark.case(32)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_strict_promotion(dtype: Any) -> None:
    x, w, y = arrays()
    options = {"label_smoothing": 0.1, "z_loss": 1e-4, "logit_scale": 1.5}
    with jax.numpy_dtype_promotion("strict"):
        for more in ({}, {"softcap": 5.0}, {"reduction": "none"}, {"normalizer": 7}):
            made = jax.grad(lambda x, w, more=more: linear_cross_entropy(x, w, y, **options, **more).sum(), (0, 1))(
                x.astype(dtype), w.astype(dtype)
            )
            assert all(grad.dtype == dtype for grad in made)
        value, stats = linear_cross_entropy(x.astype(dtype), w.astype(dtype), y, return_stats=True)
        assert value.dtype == stats.lse.dtype == jnp.float32
        both = jax.vjp(lambda x: linear_log_probs(x, w.astype(dtype), y, with_entropy=True), x.astype(dtype))
        both[1]((jnp.ones(N), jnp.ones(N)))


@pytest.mark.case(32)
def test_forward_mode_is_refused() -> None:
    x, w, y = arrays()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: loss(x, w, y), (x,), (x,))


@pytest.mark.case(5)
def test_two_backwards_of_one_forward() -> None:
    x, w, y = arrays()
    _, backward = jax.vjp(lambda x, w: loss(x, w, y), x, w)
    first, second = backward(jnp.float32(3.0)), backward(jnp.float32(-0.5))
    again = backward(jnp.float32(3.0))
    for one, two, three in zip(first, second, again, strict=True):
        assert error(two, -one / 6) <= TINY["float32"]
        assert np.array_equal(one, three)


@pytest.mark.case(6)
def test_unwanted_products_are_not_run() -> None:
    """Flops of the compiled program, by XLA's own count: 6, 4 or 2 · N·D·V as the wanted gradients need."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((64, 256), (512, 256)))
    y = jnp.asarray(rng.integers(0, 512, 64).astype(np.int32))
    one_chunk = plan(tokens=64, hidden=256, vocab=512, dtype="float32", order="tokens", chunk=64)

    def flops(function: Any) -> float:
        analysis = jax.jit(function).lower(x, w).compile().cost_analysis()
        analysis = analysis[0] if isinstance(analysis, list) else analysis
        return analysis["flops"] / (64 * 256 * 512)

    def ours(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, y, plan=one_chunk)

    # Two slices, a loop: XLA counts its body once. (It would merge the two equal logits of a single slice into one.)
    two_slices = plan(tokens=64, hidden=256, vocab=512, dtype="float32", order="vocab", chunk=256)

    def per_token(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, y, plan=two_slices, reduction="none").sum()

    measured = {
        "loss": flops(ours), "hidden": flops(jax.grad(ours, 0)), "weight": flops(jax.grad(ours, 1)),
        "both": flops(jax.grad(ours, (0, 1))),
        "none": flops(jax.grad(per_token, (0, 1))),
    }  # fmt: skip
    expected = {"loss": 2, "hidden": 4, "weight": 4, "both": 6, "none": 8 / 2}
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=BOUND["flops of XLA"]), measured


def test_compiles_once_for_the_same_shapes() -> None:
    from logitless.jax_impl import vjp

    x, w, y = arrays()
    linear_cross_entropy(x, w, y, softcap=3.5)
    before = vjp.loss_and_stats._cache_size()
    linear_cross_entropy(x * 2, w, y, softcap=3.5)
    assert vjp.loss_and_stats._cache_size() == before
    linear_cross_entropy(x, w, y, softcap=4.5)
    assert vjp.loss_and_stats._cache_size() == before + 1


@pytest.mark.case(9)
def test_numpy_ids_past_int32_are_not_wrapped() -> None:
    x, w, _ = arrays()
    y = np.zeros(N, np.int64)
    y[3] = 2**32
    with pytest.raises(ValueError, match=rf"target: got id {2**32} at index \(3\)"):
        linear_cross_entropy(x, w, y)
    assert np.isfinite(float(linear_cross_entropy(np.asarray(x), np.asarray(w), np.zeros(N, np.int64))))


@pytest.mark.case(9)
def test_traced_ids_make_nan() -> None:
    x, w, y = arrays()
    y = y.at[jnp.array([1, 2])].set(jnp.array([V, -1]))
    losses = jax.jit(lambda y: linear_cross_entropy(x, w, y, reduction="none"))(y)
    assert np.flatnonzero(np.isnan(losses)).tolist() == [1, 2]
    if JaxXla.on_gpu:  # looking would synchronise
        return
    with pytest.raises(ValueError, match=rf"target: got id {V} at index \(1\)"):
        linear_cross_entropy(x, w, y)


def test_float64_numpy_is_refused_while_x64_is_off() -> None:
    _, w, y = arrays()
    with pytest.raises(TypeError, match="hidden: got a NumPy array of dtype float64 while x64 is off"):
        linear_cross_entropy(np.ones((N, D)), w, y)


@pytest.mark.parametrize("name", ["token_weight", "class_weight", "normalizer"])
def test_constants_cannot_be_differentiated(name: str) -> None:
    x, w, y = arrays()
    value = {"token_weight": jnp.ones(N), "class_weight": jnp.ones(V), "normalizer": jnp.float32(3)}[name]
    with pytest.raises(ValueError, match=f"{name}: got an array that is differentiated, allowed is a constant"):
        jax.grad(lambda value: linear_cross_entropy(x, w, y, **{name: value}))(value)
    stopped = jax.grad(lambda v: linear_cross_entropy(x, w, y, **{name: jax.lax.stop_gradient(v)}))(value)
    assert not np.asarray(stopped).any()


def of_reduction(reduction: str) -> Any:
    return lambda x, w, y: linear_cross_entropy(x, w, y, reduction=reduction).sum()


def of_log_probs(x: Any, w: Any, y: Any) -> Any:
    return -linear_log_probs(x, w, y, with_entropy=True)[0].sum()


def of_distillation(x: Any, w: Any, y: Any) -> Any:
    """A distillation from a head that knows the targets: their cross-entropy, up to terms without a gradient."""
    teacher = 30.0 * jax.nn.one_hot(jnp.maximum(y, 0), V, dtype=x.dtype)
    mask = (y >= 0).astype(jnp.int32)
    return distillation_loss(x, w, teacher, jnp.eye(V, dtype=x.dtype), mask=mask, normalizer=1.0)


def through_torch(x: Any, w: Any, y: Any) -> Any:
    pytest.importorskip("torch", reason="the function is one of PyTorch")
    from logitless import torch_impl
    from logitless.interop import torch_in_jax

    return torch_in_jax(torch_impl.linear_cross_entropy)(x, w, y, reduction="sum")


def of_full_logits(x: Any, w: Any, y: Any) -> Any:
    log_p = jax.nn.log_softmax(x @ w.T)
    return -jnp.where(y >= 0, jnp.take_along_axis(log_p, jnp.maximum(y, 0)[:, None], 1)[:, 0], 0.0).sum()


@pytest.mark.late(where=lambda p: p["function"] is of_log_probs)
@pytest.mark.case(6)
@pytest.mark.parametrize(
    "function",
    [of_reduction("sum"), of_reduction("none"), of_log_probs, of_distillation, through_torch],
    ids=["sum", "none", "log_probs", "distillation", "torch"],
)
def test_other_derivatives_before_change_nothing(function: Any) -> None:
    """JAX keeps a trace of the forward for each set of differentiated arguments, but one structure of residuals."""
    x, w, y = arrays()
    compiled = jax.jit(lambda x, w: function(x, w, y))
    expected = jax.grad(lambda x, w: of_full_logits(x, w, y), (0, 1))(x, w)
    for first in (0, 1):
        # The forward is traced for both arguments, then forward mode is refused: no derivative of both is kept.
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(compiled, (x, w), (x, w))
        assert error(jax.grad(compiled, first)(x, w), expected[first]) <= CHAIN
    for made, true in zip(jax.grad(compiled, (0, 1))(x, w), expected, strict=True):
        assert error(made, true) <= CHAIN


def test_statistics_have_no_gradient() -> None:
    x, w, y = arrays()
    grads, stats = jax.jit(
        jax.grad(lambda x: linear_cross_entropy(x, w, y, z_loss=1e-3, return_stats=True), has_aux=True)
    )(x)
    assert error(grads, jax.grad(lambda x: loss(x, w, y))(x)) <= TINY["float32"]
    assert stats.argmax.dtype == jnp.int32
    of_stats = jax.grad(lambda x: linear_cross_entropy(x, w, y, return_stats=True)[1].lse.sum())(x)
    assert not np.asarray(of_stats).any()


def test_lowers_for_cuda_without_a_gpu() -> None:
    """The whole step of plain operations lowers for CUDA on any machine: nothing in it is bound to the CPU."""
    x, w, y = arrays()
    # With a GPU in the machine bfloat16 would take the kernels.
    plain = partial(linear_cross_entropy, z_loss=1e-3, backend="xla")
    for dtype in (jnp.float32, jnp.bfloat16):
        traced = jax.jit(jax.value_and_grad(plain, (0, 1))).trace(x.astype(dtype), w.astype(dtype), y)
        assert "dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.case(32)
@pytest.mark.parametrize("library", ["flax.nnx", "equinox"])
def test_libraries_transforms(library: str) -> None:
    """Each library's jit and remat, around a head whose forward is the loss, give the gradients of jax.grad."""
    module = pytest.importorskip(library, reason="the test is of its transforms")
    x, w, y = arrays()

    if library == "flax.nnx":

        class Head(module.Module):
            def __init__(self) -> None:
                self.kernel = module.Param(w)

            @module.remat
            def __call__(self, x: Any, y: Any) -> Any:
                return linear_cross_entropy(jnp.tanh(x), self.kernel[...], y)

        made = module.jit(module.grad(lambda head: head(x, y)))(Head())["kernel"][...]
    else:

        class Equinox(module.Module):
            kernel: Any

            @module.filter_checkpoint
            def __call__(self, x: Any, y: Any) -> Any:
                return linear_cross_entropy(jnp.tanh(x), self.kernel, y)

        made = module.filter_jit(module.filter_grad(lambda head: head(x, y)))(Equinox(w)).kernel
    plain = jax.jit(jax.grad(lambda w: linear_cross_entropy(jnp.tanh(x), w, y)))(w)
    assert error(made, plain) <= TINY["float32"]
