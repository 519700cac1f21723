"""What a forward leaves for its backward: the last chunk's exponentials, and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.planning import ChunkPlan
from logitless.spec import LossOptions
from logitless.torch_impl.call import Arrays, Gradients, Layout, Needs, is_turned
from logitless.torch_impl.chunk import Smoothing
from logitless.torch_impl.kernels.kernel_call import KernelCall, padded_length, row_stride
from logitless.torch_impl.kernels.products import GradientProducts, is_parted, low_layout, waiting_layout
from logitless.torch_impl.kernels.rows import Rows
from logitless.torch_impl.kernels.sums import Factors

# What lies in memory as the weight does.
LIKE_WEIGHT = ("weight", "weight_sum", "high", "low")


def held_layout(
    tokens: int, arrays: Arrays, options: LossOptions, dtype: torch.dtype, token_chunk: int, needs: Needs
) -> Layout:
    """Shape in memory and dtype of everything in :class:`Held` that its end reads, by name; no array's values, nor a
    plan's other numbers, matter. ``tokens`` and ``token_chunk`` may be symbols, as long as their order is known."""
    (vocab, size), cast, turned = arrays.weight.shape, arrays.weight.dtype != dtype, is_turned(arrays.weight)
    matrix = (size, vocab) if turned else (vocab, size)
    chunk, full, whole = max(1, token_chunk), torch.float32, torch.int32
    padded, several = padded_length(tokens, chunk), tokens > chunk
    layout: Layout = {
        "row_target": ((padded,), whole),
        "unit": ((), full),
        "g": ((tokens,), full),
        "factor": ((padded,), full),
        "target_value": ((padded,), full),
        "token_value": ((tokens,), full),
        "x": ((chunk, row_stride(size, dtype)), dtype),
        "e": ((chunk, row_stride(vocab, dtype)), dtype),
    }
    if cast and needs.hidden:
        layout["weight"] = (matrix, dtype)
    if turned and needs.hidden:
        layout["target_weight"] = ((chunk, row_stride(size, dtype)), dtype)
    if options.label_smoothing:
        layout |= {"weighted_rows": ((size,), full), "weighted_bias": ((), full), "smooth_x": ((size,), full)}
    if several and needs.hidden:
        layout |= waiting_layout(tokens, size, needs.hidden)
    if is_parted(needs, several):
        layout |= {"high": (matrix, torch.int16), "low": low_layout(vocab, size, 8, turned)}
    elif several and needs.weight:
        layout["weight_sum"] = (matrix, full)
    if several and needs.bias:
        layout["bias"] = ((vocab,), full)
    return layout


class Held:
    """Gradients made in the forward, waiting for the upstream scalar: the last chunk's exponentials, and sums."""

    def __init__(self, products: GradientProducts, factors: Factors, first: int, x: Tensor, e: Tensor) -> None:
        self.products, self.factors, self.first, self.x, self.e = products, factors, first, x, e

    def finish(self, upstream: Tensor) -> Gradients:
        """dX, dW and db with the upstream scalar; may be called once."""
        with self.products.call.on_device():
            scale = self.products.scale_for(upstream, self.factors)
        return self.finish_with(scale)

    def finish_with(self, scale: Tensor) -> Gradients:
        """The same; ``scale``: the unit, times the upstream scalar."""
        p, c = self.products, self.products.call
        with c.on_device():
            p.add(self.first, self.x, self.e, slice(0, c.vocab), self.factors, scale)
            return p.finish(scale, self.first)

    def tensors(self, layout: dict[str, Any]) -> list[Tensor]:
        """The tensors of :func:`held_layout`, in its order; no two share memory."""
        p, c, f, s = self.products, self.products.call, self.factors, self.products.smoothing
        every: dict[str, Any] = {
            "row_target": c.row_target, "unit": p.unit, "g": p.g,
            "factor": f.factor, "target_value": f.target_value, "token_value": f.token_value, "x": _whole_rows(self.x),
            "e": _whole_rows(self.e), "weight": c.weight, "smooth_x": p.smooth_x, "waiting": p.waiting,
            "waiting_low": p.waiting_low, "weight_sum": p.weight_sum, "high": p.high, "low": p.low, "bias": p.bias,
        }  # fmt: skip
        if c.target_weight is not None:
            every["target_weight"] = _whole_rows(c.target_weight)
        if s is not None:
            every |= {"weighted_rows": s.weighted_rows, "weighted_bias": s.weighted_bias}
        return [every[name].T if name in LIKE_WEIGHT and c.turned else every[name] for name in layout]


def _whole_rows(matrix: Tensor) -> Tensor:
    """A matrix of :meth:`KernelCall.matrix` with the padding of its rows."""
    stride = matrix.stride(0)
    return matrix.as_strided((matrix.shape[0], stride), (stride, 1))


def held_gradients(
    make_inputs: Callable[[Tensor | None], Rows], arrays: Arrays, options: LossOptions, dtype: torch.dtype,
    plan: ChunkPlan, needs: Needs, tensors: list[Tensor], upstream: Tensor,
) -> Gradients:  # fmt: skip
    """What :meth:`Held.finish` gives, from ``Held.tensors``, none of which is written to."""
    layout = held_layout(plan.tokens, arrays, options, dtype, plan.token_chunk, needs)
    held = dict(zip(layout, tensors, strict=True))
    if is_turned(arrays.weight):
        held |= {name: tensor.T for name, tensor in held.items() if name in LIKE_WEIGHT}
    c = KernelCall(make_inputs(held.get("weight")), options, plan, needs.into, held)
    smoothing = None
    if options.label_smoothing:
        smoothing = Smoothing(options.label_smoothing / c.shard.vocab, held["weighted_rows"], held["weighted_bias"])
    products = GradientProducts(c, needs, smoothing, held["g"], held["unit"])
    # A float32 dW is its own accumulator where the forward may keep it; here it is read beside the finished one.
    products.weight_sum = held.get("weight_sum")
    products.waiting, products.waiting_low = held.get("waiting"), held.get("waiting_low")
    products.low = held.get("low")
    if "high" in held:  # the sum's upper bits lie where dW will be
        assert products.weight is not None
        products.high = products.weight.view(torch.int16).copy_(held["high"])
    products.smooth_x = held.get("smooth_x")
    if "bias" in held:
        products.bias = held["bias"].clone()
    names = ("factor", "target_value", "token_value")
    factors = Factors(held["g"], None, None, *(held[name] for name in names))
    first = plan.token_slices[-1][0] if plan.token_slices else 0
    return Held(products, factors, first, held["x"][:, : c.size], held["e"][:, : c.vocab]).finish(upstream)


class HeldTokens:
    """A single chunk's exponentials, made in the forward, waiting for an upstream gradient per token."""

    def __init__(
        self, call: KernelCall, needs: Needs, smoothing: Smoothing | None, factors: Factors, x: Tensor, e: Tensor,
        weight: Tensor | None,
    ) -> None:  # fmt: skip
        """factors: for the upstream gradient 1. ``weight``: dW's memory, if e lies in it."""
        self.weight = weight
        self.call, self.needs, self.smoothing, self.factors, self.x, self.e = call, needs, smoothing, factors, x, e

    def finish(self, upstream: Tensor) -> Gradients:
        """dX, dW and db with upstream gradients [...] by token, or one for all; may be called once."""
        c, f = self.call, self.factors
        factors, unit = f.times(c, upstream.reshape(-1).expand(c.tokens).contiguous())
        products = GradientProducts(c, self.needs, self.smoothing, factors.g, unit, self.weight)
        with c.on_device():
            products.add_smooth_x(0, self.x)
            products.scale_operand(0, self.x, factors)
        return Held(products, factors, 0, self.x, self.e).finish_with(unit)
