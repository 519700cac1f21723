"""A distillation as one differentiable function of the student's arrays. Mirror of torch_impl/distillation/steps.py.

A logit of the student serves the divergence from the teacher and the hard loss. The whole logits of neither side exist:
whole_rows.py makes a few tokens' at a time. Where devices share the vocabulary, each has the rows of its own entries.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from logitless.jax_impl import checks, vjp
from logitless.jax_impl.call import Arrays, Gradients, Inputs, Needs
from logitless.jax_impl.distillation import whole_rows
from logitless.jax_impl.distillation.parts import Divergence, Hard, Losses, Part, RestClass
from logitless.jax_impl.distillation.teachers import Dense, Head, Program, Spread
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.residuals import Packed, Pytree, packed, unpacked
from logitless.objectives import WholeRows
from logitless.spec import LossOptions

Constants = tuple[Pytree, ...]
"""What is known of the teacher."""


class Soft(Protocol):
    """What kind of teacher there is, and everything about it that is no array. Hashable."""

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        """The divergence from it; ``constants`` as the kind has them."""


@dataclasses.dataclass(frozen=True)
class FromHead:
    """Of a teacher's head. Constants: its Arrays."""

    options: LossOptions

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        teacher = Inputs.of(constants[0], self.options.ignore_index, inputs.shard)
        return Divergence(Head(teacher, self.options, inputs.accumulation_dtype), beta, inputs.shard)


@dataclasses.dataclass(frozen=True)
class FromIds:
    """Of given ids. Constants: ids [N, K], log p [N, K], of the rest [N]."""

    spread: bool

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        ids, log_p, log_rest = constants
        if self.spread:
            return Divergence(Spread(ids, log_p, log_rest, inputs.shard), beta, inputs.shard)
        return RestClass(ids, inputs.shard, jnp.concatenate([log_p, log_rest[:, None]], axis=1), beta)


@dataclasses.dataclass(frozen=True)
class FromDense:
    """Of all probabilities. Constants: the teacher's array, or what its program closes over."""

    program: Program | None
    log: bool

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        teacher = Dense(constants[0], self.program, self.log, inputs.accumulation_dtype)
        return Divergence(teacher, beta, inputs.shard)


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
    order: WholeRows
    kernel: bool
    """Whether kernels may make the losses."""
    shard: Shard
    """This device's slice of the vocabulary."""

    def inputs(self, given: DistillationArrays) -> Inputs:
        """The student's."""
        return Inputs.of(given.arrays, self.options.ignore_index, self.shard)

    def losses(self, given: DistillationArrays) -> Losses:
        inputs = self.inputs(given)
        parts = [self.soft.part(inputs, given.constants, self.beta)]
        if given.hard is not None:
            temperature = self.temperature if inputs.temperature is None else inputs.temperature
            parts.insert(0, Hard(given.hard[:, None], inputs.shard, self.nll_coef, temperature))
        return Losses(inputs, parts, self.options, self.order, self.kernel)


class DistillationArrays(NamedTuple):
    """A call's arrays."""

    arrays: Arrays[Array]
    """The student's."""
    hard: Array | None
    """[N] the ids of the hard loss, inside the vocabulary."""
    constants: Constants


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(call: Distillation, given: DistillationArrays) -> Array:
    return whole_rows.forward(call.losses(given), differentiate=False)[0]


def _divergence_forward(call: Distillation, primals: Pytree) -> tuple[Array, Packed]:
    needs = Needs(*(leaf is not None and leaf.perturbed for leaf in primals.arrays[:3]))
    checks.check_tracked(call.shard, needs)
    given: DistillationArrays = vjp.values_of(primals)
    losses, kept = whole_rows.forward(call.losses(given), differentiate=any(needs))
    if call.order.again is None:  # the backward has done with the teacher
        given = given._replace(hard=None, constants=())
    return losses, packed((given, kept, vjp.likes_of(given.arrays)), needs)


def _divergence_backward(call: Distillation, residuals: Packed, cotangent: vjp.Cotangent) -> tuple[Pytree]:
    (given, kept, likes), flags = unpacked(residuals)
    upstream, gradients = vjp.arrived(cotangent), Gradients(None, None, None)
    if upstream is not None and any(flags):
        needs, dtype = Needs(*flags), given.arrays.weight.dtype
        if call.order.again is None:
            inputs, ((gradient,),) = call.inputs(given), kept
            gradients = whole_rows.gradients(inputs, call.options, call.order, gradient, upstream, dtype, needs)
        else:
            gradients = whole_rows.gradients_again(call.losses(given), kept, upstream, needs)
    (arrays,) = vjp.cotangents_of(gradients, likes, call.shard)
    return (DistillationArrays(arrays, None, None),)  # type: ignore[arg-type]  # cotangents, None where there is none


_divergence.defvjp(_divergence_forward, _divergence_backward, symbolic_zeros=True)

# Compiled once for a Distillation and shapes, also when the caller does not use jax.jit.
divergence = jax.jit(_divergence, static_argnums=0)
