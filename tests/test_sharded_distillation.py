"""Distillations of a vocabulary that several ranks share, against the float64 truth and against one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from distilling import cut_raggedly, rows_of  # noqa: E402
from implementations import TorchEager, TorchTriton, in_turn  # noqa: E402
from parted_teachers import EVERY, HEADS, TOKENS, case_of, outcome_of, part_of  # noqa: E402
from ranks import Failed, Ranks, group_of  # noqa: E402
from test_teachers import DTYPES, ORDERS, Problem, V, assert_true  # noqa: E402

from logitless.objectives import DistillationSizes, distillation_order  # noqa: E402
from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl import (  # noqa: E402
    dense_distillation_loss,
    distillation_loss,
    sparse_distillation_loss,
)

EAGER = TorchEager()
# Unequal parts. The first has no target, the second a single entry.
CUTS = {2: (0, 4, V), 4: (0, 4, 5, 38, V)}


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(4, sizes=(2, 4)) as ranks:
        yield ranks


def part(ranks: int, rank: int) -> slice:
    return slice(*CUTS[ranks][rank : rank + 2])


def problem_run(rank: int, impl: Any, problem: Problem, dtype: str, order: str, ranks: int) -> Any:
    """A rank's loss and gradients."""
    a, _ = case_of(problem, dtype)
    with pytest.MonkeyPatch.context() as patch:
        cut_raggedly(patch, order, TOKENS, int(np.diff(CUTS[ranks]).max()))
        return outcome_of(impl, problem, part_of(a, part(ranks, rank)), dtype, process_group=group_of(ranks))


def joined(answers: list[Any]) -> Any:
    """The ranks' outcomes as that of one device. Loss and dX are the same on all, bit by bit."""
    loss, grads = answers[0]
    for other, others in answers[1:]:
        np.testing.assert_array_equal(other, loss)
        np.testing.assert_array_equal(others["hidden"], grads["hidden"])
    rows = {name: np.concatenate([own[name] for _, own in answers]) for name in ("weight", "bias")}
    return loss, {"hidden": grads["hidden"]} | rows


@pytest.mark.case(26, 47)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("problem", "dtype"), in_turn(EVERY, DTYPES))
def test_equal_to_the_truth_and_to_one_device(pool: Ranks, problem: Problem, dtype: str, order: str) -> None:
    a, true = case_of(problem, dtype)
    result = joined(pool.run(problem_run, EAGER, problem, dtype, order, 4))
    assert_true(result, true, dtype)
    assert not result[1]["hidden"][a["mask"] == 0].any()
    loss, grads = outcome_of(EAGER, problem, a, dtype)
    assert error(result[0], loss) <= 2 * ON_TOP_LOSS[dtype]
    for name, grad in grads.items():
        assert error(result[1][name], grad) <= 2 * ON_TOP_GRADIENT[dtype], name


BY_KERNELS = [p for p in EVERY if p.name in ("head-0", "head-options", "head-hard", "spread-0.3", "log-normalizer")]


@pytest.mark.case(26, 47)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("problem", "dtype"), in_turn(BY_KERNELS, ["float32", "bfloat16"]))
def test_the_kernels_on_two_ranks(pool: Ranks, problem: Problem, dtype: str, order: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    result = joined(pool.run(problem_run, TorchTriton(), problem, dtype, order, 2, ranks=2))
    assert_true(result, case_of(problem, dtype)[1], dtype)


def per_token_run(rank: int, problem: Problem, spoiled: int) -> Any:
    """Losses of every token and gradients for an upstream gradient of each; a token that is NaN in hidden, and the same
    once more with that token masked."""
    a = part_of(case_of(problem, "float32")[0], part(4, rank))
    found = []
    for row in (spoiled, None):
        x, w, b = (EAGER.array(a[name], "float32") for name in ("hidden", "weight", "bias"))
        mask = EAGER.array(np.ones_like(a["mask"]))
        x[EAGER.array(a["mask"] == 0)] = 0.5
        mask.view(-1)[spoiled] = row is not None
        x.view(-1, x.shape[-1])[spoiled] = torch.nan
        leaves = [leaf.requires_grad_() for leaf in (x, w, b)]
        teacher = (EAGER.array(a[f"teacher_{name}"], "float32") for name in ("hidden", "weight", "bias"))
        t, *head = teacher
        losses = distillation_loss(
            leaves[0], w, t.nan_to_num(), head[0], b, teacher_bias=head[1], mask=mask, reduction="none",
            process_group=group_of(4), **problem.options,
        )  # fmt: skip
        upstream = torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)
        found.append([EAGER.numpy(v) for v in (losses, *torch.autograd.grad(losses, leaves, upstream))])
    return found


@pytest.mark.case(26)
@pytest.mark.parametrize("problem", [p for p in HEADS if p.name in ("head-0", "head-0.3", "head-1")])
def test_a_token_that_is_no_number_is_that_on_every_rank(pool: Ranks, problem: Problem) -> None:
    for spoiled, masked in pool.run(per_token_run, problem, 20):
        bad = np.arange(spoiled[0].size).reshape(spoiled[0].shape) == 20
        np.testing.assert_array_equal(np.isnan(spoiled[0]), bad)
        np.testing.assert_array_equal(spoiled[0][~bad], masked[0][~bad])
        assert not masked[0][bad].any()
        assert np.isnan(spoiled[1][bad]).all()
        np.testing.assert_array_equal(spoiled[1][~bad], masked[1][~bad])
        assert all(np.isfinite(values).all() for values in masked)


def empty_run(rank: int, masked: bool) -> Any:
    """No token at all, or none that counts."""
    x = torch.full((3, 5) if masked else (0, 5), torch.nan, requires_grad=True)
    w = torch.ones(2 + rank, 5, requires_grad=True)
    given = (x, w, x.detach(), w.detach())
    loss = distillation_loss(*given, mask=torch.zeros(len(x)), process_group=group_of(2))
    return [EAGER.numpy(value) for value in (loss, *torch.autograd.grad(loss, (x, w)))]


@pytest.mark.parametrize("masked", [False, True])
def test_no_token_counts(pool: Ranks, masked: bool) -> None:
    for values in pool.run(empty_run, masked, ranks=2):
        assert all(not value.any() for value in values)


# ---------------------------------------------------------------------------------------------------------------------
# Memory

N, D, D_TEACHER = 512, 64, 96
VOCABS = (1100, 7092)
WAYS = ("head", "class", "spread", "dense")
K = 40


def scratch_run(rank: int, way: str, dtype: str, rows: tuple[int, ...], budget: int) -> int:
    """Peak bytes of a step beyond inputs and gradients."""
    from logitless.torch_impl.memory import peak_scratch_bytes

    own, generator = VOCABS[rank], torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    x, w, b, t, tw = (
        0.1 * torch.randn(*shape, generator=generator)
        for shape in ((N, D), (own, D), (own,), (N, D_TEACHER), (own, D_TEACHER))
    )
    leaves = [leaf.to(kind).requires_grad_() for leaf in (x, w, b)]
    ids = torch.rand(N, sum(VOCABS) // K, generator=generator.manual_seed(1)).argsort(dim=1)[:, :K] * K
    more: dict[str, Any] = {"beta": 0.5, "softcap": 30.0, "memory_budget": budget, "process_group": group_of(2)}
    hard = {"target": ids[:, 0], "nll_coef": 0.5}
    dense = torch.full((N, own), 1 / sum(VOCABS), dtype=kind)
    probs = torch.full((N, K), 0.5 / K)

    def step() -> None:
        if way == "head":
            loss = distillation_loss(*leaves[:2], t.to(kind), tw.to(kind), leaves[2], **more)
        elif way == "dense":
            loss = dense_distillation_loss(*leaves[:2], dense, leaves[2], **hard, **more)
        else:
            loss = sparse_distillation_loss(*leaves[:2], ids, probs, leaves[2], rest=way, **hard, **more)  # type: ignore[arg-type]
        loss.backward()

    with pytest.MonkeyPatch.context() as patch:
        rows_of(patch, *rows)
        used = peak_scratch_bytes(step)
    given = (t.nbytes + tw.nbytes) // 2 if way == "head" and dtype == "bfloat16" else 0
    return used - given - sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)


@pytest.mark.case(26, 31)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_holds_its_rows(pool: Ranks, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(monkeypatch, 64)
    ids = (K + 1) * (way in ("class", "spread"))
    sizes = DistillationSizes(N, D, max(VOCABS), dtype, D_TEACHER * (way == "head"), ids, ranks=2)
    order = distillation_order(sizes, operand_itemsize=4, by="plain")
    promised = order.scratch_bytes
    for used, own in zip(pool.run(scratch_run, way, dtype, (64,), promised, ranks=2), VOCABS, strict=True):
        told = f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"
        assert used <= order.of_part(own).scratch_bytes <= promised, told
        assert used >= 4 * N * own, told  # the meter is not blind


@pytest.mark.case(26, 31)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_stays_within_its_budget(pool: Ranks, way: str, dtype: str) -> None:
    budget = 4 * N * max(VOCABS) // 2
    used = pool.run(scratch_run, way, dtype, (1024, 256, 128), budget, ranks=2)
    assert budget // 50 <= max(used) <= budget, f"{max(used) / 2**20:.2f} MiB of {budget / 2**20:.2f}"


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong on one rank is an error on all


def mismatch_run(rank: int, what: str) -> float:
    odd, rng = rank == 1, torch.Generator().manual_seed(0)
    x, w, ids = torch.randn(6, 4, generator=rng), torch.randn(5, 4, generator=rng), torch.arange(12).reshape(6, 2)
    probs, more = torch.full((6, 2), 0.25), {"nll_coef": 0.5, "target": torch.arange(6)}
    ids = ids % 10
    if odd and what == "ids":
        ids = ids.flip(0)
    elif odd and what == "probs":
        probs = probs * 0.5
    elif odd and what == "target":
        more["target"] = torch.arange(6).flip(0)
    elif odd and what == "mask":
        more["mask"] = torch.tensor([1, 1, 1, 1, 1, 0])
    elif odd and what in ("beta", "rest"):
        more[what] = 0.5 if what == "beta" else "spread"  # type: ignore[assignment]
    elif odd and what == "refused":
        probs = probs[:4]
    elif odd and what == "backend":
        more["backend"] = "cuda"  # type: ignore[assignment]
    elif what == "outside":
        more["target"] = torch.arange(6) + 5
    elif what in ("teacher's size", "teacher's dtype"):
        teacher = (torch.ones(6, 3), torch.ones(5, 3)) if odd and what == "teacher's size" else (x, w)
        if odd and what == "teacher's dtype":
            teacher = x.double(), w.double()
        return float(distillation_loss(x, w, *teacher, process_group=group_of(2)))
    return float(sparse_distillation_loss(x, w, ids, probs, process_group=group_of(2), **more))  # type: ignore[arg-type]


MISMATCHES = {
    "ids": "the ranks were given different ones as the teacher's ids and probabilities",
    "probs": "the ranks were given different ones as the teacher's ids and probabilities",
    "target": "the ranks were given different ones as the ids of the hard loss",
    "mask": "the ranks were given different ones as the target's ids",
    "beta": "the ranks were given different ones as the function, its options and its teacher's sizes",
    "rest": "the ranks were given different ones as the function, its options and its teacher's sizes",
    "teacher's size": "the ranks were given different ones as the function, its options and its teacher's sizes",
    "teacher's dtype": "the ranks were given different ones as the dtype of teacher_hidden",
    "outside": "target: got id 10 at index (5), allowed are 0 to 9",
}


@pytest.mark.case(9, 26)
def test_ranks_with_other_arguments_say_so(pool: Ranks) -> None:
    for what, words in MISMATCHES.items():
        for made in pool.outcomes(mismatch_run, what, ranks=2):
            assert isinstance(made, Failed), what
            assert words in made.words, (what, made.words)
    for what, words in (("refused", "probs: got shape (4, 2)"), ("backend", "backend: got 'cuda'")):
        others, own = pool.outcomes(mismatch_run, what, ranks=2)
        assert own.words.startswith(words), own.words
        assert others.words.startswith("process_group: rank 1 of the group refused its arguments")
    assert len(set(pool.run(mismatch_run, "nothing", ranks=2))) == 1
