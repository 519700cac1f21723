"""What :mod:`.liger`'s losses return: the loss, or it and what was asked for."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from logitless import spec
from logitless.spec import Reduction, TokenStats
from logitless.torch_impl import checks
from logitless.torch_impl.compiled import tracing


class OutOfBoundsError(AssertionError, ValueError):
    """For a target outside the vocabulary: Liger's error, and that of our other functions."""


@dataclasses.dataclass
class CrossEntropyOutput:
    """The loss, and beside it what was asked for, without gradient; None for the rest."""

    loss: Tensor
    z_loss: Tensor | None = None
    """The z-loss that ``loss`` has in it, reduced in the same way."""
    token_accuracy: Tensor | None = None
    """1 where the target is the first of the likeliest classes, else 0; reduced: their mean over the tokens."""
    predicted_tokens: Tensor | None = None
    """int64 ids of the likeliest classes, -1 for an ignored token."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked for beside the loss; TypeError for what is not a bool."""

    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool

    def __post_init__(self) -> None:
        spec.check_flags(**dataclasses.asdict(self))

    @property
    def any(self) -> bool:
        return self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens


def output(
    found: Tensor | tuple[Tensor, TokenStats[Tensor]],
    asked: Asked,
    target: Tensor,
    ignore_index: int,
    z_loss: float,
    reduction: Reduction,
    class_weight: Tensor | None,
    token_weight: Tensor | None = None,
) -> Tensor | CrossEntropyOutput:
    """From what a loss of :mod:`logitless.torch_impl` returned, with statistics if something is asked for."""
    if isinstance(found, Tensor):
        return found
    loss, stats = found
    z = accuracy = None
    if asked.return_z_loss:
        z = z_loss * stats.lse.square()  # an ignored token's lse is 0
        z = z if token_weight is None else z * token_weight
        z = z if reduction == "none" else z.sum()
        z = z / denominator(target, ignore_index, class_weight) if reduction == "mean" else z
    if asked.return_token_accuracy:
        accuracy = stats.correct.float()
        accuracy = accuracy if reduction == "none" else accuracy.sum() / denominator(target, ignore_index, None)
    return CrossEntropyOutput(loss, z, accuracy, stats.argmax.long() if asked.return_predicted_tokens else None)


def in_dtype(
    result: Tensor | CrossEntropyOutput, loss: torch.dtype | None, z_loss: torch.dtype
) -> Tensor | CrossEntropyOutput:
    """The result with its losses rounded to dtypes; None: left as it is."""
    if isinstance(result, Tensor):
        return result if loss is None else result.to(loss)
    z = None if result.z_loss is None else result.z_loss.to(z_loss)
    return dataclasses.replace(result, loss=result.loss if loss is None else result.loss.to(loss), z_loss=z)


def check_targets(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Look at the ids on every device, as Liger does where it takes logits. On a GPU the host waits for this."""
    if not isinstance(target, Tensor) or tracing.is_traced(target):
        return
    outside = target[checks.ids_outside(target, vocab, ignore_index)]
    if len(outside):
        raise OutOfBoundsError(
            f"target: got id {int(outside[0])}, which is out of bounds, allowed are 0 to {vocab - 1} and ignore_index "
            f"= {ignore_index}"
        )


def check_without_effect(accum_dtype: torch.dtype | None, chunk_mem_const: int, dtype: torch.dtype) -> None:
    """Check the arguments that change nothing here. Raises NotImplementedError for sums wider than ours."""
    if accum_dtype == torch.float64 != dtype:
        raise NotImplementedError(
            f"accum_dtype: got torch.float64 beside input of {dtype}, allowed are None, torch.float32 and narrower: "
            f"sums are float32; with input and weight in float64 they are float64"
        )
    if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
        raise ValueError(f"chunk_mem_const: got {chunk_mem_const!r}, allowed is an integer of at least 1")


def denominator(target: Tensor, ignore_index: int, class_weight: Tensor | None) -> Tensor:
    """Σ k_y over the tokens that count, without class weights their number; 1 where that is 0."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().clamp(min=1)
    total = torch.where(counts, class_weight[torch.where(counts, target, 0)], 0).sum()
    return torch.where(total == 0, 1, total)
