"""The weight's gradient after hidden's: what a zero-bubble pipeline schedule fills its idle time with.

Mirror of torch_impl/distributed/deferred.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Self

import jax
from jax import Array

from logitless.jax_impl import checks
from logitless.jax_impl.call import Arrays, Call, as_jax, taking_wrappers
from logitless.jax_impl.vjp import Like
from logitless.jax_impl.weight_grad import steps
from logitless.jax_impl.weight_grad.steps import Kept
from logitless.spec import check_count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeferredWeightGrad:
    """What ``linear_cross_entropy_value_and_grad(..., defer_weight_grad=True)`` returns in the place of dW and db.

        loss, (dhidden, deferred) = linear_cross_entropy_value_and_grad(hidden, weight, target, defer_weight_grad=True)
        ...                                        # dhidden goes to the stage before
        dweight, dbias = deferred.compute(weight)  # whenever there is time

    A pytree: it may leave one jax.jit and enter another, or be carried by jax.lax.scan. It keeps the call's arguments
    but for the weight, three numbers per token (12·N bytes, 24·N in float64) and the upstream gradient, and no logits.

    PyTorch's ``compute()`` adds to ``.grad``, once. JAX's arrays never change, so this one returns the gradients, and
    may be called again. :class:`WeightGradQueue` keeps several, for a pipeline's schedule.
    """

    arrays: Arrays[Array | None]
    """The call's arguments, without the weight."""
    kept: Kept
    """What the forward knows of every token."""
    call: Call
    """Everything about the call that is not an array."""
    likes: tuple[Like, Like | None]
    """What dW and db must look like."""

    @taking_wrappers
    def compute(self, weight: Array, *, accumulate_into: Array | None = None) -> tuple[Array, Array | None]:
        """dW (or ``accumulate_into`` + dW) and db (None without a bias).

            dW_j = Σ_i d_ij x_i        db_j = Σ_i d_ij        d_ij = upstream · ∂loss / ∂r_ij

        r = hidden weightᵀ + bias; of reduction="none", d_ij = upstream_i · ∂loss_i / ∂r_ij.

        The logits are made anew, block by block within the call's plan: 4·N·D·V flops, where a backward that is not
        cut in two takes 2 for dW.

        Arguments:
            weight: the call's, [V, D]. Its values are not looked at: others give wrong gradients.
            accumulate_into: as for :func:`linear_cross_entropy_value_and_grad`. A buffer narrower than float32 needs a
                call with a plan of one chunk of tokens or of order="vocab".

        Raises ValueError or TypeError naming the argument, what came and what is allowed; NotImplementedError for a
        buffer where the call runs on "pallas", and for a derivative of the results.
        """
        like, _ = self.likes
        checks.check_types({"weight": weight})
        if tuple(weight.shape) != like.shape:
            raise ValueError(f"weight: got shape {tuple(weight.shape)}, allowed is the call's {like.shape}")
        if weight.dtype != like.dtype:
            raise TypeError(f"weight: got dtype {weight.dtype}, allowed is the call's {like.dtype}")
        if accumulate_into is not None:
            self._check_buffer(weight, accumulate_into)
        arrays: Arrays[Array] = self.arrays._replace(weight=weight, accumulate_into=accumulate_into)  # type: ignore[assignment]
        made: tuple[Array, Array | None]
        made = steps.weight_grad(self.call, as_jax(arrays, arrays.hidden.dtype), self.kept, self.likes)
        return made

    def _check_buffer(self, weight: Array, into: Array) -> None:
        hidden = self.arrays.hidden
        assert hidden is not None
        checks.check_buffer(into, checks.info(weight), hidden)
        if self.call.backend == "pallas":
            raise NotImplementedError(
                f"accumulate_into: got a buffer for a call with backend='pallas', allowed is None: {checks.NO_BUFFER}; "
                f"a call with backend='xla' can"
            )
        checks.check_adds(self.call.plan, into, hidden)


class WeightGradQueue:
    """Deferred weight gradients that wait for a pipeline's idle time: in order, and no more than ``limit`` of them.

        queue = WeightGradQueue(limit=4)
        with queue:                      # at its end all are computed; an exception drops them
            loss, (dhidden, deferred) = step(hidden, weight, target)  # jitted, with defer_weight_grad=True
            queue.put(deferred, weight)  # waits in the queue
            queue.compute(1)             # the oldest, whenever there is time
        dweight, dbias = queue.gradients()

    For a schedule whose stages are separate calls of jitted functions. Inside one jax.jit there is nothing to wait for:
    XLA orders the work of a program itself.

    The order is that of ``put``. One more than ``limit`` makes the oldest be computed at once. So at most ``limit``
    microbatches keep their hidden states, and no gradient is lost.

    Whatever raises in a computation or in the ``with`` block drops all that wait: their gradients are not added, and
    what they kept is free. ``len(queue)`` is how many wait. PyTorch's queue adds to ``.grad``; this one has the sums.
    """

    def __init__(self, limit: int, *, accumulate_into: Array | None = None) -> None:
        """``limit``: the most that wait, at least 1. ``accumulate_into``: [V, D], which the sum of dW begins with, as
        for :meth:`DeferredWeightGrad.compute`; its memory is used, so the array itself is gone then.

        Raises ValueError or TypeError naming the argument, what came and what is allowed.
        """
        check_count("limit", limit, 1)
        if accumulate_into is not None:
            checks.check_types({"accumulate_into": accumulate_into})
        self.limit = limit
        self._waiting: collections.deque[tuple[DeferredWeightGrad, Array]] = collections.deque()
        self._into, self._sums = accumulate_into is not None, (accumulate_into, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, weight_grad: DeferredWeightGrad, weight: Array) -> None:
        """Let ``weight_grad`` wait here; ``weight``: its call's, [V, D].

        Raises TypeError naming the argument, what came and what is allowed.
        """
        if not isinstance(weight_grad, DeferredWeightGrad):
            raise TypeError(f"weight_grad: got {type(weight_grad).__name__}, allowed is a DeferredWeightGrad")
        checks.check_types({"weight": weight})
        self._waiting.append((weight_grad, weight))
        self.compute(max(0, len(self) - self.limit))

    def compute(self, count: int | None = None) -> int:
        """Compute the oldest ``count`` (None: all) that wait, in order; returns how many there were."""
        if count is not None:
            check_count("count", count, 0, " or None")
        count = len(self) if count is None else min(count, len(self))
        try:
            for _ in range(count):
                weight_grad, weight = self._waiting.popleft()
                self._sums = _added(self._into, self._sums, weight_grad, weight)
        except BaseException:
            self.clear()
            raise
        return count

    def gradients(self) -> tuple[Array | None, Array | None]:
        """The sums of dW and db of all that were computed since the last call; None where there were none.

        After it a new sum begins, of zero: a buffer is handed out once.
        """
        sums, self._sums, self._into = self._sums, (None, None), False
        return sums

    def clear(self) -> None:
        """Drop all that wait. Their gradients are not added."""
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.compute()
        else:
            self.clear()


Sums = tuple[Array | None, Array | None]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _added(into: bool, sums: Sums, weight_grad: DeferredWeightGrad, weight: Array) -> Sums:
    """dW and db added to the sums; ``into``: dW as to a buffer, in the buffer's dtype."""
    before, bias_before = sums
    dweight, dbias = weight_grad.compute(weight, accumulate_into=before if into else None)
    if before is not None and not into:
        dweight = before + dweight
    return dweight, dbias if bias_before is None or dbias is None else bias_before + dbias
