"""The chunk plan: how many tokens, or how much of the vocabulary, are worked on at a time, and what that costs.

Pure integers in, a frozen dataclass out; no array library, no device. Both frameworks carry out the same plan.

Two orders (docs/design.md):

``tokens``  chunks of C tokens, the whole vocabulary each. In one pass the C × V exponentials are held, 6·N·D·V flops;
            a dW accumulator [V, D] is needed only when there is more than one chunk and dW's own buffer is not precise
            enough to add in (the kernels keep 24 bits of a sum, and the upper 16 of them there all the same).
``vocab``   first the statistics of all tokens (2·N·D·V), then slices of the vocabulary, 6 more. Holds N × slice; dX is
            accumulated, each slice of dW is finished at once, so nothing of size V × D exists beside the gradient.
            (Where dW can lend its memory, slices are larger: ``lent_slices``.)

The kernel backends hold exponentials in the input dtype and leave the last chunk's products to the backward, so that a
plan of one chunk needs no accumulator at all. There an upstream gradient per token can wait for the same plan: all
tokens' exponentials are held until it arrives (``hold``), 6·N·D·V flops instead of 8.

The cost of a plan, relative to 6·N·D·V flops, counts the extra flops of a second pass and the traffic of the
accumulators that are read and written again with every further chunk:

    tokens:  passes + (chunks − 1) · T / N          passes = 1, or 4/3 when lse must come first
    vocab:   4/3    + (chunks − 1) · T / V          T = tokens whose products take as long as one such read and write

The kernel backends' cost counts the waves of their products' tiles over the multiprocessors instead of bare flops, and
what a chunk's small launches take.

T follows from the machine's balance of arithmetic and bandwidth. The plan chosen is the one with the smallest scratch
among those within 3 % (kernels in one pass: 0.5 %) of the cheapest that fits the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from logitless.spec import FLOAT_DTYPES, ITEMSIZE, check_flags

Order = Literal["tokens", "vocab"]
Device = Literal["cpu", "gpu"]
ORDERS = ("tokens", "vocab")

# Chunks and blocks are multiples of these (but for the last): the tile of the GPU kernels, whole vectors on a CPU.
TOKEN_TILE = 128
VOCAB_TILE = 128

# Rows of a held matrix start on such a boundary, so that an odd vocabulary runs at full speed.
ROW_ALIGNMENT_BYTES = 128

# T of the cost formula. gpu: from one H200, bf16, 16384 × 4096 × 128256 at C = 1024 to 8192 (150 to 163).
# cpu: from a 2-core AVX-512 machine, fp32, 2048 × 512 × 32768 at C = 128 to 1024.
ACCUMULATOR_TOKENS = {"gpu": 150, "cpu": 12}
# T of the kernels, by two chunks of the same shape and six of 32768 × 768 × 128256 (253 and 240): the first chunk's dW
# is a sum of 24 bits instead of its own dtype, too.
FUSED_ACCUMULATOR_TOKENS = 240

# A default plan may cost this much more than the fastest one, if it holds less. The kernels' in one pass is finer: they
# are chosen for speed. (Their values per token, in two passes at 8192 × 4096 × 131072 on an H200, take 1 % longer in
# slices of 280 MiB than in 1156 MiB, where the formula says 2 %.)
COST_SLACK = 1.03
FUSED_COST_SLACK = 1.005

# What the kernels' cost counts in: rows and columns of a product's tile, multiprocessors of an H100 or H200, and what
# the small launches around a chunk of tokens and around a slice of the vocabulary take, in flops (60 and 6 µs at 680
# TFLOP/s; measured on an H200).
KERNEL_TILE = (128, 256)
MULTIPROCESSORS = 132
# Tiles of dX are split where less than this share of its turns would be used.
FULL_TURNS = 0.93
SPLIT_OVERHEAD_TURNS = 0.1
CHUNK_OVERHEAD_FLOPS = 4e10
SLICE_OVERHEAD_FLOPS = 4e9

# The Pallas kernels work on matrices whose sizes are multiples of these.
PADDED_HIDDEN, PADDED_VOCAB = 64, 8

# Rows of the lower bits of a dW that several chunks add up to start on such a boundary (bytes, of one element each).
LOW_ROW_ALIGNMENT = 16

# In the tokens order, elementwise work and casts go through the vocabulary in blocks of this many columns.
TOKENS_ORDER_BLOCK = 2048

# The rows w[y] of the anchors' dot products are gathered for this many tokens at a time.
ANCHOR_ROWS = 512

# The kernels' partial sums: entries of the vocabulary that one of them covers, and how many kinds there are at most.
# (Pallas' tiles of 192 columns have one kind only, so that this covers them.)
LINE_COLUMNS = {"bfloat16": 256, "float16": 256, "float32": 64, "float64": 64}
PARTIAL_SUMS = 6

# Rows of the weight that are summed at a time for label smoothing with class weights.
SMOOTHING_BLOCK = 256

# Vectors of length N (8 bytes each) that live through a call: ids, anchors, sums, losses, factors, statistics.
ROW_VECTORS = 24
# Vectors of length V: class weights and bias in the accumulation dtype, the bias gradient, a block's column numbers.
VOCAB_VECTORS = 4


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """How a call is cut. Made by :func:`plan`, carried out by ``linear_cross_entropy(plan=...)`` of both frameworks."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    order: Order
    one_pass: bool
    """True: exponentials of a whole chunk are held and both gradients follow at once. False: lse is known first.
    (Beside an upstream gradient per token a plan of the kernels in one chunk can be True: then that chunk waits.)"""
    token_chunk: int
    """Tokens worked on at a time (all of them in the vocab order)."""
    vocab_chunk: int
    """Vocabulary entries worked on at a time (in the tokens order: the block of portable elementwise work)."""
    fused: bool = False
    """Whether ``scratch_bytes`` is that of the kernel backends ("triton", "pallas") or of the portable ones."""

    padded: bool = False
    """Whether ``scratch_bytes`` counts whole tiles, and padded copies where V % 8 or D % 64 is not 0 ("pallas")."""

    eager: bool = False
    """Whether ``scratch_bytes`` is that of PyTorch's own operations ("eager"). Else a portable plan's is XLA's, which
    may hold several blocks at once; it is more, so that it holds in both frameworks."""

    @property
    def chunks(self) -> int:
        """Number of chunks along the order's own axis."""
        return len(self.token_slices) if self.order == "tokens" else len(self.vocab_slices)

    @property
    def holds_all(self) -> bool:
        """Whether the exponentials of all tokens are held at once: one pass, one chunk."""
        return self.one_pass and 0 < self.tokens <= self.token_chunk

    @property
    def token_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every token chunk."""
        return _slices(self.tokens, self.token_chunk)

    @property
    def vocab_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every vocabulary block."""
        return _slices(self.vocab, self.vocab_chunk)

    def lent_slices(self, row_bytes: int) -> tuple[tuple[int, int, bool], ...]:
        """(start, stop, lent) of the kernels' slices where dW, of ``row_bytes`` a row, lends its memory (0: none).

        In the vocab order a slice's rows of dW are written once, after its products. Until then the matrix of an
        earlier slice may lie in them, so that about N : D shares the rows that are left between matrix and slice. Such
        slices are larger than the plan's own, which follow when little is left. Their sizes fill whole turns of the
        kernels' programs. In the tokens order there is one, the whole vocabulary, and nothing is lent.
        """
        made: list[tuple[int, int, bool]] = []
        start = 0
        while start < self.vocab:
            columns = self._lent_columns(self.vocab - start, row_bytes)
            lent = columns > self.fused_columns
            stop = min(self.vocab, start + (columns if lent else self.fused_columns))
            made.append((start, stop, lent))
            start = stop
        return tuple(made)

    def _lent_columns(self, rows: int, row_bytes: int) -> int:
        """Columns of the largest matrix that fits into the last of ``rows`` rows of dW, behind as many rows."""
        column_bytes = self.token_chunk * ITEMSIZE[self.dtype]
        tiles = max(0, rows * row_bytes - ROW_ALIGNMENT_BYTES) // (column_bytes + row_bytes) // KERNEL_TILE[1]
        row_tiles = math.ceil(self.token_chunk / KERNEL_TILE[0])
        whole = row_tiles * tiles // MULTIPROCESSORS * MULTIPROCESSORS // row_tiles
        return (whole or tiles) * KERNEL_TILE[1]

    @property
    def accumulation_itemsize(self) -> int:
        """Bytes of an element of logits, sums and accumulators: 8 for float64, else 4 (float32)."""
        return max(4, ITEMSIZE[self.dtype])

    @property
    def row_stride(self) -> int:
        """Elements from one row of the held exponentials to the next: their width, rounded up to 128 bytes."""
        width = self.vocab if self.order == "tokens" and self.one_pass else self.vocab_chunk
        return round_up(width, ROW_ALIGNMENT_BYTES // self.accumulation_itemsize)

    @property
    def low_precision(self) -> bool:
        """Whether the dtype is narrower than what is accumulated in."""
        return ITEMSIZE[self.dtype] < self.accumulation_itemsize

    @property
    def weight_accumulator(self) -> bool:
        """Whether dW needs a buffer in the accumulation dtype beside the gradient.

        Several token chunks add up in it; and gradients made in the forward wait in it for the upstream scalar, so that
        they are rounded once, with the scalar, in the last cast. (Then dX waits in the accumulation dtype as well.)
        """
        return self.low_precision and (self.one_pass or len(self.token_slices) > 1)

    @property
    def flops(self) -> int:
        """Flops of the matrix products, forward and all gradients: 6·N·D·V in one pass, 8·N·D·V otherwise."""
        return (6 if self.one_pass else 8) * self.tokens * self.hidden * self.vocab

    @property
    def scratch_bytes(self) -> int:
        """A promise: bytes beyond inputs and gradients that are live at any time, forward and backward, any option."""
        if self.fused:
            return self._padded_scratch_bytes if self.padded else self._fused_scratch_bytes
        return self._eager_scratch_bytes if self.eager else self._portable_scratch_bytes

    @property
    def fused_columns(self) -> int:
        """Vocabulary entries in a block of the kernel backends' matrix."""
        return self.vocab if self.order == "tokens" else self.vocab_chunk

    @property
    def splits_hidden(self) -> bool:
        """Whether the kernels split tiles of dX along the vocabulary: the last turn of the programs would be idle."""
        if self.padded:  # the Pallas kernels never do
            return False
        tiles = self._hidden_tiles(min(self.token_chunk, self.tokens))
        return ITEMSIZE[self.dtype] < 4 and tiles < FULL_TURNS * MULTIPROCESSORS * math.ceil(tiles / MULTIPROCESSORS)

    def _hidden_tiles(self, rows: int) -> int:
        return math.ceil(rows / KERNEL_TILE[0]) * math.ceil(self.hidden / KERNEL_TILE[1])

    @property
    def _fused_scratch_bytes(self) -> int:
        item = ITEMSIZE[self.dtype]
        rows = self.token_chunk
        matrix = rows * round_up(self.fused_columns, ROW_ALIGNMENT_BYTES // item) * item
        operand = rows * round_up(self.hidden, ROW_ALIGNMENT_BYTES // item) * item
        # Sums, and statistics, of every column tile of the first product.
        lines = PARTIAL_SUMS * math.ceil(self.vocab / LINE_COLUMNS[self.dtype]) * self.token_chunk * 4
        smoothing = 3 * SMOOTHING_BLOCK * self.hidden * 4
        vectors = 4 * (2 * ROW_VECTORS * self.tokens + 16 * rows + VOCAB_VECTORS * self.vocab + 16 * self.hidden)
        sums = 0
        if self.token_chunk < self.tokens:
            # Of dW's sum the lower 8 bits; the upper 16 lie where dW will be.
            sums += self.vocab * round_up(self.hidden, LOW_ROW_ALIGNMENT) if item < 4 else 0
            sums += self.tokens * self.hidden * 4 if self.one_pass else 0
        if self.fused_columns < self.vocab:
            sums += self.tokens * self.hidden * 4
        if self.splits_hidden:
            vectors += MULTIPROCESSORS * KERNEL_TILE[0] * KERNEL_TILE[1] * 4
        if self.one_pass:
            return matrix + operand + lines + sums + smoothing + vectors
        # Where lse is known and there is one chunk of tokens, dX's own buffer holds the operand until dX is written.
        lent = self.token_chunk >= self.tokens and self.hidden * item % 16 == 0
        backward = matrix + (max(sums, operand) if lent else sums + operand)
        return max(operand + lines + smoothing, backward) + vectors

    @property
    def _padded_scratch_bytes(self) -> int:
        """As ``_fused_scratch_bytes``, in whole tiles, with copies of what is no multiple of them."""
        item = ITEMSIZE[self.dtype]
        rows, size = round_up(self.token_chunk, KERNEL_TILE[0]), round_up(self.hidden, KERNEL_TILE[1])
        hidden, vocab = round_up(self.hidden, PADDED_HIDDEN), round_up(self.vocab, PADDED_VOCAB)
        copies = 0
        if (hidden, vocab) != (self.hidden, self.vocab):
            copies += 2 * vocab * hidden * item  # the weight, and its gradient before it is cut
        if hidden != self.hidden:
            copies += 2 * self.tokens * hidden * item
        matrix = round_up(self.token_chunk, 8) * round_up(self.fused_columns, ROW_ALIGNMENT_BYTES // item) * item
        operand = rows * size * item
        lines = PARTIAL_SUMS * math.ceil(self.vocab / LINE_COLUMNS[self.dtype]) * rows * 4
        vectors = 4 * (2 * ROW_VECTORS * (self.tokens + rows) + 16 * rows + VOCAB_VECTORS * vocab + 16 * size)
        # Sums down a matrix's columns (the bias gradient, label smoothing) go by way of about √rows partial sums.
        vectors += 4 * (math.isqrt(self.token_chunk) + 1) * self.fused_columns + 8 * (math.isqrt(vocab) + 1) * size
        positions = self.tokens + self.token_chunk  # whole chunks, each begun at a multiple of 8
        sums = 0
        if self.token_chunk < self.tokens:
            sums += vocab * hidden if item < 4 else 0
            sums += positions * hidden * (4 if self.one_pass else item)  # dX in the order of the positions
        if self.fused_columns < self.vocab:
            sums += self.tokens * hidden * 4
        if self.one_pass:
            return copies + matrix + operand + lines + sums + vectors
        # While slices of the vocabulary are worked on the operand lies where dX will be, if it has dX's shape. (On
        # several devices it does not; there Shard.scratch_bytes counts dX's float32 share beside, which follows.)
        lent = self.fused_columns < self.vocab and self.tokens % 8 == 0 and hidden == self.hidden
        return copies + max(operand + lines, matrix + (max(sums, operand) if lent else sums + operand)) + vectors

    @property
    def _eager_scratch_bytes(self) -> int:
        item, low = self.accumulation_itemsize, self.low_precision
        several = self.token_chunk < self.tokens
        row, narrow = self.hidden * item, self.hidden * ITEMSIZE[self.dtype] if low else 0
        block = self.token_chunk * self.vocab_chunk * item
        upcast = self.vocab_chunk * row if low else 0  # the weight's block, where operands are converted
        # dX and dW in the accumulation dtype. While blocks are worked on, the gradients' own buffers are not there yet.
        sums = self.vocab * row if self.weight_accumulator else 0
        sums += self.tokens * row if self.one_pass and low else 0
        early = sums - sums * ITEMSIZE[self.dtype] // item
        # Of a chunk's tokens x, x times its factors, and dX before it is rounded. The next chunk begins beside them.
        rows = self.token_chunk * row
        kept = rows * (3 if low and not self.one_pass else 2)
        begun = (kept if several else 0) + self.token_chunk * (row + narrow)
        gathered = (1 + several) * rows + min(self.token_chunk, ANCHOR_ROWS) * (row + narrow)  # w[y]
        if self.one_pass:
            held = self.token_chunk * self.row_stride * item
            # First the softcap's slope and an elementwise temporary; then the weight's block.
            work = max((1 + several) * rows + 2 * block, kept + max(block * 3 // 2, upcast))
        else:
            held = block
            rounded = 0 if self.weight_accumulator else upcast  # a block of dW before it is rounded
            # The softcap's slope and the entropy's coefficient; then the weight's blocks.
            work = kept + max(2 * block, upcast + rounded)
        vectors = 8 * (ROW_VECTORS * self.tokens + VOCAB_VECTORS * self.vocab + 4 * self.hidden)
        return max(sums, early + held + max(work, begun, gathered)) + vectors

    @property
    def _portable_scratch_bytes(self) -> int:
        item = self.accumulation_itemsize
        held = self.token_chunk * self.row_stride * item if self.one_pass else 0
        # A block's logits and two elementwise temporaries, a ragged last block's, and one where operands are converted.
        block = (5 if self.low_precision else 4) * self.token_chunk * self.vocab_chunk * item
        weight_block = 2 * self.vocab_chunk * self.hidden * item  # the weight's block upcast, its gradient's product
        token_rows = (3 if self.low_precision else 2) * self.token_chunk * self.hidden * item  # x, scaled x, dX if low
        anchor_rows = 2 * min(self.token_chunk, ANCHOR_ROWS) * self.hidden * item  # w[y] and its product with x
        vectors = 8 * (ROW_VECTORS * self.tokens + VOCAB_VECTORS * self.vocab + 4 * self.hidden)
        accumulator = self.vocab * self.hidden * item if self.weight_accumulator else 0
        if self.one_pass and self.low_precision:
            accumulator += self.tokens * self.hidden * item
        return held + block + weight_block + token_rows + anchor_rows + vectors + accumulator

    def _fused_cost(self, accumulator_tokens: int) -> float:
        """Tiles of the kernels in whole waves over the multiprocessors, times the depth of each product."""

        def waves(rows: int, columns: int) -> int:
            tiles = math.ceil(rows / KERNEL_TILE[0]) * math.ceil(columns / KERNEL_TILE[1])
            return math.ceil(tiles / MULTIPROCESSORS)

        def block(rows: int, columns: int) -> float:
            first = waves(rows, columns) * self.hidden
            turns: float = waves(rows, self.hidden)
            if self.splits_hidden:
                turns = self._hidden_tiles(rows) / MULTIPROCESSORS + SPLIT_OVERHEAD_TURNS
            return first + turns * columns + waves(columns, self.hidden) * rows

        if not self.tokens:
            return 1.0
        if self.order == "tokens":
            blocks = sum(block(size, self.vocab) for size in self._chunk_sizes)
        else:
            blocks = sum(block(self.tokens, size) for size in self._chunk_sizes)
        if not self.one_pass:
            blocks += waves(self.tokens, self.vocab) * self.hidden
        length = self.tokens if self.order == "tokens" else self.vocab
        flops = 6 * self.tokens * self.hidden * self.vocab
        ideal = flops / (2 * KERNEL_TILE[0] * KERNEL_TILE[1] * MULTIPROCESSORS)
        cost = blocks / ideal + (self.chunks - 1) * accumulator_tokens / length
        passes, slices = (self.chunks, 0) if self.order == "tokens" else (1, self.chunks)
        return cost + (passes * CHUNK_OVERHEAD_FLOPS + slices * SLICE_OVERHEAD_FLOPS) / flops

    @property
    def _chunk_sizes(self) -> list[int]:
        slices = self.token_slices if self.order == "tokens" else self.vocab_slices
        return [stop - start for start, stop in slices]

    @property
    def full_logits_bytes(self) -> int:
        """For comparison: logits and their gradient held whole in the accumulation dtype."""
        return 2 * self.tokens * self.vocab * self.accumulation_itemsize

    def relative_cost(self, device: Device) -> float:
        """Modelled time relative to 6·N·D·V flops (the formula is in the module's docstring)."""
        if self.fused:
            return self._fused_cost(FUSED_ACCUMULATOR_TOKENS)
        passes = 1.0 if self.one_pass else 4.0 / 3.0
        length = self.tokens if self.order == "tokens" else self.vocab
        return passes + max(0, self.chunks - 1) * ACCUMULATOR_TOKENS[device] / max(1, length)


def plan(
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: str,
    memory_budget: int | None = None,
    order: Order | None = None,
    chunk: int | None = None,
    one_pass: bool = True,
    device: Device = "gpu",
    fused: bool = False,
    padded: bool = False,
    hold: bool = False,
    eager: bool = False,
) -> ChunkPlan:
    """Choose how to cut a linear cross-entropy call.

    Arguments:
        tokens, hidden, vocab: N, D and V.
        dtype: of hidden and weight: "bfloat16", "float16", "float32" or "float64".
        memory_budget: bytes of scratch that ``scratch_bytes`` must not exceed; None: the smallest scratch that stays
            within 3 % (``fused`` in one pass: 0.5 %) of the fastest plan, by the cost formula of this module.
        order: "tokens", "vocab", or None for whichever costs less within the budget.
        chunk: tokens (or, in the vocab order, vocabulary entries) in a chunk, taken as it is; needs ``order``.
        one_pass: False when the upstream gradient arrives per token, after the forward (reduction="none", log-probs).
        device: "gpu" or "cpu": whose balance of arithmetic and bandwidth the cost formula assumes.
        fused: whether the scratch is that of the kernel backends ("triton", "pallas"; float16 always knows lse first
            there) or of the portable ones.
        padded: with ``fused``, whether the scratch is that of "pallas", which works on whole tiles, and on copies where
            V % 8 or D % 64 is not 0.
        hold: with ``fused`` and one_pass=False, whether the plan may be one chunk in one pass all the same: N × V
            exponentials in the input dtype are held from the forward until the upstream gradients arrive. (The calls
            allow it where a memory_budget is given and only losses or log-probabilities are differentiated.)
        eager: whether the scratch is that of PyTorch's "eager", which is less than XLA's.

    Returns a frozen :class:`ChunkPlan`. Raises ValueError or TypeError for a bad argument; a budget that no plan fits
    is a ValueError that names the smallest scratch there is.
    """
    _check_sizes(tokens, hidden, vocab, memory_budget, chunk)
    check_flags(one_pass=one_pass, fused=fused, padded=padded, hold=hold, eager=eager)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, allowed are {', '.join(FLOAT_DTYPES)}")
    if order is not None and order not in ORDERS:
        raise ValueError(f"order: got {order!r}, allowed are None, 'tokens', 'vocab'")
    if device not in ACCUMULATOR_TOKENS:
        raise ValueError(f"device: got {device!r}, allowed are 'gpu', 'cpu'")
    if chunk is not None and order is None:
        raise ValueError(f"order: got None beside chunk={chunk}, allowed are 'tokens', 'vocab': chunk counts along it")
    if fused and dtype == "float64":
        raise ValueError("fused: got True beside dtype='float64', allowed is False: the kernels have no float64")
    if fused and eager:
        raise ValueError("eager: got True beside fused=True, allowed is False: a backend is one of the two")
    held = fused and dtype != "float16" and tokens > 0
    one_pass = one_pass and not (fused and dtype == "float16")
    return _plan(
        int(tokens), int(hidden), int(vocab), dtype, memory_budget, order, chunk, one_pass, device,
        fused, fused and padded, hold and held and not one_pass, eager,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _plan(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: str,
    memory_budget: int | None,
    order: Order | None,
    chunk: int | None,
    one_pass: bool,
    device: Device,
    fused: bool,
    padded: bool,
    hold: bool,
    eager: bool,
) -> ChunkPlan:
    candidates: list[ChunkPlan] = []
    backend: dict[str, bool] = {"fused": fused, "padded": padded, "eager": eager}
    if order in (None, "tokens"):
        sizes = [chunk] if chunk else _balanced_sizes(tokens, TOKEN_TILE)
        if fused and not chunk:
            sizes = _with_whole_turns(sizes, tokens)
        block = min(vocab, TOKENS_ORDER_BLOCK)
        candidates += [
            ChunkPlan(tokens, hidden, vocab, dtype, "tokens", one_pass, min(size, max(1, tokens)), block, **backend)
            for size in sizes
        ]
        if hold and (chunk is None or chunk >= tokens):
            candidates.append(ChunkPlan(tokens, hidden, vocab, dtype, "tokens", True, tokens, block, **backend))
    if order in (None, "vocab"):
        sizes = [chunk] if chunk else _balanced_sizes(vocab, VOCAB_TILE)
        candidates += [
            ChunkPlan(tokens, hidden, vocab, dtype, "vocab", False, max(1, tokens), min(size, vocab), **backend)
            for size in sizes
        ]
    if memory_budget is not None:
        smallest = min(candidate.scratch_bytes for candidate in candidates)
        candidates = [candidate for candidate in candidates if candidate.scratch_bytes <= memory_budget]
        if not candidates:
            raise ValueError(
                f"memory_budget: got {memory_budget} bytes, allowed for tokens={tokens}, hidden={hidden}, "
                f"vocab={vocab}, dtype={dtype} is at least {smallest}"
            )
        return min(candidates, key=lambda candidate: (candidate.relative_cost(device), candidate.scratch_bytes))
    limit = default_slack(fused, one_pass) * min(candidate.relative_cost(device) for candidate in candidates)
    return min(
        (candidate for candidate in candidates if candidate.relative_cost(device) <= limit),
        key=lambda candidate: candidate.scratch_bytes,
    )


def default_slack(fused: bool, one_pass: bool) -> float:
    """How much more than the fastest plan a default plan may cost, if it holds less."""
    return FUSED_COST_SLACK if fused and one_pass else COST_SLACK


def check_plan_argument(given: object, memory_budget: int | None) -> None:
    """Raise TypeError unless ``given`` is a plan or None, ValueError when a budget is given beside a plan."""
    if given is None:
        return
    if not isinstance(given, ChunkPlan):
        raise TypeError(f"plan: got {type(given).__name__}, allowed is a ChunkPlan from logitless.plan(...) or None")
    if memory_budget is not None:
        raise ValueError("memory_budget: got a value beside a plan, allowed is one of the two: the plan has its budget")


def check_plan_sizes(given: ChunkPlan, tokens: int, hidden: int, vocab: int, dtype: str) -> None:
    """Raise ValueError unless ``given`` was made for these sizes."""
    made = (given.tokens, given.hidden, given.vocab, given.dtype)
    if made != (tokens, hidden, vocab, dtype):
        raise ValueError(
            f"plan: got one for (tokens, hidden, vocab, dtype) = {made}, "
            f"allowed is one for this call's {(tokens, hidden, vocab, dtype)}"
        )


def check_memory_budget(memory_budget: object) -> None:
    """Raise TypeError or ValueError unless ``memory_budget`` is None or an integer of at least 1."""
    if memory_budget is not None:
        _check_integer("memory_budget", memory_budget, 1)


def _check_sizes(tokens: int, hidden: int, vocab: int, memory_budget: int | None, chunk: int | None) -> None:
    for name, value, low in (("tokens", tokens, 0), ("hidden", hidden, 1), ("vocab", vocab, 1)):
        _check_integer(name, value, low)
    check_memory_budget(memory_budget)
    if chunk is not None:
        _check_integer("chunk", chunk, 1)


def _check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__} {value!r}, allowed is an integer")
    if value < low:
        raise ValueError(f"{name}: got {value}, allowed is at least {low}")


def _slices(length: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + size, length)) for start in range(0, length, size))


def _balanced_sizes(length: int, tile: int) -> list[int]:
    """Every chunk size that cuts ``length`` into equal chunks rounded up to ``tile``: no runt but by that rounding."""
    if length <= tile:
        return [max(1, length)]
    tiles = math.ceil(length / tile)
    counts = range(1, tiles + 1) if tiles <= 4096 else _spread_counts(tiles)
    return sorted({min(length, round_up(math.ceil(length / count), tile)) for count in counts})


def _with_whole_turns(sizes: list[int], length: int) -> list[int]:
    """Beside equal chunks also larger ones, and a smaller last one, whose tiles fill the multiprocessors better."""
    rounded = (round_up(size, TOKEN_TILE * more) for size in sizes for more in (2, 4, 8, 16))
    return sorted({*sizes, *(size for size in rounded if size < length)})


def _spread_counts(tiles: int) -> list[int]:
    # Above 4096 tiles the sizes lie so close that a geometric ladder (1 % steps) loses nothing.
    steps = math.ceil(math.log(tiles) / math.log(1.01))
    return sorted({min(tiles, round(1.01**step)) for step in range(steps + 1)} | {tiles})
