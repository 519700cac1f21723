"""What a teacher says of a tile, [C, B]: logits or log-probabilities. Mirror of jax_impl/distillation/teachers.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitless.objectives import LARGEST_TILE, check_teacher_rows
from logitless.scratch import row_stride, slices
from logitless.spec import LOWEST_ANCHOR, LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Inputs
from logitless.torch_impl.checks import info
from logitless.torch_impl.distributed import parallel
from logitless.torch_impl.distributed.parallel import Shard

DenseRows = Callable[[int, int], Tensor]
"""rows(start, count) → [count, V], the teacher's rows of ``count`` tokens from ``start`` on."""


class Raw(NamedTuple):
    """A tile of r, [C, B], and what makes logits f(r + b) of them, or log-probabilities if they are none yet."""

    r: Tensor
    bias: Tensor | None = None  # [B]
    options: LossOptions | None = None
    """Of logits. None: r are log-probabilities."""


class Teacher(Protocol):
    """A teacher, a tile at a time."""

    @property
    def has_logits(self) -> bool:
        """Whether it has logits, not log-probabilities."""

    def tile(self, rows: slice, start: int, stop: int) -> Tensor:
        """Its logits or log-probabilities, [C, B], which the caller may write to."""

    def raw(self, rows: slice, start: int, stop: int) -> Raw:
        """What the kernel makes log p of. Of a token that does not count, which it does not read, anything."""


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear softmax."""

    inputs: Inputs
    options: LossOptions
    dtype: torch.dtype
    has_logits = True

    def tile(self, rows: slice, start: int, stop: int) -> Tensor:
        return logits(self.inputs, rows, start, stop, self.options).to(self.dtype)

    def raw(self, rows: slice, start: int, stop: int) -> Raw:
        bias = None if self.inputs.bias is None else self.inputs.bias[start:stop]
        x = self.inputs.hidden[rows].to(self.inputs.operand_dtype)
        return Raw(raw_logits(x, self.inputs, start, stop).to(self.dtype), bias, self.options)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A few ids of every token, and the same probability for each of the others."""

    ids: Tensor  # [N, K] int64, −1 where not known
    log_p: Tensor  # [N, K]
    log_rest: Tensor  # [N]
    first: int
    """The id of this rank's first entry."""
    has_logits = False

    def tile(self, rows: slice, start: int, stop: int) -> Tensor:
        width = stop - start
        tile = self.log_rest[rows].unsqueeze(1).repeat(1, width + 1)
        columns = columns_of(self.ids[rows], self.first + start, width)
        return tile.scatter_(1, columns, self.log_p[rows])[:, :width]

    def raw(self, rows: slice, start: int, stop: int) -> Raw:
        return Raw(self.tile(rows, start, stop))


@dataclasses.dataclass
class Dense:
    """All probabilities of every token: a tensor, an array that may lie in a file, or what generates rows."""

    source: Tensor | NDArray[np.generic] | DenseRows
    log: bool
    """Whether it has log-probabilities."""
    shape: tuple[int, ...]
    """[..., V], of this rank's V"""
    like: Tensor
    """A tensor of the device and dtype of the result."""
    has_logits = False

    def tile(self, rows: slice, start: int, stop: int) -> Tensor:
        block = self._read(rows, slice(start, stop))
        plain = torch.contiguous_format  # a copy keeps its source's strides otherwise, and kernels read along rows
        tile = block.to(self.like.device, self.like.dtype, copy=True, memory_format=plain)
        return tile if self.log else tile.log_()

    def raw(self, rows: slice, start: int, stop: int) -> Raw:
        return Raw(self.tile(rows, start, stop))

    def _read(self, rows: slice, columns: slice) -> Tensor:
        if not isinstance(self.source, Tensor | np.ndarray):
            made = self.source(rows.start, rows.stop - rows.start)
            described = info(made) if isinstance(made, Tensor) else None
            check_teacher_rows(described, made, (rows.stop - rows.start, self.shape[-1]))
            return made.detach()[:, columns]
        if len(self.shape) <= 2:
            source = self.source if len(self.shape) == 2 else self.source[None]
            return as_tensor(source[rows, columns])
        # The chunk's rows alone are copied: leading axes of any strides have no common one.
        if isinstance(self.source, np.ndarray):
            places = np.unravel_index(np.arange(rows.start, rows.stop), self.shape[:-1])
            return as_tensor(self.source[(*places, columns)])  # type: ignore[arg-type]  # an index of several kinds
        index: list[Tensor | slice] = [columns]
        row = torch.arange(rows.start, rows.stop, device=self.source.device)
        for size in reversed(self.shape[:-1]):  # torch.unravel_index would wait for a copy from the host
            index.insert(0, row % size)
            row = row // size
        return self.source[tuple(index)]


def as_tensor(block: Tensor | NDArray[np.generic]) -> Tensor:
    """A block of an array as a tensor; bfloat16 of NumPy is ml_dtypes'."""
    if isinstance(block, Tensor):
        return block
    block = np.ascontiguousarray(block)
    if block.dtype.name == "bfloat16":
        return torch.tensor(block.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(block)


def raw_logits(x: Tensor, inputs: Inputs, start: int, stop: int) -> Tensor:
    """r of tokens with the hidden states x, [C, B], in the accumulation dtype, in rows that start on a boundary.

    A weight of another dtype than the products' is converted a block at a time.
    """
    weight, dtype, width = inputs.weight[start:stop], inputs.accumulation_dtype, stop - start
    out = x.new_empty((x.shape[0], row_stride(width, dtype.itemsize)), dtype=dtype)[:, :width]
    if weight.dtype == x.dtype:
        chunk.product(x, weight.t(), out, add=False)
        return out
    for first, last in slices(width, LARGEST_TILE):
        chunk.product(x, weight[first:last].to(x.dtype).t(), out[:, first:last], add=False)
    return out


def logits(inputs: Inputs, rows: slice, start: int, stop: int, options: LossOptions) -> Tensor:
    """z of the tokens ``rows``, [C, B]."""
    z = raw_logits(chunk.rows_of(inputs, rows), inputs, start, stop)
    if inputs.bias is not None:
        z.add_(inputs.bias[start:stop].to(z.dtype))
    return chunk.capped(z, options, inputs.temperature_column(rows))


def row_sums(z: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Of whole rows the largest logit, and Σ_j exp(z_j − largest), [C] each."""
    anchor = z.amax(dim=1).clamp(min=LOWEST_ANCHOR)
    total = (z - anchor.unsqueeze(1)).exp_().sum(dim=1)
    if not shard.split:
        return anchor, total
    lines = parallel.exchange(shard, {"anchor": anchor, "s": total})
    return lines.anchor, lines.merged()["s"]


def row_lse(z: Tensor, shard: Shard) -> Tensor:
    """log Σ_j exp(z_j) of whole rows in two parts, [2, C], of which the first is the largest logit.

    Where logits are large, the sum of the parts would lose what divergences need.
    """
    anchor, total = row_sums(z, shard)
    return torch.stack([anchor, total.log()])


def normalized(z: Tensor, lse: Tensor | None) -> Tensor:
    """log softmax(z) in place of a tile's logits, [C, B], with lse [2, C]; None: they are log-probabilities already."""
    if lse is None:
        return z
    anchor, rest = lse.unsqueeze(2)
    return z.sub_(anchor).sub_(rest)


def columns_of(ids: Tensor, start: int, width: int) -> Tensor:
    """The ids as columns of a tile, and the column behind the last one for those that lie elsewhere."""
    local = ids - start
    return torch.where((local >= 0) & (local < width) & (ids >= 0), local, width)
