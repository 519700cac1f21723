"""One record a GPU architecture: the file that has its products, their tiles, and what both need of the GPU.

A new architecture is a new file beside portable.py and hopper.py, with the three products and a class of
:class:`Products` that launches them, and a row in :data:`ARCHITECTURES`. Everything here is a function of dtype and
device, so that no call tunes anything.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from logitless.torch_impl.kernels.kernel_call import KernelCall

# The product kernels, with the dtype of their result: dX and dW in the gradient's own, or their sums.
LOGITS, HIDDEN, HIDDEN_SUM, WEIGHT, WEIGHT_SUM = "logits", "hidden", "hidden_sum", "weight", "weight_sum"
KERNELS = (LOGITS, HIDDEN, HIDDEN_SUM, WEIGHT, WEIGHT_SUM)

# Row tiles that walk the vocabulary together share the first product's weight tiles; their hidden states stay in L2.
GROUP_BYTES = 8 * 2**20
# 132 programs read least at a time as a square, 16 row tiles beside 8 column tiles; in a wide dX they walk like that.
SQUARE_GROUP = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a product kernel, and how its programs walk them."""

    bm: int
    bn: int
    bk: int
    group: int = 8
    """Row tiles that are walked together."""
    stages: int = 3
    """Steps whose operands are in shared memory at once."""
    warps: int = 8
    halves: int = 1
    """Groups of warps that share a tile's rows: each has its own block of a descriptor."""
    split: bool = False
    """Whether a tile's result leaves by halves of its columns."""
    flatten: bool = False
    deep: int = 0
    """Steps along a product's depth that are summed before they are added to the total; 0: all of them."""
    skew: int = 0
    """How many steps the second group of warps starts behind the first."""
    pace: int = 0
    """Steps of dX's kernel after which its programs wait for each other; 0: they do not."""

    @property
    def block_rows(self) -> int:
        """Rows of a tile that one descriptor's block covers."""
        return self.bm // self.halves

    @property
    def block_columns(self) -> int:
        """Columns of a tile that leave at a time."""
        return self.bn // 2 if self.split else self.bn

    @property
    def sizes(self) -> dict[str, int]:
        """The tile as a kernel's constants."""
        return {"BM": self.bm, "BN": self.bn, "BK": self.bk}


@dataclasses.dataclass(frozen=True)
class HiddenLaunch:
    """What one file's dX kernel takes beyond the arguments that all of them have."""

    values: dict[str, Any]
    """By the kernel's names for them."""
    group: int
    parts: Tensor | None = None
    """Where split tiles leave their parts, which combine_hidden_kernel adds; None: no tile is split."""


@dataclasses.dataclass(frozen=True)
class WeightLaunch:
    """What one file's dW kernel takes beyond the arguments that all of them have."""

    values: dict[str, Any]
    """By the kernel's names for them; low_desc among them, the descriptor of the sum's lower bits, or None."""
    by_descriptor: bool
    """Whether the result is written by descriptor."""


@dataclasses.dataclass(frozen=True)
class WeightKind:
    """Which of dW's epilogues is wanted."""

    final: bool
    """The result, not a sum over chunks."""
    parted: bool
    """The sum has 24 bits, in two matrices."""
    reads: bool
    """What is there is read before the result is written."""
    smooth: bool
    """Label smoothing's rank-one part is taken away."""


class Products(Protocol):
    """The three products of one file and how they are launched. Matrices are [rows, columns] in the operands' dtype."""

    logits_kernel: Any
    hidden_kernel: Any
    weight_kernel: Any

    def describe(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """The matrix as the tensor memory accelerator reads it, in blocks of [rows, columns]."""

    def logits(self, c: KernelCall, t: Tiles, plain: bool, known: bool) -> dict[str, Any]:
        """Constants of the first product. plain: no epilogue but exponentials; known: lse is."""

    def hidden(self, c: KernelCall, t: Tiles, sums: Tensor | None, parts: Tensor | None, smooth: bool) -> HiddenLaunch:
        """For dX, or its ``sums`` [N, D] float32; parts: of an earlier launch of this call."""

    def weight(self, c: KernelCall, t: Tiles, kind: WeightKind, low: Tensor | None, aligned: bool) -> WeightLaunch:
        """For dW, or its sum, whose lower bits are ``low``; aligned: whether rows of the result start on 16 bytes."""


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


# The first that takes a call's operands has its products.
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
    """The first that takes operands of this dtype on the device; descriptors: whether all rows start on 16 bytes."""
    arithmetic, major = arithmetic_of(dtype), major_of(index)
    return next(
        found for found in ARCHITECTURES if found.takes(arithmetic, major, descriptors) and has_products(found.products)
    )
