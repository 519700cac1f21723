"""A step of a million tokens, and one with a vocabulary of a million: ``python -m bench long --output DIR``.

Writes DIR/long.json, or with ``--framework jax`` DIR/long_jax.json. The time of a step of N × D × V is linear in each
where ``tflops``, 6·N·D·V over the time, does not change. Each shape runs by the default plan and within a fixed
``--budget``; a shape whose N × V is past 2³² also in one chunk.

Checked is what lies at the largest offsets, beside 64 tokens from everywhere: the loss; dX of the last 64 tokens; dW of
the last 64 entries of the vocabulary (``last_rows``) and of the last tokens' targets (``target_rows``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bench.registry import Results, register
from bench.shapes import MIB, named
from bench.timing import burst_ms

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu import Arrays, Step
    from logitless import ChunkPlan

SHAPES = ("65536x2048x128256", "262144x2048x128256", "1048576x2048x128256", "8192x1024x262144", "8192x1024x1048576")
# Of a million tokens: dX waits with 8 bits more per element in PyTorch, and in float32 in JAX.
BUDGETS = {"torch": 3 << 30, "jax": 10 << 30}
CHECKED = 64


def plans(arrays: Arrays, backend: str, budget: int) -> dict[str, ChunkPlan]:
    from bench.gpu import planner

    planned, shape = planner(arrays, backend), arrays.shape
    made = {"default": planned(), f"{budget // MIB} MiB": planned(memory_budget=budget)}
    if shape.tokens < 1 << 16 and shape.tokens * shape.vocab > 1 << 32:
        made["one chunk"] = planned(order="tokens", chunk=shape.tokens, lends=False)
    return made


def in_torch(values: Any) -> Any:
    """Arrays of either framework as PyTorch's, without copies."""
    import torch

    if isinstance(values[0], torch.Tensor):
        return [value.detach() for value in values]
    from logitless.interop import to_torch

    return to_torch(tuple(values))


def results_of(arrays: Arrays, step: Step) -> list[Tensor]:
    """Loss, dX and dW."""
    made: Any = step()
    if isinstance(made, tuple):
        loss, (dx, dw) = made
        return list(in_torch((loss, dx, dw)))
    return list(in_torch((made, arrays.x.grad, arrays.w.grad)))  # type: ignore[attr-defined]


class Sample:
    """The truth of the places that are checked."""

    def __init__(self, arrays: Arrays) -> None:
        import torch

        from bench.truth import truth_and_ideal

        x, w, y = in_torch((arrays.x, arrays.w, arrays.y))  # type: ignore[attr-defined]
        y, self.tokens = y.long(), len(x)
        spread = torch.linspace(0, len(x) - 1, CHECKED, device=x.device).long()
        last = torch.arange(max(0, len(x) - CHECKED), len(x), device=x.device)
        self.rows = torch.cat([spread, last]).unique()
        ends = torch.arange(max(0, len(w) - CHECKED), len(w), device=x.device)
        self.columns, self.ends = torch.cat([ends, y[last]]), len(ends)
        ones = torch.ones(len(x), device=x.device)
        truth, ideal = truth_and_ideal(x, w, y, ones, self.rows, self.columns)
        self.truth, self.ideal = self._parts(truth), self._parts(ideal)

    def _parts(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        dweight = made["dweight"]
        return {
            "loss": made["loss"].sum(),
            "dhidden": made["dhidden"],
            "last_rows": dweight[: self.ends],
            "target_rows": dweight[self.ends :],
        }

    def errors(self, loss: Tensor, dx: Tensor, dw: Tensor) -> dict[str, Any]:
        from bench.truth import compared, passes

        made = self._parts({"loss": loss, "dhidden": dx[self.rows], "dweight": dw[self.columns]})
        fields = compared(made, self.truth, self.ideal, self.tokens)
        return fields | {"passes": passes(fields)}


def measure(arrays: Arrays, steps: dict[str, tuple[Step, ChunkPlan]]) -> Iterator[dict[str, Any]]:
    """Rows as they are made."""
    sample, shape = Sample(arrays), arrays.shape
    for name, (step, chosen) in steps.items():
        row = shape.sizes() | {"variant": name, "order": chosen.order, "chunks": chosen.chunks}
        row |= {"scratch_bytes": step.variant().scratch_bytes(), "promised_bytes": chosen.scratch_bytes}
        row["time_ms"] = burst_ms(step, lambda step=step: arrays.wait([step]))[0]
        row["tflops"] = 6 * shape.tokens * shape.hidden * shape.vocab / row["time_ms"] / 1e9
        yield row | sample.errors(*results_of(arrays, step))


@register(
    "a million tokens, a vocabulary of a million: time, scratch, and what lies at the largest offsets",
    file=lambda options: "long_jax.json" if options.framework == "jax" else "long.json",
    framework="torch",
    shapes=list(SHAPES),
    arguments={
        "--budget": {"type": int, "metavar": "MIB", "help": "default: 3072 in PyTorch, 10240 in JAX"},
        "--backend": {"help": "default: the kernels"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    from bench import gpu

    budget = BUDGETS[options.framework] if options.budget is None else options.budget * MIB
    problems = []
    for name in options.shapes:
        arrays = gpu.arrays_of(options.framework, named(name))
        backend = options.backend or arrays.kernels
        chosen = plans(arrays, backend, budget)
        problems.append((arrays, {name: (gpu.step_of(arrays, plan, backend), plan) for name, plan in chosen.items()}))
    # All at once: what takes longest is compiling.
    problems[0][0].prepare(step for _, steps in problems for step, _ in steps.values())
    for arrays, steps in problems:
        for row in measure(arrays, steps):
            results.add([{"framework": options.framework} | row])
