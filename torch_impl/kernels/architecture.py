"""One record a GPU architecture: the file that has its products, their tiles, and what both need of the GPU.

A new architecture is a new file beside portable.py and hopper.py, with the three products and a class of
:class:`Products` that launches them, and a row in :data:`ARCHITECTURES`. Everything here is a function of dtype and
device, so that no call tunes anything.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch

from logitless.torch_impl.kernels.tiles import (
    HIDDEN,
    HIDDEN_SUM,
    KERNELS,
    LOGITS,
    SQUARE_GROUP,
    WEIGHT,
    WEIGHT_SUM,
    Products,
    Tiles,
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of GPU, for operands of some dtypes."""

    name: str
    products: Callable[[], Products]
    """Imports the file when it is wanted."""
    tiles: Mapping[str, Tiles]
    """By the names in :data:`KERNELS`."""
    arithmetic: tuple[str, ...]
    """Of the operands that it takes: "half", "tf32" and "ieee" (see :func:`arithmetic_of`)."""
    major: int | None = None
    """Its compute capability's first number; None: any GPU, and the interpreter."""
    descriptors: bool = False
    """Whether every operand must be readable by descriptor: rows start on 16 bytes."""

    def takes(self, arithmetic: str, major: int | None, descriptors: bool) -> bool:
        here = self.major is None or self.major == major
        return here and arithmetic in self.arithmetic and (descriptors or not self.descriptors)


def _portable() -> Products:
    from logitless.torch_impl.kernels import portable

    return portable.PRODUCTS


def _hopper() -> Products:
    from logitless.torch_impl.kernels import hopper

    return hopper.PRODUCTS


# A call takes the first record that fits its operands and its GPU.
ARCHITECTURES = [
    Architecture(
        "hopper",
        _hopper,
        # Three stages leave shared memory for a tile of results on its way out. With them keeping step made a step of
        # several chunks 1 to 1.5 % slower.
        {
            LOGITS: Tiles(128, 256, 64, halves=2, skew=1, group=SQUARE_GROUP),
            HIDDEN: Tiles(128, 256, 64, halves=2, skew=1, group=4, stages=4, pace=4),
            HIDDEN_SUM: Tiles(128, 256, 64, halves=2, skew=1, group=4, split=True),
            WEIGHT: Tiles(128, 256, 64, halves=2, skew=1),
            WEIGHT_SUM: Tiles(128, 256, 64, halves=2, skew=1, split=True),
        },
        arithmetic=("half",),
        major=9,
        descriptors=True,
    ),
    Architecture(
        "portable, 16 bits",
        _portable,
        {
            LOGITS: Tiles(128, 256, 64, split=True, flatten=True),
            HIDDEN: Tiles(128, 256, 64, group=4),
            HIDDEN_SUM: Tiles(128, 256, 64, group=4),
            WEIGHT: Tiles(128, 256, 64, split=True, stages=4),
            WEIGHT_SUM: Tiles(128, 256, 64, split=True),  # a float32 tile on its way out leaves room for three stages
        },
        arithmetic=("half",),
    ),
    Architecture("portable, tf32", _portable, dict.fromkeys(KERNELS, Tiles(128, 128, 32)), arithmetic=("tf32",)),
    Architecture(
        "portable, float32",
        _portable,
        dict.fromkeys(KERNELS, Tiles(64, 64, 16, stages=2, warps=4, deep=32)),
        arithmetic=("ieee",),
    ),
]


def precision(dtype: torch.dtype) -> str:
    """float32 products follow PyTorch's own setting; others do not read it."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def arithmetic_of(dtype: torch.dtype) -> str:
    return precision(dtype) if dtype == torch.float32 else "half"


@functools.lru_cache
def major_of(index: int | None) -> int | None:
    """The first number of a CUDA device's compute capability; None on a CPU."""
    return None if index is None else torch.cuda.get_device_capability(index)[0]


@functools.lru_cache
def multiprocessors(index: int | None) -> int:
    """Of a CUDA device; two on a CPU, where kernels are interpreted."""
    return 2 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def has_products(architecture_products: Callable[[], Products]) -> bool:
    """Whether this Triton has what the file of products is written in."""
    try:
        architecture_products()
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
        return False
    return True


def architecture_of(dtype: torch.dtype, index: int | None, descriptors: bool) -> Architecture:
    """The first record that takes operands of this dtype on the device.

    descriptors: whether every operand's rows start on 16 bytes.
    """
    arithmetic, major = arithmetic_of(dtype), major_of(index)
    return next(
        found for found in ARCHITECTURES if found.takes(arithmetic, major, descriptors) and has_products(found.products)
    )
