"""Operations after a head that move tokens and leave every token's logits as they are.

Each is read from its result back to its operand: which axis of the operand the vocabulary is, and the same operation
on hidden states, which have D numbers on the vocabulary's axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from logitless.jax_impl.capture.program import form

Move = Callable[[Array], Array]
Found = tuple[int, Move]
"""The vocabulary's axis of the operand, and the operation on hidden states."""


def read_move(equation: JaxprEqn, axis: int) -> Found | None:
    """What an equation does, whose result has the vocabulary on an axis; None where it does more."""
    rule = RULES.get(equation.primitive.name)
    return rule and rule(equation, axis)


def _keep(_: JaxprEqn, axis: int) -> Found:
    return axis, lambda hidden: hidden


def _convert(equation: JaxprEqn, axis: int) -> Found | None:
    return _keep(equation, axis) if jnp.issubdtype(form(equation.outvars[0]).dtype, jnp.floating) else None


def _transpose(equation: JaxprEqn, axis: int) -> Found:
    permutation = equation.params["permutation"]
    return permutation[axis], lambda hidden: jnp.transpose(hidden, permutation)


def _reshape(equation: JaxprEqn, axis: int) -> Found | None:
    return None if equation.params["dimensions"] else _same_order(equation, axis)  # dimensions: turned before


def _same_order(equation: JaxprEqn, axis: int) -> Found | None:
    """A reshape, as squeeze is, and broadcast_in_dim where it repeats nothing."""
    before, after = form(equation.invars[0]).shape, form(equation.outvars[0]).shape
    behind = math.prod(after[axis + 1 :])
    places = [at for at, size in enumerate(before) if (size, math.prod(before[at + 1 :])) == (after[axis], behind)]
    if math.prod(before) != math.prod(after) or not places:
        return None
    return places[0], lambda hidden: hidden.reshape(*after[:axis], hidden.shape[places[0]], *after[axis + 1 :])


def _slice(equation: JaxprEqn, axis: int) -> Found | None:
    starts, limits, strides = (equation.params[name] for name in ("start_indices", "limit_indices", "strides"))
    if form(equation.invars[0]).shape[axis] != form(equation.outvars[0]).shape[axis]:
        return None

    def cut(hidden: Array) -> Array:
        ends = (*limits[:axis], hidden.shape[axis], *limits[axis + 1 :])
        return lax.slice(hidden, starts, ends, strides)

    return axis, cut


# A sharding of logits says nothing of hidden states: XLA finds theirs.
RULES: dict[str, Callable[[JaxprEqn, int], Found | None]] = {
    "convert_element_type": _convert, "copy": _keep, "name": _keep, "sharding_constraint": _keep,
    "transpose": _transpose, "reshape": _reshape, "squeeze": _same_order, "broadcast_in_dim": _same_order,
    "slice": _slice,
}  # fmt: skip
