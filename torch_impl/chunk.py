"""Rows of a chunk in plain PyTorch operations: what the backends and the losses on other heads share.

Mirror of jax_impl/chunk.py. A call's arrays become :class:`Inputs`, a block of logits is made and summed, and sums
become losses. All functions work on flat arrays ([N, D], [V, D]) in the accumulation dtype (float64 for float64 input,
else float32). They never wait for the device, and never write to an input.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from logitless import numerics
from logitless.objectives import Tile
from logitless.scratch import ANCHOR_ROWS
from logitless.spec import LOWEST_ANCHOR, LOWEST_GAP, RESCUE_NATS, SQUARED_SCALE, LossOptions, Statistics, class_sums
from logitless.torch_impl.call import (
    XP,
    Arrays,
    Gradients,
    Inputs,
    KnownRows,
    Needs,
    TokenSums,
    accumulation_dtype,
    empty_like_weight,
    rounds_products,
)
from logitless.torch_impl.distributed import parallel
from logitless.torch_impl.distributed.parallel import Shard

# ---------------------------------------------------------------------------------------------------------------------
# A call's arrays


def prepare(arrays: Arrays, options: LossOptions, dtype: torch.dtype, shard: Shard | None = None) -> Inputs:
    """Flatten, mark ignored and outside ids, and bring everything to the dtypes of the computation."""
    hidden, weight, bias, target, token_weight, class_weight, temperature = arrays
    accumulation = accumulation_dtype(dtype)
    if dtype == torch.float16 and rounds_products(hidden.new_empty(0, dtype=accumulation)):
        warnings.warn(
            "logitless: products round float16 to bfloat16 on this CPU, which loses digits, after torch."
            'set_float32_matmul_precision("medium"); bfloat16 keeps its own, and "highest" rounds nothing',
            stacklevel=2,
        )
    flat = target.reshape(-1).long()
    valid = flat != options.ignore_index
    shard = shard or parallel.whole(weight.shape[0])
    in_vocab = (flat >= 0) & (flat < shard.vocab)
    ids = flat * (valid & in_vocab)
    target = shard.local_ids(ids, weight.shape[0]) if shard.split else ids
    weights = valid.to(accumulation)
    if token_weight is not None:
        weights = token_weight.reshape(-1).to(accumulation).masked_fill(~valid, 0.0)
    class_weight = None if class_weight is None else class_weight.to(accumulation)
    return Inputs(
        hidden=hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        ids=ids,
        target=target,
        valid=valid,
        inside=~valid | in_vocab,
        token_weight=weights,
        class_weight=class_weight,
        shard=shard,
        shared_classes=shared_classes(shard, class_weight, target),
        order=None,
        temperature=None if temperature is None else temperature.reshape(-1).to(accumulation).masked_fill(~valid, 1.0),
    )


def all_inside(target: Tensor, vocab: int) -> bool:
    """Whether all ids are of the vocabulary: the quickest question. Only where it costs no synchronisation."""
    if target.numel() == 0:
        return True
    lowest, highest = torch.aminmax(target)
    return int(lowest) >= 0 and int(highest) < vocab


def counted(inputs: Inputs) -> Inputs:
    """The inputs without the ignored tokens, on which no work is done then. On a CPU alone, where it costs nothing to
    ask how many there are; a sharded call has them on every rank."""
    valid = inputs.valid
    if valid.device.type != "cpu" or inputs.shard.split or bool(valid.all()):
        return inputs
    return taken(inputs, valid.nonzero().squeeze(1))


def taken(inputs: Inputs, order: Tensor) -> Inputs:
    """The inputs of these tokens alone, in this order."""
    names = "ids", "target", "valid", "inside", "token_weight", "temperature"
    present = {name: value for name in names if (value := getattr(inputs, name)) is not None}
    return dataclasses.replace(inputs, order=order, **{name: value[order] for name, value in present.items()})


def of_all(sums: TokenSums, inputs: Inputs) -> TokenSums:
    """The sums of :func:`counted` inputs as those of all tokens, 0 where ignored."""
    if inputs.order is None:
        return sums
    order, tokens = inputs.order, inputs.hidden.shape[0]
    present = {name: values for name, values in sums._asdict().items() if values is not None}
    return TokenSums(**{name: v.new_zeros(tokens).index_copy_(0, order, v) for name, v in present.items()})


def place_rows(hidden: Tensor, inputs: Inputs) -> None:
    """In place: the first rows, those of :func:`counted` inputs, to where their tokens are, and 0 to the others."""
    if inputs.order is None:
        return
    # No token comes before its row. So from the end on, a block of rows overwrites none that is still to be moved.
    for start in reversed(range(0, inputs.tokens, ANCHOR_ROWS)):
        order = inputs.order[start : start + ANCHOR_ROWS]
        hidden[order] = hidden[start : start + len(order)].clone()
    ignored = torch.ones(hidden.shape[0], dtype=torch.bool, device=hidden.device).index_fill_(0, inputs.order, False)
    hidden.masked_fill_(ignored.unsqueeze(1), 0.0)


def shared_classes(shard: Shard, class_weight: Tensor | None, target: Tensor) -> Tensor | None:
    """Of a sharded call with class weights: k_y of every token, and Σ_j k_j at the end, [N + 1]."""
    if class_weight is None or not shard.split:
        return None
    own = class_weight[target.clamp(min=0)].masked_fill_(target < 0, 0.0)
    return shard.sum(torch.cat([own, class_weight.sum().reshape(1)]))


# ---------------------------------------------------------------------------------------------------------------------
# One block of logits


def product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """out = a b, or out += a b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        _ = torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def vector_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix @ vector, neither of them rounded."""
    return (matrix * vector).sum(dim=1) if rounds_products(matrix) else matrix @ vector


def capped(z: Tensor, options: LossOptions, temperature: Tensor | None = None) -> Tensor:
    """f(r) in place: logit_scale, then softcap, then the tokens' own temperatures."""
    if options.softcap is not None:
        z.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap)
    elif options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    return z if temperature is None else z.div_(temperature)


def slope(z: Tensor, options: LossOptions, temperature: Tensor | None = None) -> Tensor:
    """1 − (z / cap)²: the softcap's derivative, from the capped logits and the tokens' own temperatures."""
    assert options.softcap is not None
    ratio = z / options.softcap
    return (ratio if temperature is None else ratio.mul_(temperature)).square_().neg_().add_(1.0)


def logits_block(
    x: Tensor, inputs: Inputs, rows: slice, start: int, stop: int, options: LossOptions, out: Tensor
) -> Tensor:
    """z[rows, start:stop], written to ``out`` [C, stop − start] in the accumulation dtype. x: of these rows."""
    weight = inputs.weight[start:stop].to(inputs.operand_dtype)
    product(x, weight.t(), out, add=False)
    if inputs.bias is not None:
        out.add_(inputs.bias[start:stop].to(out.dtype))
    return capped(out, options, inputs.temperature_column(rows))


def target_logits(x: Tensor, inputs: Inputs, rows: slice, options: LossOptions) -> Tensor:
    """The anchors a_i = z_{i, y_i}: one dot product per token; NaN for an id outside the vocabulary."""
    dtype = inputs.accumulation_dtype
    target = inputs.target[rows].clamp(min=0)
    parts = zip(x.split(ANCHOR_ROWS), target.split(ANCHOR_ROWS), strict=True)
    dots = torch.cat([inputs.weight[ids].to(dtype).mul_(part).sum(dim=1) for part, ids in parts])
    if inputs.bias is not None:
        dots = dots + inputs.bias[target].to(dtype)
    anchors = capped(dots, options, None if inputs.temperature is None else inputs.temperature[rows])
    if inputs.shard.split:
        anchors = inputs.shard.sum(anchors.masked_fill_(inputs.target[rows] < 0, 0.0))
    return anchors.masked_fill_(~inputs.inside[rows], torch.nan)


def set_target(block: Tensor, target: Tensor, start: int, values: Tensor | float) -> None:
    """block[i, y_i − start] = values_i in place, for the rows whose target lies in the block."""
    local = target - start
    present = (local >= 0) & (local < block.shape[1])
    index = local.clamp(0, block.shape[1] - 1).unsqueeze(1)
    old = block.gather(1, index).squeeze(1)
    block.scatter_(1, index, torch.where(present, values, old).unsqueeze(1))


def rows_of(inputs: Inputs, rows: slice) -> Tensor:
    """The chunk's hidden states, zero for an ignored token whatever it holds, in the products' dtype."""
    x = inputs.hidden[rows if inputs.order is None else inputs.order[rows]]
    return x.masked_fill(~inputs.valid[rows].unsqueeze(1), 0.0).to(inputs.operand_dtype)


def tile_gradients(
    inputs: Inputs,
    tile: Tile,
    needs: Needs,
    unit: Tensor,
    logit_gradient: Callable[[slice, Tensor, int, int], Tensor],
) -> Gradients:
    """dX, dW and db from the gradient of the raw logits, a tile at a time: 4·N·D·V flops beside its own.

    ``logit_gradient(rows, x, start, stop)`` is a tile of it divided by ``unit``, [C, B]; x [C, D] are the tokens'
    hidden states. dX and db come in the accumulation dtype. A block of the vocabulary is done with all its tokens
    before the next begins, so that its rows of dW are rounded once and no accumulator of dW's size exists.
    """
    (vocab, size), dtype = inputs.weight.shape, inputs.accumulation_dtype
    dx = inputs.hidden.new_zeros(inputs.hidden.shape, dtype=dtype) if needs.hidden else None
    dw = empty_like_weight(inputs.weight, needs.weight) if needs.weight else None
    db = inputs.weight.new_zeros(vocab, dtype=dtype) if needs.bias else None
    whole = rows_of(inputs, slice(0, tile.tokens)) if len(tile.token_slices) == 1 else None
    for start, stop in tile.vocab_slices:
        part = inputs.weight.new_zeros((stop - start, size), dtype=dtype)
        for first, last in tile.token_slices:
            rows = slice(first, last)
            x = rows_of(inputs, rows) if whole is None else whole
            dz = logit_gradient(rows, x, start, stop)
            if db is not None:
                db[start:stop] += dz.sum(dim=0, dtype=dtype)
            dz = dz.to(inputs.operand_dtype)
            if dx is not None:
                product(dz, inputs.weight[start:stop].to(dz.dtype), dx[rows], add=True)
            if dw is not None:
                product(dz.t(), x, part, add=True)
            del dz  # which makes room
        if dw is not None:
            dw[start:stop] = part.mul_(unit)
        del part
    return Gradients(None if dx is None else dx.mul_(unit), dw, None if db is None else db.mul_(unit))


# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


class RunningSums:
    """s_i = Σ_{j ≠ y_i} exp(z_ij − anchor_i) over the blocks seen so far, and what else of CLASS_SUMS was asked for."""

    def __init__(self, target_logit: Tensor, target: Tensor, statistics: Statistics) -> None:
        self.target_logit = target_logit
        self.target = target
        self.anchor = target_logit.clamp(min=LOWEST_ANCHOR)
        self.sums = {name: torch.zeros_like(target_logit) for name in class_sums(statistics)}
        self.sums["highest"] = torch.full_like(target_logit, -torch.inf)
        self.extremes = statistics is True
        if self.extremes:
            self.sums |= {"lowest": torch.full_like(target_logit, torch.inf), "argmax": torch.zeros_like(target)}

    @property
    def s(self) -> Tensor:
        return self.sums["s"]

    @property
    def highest(self) -> Tensor:
        return self.sums["highest"]

    def observe(self, z: Tensor, start: int) -> None:
        """Maximum (and minimum and first index of the maximum) of a block of logits."""
        sums, block_highest = self.sums, z.amax(dim=1)
        if self.extremes:
            best = z.argmax(dim=1) + start
            sums["argmax"] = torch.where(block_highest > sums["highest"], best, sums["argmax"])
            sums["lowest"] = torch.minimum(sums["lowest"], z.amin(dim=1))
        sums["highest"] = torch.maximum(sums["highest"], block_highest)

    def rescue(self, highest: Tensor) -> None:
        """Move the anchor of a row to its maximum where exponents would grow too large; rescale what was summed."""
        moved = torch.where(highest - self.anchor > RESCUE_NATS, highest, self.anchor)
        self.sums |= numerics.moved_sums(XP, self.sums, self.anchor - moved)
        self.anchor = moved

    def exponentiate(self, z: Tensor, start: int) -> Tensor:
        """exp(z − anchor) in place of z, 0 at the target, added to the sums."""
        set_target(z, self.target, start, -torch.inf)
        return self.exponentiate_others(z)

    def exponentiate_others(self, z: Tensor) -> Tensor:
        """As :meth:`exponentiate`, of a z that is −inf at the target."""
        gaps, sums = z.sub_(self.anchor.unsqueeze(1)), self.sums
        if "gap_sum" not in sums:
            e = gaps.exp_()
        else:
            gaps.clamp_(min=LOWEST_GAP)
            e = gaps.exp()
            sums["gap_sum"] += gaps.mul_(e).sum(dim=1)
            if "squares" in sums:
                sums["squares"] += torch.mul(e, SQUARED_SCALE, out=gaps).square_().sum(dim=1)
            e = gaps.copy_(e)
        sums["s"] += e.sum(dim=1)
        return e

    def e_target(self) -> Tensor:
        """exp(a − anchor): 1 but for a rescued row."""
        return torch.exp(self.target_logit - self.anchor)

    def exchange(self, shard: Shard, logit_sum: Tensor | None) -> Tensor | None:
        """The sums of all ranks instead of this one's; returns Σ_j k_j z_ij, if it is among them."""
        if not shard.split:
            return logit_sum
        record = {"anchor": self.anchor, **self.sums}
        if self.extremes:
            record["argmax"] = self.sums["argmax"] + shard.start
        else:
            del record["highest"]  # which nobody asks for any more
        if logit_sum is not None:
            record["logit_sum"] = logit_sum
        lines = parallel.exchange(shard, record)
        self.anchor, merged = lines.anchor, lines.merged()
        logit_sum = merged.pop("logit_sum", None)
        self.sums |= merged
        return logit_sum

    def finish(self, weighted_logits: Tensor | None) -> TokenSums:
        sums, known = self.sums, (self.target_logit, self.anchor, self.s)
        log_total, entropy = numerics.finish_sums(XP, *known, sums.get("gap_sum"))
        found = TokenSums(self.target_logit, self.anchor, log_total, weighted_logits, entropy)
        if not self.extremes:
            return found
        return found._replace(
            argmax=sums["argmax"].to(torch.int32),
            max_logit=sums["highest"],
            min_logit=sums["lowest"],
            others_squared=numerics.squared_shares(XP, *known, sums["squares"]),
        )


def concatenate(parts: list[TokenSums], empty: Tensor) -> TokenSums:
    if not parts:
        nothing = TokenSums(*(empty.clone() for _ in TokenSums._fields))
        return nothing._replace(argmax=empty.to(torch.int32), total=None)
    wanted = [name for name in TokenSums._fields if getattr(parts[0], name) is not None]
    return TokenSums(**{name: torch.cat([getattr(part, name) for part in parts]) for name in wanted})


# ---------------------------------------------------------------------------------------------------------------------
# From sums to losses


def normalizer(inputs: Inputs, options: LossOptions, denominator: Tensor | float | None) -> Tensor:
    """What the sum of the token losses is multiplied by: 1 / Σ t k_y for mean, 0 where no token counts."""
    one = torch.ones((), dtype=inputs.accumulation_dtype, device=inputs.hidden.device)
    if options.reduction != "mean":
        return one
    if denominator is not None:
        return (one / denominator).to(one.dtype)  # a denominator in float64 makes no loss in float64
    counts = numerics.counts(XP, inputs)
    return torch.where((counts != 0).any(), one / counts.sum(), 0.0)


def losses(inputs: Inputs, options: LossOptions, sums: TokenSums) -> Tensor:
    """ℓ_i of every token, [N]; exactly 0 where ignored."""
    return numerics.losses(XP, inputs, options, sums)


def log_probs(inputs: Inputs, sums: TokenSums) -> Tensor:
    """log p(target) of every token, [N]; exactly 0 where ignored."""
    return (-sums.nll).masked_fill(~inputs.valid, 0.0)


def entropy(inputs: Inputs, sums: TokenSums) -> Tensor:
    """The entropy of every token, [N]; exactly 0 where ignored."""
    assert sums.entropy is not None
    return sums.entropy.masked_fill(~inputs.valid, 0.0)


def log_prob_rows(
    inputs: Inputs, options: LossOptions, sums: TokenSums, g_log_prob: Tensor | None, g: Mapping[str, Tensor]
) -> KnownRows:
    """The rows of log-probabilities' gradient from upstream gradients [N]: of log p (None: 0), and of statistics by
    their names."""

    def row_upstream(values: Tensor) -> Tensor:
        return numerics.row_upstream(XP, inputs, options, values)

    g_first = torch.zeros_like(sums.anchor) if g_log_prob is None else row_upstream(g_log_prob)
    rows = {name: row_upstream(values) for name, values in g.items()}
    return numerics.known_log_prob_rows(XP, inputs, options, sums, g_first, rows)


def total_loss(inputs: Inputs, options: LossOptions, sums: TokenSums, norm: Tensor) -> Tensor:
    """Σ ℓ_i times norm."""
    return losses(inputs, options, sums).sum() * norm


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
            rows += block.sum(dim=0) if k is None else vector_product(block.t(), k[start : start + block_size])
        bias = torch.zeros((), dtype=dtype, device=inputs.hidden.device)
        if inputs.bias is not None:
            b = inputs.bias.to(dtype)
            bias = b.sum() if inputs.class_weight is None else b @ inputs.class_weight
        if inputs.shard.split:
            both = inputs.shard.sum(torch.cat([rows, bias.reshape(1)]))
            rows, bias = both[:-1], both[-1]
        return Smoothing(options.label_smoothing / inputs.vocab, rows, bias)

    def weighted_logits(self, x: Tensor, options: LossOptions, temperature: Tensor | None = None) -> Tensor:
        """Σ_j k_j z_ij = scale · (x_i · Σ_j k_j w_j + Σ_j k_j b_j), divided by the token's own temperature."""
        rows = vector_product(x.to(self.weighted_rows.dtype), self.weighted_rows)
        z = (rows + self.weighted_bias) * options.logit_scale
        return z if temperature is None else z / temperature
