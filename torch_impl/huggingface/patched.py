"""What is known of a patched model: by which patch, and what became of its forwards."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import TypedDict

from torch import nn
from torch.utils.hooks import RemovableHandle

from logitless.planning import Preference

# The attribute in which a patched forward keeps its Patch.
MARK = "logitless_patch"

# What a message names where TRL computes losses of its own.
TRL = "logitless.torch_impl.integrations.trl.patch_trl"
TRL_REMEDY = f": {TRL}() replaces TRL's own"


class LossArguments(TypedDict):
    """What patch was given for the losses."""

    label_smoothing: float
    z_loss: float
    plan: Preference | None
    memory_budget: int | None
    backend: str | None


@dataclasses.dataclass(frozen=True)
class Patch:
    """What patch was asked for, and what unpatch needs."""

    head_name: str
    """The head's path inside the module that runs it, so that a copy of the model finds its own head."""
    return_logits: bool | None
    loss_arguments: LossArguments
    before: Callable[..., object] | None
    """The instance's own forward, or None where it is its class's."""
    signature: inspect.Signature


@dataclasses.dataclass
class Watch:
    """What became of a patched model's forwards."""

    handle: RemovableHandle
    ran: bool = False
    """Whether the patched forward has run since the last look."""
    bypassed: bool = False
    """Whether the warnings were given."""
    full: bool = False


WATCHED: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()


def patch_of(forward: object) -> Patch | None:
    """The patch whose forward this is; functools.wraps copies attributes to wrappers, but a mark knows its function."""
    function, found = getattr(forward, MARK, (None, None))
    return found if function is not None and function is getattr(forward, "__func__", forward) else None


def module_of(forward: object) -> str | None:
    """The module that a function was written in, whatever functools.wraps has copied to it."""
    function = getattr(forward, "__func__", forward)
    return getattr(function, "__globals__", {}).get("__name__")
