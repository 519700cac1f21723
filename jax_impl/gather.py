"""Rows picked by an index and padded to a multiple: it packs tokens before a head. Mirror of torch_impl/gather.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless import spec
from logitless.jax_impl import checks
from logitless.jax_impl.call import accumulation_dtype, taking_wrappers
from logitless.jax_impl.slices import Index, for_slices, put, rows_at, run_sums, take
from logitless.spec import ArrayInfo

# The backward adds a slice of the columns at a time, in float32. A slice is a part of all columns, or it has this many
# elements: shorter ones would cost time and save little.
SLICES, LEAST_ELEMENTS = 32, 2**18


@taking_wrappers
def padded_index_gather(
    input: Array, index: Array, *, pad_to_multiple: int = 1, group_sizes: Array | Sequence[int] | None = None
) -> Array:
    """``input[index]``, with rows of zeros after it, or after each group, up to a multiple of ``pad_to_multiple``.

        out_i = input_{index_i}   for i < M,      0   for M ≤ i < P        P = M rounded up
        with groups: the same for each, M_g its size; it begins where the one before it, with its zeros, ends

    For the backward only ``index`` and ``group_sizes`` are kept: not the input, no mask. The gradient of a row is the
    sum over all places that it was gathered to, in float32 (float64 for float64), rounded once; the same bit by bit
    from run to run, on a GPU as well: equal indices are sorted together and added as a tree, where XLA's own scatter
    adds in any order.

    Arguments:
        input: [R, ...] bfloat16, float16, float32, or float64 where x64 is on.
        index: [M] int32 or int64 in [0, R); duplicates allowed, M may be 0. Where it can be looked at without waiting
            (a NumPy array, a concrete array on a CPU) an index outside raises ValueError; elsewhere its row is NaN, and
            nothing outside the input is read or written. A negative index is outside: it does not count from the end.
        pad_to_multiple: at least 1.
        group_sizes: how many of ``index`` belong to each of G groups, in order: what grouped products ask for, where
            each group begins at a multiple. Integers, or an array [G] int32 or int64, which is not waited for. Their
            sum is M. Another sum in an array that cannot be looked at makes every gathered row NaN.

    Returns [P, ...] in input's dtype. P is the sum of the padded groups. Of an array's sizes only G is known, so there
    P is the largest multiple within M + G·(pad_to_multiple − 1), and zeros end it. Linear in ``input``, so
    differentiable as often as you like in reverse mode; what arrives at the padding goes nowhere.

    Memory beside the gradient: some integers a row, and a few arrays of 1/32 of the columns in float32, or of 1 MiB if
    that is more.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.
    """
    checks.check_types({"input": input, "index": index})
    if group_sizes is None or isinstance(group_sizes, tuple | list):
        known: ArrayInfo | Sequence[int] | None = group_sizes
    else:
        checks.check_types({"group_sizes": group_sizes})
        known = checks.info(cast(Array, group_sizes))
    padded = spec.check_gather(checks.info(input), checks.info(index), pad_to_multiple, known)
    if (ids := checks.readable(index)) is not None:
        outside = (ids < 0) | (ids >= input.shape[0])
        if outside.any():
            position = int(np.nonzero(outside)[0][0])
            raise spec.index_error(position, int(ids[position]), input.shape[0])
    sizes = None if group_sizes is None else jnp.asarray(group_sizes)
    if sizes is not None and (found := checks.readable(sizes)) is not None:
        spec.check_group_sum(found.tolist(), index.shape[0])
    layout = Layout(tuple(input.shape), str(input.dtype), pad_to_multiple, padded)
    gathered: Array = _jitted(layout, jnp.asarray(input), jnp.asarray(index), sizes)
    return gathered


def _inside(index: Array, rows: int) -> Array:
    """The index in its own dtype, with ``rows`` in place of what is outside."""
    return jnp.where((index >= 0) & (index < rows), index, rows)


def _places_of(sizes: Array, count: int, multiple: int, padded: int) -> tuple[Array, Array]:
    """The padded row of each of ``count`` indices, and whether the sizes are not those of so many."""
    wide = (sizes + (multiple - 1)) // multiple * multiple
    ends = jnp.cumsum(sizes)
    shift = jnp.cumsum(wide) - wide - ends + sizes
    place = jnp.arange(count, dtype=shift.dtype)
    group = jnp.minimum(jnp.searchsorted(ends, place, side="right"), sizes.shape[0] - 1)
    return jnp.clip(place + shift[group], 0, max(padded - 1, 0)), (ends[-1] != count) | (sizes < 0).any()


class Layout(NamedTuple):
    """All that is no array. Hashable."""

    shape: tuple[int, ...]
    """The input's."""
    dtype: str
    multiple: int
    padded: int
    nan_outside: bool = True
    """Whether the rows of an index outside are NaN; else zero."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(layout: Layout, input: Array, index: Array, sizes: Array | None) -> Array:
    rows, count, padded = layout.shape[0], index.shape[0], layout.padded
    inside, padding = _inside(index, rows), jnp.arange(padded) >= count
    if sizes is None:
        inside = jnp.pad(inside, (0, padded - count))
    else:
        places, wrong = _places_of(sizes, count, layout.multiple, padded)
        inside = jnp.zeros(padded, index.dtype).at[places].set(jnp.where(wrong, rows, inside))
        padding = jnp.ones(padded, bool).at[places].set(False)
    if rows and count:
        picked = rows_at(input, jnp.minimum(inside, rows - 1))
    else:
        picked = jnp.zeros((padded, *input.shape[1:]), input.dtype)
    ones = (1,) * (input.ndim - 1)
    outside, padding = (inside == rows).reshape(-1, *ones), padding.reshape(-1, *ones)
    strange = jnp.asarray(jnp.nan if layout.nan_outside else 0.0, input.dtype)
    return jnp.where(padding, jnp.zeros((), input.dtype), jnp.where(outside, strange, picked))


Kept = tuple[Array, Array | None]


def _gather_forward(layout: Layout, input: Array, index: Array, sizes: Array | None) -> tuple[Array, Kept]:
    return _gather(layout, input, index, sizes), (index, sizes)


def _gather_backward(layout: Layout, kept: Kept, upstream: Array) -> tuple[Array, None, None]:
    return _scatter(layout, upstream, *kept), None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(layout: Layout, values: Array, index: Array, sizes: Array | None) -> Array:
    """The gather's transpose, and so its gradient: rows [P, ...] added up at their places in [R, ...]."""
    (rows, *rest), count, dtype = layout.shape, index.shape[0], jnp.dtype(layout.dtype)
    width = math.prod(rest)
    if not rows or not count or not width:
        return jnp.zeros(layout.shape, dtype)
    inside = _inside(index, rows)
    if sizes is not None:
        places, wrong = _places_of(sizes, count, layout.multiple, layout.padded)
        inside = jnp.where(wrong, rows, inside)
    order = jnp.argsort(inside, stable=True)
    ids = inside[order]
    source = order if sizes is None else places[order]
    values = values.reshape(layout.padded, width)

    def slice_of(gradient: Array, first: Index, columns: int) -> Array:
        parts = rows_at(take(values, first, columns, axis=1), source).astype(accumulation_dtype(dtype))
        totals, last = run_sums(ids, parts)
        # Every row that was gathered is written once, from the end of its run. Other places are dropped.
        part = jnp.zeros((rows, columns), totals.dtype).at[jnp.where(last, ids, rows)].set(totals, mode="drop")
        return put(gradient, part.astype(dtype), first, axis=1)

    size = max(-(-width // SLICES), LEAST_ELEMENTS // max(rows, count), 1)
    total = for_slices(width, size, slice_of, jnp.zeros((rows, width), dtype))
    return total.reshape(layout.shape)


def _scatter_forward(layout: Layout, values: Array, index: Array, sizes: Array | None) -> tuple[Array, Kept]:
    return _scatter(layout, values, index, sizes), (index, sizes)


def _scatter_backward(layout: Layout, kept: Kept, upstream: Array) -> tuple[Array, None, None]:
    return _gather(layout._replace(nan_outside=False), upstream, *kept), None, None


_gather.defvjp(_gather_forward, _gather_backward)
_scatter.defvjp(_scatter_forward, _scatter_backward)

_jitted = jax.jit(_gather, static_argnums=0)
