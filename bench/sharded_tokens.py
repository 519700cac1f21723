"""Log-probabilities with entropy on GPUs that share the vocabulary: ``python -m bench sharded --per-token``.

What AReaL's LM-head capture (pull request 1322) is measured by: ours beside materialised logits, time and memory.

Rows (a variant and a number of ranks; a time is the slowest rank's median):

    logitless      linear_log_probs(with_entropy=True)
    materialised   logits [N, V / ranks] in bfloat16, log p and entropy from them in float32

``difference`` is the largest of a log-probability, in nats, from one GPU's with float32 logits. ``dhidden_difference``
is the norm of dX's difference from the first row's, over dX's norm.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import sharded_torch
from bench.sharded_torch import MIB, Arrays, Shape, difference, slowest, timed_ms
from logitless.torch_impl import linear_log_probs
from logitless.torch_impl.memory import peak_scratch_bytes

Step = Callable[[], tuple[Tensor, ...]]


class Materialised(torch.autograd.Function):
    """log p and entropy of logits that are held; with a group, each rank holds those of its entries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        def together(value: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
            if group is not None:
                dist.all_reduce(value, how, group)
            return value

        z = (x @ w.T).float()
        z -= together(z.amax(1), dist.ReduceOp.MAX)[:, None]
        own = (y >= first) & (y < first + len(w))
        place = torch.where(own, y - first, 0)[:, None]
        target = together(torch.where(own, z.gather(1, place)[:, 0], 0.0))
        p = z.exp()
        total = together(p.sum(1))
        p /= total[:, None]
        lse = total.log()
        entropy = lse - together((p * z).sum(1))
        z -= lse[:, None]
        ctx.save_for_backward(x, w, p, z, own, place, entropy)
        ctx.together = together
        return target - lse, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, w, p, log_p, own, place, entropy = ctx.saved_tensors
        g, h = (value[:, None] for value in upstream)
        dz = -p * (g + h * (log_p + entropy[:, None]))
        dz.scatter_add_(1, place, torch.where(own, upstream[0], 0.0)[:, None])
        dz = dz.to(x.dtype)
        return ctx.together(dz @ w), dz.T @ x, None, None, None


def steps_of(arrays: Arrays, ranks: int) -> dict[str, tuple[Step, Step]]:
    """By variant: the forward, and forward and backward (log p, entropy, dX, dW)."""
    group = arrays.group if ranks > 1 else None
    entries = arrays.entries if ranks > 1 else slice(0, len(arrays.w))
    x, w = arrays.x.detach().requires_grad_(), arrays.w[entries].detach().requires_grad_()
    upstream = torch.randn(2, len(x), device=x.device, generator=torch.Generator(x.device).manual_seed(1))

    def logitless() -> tuple[Tensor, ...]:
        log_prob, entropy = linear_log_probs(x, w, arrays.y, with_entropy=True, process_group=group)
        return log_prob, entropy

    def materialised() -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = Materialised.apply(x, w, arrays.y, entries.start, group)
        return made

    def both(forward: Step) -> tuple[Step, Step]:
        @torch.no_grad()
        def alone() -> tuple[Tensor, ...]:
            return forward()

        def whole() -> tuple[Tensor, ...]:
            values = forward()
            return (*values, *torch.autograd.grad(values, (x, w), tuple(upstream)))

        return alone, whole

    return {"logitless": both(logitless), "materialised": both(materialised)}


def measure(group: Any, shape: Shape, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of one rank, which the others wait for, and of all; every rank calls it, every rank gets them."""
    arrays = Arrays(shape, group, device)
    exact = Materialised.apply(arrays.x.float(), arrays.w.float(), arrays.y, 0, None)[0]
    rows: list[dict[str, Any]] = []
    dhidden = None  # the first row's, on the rank that has one
    for ranks in (1, arrays.ranks):
        idle = ranks == 1 and arrays.rank != 0
        for name, kinds in steps_of(arrays, ranks).items():
            row: dict[str, Any] = {"variant": name, "ranks": ranks, **dataclasses.asdict(shape)}
            for kind, step in zip(("forward", "step"), kinds, strict=True):
                if not idle:
                    made = step()
                times = []
                for _ in range(rounds):
                    dist.barrier(group)
                    times.append(0.0 if idle else timed_ms(step, device))
                row[f"{kind}_ms"] = slowest(statistics.median(times), group, device)
                sizes = 0 if idle else sum(value.nbytes for value in made)
                scratch = 0 if idle else peak_scratch_bytes(step) - sizes
                row[f"{kind}_scratch_mib"] = slowest(scratch / MIB, group, device)
            off = 0.0 if idle else float((made[0].detach() - exact).abs().max())
            dhidden = made[2] if dhidden is None and arrays.rank == 0 else dhidden
            beside = 0.0 if dhidden is None else difference(made[2], dhidden)
            errors = {"difference": off, "dhidden_difference": beside}
            rows.append(row | {key: slowest(value, group, device) for key, value in errors.items()})
    return rows


run = functools.partial(sharded_torch.run, measured=measure)
