"""A loss without options on a GPU, in few large operations.

eager.py takes some sixty small operations beside the large ones. And PyTorch is slow at two of its passes through a
chunk's logits: the one that subtracts each row's anchor, and the one that multiplies by each row's factor and rounds.
Here log_softmax does the first: it is one kernel. Nothing has to be multiplied, as all rows have the same factor; it is
left to the end.

The target's element is −q, q = 1 − p_y = Σ_{j ≠ y} p_j. The sum has no cancellation, so the gradient of a confident
token is right. So is its loss, −log(1 − q); where q > 1/2 it is −log p_y. log_softmax rounds a row's log-sum, so all p
of the row are off by one factor. The factor is their sum, and is taken out of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.planning import ChunkPlan
from logitless.scratch import TOKEN_TILE, slices
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Arrays, Call, Gradients, Inputs, Needs, empty_like_weight
from logitless.torch_impl.plain_loss import is_plain


def loss(
    arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs
) -> tuple[Tensor, Gradients] | None:
    """The loss, and gradients that wait for the upstream scalar; None where an option asks for more."""
    if not is_plain(arrays, call, needs) or not arrays.target.numel():
        return None
    inputs = chunk.prepare(arrays, call.options, call.compute_dtype)
    norm = chunk.normalizer(inputs, call.options, normalizer)
    made = _Chunks(inputs, call.options, call.chunk_plan, needs)
    losses = torch.cat([made.add(slice(first, last)) for first, last in slices(inputs.tokens, made.rows)])
    total = losses.masked_fill_(~inputs.valid, 0.0).sum() * norm
    return total, made.finish(inputs.wide(norm) * call.options.logit_scale)


class _Chunks:
    """The memory of a call, and its gradients without their common factor."""

    def __init__(self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, needs: Needs) -> None:
        vocab, device, dtype = inputs.weight.shape[0], inputs.hidden.device, inputs.accumulation_dtype
        self.inputs, self.options, self.operand = inputs, options, None
        self.rows = min(plan.token_chunk, inputs.tokens)
        """Tokens of a chunk: the plan's, or fewer, so that what the products read fits into the plan's scratch too."""
        if inputs.operand_dtype != dtype:
            # The plan has a chunk's logits, and two blocks of them for what is done to these.
            room = plan.token_chunk * (vocab + 2 * plan.vocab_chunk) * dtype.itemsize
            rows = room // (vocab * (dtype.itemsize + inputs.operand_dtype.itemsize))
            self.rows = min(self.rows, rows // TOKEN_TILE * TOKEN_TILE or max(1, rows))
            self.operand = torch.empty((self.rows, vocab), dtype=inputs.operand_dtype, device=device)
        self.logits = torch.empty((self.rows, vocab), dtype=dtype, device=device)
        self.hidden = torch.empty_like(inputs.hidden, dtype=dtype) if needs.hidden else None
        self.weight = empty_like_weight(inputs.weight, dtype) if needs.weight else None
        self.bias = torch.zeros(vocab, dtype=dtype, device=device) if needs.bias else None

    def add(self, rows: slice) -> Tensor:
        """The losses of these tokens; their gradients are added."""
        inputs, target = self.inputs, self.inputs.target[rows].unsqueeze(1)
        # A row of an id that is outside becomes NaN, as everything does that comes of it.
        x = chunk.rows_of(inputs, rows).masked_fill_(~inputs.inside[rows].unsqueeze(1), torch.nan)
        z = self.logits[: len(x)]
        chunk.logits_block(x, inputs, rows, 0, z.shape[1], self.options, z)
        if inputs.bias is not None:  # which may ban all classes; an ignored token has one left
            z[:, 0].masked_fill_(~inputs.valid[rows], 0.0)
        own = torch.log_softmax(z, 1, out=z).gather(1, target)
        p = z.exp_().scatter_(1, target, 0.0)
        share = p.sum(1, keepdim=True)
        self._add_gradients(p.scatter_(1, target, -share), x, rows)
        total = share + own.exp()  # 1, but for what rounding has made of log_softmax's sum
        q = share / total
        return torch.where(q < 0.5, -torch.log1p(-q), total.log() - own).squeeze(1)

    def _add_gradients(self, dz: Tensor, x: Tensor, rows: slice) -> None:
        """``dz``: of the logits, without the common factor."""
        if self.bias is not None:
            self.bias += self.inputs.valid[rows].to(dz.dtype) @ dz
        if self.operand is not None:
            dz = self.operand[: len(dz)].copy_(dz)
        if self.hidden is not None:
            chunk.product(dz, self.inputs.weight.to(dz.dtype), self.hidden[rows], add=False)
        if self.weight is not None:
            chunk.product(dz.t(), x, self.weight, add=rows.start > 0)

    def finish(self, factor: Tensor) -> Gradients:
        """The gradients, which still lack the factor."""
        if self.hidden is not None:
            self.hidden.masked_fill_(~self.inputs.valid.unsqueeze(1), 0.0)
        return Gradients(self.hidden, self.weight, self.bias, factor)
