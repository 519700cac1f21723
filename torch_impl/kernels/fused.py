"""The target-anchored chunk by Triton kernels: the same verbs as torch_impl/eager.py.

Its mirror: jax_impl/kernels/fused.py.

A loss's gradients in one pass are made in two steps: the forward writes a chunk's exponentials and, for every chunk but
the last, its products; the last chunk's products wait for the upstream scalar, so that dW is rounded once, with it, in
the epilogue of its last product. A plan with a single chunk needs no accumulator for that at all. In a small step the
forward makes dX of the last chunk, too: the GPU would be idle until the host has come to the backward.

Rounding: logits, exponentials and sums are float32. What is stored of a chunk is rounded to the input dtype on its way
into the products, which accumulate in float32. e is 0 at the target. The target's element is kept in float32 beside it,
and added before a gradient is rounded: to dX in the product's epilogue, to dW in its last product.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os

import torch
from torch import Tensor

from logitless import spec
from logitless.planning import ChunkPlan
from logitless.scratch import SMOOTHING_BLOCK
from logitless.spec import LossOptions, Statistics
from logitless.torch_impl.call import (
    Arrays,
    Call,
    Gradients,
    KnownRows,
    Needs,
    TokenSums,
    empty_like_weight,
    is_turned,
)
from logitless.torch_impl.chunk import Smoothing
from logitless.torch_impl.kernels import architecture
from logitless.torch_impl.kernels.held import Held, HeldTokens, held_gradients, held_layout
from logitless.torch_impl.kernels.kernel_call import KernelCall, aligned_rows
from logitless.torch_impl.kernels.launch import cdiv
from logitless.torch_impl.kernels.products import GradientProducts, matrix_of, operand_of
from logitless.torch_impl.kernels.replay import run_step
from logitless.torch_impl.kernels.rows import (
    Rows,
    entropy,
    log_prob_rows,
    log_probs,
    losses,
    normalizer,
    prepare,
    total_loss,
)
from logitless.torch_impl.kernels.sums import Sums, known_by_position, relative_factors
from logitless.torch_impl.kernels.tiles import WEIGHT

with contextlib.suppress(ImportError):  # without triton, unavailable() says so before a kernel is launched
    from logitless.torch_impl.kernels import portable as kernels

# What a backend has; the functions that are not here are imported.
__all__ = [
    "BUFFER_ALIGNMENT",
    "PRODUCTS_WAIT",
    "SUMS_SLICES",
    "entropy",
    "held_gradients",
    "held_layout",
    "holds",
    "known_gradients",
    "lends",
    "log_prob_rows",
    "log_probs",
    "logits_gradients",
    "loss_gradients",
    "losses",
    "normalizer",
    "one_pass",
    "plain_loss",
    "prepare",
    "run_step",
    "token_gradients",
    "token_logits",
    "token_sums",
    "total_loss",
    "unavailable",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: torch.device, dtype: torch.dtype, each: bool = False) -> str | None:
    """Why these kernels cannot run there, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"its kernels take bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda" and not (interpreted() and device.type == "cpu"):
        return spec.needs_cuda(device.type)
    return architecture.unavailable(device, dtype, each)


# What is left of a loss's gradients when the upstream scalar arrives are products, that TMA writes to a buffer.
PRODUCTS_WAIT = True
SUMS_SLICES = True
BUFFER_ALIGNMENT = 16


def one_pass(dtype: torch.dtype, options: LossOptions) -> bool:
    """Whether exponentials relative to the target can be held in ``dtype``: float16's range ends at 11 nats."""
    del options
    return dtype != torch.float16


def holds(dtype: torch.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token."""
    return dtype != torch.float16


def plain_loss(arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs) -> None:
    """Plain losses have no kernels of their own: repeating a step (replay.py) is what helps here."""
    del arrays, normalizer, call, needs


def lends(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether exponentials can lie in dW's rows: where the products can work in place, and dW has their dtype."""
    if weight.dtype != dtype:
        return False
    found = architecture.architecture_of(dtype, weight.device.index, aligned_rows(weight), is_turned(weight))
    beside = cdiv(weight.shape[1], found.tiles[WEIGHT].bn)
    return found.in_place and beside <= architecture.multiprocessors(weight.device.index)


def token_sums(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, statistics: Statistics, norm: Tensor | None = None
) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, and no C × V matrix."""
    c = KernelCall(inputs, options, plan)
    sums = Sums(c, statistics, norm)
    with c.on_device():
        x = c.operand()
        for first, _ in plan.token_slices:
            sums.gather(first, x)
            sums.product(first, x, None)
            sums.finish(first, x, None, None)
    return sums.result()


def loss_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, norm: Tensor, needs: Needs, statistics: bool
) -> tuple[TokenSums, Held]:
    """Sums, and gradients that wait for the upstream scalar: 6·N·D·V flops. See :func:`eager.loss_gradients`."""
    c = KernelCall(inputs, options, plan, needs.into)
    sums = Sums(c, statistics, norm)
    factors = relative_factors(c)
    unit = inputs.unit if norm is inputs.norm else norm * inputs.largest
    products = GradientProducts(c, needs, sums.smoothing, factors.g, unit)
    with c.on_device():
        e = matrix_of(c, c.vocab, products.room)
        x = operand_of(c, e, products.room)
        slices = plan.token_slices or ((0, 0),)
        for first, last in slices:
            sums.gather(first, x)
            products.add_smooth_x(first, x)
            sums.product(first, x, e)
            late = products.scales_late and last < c.tokens
            sums.finish(first, x, e, factors, scale_rows=needs.weight is not None and not late)
            if last < c.tokens:
                products.add(first, x, e, slice(0, c.vocab), factors, None)
            elif plan.early_hidden:
                products.make_hidden(e, factors)
        result = sums.result()
        del sums  # its partial sums make room, and so do parts of tiles
        products.parts = None
    return result, Held(products, factors, slices[-1][0], x, e)


def token_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, needs: Needs, statistics: bool
) -> tuple[TokenSums, HeldTokens]:
    """Sums, and exponentials that wait for an upstream gradient per token: 6·N·D·V flops, in a plan of one chunk."""
    c = KernelCall(inputs, options, plan, needs.into)
    sums, factors = Sums(c, statistics), relative_factors(c)
    weight = empty_like_weight(c.weight, c.dtype) if plan.lends else None
    with c.on_device():
        x, e = c.operand(), matrix_of(c, c.vocab, weight)
        sums.gather(0, x)
        sums.product(0, x, e)
        sums.finish(0, x, e, factors)
    return sums.result(), HeldTokens(c, needs, sums.smoothing, factors, x, e, weight)


def token_logits(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, statistics: Statistics
) -> tuple[TokenSums, Tensor]:
    """Sums, and all logits in the input dtype's bits (kernels.held_of), for :func:`logits_gradients`: in a plan of
    one chunk 6·N·D·V flops together."""
    c = KernelCall(inputs, options, plan)
    sums = Sums(c, statistics, held=True)
    with c.on_device():
        x, held = c.operand(), c.matrix(c.chunk, c.vocab)
        sums.gather(0, x)
        sums.product(0, x, held)
        sums.finish(0, x, held, None)
    return sums.result(), held


def logits_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, known: KnownRows, needs: Needs, logits: Tensor
) -> Gradients:
    """:func:`known_gradients` from what :func:`token_logits` has left, which becomes the gradient's matrix: 4·N·D·V
    flops."""
    c = KernelCall(inputs, options, plan, needs.into)
    vectors, unit = known_by_position(c, known)
    products = GradientProducts(c, needs, None, known.factor, unit)
    with c.on_device():
        x = c.operand()
        c.gather(0, x)
        c.turn_held(logits, vectors)
        products.add(0, x, logits, slice(0, c.vocab), None, unit)
        return products.finish(unit, 0)


def known_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Tensor, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, either order of the plan. See :func:`eager.known_gradients`."""
    c = KernelCall(inputs, options, plan, needs.into)
    smoothing = Smoothing.prepare(inputs, options, SMOOTHING_BLOCK)
    vectors, unit = known_by_position(c, known)
    g = g if smoothing is None else g / unit  # which smoothing alone reads
    products = GradientProducts(c, needs, smoothing, g, unit)
    with c.on_device():
        # x may lie where dX will be, unless dX is made first.
        free = len(plan.token_slices) == 1 and not c.shard.split and not plan.lends
        e = matrix_of(c, plan.fused_columns, products.room)
        x = c.operand(products.hidden) if free else operand_of(c, e, products.room)
        if plan.sums_slices:
            parts = ((first, *part) for part in products.blocks(e) for first, _ in plan.token_slices)
        else:
            parts = ((first, *part) for first, _ in plan.token_slices for part in products.blocks(e))
        for first, entries, block in parts:
            if plan.sums_slices or not entries.start:
                c.gather(first, x)
            if not entries.start:
                products.add_smooth_x(first, x)
            c.logits(first, x, block, entries, mode=kernels.KNOWN.value, known=vectors)
            products.add(first, x, block, entries, None, unit)
        if not plan.token_slices and products.weight is not None and needs.into is None:
            products.weight.zero_()
        return products.finish(unit, 0)
