"""Values per token — losses, log-probabilities, entropies, statistics — with gradients that arrive later, on every
implementation, and on interpreted kernels where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from implementations import ALL, MORE_DTYPES, TorchEager, interpreted

from logitless import plan, reference
from logitless.problems import BY_NAME
from logitless.rounding import round_to
from logitless.tolerances import AREAL, GRADIENT, RATIO, ROUNDING, TARGET_GRADIENT, THREE_DIGITS, TINY, error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


class TorchTritonInterpreted(TorchEager):
    """The kernels on CPU tensors."""

    name = "torch_triton_interpreted"
    backend = "triton"


EVERY = [
    *ALL,
    pytest.param(
        TorchTritonInterpreted(), id="torch_triton_interpreted",
        marks=interpreted,
    ),
]  # fmt: skip
every_implementation = pytest.mark.parametrize("impl", EVERY)
in_its_own_dtype = pytest.mark.parametrize("impl", [*EVERY, *MORE_DTYPES])


def some(tokens: int = 40, hidden: int = 16, vocab: int = 90, dtype: str = "float32", seed: int = 0) -> tuple[Any, ...]:
    """x, w, b of the dtype's values, and y with ignored tokens."""
    rng = np.random.default_rng(seed)
    x, w, b = (rng.standard_normal(shape) for shape in ((tokens, hidden), (vocab, hidden), (vocab,)))
    y = rng.integers(0, vocab, tokens)
    y[::7] = -100
    return round_to(x, dtype), round_to(w * hidden**-0.5, dtype), round_to(b, dtype), y


def gradients_of(
    impl: Any, scalar: Callable[[Any, Any, Callable[[Any], Any]], Any], x: Any, w: Any, b: Any, y: Any
) -> Any:
    """Gradients in x, w and b of ``scalar(log_prob, entropy, array)``, a function of tensors or of JAX arrays."""
    given = {name: impl.array(values, impl.dtype) for name, values in (("hidden", x), ("weight", w), ("bias", b))}
    if impl.name.startswith("torch"):
        from logitless import torch_impl

        for leaf in given.values():
            leaf.requires_grad_()
        made = torch_impl.linear_log_probs(**given, target=impl.array(y), with_entropy=True, backend=impl.backend)
        scalar(*made, impl.array).backward()
        return [impl.numpy(leaf.grad) for leaf in given.values()]
    import jax

    from logitless import jax_impl

    def value(given: dict[str, Any]) -> Any:
        made = jax_impl.linear_log_probs(**given, target=impl.array(y), with_entropy=True, backend=impl.backend)
        return scalar(*made, impl.array)

    made = jax.grad(value)(given)
    return [impl.numpy(made[name]) for name in given]


# ---------------------------------------------------------------------------------------------------------------------
# AReaL's table, to the letter; interpreting takes as long as there are tokens, so there two ragged tiles of them


def areal(impl: Any, dtype: str = "float32") -> tuple[Any, ...]:
    return some(80 if impl.name == "torch_triton_interpreted" else 128, 64, 500, dtype)


SLOW = pytest.mark.slow  # less than what the others of the same test do


def within(made: Any, true: Any, key: str) -> None:
    large = key.endswith("large")
    np.testing.assert_allclose(made, true, rtol=0.0 if large else AREAL[key], atol=AREAL[key], err_msg=key)


@pytest.mark.case(19)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_areal_forward(impl: Any, dtype: str) -> None:
    if impl.name == "torch_triton_interpreted" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter cuts float32 off where it should round it to bfloat16")
    x, w, b, y = areal(impl, dtype)
    true = reference.linear_log_probs(x, w, y, b)
    made = impl.run_log_probs(x, w, y, b, dtype=dtype, entropy_upstream=0.0)
    within(made.log_prob, true.log_prob, f"forward {dtype}")
    within(made.entropy, true.entropy, f"forward {dtype}")


@pytest.mark.case(19)
@every_implementation
@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=SLOW), pytest.param(1.5, marks=SLOW)])
def test_areal_temperature(impl: Any, temperature: float) -> None:
    x, w, _, y = areal(impl)
    true = reference.linear_log_probs(x, w, y, logit_scale=1 / temperature)
    made = impl.run_log_probs(x, w, y, dtype="float32", entropy_upstream=0.0, logit_scale=1 / temperature)
    within(made.log_prob, true.log_prob, "temperature float32")
    within(made.entropy, true.entropy, "temperature float32")


@pytest.mark.case(2)
@every_implementation
@pytest.mark.parametrize("kind", [pytest.param("log_prob", marks=SLOW), pytest.param("entropy", marks=SLOW), "both"])
def test_areal_backward(impl: Any, kind: str) -> None:
    x, w, _, y = areal(impl)
    rng = np.random.default_rng(1)
    g1 = rng.standard_normal(len(x)) * (kind != "entropy")
    g2 = rng.standard_normal(len(x)) * (kind != "log_prob")
    true = reference.linear_log_probs(x, w, y, log_prob_upstream=g1, entropy_upstream=g2)
    made = impl.run_log_probs(x, w, y, dtype="float32", log_prob_upstream=g1, entropy_upstream=g2)
    within(made.grads["hidden"], true.hidden_grad, "backward hidden")
    within(made.grads["weight"], true.weight_grad, "backward weight")


@pytest.mark.late(where=lambda p: p["impl"].name == "jax_xla")
@every_implementation
def test_areal_backward_large(impl: Any) -> None:
    if impl.name == "torch_triton_interpreted":
        pytest.skip("interpreted kernels are slow: a large problem is judged on a GPU")
    x, w, _, y = some(1024, 256, 8192)
    g1, g2 = np.random.default_rng(1).standard_normal((2, 1024))
    true = reference.linear_log_probs(x, w, y, log_prob_upstream=g1, entropy_upstream=g2)
    made = impl.run_log_probs(x, w, y, dtype="float32", log_prob_upstream=g1, entropy_upstream=g2)
    within(made.grads["hidden"], true.hidden_grad, "backward hidden")
    within(made.grads["weight"], true.weight_grad, "backward weight large")


# ---------------------------------------------------------------------------------------------------------------------
# Cases


@pytest.mark.case(4)
@in_its_own_dtype
@pytest.mark.parametrize("kind", ["strided", "expanded", "sliced", "transposed"])
def test_upstream_gradients_of_any_layout(impl: Any, kind: str) -> None:
    x, w, b, y = some(dtype=impl.dtype)
    g = np.random.default_rng(5).standard_normal(80).astype(np.float32)
    scalars: dict[str, Any] = {
        "strided": (lambda lp, h, array: (lp * array(g)[::2]).sum() + (h * array(g)[1::2]).sum(), g[::2], g[1::2]),
        "expanded": (lambda lp, h, array: lp.sum() - h.sum(), np.ones(40), -np.ones(40)),
        "sliced": (lambda lp, h, array: lp[::3].sum() + h[1::4].sum(), np.arange(40) % 3 == 0, np.arange(40) % 4 == 1),
        "transposed": (
            lambda lp, h, array: (lp.reshape(5, 8).T * array(g[:40]).reshape(8, 5)).sum() + 0 * h.sum(),
            g[:40].reshape(8, 5).T.reshape(-1), np.zeros(40),
        ),
    }  # fmt: skip
    scalar, g1, g2 = scalars[kind]
    true = reference.linear_log_probs(x, w, y, b, log_prob_upstream=g1, entropy_upstream=g2)
    made = gradients_of(impl, scalar, x, w, b, y)
    for grad, expected in zip(made, (true.hidden_grad, true.weight_grad, true.bias_grad), strict=True):
        assert error(grad, expected) <= 2 * GRADIENT[impl.dtype]


@pytest.mark.case(18)
@in_its_own_dtype
def test_gradient_of_lse_through_log_probs(impl: Any) -> None:
    """Σ (i log p_i)²: the upstream gradient of token i is 2 i² log p_i, made of what the forward gave."""
    x, w, b, y = some(dtype=impl.dtype)
    i = np.arange(1.0, 41.0).astype(np.float32)
    forward = reference.linear_log_probs(x, w, y, b)
    true = reference.linear_log_probs(x, w, y, b, log_prob_upstream=2 * i.astype(np.float64) ** 2 * forward.log_prob)
    made = gradients_of(impl, lambda lp, _, array: ((lp * array(i)) ** 2).sum(), x, w, b, y)
    for grad, expected in zip(made, (true.hidden_grad, true.weight_grad, true.bias_grad), strict=True):
        assert error(grad, expected) <= 2 * GRADIENT[impl.dtype]


@pytest.mark.every_value
@pytest.mark.case(20)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_ties_take_the_first_index_wherever_blocks_end(impl: Any, order: str) -> None:
    """Two largest logits at every pair of places: in one block or in two, beside their ends."""
    vocab, tokens = 300, 36
    places = [0, 1, 127, 128, 129, 255, 256, 298, 299]
    pairs = [(a, b) for a in places for b in places if a < b]
    assert len(pairs) == tokens
    hidden = 40  # Triton's kernels for Hopper take multiples of 8
    x = np.eye(tokens, hidden, dtype=np.float32)
    w = np.zeros((vocab, hidden), np.float32)
    for token, pair in enumerate(pairs):
        w[list(pair), token] = 3.0
    first, second = np.array(pairs).T
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": impl.dtype}
    chosen = plan(**sizes, order=order, chunk=128, fused=impl.fused)
    for y, right in ((first, True), (second, False)):
        stats = impl.run(x, w, y, return_stats=True, plan=chosen).stats
        assert stats.argmax.tolist() == first.tolist()
        assert stats.correct.tolist() == [right] * tokens
        assert (stats.max_logit == 3.0).all()
        assert not stats.min_logit.any()
    nothing = impl.run(x, 0 * w, first, return_stats=True, plan=chosen).stats
    assert not nothing.argmax.any()
    assert np.allclose(nothing.entropy, np.log(vocab))


@pytest.mark.every_value(each="impl")
@pytest.mark.case(3)
@pytest.mark.case(20)
@in_its_own_dtype
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("poison", [1.0, 1e30, np.nan])
def test_statistics_of_ignored_rows_are_defined(impl: Any, poison: float, reduction: str) -> None:
    x, w, b, y = some(dtype=impl.dtype)
    x[y == -100] *= poison
    stats = impl.run(x, w, y, b, return_stats=True, reduction=reduction).stats
    ignored = y == -100
    for name, values in zip(stats._fields, stats, strict=True):
        assert (values[ignored] == (-1 if name == "argmax" else 0)).all(), name
        assert np.isfinite(values).all(), name
    true = reference.linear_cross_entropy(np.nan_to_num(x, posinf=0), w, y, b).stats
    for name in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        assert error(getattr(stats, name), getattr(true, name)) <= TINY["float32"], name
    assert stats.argmax.tolist() == true.argmax.tolist()
    assert stats.correct.tolist() == true.correct.tolist()


@pytest.mark.case(3)
@in_its_own_dtype
def test_mask_weights_per_token(impl: Any) -> None:
    """A mask as token_weight, as ignored targets and as a factor of the losses: one gradient, and not zero."""
    x, w, b, y = some(dtype=impl.dtype)
    mask = (np.arange(40) % 3 > 0).astype(np.float32)
    g = np.random.default_rng(2).standard_normal(40)
    weighted = impl.run(x, w, y, b, reduction="none", token_weight=mask, upstream=g)
    ignored = impl.run(x, w, np.where(mask > 0, y, -100), b, reduction="none", upstream=g)
    factored = impl.run(x, w, y, b, reduction="none", upstream=g * mask)
    for name in ("hidden", "weight", "bias"):
        assert np.abs(weighted.grads[name]).max() > 0
        assert error(ignored.grads[name], weighted.grads[name]) <= GRADIENT[impl.dtype]
        assert error(factored.grads[name], weighted.grads[name]) <= GRADIENT[impl.dtype]
    # Interpreted kernels multiply by NumPy's BLAS, where a row's bits depend on the rows beside it.
    assert error(ignored.loss, weighted.loss) <= TINY["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# Exponentials that wait for the upstream gradient


# Pallas's are in test_pallas.py.
every_triton = pytest.mark.parametrize("impl", [i for i in [*EVERY, *MORE_DTYPES] if i.values[0].backend == "triton"])
LARGE = 2**40


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the Triton backend made the gradients, call by call."""
    from logitless.torch_impl.kernels import fused, rehearsal

    ways: list[str] = []

    def recorded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if not rehearsal.rehearsing():  # kernels are compiled before a first call runs
                ways.append(name)
            return real(*arguments)

        return run

    for name in ("token_gradients", "token_logits", "known_gradients", "logits_gradients"):
        monkeypatch.setattr(fused, name, recorded(name, getattr(fused, name)))
    return ways


@pytest.mark.case(2)
@pytest.mark.case(4)
@every_triton
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_log_probs_whose_exponentials_wait(impl: Any, scale: float, counted: list[str]) -> None:
    """Any upstream gradient: of both signs, 0, small and large, NaN at an ignored token."""
    x, w, b, y = some(61, 32, 203, dtype=impl.dtype, seed=3)
    g = np.random.default_rng(4).standard_normal(61) * 10.0 ** np.random.default_rng(5).integers(-3, 4, 61)
    g[5:9] = 0.0
    true = reference.linear_log_probs(x, w, y, b, log_prob_upstream=g, logit_scale=scale)
    g[y == -100] = np.nan
    made = impl.run_log_probs(x, w, y, b, log_prob_upstream=g, logit_scale=scale, memory_budget=LARGE)
    assert counted == ["token_gradients"]
    assert error(made.log_prob, true.log_prob) <= TINY["float32"]
    for name in ("hidden", "weight", "bias"):
        assert error(made.grads[name], getattr(true, f"{name}_grad")) <= 2 * GRADIENT[impl.dtype], name


@every_triton
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 0.7},
        {"return_stats": True},
        {"class_weight": "drawn", "token_weight": "drawn", "label_smoothing": 0.2},
    ],
    ids=["plain", "smooth", "stats", "weights"],
)
def test_losses_whose_exponentials_wait(impl: Any, options: dict[str, Any], counted: list[str]) -> None:
    x, w, b, y = some(70, 24, 150, dtype=impl.dtype, seed=6)
    rng = np.random.default_rng(7)
    g, drawn = rng.standard_normal(70), {"class_weight": rng.random(150), "token_weight": rng.random(70)}
    drawn["token_weight"][3] = 0.0
    given = {name: drawn[name] if value == "drawn" else value for name, value in options.items()}
    with_stats = given.pop("return_stats", False)
    true = reference.linear_cross_entropy(x, w, y, b, reduction="none", upstream=g, **given)
    g[y == -100] = np.nan
    made = impl.run(x, w, y, b, reduction="none", upstream=g, memory_budget=LARGE, return_stats=with_stats, **given)
    assert counted == ["token_gradients"]
    assert error(made.loss, true.loss) <= TINY["float32"]
    assert not with_stats or error(made.stats.entropy, true.stats.entropy) <= TINY["float32"]
    for name in ("hidden", "weight", "bias"):
        assert error(made.grads[name], getattr(true, f"{name}_grad")) <= 2 * GRADIENT[impl.dtype], name


@every_triton
def test_nothing_waits_unless_it_can(impl: Any, counted: list[str]) -> None:
    """Two passes without a budget, with a softcap and label smoothing, or beyond the budget."""
    x, w, _, y = some(dtype=impl.dtype)
    impl.run_log_probs(x, w, y)
    impl.run_log_probs(x, w, y, entropy_upstream=1.0)
    impl.run(x, w, y, reduction="none", softcap=3.0, label_smoothing=0.1, memory_budget=LARGE)
    sizes = {"tokens": 40, "hidden": 16, "vocab": 90, "dtype": impl.dtype, "fused": True}
    impl.run_log_probs(x, w, y, memory_budget=plan(**sizes, order="tokens", chunk=40).scratch_bytes - 1)
    assert counted == 4 * ["known_gradients"]


@every_triton
def test_what_waited_is_used_once_and_made_anew(impl: Any, counted: list[str]) -> None:
    """A graph that is kept gives the same gradient again, from known sums."""
    import torch

    from logitless.torch_impl import linear_log_probs

    x, w, _, y = some(dtype=impl.dtype)
    leaf = impl.array(x, impl.dtype).requires_grad_()
    weight, ids = impl.array(w, impl.dtype), impl.array(y)
    for with_entropy, ways in ((False, ["token_gradients"]), (True, ["token_logits", "logits_gradients"])):
        counted.clear()
        values = linear_log_probs(leaf, weight, ids, with_entropy=with_entropy, memory_budget=LARGE, backend="triton")
        total = torch.stack([value.sum() for value in values if value is not None]).sum()
        first, second = (torch.autograd.grad(total, leaf, retain_graph=True)[0] for _ in range(2))
        assert counted == [*ways, "known_gradients"]
        assert error(impl.numpy(second), impl.numpy(first)) <= GRADIENT[impl.dtype]


def assert_as_exact(
    impl: Any, arrays: tuple[Any, ...], dtype: str, counted: list[str], true: Any, **given: Any
) -> None:
    """Logits that waited add little to what rounding the gradient's matrix does, once, from float32 logits."""
    from logitless.torch_impl.kernels import replay

    replay.programs.clear()  # a step that is repeated calls nothing
    made = impl.run_log_probs(*arrays, dtype=dtype, plan="fast", **given)
    assert counted == ["token_logits", "logits_gradients"]
    again = impl.run_log_probs(*arrays, dtype=dtype, plan="balanced", **given)
    assert error(made.entropy, true.entropy) <= TINY["float32"]
    assert error(made.log_prob, true.log_prob) <= TINY["float32"]
    for name in ("hidden", "weight", "bias"):
        expected = getattr(true, f"{name}_grad")
        allowed = RATIO * error(again.grads[name], expected) + TINY[dtype]
        assert error(made.grads[name], expected) <= allowed, name


@pytest.mark.case(2)
@pytest.mark.case(4)
@every_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": 1.5}, {"temperature": 1.7}], ids=str)
def test_statistics_whose_logits_wait(impl: Any, dtype: str, options: dict[str, Any], counted: list[str]) -> None:
    """Any upstream gradients, NaN at an ignored token; also of statistics, and of the entropy alone."""
    x, w, b, y = some(61, 32, 203, dtype=dtype, seed=3)
    g = np.random.default_rng(4).standard_normal((4, 61)) * 10.0 ** np.random.default_rng(5).integers(-3, 4, (4, 61))
    g[:, 5:9] = 0.0
    for stated, h in ((False, 0.0 * g[0]), (False, g[0]), (True, g[0])):
        counted.clear()
        more = {"lse_upstream": g[2], "squared_upstream": g[3]} if stated else {}
        true = reference.linear_log_probs(x, w, y, b, log_prob_upstream=h, entropy_upstream=g[1], **more, **options)
        upstream = {"log_prob_upstream": np.where(y == -100, np.nan, h), "entropy_upstream": g[1]}
        upstream["stats_upstream"] = {"lse": g[2], "sum_p_squared": g[3]} if stated else None
        assert_as_exact(impl, (x, w, y, b), dtype, counted, true, **upstream, **options)


@every_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("above", [0.0, 23.0, 25.0, 60.0, -39.0, -45.0])
def test_logits_that_wait_have_a_range(impl: Any, dtype: str, above: float, counted: list[str]) -> None:
    """An entry lies so many nats above the target of every second token, or below. From 24 on the row is done again;
    from −40 on a probability is 0."""
    x, w, _, y = some(40, 16, 203, dtype=dtype, seed=8)
    b = np.zeros(203, np.float32)
    x[::2], w[:, 3] = 0.0, 0.0
    x[::2, 3], w[202, 3] = 1.0, above
    y[y == 202] = 0
    g = np.random.default_rng(9).standard_normal((2, 40))
    true = reference.linear_log_probs(x, w, y, b, log_prob_upstream=g[0], entropy_upstream=g[1])
    upstream = {"log_prob_upstream": g[0], "entropy_upstream": g[1]}
    assert_as_exact(impl, (x, w, y, b), dtype, counted, true, **upstream)


@every_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "what", ["hidden nan", "hidden inf", "hidden -inf", "bias nan", "bias inf", "bias -inf", "banned"]
)
def test_logits_that_wait_keep_what_is_no_number(impl: Any, dtype: str, what: str) -> None:
    """NaN is where it is without them, and nowhere else. "banned": the bias of a token's target is −inf."""
    from logitless.torch_impl.kernels import replay

    x, w, b, y = some(12, 16, 90, dtype=dtype, seed=1)
    place, *value = what.split()
    number = float(value[0]) if value else -np.inf
    if place == "hidden":
        x[2, 3] = number
    else:
        b[y[3] if place == "banned" else 5] = number
    g = np.random.default_rng(1).standard_normal((2, 12))
    made = []
    for prefer in ("fast", "balanced"):
        replay.programs.clear()
        upstream = {"log_prob_upstream": g[0], "entropy_upstream": g[1], "plan": prefer}
        made.append(impl.run_log_probs(x, w, y, b, dtype=dtype, **upstream))
    for name in ("hidden", "weight", "bias"):
        ours, others = (each.grads[name] for each in made)
        assert (np.isnan(ours) == np.isnan(others)).all(), name
        assert np.isnan(ours).any() == (number != -np.inf or place == "hidden"), name


@every_triton
@pytest.mark.parametrize("nats", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("alone", [False, True], ids=["both", "entropy"])
def test_logits_that_wait_are_exact_for_sure_and_unsure_tokens(
    impl: Any, nats: float, alone: bool, counted: list[str]
) -> None:
    """``nats``: the standard deviation of a token's logits. The entropy's gradient is smallest where all probabilities
    are alike. Targets are drawn from the softmax."""
    rng = np.random.default_rng(10)
    x = round_to(rng.standard_normal((64, 32)), "bfloat16")
    w = round_to(nats * rng.standard_normal((300, 32)) * 32**-0.5, "bfloat16")
    b = np.zeros(300, np.float32)
    y = (x @ w.T + rng.gumbel(size=(64, 300))).argmax(1)
    g = rng.standard_normal((2, 64)) * [[0.0 if alone else 1.0], [1.0]]
    true = reference.linear_log_probs(x, w, y, b, log_prob_upstream=g[0], entropy_upstream=g[1])
    upstream = {"log_prob_upstream": g[0], "entropy_upstream": g[1]}
    assert_as_exact(impl, (x, w, y, b), "bfloat16", counted, true, **upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics beside log-probabilities

STATED = ("confident", "confident_wrong", "tied", "minus_inf", "banned", "one_class", "trained_bias")
# Left to test-all, by implementation: XLA has one way for all, and the kernels' rescued rows have tests of their own.
LATE = {"jax_xla": ("confident", "tied", "one_class"), "torch_triton_interpreted": ("confident_wrong",)}


def is_late(parameters: dict[str, Any]) -> bool:
    return parameters["name"] in LATE.get(parameters["impl"].name, ())


def stated(name: str, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A listed problem's arrays, and those of its options that log-probabilities have."""
    problem = BY_NAME[name].with_dtype(dtype)
    case = problem.case()
    options = {field: getattr(problem.options, field) for field in ("logit_scale", "softcap", "ignore_index")}
    return (case.hidden, case.weight, case.target, case.bias), options


@pytest.mark.late(where=is_late)
@pytest.mark.case(19)
@in_its_own_dtype
@pytest.mark.parametrize("prefer", ["balanced", "fast"])
@pytest.mark.parametrize("name", [*STATED, pytest.param("trained_softcap", marks=SLOW)])
def test_statistics_and_their_gradients(impl: Any, name: str, prefer: str) -> None:
    """ "fast": from logits that waited, where kernels have that."""
    if prefer == "fast" and impl.backend not in ("triton", "pallas"):
        pytest.skip('takes the way of "balanced"')
    if name.startswith("trained") and impl.name == "torch_triton_interpreted":
        pytest.skip("interpreted kernels are slow: a large problem is judged on a GPU")
    arrays, options = stated(name, impl.dtype)
    g1, g2, g3, g4 = np.random.default_rng(1).standard_normal((4, *arrays[2].shape))
    true = reference.linear_log_probs(
        *arrays, log_prob_upstream=g1, entropy_upstream=g2, lse_upstream=g3, squared_upstream=g4, **options
    )
    made = impl.run_log_probs(
        *arrays, log_prob_upstream=g1, entropy_upstream=g2, stats_upstream={"lse": g3, "sum_p_squared": g4},
        dtype=impl.dtype, plan=prefer, **options,
    )  # fmt: skip
    for field in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit", "sum_p_squared"):
        with np.errstate(invalid="ignore"):  # −inf of two sides
            assert error(*finite(getattr(made.stats, field), getattr(true.stats, field))) <= TINY["float32"], field
    assert (made.entropy == made.stats.entropy).all()
    # Of tied rows one element of dW is nearly all of its norm.
    allowed = max(GRADIENT[impl.dtype], ROUNDING[impl.dtype] if name == "tied" else 0.0)
    for key, grad in (("hidden", true.hidden_grad), ("weight", true.weight_grad), ("bias", true.bias_grad)):
        if made.grads[key] is not None:
            assert error(made.grads[key], grad) <= allowed, key


def finite(made: Any, true: Any) -> tuple[Any, Any]:
    """Both, 0 where both have the same infinity."""
    same = np.isinf(true) & (made == true)
    return np.where(same, 0.0, made), np.where(same, 0.0, true)


@pytest.mark.case(14)
@in_its_own_dtype
def test_square_sum_of_confident_tokens(impl: Any) -> None:
    """p − Σ p² cancels where p is near 1. Every token's gradient keeps its digits."""
    arrays, options = stated("confident", impl.dtype)
    true = reference.linear_log_probs(*arrays, log_prob_upstream=0.0, squared_upstream=1.0, **options)
    made = impl.run_log_probs(
        *arrays, log_prob_upstream=0.0, stats_upstream={"sum_p_squared": 1.0}, dtype=impl.dtype, **options
    )
    for row, expected in zip(made.grads["hidden"], true.hidden_grad, strict=True):
        assert error(row, expected) <= TARGET_GRADIENT[impl.dtype]


@in_its_own_dtype
def test_square_sum_of_many_classes_far_above_the_target(impl: Any) -> None:
    """All others are 39.75 nats above the target, where no anchor moves: Σ exp(z − anchor)² is no float32."""
    if impl.name == "torch_triton_interpreted":
        pytest.skip("interpreted kernels are slow: a large problem is judged on a GPU")
    vocab, size = 2**14, 16
    w = np.zeros((vocab, size), np.float32)
    w[1:, 0] = 1.0
    x = np.zeros((2, size), np.float32)
    x[:, 0] = 39.75
    y = np.array([0, 1])
    g = np.array([1.0, 2.0])
    true = reference.linear_log_probs(x, w, y, log_prob_upstream=0.0, squared_upstream=g)
    made = impl.run_log_probs(
        x, w, y, log_prob_upstream=0.0, stats_upstream={"sum_p_squared": g}, dtype=impl.dtype, wrt=("weight",)
    )
    assert error(made.stats.sum_p_squared, np.full(2, 1.0 / (vocab - 1))) <= TINY["float32"]
    assert np.abs(made.grads["weight"] - true.weight_grad).max() <= TINY["float32"]


@in_its_own_dtype
def test_rescued_rows_have_their_square_sums(impl: Any) -> None:
    """Logits spread over hundreds of nats, so that anchors move after sums were made."""
    x, w, _, y = some(40, 16, 400, impl.dtype)
    x = round_to(60 * x, impl.dtype)
    true = reference.linear_log_probs(x, w, y)
    chosen = plan(tokens=40, hidden=16, vocab=400, dtype=impl.dtype, order="vocab", chunk=20)
    made = impl.run_log_probs(x, w, y, stats_upstream={}, plan=chosen, dtype=impl.dtype)
    assert (true.log_prob < -40).any()
    assert ((true.stats.sum_p_squared > 0.1) & (true.stats.sum_p_squared < 0.9)).any()
    assert np.abs(made.stats.sum_p_squared - true.stats.sum_p_squared).max() <= THREE_DIGITS
