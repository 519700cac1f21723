"""The loss of megatron-core's output layer: tensor-parallel ranks, main_grad, and what is refused."""

from __future__ import annotations

from typing import Protocol, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.torch_impl import api
from logitless.torch_impl.huggingface.lm_head import PROBES, check_probes
from logitless.torch_impl.integrations.options import Options


class OutputLayer(Protocol):
    """What is used of megatron-core's ColumnParallelLinear, which has no types."""

    @property
    def bias(self) -> Tensor | None: ...
    @property
    def tp_group(self) -> dist.ProcessGroup | None: ...
    @property
    def weight(self) -> Tensor | None: ...
    @property
    def sequence_parallel(self) -> bool: ...


class _Accumulating(Protocol):
    main_grad: Tensor


def head_loss(
    layer: OutputLayer, hidden: Tensor, weight: Tensor | None, labels: Tensor, **options: Unpack[Options]
) -> Tensor:
    """The loss of hidden [s, b, D] (with sequence parallelism this rank's share of s) and labels [b, s].

    weight: [V_r, D], or None for the layer's own. Returns [b, s], or one number by ``options["reduction"]``, which is
    "none" by default. Raises NotImplementedError for a layer that is more than a tensor-parallel product: one with a
    bias, an expert's, one that leaves the sum of hidden's gradient out, or one that defers dW; ValueError without any
    weight.
    """
    config = getattr(layer, "config", None)
    found = ["bias"] if layer.bias is not None else []
    found += [name for name in ("is_expert", "disable_grad_reduce") if getattr(layer, name, False)]
    found += ["defer_embedding_wgrad_compute"] if getattr(config, "defer_embedding_wgrad_compute", False) else []
    if found:
        raise NotImplementedError(f"output_layer: got one with {', '.join(found)}, allowed is one without {found[0]}")
    own = layer.weight if weight is None else weight
    if own is None:
        raise ValueError("weight: got None beside an output layer without one, allowed is the shared weight [V_r, D]")
    options = {"reduction": "none", **options}
    loss = tensor_parallel_loss(hidden, own, labels.T, layer.tp_group, layer.sequence_parallel, **options)
    return loss.T.contiguous() if loss.dim() else loss


def tensor_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    **options: Unpack[Options],
) -> Tensor:
    """:func:`logitless.torch_impl.linear_cross_entropy` of a group's ranks; dW is added to weight's ``main_grad``."""
    shared = group is not None and dist.get_world_size(group) > 1
    adds = torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")
    loss: Tensor = api.linear_cross_entropy(
        hidden, weight, labels, process_group=group if shared else None,
        sequence_parallel=sequence_parallel and shared,
        accumulate_into=cast(_Accumulating, weight).main_grad if adds else None, **options,
    )  # fmt: skip
    return loss


def scale_of(probes: Tensor) -> float:
    """The factor that a model has multiplied PROBES by. Raises NotImplementedError if it did anything else."""
    scale = float(probes[PROBES.index(8.0)]) / 8.0
    check_probes({"logit_scale": scale, "softcap": None}, probes)
    return scale
