"""The order "both": chunks of tokens for dX, then slices of the vocabulary for dW, and what may lie in dW's memory.

test_agreement.py, test_triton.py and the fuzz hold its results to the rule; here is what is its own.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless import ChunkPlan, plan, reference  # noqa: E402
from logitless.planning import Request, choose  # noqa: E402
from logitless.tolerances import GRADIENT, error  # noqa: E402
from logitless.torch_impl import linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.memory import peak_scratch_bytes  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU"
)
IN_EACH_PLACE = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
# On a GPU several tiles of everything.
SIZES = {"cpu": (100, 64, 700), "cuda": (3000, 512, 9001)}
PARTS = {"cpu": (32, 96, 40, 700 - 512), "cuda": (256, 640, 1024, 9001 - 7680)}
"""Tokens of a chunk, entries of a slice, tokens of a chunk of its sum, entries whose dW is made with dX."""
IN_PARTS = pytest.mark.parametrize("part", ["all later", "a part later", "sums alone"])


def plan_of(device: str, dtype: str = "bfloat16", part: str = "a part later", **different: Any) -> ChunkPlan:
    """A plan that keeps its exponentials in dW's memory, with slices whose dW is a sum."""
    (tokens, hidden, vocab), (chunk, width, few, summed) = SIZES[device], PARTS[device]
    made = plan(tokens=tokens, hidden=hidden, vocab=vocab, dtype=dtype, fused=True, order="both", chunk=chunk)
    lent = {"lends": part != "sums alone", "lends_sums": part == "sums alone"}
    made = dataclasses.replace(made, vocab_chunk=width, weight_tokens=few, **lent, **different)
    made = dataclasses.replace(made, summed=0 if part == "all later" else summed)
    assert made.lent_bytes <= made.room_bytes
    assert all(len(half.token_slices) > 1 for half in made.halves)
    return made


def arrays(device: str, dtype: str = "bfloat16", ignored: float = 0.2) -> list[Any]:
    """hidden, weight, target and bias; hidden states of ignored tokens are no numbers."""
    (tokens, hidden, vocab), random = SIZES[device], torch.Generator().manual_seed(7)
    x, w, b = (torch.randn(*shape, generator=random) for shape in ((tokens, hidden), (vocab, hidden), (vocab,)))
    y = torch.randint(vocab, (tokens,), generator=random)
    y[torch.rand(tokens, generator=random) < ignored] = -100
    x[y == -100] = torch.nan
    made = [values.to(device, getattr(torch, dtype)).requires_grad_() for values in (x, w * hidden**-0.5, b)]
    return [made[0], made[1], y.to(device), made[2]]


def gradients(of: list[Any], chosen: ChunkPlan | None, **options: Any) -> list[Any]:
    """The loss, dX, dW and db, with an upstream gradient that is no power of two."""
    x, w, y, b = of
    function = options.pop("function", linear_cross_entropy)
    made = function(x, w, y, b, plan=chosen, backend="triton", **options)
    made = made[0] if isinstance(made, tuple) else made
    return [made.detach(), *torch.autograd.grad(made, [x, w, b], torch.full_like(made, 0.3))]


CHOSEN = [("everything", "a part later"), ("log-probs", "all later")]
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "everything": {"label_smoothing": 0.1, "softcap": 10.0, "z_loss": 1e-3},
    "none": {"reduction": "none"},
    "log-probs": {"function": linear_log_probs},
}


@pytest.mark.late(where=lambda p: p["device"] == "cpu" and (p["name"], p["part"]) not in CHOSEN)
@IN_EACH_PLACE
@IN_PARTS
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits_in_dws_memory_as_beside_it(name: str, part: str, device: str) -> None:
    of, lent = arrays(device), plan_of(device, part=part)
    beside = dataclasses.replace(lent, lends=False, lends_sums=False)
    for one, other in zip(gradients(of, lent, **OPTIONS[name]), gradients(of, beside, **OPTIONS[name]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.late(where=lambda p: p["device"] == "cpu" and p["dtype"] != "bfloat16")
@IN_EACH_PLACE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_sum_over_chunks_is_rounded_once(dtype: str, device: str) -> None:
    """dW of the order "both" and of "vocab", with few tokens at a time, as exact as with all of them."""
    of, lent = arrays(device, dtype), plan_of(device, dtype, one_pass=dtype != "float16")
    x, w, y, b = (values.detach().cpu() for values in of)
    true = reference.linear_cross_entropy(
        *(v.double().numpy() for v in (torch.nan_to_num(x), w)), y.numpy(), b.double().numpy(), upstream=0.3
    ).weight_grad
    errors = {}
    true_parts = {}
    for few in (0, lent.weight_tokens):
        tiles = {"token_chunk": few or lent.tokens, "order": "vocab", "lends": False, "one_pass": False}
        for order, different in (("both", {"weight_tokens": few}), ("vocab", tiles)):
            made = gradients(of, dataclasses.replace(lent, **different))[2]
            errors[order, few] = error(made.double().cpu().numpy(), true)
            true_parts[order, few] = error(made[lent.later :].double().cpu().numpy(), true[lent.later :])
    for order in ("both", "vocab"):
        assert errors[order, lent.weight_tokens] <= 1.02 * errors[order, 0]
        assert errors[order, 0] <= 2 * GRADIENT[dtype]
    # What is made with dX is no less exact than what is made afterwards.
    assert true_parts["both", 0] <= 1.02 * true_parts["vocab", 0]


@pytest.mark.late(where=lambda p: p["device"] == "cpu" and (p["name"], p["part"]) not in CHOSEN)
@IN_EACH_PLACE
@IN_PARTS
@pytest.mark.parametrize("name", OPTIONS)
def test_the_promise_in_dws_memory(name: str, part: str, device: str) -> None:
    of, chosen = arrays(device, ignored=0.0), plan_of(device, part=part)
    gradients(of, chosen, **OPTIONS[name])
    made: list[Any] = []
    peak = peak_scratch_bytes(lambda: made.extend(gradients(of, chosen, **OPTIONS[name])))
    scratch = peak - sum(values.nbytes for values in made[1:])
    assert scratch <= chosen.scratch_bytes
    beside = dataclasses.replace(chosen, lends=False, lends_sums=False)
    assert chosen.scratch_bytes < beside.scratch_bytes


@IN_EACH_PLACE
def test_a_retained_graph_gives_the_gradients_again(device: str) -> None:
    x, w, y, b = arrays(device)
    loss = linear_cross_entropy(x, w, y, b, plan=plan_of(device), backend="triton")
    once = torch.autograd.grad(loss, [x, w, b], retain_graph=True)
    again = torch.autograd.grad(loss, [x, w, b])
    for one, other in zip(once, again, strict=True):
        assert error(other.double().cpu().numpy(), one.double().cpu().numpy()) <= 2 * GRADIENT["bfloat16"]


@IN_EACH_PLACE
@pytest.mark.parametrize("alone", ["hidden", "weight", "bias"])
def test_one_gradient_alone(alone: str, device: str) -> None:
    of = arrays(device)
    every = dict(zip(("hidden", "weight", "bias"), gradients(of, plan_of(device))[1:], strict=True))
    names = ("hidden", "weight", "", "bias")
    x, w, y, b = (v.detach().requires_grad_(n == alone) if n else v for n, v in zip(names, of, strict=True))
    chosen = plan_of(device) if alone == "weight" else dataclasses.replace(plan_of(device), lends=False)
    (leaf,) = (v for v in (x, w, b) if v.requires_grad)
    loss = linear_cross_entropy(x, w, y, b, plan=chosen, backend="triton")
    (made,) = torch.autograd.grad(loss, [leaf], torch.full_like(loss, 0.3))
    assert torch.equal(made, every[alone])


@pytest.mark.gpu
def test_every_run_gives_the_same_bits_on_a_gpu() -> None:
    """As they are, and repeated as CUDA graphs; also while other work takes multiprocessors away."""
    of, chosen = arrays("cuda"), plan_of("cuda")
    first = gradients(of, chosen)
    matrix, side = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            matrix @ matrix
        for one, other in zip(first, gradients(of, chosen), strict=True):
            assert torch.equal(one, other)
    torch.cuda.synchronize()


def refused(device: str, **options: Any) -> None:
    x, w, y, b = arrays(device)
    with pytest.raises(ValueError, match="plan: got one"):
        linear_cross_entropy(x, w, y, b, plan=plan_of(device), backend="triton", **options)


@IN_EACH_PLACE
def test_a_dw_that_is_somebodys_lends_nothing(device: str) -> None:
    refused(device, accumulate_into=torch.zeros(SIZES[device][2], SIZES[device][1], device=device))


@IN_EACH_PLACE
def test_a_narrow_buffer_takes_no_sum_over_chunks(device: str) -> None:
    x, w, y, b = arrays(device)
    summed = dataclasses.replace(plan_of(device), lends=False)
    buffer = torch.zeros_like(w)
    with pytest.raises(ValueError, match="each chunk would be rounded"):
        linear_cross_entropy(x, w, y, b, plan=summed, backend="triton", accumulate_into=buffer)
    whole = summed.with_whole_slices
    loss = linear_cross_entropy(x, w, y, b, plan=whole, backend="triton", accumulate_into=buffer)
    loss.backward(torch.full_like(loss, 0.3))
    true = gradients([x, w, y, b], whole)[2].double().cpu().numpy()
    assert error(buffer.double().cpu().numpy(), true) <= 2 * GRADIENT["bfloat16"]


@IN_EACH_PLACE
def test_a_wide_buffer_takes_a_sum_over_chunks(device: str) -> None:
    x, w, y, b = arrays(device)
    summed, buffer = dataclasses.replace(plan_of(device), lends=False), torch.zeros_like(w, dtype=torch.float32)
    loss = linear_cross_entropy(x, w, y, b, plan=summed, backend="triton", accumulate_into=buffer)
    loss.backward(torch.full_like(loss, 0.3))
    true = gradients([x, w, y, b], summed)[2].double().cpu().numpy()
    assert error(buffer.double().cpu().numpy(), true) <= 2 * GRADIENT["bfloat16"]


def test_compiled_code_refuses_the_order() -> None:
    x, w = torch.zeros(32, 8, requires_grad=True), torch.zeros(100, 8, requires_grad=True)
    chosen = plan(tokens=32, hidden=8, vocab=100, dtype="float32", order="both", chunk=16)

    def function(x: Any) -> Any:
        return linear_cross_entropy(x, w, torch.zeros(32, dtype=torch.int64), plan=chosen)

    function(x).backward()
    with pytest.raises(Exception, match="plan: got one of order 'both'"):
        torch.compile(function, backend="eager")(x)
    with pytest.raises(ValueError, match="plan: got one of order 'both'"):
        torch.func.grad(function)(x.detach())


# ---------------------------------------------------------------------------------------------------------------------
# The planner


LARGE = [(16384, 4096, 128256), (65536, 4096, 128256), (8192, 2304, 256000), (131072, 2048, 128256)]


def request(sizes: tuple[int, int, int], **more: Any) -> Request:
    return Request(*sizes, "bfloat16", **({"kind": "triton", "lends": True, "frees": True} | more))


@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_the_leanest_plan_needs_next_to_nothing(sizes: tuple[int, int, int]) -> None:
    """At most 140 MiB however many tokens there are, for a little more than 4 / 3 of the time."""
    made = choose(request(sizes, prefer="lean"))
    assert (made.order, made.lends) == ("both", True)
    assert made.scratch_bytes <= 140 * 2**20
    assert made.lent_bytes <= made.room_bytes
    assert made.relative_cost("gpu") <= 1.5
    assert 6 * np.prod(sizes, dtype=np.int64) < made.flops <= 8 * np.prod(sizes, dtype=np.int64)
    own = choose(request(sizes, prefer="lean", frees=False, lends=False))
    assert own.order != "both"
    assert own.scratch_bytes > 2 * made.scratch_bytes


def test_a_larger_budget_is_never_slower() -> None:
    budgets = [int(40 * 2**20 * 1.3**step) for step in range(20)]
    costs = [choose(request(LARGE[0], memory_budget=budget)).relative_cost("gpu") for budget in budgets]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_sums_that_are_made_before_take_longer() -> None:
    """So the order is no answer to "lean" there, and a small budget has to ask for it."""
    late = request(LARGE[0], one_pass=False)
    assert choose(dataclasses.replace(late, prefer="lean")).order == "vocab"
    made = choose(dataclasses.replace(late, memory_budget=45 * 2**20))
    assert made.order == "both"
    assert made.flops == 8 * np.prod(LARGE[0], dtype=np.int64) + 2 * 16384 * 4096 * made.later


@pytest.mark.parametrize("kind", ["eager", "xla", "pallas", "triton"])
def test_halves_say_what_they_are(kind: Any) -> None:
    made = dataclasses.replace(choose(request((1000, 64, 5000), kind=kind, order="both", chunk=200)), weight_tokens=300)
    first, second = made.halves
    assert (first.order, first.one_pass, first.chunks) == ("tokens", True, 5)
    assert (second.order, second.one_pass, len(second.token_slices)) == ("vocab", False, 4)
    assert made.scratch_bytes == max(first.scratch_bytes, second.scratch_bytes)
    assert len(made.with_whole_slices.for_weight.token_slices) == 1
