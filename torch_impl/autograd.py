"""The steps of a call as differentiable functions. Mirror of jax_impl/vjp.py.

Eager mode runs steps.py directly; torch.compile sees the same steps as the opaque operations of ops.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from logitless.torch_impl import layouts, steps
from logitless.torch_impl.call import NO_GRADIENTS, Arrays, Call, Gradients, Needs
from logitless.torch_impl.compiled import ops
from logitless.torch_impl.once import differentiable_once, reverse_only


def _needs(ctx: Any, call: Call, *arguments: Tensor | None) -> Needs:
    """Gradients are made in the dtype of the argument, which under autocast is not the products'."""
    if not call.differentiate:
        return NO_GRADIENTS
    wanted = zip(ctx.needs_input_grad[:3], arguments, strict=True)
    dtypes = [tensor.dtype if needed and tensor is not None else None for needed, tensor in wanted]
    needs = Needs(dtypes[0], dtypes[1], dtypes[2])
    if call.into is not None and needs.weight:
        needs = dataclasses.replace(needs, weight=call.into.dtype, into=call.into)
    return needs


def _take(ctx: Any) -> Any:
    """What waits for the upstream gradient, for this backward alone: finishing it writes to it.

    Where the graph is retained, plain operations' gradients are copied, so that every backward has the same bits.
    """
    waiting = ctx.waiting
    if isinstance(waiting, Gradients) and torch._C._autograd._get_current_graph_task_keep_graph():
        kept = (waiting.hidden, waiting.weight, waiting.bias)
        return Gradients(*(None if gradient is None else gradient.clone() for gradient in kept))
    ctx.waiting = None
    return waiting


def _weight_gradients(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Any, ...], upstream: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """dW and db of a loss whose backward has left them for later."""
    if not needs.any:
        return None, None
    gradients = steps.loss_gradients(arrays, call, needs, saved, None, upstream)
    return gradients.weight, gradients.bias


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss and the eight statistics (or Nones), from hidden, weight, bias and what is not differentiated.

    What the forward made of the gradients waits in ctx.waiting for the upstream scalar; the first backward takes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        token_weight: Tensor | None,
        class_weight: Tensor | None,
        normalizer: Tensor | float | None,
        call: Call,
    ) -> tuple[Any, ...]:
        arrays = Arrays(hidden, weight, bias, target, token_weight, class_weight)
        run: Any = ops if call.traced else steps
        needs = _needs(ctx, call, hidden, weight, bias)
        made = run.loss(arrays, normalizer, call, needs if call.deferred is None else needs.hidden_alone)
        ctx.call, ctx.waiting = call, made.waiting
        ctx.save_for_backward(*arrays, *made.saved)
        loss, *stats = map(layouts.own, (made.loss, *made.stats))
        ctx.mark_non_differentiable(*(value for value in stats if value is not None))
        return (loss, *stats)

    jvp = reverse_only("linear_cross_entropy")

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(ctx: Any, kept: tuple[Any, ...], upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        waiting, call = _take(ctx), ctx.call
        arrays, saved = Arrays(*kept[:6]), kept[6:]
        run: Any = ops if call.traced else steps
        needs = _needs(ctx, call, *arrays[:3])
        if call.deferred is not None:
            rest = dataclasses.replace(needs, hidden=None)
            call.deferred.arrived(upstream, arrays, functools.partial(_weight_gradients, arrays, call, rest, saved))
            needs = needs.hidden_alone
            if not needs.any:
                return (None,) * 8
        grads = run.loss_gradients(arrays, call, needs, saved, waiting, upstream)
        return grads.hidden, grads.weight, grads.bias, *(None,) * 5


class LinearLogProbsFunction(torch.autograd.Function):
    """log p(target) and entropy (or None) per token; gradients are made when both upstream gradients have arrived."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        run: Any = ops if call.traced else steps
        arrays = Arrays(hidden, weight, bias, target)
        made = run.log_probs(arrays, call, _needs(ctx, call, hidden, weight, bias))
        ctx.call, ctx.waiting = call, made.waiting
        ctx.save_for_backward(hidden, weight, bias, target, *made.saved)
        return layouts.own(made.log_prob), layouts.own(made.entropy)

    jvp = reverse_only("linear_log_probs")

    @staticmethod
    @differentiable_once("linear_log_probs")
    def backward(
        ctx: Any, kept: tuple[Any, ...], g_log_prob: Tensor, g_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        waiting, call = _take(ctx), ctx.call
        arrays = Arrays(*kept[:4])
        run: Any = ops if call.traced else steps
        needs = _needs(ctx, call, *arrays[:3])
        grads = run.log_probs_gradients(arrays, call, needs, kept[4:], waiting, g_log_prob, g_entropy)
        return grads.hidden, grads.weight, grads.bias, None, None
