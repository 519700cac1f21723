"""Which residuals of a pullback are arguments or outputs of the function itself.

Compiled code returns a fresh buffer for every result. So a residual that is only an argument passed through (the weight
of a linear layer) would be copied. The traced program shows such residuals, and then they need not be returned.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, Var
    from jax.extend.core import Literal as Constant

# Calls whose inner program has the call's own arguments and results, one to one.
_CALLS = ("pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a residual comes from: the ``index``-th argument, output, or array returned besides the outputs."""

    kind: Literal["argument", "output", "extra"]
    index: int


def sources(program: Jaxpr, outputs: int) -> tuple[Source, ...]:
    """Where to find each result of a jaxpr after its first ``outputs``."""
    results = [_origin(program, variable) for variable in program.outvars]
    arguments = {id(variable): index for index, variable in enumerate(program.invars)}
    own = {id(variable): index for index, variable in reversed(list(enumerate(results[:outputs])))}
    found: list[Source] = []
    extra = 0
    for variable in results[outputs:]:
        if id(variable) in arguments:
            found.append(Source("argument", arguments[id(variable)]))
        elif id(variable) in own:
            found.append(Source("output", own[id(variable)]))
        else:
            found.append(Source("extra", extra))
            extra += 1
    return tuple(found)


def _origin(program: Jaxpr, variable: Var | Constant) -> Var | Constant:
    """The variable of ``program`` for which ``variable`` is only another name. Calls are followed."""
    producers = {id(result): (step, place) for step in program.eqns for place, result in enumerate(step.outvars)}
    while id(variable) in producers:
        step, place = producers[id(variable)]
        inner = step.params.get("jaxpr", step.params.get("call_jaxpr"))
        if step.primitive.name not in _CALLS or inner is None:
            return variable
        inner = getattr(inner, "jaxpr", inner)
        if len(inner.invars) != len(step.invars):
            return variable
        origin = _origin(inner, inner.outvars[place])
        passed = [number for number, argument in enumerate(inner.invars) if argument is origin]
        if not passed:
            return variable
        variable = step.invars[passed[0]]
    return variable
