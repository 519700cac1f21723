"""The weight's gradient after hidden's: what a zero-bubble pipeline schedule fills its idle time with.

Mirror of torch_impl/distributed/deferred.py.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

from logitless.jax_impl import checks
from logitless.jax_impl.call import Arrays, Call, as_jax, taking_wrappers
from logitless.jax_impl.vjp import Like
from logitless.jax_impl.weight_grad import steps
from logitless.jax_impl.weight_grad.steps import Kept


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
    may be called again.
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
