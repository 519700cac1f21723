"""verl's fused log-probabilities by :func:`linear_log_probs`: ``patch_verl()`` before training.

verl's models call ``linear_cross_entropy(hidden, weight, labels, temperature, "none", group)`` where
``use_fused_kernels`` is on (``fused_kernel_options.impl_backend: triton``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from logitless.torch_impl.api import linear_log_probs

KERNEL, NAME = "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"
# Megatron's gather of a sequence-parallel hidden, whose backward sums over the ranks.
GATHER = "_GatherFromSequenceParallelRegionBackward"

# How to take back what was replaced; empty where nothing is.
_UNDO: list[Callable[[], None]] = []


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(label) and entropy of every token at a temperature, by verl's name and arguments.

    hidden [..., D], weight [V, D] (with a group this rank's entries [V_r, D]), labels [...]; temperature a number, or a
    tensor with one per label. Both results are [N], float32, and differentiable. hidden's gradient is complete on every
    rank of the group; what came out of Megatron's gather of a sequence-parallel hidden gets 1 / R of it, because the
    backward of that gather sums it over R ranks.

    Raises as :func:`logitless.torch_impl.linear_log_probs`; NotImplementedError for another reduction.
    """
    if reduction.lower() != "none":
        raise NotImplementedError(f"reduction: got {reduction!r}, allowed is 'none': reduce the results")
    group = None if dist_process_group is None or dist.get_world_size(dist_process_group) == 1 else dist_process_group
    if group is not None and type(hidden.grad_fn).__name__ == GATHER:
        hidden = _share_of_gradient(hidden, dist.get_world_size(group))
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
    log_probs, entropy = linear_log_probs(
        hidden.flatten(0, -2), weight, labels.flatten(), temperature=temperature, with_entropy=True, process_group=group
    )
    assert entropy is not None
    return log_probs, entropy


def _share_of_gradient(hidden: Tensor, ranks: int) -> Tensor:
    """hidden itself, whose gradient is divided by the number of ranks."""
    passed = hidden.view_as(hidden)
    if passed.requires_grad:
        passed.register_hook(lambda gradient: gradient / ranks)
    return passed


def patch_verl() -> None:
    """Make verl compute its log-probabilities and entropies here, in all models of this process.

    Raises ImportError without verl, RuntimeError where it was called already.
    """
    if _UNDO:
        raise RuntimeError("verl: its function is replaced already, allowed is one patch_verl: unpatch_verl first")
    theirs = getattr(importlib.import_module(KERNEL), NAME)
    for module in list(sys.modules.values()):  # verl's modules import the function itself
        if getattr(module, "__name__", "").startswith("verl.") and getattr(module, NAME, None) is theirs:
            setattr(module, NAME, linear_cross_entropy)
            _UNDO.append(lambda module=module: setattr(module, NAME, theirs))  # type: ignore[misc]


def unpatch_verl() -> None:
    """Take back :func:`patch_verl`. Raises RuntimeError where there is nothing to take back."""
    if not _UNDO:
        raise RuntimeError("verl: its function is not replaced, allowed is unpatch_verl after patch_verl")
    while _UNDO:
        _UNDO.pop()()
