"""dW added to a buffer (accumulate_into), and dW made after the backward (defer_weight_grad)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless import plan as make_plan  # noqa: E402
from logitless.tolerances import BOUND, TINY, error  # noqa: E402
from logitless.torch_impl import LinearCrossEntropy, WeightGradQueue, linear_cross_entropy  # noqa: E402
from logitless.torch_impl.memory import peak_scratch_bytes  # noqa: E402

TOKENS, SIZE, VOCAB = 40, 16, 70
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}


def tensors(dtype: Any = torch.float32, device: str = "cpu") -> dict[str, Any]:
    made = torch.Generator().manual_seed(1)
    return {
        "hidden": torch.randn(TOKENS, SIZE, generator=made).to(device, dtype).requires_grad_(),
        "weight": torch.randn(VOCAB, SIZE, generator=made).mul(0.3).to(device, dtype).requires_grad_(),
        "target": torch.randint(0, VOCAB, (TOKENS,), generator=made).to(device),
        "bias": torch.randn(VOCAB, generator=made).to(device, dtype).requires_grad_(),
    }


def sizes(**more: Any) -> Any:
    return make_plan(tokens=TOKENS, hidden=SIZE, vocab=VOCAB, **({"dtype": "float32", "device": "cpu"} | more))


# name → (backend, dtype, dtype of the buffer, further options); the float32 result is the truth to all.
WAYS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "eager": ("eager", torch.float32, torch.float32, OPTIONS),
    "chunks": ("eager", torch.float32, torch.float32, OPTIONS | {"plan": sizes(order="tokens", chunk=16)}),
    "vocab": (
        "eager", torch.float32, torch.float32, OPTIONS | {"softcap": 3.0, "plan": sizes(order="vocab", chunk=30)},
    ),
    "both": ("eager", torch.float32, torch.float32, OPTIONS | {"plan": sizes(order="both", chunk=16)}),
    "none": ("eager", torch.float32, torch.float32, OPTIONS | {"reduction": "none"}),
    "wide": ("eager", torch.bfloat16, torch.float32, OPTIONS),
    "narrow": ("eager", torch.bfloat16, torch.bfloat16, OPTIONS),
    "kernels": ("triton", torch.float32, torch.float32, OPTIONS),
    "kernels, both": (
        "triton", torch.float32, torch.float32, OPTIONS | {"plan": sizes(order="both", chunk=16, fused=True)},
    ),
    "kernels, chunks": (
        "triton", torch.float32, torch.float32,
        OPTIONS | {"plan": sizes(order="tokens", chunk=16, one_pass=False, fused=True)},
    ),
    # On a GPU, where the memory itself adds to a float32 buffer.
    "gpu": ("triton", torch.float32, torch.float32, OPTIONS),
    "gpu, wide": ("triton", torch.bfloat16, torch.float32, OPTIONS),
    "gpu, narrow": ("triton", torch.bfloat16, torch.bfloat16, OPTIONS),
    "gpu, wide, none": ("triton", torch.bfloat16, torch.float32, OPTIONS | {"reduction": "none"}),
    "gpu, wide, chunks": (
        "triton", torch.bfloat16, torch.float32,
        OPTIONS | {"plan": sizes(order="tokens", chunk=16, dtype="bfloat16", fused=True)},
    ),
    "gpu, wide, vocab": (
        "triton", torch.bfloat16, torch.float32,
        OPTIONS | {"softcap": 3.0, "plan": sizes(order="vocab", chunk=32, dtype="bfloat16", fused=True)},
    ),
}  # fmt: skip


def device_of(way: str) -> str:
    return "cuda" if way.startswith("gpu") else "cpu"


def in_way(way: str, *more: Any) -> Any:
    """A parameter that begins with one of WAYS' names."""
    return pytest.param(way, *more, marks=[pytest.mark.gpu] if device_of(way) == "cuda" else [])


def expected(options: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The gradients of the plain call for an upstream gradient of 3."""
    t = tensors(dtype)
    loss = linear_cross_entropy(**t, backend="eager", **{k: v for k, v in options.items() if k != "plan"})
    loss.backward(torch.full_like(loss, 3.0))
    return {name: t[name].grad for name in ("hidden", "weight", "bias")}


def skip_without_triton(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")


def close(made: Any, true: Any, dtype: Any) -> None:
    limit = 4 * TINY["float32"] if dtype == torch.float32 else BOUND["added bfloat16"]
    assert error(made.detach().double().cpu().numpy(), true.detach().double().numpy()) <= limit


@pytest.mark.parametrize("way", [in_way(way) for way in WAYS])
def test_added_to_what_is_there(way: str) -> None:
    backend, dtype, buffer_dtype, options = WAYS[way]
    skip_without_triton(backend)
    t = tensors(dtype, device_of(way))
    start = 0.5 if buffer_dtype == torch.float32 else 0.0  # beside 0.5 bfloat16 has no room for a gradient
    buffer = torch.full((VOCAB, SIZE), start, dtype=buffer_dtype, device=device_of(way))
    loss = linear_cross_entropy(**t, backend=backend, accumulate_into=buffer, **options)
    assert bool((buffer == start).all())  # nothing before the upstream gradient is known
    loss.backward(torch.full_like(loss, 3.0), retain_graph=True)
    true = expected(options, dtype)
    close(buffer - start, true["weight"], dtype)
    for name in ("hidden", "bias"):
        close(t[name].grad, true[name], dtype)
    loss.backward(torch.full_like(loss, 3.0))
    close(buffer - start, 2 * true["weight"], dtype)
    assert t["weight"].grad is None


def test_a_buffer_saves_a_gradient() -> None:
    """Neither forward nor backward makes anything as large as dW. The plain call makes dW itself."""
    x, w = torch.randn(16, 64, requires_grad=True), torch.randn(4000, 64, requires_grad=True)
    y, buffer = torch.zeros(16, dtype=torch.int64), torch.zeros(4000, 64)
    plan = make_plan(tokens=16, hidden=64, vocab=4000, dtype="float32", device="cpu", order="vocab", chunk=512)

    def run(**more: Any) -> None:
        linear_cross_entropy(x, w, y, backend="eager", plan=plan, **more).backward()
        x.grad = w.grad = None

    run()
    assert peak_scratch_bytes(run) > w.numel() * 4
    assert peak_scratch_bytes(lambda: run(accumulate_into=buffer)) < w.numel() * 4 / 2


def test_evaluation_leaves_the_buffer_alone() -> None:
    t, buffer = tensors(), torch.zeros(VOCAB, SIZE)
    with torch.no_grad():
        linear_cross_entropy(**t, accumulate_into=buffer)
    assert not buffer.any()


@pytest.mark.parametrize(
    ("buffer", "kind", "words"),
    [
        (torch.zeros(VOCAB, SIZE + 1), ValueError, "got shape (70, 17), allowed is this rank's weight's (70, 16)"),
        (torch.zeros(VOCAB, SIZE).half(), TypeError, "got dtype torch.float16, allowed are torch.float32 and"),
        (torch.zeros(VOCAB, SIZE, device="meta"), ValueError, "got device meta, allowed is weight's cpu"),
        (torch.zeros(VOCAB, 2 * SIZE)[:, ::2], ValueError, "is not contiguous"),
        ([1.0], TypeError, "got list, allowed is a torch.Tensor"),
    ],
)
def test_other_buffers_are_refused(buffer: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match="accumulate_into: ") as caught:
        linear_cross_entropy(**tensors(), accumulate_into=buffer)
    assert words in str(caught.value)


def test_what_does_not_go_with_a_buffer() -> None:
    t = tensors()
    t["weight"] = t["weight"].detach()
    with pytest.raises(ValueError, match="accumulate_into: got a buffer beside a weight that requires no grad"):
        linear_cross_entropy(**t, accumulate_into=torch.zeros(VOCAB, SIZE))
    low = sizes(order="tokens", chunk=16, dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"plan: got one that adds to dW chunk by chunk beside accumulate_into of torch.bfloat16"
    ):
        linear_cross_entropy(
            **tensors(torch.bfloat16), accumulate_into=torch.zeros(VOCAB, SIZE, dtype=torch.bfloat16), plan=low
        )


@pytest.mark.parametrize(
    ("way", "into"),
    [
        *(in_way(way, into) for way in ("eager", "none", "gpu, wide", "gpu, wide, none") for into in (False, True)),
        *(in_way(way, True) for way in ("vocab", "wide", "gpu, wide, vocab", "gpu, narrow")),
        *(in_way(way, False) for way in ("narrow", "kernels")),
    ],
)
def test_deferred(way: str, into: bool) -> None:
    backend, dtype, buffer_dtype, options = WAYS[way]
    skip_without_triton(backend)
    device = device_of(way)
    t = tensors(dtype, device)
    more = {"accumulate_into": torch.zeros(VOCAB, SIZE, dtype=buffer_dtype, device=device)} if into else {}
    loss, handle = linear_cross_entropy(**t, backend=backend, defer_weight_grad=True, **more, **options)
    loss.backward(torch.full_like(loss, 3.0))
    true = expected(options, dtype)
    close(t["hidden"].grad, true["hidden"], dtype)
    assert t["weight"].grad is None
    assert t["bias"].grad is None
    handle.compute()
    close(t["bias"].grad, true["bias"], dtype)
    if into:
        assert t["weight"].grad is None
        close(more["accumulate_into"], true["weight"], dtype)
    else:
        close(t["weight"].grad, true["weight"], dtype)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("buffer_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deferred", [False, True])
def test_with_lse(backend: str, buffer_dtype: Any, deferred: bool) -> None:
    """Both upstream gradients wait, and those of two backward calls add up."""
    skip_without_triton(backend)
    if (backend, buffer_dtype) == ("triton", torch.bfloat16):
        pytest.skip("Triton's interpreter cuts float32 off where it should round it to bfloat16")
    dtype = torch.bfloat16 if buffer_dtype == torch.bfloat16 else torch.float32
    h = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    plain = tensors(dtype)
    loss, lse = linear_cross_entropy(**plain, return_lse=True, shift=1, backend="eager", **OPTIONS)
    torch.autograd.backward([loss, lse], [torch.tensor(3.0), h])
    t = tensors(dtype)
    into = None if buffer_dtype is None else torch.zeros(VOCAB, SIZE, dtype=buffer_dtype)
    loss, lse, *handle = linear_cross_entropy(
        **t, return_lse=True, shift=1, accumulate_into=into, defer_weight_grad=deferred, backend=backend, **OPTIONS
    )
    for factor, kept in ((0.25, True), (0.75, deferred)):
        torch.autograd.backward([loss, lse], [factor * torch.tensor(3.0), factor * h], retain_graph=kept)
        if not deferred and buffer_dtype == torch.bfloat16:
            break  # a second sum would be rounded twice
    for each in handle:
        each.compute()
    share = 0.25 if not deferred and buffer_dtype == torch.bfloat16 else 1.0
    assert (t["weight"].grad is None) == (into is not None)
    for name in ("hidden", "weight", "bias"):
        made = into if name == "weight" and into is not None else t[name].grad
        close(made, share * plain[name].grad, dtype)


def test_deferred_beside_frozen_hidden_states_and_earlier_gradients() -> None:
    t = tensors()
    t["hidden"] = t["hidden"].detach()
    t["weight"].grad = torch.ones(VOCAB, SIZE)
    loss, stats, handle = linear_cross_entropy(**t, defer_weight_grad=True, return_stats=True, **OPTIONS)
    assert stats.nll.shape == (TOKENS,)
    loss.backward(torch.tensor(1.0), retain_graph=True)
    loss.backward(torch.tensor(2.0))
    handle.compute()
    close(t["weight"].grad - 1, expected(OPTIONS, torch.float32)["weight"], torch.float32)


def test_a_handle_is_for_once_after_a_backward() -> None:
    t = tensors()
    loss, handle = linear_cross_entropy(**t, defer_weight_grad=True)
    with pytest.raises(RuntimeError, match="called before the loss's backward"):
        handle.compute()
    loss.backward()
    handle.compute()
    with pytest.raises(RuntimeError, match="called a second time"):
        handle.compute()
    loss, handle = linear_cross_entropy(**t, defer_weight_grad=True)
    loss.backward()
    with torch.no_grad():
        t["weight"].mul_(2.0)
    with pytest.raises(RuntimeError, match="was changed in place after the backward"):
        handle.compute()
    t["weight"] = t["weight"] * 2
    with pytest.raises(ValueError, match="weight: got a tensor that others were computed into"):
        linear_cross_entropy(**t, defer_weight_grad=True)


def test_the_module_and_a_compiled_function_take_them() -> None:
    head = LinearCrossEntropy(SIZE, VOCAB)
    t, buffer = tensors(), torch.zeros(VOCAB, SIZE)

    def step(hidden: Any, target: Any) -> Any:
        return head(hidden * 1.0, target, accumulate_into=buffer) * 2.0

    head(t["hidden"], t["target"]).mul(2.0).backward()
    torch.compile(step, backend="aot_eager")(t["hidden"], t["target"]).backward()
    close(buffer, head.weight.grad, torch.float32)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of a graph"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(t["hidden"], t["target"])


# ---------------------------------------------------------------------------------------------------------------------
# The queue; tests/test_pipeline.py has it in a pipeline


def microbatch(queue: Any, number: int, weight: Any) -> Any:
    """A loss whose dW is that of ``number``; its weight_grad is in the queue."""
    made = torch.Generator().manual_seed(number)
    hidden = torch.randn(6, SIZE, generator=made).requires_grad_() * 1.0
    loss, weight_grad = linear_cross_entropy(hidden, weight, torch.arange(6), defer_weight_grad=True)
    queue.put(weight_grad)
    return loss, weight_grad, hidden


def total_of(numbers: Iterable[int], weight: Any) -> Any:
    """The sum of the microbatches' gradients, in float64."""
    alone = weight.detach().double().requires_grad_()
    for number in numbers:
        made = torch.Generator().manual_seed(number)
        x = torch.randn(6, SIZE, generator=made).double()
        torch.nn.functional.cross_entropy(x @ alone.T, torch.arange(6)).backward()
    return alone.grad


def test_a_queue_computes_the_oldest_and_holds_no_more_than_its_limit() -> None:
    weight, queue = tensors()["weight"], WeightGradQueue(limit=2)
    losses = [microbatch(queue, number, weight)[0] for number in range(4)]
    assert len(queue) == 0  # no backward has run
    with queue:
        for number in (2, 0):
            losses[number].backward()
        assert (len(queue), weight.grad) == (2, None)
        losses[3].backward()  # the third: the oldest is computed at once
        assert len(queue) == 2
        close(weight.grad, total_of([2], weight), torch.float32)
        assert queue.compute(1) == 1
        close(weight.grad, total_of([2, 0], weight), torch.float32)
        assert (queue.compute(0), len(queue)) == (0, 1)
        losses[1].backward()
    assert len(queue) == 0  # the end has computed the rest
    close(weight.grad, total_of([0, 1, 2, 3], weight), torch.float32)
    assert queue.compute() == 0


def test_a_weight_grad_waits_once_and_leaves_when_it_is_computed() -> None:
    weight, queue = tensors()["weight"], WeightGradQueue(limit=2)
    loss, weight_grad, _ = microbatch(queue, 1, weight)
    for _ in range(2):  # the upstream gradients of two backward calls add up
        loss.backward(torch.tensor(0.5), retain_graph=True)
        assert len(queue) == 1
    queue.put(weight_grad)
    weight_grad.compute()
    assert len(queue) == 0
    close(weight.grad, total_of([1], weight), torch.float32)
    loss.backward()
    assert (len(queue), queue.compute()) == (1, 1)
    close(weight.grad, total_of([1, 1], weight), torch.float32)
    loss, late = linear_cross_entropy(**tensors(), defer_weight_grad=True)
    loss.backward()
    queue.put(late)
    assert len(queue) == 1


def test_an_exception_drops_all_that_wait() -> None:
    """Their gradients are not added, and their hidden states are free. Then the queue is as good as new."""
    weight, queue = tensors()["weight"], WeightGradQueue(limit=3)

    handles = []  # a schedule holds them too

    def fill() -> tuple[list[Any], Any]:
        made = [microbatch(queue, number, weight) for number in range(3)]
        handles.extend(handle for _, handle, _ in made)
        for loss, *_ in made:
            loss.backward()
        assert len(queue) == 3
        return [weakref.ref(hidden) for *_, hidden in made], made[1][2]

    def fail_in_the_block() -> list[Any]:
        with queue:
            held, _ = fill()
            del _
            assert all(reference() is not None for reference in held)
            raise KeyError(held)

    with pytest.raises(KeyError) as caught:
        fail_in_the_block()
    gc.collect()
    assert not any(reference() is not None for reference in caught.value.args[0])
    assert (len(queue), weight.grad) == (0, None)

    def run_backward() -> None:
        for number in range(3):
            microbatch(queue, number, weight)[0].backward()

    for compute in (queue.compute, run_backward):  # the second by more than fit
        weight.grad = None
        _, second = fill()
        queue.compute(1)
        with torch.no_grad():
            second.add_(1.0)
        with pytest.raises(RuntimeError, match="was changed in place after the backward"):
            compute()
        assert len(queue) == 0
        close(weight.grad, total_of([0], weight), torch.float32)
    with queue:
        microbatch(queue, 5, weight)[0].backward()
    close(weight.grad, total_of([0, 5], weight), torch.float32)


def test_what_a_schedule_tries_is_dropped() -> None:
    """Before the first microbatch it runs the loss on made-up data, and asks for no runner. A queue of one has room."""
    weight, queue = tensors()["weight"], WeightGradQueue(limit=1)
    build = queue.dw_builder()
    for _ in range(2):
        torch.autograd.grad(*microbatch(queue, 9, weight)[::2])
    assert len(queue) == 0
    losses, runs = [microbatch(queue, number, weight)[0] for number in (0, 1)], []
    for loss in losses:
        loss.backward()
        runs.append(build())
        assert len(queue) == 1
    close(weight.grad, total_of([0], weight), torch.float32)  # two do not fit
    for run in runs:
        run()
    assert len(queue) == 0
    close(weight.grad, total_of([0, 1], weight), torch.float32)
    loss, *_ = microbatch(queue, 2, weight)
    loss.backward(torch.tensor(0.25), retain_graph=True)
    run = build()
    loss.backward(torch.tensor(0.75))  # once more, before what it left is computed
    microbatch(queue, 3, weight)
    run()
    close(weight.grad, total_of([0, 1, 2], weight), torch.float32)


def test_what_a_queue_refuses() -> None:
    for limit, kind in ((0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(kind, match="limit: got "):
            WeightGradQueue(limit)  # type: ignore[arg-type]
    queue, other = WeightGradQueue(1), WeightGradQueue(1)
    with pytest.raises(TypeError, match="weight_grad: got int, allowed is a DeferredWeightGrad"):
        queue.put(3)  # type: ignore[arg-type]
    weight_grad = microbatch(queue, 0, tensors()["weight"])[1]
    with pytest.raises(ValueError, match="weight_grad: got one of another queue"):
        other.put(weight_grad)
    for count, wrong in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(wrong, match="count: got "):
            queue.compute(count)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Megatron's main_grad


class MegatronHook:
    """What megatron-core's DistributedDataParallel does with overlap_grad_reduce when a parameter's .grad arrives."""

    def __init__(self, parameter: Any) -> None:
        self.ready = 0
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter, dtype=torch.float32), False
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Any) -> None:
        assert parameter.grad is not None, "param.grad being None is not safe when overlap_grad_reduce is True"
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad.data)
        parameter.grad = None
        self.ready += 1


@pytest.mark.case(40)
@pytest.mark.parametrize("zeros", [False, True])
def test_megatrons_hook_sees_a_gradient_that_it_need_not_add(zeros: bool) -> None:
    x, y = torch.randn(6, 4), torch.arange(6)
    weight = torch.nn.Parameter(torch.randn(9, 4))
    alone = weight.detach().clone().requires_grad_()
    hook = MegatronHook(weight)
    if zeros:
        weight.zero_out_wgrad = True
    for _ in range(2):
        weight.grad_added_to_main_grad = False
        linear_cross_entropy(x, weight, y, accumulate_into=weight.main_grad).backward()
        torch.nn.functional.cross_entropy(x @ alone.T, y).backward()
        assert weight.grad_added_to_main_grad
    assert hook.ready == 2
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, alone.grad)
