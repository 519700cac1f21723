"""DTensors, without the module that knows them: it is imported only where one is made."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor; the module that knows them is not imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(value: Any) -> Any:
    """A DTensor's part on this rank, without gradient; anything else as it is."""
    return value._local_tensor if is_dtensor(value) else value


def spec_of(given: Any) -> tuple[Any, ...]:
    """(mesh, placements, shape, stride) of a DTensor."""
    return given.device_mesh, given.placements, given.shape, given.stride()


def wrapped(local: Tensor, spec: tuple[Any, ...]) -> Any:
    """``local`` as a DTensor of (mesh, placements, shape, stride)."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = spec
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
