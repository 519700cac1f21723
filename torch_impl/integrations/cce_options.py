"""What goes with cut-cross-entropy's losses: implementations, what tunes its kernels, a shared vocabulary, a z-loss."""

from __future__ import annotations

import dataclasses
import enum

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import spec
from logitless.spec import Reduction
from logitless.torch_impl.distributed import agreement, parallel, sharding


class LinearCrossEntropyImpl(enum.IntEnum):
    """cut-cross-entropy's implementations. Here there is one for all of them."""

    CCE = 1
    TORCH_COMPILE = 2
    CCE_KAHAN_FULL_C = 3
    CCE_KAHAN_FULL_E = 4
    CCE_EXACT = 5
    CCE_KAHAN_FULL_C_FULL_E = 6
    CCE_KAHAN_FULL = 7


NAMES = tuple(impl.name.lower() for impl in LinearCrossEntropyImpl)


@dataclasses.dataclass
class VocabParallelOptions:
    """This rank has the entries ``start`` to ``stop`` of a vocabulary that the ranks of ``group`` share.

    ``group`` None: all ranks. Their ranges follow each other in the group's order.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None = None
    reduce_e_grad: bool = True

    @classmethod
    def from_vocab(
        cls, vocab_size: int, group: dist.ProcessGroup | None = None, reduce_e_grad: bool = True
    ) -> VocabParallelOptions:
        """Equal shares; the first ranks have one entry more where it does not divide."""
        rank, (share, more) = dist.get_rank(group), divmod(vocab_size, dist.get_world_size(group))
        start = rank * share + min(rank, more)
        return cls(start, start + share + (rank < more), group, reduce_e_grad)


def check_tuning(filter_eps: object, impl: object, **flags: object) -> None:
    """Check what tunes cut-cross-entropy's kernels: none of it has anything to do here."""
    name = impl.name.lower() if isinstance(impl, enum.Enum) else impl
    spec.check_choice("impl", name, NAMES)
    if isinstance(filter_eps, str):
        spec.check_choice("filter_eps", filter_eps, ("auto", "high"))
    elif filter_eps is not None:
        spec.check_number("filter_eps", filter_eps, low=0.0, also="'auto', 'high' or None")
    spec.check_flags(**flags)


def group_of(options: VocabParallelOptions, c: Tensor) -> dist.ProcessGroup:
    """The ranks that share the vocabulary, once they have compared their ranges of it."""
    parallel.check_member(options.group)
    group = dist.group.WORLD if options.group is None else options.group
    assert group is not None  # there is a default one by now
    try:
        _check_own(options, len(c))
    except (NotImplementedError, ValueError):
        agreement.refuse(group, c.device, 1)
        raise
    start = agreement.agree(group, c.device, {}, len(c), sequence_parallel=False).start
    if options.start != start:
        agreement.refuse(group, c.device, 1 + sharding.FACTS)  # the others are at the loss's own comparison
        raise ValueError(
            f"vocab_parallel_options: got start={options.start} beside {start} entries on the ranks before this one, "
            f"allowed are ranges that follow each other in the group's order"
        )
    return group


def _check_own(options: VocabParallelOptions, rows: int) -> None:
    if not options.reduce_e_grad:
        raise NotImplementedError(
            "vocab_parallel_options: got reduce_e_grad=False, allowed is True: e's gradient is complete on every rank "
            "here, so a program that sums it over the group leaves that sum out"
        )
    if rows != options.stop - options.start:
        raise ValueError(
            f"c: got {rows} rows beside vocab_parallel_options for entries {options.start} to {options.stop}, "
            f"allowed are {options.stop - options.start}"
        )


def compute_z_loss(
    lse: Tensor, targets: Tensor | None = None, shift: bool | int = False, ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """lse², its sum or its mean over the tokens that count; ``targets`` and ``shift``: those of the call that gave lse.

    ``linear_cross_entropy(z_loss=...)`` adds it to the loss itself, with 2·N·D·V flops less.
    """
    spec.check_choice("reduction", reduction, spec.REDUCTIONS)
    counted = torch.ones_like(lse, dtype=torch.bool) if targets is None else targets[..., int(shift) :] != ignore_index
    values = torch.where(counted, lse.square(), 0.0)
    if reduction == "none":
        return values
    return values.sum() / counted.sum().clamp(min=1) if reduction == "mean" else values.sum()
