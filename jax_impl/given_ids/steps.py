"""What :mod:`logitless.jax_impl.given_ids.api` computes, as one differentiable function. Mirror of
torch_impl/given_ids/steps.py.

    log p_k = (z_k − z_best) + log p_best          best: the given id with the largest logit
    dz_j    = Σ_{k: id_k = j} g_k − G p_j          G = Σ_k g_k

The logits of the given ids are dot products with gathered rows of the weight. log p_best comes from the backend's pass
for the logsumexps, anchored at best's logit, so a confident token has all its digits. The backward makes a tile [C, B]
of the logits' gradient at a time, in plain operations. At best it is G (1 − p_best) − Σ_{k: id_k ≠ best} g_k, which
does not cancel as p_best → 1.

Rounding: as in xla.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal

from logitless import numerics
from logitless.given_ids import IdsCut
from logitless.jax_impl import checks, vjp
from logitless.jax_impl.call import NOTHING, XP, Arrays, Call, Gradients, Inputs, Needs, TokenSums
from logitless.jax_impl.chunk import (
    capped,
    is_target,
    logits_block,
    rows_of,
    slope,
    temperature_column,
    tile_gradients,
    unpadded,
)
from logitless.jax_impl.residuals import Packed, packed, unpacked
from logitless.jax_impl.slices import Index, for_slices, put, rows_at, take
from logitless.spec import LossOptions

# Stands for no id: it comes after all others.
BEYOND = 2**31 - 1


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class IdsCall:
    """Everything about a call that is not an array. A static argument of jax.jit."""

    call: Call
    cut: IdsCut

    @property
    def options(self) -> LossOptions:
        return self.call.options


class Pairs(NamedTuple):
    """A token and an id each, [N, K]."""

    ids: Array  # [N, K] int32
    ignored: Array  # [N, K] bool
    known: Array  # [N, K] bool: neither ignored nor outside the vocabulary

    @staticmethod
    def of(ids: Array, inputs: Inputs, ignore_index: int) -> Pairs:
        """From ids [N, K] or [K]."""
        ids = jnp.broadcast_to(ids, (inputs.hidden.shape[0], ids.shape[-1]))
        ignored = ids == ignore_index
        return Pairs(ids, ignored, ~ignored & (ids >= 0) & (ids < inputs.vocab))

    def any_id(self, ignore_index: int) -> Array:
        """Some known id of every token, ignore_index if there is none: it says which tokens count."""
        return self._at(jnp.argmax(self.known, axis=1)[:, None], ignore_index)

    def best(self, z: Array, ignore_index: int) -> tuple[Array, Array]:
        """Of every token the place of the known id with the largest logit, and that id; ignore_index if there is none.

        Banned ids have a logit of −inf, which is above that of an id that is not known.
        """
        least = float(np.finfo(z.dtype).min)
        place = jnp.argmax(jnp.where(self.known, jnp.maximum(z, least), -jnp.inf), axis=1)[:, None]
        return place, self._at(place, ignore_index)

    def _at(self, place: Array, ignore_index: int) -> Array:
        chosen = jnp.take_along_axis(self.ids, place, axis=1)[:, 0]
        return jnp.where(self.known.any(axis=1), chosen, jnp.asarray(ignore_index, self.ids.dtype))


def _whole_hidden(arrays: Arrays[Array], call: Call) -> tuple[Arrays[Array], Call]:
    """The arrays with the hidden states of all tokens in rows [N, D], and a call on them."""
    hidden = call.shard.gather(arrays.hidden.reshape(-1, arrays.hidden.shape[-1]))
    call = dataclasses.replace(call, shard=dataclasses.replace(call.shard, sequence_parallel=False))
    return arrays._replace(hidden=hidden, target=arrays.target.reshape(-1)), call


def _inputs(arrays: Arrays[Array], call: Call, target: Array) -> Inputs:
    return Inputs.of(arrays._replace(target=target), call.options.ignore_index, call.shard)


def _given_logits(inputs: Inputs, ids: Array, options: LossOptions, cut: IdsCut) -> Array:
    """z of the given ids, [N, K]; of an id that is not known, of some other one. ids [N, K] or [K]."""
    known = (ids >= 0) & (ids < inputs.vocab)
    place = inputs.shard.place(jnp.where(known, ids, 0))
    own = jnp.maximum(place, 0)
    z = _shared_logits(inputs, own, options, cut) if ids.ndim == 1 else _gathered_logits(inputs, own, options, cut)
    return inputs.shard.total(jnp.where(place >= 0, z, 0.0)) if inputs.shard.active else z


def _shared_logits(inputs: Inputs, ids: Array, options: LossOptions, cut: IdsCut) -> Array:
    """z [N, K] of ids [K]: a product with their rows of the weight."""
    bias = None if inputs.bias is None else rows_at(inputs.bias, ids)
    head = inputs._replace(weight=rows_at(inputs.weight, ids), bias=bias)
    tokens = inputs.hidden.shape[0]

    def chunk(z: Array, first: Index, size: int) -> Array:
        return put(z, logits_block(rows_of(inputs, first, size), head, first, 0, cut.ids, options), first)

    return for_slices(tokens, cut.tile.token_chunk, chunk, jnp.zeros((tokens, cut.ids), inputs.accumulation_dtype))


def _gathered_logits(inputs: Inputs, ids: Array, options: LossOptions, cut: IdsCut) -> Array:
    """z [N, K] of ids [N, K]: dot products with gathered rows of the weight."""
    dtype = inputs.accumulation_dtype

    def chunk(z: Array, first: Index, tokens: int) -> Array:
        x = rows_of(inputs, first, tokens).astype(dtype)[:, None]
        here = take(ids, first, tokens)

        def some(dots: Array, start: Index, size: int) -> Array:
            own = lax.dynamic_slice_in_dim(here, start, size, axis=1)
            part = (rows_at(inputs.weight, own).astype(dtype) * x).sum(axis=2)
            if inputs.bias is not None:
                part = part + rows_at(inputs.bias, own).astype(dtype)
            return put(dots, part, start, axis=1)

        dots = for_slices(cut.ids, cut.id_chunk, some, jnp.zeros(here.shape, dtype))
        return put(z, capped(dots, options, temperature_column(inputs, first, tokens)), first)

    return for_slices(ids.shape[0], cut.token_chunk, chunk, jnp.zeros(ids.shape, dtype))


# ---------------------------------------------------------------------------------------------------------------------
# The differentiable function


class Known(NamedTuple):
    """What the backward computes the gradients from."""

    arrays: Arrays[Array]
    ids: Array
    best: Array
    sums: TokenSums


def _forward(call: IdsCall, given: Arrays[Array], ids: Array, logits: Array | None) -> tuple[Array, Known]:
    """log p of the given ids, [N, K], 0 where ignored. logits [N, K]: of the ids, where they are known already."""
    (arrays, own), ignored = _whole_hidden(given, call.call), call.options.ignore_index
    pairs = Pairs.of(ids, _inputs(arrays, own, arrays.target), ignored)
    if logits is None:
        logits = _given_logits(_inputs(arrays, own, pairs.any_id(ignored)), ids, call.options, call.cut)
    place, best = pairs.best(logits, ignored)
    (log_p_best,), kept = vjp.log_probs_forward(own, arrays._replace(target=best), NOTHING)
    assert isinstance(kept, vjp.Known)
    highest = jnp.take_along_axis(logits, place, axis=1)
    below = jnp.where(logits == highest, 0.0, logits - highest)  # both may be −inf
    log_prob = jnp.where(pairs.known, below + log_p_best[:, None], jnp.where(pairs.ignored, 0.0, jnp.nan))
    return log_prob, Known(given, ids, best, kept.sums)


def _gradients(call: IdsCall, known: Known, upstream: Array, needs: Needs) -> Gradients:
    """dX, of which this device has its share, dW and db, each None unless wanted: 6·N·D·V flops."""
    (arrays, own), options = _whole_hidden(known.arrays, call.call), call.options
    inputs, sums = _inputs(arrays, own, known.best), known.sums
    pairs = Pairs.of(known.ids, inputs, options.ignore_index)
    g = jnp.where(pairs.known, inputs.wide(upstream), 0.0) * options.logit_scale
    g = g if inputs.temperature is None else g / inputs.temperature[:, None]
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, jnp.abs(g).sum(axis=1))
    g = g / unit
    total, rest = g.sum(axis=1), jnp.where(pairs.ids == known.best[:, None], 0.0, g).sum(axis=1)
    at_best = total * -jnp.expm1(-sums.nll) - rest
    at_best = numerics.sloped(XP, at_best, sums.target_logit, options, inputs.temperature)
    places, target = inputs.shard.place(pairs.ids), inputs.shard.place(inputs.target)
    limit = inputs.shard.limit()

    def logit_gradient(x: Array, first: Index, start: Index, columns: int) -> Array:
        tokens = x.shape[0]

        def column(values: Array) -> Array:
            return take(values, first, tokens)[:, None]

        z = logits_block(x, inputs, first, start, columns, options)
        p = jnp.exp((z - column(sums.anchor)) - column(sums.log_total))
        local = take(places, first, tokens) - start
        local = jnp.where((local >= 0) & (local < columns), local, columns)  # what is not here is dropped
        rows = jnp.arange(tokens)[:, None]
        dz = jnp.zeros_like(p).at[rows, local].add(take(g, first, tokens), mode="drop") - p * column(total)
        if options.softcap is not None:
            dz = dz * slope(z, options, temperature_column(inputs, first, tokens))
        dz = jnp.where(is_target(take(target, first, tokens), start, columns), column(at_best), dz)
        return jnp.where(column(inputs.valid), unpadded(dz, limit, start, 0.0), 0.0)

    return tile_gradients(inputs, call.cut.tile, needs, unit, logit_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(call: IdsCall, arrays: Arrays[Array], ids: Array, logits: Array | None) -> Array:
    return _forward(call, arrays, ids, logits)[0]


def _log_probs_forward(
    call: IdsCall, primals: Arrays[CustomVJPPrimal], ids: CustomVJPPrimal, logits: CustomVJPPrimal | None
) -> tuple[Array, Packed]:
    arrays, needs = vjp.values_and_needs(primals)
    checks.check_tracked(call.call.shard, needs)
    log_prob, kept = _forward(call, arrays, ids.value, None if logits is None else logits.value)
    return log_prob, packed((kept, vjp.likes_of(arrays)), needs)


def _log_probs_backward(
    call: IdsCall, residuals: Packed, cotangent: vjp.Cotangent
) -> tuple[Arrays[Array | None], None, None]:
    (kept, likes), needs = unpacked(residuals)
    upstream = vjp.arrived(cotangent)
    if upstream is None:
        return vjp.NO_COTANGENTS, None, None
    gradients = _gradients(call, kept, upstream, Needs(*needs))
    return *vjp.cotangents_of(gradients, likes, call.call.shard), None, None


_log_probs.defvjp(_log_probs_forward, _log_probs_backward, symbolic_zeros=True)


# ---------------------------------------------------------------------------------------------------------------------
# The largest logits


def _largest_logits(call: IdsCall, arrays: Arrays[Array]) -> tuple[Array, Array]:
    """The K largest logits of every token and their ids, [N, K] each, largest first; of equal ones the first id."""
    (arrays, own), cut = _whole_hidden(arrays, call.call), call.cut
    inputs = _inputs(arrays, own, arrays.target)
    limit, (vocab, _) = inputs.shard.limit(), inputs.weight.shape

    def chunk(found: tuple[Array, Array], first: Index, tokens: int) -> tuple[Array, Array]:
        x = rows_of(inputs, first, tokens)

        def block(best: tuple[Array, Array], start: Index, columns: int) -> tuple[Array, Array]:
            z = unpadded(logits_block(x, inputs, first, start, columns, call.options), limit, start)
            # Of equal elements top_k takes the first; −0 is not below 0.
            z, places = lax.top_k(jnp.where(z == 0, 0.0, z), min(cut.ids, columns))
            ids = places.astype(jnp.int32) + start
            if limit is not None:
                ids = jnp.where(ids < limit, ids, BEYOND)
            return _merged(jnp.concatenate([best[0], z], axis=1), jnp.concatenate([best[1], ids], axis=1), cut.ids)

        nothing = jnp.full((tokens, cut.ids), -jnp.inf, inputs.accumulation_dtype)
        z, ids = for_slices(vocab, cut.tile.vocab_chunk, block, (nothing, jnp.full(nothing.shape, BEYOND, jnp.int32)))
        return put(found[0], z, first), put(found[1], ids, first)

    shape = (inputs.hidden.shape[0], cut.ids)
    empty = jnp.zeros(shape, inputs.accumulation_dtype), jnp.zeros(shape, jnp.int32)
    return _of_all_devices(*for_slices(cut.tile.tokens, cut.tile.token_chunk, chunk, empty), inputs)


def _merged(z: Array, ids: Array, count: int) -> tuple[Array, Array]:
    """The largest logits and their ids; of equal ones the lowest ids."""
    negative, ids = lax.sort((-z, ids), num_keys=2)
    return -negative[:, :count], ids[:, :count]


def _of_all_devices(z: Array, ids: Array, inputs: Inputs) -> tuple[Array, Array]:
    """The largest of all devices' largest logits, and their ids."""
    shard, (tokens, count) = inputs.shard, z.shape
    if not shard.active:
        return z, ids
    ids = jnp.where(ids == BEYOND, BEYOND, ids + shard.first())
    # A sum with zeros in the others' places: its type is the same on all devices, which that of a gather is not.
    device = lax.axis_index(shard.axis_name)

    def gathered(part: Array) -> Array:
        own = put(jnp.zeros((shard.devices, tokens, count), part.dtype), part[None], device)
        return shard.total(own).transpose(1, 0, 2).reshape(tokens, -1)

    return _merged(gathered(z), gathered(ids), count)


# Compiled once for an IdsCall and shapes, also when the caller does not use jax.jit.
token_log_probs = jax.jit(_log_probs, static_argnums=0)
largest_logits = jax.jit(_largest_logits, static_argnums=0)
