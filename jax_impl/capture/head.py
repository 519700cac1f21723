"""The head, read from a forward's logits: z = f(hidden @ weight.T + bias), where f is a constant scale, a softcap and
moves of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from logitless.jax_impl.capture.moves import Move, read_move
from logitless.jax_impl.capture.program import Atom, Program, form
from logitless.spec import LARGEST_FACTOR, SMALLEST_FACTOR, WeightLayout


class Head(NamedTuple):
    """What the head multiplies, what it is, and what is done to its result."""

    hidden: Atom
    weight: Atom
    bias: Atom | None
    weight_layout: WeightLayout
    logit_scale: float
    softcap: float | None
    laid_out: Move
    """The head's operand as [..., D] with the logits' leading axes."""


def read_head(program: Program, logits: Atom) -> Head:
    """The head that makes the logits. Raises NotImplementedError, with the reason, where it is no plain linear map."""
    if not form(logits).ndim or not jnp.issubdtype(form(logits).dtype, jnp.floating):
        _refuse(f"it gives {form(logits).str_short()}")
    way = _Way(program, logits)
    product = way.product()
    contracted, operands = product.params["dimension_numbers"][0], product.invars
    # The result has the axes of the first operand, then those of the second, without those that are summed.
    side = 0 if way.axis < form(operands[0]).ndim - len(contracted[0]) else 1
    hidden, weight = operands[1 - side], operands[side]
    _check_product(product, weight)
    weight, width_axis = _stored(program, weight, contracted[side][0], hidden)
    hidden_axis, place = contracted[1 - side][0], way.axis

    def laid_out(hidden: Array) -> Array:
        hidden = jnp.moveaxis(hidden, hidden_axis, place)
        for move in reversed(way.moves):
            hidden = move(hidden)
        return hidden

    bias = None if way.bias is None else _stored(program, way.bias, 0, hidden)[0]
    return Head(hidden, weight, bias, "vd" if width_axis == 1 else "dv", *way.options(), laid_out)


class _Way:
    """The way from the logits back to the product."""

    def __init__(self, program: Program, logits: Atom) -> None:
        self.program, self.atom, self.axis = program, logits, form(logits).ndim - 1
        self.moves: list[Move] = []
        self.bias: Atom | None = None
        self.after, self.before = 1.0, 1.0
        """The factors after the tanh and before it; without a tanh all count as after."""
        self.capped = False

    def product(self) -> JaxprEqn:
        while True:
            equation = self.program.maker(self.atom)
            if equation is None:
                _refuse("its logits are no product")
            name = equation.primitive.name
            if name == "dot_general":
                return equation
            if name in STEPS:
                if name != "add" and self.bias is not None:
                    _refuse(f"a bias is added after {name}")
                self.atom = STEPS[name](self, equation)
                if form(self.atom).shape != form(equation.outvars[0]).shape:
                    _refuse(f"its logits are repeated by {name}")
            else:
                found = read_move(equation, self.axis)
                if found is None:
                    _refuse(f"its logits go through {name}")
                self.atom, (self.axis, move) = equation.invars[0], found
                self.moves.append(move)

    def options(self) -> tuple[float, float | None]:
        """logit_scale and softcap: after · tanh(before · r) = cap · tanh(scale · r / cap)."""
        scale, softcap = self.before * self.after, self.after if self.capped else None
        if not all(SMALLEST_FACTOR <= each <= LARGEST_FACTOR for each in (scale, softcap or 1.0)):
            _refuse(f"its logits have the scale {scale:g} and the softcap {softcap}, not above 0")
        return 1.0 if abs(scale - 1) < 1e-12 else scale, softcap  # (r / 30) · 30

    def tanh(self, equation: JaxprEqn) -> Atom:
        if self.capped:
            _refuse("its logits go through two tanh")
        self.capped = True
        return equation.invars[0]

    def factor(self, equation: JaxprEqn) -> Atom:
        (rest, other), divides = equation.invars, equation.primitive.name == "div"
        number = self.program.number(other)
        if number is None and not divides:
            number, rest = self.program.number(rest), other
        if not number:
            _refuse(
                f"its logits go through {equation.primitive.name} with something else than a constant (a scale that is "
                f"trained can multiply the hidden states)"
            )
        factor = 1 / number if divides else number
        if self.capped:
            self.before *= factor
        else:
            self.after *= factor
        return rest

    def add(self, equation: JaxprEqn) -> Atom:
        count = form(equation.outvars[0]).shape[self.axis]
        vectors = [_vector(self.program, each, self.axis, count) for each in equation.invars]
        if self.bias is not None or (vectors[0] is None) == (vectors[1] is None):
            _refuse("its logits are another sum than that of one product and one bias [V] (LoRA is: merge it)")
        at = 0 if vectors[1] is None else 1
        self.bias = vectors[at]
        return equation.invars[1 - at]


STEPS: dict[str, Callable[[_Way, JaxprEqn], Atom]] = {
    "tanh": _Way.tanh, "mul": _Way.factor, "div": _Way.factor, "add": _Way.add,
}  # fmt: skip


def _check_product(product: JaxprEqn, weight: Atom) -> None:
    (contracted, batched), operands = product.params["dimension_numbers"], product.invars
    shapes = " and ".join(form(each).str_short() for each in operands)
    if batched[0] or len(contracted[0]) != 1 or form(weight).ndim != 2:
        _refuse(f"its head multiplies {shapes}, not [..., D] and one weight of two axes")
    if not all(jnp.issubdtype(form(each).dtype, jnp.floating) for each in operands):
        _refuse(f"its head multiplies {shapes}, not floating numbers")
    precision = product.params["precision"]
    if precision not in (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT), _default_precision()):
        _refuse(f"its head has precision={precision}, where jax.default_matmul_precision sets it for the products here")


def _default_precision() -> object:
    """What jax.default_matmul_precision says, as a product has it."""
    traced = jax.make_jaxpr(lambda x: lax.dot(x, x))(jax.ShapeDtypeStruct((1, 1), jnp.float32))
    return traced.jaxpr.eqns[0].params["precision"]


def _stored(program: Program, atom: Atom, axis: int, hidden: Atom) -> tuple[Atom, int]:
    """A weight or bias as it is stored, and where its axis is there.

    It may be turned for the product, and rounded from float32 to the 16 bits of hidden: the loss does that itself.
    """
    while (equation := program.maker(atom)) is not None:
        name = equation.primitive.name
        if name == "transpose":
            axis = equation.params["permutation"][axis]
        elif name != "convert_element_type" or not _rounds(equation, hidden):
            break
        atom = equation.invars[0]
    return atom, axis


def _rounds(equation: JaxprEqn, hidden: Atom) -> bool:
    before, after = form(equation.invars[0]).dtype, form(equation.outvars[0]).dtype
    return bool(before == jnp.float32 and after == form(hidden).dtype and after.itemsize == 2)


def _vector(program: Program, atom: Atom, axis: int, count: int) -> Atom | None:
    """The vector [count] that an operand repeats along all axes but one; None for anything else."""
    while form(atom).ndim > 1:
        equation = program.maker(atom)
        if equation is None:
            return None
        if equation.primitive.name == "broadcast_in_dim":
            axes = list(equation.params["broadcast_dimensions"])
            if axis not in axes:
                return None
            axis = axes.index(axis)
        else:
            found = read_move(equation, axis)
            if found is None:
                return None
            axis, _ = found
        atom = equation.invars[0]
    return atom if form(atom).shape == (count,) and not _is_product(program, atom) else None


def _is_product(program: Program, vector: Atom) -> bool:
    """Whether it is what a head gives for one token, and no bias."""
    equation = program.maker(vector)
    while equation is not None and read_move(equation, 0) is not None:
        equation = program.maker(equation.invars[0])
    return equation is not None and equation.primitive.name == "dot_general"


def _refuse(reason: str) -> NoReturn:
    raise NotImplementedError(
        f"forward: {reason}; allowed are logits [..., V] of one product, f(hidden @ weight.T + bias), with a constant "
        f"scale and a softcap"
    )
