"""dX, dW and db of a call: the second and third product, and what the targets' elements lack."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.jax_impl.call import Gradients, Needs
from logitless.jax_impl.kernels.architecture import HOPPER, interpreted
from logitless.jax_impl.kernels.kernel_call import KernelCall, as_index
from logitless.jax_impl.kernels.rows import Rows
from logitless.jax_impl.kernels.sums import Factors, smoothing_of
from logitless.jax_impl.slices import Carry, Index, run_sums
from logitless.scratch import round_up

with contextlib.suppress(ImportError):  # without absl, fused.unavailable() says so before a kernel is launched
    from logitless.jax_impl.kernels import hopper, launch, row_kernels


class State(NamedTuple):
    """dX by position, dW and db as far as they are; None where not wanted or not begun."""

    hidden: Array | None = None  # [≥ N, D]
    weight: Array | None = None  # [V, D] (or turned, [D, V]), or the upper 16 bits of its sum [V, D]
    low: Array | None = None  # [V, D] int8: the next 8
    bias: Array | None = None  # [V] float32


class GradientProducts:
    """dX, dW and db of a call, chunk by chunk and slice by slice. Its methods give the next state."""

    def __init__(self, c: KernelCall, needs: Needs, g: Array, unit: Array) -> None:
        self.call, self.needs, self.g, self.unit = c, needs, g / unit, unit
        self.smoothing = s = smoothing_of(c)
        self.smooth: Array | None = None
        self.smooth_x: Array | None = None
        if s is not None:
            self.smooth = -s.factor * self.g
            # An ignored token may hold anything.
            x = jnp.where(c.inputs.valid[:, None], c.inputs.hidden.astype(jnp.float32), 0.0)
            self.smooth_x = s.factor * (x * self.g[:, None]).sum(axis=0)

    def begun(self, hidden_dtype: DTypeLike, parted: bool) -> State:
        """What several blocks write to, or add to: dX in this dtype; dW, a sum in two parts if ``parted``; db. db
        begins as 0. The others hold anything until the first block."""
        c, needs = self.call, self.needs
        size = (c.padded_vocab, c.padded_size)
        shape = size[::-1] if c.turned and not parted else size
        hidden = c.empty(self._hidden_shape, hidden_dtype) if needs.hidden else None
        weight = c.empty(shape, c.dtype) if needs.weight else None
        low = c.empty(size, jnp.int8) if needs.weight and parted else None
        return State(hidden, weight, low, self._no_bias() if needs.bias else None)

    def _no_bias(self) -> Array:
        """db before the first block, in whole slices."""
        return jnp.zeros(round_up(self.call.vocab, self.call.columns), jnp.float32)

    @property
    def _hidden_shape(self) -> tuple[int, int]:
        """Of dX by position."""
        return round_up(self.call.chunks * self.call.chunk, 8), self.call.padded_size

    def hidden(
        self, state: State, rows: Rows, e: Array, start: Index, factors: Factors | None, scale: Array | None
    ) -> State:
        """dX from a block e; scale: what the rows still lack when no other block follows."""
        c = self.call
        if not self.needs.hidden:
            return state
        if c.inputs.shard.active:
            scale = None  # other devices' shares follow
        arguments = {"tiles": rows.tiles, "first": rows.first, "start": as_index(start), "e": e, "w": c.weight}
        arguments |= c.slice_at(start)
        if factors is not None:
            target_rows = c.weight_rows(rows)
            arguments |= {"factor": factors.factor, "rest": factors.rest, "target_rows": target_rows}
        if c.plan.hidden_parts > 1:
            return state._replace(hidden=self._hidden_in_parts(state.hidden, rows, arguments, scale))
        if scale is not None:
            arguments["scale"] = scale.reshape(1)
            if self.smoothing is not None and self.smooth is not None:
                arguments["smooth"] = rows.pick(self.smooth)
                arguments["weighted_rows"] = c.along_size(self.smoothing.weighted_rows)
        shape = jax.ShapeDtypeStruct(self._hidden_shape, jnp.float32 if scale is None else c.dtype)
        if c.sliced:
            arguments["fresh"] = _is_first(start)
        kernel = functools.partial(hopper.hidden, adds=c.sliced, turned=c.turned, across=c.across)
        results = _into(kernel, arguments, {"out": state.hidden}, {"out": shape})
        return state._replace(hidden=results["out"])

    def _hidden_in_parts(
        self, before: Array | None, rows: Rows, arguments: dict[str, Array], scale: Array | None
    ) -> Array:
        """:meth:`hidden`, each tile in parts along the vocabulary. XLA adds them up. ``before``: dX as far as it is."""
        c, parts, length = self.call, self.call.plan.hidden_parts, round_up(self.call.chunk, 8)
        shape = jax.ShapeDtypeStruct((parts * c.rows, c.padded_size), jnp.float32)
        kernel = functools.partial(hopper.hidden, adds=False, turned=c.turned, across=c.across, parts=parts)
        made = kernel(arguments, {"out": shape})["out"].reshape(parts, c.rows, c.padded_size)[:, :length].sum(axis=0)
        if scale is not None:
            if self.smoothing is not None and self.smooth is not None:
                smooth = rows.pick(self.smooth)[:length, None]
                made = made + smooth * c.along_size(self.smoothing.weighted_rows)[: c.padded_size]
            made = (made * scale).astype(c.dtype)
        return made if before is None else lax.dynamic_update_slice_in_dim(before, made, rows.first[0], 0)

    def weight(
        self, state: State, rows: Rows, e: Array, x: Array, start: Index, scale: Array | None,
        listed: dict[str, Array] | None = None,
    ) -> State:  # fmt: skip
        """dW of a block, added to the sum if there is one. In a plan that lends, e becomes dW.

        scale: what the entries still lack when no other chunk follows. listed: rows to add (:func:`listed_targets`).
        """
        c = self.call
        if not self.needs.weight:
            return state
        arguments = {"rows": rows.number, "start": as_index(start), "x": x} | (listed or {})
        arguments |= c.slice_at(start)
        turned = c.turned and scale is not None  # sums over chunks are [V, D] all the same: read as they are written
        size = (c.padded_vocab, c.padded_size)
        shape = size[::-1] if turned else size
        outs, shapes = {"out": state.weight}, {"out": jax.ShapeDtypeStruct(shape, c.dtype)}
        if c.in_place:
            outs["out"] = e
        if not c.in_place or interpreted():
            arguments["e"] = e
        adds = state.low is not None
        if turned and adds and state.weight is not None:
            arguments["high"], outs["out"] = state.weight, None
        if adds and scale is None:
            arguments["fresh"] = _is_first(rows.first)
        if scale is None:
            outs["low"], shapes["low"] = state.low, jax.ShapeDtypeStruct(size, jnp.int8)
        else:
            arguments["scale"] = scale.reshape(1)
            if state.low is not None:
                arguments["low"] = state.low
            if self.smooth_x is not None:
                arguments["smooth_x"] = c.along_size(self.smooth_x)
                if c.class_weight is not None:
                    arguments["class_weight"] = c.class_weight
        kernel = functools.partial(hopper.weight, columns=c.columns, adds=adds, turned=turned, in_place=c.in_place)
        results = _into(kernel, arguments, outs, shapes)
        return state._replace(weight=results["out"], low=results.get("low"))

    def bias(self, state: State, rows: Rows, e: Array, start: Index, factor: Array | None) -> State:
        """db of a block, relative to the unit."""
        if not self.needs.bias:
            return state
        columns = self.call.columns
        if self.call.across:
            assert factor is not None
            part = _row_sums(e[:columns], rows.exists, factor)
        else:
            arguments = {"rows": rows.number, "e": e} | ({} if factor is None else {"factor": factor})
            part = row_kernels.column_sums(arguments)[:columns]
        old = self._no_bias() if state.bias is None else state.bias
        part = part + lax.dynamic_slice_in_dim(old, start, columns)
        return state._replace(bias=lax.dynamic_update_slice_in_dim(old, part, start, 0))

    def last_bias(self, state: State, rows: Rows, e: Array, factors: Factors, by_token: Factors) -> State:
        """db with the last chunk's share, and what all targets' elements still lack."""
        state = self.bias(state, rows, e, 0, factors.factor)
        if state.bias is None:
            return state
        key, _, rest = _sorted_targets(self.call, by_token.rest)
        total, ends = run_sums(key, rest)
        places = jnp.where(ends, key, self.call.padded_vocab)
        return state._replace(bias=state.bias.at[places].add(total, mode="drop"))

    def finish(self, state: State, scale: Array, lent: Array | None = None) -> Gradients:
        """The gradients in the caller's order and sizes. db, and dX where it is float32, still lack the scale.

        ``lent``: a matrix that nothing else will read, which dX lies in if it has dX's shape and dtype.
        """
        c = self.call
        hidden = None if state.hidden is None else self._hidden_by_token(state.hidden, scale, lent)
        weight = state.weight
        if weight is not None:
            weight = (weight.T if c.turned else weight)[: c.vocab, : c.size]
        bias = state.bias
        if bias is not None:
            bias = bias[: c.vocab]
            if self.smoothing is not None:
                share, k = self.smoothing.factor * self.g.sum(), c.inputs.class_weight
                bias = bias - (share if k is None else share * k)
            bias = bias * scale
        return Gradients(hidden, weight, bias)

    def _hidden_by_token(self, hidden: Array, scale: Array, lent: Array | None) -> Array:
        """dX by token. float32 sums get their scale and label smoothing's part; ignored tokens get 0."""
        c = self.call
        more = round_up(c.tokens, row_kernels.RUN) - c.tokens
        position = jnp.pad(jnp.where(c.inputs.valid, c.position, -1), (0, more), constant_values=-1)
        arguments = {"position": position, "made": hidden}
        if hidden.dtype == jnp.float32:
            arguments["scale"] = scale.astype(jnp.float32).reshape(1)
            if self.smoothing is not None and self.smooth is not None:
                arguments["smooth"] = jnp.pad(self.smooth, (0, more))
                arguments["weighted_rows"] = c.along_size(self.smoothing.weighted_rows)
        out = jax.ShapeDtypeStruct((c.tokens, c.padded_size), c.hidden_dtype)
        lends = lent is not None and (lent.shape, lent.dtype) == (out.shape, out.dtype)
        results = _into(row_kernels.by_token, arguments, {"out": lent if lends else None}, {"out": out})
        return results["out"][:, : c.size]


def _row_sums(e: Array, exists: Array, factor: Array) -> Array:
    """Σ_r factor_r e_jr of eᵀ [V, ≥ rows] in float32, over the rows that exist."""
    rows = min(e.shape[1], exists.shape[0])
    return jnp.where(exists[:rows], e[:, :rows].astype(jnp.float32) * factor[:rows], 0.0).sum(axis=1)


def _is_first(start: Index) -> Array:
    """Whether the block that begins there is the first, as kernels read it: [1] int32."""
    return (as_index(start) == 0).astype(jnp.int32)


def _into(
    kernel: Callable[[launch.Arguments, launch.Shapes], dict[str, Array]], arguments: dict[str, Array],
    outs: dict[str, Array | None], shapes: launch.Shapes,
) -> dict[str, Array]:  # fmt: skip
    """The kernel's results: ``outs`` written in place, or where there are none, new arrays of ``shapes``."""
    references = {name: launch.reference(out) for name, out in outs.items() if out is not None}
    if not references:
        return kernel(arguments, shapes)
    kernel({**arguments, **references}, {})
    return {name: launch.written(reference) for name, reference in references.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The targets' elements


def _sorted_targets(c: KernelCall, values: Carry) -> tuple[Array, Array, Carry]:
    """The targets sorted, their tokens in the tokens' order, and their values; no target comes last."""
    place = c.inputs.shard.place(c.inputs.target)
    real = c.inputs.valid & c.inputs.inside
    key = jnp.where(real & (place >= 0) if c.inputs.shard.active else real, place, c.padded_vocab)
    key, token = lax.sort((key, jnp.arange(c.tokens, dtype=jnp.int32)), num_keys=1, is_stable=True)
    return key, token, jax.tree.map(lambda vector: vector[token], values)


def _add_targets(c: KernelCall, key: Array, token: Array, vectors: Factors, outs: dict[str, Array]) -> dict[str, Array]:
    """``outs`` with what the products lack of the targets' elements of dW: a sum of several chunks, or rows alone.

    ``key``: which of the rows each token of the sorted ones has; their number where there is none.
    """
    rows, more = outs["out"].shape[0], round_up(c.tokens, row_kernels.RUN) + row_kernels.RUN - c.tokens
    keys = {"key": jnp.pad(key, (0, more), constant_values=rows)}
    lists = {"token": token} | vectors._asdict()
    lists = {name: jnp.pad(vector, (0, more)) for name, vector in lists.items()} | {"x": c.hidden}
    references = {name: launch.reference(out) for name, out in outs.items()}
    part = row_kernels.add_targets({**keys, **lists, **references})
    row_kernels.add_long_runs({**keys, "part": part, **references})
    return {name: launch.written(out) for name, out in references.items()}


def add_to_sum(c: KernelCall, state: State, by_token: Factors) -> State:
    """The sum of several chunks, with what it lacks of the targets' elements."""
    if state.weight is None or state.low is None:
        return state
    key, token, vectors = _sorted_targets(c, by_token)
    summed = _add_targets(c, key, token, vectors, {"out": state.weight, "low": state.low})
    return state._replace(weight=summed["out"], low=summed["low"])


def listed_targets(c: KernelCall, by_token: Factors) -> dict[str, Array]:
    """Rows that hold what one chunk's product lacks of the targets' elements, as arguments of hopper.weight."""
    key, token, vectors = _sorted_targets(c, by_token)
    real, first = key < c.padded_vocab, key != jnp.roll(key, 1).at[0].set(-1)
    seen = jnp.cumsum(first & real, dtype=jnp.int32)
    place, places = seen - 1, round_up(c.tokens, HOPPER.step)
    listed = jnp.zeros((places, c.padded_size), c.dtype)
    listed = _add_targets(c, jnp.where(real, place, places), token, vectors, {"out": listed})["out"]

    rows = hopper.pair_rows()
    pairs = round_up(c.vocab, rows) // rows
    # How many listed rows lie below each edge. XLA makes one kernel of this sum, and three of a search.
    edge = jnp.arange(pairs + 1, dtype=jnp.int32)[:, None] * rows
    fresh = lax.optimization_barrier(jnp.where(first & real, key, c.vocab + rows))
    bounds = (fresh[None, :] < edge).sum(axis=1, dtype=jnp.int32)
    pair, listed_rows = jnp.minimum(key // rows, pairs), hopper.listed_rows()
    size = pairs * listed_rows + HOPPER.step  # they are asked for a step ahead
    number = pair * listed_rows + place - bounds[pair] // HOPPER.tiling * HOPPER.tiling
    number = jnp.where(first & real, number, size)
    numbers = jnp.full(size, -1, jnp.int32).at[number].set(key - pair * rows, mode="drop")
    return {"listed": listed, "bounds": bounds, "numbers": numbers}
