"""Small steps, where the host's own time counts: ``python -m bench small``.

A step is a loss and all gradients in bfloat16, started back to back as in training, the host's time included. Each
shape has the floor (three bare cuBLAS products), full logits by PyTorch and by torch.compile, our kernels, a CUDA graph
of ours, and log-probabilities; and ours inside torch.compile, with its own CUDA graphs too (mode "reduce-overhead").
``launches`` are kernels and memory fills of one step, counted by the profiler.

``--host`` needs no GPU. Calls choose what they would on a Hopper GPU, and their launches do nothing. ``time_ms`` is
what is left: the median time of PyTorch's and our own code on a CPU. What a GPU would do as a CUDA graph does nothing,
too. "as it runs" is the same without what is repeated (torch_impl/kernels/replay.py), as the first two calls of a kind
are.

``--cpu`` needs no GPU either: the portable paths of both frameworks on a CPU, at the size of a unit test, beside full
logits.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench import portable
from bench.architectures import on_chip
from bench.registry import Results, register
from bench.shapes import Shape, named
from bench.variants import REDUCE_OVERHEAD, Variant, measured_rows

SHAPES = (
    "512x2048x32000", "128x2048x128256", "2048x1024x32768", "256x4096x128256", "8192x2048x8192", "8192x576x49152",
    "1024x896x151936",
)  # fmt: skip
CHIP = "9.0"
# The host's time does not depend on sizes; these are little memory.
HOST_SHAPE = Shape(512, 256, 4096)
CPU_SIZES = portable.Sizes(64, 32, 1000, "float32")


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


def launches_of(step: Callable[[], Any]) -> int:
    """Kernels and memory fills of a step, by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step(), torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(), torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def graph_of(step: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of the step."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def own_steps(arrays: Any) -> dict[str, Any]:
    """Steps of ours by the names of their variants."""
    import torch

    from bench.gpu_torch import Step
    from logitless.torch_impl import linear_log_probs

    ours = functools.partial(arrays.loss, backend="triton")
    upstream = torch.randn(arrays.shape.tokens, device=arrays.x.device)

    def log_probs(entropy: bool) -> Callable[[], Any]:
        def run() -> Any:
            arrays.x.grad = arrays.w.grad = None
            values = linear_log_probs(arrays.x, arrays.w, arrays.y, with_entropy=entropy, backend="triton")
            found = [value for value in values if value is not None]
            torch.autograd.backward(found, [upstream] * len(found))

        return run

    return {
        "triton": arrays.step(ours),
        "triton, log-probs": Step(arrays, log_probs(False)),
        "triton, log-probs and entropy": Step(arrays, log_probs(True)),
        "triton, forward only": arrays.forward(ours),
    }


def compiled_steps(arrays: Any) -> dict[str, Any]:
    """Steps inside torch.compile. The weight is a module's: a CUDA graph copies what is no parameter."""
    import torch

    from bench.gpu_torch import Step, full_logits_float32

    class Head(torch.nn.Module):
        def __init__(self, loss: Callable[..., Any]) -> None:
            super().__init__()
            self.weight, self.loss = arrays.w, loss

        def forward(self, hidden: Any, target: Any) -> Any:
            return self.loss(hidden, self.weight, target)

    def compiled(loss: Callable[..., Any], mode: str | None) -> Callable[[], Any]:
        head = torch.compile(Head(loss), mode=mode)

        def run() -> Any:
            arrays.x.grad = arrays.w.grad = None
            if mode is not None:
                torch.compiler.cudagraph_mark_step_begin()
            value = head(arrays.x, arrays.y)
            value.backward()
            return value

        return run

    ours, graphs = functools.partial(arrays.loss, backend="triton"), REDUCE_OVERHEAD
    return {
        "triton, torch.compile": Step(arrays, compiled(ours, None)),
        f"triton, {graphs}": Step(arrays, compiled(ours, graphs)),
        f"full logits, {graphs}": Step(arrays, compiled(full_logits_float32, graphs)),
    }


def gpu_rows(name: str, rounds: int) -> list[dict[str, Any]]:
    from bench.gpu_torch import Arrays, wait
    from bench.timing import burst_ms

    arrays = Arrays(named(name))
    steps = {"floor": arrays.floor(), **own_steps(arrays), **compiled_steps(arrays)}
    steps |= {name: arrays.step(loss) for name, loss, _ in arrays.peers() if "full logits" in name}

    def variant(step: Any, run: Callable[[], Any], known: bool = True) -> Variant:
        return Variant(step.scratch_bytes if known else lambda: None, lambda: burst_ms(run, wait))

    # A graph of torch.compile's keeps gradients and scratch in memory of its own.
    variants = {key: variant(step, step, REDUCE_OVERHEAD not in key) for key, step in steps.items()}
    ours = steps["triton"]
    variants["triton, CUDA graph"] = variant(ours, graph_of(ours))
    rows = measured_rows(name, named(name), variants, rounds)
    for row in rows:
        if row["variant"] in steps:
            row["launches"] = launches_of(steps[row["variant"]])
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The host alone


class Nothing:
    """A compiled kernel that does nothing; what PyTorch's operations index with becomes zeros."""

    function = packed_metadata = None

    def __init__(self, kernel: Any) -> None:
        written = {"prepare_kernel": "order_ptr", "sort_kernel": "token_ptr", "list_kernel": "listed_token_ptr"}.get(
            kernel.fn.__name__
        )
        self.zeroed = None if written is None else (kernel.arg_names.index(written), kernel.arg_names.index("tokens"))

    def run(self, *launched: Any) -> None:
        if self.zeroed is not None:
            where, tokens = (launched[9:][i] for i in self.zeroed)
            ctypes.memset(where if isinstance(where, int) else where.data_ptr(), 0, 4 * tokens)


def _nothing(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Nothing]:
    def launch(*arguments: Any, **options: Any) -> Nothing:
        made = Nothing(kernel)
        made.run(*[None] * 9, *arguments)
        return made

    return launch


class CachingMemory:
    """Gives the same memory again once nobody has it, as PyTorch's allocator for GPUs does; the CPU's need not."""

    def __init__(self) -> None:
        self.kept: dict[Any, list[Any]] = {}

    def make(self, function: Callable[..., Any], *sizes: Any, **kind: Any) -> Any:
        import torch

        kept = self.kept.setdefault((function, sizes, kind.get("dtype")), [])
        for tensor in kept:
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2:  # by it, and by asking
                return tensor.detach()
        kept.append(function(*sizes, **kind))
        return kept[-1].detach()


def _look_at_nothing(*_: Any) -> None:
    """In place of a look at the ids."""


def _graph_of_nothing(bound: Any, work: Callable[[Any], None], frame: Any, device: Any) -> None:
    """In place of graphs.run."""
    from logitless.torch_impl.kernels.graphs import RUNS_BEFORE

    bound.runs += 1
    if bound.runs < RUNS_BEFORE:
        work(frame)


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Calls on the CPU as on a Hopper GPU, but for launches."""
    import torch
    import triton

    from logitless.torch_impl import checks
    from logitless.torch_impl.kernels import graphs, program, replay

    memory, instead = CachingMemory(), SimpleNamespace(**vars(torch))
    for name in ("empty", "empty_strided"):
        setattr(instead, name, functools.partial(memory.make, getattr(torch, name)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(on_chip(CHIP))
        patch(mock.patch.object(triton.JITFunction, "__getitem__", _nothing))
        patch(mock.patch.object(checks, "check_ids", new=_look_at_nothing))  # on a GPU nobody looks
        patch(mock.patch.object(program, "torch", instead))
        patch(mock.patch.object(graphs, "run", _graph_of_nothing))
        patch(mock.patch.object(replay.settings, "on_cpu", True))
        yield


def median_host_ms(step: Callable[[], Any], repeats: int) -> float:
    """The median time of a step that nobody waits for."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def host_rows(rounds: int) -> list[dict[str, Any]]:
    import torch

    from bench.gpu_torch import Arrays
    from logitless.torch_impl.kernels import replay

    rows, before = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with without_launches():
            arrays = Arrays(HOST_SHAPE)
            compiled = "triton, torch.compile"
            for name, step in (own_steps(arrays) | {compiled: compiled_steps(arrays)[compiled]}).items():
                for variant, off in ((name, False), (f"{name}, as it runs", True)):
                    with mock.patch.object(replay.settings, "off", off):
                        median_host_ms(step, 5)
                        ms = median_host_ms(step, 100 * rounds)
                    row = {**HOST_SHAPE.sizes(), "variant": variant, "time_ms": round(ms, 4)}
                    rows.append(row | {"scratch_bytes": None, "over_floor": None})
    finally:
        torch.set_num_threads(before)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# On a CPU


def cpu_rows(rounds: int) -> list[dict[str, Any]]:
    """A loss and its gradients by the default plan, beside full logits; ``over_full_logits`` is their ratio."""
    rows = []
    for implementation, make in portable.VARIANTS.items():
        variants = [one for one in make(CPU_SIZES) if one.name in ("full logits", "default")]
        for found in portable.measure(implementation, CPU_SIZES, variants, 200 * rounds):
            row = {**dataclasses.asdict(CPU_SIZES), "variant": f"{implementation}, {found['variant']}"}
            row |= {"time_ms": found["time_ms"], "over_full_logits": found["time_over_full_logits"]}
            rows.append(row | {"scratch_bytes": found["scratch_bytes"], "over_floor": None})
    return rows


FILES = {"host": "small_host.json", "cpu": "small_cpu.json", None: "small.json"}


@register(
    "small steps, the host's time included",
    rounds=5,
    shapes=SHAPES,
    file=lambda options: FILES[options.where],
    arguments={
        "--host": {
            "dest": "where", "action": "store_const", "const": "host",
            "help": "without a GPU: the host's time alone, launches left out",
        },
        "--cpu": {
            "dest": "where", "action": "store_const", "const": "cpu",
            "help": "the portable paths on a CPU, at the size of a unit test",
        },
    },
)  # fmt: skip
def run(options: argparse.Namespace, results: Results) -> None:
    if options.where:
        results.add({"host": host_rows, "cpu": cpu_rows}[options.where](options.rounds))
        return
    for name in options.shapes:
        results.add(gpu_rows(name, options.rounds))
