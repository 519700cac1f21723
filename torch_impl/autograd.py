"""The steps of a call as differentiable functions. Mirror of jax_impl/vjp.py.

Eager mode runs steps.py directly; torch.compile sees the same steps as the opaque operations of ops.py.

Backwards are differentiable once, and say so. torch's ``once_differentiable`` refuses a second derivative only where
the upstream gradient requires one, and hangs the refusal on a leaf of its own, which the engine prunes when the inputs
are named: ``torch.autograd.grad``, and all of ``torch.autograd.functional``, would then give 0 or None without a word.
Here the refusal hangs on what the gradient depends on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logitless.torch_impl import checks, steps
from logitless.torch_impl.backend import Waiting
from logitless.torch_impl.call import NO_GRADIENTS, Arrays, Call, Gradients, Needs
from logitless.torch_impl.compiled import ops


def own(result: Tensor) -> Tensor:
    """A fresh result of a forward, which the caller may change in place.

    Autograd refuses that for a view, such as reshape gives, when an autograd.Function returns it.
    """
    return torch.ops.aten._unsafe_view.default(result, result.shape) if result._is_view() else result


Derivatives = tuple[Tensor | None, ...]
"""The gradient of each argument of an autograd.Function, or None."""


class SavedContext(torch.autograd.function.FunctionCtx):
    """torch's own, as it is used here."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        super().save_for_backward(*tensors)  # type: ignore[arg-type]  # it takes None too


class Context(SavedContext):
    """What a backward finds of its forward."""

    call: Call
    needs: Needs
    waiting: Waiting | Tensor | None
    """A tensor: the logits of log-probabilities."""


class Steps(Protocol):
    """A call's forward and backward: the modules steps.py and compiled/ops.py."""

    def loss(self, arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs, /) -> steps.Loss: ...

    def loss_gradients(
        self, arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], waiting: Waiting | None,
        upstream: Tensor, g_lse: Tensor | None, /,
    ) -> Gradients: ...  # fmt: skip

    def log_probs(self, arrays: Arrays, call: Call, needs: Needs, /) -> steps.LogProbs: ...

    def log_probs_gradients(
        self, arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], waiting: Waiting | Tensor | None,
        upstream: Sequence[Tensor | None], /,
    ) -> Gradients: ...  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives that there are not, and results that are the caller's


class _Refused(torch.autograd.Function):
    """The first ``count`` tensors themselves, whose derivative in the others is an error."""

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(own(tensor.detach()) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:  # ctx takes any attribute
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(
            f"{ctx.name} is differentiable once: the gradient of its gradient was asked for (create_graph=True); "
            f"detach the gradient, or compute the loss from full logits"
        )


def differentiable_once(
    name: str, check: Callable[..., None] | None = None
) -> Callable[[Callable[..., Derivatives]], Callable[..., Derivatives]]:
    """A decorator for an autograd.Function's ``backward(ctx, saved, *upstream)``; ``name``: of the function, for the
    error. ``saved`` are the saved tensors, differentiable inputs among them, unpacked once, after ``check(ctx)``."""

    def decorate(backward: Callable[..., Derivatives]) -> Callable[..., Derivatives]:
        def made(ctx: SavedContext, saved: tuple[Tensor, ...], upstream: tuple[Tensor | None, ...]) -> Derivatives:
            # A kernel reads memory, in which PyTorch's negative bit is not.
            return backward(ctx, saved, *(None if v is None else checks.signed(v) for v in upstream))

        @functools.wraps(backward)
        def wrapper(ctx: SavedContext, *upstream: Tensor | None) -> Derivatives:
            if check is not None:
                check(ctx)
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return made(ctx, saved, upstream)
            with torch.no_grad():
                gradients = made(ctx, saved, upstream)
            depends = [v for v in (*saved, *upstream) if v is not None and v.requires_grad]
            present = [gradient for gradient in gradients if gradient is not None]
            if not (depends and present):
                return gradients
            refused = iter(_Refused.apply(name, len(present), *present, *depends))  # type: ignore[no-untyped-call]
            return tuple(None if gradient is None else next(refused) for gradient in gradients)

        return wrapper

    return decorate


def reverse_only(name: str) -> staticmethod[..., NoReturn]:
    """An autograd.Function's ``jvp`` that says which mode there is; ``name``: of the function, for the error."""

    def jvp(*_: object) -> NoReturn:
        raise NotImplementedError(
            f"{name}: got a call in forward mode (torch.autograd.forward_ad), allowed is reverse mode: "
            f"torch.autograd.grad"
        )

    return staticmethod(jvp)


# ---------------------------------------------------------------------------------------------------------------------
# The steps


def values(arrays: Arrays, normalizer: Tensor | float | None, call: Call) -> tuple[Tensor, ...]:
    """The loss and, if asked for, lse and the statistics; or the log-probabilities and the statistics of
    :func:`spec.log_prob_statistics`."""
    results: tuple[Tensor | None, ...]
    if _is_constant(arrays, call):  # an autograd.Function would cost as much as all checks
        if call.log_probs:
            log_probs = steps.log_probs(arrays, call, NO_GRADIENTS)
            results = (log_probs.log_prob, *log_probs.stats)
        else:
            step = steps.loss(arrays, normalizer, call, NO_GRADIENTS)
            results = (step.loss, step.lse, *step.stats)
    elif call.log_probs:
        results = LinearLogProbsFunction.apply(call, *arrays.head)  # type: ignore[no-untyped-call]
    else:
        results = LinearCrossEntropyFunction.apply(call, normalizer, *arrays)  # type: ignore[no-untyped-call]
    return tuple(value for value in results if value is not None)


def _is_constant(arrays: Arrays, call: Call) -> bool:
    """Whether nobody can differentiate the results."""
    if call.traced or forward_ad._current_level >= 0:
        return False
    return not (call.differentiate and any(array is not None and array.requires_grad for array in arrays[:3]))


def _steps(call: Call) -> Steps:
    return ops if call.traced else steps


def _needs(wanted: tuple[bool, ...], call: Call, arrays: Arrays) -> Needs:
    """``wanted``: for which arrays, in their order, autograd wants gradients.

    A gradient has the dtype of its argument, which under autocast is not the products'.
    """
    if not call.differentiate:
        return NO_GRADIENTS
    needs = Needs.of(arrays, wanted[:3])
    if call.into is not None and needs.weight:
        needs = dataclasses.replace(needs, weight=call.into.dtype, into=call.into)
    return needs


def _take(ctx: Context) -> Waiting | Tensor | None:
    """``ctx.waiting``, for this backward alone: finishing it writes to it.

    Where the graph is retained, plain operations' gradients are copied, so that every backward has the same bits.
    """
    waiting = ctx.waiting
    if isinstance(waiting, Gradients) and torch._C._autograd._get_current_graph_task_keep_graph():
        hidden, weight, bias = (
            None if gradient is None else gradient.clone()
            for gradient in (waiting.hidden, waiting.weight, waiting.bias)
        )
        return Gradients(hidden, weight, bias, waiting.factor)
    ctx.waiting = None
    return waiting


def _weight_gradients(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], upstream: Tensor, g_lse: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """dW and db of a loss whose backward has left them for later."""
    if not needs.any:
        return None, None
    gradients = steps.loss_gradients(arrays, call, needs, saved, None, upstream, g_lse)
    return gradients.weight, gradients.bias


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, lse and the statistics (or Nones), from hidden, weight, bias and what is not differentiated.

    Gradients that the forward has begun wait in ctx.waiting for the upstream scalar. The first backward takes them.
    """

    @staticmethod
    def forward(
        ctx: Context, call: Call, normalizer: Tensor | float | None, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        arrays = Arrays(*tensors)  # type: ignore[arg-type]
        needs = _needs(ctx.needs_input_grad[2:], call, arrays)
        step = _steps(call).loss(arrays, normalizer, call, needs if call.deferred is None else needs.hidden_alone)
        ctx.call, ctx.needs, ctx.waiting = call, needs, step.waiting
        ctx.save_for_backward(*arrays, *step.saved)
        stats = [None if value is None else own(value) for value in step.stats]
        ctx.mark_non_differentiable(*(value for value in stats if value is not None))
        return (own(step.loss), None if step.lse is None else own(step.lse), *stats)

    jvp = reverse_only("linear_cross_entropy")

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(
        ctx: Context, kept: tuple[Tensor, ...], upstream: Tensor, g_lse: Tensor | None, *_: Tensor | None
    ) -> Derivatives:
        waiting, call = _take(ctx), ctx.call
        assert not isinstance(waiting, Tensor)
        arrays, saved, needs = Arrays(*kept[:7]), kept[7:], ctx.needs
        if call.deferred is not None:
            rest = dataclasses.replace(needs, hidden=None)
            both = (upstream,) if g_lse is None else (upstream, g_lse)
            call.deferred.arrived(both, arrays, functools.partial(_weight_gradients, arrays, call, rest, saved))
            needs = needs.hidden_alone
            if not needs.any:
                return (None,) * 9
        gradients = _steps(call).loss_gradients(arrays, call, needs, saved, waiting, upstream, g_lse)
        return None, None, gradients.hidden, gradients.weight, gradients.bias, *(None,) * 4


class LinearLogProbsFunction(torch.autograd.Function):
    """log p(target) and the statistics per token. The backward computes all gradients."""

    @staticmethod
    def forward(
        ctx: Context, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        temperature: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        arrays = Arrays.of_head(hidden, weight, bias, target, temperature)
        needs = _needs(ctx.needs_input_grad[1:], call, arrays)
        step = _steps(call).log_probs(arrays, call, needs)
        ctx.call, ctx.needs, ctx.waiting = call, needs, step.waiting if step.held is None else step.held
        ctx.save_for_backward(*arrays.head, *step.saved)
        ctx.set_materialize_grads(False)
        results = tuple(map(own, (step.log_prob, *step.stats)))
        ctx.mark_non_differentiable(*results[call.differentiable :])
        return results

    jvp = reverse_only("linear_log_probs")

    @staticmethod
    @differentiable_once("linear_log_probs")
    def backward(ctx: Context, kept: tuple[Tensor, ...], *upstream: Tensor | None) -> Derivatives:
        waiting, call, arrays = _take(ctx), ctx.call, Arrays.of_head(*kept[:5])
        upstream = upstream[: call.differentiable]
        gradients = _steps(call).log_probs_gradients(arrays, call, ctx.needs, kept[5:], waiting, upstream)
        return None, gradients.hidden, gradients.weight, gradients.bias, None, None
