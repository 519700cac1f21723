"""Logits that a patched model's output has in name: computed when something reads them, or refused with the remedy.

An object of :class:`LazyLogits` has the shape, dtype and device of [..., V] logits and one element of memory. Trainers
pass a model's output around, look at its shapes, and often read nothing of it. Any operation on it is an operation on
the logits, which the first one computes. Where they shall not be computed, it is an error that says how to get them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

# What is answered without the logits.
_ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_leaf", "grad_fn", "is_sparse",
    "is_quantized", "is_meta", "is_mkldnn",
)  # fmt: skip
_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES), Tensor.size, Tensor.dim, Tensor.numel,
        Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device,
        Tensor.__len__, Tensor.__hash__,
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
    def __torch_function__(
        cls, function: Callable[..., object], types: object, arguments: Sequence[object] = (),
        named: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        named = named or {}
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **named)
        if function is Tensor.detach:  # as DeepSpeed does with all of a model's results: nothing is read
            lazy = cast(LazyLogits, arguments[0])
            return LazyLogits.of(lambda: lazy.whole().detach(), lazy.shape, lazy.dtype, lazy.device)
        return function(*map(_whole, arguments), **{name: _whole(value) for name, value in named.items()})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _whole(value: object) -> object:
    if isinstance(value, LazyLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        kind: Callable[..., object] = type(value)
        return kind(*map(_whole, value)) if hasattr(value, "_fields") else kind(map(_whole, value))
    return {key: _whole(one) for key, one in value.items()} if isinstance(value, dict) else value


def refused() -> Tensor:
    """Instead of logits that a forward in training does not make."""
    raise RuntimeError(
        "logits: a forward with labels of a model that logitless has patched makes none in training; "
        "patch(model, return_logits=True) makes them, at the cost of their memory"
    )
