"""Backwards that are differentiable once, and say so.

torch's ``once_differentiable`` refuses a second derivative only where the upstream gradient requires one. With
``create_graph=True`` and a constant upstream gradient, as in a gradient penalty, it returns a gradient without history,
and the penalty's own gradient would be missing without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Refused(torch.autograd.Function):
    """The tensors themselves, whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name} is differentiable once: the gradient of its gradient was asked for (create_graph=True); "
            f"detach the gradient, or compute the loss from full logits"
        )


def differentiable_once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for an autograd.Function's backward; ``name``: of the function, for the error."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *upstream: Any) -> Any:
            with torch.no_grad():
                made = backward(ctx, *upstream)
            if not torch.is_grad_enabled():
                return made
            apply: Any = _Refused.apply
            history = torch.empty(0, requires_grad=True)
            given = [gradient for gradient in made if gradient is not None]
            refused = iter(apply(name, history, *given)) if given else iter(())
            return tuple(None if gradient is None else next(refused) for gradient in made)

        return wrapper

    return decorate
