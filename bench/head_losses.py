"""The ways to compute a head's loss that bench/gist.py compares, as loss(x, w, b, y) in PyTorch, side by side."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench import timing
from bench.gist import Sizes
from bench.variants import peer
from logitless.torch_impl import linear_cross_entropy
from logitless.torch_impl.memory import peak_scratch_bytes

Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
IGNORED = -100
# Tokens in a chunk of the gist's two chunked rows.
GIST_CHUNK = 1024


def full_logits(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, w, b).float(), y, ignore_index=IGNORED)


def valid_count(y: Tensor) -> Tensor:
    """The mean's denominator, on the device; 1 where no token counts."""
    return (y != IGNORED).sum().clamp(min=1)


def chunked_with_checkpoint(chunk: int) -> Loss:
    """A chunk's logits are thrown away and made again in the backward: 8·N·D·V flops."""

    def loss(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
        parts = zip(x.split(chunk), y.split(chunk), strict=True)
        sums: list[Any] = [checkpoint(part_of_sum, rows, w, b, ids, use_reentrant=False) for rows, ids in parts]
        return torch.stack(sums).sum() / valid_count(y)

    return loss


def part_of_sum(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
    """The sum of some tokens' losses, through their logits in float32."""
    z = functional.linear(x, w, b).float()
    return functional.cross_entropy(z, y, ignore_index=IGNORED, reduction="sum")


def add_chunk(
    x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, total: Tensor, dw: Tensor, db: Tensor | None
) -> Tensor:
    """dX of a chunk's sum; the sum, dW and db are added to the last three."""
    wanted = (0, 1) if b is None else (0, 1, 2)
    gradients, value = torch.func.grad_and_value(part_of_sum, argnums=wanted)(x, w, b, y)
    total.add_(value)
    dw.add_(gradients[1])
    if db is not None:
        db.add_(gradients[2])
    dx: Tensor = gradients[0]
    return dx


class GradientsInForward(torch.autograd.Function):
    """Every chunk's gradients are made with its loss, 6·N·D·V flops, and wait for the upstream scalar."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, chunk: int, add: Any) -> Tensor:
        count, total = valid_count(y), torch.zeros((), device=x.device)
        dw, db = torch.zeros_like(w), None if b is None else torch.zeros_like(b)
        chunks = zip(x.split(chunk), y.split(chunk), strict=True)
        dx = torch.cat([add(rows, w, b, ids, total, dw, db) for rows, ids in chunks])
        ctx.save_for_backward(*(None if gradient is None else gradient.div_(count) for gradient in (dx, dw, db)))
        return total / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient * upstream for gradient in ctx.saved_tensors)
        return *gradients, None, None, None


def chunked(compiled: bool) -> Loss:
    apply: Any = GradientsInForward.apply
    add = torch.compile(add_chunk) if compiled else add_chunk
    return lambda x, w, b, y: apply(x, w, b, y, GIST_CHUNK, add)


def variants(sizes: Sizes, chunk: int, compiled: bool, budget: int | None) -> dict[str, Loss]:
    """Name → loss(x, w, b, y), a mean over the tokens that count."""
    losses: dict[str, Loss] = {}
    if liger := peer("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"):
        losses["liger lce"] = lambda x, w, b, y: liger(x, w, y, bias=b, ignore_index=IGNORED)
    losses |= {"eager (non-chunked)": full_logits, "eager (chunked)": chunked(False)}
    if compiled:
        losses |= {"compile (non-chunked)": torch.compile(full_logits), "compile (chunked)": chunked(True)}
    losses["chunks, checkpoint"] = chunked_with_checkpoint(chunk)
    losses["logitless"] = lambda x, w, b, y: linear_cross_entropy(x, w, y, b)
    if budget is not None:
        losses[f"logitless, {budget >> 20} MiB"] = lambda x, w, b, y: linear_cross_entropy(
            x, w, y, b, memory_budget=budget
        )
    return losses


def arrays(sizes: Sizes, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x [N, D], w [V, D], b [V] or None, y [N]: random, the same on every machine of a kind."""
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, sizes.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, w = normal(sizes.tokens, sizes.hidden), normal(sizes.vocab, sizes.hidden) * sizes.hidden**-0.5
    b = normal(sizes.vocab).to(dtype).requires_grad_() if sizes.bias else None
    y = torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator, device=device)
    dropped = torch.rand(sizes.tokens, generator=generator, device=device) < sizes.ignored
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), b, y.masked_fill(dropped, IGNORED)


def measure(sizes: Sizes, losses: dict[str, Loss], device: str, rounds: int, seed: int = 0) -> list[dict[str, Any]]:
    """A row for every variant; one that does not fit into the memory has no time."""
    *leaves, y = arrays(sizes, device, seed)
    present = [leaf for leaf in leaves if leaf is not None]
    inputs, gradients = sum(t.nbytes for t in (*present, y)), sum(t.nbytes for t in present)

    def step_of(loss: Loss) -> Callable[[], float]:
        def step() -> float:
            for leaf in present:
                leaf.grad = None
            value = loss(*leaves, y)
            value.backward()
            return float(value.detach())  # waits for the device

        return step

    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], float]] = {}
    for name, loss in losses.items():
        row: dict[str, Any] = {"variant": name, **dataclasses.asdict(sizes), "input_bytes": inputs}
        step = step_of(loss)
        try:
            row["loss"] = step()
            for leaf in present:
                leaf.grad = None
            gc.collect()
            row["scratch_bytes"] = peak_scratch_bytes(step) - gradients
            steps[name] = step
        except torch.OutOfMemoryError as failure:
            row["error"] = str(failure)[:300]
        rows[name] = row
    for name, times in timing.interleaved_ms(steps, rounds).items():
        rows[name] |= {"time_ms": timing.median_ms(times), "times_ms": times}
    return list(rows.values())
