"""``return_lse`` and ``shift`` of ``linear_cross_entropy``, on every implementation, and on interpreted kernels where
there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from implementations import HAVE_BOTH, JaxXla, Outcome, TorchEager, options_of, run_case
from test_per_token import every_implementation, in_its_own_dtype, some

from logitless import plan, reference
from logitless.ideal import ideal_gradients
from logitless.problems import BY_NAME
from logitless.spec import REDUCTIONS
from logitless.tolerances import GRADIENT, TINY, allowance, error

TOKENS, VOCAB = 40, 90
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-2, "class_weight": "drawn", "token_weight": "drawn"},
    "capped": {
        "label_smoothing": 0.1, "z_loss": 1e-2, "class_weight": "drawn", "token_weight": "drawn", "softcap": 4.0,
        "temperature": 0.7, "logit_scale": 1.5,
    },
}  # fmt: skip


def upstreams(reduction: str) -> tuple[Any, Any]:
    """Of the loss and of lse: both signs, some 0, one large."""
    rng = np.random.default_rng(8)
    h = rng.standard_normal(TOKENS)
    h[3:6], h[11] = 0.0, 300.0
    return (rng.standard_normal(TOKENS) if reduction == "none" else np.float64(-1.5)), h


def drawn(name: str) -> dict[str, Any]:
    """The options of that name with their arrays."""
    rng = np.random.default_rng(7)
    arrays = {"class_weight": rng.uniform(0.1, 2.0, VOCAB), "token_weight": rng.uniform(0.1, 2.0, TOKENS)}
    arrays = {key: values.astype(np.float32) for key, values in arrays.items()}
    return {key: arrays[key] if value == "drawn" else value for key, value in OPTIONS[name].items()}


def assert_right(made: Outcome, true: Any, dtype: str) -> None:
    wide = "float64" if dtype == "float64" else "float32"
    assert error(made.loss, true.loss) <= 2 * TINY[wide]
    assert error(made.lse, true.stats.lse) <= TINY[wide]
    for name, gradient in made.grads.items():
        if gradient is not None:
            assert error(gradient, getattr(true, f"{name}_grad")) <= 2 * GRADIENT[dtype], name


# ---------------------------------------------------------------------------------------------------------------------
# lse and its gradient


@pytest.mark.every_value(each="impl")
@pytest.mark.case(18)
@in_its_own_dtype
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_both_results_have_a_gradient(impl: Any, reduction: str, name: str) -> None:
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    g, h = upstreams(reduction)
    given = {"reduction": reduction, **drawn(name)}
    true = reference.linear_cross_entropy(x, w, y, b, upstream=g, lse_upstream=h, **given)
    h[y == -100] = np.nan  # of an ignored token nothing counts
    made = impl.run(x, w, y, b, upstream=g, lse_upstream=h, return_lse=True, return_stats=True, **given)
    assert_right(made, true, impl.dtype)
    assert made.lse.shape == y.shape
    assert not made.lse[y == -100].any()
    assert (made.lse == made.stats.lse).all()
    assert not made.grads["hidden"][y == -100].any()


@pytest.mark.every_value(each="impl")
@pytest.mark.case(18)
@every_implementation
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["smooth", "capped"])
def test_dtypes(impl: Any, dtype: str, name: str) -> None:
    if impl.name == "torch_triton_interpreted" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter cuts float32 off where it should round it to bfloat16")
    if impl.backend == "triton" and dtype == "float64":
        pytest.skip("the kernels take no float64")
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=dtype)
    g, h = upstreams("mean")
    true = reference.linear_cross_entropy(x, w, y, b, upstream=g, lse_upstream=h, **drawn(name))
    h[y == -100] = 1e30  # which must not set the scale of the others
    made = impl.run(x, w, y, b, dtype=dtype, upstream=g, lse_upstream=h, return_lse=True, **drawn(name))
    assert_right(made, true, dtype)


@pytest.mark.late(
    where=lambda p: p["impl"].name == "jax_xla" and p["name"] in ("confident", "confident_wrong_none", "ragged")
)
@pytest.mark.every_value(each="impl")
@pytest.mark.case(18)
@every_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["confident", "confident_wrong", "confident_wrong_none", "odd_all", "ragged", "trained"]
)
def test_within_the_rule(impl: Any, dtype: str, name: str) -> None:
    """A token's two coefficients of p may cancel, so rows differ in size: the matrix must keep its digits.

    Where all targets share one value, one rounding decides, in the ideal path as well: other draws of h can miss.
    """
    if impl.name == "torch_triton_interpreted" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter cuts float32 off where it should round it to bfloat16")
    problem = BY_NAME[name].with_dtype(dtype)
    case = problem.case()
    h = np.random.default_rng(9).standard_normal(problem.tokens) * np.abs(case.upstream_rows()).max()
    true = reference.linear_cross_entropy(
        case.hidden, case.weight, case.target, case.bias, upstream=case.upstream,
        lse_upstream=h.reshape(case.target.shape), **options_of(case)
    )  # fmt: skip
    made = run_case(impl, case, return_lse=True, lse_upstream=h.reshape(case.target.shape))
    for output, ideal in ideal_gradients(case, lse_upstream=h).items():
        if output == "loss" or (gradient := made.grads[output[1:]]) is None:
            continue
        exact = getattr(true, f"{output[1:]}_grad")
        assert error(gradient, exact) <= allowance(error(ideal, exact), dtype), output


@pytest.mark.every_value(each="impl")
@pytest.mark.case(18)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
@pytest.mark.parametrize("chunk", [16, 128])
def test_every_plan(impl: Any, order: Any, chunk: int) -> None:
    """A plan in one pass as well, though lse's gradient needs two."""
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    g, h = upstreams("mean")
    sizes = {"tokens": TOKENS, "hidden": 16, "vocab": VOCAB, "dtype": impl.dtype}
    chosen = plan(**sizes, order=order, chunk=chunk, fused=impl.fused)
    true = reference.linear_cross_entropy(x, w, y, b, upstream=g, lse_upstream=h, **drawn("smooth"))
    made = impl.run(x, w, y, b, upstream=g, lse_upstream=h, return_lse=True, plan=chosen, **drawn("smooth"))
    assert_right(made, true, impl.dtype)


@pytest.mark.case(18)
@in_its_own_dtype
def test_a_budget_that_could_hold_exponentials(impl: Any) -> None:
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    g, h = upstreams("none")
    true = reference.linear_cross_entropy(x, w, y, b, reduction="none", upstream=g, lse_upstream=h)
    given = {"reduction": "none", "memory_budget": 2**40, "return_lse": True}
    assert_right(impl.run(x, w, y, b, upstream=g, lse_upstream=h, **given), true, impl.dtype)


@pytest.mark.case(18)
@in_its_own_dtype
def test_upstreams_that_cancel(impl: Any) -> None:
    """ℓ − lse is −z_y: no probability is left in its gradient."""
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    g, _ = upstreams("none")
    true = reference.linear_cross_entropy(x, w, y, b, reduction="none", upstream=g, lse_upstream=-g)
    made = impl.run(x, w, y, b, reduction="none", upstream=g, lse_upstream=-g, return_lse=True)
    assert_right(made, true, impl.dtype)
    counted = y != -100
    targets = -g[counted, None] * w[y[counted]].astype(np.float64)
    assert error(made.grads["hidden"][counted], targets) <= 2 * GRADIENT[impl.dtype]


def gradients_of(impl: Any, scalar: Callable[[Any, Any, Callable[[Any], Any]], Any], *arrays: Any) -> Any:
    """Gradients in x, w and b of ``scalar(loss, lse, array)``, a function of tensors or of JAX arrays."""
    x, w, b, y = arrays
    given = {name: impl.array(values, impl.dtype) for name, values in (("hidden", x), ("weight", w), ("bias", b))}
    rest = {"target": impl.array(y), "backend": impl.backend, "return_lse": True}
    if impl.name.startswith("torch"):
        for leaf in given.values():
            leaf.requires_grad_()
        scalar(*impl.function()(**given, **rest), impl.array).backward()
        return [impl.numpy(leaf.grad) for leaf in given.values()]
    import jax

    made = jax.grad(lambda given: scalar(*impl.function()(**given, **rest), impl.array))(given)
    return [impl.numpy(made[name]) for name in given]


@pytest.mark.case(4, 18)
@in_its_own_dtype
@pytest.mark.parametrize("kind", ["lse alone", "loss alone", "strided", "sliced", "squared", "product"])
def test_what_a_caller_makes_of_them(impl: Any, kind: str) -> None:
    """A z-loss by hand, a loss that is not used, upstream gradients of any layout."""
    arrays = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    g = np.random.default_rng(5).standard_normal(2 * TOKENS).astype(np.float32)
    plain = reference.linear_cross_entropy(*arrays[:2], arrays[3], arrays[2])
    lse, loss = plain.stats.lse, plain.loss
    scalars: dict[str, tuple[Any, Any, Any]] = {
        "lse alone": (lambda loss, lse, array: (lse * array(g[:TOKENS])).sum(), 0.0, g[:TOKENS]),
        "loss alone": (lambda loss, lse, array: 2 * loss, 2.0, 0.0),
        "strided": (lambda loss, lse, array: loss + (lse * array(g)[::2]).sum(), 1.0, g[::2]),
        "sliced": (lambda loss, lse, array: loss + lse[::3].sum(), 1.0, np.arange(TOKENS) % 3 == 0),
        "squared": (lambda loss, lse, array: loss + 1e-2 * (lse**2).sum(), 1.0, 2e-2 * lse),
        "product": (lambda loss, lse, array: loss * lse.sum(), lse.sum(), loss),
    }
    scalar, of_loss, of_lse = scalars[kind]
    x, w, b, y = arrays
    true = reference.linear_cross_entropy(x, w, y, b, upstream=of_loss, lse_upstream=of_lse)
    made = gradients_of(impl, scalar, *arrays)
    for gradient, expected in zip(made, (true.hidden_grad, true.weight_grad, true.bias_grad), strict=True):
        assert error(gradient, expected) <= 2 * GRADIENT[impl.dtype]


@pytest.mark.case(5, 18)
@in_its_own_dtype
@pytest.mark.parametrize("kind", ["nan row", "inf upstream", "banned", "far"])
def test_rows_that_are_not_finite_stay_alone(impl: Any, kind: str) -> None:
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    _, h = upstreams("mean")
    h[11] = 1.0
    others = np.arange(TOKENS) != 9
    if kind == "nan row":
        x[9] = np.nan
    elif kind == "inf upstream":
        h[9] = np.inf
    elif kind == "banned":  # of no target, and of token 9's alone
        b[[5, y[9]]] = -np.inf
        others &= y != y[9]
        y[(y == 5) | ((y == y[9]) & (np.arange(TOKENS) != 9))] = -100
    else:
        # Exact products: a CPU's BLAS may add those of another tile in another order, and 1e-7 of such logits is 1e-5.
        x[9] = 64.0 * np.sign(x[9])
        w, b = (np.round(256 * array) / 256 for array in (w, b))
        y[9] = int(np.argmin(x[9] @ w.T))
    with np.errstate(invalid="ignore"):
        true = reference.linear_cross_entropy(x, w, y, b, reduction="none", upstream=1.0, lse_upstream=h)
    made = impl.run(x, w, y, b, reduction="none", upstream=1.0, lse_upstream=h, return_lse=True)
    assert error(made.lse[others], true.stats.lse[others]) <= TINY["float32"]
    assert error(made.grads["hidden"][others], true.hidden_grad[others]) <= 2 * GRADIENT[impl.dtype]
    if kind == "far":
        assert_right(made, true, impl.dtype)
    elif kind == "banned":
        assert error(made.lse[9], true.stats.lse[9]) <= TINY["float32"]
        assert np.isinf(made.loss[9])
    else:
        assert not np.isfinite(made.grads["hidden"][9]).any()
        assert np.isnan(made.lse[9]) == (kind == "nan row")


@pytest.mark.case(18)
@in_its_own_dtype
def test_without_a_gradient_it_is_free(impl: Any) -> None:
    """The same sums as without lse, so the loss has the same bits. Statistics may take other tiles on a GPU. With
    PyTorch's plain operations a loss alone has a way of its own (torch_impl/plain_loss)."""
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    plain, stats = (impl.run(x, w, y, b, wrt=(), return_stats=asked) for asked in (False, True))
    made = impl.run(x, w, y, b, wrt=(), return_lse=True)
    assert made.loss == (stats if impl.name == "torch_eager" else plain).loss
    assert error(made.lse, stats.stats.lse) <= TINY["float32"]


@pytest.mark.case(22)
@every_implementation
def test_no_token_at_all(impl: Any) -> None:
    x, w, b, _ = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    for tokens in (0, 3):
        made = impl.run(x[:tokens], w, np.full(tokens, -100), b, return_lse=True, lse_upstream=1.0)
        assert made.loss == 0
        assert made.lse.shape == (tokens,)
        assert not made.lse.any()
        assert not any(gradient.any() for gradient in made.grads.values())


@pytest.mark.skipif(not HAVE_BOTH, reason="needs both frameworks")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_frameworks_agree(name: str) -> None:
    x, w, b, y = some(TOKENS, vocab=VOCAB)
    g, h = upstreams("sum")
    given = {"reduction": "sum", "upstream": g, "lse_upstream": h, "return_lse": True, "shift": 2, **drawn(name)}
    one, other = (impl.run(x, w, y, b, dtype="float64", **given) for impl in (TorchEager(), JaxXla()))
    pairs = [(one.loss, other.loss), (one.lse, other.lse), *zip(one.grads.values(), other.grads.values(), strict=True)]
    for a, c in pairs:
        assert error(a, c) <= GRADIENT["float64"]


# ---------------------------------------------------------------------------------------------------------------------
# The shift


def rows(dtype: str) -> tuple[Any, ...]:
    """hidden [2, 20, D], weight, bias, target [2, 20], and the target shifted by ``by``."""
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=dtype)
    return x.reshape(2, 20, -1), w, b, y.reshape(2, 20)


def by_hand(y: Any, shift: int, ignore_index: int = -100) -> Any:
    return np.concatenate([y[..., shift:], np.full((*y.shape[:-1], shift), ignore_index)], axis=-1)


@pytest.mark.every_value(each="impl")
@pytest.mark.case(21)
@in_its_own_dtype
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shift", [1, 3])
def test_the_causal_shift(impl: Any, reduction: str, shift: int) -> None:
    x, w, b, y = rows(impl.dtype)
    rng = np.random.default_rng(3)
    t, h = rng.uniform(0.1, 2.0, (2, 20)).astype(np.float32), rng.standard_normal((2, 20))
    g = rng.standard_normal((2, 20)) if reduction == "none" else np.float64(0.7)
    given = {"reduction": reduction, "token_weight": t, "upstream": g, "lse_upstream": h}
    true = reference.linear_cross_entropy(x, w, by_hand(y, shift), b, **given)
    x[:, -shift:] = np.nan  # nobody's hidden states
    made = impl.run(x, w, y, b, shift=shift, return_lse=True, **given)
    assert_right(made, true, impl.dtype)
    assert not made.grads["hidden"][:, -shift:].any()
    assert not made.lse[:, -shift:].any()
    assert made.grads["hidden"][:, 0].any()


@pytest.mark.case(21)
@in_its_own_dtype
def test_statistics_stay_at_the_positions_of_hidden(impl: Any) -> None:
    x, w, b, y = rows(impl.dtype)
    made = impl.run(x, w, y, b, shift=1, return_stats=True, reduction="none", wrt=())
    true = reference.linear_cross_entropy(x, w, by_hand(y, 1), b, reduction="none")
    assert made.loss.shape == made.stats.nll.shape == y.shape
    assert error(made.stats.nll, true.stats.nll) <= TINY["float32"]
    assert made.stats.correct.tolist() == true.stats.correct.tolist()
    assert (made.stats.argmax[:, -1] == -1).all()
    assert not made.loss[:, -1].any()


@pytest.mark.case(21)
@every_implementation
def test_an_ignore_index_inside_of_the_vocabulary(impl: Any) -> None:
    x, w, b, y = rows(impl.dtype)
    y = np.where(y == -100, 7, y)
    made = impl.run(x, w, y, b, shift=1, ignore_index=7)
    true = reference.linear_cross_entropy(x, w, by_hand(y, 1, 7), b, ignore_index=7)
    assert error(made.loss, true.loss) <= TINY["float32"]
    assert error(made.grads["hidden"], true.hidden_grad) <= 2 * GRADIENT[impl.dtype]


@pytest.mark.case(9, 21)
@every_implementation
def test_ids_of_a_shifted_target(impl: Any) -> None:
    """The first id is no position's target. An error names the place in what was given."""
    x, w, b, y = rows(impl.dtype)
    y[:, 0] = VOCAB + 3
    true = reference.linear_cross_entropy(x, w, by_hand(y, 1), b)
    assert error(impl.run(x, w, y, b, shift=1, wrt=()).loss, true.loss) <= TINY["float32"]
    y[1, 5] = VOCAB + 4
    if not impl.on_gpu:
        with pytest.raises(ValueError, match=rf"target: got id {VOCAB + 4} at index \(1, 5\)"):
            impl.run(x, w, y, b, shift=1, wrt=())


@pytest.mark.case(9, 21)
@every_implementation
def test_a_target_without_axes_has_no_shift(impl: Any) -> None:
    x, w, b, y = some(TOKENS, vocab=VOCAB, dtype=impl.dtype)
    assert impl.run(x[1], w, y[1], b, shift=0, wrt=()).loss > 0
    with pytest.raises(ValueError, match=r"shift: got 1 beside a target without axes, allowed is 0"):
        impl.run(x[1], w, y[1], b, shift=1)
    with pytest.raises(ValueError, match=r"shift: got 1 beside a target \(40, 1\), allowed is 0 or less"):
        impl.run(x[:, None], w, y[:, None], b, shift=1)


# ---------------------------------------------------------------------------------------------------------------------
# What one framework alone has


@pytest.mark.case(33)
@pytest.mark.parametrize("layout", ["transposed", "step", "offset"])
def test_layouts_of_a_target_that_is_shifted(layout: str) -> None:
    torch = pytest.importorskip("torch", reason="about PyTorch's layouts")
    x, w, b, y = rows("float64")
    ids = torch.tensor(y)
    views = {
        "transposed": ids.t().contiguous().t(),
        "step": torch.full((2, 40), 10**6)[:, ::2],
        "offset": torch.full((2, 23), 10**6)[:, 3:],
    }
    view = views[layout].copy_(ids)
    before = view.clone()
    impl = TorchEager()
    arrays = [impl.array(values, "float64") for values in (x, w, b)]
    loss, lse = impl.function()(*arrays[:2], view, arrays[2], shift=1, return_lse=True)
    true = reference.linear_cross_entropy(x, w, by_hand(y, 1), b)
    assert error(loss, true.loss) <= TINY["float64"]
    assert error(lse, true.stats.lse) <= TINY["float64"]
    assert lse.dtype == torch.float64
    assert torch.equal(view, before)


@pytest.mark.case(39)
def test_lse_may_be_changed_in_place() -> None:
    torch = pytest.importorskip("torch", reason="about changes in place")
    from logitless.torch_impl import linear_cross_entropy

    x, w, _, y = (torch.tensor(values) for values in some(TOKENS, vocab=VOCAB, dtype="float32"))
    x.requires_grad_()
    loss, lse = linear_cross_entropy(x, w, y, return_lse=True)
    lse *= 2.0
    (loss + lse.sum()).backward()
    true = reference.linear_cross_entropy(x.detach().numpy(), w.numpy(), y.numpy(), lse_upstream=2.0)
    assert error(x.grad, true.hidden_grad) <= GRADIENT["float32"]


@pytest.mark.case(32)
@pytest.mark.parametrize("how", ["jit", "vmap", "checkpoint", "numpy"])
def test_transforms_of_jax(how: str) -> None:
    jax = pytest.importorskip("jax", reason="about JAX's transforms")
    from logitless.jax_impl import linear_cross_entropy

    x, w, b, y = rows("float32")
    g, h = np.float32(0.7), np.random.default_rng(3).standard_normal((2, 20)).astype(np.float32)
    true = reference.linear_cross_entropy(
        x, w, by_hand(y, 1), b, reduction="sum", upstream=g, lse_upstream=h, label_smoothing=0.1
    )

    def results(x: Any, w: Any, b: Any, y: Any) -> Any:
        return linear_cross_entropy(
            x, w, y, b, reduction="sum", return_lse=True, shift=1, label_smoothing=0.1, backend="xla"
        )

    def total(x: Any, w: Any, b: Any, y: Any) -> Any:
        if how == "vmap":
            loss, lse = jax.vmap(results, in_axes=(0, None, None, 0))(x, w, b, y)
        else:
            loss, lse = (jax.checkpoint(results) if how == "checkpoint" else results)(x, w, b, y)
        return g * loss.sum() + (h * lse).sum(), (loss.sum(), lse)

    arrays = (x, w, b, y.astype(np.int32))
    if how != "numpy":
        arrays = tuple(map(jax.numpy.asarray, arrays))
    step = jax.grad(total, (0, 1, 2), has_aux=True)
    grads, (loss, lse) = (jax.jit(step) if how == "jit" else step)(*arrays)
    assert lse.dtype == np.float32
    assert_right(Outcome(loss, dict(zip(("hidden", "weight", "bias"), grads, strict=True)), None, lse), true, "float32")
