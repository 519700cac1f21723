"""The target-anchored chunk by Triton kernels: the same verbs as torch_impl/eager.py.

Its mirror: jax_impl/kernels/fused.py.

A loss's gradients in one pass are made in two steps: the forward writes a chunk's exponentials and, for every chunk but
the last, its products; the last chunk's products wait for the upstream scalar, so that dW is rounded once, with it, in
the epilogue of its last product. A plan with a single chunk needs no accumulator for that at all.

Rounding: logits, exponentials and sums are float32. What is stored of a chunk is rounded to the input dtype on its way
into the products, which accumulate in float32; what that rounding left out of the target's element, and of its share of
dW, is added in float32, before dW is rounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from logitless import numerics, spec
from logitless.planning import ChunkPlan
from logitless.scratch import LOW_ROW_ALIGNMENT, ROW_ALIGNMENT_BYTES, SMOOTHING_BLOCK, TOKEN_TILE, round_up
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import XP, Arrays, Gradients, Inputs, KnownRows, Layout, Needs, TokenSums
from logitless.torch_impl.chunk import Smoothing
from logitless.torch_impl.distributed import parallel
from logitless.torch_impl.distributed.parallel import Shard
from logitless.torch_impl.kernels.architecture import (
    GROUP_BYTES,
    HIDDEN,
    HIDDEN_SUM,
    LOGITS,
    WEIGHT,
    WEIGHT_SUM,
    Tiles,
    WeightKind,
    architecture_of,
    multiprocessors,
    precision,
)
from logitless.torch_impl.kernels.launch import launch
from logitless.torch_impl.kernels.rehearsal import run_step as run_step

try:
    import triton

    from logitless.torch_impl.kernels import portable as kernels
except ImportError:  # a CPU-only install; unavailable() says so before anything here is called
    triton = None

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run there, or None."""
    if triton is None:
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"its kernels take bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return None if interpreted() and device.type == "cpu" else spec.needs_cuda(device.type)
    if torch.version.hip is not None:
        return spec.needs_hopper("an AMD GPU")
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == 9 else spec.needs_hopper(f"{major}.{minor}")


# Places of the sorted targets that one program may sum.
TARGET_RUN = 32
# Tokens up to which targets are sorted by counting, in one launch: 28 µs for so many, where torch.sort takes 50; for
# twice as many 99 and 53.
MOST_RANKED = 8192


def _on_device(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------------------------------
# What is known of the tokens before the first product, and the losses after it, in few launches

# Tokens of a program, and of a turn of the programs that go through all of them alone.
TOKEN_BLOCK, TURN_BLOCK = 1024, 4096


@dataclasses.dataclass(frozen=True)
class Rows(Inputs):
    """A call's arrays, and its tokens in the forms that the kernels read."""

    index: Tensor  # [N] int32 target, −1 for an id outside the vocabulary, −2 for one that another rank has
    key: Tensor  # [N] int32 target, V for an ignored token, an id outside the vocabulary, and one of another rank
    order: Tensor  # [N] int32: the valid tokens, then the ignored ones
    count: Tensor  # [1] int32: how many are valid
    relative: Tensor  # [N] token_weight over the largest of them
    summary: Tensor  # [2]: 1 / Σ t k_y (1 for a sum), and logit_scale times the largest token weight
    class_index: Tensor  # [N] int64: where class_table has k_y
    class_table: Tensor | None


def prepare(arrays: Arrays, options: LossOptions, dtype: torch.dtype, shard: Shard | None = None) -> Rows:
    """:func:`chunk.prepare`, and the tokens' order."""
    hidden, weight, bias, target, token_weight, class_weight = arrays
    tokens, vocab, device = target.numel(), weight.shape[0], hidden.device
    flat = target.reshape(-1)
    wide, whole, flag = (torch.empty(tokens, dtype=d, device=device) for d in (torch.int64, torch.int32, torch.bool))
    inside, key = torch.empty_like(flag), torch.empty_like(whole)
    order, count = (torch.empty(n, dtype=torch.int32, device=device) for n in (max(1, tokens), 1))
    weights, relative, summary = (torch.empty(n, device=device) for n in (tokens, tokens, 2))
    class_weight = None if class_weight is None else class_weight.float().contiguous()
    shard, shared = shard or parallel.whole(vocab), None
    target, class_index, class_table = wide, wide, class_weight
    with _on_device(device):
        if tokens:
            launch(kernels.prepare_kernel, triton.cdiv(tokens, TOKEN_BLOCK))(
                flat, None if token_weight is None else token_weight.reshape(-1), wide, flag.view(torch.int8),
                inside.view(torch.int8), weights, whole, key, tokens, shard.vocab, shard.start, vocab,
                options.ignore_index, HAS_WEIGHT=token_weight is not None, BLOCK=TOKEN_BLOCK,
            )  # fmt: skip
        if shard.split:
            target = shard.local_ids(wide, vocab)
            shared = chunk.shared_classes(shard, class_weight, target)
            if shared is not None:
                class_index, class_table = torch.arange(tokens, device=device), shared
        launch(kernels.compact_kernel, 1)(
            flag.view(torch.int8), weights, class_index, class_table, order, count, relative, summary, tokens,
            float(options.logit_scale), MEAN=options.reduction == "mean", HAS_CLASS=class_weight is not None,
            BLOCK=TURN_BLOCK if tokens > TOKEN_BLOCK else TOKEN_BLOCK, num_warps=16,
        )  # fmt: skip
    return Rows(
        hidden=hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype), ids=wide, target=target, valid=flag, inside=inside,
        token_weight=weights, class_weight=class_weight, shard=shard, shared_classes=shared, index=whole, key=key,
        order=order, count=count, relative=relative, summary=summary, class_index=class_index, class_table=class_table,
    )  # fmt: skip


def normalizer(inputs: Rows, options: LossOptions, given: Tensor | float | None) -> Tensor:
    """:func:`chunk.normalizer`."""
    if options.reduction == "mean" and given is not None:
        return chunk.normalizer(inputs, options, given)
    return inputs.summary[0]


def losses(inputs: Rows, options: LossOptions, sums: TokenSums) -> Tensor:
    """:func:`chunk.losses`."""
    out = torch.empty_like(sums.log_total)
    if out.numel():
        _launch_losses(inputs, options, sums, None, out)
    return out


def total_loss(inputs: Rows, options: LossOptions, sums: TokenSums, norm: Tensor) -> Tensor:
    """:func:`chunk.total_loss`, summed in a fixed order."""
    out = torch.empty((), device=norm.device)
    _launch_losses(inputs, options, sums, norm, out)
    return out


def _launch_losses(inputs: Rows, options: LossOptions, sums: TokenSums, norm: Tensor | None, out: Tensor) -> None:
    tokens, vocab = sums.log_total.shape[0], inputs.vocab
    several = norm is not None and tokens > TOKEN_BLOCK
    smooth = options.label_smoothing > 0
    class_sum = inputs.class_weight_sum() if smooth and inputs.class_weight is not None else None
    with _on_device(out.device):
        launch(kernels.loss_kernel, 1 if norm is not None else triton.cdiv(tokens, TOKEN_BLOCK))(
            sums.target_logit, sums.anchor, sums.log_total, sums.weighted_logits, inputs.valid.view(torch.int8),
            inputs.token_weight, inputs.class_index, inputs.class_table, class_sum, norm, out, tokens, vocab,
            1.0 - options.label_smoothing, float(options.z_loss), options.label_smoothing / vocab,
            HAS_CLASS=inputs.class_weight is not None, SMOOTHING=smooth, HAS_Z=options.z_loss != 0,
            SUM=norm is not None, BLOCK=TURN_BLOCK if several else TOKEN_BLOCK, num_warps=32,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# A call's rows and matrices


class KernelCall:
    """Everything that the launches of one call share: its rows, its matrices, its constants."""

    def __init__(
        self, inputs: Rows, options: LossOptions, plan: ChunkPlan, held: dict[str, Tensor] | None = None
    ) -> None:
        """``held``: tensors that a call with the same arguments left behind (:func:`held_layout`)."""
        self.inputs, self.options, self.plan = inputs, options, plan
        self.device, self.dtype = inputs.hidden.device, inputs.hidden.dtype
        self.hidden = inputs.hidden if inputs.hidden.stride(-1) == 1 else inputs.hidden.contiguous()
        self.weight = inputs.weight if inputs.weight.stride(-1) == 1 else inputs.weight.contiguous()
        self.bias = None if inputs.bias is None else inputs.bias.contiguous()
        self.class_weight = None if inputs.class_weight is None else inputs.class_weight.contiguous()
        self.tokens, self.size = self.hidden.shape
        self.vocab, self.shard = self.weight.shape[0], inputs.shard
        self.programs = multiprocessors(self.device.index)
        item = self.dtype.itemsize
        self.tma = (self.weight.stride(0) * item) % 16 == 0 and (self.size * item) % 16 == 0
        self.tma = self.tma and self.weight.data_ptr() % 16 == 0
        self.architecture = architecture_of(self.dtype, self.device.index, self.tma)
        self.products = self.architecture.products()
        self.block = column_block(self.size, 1024)
        self.chunk = max(1, plan.token_chunk)
        self.scale = float(options.logit_scale)
        self.cap = 1.0 if options.softcap is None else float(options.softcap)
        self.has_cap = options.softcap is not None
        self.precision = precision(self.dtype)
        self.logit = {"HAS_BIAS": self.bias is not None, "HAS_SCALE": self.scale != 1.0, "HAS_CAP": self.has_cap}
        self.order, self.count, self.target = inputs.order, inputs.count, inputs.index
        if held is not None:
            self.row_target = held["row_target"]
            return
        padded = _padded(self.tokens, self.chunk)
        self.row_target = self.empty(padded, torch.int32)
        self.anchor = self.empty(padded)

    def on_device(self) -> Any:
        return _on_device(self.device)

    def empty(self, *shape: Any) -> Tensor:
        dtype = torch.float32
        if isinstance(shape[-1], torch.dtype):
            *sizes, dtype = shape
            shape = tuple(sizes)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] of the input dtype whose rows start on a boundary."""
        return self.empty(rows, _row_stride(columns, self.dtype), self.dtype)[:, :columns]

    def operand(self, lent: Tensor | None = None) -> Tensor:
        """x of a chunk, [C, D]; in ``lent``, a result of at least its size that is written after x was last read."""
        aligned = (self.size * self.dtype.itemsize) % 16 == 0
        if lent is None or not aligned or lent.dtype.itemsize < self.dtype.itemsize:
            return self.matrix(self.chunk, self.size)
        return lent.view(-1).view(self.dtype)[: self.chunk * self.size].view(self.chunk, self.size)

    def gather(
        self, first: int, x: Tensor, anchor: Tensor | None = None, highest: Tensor | None = None,
        flagged: Tensor | None = None, weighted_rows: Tensor | None = None, weighted: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A chunk's hidden states into x, and its targets; its anchors and label smoothing's sums where asked for."""
        launch(kernels.rows_kernel, self.chunk)(
            self.hidden, self.weight, self.bias, self.target, self.order, self.count, weighted_rows, x,
            self.row_target[first:], anchor, highest, weighted, flagged,
            first, self.chunk, self.hidden.stride(0), self.weight.stride(0), x.stride(0), self.size, self.scale,
            self.cap, DOTS=anchor is not None, WEIGHTED=weighted_rows is not None, BLOCK=self.block, **self.logit,
        )  # fmt: skip

    def by_position(self, values: Tensor) -> Tensor:
        """A vector by token as one by position, 0 behind the tokens."""
        chosen = values.index_select(0, self.order[: self.tokens])
        return torch.nn.functional.pad(chosen, (0, self.row_target.shape[0] - self.tokens))

    def tiles(self, kernel: str) -> Tiles:
        return self.architecture.tiles[kernel]

    def describe(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """A matrix as the tensor memory accelerator sees it, in blocks of [rows, columns]."""
        return self.products.describe(matrix, rows, columns)

    def describe_weight(self, rows: slice, block: tuple[int, int]) -> Any:
        return self.describe(self.weight[rows], *block) if self.tma else None


def _padded(tokens: int, chunk: int) -> int:
    """Length of a vector by position: whole chunks, and a tile that a kernel may read beyond them."""
    return (chunk if chunk >= tokens else round_up(tokens, chunk)) + TOKEN_TILE


def _row_stride(columns: int, dtype: torch.dtype) -> int:
    return round_up(columns, ROW_ALIGNMENT_BYTES // dtype.itemsize)


def _at_end(memory: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in the last bytes of ``memory``, from a boundary on."""
    flat, size, boundary = memory.view(-1).view(dtype), rows * columns, ROW_ALIGNMENT_BYTES // dtype.itemsize
    place = (flat.numel() - size) // boundary * boundary
    return flat[place : place + size].view(rows, columns)


def _sorted(c: KernelCall) -> tuple[Tensor, Tensor]:
    """The tokens' keys in order, and the tokens in that order, those of one key in their own."""
    if c.tokens > MOST_RANKED:
        return torch.sort(c.inputs.key, stable=True)
    key, token = c.empty(c.tokens, torch.int32), c.empty(c.tokens, torch.int32)
    launch(kernels.sort_kernel, triton.cdiv(c.tokens, 16))(c.inputs.key, key, token, c.tokens, BI=16, BJ=512)
    return key, token


def column_block(size: int, most: int) -> int:
    """Columns of a program that goes along rows of ``size``: a power of two that holds them, 16 to ``most``."""
    columns: int = triton.next_power_of_2(size)
    return min(most, max(16, columns))


class _Sums:
    """The forward's sums per token, and the lines of partial sums that they are made from."""

    def __init__(self, call: KernelCall, statistics: bool) -> None:
        o = call.options
        self.call, self.statistics = call, statistics
        self.sum_logits = o.label_smoothing > 0 and not o.separable
        self.tile = call.tiles(LOGITS)
        self.lines = triton.cdiv(call.vocab, self.tile.bn)
        self.smoothing = Smoothing.prepare(call.inputs, o, SMOOTHING_BLOCK)

        def line(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return call.empty(self.lines, call.chunk, dtype) if wanted else None

        self.partial = line(True)
        self.partial_gap, self.partial_highest, self.partial_lowest = (line(statistics) for _ in range(3))
        self.partial_argmax = line(statistics, torch.int32)
        self.partial_logits = line(self.sum_logits)
        self.highest, self.list = call.empty(call.chunk), call.empty(call.chunk, torch.int32)
        self.flagged = call.empty(1, torch.int32)

        def vector(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.zeros(call.tokens, dtype=dtype, device=call.device) if wanted else None

        self.target_logit, self.out_anchor, self.log_total = vector(), vector(), vector()
        self.weighted = vector(o.label_smoothing > 0)
        self.entropy, self.max_logit, self.min_logit = (vector(statistics) for _ in range(3))
        self.argmax = vector(statistics, torch.int32)

    def gather(self, first: int, x: Tensor) -> None:
        """The chunk's hidden states into x, its anchors, and label smoothing's share of the loss."""
        c, s = self.call, self.smoothing
        c.gather(first, x, c.anchor[first:], self.highest, self.flagged, s.weighted_rows if s else None, self.weighted)
        c.shard.sum(c.anchor[first : first + c.chunk])

    def product(self, first: int, x: Tensor, e: Tensor | None) -> None:
        """The first product: partial sums and, if ``e`` is given, the exponentials."""
        c, t = self.call, self.tile
        launch_logits(
            c, t, first, x, e, slice(0, c.vocab), mode=0 if e is None else 1, statistics=self.statistics,
            sum_logits=self.sum_logits,
            partial=(self.partial, self.partial_gap, self.partial_highest, self.partial_argmax, self.partial_lowest,
                     self.partial_logits),
        )  # fmt: skip

    def finish(self, first: int, x: Tensor, e: Tensor | None, factors: _Factors | None) -> None:
        """Sums to results; rows whose exponents grew too large once more, anchored at their maximum."""
        split = self.call.shard.split
        record = self.call.empty(parallel.RECORD_FIELDS, self.call.chunk) if split else None
        own = None if split else factors
        self._finish(first, e, own, flagged=False, record=record)
        self._rescue(first, x, e, maximum=True)
        self._rescue(first, x, e, maximum=False)
        self._finish(first, e, own, flagged=True, record=record)
        if record is not None:
            self._finish(first, e, factors, flagged=False, lines=self._exchange(record))

    def _exchange(self, record: Tensor) -> parallel.Lines:
        """The records of all ranks; ``record`` [7, C] is this one's."""
        statistics, names = self.statistics, [field.name for field in dataclasses.fields(parallel.Record)]
        fields = dict(zip(names, record, strict=True))
        fields["argmax"] = record[names.index("argmax")].view(torch.int32) + self.call.shard.start
        wanted = {"anchor", "s", *(names[2:6] if statistics else ()), *(("logit_sum",) if self.sum_logits else ())}
        mine = parallel.Record(**{name: value for name, value in fields.items() if name in wanted})
        return parallel.exchange(self.call.shard, mine)

    def _finish(
        self, first: int, e: Tensor | None, factors: _Factors | None, flagged: bool, record: Tensor | None = None,
        lines: parallel.Lines | None = None,
    ) -> None:  # fmt: skip
        c, o, f = self.call, self.call.options, factors
        read: Any = (
            self.partial, self.partial_gap, self.partial_highest, self.partial_argmax, self.partial_lowest,
            self.partial_logits,
        )  # fmt: skip
        if lines is not None:
            parts = lines.s, lines.gap_sum, lines.highest, lines.argmax, lines.lowest, lines.logit_sum
            read = [None if part is None else part.contiguous() for part in parts]
        launch(kernels.finish_kernel, 8 if flagged else triton.cdiv(c.chunk, 16))(
            *read, c.order, c.count, c.anchor[first:], self.highest if lines is None else lines.anchor, self.list,
            self.flagged, f.g if f else None, f.class_weight if f else None, f.smooth if f else None,
            None if lines is None else lines.share.contiguous(), c.row_target[first:], record,
            self.target_logit, self.out_anchor, self.log_total, self.weighted, self.entropy, self.argmax,
            self.max_logit, self.min_logit, f.factor[first:] if f else None, f.target_rest[first:] if f else None,
            f.token_factor if f else None, f.token_value if f else None, f.token_stored if f else None, e, first,
            c.chunk, self.lines if lines is None else c.shard.ranks, 0 if e is None else e.stride(0),
            1.0 - o.label_smoothing, o.z_loss, c.cap,
            FLAGGED=flagged, STATISTICS=self.statistics, SUM_LOGITS=self.sum_logits, FACTORS=f is not None,
            HAS_CAP=c.has_cap, HAS_CLASS=f is not None and f.class_weight is not None,
            SMOOTH=f is not None and f.smooth is not None, RECORD=record is not None, SHARED=lines is not None,
            STORE=f is not None, BR=16, BL=128,
        )  # fmt: skip

    def _rescue(self, first: int, x: Tensor, e: Tensor | None, maximum: bool) -> None:
        c = self.call
        launch(kernels.rescue_kernel, c.programs)(
            x, c.weight, c.bias, c.row_target[first:], self.list, self.flagged, self.highest, e, self.partial,
            self.partial_gap, c.chunk, c.size, x.stride(0), c.weight.stride(0), 0 if e is None else e.stride(0),
            c.vocab, c.scale, c.cap,
            MAXIMUM=maximum, STORE=e is not None, STATISTICS=self.statistics, BM=16,
            BN=self.tile.bn, BK=32, PROGRAMS=c.programs, PRECISION=c.precision, num_warps=8, **c.logit,
        )  # fmt: skip

    def result(self) -> TokenSums:
        weighted = self.weighted
        if weighted is not None and self.smoothing is not None:
            weighted = weighted + self.smoothing.weighted_bias * self.call.options.logit_scale
        target_logit: Any = self.target_logit
        return TokenSums(
            target_logit, self.out_anchor, self.log_total, weighted, self.entropy,
            self.argmax, self.max_logit, self.min_logit,
        )  # fmt: skip


def launch_logits(
    c: KernelCall, t: Tiles, first: int, x: Tensor, e: Tensor | None, entries: slice, *, mode: int,
    statistics: bool = False, sum_logits: bool = False, partial: tuple[Tensor | None, ...] = (None,) * 6,
    known: _KnownVectors | None = None,
) -> None:  # fmt: skip
    """The first product over ``entries`` of the vocabulary: see kernels.logits_kernel."""
    k = known
    part: Any = (lambda v: None if v is None else v[first:]) if known else None
    vectors = [part(v) for v in (k.log_total, k.factor, k.target, k.alpha, k.gamma, k.sigma)] if k else [None] * 6
    group = min(64, max(t.group, GROUP_BYTES // (t.bm * c.size * c.dtype.itemsize)))
    plain = not (statistics or sum_logits or c.has_cap or vectors[3] is not None or vectors[5] is not None)
    constants = c.products.logits(c, t, plain, known is not None) | c.logit
    launch(c.products.logits_kernel, c.programs)(
        c.describe(x, t.block_rows, t.bk), c.describe_weight(entries, (t.bn, t.bk)),
        None if e is None else c.describe(e, t.block_rows, t.block_columns), c.weight[entries], c.bias, c.class_weight,
        c.row_target[first:], part(k.anchor) if k else c.anchor[first:], c.count, *partial, *vectors,
        first, c.chunk, c.size, c.weight.stride(0), entries.start, entries.stop - entries.start, c.scale, c.cap,
        MODE=mode, STATISTICS=statistics, SUM_LOGITS=sum_logits, HAS_CLASS=c.class_weight is not None,
        HAS_ALPHA=vectors[3] is not None, HAS_GAMMA=vectors[4] is not None, HAS_SIGMA=vectors[5] is not None,
        GROUP=group, PROGRAMS=c.programs, **constants,
    )  # fmt: skip


def token_sums(inputs: Rows, options: LossOptions, plan: ChunkPlan, statistics: bool) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, and no C × V matrix."""
    c = KernelCall(inputs, options, plan)
    sums = _Sums(c, statistics)
    with c.on_device():
        x = c.operand()
        for first, _ in plan.token_slices:
            sums.gather(first, x)
            sums.product(first, x, None)
            sums.finish(first, x, None, None)
    return sums.result()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@dataclasses.dataclass(frozen=True)
class _Factors:
    """What turns sums into row factors, and the factors themselves, by position. g is relative to ``unit``."""

    g: Tensor  # [N] by token
    class_weight: Tensor | None  # k_y, [N] by token
    smooth: Tensor | None  # (ε/V) K
    factor: Tensor  # u
    target_rest: Tensor  # of u T, what e's element leaves out
    token_factor: Tensor  # u, by token
    token_value: Tensor  # u T, by token
    token_stored: Tensor  # T as e has it, by token

    def times(self, by_token: Tensor, by_position: Tensor) -> _Factors:
        """For upstream gradients that many times as large."""
        return dataclasses.replace(
            self, g=self.g * by_token, factor=self.factor * by_position, target_rest=self.target_rest * by_position,
            token_factor=self.token_factor * by_token, token_value=self.token_value * by_token,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _KnownVectors:
    """:class:`KnownRows` by position, factor and target relative to the unit."""

    anchor: Tensor
    log_total: Tensor
    factor: Tensor
    target: Tensor
    alpha: Tensor | None
    gamma: Tensor | None
    sigma: Tensor | None


def _is_parted(needs: Needs, several: bool) -> bool:
    """Of a dW in 16 bits, several chunks' sum has 24 bits: the upper 16 where dW will be, the next 8 in a matrix."""
    return several and needs.weight is not None and needs.into is None and needs.weight.itemsize == 2


def _low_layout(vocab: int, size: int) -> tuple[tuple[int, int], torch.dtype]:
    """Of that matrix of 8 bits; its rows are kernels.low_stride apart."""
    return (vocab, round_up(size, LOW_ROW_ALIGNMENT)), torch.int8


class _Products:
    """dX, dW and db of a call, chunk by chunk and slice by slice."""

    def __init__(self, c: KernelCall, needs: Needs, smoothing: Smoothing | None, g: Tensor, unit: Tensor) -> None:
        self.call, self.needs, self.smoothing, self.g, self.unit = c, needs, smoothing, g, unit
        self.hidden_sum: Tensor | None = None
        self.weight_sum: Tensor | None = None
        self.parted = _is_parted(needs, c.tokens > c.chunk)
        self.high: Tensor | None = None
        self.low: Tensor | None = None
        self.parts: Tensor | None = None
        self.is_target: Tensor | None = None  # [V]: whether dW's row holds what its targets' elements lack
        # Under sequence parallelism dX is what comes back from the sum over the ranks.
        self.hidden = self._new(c.tokens, None if c.shard.sequence_parallel else needs.hidden)
        self.weight = self._new(c.vocab, needs.weight) if needs.into is None else needs.into
        self.works: list[Any] = []  # sums of dX over the ranks that are under way
        self.bias = torch.zeros(c.vocab, device=c.device) if needs.bias else None
        self.smooth_rows = None if smoothing is None else g * -smoothing.factor
        self.smooth_x = torch.zeros(c.size, device=c.device) if smoothing is not None else None

    def _new(self, rows: int, dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else self.call.empty(rows, self.call.size, dtype)

    @property
    def starts_from_targets(self) -> bool:
        """Whether dW's rows hold what the targets' elements lack before the only product, which adds and rounds it."""
        rounds = self.weight is not None and self.weight.itemsize == 2 and self.needs.into is None
        return rounds and self.call.chunk >= self.call.tokens

    @property
    def lent(self) -> Tensor | None:
        """dW, where until its rows are written they may hold something else."""
        wide = self.weight is not None and self.weight.itemsize >= self.call.dtype.itemsize
        return self.weight if wide and self.needs.into is None else None

    def blocks(self, e: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the vocabulary, each with its matrix: of e, or larger, in rows of dW that are written later."""
        c, dw = self.call, self.lent
        for start, stop, lent in c.plan.lent_slices(0 if dw is None else c.size * dw.itemsize):
            block = e[:, : stop - start]
            if lent:
                assert dw is not None
                block = _at_end(dw, c.chunk, stop - start, c.dtype)
            yield slice(start, stop), block

    def add_smooth_x(self, first: int, x: Tensor) -> None:
        """Σ_i g_i x_i of the chunk, from x as it came."""
        if self.smooth_x is not None:
            self._column_sums(x, self.g, first, self.smooth_x, by_token=True)

    def scale_operand(self, first: int, x: Tensor, factors: _Factors) -> None:
        """u ⊙ x of the chunk, for dW."""
        c = self.call
        if self.needs.weight:
            launch(kernels.scale_rows_kernel, c.chunk)(
                x, factors.factor[first:], c.count, first, c.chunk, x.stride(0), c.size, BLOCK=c.block
            )

    def _column_sums(self, matrix: Tensor, factor: Tensor | None, first: int, out: Tensor, by_token: bool) -> None:
        c = self.call
        launch(kernels.column_sums_kernel, triton.cdiv(matrix.shape[1], 256))(
            matrix, factor, c.order, c.count, out, first, c.chunk, matrix.stride(0), matrix.shape[1],
            BY_TOKEN=by_token, HAS_FACTOR=factor is not None, BR=16, BC=256, STAGES=4, num_warps=4,
        )  # fmt: skip

    def add(
        self, first: int, x: Tensor, e: Tensor, entries: slice, factors: _Factors | None, scale: Tensor | None
    ) -> None:
        """The products of a block e over ``entries``; scale: this is the last block of a result, and what it lacks."""
        c = self.call
        if self.bias is not None:
            factor = None if factors is None else factors.factor[first:]
            self._column_sums(e, factor, first, self.bias[entries], by_token=False)
        if self.needs.hidden and c.shard.split and c.tokens:  # on its way to the others while dW is made
            self._hidden(first, e, entries, factors, None)
            if entries.stop == c.vocab:
                self._start_sum(first)
        # dW first: x may lie where dX will be.
        if self.needs.weight:
            last = scale is not None and (first + c.chunk >= c.tokens or self.needs.into is not None)
            self._weight(first, x, e, entries, scale if last else None)
        if self.needs.hidden and not c.shard.split:
            last = scale is not None and entries.stop == c.vocab
            self._hidden(first, e, entries, factors, scale if last else None)

    def _start_sum(self, first: int) -> None:
        """Begin the sum over the ranks of a chunk's dX; under sequence parallelism of all of it, after the last one."""
        c = self.call
        assert self.hidden_sum is not None
        if not c.shard.sequence_parallel:
            self.works.append(c.shard.start_sum(self.hidden_sum[first : first + c.chunk]))
        elif first + c.chunk >= c.tokens:
            by_token, one = torch.empty_like(self.hidden_sum), torch.ones((), device=c.device)
            self._finish_hidden(by_token, one, c.tokens, smooth=False)
            self.hidden, work = c.shard.start_scatter(by_token)
            self.works.append(work)

    def _hidden(self, first: int, e: Tensor, entries: slice, factors: _Factors | None, scale: Tensor | None) -> None:
        c, s, t = self.call, self.smoothing, self.call.tiles(HIDDEN if scale is not None else HIDDEN_SUM)
        if scale is None and self.hidden_sum is None:
            self.hidden_sum = c.empty(c.tokens, c.size)
        own = c.products.hidden(c, t, None if scale is not None else self.hidden_sum, self.parts, s is not None)
        self.parts = own.parts
        results = (
            self.hidden_sum, self.hidden, factors.factor[first:] if factors else None,
            factors.target_rest[first:] if factors else None, c.row_target[first:], c.order, c.count, scale,
            self.smooth_rows, s.weighted_rows if s else None, first, c.chunk, entries.stop - entries.start, c.size,
            c.weight.stride(0), c.weight,
        )  # fmt: skip
        kinds = {"ADD": entries.start > 0, "FINAL": scale is not None, "ROWS": factors is not None}
        kinds |= {"SMOOTH": s is not None, "GROUP": own.group, "PROGRAMS": c.programs}
        launch(c.products.hidden_kernel, c.programs)(
            c.describe(e, t.block_rows, t.bk), c.describe_weight(entries, (t.bk, t.bn)), c.weight[entries], *results,
            *own.arguments, **kinds, **own.constants,
        )  # fmt: skip
        if own.parts is not None:
            rows = 32
            launch(kernels.combine_hidden_kernel, c.programs * t.bm // rows)(
                own.parts, *results, **t.sizes, SLICE=rows, **kinds, num_warps=8
            )

    def _weight(self, first: int, x: Tensor, e: Tensor, entries: slice, scale: Tensor | None) -> None:
        c, into, final = self.call, self.needs.into is not None, scale is not None
        smooth = self.smoothing is not None and not (into and first + c.chunk < c.tokens)
        out: Any = self.weight if final else self._weight_accumulator()
        parted = self.parted and (first > 0 or not final)
        t = c.tiles(WEIGHT_SUM if out.dtype in (torch.float32, torch.int16) else WEIGHT)
        targets = self.is_target is not None
        reads = targets or (first > 0 if not into else out.dtype != torch.float32)
        kind = WeightKind(final, parted, reads, smooth)
        aligned = (c.size * out.element_size()) % 16 == 0
        own = c.products.weight(c, t, kind, self.low, aligned)
        launch(c.products.weight_kernel, c.programs)(
            c.describe(e, t.bk, t.block_rows), c.describe(x, t.bk, t.bn),
            out if into else self.high if parted else self.weight_sum, self.low if parted else None, own.low,
            c.describe(out[entries], t.block_rows, t.block_columns) if own.by_descriptor else None, out, c.count, scale,
            c.class_weight, self.smooth_x_scaled if final and smooth else None,
            self.is_target, first, c.chunk, entries.start, entries.stop - entries.start, c.size,
            ADD=first > 0 or into, FINAL=final, INTO=into, PARTED=parted, SMOOTH=smooth,
            HAS_CLASS=c.class_weight is not None, TARGETS=targets, GROUP=t.group, PROGRAMS=c.programs, **own.constants,
        )  # fmt: skip

    def _weight_accumulator(self) -> Tensor:
        """What a chunk's dW is added to that is not the last: the upper 16 bits of the sum, or all of it."""
        c, weight = self.call, self.weight
        if self.parted:
            if self.low is None and weight is not None:
                shape, dtype = _low_layout(c.vocab, c.size)
                self.high, self.low = weight.view(torch.int16), c.empty(*shape, dtype)
            assert self.high is not None
            return self.high
        if self.weight_sum is None:  # a float32 result is its own accumulator
            whole = weight is not None and weight.dtype == torch.float32
            self.weight_sum = weight if whole else c.empty(c.vocab, c.size)
        assert self.weight_sum is not None
        return self.weight_sum

    @functools.cached_property
    def smooth_x_scaled(self) -> Tensor | None:
        if self.smoothing is None or self.smooth_x is None:
            return None
        return self.smooth_x * self.smoothing.factor

    def add_targets(self, factors: _Factors, scale: Tensor | None) -> None:
        """Add what the products lack of the targets' elements of dW and db.

        Without ``scale`` it goes into the sum of several chunks. With it, it goes into dW: into the finished one, or
        into the rows that the only product will add.
        """
        c = self.call
        first = scale is not None and self.starts_from_targets
        out = self.weight if scale is not None else self.high if self.parted else self.weight_sum
        if (out is None and self.bias is None) or not c.tokens:
            return
        if first:
            self.is_target = torch.zeros(c.vocab, dtype=torch.int8, device=c.device)
        low = self.low if scale is None else None
        key, token = _sorted(c)  # what is not in the vocabulary comes last
        block = column_block(c.size, 4096)
        blocks, columns = triton.cdiv(c.tokens, TARGET_RUN), 1
        part = share = c.empty(2 * blocks)
        if out is not None:
            part, columns = c.empty(2 * blocks, c.size), triton.cdiv(c.size, block)
        options: dict[str, int] = {"WEIGHT": out is not None, "BIAS": self.bias is not None}
        options |= {"SCALED": scale is not None, "PARTED": low is not None, "FIRST": first}
        options |= {"RUN": TARGET_RUN, "BC": block, "num_warps": 8 if block > 1024 else 4}
        launch(kernels.add_targets_kernel, c.tokens, columns)(
            key, token, factors.token_factor, factors.token_value, factors.token_stored, c.hidden, scale, out, low,
            self.is_target, self.bias, part, share, c.tokens, c.vocab, c.hidden.stride(0), c.size, BR=4, **options,
        )  # fmt: skip
        launch(kernels.add_long_runs_kernel, blocks, columns)(
            key, scale, out, low, self.is_target, self.bias, part, share, c.tokens, c.vocab, c.size, **options
        )

    def _finish_hidden(self, out: Tensor, scale: Tensor, done_from: int, smooth: bool) -> None:
        c, s = self.call, self.smoothing
        launch(kernels.finish_hidden_kernel, c.tokens)(
            scale if self.hidden_sum is None else self.hidden_sum, out, c.order, c.count, scale, self.smooth_rows,
            s.weighted_rows if s else None, done_from, c.size, SMOOTH=smooth, BLOCK=c.block,
        )  # fmt: skip

    def finish(self, scale: Tensor, done_from: int) -> Gradients:
        """Rows of dX that still lack the scale (positions before ``done_from``), zero rows, and the bias."""
        c, s = self.call, self.smoothing
        for work in self.works:
            if work is not None:
                work.wait()
        if self.hidden is not None and c.tokens:
            if c.shard.split and c.shard.sequence_parallel:
                if s is not None:
                    assert self.smooth_rows is not None
                    self.hidden.addr_(self.smooth_rows[c.shard.tokens_of(c.tokens)], s.weighted_rows)
                self.hidden.mul_(scale)
            else:
                done_from = c.tokens if c.shard.split else done_from
                self._finish_hidden(self.hidden, scale, done_from, smooth=s is not None)
        bias = self.bias
        if bias is not None:
            if s is not None:
                share = s.factor * self.g.sum()
                k = c.class_weight
                bias = bias - (share if k is None else share * k)
            bias = bias * scale
        return Gradients(self.hidden, self.weight if self.needs.into is None else None, bias)


# What is left of a loss's gradients when the upstream scalar arrives are products, that TMA writes to a buffer.
PRODUCTS_WAIT = True
BUFFER_ALIGNMENT = 16


def held_layout(
    tokens: int, arrays: Arrays, options: LossOptions, dtype: torch.dtype, token_chunk: int, needs: Needs
) -> Layout:
    """Shape and dtype of everything in :class:`Held` that its end reads, by name; no array's values, nor a plan's
    other numbers, matter. ``tokens`` and ``token_chunk`` may be symbols, as long as their order is known."""
    (vocab, size), cast = arrays.weight.shape, arrays.weight.dtype != dtype
    chunk, full, whole = max(1, token_chunk), torch.float32, torch.int32
    padded, several = _padded(tokens, chunk), tokens > chunk
    layout: Layout = {
        "row_target": ((padded,), whole),
        "unit": ((), full),
        "g": ((tokens,), full),
        "factor": ((padded,), full),
        "target_rest": ((padded,), full),
        "token_factor": ((tokens,), full),
        "token_value": ((tokens,), full),
        "token_stored": ((tokens,), full),
        "x": ((chunk, _row_stride(size, dtype)), dtype),
        "e": ((chunk, _row_stride(vocab, dtype)), dtype),
    }
    if cast and needs.hidden:
        layout["weight"] = ((vocab, size), dtype)
    if options.label_smoothing:
        layout |= {"weighted_rows": ((size,), full), "weighted_bias": ((), full), "smooth_x": ((size,), full)}
    if several and needs.hidden:
        layout["hidden_sum"] = ((tokens, size), full)
    if _is_parted(needs, several):
        layout |= {"high": ((vocab, size), torch.int16), "low": _low_layout(vocab, size)}
    elif several and needs.weight:
        layout["weight_sum"] = ((vocab, size), full)
    if several and needs.bias:
        layout["bias"] = ((vocab,), full)
    return layout


class Held:
    """Gradients made in the forward, waiting for the upstream scalar: the last chunk's exponentials, and sums."""

    def __init__(self, products: _Products, factors: _Factors, first: int, x: Tensor, e: Tensor) -> None:
        self.products, self.factors, self.first, self.x, self.e = products, factors, first, x, e

    def finish(self, upstream: Tensor) -> Gradients:
        """dX, dW and db with the upstream scalar; may be called once."""
        p, c = self.products, self.products.call
        scale = p.unit * upstream
        single = c.chunk >= c.tokens  # of several chunks the sum has them
        with c.on_device():
            if single and p.starts_from_targets:
                p.add_targets(self.factors, scale)
            p.add(self.first, self.x, self.e, slice(0, c.vocab), self.factors, scale)
            if single and not p.starts_from_targets:
                p.add_targets(self.factors, scale)
            return p.finish(scale, self.first)

    def tensors(self, layout: dict[str, Any]) -> list[Tensor]:
        """The tensors of :func:`held_layout`, in its order; no two share memory."""
        p, c, f, s = self.products, self.products.call, self.factors, self.products.smoothing
        every: dict[str, Any] = {
            "row_target": c.row_target, "unit": p.unit, "g": p.g,
            "factor": f.factor, "target_rest": f.target_rest, "token_factor": f.token_factor,
            "token_value": f.token_value, "token_stored": f.token_stored, "x": _whole_rows(self.x),
            "e": _whole_rows(self.e), "weight": c.weight, "smooth_x": p.smooth_x, "hidden_sum": p.hidden_sum,
            "weight_sum": p.weight_sum, "high": p.high, "low": p.low, "bias": p.bias,
        }  # fmt: skip
        if s is not None:
            every |= {"weighted_rows": s.weighted_rows, "weighted_bias": s.weighted_bias}
        return [every[name] for name in layout]


def _whole_rows(matrix: Tensor) -> Tensor:
    """A matrix of :meth:`KernelCall.matrix` with the padding of its rows."""
    stride = matrix.stride(0)
    return matrix.as_strided((matrix.shape[0], stride), (stride, 1))


def held_gradients(
    make_inputs: Callable[[Tensor | None], Rows], arrays: Arrays, options: LossOptions, dtype: torch.dtype,
    plan: ChunkPlan, needs: Needs, tensors: list[Tensor], upstream: Tensor,
) -> Gradients:  # fmt: skip
    """What :meth:`Held.finish` gives, from ``Held.tensors``, none of which is written to."""
    layout = held_layout(plan.tokens, arrays, options, dtype, plan.token_chunk, needs)
    held = dict(zip(layout, tensors, strict=True))
    c = KernelCall(make_inputs(held.get("weight")), options, plan, held)
    smoothing = None
    if options.label_smoothing:
        smoothing = Smoothing(options.label_smoothing / c.shard.vocab, held["weighted_rows"], held["weighted_bias"])
    products = _Products(c, needs, smoothing, held["g"], held["unit"])
    # A float32 dW is its own accumulator where the forward may keep it; here it is read beside the finished one.
    products.hidden_sum, products.weight_sum = held.get("hidden_sum"), held.get("weight_sum")
    products.high, products.low = held.get("high"), held.get("low")
    products.smooth_x = held.get("smooth_x")
    if "bias" in held:
        products.bias = held["bias"].clone()
    names = ("factor", "target_rest", "token_factor", "token_value", "token_stored")
    factors = _Factors(held["g"], None, None, *(held[name] for name in names))
    first = plan.token_slices[-1][0] if plan.token_slices else 0
    return Held(products, factors, first, held["x"][:, : c.size], held["e"][:, : c.vocab]).finish(upstream)


def one_pass(dtype: torch.dtype, options: LossOptions) -> bool:
    """Whether exponentials relative to the target can be held in ``dtype``: float16's range ends at 11 nats."""
    del options
    return dtype != torch.float16


def holds(dtype: torch.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token."""
    return dtype != torch.float16


def loss_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, norm: Tensor, needs: Needs, statistics: bool
) -> tuple[TokenSums, Held]:
    """Sums, and gradients that wait for the upstream scalar: 6·N·D·V flops. See :func:`eager.loss_gradients`."""
    c = KernelCall(inputs, options, plan)
    sums = _Sums(c, statistics)
    factors = _relative_factors(c)
    products = _Products(c, needs, sums.smoothing, factors.g, norm * inputs.summary[1])
    with c.on_device():
        x, e = c.operand(), c.matrix(c.chunk, c.vocab)
        slices = plan.token_slices or ((0, 0),)
        for first, last in slices:
            sums.gather(first, x)
            sums.product(first, x, e)
            sums.finish(first, x, e, factors)
            products.add_smooth_x(first, x)
            products.scale_operand(first, x, factors)
            if last < c.tokens:
                products.add(first, x, e, slice(0, c.vocab), factors, None)
        result = sums.result()
        del sums  # its partial sums make room
        if c.chunk < c.tokens:
            products.add_targets(factors, None)
    return result, Held(products, factors, slices[-1][0], x, e)


def _relative_factors(c: KernelCall) -> _Factors:
    """Row factors to be made, relative to logit_scale times the largest token weight."""
    inputs, smooth = c.inputs, None
    if c.options.label_smoothing:
        share = c.options.label_smoothing / inputs.vocab * inputs.class_weight_sum()
        smooth = share if isinstance(share, Tensor) else torch.full((), share, device=c.device)  # no copy from the host
    padded = c.row_target.shape[0]
    k = inputs.token_class_weight()
    by_token = (c.empty(c.tokens) for _ in range(3))
    return _Factors(inputs.relative, k, smooth, c.empty(padded), c.empty(padded), *by_token)


class HeldTokens:
    """A single chunk's exponentials, made in the forward, waiting for an upstream gradient per token."""

    def __init__(
        self, call: KernelCall, needs: Needs, smoothing: Smoothing | None, factors: _Factors, x: Tensor, e: Tensor
    ):
        """factors: for the upstream gradient 1."""
        self.call, self.needs, self.smoothing, self.factors, self.x, self.e = call, needs, smoothing, factors, x, e

    def finish(self, upstream: Tensor) -> Gradients:
        """dX, dW and db with upstream gradients [...] by token, or one for all; may be called once."""
        c, f = self.call, self.factors
        g = torch.where(c.inputs.valid, upstream.reshape(-1), 0.0)
        unit = numerics.largest_factor(XP, g)
        g = g / unit
        factors = f.times(g, c.by_position(g))
        products = _Products(c, self.needs, self.smoothing, factors.g, unit * c.inputs.summary[1])
        with c.on_device():
            products.add_smooth_x(0, self.x)
            products.scale_operand(0, self.x, factors)
        return Held(products, factors, 0, self.x, self.e).finish(torch.ones((), device=c.device))


def token_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, needs: Needs, statistics: bool
) -> tuple[TokenSums, HeldTokens]:
    """Sums, and exponentials that wait for an upstream gradient per token: 6·N·D·V flops, in a plan of one chunk."""
    c = KernelCall(inputs, options, plan)
    sums, factors = _Sums(c, statistics), _relative_factors(c)
    with c.on_device():
        x, e = c.operand(), c.matrix(c.chunk, c.vocab)
        sums.gather(0, x)
        sums.product(0, x, e)
        sums.finish(0, x, e, factors)
    return sums.result(), HeldTokens(c, needs, sums.smoothing, factors, x, e)


def known_gradients(
    inputs: Rows, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Tensor, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, either order of the plan. See :func:`eager.known_gradients`."""
    c = KernelCall(inputs, options, plan)
    unit = known.unit(XP)
    smoothing = Smoothing.prepare(inputs, options, SMOOTHING_BLOCK)
    products = _Products(c, needs, smoothing, g / unit, unit)
    tile = c.tiles(LOGITS)
    with c.on_device():
        vectors = _by_position(c, known, unit)
        lent = products.hidden if len(plan.token_slices) == 1 and not c.shard.split else None
        x, e = c.operand(lent), c.matrix(c.chunk, plan.fused_columns)
        for first, _ in plan.token_slices:
            c.gather(first, x)
            products.add_smooth_x(first, x)
            for entries, block in products.blocks(e):
                launch_logits(c, tile, first, x, block, entries, mode=2, known=vectors)
                products.add(first, x, block, entries, None, unit)
        if not plan.token_slices and products.weight is not None and needs.into is None:
            products.weight.zero_()
        return products.finish(unit, 0)


def _by_position(c: KernelCall, known: KnownRows, unit: Tensor) -> _KnownVectors:
    """Vectors by token to vectors by position. The target's element lacks its factor there, and has it here."""

    factor = known.factor / unit
    made: list[Any] = [
        None if v is None else c.by_position(v)
        for v in (known.anchor, known.log_total, factor, factor * known.target, known.alpha, known.gamma, known.sigma)
    ]
    return _KnownVectors(*made)
