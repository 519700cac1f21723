"""Rows picked by an index, padded to a multiple: what packs tokens before a head. Mirror of jax_impl/gather.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless import spec
from logitless.scratch import round_up
from logitless.torch_impl import checks
from logitless.torch_impl.call import accumulation_dtype
from logitless.torch_impl.compiled import tracing


def padded_index_gather(input: Tensor, index: Tensor, *, pad_to_multiple: int = 1) -> Tensor:
    """``input[index]``, with rows of zeros after it up to a multiple of ``pad_to_multiple``.

        out_i = input_{index_i}   for i < M,      0   for M ≤ i < P        P = M rounded up

    For the backward only ``index`` is kept: not the input, no mask. The gradient of a row is the sum over all places
    that it was gathered to, in float32 (float64 for float64), rounded once; the same bit by bit from run to run, on a
    GPU as well.

    Arguments:
        input: [R, ...] bfloat16, float16, float32 or float64.
        index: [M] int32 or int64 in [0, R); duplicates allowed, M may be 0. On a CPU an index outside raises
            ValueError; on a GPU and inside torch.compile its row is NaN, and nothing outside the input is read or
            written. A negative index is outside: it does not count from the end.
        pad_to_multiple: at least 1.

    Returns [P, ...] in input's dtype, new memory. Linear in ``input``, so differentiable as often as you like; what
    arrives at the padding goes nowhere. Beyond the gradient the backward makes [R + 1, ...] in float32 for a narrower
    dtype.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.
    """
    checks.check_type("input", input, strided=False)
    checks.check_type("index", index, strided=False)
    spec.check_gather(checks.info(input), checks.info(index), pad_to_multiple)
    checks.check_device("index", index, "input's", input.device)
    looked_at = index.device.type == "cpu" and not tracing.is_traced(index)
    if looked_at:
        outside = (index < 0) | (index >= input.shape[0])
        if bool(outside.any()):
            position = int(outside.nonzero()[0])
            raise spec.index_error(position, int(index[position]), input.shape[0])
    rows: Tensor = GatherFunction.apply(input, index, pad_to_multiple, torch.nan)  # type: ignore[no-untyped-call]
    return rows


def _places(index: Tensor, rows: int) -> Tensor:
    """The index, ``rows`` where it is outside."""
    return torch.where((index >= 0) & (index < rows), index, rows).long()


def _picked(input: Tensor, index: Tensor, multiple: int, outside: float) -> Tensor:
    """The rows, ``outside`` where an index is outside."""
    rows, count = input.shape[0], index.shape[0]
    out = input.new_empty((round_up(count, multiple), *input.shape[1:]))
    if rows:
        places = _places(index, rows)
        torch.index_select(input, 0, places.clamp(max=rows - 1), out=out[:count])
        out[:count].masked_fill_((places == rows).view(-1, *(1,) * (input.dim() - 1)), outside)
    else:
        out[:count].fill_(outside)
    out[count:].zero_()
    return out


class GatherFunction(torch.autograd.Function):
    """See :func:`padded_index_gather`. ``outside``: what the rows of an index outside hold."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, index: Tensor, multiple: int, outside: float) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = input.shape[0], multiple
        return _picked(input, index, multiple, outside)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ScatterFunction.apply(upstream, *ctx.saved_tensors, *ctx.like)  # type: ignore[no-untyped-call]
        return gradient, None, None, None


class ScatterFunction(torch.autograd.Function):
    """The gather's transpose, and so its gradient: rows [P, ...] added up at their places in [rows, ...]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, rows: int, multiple: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.multiple = multiple
        # One row more takes what came from an index outside.
        total = values.new_zeros((rows + 1, *values.shape[1:]), dtype=accumulation_dtype(values.dtype))
        places, parts = _places(index, rows), values[: index.shape[0]].to(total.dtype)
        # By PyTorch's documentation the one is deterministic on CUDA and the other is not, and on a CPU the reverse.
        if total.is_cuda:
            total.index_put_((places,), parts, accumulate=True)
        else:
            total.index_add_(0, places, parts)
        return total[:rows].to(values.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = GatherFunction.apply(upstream, *ctx.saved_tensors, ctx.multiple, 0.0)  # type: ignore[no-untyped-call]
        return gradient, None, None, None
