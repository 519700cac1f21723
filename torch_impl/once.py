"""Backwards that are differentiable once, and say so.

torch's ``once_differentiable`` refuses a second derivative only where the upstream gradient requires one, and hangs the
refusal on a leaf of its own, which the engine prunes when the inputs are named: ``torch.autograd.grad``, and all of
``torch.autograd.functional``, would then give 0 or None without a word. Here the refusal hangs on what the gradient
depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.torch_impl import layouts


class _Refused(torch.autograd.Function):
    """The first ``count`` tensors themselves, whose derivative in the others is an error."""

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(layouts.own(tensor.detach()) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name} is differentiable once: the gradient of its gradient was asked for (create_graph=True); "
            f"detach the gradient, or compute the loss from full logits"
        )


def differentiable_once(
    name: str, check: Callable[[Any], None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for an autograd.Function's ``backward(ctx, saved, *upstream)``; ``name``: of the function, for the
    error. ``saved`` are the saved tensors, differentiable inputs among them, unpacked once, after ``check(ctx)``."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *upstream: Any) -> Any:
            if check is not None:
                check(ctx)
            saved = ctx.saved_tensors
            with torch.no_grad():
                made = backward(ctx, saved, *upstream)
            if not torch.is_grad_enabled():
                return made
            depends = [v for v in (*saved, *upstream) if v is not None and v.requires_grad]
            given = [gradient for gradient in made if gradient is not None]
            if not (depends and given):
                return made
            apply: Any = _Refused.apply
            refused = iter(apply(name, len(given), *given, *depends))
            return tuple(None if gradient is None else next(refused) for gradient in made)

        return wrapper

    return decorate


def reverse_only(name: str) -> Any:
    """An autograd.Function's ``jvp`` that says which mode there is; ``name``: of the function, for the error."""

    def jvp(*_: Any) -> Any:
        raise NotImplementedError(
            f"{name}: got a call in forward mode (torch.autograd.forward_ad), allowed is reverse mode: "
            f"torch.autograd.grad"
        )

    return staticmethod(jvp)
