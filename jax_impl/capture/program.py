"""A traced forward: which equation makes a value, and the values of those that are asked for.

Calls are opened where the way to the head goes through them. All others stay as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Atom = Var | Literal

JIT = ("jit", "pjit")
# jax.checkpoint, nnx.remat, nn.remat and eqx.filter_checkpoint.
CHECKPOINT = ("checkpoint", "remat", "remat2")
# What gives numbers as they are, in another shape.
SHAPED = ("broadcast_in_dim", "reshape", "squeeze", "copy")


class Line(NamedTuple):
    """An equation, and the call of jax.checkpoint that it stood in."""

    equation: JaxprEqn
    block: JaxprEqn | None


def form(atom: Atom) -> ShapedArray:
    """An atom's shape and dtype."""
    return cast(ShapedArray, atom.aval)


class Program:
    """The equations of a function without arguments, in their order."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.outputs: list[Atom] = list(closed.jaxpr.outvars)
        self._whole = closed.jaxpr
        self._lines = [Line(equation, None) for equation in closed.jaxpr.eqns]
        self._values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._same: dict[Var, Atom] = {}
        """What the results of an opened call are inside of it."""
        self._made_by = {var: line for line in self._lines for var in line.equation.outvars}

    def maker(self, atom: Atom) -> JaxprEqn | None:
        """The equation that makes a value, which is no call; None for what comes from outside."""
        while True:
            found = self._inside(atom)
            line = self._made_by.get(found) if isinstance(found, Var) else None
            if line is None:
                return None
            if line.equation.primitive.name not in JIT + CHECKPOINT:
                return line.equation
            self._open(line)

    def number(self, atom: Atom) -> float | None:
        """The number that all elements of a constant are; None for what is no such constant."""
        equation, atom = self.maker(atom), self._inside(atom)
        if equation is None:
            return _as_number(atom.val if isinstance(atom, Literal) else self._values.get(atom))
        if equation.primitive.name in SHAPED:
            return self.number(equation.invars[0])
        if math.prod(form(atom).shape) != 1 or equation.primitive.multiple_results:
            return None
        values = []
        for each in equation.invars:
            number = self.number(each)
            if number is None:
                return None
            values.append((number, form(each)))
        with jax.ensure_compile_time_eval():  # a jit around it would make a tracer
            arrays = [jnp.full(each.shape, number, each.dtype) for number, each in values]
            return _as_number(equation.primitive.bind(*arrays, **equation.params))

    def evaluate(self, wanted: Sequence[Atom]) -> list[Array]:
        """The values of atoms. Only what they need is computed, and in the trace of the caller."""
        atoms = [self._inside(each) for each in wanted]
        needed = _vars(atoms)
        lines: list[Line] = []
        for equation, block in reversed(self._lines):
            if equation.effects or not needed.isdisjoint(equation.outvars):
                equation = equation.replace(invars=[self._inside(each) for each in equation.invars])
                needed |= _vars(equation.invars)
                lines.append(Line(equation, block))
        equations = self._in_blocks(lines[::-1], _vars(atoms))
        given = [var for var in self._values if var in needed]
        kept = Jaxpr(given, [], atoms, equations, self._whole.effects, self._whole.debug_info)
        return list(jaxpr_as_fun(ClosedJaxpr(kept, [self._values[var] for var in given]))())

    def _inside(self, atom: Atom) -> Atom:
        while isinstance(atom, Var) and atom in self._same:
            atom = self._same[atom]
        return atom

    def _open(self, line: Line) -> None:
        """Put the equations of a call in the call's place."""
        call, called = line.equation, line.equation.params["jaxpr"]
        block = call if line.block is None and call.primitive.name in CHECKPOINT else line.block
        inner, consts = getattr(called, "jaxpr", called), getattr(called, "consts", [])
        outside: dict[Var, Atom] = dict(zip(inner.invars, call.invars, strict=True))

        def renamed(atom: Atom) -> Atom:  # two calls may share one jaxpr
            return atom if isinstance(atom, Literal | DropVar) else outside.setdefault(atom, Var(atom.aval))

        def made(var: Var) -> Var:
            return cast(Var, renamed(var))

        self._values.update({made(var): value for var, value in zip(inner.constvars, consts, strict=True)})
        opened = [
            Line(one.replace(invars=[*map(renamed, one.invars)], outvars=[*map(made, one.outvars)]), block)
            for one in inner.eqns
        ]
        at = next(index for index, each in enumerate(self._lines) if each.equation is call)
        self._lines[at : at + 1] = opened
        self._made_by.update({var: each for each in opened for var in each.equation.outvars})
        self._same.update(zip(call.outvars, map(renamed, inner.outvars), strict=True))

    def _in_blocks(self, lines: list[Line], wanted: set[Var]) -> list[JaxprEqn]:
        """The equations, those of an opened call of jax.checkpoint in such a call again."""
        equations: list[JaxprEqn] = []
        for _, group in itertools.groupby(lines, lambda line: id(line.block)):
            inside = list(group)
            block = inside[0].block
            if block is None:
                equations += [line.equation for line in inside]
            else:
                asked = wanted.union(*(_vars(line.equation.invars) for line in lines if line.block is not block))
                equations.append(self._closed(block, [line.equation for line in inside], asked))
        return equations

    def _closed(self, block: JaxprEqn, equations: list[JaxprEqn], asked: set[Var]) -> JaxprEqn:
        """A call of these equations in a call's place. ``asked``: what is read outside of it."""
        made = dict.fromkeys(var for each in equations for var in each.outvars)  # as sets, but in order
        read = dict.fromkeys(var for each in equations for var in each.invars if isinstance(var, Var))
        into, results = [var for var in read if var not in made], [var for var in made if var in asked]
        called = block.params["jaxpr"]
        params = block.params | {"jaxpr": Jaxpr([], into, results, equations, called.effects, called.debug_info)}
        if isinstance(params["prevent_cse"], tuple):  # one for each argument
            flags = dict(zip(map(self._inside, block.invars), params["prevent_cse"], strict=True))
            params["prevent_cse"] = tuple(flags.get(var, True) for var in into)
        new: JaxprEqn = block.replace(invars=[*into], outvars=results, params=params)
        return new


def _vars(atoms: Iterable[Atom]) -> set[Var]:
    return {each for each in atoms if isinstance(each, Var)}


def _as_number(value: object) -> float | None:
    """A float, of an array with one element that is there to be read."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, Array | np.ndarray | np.generic | int | float):
        return None
    dtype = jnp.result_type(value)
    if np.size(value) != 1 or not (jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)):
        return None
    return float(np.asarray(value).item())
