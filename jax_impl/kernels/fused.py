"""The target-anchored chunk by Pallas kernels: the same verbs as jax_impl/xla.py.

Mirror of torch_impl/kernels/fused.py.

A loss's gradients in one pass are made in two steps: the forward writes a chunk's exponentials and, for every chunk but
the last, its products; the last chunk's products wait for the upstream scalar, so that dW is rounded once, with it, in
the epilogue of its last product. A plan with a single chunk needs no accumulator for that at all.

Rounding: logits, exponentials and sums are float32. What is stored of a chunk is rounded to the input dtype on its way
into the products, which accumulate in float32; what that rounding left out of the target's element, and of its share of
dW, is added in float32, before dW is rounded.

Sizes: a matrix moves in blocks of 8 rows and 64 columns. So a weight with V % 8 or D % 64 is copied, padded, and its
gradient is cut; a plan made with ``padded`` counts both. Beside the products the copies take under 2 % of the time.
Chunks of tokens and slices of the vocabulary begin at multiples of 8: a plan's smaller ones are rounded down.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, KnownRows, Needs, TokenSums
from logitless.jax_impl.chunk import empty_sums
from logitless.jax_impl.kernels import architecture
from logitless.jax_impl.kernels.held import Held, Waiting, held_gradients
from logitless.jax_impl.kernels.kernel_call import KernelCall
from logitless.jax_impl.kernels.loops import after, blocks, one_by_one
from logitless.jax_impl.kernels.products import GradientProducts, State, add_to_sum
from logitless.jax_impl.kernels.rows import Rows, own_target_logits
from logitless.jax_impl.kernels.sums import (
    Factors,
    Forwarded,
    chunk_sums,
    forward,
    held_matrix,
    known_matrix,
    smoothing_of,
    with_weighted,
)
from logitless.jax_impl.slices import Index
from logitless.planning import ChunkPlan
from logitless.spec import LossOptions, Statistics

with contextlib.suppress(ImportError):  # without absl, unavailable() says so before a kernel is launched
    from logitless.jax_impl.kernels import hopper

# What a backend has; the function that is not here is imported.
__all__ = [
    "finish",
    "holds",
    "known_gradients",
    "logits_gradients",
    "loss_gradients",
    "one_pass",
    "own_target_logits",
    "token_gradients",
    "token_logits",
    "token_sums",
    "unavailable",
]

DTYPES = ("bfloat16", "float16")


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Why these kernels cannot run on ``device`` (None: not known while tracing), or None."""
    return architecture.unusable(device, dtype, DTYPES)


def one_pass(dtype: jnp.dtype, options: LossOptions) -> bool:
    """Whether exponentials relative to the target can be held in ``dtype``: float16's range ends at 11 nats."""
    del options
    return bool(dtype != jnp.float16)


def holds(dtype: jnp.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token."""
    return bool(dtype != jnp.float16)


# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


def token_sums(inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, and no C × V matrix."""

    def run(inputs: Inputs) -> TokenSums:
        return _token_sums(KernelCall(inputs, options, plan), statistics)

    return one_by_one(run)(inputs)


def _token_sums(c: KernelCall, statistics: Statistics) -> TokenSums:
    smoothing = smoothing_of(c)

    def chunk(state: TokenSums, first: Index) -> TokenSums:
        rows = c.rows_at(first)
        sums, weighted, _ = chunk_sums(c, rows, statistics, hopper.SUMS)
        return rows.put(state, sums.finish(weighted))

    sums = blocks(chunk, c.by_position(empty_sums(c.inputs, c.sums_logits, statistics)), c.chunks, c.chunk)
    return with_weighted(c, c.by_token(sums), smoothing)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients in one pass

Vectors = tuple[TokenSums, Factors]
"""What the forward knows of every token, by position."""


def _vectors(c: KernelCall, statistics: bool) -> Vectors:
    """Vectors for the chunks' forwards to fill."""
    sums = empty_sums(c.inputs, c.sums_logits, statistics)
    some = sums.log_total
    return c.by_position((sums, Factors(some, some, some)))


def _filled(vectors: Vectors, part: Forwarded) -> Vectors:
    """``vectors`` with what a chunk's forward gives for its rows."""
    return part.rows.put(vectors, (part.sums, part.factors))


def loss_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Held]:
    """Sums, and gradients that wait for the upstream scalar: 6·N·D·V flops. There is at least one token."""

    def run(inputs: Inputs, g: Array) -> tuple[TokenSums, Waiting]:
        return _loss_gradients(KernelCall(inputs, options, plan), g, needs, statistics)

    sums, waiting = one_by_one(run)(inputs, g)
    return sums, Held(inputs, g, waiting)


def _loss_gradients(c: KernelCall, g: Array, needs: Needs, statistics: bool) -> tuple[TokenSums, Waiting]:
    p = GradientProducts(c, needs, g, numerics.largest_factor(XP, g))

    def chunk(carry: tuple[Vectors, State], first: Index) -> tuple[Vectors, State]:
        vectors, state = carry
        part = forward(c, first, p.g, statistics)
        x = part.factors.operand(part.rows, c.dtype)
        state = p.weight(state, part.rows, part.e, x, 0, None)
        state = p.hidden(state, part.rows, part.e, 0, part.factors, None)
        state = p.bias(state, part.rows, part.e, 0, part.factors.factor)
        return _filled(vectors, part), state

    carry = _vectors(c, statistics), p.begun(jnp.float32, parted=True) if c.chunks > 1 else State()
    carry = blocks(chunk, carry, c.chunks - 1, c.chunk)
    (vectors, state), last = after(carry, (c.chunks - 1) * c.chunk)
    part = forward(c, last, p.g, statistics)
    sums, by_token = c.by_token(_filled(vectors, part))
    state = p.last_bias(state, part.rows, part.e, part.factors, by_token)
    state = add_to_sum(c, state, by_token)
    x = None if c.in_place else part.factors.operand(part.rows, c.dtype)
    return with_weighted(c, sums, p.smoothing), Waiting(x, part.e, part.factors, by_token, state)


def token_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Held]:
    """Sums, and exponentials that wait for an upstream gradient per token: 6·N·D·V flops, in a plan of one chunk."""

    def run(inputs: Inputs, g: Array) -> tuple[TokenSums, Waiting]:
        c = KernelCall(inputs, options, plan)
        part = forward(c, jnp.int32(0), g / numerics.largest_factor(XP, g), statistics)
        sums, by_token = c.by_token(_filled(_vectors(c, statistics), part))
        waiting = Waiting(None, part.e, part.factors, by_token, State())
        return with_weighted(c, sums, smoothing_of(c)), waiting

    sums, waiting = one_by_one(run)(inputs, g)
    return sums, Held(inputs, g, waiting)


def finish(held: Held, options: LossOptions, plan: ChunkPlan, needs: Needs, upstream: Array) -> Gradients:
    """dX, dW and db with the upstream gradient, from what :func:`loss_gradients` or :func:`token_gradients` left."""

    def run(inputs: Inputs, g: Array, waiting: Waiting, upstream: Array) -> Gradients:
        return held_gradients(KernelCall(inputs, options, plan), g, waiting, needs, upstream)

    return one_by_one(run)(*held, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients when lse is known


def known_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Array, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, either order of the plan."""

    def run(inputs: Inputs, known: KnownRows, g: Array) -> Gradients:
        c, unit = KernelCall(inputs, options, plan), known.unit(XP)
        p = GradientProducts(c, needs, g, unit)
        if c.sliced:
            state, lent = _known_slices(c, p, known)
            return p.finish(state, unit, lent)
        return p.finish(_known_chunks(c, p, known), unit)

    return one_by_one(run)(inputs, known, g)


def token_logits(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics
) -> tuple[TokenSums, Array]:
    """Sums, and all logits in the input dtype's bits (arithmetic.held_of), for :func:`logits_gradients`: in a plan of
    one chunk 6·N·D·V flops together."""

    def run(inputs: Inputs) -> tuple[TokenSums, Array]:
        c = KernelCall(inputs, options, plan)
        rows = c.rows_at(jnp.int32(0))
        running, weighted, logits = chunk_sums(c, rows, statistics, hopper.HELD)
        assert logits is not None
        state = c.by_position(empty_sums(c.inputs, c.sums_logits, statistics))
        return c.by_token(rows.put(state, running.finish(weighted))), logits

    return one_by_one(run)(inputs)


def logits_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, needs: Needs, logits: Array
) -> Gradients:
    """:func:`known_gradients` from what :func:`token_logits` has left: 4·N·D·V flops."""

    def run(inputs: Inputs, known: KnownRows, logits: Array) -> Gradients:
        c, unit = KernelCall(inputs, options, plan), known.unit(XP)
        p, rows = GradientProducts(c, needs, known.factor, unit), c.rows_at(jnp.int32(0))
        e = held_matrix(c, unit, known, rows, logits)
        return p.finish(_add_known(p, State(), rows, e, final=True), unit)

    return one_by_one(run)(inputs, known, logits)


def _add_known(p: GradientProducts, state: State, rows: Rows, e: Array, final: bool) -> State:
    """A chunk's products, from the gradient's matrix e of all its entries. ``final``: it is the last chunk."""
    state = p.weight(state, rows, e, rows.x, 0, p.unit if final else None)
    state = p.hidden(state, rows, e, 0, None, p.unit)
    return p.bias(state, rows, e, 0, None)


def _known_chunks(c: KernelCall, p: GradientProducts, known: KnownRows) -> State:
    """The tokens order: dX is finished chunk by chunk, dW with the last chunk."""

    def chunk(state: State, first: Index, final: bool = False) -> State:
        rows = c.rows_at(first)
        return _add_known(p, state, rows, known_matrix(c, p.unit, known, rows, 0), final)

    state = p.begun(c.hidden_dtype, parted=True) if c.chunks > 1 else State()
    state, last = after(blocks(chunk, state, c.chunks - 1, c.chunk), (c.chunks - 1) * c.chunk)
    return chunk(state, last, final=True)


def _known_slices(c: KernelCall, p: GradientProducts, known: KnownRows) -> tuple[State, Array]:
    """The vocab order: dW is finished slice by slice, dX adds up in float32. Also rows.x, read for the last time."""
    rows = c.rows_at(jnp.int32(0))

    def part(state: State, start: Index) -> State:
        e = known_matrix(c, p.unit, known, rows, start)
        state = p.weight(state, rows, e, rows.x, start, p.unit)
        state = p.hidden(state, rows, e, start, None, None)
        return p.bias(state, rows, e, start, None)

    state = blocks(part, p.begun(jnp.float32, parted=False), -(-c.vocab // c.columns), c.columns)
    done: tuple[State, Array] = lax.optimization_barrier((state, rows.x))
    return done
