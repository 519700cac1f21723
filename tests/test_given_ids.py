"""Log-probabilities of given ids and the largest logits, on every implementation, against float64."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from implementations import and_interpreted, every_implementation, in_jax, in_turn, problem_named

from logitless import plan, reference
from logitless.doctor import cuda_device_count
from logitless.given_ids import ids_cut
from logitless.problems import PROBLEMS, Case, Problem
from logitless.rounding import round_to
from logitless.tolerances import GRADIENT, TARGET_GRADIENT, TINY, allowance, error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

DTYPES = ("float32", "bfloat16", "float16", "float64")
NAMES = [problem.name for problem in PROBLEMS if "large" not in problem.tags and problem.name not in ("gpt2", "qwen")]
FEW = 100
# Compiled by XLA in make test: the options, layouts of tokens and data that the function treats in ways of their own.
QUICK = (
    *("odd_bias", "odd_softcap", "odd_none_all", "ragged", "banned", "cohere", "confident_wrong", "no_axes"),
    *("no_token", "all_ignored"),
)
GRADIENTS = ("hidden", "weight", "bias")


def options_of(problem: Problem) -> dict[str, Any]:
    o = problem.options
    return {"logit_scale": o.logit_scale, "softcap": o.softcap, "ignore_index": o.ignore_index, "temperature": 0.8}


def side(dtype: str) -> str:
    """The dtype of results."""
    return "float64" if dtype == "float64" else "float32"


def upstream_of(case: Case, ids: Any) -> Any:
    shape = (*case.problem.shape, ids.shape[-1])
    return round_to(np.random.default_rng(3).standard_normal(shape), side(case.problem.dtype))


def package(impl: Any) -> Any:
    return importlib.import_module("logitless.torch_impl" if impl.name.startswith("torch") else "logitless.jax_impl")


def run(impl: Any, case: Any, call: Callable[..., Any], upstream: Any, wrt: tuple[str, ...] = GRADIENTS) -> Any:
    """``call(hidden, weight, bias)``'s values, what came beside them, and the gradients by name."""
    dtype = impl.takes(case.problem.dtype)
    given = {name: getattr(case, name) for name in GRADIENTS}
    with impl.precision(dtype) if hasattr(impl, "precision") else _nothing():
        arrays = {name: impl.array(values, dtype) for name, values in given.items()}
        wrt = tuple(name for name in wrt if arrays[name] is not None)
        if impl.name.startswith("torch"):
            leaves = {name: arrays[name].requires_grad_() for name in wrt}
            values, *more = _several(call(**arrays))
            grads = _torch_gradients(values, leaves, impl.array(upstream).to(values.dtype))
        else:
            import jax

            def split(chosen: Any) -> Any:
                first, *rest = _several(call(**(arrays | chosen)))
                return first, rest

            values, pull, more = jax.vjp(split, {name: arrays[name] for name in wrt}, has_aux=True)
            (grads,) = pull(impl.upstream(upstream, values))
        return (
            impl.numpy(values),
            [impl.numpy(value) for value in more],
            {name: impl.numpy(grad) for name, grad in grads.items()},
        )


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def _several(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _torch_gradients(values: Any, leaves: dict[str, Any], upstream: Any) -> dict[str, Any]:
    import torch

    return dict(zip(leaves, torch.autograd.grad(values, list(leaves.values()), upstream), strict=True))


def ideal_of(case: Case, true: Any) -> dict[str, Any]:
    """The gradients where nothing but the logits' gradient and the results are rounded, once, to the dtype."""
    dtype = case.problem.dtype
    largest = np.abs(true.logits_grad).max(initial=0.0) or 1.0
    dz = round_to(true.logits_grad / largest, dtype).astype(np.float64) * largest
    x, w = case.hidden.astype(np.float64).reshape(len(dz), case.problem.hidden), case.weight.astype(np.float64)
    made = {"hidden": (dz @ w).reshape(case.hidden.shape), "weight": dz.T @ x, "bias": true.logits_grad.sum(0)}
    return {name: round_to(values, dtype) for name, values in made.items()}


def magnitudes(case: Case) -> Any:
    """[...] the size of what a logit is the sum of."""
    x, w = np.abs(case.hidden.astype(np.float64)), np.abs(case.weight.astype(np.float64))
    b = 0.0 if case.bias is None else np.abs(np.where(np.isfinite(case.bias), case.bias, 0.0))
    return (x @ w.T + b).max(axis=-1, initial=0.0) * case.problem.options.logit_scale / 0.8


def assert_close(problem: Problem, name: str, grad: Any, true: Any, ideal: Any) -> None:
    """The rule of logitless.tolerances. How the numbers of a few tokens are rounded is a matter of luck. In float32 a
    logit is rounded by its size, and the gradient is off by as much."""
    wrong, most = error(grad, true), allowance(error(ideal, true), problem.dtype)
    if problem.tokens < FEW:
        most = max(most, GRADIENT[problem.dtype])
    if problem.dtype == "float32" and problem.tokens:
        rounded = np.finfo(np.float32).eps * float(magnitudes(problem.case()).max())
        most = max(most, min(rounded, TARGET_GRADIENT["float32"]))
    assert wrong <= most, f"{name}: error {wrong:.3g}, allowed {most:.3g}"


def check(impl: Any, problem: Problem, count: int, *, shared: bool = False, **more: Any) -> None:
    case = problem.case()
    ids = case.given_ids(count, shared=shared)
    g = upstream_of(case, ids)
    true = reference.linear_token_log_probs(case.hidden, case.weight, ids, case.bias, upstream=g, **options_of(problem))
    function = package(impl).linear_token_log_probs
    made, _, grads = run(
        impl, case,
        lambda hidden, weight, bias: function(
            hidden, weight, impl.array(ids), bias, backend=impl.backend, **options_of(problem), **more
        ), g,
    )  # fmt: skip
    assert made.shape == true.log_prob.shape
    finite = np.isfinite(true.log_prob)  # not of a banned id
    np.testing.assert_array_equal(made[~finite], true.log_prob[~finite])
    allowed = TINY[side(problem.dtype)] * (1.0 + 2.0 * magnitudes(case)[..., None] + np.abs(true.log_prob))
    assert (np.abs(made[finite] - true.log_prob[finite]) <= allowed[finite]).all()
    ignored = np.broadcast_to(ids == problem.options.ignore_index, made.shape)
    assert not made[ignored].any()
    ideal = ideal_of(case, true)
    for name, grad in grads.items():
        expected = getattr(true, f"{name}_grad")
        assert_close(problem, name, grad, expected, ideal[name])
    nothing = ignored.all(axis=-1)
    assert not grads["hidden"][nothing].any()


@pytest.mark.late(where=lambda p: in_jax(p) and p["name"] not in QUICK)
@pytest.mark.case(45)
@every_implementation
@pytest.mark.parametrize(("name", "dtype"), in_turn(NAMES, DTYPES))
def test_every_problem(impl: Any, name: str, dtype: str) -> None:
    check(impl, problem_named(name).with_dtype(dtype), 5)


@pytest.mark.every_value(each="impl")
@pytest.mark.case(45)
@and_interpreted
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("count", [1, 1024])
def test_one_id_and_many(impl: Any, count: int, shared: bool) -> None:
    """With 1024 of 123 ids most come several times."""
    check(impl, problem_named("odd_most"), count, shared=shared)


@pytest.mark.every_value
@pytest.mark.case(45)
@every_implementation
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_several_tiles_and_gathers(impl: Any, shared: bool) -> None:
    """A budget that leaves tiles of 128 × 128, and 64 rows of the weight at a time for 70 ids a token."""
    problem = problem_named("ragged")
    sizes = {"tokens": 515, "hidden": 24, "vocab": 300, "ids": 70, "dtype": "float32"}
    budget = _least(ids_cut, sizes)
    cut = ids_cut(**sizes, memory_budget=budget)
    assert (cut.gather_rows, len(cut.tile.token_slices), len(cut.tile.vocab_slices)) == (64, 5, 3)
    check(impl, problem, 70, shared=shared, memory_budget=budget)


@pytest.mark.case(14, 45)
@every_implementation
@pytest.mark.parametrize("place", [0, 3])
def test_a_confident_token_keeps_its_digits(impl: Any, place: int) -> None:
    """Whatever the place of the likely id: log p near 0, and 1 − p in the gradient."""
    case = problem_named("confident").case()
    ids = np.repeat(case.target[..., None], 4, axis=-1)
    ids[..., :place], ids[..., place + 1 :] = 500, 501
    g = np.zeros(ids.shape, np.float32)
    g[..., place] = 1.0
    true = reference.linear_token_log_probs(case.hidden, case.weight, ids, upstream=g)
    function = package(impl).linear_token_log_probs
    made, _, grads = run(
        impl, case,
        lambda hidden, weight, bias: function(hidden, weight, impl.array(ids), bias, backend=impl.backend), g,
    )  # fmt: skip
    log_prob, expected = made[..., place], true.log_prob[..., place]
    assert np.abs(log_prob / expected - 1).max() <= TARGET_GRADIENT["float32"]
    own = np.take_along_axis(grads["hidden"], case.target[..., None], -1)
    assert (
        np.abs(own / np.take_along_axis(true.hidden_grad, case.target[..., None], -1) - 1).max()
        <= (TARGET_GRADIENT["float32"])
    )


@pytest.mark.case(45)
@and_interpreted
def test_one_id_is_linear_log_probs(impl: Any) -> None:
    problem = problem_named("odd_none")
    case = problem.case()
    true = reference.linear_log_probs(case.hidden, case.weight, case.target, case.bias)
    function, other = package(impl).linear_token_log_probs, package(impl).linear_log_probs
    g = np.ones((*problem.shape, 1), np.float32)
    made, _, _ = run(
        impl, case,
        lambda hidden, weight, bias: function(
            hidden, weight, impl.array(case.target[..., None]), bias, backend=impl.backend
        ), g,
    )  # fmt: skip
    same, _, _ = run(
        impl, case,
        lambda hidden, weight, bias: other(hidden, weight, impl.array(case.target), bias, backend=impl.backend)[0],
        g[..., 0],
    )  # fmt: skip
    np.testing.assert_array_equal(made[..., 0], same)
    assert error(made[..., 0], true.log_prob) <= TINY["float32"]


@pytest.mark.case(33, 45)
@every_implementation
@pytest.mark.parametrize("layout", ["offset", "step", "transposed", "expanded"])
def test_layouts_of_ids_and_of_the_upstream_gradient(impl: Any, layout: str) -> None:
    if not impl.name.startswith("torch"):
        pytest.skip("JAX's arrays have one layout; NumPy's views become that at once")
    import torch

    case = problem_named("odd_bias").case()
    ids = case.given_ids(6)
    g = upstream_of(case, ids)
    if layout == "expanded":
        ids, g = np.broadcast_to(ids[:1], ids.shape), np.broadcast_to(g[..., :1], g.shape)

    def view(values: Any) -> Any:
        tensor = torch.tensor(np.ascontiguousarray(values))
        if layout == "offset":
            return torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].view(tensor.shape)
        if layout == "step":
            return torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., ::2]
        if layout == "transposed":
            return tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        return tensor[:1].expand(tensor.shape) if tensor.dtype == torch.int64 else tensor[..., :1].expand(tensor.shape)

    leaves = [impl.array(getattr(case, name), "float32").requires_grad_() for name in GRADIENTS]
    shown = [values.to(leaves[0].device) for values in map(view, (ids, g))]
    made = torch_function(impl)(leaves[0], leaves[1], shown[0], leaves[2], backend=impl.backend)
    grads = torch.autograd.grad(made, leaves, shown[1])
    true = reference.linear_token_log_probs(case.hidden, case.weight, ids, case.bias, upstream=g)
    assert error(impl.numpy(made), true.log_prob) <= TINY["float32"]
    for name, grad in zip(GRADIENTS, grads, strict=True):
        assert error(impl.numpy(grad), getattr(true, f"{name}_grad")) <= TINY["float32"]


def torch_function(impl: Any) -> Any:
    return package(impl).linear_token_log_probs


@pytest.mark.case(33, 45)
@every_implementation
@pytest.mark.parametrize("name", GRADIENTS)
def test_one_gradient_alone(impl: Any, name: str) -> None:
    case = problem_named("odd_bias").case()
    ids = case.given_ids(3)
    g = upstream_of(case, ids)
    true = reference.linear_token_log_probs(case.hidden, case.weight, ids, case.bias, upstream=g)
    function = package(impl).linear_token_log_probs
    _, _, grads = run(
        impl, case, lambda hidden, weight, bias: function(hidden, weight, impl.array(ids), bias, backend=impl.backend),
        g, (name,),
    )  # fmt: skip
    assert list(grads) == [name]
    assert error(grads[name], getattr(true, f"{name}_grad")) <= TINY["float32"]


@pytest.mark.case(45)
@every_implementation
def test_a_nan_token_spoils_itself_alone(impl: Any) -> None:
    """Its ids' log-probabilities are NaN. A token whose ids are all ignored is not read."""
    case = problem_named("odd").case()
    ids = case.given_ids(3)
    ids[0, 1], ids[2, 5] = -100, 7
    hidden = case.hidden.copy()
    hidden[0, 1], hidden[2, 5] = np.nan, np.nan
    function = package(impl).linear_token_log_probs
    x, w = impl.array(hidden, impl.dtype), impl.array(case.weight, impl.dtype)
    made = impl.numpy(function(x, w, impl.array(ids), backend=impl.backend))
    bad = np.zeros(made.shape, bool)
    bad[2, 5] = True
    np.testing.assert_array_equal(np.isnan(made), bad)
    assert not made[0, 1].any()


@pytest.mark.case(38, 45)
@every_implementation
def test_a_token_with_banned_ids_alone(impl: Any) -> None:
    """Each has −inf, and the gradient is that of −lse times their number."""
    x, w = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    b, ids = np.array([-np.inf, -np.inf, 0.5, 1.0], np.float32), np.array([[1, 0, 1], [0, 2, 3]])
    case = Case(Problem("", (4,), 3, 4), x, w, np.zeros(4), b, None, None, np.ones(()))
    ids = np.stack([ids, ids]).reshape(4, 3)
    function, g = package(impl).linear_token_log_probs, np.ones((4, 3), np.float32)
    made, _, grads = run(
        impl, case,
        lambda hidden, weight, bias: function(hidden, weight, impl.array(ids), bias, backend=impl.backend), g,
    )  # fmt: skip
    true = reference.linear_token_log_probs(x, w, ids, b, upstream=g)
    np.testing.assert_array_equal(np.isneginf(made), np.isneginf(true.log_prob))
    assert np.isneginf(made[::2]).all()
    assert error(made, true.log_prob) <= TINY["float32"]
    assert error(grads["hidden"], true.hidden_grad) <= TINY["float32"]


@pytest.mark.every_value
@pytest.mark.case(35, 45)
@every_implementation
@pytest.mark.parametrize(("size", "name"), [(1e-6, "weight"), (1e5, "hidden")])
def test_upstream_gradients_of_any_size_in_float16(impl: Any, size: float, name: str) -> None:
    """float16 holds the gradient, but not that of the logits."""
    problem = problem_named("ragged").with_dtype("float16")
    case = problem.case()
    case = dataclasses.replace(case, hidden=case.hidden * 256, weight=case.weight / 256)
    ids = case.given_ids(5)
    g = size * upstream_of(case, ids)
    function = package(impl).linear_token_log_probs
    _, _, grads = run(
        impl, case,
        lambda hidden, weight, bias: function(hidden, weight, impl.array(ids), bias, backend=impl.backend), g, (name,),
    )  # fmt: skip
    true = reference.linear_token_log_probs(case.hidden, case.weight, ids, upstream=g)
    assert_close(problem, name, grads[name], getattr(true, f"{name}_grad"), ideal_of(case, true)[name])


# ---------------------------------------------------------------------------------------------------------------------
# The largest logits


def check_top_k(impl: Any, problem: Problem, k: int, **more: Any) -> None:
    case, options = problem.case(), options_of(problem)
    del options["ignore_index"]
    log_prob, ids = reference.linear_top_k(case.hidden, case.weight, problem.vocab, case.bias, **options)
    function = package(impl).linear_top_k
    rng = np.random.default_rng(4)
    g = round_to(rng.standard_normal((*problem.shape, k)), side(problem.dtype))
    made, (found,), grads = run(
        impl, case,
        lambda hidden, weight, bias: function(hidden, weight, k, bias, backend=impl.backend, **options, **more), g,
    )  # fmt: skip
    assert made.shape == found.shape == (*problem.shape, k)
    assert (np.diff(np.sort(found, axis=-1), axis=-1) > 0).all()
    assert not (np.diff(np.nan_to_num(made, neginf=-1e30), axis=-1) > 0).any()
    # Where two logits differ by less than rounding, either may come first.
    rank = np.argsort(ids, axis=-1)
    of_found = np.take_along_axis(log_prob, np.take_along_axis(rank, found, -1), -1)
    allowed = TINY[side(problem.dtype)] * (1.0 + 2.0 * magnitudes(case)[..., None])
    with np.errstate(invalid="ignore"):
        off = np.abs(of_found - log_prob[..., :k])
        assert (np.where(of_found == log_prob[..., :k], 0.0, off) <= 2 * allowed).all()
        assert (np.where(made == of_found, 0.0, np.abs(made - of_found)) <= allowed + TINY["float32"] * -of_found).all()
        exact = np.abs(log_prob[..., :-1] - log_prob[..., 1:]) > 4 * allowed
    if exact.all():
        np.testing.assert_array_equal(found, ids[..., :k])
    true = reference.linear_token_log_probs(case.hidden, case.weight, found, case.bias, upstream=g, **options)
    ideal = ideal_of(case, true)
    for name, grad in grads.items():
        assert_close(problem, name, grad, getattr(true, f"{name}_grad"), ideal[name])


@pytest.mark.every_value(each="impl")
@pytest.mark.case(45)
@every_implementation
@pytest.mark.parametrize(("name", "dtype"), in_turn(["odd_most", "ragged", "banned", "trained", "gemma"], DTYPES))
@pytest.mark.parametrize("k", [1, 20])
def test_the_largest(impl: Any, name: str, dtype: str, k: int) -> None:
    check_top_k(impl, problem_named(name).with_dtype(dtype), k)


@pytest.mark.case(45)
@and_interpreted
def test_as_many_as_there_are(impl: Any) -> None:
    """k = V: every id once, also those at −inf."""
    check_top_k(impl, problem_named("banned"), 64)


@pytest.fixture
def square_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 2048 entries."""
    monkeypatch.setattr("logitless.given_ids.WIDE", 1)
    cut = ids_cut(tokens=17, hidden=16, vocab=5000, ids=8, dtype="float32")
    assert [start for start, _ in cut.tile.vocab_slices] == [0, 2048, 4096]


@pytest.mark.case(45)
@every_implementation
def test_a_thousand_of_several_tiles(impl: Any, square_tiles: None) -> None:
    check_top_k(impl, Problem("many", (17,), 16, 5000, bias=True), 1024)


@pytest.mark.case(20, 45)
@every_implementation
def test_ties_take_the_first_ids(impl: Any, square_tiles: None) -> None:
    """Equal logits wherever tiles end: 2048 is the first column of a tile. Rows of zeros, of one sign or the other."""
    impl.takes("float32")
    places = [5, 100, 2047, 2048, 2049, 4095, 4096, 4999]
    x, w = np.ones((3, 8), np.float32), np.zeros((5000, 8), np.float32)
    w[places] = 1.0
    x[1], x[2] = -1.0, 0.0
    function = package(impl).linear_top_k
    for k in (1, 3, 8, 12):
        _, ids = function(impl.array(x), impl.array(w), k, backend=impl.backend)
        ids, others = impl.numpy(ids).tolist(), [n for n in range(20) if n not in places]
        assert ids[0] == [*places, *others][:k]
        assert ids[1] == others[:k]
        assert ids[2] == list(range(k))
    # Logits too small for float32: −0, 0 and 0.
    x, w = np.full((1, 1), 1e-20, np.float32), np.array([[-1e-15], [1e-15], [0.0]], np.float32)
    _, ids = function(impl.array(x), impl.array(w), 3, logit_scale=1e-15, backend=impl.backend)
    assert impl.numpy(ids).tolist() == [[0, 1, 2]]


# ---------------------------------------------------------------------------------------------------------------------
# Ways to call it


@pytest.mark.case(45)
@every_implementation
@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_few_tokens(impl: Any, shape: tuple[int, ...]) -> None:
    """No axes, and no token."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((*shape, 6)).astype(np.float32), rng.standard_normal((11, 6)).astype(np.float32)
    for ids in (np.array([3, 3, 10]), rng.integers(0, 11, (*shape, 3))):
        made = package(impl).linear_token_log_probs(impl.array(x), impl.array(w), impl.array(ids), backend=impl.backend)
        true = reference.linear_token_log_probs(x, w, ids)
        assert error(impl.numpy(made), true.log_prob) <= TINY["float32"]
    log_prob, ids = package(impl).linear_top_k(impl.array(x), impl.array(w), 4, backend=impl.backend)
    assert tuple(log_prob.shape) == tuple(ids.shape) == (*shape, 4)


@pytest.mark.case(9, 45)
@every_implementation
def test_what_is_refused(impl: Any) -> None:
    module, x, w = package(impl), impl.array(np.ones((4, 3), np.float32)), impl.array(np.ones((7, 3), np.float32))

    def ids(values: Any) -> Any:
        return impl.array(np.asarray(values))

    for values, words in (
        (np.zeros((3, 2), np.int64), r"ids: got shape \(3, 2\), allowed is \[\.\.\., K\]"),
        (np.zeros((4, 0), np.int64), r"ids: got shape \(4, 0\)"),
        (np.zeros((), np.int64), r"ids: got shape \(\)"),
        (np.zeros((1, 4, 2), np.int64), r"ids: got shape \(1, 4, 2\)"),
        (np.array([1.0]), "ids: got dtype float"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            module.linear_token_log_probs(x, w, ids(values), backend=impl.backend)
    if not impl.on_gpu:
        with pytest.raises(ValueError, match=r"ids: got id 7 at index \(1\), allowed are 0 to 6 and ignore_index"):
            module.linear_token_log_probs(x, w, ids([0, 7]), backend=impl.backend)
    for k, kind in ((0, ValueError), (8, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match=r"k: got .+allowed is "):
            module.linear_top_k(x, w, k, backend=impl.backend)
    with pytest.raises(ValueError, match="memory_budget: got 10 bytes, allowed for tokens=4 and 2 ids a token is more"):
        module.linear_token_log_probs(x, w, ids([0, 1]), backend=impl.backend, memory_budget=10)
    with pytest.raises(ValueError, match="memory_budget: got 1000 bytes, 192 of them for arrays of the ids, allowed"):
        module.linear_token_log_probs(x, w, ids([0, 1]), backend=impl.backend, memory_budget=1000)


@pytest.mark.case(45)
def test_torch_compile_and_autocast() -> None:
    """A compiled caller leaves its graph here. Under autocast the products are bfloat16's, the gradients float32."""
    torch = pytest.importorskip("torch", reason="both are PyTorch's")
    from logitless.torch_impl import linear_token_log_probs, linear_top_k

    case = problem_named("odd_bias").case()
    ids = torch.tensor(case.given_ids(4))
    x, w, b = (torch.tensor(getattr(case, name)).requires_grad_() for name in GRADIENTS)

    def call() -> Any:
        largest, found = linear_top_k(x, w, 3, b)
        return linear_token_log_probs(x, w, ids, b), largest, found

    plain, compiled = call(), torch.compile(call, backend="aot_eager")()
    for made, expected in zip(compiled, plain, strict=True):
        assert torch.equal(made, expected)
    (compiled[0].sum() + compiled[1].sum()).backward()
    grads = torch.autograd.grad(plain[0].sum() + plain[1].sum(), (x, w, b))
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip((x, w, b), grads, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        made = linear_token_log_probs(x, w, ids, b)
    rounded = [round_to(getattr(case, name), "bfloat16") for name in GRADIENTS]
    true = reference.linear_token_log_probs(rounded[0], rounded[1], ids.numpy(), rounded[2])
    assert made.dtype == torch.float32
    assert error(made.detach().numpy(), true.log_prob) <= TINY["float32"]
    made.sum().backward()
    assert x.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Memory

TOKENS, HIDDEN = 256, 64
VOCAB = 65536 if cuda_device_count() else 8192  # the kernels' smallest slice of the vocabulary is 16384 wide


def scratch(impl: Any, count: int, shared: bool, top: bool, dtype: str, **options: Any) -> int:
    """Peak bytes beyond inputs, results and gradients of one forward and backward."""
    dtype, rng = impl.takes(dtype), np.random.default_rng(0)
    shapes = {"hidden": (TOKENS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,)}
    floats = {name: impl.array(rng.standard_normal(shape) * 0.1, dtype) for name, shape in shapes.items()}
    ids = impl.array(rng.integers(0, VOCAB, (count,) if shared else (TOKENS, count)))

    def call(floats: dict[str, Any]) -> Any:
        if top:
            return package(impl).linear_top_k(**floats, k=count, backend=impl.backend, **options)
        return package(impl).linear_token_log_probs(**floats, ids=ids, backend=impl.backend, **options)

    if not impl.name.startswith("torch"):
        import jax

        from logitless.jax_impl.memory import temp_bytes

        def value(floats: dict[str, Any]) -> Any:
            log_prob, *more = _several(call(floats))
            return log_prob.sum(), (log_prob, more)

        return temp_bytes(jax.jit(jax.value_and_grad(value, has_aux=True)), floats)
    import torch

    from logitless.torch_impl.memory import peak_scratch_bytes

    kept: list[Any] = []
    leaves = {name: leaf.requires_grad_() for name, leaf in floats.items()}

    def step() -> None:
        values = _several(call(leaves))
        kept.append([value.detach() for value in values])
        torch.autograd.backward(values[0], torch.ones((), device=values[0].device).expand(values[0].shape))

    if impl.on_gpu:  # where the first call makes what stays: kernels, cuBLAS's workspace
        step()
    kept.clear()
    for leaf in leaves.values():
        leaf.grad = None
    used = peak_scratch_bytes(step)
    return used - sum(leaf.grad.nbytes for leaf in leaves.values()) - sum(value.nbytes for value in kept[0])


@pytest.mark.case(31, 45)
@every_implementation
@pytest.mark.every_value(each="impl")
@pytest.mark.parametrize("kind", ["own", "shared", "top"])
@pytest.mark.parametrize(("count", "dtype"), in_turn([8, 200], ["float32", "bfloat16"]))
@pytest.mark.parametrize("large", [False, True], ids=["smallest", "largest"])
def test_the_promise_of_memory(impl: Any, kind: str, count: int, dtype: str, large: bool) -> None:
    """Of the smallest cut and of the largest one: below the logits, and below rows of the weight for every id."""
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "ids": count, "dtype": dtype}
    cut, options = ids_cut(**sizes), {}
    of_lse = {name: sizes[name] for name in ("tokens", "hidden", "vocab", "dtype")} | {"one_pass": False}
    of_lse |= {"fused": impl.fused, "padded": impl.padded}
    if large:
        promised = max(cut.scratch_bytes, plan(**of_lse).scratch_bytes + cut.kept_bytes)
    else:
        promised = max(_least(ids_cut, sizes), _least(plan, of_lse) + cut.kept_bytes)
        options = {"memory_budget": promised}
    used = scratch(impl, count, kind == "shared", kind == "top", dtype, **options)
    assert used <= promised, f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f}"
    if not large and not impl.fused:
        assert promised < TOKENS * VOCAB * 4 / 2
        assert promised < TOKENS * count * HIDDEN * 4 or count < 200


def _least(function: Callable[..., Any], sizes: dict[str, Any]) -> int:
    """The smallest budget that a plan or a cut takes: its error says it."""
    with pytest.raises(ValueError, match="memory_budget: got 1 bytes, allowed") as error:
        function(**sizes, memory_budget=1)
    return int(re.findall(r"\d+", str(error.value))[-1])
