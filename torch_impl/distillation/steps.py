"""A distillation as one differentiable function of the student's arrays. Mirror of jax_impl/distillation/steps.py.

A logit of the student serves the divergence from the teacher and the hard loss. The whole logits of neither side exist:
whole_rows.py makes a few tokens' at a time. Where ranks share the vocabulary, each has the rows of its own entries, and
cuts the tokens as all others do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitless.objectives import WholeRows
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.autograd import Derivatives, SavedContext, differentiable_once, reverse_only
from logitless.torch_impl.call import Arrays, Inputs, Needs
from logitless.torch_impl.distillation import whole_rows
from logitless.torch_impl.distillation.parts import Divergence, Hard, Losses, Part, RestClass
from logitless.torch_impl.distillation.teachers import Dense, DenseRows, Head, Spread
from logitless.torch_impl.distributed.parallel import Shard

Constants = Sequence[Tensor | None]
"""What is known of the teacher."""


class Soft(Protocol):
    """What kind of teacher there is, and everything about it that is no tensor."""

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        """The divergence from it; ``constants`` as the kind has them."""


@dataclasses.dataclass(frozen=True)
class FromHead:
    """Of a teacher's head. Constants: hidden, weight, bias, target, temperature."""

    options: LossOptions
    compute_dtype: torch.dtype

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        given = Arrays.of_head(*constants)  # type: ignore[arg-type]
        teacher = chunk.prepare(given, self.options, self.compute_dtype, inputs.shard)
        return Divergence(Head(teacher, self.options, inputs.accumulation_dtype), beta, inputs.shard)


@dataclasses.dataclass(frozen=True)
class FromIds:
    """Of given ids. Constants: ids [N, K], log p [N, K], of the rest [N]."""

    spread: bool

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        ids, log_p, log_rest = constants
        assert ids is not None
        assert log_p is not None
        assert log_rest is not None
        shard = inputs.shard
        if self.spread:
            return Divergence(Spread(ids, log_p, log_rest, shard.start), beta, shard)
        return RestClass(ids, shard, torch.cat([log_p, log_rest.unsqueeze(1)], dim=1), beta)


@dataclasses.dataclass(frozen=True)
class FromDense:
    """Of all probabilities. Constants: the teacher's if it is a tensor."""

    source: NDArray[np.generic] | DenseRows | None
    log: bool
    shape: tuple[int, ...]

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        source = constants[0] if self.source is None else self.source
        assert source is not None
        like = inputs.weight.new_empty(0, dtype=inputs.accumulation_dtype)
        return Divergence(Dense(source, self.log, self.shape, like), beta, inputs.shard)


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Everything about a call that is not a tensor."""

    soft: Soft
    beta: float
    nll_coef: float
    temperature: float
    """Of all tokens; 1 where each has its own."""
    options: LossOptions
    """Of the student's logits, temperature included."""
    compute_dtype: torch.dtype
    order: WholeRows
    kernel: bool
    """Whether kernels may make the losses."""
    differentiate: bool
    shard: Shard | None
    """This rank's slice of the vocabulary, if ranks share it."""

    def inputs(self, arrays: Arrays) -> Inputs:
        """The student's."""
        return chunk.prepare(arrays, self.options, self.compute_dtype, self.shard)

    def losses(self, arrays: Arrays, hard: Tensor | None, constants: Constants) -> Losses:
        """``hard``: the hard loss's ids, [N], inside the vocabulary; None: there is none."""
        inputs = self.inputs(arrays)
        part = self.soft.part(inputs, constants, self.beta)
        if self.kernel and isinstance(part, Divergence) and inputs.shard.split:
            from logitless.torch_impl.distillation import fused  # imports Triton

            part = dataclasses.replace(part, by_tile=fused)
        parts = [part]
        if hard is not None:
            column = inputs.temperature_column(slice(None))
            temperature = self.temperature if column is None else column
            parts.insert(0, Hard(hard.unsqueeze(1), inputs.shard, self.nll_coef, temperature))
        return Losses(inputs, parts, self.options, self.order)


class DivergenceContext(SavedContext):
    """What the backward finds of its forward."""

    call: Distillation
    counts: list[int]
    """How many tensors each part has kept."""


class DivergenceFunction(torch.autograd.Function):
    """The losses of every token, [N], 0 where it does not count; differentiable in the student's arrays.

    ``tensors``: the student's head (:attr:`Arrays.head`), the ids of the hard loss or None, and the constants.
    """

    @staticmethod
    def forward(ctx: DivergenceContext, call: Distillation, *tensors: Tensor | None) -> Tensor:
        arrays = Arrays.of_head(*tensors[:5])  # type: ignore[arg-type]
        with torch.autocast(arrays.hidden.device.type, enabled=False):
            losses, kept = whole_rows.forward(
                call.losses(arrays, tensors[5], tensors[6:]), differentiate=call.differentiate
            )
        if call.order.again is None:
            tensors = tensors[:5]  # the backward has done with the teacher
        ctx.call, ctx.counts = call, [len(each) for each in kept]
        ctx.save_for_backward(*tensors, *(tensor for each in kept for tensor in each))
        return losses


def _backward(ctx: DivergenceContext, saved: tuple[Tensor, ...], upstream: Tensor) -> Derivatives:
    split = len(saved) - sum(ctx.counts)
    tensors, found = saved[:split], iter(saved[split:])
    kept = [tuple(next(found) for _ in range(count)) for count in ctx.counts]
    call, wanted = ctx.call, ctx.needs_input_grad
    arrays = Arrays.of_head(*tensors[:5])
    needs = Needs.of(arrays, wanted[1:4])
    with torch.autocast(upstream.device.type, enabled=False):
        if call.order.again is None:
            inputs = call.inputs(arrays)
            made = whole_rows.gradients(inputs, call.options, call.order, kept[0][0], upstream, needs)
        else:
            losses = call.losses(arrays, tensors[5], tensors[6:])
            inputs = losses.inputs
            made = whole_rows.gradients_again(losses, kept, upstream, needs)
        if made.hidden is not None:
            inputs.shard.sum(made.hidden)
    return (None, *made.like(arrays), *(None,) * (len(wanted) - 4))


def _named(name: str) -> type[DivergenceFunction]:
    """The function of a public one, whose errors have its name."""

    class Named(DivergenceFunction):
        jvp = reverse_only(name)
        backward = staticmethod(differentiable_once(name)(_backward))

    return Named


FUNCTIONS = {
    name: _named(name) for name in ("distillation_loss", "sparse_distillation_loss", "dense_distillation_loss")
}
"""By the name of the public function."""
