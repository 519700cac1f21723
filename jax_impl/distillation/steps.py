"""A distillation's losses and gradients: by whole rows (whole_rows.py), or tile by tile. Mirror of
torch_impl/distillation/steps.py.

A tile [C, B] of the student's logits serves the divergence from the teacher and the hard loss. The whole logits of
neither side exist. lse comes in two parts, a logit not far below the largest and the rest, so that large logits cost no
accuracy, nor do saturated sides.

Where devices share the vocabulary, each has the rows or tiles of its own entries.

Rounding: as in xla.py, with the gradient of a tile rounded to the student's dtype, and accumulated in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from logitless import numerics
from logitless.jax_impl import checks, vjp
from logitless.jax_impl.call import XP, Arrays, Gradients, Inputs, Needs
from logitless.jax_impl.chunk import logits_block, rows_of, slope, temperature_column, tile_gradients, unpadded
from logitless.jax_impl.distillation import whole_rows
from logitless.jax_impl.distillation.parts import Divergence, Hard, Kept, Part, RestClass, Sums
from logitless.jax_impl.distillation.teachers import Dense, Head, Program, Spread
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.residuals import Packed, Pytree, packed, unpacked
from logitless.jax_impl.slices import Index, for_slices, put, take
from logitless.objectives import Tile, WholeRows
from logitless.spec import LossOptions

Constants = tuple[Pytree, ...]
"""What is known of the teacher, and of the student beside its arrays."""


class Soft(Protocol):
    """What kind of teacher there is, and everything about it that is no array. Hashable."""

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        """The divergence from it; ``constants`` as the kind has them."""


@dataclasses.dataclass(frozen=True)
class FromHead:
    """Of a teacher's head. Constants: its Arrays; of tiles its lse and the student's lse."""

    options: LossOptions

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        arrays, (teacher_lse, lse) = constants[0], constants[1:] or (None, None)
        teacher = Inputs.of(arrays, self.options.ignore_index, inputs.shard)
        return Divergence(Head(teacher, self.options, teacher_lse, inputs.accumulation_dtype), lse, beta, inputs.shard)


@dataclasses.dataclass(frozen=True)
class FromIds:
    """Of given ids. Constants: ids [N, K], log p [N, K], of the rest [N]; of tiles the student's lse if the rest is
    spread."""

    spread: bool

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        ids, log_p, log_rest, *lse = constants
        shard = inputs.shard
        if self.spread:
            return Divergence(Spread(ids, log_p, log_rest, shard), lse[0] if lse else None, beta, shard)
        return RestClass(ids, log_p.dtype, shard, jnp.concatenate([log_p, log_rest[:, None]], axis=1), beta)


@dataclasses.dataclass(frozen=True)
class FromDense:
    """Of all probabilities. Constants: the teacher's array, or what its program closes over; of tiles the student's
    lse."""

    program: Program | None
    log: bool

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        source, *lse = constants
        teacher = Dense(source, self.program, self.log, inputs.accumulation_dtype)
        return Divergence(teacher, lse[0] if lse else None, beta, inputs.shard)


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Everything about a call that is not an array. A static argument of jax.jit."""

    soft: Soft
    beta: float
    nll_coef: float
    temperature: float
    """Of all tokens; 1 where each has its own."""
    options: LossOptions
    """Of the student's logits, temperature included."""
    order: WholeRows | Tile
    shard: Shard
    """This device's slice of the vocabulary."""

    def inputs(self, given: DistillationArrays) -> Inputs:
        """The student's."""
        return Inputs.of(given.arrays, self.options.ignore_index, self.shard)

    def prepared(self, given: DistillationArrays) -> tuple[Inputs, list[Part]]:
        """The student's inputs, and the losses: the hard one, if there is one, and the divergence."""
        inputs = self.inputs(given)
        parts = [self.soft.part(inputs, given.constants, self.beta)]
        if given.hard is not None:
            temperature = self.temperature if inputs.temperature is None else inputs.temperature
            ids, dtype = given.hard[:, None], inputs.accumulation_dtype
            parts.insert(0, Hard(ids, dtype, inputs.shard, self.nll_coef, temperature))
        return inputs, parts


class DistillationArrays(NamedTuple):
    """A call's arrays."""

    arrays: Arrays[Array]
    """The student's."""
    hard: Array | None
    """[N] the ids of the hard loss, inside the vocabulary."""
    constants: Constants


def _losses(call: Distillation, given: DistillationArrays, *, differentiate: bool) -> tuple[Array, Pytree]:
    """The losses of every token, 0 where it does not count, and what the backward needs beside the arrays."""
    inputs, parts = call.prepared(given)
    if isinstance(call.order, WholeRows):
        return whole_rows.forward(inputs, parts, call.options, call.order, differentiate=differentiate)
    return _forward(inputs, parts, call.options, call.order)


def _forward(inputs: Inputs, parts: list[Part], options: LossOptions, tile: Tile) -> tuple[Array, list[Kept]]:
    """The losses of every token, and what each part has kept."""

    def chunk(carry: tuple[Array, list[Kept]], first: Index, tokens: int) -> tuple[Array, list[Kept]]:
        x = rows_of(inputs, first, tokens)

        def block(sums: list[Sums], start: Index, width: int) -> list[Sums]:
            z = unpadded(logits_block(x, inputs, first, start, width, options), inputs.shard.limit(), start)
            return [part.add(of, z, first, start) for part, of in zip(parts, sums, strict=True)]

        sums = for_slices(tile.vocab, tile.vocab_chunk, block, [part.start(first, tokens) for part in parts])
        losses, kept = zip(*(part.finish(of, first) for part, of in zip(parts, sums, strict=True)), strict=True)
        whole: tuple[Array, list[Kept]] = jax.tree.map(
            lambda array, own: put(array, own, first), carry, (sum(losses[1:], losses[0]), list(kept))
        )
        return whole

    shapes = jax.eval_shape(lambda: [part.finish(part.start(0, tile.tokens), 0)[1] for part in parts])
    nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    zero = jnp.zeros(tile.tokens, inputs.accumulation_dtype)
    losses, kept = for_slices(tile.tokens, tile.token_chunk, chunk, (zero, nothing))
    return jnp.where(inputs.valid, losses, 0.0), kept


def _gradients(
    inputs: Inputs, parts: list[Part], kept: list[Kept], upstream: Array, call: Distillation, needs: Needs
) -> Gradients:
    """dX, dW and db, each None unless wanted: 6·N·D·V flops beside the teacher's."""
    assert isinstance(call.order, Tile)
    factor = numerics.row_upstream(XP, inputs, call.options, inputs.wide(upstream))
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, factor)
    factor = factor / unit

    def logit_gradient(x: Array, first: Index, start: Index, columns: int) -> Array:
        tokens = x.shape[0]
        z = unpadded(logits_block(x, inputs, first, start, columns, call.options), inputs.shard.limit(), start)
        own = (jax.tree.map(lambda values: take(values, first, tokens), of) for of in kept)
        slopes = [part.gradient(of, z, first, start) for part, of in zip(parts, own, strict=True)]
        dz = sum(slopes[1:], slopes[0])
        if call.options.softcap is not None:
            dz = dz * slope(z, call.options, temperature_column(inputs, first, tokens))
        dz = unpadded(dz * take(factor, first, tokens)[:, None], inputs.shard.limit(), start, 0.0)
        return jnp.where(take(inputs.valid, first, tokens)[:, None], dz, 0.0)

    return tile_gradients(inputs, call.order, needs, unit, logit_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(call: Distillation, given: DistillationArrays) -> Array:
    return _losses(call, given, differentiate=False)[0]


def _divergence_forward(call: Distillation, primals: Pytree) -> tuple[Array, Packed]:
    needs = Needs(*(leaf is not None and leaf.perturbed for leaf in primals.arrays[:3]))
    checks.check_tracked(call.shard, needs)
    given: DistillationArrays = vjp.values_of(primals)
    losses, kept = _losses(call, given, differentiate=any(needs))
    if isinstance(call.order, WholeRows):  # which have done with the teacher
        given = given._replace(hard=None, constants=())
    return losses, packed((given, kept, vjp.likes_of(given.arrays)), needs)


def _divergence_backward(call: Distillation, residuals: Packed, cotangent: vjp.Cotangent) -> tuple[Pytree]:
    (given, kept, likes), flags = unpacked(residuals)
    upstream, gradients = vjp.arrived(cotangent), Gradients(None, None, None)
    if upstream is not None and any(flags):
        needs, dtype = Needs(*flags), given.arrays.weight.dtype
        if isinstance(call.order, WholeRows):
            inputs = call.inputs(given)
            gradients = whole_rows.gradients(inputs, call.options, call.order, kept, upstream, dtype, needs)
        else:
            gradients = _gradients(*call.prepared(given), kept, upstream, call, needs)
    (arrays,) = vjp.cotangents_of(gradients, likes, call.shard)
    return (DistillationArrays(arrays, None, None),)  # type: ignore[arg-type]  # cotangents, None where there is none


_divergence.defvjp(_divergence_forward, _divergence_backward, symbolic_zeros=True)

# Compiled once for a Distillation and shapes, also when the caller does not use jax.jit.
divergence = jax.jit(_divergence, static_argnums=0)
