"""The numbered cases of docs/cases.md that are the same for every implementation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from implementations import (
    ARGUMENTS,
    assert_within,
    beside_torch,
    every_implementation,
    in_its_own_dtype,
    in_jax,
    in_turn,
    options_of,
    plan_for,
    problem_named,
    run_case,
    truth,
    truth_outputs,
)  # fmt: skip

from logitless import plan, reference
from logitless.doctor import cuda_device_count
from logitless.problems import CONFIDENCES, WRONG_NATS, Problem
from logitless.rounding import round_to
from logitless.spec import STATISTICS, LossOptions
from logitless.tolerances import (
    BOUND,
    CANCELLED,
    CHAIN,
    GRADIENT,
    TARGET_GRADIENT,
    THREE_DIGITS,
    TINY,
    allowance,
    error,
)

LOW = ("float32", "bfloat16", "float16")
# Of the values per token in make test: what XLA compiles.
VALUES_IN_XLA = [
    *(("log_prob", 1.5, 3.0), ("entropy", 0.7, 3.0), ("both", 1.0, None)),
    *(("stats", 1.5, 3.0), ("squares", 1.0, None)),
]


def random_arrays(tokens: int, hidden: int, vocab: int, dtype: str) -> tuple[Any, Any, Any]:
    """x, w of the dtype's values, and y. With a ``hidden`` of whole 16 bytes Triton's kernels for Hopper take them."""
    rng = np.random.default_rng(0)
    x = round_to(rng.standard_normal((tokens, hidden)), dtype)
    w = round_to(rng.standard_normal((vocab, hidden)) * hidden**-0.5, dtype)
    return x, w, rng.integers(0, vocab, tokens)


@pytest.mark.case(2)
@pytest.mark.case(3)
@in_its_own_dtype
@pytest.mark.parametrize("name", ["odd_none", "odd_none_all", "odd_none_most"])
def test_none_with_random_upstream(impl: Any, name: str) -> None:
    problem = problem_named(name).with_dtype(impl.dtype)
    case = problem.case()
    outcome = run_case(impl, case)
    assert_within(problem, outcome)
    for argument in ARGUMENTS:
        made, true = outcome.grads[argument], truth_outputs(problem)[f"d{argument}"]
        assert impl.dtype != "float32" or error(made, true) <= CANCELLED
        assert np.abs(outcome.grads[argument]).max() > 0
    ignored = case.target == problem.options.ignore_index
    assert ignored.any()
    assert not outcome.loss[ignored].any()
    assert not outcome.grads["hidden"][ignored].any()
    assert outcome.grads["hidden"][~ignored].any()


@pytest.mark.case(3)
@in_its_own_dtype
def test_an_ignored_token_shuts_out_whatever_arrives_there(impl: Any) -> None:
    """An ignored token may have a NaN or infinite upstream gradient, or hidden state. No gradient shows it."""
    rng = np.random.default_rng(0)
    x, w, y = rng.standard_normal((6, 8)), rng.standard_normal((9, 8)), rng.integers(0, 9, 6)
    x, w = round_to(x, impl.dtype), round_to(w, impl.dtype)
    y[[1, 4]] = -100
    upstream = np.ones(6)
    true = reference.linear_cross_entropy(x, w, y, reduction="none", upstream=upstream)
    upstream[[1, 4]], x[[1, 4]] = [np.nan, np.inf], [[np.inf], [np.nan]]
    made = impl.run(x, w, y, reduction="none", upstream=upstream)
    assert (made.grads["hidden"][[1, 4]] == 0).all()
    assert error(made.grads["hidden"], true.hidden_grad) <= 2 * GRADIENT[impl.dtype]
    assert error(made.grads["weight"], true.weight_grad) <= 2 * GRADIENT[impl.dtype]


@pytest.mark.case(5)
@in_its_own_dtype
def test_upstream_other_than_one(impl: Any) -> None:
    x, w, y = random_arrays(40, 16, 70, impl.dtype)
    one, three = (impl.run(x, w, y, upstream=upstream) for upstream in (1.0, 3.0))
    assert float(one.loss) == float(three.loss)
    for name in ("hidden", "weight"):
        assert error(three.grads[name], 3 * one.grads[name]) <= GRADIENT[impl.dtype]


@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(6)
@in_its_own_dtype
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wrt", [tuple(a for i, a in enumerate(ARGUMENTS) if mask >> i & 1) for mask in range(1, 8)])
def test_every_subset_of_gradients(impl: Any, wrt: tuple[str, ...], reduction: str) -> None:
    problem = problem_named("odd_most").with_dtype(impl.dtype).with_options(reduction=reduction)
    case = problem.case()
    outcome = run_case(impl, case, wrt=wrt)
    assert {name for name in ARGUMENTS if outcome.grads[name] is not None} == set(wrt)
    assert_within(problem, outcome)


@pytest.mark.case(7)
@in_its_own_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_no_token_counts(impl: Any, tokens: int, reduction: str) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((tokens, 6)), rng.standard_normal((11, 6))
    y = np.full(tokens, -100)
    outcome = impl.run(x, w, y, rng.standard_normal(11), reduction=reduction, z_loss=0.1, label_smoothing=0.1)
    assert outcome.loss.shape == ((tokens,) if reduction == "none" else ())
    assert not outcome.loss.any()
    for name in ARGUMENTS:
        assert outcome.grads[name] is not None, name
        assert not outcome.grads[name].any(), name


@pytest.mark.case(7)
@in_its_own_dtype
def test_one_token(impl: Any) -> None:
    problem = problem_named("one_token").with_dtype(impl.dtype)
    assert_within(problem, run_case(impl, problem.case()))


@pytest.mark.case(8)
@in_its_own_dtype
@pytest.mark.parametrize("ignore_index", [2, 4, 42, 122, -100, 123, -1])
def test_ignore_index_inside_and_outside_the_vocabulary(impl: Any, ignore_index: int) -> None:
    problem = problem_named("odd_most").with_dtype(impl.dtype).with_options(ignore_index=ignore_index)
    case = problem.case()
    outcome = run_case(impl, case)
    assert_within(problem, outcome)
    ignored = case.target == ignore_index
    assert ignored.any()
    assert not outcome.grads["hidden"][ignored].any()


@pytest.mark.case(8)
@in_its_own_dtype
def test_an_ignored_token_may_hold_anything(impl: Any) -> None:
    x, w, y = random_arrays(20, 8, 30, impl.dtype)
    y[[3, 7]] = -100
    clean = impl.run(x, w, y)
    for poison in (np.nan, np.inf):
        x[3], x[7] = poison, -poison
        outcome = impl.run(x, w, y)
        assert float(outcome.loss) == float(clean.loss)
        assert np.array_equal(outcome.grads["weight"], clean.grads["weight"])
        assert not outcome.grads["hidden"][[3, 7]].any()


@pytest.mark.case(10)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_with_a_wide_hidden(impl: Any, dtype: str) -> None:
    problem = Problem("wide", (24,), 4096, 190, bias=True, dtype=dtype)
    assert_within(problem, run_case(impl, problem.case()))


@pytest.mark.case(12)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_tied_classes_at_large_logits(impl: Any, dtype: str) -> None:
    problem = problem_named("tied").with_dtype(dtype)
    outcome = run_case(impl, problem.case())
    assert float(outcome.loss) == pytest.approx(np.log(2), rel=TINY["float32"])
    assert_within(problem, outcome)


@pytest.mark.case(12)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_infinite_logits(impl: Any, order: str) -> None:
    x, w, y = random_arrays(12, 8, 9, impl.dtype)
    bias = np.zeros(9)
    bias[4] = -np.inf
    y[y == 4] = 3
    y[0] = 4
    options = {"reduction": "none", "plan": plan(tokens=12, hidden=8, vocab=9, dtype=impl.dtype, order=order, chunk=4)}
    outcome = impl.run(x, w, y, bias, **options)
    assert outcome.loss[0] == np.inf
    assert np.isfinite(outcome.loss[1:]).all()
    true = reference.linear_cross_entropy(x, w, y, bias, reduction="none")
    assert error(outcome.loss, true.loss) <= TINY["float32"]
    for name, grad in (("hidden", true.hidden_grad), ("weight", true.weight_grad), ("bias", true.bias_grad)):
        assert error(outcome.grads[name], grad) <= GRADIENT[impl.dtype]
    nothing = impl.run(x, w, y, np.full(9, -np.inf), **options)
    assert np.isnan(nothing.loss).all()


@pytest.mark.case(12)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_a_row_of_nan_poisons_only_itself(impl: Any, order: str) -> None:
    x, w, y = random_arrays(12, 8, 9, impl.dtype)
    options = {"reduction": "none", "plan": plan(tokens=12, hidden=8, vocab=9, dtype=impl.dtype, order=order, chunk=4)}
    clean = impl.run(x, w, y, **options)
    x[5] = np.nan
    outcome = impl.run(x, w, y, **options)
    others = np.arange(12) != 5
    assert np.isnan(outcome.loss[5])
    assert np.isnan(outcome.grads["hidden"][5]).all()
    assert np.array_equal(outcome.loss[others], clean.loss[others])
    assert np.array_equal(outcome.grads["hidden"][others], clean.grads["hidden"][others])


@pytest.mark.late(where=lambda p: in_jax(p) and p["dtype"] == "float32")
@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(14)
@every_implementation
@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("dtype", [*LOW, "float64"])
def test_confident_tokens(impl: Any, dtype: str, two_pass: bool) -> None:
    """The target's logit gradient p − 1 and the loss −log p keep their relative accuracy as p → 1.

    Token i's logits are x_i[y_i] at its class and 0 elsewhere, so dX[i, y_i] is the target's logit gradient.
    """
    problem = problem_named("confident").with_dtype(dtype).with_options(reduction="none")
    case = problem.case()
    chosen = plan_for(problem, order="vocab", chunk=300) if two_pass else None
    if not two_pass:
        problem = problem.with_options(reduction="sum")
        case = problem.case()
    losses = impl.run(case.hidden, case.weight, case.target, dtype=dtype, reduction="none").loss
    outcome = impl.run(
        case.hidden, case.weight, case.target, dtype=dtype, reduction=problem.options.reduction, plan=chosen
    )
    tokens, y = np.arange(problem.tokens), case.target
    logit = case.hidden[tokens, y].astype(np.float64)
    s = (problem.vocab - 1) * np.exp(-logit)
    p = 1 / (1 + s)
    assert {float(np.round(value, 5)) for value in p} >= set(CONFIDENCES) or dtype in ("bfloat16", "float16")
    assert p.max() > 0.99995
    made = outcome.grads["hidden"][tokens, y]
    assert np.abs(made / -(s / (1 + s)) - 1).max() <= TARGET_GRADIENT[dtype]
    assert np.abs(losses / np.log1p(s) - 1).max() <= TARGET_GRADIENT["float64" if dtype == "float64" else "float32"]


@pytest.mark.every_value
@pytest.mark.case(15)
@every_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weight_gradient_does_not_worsen_with_chunks(impl: Any, dtype: str) -> None:
    problem = Problem("chunks", (1024,), 16, 64, dtype=dtype)
    case, true = problem.case(), truth_outputs(problem)["dweight"]
    errors = {
        chunks: error(
            run_case(impl, case, plan=plan_for(problem, order="tokens", chunk=1024 // chunks)).grads["weight"], true
        )
        for chunks in (1, 4, 64, 1024)
    }
    assert max(errors.values()) <= BOUND["chunks beside one, times"] * errors[1] + TINY["float32"], errors


@pytest.mark.slow
@pytest.mark.case(16)
@beside_torch
@in_its_own_dtype
def test_more_logits_than_two_to_the_31(impl: Any) -> None:
    """N · V is more than 2³¹. Every token is the same, so one row's truth is enough."""
    tokens, vocab = 66_000, 32_771
    rng = np.random.default_rng(0)
    row, w = (round_to(rng.standard_normal(shape), impl.dtype) for shape in (2, (vocab, 2)))
    x = np.broadcast_to(row, (tokens, 2)).copy()
    y = np.full(tokens, vocab - 1)
    chosen = plan(tokens=tokens, hidden=2, vocab=vocab, dtype=impl.dtype, memory_budget=200 * 2**20, device="cpu")
    assert tokens * vocab > 2**31
    # JAX's loops are the same with and without gradients; unoptimised, as a CPU's tests compile them, they take a
    # minute more.
    gradients = impl.on_gpu or impl.name.startswith("torch")
    outcome = impl.run(x, w, y, plan=chosen, wrt=ARGUMENTS if gradients else ())
    true = reference.linear_cross_entropy(x[:1], w, y[:1])
    assert float(outcome.loss) == pytest.approx(float(true.loss), rel=CHAIN)
    if not gradients:
        return
    bare = error(impl.product(np.ones((2, tokens), np.float32), x), np.repeat(x[:1], 2, 0) * float(tokens))
    limit = max(CANCELLED, GRADIENT[impl.dtype], allowance(bare, "float32"))
    assert error(outcome.grads["weight"], true.weight_grad) <= limit
    assert error(outcome.grads["hidden"][[0, -1]] * tokens, np.repeat(true.hidden_grad, 2, 0)) <= limit


@pytest.mark.slow
@pytest.mark.case(16)
@beside_torch
@every_implementation
def test_a_weight_of_more_than_two_to_the_31_elements(impl: Any) -> None:
    """V · D is more than 2³¹. All rows are 0 except the last, which is the target."""
    if impl.name.startswith("jax") and not cuda_device_count():
        pytest.skip("a minute on a CPU; JAX on a GPU runs it, and the test above on both")
    vocab, hidden = 2**21 + 9, 1024
    weight = np.zeros((vocab, hidden), np.float16)
    weight[-1] = 1.0
    assert weight.size > 2**31
    x = np.full((2, hidden), np.float16(14 / hidden))
    outcome = impl.run(x, weight, np.full(2, vocab - 1), dtype="float16", reduction="sum", wrt=("hidden",))
    s = (vocab - 1) * np.exp(-x[0].astype(np.float64).sum())
    assert float(outcome.loss) == pytest.approx(2 * np.log1p(s), rel=CHAIN)
    assert error(outcome.grads["hidden"], np.full((2, hidden), -s / (1 + s))) <= THREE_DIGITS


@pytest.mark.case(18)
@in_its_own_dtype
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradient_through_lse(impl: Any, softcap: float | None) -> None:
    """z-loss alone: class weights of 0 leave nothing else. Token i's upstream gradient is i, so that every row is
    distinct."""
    x, w, y = random_arrays(30, 16, 50, impl.dtype)
    upstream = np.arange(1.0, 31.0)
    options = {"reduction": "none", "z_loss": 0.5, "class_weight": np.zeros(50, np.float32), "softcap": softcap}
    outcome = impl.run(x, w, y, upstream=upstream, **options)
    z = x.astype(np.float64) @ w.T.astype(np.float64)
    z, slope = (z, 1.0) if softcap is None else (softcap * np.tanh(z / softcap), 1 - np.tanh(z / softcap) ** 2)
    lse = np.log(np.exp(z).sum(1))
    dz = (upstream * 2 * 0.5 * lse)[:, None] * np.exp(z - lse[:, None]) * slope
    assert error(outcome.loss, 0.5 * lse**2) <= TINY["float32"]
    assert error(outcome.grads["hidden"], dz @ w) <= GRADIENT[impl.dtype]
    assert error(outcome.grads["weight"], dz.T @ x) <= GRADIENT[impl.dtype]


@pytest.mark.late(where=lambda p: in_jax(p) and p["run"] not in VALUES_IN_XLA)
@pytest.mark.case(19)
@every_implementation
@pytest.mark.parametrize(
    ("run", "dtype"),
    in_turn(
        [
            *itertools.product(["log_prob", "entropy", "both"], [0.7, 1.0, 1.5], [None, 3.0]),
            *[("stats", 0.7, None), ("stats", 1.5, 3.0), ("squares", 1.0, None)],
        ],
        LOW,
    ),
)
def test_log_probs_and_entropy(impl: Any, run: tuple[str, float, float | None], dtype: str) -> None:
    kind, temperature, softcap = run
    rng = np.random.default_rng(3)
    x, w, y = random_arrays(50, 20, 90, dtype)
    bias = round_to(rng.standard_normal(90), dtype)
    y[::7] = -100
    x[7] *= 100  # an ignored row with large logits
    g1 = rng.standard_normal(50) * (kind not in ("entropy", "squares"))
    g2 = None if kind in ("log_prob", "squares") else rng.standard_normal(50)
    names = {"stats": ("lse", "sum_p_squared"), "squares": ("sum_p_squared",)}.get(kind, ())
    g3 = {name: rng.standard_normal(50) for name in names}
    options = {"logit_scale": 1 / temperature, "softcap": softcap}
    true = reference.linear_log_probs(
        x, w, y, bias, log_prob_upstream=g1, entropy_upstream=0.0 if g2 is None else g2,
        lse_upstream=g3.get("lse", 0.0), squared_upstream=g3.get("sum_p_squared", 0.0), **options,
    )  # fmt: skip
    for chosen in (None, plan(tokens=50, hidden=20, vocab=90, dtype=dtype, order="tokens", chunk=16)):
        made = impl.run_log_probs(
            x, w, y, bias, dtype=dtype, log_prob_upstream=g1, entropy_upstream=g2, stats_upstream=g3 or None,
            plan=chosen, **options,
        )  # fmt: skip
        assert error(made.log_prob, true.log_prob) <= TINY["float32"]
        assert not made.log_prob[::7].any()
        for field in STATISTICS if g3 else ():
            assert error(getattr(made.stats, field), getattr(true.stats, field)) <= TINY["float32"], field
            assert (getattr(made.stats, field)[::7] == STATISTICS[field].ignored).all()
        if g2 is None and not g3:
            assert made.entropy is None
        else:
            assert error(made.entropy, true.entropy) <= TINY["float32"]
            assert not made.entropy[::7].any()
        for name, grad in (("hidden", true.hidden_grad), ("weight", true.weight_grad), ("bias", true.bias_grad)):
            assert error(made.grads[name], grad) <= 2 * GRADIENT[dtype], name
        assert not made.grads["hidden"][::7].any()


@pytest.mark.every_value
@pytest.mark.case(19)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_entropy_of_rows_rescued_midway(impl: Any, order: str) -> None:
    """Logits spread over hundreds of nats, so that anchors move after sums were made, block by block."""
    x, w, y = random_arrays(40, 16, 400, impl.dtype)
    x = round_to(60 * x, impl.dtype)
    true = reference.linear_log_probs(x, w, y, entropy_upstream=1.0)
    chosen = plan(tokens=40, hidden=16, vocab=400, dtype=impl.dtype, order=order, chunk=20)
    made = impl.run_log_probs(x, w, y, entropy_upstream=1.0, plan=chosen)
    assert (-true.log_prob > 40).any()
    assert (true.entropy > 0.1).any()
    assert error(made.log_prob, true.log_prob) <= CHAIN
    assert np.abs(made.entropy - true.entropy).max() <= THREE_DIGITS
    stats = impl.run(x, w, y, return_stats=True, plan=chosen).stats
    assert np.abs(stats.entropy - true.entropy).max() <= THREE_DIGITS
    # Near ties flip nothing, but float32 logits of ±200 carry 1e-5 of their size.
    assert error(made.grads["hidden"], true.hidden_grad) <= max(THREE_DIGITS, GRADIENT[impl.dtype])


@pytest.mark.case(20)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_argmax_takes_the_first_of_a_tie(impl: Any, order: str) -> None:
    x = np.ones((6, 8), np.float32)
    w = np.array([0, 2, 1, 2, 2, 0, 2], np.float32)[:, None] * np.eye(1, 8, dtype=np.float32)
    y = np.array([1, 3, -100, 1, 0, 6])
    chosen = plan(tokens=6, hidden=8, vocab=7, dtype=impl.dtype, order=order, chunk=2)
    stats = impl.run(x, w, y, return_stats=True, plan=chosen).stats
    assert stats.argmax.tolist() == [1, 1, -1, 1, 1, 1]
    assert stats.correct.tolist() == [True, False, False, True, False, False]
    assert stats.argmax.dtype == np.int32
    assert stats.max_logit.tolist() == [2, 2, 0, 2, 2, 2]
    assert stats.min_logit.tolist() == [0, 0, 0, 0, 0, 0]


@pytest.mark.case(21)
@in_its_own_dtype
def test_leading_axes(impl: Any) -> None:
    x, w, y = random_arrays(24, 8, 40, impl.dtype)
    flat = impl.run(x, w, y, reduction="none")
    cube = impl.run(x.reshape(2, 3, 4, 8), w, y.reshape(2, 3, 4), reduction="none")
    assert cube.loss.shape == (2, 3, 4)
    assert cube.grads["hidden"].shape == (2, 3, 4, 8)
    assert np.array_equal(cube.loss.reshape(-1), flat.loss)
    assert np.array_equal(cube.grads["weight"], flat.grads["weight"])
    # A causal shift made by the caller.
    shifted = impl.run(x.reshape(2, 12, 8)[:, :-1], w, y.reshape(2, 12)[:, 1:])
    true = reference.linear_cross_entropy(x.reshape(2, 12, 8)[:, :-1], w, y.reshape(2, 12)[:, 1:])
    assert float(shifted.loss) == pytest.approx(float(true.loss), rel=TINY["float32"])


@pytest.mark.late(where=lambda p: in_jax(p) and p["tokens"] in (26, 128, 2048))
@pytest.mark.case(22)
@in_its_own_dtype
@pytest.mark.parametrize("tokens", [15, 26, 128, 513, 2048, 8192])
def test_any_number_of_tokens(impl: Any, tokens: int) -> None:
    problem = Problem("any", (tokens,), 8, 130, dtype=impl.dtype)
    chosen = plan_for(problem, order="tokens", chunk=min(tokens, 500))
    assert_within(problem, run_case(impl, problem.case(), plan=chosen), product=impl.product)


@pytest.mark.every_value(where=in_jax)
@pytest.mark.case(23)
@every_implementation
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_confident_and_wrong(impl: Any, order: str, mixed: bool, dtype: str) -> None:
    problem = problem_named("confident_wrong").with_dtype(dtype).with_options(reduction="sum")
    case = problem.case()
    ids = case.target if mixed else np.where(truth(problem).stats.nll > 40, case.target, -100)
    outcome = impl.run(
        case.hidden, case.weight, ids, dtype=dtype, reduction="sum", plan=plan_for(problem, order=order, chunk=48),
    )  # fmt: skip
    losses = impl.run(case.hidden, case.weight, ids, dtype=dtype, reduction="none").loss
    true = reference.linear_cross_entropy(case.hidden, case.weight, ids, reduction="none")
    assert all(np.abs(true.loss - round(nats, -1)).min() < 0.02 * nats + 1 for nats in WRONG_NATS)
    assert error(losses, true.loss) <= TINY["float32"]
    assert error(outcome.grads["hidden"], true.hidden_grad) <= GRADIENT[dtype]
    assert error(outcome.grads["weight"], true.weight_grad) <= GRADIENT[dtype]


@pytest.mark.case(29)
@in_its_own_dtype
@pytest.mark.parametrize("name", ["odd_most", "odd_softcap", "odd_none_all", "confident_wrong"])
def test_loss_without_gradients_equals_the_training_loss(impl: Any, name: str) -> None:
    problem = problem_named(name).with_dtype(impl.dtype)
    case = problem.case()
    kept = {field: np.copy(getattr(case, field)) for field in ("hidden", "weight", "target")}
    training = run_case(impl, case)
    evaluation = run_case(impl, case, wrt=())
    assert error(evaluation.loss, training.loss) <= TINY["float32"]
    assert all(grad is None for grad in evaluation.grads.values())
    for field, values in kept.items():
        assert np.array_equal(getattr(case, field), values), field


@pytest.mark.case(30)
@in_its_own_dtype
def test_micro_batches_with_one_normalizer(impl: Any) -> None:
    x, w, y = random_arrays(60, 16, 45, impl.dtype)
    y[[1, 5, 30, 31, 32, 59]] = -100
    count = float((y != -100).sum())
    whole = impl.run(x, w, y, z_loss=1e-3)
    parts = [impl.run(x[i : i + 20], w, y[i : i + 20], z_loss=1e-3, normalizer=count) for i in (0, 20, 40)]
    assert sum(float(part.loss) for part in parts) == pytest.approx(float(whole.loss), rel=TINY["float32"])
    assert error(sum(part.grads["weight"] for part in parts), whole.grads["weight"]) <= GRADIENT[impl.dtype]
    hidden = np.concatenate([part.grads["hidden"] for part in parts])
    assert error(hidden, whole.grads["hidden"]) <= GRADIENT[impl.dtype]


@pytest.mark.case(31)
@in_its_own_dtype
@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_bitwise_the_same_from_run_to_run(impl: Any, order: str) -> None:
    problem = problem_named("odd_most").with_dtype(impl.dtype)
    case, chosen = problem.case(), plan_for(problem, order=order, chunk=40)
    first, second = run_case(impl, case, plan=chosen), run_case(impl, case, plan=chosen)
    assert float(first.loss) == float(second.loss)
    for name in ARGUMENTS:
        assert np.array_equal(first.grads[name], second.grads[name]), name


@every_implementation
def test_float16_small_gradients_survive_a_loss_scale(impl: Any) -> None:
    """The mean over many tokens makes gradients smaller than float16's smallest number. An upstream loss scale must
    save them."""
    problem = Problem("scaled", (4096,), 8, 300, dtype="float16", upstream=65536.0)
    case = problem.case()
    outcome = run_case(impl, case)
    assert_within(problem, outcome)
    per_token = Problem("scaled", (4096,), 8, 300, dtype="float16", options=LossOptions("none"))
    case = per_token.case()
    upstream = np.full(4096, 65536.0 / 4096)
    made = impl.run(case.hidden, case.weight, case.target, dtype="float16", upstream=upstream, reduction="none")
    assert error(made.grads["weight"], truth_outputs(problem)["dweight"]) <= THREE_DIGITS


@in_its_own_dtype
def test_token_weight_zero_equals_ignored(impl: Any) -> None:
    x, w, y = random_arrays(30, 8, 25, impl.dtype)
    mask = (np.arange(30) % 3 > 0).astype(np.float32)
    weighted = impl.run(x, w, y, token_weight=mask, label_smoothing=0.1)
    ignored = impl.run(x, w, np.where(mask > 0, y, -100), label_smoothing=0.1)
    assert float(weighted.loss) == pytest.approx(float(ignored.loss), rel=TINY["float32"])
    assert error(weighted.grads["hidden"], ignored.grads["hidden"]) <= GRADIENT[impl.dtype]
    assert error(weighted.grads["weight"], ignored.grads["weight"]) <= GRADIENT[impl.dtype]


@pytest.mark.every_value
@every_implementation  # Triton's kernels for 16 bits hold 17 MiB of split tiles, more than this problem's matrix
@pytest.mark.parametrize("budget_share", [0.2, 0.5])
def test_a_memory_budget_is_enough(impl: Any, budget_share: float) -> None:
    problem = Problem("budget", (600,), 32, 5000, dtype=impl.dtype)
    case = problem.case()
    roomy = plan_for(problem, fused=impl.fused)
    outcome = run_case(impl, case, memory_budget=int(roomy.scratch_bytes * budget_share))
    assert_within(problem, outcome)


def test_options_reach_the_reference() -> None:
    """Guards the helpers above: leaving an option out must change the truth."""
    problem = problem_named("odd_most")
    case = problem.case()
    options = options_of(case)
    base = float(truth(problem).loss)
    for name in ("label_smoothing", "z_loss", "logit_scale", "token_weight", "class_weight", "ignore_index"):
        default = {"label_smoothing": 0.0, "z_loss": 0.0, "logit_scale": 1.0, "ignore_index": 122}.get(name)
        without = options | {name: default}
        changed = reference.linear_cross_entropy(case.hidden, case.weight, case.target, case.bias, **without)
        assert float(changed.loss) != pytest.approx(base, rel=TINY["float32"]), name
