"""The Triton kernels, interpreted on the CPU: the same problems and the same rule as everywhere.

Triton's interpreter cuts float32 off where it should round it to bfloat16, so that dtype is judged on a GPU (marker
``gpu``: there tests/implementations.py adds the kernels to every test). tests/test_trained.py has
the interpreter round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from implementations import TorchTriton, assert_within, problem_named, run_case, truth  # noqa: E402

from logitless import plan, reference  # noqa: E402
from logitless.spec import LossOptions  # noqa: E402
from logitless.tolerances import GRADIENT, TINY, error  # noqa: E402
from logitless.torch_impl import cross_entropy, linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.call import Arrays  # noqa: E402
from logitless.torch_impl.given_logits import fused as logits_fused  # noqa: E402
from logitless.torch_impl.given_logits import kernels as logits_kernels  # noqa: E402
from logitless.torch_impl.kernels import kernel_call, launch, products, rows  # noqa: E402
from logitless.torch_impl.kernels import portable as kernels  # noqa: E402
from logitless.torch_impl.plain_loss import kernels as plain_kernels  # noqa: E402
from logitless.torch_impl.plain_loss import row_kernels  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU"),
    pytest.mark.usefixtures("checked_accesses", "unwritten_memory_is_nan"),
]


TRITON = TorchTriton()
# Interpreted kernels are slow: each problem once, and every order of the plan where an order can go wrong.
ORDERS = ("default", "tokens", "tokens_two_pass", "vocab", "both", "tiles", "both_tiles")
RUNS = (
    *(("odd_all", "float32", order) for order in ORDERS),
    *(("odd_softcap", "float32", order) for order in ("tokens", "vocab")),
    *(("confident_wrong", "float32", order) for order in ("default", "tokens_two_pass")),
    *((name, "float32", "default") for name in ("signed_smooth", "odd_none_all")),
    *((name, "float32", "tokens") for name in ("shifted_up", "minus_inf")),
    *((name, "float32", "held") for name in ("odd_none", "odd_none_most", "odd_none_all")),
    *((name, "float32", "both_tiles") for name in ("odd_none_all", "confident_wrong")),
    *(("signed_smooth", dtype, "lent") for dtype in ("float32", "float16")),
    *(("odd_all", "float16", "default"), ("confident_wrong", "float16", "tokens"), ("odd_most", "float16", "vocab")),
)


# Interpreting takes as long as there are tokens. Small problems have more than one tile of rows and of columns too.
EVERY_SIZE = pytest.mark.parametrize(
    "small", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["small", "whole"]
)


def sized(name: str, small: bool) -> Any:
    """A named problem, or the same with fewer tokens."""
    problem = problem_named(name)
    if not small or problem.tokens <= 74:
        return problem
    if len(problem.shape) == 2:  # more than 64 rows, a tile, that are not ignored
        shape = (2, 45 if problem.ignored else 37)
        return dataclasses.replace(problem, name=f"{name}_small", shape=shape)
    return dataclasses.replace(problem, name=f"{name}_small", shape=(40,), vocab=min(problem.vocab, 400))


def plans(problem: Any) -> dict[str, Any]:
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": problem.dtype}
    few = problem.tokens * 3 // 8
    both = plan(**sizes, fused=True, order="both", chunk=few)
    return {
        "default": plan(**sizes, fused=True),
        "tokens": plan(**sizes, fused=True, order="tokens", chunk=problem.tokens * 3 // 8),
        "tokens_two_pass": plan(**sizes, fused=True, order="tokens", chunk=problem.tokens // 3 + 1, one_pass=False),
        "vocab": plan(**sizes, fused=True, order="vocab", chunk=50),
        "held": plan(**sizes, fused=True, order="tokens", chunk=problem.tokens),
        "both": both,
        # A slice's dW is a sum over chunks of tokens.
        "tiles": dataclasses.replace(plan(**sizes, fused=True, order="vocab", chunk=50), token_chunk=few),
        "both_tiles": dataclasses.replace(both, weight_tokens=few, vocab_chunk=50),
        "lent": dataclasses.replace(both, token_chunk=8, weight_tokens=few, vocab_chunk=50, lends=True),
    }


@pytest.mark.every_value(where=lambda p: p["small"])
@pytest.mark.parametrize(("name", "dtype", "order"), RUNS)
@EVERY_SIZE
@pytest.mark.case(1)
@pytest.mark.case(23)
def test_within_the_rule(name: str, dtype: str, order: str, small: bool) -> None:
    problem = sized(name, small).with_dtype(dtype)
    assert_within(problem, run_case(TRITON, problem.case(), plan=plans(problem)[order]))


@pytest.mark.case(28)
def test_every_launch_is_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. So each launch must happen while the tensors' device is current."""
    inside: list[torch.device] = []
    launched: set[str] = set()

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def checked(kernel: Any, *grid: int) -> Any:
        launched.add(kernel.__name__)
        assert inside, f"{kernel.__name__} is launched on whatever device is current"
        return real(kernel, *grid)

    real = launch.launch
    for module in (rows, kernel_call, logits_fused, row_kernels):
        monkeypatch.setattr(module, "on_device", on_device)
    for module in (launch, logits_fused, row_kernels):
        monkeypatch.setattr(module, "launch", checked)
    for name, order, options in (
        ("odd_all", "default", {"return_stats": True}),
        ("odd_most", "tokens", {}),
        ("odd_none", "held", {}),
        ("odd_none_all", "vocab", {}),
    ):
        problem = sized(name, small=True)
        run_case(TRITON, problem.case(), plan=plans(problem)[order], **options)
    few = plan(tokens=40, hidden=8, vocab=60, dtype="bfloat16", fused=True, order="tokens", chunk=16, lends=True)
    bfloat16 = {"dtype": torch.bfloat16, "requires_grad": True}
    x, w, y = torch.randn(40, 8, **bfloat16), torch.randn(60, 8, **bfloat16), torch.arange(40)
    linear_cross_entropy(x, w, y, plan=few, backend="triton").backward()
    for prefer in ("balanced", "fast"):
        log_prob, entropy = linear_log_probs(x, w, y, with_entropy=True, plan=prefer, backend="triton")
        (log_prob + entropy).sum().backward()
    linear_cross_entropy(torch.randn(6, 8), torch.randn(8, 40), torch.arange(6), weight_layout="dv", backend="triton")
    logits = torch.randn(6, 40, requires_grad=True)
    cross_entropy(logits, torch.arange(6), backend="triton").backward()
    assert row_kernels._trial(torch.device("cpu"), torch.float16) is None
    every = {
        name for module in (kernels, logits_kernels, plain_kernels) for name in vars(module) if name.endswith("_kernel")
    }
    assert launched == every - {"combine_hidden_kernel"}  # which adds what Hopper's kernels leave


@pytest.mark.late(where=lambda p: p["name"] == "odd_softcap")
@pytest.mark.parametrize("name", ["odd_all", "odd_softcap", "confident_wrong"])
@EVERY_SIZE
def test_statistics(name: str, small: bool) -> None:
    problem = sized(name, small).with_dtype("float32")
    true = truth(problem).stats
    made = run_case(TRITON, problem.case(), return_stats=True).stats
    for field in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        assert error(getattr(made, field), getattr(true, field)) <= 2 * TINY["float32"], field
    assert (made.argmax == true.argmax).mean() >= 0.99
    assert ((made.argmax == -1) == (true.argmax == -1)).all()


def test_log_probs_and_entropy() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((20, 12)).astype(np.float32), rng.standard_normal((70, 12)).astype(np.float32)
    y = rng.integers(0, 70, 20)
    y[::6] = -100
    g1, g2 = rng.standard_normal((2, 20)).astype(np.float32)
    made = TRITON.run_log_probs(x, w, y, log_prob_upstream=g1, entropy_upstream=g2, logit_scale=0.7)
    true = reference.linear_log_probs(x, w, y, log_prob_upstream=g1, entropy_upstream=g2, logit_scale=0.7)
    assert error(made.log_prob, true.log_prob) <= TINY["float32"]
    assert error(made.entropy, true.entropy) <= TINY["float32"]
    assert error(made.grads["hidden"], true.hidden_grad) <= 2 * TINY["float32"]
    assert error(made.grads["weight"], true.weight_grad) <= 2 * TINY["float32"]


@pytest.mark.parametrize("chunk", [None, 16])
def test_ignored_tokens_may_lie_anywhere(chunk: int | None) -> None:
    """The same bits, wherever the ignored tokens stand between the valid ones."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(24, 16, generator=generator), torch.randn(90, 16, generator=generator)
    y = torch.randint(0, 90, (24,), generator=generator)
    results = []
    for where in (range(24), range(12, 36), range(0, 48, 2)):
        rows = list(where)
        hidden, target = torch.full((48, 16), torch.nan), torch.full((48,), -100)
        hidden[rows], target[rows] = x, y
        hidden.requires_grad_()
        weight = w.clone().requires_grad_()
        sizes = {"tokens": 48, "hidden": 16, "vocab": 90, "dtype": "float32", "fused": True}
        chosen = plan(**sizes, order="tokens", chunk=chunk) if chunk else None
        loss = linear_cross_entropy(hidden, weight, target, plan=chosen, backend="triton")
        loss.backward()
        ignored = torch.ones(48, dtype=torch.bool)
        ignored[rows] = False
        assert (hidden.grad[ignored] == 0).all()
        results.append((loss.detach(), hidden.grad[rows], weight.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.late(where=lambda p: p["case"] in ("all", "frozen"))
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *(("float32", case) for case in ("plain", "all", "into", "frozen")),
        ("float16", "plain"),
        *(pytest.param("float16", case, marks=pytest.mark.slow) for case in ("all", "into", "frozen")),
    ],
)
def test_a_slices_matrix_lies_where_dw_is_not_yet_written(
    monkeypatch: pytest.MonkeyPatch, dtype: str, case: str
) -> None:
    """Larger slices than the plan's own, and the same gradients; but where dW is not this call's to lend, its own."""
    rng = np.random.default_rng(11)
    x, w, b = (rng.standard_normal(shape).astype(dtype) for shape in ((24, 16), (900, 16), (900,)))
    y = rng.integers(0, 900, 24)
    y[::5] = -100
    options = {"label_smoothing": 0.1, "z_loss": 1e-2} if case == "all" else {}
    chosen = plan(tokens=24, hidden=16, vocab=900, dtype=dtype, fused=True, order="vocab", chunk=128)
    matrices, real = [], kernel_call.KernelCall.logits

    def spy(c: Any, first: int, x: Any, e: Any, *arguments: Any, **named: Any) -> None:
        if e is not None:
            matrices.append((e.shape[1], e.untyped_storage().nbytes()))
        real(c, first, x, e, *arguments, **named)

    monkeypatch.setattr(kernel_call.KernelCall, "logits", spy)
    hidden, weight, bias = (torch.from_numpy(values).requires_grad_() for values in (x, w, b))
    weight.requires_grad_(case != "frozen")
    into = {"accumulate_into": torch.zeros(900, 16)} if case == "into" else {}
    linear_cross_entropy(
        hidden, weight, torch.from_numpy(y), bias, plan=chosen, backend="triton", **options, **into
    ).backward()
    true = reference.linear_cross_entropy(x, w, y, b, **options)
    grads = {"hidden": hidden.grad, "bias": bias.grad}
    if case != "frozen":
        grads["weight"] = into["accumulate_into"] if into else weight.grad
    for name, grad in grads.items():
        assert error(grad.numpy(), getattr(true, f"{name}_grad")) <= 2 * GRADIENT[dtype], name
    lends = case in ("plain", "all")
    slices = chosen.lent_slices(16 * np.dtype(dtype).itemsize if lends else 0)
    assert [width for width, _ in matrices] == [stop - start for start, stop, _ in slices]
    assert sum(lent for *_, lent in slices) == (2 if lends else 0)
    for (_, memory), (*_, lent) in zip(matrices, slices, strict=True):
        assert (memory == weight.untyped_storage().nbytes()) == lent


@pytest.mark.parametrize(("tokens", "chunk"), [pytest.param(230, None, marks=pytest.mark.slow), (110, 100)])
def test_long_runs_of_one_target(tokens: int, chunk: int | None) -> None:
    """The tokens of a frequent target enter its row of dW and element of db in several steps, each token once."""
    rng = np.random.default_rng(5)
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, 8), (20, 8), (20,)))
    for share in (1.0, 0.5):
        y = np.where(rng.random(tokens) < share, 3, rng.integers(0, 20, tokens))
        y[5], y[77] = -100, 19
        sizes = {"tokens": tokens, "hidden": 8, "vocab": 20, "dtype": "float32", "fused": True}
        chosen = plan(**sizes, order="tokens", chunk=chunk) if chunk else None
        made = TRITON.run(x, w, y, b, plan=chosen)
        true = reference.linear_cross_entropy(x, w, y, b)
        assert error(made.grads["weight"], true.weight_grad) <= 2 * TINY["float32"]
        assert error(made.grads["bias"], true.bias_grad) <= 2 * TINY["float32"]


def test_no_tokens_and_all_ignored() -> None:
    weight = torch.randn(90, 16, requires_grad=True)
    for tokens in (0, 5):
        hidden = torch.randn(tokens, 16, requires_grad=True)
        target = torch.full((tokens,), -100)
        for reduction in ("mean", "sum", "none"):
            hidden.grad = weight.grad = None
            linear_cross_entropy(hidden, weight, target, reduction=reduction, backend="triton").sum().backward()
            assert (weight.grad == 0).all()
            assert (hidden.grad == 0).all()


def test_float64_is_refused() -> None:
    x, w, y = torch.randn(3, 4).double(), torch.randn(5, 4).double(), torch.zeros(3, dtype=torch.long)
    with pytest.raises(
        NotImplementedError, match="its kernels take bfloat16, float16 and float32, not float64; backend"
    ):
        linear_cross_entropy(x, w, y, backend="triton")


@triton.jit
def programs_kernel(out_ptr, row_tiles, column_tiles, GROUP: tl.constexpr, PROGRAMS: tl.constexpr):
    tl.store(out_ptr, kernels.programs_of(row_tiles, column_tiles, GROUP, PROGRAMS))


def programs(row_tiles: int, column_tiles: int, group: int, most: int) -> int:
    out = torch.empty(1, dtype=torch.int32)
    programs_kernel[(1,)](out, row_tiles, column_tiles, GROUP=group, PROGRAMS=most)
    return int(out)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 24), st.sampled_from([2, 114, 132]))
def test_fewer_programs_take_no_more_turns(row_tiles: int, column_tiles: int, group: int, most: int) -> None:
    tiles, made = row_tiles * column_tiles, programs(row_tiles, column_tiles, group, most)
    assert 1 <= made <= most
    assert -(-tiles // made) == -(-tiles // most)


@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "group", "wanted"),
    [
        (32, 16, 16, 128),  # 4096 x 4096: four turns of 16 x 8
        (256, 3, 4, 132),  # 32768 x 768: six turns of 44 x 3, as 128 programs would cut a group of 4 x 3
        (64, 9, 4, 132),  # 8192 x 2304: no 116 to 132 programs have whole groups of 4 x 9
    ],
)
def test_turns_are_whole_groups(row_tiles: int, column_tiles: int, group: int, wanted: int) -> None:
    assert programs(row_tiles, column_tiles, group, 132) == wanted


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 1300), st.integers(0, 2**32))
@example(1300, 0)
def test_tokens_are_sorted_by_target(tokens: int, seed: int) -> None:
    key = torch.from_numpy(np.random.default_rng(seed).integers(0, 41, tokens, np.int32))
    vocab, grain = 35, kernels.TARGET_GRAIN.value
    edges = torch.arange(0, 257, grain, dtype=torch.int32)
    value, made, token = torch.randn(len(key)), torch.full_like(key, -1), torch.full_like(key, -1)
    sorted_value, bounds = torch.full((len(key),), torch.nan), torch.full_like(edges, -1)
    grid = (triton.cdiv(len(key), 16) + triton.cdiv(len(edges), 16),)
    kernels.sort_kernel[grid](
        key, value, made, token, sorted_value, bounds, None, None, None, len(key), vocab, len(edges), BI=16, BJ=512
    )  # fmt: skip
    wanted = torch.sort(key, stable=True)
    assert torch.equal(made, wanted.values)
    assert torch.equal(token.long(), wanted.indices)
    assert torch.equal(sorted_value, value[wanted.indices])
    assert torch.equal(bounds, torch.searchsorted(wanted.values, edges.clamp(max=vocab), out_int32=True))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=150), st.integers(1, 40), st.booleans(), st.randoms())
def test_targets_are_grouped_by_chunk(targets: list[int], chunk: int, ranked: bool, random: Any) -> None:
    """Beside what the docstring of GroupedTargets says, in Python. Key 40 is of what is not in the vocabulary."""
    tokens, vocab = len(targets), 40
    order = random.sample(range(tokens), tokens)
    key, chunks = torch.tensor(targets, dtype=torch.int32), -(-tokens // chunk)
    c = SimpleNamespace(
        tokens=tokens, vocab=vocab, chunk=chunk, order=torch.tensor(order, dtype=torch.int32),
        inputs=SimpleNamespace(key=key), empty=lambda *sizes: torch.empty(sizes[:-1], dtype=sizes[-1]),
    )  # fmt: skip
    shared = {"order_ptr": c.order, "tokens": tokens, "vocab": vocab, "chunk": chunk, "num_warps": 4}
    c.launch = lambda kernel, grid, **own: launch.launch_named(kernel, (grid,), shared | own)
    with mock.patch.object(products, "MOST_RANKED", 1000 if ranked else 0):
        made = products.GroupedTargets.of(c)
    of_chunk = [[targets[token] for token in order[k * chunk : (k + 1) * chunk]] for k in range(chunks)]
    groups: list[list[tuple[int, int, int]]] = [[] for _ in range(chunks)]
    for position, token in enumerate(order):
        k, y = position // chunk, targets[token]
        early = y < vocab and of_chunk[k].count(y) > 1
        groups[k if early else chunks - 1].append((y, position, token))
    listed = [place for group in groups for place in sorted(group)]
    assert made.key.tolist() == [y for y, _, _ in listed]
    assert made.token.tolist() == [token for _, _, token in listed]
    begin = 0
    for k, group in enumerate(groups):
        found = [begin + sum(y < min(edge * 16, vocab) for y, _, _ in group) for edge in range(made.bounds.shape[1])]
        assert made.bounds[k].tolist() == found
        begin += len(group)


def test_many_tokens_are_sorted_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient has the same bits."""
    hidden, weight = torch.randn(40, 32, requires_grad=True), torch.randn(60, 32, requires_grad=True)
    target, made = torch.randint(0, 60, (40,)), []
    for most in (products.MOST_RANKED, 39):
        monkeypatch.setattr(products, "MOST_RANKED", most)
        sort, seen = torch.sort, []
        monkeypatch.setattr(torch, "sort", lambda *x, sort=sort, seen=seen, **o: seen.append(1) or sort(*x, **o))
        loss = linear_cross_entropy(hidden, weight, target, backend="triton")
        made.append(torch.autograd.grad(loss, (hidden, weight)))
        assert bool(seen) == (most < 40)
        monkeypatch.undo()
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("tokens", [1, 16, 47, 130, 200])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_prepared_of_tokens(tokens: int, mean: bool, weighted: bool) -> None:
    """Several programs, blocks and turns, beside Python. Of ids in [0, 10), 3 is ignored."""
    random, vocab, ignored = np.random.default_rng(tokens), 10, 3
    targets = random.choice([-2, 0, 3, 3, 5, 9, 10], tokens).tolist()
    given_weight = random.choice([0.0, 0.5, -2.0, float("inf")], tokens).tolist() if weighted else None
    class_weight = [float(k) for k in range(1, vocab + 1)]
    arrays = Arrays(
        torch.randn(tokens, 4), torch.randn(vocab, 4), None, torch.tensor(targets),
        None if given_weight is None else torch.tensor(given_weight), torch.tensor(class_weight) if weighted else None,
    )  # fmt: skip
    options = LossOptions(reduction="mean" if mean else "sum", ignore_index=ignored, logit_scale=2.0)
    blocks = {"TOKEN_BLOCK": 16, "TURN_BLOCK": 64, "PREPARING_PROGRAMS": 3}
    with mock.patch.multiple(rows, **blocks):
        made = rows.prepare(arrays, options, torch.float32)
    valid = [y != ignored for y in targets]
    inside = [0 <= y < vocab for y in targets]
    weight = [(t if v else 0.0) for t, v in zip(given_weight or [1.0] * tokens, valid, strict=True)]
    k = [class_weight[y if i else 0] if weighted else 1.0 for y, i in zip(targets, inside, strict=True)]
    sizes = [abs(t) for t in weight if abs(t) < float("inf")]
    unit = max(sizes) if any(sizes) else 1.0
    parts = [t * one for t, one, v in zip(weight, k, valid, strict=True) if v]
    norm = (1 / np.float32(sum(parts)) if any(parts) else 0.0) if mean else 1.0
    assert made.order.tolist() == sorted(range(tokens), key=lambda i: not valid[i])
    assert (made.count.tolist(), made.progress.tolist()) == ([sum(valid)], [0, 0])
    assert made.valid.tolist() == valid
    assert made.inside.tolist() == [i or not v for i, v in zip(inside, valid, strict=True)]
    kept = [v and i for v, i in zip(valid, inside, strict=True)]
    assert made.ids.tolist() == [y if keep else 0 for y, keep in zip(targets, kept, strict=True)]
    assert made.key.tolist() == [y if keep else vocab for y, keep in zip(targets, kept, strict=True)]
    lost = [-1 if v and not i else 0 for v, i in zip(valid, inside, strict=True)]
    assert made.index.tolist() == [y if keep else out for y, keep, out in zip(targets, kept, lost, strict=True)]
    assert made.token_weight.tolist() == weight
    assert torch.equal(made.relative, torch.tensor(weight) / unit)
    assert torch.allclose(made.norm, torch.tensor(norm), equal_nan=True)
    assert (made.largest.item(), made.unit.item()) == (
        2 * unit,
        pytest.approx(made.norm.item() * 2 * unit, nan_ok=True),
    )


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_what_dw_in_place_counts_in_is_zeroed(tokens: int) -> None:
    """With the chunk's hidden states, by fewer or more programs than there are numbers. In place it would wait for
    ever. (dW's kernel itself runs on a GPU: test_in_place.)"""
    arrays = Arrays(torch.randn(tokens, 64), torch.randn(700, 64), None, torch.zeros(tokens, dtype=torch.int64))
    chosen = plan(tokens=tokens, hidden=64, vocab=700, dtype="bfloat16", fused=True, order="tokens", chunk=tokens)
    chosen = dataclasses.replace(chosen, lends=True)
    assert chosen.in_place
    c = kernel_call.KernelCall(rows.prepare(arrays, LossOptions(), torch.float32), LossOptions(), chosen)
    c.counter.fill_(7)
    c.gather(0, c.operand())
    assert c.counter.numel() >= 2
    assert not c.counter.any()
