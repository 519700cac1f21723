"""The weight's gradient after the backward: what a zero-bubble pipeline schedule fills its idle time with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from logitless.torch_impl.distributed import dtensors


class DeferredWeightGrad:
    """What ``linear_cross_entropy(..., defer_weight_grad=True)`` returns beside the loss.

        loss, weight_grad = linear_cross_entropy(hidden, weight, target, defer_weight_grad=True)
        loss.backward()         # the gradient of hidden, and nothing of the weight's
        weight_grad.compute()   # whenever there is time: dW into weight.grad or accumulate_into, db into bias.grad

    From the backward to :meth:`compute` it keeps the call's arguments, which must not be changed in place meanwhile,
    and three numbers per token: 12·N bytes beside hidden, weight and target, and no logits. compute() makes the logits
    anew, chunk by chunk within the call's plan: 4·N·D·V flops, 2 more than in a backward that is not cut in two.

    Gradients are added to ``.grad`` directly: hooks on the parameters, and so the reductions of
    DistributedDataParallel and FSDP, do not see them. With a process_group every rank calls compute(), in the same
    order.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight``, ``bias``: the parameters as they were given, whose ``.grad`` the gradients are added to."""
        self._parameters = weight, bias
        self._gradients: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
        self._arrays: tuple[Tensor | None, ...] = ()
        self._versions: list[int] = []
        self._upstream: tuple[Tensor, ...] | None = None
        self._computed = False

    def arrived(
        self,
        upstream: tuple[Tensor, ...],
        arrays: Iterable[Tensor | None],
        gradients: Callable[..., tuple[Tensor | None, Tensor | None]],
    ) -> None:
        """What a backward leaves. The upstream gradients of several backward calls add up.

        ``upstream`` has one of each result that has a gradient, and ``gradients`` gives dW and db for them. It reads
        ``arrays``.
        """
        before = self._upstream
        self._upstream = upstream if before is None else tuple(a + b for a, b in zip(before, upstream, strict=True))
        self._arrays = tuple(arrays)
        self._gradients, self._versions = gradients, _versions(self._arrays)

    def compute(self) -> None:
        """Add dW (and db) of every backward since the last call. Frees what was kept.

        Raises RuntimeError before the first backward, and a second time after one (a further backward through a
        retained graph allows a further call).
        """
        gradients, upstream = self._gradients, self._upstream
        if upstream is None or gradients is None:
            when = "a second time" if self._computed else "before the loss's backward()"
            raise RuntimeError(
                f"DeferredWeightGrad.compute: called {when}, allowed is once after a backward() of its loss"
            )
        if _versions(self._arrays) != self._versions:
            raise RuntimeError(
                "DeferredWeightGrad.compute: hidden, weight, bias or target was changed in place after the backward, "
                "allowed is a change after compute()"
            )
        self._gradients, self._upstream, self._arrays, self._computed = None, None, (), True
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients(*upstream), strict=True):
                if parameter is not None and gradient is not None:
                    _add_gradient(parameter, gradient)


def _versions(arrays: Iterable[Tensor | None]) -> list[int]:
    return [array._version for array in arrays if array is not None]


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if dtensors.is_dtensor(parameter):
        gradient = dtensors.wrapped(gradient, dtensors.place_of(parameter))
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
