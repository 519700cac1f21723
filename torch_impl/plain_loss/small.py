"""A loss without options on a CPU, whose logits are all one block of the plan.

What Python and PyTorch do around an operation costs more here than the operation. So this takes a third of them. As all
logits are known before any exponential is, a row's anchor is its largest logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.spec import LOWEST_ANCHOR
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Arrays, Call, Gradients, Needs, empty_like_weight
from logitless.torch_impl.plain_loss import is_plain


def loss(
    arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs
) -> tuple[Tensor, Gradients] | None:
    """The loss, and gradients that wait for the upstream scalar; None where an option asks for more, or an id is
    outside."""
    if not _is_small(arrays, call, needs):
        return None
    options, weight, bias = call.options, arrays.weight, arrays.bias
    hidden, target = arrays.hidden.reshape(-1, weight.shape[1]), arrays.target.reshape(-1)
    order = _counted(target, options.ignore_index, len(weight))
    x, y = (hidden, target) if order is None else (hidden[order], target[order])
    if order is not None and not chunk.all_inside(y, len(weight)):
        return None
    column = y.long().unsqueeze(1)
    norm: Tensor | float = 1.0
    if options.reduction == "mean":
        norm = 1 / max(len(y), 1) if normalizer is None else x.new_ones(()) / normalizer
    z = x.mm(weight.t()) if bias is None else torch.addmm(bias.to(x.dtype), x, weight.t())
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    own = z.gather(1, column)
    anchor = torch.maximum(z.amax(1, keepdim=True), own).clamp_(min=LOWEST_ANCHOR)
    e = z.scatter_(1, column, -torch.inf).sub_(anchor).exp_()
    s, gap = e.sum(1, keepdim=True), own - anchor
    more = gap.expm1().add_(s)  # Σ_j exp(z_j − anchor) − 1, exact where the target has nearly all
    total = (more.log1p() - gap).sum().mul_(norm)
    factor = more.add_(1.0).reciprocal_().mul_(norm * options.logit_scale)
    e.scatter_(1, column, s.neg_())
    hidden_gradient = weight_gradient = None
    if needs.hidden:
        hidden_gradient = e.mm(weight).mul_(factor)
        if order is not None:
            hidden_gradient = torch.zeros_like(hidden).index_copy_(0, order, hidden_gradient)
    if needs.weight:
        weight_gradient = torch.mm(e.t(), x * factor, out=empty_like_weight(weight, x.dtype))
    return total, Gradients(hidden_gradient, weight_gradient, e.t().mv(factor.squeeze(1)) if needs.bias else None)


def _counted(target: Tensor, ignore_index: int, vocab: int) -> Tensor | None:
    """Which tokens are not ignored; None: all, and all ids are inside."""
    if not 0 <= ignore_index < vocab and chunk.all_inside(target, vocab):
        return None
    return (target != ignore_index).nonzero().squeeze(1)


def _is_small(arrays: Arrays, call: Call, needs: Needs) -> bool:
    """Whether :func:`loss` knows all that is asked for."""
    if not is_plain(arrays, call, needs) or not call.chunk_plan.holds_all:
        return False
    if call.chunk_plan.vocab_chunk < call.chunk_plan.vocab:
        return False
    same = arrays.hidden.dtype == arrays.weight.dtype == call.compute_dtype
    return same and call.compute_dtype.itemsize >= 4 and arrays.hidden.device.type == "cpu"
