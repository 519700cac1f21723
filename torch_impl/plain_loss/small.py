"""A loss without options on a CPU, whose logits are all one block of the plan.

What Python and PyTorch do around an operation costs more here than the operation. So this takes a third of them. A
row's anchor is its target's logit. Where another logit is too far above it, eager.py makes the loss: it moves anchors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.torch_impl import chunk
from logitless.torch_impl.call import NOTHING, Arrays, Call, Gradients, Needs, empty_like_weight
from logitless.torch_impl.plain_loss import is_plain

LARGEST_SUM = 1e33
"""Of a row's exponentials over its target's. float32 ends at 3e38, and dX's product multiplies them by weights."""


def loss(
    arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs
) -> tuple[Tensor, Gradients] | None:
    """The loss, and gradients that wait for the upstream scalar; None where an option asks for more, an id is outside,
    or a logit is too large."""
    if not _is_small(arrays, call, needs):
        return None
    options, weight, bias = call.options, arrays.weight, arrays.bias
    hidden, target = arrays.hidden, arrays.target
    if target.dim() != 1:
        hidden, target = hidden.reshape(-1, weight.shape[1]), target.reshape(-1)
    order = _counted(target, options.ignore_index, len(weight))
    x, y = (hidden, target) if order is None else (hidden[order], target[order])
    if order is not None and not chunk.all_inside(y, len(weight)):
        return None
    column = y.long().unsqueeze(1)
    norm: Tensor | float = 1.0
    if options.reduction == "mean":
        normalizer = normalizer.to(x) if isinstance(normalizer, Tensor) else normalizer
        norm = 1 / max(len(y), 1) if normalizer is None else x.new_ones(()) / normalizer
    z = x.mm(weight.t()) if bias is None else torch.addmm(bias.to(x.dtype), x, weight.t())
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    own = z.gather(1, column)
    e = z.scatter_(1, column, -torch.inf).sub_(own).exp_()
    s = e.sum(1, keepdim=True)  # 1 / p_y − 1, exact where the target has nearly all
    if len(y) and not s.amax().item() <= LARGEST_SUM:  # or NaN
        return None
    total = s.log1p().sum().mul_(norm)
    if not needs.any:
        return total, NOTHING
    e.scatter_(1, column, s.neg())
    divisor = s.add_(1.0).div_(norm * options.logit_scale)
    hidden_gradient = weight_gradient = None
    if needs.hidden:
        hidden_gradient = e.mm(weight).div_(divisor)
        if order is not None:
            hidden_gradient = torch.zeros_like(hidden).index_copy_(0, order, hidden_gradient)
    if needs.weight:
        weight_gradient = torch.mm(e.t(), x / divisor, out=empty_like_weight(weight, x.dtype))
    bias_gradient = e.t().mv(divisor.reciprocal_().squeeze(1)) if needs.bias else None
    return total, Gradients(hidden_gradient, weight_gradient, bias_gradient)


def _counted(target: Tensor, ignore_index: int, vocab: int) -> Tensor | None:
    """Which tokens are not ignored; None: all, and all ids are inside."""
    if not 0 <= ignore_index < vocab and chunk.all_inside(target, vocab):
        return None
    return (target != ignore_index).nonzero().squeeze(1)


def _is_small(arrays: Arrays, call: Call, needs: Needs) -> bool:
    """Whether :func:`loss` knows all that is asked for."""
    if not is_plain(arrays, call, needs):
        return False
    plan, dtype = call.chunk_plan, call.compute_dtype
    if not plan.holds_all or plan.vocab_chunk < plan.vocab:
        return False
    return arrays.hidden.dtype == arrays.weight.dtype == dtype and dtype.itemsize >= 4 and arrays.hidden.is_cpu
