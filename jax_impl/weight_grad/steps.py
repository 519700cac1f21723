"""A call's forward and its backward at once, for an upstream gradient that is known, compiled once for a call's sizes.

| what | flops |
| --- | --- |
| mean, sum, a plan in one pass | 6·N·D·V |
| none, a plan that knows lse first | 8 |
| hidden's gradient alone, and dW and db later | 4 or 6, and 4 |
"""

from __future__ import annotations

import functools
from typing import NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from logitless.jax_impl import checks, vjp
from logitless.jax_impl.call import Arrays, Call, Gradients, Needs, Shared, TokenSums
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.vjp import Known, Like
from logitless.spec import TokenStats

Tree = TypeVar("Tree")


class Values(NamedTuple):
    """The loss, statistics or None, and the gradients that were asked for."""

    loss: Array
    stats: TokenStats[Array] | None
    gradients: Gradients

    @property
    def value(self) -> Array | tuple[Array, TokenStats[Array]]:
        return self.loss if self.stats is None else (self.loss, self.stats)


class Kept(NamedTuple):
    """What dW and db can be computed from beside the call's arguments."""

    sums: TokenSums
    shared: Shared | None
    upstream: Array


@jax.custom_jvp
def constants(arrays: Tree) -> Tree:
    """The arrays themselves. A derivative is refused: the gradients are results already."""
    return arrays


@constants.defjvp
def _refuse(_: object, __: object) -> NoReturn:
    raise NotImplementedError(
        "linear_cross_entropy_value_and_grad: got arrays that are differentiated, allowed are constants: its results "
        "are values; linear_cross_entropy can be differentiated"
    )


def cast_weight(gradient: Array, like: Like, into: Array | None) -> Array:
    """The last cast: of dW as ``like`` says, of a buffer with dW in it back to its own dtype, which loses nothing.

    Raises ValueError if JAX knows the buffer as the same on devices that have added different gradients.
    """
    if into is None:
        return like.cast(gradient)
    beyond = parallel.varying(gradient) - parallel.varying(into)
    if beyond:
        raise ValueError(
            f"accumulate_into: got a buffer that is the same on all devices of {tuple(sorted(beyond))}, allowed is "
            f"each device's own (jax.lax.pcast(..., to='varying')): it adds up the gradients of its own tokens, and "
            f"jax.lax.psum adds the buffers"
        )
    return gradient.astype(into.dtype)


def _gradients(
    call: Call, arrays: Arrays[Array], upstream: Array, needs: Needs
) -> tuple[vjp.LossAndLse, Known, Gradients]:
    arrays, upstream = constants((arrays, upstream))
    checks.check_tracked(call.shard, needs)
    known_now = call.one_pass and any(needs)
    output, known, held = vjp.loss_and_sums(call, arrays, needs, upstream if known_now else None)
    arriving = jnp.ones_like(upstream) if known_now else upstream
    made = vjp.loss_gradients(call, known if held is None else held, needs, arriving, None)
    hidden_like, weight_like, bias_like = vjp.likes_of(arrays)
    weight = None if made.weight is None else cast_weight(made.weight, weight_like, arrays.accumulate_into)
    ((hidden, _, bias, *_),) = vjp.cotangents_of(
        made._replace(weight=None), (hidden_like, weight_like, bias_like), call.shard
    )
    return output, known, Gradients(hidden, weight, bias)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(call: Call, arrays: Arrays[Array], upstream: Array) -> Values:
    """All gradients: of the weight, the buffer with it where there is one."""
    (loss, _, stats), _, gradients = _gradients(call, arrays, upstream, Needs(True, True, arrays.bias is not None))
    return Values(loss, stats, gradients)


@functools.partial(jax.jit, static_argnums=0)
def value_and_hidden_grad(call: Call, arrays: Arrays[Array], upstream: Array) -> tuple[Values, Kept]:
    """Hidden's gradient, and what the others can be computed from."""
    (loss, _, stats), known, gradients = _gradients(call, arrays, upstream, Needs(True, False, False))
    sums = TokenSums(known.sums.target_logit, known.sums.anchor, known.sums.log_total)
    return Values(loss, stats, gradients), Kept(sums, known.shared, upstream)


@jax.jit
def weight_grad(
    call: Call, arrays: Arrays[Array], kept: Kept, likes: tuple[Like, Like | None]
) -> tuple[Array, Array | None]:
    """dW, or the buffer with it, and db or None: 4·N·D·V flops."""
    arrays, kept = constants((arrays, kept))
    like, bias_like = likes
    needs = Needs(hidden=False, weight=True, bias=bias_like is not None)
    made = vjp.loss_gradients(call, Known(arrays, kept.sums, kept.shared), needs, kept.upstream, None)
    assert made.weight is not None
    weight = cast_weight(made.weight, like, arrays.accumulate_into)
    return weight, None if made.bias is None or bias_like is None else bias_like.cast(made.bias)
