"""What torch.compile must know of our functions. Imported only where something is compiled: it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from logitless.torch_impl.compiled import KEPT_WHOLE

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

for function in KEPT_WHOLE:
    torch.compiler.allow_in_graph(function)


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="process_group, DTensors, accumulate_into, defer_weight_grad, distillations and patched models' losses "
    "run outside of a graph"
)
def outside(
    function: Callable[Parameters, Result], /, *arguments: Parameters.args, **named: Parameters.kwargs
) -> Result:
    return function(*arguments, **named)
