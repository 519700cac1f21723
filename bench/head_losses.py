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


def full_logits(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, w, b).float(), y, ignore_index=IGNORED)


def valid_count(y: Tensor) -> Tensor:
    """The mean's denominator, on the device; 1 where no token counts."""
    return (y != IGNORED).sum().clamp(min=1)


def chunked_with_checkpoint(chunk: int) -> Loss:
    """A chunk's logits are thrown away and made again in the backward: 8·N·D·V flops."""

    def part(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
        z = functional.linear(x, w, b).float()
        return functional.cross_entropy(z, y, ignore_index=IGNORED, reduction="sum")

    def loss(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
        parts = zip(x.split(chunk), y.split(chunk), strict=True)
        sums: list[Any] = [checkpoint(part, rows, w, b, ids, use_reentrant=False) for rows, ids in parts]
        return torch.stack(sums).sum() / valid_count(y)

    return loss


class GradientInForward(torch.autograd.Function):
    """Every chunk's gradients are made with its loss, 6·N·D·V flops, and wait for the upstream scalar.

    With ``narrow`` as Liger does it: the logits' gradient in the input dtype, in the logits' place, and dW summed in
    the weight's dtype. Without: the logits' gradient in float32 until it enters the products, and dW's chunks summed in
    float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, chunk: int, narrow: bool) -> Tensor:
        count, total = valid_count(y), torch.zeros((), device=x.device)
        sum_dtype = w.dtype if narrow else torch.float32
        dx, dw = torch.empty_like(x), torch.zeros_like(w, dtype=sum_dtype)
        db = None if b is None else torch.zeros_like(b, dtype=sum_dtype)
        for start in range(0, len(y), chunk):
            rows, ids = x[start : start + chunk], y[start : start + chunk]
            counts, safe = ids != IGNORED, ids.clamp(min=0).unsqueeze(1)
            z = functional.linear(rows, w, b)
            log_p = torch.log_softmax(z.float(), dim=1)
            total -= log_p.gather(1, safe).squeeze(1).masked_fill(~counts, 0.0).sum()
            dz = log_p.exp_()
            dz.scatter_add_(1, safe, torch.full_like(safe, -1, dtype=dz.dtype))
            dz.masked_fill_(~counts.unsqueeze(1), 0.0).div_(count)
            if narrow:
                dz = z.copy_(dz)
            dx[start : start + chunk] = dz.to(x.dtype) @ w
            dw += dz.to(x.dtype).t() @ rows
            if db is not None:
                db += dz.sum(dim=0)
        ctx.save_for_backward(dx, dw.to(w.dtype), None if db is None else db.to(w.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient * upstream for gradient in ctx.saved_tensors)
        return *gradients, None, None, None


def gradient_in_forward(chunk: int) -> Loss:
    apply: Any = GradientInForward.apply
    return lambda x, w, b, y: apply(x, w, b, y, chunk, False)


def liger_chunk(tokens: int, hidden: int, vocab: int) -> int:
    """So many tokens that a chunk of logits is about as large as the hidden states: N · D / V, up to a power of two."""
    return 1 << max(0, -(-tokens // -(-vocab // hidden)) - 1).bit_length()


def liger_style(sizes: Sizes) -> Loss:
    chunk, apply = liger_chunk(sizes.tokens, sizes.hidden, sizes.vocab), GradientInForward.apply
    return lambda x, w, b, y: apply(x, w, b, y, chunk, True)  # type: ignore[no-untyped-call]


def variants(sizes: Sizes, chunk: int, compiled: bool, budget: int | None) -> dict[str, Loss]:
    """Name → loss(x, w, b, y), a mean over the tokens that count."""
    losses: dict[str, Loss] = {"full logits": full_logits}
    if compiled:
        losses["full logits, torch.compile"] = torch.compile(full_logits)
    losses["chunks, checkpoint"] = chunked_with_checkpoint(chunk)
    losses["chunks, gradient in the forward"] = gradient_in_forward(chunk)
    losses["chunks, as Liger"] = liger_style(sizes)
    if liger := peer("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"):
        losses["Liger-Kernel"] = lambda x, w, b, y: liger(x, w, y, bias=b, ignore_index=IGNORED)
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
