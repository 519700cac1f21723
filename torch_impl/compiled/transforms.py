"""Calls inside of torch.func's transforms: grad, grad_and_value and vjp, one at a time.

A transform runs an autograd.Function's forward on plain tensors one level below, so what waits for the backward has to
leave it as results. ops.py's operations give it so, and are seen through by the transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.torch_impl.autograd import Context, Derivatives, differentiable_once
from logitless.torch_impl.call import Arrays, Call, Needs
from logitless.torch_impl.compiled import ops


def wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    """Which gradients the transform is for: in a forward, autograd does not say."""
    arrays = (hidden, weight, bias)
    dtypes = [array.dtype if array is not None and array.requires_grad else None for array in arrays]
    return Needs(dtypes[0], dtypes[1], dtypes[2])


class TransformedContext(Context):
    """What a backward finds of its forward, and the gradients that it is for."""

    needs: Needs


class TransformedLoss(torch.autograd.Function):
    """autograd.LinearCrossEntropyFunction: the loss, lse and statistics if asked for, and what the backward needs."""

    @staticmethod
    def forward(
        call: Call, needs: Needs, normalizer: Tensor | float | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        step = ops.loss(Arrays(*tensors), normalizer, call, needs)  # type: ignore[arg-type]
        return tuple(value for value in (step.loss, step.lse, *step.stats, *step.saved) if value is not None)

    @staticmethod
    def setup_context(ctx: TransformedContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.needs, _, *tensors = inputs
        own = ctx.call.differentiable
        ctx.mark_non_differentiable(*output[own:])
        ctx.save_for_backward(*tensors, *output[own + ctx.call.constants :])

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(
        ctx: TransformedContext, kept: tuple[Tensor, ...], upstream: Tensor, *more: Tensor | None
    ) -> Derivatives:
        g_lse = more[0] if ctx.call.lse else None
        gradients = ops.loss_gradients(Arrays(*kept[:7]), ctx.call, ctx.needs, kept[7:], None, upstream, g_lse)
        return None, None, None, gradients.hidden, gradients.weight, gradients.bias, *(None,) * 4


class TransformedLogProbs(torch.autograd.Function):
    """autograd.LinearLogProbsFunction: log p, the statistics, and what the backward needs."""

    @staticmethod
    def forward(call: Call, needs: Needs, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        step = ops.log_probs(Arrays.of_head(*tensors), call, needs)  # type: ignore[arg-type]
        return (step.log_prob, *step.stats, *step.saved)

    @staticmethod
    def setup_context(ctx: TransformedContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.needs, *tensors = inputs
        own = ctx.call.differentiable
        ctx.mark_non_differentiable(*output[own:])
        ctx.save_for_backward(*tensors, *output[own + ctx.call.constants :])

    @staticmethod
    @differentiable_once("linear_log_probs")
    def backward(ctx: TransformedContext, kept: tuple[Tensor, ...], *upstream: Tensor | None) -> Derivatives:
        arrays, own = Arrays.of_head(*kept[:5]), upstream[: ctx.call.differentiable]
        gradients = ops.log_probs_gradients(arrays, ctx.call, ctx.needs, kept[5:], None, own)
        return None, None, gradients.hidden, gradients.weight, gradients.bias, None, None


def values(arrays: Arrays, normalizer: Tensor | float | None, call: Call) -> tuple[Tensor, ...]:
    """:func:`autograd.values`."""
    needs = wanted(*arrays[:3])
    if call.log_probs:
        log_probs: tuple[Tensor, ...] = TransformedLogProbs.apply(  # type: ignore[no-untyped-call]
            call, needs, *arrays.head
        )
        return log_probs[: call.differentiable + call.constants]
    loss: tuple[Tensor, ...] = TransformedLoss.apply(call, needs, normalizer, *arrays)  # type: ignore[no-untyped-call]
    return loss[: call.differentiable + call.constants]
