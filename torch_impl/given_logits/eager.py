"""The loss on given logits in plain PyTorch operations: CPU and any CUDA device.

Mirror of jax_impl/given_logits/xla.py.

The logits take the place of hidden weightᵀ + bias. What follows, from sums to losses, is that of chunk.py. A few rows
at a time are copied to float32 (float64 for float64 logits), so that nothing else of the logits' size is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from logitless.numerics import LogitRows
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Inputs, TokenSums

# Logits of a block of rows: on a CPU what stays in its cache, on a GPU what keeps it busy.
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}


def _row_slices(inputs: Inputs) -> Iterator[slice]:
    tokens, vocab = inputs.hidden.shape
    step = max(1, BLOCK_ELEMENTS.get(inputs.hidden.device.type, BLOCK_ELEMENTS["cuda"]) // vocab)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def _logits(inputs: Inputs, rows: slice, options: LossOptions) -> Tensor:
    """z of some rows, a copy in the accumulation dtype."""
    return chunk.capped(inputs.hidden[rows].to(inputs.accumulation_dtype, copy=True), options)


def token_sums(inputs: Inputs, options: LossOptions, statistics: bool) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token; ``inputs.hidden`` is the logits, [N, V]."""
    parts, k = [], inputs.class_weight
    for rows in _row_slices(inputs):
        z, target = _logits(inputs, rows, options), inputs.target[rows]
        target_logit = z.gather(1, target.unsqueeze(1)).squeeze(1).masked_fill_(~inputs.inside[rows], torch.nan)
        sums = chunk.RunningSums(target_logit, target, statistics)
        weighted = None
        if options.label_smoothing:  # a class of weight 0 may have a logit of −inf
            weighted = z.sum(dim=1) if k is None else z.masked_fill(k == 0, 0.0) @ k
        sums.observe(z, 0)
        sums.rescue(sums.highest)
        sums.exponentiate(z, 0)
        parts.append(sums.finish(weighted))
    empty = torch.empty(0, dtype=inputs.accumulation_dtype, device=inputs.hidden.device)
    return chunk.concatenate(parts, empty)


def gradient(inputs: Inputs, options: LossOptions, known: LogitRows[Tensor], out: Tensor) -> None:
    """The gradient to ``out`` [N, V], which may be the logits themselves: a block is copied before it is written."""
    ignored, k = ~inputs.valid, inputs.class_weight
    for rows in _row_slices(inputs):
        z = _logits(inputs, rows, options)
        slope = None if options.softcap is None else chunk.slope(z, options)
        z.sub_(known.anchor[rows].unsqueeze(1)).sub_(known.log_total[rows].unsqueeze(1)).exp_()
        z.mul_(known.factor[rows].unsqueeze(1))
        if known.smooth is not None:
            z.sub_(known.smooth[rows].unsqueeze(1) * (1.0 if k is None else k))
        if slope is not None:
            z.mul_(slope)
        chunk.set_target(z, inputs.target[rows], 0, known.target[rows])
        out[rows] = z.masked_fill_(ignored[rows].unsqueeze(1), 0.0)
