"""What torch.compile and torch.func ask of a call's Python: numbers that may be symbols, and who is looking.

Comparing a symbol makes a guard: the compiled code is for the sizes that compare as this one did, and another size
compiles again. So a plan is chosen here by few comparisons.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.planning import ChunkPlan, Preference
from logitless.scratch import TOKEN_TILE
from logitless.torch_impl.call import LatePlan
from logitless.torch_impl.compiled import KEPT_WHOLE

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# One graph serves at most this many tokens in one chunk; a doubling has one of its own above.
MOST_TOKENS = 2**17

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# ---------------------------------------------------------------------------------------------------------------------
# Who is looking


def is_traced(tensor: Tensor) -> bool:
    """Whether there is no data to look at: inside torch.compile, or on fake tensors."""
    return torch.compiler.is_compiling() or is_fake(tensor)


def in_transform() -> bool:
    """Whether a transform of torch.func is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def is_looked_at(tensor: Tensor) -> bool:
    """Whether torch.compile or torch.func is looking."""
    return is_traced(tensor) or in_transform()


def check_transforms(name: str, *, takes_one: bool = True) -> None:
    """Refuse the transforms that the function ``name`` cannot be part of; ``takes_one``: whether it takes any."""
    if not in_transform():
        return
    kinds = [level.key() for level in get_interpreter_stack() or ()]
    if takes_one and kinds == [TransformType.Grad]:
        return
    names = " in ".join(kind.name.lower() for kind in reversed(kinds))
    allowed = "allowed is one torch.func.grad, grad_and_value or vjp" if takes_one else "use torch.autograd.grad"
    raise NotImplementedError(
        f"{name}: got a call inside of torch.func's transforms ({names}), {allowed}; loop over what vmap would"
    )


def kept_whole(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A decorator: torch.compile puts calls of ``function`` into its graph as they are, and traces their tensor
    operations later, which are those of ops.py. Choosing a plan is Python over integers, and nothing for a graph.

    As torch.compiler.allow_in_graph, which would import torch's compiler at once. Arguments are tensors, constants and
    tuples of them.
    """
    KEPT_WHOLE.append(function)

    @functools.wraps(function)
    def wrapper(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():  # whoever traces this imports what marks the function, before the call
            from logitless.torch_impl.compiled import marks  # noqa: F401
        return function(*arguments, **named)

    return wrapper


def outside_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A decorator: torch.compile leaves its graph for ``function``, and sees nothing of it.

    As torch.compiler.disable, which would import torch's compiler at once. Where nobody has imported it, nobody is
    compiling.
    """

    @functools.wraps(function)
    def wrapper(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        # Whoever traces this looks at the first condition alone.
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        from logitless.torch_impl.compiled import marks

        result: Result = marks.outside(function, *arguments, **named)
        return result

    return wrapper


class OperationMode(TorchDispatchMode):
    """A dispatch mode that does not import torch.compile. Its base does, at the first operation, to keep the mode out
    of graphs. That takes 1 to 4 s."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        cls.__torch_dispatch__ = outside_graphs(cls.__torch_dispatch__)  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # outside_graphs does what the base would do


# ---------------------------------------------------------------------------------------------------------------------
# Symbols


def is_symbol(value: Any) -> bool:
    """Whether ``value`` is a number that torch.compile has left open."""
    return isinstance(value, SYMBOLS)


def number(value: Any) -> Any:
    """``value``, or the number behind a symbol: compiled code is then for this number."""
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else value


def symbolic_plan(
    tokens: Any,
    choose: Callable[[int], ChunkPlan],
    memory_budget: int | None,
    chunk_waits: bool,
    prefer: Preference = "balanced",
) -> ChunkPlan | LatePlan:
    """The plan for a symbol ``tokens``; ``choose(n)`` is the plan for n tokens.

    One chunk holds all tokens up to the largest power of two whose plan is one chunk: one graph serves them all. Above,
    there is a graph for every doubling, whose chunk is that of the largest number of tokens it serves. Where the plan
    takes two passes nothing in the graph depends on it, and it is chosen when the call runs; so it is in one pass,
    unless a chunk waits between forward and backward (``chunk_waits``) or a budget may ask for two. Where the largest
    number of tokens does not fit the budget, the graph is for this number alone.
    """

    def fitting(bound: int) -> ChunkPlan | None:
        try:
            return choose(bound)
        except ValueError:
            return None

    bound, chosen = TOKEN_TILE, fitting(TOKEN_TILE)
    if chosen is not None and not (chosen.one_pass and (chunk_waits or memory_budget is not None)):
        return LatePlan(chosen.one_pass, memory_budget, prefer)
    while bound < MOST_TOKENS and _one_chunk(fitting(2 * bound)):
        bound *= 2
    while tokens > bound:
        bound *= 2
    chosen = fitting(bound)
    if chosen is None:
        return choose(int(tokens))
    if not chosen.one_pass:
        return LatePlan(False, memory_budget, prefer)
    return _resized(chosen, tokens, tokens if _one_chunk(chosen) else chosen.token_chunk)


def _one_chunk(plan: ChunkPlan | None) -> bool:
    return plan is not None and plan.holds_all


def _resized(plan: ChunkPlan, tokens: Any, token_chunk: Any) -> ChunkPlan:
    return ChunkPlan(
        tokens, plan.hidden, plan.vocab, plan.dtype, plan.order, plan.one_pass, token_chunk, plan.vocab_chunk, plan.kind
    )
