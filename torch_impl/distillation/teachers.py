"""What a teacher says of a tile: log-probabilities [C, B]. Mirror of jax_impl/distillation/teachers.py."""

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


class RawRows(NamedTuple):
    """Whole rows of r, [C, V], and what makes logits f(r + b) of them, or log-probabilities if they are none yet."""

    r: Tensor
    bias: Tensor | None = None  # [V]
    options: LossOptions | None = None
    """Of logits. None: r are log-probabilities."""


class Teacher(Protocol):
    """A teacher's log-probabilities, a tile at a time or whole rows."""

    def tile(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Logits of a tile, [C, B], which the caller may write to, and their logsumexps in two parts, [2, C]; or
        log-probabilities and None."""

    def raw(self, rows: slice) -> RawRows:
        """What the kernel makes log p of, of the tokens ``rows``."""


def log_probs(teacher: Teacher, rows: slice, start: int, stop: int) -> Tensor:
    """log p of a tile, [C, B], which the caller may write to."""
    z, lse = teacher.tile(rows, start, stop)
    return z if lse is None else normalized(z, lse)


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear softmax: its arrays, and its logsumexps."""

    inputs: Inputs
    options: LossOptions
    lse: Tensor | None  # [2, N]: two parts, whose sum it is; None where tiles are whole rows
    dtype: torch.dtype

    def tile(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        if self.lse is None:
            z = whole_logits(self.inputs, rows, self.options).to(self.dtype)
            return z, row_lse(z, self.inputs.shard)
        x = chunk.rows_of(self.inputs, rows)
        out = x.new_empty((x.shape[0], stop - start), dtype=self.inputs.accumulation_dtype)
        z = chunk.logits_block(x, self.inputs, rows, start, stop, self.options, out)
        return z.to(self.dtype), self.lse[:, rows]

    def raw(self, rows: slice) -> RawRows:
        return RawRows(raw_rows(self.inputs, rows).to(self.dtype), self.inputs.bias, self.options)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A few ids of every token, and the same probability for each of the others."""

    ids: Tensor  # [N, K] int64, −1 where not known
    log_p: Tensor  # [N, K]
    log_rest: Tensor  # [N]
    first: int
    """The id of this rank's first entry."""
    vocab: int
    """This rank's entries."""

    def tile(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        width = stop - start
        tile = self.log_rest[rows].unsqueeze(1).repeat(1, width + 1)
        columns = columns_of(self.ids[rows], self.first + start, width)
        return tile.scatter_(1, columns, self.log_p[rows])[:, :width], None

    def raw(self, rows: slice) -> RawRows:
        return RawRows(self.tile(rows, 0, self.vocab)[0])


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

    def tile(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        block = self._read(rows, slice(start, stop))
        plain = torch.contiguous_format  # a copy keeps its source's strides otherwise, and kernels read along rows
        tile = block.to(self.like.device, self.like.dtype, copy=True, memory_format=plain)
        return tile if self.log else tile.log_(), None

    def raw(self, rows: slice) -> RawRows:
        return RawRows(self.tile(rows, 0, self.shape[-1])[0])

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


def raw_rows(inputs: Inputs, rows: slice) -> Tensor:
    """r of the tokens ``rows``, [C, V], in the accumulation dtype, in rows that start on a boundary.

    A weight of another dtype than the products' is converted a block at a time.
    """
    x, weight = chunk.rows_of(inputs, rows), inputs.weight
    vocab, dtype = weight.shape[0], inputs.accumulation_dtype
    out = x.new_empty((x.shape[0], row_stride(vocab, dtype.itemsize)), dtype=dtype)[:, :vocab]
    for start, stop in slices(vocab, vocab if weight.dtype == x.dtype else LARGEST_TILE):
        chunk.product(x, weight[start:stop].to(x.dtype).t(), out[:, start:stop], add=False)
    return out


def whole_logits(inputs: Inputs, rows: slice, options: LossOptions) -> Tensor:
    """z of the tokens ``rows``, [C, V]."""
    z = raw_rows(inputs, rows)
    if inputs.bias is not None:
        z.add_(inputs.bias.to(z.dtype))
    return chunk.capped(z, options, inputs.temperature_column(rows))


def row_lse(z: Tensor, shard: Shard) -> Tensor:
    """log Σ_j exp(z_j) of whole rows in two parts, [2, C], of which the first is the largest logit."""
    anchor = z.amax(dim=1).clamp(min=LOWEST_ANCHOR)
    anchor, total = of_all_ranks(shard, anchor, (z - anchor.unsqueeze(1)).exp_().sum(dim=1))
    return torch.stack([anchor, total.log()])


def of_all_ranks(shard: Shard, anchor: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The ranks' largest anchor, and their sums Σ exp(z − anchor) relative to it, [C] each."""
    if not shard.split:
        return anchor, total
    lines = parallel.exchange(shard, {"anchor": anchor, "s": total})
    return lines.anchor, lines.merged()["s"]


def normalized(z: Tensor, lse: Tensor) -> Tensor:
    """log softmax(z) in place of a tile's logits, [C, B], with lse [2, C]."""
    anchor, rest = lse.unsqueeze(2)
    return z.sub_(anchor).sub_(rest)


def columns_of(ids: Tensor, start: int, width: int) -> Tensor:
    """The ids as columns of a tile, and the column behind the last one for those that lie elsewhere."""
    local = ids - start
    return torch.where((local >= 0) & (local < width) & (ids >= 0), local, width)
