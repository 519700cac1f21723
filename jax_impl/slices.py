"""Loops over slices of arrays, and the slices themselves, which XLA moves without copying the array.

Sizes are static: a loop goes over the full slices, and the ragged last one is a loop of its own. What a loop carries is
updated in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.jax_impl.distributed import parallel

Carry = TypeVar("Carry")

Position = TypeVar("Position", bound="Index")

Index = int | Array
"""Where a slice begins: a number, or a scalar that only the device knows."""


def for_slices(
    length: int, size: int, body: Callable[[Carry, Index, int], Carry], carry: Carry, count: Array | None = None
) -> Carry:
    """carry = body(carry, start, size) for every slice: a loop over the full ones, then the ragged rest. With a
    ``count`` for those alone that begin before it."""
    full, rest = divmod(length, size)
    if length and parallel.tracked():
        carry = varied(lambda state: body(state, jnp.int32(0), min(size, length)), carry)
    if count is not None:
        begun = jnp.minimum(full, (count + size - 1) // size).astype(jnp.int32)
        carry = lax.fori_loop(jnp.int32(0), begun, lambda i, c: body(c, i * size, size), carry)
    elif full == 1:
        carry = body(carry, 0, size)
    elif full > 1:
        carry = lax.fori_loop(jnp.int32(0), jnp.int32(full), lambda i, c: body(c, i * size, size), carry)
    if not rest:
        return carry
    # A loop whose length XLA does not see: unrolled, the rest's blocks are computed beside the loop's, or shared
    # between forward and backward, and held.
    once = lax.optimization_barrier(jnp.int32(1)) if count is None else (count > full * size).astype(jnp.int32)
    carry = lax.fori_loop(jnp.int32(0), once, lambda i, c: body(c, full * size + i * rest, rest), carry)
    return carry


def varied(body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """``carry`` with the types that a loop's body gives it: JAX asks that they vary over the same axes (shard_map)."""
    while True:
        shapes = jax.eval_shape(body, carry)
        wanted = jax.tree.map(lambda part, like: parallel.vary_over(part, parallel.varying(like)), carry, shapes)
        if jax.tree.map(parallel.varying, wanted) == jax.tree.map(parallel.varying, carry):
            return carry
        carry = wanted


def bits(array: Array) -> Array:
    """A 16-bit float array as integers, bit by bit; any other array as it is."""
    return lax.bitcast_convert_type(array, jnp.uint16) if _is_low(array) else array


def floats(bits: Array, dtype: jnp.dtype) -> Array:
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def _is_low(array: Array) -> bool:
    return array.dtype in (jnp.bfloat16, jnp.float16)


def _moved(move: Callable[..., Array], *arrays: Array, at: Index) -> Array:
    """``move(*arrays, at)``, which only moves elements of the arrays' dtype.

    XLA on a CPU slices, gathers and updates 16-bit floats in float32: it would convert the whole array first, V × D
    that no plan has counted. Integers it moves as they are; the cast costs nothing. On a TPU the cast is a copy of the
    whole array.
    """
    if not _is_low(arrays[0]):
        return move(*arrays, at)

    def as_integers(*arrays: Array) -> Array:
        *moved, at = arrays
        return floats(move(*map(bits, moved), at), moved[0].dtype)

    moved: Array = lax.platform_dependent(*arrays, jnp.asarray(at), tpu=move, default=as_integers)
    return moved


def _stay(array: Array, where: Position) -> tuple[Array, Position]:
    """Tie a 16-bit array to the place where it is read. Else XLA casts the whole array before the loop: a copy."""
    return lax.optimization_barrier((array, where)) if _is_low(array) else (array, where)


def take(array: Array, start: Index, size: int, axis: int = 0) -> Array:
    """array[start:start + size], or along another axis."""
    array, start = _stay(array, start)
    return _moved(lambda array, start: lax.dynamic_slice_in_dim(array, start, size, axis), array, at=start)


def take_block(matrix: Array, rows: int, start: Index, size: int) -> Array:
    """matrix[:rows, start:start + size]; the matrix is never 16-bit."""
    return lax.dynamic_slice(matrix, (jnp.zeros_like(start), start), (rows, size))


def take_tile(matrix: Array, first: Index, rows: int, start: Index, columns: int) -> Array:
    """matrix[first:first + rows, start:start + columns]."""
    matrix, at = _stay(matrix, jnp.stack([jnp.asarray(first, jnp.int32), jnp.asarray(start, jnp.int32)]))
    return _moved(lambda matrix, at: lax.dynamic_slice(matrix, (at[0], at[1]), (rows, columns)), matrix, at=at)


def put(array: Array, part: Array, start: Index, axis: int = 0) -> Array:
    """array with ``part`` at ``start``. Along the other axis a shorter part fills the beginning."""
    return _moved(lambda a, part, start: lax.dynamic_update_slice_in_dim(a, part, start, axis), array, part, at=start)


def put_rows(array: Array, rows: Array, indices: Array) -> Array:
    """array with ``rows`` in the places ``indices``, all of them different."""
    return _moved(
        lambda array, rows, at: array.at[at].set(rows, unique_indices=True, mode="promise_in_bounds"),
        array, rows, at=indices,
    )  # fmt: skip


def add_to(array: Array, part: Array, start: Index, axis: int = 0) -> Array:
    """array with ``part`` added at ``start``: the sum is taken in the part's dtype and rounded to the array's.

    The array is one that a loop carries and changes, so nothing ties it to its place: that (_stay) would copy it.
    """
    size = part.shape[axis]

    def total(part: Array, _: Index, __: int) -> Array:
        old = _moved(lambda array, start: lax.dynamic_slice_in_dim(array, start, size, axis), array, at=start)
        return old.astype(part.dtype) + part

    # 16 bits: a slice and an update that are fused read and write the array at once, and XLA copies it. The ragged rest
    # of a loop, which is all of this one, is fused with nothing.
    part = for_slices(1, 2, total, part) if _is_low(array) else total(part, 0, size)
    return put(array, part.astype(array.dtype), start, axis)


def rows_at(array: Array, indices: Array, axis: int = 0) -> Array:
    """array[indices], or along another axis."""
    array, indices = _stay(array, indices)
    return _moved(lambda array, indices: array[indices] if axis == 0 else array[:, indices], array, at=indices)


def run_sums(ids: Array, values: Array) -> tuple[Array, Array]:
    """Along the first axis: sums of the values since the current run of equal ids began, and where runs end.

    The sums are a scan over a fixed tree, so they are the same from run to run.
    """
    begins = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (a_begins, a), (b_begins, b) = left, right
        fresh = b_begins.reshape(-1, *(1,) * (b.ndim - 1))
        return a_begins | b_begins, jnp.where(fresh, b, a + b)

    _, sums = lax.associative_scan(join, (begins, values))
    return sums, jnp.concatenate([begins[1:], jnp.ones(1, bool)])
