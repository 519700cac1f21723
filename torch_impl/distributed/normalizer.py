"""Mean's denominator for a batch that is spread over ranks: data parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import spec
from logitless.torch_impl.checks import check_counted
from logitless.torch_impl.distributed.parallel import check_member


def global_normalizer(
    target: Tensor,
    process_group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    averaged: bool = False,
) -> Tensor:
    """Σ t_i k_{y_i} over the valid tokens of all ranks: mean's denominator for a batch that is spread over ranks.

    For data parallelism: each rank has its own tokens and the whole head, and passes what this returns as
    ``normalizer=``. The losses of the ranks then add up to the mean over all tokens of the batch, however unevenly they
    (and the ignored ones) are spread; so do the gradients. A rank without a valid token takes part: its loss and
    gradients are 0. One collective of two numbers; nothing synchronises with the host.

    Arguments:
        target: [...] this rank's ids; any number of them.
        process_group: the data-parallel ranks; None: the default group.
        ignore_index, token_weight, class_weight: as for :func:`linear_cross_entropy` (class_weight over the whole V).
        averaged: True where gradients are averaged over the ranks and not summed, as DistributedDataParallel and FSDP
            do unless told otherwise: the result is divided by the number of ranks, so that the average is the mean over
            all tokens. (The mean over the ranks of the losses is the loss, then.)

    Returns a tensor without axes, float32 (float64 if a weight is); where no token of any rank counts 1, so that loss
    and gradients are 0. Raises ValueError for a group that this rank is not in.
    """
    check_member(process_group)
    spec.check_ignore_index(ignore_index)
    spec.check_flags(averaged=averaged)
    check_counted(target, token_weight, class_weight)
    wide = any(weight is not None and weight.dtype == torch.float64 for weight in (token_weight, class_weight))
    valid = target != ignore_index
    counts = valid.to(torch.float64 if wide else torch.float32)
    if token_weight is not None:
        counts = torch.where(valid, token_weight.to(counts.dtype), 0.0)
    if class_weight is not None:
        counts = counts * class_weight.to(counts.dtype)[torch.where(valid, target, 0)]
    both = torch.stack([counts.sum(), (counts != 0).sum().to(counts.dtype)])
    dist.all_reduce(both, group=process_group)
    total = torch.where(both[1] > 0, both[0], 1.0)
    return total / dist.get_world_size(process_group) if averaged else total
