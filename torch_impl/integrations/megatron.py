"""Megatron-core's head and its loss without logits, over tensor-parallel ranks.

    loss = model(tokens, positions, mask, labels=labels, output_processor=output_processor)  # [b, s], from 0.18 on

:class:`LinearCrossEntropyModule` and :func:`linear_cross_entropy` have the names and arguments that Megatron-LM's dev
branch gives its own fused head. :mod:`.megatron_model` patches a GPTModel that has neither seam (0.16).

A weight's dW is added to its ``main_grad`` where Megatron's DistributedDataParallel has made one. b sequences of s
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitless.spec import Reduction
from logitless.torch_impl.huggingface.lm_head import PROBES, replaced
from logitless.torch_impl.integrations.megatron_loss import head_loss, scale_of, tensor_parallel_loss
from logitless.torch_impl.integrations.options import Options

if TYPE_CHECKING:

    class ColumnParallelLinear(nn.Module):
        """What is used of megatron-core's, which has no types."""

        bias: Tensor | None
        tp_group: dist.ProcessGroup | None
        weight: Tensor | None
        sequence_parallel: bool
        forward: Callable[..., tuple[Tensor, Tensor | None]]
else:
    from megatron.core.tensor_parallel import ColumnParallelLinear


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: Reduction = "none",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Tensor:
    """Cross-entropy of a tensor-parallel head, by the name and arguments of Megatron-LM's dev branch.

        ℓ_i = lse_i − z_{i,y_i},    z = hidden weightᵀ over the weights [V_r, D] of all ranks of tp_group

    Arguments:
        hidden: [..., D]; with ``sequence_parallel`` this rank's share of the first axis.
        weight: [V_r, D] this rank's entries of the vocabulary. If it has a ``main_grad``, dW is added to that.
        labels: [...] ids of all tokens, in hidden's order, the same on every rank.
        reduction, ignore_index: as for :func:`logitless.torch_impl.linear_cross_entropy`, with its errors.

    Returns the loss in float32, for "none" [...]: 0 for an ignored label.
    """
    return tensor_parallel_loss(
        hidden, weight, labels, tp_group, sequence_parallel, reduction=reduction, ignore_index=ignore_index
    )


class LinearCrossEntropyModule(ColumnParallelLinear):
    """A ColumnParallelLinear whose forward is the loss where it is asked for, as in Megatron-LM's dev branch."""

    def forward(  # type: ignore[override]  # more arguments than its own
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False, labels: Tensor | None = None, reduction: Reduction = "none",
        ignore_index: int = -100,
    ) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
        """Logits and bias, or with ``output_cross_entropy_loss`` the loss of labels [b, s], for "none" [b, s].

        input_ is [s, b, D], with sequence parallelism this rank's share of s. weight: [V_r, D] where it is shared with
        the embedding. Raises as :func:`.megatron_loss.head_loss`.
        """
        if not output_cross_entropy_loss:
            return super().forward(input_, weight, runtime_gather_output)
        if labels is None:
            raise ValueError("labels: got None beside output_cross_entropy_loss=True, allowed are ids [b, s]")
        return head_loss(self, input_, weight, labels, reduction=reduction, ignore_index=ignore_index)


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    labels: Tensor | None,
    context: Options | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_: object,
) -> Tensor:
    """For ``GPTModel.forward(output_processor=)``: the loss [b, s], as the model's own path gives it.

    context: ``output_processor_context``, keyword arguments of :func:`logitless.torch_impl.linear_cross_entropy` or
    None. MuP's factor of the logits is taken from ``scale_logits``. The layer's hooks run, as those of Megatron's DDP
    that gather parameters must.

    Raises ValueError without labels, NotImplementedError where ``scale_logits`` is more than a factor, and as
    :func:`.megatron_loss.head_loss`.
    """
    if labels is None:
        raise ValueError("labels: got None beside output_processor, allowed are ids [b, s]: logits are not made here")
    options: Options = {**(context or {})}
    if scale_logits is not None:
        options["logit_scale"] = options.get("logit_scale", 1.0) * scale_of(
            scale_logits(torch.tensor(PROBES, dtype=torch.float32))
        )
    run = functools.partial(head_loss, output_layer, weight=output_weight, labels=labels, **options)
    with replaced(output_layer, "forward", run):
        return cast(Tensor, output_layer(hidden_states))
