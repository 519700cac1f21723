"""Several ranks against one: the vocabulary, the tokens and the batch spread over processes that talk over gloo."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from implementations import (  # noqa: E402
    Outcome,
    TorchEager,
    assert_within,
    options_of,
    plan_for,
    problem_named,
    run_case,
    truth,
)
from ranks import Failed, Ranks, group_of  # noqa: E402

from logitless import plan, reference  # noqa: E402
from logitless.problems import Problem  # noqa: E402
from logitless.spec import LossOptions, TokenStats  # noqa: E402
from logitless.tolerances import BOUND, CHAIN, ELEMENTS, TINY, error  # noqa: E402
from logitless.torch_impl import (  # noqa: E402
    global_normalizer,
    linear_cross_entropy,
    linear_log_probs,
    linear_token_log_probs,
    linear_top_k,
)

EAGER = TorchEager()
SMOOTH = LossOptions(label_smoothing=0.1, z_loss=1e-3)
UNEVEN = Problem("uneven", (37,), 16, 1023, options=SMOOTH, ignored=0.2, bias=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(7, sizes=(1, 2, 4, 7)) as ranks:
        yield ranks


def shares(vocab: int, ranks: int) -> list[slice]:
    """Consecutive slices as DTensor cuts them: 1023 over 4 is 256, 256, 256, 255."""
    size = -(-vocab // ranks)
    return [slice(start, min(start + size, vocab)) for start in range(0, vocab, size)]


def shard_run(rank: int, problem: Problem, ranks: int, more: dict[str, Any], sequence: bool = False) -> Any:
    """One rank's loss, gradients (hidden's, its own entries' of weight and bias) and statistics, twice backward."""
    case = problem.case()
    own, dtype = shares(problem.vocab, ranks)[rank], problem.dtype
    tensors = {"hidden": case.hidden, "weight": case.weight[own], "bias": None if case.bias is None else case.bias[own]}
    if sequence:
        part = len(case.hidden) // ranks
        tensors["hidden"] = case.hidden[rank * part : (rank + 1) * part]
    x, w, b = (EAGER.array(value, dtype) for value in tensors.values())
    leaves = [value.requires_grad_() for value in (x, w, b) if value is not None]
    options = options_of(case)
    for name in ("token_weight", "class_weight"):
        options[name] = EAGER.array(options[name])
    if options["class_weight"] is not None:
        options["class_weight"] = options["class_weight"][own]
    given = {"backend": "eager"} | options | more
    loss, stats = linear_cross_entropy(
        x, w, torch.tensor(case.target), b, return_stats=True, process_group=group_of(ranks),
        sequence_parallel=sequence, **given,
    )  # fmt: skip
    upstream = torch.as_tensor(case.upstream, dtype=loss.dtype).expand_as(loss)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, upstream)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, **ELEMENTS["long sums bfloat16" if dtype == "bfloat16" else "long sums"])
    numbers = [EAGER.numpy(value) for value in (loss, *first)]
    return numbers, [EAGER.numpy(value) for value in stats]


def joined(answers: list[Any], sequence: bool = False) -> tuple[Outcome, Any]:
    """The ranks' answers as those of one device; loss and statistics are the same on all, bit by bit."""
    for numbers, stats in answers[1:]:
        np.testing.assert_array_equal(numbers[0], answers[0][0][0])
        for one, other in zip(stats, answers[0][1], strict=True):
            np.testing.assert_array_equal(one, other)
    parts = list(zip(*(numbers[1:] for numbers, _ in answers), strict=True))
    if sequence:
        hidden = np.concatenate(parts[0])
    else:
        hidden = parts[0][0]
        for other in parts[0][1:]:
            np.testing.assert_array_equal(other, hidden)
    grads = {"hidden": hidden, "weight": np.concatenate(parts[1]), "bias": None}
    if len(parts) > 2:
        grads["bias"] = np.concatenate(parts[2])
    return Outcome(answers[0][0][0], grads), TokenStats(*answers[0][1])


def chunks(problem: Problem, ranks: int, **arguments: Any) -> dict[str, Any]:
    """A plan for the largest shard."""
    return {"plan": plan_for(dataclasses.replace(problem, vocab=-(-problem.vocab // ranks)), **arguments)}


LOW = problem_named("odd_most").with_dtype("bfloat16")
# Eight classes over the border of two ranks: the target on one, what is far more likely on the other.
ACROSS = dataclasses.replace(problem_named("confident_wrong"), vocab=12)
TINY_ALL = dataclasses.replace(problem_named("odd_most"), name="tiny", shape=(13,), hidden=16, vocab=45)
RUNS = (
    (UNEVEN, 4, {}),
    (UNEVEN, 7, chunks(UNEVEN, 7, order="tokens", chunk=16)),
    ("odd_most", 2, chunks(problem_named("odd_most"), 2, order="vocab", chunk=20)),
    ("odd_all", 2, chunks(problem_named("odd_all"), 2, order="both", chunk=64)),
    (LOW, 2, chunks(LOW, 2, order="tokens", chunk=64)),
    ("odd_all", 2, {}),
    ("odd_most", 4, {}),
    ("odd_softcap", 2, {}),
    ("odd_none_most", 4, {}),
    ("odd_none_all", 2, {}),
    ("signed_smooth", 2, {}),
    ("confident", 4, {}),
    ("confident_wrong", 4, {}),
    ("confident_wrong_none", 2, {}),
    (ACROSS, 2, {}),
    (dataclasses.replace(ACROSS, options=LossOptions("none", z_loss=1e-3)), 2, {}),
    ("minus_inf", 4, {}),
    ("shifted_up", 2, {}),
    ("all_ignored", 2, {}),
    ("no_token", 2, {}),
)


@pytest.mark.case(26)
@pytest.mark.parametrize(("name", "ranks", "more"), RUNS, ids=[f"{getattr(r[0], 'name', r[0])}-{r[1]}" for r in RUNS])
def test_equal_to_one_device(pool: Ranks, name: Any, ranks: int, more: dict[str, Any]) -> None:
    problem = name if isinstance(name, Problem) else problem_named(name)
    outcome, stats = joined(pool.run(shard_run, problem, ranks, more, ranks=ranks))
    assert_within(problem, outcome)
    alone = run_case(EAGER, problem.case(), return_stats=True).stats
    for field in ("argmax", "correct"):
        np.testing.assert_array_equal(getattr(stats, field), getattr(alone, field))
    for field in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        np.testing.assert_allclose(getattr(stats, field), getattr(alone, field), **ELEMENTS["another size"])


@pytest.mark.case(26)
@pytest.mark.parametrize("name", ["odd_most", "odd_none_all"])
def test_sequence_parallel(pool: Ranks, name: str) -> None:
    """hidden and its gradient hold a rank's share of the tokens. The loss is over all of them."""
    problem = problem_named(name)
    answers = pool.run(shard_run, problem, 4, {}, True, ranks=4)
    assert answers[0][0][1].shape == (1, 47, 31)
    assert_within(problem, joined(answers, sequence=True)[0])


KERNEL_RUNS = (
    (TINY_ALL, {"order": "tokens", "chunk": 13}, False),
    (TINY_ALL, {"order": "tokens", "chunk": 8}, False),
    (dataclasses.replace(TINY_ALL, shape=(14,)), {"order": "tokens", "chunk": 8}, True),
    (dataclasses.replace(TINY_ALL, options=dataclasses.replace(TINY_ALL.options, softcap=3.0, reduction="none")),
     {"order": "vocab", "chunk": 16}, False),
    (dataclasses.replace(ACROSS, shape=(20,)), {"order": "tokens", "chunk": 8}, False),
)  # fmt: skip


def checked_run(rank: int, *arguments: Any) -> Any:
    """:func:`shard_run`, with an eye on what the kernels read and write."""
    from accesses import checked

    with checked():
        return shard_run(rank, *arguments)


@pytest.mark.case(26)
@pytest.mark.parametrize(("problem", "plan", "sequence"), KERNEL_RUNS)
def test_the_kernels_on_two_ranks(pool: Ranks, problem: Problem, plan: dict[str, Any], sequence: bool) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    more = {"backend": "triton"} | chunks(problem, 2, fused=True, **plan)
    outcome, stats = joined(pool.run(checked_run, problem, 2, more, sequence, ranks=2), sequence)
    assert_within(problem, outcome)
    alone = run_case(EAGER, problem.case(), return_stats=True).stats
    np.testing.assert_array_equal(stats.argmax, alone.argmax)
    np.testing.assert_allclose(stats.entropy, alone.entropy, **ELEMENTS["long sums"])


REPEATED: dict[str, dict[str, Any]] = {
    "mean": {},
    "sequence": {"sequence_parallel": True, "label_smoothing": 0.1, "bias": True},
    "chunks": {"plan": {"order": "tokens", "chunk": 8}, "return_stats": True, "softcap": 5.0},
    "sequence, chunks": {"plan": {"order": "tokens", "chunk": 8}, "sequence_parallel": True, "z_loss": 1e-3},
    "slices": {"plan": {"order": "vocab", "chunk": 24}},
    "both": {"plan": {"order": "both", "chunk": 8}, "bias": True},
    "sequence, both": {"plan": {"order": "both", "chunk": 8}, "sequence_parallel": True},
    "per token": {"reduction": "none", "class_weight": True},
    "log-probs and statistics": {"function": linear_log_probs, "return_stats": True},
    "one rank runs as it is": {"apart": True},
}


def repeated_values(rank: int, name: str, seed: int) -> list[Any]:
    """Values and gradients of a call; other values, and other ignored tokens, for every seed."""
    options, (tokens, hidden, vocab) = dict(REPEATED[name]), (24, 32, 140)
    function, sequence = options.pop("function", linear_cross_entropy), options.get("sequence_parallel", False)
    generator = torch.Generator().manual_seed(seed)
    x, w, k, b = (torch.randn(n, hidden, generator=generator) for n in (tokens, vocab, vocab, vocab))
    y = torch.randint(vocab, (tokens,), generator=generator)
    y[torch.rand(tokens, generator=generator) < 0.3] = -100
    own, part = (slice(rank * n // 2, (rank + 1) * n // 2) for n in (vocab, tokens))
    leaves = [value.clone().requires_grad_() for value in (x[part] if sequence else x, w[own])]
    options.pop("apart", None)
    if options.pop("class_weight", False):
        options["class_weight"] = k[own, 0].abs()
    if options.pop("bias", False):
        leaves.append(b[own, 0].clone().requires_grad_())
        options["bias"] = leaves[2]
    if "plan" in options:
        sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab // 2, "dtype": "float32", "fused": True}
        options["plan"] = plan(**sizes, **options["plan"])
    found = function(*leaves[:2], y, backend="triton", process_group=group_of(2), **options)
    values = []
    for value in found if isinstance(found, tuple) else (found,):
        values += value if isinstance(value, tuple) else [value]
    total = sum((i + seed + 1) * (v * v.detach().cos()).sum() for i, v in enumerate(values) if v.requires_grad)
    return [*values, *torch.autograd.grad(total, leaves)]  # type: ignore[arg-type]


def repeated_run(rank: int, name: str) -> tuple[int, int, bool]:
    """How many kinds of steps were written down, how often they were repeated, and whether the bits are the same."""
    from logitless.torch_impl.kernels import program, replay

    ran, real, apart = [], program.Program.run, REPEATED[name].get("apart", False)

    def counted(self: Any, *given: Any) -> Any:
        ran.append(self)
        return real(self, *given)

    replay.programs.clear()
    replay.seen.clear()
    with mock.patch.object(program.Program, "run", counted):
        with mock.patch.object(replay.settings, "on_cpu", not (apart and rank == 1)):
            made = [repeated_values(rank, name, seed) for seed in range(4)]
        expected = [repeated_values(rank, name, seed) for seed in range(4)]
    pairs = zip((v for one in made for v in one), (v for one in expected for v in one), strict=True)
    return sum(known is not None for known in replay.programs.values()), len(ran), all(torch.equal(*p) for p in pairs)


@pytest.mark.case(26)
@pytest.mark.late(where=lambda p: p["name"] not in ("sequence, chunks", "per token", "one rank runs as it is"))
@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_step_of_two_ranks_has_the_same_bits(pool: Ranks, name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    for rank, (kinds, runs, same) in enumerate(pool.run(repeated_run, name, ranks=2)):
        assert same
        two = name in ("slices", "per token", "log-probs and statistics")  # their backward is a step of its own
        steps = 0 if REPEATED[name].get("apart") and rank else 1 + two
        assert (kinds, runs) == (steps, 2 * steps)


def log_probs_run(rank: int, case: dict[str, Any], ranks: int) -> Any:
    own = shares(len(case["weight"]), ranks)[rank]
    x, w = EAGER.array(case["hidden"], "float32"), EAGER.array(case["weight"][own], "float32")
    x.requires_grad_()
    w.requires_grad_()
    y = torch.tensor(case["target"])
    given = {"softcap": 5.0, "process_group": group_of(ranks), "backend": case["backend"]}
    log_prob, entropy, stats = linear_log_probs(x, w, y, return_stats=True, **given)
    values = (log_prob, entropy, stats.lse, stats.sum_p_squared)
    sum((value * torch.tensor(case[f"g{n}"])).sum() for n, value in enumerate(values, 1)).backward()  # type: ignore[union-attr]
    short = linear_log_probs(x, w, y, with_entropy=True, **given)
    assert torch.equal(torch.stack(short), torch.stack(values[:2]))
    return [EAGER.numpy(value) for value in (*stats, log_prob, x.grad, w.grad)]


@pytest.mark.case(26)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_log_probs_and_statistics_with_a_target_on_each_rank(pool: Ranks, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    rng = np.random.default_rng(0)
    edges = [edge for part in shares(43, 4) for edge in (part.start, part.stop - 1)]
    target = np.array([*edges, -100])
    case: dict[str, Any] = {"hidden": rng.standard_normal((9, 12)), "weight": rng.standard_normal((43, 12))}
    case |= {"target": target, "backend": backend} | {f"g{n}": rng.standard_normal(9) for n in (1, 2, 3, 4)}
    rounded = (case[name].astype(np.float32) for name in ("hidden", "weight"))
    true = reference.linear_log_probs(
        *rounded, target, softcap=5.0, log_prob_upstream=case["g1"], entropy_upstream=case["g2"],
        lse_upstream=case["g3"], squared_upstream=case["g4"],
    )  # fmt: skip
    answers = pool.run(log_probs_run, case, 4, ranks=4)
    for made in answers:
        for value, expected in zip(made, (*true.stats, true.log_prob, true.hidden_grad), strict=False):
            assert error(value, expected) <= 4 * TINY["float32"]
    weight = np.concatenate([made[-1] for made in answers])
    assert error(weight, true.weight_grad) <= 4 * TINY["float32"]


LOSSES_ON_TOP: dict[str, dict[str, Any]] = {
    "dpo_loss": {"loss_type": "ipo", "nll_coef": 0.3},
    "kto_loss": {"kl": 0.2},
    "clipped_policy_loss": {"ratio": "sequence", "entropy_coef": 0.1, "kl_coef": 0.1, "kl_times_ratio": True},
}


def sequences_case() -> dict[str, Any]:
    """Four sequences of six tokens, and what the losses on top know of them."""
    rng = np.random.default_rng(0)
    case = {"hidden": rng.standard_normal((4, 6, 12)), "weight": rng.standard_normal((43, 12)), "bias": np.zeros(43)}
    case["target"], case["mask"] = rng.integers(0, 43, (4, 6)), rng.random((4, 6)) < 0.7
    for name in ("reference_log_prob", "old_log_prob", "sampler_log_prob"):
        case[name] = rng.standard_normal((4, 6)) - 4
    return case | {"advantage": rng.standard_normal(4), "desirable": np.array([1, 0, 1, 0])}


def on_top(name: str, case: dict[str, Any], own: slice, tokens: slice, **more: Any) -> list[Any]:
    """Loss, dX, dW and db of a loss on top, for some rows of the vocabulary and some sequences' hidden states."""
    from logitless import torch_impl

    parts = {"hidden": case["hidden"][tokens], "weight": case["weight"][own], "bias": case["bias"][own]}
    leaves = {key: EAGER.array(value, "float32").requires_grad_() for key, value in parts.items()}
    names = {"dpo_loss": (), "kto_loss": ("desirable",)}.get(name, ("old_log_prob", "sampler_log_prob", "advantage"))
    known = {key: torch.tensor(case[key]) for key in ("target", "mask", "reference_log_prob", *names)}
    known = {key: value.float() if value.is_floating_point() else value for key, value in known.items()}
    loss = getattr(torch_impl, name)(**leaves, **known, **LOSSES_ON_TOP[name], **more)
    return [EAGER.numpy(value) for value in (loss, *torch.autograd.grad(loss, list(leaves.values())))]


def on_top_run(rank: int, name: str, sequence: bool) -> Any:
    tokens = slice(2 * rank, 2 * rank + 2) if sequence else slice(None)
    more = {"process_group": group_of(2), "sequence_parallel": sequence}
    return on_top(name, sequences_case(), shares(43, 2)[rank], tokens, **more)


@pytest.mark.case(26)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LOSSES_ON_TOP)
def test_losses_on_top_of_a_vocabulary_on_two_ranks(pool: Ranks, name: str, sequence: bool) -> None:
    alone = on_top(name, sequences_case(), slice(None), slice(None))
    answers = pool.run(on_top_run, name, sequence, ranks=2)
    hidden = np.concatenate([made[1] for made in answers]) if sequence else answers[0][1]
    joint = [answers[0][0], hidden, *(np.concatenate([made[part] for made in answers]) for part in (2, 3))]
    for value, expected in zip(joint, alone, strict=True):
        assert error(value, expected) <= 4 * TINY["float32"]
    np.testing.assert_array_equal(answers[0][0], answers[1][0])


def test_losses_on_top_name_a_missing_group() -> None:
    case = sequences_case()
    for name in LOSSES_ON_TOP:
        with pytest.raises(ValueError, match="sequence_parallel: got True without a process_group"):
            on_top(name, case, slice(None), slice(None), sequence_parallel=True)


def lse_run(rank: int, case: dict[str, Any], sequence: bool, backend: str) -> Any:
    own = shares(len(case["weight"]), 2)[rank]
    x, w = EAGER.array(case["hidden"], "float32"), EAGER.array(case["weight"][own], "float32")
    if sequence:
        x = x[rank : rank + 1].clone()
    x.requires_grad_()
    w.requires_grad_()
    loss, lse = linear_cross_entropy(
        x, w, torch.tensor(case["target"]), softcap=5.0, label_smoothing=0.1, return_lse=True, shift=1,
        process_group=group_of(2), sequence_parallel=sequence, backend=backend,
    )  # fmt: skip
    (3 * loss + (lse * torch.tensor(case["h"])).sum()).backward()
    return [EAGER.numpy(value) for value in (loss, lse, x.grad, w.grad)]


@pytest.mark.case(18, 21, 26)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_lse_and_the_shift(pool: Ranks, sequence: bool, backend: str) -> None:
    """hidden [2, 5, D]: under sequence parallelism a rank has one of the rows, and all targets."""
    rng = np.random.default_rng(0)
    case: dict[str, Any] = {"hidden": rng.standard_normal((2, 5, 12)), "weight": rng.standard_normal((43, 12))}
    case |= {"target": rng.integers(0, 43, (2, 5)), "h": rng.standard_normal((2, 5))}
    alone = EAGER.run(
        case["hidden"], case["weight"], case["target"], softcap=5.0, label_smoothing=0.1, return_lse=True, shift=1,
        upstream=3.0, lse_upstream=case["h"],
    )  # fmt: skip
    answers = pool.run(lse_run, case, sequence, backend, ranks=2)
    for loss, lse, *_ in answers:
        assert error(loss, alone.loss) <= 4 * TINY["float32"]
        assert error(lse, alone.lse) <= 4 * TINY["float32"]
    if sequence:
        assert error(np.concatenate([made[2] for made in answers]), alone.grads["hidden"]) <= 4 * TINY["float32"]
    else:
        assert all(error(made[2], alone.grads["hidden"]) <= 4 * TINY["float32"] for made in answers)
    assert error(np.concatenate([made[3] for made in answers]), alone.grads["weight"]) <= 4 * TINY["float32"]


def given_ids_case(shared: bool) -> dict[str, Any]:
    """Ids on every rank, some twice, some ignored; a token without any, and one with ids far from the likeliest."""
    rng = np.random.default_rng(0)
    case: dict[str, Any] = {"hidden": rng.standard_normal((4, 3, 12)), "weight": rng.standard_normal((43, 12))}
    ids = rng.integers(0, 43, (6,) if shared else (4, 3, 6))
    ids[..., 1], ids[..., 3], ids[..., 4] = ids[..., 0], -100, 42
    if not shared:
        ids[1, 2] = -100
    case["hidden"][2, 0] = 12 * case["weight"][7]
    return case | {"ids": ids, "g": rng.standard_normal((4, 3, 6)), "h": rng.standard_normal((4, 3, 30))}


def given_ids_run(rank: int, case: dict[str, Any], sequence: bool, backend: str, ranks: int) -> Any:
    """Both functions: values, dX and this rank's dW of each. 30 largest ids are more than a rank has."""
    own = shares(43, ranks)[rank]
    x, w = EAGER.array(case["hidden"], "float32"), EAGER.array(case["weight"][own], "float32")
    if sequence:
        x = x.chunk(ranks)[rank].clone()
    x.requires_grad_()
    w.requires_grad_()
    more = {"process_group": group_of(ranks), "sequence_parallel": sequence, "backend": backend, "softcap": 50.0}
    log_prob = linear_token_log_probs(x, w, torch.tensor(case["ids"]), **more)
    first = torch.autograd.grad(log_prob, (x, w), torch.tensor(case["g"], dtype=torch.float32))
    largest, found = linear_top_k(x, w, 30, **more)
    second = torch.autograd.grad(largest, (x, w), torch.tensor(case["h"], dtype=torch.float32))
    return [EAGER.numpy(value) for value in (log_prob, *first, largest, *second, found)]


@pytest.mark.case(26, 45)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("sequence", "backend", "ranks"), [(False, "eager", 4), (True, "eager", 2), (True, "triton", 2)]
)
def test_given_ids_and_the_largest(pool: Ranks, shared: bool, sequence: bool, backend: str, ranks: int) -> None:
    case = given_ids_case(shared)
    true = reference.linear_token_log_probs(
        case["hidden"], case["weight"], case["ids"], upstream=case["g"], softcap=50.0
    )
    largest, found = reference.linear_top_k(case["hidden"], case["weight"], 30, softcap=50.0)
    other = reference.linear_token_log_probs(case["hidden"], case["weight"], found, upstream=case["h"], softcap=50.0)
    answers = pool.run(given_ids_run, case, sequence, backend, ranks, ranks=ranks)
    for made in answers:
        np.testing.assert_array_equal(made[6], found)
        np.testing.assert_array_equal(made[0], answers[0][0])
        assert error(made[0], true.log_prob) <= 4 * TINY["float32"]
        assert error(made[3], largest) <= 4 * TINY["float32"]
    for place, expected in ((1, true), (4, other)):
        parts = [made[place] for made in answers]
        for hidden in [np.concatenate(parts)] if sequence else parts:
            assert error(hidden, expected.hidden_grad) <= 4 * TINY["float32"]
        weight = np.concatenate([made[place + 1] for made in answers])
        assert error(weight, expected.weight_grad) <= 4 * TINY["float32"]


def other_ids_run(rank: int, apart: str) -> Any:
    ids = torch.tensor([1, 2 + rank] if apart == "the ids" else [1] * (1 + rank))
    return linear_token_log_probs(torch.ones(2, 3), torch.ones(5, 3), ids, process_group=group_of(2)).tolist()


@pytest.mark.case(9, 45)
@pytest.mark.parametrize("apart", ["the ids", "the shape of ids"])
def test_ranks_with_other_ids_say_so(pool: Ranks, apart: str) -> None:
    for made in pool.outcomes(other_ids_run, apart, ranks=2):
        assert isinstance(made, Failed)
        assert f"the ranks were given different ones as {apart}" in made.words


def temperature_run(rank: int, case: dict[str, Any], sequence: bool) -> Any:
    """Loss, lse, dX and dW; log-probs of given ids and their dX. The temperature is one per token of all ranks."""
    own = shares(len(case["weight"]), 2)[rank]
    x, w = EAGER.array(case["hidden"], "float32"), EAGER.array(case["weight"][own], "float32")
    if sequence:
        x = x.chunk(2)[rank].clone()
    x.requires_grad_()
    w.requires_grad_()
    more = {"process_group": group_of(2), "sequence_parallel": sequence, "softcap": 3.0}
    more["temperature"] = torch.tensor(case["tau"])
    loss, lse = linear_cross_entropy(x, w, torch.tensor(case["target"]), return_lse=True, **more)
    first = torch.autograd.grad((loss, lse), (x, w), (torch.tensor(2.0), torch.tensor(case["h"])))
    log_prob = linear_token_log_probs(x, w, torch.tensor(case["target"]).unsqueeze(-1), **more)
    (second,) = torch.autograd.grad(log_prob.sum(), (x,))
    return [EAGER.numpy(value) for value in (loss, lse, *first, log_prob, second)]


@pytest.mark.case(26, 46)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_temperature_per_token(pool: Ranks, sequence: bool) -> None:
    rng = np.random.default_rng(0)
    case: dict[str, Any] = {"hidden": rng.standard_normal((4, 3, 12)), "weight": rng.standard_normal((43, 12))}
    case |= {"target": rng.integers(0, 43, (4, 3)), "h": rng.standard_normal((4, 3)).astype(np.float32)}
    case["tau"] = rng.uniform(0.4, 2.5, (4, 3)).astype(np.float32)
    case["target"][1, 1], case["tau"][1, 1] = -100, np.nan
    given, options = (case["hidden"], case["weight"]), {"softcap": 3.0, "temperature": case["tau"]}
    true = reference.linear_cross_entropy(*given, case["target"], upstream=2.0, lse_upstream=case["h"], **options)
    other = reference.linear_token_log_probs(*given, case["target"][..., None], **options)
    answers = pool.run(temperature_run, case, sequence, ranks=2)
    for made in answers:
        for place, expected in ((0, true.loss), (1, true.stats.lse), (4, other.log_prob)):
            assert error(made[place], expected) <= 4 * TINY["float32"]
    for place, expected in ((2, true.hidden_grad), (5, other.hidden_grad)):
        parts = [made[place] for made in answers]
        for hidden in [np.concatenate(parts)] if sequence else parts:
            assert error(hidden, expected) <= 4 * TINY["float32"]
    assert error(np.concatenate([made[3] for made in answers]), true.weight_grad) <= 4 * TINY["float32"]


def ties_run(rank: int) -> Any:
    """Ten equal logits on two ranks, then the second's best above the first's."""
    weight, target = torch.zeros(5, 3), torch.tensor([7, 2])
    first = linear_cross_entropy(torch.ones(2, 3), weight, target, return_stats=True, process_group=group_of(2))[1]
    weight[2 + rank] = 1.0 + rank
    second = linear_cross_entropy(torch.ones(2, 3), weight, target, return_stats=True, process_group=group_of(2))[1]
    return first.argmax.tolist(), second.argmax.tolist()


@pytest.mark.case(20)
def test_ties_take_the_lowest_global_id(pool: Ranks) -> None:
    assert pool.run(ties_run, ranks=2) == [([0, 0], [8, 8])] * 2


def shifts_run(rank: int, backend: str) -> list[Any]:
    """The target's rank stays at its anchor with a logit 39 above it; the other's is rescued at 41."""
    weight = torch.tensor([[0.0], [39.0]] if rank == 0 else [[41.0], [40.5]])
    given = {"process_group": group_of(2), "backend": backend}
    log_prob, entropy, stats = linear_log_probs(torch.ones(1, 1), weight, torch.tensor([0]), return_stats=True, **given)
    return [value.item() for value in (log_prob, entropy, stats.sum_p_squared)]


@pytest.mark.case(23)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_ranks_that_are_rescued_apart(pool: Ranks, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    p = np.exp(np.array([0.0, 39.0, 41.0, 40.5]) - 41.0)
    log_p = np.log(p / p.sum())
    for log_prob, entropy, squared in pool.run(shifts_run, backend, ranks=2):
        np.testing.assert_allclose(squared, np.exp(2 * log_p).sum(), rtol=TINY["float32"])
        np.testing.assert_allclose(log_prob, log_p[0], rtol=TINY["float32"])
        np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(), rtol=CHAIN)


# ---------------------------------------------------------------------------------------------------------------------
# DTensors, data parallelism, FSDP2


def dtensor_run(rank: int, problem: Problem, kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (7,))
    case = problem.case()
    x, w, b = (EAGER.array(value, "float32") for value in (case.hidden, case.weight, case.bias))
    placed = Shard(0) if kind != "replicate" else Replicate()
    w, b = (distribute_tensor(value, mesh, [placed]).requires_grad_() for value in (w, b))
    x = distribute_tensor(x, mesh, [Shard(1) if kind == "sequence" else Replicate()]).requires_grad_()
    loss = linear_cross_entropy(x, w, torch.tensor(case.target), b, reduction="none", z_loss=1e-3, softcap=20.0)
    loss.backward(torch.as_tensor(case.upstream, dtype=loss.dtype))
    for value in (x, w, b):
        assert value.grad.placements == value.placements
    return [EAGER.numpy(value) for value in (loss, *(value.grad.full_tensor() for value in (x, w, b)))]


@pytest.mark.case(26)
@pytest.mark.case(27)
@pytest.mark.parametrize("kind", ["vocabulary", "sequence", "replicate"])
def test_dtensors(pool: Ranks, kind: str) -> None:
    options = LossOptions("none", z_loss=1e-3, softcap=20.0)
    problem = Problem("placed", (3, 14), 8, 61, options=options, bias=True, ignored=0.2)
    expected = truth(problem)
    for made in pool.run(dtensor_run, problem, kind):
        outcome = Outcome(made[0], dict(zip(("hidden", "weight", "bias"), made[1:], strict=True)))
        assert outcome.loss.shape == expected.loss.shape
        assert_within(problem, outcome)


def dtensor_buffer_run(rank: int, deferred: bool) -> Any:
    """dW of a sharded weight into a buffer, or deferred: weight.grad stays None, or comes with compute()."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, rng = init_device_mesh("cpu", (7,)), torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=rng) for shape in ((9, 4), (20, 4)))
    target = torch.arange(9)
    alone = w.clone().requires_grad_()
    linear_cross_entropy(x, alone, target).backward()
    w = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    if deferred:
        loss, handle = linear_cross_entropy(x, w, target, defer_weight_grad=True)
        loss.backward()
        assert w.grad is None
        handle.compute()
        made = w.grad
    else:
        made = torch.zeros_like(w, requires_grad=False)
        linear_cross_entropy(x, w, target, accumulate_into=made).backward()
        assert w.grad is None
    return EAGER.numpy(made.full_tensor()), EAGER.numpy(alone.grad)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_gradient_of_a_dtensor_elsewhere(pool: Ranks, deferred: bool) -> None:
    for made, expected in pool.run(dtensor_buffer_run, deferred):
        assert error(made, expected) <= TINY["float32"]


def on_top_of_a_dtensor_run(rank: int, name: str, sequence: bool) -> Any:
    """Of a loss on top: loss and whole gradients, with a DTensor weight and a plain or a split hidden state."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from logitless import torch_impl

    mesh, case = DeviceMesh.from_group(group_of(2), "cpu"), sequences_case()
    w, b = (distribute_tensor(EAGER.array(case[key], "float32"), mesh, [Shard(0)]) for key in ("weight", "bias"))
    x = EAGER.array(case["hidden"], "float32")
    x = distribute_tensor(x, mesh, [Shard(1)]) if sequence else x
    leaves = [leaf.requires_grad_() for leaf in (x, w, b)]
    names = {"dpo_loss": (), "kto_loss": ("desirable",)}.get(name, ("old_log_prob", "sampler_log_prob", "advantage"))
    known = {key: torch.tensor(case[key]) for key in ("mask", "reference_log_prob", *names)}
    known = {key: value.float() if value.is_floating_point() else value for key, value in known.items()}
    loss = getattr(torch_impl, name)(x, w, torch.tensor(case["target"]), b, **known, **LOSSES_ON_TOP[name])
    grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in torch.autograd.grad(loss, leaves)]
    return [EAGER.numpy(value) for value in (loss, *grads)]


@pytest.mark.case(26)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LOSSES_ON_TOP)
def test_losses_on_top_of_dtensors(pool: Ranks, name: str, sequence: bool) -> None:
    alone = on_top(name, sequences_case(), slice(None), slice(None))
    for made in pool.run(on_top_of_a_dtensor_run, name, sequence, ranks=2):
        for value, expected in zip(made, alone, strict=True):
            assert error(value, expected) <= 4 * TINY["float32"]


def refused_run(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, plane = init_device_mesh("cpu", (7,)), init_device_mesh("cpu", (7, 1))
    x, w, y = torch.randn(7, 4), torch.randn(14, 4), torch.zeros(7, dtype=torch.int64)
    split = distribute_tensor(w, mesh, [Shard(0)])
    said = []
    for hidden, weight, more in (
        (x, distribute_tensor(w[:, :1].expand(14, 7).contiguous(), mesh, [Shard(1)]), {}),
        (x, DTensor.from_local(w, mesh, [Partial()], run_check=False), {}),
        (x, distribute_tensor(w, plane, [Shard(0), Replicate()]), {}),
        (distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()]), {}),
        (DTensor.from_local(x, mesh, [Partial()], run_check=False), split, {}),
        (x, split, {"process_group": group_of(7)}),
        (x, split, {"class_weight": distribute_tensor(torch.ones(14), mesh, [Replicate()])}),
    ):
        with pytest.raises(ValueError, match="allowed is") as caught:
            linear_cross_entropy(hidden, weight, y, **more)
        said.append(str(caught.value))
    return said


@pytest.mark.case(27)
def test_other_placements_are_refused(pool: Ranks) -> None:
    said = pool.run(refused_run)[0]
    words = (
        r"weight: got a DTensor of placement Shard(1), allowed is Shard(0) or Replicate()",
        "weight: got a DTensor of placement Partial",
        "weight: got a DTensor on a mesh of 2 axes",
        "hidden: got a DTensor of placement Shard(0), allowed is Replicate()",
        "hidden: got a DTensor of placement Partial",
        "process_group: got one beside a DTensor weight",
        "class_weight: got a DTensor of placement Replicate(), allowed is Shard(0)",
    )
    for one, expected in zip(said, words, strict=True):
        assert one.startswith(expected)


def batch_of(rank: int) -> tuple[Any, Any]:
    """A rank's tokens: one more than its number. None of rank 2's are valid."""
    rng = np.random.default_rng(rank)
    target = torch.tensor(rng.integers(0, 11, rank + 1))
    return torch.tensor(rng.standard_normal((rank + 1, 6))).float(), target if rank != 2 else target * 0 - 100


def fsdp_run(rank: int, averaged: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    from logitless.torch_impl import LinearCrossEntropy

    torch.manual_seed(0)
    head = LinearCrossEntropy(6, 11)
    fully_shard(head, mesh=init_device_mesh("cpu", (7,)))
    if not averaged:
        head.set_gradient_divide_factor(1.0)
        head.set_force_sum_reduction_for_comms(True)
    x, y = batch_of(rank)
    x.requires_grad_()
    norm = global_normalizer(y, averaged=averaged)
    with CommDebugMode() as counted:
        loss = head(x, y, normalizer=norm)
        loss.backward()
    made = {str(name): number for name, number in counted.get_comm_counts().items()}
    return EAGER.numpy(loss), EAGER.numpy(x.grad), EAGER.numpy(head.weight.grad.full_tensor()), made


@pytest.mark.case(27)
@pytest.mark.case(30)
@pytest.mark.parametrize("averaged", [True, False])
def test_fsdp_with_one_normalizer_over_ragged_batches(pool: Ranks, averaged: bool) -> None:
    from logitless.torch_impl import LinearCrossEntropy

    answers = pool.run(fsdp_run, averaged)
    torch.manual_seed(0)
    head = LinearCrossEntropy(6, 11)
    batches = [batch_of(rank) for rank in range(7)]
    x = torch.cat([hidden for hidden, _ in batches]).requires_grad_()
    loss = head(x, torch.cat([target for _, target in batches]))
    loss.backward()
    scale = 7.0 if averaged else 1.0
    assert error(sum(made[0] for made in answers) / scale, loss.item()) <= TINY["float32"]
    assert error(np.concatenate([made[1] for made in answers]) / scale, x.grad.numpy()) <= TINY["float32"]
    for made in answers:
        assert error(made[2], head.weight.grad.numpy()) <= TINY["float32"]
        # One unshard, one reduction of the gradient, nothing else.
        assert sorted(made[3].values()) == [1, 1], made[3]
        assert ["all_gather" in name or "allgather" in name for name in made[3]].count(True) == 1
        assert ["reduce_scatter" in name for name in made[3]].count(True) == 1
    assert not answers[2][1].any()
    assert answers[2][0] == 0


def cut_by_fsdp_run(rank: int) -> Any:
    """A head outside of its module's forward, on every rank with data of its own: the errors, and the remedy's loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from logitless.torch_impl import LinearCrossEntropy, capture_lm_head, linear_log_probs

    class Model(torch.nn.Module):
        def __init__(self, head: Any) -> None:
            super().__init__()
            self.body, self.lm_head = torch.nn.Linear(6, 6), head

        def forward(self, x: Any, *target: Any) -> Any:
            return self.lm_head(self.body(x), *target)

    mesh, said = init_device_mesh("cpu", (7,)), []
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(6, 14, bias=False))
    alone = copy.deepcopy(model)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    y = torch.tensor([0, 13, *torch.randint(0, 14, (3,), generator=torch.Generator().manual_seed(rank)).tolist()])
    with capture_lm_head(model) as head:
        model(x)
    for call in (linear_cross_entropy, linear_log_probs):
        for hidden, weight in ((x, model.lm_head.weight), (head.hidden, head.weight)):
            try:
                call(hidden, weight, y)
                said.append("no error")
            except ValueError as error:
                said.append(str(error))
    remedy = Model(LinearCrossEntropy(6, 14))
    remedy.load_state_dict(alone.state_dict())
    fully_shard(remedy, mesh=mesh)
    truth = torch.nn.functional.cross_entropy(alone(x), y)
    return said, float(remedy(x, y).detach()), float(truth.detach())


@pytest.mark.case(40)
def test_a_weight_that_fsdp_has_cut_is_no_part_of_a_vocabulary(pool: Ranks) -> None:
    for said, loss, right in pool.run(cut_by_fsdp_run):
        for words in said:
            assert words.startswith("weight: got a parameter that fully_shard (FSDP2) has cut"), words
            assert "LinearCrossEntropy" in words
        assert loss == pytest.approx(right, rel=TINY["float32"])


def tensor_parallel_run(rank: int) -> Any:
    """Plain hidden states, the same on every rank, beside a Shard(0) weight, as Hugging Face's tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in ((9, 4), (21, 4)))
    target = torch.randint(0, 21, (9,), generator=generator)
    alone, x_alone = w.clone().requires_grad_(), x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(x_alone @ alone.T, target).backward()
    w = distribute_tensor(w, init_device_mesh("cpu", (7,)), [Shard(0)]).requires_grad_()
    x.requires_grad_()
    linear_cross_entropy(x, w, target).backward()
    return [EAGER.numpy(g) for g in (x.grad, x_alone.grad, w.grad.full_tensor(), alone.grad)]


@pytest.mark.case(40)
def test_plain_hidden_states_beside_a_part_of_a_vocabulary(pool: Ranks) -> None:
    for dx, true_dx, dw, true_dw in pool.run(tensor_parallel_run):
        assert error(dx, true_dx) <= TINY["float32"]
        assert error(dw, true_dw) <= TINY["float32"]


def normalizer_run(rank: int) -> list[float]:
    target = torch.tensor([rank, -100, 2])[: 3 - rank]
    k = torch.tensor([1.0, 2.0, -4.0, 0.5])
    t = torch.tensor([0.5, 9.0, 1.0])[: 3 - rank]
    group = group_of(2)
    return [
        float(global_normalizer(target, group)),
        float(global_normalizer(target, group, averaged=True)),
        float(global_normalizer(target, group, class_weight=k, token_weight=t)),
        float(global_normalizer(target * 0 - 100, group)),
    ]


def test_normalizer_over_all_ranks(pool: Ranks) -> None:
    assert pool.run(normalizer_run, ranks=2) == [[3.0, 1.5, 0.5 - 4.0 + 0.5 * 2.0, 1.0]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong on one rank is an error on all


def mismatch_run(rank: int, what: str) -> str:
    odd = rank == 1
    x, w, y = torch.randn(6, 4), torch.randn(5 + rank, 4), torch.tensor([0, 1, 2, 3, 4, 5])
    options: dict[str, Any] = {}
    if odd and what == "tokens":
        x, y = x[:4], y[:4]
    elif odd and what == "hidden size":
        x, w = torch.randn(6, 3), torch.randn(6, 3)
    elif odd and what == "dtype":
        x, w = x.double(), w.double()
    elif odd and what == "refused":
        options["normalizer"] = torch.ones(2)
    elif odd and what == "gradient":
        x.requires_grad_()
    elif odd and what == "id":
        y = y + 1000
    elif odd and what == "options":
        options["label_smoothing"] = 0.1
    try:
        linear_cross_entropy(x, w, y, process_group=group_of(4), **options)
    except (TypeError, ValueError) as raised:
        return str(raised)
    return "no error"


MISMATCHES = {
    "tokens": "process_group: the ranks were given 24, 16, 24, 24 as hidden's number of elements",
    "hidden size": "process_group: the ranks were given 24, 18, 24, 24 as hidden's number of elements",
    "dtype": "process_group: the ranks were given different ones as the dtype of hidden",
    "gradient": "process_group: the ranks were given 0, 1, 0, 0 as whether hidden requires grad",
    "id": "process_group: the ranks were given different ones as the target's ids",
    "options": "process_group: the ranks were given different ones as the options",
    "refused": "process_group: rank 1 of the group refused its arguments",
}


def test_a_rank_with_other_arguments_is_an_error_on_every_rank(pool: Ranks) -> None:
    for what, words in MISMATCHES.items():
        said = pool.run(mismatch_run, what, ranks=4)
        if what == "refused":
            assert said.pop(1).startswith("normalizer: got shape (2,)")
        assert all(one.startswith(words) for one in said), (what, said)
    assert pool.run(mismatch_run, "nothing", ranks=4) == ["no error"] * 4


def dying_run(rank: int, how: str) -> float:
    import os
    import time

    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4)
    loss = linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3, 4, 5]), process_group=group_of(3))
    if rank == 1 and how == "dies":
        os._exit(1)
    if rank == 1:
        time.sleep(3)
        raise RuntimeError("away")
    linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3, 4, 5]), process_group=group_of(3)).backward()
    return float(loss)


@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_a_rank_that_is_gone_is_an_error_on_the_others(how: str) -> None:
    with Ranks(3, timeout_s=2, sizes=(3,)) as ranks:
        made = ranks.outcomes(dying_run, how)
    assert [isinstance(value, Failed) for value in made] == [True] * 3
    assert {value.kind for value in (made[0], made[2])} <= {"RuntimeError", "DistBackendError"}


def example_run(rank: int, path: str, ranks: int) -> list[float]:
    import runpy

    from torch.distributed.device_mesh import DeviceMesh

    losses: list[float] = runpy.run_path(path)["train"](DeviceMesh.from_group(group_of(ranks), "cpu"), steps=25)
    return losses


@pytest.mark.case(27)
def test_the_example_learns_the_same_on_any_number_of_ranks(pool: Ranks) -> None:
    path = str(Path(__file__).resolve().parent.parent / "examples" / "torch_sharded_training.py")
    alone, pair = (pool.run(example_run, path, ranks, ranks=ranks) for ranks in (1, 2))
    assert alone[0][0] > 6.5
    assert alone[0][-1] < 3
    assert pair[0] == pair[1]
    np.testing.assert_allclose(pair[0], alone[0], rtol=BOUND["example on two ranks"])
