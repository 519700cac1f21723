"""What the launches of one call share: its rows, its matrices, its constants."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from logitless import scratch
from logitless.planning import ChunkPlan
from logitless.scratch import ROW_ALIGNMENT_BYTES, TOKEN_TILE, round_up
from logitless.spec import LossOptions
from logitless.torch_impl.call import is_turned
from logitless.torch_impl.kernels.architecture import architecture_of, multiprocessors
from logitless.torch_impl.kernels.launch import cdiv, launch_named
from logitless.torch_impl.kernels.rows import Rows, on_device
from logitless.torch_impl.kernels.tiles import GROUP_BYTES, LOGITS, LOGITS_MORE, WEIGHT, Tiles

with contextlib.suppress(ImportError):  # without triton, fused.unavailable() says so before a kernel is launched
    from logitless.torch_impl.kernels import portable as kernels


# The first product's optional pointers, all absent: lines of partial sums, and the vectors of a call that knows lse.
NO_LINES: Mapping[str, Tensor | None] = dict.fromkeys(
    ("sum_ptr", "gap_ptr", "highest_ptr", "argmax_ptr", "lowest_ptr", "logit_sum_ptr", "squares_ptr")
)
NOT_KNOWN: dict[str, Tensor | None] = dict.fromkeys(
    ("log_total_ptr", "factor_ptr", "target_value_ptr", "alpha_ptr", "gamma_ptr", "delta_ptr", "sigma_ptr")
)


# Columns of a row that held_kernel takes at a time.
HELD_BLOCK = 4096


class KernelCall:
    """Everything that the launches of one call share: its rows, its matrices, its constants."""

    def __init__(
        self, inputs: Rows, options: LossOptions, plan: ChunkPlan, into: Tensor | None = None,
        held: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """``into``: the buffer that dW is added to. ``held``: tensors that a call with the same arguments left behind
        (:func:`held_layout`)."""
        self.inputs, self.options, self.plan = inputs, options, plan
        self.device, self.dtype = inputs.hidden.device, inputs.hidden.dtype
        self.hidden = inputs.hidden if inputs.hidden.stride(-1) == 1 else inputs.hidden.contiguous()
        self.turned = is_turned(inputs.weight)
        plain = self.turned or inputs.weight.stride(-1) == 1
        self.weight = inputs.weight if plain else inputs.weight.contiguous()
        self.bias = None if inputs.bias is None else inputs.bias.contiguous()
        self.class_weight = None if inputs.class_weight is None else inputs.class_weight.contiguous()
        self.tokens, self.size = self.hidden.shape
        self.vocab, self.shard = self.weight.shape[0], inputs.shard
        self.programs = multiprocessors(self.device.index)
        aligned = all(aligned_slices(w, plan.fused_columns) for w in (self.weight, into) if w is not None)
        each = inputs.temperature is not None
        self.architecture = architecture_of(self.dtype, self.device.index, aligned, self.turned, each)
        self.tma = aligned and self.architecture.descriptors
        self.products = self.architecture.products()
        self.block = column_block(self.size, 1024)
        self.chunk = max(1, plan.token_chunk)
        self.scale = float(options.logit_scale)
        self.cap = 1.0 if options.softcap is None else float(options.softcap)
        self.has_cap = options.softcap is not None
        self.precision = self.architecture.precision
        self.order, self.count, self.target = inputs.order, inputs.count, inputs.index
        self.target_weight = None if held is None else held.get("target_weight")
        self.temperature: Tensor | None = None  # by position
        self.gathers = held is None
        if held is not None:
            self.row_target = held["row_target"]
            return
        padded = padded_length(self.tokens, self.chunk)
        self.row_target = self.empty(padded, torch.int32)
        self.anchor = self.empty(padded)
        if inputs.temperature is not None:
            # Rows behind the last token are zeros. Divided by a temperature of 0 they would be NaN.
            self.temperature = self.by_position(inputs.temperature, behind=1.0)

    def on_device(self) -> Any:
        return on_device(self.device)

    def empty(self, *shape: Any) -> Tensor:
        dtype = torch.float32
        if isinstance(shape[-1], torch.dtype):
            *sizes, dtype = shape
            shape = tuple(sizes)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] of the input dtype whose rows start on a boundary."""
        return self.empty(rows, row_stride(columns, self.dtype), self.dtype)[:, :columns]

    def operand(self, lent: Tensor | None = None) -> Tensor:
        """x of a chunk, [C, D]; in ``lent``, a result of at least its size that is written after x was last read."""
        aligned = (self.size * self.dtype.itemsize) % 16 == 0
        if lent is None or not aligned or lent.dtype.itemsize < self.dtype.itemsize:
            return self.matrix(self.chunk, self.size)
        return lent.view(-1).view(self.dtype)[: self.chunk * self.size].view(self.chunk, self.size)

    @functools.cached_property
    def counter(self) -> Tensor:
        """What dW in place counts in, a number for each half of a tile's rows: zeros, once the chunk was gathered."""
        make = torch.empty if self.gathers else torch.zeros
        return make(2 * cdiv(self.vocab, self.tiles(WEIGHT).bm), dtype=torch.int32, device=self.device)

    @functools.cached_property
    def shared(self) -> dict[str, Any]:
        """What the kernels' parameters of these names are in every launch of the call that gives no other."""
        return {
            "hidden_ptr": self.hidden,
            "hidden_stride": self.hidden.stride(0),
            "w_ptr": self.weight,
            "w_stride": self.weight.stride(1 if self.turned else 0),
            "bias_ptr": self.bias,
            "class_weight_ptr": self.class_weight,
            "temperature_ptr": self.temperature,
            "order_ptr": self.order,
            "count_ptr": self.count,
            "tokens": self.tokens,
            "vocab": self.vocab,
            "chunk": self.chunk,
            "size": self.size,
            "scale": self.scale,
            "cap": self.cap,
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.scale != 1.0,
            "HAS_CAP": self.has_cap,
            "HAS_TEMPERATURE": self.temperature is not None,
            "HAS_CLASS": self.class_weight is not None,
            "PROGRAMS": self.programs,
            "PRECISION": self.precision,
            "POINTERS": not self.architecture.descriptors,
            "LENT": False,
            "TURNED": self.turned,
        }

    def launch(self, kernel: Any, grid: int, **own: Any) -> None:
        """Launch a kernel; ``own``: its parameters by name, but for what is in :attr:`shared`."""
        self.launch_on(kernel, (grid,), **own)

    def launch_on(self, kernel: Any, grid: tuple[int, ...], **own: Any) -> None:
        """:meth:`launch` on a grid of several axes."""
        launch_named(kernel, grid, self.shared | own)

    def gather(self, first: int, x: Tensor, **own: Any) -> None:
        """A chunk's hidden states into x, and its targets; its anchors and label smoothing's sums where asked for.

        ``own``: anchor_ptr, highest_ptr, state_ptr, weighted_rows_ptr and weighted_ptr of kernels.rows_kernel.
        """
        if self.turned and "anchor_ptr" in own:
            self._gather_target_weight(first)
        gathered = self.target_weight
        wanted: dict[str, Any] = dict.fromkeys(
            ("anchor_ptr", "highest_ptr", "state_ptr", "weighted_rows_ptr", "weighted_ptr")
        )
        wanted |= own
        self.launch(
            kernels.rows_kernel, self.chunk, **wanted, target_ptr=self.target, x_ptr=x, x_stride=x.stride(0),
            row_target_ptr=self.row_target[first:], first=first, DOTS=wanted["anchor_ptr"] is not None,
            WEIGHTED=wanted["weighted_rows_ptr"] is not None, target_w_ptr=gathered,
            target_w_stride=0 if gathered is None else gathered.stride(0), BLOCK=self.block,
            counter_ptr=self.counter if self.plan.in_place else None,
            counters=self.counter.numel() if self.plan.in_place else 0,
        )  # fmt: skip

    def _gather_target_weight(self, first: int) -> None:
        """The weight's rows of a chunk's targets, which lie scattered if it is turned: anchors and dX read them."""
        if self.target_weight is None:
            self.target_weight = self.matrix(self.chunk, self.size)
        rows, columns = 64, 64
        self.launch(
            kernels.target_weight_kernel, cdiv(self.chunk, rows) * cdiv(self.size, columns), target_ptr=self.target,
            target_w_ptr=self.target_weight, first=first, target_w_stride=self.target_weight.stride(0), BR=rows,
            BC=columns,
        )  # fmt: skip

    def logits(
        self, first: int, x: Tensor, e: Tensor | None, entries: slice, mode: int,
        partial: Mapping[str, Tensor | None] = NO_LINES, known: Mapping[str, Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        """The first product over ``entries`` of the vocabulary, into e: see portable.logits_kernel.

        partial: its pointers to lines of partial sums. known: its pointers to vectors by position, where lse is known.
        """
        vectors = NOT_KNOWN | {"anchor_ptr": self.anchor[first:]}
        if known is not None:
            vectors = {name: None if vector is None else vector[first:] for name, vector in known.items()}
        entropy, sum_logits = partial["gap_ptr"] is not None, partial["logit_sum_ptr"] is not None
        plain = not (entropy or sum_logits or self.has_cap or vectors["alpha_ptr"] is not None)
        plain = plain and vectors["sigma_ptr"] is None
        t = self.tiles(LOGITS if plain else LOGITS_MORE)
        self.launch(
            self.products.logits_kernel, self.programs, **partial, **vectors,
            x_desc=self.describe(x, t.block_rows, t.bk), w_desc=self.describe_weight(entries, (t.bn, t.bk)),
            e_desc=None if e is None else self.describe_matrix(e, t.block_rows, t.block_columns), LENT=is_across(e),
            w_ptr=self.weight[entries],
            **addresses(x=x, e=e), row_target_ptr=self.row_target[first:], first=first, start=entries.start,
            columns=entries.stop - entries.start, MODE=mode, ENTROPY=entropy, SUM_LOGITS=sum_logits,
            STATISTICS=partial["squares_ptr"] is not None, **_present(vectors),
            GROUP=min(64, max(t.group, GROUP_BYTES // (t.bm * self.size * self.dtype.itemsize))),
            **self.products.logits(self, t, plain, known is not None),
        )  # fmt: skip

    def turn_held(self, held: Tensor, known: Mapping[str, Tensor | None]) -> None:
        """The gradient's matrix in place of logits that waited; ``known``: as for :meth:`logits`."""
        self.launch(
            kernels.held_kernel, self.chunk, e_ptr=held, e_stride=held.stride(0), row_target_ptr=self.row_target,
            **known, **_present(known), BLOCK=column_block(self.vocab, HELD_BLOCK), num_warps=8,
        )  # fmt: skip

    def by_position(self, values: Tensor, behind: float = 0.0) -> Tensor:
        """Vectors [..., N] by token as ones by position, ``behind`` after the tokens; each begins on 16 bytes."""
        chosen = values.index_select(-1, self.order[: self.tokens])
        length = self.row_target.shape[0]
        return torch.nn.functional.pad(chosen, (0, round_up(length, 4) - self.tokens), value=behind)[..., :length]

    def tiles(self, kernel: str) -> Tiles:
        return self.architecture.tiles[kernel]

    def describe(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """A matrix as the tensor memory accelerator sees it, in blocks of [rows, columns]; None where pointers do."""
        return self.products.describe(matrix, rows, columns) if self.architecture.descriptors else None

    def describe_matrix(self, matrix: Tensor, rows: int, columns: int) -> object:
        """:meth:`describe` of a matrix, as it lies."""
        across = is_across(matrix)
        return self.describe(matrix.T, columns, rows) if across else self.describe(matrix, rows, columns)

    def describe_weight(self, rows: slice, block: tuple[int, int]) -> object:
        return self.describe_matrix(self.weight[rows], *block) if self.tma else None


def _present(known: Mapping[str, Tensor | None]) -> dict[str, bool]:
    """Which vectors of a call that knows lse there are, by the kernels' names for that."""
    names = ("alpha", "gamma", "delta", "sigma")
    return {f"HAS_{name.upper()}": known[f"{name}_ptr"] is not None for name in names}


def addresses(**matrices: Tensor | None) -> dict[str, Tensor | int | None]:
    """Matrices for kernels that read them by pointers: where each one begins, and how far apart its rows are."""
    found: dict[str, Tensor | int | None] = {f"{name}_ptr": matrix for name, matrix in matrices.items()}
    return found | {f"{name}_stride": 0 if m is None else m.stride(0) for name, m in matrices.items()}


def aligned_rows(weight: Tensor) -> bool:
    """Whether the rows in memory of the weight, or of a dW, and of matrices of its size start on 16 bytes.

    A weight with steps along both axes is copied before it is read."""
    vocab, size = weight.shape
    turned, start = is_turned(weight), weight.data_ptr()
    widths = [size, weight.stride(0)]
    if turned:
        widths = [size, vocab, weight.stride(1)]
    elif weight.stride(1) != 1:
        widths, start = [size], 0
    return all(width * weight.itemsize % 16 == 0 for width in widths) and start % 16 == 0


def aligned_slices(weight: Tensor, entries: int) -> bool:
    """:func:`aligned_rows` of every slice of so many vocabulary entries: those of a turned weight begin within rows."""
    inside = is_turned(weight) and entries < weight.shape[0]
    return aligned_rows(weight) and not (inside and entries * weight.itemsize % 16)


def is_across(matrix: Tensor | None) -> bool:
    """Whether a matrix lies in memory transposed, as e [C, V] does in the rows of a dW [V, D]."""
    return matrix is not None and matrix.stride(1) != 1


def padded_length(tokens: int, chunk: int) -> int:
    """Length of a vector by position: whole chunks, and a tile that a kernel may read beyond them."""
    return (chunk if chunk >= tokens else round_up(tokens, chunk)) + TOKEN_TILE


def row_stride(columns: int, dtype: torch.dtype) -> int:
    return scratch.row_stride(columns, dtype.itemsize)


def flat(memory: Tensor) -> Tensor:
    """All of a matrix without gaps, as it lies."""
    return (memory if memory.is_contiguous() else memory.T).view(-1)


def at_start(memory: Tensor, place: int, rows: int, columns: int) -> Tensor:
    """[rows, columns] in ``memory``, a matrix without gaps, from an element on; rows start on a boundary."""
    stride = row_stride(columns, memory.dtype)
    return flat(memory)[place : place + rows * stride].view(rows, stride)[:, :columns]


def at_end(memory: Tensor, rows: int, columns: int, dtype: torch.dtype, behind: int = 0) -> Tensor:
    """[rows, columns] in the last bytes of ``memory``, a matrix without gaps, from a boundary on; ``behind``: so many
    bytes at the very end are left out."""
    whole, size, boundary = flat(memory).view(dtype), rows * columns, ROW_ALIGNMENT_BYTES // dtype.itemsize
    place = (whole.numel() - behind // dtype.itemsize - size) // boundary * boundary
    return whole[place : place + size].view(rows, columns)


def column_block(size: int, most: int) -> int:
    """Columns of a program that goes along rows of ``size``: a power of two that holds them, 16 to ``most``."""
    columns: int = 1 << (size - 1).bit_length()
    return min(most, max(16, columns))
