"""Logits that a patched model's output has in name: computed when something reads them, or refused with the remedy.

An object of :class:`LazyLogits` has the shape, dtype and device of [..., V] logits and one element of memory. Trainers
pass a model's output around, look at its shapes, and often read nothing of it. Any operation on it is an operation on
the logits, which the first one computes. Where they shall not be computed, it is an error that says how to get them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# What is answered without the logits.
_ATTRIBUTES: Any = (
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout, Tensor.is_cuda, Tensor.requires_grad,
    Tensor.is_leaf, Tensor.grad_fn, Tensor.is_sparse, Tensor.is_quantized, Tensor.is_meta, Tensor.is_mkldnn,
)  # fmt: skip
_METADATA = frozenset(
    {
        *(attribute.__get__ for attribute in _ATTRIBUTES), Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.__len__,
        Tensor.__hash__,
    }
)  # fmt: skip


class LazyLogits(Tensor):
    """See the module."""

    @staticmethod
    def of(compute: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> LazyLogits:
        """``compute`` gives the logits."""
        one = torch.full((), torch.nan, dtype=dtype, device=device)  # whoever reads past us shall see it
        lazy = one.expand(shape).as_subclass(LazyLogits)
        lazy.__dict__["compute"], lazy.__dict__["logits"] = compute, None
        return lazy

    def whole(self) -> Tensor:
        """The logits, computed once."""
        own = self.__dict__
        if own["logits"] is None:
            own["logits"] = own["compute"]()
        logits: Tensor = own["logits"]
        return logits

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **(named or {}))
        arguments, named = _whole(arguments), _whole(named or {})
        return function(*arguments, **named)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _whole(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(map(_whole, value)) if not hasattr(value, "_fields") else type(value)(*map(_whole, value))
    return {key: _whole(one) for key, one in value.items()} if isinstance(value, dict) else value


def refused() -> Tensor:
    """Instead of logits that a forward in training does not make."""
    raise RuntimeError(
        "logits: a forward with labels of a model that logitless has patched makes none in training; "
        "patch(model, return_logits=True) makes them, at the cost of their memory"
    )
