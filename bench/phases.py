"""Forward and backward apart: ``python -m bench phases --output DIR`` writes DIR/phases.json.

What Megatron's fused linear cross-entropy (pull request 2256) reports, at its sizes and for several implementations.

``rows``      the median times of forward, backward and both, by CUDA's events, with gradients in both arguments. Bytes
              beyond the inputs, as the allocator saw them: the forward's peak (``forward_bytes``), what waits between
              forward and backward (``held_bytes``, with gradients that the forward has made), the peak of both
              (``peak_bytes``), and that peak beyond the gradients (``scratch_bytes``) beside the plan's promise. Ours
              also in 1 to 32 chunks, of the tokens and of the vocabulary; with a loss per token; and with every second
              token padding.
``checks``    errors of ours against float64, beside what is allowed, for both dtypes, every reduction and two values of
              ``ignore_index``. A quarter of the tokens is ignored. ``padding_is_zero``: their gradient is 0.
``launches``  other numbers of tokens in one process: the first call by the host's clock, and the times of later ones.

Runs on a CUDA device, or at small sizes with ``--backend eager`` on a CPU. Sizes are tokens, hidden and vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.registry import SHARED, Results, register
from bench.shapes import Shape, named
from bench.variants import described

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu_torch import Arrays
    from logitless import ChunkPlan

CHUNKS = (1, 2, 4, 8, 16, 32)
CHECKS = ("80x64x125", "80x64x152064", "1024x4096x152064", "4096x8192x152063", "8192x8192x152064")
LAUNCHES = tuple(f"{tokens}x4096x152064" for tokens in (15, 26, 128, 513, 2048, 8192))
IGNORE_INDEXES = (-100, 4)
# Peers that try out much before they run.
SLOW_TO_START = ("QuACK", "CuTe")
WARM_S, REPEATS = 0.3, 6


@dataclasses.dataclass(frozen=True)
class Way:
    """A loss of (x, w, y), a scalar or one per token, its plan if it is ours, and its target if tokens are padding."""

    loss: Callable[..., Any]
    plan: ChunkPlan | None = None
    target: Any = None


def ways(arrays: Arrays, backend: str, peers: bool) -> dict[str, Way]:
    """By name: ours by its default plan, per token, with padding and by the number of chunks; and the peers."""
    from bench.gpu import planner

    loss, planned = functools.partial(arrays.loss, backend=backend), planner(arrays, backend)
    default, none = planned(), planned(one_pass=False)
    mean, tokens = functools.partial(loss, plan=default), functools.partial(loss, plan=none, reduction="none")
    made = {
        backend: Way(mean, default),
        f"{backend}, half padding": Way(mean, default, arrays.half_ignored()),
        f"{backend}, per token": Way(tokens, none),
        f"{backend}, per token, half padding": Way(tokens, none, arrays.half_ignored()),
    }
    for order, length in (("tokens", arrays.shape.tokens), ("vocab", arrays.shape.vocab)):
        for chunks in CHUNKS:
            chosen = planned(order=order, chunk=-(-length // chunks), lends=False)
            made[f"{backend}, {order} in {chunks} chunks"] = Way(functools.partial(loss, plan=chosen), chosen)
    if peers:
        made |= {name: Way(f) for name, f, _ in arrays.peers() if not any(word in name for word in SLOW_TO_START)}
        for name, values in arrays.token_peers().items():
            made[f"{name}, per token"] = Way(lambda x, w, y, values=values: values(x, w, y)[0])
    return made


class Step:
    """A step in its two phases. The gradients are dropped before each forward."""

    def __init__(self, arrays: Arrays, way: Way) -> None:
        import torch

        self.arrays, self.way = arrays, way
        generator = torch.Generator(arrays.x.device).manual_seed(1)
        self.upstream = torch.randn(len(arrays.y), device=arrays.x.device, generator=generator)

    def forward(self) -> Tensor:
        self.drop()
        target = self.arrays.y if self.way.target is None else self.way.target
        loss: Tensor = self.way.loss(self.arrays.x, self.arrays.w, target)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward(self.upstream[: len(loss)].to(loss.dtype) if loss.dim() else None)

    def drop(self) -> None:
        self.arrays.x.grad = self.arrays.w.grad = None

    def times_ms(self, warm_s: float = WARM_S, repeats: int = REPEATS) -> dict[str, float]:
        """Medians of steps in a row, after untimed ones that settle the clock."""
        from bench.gpu_torch import wait

        begin = time.perf_counter()
        while time.perf_counter() - begin < warm_s:
            self.backward(self.forward())
            wait()
        marks = []
        for _ in range(repeats):
            marks.append([mark()])
            loss = self.forward()
            marks[-1].append(mark())
            self.backward(loss)
            marks[-1].append(mark())
        wait()
        phases = {"forward_ms": (0, 1), "backward_ms": (1, 2), "both_ms": (0, 2)}
        return {
            name: statistics.median(between_ms(each[first], each[last]) for each in marks)
            for name, (first, last) in phases.items()
        }

    def bytes(self) -> dict[str, int]:
        """Of one step, beyond the inputs. Before it two others run, for what a first call allocates and keeps."""
        import torch

        from logitless.torch_impl.memory import peak_scratch_bytes

        x, w = self.arrays.x, self.arrays.w
        for _ in range(2):
            self.backward(self.forward())
        self.drop()
        forward = peak_scratch_bytes(self.forward)
        # Beside as much memory as the forward's peak, what it holds at its end is the peak.
        held = peak_scratch_bytes(lambda: (self.forward(), torch.empty(forward, dtype=torch.uint8, device=x.device)))
        peak = peak_scratch_bytes(lambda: self.backward(self.forward()))
        self.drop()
        return {
            "forward_bytes": forward,
            "held_bytes": held - forward,
            "peak_bytes": peak,
            "scratch_bytes": peak - x.nbytes - w.nbytes,
        }


def mark() -> Any:
    """A point in time, of the device's work where there is one."""
    from bench.gpu_torch import DEVICE

    if DEVICE != "cuda":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(first: Any, last: Any) -> float:
    return (last - first) * 1e3 if isinstance(first, float) else first.elapsed_time(last)


def row_of(arrays: Arrays, name: str, way: Way, kind: type[Step] = Step) -> dict[str, Any]:
    row: dict[str, Any] = {**arrays.shape.sizes(), "variant": name}
    if way.plan is not None:
        row |= {"order": way.plan.order, "chunks": way.plan.chunks, "promised_bytes": way.plan.scratch_bytes}
    step = kind(arrays, way)
    try:
        row |= step.bytes()
        row |= step.times_ms()
    except Exception as failure:  # a peer may fail in its own way
        row["error"] = described(failure)
    step.drop()
    return row


def floor_row(arrays: Arrays, products: Callable[[], object]) -> dict[str, Any]:
    from bench.gpu_torch import event_ms

    return {**arrays.shape.sizes(), "variant": "floor", "both_ms": statistics.median(event_ms(products))}


def checks(shape: Shape, dtype: str, backend: str) -> Iterator[dict[str, Any]]:
    """A row for every reduction and value of ``ignore_index``. Mean and sum have one truth."""
    import torch

    from bench.gpu_torch import Arrays
    from bench.truth import IGNORED, compared, passes, truth_and_ideal

    arrays = Arrays(shape, getattr(torch, dtype))
    x, w, y = arrays.x, arrays.w, arrays.y.clamp(min=max(IGNORE_INDEXES) + 1)
    kept = torch.arange(len(y), device=y.device) % 4 != 3
    for reductions in (("mean", "sum"), ("none",)):
        upstream = torch.randn(len(y), device=y.device) if reductions == ("none",) else torch.ones_like(y).float()
        truth, ideal = truth_and_ideal(x, w, torch.where(kept, y, IGNORED), upstream)
        if reductions != ("none",):
            truth["loss"] = ideal["loss"] = truth["loss"].sum()
        for reduction in reductions:
            for ignore_index in IGNORE_INDEXES:
                x.grad = w.grad = None
                target = torch.where(kept, y, ignore_index)
                loss = arrays.loss(x, w, target, reduction=reduction, ignore_index=ignore_index, backend=backend)
                loss.backward(upstream if reduction == "none" else None)
                assert x.grad is not None
                assert w.grad is not None
                outputs = {"loss": loss.detach(), "dhidden": x.grad, "dweight": w.grad}
                errors = compared(outputs, truth, ideal, int(kept.sum()) if reduction == "mean" else 1)
                zero = not x.grad[~kept].any()
                row = shape.sizes() | {"dtype": dtype, "reduction": reduction, "ignore_index": ignore_index}
                yield row | errors | {"padding_is_zero": zero, "passes": passes(errors) and zero}


def launch_row(shape: Shape, backend: str) -> dict[str, Any]:
    from bench.gpu_torch import Arrays, wait

    arrays = Arrays(shape)
    step = Step(arrays, Way(functools.partial(arrays.loss, backend=backend)))
    wait()
    start = time.perf_counter()
    step.backward(step.forward())
    wait()
    first = {"first_ms": (time.perf_counter() - start) * 1e3}
    gradients = [tensor.grad for tensor in (arrays.x, arrays.w) if tensor.grad is not None]
    finite = len(gradients) == 2 and all(bool(gradient.isfinite().all()) for gradient in gradients)
    return shape.sizes() | {"variant": backend} | first | step.times_ms() | {"finite": finite}


@register(
    "forward and backward apart, memory by the number of chunks, and correctness, at Megatron's sizes",
    shapes=["4096x7168x129280"],
    peers=True,
    arguments={
        "--checks": {**SHARED["shapes"], "default": list(CHECKS), "help": "shapes whose results are checked"},
        "--launches": {**SHARED["shapes"], "default": list(LAUNCHES), "help": "shapes that are launched one by one"},
        "--backend": {"default": "triton", "choices": ("triton", "eager"), "help": "ours"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    from bench.gpu import forget
    from bench.gpu_torch import Arrays

    for name in options.shapes:
        arrays = Arrays(named(name))
        results.add([floor_row(arrays, arrays.floor().run)])
        for variant, way in ways(arrays, options.backend, options.peers).items():
            results.add([row_of(arrays, variant, way)])
            forget("torch")
        del arrays
    for name in options.launches:
        results.add([launch_row(named(name), options.backend)], "launches")
    for name in options.checks:
        for dtype in ("bfloat16", "float16"):
            for row in checks(named(name), dtype, options.backend):
                results.add([row], "checks")
            forget("torch")
