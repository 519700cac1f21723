"""Arguments in the memory that kernels read, and results in memory of their own.

The Triton kernels read a vector element after element and a matrix by the distance of its rows, whatever a tensor's
strides say, and know nothing of PyTorch's negative bit (``z.conj().imag``). Plain operations take any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.torch_impl.call import Arrays


def vector(tensor: Tensor | None) -> Tensor | None:
    """``tensor`` without gaps, in the order of its axes: itself, or a copy of a part, an expanded or a moved one."""
    if tensor is None:
        return None
    tensor = signed(tensor)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def signed(tensor: Tensor) -> Tensor:
    """``tensor`` with the signs that its memory has."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def matrix(tensor: Tensor) -> Tensor:
    """``tensor`` with rows that do not overlap: an expanded weight is copied, as TMA may refuse its strides.

    Rows of any distance stay as they are; where the last axis has steps, the kernels' host code copies.
    """
    tensor = signed(tensor)
    rows, columns = tensor.shape
    return tensor.contiguous() if rows > 1 and tensor.stride(0) < columns and tensor.stride(1) == 1 else tensor


def plain(arrays: Arrays) -> Arrays:
    """A call's arrays as the kernels read them. The copies are differentiable, and made only where needed."""
    hidden, weight, bias, target, token_weight, class_weight = arrays
    flat: Sequence[Tensor | None] = [vector(v) for v in (bias, target, token_weight, class_weight)]
    bias, settled, token_weight, class_weight = flat
    assert settled is not None
    return Arrays(signed(hidden), matrix(weight), bias, settled, token_weight, class_weight)


def own(result: Any) -> Any:
    """A fresh result of a forward, or None, that is the caller's to change in place.

    Autograd refuses that for a view, such as reshape gives, when an autograd.Function returns it.
    """
    if result is None or not result._is_view():
        return result
    return torch.ops.aten._unsafe_view.default(result, result.shape)
