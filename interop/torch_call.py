"""The torch half of interop.torch_in_jax: a call of the function on tensors, and gradients through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import torch
from jax.tree_util import PyTreeDef
from torch import Tensor

from logitless.interop import arguments, dlpack
from logitless.interop.arguments import Layout


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array; hashable."""

    fn: Callable[..., object]
    layout: Layout

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], PyTreeDef]:
        """The results of the function, flat, and their structure.

        Raises ValueError when an argument was written to, TypeError when a result is no tensor.
        """
        versions = [tensor._version for tensor in tensors]
        args, kwargs = self.layout.join(tensors)
        results, tree = jax.tree.flatten(self.fn(*args, **kwargs))
        for number, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if tensor._version != version:
                raise ValueError(
                    f"{arguments.array_name(args, kwargs, is_tensor, number)}: the function wrote to it in place, but "
                    "it shares the memory of a JAX array, which must not change: clone it first"
                )
        for result in results:
            if not isinstance(result, Tensor):
                raise TypeError(f"the function returned {dlpack.type_name(result)}, allowed is a pytree of tensors")
        return results, tree

    def run_with_graph(self, tensors: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Tape, PyTreeDef]:
        """As :meth:`run`, but autograd records the graph of the ``wanted`` arguments."""
        inputs = {number: tensors[number].requires_grad_() for number in wanted}
        with torch.enable_grad():
            results, tree = self.run(tensors)
        return Tape(results, inputs, len(tensors)), tree


@jax.tree_util.register_static
class Tape:
    """autograd's graph of one call. JAX may keep it as a residual: a pytree without arrays, compared by identity."""

    def __init__(self, results: list[Tensor], inputs: dict[int, Tensor], count: int) -> None:
        self.results, self.inputs, self.count = results, inputs, count

    def gradients(self, upstream: Sequence[Tensor | None], *, keep: bool) -> list[Tensor]:
        """Gradients of the inputs, zeros where none arrives. ``upstream``: one gradient per result, None for zero.

        JAX's gradient of a complex number is the conjugate of torch's. ``keep``: the graph can be used again.
        """
        chosen = [
            (result, gradient.conj())
            for result, gradient in zip(self.results, upstream, strict=True)
            if gradient is not None and result.requires_grad
        ]
        inputs = list(self.inputs.values())
        if not chosen or not inputs:
            return [torch.zeros_like(tensor) for tensor in inputs]
        results, arrived = zip(*chosen, strict=True)
        gradients = torch.autograd.grad(results, inputs, arrived, allow_unused=True, retain_graph=keep)
        pairs = zip(inputs, gradients, strict=True)
        return [torch.zeros_like(tensor) if gradient is None else gradient.conj() for tensor, gradient in pairs]


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
