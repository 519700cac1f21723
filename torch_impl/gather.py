"""Rows picked by an index, padded to a multiple: what packs tokens before a head. Mirror of jax_impl/gather.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import spec
from logitless.scratch import slices
from logitless.torch_impl import checks
from logitless.torch_impl.call import accumulation_dtype
from logitless.torch_impl.compiled import tracing

# The backward adds a slice of the columns at a time, in float32. A slice is a part of all columns, or it has this many
# elements: shorter ones would cost launches and save little.
SLICES, LEAST_ELEMENTS = 16, 2**18


def padded_index_gather(
    input: Tensor, index: Tensor, *, pad_to_multiple: int = 1, group_sizes: Tensor | Sequence[int] | None = None
) -> Tensor:
    """``input[index]``, with rows of zeros after it, or after each group, up to a multiple of ``pad_to_multiple``.

        out_i = input_{index_i}   for i < M,      0   for M ≤ i < P        P = M rounded up
        with groups: the same for each, M_g its size; it begins where the one before it, with its zeros, ends

    For the backward only ``index`` and ``group_sizes`` are kept: not the input, no mask. The gradient of a row is the
    sum over all places that it was gathered to, in float32 (float64 for float64), rounded once; the same bit by bit
    from run to run, on a GPU as well.

    Arguments:
        input: [R, ...] bfloat16, float16, float32 or float64.
        index: [M] int32 or int64 in [0, R); duplicates allowed, M may be 0. On a CPU an index outside raises
            ValueError; on a GPU and inside torch.compile its row is NaN, and nothing outside the input is read or
            written. A negative index is outside: it does not count from the end.
        pad_to_multiple: at least 1.
        group_sizes: how many of ``index`` belong to each of G groups, in order: what grouped products ask for, where
            each group begins at a multiple. Integers, or an array [G] int32 or int64, which is not waited for. Their
            sum is M. Another sum in an array on a GPU or inside torch.compile makes every gathered row NaN.

    Returns [P, ...] in input's dtype, new memory. P is the sum of the padded groups. Of an array's sizes only G is
    known, so there P is the largest multiple within M + G·(pad_to_multiple − 1), and zeros end it. Linear in ``input``,
    so differentiable as often as you like; what arrives at the padding goes nowhere.

    Memory beside the result: on a CPU nothing, on a GPU up to 9 bytes a row; with groups up to 29. Beside the
    gradient the backward makes some integers a row and, for a dtype narrower than float32 or with groups, 1/16 of the
    columns in float32 as [R] and as [M], or 1 MiB each if that is more. Inside torch.compile the compiler decides.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.
    """
    checks.check_type("input", input, strided=False)
    checks.check_type("index", index, strided=False)
    sizes = group_sizes
    if isinstance(sizes, Tensor):
        checks.check_device("group_sizes", sizes, "index's", index.device)
    elif not (sizes is None or isinstance(sizes, tuple | list)):
        raise TypeError(f"group_sizes: got {type(sizes).__name__}, allowed is a torch.Tensor or a sequence of integers")
    known = checks.info(sizes) if isinstance(sizes, Tensor) else sizes
    padded = spec.check_gather(checks.info(input), checks.info(index), pad_to_multiple, known)
    checks.check_device("index", index, "input's", input.device)
    outside: float | None = torch.nan
    if index.device.type == "cpu" and not tracing.is_traced(index):
        _check_values(index, sizes, input.shape[0])
        outside = None
    if isinstance(sizes, tuple | list):
        sizes = torch.tensor(sizes, device=index.device)
    rows: Tensor = GatherFunction.apply(input, index, sizes, (pad_to_multiple, padded), outside)  # type: ignore[no-untyped-call]
    return rows


def _check_values(index: Tensor, sizes: Tensor | Sequence[int] | None, rows: int) -> None:
    if isinstance(sizes, Tensor):
        spec.check_group_sum(sizes.tolist(), index.shape[0])
    if not index.shape[0]:
        return
    least, largest = index.aminmax()  # no mask of the index's size
    if int(least) < 0 or int(largest) >= rows:
        position = int(((index < 0) | (index >= rows)).nonzero()[0])
        raise spec.index_error(position, int(index[position]), rows)


def _is_outside(index: Tensor, rows: int) -> Tensor:
    return (index < 0).logical_or_(index >= rows)


def _along_rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *(1,) * (like.dim() - 1))


def _places_of(sizes: Tensor, count: int, multiple: int, padded: int) -> tuple[Tensor, Tensor]:
    """The padded row of each of ``count`` indices, and whether the sizes are not those of so many."""
    narrow = torch.int32 if padded < 2**31 else torch.int64  # half of the memory
    wide = (sizes + (multiple - 1)) // multiple * multiple
    ends = sizes.cumsum(0)
    shift = (wide.cumsum(0) - wide - ends + sizes).to(narrow)
    place = torch.arange(count, dtype=narrow, device=sizes.device)
    group = torch.searchsorted(ends.to(narrow), place, right=True, out_int32=True)
    place += shift.index_select(0, group.clamp_(max=sizes.shape[0] - 1))
    return place.clamp_(0, max(padded - 1, 0)), (ends[-1] != count) | (sizes < 0).any()


def _picked(
    input: Tensor, index: Tensor, sizes: Tensor | None, layout: tuple[int, int], outside: float | None
) -> Tensor:
    """The rows, ``outside`` where an index is outside; None: no index is."""
    (multiple, padded), rows, count = layout, input.shape[0], index.shape[0]
    out = input.new_empty((padded, *input.shape[1:]))
    padding = None
    if sizes is not None and count:
        places, wrong = _places_of(sizes, count, multiple, padded)
        padding = torch.ones(padded, dtype=torch.bool, device=index.device).index_fill_(0, places.long(), False)
        if outside is not None:
            index = index.masked_fill(wrong, -1)
        index = index.new_zeros(padded).index_copy_(0, places.long(), index)
        del places
    body = out[: index.shape[0]]
    strange = None if outside is None else _is_outside(index, rows)
    if rows:
        # index_select reads an index of either dtype: no wider one is made.
        torch.index_select(input, 0, index if outside is None else index.clamp(0, rows - 1), out=body)
    if strange is not None and outside is not None:
        body.masked_fill_(_along_rows(strange, body), outside)
    if padding is not None:
        body.masked_fill_(_along_rows(padding, body), 0.0)
    out[body.shape[0] :].zero_()
    return out


class GatherFunction(torch.autograd.Function):
    """See :func:`padded_index_gather`. ``layout``: (multiple, P); ``outside``: what an index outside gives."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, index: Tensor, sizes: Tensor | None, layout: tuple[int, int], outside: float | None
    ) -> Tensor:
        ctx.save_for_backward(index, sizes)
        ctx.like = layout, input.shape[0]
        return _picked(input, index, sizes, layout, outside)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ScatterFunction.apply(upstream, *ctx.saved_tensors, *ctx.like)  # type: ignore[no-untyped-call]
        return gradient, None, None, None, None


class ScatterFunction(torch.autograd.Function):
    """The gather's transpose, and so its gradient: rows [P, ...] added up at their places in [rows, ...]."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, sizes: Tensor | None, layout: tuple[int, int], rows: int
    ) -> Tensor:
        ctx.save_for_backward(index, sizes)
        ctx.layout = layout
        (multiple, padded), count, places = layout, index.shape[0], None
        if sizes is not None and count:
            places, wrong = _places_of(sizes, count, multiple, padded)
            index = index.masked_fill(wrong, -1)
        # One row more takes what came from an index outside.
        index = index.masked_fill(_is_outside(index, rows), rows)
        dtype = accumulation_dtype(values.dtype)
        if tracing.is_traced(values) or (dtype == values.dtype and places is None):  # a compiler has its own loops
            values = values[:count] if places is None else values.index_select(0, places)
            return _added(values.to(dtype), index, rows).to(values.dtype)
        width = math.prod(values.shape[1:])
        values, total = values.reshape(padded, width), values.new_empty((rows, *values.shape[1:]))
        flat = total.view(rows, width)
        size = max(-(-width // SLICES), LEAST_ELEMENTS // max(rows, count, 1), 1)
        for first, last in slices(width, size):
            part = values[:count, first:last] if places is None else values[:, first:last].index_select(0, places)
            flat[:, first:last] = _added(part.to(dtype), index, rows)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = GatherFunction.apply(upstream, *ctx.saved_tensors, ctx.layout, 0.0)  # type: ignore[no-untyped-call]
        return gradient, None, None, None, None


def _added(parts: Tensor, index: Tensor, rows: int) -> Tensor:
    """[rows, ...]: the sums of the parts of each index, in their dtype."""
    total = parts.new_zeros((rows + 1, *parts.shape[1:]))
    # By PyTorch's documentation the one is deterministic on CUDA and the other is not, and on a CPU the reverse.
    if total.is_cuda:
        total.index_put_((index.long(),), parts, accumulate=True)
    else:
        total.index_add_(0, index, parts)
    return total[:rows]
