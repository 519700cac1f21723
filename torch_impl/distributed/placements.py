"""DTensor arguments: which placements a call takes, and the local tensors and gradients behind them.

| weight (and bias, class_weight) | hidden | meaning |
| --- | --- | --- |
| Shard(0) | plain or Replicate | vocabulary-parallel over the mesh |
| Shard(0) | Shard(a token axis) | the same with sequence parallelism |
| Replicate | plain or Replicate | every rank computes the whole loss; gradients are Replicate |

A weight that fully_shard (FSDP2) has cut is Shard(0) too, but its ranks have hidden states of their own: it is refused.

target and token_weight are plain or Replicate: all tokens, global ids. Everything else is refused. A gradient has its
argument's placement, the loss is a plain tensor, the same on every rank.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.torch_impl.call import Arrays
from logitless.torch_impl.distributed.dtensors import Place, is_dtensor, place_of, wrapped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _Context(torch.autograd.function.FunctionCtx):
    place: Place


class _Local(torch.autograd.Function):
    """A DTensor's local tensor; its gradient becomes a DTensor of the same placement, or stays None.

    DTensor.to_local's own gradient turns None into zeros of the size of the weight.
    """

    @staticmethod
    def forward(ctx: _Context, tensor: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.place = place_of(tensor)
        local = tensor._local_tensor.detach()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor | None) -> DTensor | None:
        return None if gradient is None else wrapped(gradient, ctx.place)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A call's tensors as this rank has them."""

    arrays: Arrays
    """Plain tensors (or whatever was given that is no tensor)."""
    group: dist.ProcessGroup | None
    """The ranks that share the vocabulary, or None."""
    token_axis: int | None
    """The axis of hidden that the ranks share under sequence parallelism, or None."""

    @property
    def device(self) -> torch.device:
        return next((array.device for array in self.arrays if isinstance(array, Tensor)), torch.device("cpu"))

    @property
    def tokens_first(self) -> Arrays:
        """The arrays with the shared axis of the tokens as their first."""
        axis, arrays = self.token_axis, self.arrays
        if not axis:
            return arrays
        hidden, target, *optional = (
            None if array is None else array.movedim(axis, 0)
            for array in (arrays.hidden, arrays.target, arrays.token_weight, arrays.temperature)
        )
        assert hidden is not None
        assert target is not None
        return arrays._replace(hidden=hidden, target=target, token_weight=optional[0], temperature=optional[1])


def is_fsdp_shard(weight: Tensor) -> bool:
    """Whether fully_shard has cut this parameter: its ranks hold different data, not parts of one vocabulary.

    FSDP2 keeps no mark on the parameter; its states, one for every module that it manages, know their parameters.
    """
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in list(states.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if any(parameter.sharded_param is weight for parameter in getattr(group, "fsdp_params", ())):
                return True
    return False


def localize(arrays: Arrays, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Placed:
    """Plain local tensors, and the group and the axis that their placements say. Raises ValueError naming a placement
    that is not taken, and what is."""
    weight, hidden = arrays.weight, arrays.hidden
    axis = 0 if sequence_parallel else None
    sharded = False
    if is_dtensor(weight):
        if is_fsdp_shard(weight):
            raise ValueError(
                "weight: got a parameter that fully_shard (FSDP2) has cut over ranks with data of their own, allowed "
                "is the whole one, which FSDP gathers for a module's forward: make the head a "
                "torch_impl.LinearCrossEntropy (its forward is the loss), or use torch_impl.patch, or "
                "logitless.torch_impl.integrations.sharded_head.head_cross_entropy(head, hidden, target)"
            )
        sharded = _kind(weight, "weight", ("Shard(0)", "Replicate()")) == "Shard(0)"
        mesh_group = weight.device_mesh.get_group()
        if group is not None and not (sharded and group is mesh_group):
            raise ValueError(
                "process_group: got one beside a DTensor weight, allowed is None: the weight's mesh is the group"
            )
        group = mesh_group if sharded else None
    elif is_dtensor(hidden) and group is None:
        _kind(hidden, "hidden", ("Replicate()",))
    if is_dtensor(hidden):
        leading = tuple(f"Shard({axis})" for axis in range(hidden.ndim - 1)) if group is not None else ()
        kind = _kind(hidden, "hidden", ("Replicate()", *leading))
        _check_mesh(hidden, "hidden", group)
        axis = None if kind == "Replicate()" else leading.index(kind)
        if sequence_parallel and axis is None:
            raise ValueError("sequence_parallel: got True beside a replicated DTensor hidden, allowed is False")
    local: dict[str, Tensor] = {}
    for name, array in arrays._asdict().items():
        if is_dtensor(array):
            if name in ("bias", "class_weight"):
                _kind(array, name, ("Shard(0)" if group is not None else "Replicate()",))
            elif name in ("target", "token_weight", "temperature"):
                _kind(array, name, ("Replicate()",))
            _check_mesh(array, name, group)
            local[name] = _Local.apply(array)  # type: ignore[no-untyped-call]
    return Placed(arrays._replace(**local), group, axis)


def _kind(array: DTensor, name: str, allowed: tuple[str, ...]) -> str:
    """The one placement of ``array``, as it is written."""
    if array.device_mesh.ndim != 1:
        raise ValueError(
            f"{name}: got a DTensor on a mesh of {array.device_mesh.ndim} axes, allowed is one axis: take a part of it "
            f"(mesh['tp'])"
        )
    (placement,) = array.placements
    words = "Replicate()" if placement.is_replicate() else str(placement)
    if placement.is_shard():
        words = f"Shard({placement.dim % array.ndim})"  # type: ignore[attr-defined]  # a Shard has one
        if type(placement).__name__ != "Shard":
            words = repr(placement)
    elif not placement.is_replicate():
        words = repr(placement)
    if words not in allowed:
        raise ValueError(f"{name}: got a DTensor of placement {words}, allowed is {' or '.join(allowed)}")
    return words


def _check_mesh(array: DTensor, name: str, group: dist.ProcessGroup | None) -> None:
    if group is not None and array.device_mesh.get_group() is not group:
        raise ValueError(f"{name}: got a DTensor on another mesh, allowed is the one that shares the vocabulary")
