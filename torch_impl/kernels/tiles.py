"""The product kernels' tiles, and how a file of products is launched: what portable.py and hopper.py share."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from logitless.planning import ChunkPlan

# The product kernels. The first product makes exponentials and their sums, or more: statistics, coefficients, a
# softcap. dX and dW have the gradient's own dtype, or are sums.
LOGITS, LOGITS_MORE = "logits", "logits_more"
HIDDEN, HIDDEN_SUM, WEIGHT, WEIGHT_SUM = "hidden", "hidden_sum", "weight", "weight_sum"
KERNELS = (LOGITS, LOGITS_MORE, HIDDEN, HIDDEN_SUM, WEIGHT, WEIGHT_SUM)

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
    columns: int
    """Elements of the descriptor in a row of a block."""
    pairs: bool = False
    """Whether such an element is two neighbours, 16 bits each."""


@dataclasses.dataclass(frozen=True)
class WeightKind:
    """Which of dW's epilogues is wanted."""

    final: bool
    """The result, not a sum over chunks."""
    parted: bool
    """The sum has 24 or 20 bits, in two matrices."""
    reads: bool
    """What is there is read before the result is written."""
    smooth: bool
    """Label smoothing's rank-one part is taken away."""
    targets: bool
    """The targets' elements are added."""
    lent: bool
    """Exponentials lie where the result is written."""
    turned: bool
    """The result lies in memory as a matrix [D, V]."""
    low_bits: int = 8
    """Of a sum in two matrices: the bits in the second one, 8 or 4."""


class Operands(Protocol):
    """What a file of products reads of a call (kernel_call.KernelCall)."""

    device: torch.device
    plan: ChunkPlan
    programs: int
    size: int
    """D."""
    tma: bool
    """Whether every operand can be read by descriptor."""
    precision: str
    """Of float32 products: "ieee" or "tf32"."""

    turned: bool
    """Whether the weight lies in memory as a matrix [D, V]."""

    def empty(self, *shape: Any) -> Tensor:
        """A new tensor on the call's device: its shape, and a dtype behind it if that is not float32."""

    def describe_matrix(self, matrix: Tensor, rows: int, columns: int) -> object:
        """A matrix, whichever way it lies, in blocks of [rows, columns]; None where there are no descriptors."""


class Products(Protocol):
    """The three products of one file and how they are launched. Matrices are [rows, columns] in the operands' dtype."""

    logits_kernel: Any
    hidden_kernel: Any
    weight_kernel: Any

    def describe(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """The matrix as the tensor memory accelerator reads it, in blocks of [rows, columns]."""

    def logits(self, c: Operands, t: Tiles, plain: bool, known: bool) -> dict[str, Any]:
        """Constants of the first product. plain: no epilogue but exponentials; known: lse is."""

    def hidden(self, c: Operands, t: Tiles, sums: Tensor | None, parts: Tensor | None, smooth: bool) -> HiddenLaunch:
        """For dX, or its ``sums`` [N, D] float32; parts: of an earlier launch of this call."""

    def weight(self, c: Operands, t: Tiles, kind: WeightKind, low: Tensor | None, aligned: bool) -> WeightLaunch:
        """For dW, or its sum, whose lower bits are ``low``; aligned: whether rows of the result start on 16 bytes."""
