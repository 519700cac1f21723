"""The head over several ranks beside one device, in PyTorch: what ``python -m bench sharded`` measures, in one run.

A process for every rank; NCCL where there are GPUs, gloo with --cpu.

Rows (one a variant, from rank 0; a time is the slowest rank's median):

    alone       the whole head on one device, the other ranks idle
    tensor      the vocabulary over the ranks, hidden on every rank
    sequence    the same with sequence parallelism
    data        weak scaling: every rank the whole head and as many tokens as ``alone``, dW summed over the ranks
                when it is there, beside nothing
    model       the head behind BODY linear layers on one device; scratch: activations and gradients too
    model, data the same on every rank under DistributedDataParallel, which sums beside the rest of the backward
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.registry import Results
from bench.shapes import named
from bench.sharded import powers_of_two
from logitless.torch_impl import LinearCrossEntropy, global_normalizer, linear_cross_entropy
from logitless.torch_impl.memory import peak_scratch_bytes

MIB = 2**20
# What runs on one device, and is what the variants after it are held against.
ALONE = ("alone", "model")
STEPS = 4  # in a timed round
BODY = 8  # linear layers [D, D] before the head, where a whole model is timed


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"


# Of a group, a shape, rounds and a device: the rows that this group's ranks measure.
Measure = Callable[[Any, Shape, int, torch.device], list[dict[str, Any]]]


class _Model(nn.Module):
    def __init__(self, body: nn.Module, head: LinearCrossEntropy) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.body(x), y)
        return loss


class Arrays:
    """The whole problem, the same on every rank, and this rank's part of it."""

    def __init__(self, shape: Shape, group: Any, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, shape.dtype)

        def normal(rows: int, scale: float) -> torch.Tensor:
            return (torch.randn(rows, shape.hidden, device=device, generator=generator) * scale).to(dtype)

        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.x, self.w = normal(shape.tokens, 1.0), normal(shape.vocab, shape.hidden**-0.5)
        self.y = torch.randint(0, shape.vocab, (shape.tokens,), device=device, generator=generator)
        size = -(-shape.vocab // self.ranks)
        self.entries = slice(self.rank * size, min((self.rank + 1) * size, shape.vocab))
        share = shape.tokens // self.ranks
        self.tokens = slice(self.rank * share, (self.rank + 1) * share)

    def model_step(self, variant: str) -> Callable[[], tuple[Any, Any, Any]]:
        """The head behind BODY layers, alone or under DistributedDataParallel, whose sums run beside the backward."""
        size = self.x.shape[1]
        like: dict[str, Any] = {"device": self.x.device, "dtype": self.x.dtype}
        torch.manual_seed(0)
        body = [layer for _ in range(BODY) for layer in (nn.Linear(size, size, bias=False, **like), nn.Tanh())]
        head = LinearCrossEntropy(size, len(self.w), **like)
        head.weight = nn.Parameter(self.w.clone())
        model = _Model(nn.Sequential(*body), head)
        run_model: Any = model
        if variant == "model, data":
            run_model = DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)

        def run() -> tuple[Any, Any, Any]:
            model.zero_grad()
            loss = run_model(self.x, self.y)
            loss.backward()
            return loss, body[0].weight.grad, head.weight.grad

        return run

    def step(self, variant: str) -> Callable[[], tuple[Any, Any, Any]]:
        """A forward and a backward: loss, gradient of hidden (or of the first layer's weight), gradient of weight."""
        if variant.startswith("model"):
            return self.model_step(variant)
        tensor = variant in ("tensor", "sequence")
        x = self.x[self.tokens] if variant == "sequence" else self.x
        w = self.w[self.entries] if tensor else self.w
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        options: dict[str, Any] = {}
        if tensor:
            options = {"process_group": self.group, "sequence_parallel": variant == "sequence"}

        def run() -> tuple[Any, Any, Any]:
            if variant == "data":
                options["normalizer"] = global_normalizer(self.y, self.group)
            loss = linear_cross_entropy(x, w, self.y, **options)
            dx, dw = torch.autograd.grad(loss, (x, w))
            if variant == "data":
                dist.all_reduce(dw, group=self.group)
            return loss, dx, dw

        return run

    def errors(self, variant: str, results: tuple[Any, Any, Any], alone: tuple[Any, Any, Any]) -> dict[str, float]:
        """Relative difference of a rank's results from one device's."""
        rows = self.tokens if variant == "sequence" else slice(None)
        parts = alone[0], alone[1][rows], alone[2][self.entries if variant in ("tensor", "sequence") else slice(None)]
        if variant == "data":  # the ranks have the same tokens: together the mean is over each of them R times
            parts = alone[0] / self.ranks, alone[1] / self.ranks, alone[2]
        names = ("loss", "dhidden", "dweight")
        pairs = zip(names, results, parts, strict=True)
        return {name: difference(one.detach(), other.detach()) for name, one, other in pairs}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """‖one − other‖ / ‖other‖, on the device, where the arrays are large."""
    norm = torch.linalg.vector_norm
    one, other = one.reshape(-1), other.reshape(-1)
    return float(norm(one - other, dtype=torch.float64) / norm(other, dtype=torch.float64))


def slowest(value: float, group: Any, device: torch.device) -> float:
    """The largest of the ranks' values."""
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    return float(held)


def timed_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Of one of STEPS runs in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / STEPS


def measure(group: Any, shape: Shape, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """All rows of ``shape`` on this group of ranks; every rank calls it, every rank gets them."""
    arrays = Arrays(shape, group, device)
    variants = ("alone", "tensor", "sequence", "data", "model", "model, data")
    steps = {name: arrays.step(name) for name in variants}
    errors = {}
    for name in variants:
        if name in ALONE:
            alone = steps[name]()
        else:
            errors[name] = arrays.errors(name, steps[name](), alone)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in variants:
            dist.barrier(group)
            idle = name in ALONE and arrays.rank != 0
            times[name].append(0.0 if idle else timed_ms(steps[name], device))
    rows = []
    for name in variants:
        sizes = [value.nbytes for value in steps[name]()]
        scratch = max(0, peak_scratch_bytes(steps[name]) - sum(sizes))
        row: dict[str, Any] = {"framework": "torch", "variant": name, "ranks": arrays.ranks, "plan": "balanced"}
        row |= dataclasses.asdict(shape)
        row["time_ms"] = slowest(statistics.median(times[name]), group, device)
        row["scratch_mib"] = slowest(scratch / MIB, group, device)
        row["weight_mib"] = slowest(sizes[2] / MIB, group, device)
        worst = {key: slowest(value, group, device) for key, value in errors.get(name, {}).items()}
        row["difference_from_alone"] = worst
        rows.append(row)
    for row in rows:
        if row["variant"] in ALONE:
            one = row["time_ms"]
        ratio = one / row["time_ms"] if row["time_ms"] else 0.0
        # Of a perfect split: R times as fast; in weak scaling: as fast.
        row["speedup"] = ratio
        row["efficiency"] = ratio / arrays.ranks if row["variant"] in ("tensor", "sequence") else ratio
    return rows


def rank_rows(
    rank: int, ranks: int, store: str, shape: Shape, rounds: int, cpu: bool, measured: Measure, answer: Any
) -> None:  # fmt: skip
    """One rank, in a process of its own; the first one answers."""
    device = torch.device("cpu" if cpu else f"cuda:{rank}")
    if not cpu:
        torch.cuda.set_device(device)
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = measured(dist.group.WORLD, shape, rounds, device)
    if rank == 0:
        answer.put(rows)
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch's profiler keeps the group, and with it gloo's threads. If one of them drops a tensor while Python ends,
    # the process is aborted.
    os._exit(0)


def rows_of(ranks: int, shape: Shape, rounds: int, cpu: bool, measured: Measure) -> list[dict[str, Any]]:
    """Start the ranks, and return the rows that ``measured`` gives them."""
    with tempfile.TemporaryDirectory() as folder:
        answer: Any = processes.get_context("spawn").SimpleQueue()
        arguments = (ranks, str(Path(folder) / "store"), shape, rounds, cpu, measured, answer)
        processes.spawn(rank_rows, arguments, ranks, join=True)
        rows: list[dict[str, Any]] = answer.get()
        return rows


def run(options: argparse.Namespace, results: Results, measured: Measure = measure) -> None:
    for ranks in options.devices or powers_of_two(2 if options.cpu else torch.cuda.device_count()):
        for name in options.shapes:
            sizes = named(name)
            shape = Shape(sizes.tokens, sizes.hidden, sizes.vocab, options.dtype)
            results.add(rows_of(ranks, shape, options.rounds or 5, options.cpu, measured))
