"""What a backend does, as a type, and the backends by name. Mirror of jax_impl/backend.py.

A backend is a module with the attributes and functions of :class:`Backend`: torch_impl/eager.py and
torch_impl/kernels/fused.py. N tokens, D hidden, V vocabulary entries (of this rank, if the call is sharded).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from logitless import numerics, spec
from logitless.planning import ChunkPlan
from logitless.scratch import Kind
from logitless.spec import LossOptions, Statistics
from logitless.torch_impl.call import (
    NOTHING,
    XP,
    Arrays,
    Call,
    Gradients,
    Inputs,
    KnownRows,
    Layout,
    Needs,
    TokenSums,
    empty_like_weight,
)
from logitless.torch_impl.distributed.parallel import Shard

BACKENDS = ("triton", "eager")

Prepared = TypeVar("Prepared", bound=Inputs)
Result = TypeVar("Result")


class Waiting(Protocol):
    """What a forward leaves for its backward."""

    def finish(self, upstream: Tensor) -> Gradients:
        """The gradients for the upstream gradient, which may be written over what waits: called once."""


class WaitingLoss(Waiting, Protocol):
    def tensors(self, layout: Layout) -> list[Tensor]:
        """What waits, as the tensors of :meth:`Backend.held_layout`."""


class Backend(Protocol[Prepared]):
    PRODUCTS_WAIT: bool
    """Whether the products of the last chunk wait for the upstream scalar. Else whole gradients wait for it."""
    SUMS_SLICES: bool
    """Whether dW of a part of the vocabulary can be a sum over chunks of tokens beside the other parts. Else each is
    made of all tokens at once."""
    BUFFER_ALIGNMENT: int
    """The bytes on whose multiple a buffer that dW is added to must start."""

    def unavailable(self, device: torch.device, dtype: torch.dtype, each: bool = False) -> str | None:
        """Why this backend cannot compute in ``dtype`` on that device, or None. ``each``: with a temperature per
        token."""

    def one_pass(self, dtype: torch.dtype, options: LossOptions) -> bool:
        """Whether gradients can be computed before lse is known."""

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether exponentials can wait for an upstream gradient per token."""

    def lends(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether exponentials [N, V] can lie in the rows of dW, N ≤ D, until dW is made there."""

    def run_step(
        self, name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result],
        others: Sequence[Tensor | float | None], /,
    ) -> Result:  # fmt: skip
        """``step(call)``, and whatever the first call of its kind needs before it. ``others``: all tensors and
        numbers that it reads beside ``arrays`` and ``call``."""

    def prepare(
        self, arrays: Arrays, options: LossOptions, dtype: torch.dtype, shard: Shard | None = None, /
    ) -> Prepared:
        """The arrays flattened, ids marked, products' operands in ``dtype``."""

    def normalizer(self, inputs: Prepared, options: LossOptions, normalizer: Tensor | float | None, /) -> Tensor:
        """[] what the sum of the token losses is multiplied by: 1 / Σ t k_y for mean, 1 for the others."""

    def token_sums(
        self, inputs: Prepared, options: LossOptions, plan: ChunkPlan, statistics: Statistics,
        norm: Tensor | None = None, /,
    ) -> TokenSums:  # fmt: skip
        """[N] each: what the forward knows of every token. 2·N·D·V flops. ``norm``: of a loss that is a sum."""

    def losses(self, inputs: Prepared, options: LossOptions, sums: TokenSums, /) -> Tensor:
        """[N] the token losses, exactly 0 where ignored."""

    def log_probs(self, inputs: Prepared, sums: TokenSums, /) -> Tensor:
        """[N] log p(target), exactly 0 where ignored."""

    def entropy(self, inputs: Prepared, sums: TokenSums, /) -> Tensor:
        """[N] the entropy, which is among the sums, exactly 0 where ignored; in memory of its own."""

    def log_prob_rows(
        self, inputs: Prepared, options: LossOptions, sums: TokenSums, g_log_prob: Tensor | None,
        g: Mapping[str, Tensor], /,
    ) -> KnownRows:  # fmt: skip
        """The rows of log-probabilities' gradient. Upstream gradients [N]: of log p, None if it has none, and of
        statistics by their names. (JAX makes this, :meth:`log_probs` and :meth:`entropy` in vjp.py: XLA fuses them.)"""

    def total_loss(self, inputs: Prepared, options: LossOptions, sums: TokenSums, norm: Tensor, /) -> Tensor:
        """[] the sum of the token losses times ``norm``."""

    def loss_gradients(
        self, inputs: Prepared, options: LossOptions, plan: ChunkPlan, norm: Tensor, needs: Needs, statistics: bool, /
    ) -> tuple[TokenSums, WaitingLoss]:
        """Sums, and gradients that wait for the upstream scalar. 6·N·D·V flops in all."""

    def plain_loss(
        self, arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs, /
    ) -> tuple[Tensor, WaitingLoss] | None:
        """A loss without options and its gradients in few operations, or None where the general way must be taken."""

    def token_gradients(
        self, inputs: Prepared, options: LossOptions, plan: ChunkPlan, needs: Needs, statistics: bool, /
    ) -> tuple[TokenSums, Waiting]:
        """Sums, and exponentials [N, V] that wait for upstream gradients [N]. Only where :meth:`holds`."""

    def known_gradients(
        self, inputs: Prepared, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Tensor, needs: Needs, /
    ) -> Gradients:
        """dX [N, D], dW [V, D], db [V] from rows [N] that are known. g [N]: upstream gradient, weights included."""

    def token_logits(
        self, inputs: Prepared, options: LossOptions, plan: ChunkPlan, statistics: Statistics, /
    ) -> tuple[TokenSums, Tensor]:
        """Sums, and logits [N, V] that wait for :meth:`logits_gradients`. Only where :meth:`holds`."""

    def logits_gradients(
        self, inputs: Prepared, options: LossOptions, plan: ChunkPlan, known: KnownRows, needs: Needs, logits: Tensor, /
    ) -> Gradients:
        """:meth:`known_gradients` from the logits that :meth:`token_logits` has left, which are written to."""

    def held_layout(
        self, tokens: int, arrays: Arrays, options: LossOptions, dtype: torch.dtype, token_chunk: int, needs: Needs, /
    ) -> Layout:
        """What :meth:`loss_gradients` leaves waiting. ``tokens`` and ``token_chunk`` may be symbols."""

    def held_gradients(
        self,
        make_inputs: Callable[[Tensor | None], Prepared],
        arrays: Arrays,
        options: LossOptions,
        dtype: torch.dtype,
        plan: ChunkPlan,
        needs: Needs,
        tensors: list[Tensor],
        upstream: Tensor,
        /,
    ) -> Gradients:
        """What :meth:`Waiting.finish` gives, from the tensors of :meth:`held_layout`. None of them is written to."""


def backend_named(name: str) -> Backend[Any]:
    """The backend of that name. Only a backend reads the inputs that it has prepared, so their type does not matter.

    Triton is imported when its backend is first asked for.
    """
    if name == "triton":
        from logitless.torch_impl.kernels import fused

        return fused
    from logitless.torch_impl import eager

    return eager


# ---------------------------------------------------------------------------------------------------------------------
# The order "both": two plans, one after the other


class Halves(Generic[Prepared]):
    """Gradients of the order "both", waiting for the upstream scalar: dX has begun, the rest of dW is made then."""

    def __init__(
        self, backend: Backend[Prepared], inputs: Prepared, options: LossOptions, plan: ChunkPlan, norm: Tensor,
        needs: Needs, begun: tuple[TokenSums, WaitingLoss | None],
    ) -> None:  # fmt: skip
        self.backend, self.inputs, self.options, self.plan = backend, inputs, options, plan
        self.norm, self.needs, (self.sums, self.begun) = norm, needs, begun

    def finish(self, upstream: Tensor) -> Gradients:
        """May be called once."""
        waiting, self.begun = self.begun, None  # what it holds makes room
        made = NOTHING if waiting is None else waiting.finish(upstream)
        del waiting
        if made.hidden is not None:
            made = dataclasses.replace(made, hidden=made.hidden.to(self.needs.hidden))
        if self.needs.weight is None:
            return made
        g = numerics.row_upstream(XP, self.inputs, self.options, self.inputs.wide(upstream * self.norm))
        known = numerics.known_loss_rows(XP, self.inputs, self.options, self.sums, g)
        return _with_rest(self.backend, self.inputs, self.options, self.plan, known, g, self.needs, made)


def loss_gradients(
    backend: Backend[Prepared], inputs: Prepared, options: LossOptions, plan: ChunkPlan, norm: Tensor, needs: Needs,
    statistics: bool,
) -> tuple[TokenSums, Waiting]:  # fmt: skip
    """:meth:`Backend.loss_gradients`, in any order of the plan."""
    if not backend.SUMS_SLICES:
        plan = plan.with_whole_slices
    if plan.order != "both":
        return backend.loss_gradients(inputs, options, plan, norm, needs, statistics)
    needs = _with_room(inputs, plan, needs)
    first = _of_first(plan, needs)
    begun: tuple[TokenSums, WaitingLoss | None]
    if first.any:
        begun = backend.loss_gradients(inputs, options, plan.forward, norm, first, statistics)
    else:
        begun = backend.token_sums(inputs, options, plan.forward, statistics, norm), None
    return begun[0], Halves(backend, inputs, options, plan, norm, needs, begun)


def known_gradients(
    backend: Backend[Prepared], inputs: Prepared, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Tensor,
    needs: Needs,
) -> Gradients:  # fmt: skip
    """:meth:`Backend.known_gradients`, in any order of the plan."""
    if not backend.SUMS_SLICES:
        plan = plan.with_whole_slices
    if plan.order != "both":
        return backend.known_gradients(inputs, options, plan, known, g, needs)
    needs = _with_room(inputs, plan, needs)
    first = _of_first(plan, needs)
    made = backend.known_gradients(inputs, options, plan.forward, known, g, first) if first.any else NOTHING
    return _with_rest(backend, inputs, options, plan, known, g, needs, made)


def _of_first(plan: ChunkPlan, needs: Needs) -> Needs:
    """What the first half makes: dW if it makes a part of it."""
    return needs if plan.summed else dataclasses.replace(needs, weight=None, into=None)


def _with_rest(
    backend: Backend[Prepared], inputs: Prepared, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Tensor,
    needs: Needs, made: Gradients,
) -> Gradients:  # fmt: skip
    """The first half's gradients, with what the second makes of dW."""
    if needs.weight is None:
        return made
    rest = backend.known_gradients(inputs, options, plan.for_weight, known, g, needs.weight_alone)
    return dataclasses.replace(made, weight=rest.weight)


def _with_room(inputs: Inputs, plan: ChunkPlan, needs: Needs) -> Needs:
    """With dW's memory, if something else lies there first, or if both halves make a part of dW."""
    parts = plan.summed > 0 and needs.weight is not None and needs.into is None
    if not (plan.has_room or parts):
        return needs
    dtype = inputs.hidden.dtype if needs.weight is None else needs.weight
    return dataclasses.replace(needs, room=empty_like_weight(inputs.weight, dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Which backend, and what a plan can do there


def adds_in_one_pass(backend: Backend[Any], plan: ChunkPlan) -> bool:
    """Whether a plan in one pass can add dW to a buffer: no part of dW may be added before the upstream scalar is
    known."""
    if plan.order == "both" and not plan.summed:
        return True
    return backend.PRODUCTS_WAIT and len(plan.token_slices) <= 1


def chosen_backend(name: str | None, device: torch.device, dtype: torch.dtype, each: bool = False) -> Kind:
    """The backend to use: the one asked for, or the kernels where they run on a GPU, else plain operations. ``each``:
    with a temperature per token."""
    if name == "eager" or (name is None and device.type != "cuda"):
        return "eager"
    reason = backend_named("triton").unavailable(device, dtype, each)
    if name is not None and reason is not None:
        raise spec.unavailable_error(name, reason, usable="eager")
    return "triton" if reason is None else "eager"
