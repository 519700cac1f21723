"""The target-anchored chunk in plain PyTorch operations: CPU and any CUDA device. Mirror of jax_impl/xla.py.

Two verbs (docs/design.md): :func:`token_sums` reads the logits block by block and keeps sums per token only;
:func:`loss_gradients` and :func:`known_gradients` give dX, dW and db as well. All work on flat arrays ([N, D], [V, D])
in the accumulation dtype (float64 for float64 input, else float32), make no host synchronisation, and never write to
an input.

Rounding: logits, exponentials and sums are float32, and so are the operands of the products on a CPU. On a GPU a block
of the logits' gradient is rounded to the input dtype on its way into the products, which accumulate in float32. So it
is on a CPU where PyTorch's switch lets float32 products read bfloat16 (call.rounds_products).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from logitless import numerics
from logitless.planning import ChunkPlan
from logitless.scratch import slices
from logitless.spec import LOWEST_GAP, LossOptions, Statistics
from logitless.torch_impl import chunk
from logitless.torch_impl.call import (
    XP,
    Arrays,
    Call,
    Gradients,
    Inputs,
    KnownRows,
    Layout,
    Needs,
    TokenSums,
    accumulation_dtype,
    empty_like_weight,
    is_turned,
    rounds_products,
)
from logitless.torch_impl.chunk import Smoothing
from logitless.torch_impl.chunk import entropy as entropy
from logitless.torch_impl.chunk import log_prob_rows as log_prob_rows
from logitless.torch_impl.chunk import log_probs as log_probs
from logitless.torch_impl.chunk import losses as losses
from logitless.torch_impl.chunk import normalizer as normalizer
from logitless.torch_impl.chunk import prepare as prepare
from logitless.torch_impl.chunk import total_loss as total_loss
from logitless.torch_impl.plain_loss import large, small

Result = TypeVar("Result")

# Whole gradients wait for the upstream scalar. A compiler may fuse what is left with other elementwise operations.
PRODUCTS_WAIT = False
SUMS_SLICES = False
BUFFER_ALIGNMENT = 1


def run_step(
    name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result],
    others: Sequence[Tensor | float | None],
) -> Result:  # fmt: skip
    """``step(call)``: plain operations need nothing before it."""
    del name, arrays, needs, others
    return step(call)


def one_pass(dtype: torch.dtype, options: LossOptions) -> bool:
    """Whether a chunk's matrix can be scaled into ``dtype``'s range before lse is known: float16's is too small for
    what a z-loss, 2 λ lse, may make of it."""
    return dtype != torch.float16 or not options.z_loss


def holds(dtype: torch.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token. Here the backward computes them again."""
    del dtype
    return False


def lends(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether exponentials can lie in dW's rows. Here they cannot."""
    del weight, dtype
    return False


def unavailable(device: torch.device, dtype: torch.dtype, each: bool = False) -> str | None:
    """Why plain operations cannot run there: they can anywhere."""
    del device, dtype, each
    return None


def token_sums(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics, norm: Tensor | None = None
) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, one block [C, B] of logits at a time."""
    inputs = chunk.counted(inputs)
    dtype, device = inputs.accumulation_dtype, inputs.hidden.device
    block = torch.empty((plan.token_chunk, plan.vocab_chunk), dtype=dtype, device=device)
    smoothing = Smoothing.prepare(inputs, options, plan.vocab_chunk)
    parts = []
    for first, last in slices(inputs.tokens, plan.token_chunk):
        rows = slice(first, last)
        x = chunk.rows_of(inputs, rows)
        sums = chunk.RunningSums(chunk.target_logits(x, inputs, rows, options), inputs.target[rows], statistics)
        own = None if inputs.temperature is None else inputs.temperature[rows]
        weighted = smoothing.weighted_logits(x, options, own) if smoothing else None
        for start, stop in plan.vocab_slices:
            z = chunk.logits_block(x, inputs, rows, start, stop, options, block[: last - first, : stop - start])
            if options.label_smoothing and not options.separable:
                k = None if inputs.class_weight is None else inputs.class_weight[start:stop]
                part = z.sum(dim=1) if k is None else chunk.vector_product(z, k)
                weighted = part if weighted is None else weighted + part
            sums.observe(z, start)
            sums.rescue(sums.highest)
            sums.exponentiate(z, start)
        if smoothing is None:
            weighted = sums.exchange(inputs.shard, weighted)
        else:
            sums.exchange(inputs.shard, None)
        parts.append(sums.finish(weighted))
    return chunk.of_all(chunk.concatenate(parts, torch.empty(0, dtype=dtype, device=device)), inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


class _Accumulators:
    """Where dX, dW and db are gathered, block by block; one object a call."""

    def __init__(
        self, inputs: Inputs, plan: ChunkPlan, needs: Needs, smoothing: Smoothing | None, g: Tensor,
        unit: Callable[[], Tensor],
    ) -> None:  # fmt: skip
        """``unit()``: as large as the matrix's elements get. Products in the accumulation dtype do not ask for it."""
        tokens, size = inputs.tokens, inputs.hidden.shape[1]
        vocab, device, dtype = inputs.weight.shape[0], inputs.hidden.device, inputs.accumulation_dtype
        self.inputs, self.plan, self.needs, self.smoothing, self.g = inputs, plan, needs, smoothing, g
        weight_dtype = dtype if plan.weight_accumulator else needs.weight
        # The ranks' parts of dX are added before they are rounded.
        hidden_dtype = dtype if inputs.shard.split else needs.hidden
        self.hidden = torch.empty_like(inputs.hidden, dtype=hidden_dtype) if needs.hidden else None
        self.weight = needs.into
        if weight_dtype and needs.weight and needs.into is None:
            self.weight = empty_like_weight(inputs.weight, weight_dtype)
            if not tokens:
                self.weight.zero_()
        self.works: list[Any] = []  # sums of dX over the ranks that are under way
        self.bias = torch.zeros(vocab, dtype=dtype, device=device) if needs.bias else None
        if smoothing is not None:
            self.smooth_x = torch.zeros(size, dtype=dtype, device=device)  # Σ_i g_i x_i
        # Low-precision operands: the largest factor is taken out of the matrix and put back in float32. float16 could
        # not hold it (loss scaling, class weights), and 1/N would round all targets' elements to the same side.
        rounds = inputs.operand_dtype != dtype or rounds_products(g)
        self.unit = unit() if rounds and tokens else None

    def start_chunk(self, rows: slice, x: Tensor, factor: Tensor) -> None:
        """Begin the tokens ``rows``; factor [C] is what their rows of the matrix still lack."""
        self.rows, self.factor = rows, factor
        # float32 operands: the factor goes to the rows of dX and of x, never to the matrix. Low-precision operands, or
        # products that round theirs: the matrix is rounded anyway, so it is rounded once, factor included, and x is
        # read as it came.
        self.element_factor = None
        self.scaled_x = x
        if self.unit is not None:
            self.element_factor = (factor / self.unit).unsqueeze(1)
        elif self.needs.weight:
            self.scaled_x = x * factor.unsqueeze(1)
        self.hidden_part = None
        if self.hidden is not None:
            own = self.hidden[rows]
            accumulates = own.dtype == factor.dtype
            self.hidden_part = own if accumulates else torch.empty_like(own, dtype=factor.dtype)
        if self.smoothing is not None:
            self.smooth_x += chunk.vector_product(x.to(factor.dtype).t(), self.g[rows])

    def add_block(self, e: Tensor, start: int, stop: int) -> None:
        """The two products of a block of the matrix, and the bias's sums. The block is not as it was afterwards."""
        if self.bias is not None:
            self.bias[start:stop] += chunk.vector_product(e.t(), self.factor)
        operand = e
        if self.element_factor is not None:
            dtype = self.inputs.operand_dtype
            if dtype != e.dtype:
                operand = torch.empty_like(e, dtype=dtype, memory_format=torch.contiguous_format)
            torch.mul(e, self.element_factor, out=operand)
        if self.hidden_part is not None:
            weight = self.inputs.weight[start:stop].to(operand.dtype)
            chunk.product(operand, weight, self.hidden_part, add=start > 0)
        if self.weight is not None:
            self._add_weight(operand, start, stop)

    def _add_weight(self, operand: Tensor, start: int, stop: int) -> None:
        assert self.weight is not None
        own, adds = self.weight[start:stop], self.needs.into is not None
        direct = own.dtype == self.factor.dtype and not (adds and self.unit is not None)
        part = own if direct else torch.empty_like(own, dtype=self.factor.dtype)
        chunk.product(operand.t(), self.scaled_x, part, add=direct and (adds or self.rows.start > 0))
        last = self.rows.stop == self.inputs.tokens
        if self.unit is not None and (last or adds):
            part.mul_(self.unit)
        if last and self.smoothing is not None:
            k = self.inputs.class_weight
            ones = torch.ones(stop - start, dtype=part.dtype, device=part.device)
            part.addr_(ones if k is None else k[start:stop], self.smooth_x, alpha=-self.smoothing.factor)
        if not direct:
            _ = own.add_(part) if adds else own.copy_(part)

    def finish_chunk(self) -> None:
        """Row factors on dX, and smoothing's share of it; the sum over the ranks begins."""
        if self.hidden is None or self.hidden_part is None:
            return
        if self.element_factor is None:
            self.hidden_part.mul_(self.factor.unsqueeze(1))
        elif self.unit is not None:
            self.hidden_part.mul_(self.unit)
        shard = self.inputs.shard
        if self.smoothing is not None and not shard.split:
            self.hidden_part.addr_(self.g[self.rows], self.smoothing.weighted_rows, alpha=-self.smoothing.factor)
        if shard.split and not shard.sequence_parallel:
            self.works.append(shard.start_sum(self.hidden_part))
        if self.hidden_part.dtype != self.hidden.dtype:
            self.hidden[self.rows].copy_(self.hidden_part)

    def finish(self) -> Gradients:
        if self.bias is not None and self.smoothing is not None:
            share = self.smoothing.factor * self.g.sum()
            self.bias -= share if self.inputs.class_weight is None else share * self.inputs.class_weight
        if self.hidden is not None:
            chunk.place_rows(self.hidden, self.inputs)
            if self.inputs.shard.split:
                self.hidden = self._shared_hidden(self.hidden)
        return Gradients(self.hidden, self.weight if self.needs.into is None else None, self.bias)

    def _shared_hidden(self, hidden: Tensor) -> Tensor:
        """dX summed over the ranks, with smoothing's share of it; under sequence parallelism this rank's tokens."""
        shard, rows = self.inputs.shard, slice(None)
        if shard.sequence_parallel:
            rows = shard.tokens_of(hidden.shape[0])
            hidden, work = shard.start_scatter(hidden)
            self.works.append(work)
        for work in self.works:
            if work is not None:
                work.wait()
        if self.smoothing is not None:
            hidden.addr_(self.g[rows], self.smoothing.weighted_rows, alpha=-self.smoothing.factor)
        return hidden


class _Held:
    """A chunk's matrix [C, V] in blocks of columns, each contiguous: exp of such a block takes a GPU 0.6 of the time.
    Behind them is one more element, for targets that are not in the vocabulary."""

    def __init__(self, inputs: Inputs, plan: ChunkPlan) -> None:
        self.plan = plan
        size = plan.token_chunk * plan.row_stride + 1
        self.memory = torch.empty(size, dtype=inputs.accumulation_dtype, device=inputs.hidden.device)

    def start_chunk(self, target: Tensor) -> list[tuple[int, int, Tensor]]:
        """(start, stop, block) of every block, for the tokens with these targets."""
        rows, width, end = len(target), self.plan.vocab_chunk, self.plan.row_stride
        blocks = []
        for start, stop in self.plan.vocab_slices:
            stride = min(width, end - start)  # the last block has the row's padding, too
            block = self.memory[rows * start : rows * (start + stride)].view(rows, stride)
            blocks.append((start, stop, block[:, : stop - start]))
        first = target.div(width, rounding_mode="floor").mul_(width)  # of the target's block
        row = torch.arange(rows, device=target.device)
        place = first * rows + (end - first).clamp_(max=width) * row + (target - first)
        self.targets = place.masked_fill_(target < 0, self.memory.numel() - 1)
        return blocks

    def set_target(self, values: Tensor | float) -> None:
        """The targets' elements."""
        if isinstance(values, Tensor):
            self.memory.scatter_(0, self.targets, values)
        else:
            self.memory.index_fill_(0, self.targets, values)


def loss_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, norm: Tensor, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Sums and gradients in one pass, 6·N·D·V flops: the exponentials of a chunk are held, anchored at the target.

    norm: what the sum of the token losses is multiplied by. For a plan in one pass and separable options.
    """
    inputs = chunk.counted(inputs)
    dtype, device = inputs.accumulation_dtype, inputs.hidden.device
    g = numerics.row_upstream(XP, inputs, options, inputs.wide(norm))
    held = _Held(inputs, plan)
    smoothing = Smoothing.prepare(inputs, options, plan.vocab_chunk)
    # dX waits for the upstream scalar in the accumulation dtype, as dW does (weight_accumulator).
    needs = dataclasses.replace(needs, hidden=dtype if needs.hidden else None)
    unit = functools.partial(numerics.loss_unit, XP, inputs, options, g)
    gradients = _Accumulators(inputs, plan, needs, smoothing, g, unit)
    parts = []
    for first, last in slices(inputs.tokens, plan.token_chunk):
        rows = slice(first, last)
        x = chunk.rows_of(inputs, rows)
        blocks = held.start_chunk(inputs.target[rows])
        sums = chunk.RunningSums(chunk.target_logits(x, inputs, rows, options), inputs.target[rows], statistics)
        for start, stop, z in blocks:
            sums.observe(chunk.logits_block(x, inputs, rows, start, stop, options, z), start)
        sums.rescue(inputs.shard.max(sums.highest))
        held.set_target(-torch.inf)
        for _, _, z in blocks:
            slope = chunk.slope(z, options, inputs.temperature_column(rows)) if options.softcap is not None else None
            sums.exponentiate_others(z)
            if slope is not None:
                z.mul_(slope)
            del slope  # a block that must not live through the products
        sums.exchange(inputs.shard, None)
        own = None if inputs.temperature is None else inputs.temperature[rows]
        part = sums.finish(smoothing.weighted_logits(x, options, own) if smoothing else None)
        parts.append(part)

        k = inputs.token_class_weight(rows)
        alpha, beta = numerics.alpha_beta(XP, inputs, options, part.lse, 1.0 if k is None else k)
        e_target, ignored = sums.e_target(), ~inputs.valid[rows]
        total, target = sums.s + e_target, numerics.target_over_alpha(XP, alpha, beta, e_target, sums.s)
        target = numerics.sloped(XP, target, part.target_logit, options, own)
        held.set_target(target.masked_fill(ignored, 0.0))
        gradients.start_chunk(rows, x, (g[rows] * alpha / total).masked_fill(ignored, 0.0))
        for start, stop, e in blocks:
            gradients.add_block(e, start, stop)
        gradients.finish_chunk()
    found = chunk.concatenate(parts, torch.empty(0, dtype=dtype, device=device))
    return chunk.of_all(found, inputs), gradients.finish()


def plain_loss(
    arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs
) -> tuple[Tensor, Gradients] | None:
    """The loss, and gradients that wait for the upstream scalar, in few operations; None where an option asks for
    more."""
    if arrays.hidden.device.type != "cuda":
        return small.loss(arrays, normalizer, call, needs)
    return large.loss(arrays, normalizer, call, needs) if needs.any else None


def token_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Exponentials that wait for upstream gradients per token: not here, see :func:`holds`."""
    raise NotImplementedError


def token_logits(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics
) -> tuple[TokenSums, Tensor]:
    """Logits that wait for upstream gradients per token: not here, see :func:`holds`."""
    raise NotImplementedError


def logits_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, needs: Needs, logits: Tensor
) -> Gradients:
    """Gradients from logits that waited: not here, see :func:`holds`."""
    raise NotImplementedError


def held_layout(
    tokens: int, arrays: Arrays, options: LossOptions, dtype: torch.dtype, token_chunk: int, needs: Needs
) -> Layout:
    """Shape in memory and dtype of the gradients that wait for the upstream scalar, and of what they lack, by name;
    ``tokens`` may be a symbol."""
    del options, token_chunk
    wide, weight = accumulation_dtype(dtype), arrays.weight
    vocab, size = weight.shape
    layout: Layout = {}
    if needs.hidden:
        layout["hidden"] = ((tokens, size), wide)
    if needs.weight:
        lying = (size, vocab) if is_turned(weight) else (vocab, size)
        layout["weight"] = (lying, wide if dtype.itemsize < wide.itemsize else needs.weight)
    if needs.bias:
        layout["bias"] = ((vocab,), wide)
    return layout | {"factor": ((), wide)}


def held_gradients(
    make_inputs: Callable[[Tensor | None], Inputs], arrays: Arrays, options: LossOptions, dtype: torch.dtype,
    plan: ChunkPlan, needs: Needs, tensors: list[Tensor], upstream: Tensor,
) -> Gradients:  # fmt: skip
    """What :meth:`Gradients.finish` gives, from ``Gradients.tensors``, none of which is written to."""
    del make_inputs, options, dtype, plan
    left, factor = iter(tensors), upstream * tensors[-1]

    def finished(wanted: torch.dtype | None) -> Tensor | None:
        return None if wanted is None else (next(left) * factor).to(wanted)

    hidden, weight, bias = finished(needs.hidden), finished(needs.weight), finished(needs.bias)
    return Gradients(hidden, weight.T if weight is not None and is_turned(arrays.weight) else weight, bias)


def _known_block(
    z: Tensor, known: KnownRows, rows: slice, k: Tensor | None, options: LossOptions, temperature: Tensor | None
) -> Tensor:
    """The matrix of :class:`KnownRows` in place of a block of logits, but for the target's element."""
    slope = chunk.slope(z, options, temperature) if options.softcap is not None else None
    z.sub_(known.anchor[rows].unsqueeze(1)).sub_(known.log_total[rows].unsqueeze(1))
    if known.gamma is not None or known.delta is not None:
        assert known.alpha is not None
        coefficient = known.alpha[rows].unsqueeze(1).repeat(1, z.shape[1])
        if known.gamma is not None:
            coefficient.addcmul_(z.clamp_(min=LOWEST_GAP), known.gamma[rows].unsqueeze(1))
        z.exp_()
        if known.delta is not None:
            coefficient.addcmul_(z, known.delta[rows].unsqueeze(1))
        z.mul_(coefficient)
    else:
        z.exp_()
        if known.alpha is not None:
            z.mul_(known.alpha[rows].unsqueeze(1))
    if known.sigma is not None:
        ones = torch.ones(z.shape[1], dtype=z.dtype, device=z.device)
        z.addr_(known.sigma[rows], ones if k is None else k, alpha=-1)
    return z if slope is None else z.mul_(slope)


def known_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Tensor, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, either order of the plan: one block [C, B] at a time.

    g [N]: upstream gradient times normalizer, token weight and logit_scale, 0 where ignored; only label smoothing's
    rank-one part reads it.
    """
    inputs = chunk.counted(inputs)
    if inputs.order is not None:
        known, g = known.at(inputs.order), g[inputs.order]
    dtype, device = inputs.accumulation_dtype, inputs.hidden.device
    block = torch.empty((plan.token_chunk, plan.vocab_chunk), dtype=dtype, device=device)
    smoothing = Smoothing.prepare(inputs, options, plan.vocab_chunk)
    known = known.of(XP, inputs.valid)
    gradients = _Accumulators(inputs, plan, needs, smoothing, g, functools.partial(known.unit, XP))
    for first, last in slices(inputs.tokens, plan.token_chunk):
        rows = slice(first, last)
        x = chunk.rows_of(inputs, rows)
        gradients.start_chunk(rows, x, known.factor[rows])
        for start, stop in plan.vocab_slices:
            z = chunk.logits_block(x, inputs, rows, start, stop, options, block[: last - first, : stop - start])
            k = None if inputs.class_weight is None else inputs.class_weight[start:stop]
            _known_block(z, known, rows, k, options, inputs.temperature_column(rows))
            chunk.set_target(z, inputs.target[rows], start, known.target[rows])
            gradients.add_block(z, start, stop)
        gradients.finish_chunk()
    return gradients.finish()
