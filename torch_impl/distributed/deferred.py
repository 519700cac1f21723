"""The weight's gradient after the backward: what a zero-bubble pipeline schedule fills its idle time with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor

from logitless.spec import check_count
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
    order. :class:`WeightGradQueue` keeps several, for a pipeline's schedule.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight``, ``bias``: the parameters as they were given, whose ``.grad`` the gradients are added to."""
        self._parameters = weight, bias
        self._gradients: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
        self._arrays: tuple[Tensor | None, ...] = ()
        self._versions: list[int] = []
        self._upstream: tuple[Tensor, ...] | None = None
        self._computed = False
        self._queue: WeightGradQueue | None = None

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
        if self._queue is not None:
            self._queue._enter(self)

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
        self._drop()
        self._computed = True
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients(*upstream), strict=True):
                if parameter is not None and gradient is not None:
                    _add_gradient(parameter, gradient)

    def _drop(self) -> None:
        """Free what a backward left, and leave the queue."""
        self._gradients, self._upstream, self._arrays = None, None, ()
        if self._queue is not None:
            self._queue._leave(self)


class WeightGradQueue:
    """Deferred weight gradients that wait for a pipeline's idle time: in order, and no more than ``limit`` of them.

        queue = WeightGradQueue(limit=4)
        with queue:                    # at its end all are computed; an exception drops them
            loss, weight_grad = linear_cross_entropy(hidden, weight, target, defer_weight_grad=True)
            queue.put(weight_grad)     # waits in the queue from its loss's backward on
            loss.backward()
            queue.compute(1)           # the oldest, whenever there is time

    With the schedules of torch.distributed.pipelining, give :meth:`dw_builder` to the stage that has the head,
    ``PipelineStage(..., dw_builder=queue.dw_builder())``, and call ``put`` in the schedule's ``loss_fn``. Each W of the
    schedule then computes what the same microbatch's B has left.

    The order is that of the backward calls. One more than ``limit`` makes the oldest be computed at once, right after
    that backward. So at most ``limit`` microbatches keep their hidden states, and no gradient is lost.

    Whatever raises in a computation or in the ``with`` block drops all that wait: their gradients are not added, and
    what they kept is free. ``len(queue)`` is how many wait. With a process_group every rank's queue has one limit, and
    all ranks compute in the same order.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: the most that wait, at least 1.

        Raises ValueError or TypeError naming the argument, what came and what is allowed.
        """
        check_count("limit", limit, 1)
        self.limit = limit
        self._scheduled = False
        # Both oldest first. A schedule's have arrived until it asks for a runner, and wait from then on.
        self._arrived: list[DeferredWeightGrad] = []
        self._waiting: dict[DeferredWeightGrad, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, weight_grad: DeferredWeightGrad) -> None:
        """Let ``weight_grad`` wait here once its loss's backward has run. If it has, it waits from now on.

        Raises TypeError naming the argument, what came and what is allowed; ValueError if another queue has it.
        """
        if not isinstance(weight_grad, DeferredWeightGrad):
            raise TypeError(f"weight_grad: got {type(weight_grad).__name__}, allowed is a DeferredWeightGrad")
        if weight_grad._queue not in (None, self):
            raise ValueError("weight_grad: got one of another queue, allowed is one of this queue or of none")
        # A schedule asks for a runner right after each backward, except where it tries the loss on made-up data.
        for made_up in list(self._arrived):
            made_up._drop()
        weight_grad._queue = self
        if weight_grad._upstream is not None:
            self._enter(weight_grad)

    def compute(self, count: int | None = None) -> int:
        """Compute the oldest ``count`` (None: all) that wait, in order; returns how many there were."""
        if count is not None:
            check_count("count", count, 0, " or None")
        chosen = list(self._waiting)[:count]
        self._compute(chosen)
        return len(chosen)

    def dw_builder(self) -> Callable[[], Callable[[], None]]:
        """For PipelineStage's argument of this name: what its schedule calls right after each backward.

        It gives a function that computes what this backward has left, as far as it still waits. The stages first try
        the loss once, on made-up data, to learn the shapes of gradients. What that leaves is dropped: nobody asks for
        its function. So only a schedule that calls it after each backward may be given this.
        """
        self._scheduled = True

        def build() -> Callable[[], None]:
            taken, self._arrived = self._arrived, []
            for weight_grad in taken:
                self._wait(weight_grad)
            return lambda: self._compute([weight_grad for weight_grad in taken if weight_grad in self._waiting])

        return build

    def clear(self) -> None:
        """Drop all that wait. Their gradients are not added."""
        for weight_grad in [*self._arrived, *self._waiting]:
            weight_grad._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.compute()
        else:
            self.clear()

    def _enter(self, weight_grad: DeferredWeightGrad) -> None:
        """Its backward has run, once more if it is here already."""
        if weight_grad in self._waiting or weight_grad in self._arrived:
            return
        if self._scheduled:
            self._arrived.append(weight_grad)
        else:
            self._wait(weight_grad)

    def _wait(self, weight_grad: DeferredWeightGrad) -> None:
        self._waiting[weight_grad] = None
        self.compute(max(0, len(self) - self.limit))

    def _leave(self, weight_grad: DeferredWeightGrad) -> None:
        self._waiting.pop(weight_grad, None)
        if weight_grad in self._arrived:
            self._arrived.remove(weight_grad)

    def _compute(self, chosen: Iterable[DeferredWeightGrad]) -> None:
        try:
            for weight_grad in chosen:
                weight_grad.compute()
        except BaseException:
            self.clear()
            raise


def _versions(arrays: Iterable[Tensor | None]) -> list[int]:
    return [array._version for array in arrays if array is not None]


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if dtensors.is_dtensor(parameter):
        gradient = dtensors.wrapped(gradient, dtensors.place_of(parameter))
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
