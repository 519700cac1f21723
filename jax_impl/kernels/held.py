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

    x: Array | None  # u ⊙ x of the last chunk; None where u lacks the tokens' upstream gradients
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
    """dX, dW and db with the upstream scalar, or with upstream gradients [...] by token where ``held`` has no x."""
    rows = c.rows_at(jnp.int32((c.chunks - 1) * c.chunk))
    if held.x is None:
        p, x, held = _arrived(c, g, held, rows, needs, jnp.where(c.inputs.valid, upstream.reshape(-1), 0.0))
        upstream = jnp.ones((), jnp.float32)
    else:
        p, x = GradientProducts(c, needs, g, numerics.largest_factor(XP, g)), held.x
    scale = (p.unit * upstream).astype(jnp.float32)
    single = c.chunks == 1  # of several chunks the sum has the targets
    listed = listed_targets(c, held.by_token) if single and needs.weight else {}
    state = p.weight(held.state, rows, held.e, x, 0, scale, listed)
    if state.weight is not None and not c.turned:
        # dX's operand is gathered when dW's is not needed any more. (A turned weight's rows are gathered once.)
        weight, target = lax.optimization_barrier((state.weight, rows.target))
        state, rows = state._replace(weight=weight), rows._replace(target=target)
    state = p.hidden(state, rows, held.e, 0, held.factors, scale if single else None)
    return p.finish(state, scale)


def _arrived(
    c: KernelCall, g: Array, held: Waiting, rows: Rows, needs: Needs, upstream: Array
) -> tuple[GradientProducts, Array, Waiting]:
    """The products of g ⊙ upstream [N], their operand u ⊙ x, and what waits for them, from what waits for those of g.

    The row factors grow in proportion. With them the operand and db are known.
    """
    p = GradientProducts(c, needs, g * upstream, numerics.largest_factor(XP, g * upstream))
    times = upstream * (numerics.largest_factor(XP, g) / p.unit)
    factors, by_token = held.factors.times(rows.pick(times)), held.by_token.times(times)
    state = p.last_bias(held.state, rows, held.e, factors, by_token)
    return p, factors.operand(rows, c.dtype), Waiting(None, held.e, factors, by_token, state)
