"""Calls inside of torch.func's transforms: grad, grad_and_value and vjp, one at a time.

A transform runs an autograd.Function's forward on plain tensors one level below, so what waits for the backward has to
leave it as results. ops.py's operations give it so, and are seen through by the transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.torch_impl.autograd import differentiable_once
from logitless.torch_impl.call import Arrays, Call, Needs
from logitless.torch_impl.compiled import ops


def wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    """Which gradients the transform is for: in a forward, autograd does not say."""
    arrays = (hidden, weight, bias)
    dtypes = [array.dtype if array is not None and array.requires_grad else None for array in arrays]
    return Needs(dtypes[0], dtypes[1], dtypes[2])


class TransformedLoss(torch.autograd.Function):
    """autograd.LinearCrossEntropyFunction: the loss, the eight statistics or none, and what the backward needs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *given, normalizer, call, needs = inputs
        made = ops.loss(Arrays(*given), normalizer, call, needs)
        return tuple(value for value in (made.loss, *made.stats, *made.saved) if value is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, _, ctx.call, ctx.needs = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*given, *output[1 + ctx.call.fields :])

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(ctx: Any, kept: tuple[Any, ...], upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = ops.loss_gradients(Arrays(*kept[:6]), ctx.call, ctx.needs, kept[6:], None, upstream)
        return grads.hidden, grads.weight, grads.bias, *(None,) * 6


class TransformedLogProbs(torch.autograd.Function):
    """autograd.LinearLogProbsFunction: log p, the entropy if asked for, and what the backward needs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *given, call, needs = inputs
        made = ops.log_probs(Arrays(*given), call, needs)
        return tuple(value for value in (made.log_prob, made.entropy, *made.saved) if value is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, ctx.call, ctx.needs = inputs
        kinds = 2 if ctx.call.statistics else 1
        ctx.mark_non_differentiable(*output[kinds:])
        ctx.save_for_backward(*given, *output[kinds:])

    @staticmethod
    @differentiable_once("linear_log_probs")
    def backward(ctx: Any, kept: tuple[Any, ...], g_log_prob: Tensor, *more: Any) -> tuple[Tensor | None, ...]:
        g_entropy = more[0] if ctx.call.statistics else None
        grads = ops.log_probs_gradients(Arrays(*kept[:4]), ctx.call, ctx.needs, kept[4:], None, g_log_prob, g_entropy)
        return grads.hidden, grads.weight, grads.bias, *(None,) * 3


def values(arrays: Arrays, normalizer: Tensor | float | None, call: Call) -> tuple[Tensor, ...]:
    """:func:`autograd.values`."""
    needs = wanted(*arrays[:3])
    if call.log_probs:
        log_probs: Any = TransformedLogProbs.apply
        of_tokens: tuple[Tensor, ...] = log_probs(*arrays[:4], call, needs)
        return of_tokens[: 2 if call.statistics else 1]
    loss: Any = TransformedLoss.apply
    results: tuple[Tensor, ...] = loss(*arrays, normalizer, call, needs)
    return results[: 1 + call.fields]
