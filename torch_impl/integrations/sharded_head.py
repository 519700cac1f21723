"""The loss of a head whose weight is whole in its own forward alone: FSDP2, FSDP1, DeepSpeed's ZeRO-3.

All of these gather a module's weights in hooks around its forward and its backward. So the loss is computed inside of
the head's own forward: its weight is gathered as for the head's logits, and its gradient is reduced once.
"""

from __future__ import annotations

from typing import Unpack, cast

from torch import Tensor, nn

from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.huggingface.adapters import product
from logitless.torch_impl.huggingface.lm_head import check_forward, replaced
from logitless.torch_impl.integrations.options import Options

# What FSDP1 calls its wrapper.
WRAPPER = "FullyShardedDataParallel"


def head_cross_entropy(head: nn.Module, hidden: Tensor, target: Tensor, **options: Unpack[Options]) -> Tensor:
    """The loss of ``head(hidden)`` against target, computed by the head's own forward, without logits.

        loss = head_cross_entropy(model.lm_head, hidden, target)

    For a head that ``fully_shard`` (FSDP2) has cut as a unit of its own, alone or with the last norm, that
    FullyShardedDataParallel (FSDP1) wraps, or whose weight DeepSpeed's ZeRO-3 has taken; a plain head is taken too, and
    one that PEFT has adapted. The head's hooks run around the loss.

    Arguments:
        head: a torch.nn.Linear [V, D], or what wraps one.
        hidden: [..., D] this rank's.
        target: [...] this rank's ids.
        options: as for :func:`logitless.torch_impl.linear_cross_entropy`.

    Returns its result. Raises as it does; TypeError for a head that is no module; NotImplementedError for one that is
    no plain linear map.
    """
    if not isinstance(head, nn.Module):
        raise TypeError(f"head: got {type(head).__name__}, allowed is a torch.nn.Module")
    inner = cast(nn.Module, head.module) if type(head).__name__ == WRAPPER else head
    check_forward(inner)

    def forward(hidden: Tensor) -> Tensor:
        found = product(inner, hidden)
        loss: Tensor = linear_cross_entropy(found.hidden, found.weight, target, found.bias, **options)
        return loss

    with replaced(inner, "forward", forward):
        return cast(Tensor, head(hidden))
