"""The error of dW against the number of chunks that add up to it: ``python -m bench accumulation --output DIR``.

Liger-Kernel's issue 1232 asks for dW to be added in float32 inside the product. A row is ‖dW − truth‖ / ‖truth‖ of one
step in bfloat16 whose tokens are cut into ``chunks``, against float64. ``commonest_error`` is of the rows of the
commonest targets, to which many chunks add: targets are drawn in proportion to 1 / rank, as words are. The ideal path
rounds the logits' gradient and dW once.

Liger-Kernel takes as many chunks as the vocabulary is times the hidden size, or fewer by ``chunk_mem_const``. So the
shape has a vocabulary of 1024 times the hidden size. Two variants are plain PyTorch: a chunk's product is rounded and
added in bfloat16, or added in float32 by ``torch.addmm``, as the issue proposes. That dW and ours with a float32 buffer
are compared as they are; all others are rounded to bfloat16.

Runs on a CUDA device, or at small sizes with ``--backend eager`` on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.registry import Results, register
from bench.shapes import named
from bench.variants import described, peer

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu_torch import Arrays

CHUNKS = (1, 4, 16, 64, 256, 1024)
COMMONEST = 64
Gradient = Callable[[int], "Tensor"]
"""dW by the number of chunks."""


def ours(arrays: Arrays, backend: str, into: bool) -> Gradient:
    """``into``: dW is added to a buffer in float32."""
    import torch

    from bench.gpu import planner

    planned = planner(arrays, backend)

    def gradient(chunks: int) -> Tensor:
        arrays.x.grad = arrays.w.grad = None
        buffer = torch.zeros_like(arrays.w, dtype=torch.float32) if into else None
        chosen = planned(order="tokens", chunk=-(-len(arrays.y) // chunks), lends=False)
        arrays.loss(arrays.x, arrays.w, arrays.y, plan=chosen, backend=backend, accumulate_into=buffer).backward()
        made = arrays.w.grad if buffer is None else buffer
        assert made is not None
        return made

    return gradient


def ligers(arrays: Arrays, **options: Any) -> Gradient | None:
    """None where it is not installed."""
    from bench.gpu_torch import LIGER

    loss = peer(LIGER, "liger_fused_linear_cross_entropy")

    def gradient(chunks: int) -> Tensor:
        arrays.x.grad = arrays.w.grad = None
        fewer = max(1, arrays.shape.vocab // arrays.shape.hidden // chunks)
        loss(arrays.x, arrays.w, arrays.y, chunk_mem_const=fewer, **options).backward()
        assert arrays.w.grad is not None
        return arrays.w.grad

    return gradient if loss else None


def torchs(arrays: Arrays, dtype: Any) -> Gradient:
    """Chunks of full logits; dW is added in ``dtype``."""
    import torch

    from bench.truth import float32_sums

    x, w, y = arrays.x.detach(), arrays.w.detach(), arrays.y

    def gradient(chunks: int) -> Tensor:
        size, dw = -(-len(y) // chunks), torch.zeros_like(w, dtype=dtype)
        for rows, ids in zip(x.split(size), y.split(size), strict=True):
            dz = torch.softmax((rows @ w.t()).float(), 1)
            dz.scatter_add_(1, ids[:, None], torch.full_like(dz[:, :1], -1))
            low = (dz / len(y)).to(x.dtype)
            if dtype == torch.float32 and x.is_cuda:
                torch.addmm(dw, low.t(), rows, out_dtype=dtype, out=dw)
            else:
                dw += float32_sums(low.t(), rows).to(dtype)
        return dw

    return gradient


def measure(arrays: Arrays, backend: str, peers: bool) -> Iterator[dict[str, Any]]:
    """Rows as they are made; the ideal path's first."""
    import torch

    from bench.truth import relative, truth_and_ideal

    x, w, count = arrays.x, arrays.w, len(arrays.y)
    ones = torch.ones(count, device=x.device)
    truth, ideal = (made["dweight"] for made in truth_and_ideal(x, w, arrays.y, ones))
    commonest = arrays.y.bincount(minlength=len(w)).argsort(descending=True)[:COMMONEST]

    def row(variant: str, chunks: int | None, dw: Tensor) -> dict[str, Any]:
        errors = {
            "dweight_error": relative(dw, truth, count),
            "commonest_error": relative(dw[commonest], truth[commonest], count),
        }
        return {**arrays.shape.sizes(), "variant": variant, "chunks": chunks} | errors

    yield row("ideal", None, (ideal / count).to(w.dtype))
    every: dict[str, Gradient | None] = {
        "logitless": ours(arrays, backend, into=False),
        "logitless, accumulate_into float32": ours(arrays, backend, into=True),
    }
    if peers:
        every["Liger-Kernel"] = ligers(arrays)
        every["Liger-Kernel, accum_dtype float32"] = ligers(arrays, accum_dtype=torch.float32)
    every["torch, added in bfloat16"] = torchs(arrays, torch.bfloat16)
    every["torch, added in float32 inside the product"] = torchs(arrays, torch.float32)
    for variant, gradient in every.items():
        for chunks in CHUNKS if gradient else ():
            try:
                yield row(variant, chunks, gradient(chunks))
            except Exception as failure:
                yield {**arrays.shape.sizes(), "variant": variant, "chunks": chunks, "error": described(failure)}


def worded(arrays: Arrays) -> Arrays:
    """With targets in proportion to 1 / rank."""
    import torch

    ranks = torch.arange(1, arrays.shape.vocab + 1, device=arrays.y.device)
    generator = torch.Generator(arrays.y.device).manual_seed(2)
    arrays.y = torch.multinomial(1.0 / ranks, len(arrays.y), replacement=True, generator=generator)
    return arrays


@register(
    "the error of dW against the number of chunks, beside Liger-Kernel and plain PyTorch",
    shapes=["8192x256x262144"],
    peers=True,
    arguments={"--backend": {"default": "triton", "choices": ("triton", "eager"), "help": "ours"}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    from bench.gpu_torch import Arrays

    for name in options.shapes:
        for row in measure(worded(Arrays(named(name))), options.backend, options.peers):
            results.add([row])
