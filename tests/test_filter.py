"""filter_eps: which tiles are left out of the gradients, that nothing else is, and that the error has its bound.

What is exactly left out is judged on problems where no element is near the threshold; the bound on drawn ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import (
    ALL,
    TORCH_PLACES,
    Outcome,
    TorchEager,
    TorchTriton,
    assert_within,
    beside_torch,
    filter_bounds,
    ideal_errors,
    in_every_torch_place,
    interpreted,
    options_of,
    plan_for,
    problem_named,
    run_case,
    truth,
    truth_outputs,
    unwritten_is_nan,
)
from test_memory import measured_scratch

from logitless import ChunkPlan
from logitless import plan as make_plan
from logitless.problems import Problem
from logitless.reference import FilterCut
from logitless.spec import LossOptions
from logitless.tolerances import ROUNDING, TINY, allowance, error

# The kernels of PyTorch interpreted beside all others; those of JAX, slower still, are in tests/test_pallas.py.
IMPLEMENTATIONS = [*ALL, pytest.param(TorchTriton(), id="torch_triton", marks=interpreted)]
every_filtering_one = pytest.mark.parametrize("impl", IMPLEMENTATIONS)

pytestmark = [beside_torch, pytest.mark.usefixtures("checked_accesses")]

# What passes a filter on is the same for every backend, and interpreted kernels are slow.
in_fast_torch_places = pytest.mark.parametrize(
    ("device", "backend"), [place for place in TORCH_PLACES if place.id != "interpreted"]
)

EPS = 2.0**-8
# Three tiles of rows, five of the vocabulary, of which the second and the fourth are low.
LOW_RUNS = Problem("low_runs", (3, 100), 24, 1200, options=LossOptions(filter_eps=EPS), bias=True, recipe="low_runs")
# Interpreted kernels are slow: two tiles of rows, three of the vocabulary.
SMALL = dataclasses.replace(LOW_RUNS, name="low_runs_small", shape=(140,), hidden=9, vocab=700)

KINDS: dict[str, dict[str, Any]] = {
    "one_chunk": {"order": "tokens"},
    "chunks": {"order": "tokens", "chunk": 96},
    "two_pass": {"order": "tokens", "chunk": 96, "one_pass": False},
    "slices": {"order": "vocab", "chunk": 640},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignored": 0.4, "upstream": -3.0},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 0.9, "class_weight": "positive"},
    "cap": {"softcap": 30.0, "token_weight": "mask"},
    "not_separable": {"softcap": 30.0, "label_smoothing": 0.1, "reduction": "sum"},
    "none": {"reduction": "none", "ignored": 0.3},
}


def made_of(problem: Problem, options: dict[str, Any]) -> Problem:
    """The problem with changes to itself and to its loss options."""
    own = {name: value for name, value in options.items() if hasattr(problem, name)}
    return dataclasses.replace(problem, **own).with_options(**{k: v for k, v in options.items() if k not in own})


def fitting(impl: Any, problem: Problem) -> Problem:
    """The problem in a dtype that the implementation has."""
    return problem.with_dtype("bfloat16") if impl.backend == "pallas" and problem.dtype != "float16" else problem


def chosen_plan(impl: Any, problem: Problem, kind: str) -> ChunkPlan:
    wanted = dict(KINDS[kind])
    if kind == "one_chunk":
        wanted["chunk"] = problem.tokens
    if problem.options.reduction == "none" and not (impl.fused and kind == "one_chunk"):  # there exponentials wait
        wanted["one_pass"] = False
    return plan_for(problem, fused=impl.fused, padded=impl.padded, **wanted)


def cut_of(impl: Any, problem: Problem, chosen: ChunkPlan) -> FilterCut:
    """How this implementation counts tiles under this plan."""
    one_pass = chosen.one_pass and problem.options.separable
    return FilterCut(
        chunk=chosen.token_chunk,
        block=None if chosen.order == "tokens" else chosen.vocab_chunk,
        drops_ignored=impl.fused,
        keeps_targets=not one_pass or (problem.dtype == "float16" and (impl.fused or problem.options.z_loss > 0)),
    )


def share_of(impl: Any, problem: Problem, **more: Any) -> float:
    case = problem.case()
    return impl.filtered_share(
        case.hidden, case.weight, case.target, case.bias, dtype=problem.dtype, **(options_of(case) | more)
    )


def runs() -> list[Any]:
    """Every implementation with every kind of plan and all options, dtypes in turn; interpreted kernels with few, and
    JAX on a CPU, which compiles each, with some."""
    made = []
    for parameter in IMPLEMENTATIONS:
        impl = parameter.values[0]
        slow, compiles = (impl.backend == name and not impl.on_gpu for name in ("triton", "xla"))
        dtypes = ("float32", "float16") if slow else ("bfloat16", "float32", "float16", "float64")
        if impl.backend == "triton" and not slow:
            dtypes = ("bfloat16", "float32", "float16")
        if impl.backend == "pallas":
            dtypes = ("bfloat16", "bfloat16", "float16")
        for number, (kind, options) in enumerate((k, o) for k in KINDS for o in OPTIONS):
            if number % 5 <= (0 if slow else 1 if compiles else 5):
                dtype = dtypes[(number // 5 if slow else number) % len(dtypes)]
                ident = f"{impl.name}-{kind}-{options}-{dtype}"
                made.append(pytest.param(impl, kind, options, dtype, id=ident, marks=parameter.marks))
    return made


@pytest.mark.parametrize(("impl", "kind", "options", "dtype"), runs())
def test_low_tiles_are_left_out_and_nothing_else(impl: Any, kind: str, options: str, dtype: str) -> None:
    base = SMALL if impl.backend == "triton" and not impl.on_gpu else LOW_RUNS
    problem = made_of(base, OPTIONS[options]).with_dtype(dtype)
    chosen = chosen_plan(impl, problem, kind)
    cut = cut_of(impl, problem, chosen)
    assert_within(problem, run_case(impl, problem.case(), plan=chosen), cut)
    assert 0.05 < truth(problem, cut).filtered_share < 0.6
    assert error(share_of(impl, problem, plan=chosen), truth(problem, cut).filtered_share) <= TINY["float32"]


@every_filtering_one
def test_low_tiles_of_exponentials_that_wait(impl: Any) -> None:
    """reduction="none" in one pass: a tile with a target is left out as any other."""
    if not impl.fused:
        pytest.skip("the portable backends' exponentials never wait")
    problem = fitting(impl, made_of(SMALL, OPTIONS["none"]).with_dtype("float32"))
    chosen = chosen_plan(impl, problem, "one_chunk")
    cut = cut_of(impl, problem, chosen)
    assert chosen.one_pass
    assert not cut.keeps_targets
    assert_within(problem, run_case(impl, problem.case(), plan=chosen), cut)
    assert error(share_of(impl, problem, plan=chosen), truth(problem, cut).filtered_share) <= TINY["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("base", [LOW_RUNS, SMALL], ids=lambda problem: problem.name)
def test_what_is_left_out_is_far_beyond_the_tolerance(base: Problem, dtype: str) -> None:
    """Else the test above could not fail."""
    problem = base.with_dtype(dtype)
    exact, ideal = truth_outputs(problem.with_options(filter_eps=None)), ideal_errors(problem)
    for name in ("dhidden", "dweight"):
        assert error(exact[name], truth_outputs(problem)[name]) > 4 * allowance(ideal[name], dtype), name


def rounds_otherwise(impl: Any, kind: str) -> bool:
    """Whether a filter beside it changes rounding: XLA fuses other work for a GPU; in one pass kernels that have none
    give the targets to the products."""
    return (impl.on_gpu and impl.name.startswith("jax")) or (impl.fused and kind == "one_chunk")


@every_filtering_one
@pytest.mark.parametrize(("kind", "dtype"), [("one_chunk", "float32"), ("slices", "float16")])
def test_nothing_low_is_the_exact_gradient(impl: Any, kind: str, dtype: str) -> None:
    problem = fitting(impl, SMALL.with_options(filter_eps=None, label_smoothing=0.1).with_dtype(dtype))
    chosen, case = chosen_plan(impl, problem, kind), problem.case()
    exact = run_case(impl, case, plan=chosen)
    made = run_case(impl, case, plan=chosen, filter_eps=1e-30)
    if rounds_otherwise(impl, kind):
        assert_within(problem, made)
        return
    assert np.array_equal(made.loss, exact.loss)
    for name, grad in exact.grads.items():
        assert np.array_equal(made.grads[name], grad), name


@every_filtering_one
@pytest.mark.parametrize("kind", ["one_chunk", "slices"])
def test_everything_low_leaves_targets_and_smoothing(impl: Any, kind: str) -> None:
    # In 16 bits smoothing's part of dW is rounded, and again with the target's: here nothing else would be left of it.
    smoothing = 0.0 if impl.backend == "pallas" else 0.1
    problem = fitting(impl, SMALL.with_options(filter_eps=1e6, label_smoothing=smoothing))
    chosen = chosen_plan(impl, problem, kind)
    cut = cut_of(impl, problem, chosen)
    assert_within(problem, run_case(impl, problem.case(), plan=chosen), cut)
    assert error(share_of(impl, problem, plan=chosen), truth(problem, cut).filtered_share) <= TINY["float32"]
    assert (kind == "slices") == (truth(problem, cut).filtered_share < 1.0)


drawn = st.builds(
    Problem,
    name=st.just("drawn"),
    shape=st.tuples(st.integers(1, 300)),
    hidden=st.integers(1, 6),
    vocab=st.integers(1, 700),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
    options=st.builds(
        LossOptions,
        reduction=st.sampled_from(["mean", "sum", "none"]),
        label_smoothing=st.sampled_from([0.0, 0.1]),
        z_loss=st.sampled_from([0.0, 1e-2]),
        logit_scale=st.sampled_from([1.0, 3.0]),
        softcap=st.sampled_from([None, 3.0]),
        filter_eps=st.sampled_from([1e-3, 0.01, 0.1, 1.0]),
    ),
    bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.5]),
    token_weight=st.sampled_from(["none", "mask", "random"]),
    class_weight=st.sampled_from(["none", "positive", "signed"]),
    upstream=st.sampled_from([1.0, -2.0]),
    seed=st.integers(0, 10**6),
)


def assert_bounded(impl: Any, problem: Problem, kind: str) -> None:
    """|δdX_id| ≤ ε |g_i| Σ_j |w_jd| and |δdW_jd| ≤ ε Σ_i |g_i| |x_id|; the loss and db are exact."""
    case, chosen = problem.case(), chosen_plan(impl, problem, kind)
    exact = run_case(impl, case, plan=chosen, filter_eps=None)
    made = run_case(impl, case, plan=chosen)
    eps, rounding = problem.options.filter_eps, ROUNDING[problem.dtype]
    for name, bound in zip(("hidden", "weight"), filter_bounds(case, eps + rounding), strict=True):
        change, rounded = np.abs(made.grads[name] - exact.grads[name]), rounding * np.abs(exact.grads[name])
        assert np.all(change <= bound + rounded), name
    if rounds_otherwise(impl, kind):
        assert_within(problem.with_options(filter_eps=None), Outcome(made.loss, {"bias": made.grads["bias"]}, None))
        return
    assert np.array_equal(made.loss, exact.loss, equal_nan=True)
    if case.bias is not None:
        assert np.array_equal(made.grads["bias"], exact.grads["bias"])


@settings(max_examples=40, deadline=None)
@given(drawn, st.sampled_from(list(KINDS)))
def test_the_error_has_its_bound(problem: Problem, kind: str) -> None:
    pytest.importorskip("torch", reason="the implementation at hand is PyTorch's")
    assert_bounded(TorchEager(), problem, kind)


@every_filtering_one
@pytest.mark.parametrize(("name", "kind"), [("odd_all", "one_chunk"), ("odd_none_most", "two_pass")])
def test_the_error_has_its_bound_with_every_option(impl: Any, name: str, kind: str) -> None:
    problem = problem_named(name).with_options(filter_eps=0.1, softcap=None)
    assert_bounded(impl, dataclasses.replace(fitting(impl, problem), vocab=300), kind)


@every_filtering_one
def test_rows_without_weight_keep_no_tile(impl: Any) -> None:
    """Of 140 tokens the first 128 have weight 0: kernels and plain operations agree that their tiles are left out."""
    problem = fitting(impl, dataclasses.replace(SMALL, name="weightless").with_options(filter_eps=1e-30))
    case = problem.case()
    given = {"token_weight": np.where(np.arange(140) < 128, 0.0, 1.0).astype(np.float32)}
    options = options_of(case) | given | {"plan": chosen_plan(impl, problem, "one_chunk")}
    share = impl.filtered_share(case.hidden, case.weight, case.target, case.bias, dtype=problem.dtype, **options)
    assert share == 0.5


@every_filtering_one
@pytest.mark.parametrize("kind", ["one_chunk", "slices"])
def test_a_nan_is_not_left_out(impl: Any, kind: str) -> None:
    """Of one token: it is in every entry of dW, however high the threshold, and in that token's dX alone."""
    problem = fitting(impl, dataclasses.replace(SMALL, name="nan", hidden=4).with_options(filter_eps=1e6))
    case = problem.case()
    case.hidden[3] = np.nan
    grads = run_case(impl, case, plan=chosen_plan(impl, problem, kind)).grads
    assert np.isnan(grads["weight"]).all()
    assert np.array_equal(np.isnan(grads["hidden"]).any(axis=1), np.arange(problem.tokens) == 3)


def torch_arrays(problem: Problem, device: str) -> tuple[Any, ...]:
    """hidden and weight, which require gradients, target and bias."""
    import torch

    case = problem.case()
    floats = [torch.tensor(a, device=device).requires_grad_() for a in (case.hidden, case.weight, case.bias)]
    return floats[0], floats[1], torch.tensor(case.target, device=device), floats[2]


@in_every_torch_place
def test_where_dw_goes_instead(device: str, backend: str) -> None:
    """Into a buffer, and later: dW is of the tiles of its own backward, which holds the targets' in the second case."""
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    from logitless.torch_impl import linear_cross_entropy

    problem = dataclasses.replace(SMALL, name="elsewhere", hidden=4)
    x, w, y, b = torch_arrays(problem, device)
    chosen = plan_for(problem, fused=backend == "triton", order="tokens", chunk=problem.tokens)
    buffer = torch.zeros_like(w)
    given = {"filter_eps": EPS, "plan": chosen, "backend": backend}
    linear_cross_entropy(x, w, y, b, accumulate_into=buffer, **given).backward()
    loss, later = linear_cross_entropy(x, w, y, b, defer_weight_grad=True, **given)
    loss.backward()
    later.compute()
    anchored, known = truth(problem), truth(problem, FilterCut(keeps_targets=True))
    # Kernels add what waited for the upstream scalar; plain operations know lse before they add.
    added = anchored if backend == "triton" else known
    ideal = ideal_errors(problem)["dweight"]
    assert error(buffer.double().cpu(), added.weight_grad) <= allowance(ideal, "float32")
    assert error(w.grad.double().cpu(), known.weight_grad) <= allowance(ideal, "float32")
    assert error(anchored.weight_grad, known.weight_grad) > 1e-3


@in_fast_torch_places
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_call_filters_as_well(device: str, backend: str, reduction: str) -> None:
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    from logitless.torch_impl import linear_cross_entropy

    arrays = torch_arrays(dataclasses.replace(SMALL, name="compiled", hidden=4), device)

    def loss(x: Any, w: Any, y: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, y, b, reduction=reduction, filter_eps=EPS, backend=backend).sum()

    leaves = [array for array in arrays if array.requires_grad]
    plain = torch.autograd.grad(loss(*arrays), leaves)
    torch._dynamo.reset()
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*arrays), leaves)
    exact = torch.autograd.grad(linear_cross_entropy(*arrays, reduction=reduction, backend=backend).sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))
    assert not torch.equal(plain[0], exact[0])


@in_fast_torch_places
def test_the_module_passes_it_on(device: str, backend: str) -> None:
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    from logitless.torch_impl import LinearCrossEntropy, linear_cross_entropy

    x, w, y, _ = torch_arrays(dataclasses.replace(SMALL, name="module", hidden=4), device)
    head = LinearCrossEntropy(4, 700, filter_eps=EPS, backend=backend, device=device)
    with torch.no_grad():
        head.weight.copy_(w)
    head(x, y).backward()
    (wanted,) = torch.autograd.grad(linear_cross_entropy(x, w, y, filter_eps=EPS, backend=backend), w)
    assert torch.equal(head.weight.grad, wanted)


def scattered(tokens: int, hidden: int, vocab: int, device: str) -> tuple[Any, ...]:
    """x, w, y in bfloat16, and which tiles have a peak: of some rows and columns of tiles none, of some one, or all."""
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.0, 0.03, 0.3, 1.0])
    tiles = [shares[torch.arange(count) % 4] for count in (tokens // 128, vocab // 256)]
    peaks = torch.rand(len(tiles[0]), len(tiles[1]), generator=generator) < tiles[0][:, None] * tiles[1]
    x, w = (torch.randn(count, hidden, generator=generator) for count in (tokens, vocab))
    w *= 0.1 * hidden**-0.5
    axes = len(peaks)  # a direction for each tile of rows
    x[:, :axes] = 10.0 * (torch.arange(tokens) // 128 == torch.arange(axes)[:, None]).T
    w[:, :axes] = 0.0
    w[::256, :axes] = peaks.T.float()
    y = torch.randint(0, vocab, (tokens,), generator=generator)
    return x.bfloat16().to(device), w.bfloat16().to(device), y.to(device), peaks.to(device)


PLACES = [TORCH_PLACES[0], *TORCH_PLACES[2:]]  # interpreted kernels would take minutes


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("kind", ["one_chunk", "chunks", "slices"])
def test_scattered_tiles(device: str, backend: str, kind: str) -> None:
    """Lists of every length, so that programs have pieces of work of any depth, and some of none."""
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    from logitless.torch_impl import filtered_share, linear_cross_entropy

    tokens, hidden, vocab = (4096, 2048, 20480) if device == "cuda" else (1024, 40, 2048)
    x, w, y, kept = scattered(tokens, hidden, vocab, device)
    chunks = {"order": "tokens", "chunk": tokens if kind == "one_chunk" else tokens // 4}
    wanted = {"order": "vocab", "chunk": vocab // 4} if kind == "slices" else chunks
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16"}
    chosen = make_plan(**sizes, fused=backend == "triton", **wanted)
    given = {"filter_eps": 64 / vocab, "plan": chosen, "backend": backend}
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    linear_cross_entropy(*leaves, y, **given).backward()
    index = torch.arange(tokens, device=device)
    if kind == "slices":
        kept[index // 128, y // 256] = True
    assert float(filtered_share(x, w, y, **given)) == pytest.approx(float((~kept).float().mean()))
    dz = torch.softmax(x.double() @ w.double().T, 1)
    dz[index, y] -= 1.0
    low = ~kept.repeat_interleave(128, 0).repeat_interleave(256, 1)
    low[index, y] = False
    dz.masked_fill_(low, 0.0)
    ideal = dz.bfloat16().double()  # of 1 / N it is free
    made = ((dz @ w.double(), ideal @ w.double()), (dz.T @ x.double(), ideal.T @ x.double()))
    for leaf, (true, best) in zip(leaves, made, strict=True):
        rounded = error((best / tokens).bfloat16().double().cpu(), (true / tokens).cpu())
        assert error(leaf.grad.double().cpu(), (true / tokens).cpu()) <= allowance(rounded, "bfloat16")


@interpreted
def test_rows_that_do_not_exist_are_not_read() -> None:
    """56 of 140 tokens are valid, so the second half of the first tile's rows was never written."""
    problem = dataclasses.replace(SMALL, name="few_rows", hidden=4)
    case = problem.case()
    case.target[56:] = problem.options.ignore_index
    with unwritten_is_nan():
        made = run_case(TorchTriton(), case, plan=chosen_plan(TorchTriton(), problem, "one_chunk"))
    assert all(np.isfinite(grad).all() for grad in made.grads.values())


@every_filtering_one
@pytest.mark.parametrize("value", [0, 0.0, -1e-3, float("nan"), float("inf"), True, "1e-3"])
def test_bad_values_are_named(impl: Any, value: Any) -> None:
    problem = fitting(impl, SMALL)
    with pytest.raises((TypeError, ValueError), match=r"filter_eps: got .*, allowed is a"):
        run_case(impl, problem.case(), filter_eps=value)
    with pytest.raises((TypeError, ValueError), match=r"filter_eps: got .*, allowed is a"):
        share_of(impl, problem, filter_eps=value)


@every_filtering_one
def test_a_share_needs_a_threshold(impl: Any) -> None:
    with pytest.raises(TypeError, match="filter_eps: got None, allowed is a Python number"):
        share_of(impl, fitting(impl, SMALL), filter_eps=None)


@every_filtering_one
@pytest.mark.parametrize("kind", ["one_chunk", "chunks", "two_pass", "slices"])
def test_scratch_stays_within_the_promise(impl: Any, kind: str) -> None:
    small = impl.backend == "triton" and not impl.on_gpu
    tokens, hidden, vocab = (140, 16, 700) if small else (512, 128, 8192)
    problem = fitting(impl, dataclasses.replace(SMALL, shape=(tokens,), hidden=hidden, vocab=vocab))
    chosen = chosen_plan(impl, problem, kind)
    used = measured_scratch(impl, chosen, problem.dtype, False, {"filter_eps": 1e-3, "label_smoothing": 0.1})
    assert used <= chosen.scratch_bytes, f"{used / 2**20:.2f} MiB of {chosen.scratch_bytes / 2**20:.2f} promised"
