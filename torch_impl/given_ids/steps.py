"""What :mod:`logitless.torch_impl.given_ids.api` computes, as one differentiable function. Mirror of
jax_impl/given_ids/steps.py.

    log p_k = (z_k − z_best) + log p_best          best: the given id with the largest logit
    dz_j    = Σ_{k: id_k = j} g_k − G p_j          G = Σ_k g_k

The logits of the given ids are dot products with gathered rows of the weight. log p_best comes from the backend's pass
for the logsumexps, anchored at best's logit, so a confident token has all its digits. The backward makes a tile [C, B]
of the logits' gradient at a time, in plain operations. At best it is G (1 − p_best) − Σ_{k: id_k ≠ best} g_k, which
does not cancel as p_best → 1.

Rounding: as in eager.py.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from logitless import numerics
from logitless.given_ids import IdsCut
from logitless.scratch import slices
from logitless.spec import LossOptions
from logitless.torch_impl import chunk, steps
from logitless.torch_impl.autograd import Derivatives, SavedContext, differentiable_once, reverse_only
from logitless.torch_impl.call import XP, Arrays, Call, Gradients, Inputs, Needs, TokenSums

# Ids are below it.
LAST_ID = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class IdsCall:
    """Everything about a call that is not an array."""

    call: Call
    cut: IdsCut

    @property
    def options(self) -> LossOptions:
        return self.call.options


class Pairs(NamedTuple):
    """A token and an id each, [N, K]."""

    ids: Tensor  # [N, K] int64, a view of [K] where they are the same for all tokens
    ignored: Tensor  # [N, K] bool
    known: Tensor  # [N, K] bool: neither ignored nor outside the vocabulary
    shared: bool
    """Whether every token has the same ids."""

    @staticmethod
    def of(ids: Tensor, tokens: int, vocab: int, ignore_index: int) -> Pairs:
        """From ids [N, K] or [K]."""
        shared = ids.dim() == 1
        ids = ids.long().expand(tokens, -1) if shared else ids.long()
        ignored = ids == ignore_index
        return Pairs(ids, ignored, ~ignored & (ids >= 0) & (ids < vocab), shared)

    def best(self, z: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Of every token the place of the known id with the largest logit, and that id; ignore_index if there is none.

        Banned ids have a logit of −inf, which is above that of an id that is not known.
        """
        lowest = torch.finfo(z.dtype).min
        place = z.clamp(min=lowest).masked_fill_(~self.known, -torch.inf).argmax(dim=1, keepdim=True)
        best = self.ids.gather(1, place).squeeze(1)
        return place, best.masked_fill(~self.known.any(dim=1), ignore_index)


def whole_hidden(arrays: Arrays, call: Call) -> tuple[Arrays, Call]:
    """The arrays with the hidden states of all tokens in rows [N, D], and a call on them."""
    hidden = arrays.hidden.detach()
    shard = call.shard
    if shard is not None and shard.sequence_parallel:
        hidden = shard.gather(hidden.to(call.compute_dtype))
        call = dataclasses.replace(call, shard=dataclasses.replace(shard, sequence_parallel=False))
    return arrays._replace(hidden=hidden.reshape(-1, hidden.shape[-1]), target=arrays.target.reshape(-1)), call


def _inputs(arrays: Arrays, call: Call) -> Inputs:
    return chunk.prepare(arrays, call.options, call.compute_dtype, call.shard)


def _any_id(pairs: Pairs, ignore_index: int) -> Tensor:
    """Some known id of every token, ignore_index if there is none: it says which tokens count."""
    place = pairs.known.to(torch.uint8).argmax(dim=1, keepdim=True)
    return pairs.ids.gather(1, place).squeeze(1).masked_fill(~pairs.known.any(dim=1), ignore_index)


def _local(inputs: Inputs, pairs: Pairs) -> Tensor:
    """The ids as places in this rank's rows of the weight, −1 where they are not there; [N, K] or, if shared, [K]."""
    ids = pairs.ids[0] if pairs.shared and inputs.tokens else pairs.ids
    known = (ids >= 0) & (ids < inputs.vocab)
    if inputs.shard.split:
        return inputs.shard.local_ids(ids, inputs.weight.shape[0]).masked_fill_(~known, -1)
    return ids.masked_fill(~known, -1)


def _given_logits(inputs: Inputs, pairs: Pairs, options: LossOptions, cut: IdsCut) -> Tensor:
    """z of the given ids, [N, K]; of an id that is not known, of some other one."""
    local = _local(inputs, pairs)
    z = inputs.hidden.new_empty(pairs.ids.shape, dtype=inputs.accumulation_dtype)
    if not inputs.tokens:
        return z
    rows_and_logits = _shared_logits if pairs.shared else _gathered_logits
    rows_and_logits(z, inputs, local.clamp(min=0), options, cut)
    return inputs.shard.sum(z.masked_fill_(local < 0, 0.0)) if inputs.shard.split else z


def _shared_logits(z: Tensor, inputs: Inputs, ids: Tensor, options: LossOptions, cut: IdsCut) -> None:
    """Into z [N, K], for ids [K]: a product with their rows of the weight."""
    for start, stop in slices(cut.ids, cut.id_chunk):
        own = ids[start:stop]
        head = dataclasses.replace(
            inputs, weight=inputs.weight[own], bias=None if inputs.bias is None else inputs.bias[own]
        )
        for first, last in cut.tile.token_slices:
            rows = slice(first, last)
            chunk.logits_block(chunk.rows_of(inputs, rows), head, rows, 0, stop - start, options, z[rows, start:stop])


def _gathered_logits(z: Tensor, inputs: Inputs, ids: Tensor, options: LossOptions, cut: IdsCut) -> None:
    """Into z [N, K], for ids [N, K]: dot products with gathered rows of the weight."""
    dtype = z.dtype
    for first, last in slices(inputs.tokens, cut.token_chunk):
        rows = slice(first, last)
        x = chunk.rows_of(inputs, rows).to(dtype).unsqueeze(1)
        for start, stop in slices(cut.ids, cut.id_chunk):
            own = ids[rows, start:stop]
            dots = inputs.weight[own].to(dtype).mul_(x).sum(dim=2)
            if inputs.bias is not None:
                dots += inputs.bias[own].to(dtype)
            z[rows, start:stop] = chunk.capped(dots, options, inputs.temperature_column(rows))


# ---------------------------------------------------------------------------------------------------------------------
# The differentiable function


class IdsContext(SavedContext):
    """What the backward finds of its forward."""

    call: IdsCall


class TokenLogProbsFunction(torch.autograd.Function):
    """log p of the given ids, [N, K], 0 where ignored; differentiable in hidden, weight and bias.

    ids [N, K] or [K]; logits [N, K] of the ids where they are known already, or None.
    """

    @staticmethod
    def forward(ctx: IdsContext, call: IdsCall, ids: Tensor, logits: Tensor | None, *tensors: Tensor | None) -> Tensor:
        given = Arrays.of_head(*tensors)  # type: ignore[arg-type]
        ignore_index = call.options.ignore_index
        with torch.autocast(given.hidden.device.type, enabled=False):
            arrays, own = whole_hidden(given, call.call)
            vocab = arrays.weight.shape[0] if own.shard is None else own.shard.vocab
            pairs = Pairs.of(ids, arrays.hidden.shape[0], vocab, ignore_index)
            if logits is None:
                inputs = _inputs(arrays._replace(target=_any_id(pairs, ignore_index)), own)
                logits = _given_logits(inputs, pairs, call.options, call.cut)
            place, best = pairs.best(logits, ignore_index)
            step = steps.log_probs(arrays._replace(target=best), own, Needs(arrays.hidden.dtype, None, None))
            highest = logits.gather(1, place)
            below = torch.where(logits == highest, 0.0, logits - highest)  # both may be −inf
            log_prob = below.add_(step.log_prob.unsqueeze(1))
            log_prob.masked_fill_(~pairs.known, torch.nan).masked_fill_(pairs.ignored, 0.0)
        ctx.call = call
        ctx.save_for_backward(*tensors, ids, best, *step.saved)
        return log_prob

    jvp = reverse_only("linear_token_log_probs")

    @staticmethod
    @differentiable_once("linear_token_log_probs")
    def backward(ctx: IdsContext, kept: tuple[Tensor, ...], upstream: Tensor) -> Derivatives:
        given = Arrays.of_head(*kept[:5])
        needs = Needs.of(given, ctx.needs_input_grad[3:6])
        with torch.autocast(upstream.device.type, enabled=False):
            made = _gradients(ctx.call, given, needs, kept[5:], upstream)
        return (None, None, None, *made.like(given), None, None)


def _gradients(call: IdsCall, given: Arrays, needs: Needs, known: tuple[Tensor, ...], upstream: Tensor) -> Gradients:
    """dX, dW and db: 6·N·D·V flops. ``known``: ids, best, and the sums of the forward."""
    ids, best, *parts = known
    arrays, own = whole_hidden(given, call.call)
    inputs, options, sums = _inputs(arrays._replace(target=best), own), call.options, TokenSums(*parts)
    pairs = Pairs.of(ids, inputs.tokens, inputs.vocab, options.ignore_index)
    g = torch.where(pairs.known, inputs.wide(upstream), 0.0) * options.logit_scale
    if inputs.temperature is not None:
        g /= inputs.temperature.unsqueeze(1)
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, g.abs().sum(dim=1))
    g /= unit
    total, rest = g.sum(dim=1), g.masked_fill(pairs.ids == best.unsqueeze(1), 0.0).sum(dim=1)
    at_best = total * -torch.expm1(-sums.nll) - rest
    at_best = numerics.sloped(XP, at_best, sums.target_logit, options, inputs.temperature)
    local = _local(inputs, pairs)

    def logit_gradient(rows: slice, x: Tensor, start: int, stop: int) -> Tensor:
        z = x.new_empty((x.shape[0], stop - start), dtype=inputs.accumulation_dtype)
        chunk.logits_block(x, inputs, rows, start, stop, options, z)
        slope = None if options.softcap is None else chunk.slope(z, options, inputs.temperature_column(rows))
        p = z.sub_(sums.anchor[rows].unsqueeze(1)).sub_(sums.log_total[rows].unsqueeze(1)).exp_()
        column = (local if pairs.shared else local[rows]) - start
        here = (column >= 0) & (column < stop - start)
        index = column.masked_fill(~here, 0).expand(g[rows].shape)
        dz = p.mul_(-total[rows].unsqueeze(1)).scatter_add_(1, index, g[rows].masked_fill(~here, 0.0))
        if slope is not None:
            dz.mul_(slope)
        chunk.set_target(dz, inputs.target[rows], start, at_best[rows])
        return dz.masked_fill_(~inputs.valid[rows].unsqueeze(1), 0.0)

    made = chunk.tile_gradients(inputs, call.cut.tile, needs, unit, logit_gradient)
    return dataclasses.replace(made, hidden=_own_tokens(made.hidden, call.call))


def _own_tokens(hidden: Tensor | None, call: Call) -> Tensor | None:
    """dX summed over the ranks; under sequence parallelism this rank's tokens."""
    shard = call.shard
    if hidden is None or shard is None:
        return hidden
    if not shard.sequence_parallel:
        return shard.sum(hidden)
    own, work = shard.start_scatter(hidden)
    if work is not None:
        work.wait()
    return own


# ---------------------------------------------------------------------------------------------------------------------
# The largest logits


def largest_logits(arrays: Arrays, call: IdsCall) -> tuple[Tensor, Tensor]:
    """The K largest logits of every token and their ids, [N, K] each, largest first; of equal ones the first id."""
    arrays, own = whole_hidden(arrays, call.call)
    inputs, cut, options = _inputs(arrays, own), call.cut, call.options
    z = inputs.hidden.new_empty((inputs.tokens, cut.ids), dtype=inputs.accumulation_dtype)
    ids = torch.empty(z.shape, dtype=torch.long, device=z.device)
    for first, last in cut.tile.token_slices:
        rows = slice(first, last)
        x = chunk.rows_of(inputs, rows)
        best, best_ids = z.new_empty((last - first, 0)), ids.new_empty((last - first, 0))
        for start, stop in cut.tile.vocab_slices:
            block = x.new_empty((last - first, stop - start), dtype=z.dtype)
            chunk.logits_block(x, inputs, rows, start, stop, options, block)
            numbers = torch.arange(start, stop, device=z.device).expand(block.shape)
            block, block_ids = _largest(block, numbers, cut.ids)
            best, best_ids = _largest(torch.cat([best, block], dim=1), torch.cat([best_ids, block_ids], dim=1), cut.ids)
        z[rows], ids[rows] = _of_all_ranks(best, best_ids + inputs.shard.start, inputs, cut.ids)
    return z, ids


def _largest(z: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits and their ids, largest first, of equal ones the first id. May write to z, [C, B].

    topk leaves open which of equal elements it takes. So it gets numbers that differ: a logit's bits, which grow as the
    logit does once those of negative ones are turned, and behind them the id from its end.
    """
    z.add_(0.0)  # −0 is not below 0
    if z.dtype != torch.float32:  # ids of equal logits grow from left to right, and a stable sort keeps their order
        z, order = z.sort(dim=1, descending=True, stable=True)
        return z[:, :count], ids.gather(1, order)[:, :count]
    keys = _turned(z.view(torch.int32)).long().bitwise_left_shift_(32).add_(LAST_ID).sub_(ids)
    keys = keys.topk(min(count, z.shape[1]), dim=1).values
    return _turned((keys >> 32).int()).view(torch.float32), LAST_ID - (keys & LAST_ID)


def _turned(bits: Tensor) -> Tensor:
    """A float's bits as an integer that grows as the float does, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _of_all_ranks(z: Tensor, ids: Tensor, inputs: Inputs, count: int) -> tuple[Tensor, Tensor]:
    """The largest of all ranks' largest logits, and their ids."""
    shard = inputs.shard
    if not shard.split:
        return z, ids
    missing = (0, count - z.shape[1])  # a slice may have fewer entries
    z = torch.nn.functional.pad(z, missing, value=-torch.inf)
    ids = torch.nn.functional.pad(ids, missing, value=inputs.vocab)
    z, ids = (shard.gather(part).view(shard.ranks, *part.shape).movedim(0, 1).flatten(1) for part in (z, ids))
    ids, order = ids.sort(dim=1)
    z, by_size = z.gather(1, order).sort(dim=1, descending=True, stable=True)
    return z[:, :count], ids.gather(1, by_size)[:, :count]
