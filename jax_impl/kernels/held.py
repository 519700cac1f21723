"""What a forward leaves for its backward: the last chunk's exponentials, and sums."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, Needs
from logitless.jax_impl.kernels.kernel_call import KernelCall
from logitless.jax_impl.kernels.products import GradientProducts, State, listed_targets
from logitless.jax_impl.kernels.rows import Rows
from logitless.jax_impl.kernels.sums import Factors


class Waiting(NamedTuple):
    """Gradients made in the forward, waiting for the upstream gradient."""

    x: Array | None  # u ⊙ x of the last chunk; None where u lacks the tokens' upstream gradients, or dW comes last
    e: Array
    factors: Factors
    by_token: Factors  # of all tokens
    state: State


class Held(NamedTuple):
    """What the backward needs."""

    inputs: Inputs
    g: Array  # [N] by token
    waiting: Waiting


def held_gradients(c: KernelCall, g: Array, held: Waiting, needs: Needs, upstream: Array) -> Gradients:
    """dX, dW and db with the upstream scalar, or of reduction "none" with upstream gradients [...] by token."""
    rows = c.rows_at(jnp.int32((c.chunks - 1) * c.chunk))
    if c.options.reduction == "none":
        p, held = _arrived(c, g, held, rows, needs, jnp.where(c.inputs.valid, upstream.reshape(-1), 0.0))
        upstream = jnp.ones((), jnp.float32)
    else:
        p = GradientProducts(c, needs, g, numerics.largest_factor(XP, g))
    scale = (p.unit * upstream).astype(jnp.float32)
    if c.in_place:
        return _in_place(c, p, held, rows, scale)
    single = c.chunks == 1  # of several chunks the sum has the targets
    x = held.factors.operand(rows, c.dtype) if held.x is None else held.x
    listed = listed_targets(c, held.by_token) if single and needs.weight else {}
    state = p.weight(held.state, rows, held.e, x, 0, scale, listed)
    if state.weight is not None and not c.turned:
        # dX's operand is gathered when dW's is not needed any more. (A turned weight's rows are gathered once.)
        weight, target = lax.optimization_barrier((state.weight, rows.target))
        state, rows = state._replace(weight=weight), rows._replace(target=target)
    state = p.hidden(state, rows, held.e, 0, held.factors, scale if single else None)
    return p.finish(state, scale)


def _in_place(c: KernelCall, p: GradientProducts, held: Waiting, rows: Rows, scale: Array) -> Gradients:
    """dX first, then dW over the exponentials."""
    hidden = p.hidden(held.state, rows, held.e, 0, held.factors, scale)
    made = p.finish(hidden, scale)
    # All that reads the exponentials has to come before what is stored over them, or XLA copies them. Matrices of
    # dX's size are made as late as can be.
    e, made, by_token = lax.optimization_barrier((held.e, made, held.by_token))
    listed = listed_targets(c, by_token)
    x = held.factors.operand(c.gathered_again(rows, listed["listed"]), c.dtype)
    state = p.weight(State(), rows, e, x, 0, scale, listed)
    gradients: Gradients = made._replace(weight=p.finish(state, scale).weight)
    return gradients


def _arrived(
    c: KernelCall, g: Array, held: Waiting, rows: Rows, needs: Needs, upstream: Array
) -> tuple[GradientProducts, Waiting]:
    """The products of g ⊙ upstream [N], and what waits for them, from what waits for those of g.

    The row factors grow in proportion. With them db is known.
    """
    p = GradientProducts(c, needs, g * upstream, numerics.largest_factor(XP, g * upstream))
    times = upstream * (numerics.largest_factor(XP, g) / p.unit)
    factors, by_token = held.factors.times(rows.pick(times)), held.by_token.times(times)
    state = p.last_bias(held.state, rows, held.e, factors, by_token)
    return p, Waiting(None, held.e, factors, by_token, state)
