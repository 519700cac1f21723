"""DTensors, without the module that knows them: only what makes one imports it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class Place(NamedTuple):
    """Everything about a DTensor but its numbers."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor; the module that knows them is not imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(value: Tensor | None) -> Tensor | None:
    """A DTensor's part on this rank, without gradient; anything else as it is."""
    return value._local_tensor if is_dtensor(value) else value


def place_of(tensor: DTensor) -> Place:
    """Where its parts are."""
    return Place(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def wrapped(part: Tensor, place: Place) -> DTensor:
    """The DTensor whose part on this rank is ``part``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, place.mesh, place.placements, run_check=False, shape=place.shape, stride=place.stride
    )
