"""A distillation's losses and gradients: by whole rows (whole_rows.py), or tile by tile in plain operations. Mirror of
jax_impl/distillation/steps.py.

A tile [C, B] of the student's logits serves the divergence from the teacher and the hard loss. The whole logits of
neither side exist. lse comes in two parts, a logit not far below the largest and the rest, so that large logits cost no
accuracy, nor do saturated sides.

Where ranks share the vocabulary, each has the rows or tiles of its own entries, and cuts the tokens as all others do.

Rounding: as in eager.py, with the gradient of a tile rounded to the student's dtype on a GPU, and accumulated in
float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitless import numerics
from logitless.objectives import Tile, WholeRows
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.autograd import Derivatives, SavedContext, differentiable_once, reverse_only
from logitless.torch_impl.call import XP, Arrays, Inputs
from logitless.torch_impl.distillation import whole_rows
from logitless.torch_impl.distillation.parts import Divergence, Hard, Part, RestClass
from logitless.torch_impl.distillation.teachers import Dense, DenseRows, Head, Spread
from logitless.torch_impl.distributed.parallel import Shard

Constants = Sequence[Tensor | None]
"""What is known of the teacher, and of the student beside its arrays."""


class Soft(Protocol):
    """What kind of teacher there is, and everything about it that is no tensor."""

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        """The divergence from it; ``constants`` as the kind has them."""


@dataclasses.dataclass(frozen=True)
class FromHead:
    """Of a teacher's head. Constants: hidden, weight, bias, target, temperature; of tiles lse and the student's lse."""

    options: LossOptions
    compute_dtype: torch.dtype

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        arrays, (teacher_lse, lse) = constants[:5], constants[5:] or (None, None)
        given = Arrays.of_head(*arrays)  # type: ignore[arg-type]
        teacher = chunk.prepare(given, self.options, self.compute_dtype, inputs.shard)
        return Divergence(Head(teacher, self.options, teacher_lse, inputs.accumulation_dtype), lse, beta, inputs.shard)


@dataclasses.dataclass(frozen=True)
class FromIds:
    """Of given ids. Constants: ids [N, K], log p [N, K], of the rest [N]; of tiles the student's lse if the rest is
    spread."""

    spread: bool

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        ids, log_p, log_rest, *lse = constants
        assert ids is not None
        assert log_p is not None
        assert log_rest is not None
        shard = inputs.shard
        if self.spread:
            teacher = Spread(ids, log_p, log_rest, shard.start, inputs.weight.shape[0])
            return Divergence(teacher, lse[0] if lse else None, beta, shard)
        return RestClass(ids, log_p.dtype, shard, torch.cat([log_p, log_rest.unsqueeze(1)], dim=1), beta)


@dataclasses.dataclass(frozen=True)
class FromDense:
    """Of all probabilities. Constants: the teacher's if it is a tensor; of tiles the student's lse."""

    source: NDArray[np.generic] | DenseRows | None
    log: bool
    shape: tuple[int, ...]

    def part(self, inputs: Inputs, constants: Constants, beta: float) -> Part:
        tensors = list(constants)
        source = tensors.pop(0) if self.source is None else self.source
        assert source is not None
        like = inputs.weight.new_empty(0, dtype=inputs.accumulation_dtype)
        teacher = Dense(source, self.log, self.shape, like)
        return Divergence(teacher, tensors[0] if tensors else None, beta, inputs.shard)


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
    order: WholeRows | Tile
    kernel: bool
    """Whether the losses are the kernels', where they take them."""
    differentiate: bool
    shard: Shard | None
    """This rank's slice of the vocabulary, if ranks share it."""

    def inputs(self, arrays: Arrays) -> Inputs:
        """The student's."""
        return chunk.prepare(arrays, self.options, self.compute_dtype, self.shard)

    def prepared(self, arrays: Arrays, hard: Tensor | None, constants: Constants) -> tuple[Inputs, list[Part]]:
        """The student's inputs, and the losses: the hard one, if there is one, and the divergence. ``hard``: its ids,
        [N], inside the vocabulary."""
        inputs = self.inputs(arrays)
        part = self.soft.part(inputs, constants, self.beta)
        if self.kernel and isinstance(part, Divergence) and (isinstance(self.order, Tile) or inputs.shard.split):
            from logitless.torch_impl.distillation import fused  # imports Triton

            part = dataclasses.replace(part, by_tile=fused)
        parts = [part]
        if hard is not None:
            column = inputs.temperature_column(slice(None))
            temperature = self.temperature if column is None else column
            dtype = inputs.accumulation_dtype
            parts.insert(0, Hard(hard.unsqueeze(1), dtype, inputs.shard, self.nll_coef, temperature))
        return inputs, parts


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
            inputs, parts = call.prepared(arrays, tensors[5], tensors[6:])
            if isinstance(call.order, WholeRows):
                losses, gradient = whole_rows.forward(
                    inputs, parts, call.options, call.order, kernel=call.kernel, differentiate=call.differentiate
                )
                kept: list[tuple[Tensor, ...]] = [] if gradient is None else [(gradient,)]
                tensors = tensors[:5]  # the rows have done with the teacher
            else:
                losses, kept = _forward(inputs, parts, call.options, call.order)
        ctx.call, ctx.counts = call, [len(each) for each in kept]
        ctx.save_for_backward(*tensors, *(tensor for each in kept for tensor in each))
        return losses


def _backward(ctx: DivergenceContext, saved: tuple[Tensor, ...], upstream: Tensor) -> Derivatives:
    split = len(saved) - sum(ctx.counts)
    tensors, found = saved[:split], iter(saved[split:])
    kept = [tuple(next(found) for _ in range(count)) for count in ctx.counts]
    call, needs = ctx.call, ctx.needs_input_grad[1:4]
    with torch.autocast(upstream.device.type, enabled=False):
        arrays = Arrays.of_head(*tensors[:5])
        if isinstance(call.order, WholeRows):
            inputs = call.inputs(arrays)
            gradients = whole_rows.gradients(
                inputs, call.options, call.order, kept[0][0], upstream, tensors[1].dtype, needs, call.kernel
            )
        else:
            inputs, parts = call.prepared(arrays, tensors[5], tensors[6:])
            gradients = _gradients(inputs, parts, kept, upstream, call, tensors[1].dtype, needs)
        if gradients[0] is not None:
            inputs.shard.sum(gradients[0])
    like = zip(gradients, tensors[:3], strict=True)
    cast = (None if g is None else g.to(a.dtype).reshape(a.shape) for g, a in like)
    return (None, *cast, *(None,) * (len(ctx.needs_input_grad) - 4))


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


def _forward(
    inputs: Inputs, parts: list[Part], options: LossOptions, tile: Tile
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The losses of every token, and what each part has kept."""
    losses = inputs.hidden.new_zeros(inputs.tokens, dtype=inputs.accumulation_dtype)
    kept: list[list[tuple[Tensor, ...]]] = [[] for _ in parts]
    for first, last in tile.token_slices or ((0, 0),):
        rows = slice(first, last)
        x, sums = chunk.rows_of(inputs, rows), [part.start(rows) for part in parts]
        for start, stop in tile.vocab_slices:
            z = x.new_empty((last - first, stop - start), dtype=inputs.accumulation_dtype)
            chunk.logits_block(x, inputs, rows, start, stop, options, z)
            sums = [part.add(of, z, rows, start) for part, of in zip(parts, sums, strict=True)]
        for part, of, each in zip(parts, sums, kept, strict=True):
            part_losses, part_kept = part.finish(of, rows)
            losses[rows] += part_losses
            each.append(part_kept)
    joined = [tuple(map(torch.cat, zip(*each, strict=True))) for each in kept]
    return losses.masked_fill_(~inputs.valid, 0.0), joined


def _gradients(
    inputs: Inputs, parts: list[Part], kept: list[tuple[Tensor, ...]], upstream: Tensor, call: Distillation,
    weight_dtype: torch.dtype, needs: tuple[bool, ...],
) -> list[Tensor | None]:  # fmt: skip
    """dX, dW and db, each None unless wanted: 6·N·D·V flops beside the teacher's."""
    assert isinstance(call.order, Tile)
    factor = numerics.row_upstream(XP, inputs, call.options, inputs.wide(upstream))
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, factor)
    factor = factor / unit

    def logit_gradient(rows: slice, x: Tensor, start: int, stop: int) -> Tensor:
        z = x.new_empty((x.shape[0], stop - start), dtype=factor.dtype)
        chunk.logits_block(x, inputs, rows, start, stop, call.options, z)
        capped = call.options.softcap is not None
        slope = chunk.slope(z, call.options, inputs.temperature_column(rows)) if capped else None
        dz = None
        for part, of in zip(parts, kept, strict=True):
            own = part.gradient(tuple(values[rows] for values in of), z, rows, start)
            dz = own if dz is None else own.add_(dz)
        assert dz is not None
        if slope is not None:
            dz.mul_(slope)
        return dz.mul_(factor[rows].unsqueeze(1)).masked_fill_(~inputs.valid[rows].unsqueeze(1), 0.0)

    wanted = needs[0], needs[1], needs[2]
    return chunk.tile_gradients(inputs, call.order, wanted, weight_dtype, unit, logit_gradient)
