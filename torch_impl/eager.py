"""The target-anchored chunk in plain PyTorch operations: CPU and any CUDA device. Mirror of jax_impl/xla.py.

Two verbs (docs/design.md): :func:`token_sums` reads the logits block by block and keeps sums per token only;
:func:`loss_gradients` and :func:`known_gradients` give dX, dW and db as well. All work on flat arrays ([N, D], [V, D])
in the accumulation dtype (float64 for float64 input, else float32), make no host synchronisation, and never write to
an input.

Rounding: logits, exponentials and sums are float32, and so are the operands of the products on a CPU. On a GPU a block
of the logits' gradient is rounded to the input dtype on its way into the products, which accumulate in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from logitless import numerics
from logitless.planning import ANCHOR_ROWS, ChunkPlan
from logitless.spec import LOWEST_ANCHOR, LOWEST_GAP, RESCUE_NATS, LossOptions
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
)
from logitless.torch_impl.distributed import parallel
from logitless.torch_impl.distributed.parallel import Shard

Result = TypeVar("Result")


# ---------------------------------------------------------------------------------------------------------------------
# One block of logits


def _product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """out = a b, or out += a b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=1 if add else 0, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _capped(z: Tensor, options: LossOptions) -> Tensor:
    """f(r) in place: logit_scale, then softcap."""
    if options.softcap is None:
        return z if options.logit_scale == 1.0 else z.mul_(options.logit_scale)
    return z.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap)


def _slope(z: Tensor, options: LossOptions) -> Tensor:
    """1 − (z / cap)²: the softcap's derivative, from the capped logits."""
    assert options.softcap is not None
    return (z / options.softcap).square_().neg_().add_(1.0)


def _logits_block(x: Tensor, inputs: Inputs, start: int, stop: int, options: LossOptions, out: Tensor) -> Tensor:
    """z[:, start:stop] of the rows x, written to ``out`` [C, stop − start] in the accumulation dtype."""
    weight = inputs.weight[start:stop].to(inputs.operand_dtype)
    _product(x, weight.t(), out, add=False)
    if inputs.bias is not None:
        out.add_(inputs.bias[start:stop].to(out.dtype))
    return _capped(out, options)


def _target_logits(x: Tensor, inputs: Inputs, rows: slice, options: LossOptions) -> Tensor:
    """The anchors a_i = z_{i, y_i}: one dot product per token; NaN for an id outside the vocabulary."""
    dtype = inputs.accumulation_dtype
    target = inputs.target[rows].clamp(min=0)
    parts = zip(x.split(ANCHOR_ROWS), target.split(ANCHOR_ROWS), strict=True)
    dots = torch.cat([inputs.weight[ids].to(dtype).mul_(part).sum(dim=1) for part, ids in parts])
    if inputs.bias is not None:
        dots = dots + inputs.bias[target].to(dtype)
    anchors = _capped(dots, options)
    if inputs.shard.split:
        anchors = inputs.shard.sum(anchors.masked_fill_(inputs.target[rows] < 0, 0.0))
    return anchors.masked_fill_(~inputs.inside[rows], torch.nan)


def _set_target(block: Tensor, target: Tensor, start: int, values: Tensor | float) -> None:
    """block[i, y_i − start] = values_i in place, for the rows whose target lies in the block."""
    local = target - start
    present = (local >= 0) & (local < block.shape[1])
    index = local.clamp(0, block.shape[1] - 1).unsqueeze(1)
    old = block.gather(1, index).squeeze(1)
    block.scatter_(1, index, torch.where(present, values, old).unsqueeze(1))


def _rows_of(inputs: Inputs, rows: slice) -> Tensor:
    """The chunk's hidden states, zero for an ignored token whatever it holds, in the products' dtype."""
    x = inputs.hidden[rows]
    return x.masked_fill(~inputs.valid[rows].unsqueeze(1), 0.0).to(inputs.operand_dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


class _RunningSums:
    """s_i = Σ_{j ≠ y_i} exp(z_ij − anchor_i) over the blocks seen so far, and what else was asked for."""

    def __init__(self, target_logit: Tensor, target: Tensor, statistics: bool) -> None:
        self.target_logit = target_logit
        self.target = target
        self.anchor = target_logit.clamp(min=LOWEST_ANCHOR)
        self.s = torch.zeros_like(target_logit)
        self.highest = torch.full_like(target_logit, -torch.inf)
        self.statistics = statistics
        if statistics:
            self.gap_sum = torch.zeros_like(target_logit)  # Σ exp(z − anchor) (z − anchor), without the target
            self.lowest = torch.full_like(target_logit, torch.inf)
            self.argmax = torch.zeros_like(target)

    def observe(self, z: Tensor, start: int) -> None:
        """Maximum (and minimum and first index of the maximum) of a block of logits."""
        block_highest = z.amax(dim=1)
        if self.statistics:
            self.argmax = torch.where(block_highest > self.highest, z.argmax(dim=1) + start, self.argmax)
            self.lowest = torch.minimum(self.lowest, z.amin(dim=1))
        self.highest = torch.maximum(self.highest, block_highest)

    def rescue(self, highest: Tensor) -> None:
        """Move the anchor of a row to its maximum where exponents would grow too large; rescale what was summed."""
        moved = torch.where(highest - self.anchor > RESCUE_NATS, highest, self.anchor)
        step = self.anchor - moved
        factor = torch.exp(step)
        if self.statistics:
            self.gap_sum = factor * (self.gap_sum + self.s * step)
        self.s = self.s * factor
        self.anchor = moved

    def exponentiate(self, z: Tensor, start: int) -> Tensor:
        """exp(z − anchor) in place of z, 0 at the target, added to the sums."""
        _set_target(z, self.target, start, -torch.inf)
        gaps = z.sub_(self.anchor.unsqueeze(1))
        if not self.statistics:
            e = gaps.exp_()
        else:
            gaps.clamp_(min=LOWEST_GAP)
            e = gaps.exp()
            self.gap_sum += gaps.mul_(e).sum(dim=1)
            e = gaps.copy_(e)
        self.s += e.sum(dim=1)
        return e

    def e_target(self) -> Tensor:
        """exp(a − anchor): 1 but for a rescued row."""
        return torch.exp(self.target_logit - self.anchor)

    def exchange(self, shard: Shard, logit_sum: Tensor | None) -> Tensor | None:
        """The sums of all ranks instead of this one's; returns Σ_j k_j z_ij, if it is among them."""
        if not shard.split:
            return logit_sum
        record = parallel.Record(self.anchor, self.s, logit_sum=logit_sum)
        if self.statistics:
            ids = self.argmax + shard.start
            record = dataclasses.replace(
                record, gap_sum=self.gap_sum, highest=self.highest, lowest=self.lowest, argmax=ids
            )
        lines = parallel.exchange(shard, record)
        self.anchor, self.s = lines.anchor, lines.s.sum(dim=0)
        if self.statistics:
            assert lines.gap_sum is not None
            assert lines.lowest is not None
            self.gap_sum, self.lowest = lines.gap_sum.sum(dim=0), lines.lowest.amin(dim=0)
            self.highest, self.argmax = lines.best()
        return None if lines.logit_sum is None else lines.logit_sum.sum(dim=0)

    def finish(self, weighted_logits: Tensor | None) -> TokenSums:
        gap_sum = self.gap_sum if self.statistics else None
        log_total, entropy = numerics.finish_sums(XP, self.target_logit, self.anchor, self.s, gap_sum)
        return TokenSums(
            target_logit=self.target_logit,
            anchor=self.anchor,
            log_total=log_total,
            weighted_logits=weighted_logits,
            entropy=entropy,
            argmax=self.argmax.to(torch.int32) if self.statistics else None,
            max_logit=self.highest if self.statistics else None,
            min_logit=self.lowest if self.statistics else None,
        )


def _concatenate(parts: list[TokenSums], empty: Tensor) -> TokenSums:
    if not parts:
        nothing = TokenSums(*(empty.clone() for _ in TokenSums._fields))
        return nothing._replace(argmax=empty.to(torch.int32))
    columns: Any = {name: [getattr(part, name) for part in parts] for name in TokenSums._fields}
    joined: Any = {name: None if column[0] is None else torch.cat(column) for name, column in columns.items()}
    return TokenSums(**joined)


def token_sums(inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: bool) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, one block [C, B] of logits at a time."""
    dtype, device = inputs.accumulation_dtype, inputs.hidden.device
    block = torch.empty((plan.token_chunk, plan.vocab_chunk), dtype=dtype, device=device)
    smoothing = Smoothing.prepare(inputs, options, plan.vocab_chunk)
    parts = []
    for first, last in plan.token_slices:
        rows = slice(first, last)
        x = _rows_of(inputs, rows)
        sums = _RunningSums(_target_logits(x, inputs, rows, options), inputs.target[rows], statistics)
        weighted = smoothing.weighted_logits(x, options) if smoothing else None
        for start, stop in plan.vocab_slices:
            z = _logits_block(x, inputs, start, stop, options, block[: last - first, : stop - start])
            if options.label_smoothing and not options.separable:
                k = None if inputs.class_weight is None else inputs.class_weight[start:stop]
                part = z.sum(dim=1) if k is None else z @ k
                weighted = part if weighted is None else weighted + part
            sums.observe(z, start)
            sums.rescue(sums.highest)
            sums.exponentiate(z, start)
        if smoothing is None:
            weighted = sums.exchange(inputs.shard, weighted)
        else:
            sums.exchange(inputs.shard, None)
        parts.append(sums.finish(weighted))
    return _concatenate(parts, torch.empty(0, dtype=dtype, device=device))


# ---------------------------------------------------------------------------------------------------------------------
# From sums to losses and row factors


def prepare(arrays: Arrays, options: LossOptions, dtype: torch.dtype, shard: Shard | None = None) -> Inputs:
    """Flatten, mark ignored and outside ids, and bring everything to the dtypes of the computation."""
    hidden, weight, bias, target, token_weight, class_weight = arrays
    accumulation = accumulation_dtype(dtype)
    flat = target.reshape(-1).long()
    valid = flat != options.ignore_index
    shard = shard or parallel.whole(weight.shape[0])
    inside = ~valid | ((flat >= 0) & (flat < shard.vocab))
    ids = flat.masked_fill(~(valid & inside), 0)
    target = shard.local_ids(ids, weight.shape[0]) if shard.split else ids
    ones = torch.ones(flat.shape, dtype=accumulation, device=flat.device)
    weights = ones if token_weight is None else token_weight.reshape(-1).to(accumulation)
    class_weight = None if class_weight is None else class_weight.to(accumulation)
    return Inputs(
        hidden=hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        ids=ids,
        target=target,
        valid=valid,
        inside=inside,
        token_weight=weights.masked_fill(~valid, 0.0),
        class_weight=class_weight,
        shard=shard,
        shared_classes=shared_classes(shard, class_weight, target),
    )


def shared_classes(shard: Shard, class_weight: Tensor | None, target: Tensor) -> Tensor | None:
    """Of a sharded call with class weights: k_y of every token, and Σ_j k_j at the end, [N + 1]."""
    if class_weight is None or not shard.split:
        return None
    own = class_weight[target.clamp(min=0)].masked_fill_(target < 0, 0.0)
    return shard.sum(torch.cat([own, class_weight.sum().reshape(1)]))


def normalizer(inputs: Inputs, options: LossOptions, given: Tensor | float | None) -> Tensor:
    """What the sum of the token losses is multiplied by: 1 / Σ t k_y for mean, 0 where no token counts."""
    one = torch.ones((), dtype=inputs.accumulation_dtype, device=inputs.hidden.device)
    if options.reduction != "mean":
        return one
    if given is not None:
        return one / given
    counts = numerics.counts(XP, inputs)
    return torch.where((counts != 0).any(), one / counts.sum(), 0.0)


def losses(inputs: Inputs, options: LossOptions, sums: TokenSums) -> Tensor:
    """ℓ_i of every token, [N]; exactly 0 where ignored."""
    return numerics.losses(XP, inputs, options, sums)


def total_loss(inputs: Inputs, options: LossOptions, sums: TokenSums, norm: Tensor) -> Tensor:
    """Σ ℓ_i times norm."""
    return losses(inputs, options, sums).sum() * norm


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """Label smoothing's rank-one part: every dz_ij has −(ε/V) t g k_j, so nothing of it needs the C × V matrix."""

    factor: float  # ε / V
    weighted_rows: Tensor  # Σ_j k_j w_j, [D], of all ranks
    weighted_bias: Tensor  # Σ_j k_j b_j

    @staticmethod
    def prepare(inputs: Inputs, options: LossOptions, block_size: int) -> Smoothing | None:
        """None where there is no smoothing, or where a softcap makes it part of the matrix."""
        if not options.label_smoothing or not options.separable:
            return None
        dtype = inputs.accumulation_dtype
        rows = torch.zeros(inputs.hidden.shape[1], dtype=dtype, device=inputs.hidden.device)
        for start in range(0, inputs.weight.shape[0], block_size):
            block = inputs.weight[start : start + block_size].to(dtype)
            k = inputs.class_weight
            rows += block.sum(dim=0) if k is None else k[start : start + block_size] @ block
        bias = torch.zeros((), dtype=dtype, device=inputs.hidden.device)
        if inputs.bias is not None:
            b = inputs.bias.to(dtype)
            bias = b.sum() if inputs.class_weight is None else b @ inputs.class_weight
        if inputs.shard.split:
            both = inputs.shard.sum(torch.cat([rows, bias.reshape(1)]))
            rows, bias = both[:-1], both[-1]
        return Smoothing(options.label_smoothing / inputs.vocab, rows, bias)

    def weighted_logits(self, x: Tensor, options: LossOptions) -> Tensor:
        """Σ_j k_j z_ij = scale · (x_i · Σ_j k_j w_j + Σ_j k_j b_j)."""
        return (x.to(self.weighted_rows.dtype) @ self.weighted_rows + self.weighted_bias) * options.logit_scale


class _Accumulators:
    """Where dX, dW and db are gathered, block by block; one object a call."""

    def __init__(
        self, inputs: Inputs, plan: ChunkPlan, needs: Needs, smoothing: Smoothing | None, g: Tensor, unit: Tensor
    ) -> None:
        """``unit``: as large as the matrix's elements get."""
        tokens, size = inputs.hidden.shape
        vocab, device, dtype = inputs.weight.shape[0], inputs.hidden.device, inputs.accumulation_dtype
        self.inputs, self.plan, self.needs, self.smoothing, self.g = inputs, plan, needs, smoothing, g
        weight_dtype = dtype if plan.weight_accumulator else needs.weight
        make = torch.empty if tokens else torch.zeros
        # The ranks' parts of dX are added before they are rounded.
        hidden_dtype = dtype if inputs.shard.split else needs.hidden
        self.hidden = torch.empty_like(inputs.hidden, dtype=hidden_dtype) if needs.hidden else None
        self.weight = needs.into
        if needs.weight and needs.into is None:
            self.weight = make((vocab, size), dtype=weight_dtype, device=device)
        self.works: list[Any] = []  # sums of dX over the ranks that are under way
        self.bias = torch.zeros(vocab, dtype=dtype, device=device) if needs.bias else None
        self.smooth_x = torch.zeros(size, dtype=dtype, device=device)  # Σ_i g_i x_i
        # Low-precision operands: the largest factor is taken out of the matrix and put back in float32. float16 could
        # not hold it (loss scaling, class weights), and 1/N would round all targets' elements to the same side.
        self.unit = unit if inputs.operand_dtype != dtype and tokens else None

    def start_chunk(self, rows: slice, x: Tensor, factor: Tensor) -> None:
        """Begin the tokens ``rows``; factor [C] is what their rows of the matrix still lack."""
        self.rows, self.factor = rows, factor
        # float32 operands: the factor goes to the rows of dX and of x, never to the matrix. Low-precision operands: the
        # matrix is rounded anyway, so it is rounded once, factor included, and x is read as it came.
        self.element_factor = None
        self.scaled_x = x
        if x.dtype != factor.dtype:
            assert self.unit is not None
            self.element_factor = (factor / self.unit).unsqueeze(1)
        elif self.needs.weight:
            self.scaled_x = x * factor.unsqueeze(1)
        self.hidden_part = None
        if self.hidden is not None:
            own = self.hidden[rows]
            accumulates = own.dtype == factor.dtype
            self.hidden_part = own if accumulates else torch.empty_like(own, dtype=factor.dtype)
        if self.smoothing is not None:
            self.smooth_x += self.g[rows] @ x.to(factor.dtype)

    def add_block(self, e: Tensor, start: int, stop: int) -> None:
        """The two products of a block of the matrix, and the bias's sums."""
        if self.bias is not None:
            self.bias[start:stop] += e.t() @ self.factor
        operand = e
        if self.element_factor is not None:
            operand = torch.empty_like(e, dtype=self.inputs.operand_dtype, memory_format=torch.contiguous_format)
            torch.mul(e, self.element_factor, out=operand)
        if self.hidden_part is not None:
            weight = self.inputs.weight[start:stop].to(operand.dtype)
            _product(operand, weight, self.hidden_part, add=start > 0)
        if self.weight is not None:
            self._add_weight(operand, start, stop)

    def _add_weight(self, operand: Tensor, start: int, stop: int) -> None:
        assert self.weight is not None
        own, adds = self.weight[start:stop], self.needs.into is not None
        direct = own.dtype == self.factor.dtype and not (adds and self.unit is not None)
        part = own if direct else torch.empty_like(own, dtype=self.factor.dtype)
        _product(operand.t(), self.scaled_x, part, add=direct and (adds or self.rows.start > 0))
        last = self.rows.stop == self.inputs.hidden.shape[0]
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
        if self.inputs.shard.split and self.hidden is not None:
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


def run_step(name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result]) -> Result:
    """``step(call)``: plain operations need nothing before it."""
    del name, arrays, needs
    return step(call)


def one_pass(dtype: torch.dtype, options: LossOptions) -> bool:
    """Whether a chunk's matrix can be scaled into ``dtype``'s range before lse is known: float16's is too small for
    what a z-loss, 2 λ lse, may make of it."""
    return dtype != torch.float16 or not options.z_loss


def holds(dtype: torch.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token: here gradients are made at once, or anew."""
    del dtype
    return False


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why plain operations cannot run there: they can anywhere."""
    del device, dtype
    return None


def loss_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, norm: Tensor, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Sums and gradients in one pass, 6·N·D·V flops: the exponentials of a chunk are held, anchored at the target.

    norm: what the sum of the token losses is multiplied by. For a plan in one pass and separable options.
    """
    dtype, device = inputs.accumulation_dtype, inputs.hidden.device
    g = numerics.row_upstream(XP, inputs, options, inputs.wide(norm))
    vocab = inputs.weight.shape[0]
    held = torch.empty((plan.token_chunk, plan.row_stride), dtype=dtype, device=device)
    smoothing = Smoothing.prepare(inputs, options, plan.vocab_chunk)
    # dX waits for the upstream scalar in the accumulation dtype, as dW does (weight_accumulator).
    needs = dataclasses.replace(needs, hidden=dtype if needs.hidden else None)
    unit = numerics.loss_unit(XP, inputs, options, g)
    gradients = _Accumulators(inputs, plan, needs, smoothing, g, unit)
    parts = []
    for first, last in plan.token_slices:
        rows = slice(first, last)
        x = _rows_of(inputs, rows)
        e = held[: last - first, :vocab]
        sums = _RunningSums(_target_logits(x, inputs, rows, options), inputs.target[rows], statistics)
        for start, stop in plan.vocab_slices:
            sums.observe(_logits_block(x, inputs, start, stop, options, e[:, start:stop]), start)
        sums.rescue(inputs.shard.max(sums.highest))
        for start, stop in plan.vocab_slices:
            z = e[:, start:stop]
            slope = _slope(z, options) if options.softcap is not None else None
            sums.exponentiate(z, start)
            if slope is not None:
                z.mul_(slope)
            del slope  # a block that must not live through the products
        sums.exchange(inputs.shard, None)
        part = sums.finish(smoothing.weighted_logits(x, options) if smoothing else None)
        parts.append(part)

        k = inputs.token_class_weight(rows)
        alpha, beta = numerics.alpha_beta(XP, inputs, options, part.lse, 1.0 if k is None else k)
        total, ignored = sums.s + sums.e_target(), ~inputs.valid[rows]
        target = numerics.target_over_alpha(XP, alpha, beta, sums.e_target(), sums.s)
        target = numerics.sloped(XP, target, part.target_logit, options)
        _set_target(e, inputs.target[rows], 0, target.masked_fill(ignored, 0.0))
        gradients.start_chunk(rows, x, (g[rows] * alpha / total).masked_fill(ignored, 0.0))
        for start, stop in plan.vocab_slices:
            gradients.add_block(e[:, start:stop], start, stop)
        gradients.finish_chunk()
    return _concatenate(parts, torch.empty(0, dtype=dtype, device=device)), gradients.finish()


def token_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Exponentials that wait for upstream gradients per token: not here, see :func:`holds`."""
    raise NotImplementedError


# Whole gradients wait for the upstream scalar. A compiler may fuse what is left with other elementwise operations.
PRODUCTS_WAIT = False
BUFFER_ALIGNMENT = 1


def held_layout(
    tokens: int, arrays: Arrays, options: LossOptions, dtype: torch.dtype, token_chunk: int, needs: Needs
) -> Layout:
    """Shape and dtype of the gradients that wait for the upstream scalar, by name; ``tokens`` may be a symbol."""
    del options, token_chunk
    made = accumulation_dtype(dtype)
    vocab, size = arrays.weight.shape
    layout: Layout = {}
    if needs.hidden:
        layout["hidden"] = ((tokens, size), made)
    if needs.weight:
        layout["weight"] = ((vocab, size), made if dtype.itemsize < made.itemsize else needs.weight)
    if needs.bias:
        layout["bias"] = ((vocab,), made)
    return layout


def held_gradients(
    make_inputs: Callable[[Tensor | None], Inputs], arrays: Arrays, options: LossOptions, dtype: torch.dtype,
    plan: ChunkPlan, needs: Needs, tensors: list[Tensor], upstream: Tensor,
) -> Gradients:  # fmt: skip
    """What :meth:`Gradients.finish` gives, from ``Gradients.tensors``, none of which is written to."""
    del make_inputs, arrays, options, dtype, plan
    left = iter(tensors)

    def finished(wanted: torch.dtype | None) -> Tensor | None:
        return None if wanted is None else (next(left) * upstream).to(wanted)

    return Gradients(finished(needs.hidden), finished(needs.weight), finished(needs.bias))


def _known_block(z: Tensor, known: KnownRows, rows: slice, k: Tensor | None, options: LossOptions) -> Tensor:
    """The matrix of :class:`KnownRows` in place of a block of logits, but for the target's element."""
    slope = _slope(z, options) if options.softcap is not None else None
    z.sub_(known.anchor[rows].unsqueeze(1)).sub_(known.log_total[rows].unsqueeze(1))
    if known.gamma is not None:
        assert known.alpha is not None
        z.clamp_(min=LOWEST_GAP)
        coefficient = (z * known.gamma[rows].unsqueeze(1)).add_(known.alpha[rows].unsqueeze(1))
        z.exp_().mul_(coefficient)
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
    dtype, device = inputs.accumulation_dtype, inputs.hidden.device
    block = torch.empty((plan.token_chunk, plan.vocab_chunk), dtype=dtype, device=device)
    smoothing = Smoothing.prepare(inputs, options, plan.vocab_chunk)
    known = known.of(XP, inputs.valid)
    gradients = _Accumulators(inputs, plan, needs, smoothing, g, known.unit(XP))
    for first, last in plan.token_slices:
        rows = slice(first, last)
        x = _rows_of(inputs, rows)
        gradients.start_chunk(rows, x, known.factor[rows])
        for start, stop in plan.vocab_slices:
            z = _logits_block(x, inputs, start, stop, options, block[: last - first, : stop - start])
            k = None if inputs.class_weight is None else inputs.class_weight[start:stop]
            _known_block(z, known, rows, k, options)
            _set_target(z, inputs.target[rows], start, known.target[rows])
            gradients.add_block(z, start, stop)
        gradients.finish_chunk()
    return gradients.finish()
