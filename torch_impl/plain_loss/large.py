"""A loss without options on a GPU, in few large operations.

eager.py takes some sixty small operations beside the large ones. And PyTorch is slow at a chunk's logits: it goes over
them nine times between the first product and the others. Where Triton runs, kernels go over them twice
(row_kernels.py). Else log_softmax subtracts the anchor: it is one kernel. Nothing has to be multiplied, as all rows
have the same factor; it is left to the end.

The target's element is −q, q = 1 − p_y = Σ_{j ≠ y} p_j. The sum has no cancellation, so the gradient of a confident
token is right. So is its loss, −log(1 − q); where q > 1/2 it is −log p_y. log_softmax rounds a row's log-sum, so all p
of the row are off by one factor. The factor is their sum, and is taken out of the loss.

No work is done on ignored tokens, but in the first chunk. The others come first, and while the GPU works on the first
chunk it tells the host how many they are. Small steps do not ask: there the host would have to wait.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from logitless.planning import ChunkPlan
from logitless.scratch import TOKEN_TILE, slices
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Arrays, Call, Gradients, Inputs, Needs, empty_like_weight
from logitless.torch_impl.plain_loss import is_plain, row_kernels

# The products of a call that counts its tokens, in flops: 6 ms on an H200.
COUNTED_FLOPS = 4e12


def loss(
    arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs
) -> tuple[Tensor, Gradients] | None:
    """The loss, and gradients that wait for the upstream scalar; None where an option asks for more."""
    if not is_plain(arrays, call, needs) or not arrays.target.numel():
        return None
    inputs = chunk.prepare(arrays, call.options, call.compute_dtype)
    norm = chunk.normalizer(inputs, call.options, normalizer)
    made = _Chunks(inputs, call.options, call.chunk_plan, needs)
    total = made.add_all().sum() * norm
    return total, made.finish(inputs.wide(norm) * call.options.logit_scale)


class _Counted:
    """How many tokens count, which the host learns while the GPU works on."""

    def __init__(self, valid: Tensor) -> None:
        self.number, self.arrived = valid.sum(), None
        if valid.device.type == "cuda":
            on_host = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            self.number = on_host.copy_(self.number, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def __int__(self) -> int:
        if self.arrived is not None:
            self.arrived.synchronize()
        return int(self.number)


class _Chunks:
    """The memory of a call, and its gradients without their common factor."""

    def __init__(self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, needs: Needs) -> None:
        vocab, device, dtype = inputs.weight.shape[0], inputs.hidden.device, inputs.accumulation_dtype
        self.inputs, self.options, self.operand, self.needs = inputs, options, None, needs
        self.fused = row_kernels.are_fused(device, inputs.operand_dtype)
        self.rows = min(plan.token_chunk, inputs.tokens)
        """Tokens of a chunk: the plan's, or fewer, so that what the products read fits into the plan's scratch too."""
        self.narrows = self.fused and not needs.bias and inputs.operand_dtype != dtype
        """Whether what the products read lies in the logits' rows. A bias's gradient is summed before it is rounded."""
        if inputs.operand_dtype != dtype and not self.narrows:
            # The plan has a chunk's logits, and two blocks of them for what is done to these.
            room = plan.token_chunk * (vocab + 2 * plan.vocab_chunk) * dtype.itemsize
            rows = room // (vocab * (dtype.itemsize + inputs.operand_dtype.itemsize))
            self.rows = min(self.rows, rows // TOKEN_TILE * TOKEN_TILE or max(1, rows))
            self.operand = torch.empty((self.rows, vocab), dtype=inputs.operand_dtype, device=device)
        self.logits = torch.empty((self.rows, vocab), dtype=dtype, device=device)
        if self.narrows:
            self.operand = self.logits.view(inputs.operand_dtype)[:, :vocab]
        self.hidden = torch.empty_like(inputs.hidden, dtype=dtype) if needs.hidden else None
        self.weight = empty_like_weight(inputs.weight, dtype) if needs.weight else None
        self.bias = torch.zeros(vocab, dtype=dtype, device=device) if needs.bias else None

    def add_all(self) -> Tensor:
        """The losses of the tokens that count, and of others 0; their gradients are added."""
        inputs, rows = self.inputs, self.rows
        if rows >= inputs.tokens or not self._counts:
            found = [self.add(slice(first, last)) for first, last in slices(inputs.tokens, rows)]
            if self.hidden is not None:
                self.hidden.masked_fill_(~inputs.valid.unsqueeze(1), 0.0)
            return torch.cat(found)
        counted = _Counted(inputs.valid)
        order = torch.sort((~inputs.valid).byte(), stable=True).indices  # the tokens that count come first
        self.inputs = chunk.taken(inputs, order)
        found = [self.add(slice(0, rows))]
        number = int(counted)
        found += [self.add(slice(start, min(start + rows, number))) for start in range(rows, number, rows)]
        if self.hidden is not None and number < inputs.tokens:
            chunk.place_rows(self.hidden, chunk.taken(inputs, order[:number]))
        return torch.cat(found)

    @property
    def _counts(self) -> bool:
        """Whether the host waits for the number of tokens that count."""
        inputs = self.inputs
        if inputs.valid.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return 6 * inputs.tokens * inputs.weight.numel() >= COUNTED_FLOPS

    def add(self, rows: slice) -> Tensor:
        """The losses of these tokens, 0 where ignored; their gradients are added."""
        inputs, options = self.inputs, self.options
        # A row of an id that is outside becomes NaN, as everything does that comes of it.
        x = chunk.rows_of(inputs, rows).masked_fill_(~inputs.inside[rows].unsqueeze(1), torch.nan)
        z = self.logits[: len(x)]
        chunk.logits_block(x, inputs, rows, 0, z.shape[1], LossOptions() if self.fused else options, z)
        if self.fused:
            dz = self.operand[: len(x)] if self.operand is not None and self.narrows else z
            losses = row_kernels.losses(z, inputs, rows, options, dz)
        else:
            dz, losses = self._plain(z, rows)
        self._add_gradients(dz, x, rows)
        return losses.masked_fill_(~inputs.valid[rows], 0.0)

    def _plain(self, z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The logits' gradient, in their place, and the losses."""
        inputs, target = self.inputs, self.inputs.target[rows].unsqueeze(1)
        if inputs.bias is not None:  # which may ban all classes; an ignored token has one left
            z[:, 0].masked_fill_(~inputs.valid[rows], 0.0)
        own = torch.log_softmax(z, 1, out=z).gather(1, target)
        p = z.exp_().scatter_(1, target, 0.0)
        share = p.sum(1, keepdim=True)
        total = share + own.exp()  # 1, but for what rounding has made of log_softmax's sum
        q = share / total
        losses = torch.where(q < 0.5, -torch.log1p(-q), total.log() - own)
        return p.scatter_(1, target, -share), losses.squeeze(1)

    def _add_gradients(self, dz: Tensor, x: Tensor, rows: slice) -> None:
        """``dz``: of the logits, without the common factor."""
        if self.bias is not None:
            self.bias += self.inputs.valid[rows].to(dz.dtype) @ dz
        if self.operand is not None and dz.dtype != self.operand.dtype:
            dz = self.operand[: len(dz)].copy_(dz)
        if self.hidden is not None:
            chunk.product(dz, self.inputs.weight.to(dz.dtype), self.hidden[rows], add=False)
        if self.weight is not None:
            chunk.product(dz.t(), x, self.weight, add=rows.start > 0)

    def finish(self, factor: Tensor) -> Gradients:
        """The gradients, which still lack the factor."""
        made = self.hidden, self.weight, self.bias, factor
        return _Fused(*made, (self.needs.hidden, self.needs.weight)) if self.fused else Gradients(*made)


@dataclasses.dataclass(frozen=True)
class _Fused(Gradients):
    """Gradients that get their factor, and are rounded, in one pass."""

    dtypes: tuple[torch.dtype | None, torch.dtype | None] = None, None
    """Of hidden's and the weight's."""

    def finish(self, upstream: Tensor) -> Gradients:
        assert self.factor is not None
        factor = upstream * self.factor
        hidden, weight = (
            None if g is None or dtype is None else row_kernels.scaled(g, factor, dtype)
            for g, dtype in zip((self.hidden, self.weight), self.dtypes, strict=True)
        )
        return Gradients(hidden, weight, None if self.bias is None else self.bias * factor)
