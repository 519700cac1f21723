"""Rows picked by an index and padded to a multiple: it packs tokens before a head. Mirror of torch_impl/gather.py."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless import spec
from logitless.jax_impl import checks
from logitless.jax_impl.call import accumulation_dtype, taking_wrappers
from logitless.jax_impl.slices import rows_at, run_sums
from logitless.scratch import round_up


@taking_wrappers
def padded_index_gather(input: Array, index: Array, *, pad_to_multiple: int = 1) -> Array:
    """``input[index]``, with rows of zeros after it up to a multiple of ``pad_to_multiple``.

        out_i = input_{index_i}   for i < M,      0   for M ≤ i < P        P = M rounded up

    For the backward only ``index`` is kept: not the input, no mask. The gradient of a row is the sum over all places
    that it was gathered to, in float32 (float64 for float64), rounded once; the same bit by bit from run to run, on a
    GPU as well: equal indices are sorted together and added as a tree, where XLA's own scatter adds in any order.

    Arguments:
        input: [R, ...] bfloat16, float16, float32, or float64 where x64 is on.
        index: [M] int32 or int64 in [0, R); duplicates allowed, M may be 0. Where it can be looked at without waiting
            (a NumPy array, a concrete array on a CPU) an index outside raises ValueError; elsewhere its row is NaN, and
            nothing outside the input is read or written. A negative index is outside: it does not count from the end.
        pad_to_multiple: at least 1.

    Returns [P, ...] in input's dtype. Differentiable once, in reverse mode, in ``input``; what arrives at the padding
    goes nowhere.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.
    """
    checks.check_types({"input": input, "index": index})
    spec.check_gather(checks.info(input), checks.info(index), pad_to_multiple)
    if (ids := checks.readable(index)) is not None:
        outside = (ids < 0) | (ids >= input.shape[0])
        if outside.any():
            position = int(np.nonzero(outside)[0][0])
            raise spec.index_error(position, int(ids[position]), input.shape[0])
    like = tuple(input.shape), str(input.dtype)
    gathered: Array = _jitted(like, pad_to_multiple, jnp.asarray(input), jnp.asarray(index))
    return gathered


def _places(index: Array, rows: int) -> Array:
    """The index, with ``rows`` in place of what is outside."""
    return jnp.where((index >= 0) & (index < rows), index, rows).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(like: tuple[tuple[int, ...], str], multiple: int, input: Array, index: Array) -> Array:
    del like
    rows, count = input.shape[0], index.shape[0]
    places = _places(index, rows)
    if rows and count:
        picked = rows_at(input, jnp.minimum(places, rows - 1))
    else:
        picked = jnp.zeros((count, *input.shape[1:]), input.dtype)
    outside = (places == rows).reshape(-1, *(1,) * (input.ndim - 1))
    picked = jnp.where(outside, jnp.asarray(jnp.nan, input.dtype), picked)
    padding = [(0, round_up(count, multiple) - count), *((0, 0),) * (input.ndim - 1)]
    return jnp.pad(picked, padding)


def _forward(like: tuple[tuple[int, ...], str], multiple: int, input: Array, index: Array) -> tuple[Array, Array]:
    return _gather(like, multiple, input, index), index


def _backward(like: tuple[tuple[int, ...], str], multiple: int, index: Array, upstream: Array) -> tuple[Array, None]:
    del multiple
    (rows, *rest), dtype = like[0], jnp.dtype(like[1])
    gradient = jnp.zeros((rows, *rest), accumulation_dtype(dtype))
    if not rows or not index.shape[0]:
        return gradient.astype(dtype), None
    places = _places(index, rows)
    order = jnp.argsort(places, stable=True)
    ids = places[order]
    totals, last = run_sums(ids, rows_at(upstream, order).astype(gradient.dtype))
    # Every row that was gathered is written once, from the end of its run. Other places are dropped.
    gradient = gradient.at[jnp.where(last, ids, rows)].set(totals, mode="drop")
    return gradient.astype(dtype), None


_gather.defvjp(_forward, _backward)

_jitted = jax.jit(_gather, static_argnums=(0, 1))
