"""How a call is cut into chunks, and the scratch that each kind of backend promises for it.

A promise counts every byte beyond inputs and gradients that is live at any time, forward and backward, for any option.
tests/test_memory.py checks that the backends keep it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Self

from logitless.hardware import HOPPER
from logitless.spec import ITEMSIZE

Order = Literal["tokens", "vocab", "both"]
Tile = tuple[int, int]
Kind = Literal["triton", "pallas", "eager", "xla"]

# Chunks and blocks, except the last, are multiples of these: the GPU kernels' tile, and whole vectors on a CPU.
TOKEN_TILE = 128
VOCAB_TILE = 128

# In the tokens order, plain operations go through the vocabulary in blocks of this many columns. XLA on a GPU has all
# of it in one block: there it fuses what is done to the logits, and wider products are faster.
TOKENS_ORDER_BLOCK = 2048

# Rows of a held matrix start on such a boundary, so that an odd vocabulary runs at full speed.
ROW_ALIGNMENT_BYTES = 128

# The Pallas kernels work on matrices whose sizes are multiples of these: 64 along rows, 8 along columns of a weight. A
# turned weight's rows go along the vocabulary.
PADDED_HIDDEN, PADDED_VOCAB = 64, 8

# If several chunks add up to dW, the rows of its lower bits (one byte per element, or half) start on such a boundary.
LOW_ROW_ALIGNMENT = 16
# A sum over at most so many chunks may have 20 bits. Each chunk rounds it to 1/16 of what bfloat16 keeps: the error of
# dW's own rounding becomes 1.03 times as large with 16 chunks, 1.06 with 32 and 1.12 with 64.
MOST_NARROW_CHUNKS = 32

# The rows w[y] of the anchors' dot products are gathered for this many tokens at a time.
ANCHOR_ROWS = 512

# Label smoothing with class weights sums this many rows of the weight at a time.
SMOOTHING_BLOCK = 256

# The kernels' partial sums: how many entries of the vocabulary one covers, and how many kinds there are at most.
# (Pallas has tiles of 192 columns too, but then one kind only, so this is enough.)
_LINE_COLUMNS = {"bfloat16": 256, "float16": 256, "float32": 64, "float64": 64}
_PARTIAL_SUMS = 7

# Vectors of length N (8 bytes per element) that live through a call: ids, anchors, sums, losses, factors, statistics.
_ROW_VECTORS = 24
# Vectors of length V: class weights and bias in the accumulation dtype, the bias gradient, a block's column numbers.
_VOCAB_VECTORS = 4


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def gradient_tile(hidden: int, kind: Kind = "triton") -> Tile:
    """Rows and columns of the tiles of dX and dW on Hopper. They do not depend on the number of tokens: another one
    compiles nothing. Of the other backends' plans tiles are counted as if none were narrow."""
    if kind != "triton":
        return HOPPER.tile
    wide, narrow = (round_up(hidden, columns) for _, columns in (HOPPER.tile, HOPPER.narrow_tile))
    return HOPPER.narrow_tile if narrow * HOPPER.narrow_time < wide else HOPPER.tile


def row_stride(columns: int, itemsize: int) -> int:
    """Elements from one row of a held matrix to the next: rows start on a boundary."""
    return round_up(columns, ROW_ALIGNMENT_BYTES // itemsize)


def low_row_bytes(width: int, bits: int) -> int:
    """Bytes of a row of so many elements of a sum's lower ``bits``, 8 or 4: rows start on a boundary."""
    return round_up(math.ceil(width * bits / 8), LOW_ROW_ALIGNMENT)


def slices(length: int, size: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every chunk of ``size``. The last one may be shorter."""
    return tuple((start, min(start + size, length)) for start in range(0, length, size))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The sizes of a call and of its chunks, and what follows from them. :class:`logitless.ChunkPlan` is one."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    order: Order
    one_pass: bool
    """True: a whole chunk's exponentials are held, and both gradients follow at once. False: lse is known first.
    (With an upstream gradient per token, a one-chunk plan of the kernels can be True: then the chunk waits for it.)"""
    token_chunk: int
    """Tokens worked on at a time (in "both", for dX). In the vocab order all of them, or with PyTorch's kernels fewer:
    then a slice's dW is a sum over chunks of tokens."""
    vocab_chunk: int
    """Vocabulary entries worked on at a time (in the tokens order: the block of portable elementwise work; in "both",
    for dW, and that block)."""
    kind: Kind = "xla"
    """The backend that the promise is for. A promise for "xla" holds for "eager" too. "triton" and "pallas" run each
    other's plans, but keep the promise only for their own."""
    lends: bool = False
    """Whether exponentials lie in dW's memory until dW is made there, and so take no scratch: those of all tokens in
    dW's rows (on Hopper), or in the order "both" those of each chunk of tokens (PyTorch)."""
    turned: bool = False
    """Whether the weight lies in memory as [D, V]."""
    summed: int = 0
    """In "both": entries at the vocabulary's end whose dW is made with dX, as a sum over chunks of tokens. The others'
    dW is made afterwards, and lends its memory. How many others there are is a multiple of 256."""
    lends_sums: bool = False
    """In "both", where exponentials are scratch: whether the lower bits of sums over chunks lie in dW's memory."""
    weight_tokens: int = 0
    """In "both": tokens worked on at a time for dW; 0: all. Of several such chunks a slice's dW is a sum."""
    sum_bits: int = 24
    """Bits of dW's sum over at most 32 chunks of tokens: 24 or 20. A sum over more chunks has 24. (20 are for PyTorch's
    kernels and bfloat16. Elsewhere it has 24, or is float32.)"""
    alone: bool = False
    """Whether this is one half of "both": dX and dW of the ``summed`` entries in the tokens order, dW of the others in
    the vocab order."""
    early_hidden: bool = False
    """Whether the forward makes dX of its only chunk, too, where it would leave it to the backward. It waits there for
    the upstream scalar. (PyTorch's kernels. XLA has forward and backward in one program.)"""

    @property
    def kernels(self) -> bool:
        """Whether the backend has kernels."""
        return self.kind in ("triton", "pallas")

    @property
    def kernel_kind(self) -> tuple[object, ...]:
        """What decides which forms of the kernels a call launches."""
        several = self.chunks > 1, self.for_weight.sums_slices, self.summed > 0
        return self.order, self.one_pass, several, self.low_bits, self.early_hidden, self.in_place

    @property
    def chunks(self) -> int:
        """Number of chunks along the order's own axis; in "both", of tokens."""
        return len(self.vocab_slices) if self.order == "vocab" else len(self.token_slices)

    @property
    def halves(self) -> tuple[Self, Self]:
        """Of the order "both": what makes the sums, dX, db and dW of ``summed`` entries; and what makes the rest of
        dW."""
        first = dataclasses.replace(self, order="tokens", alone=True)
        chunk = min(self.weight_tokens or self.tokens, self.tokens) or 1
        second = dataclasses.replace(self, order="vocab", one_pass=False, token_chunk=chunk, lends=False, alone=True)
        return first, second

    @property
    def has_own_sum(self) -> bool:
        """Whether the lower bits of dW's sum are those of a part of the vocabulary alone."""
        return self.sums_slices or self.is_first_half

    @property
    def is_first_half(self) -> bool:
        return self.alone and self.order == "tokens"

    @property
    def knows_sums(self) -> bool:
        """Whether the tokens' sums were made by another plan: the second of the halves."""
        return self.alone and self.order == "vocab"

    @property
    def forward(self) -> Self:
        """How the sums are made."""
        return self.halves[0] if self.order == "both" else self

    @property
    def for_weight(self) -> Self:
        """How dW is made."""
        return self.halves[1] if self.order == "both" else self

    @property
    def in_place(self) -> bool:
        """Whether dW is made where the exponentials of all tokens lie."""
        return self.lends and self.order == "tokens" and not self.alone

    @property
    def holds_all(self) -> bool:
        """Whether the exponentials of all tokens are held at once: one pass, one chunk."""
        return self.order == "tokens" and self.one_pass and 0 < self.tokens <= self.token_chunk

    @property
    def later(self) -> int:
        """In "both": entries of the vocabulary whose dW is made after dX."""
        return self.vocab - self.summed

    @property
    def weight_entries(self) -> int:
        """Entries of the vocabulary whose dW is made here."""
        if not self.alone:
            return self.vocab
        return self.later if self.order == "vocab" else self.summed

    @property
    def lent_bytes(self) -> int:
        """Bytes of dW's memory that a plan of the order "both" uses: a chunk's exponentials and hidden states, and the
        lower bits of dX. (:attr:`lends_low`: and of dW.)"""
        item, boundary = ITEMSIZE[self.dtype], ROW_ALIGNMENT_BYTES
        row = sum(row_stride(width, item) * item for width in (self.vocab, self.hidden)) if self.lends else 0
        return self.token_chunk * row + self.waiting_bytes + 2 * boundary

    @property
    def has_room(self) -> bool:
        """Whether anything lies in dW's memory before dW is made there."""
        return self.lends or self.lends_sums

    @property
    def room_bytes(self) -> int:
        """Bytes of dW's memory that are free until the second half of "both"."""
        return self.later * self.hidden * ITEMSIZE[self.dtype]

    @property
    def lends_low(self) -> bool:
        """Whether the lower bits of dW's sum over chunks lie in its memory, too: where there is room for them."""
        more = self.summed * self.low_bytes + ROW_ALIGNMENT_BYTES
        return self.has_room and self.alone and self.lent_bytes + more <= self.room_bytes

    @property
    def hidden_waits(self) -> bool:
        """Whether the forward makes some chunk's dX, which then waits for the upstream scalar."""
        return self.one_pass and (self.early_hidden or self.token_chunk < self.tokens)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the lower 8 bits of dX that waits; the upper 16 lie where dX will be."""
        return self.tokens * self.hidden if self.hidden_waits and ITEMSIZE[self.dtype] < 4 else 0

    @property
    def lends_waiting(self) -> bool:
        """Whether these lower bits lie in dW's memory."""
        return self.has_room and not self.in_place

    @property
    def token_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every token chunk."""
        return slices(self.tokens, self.token_chunk)

    @property
    def vocab_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every vocabulary block."""
        return slices(self.vocab, self.vocab_chunk)

    @property
    def sums_slices(self) -> bool:
        """Whether a slice's dW is a sum over chunks of tokens."""
        return self.order == "vocab" and self.token_chunk < self.tokens

    @property
    def with_whole_slices(self) -> Self:
        """The same where no part of dW can be a sum over chunks: it is made of all tokens at once."""
        chunk = max(1, self.tokens) if self.order == "vocab" else self.token_chunk
        return dataclasses.replace(self, token_chunk=chunk, weight_tokens=0, summed=0, lends_sums=False)

    @property
    def adds_chunks(self) -> bool:
        """Whether an entry of dW is added to chunk by chunk of tokens."""
        if self.order == "both":
            return self.halves[1].adds_chunks or (self.summed > 0 and len(self.token_slices) > 1)
        return len(self.token_slices) > 1

    @property
    def low_bits(self) -> int:
        """Bits of an element of dW's sum beside the upper 16, which lie where dW will be: 8 or 4."""
        narrow = self.sum_bits == 20 and self.dtype == "bfloat16" and len(self.token_slices) <= MOST_NARROW_CHUNKS
        return 4 if narrow else 8

    @property
    def low_bytes(self) -> int:
        """Bytes of a row of the lower bits of dW's sum."""
        return low_row_bytes(self.hidden, self.low_bits) if ITEMSIZE[self.dtype] < 4 else 0

    def lent_slices(self, row_bytes: int) -> tuple[tuple[int, int, bool], ...]:
        """(start, stop, lent) of the kernels' slices, if dW lends its memory. ``row_bytes``: of a row of dW; 0: none.

        In the vocab order, a slice's rows of dW are written once, after its products. Until then an earlier slice's
        matrix may lie in them, and the lower bits of its sum. The rows that are left are shared between matrix and
        slice about as N : D. Such slices are larger than the plan's own, which follow when few rows are left. Their
        sizes fill whole turns of the kernels' programs. In the tokens order the whole vocabulary is one slice, and
        nothing is lent.
        """
        slices: list[tuple[int, int, bool]] = []
        start, end = 0, self.later if self.knows_sums else self.vocab
        while start < end:
            columns = self._lent_columns(end - start, row_bytes)
            lent = columns > self.fused_columns
            stop = min(end, start + (columns if lent else self.fused_columns))
            slices.append((start, stop, lent))
            start = stop
        return tuple(slices)

    def _lent_columns(self, rows: int, row_bytes: int) -> int:
        """Columns of the largest matrix that fits into the end of dW's ``rows`` rows, behind as many rows."""
        tile_rows, tile_columns = HOPPER.tile
        column_bytes = self.token_chunk * ITEMSIZE[self.dtype] + self.low_bytes * self.sums_slices
        free = max(0, rows * row_bytes - (1 + self.sums_slices) * ROW_ALIGNMENT_BYTES)
        tiles = free // (column_bytes + row_bytes) // tile_columns
        row_tiles = math.ceil(self.token_chunk / tile_rows)
        whole = row_tiles * tiles // HOPPER.multiprocessors * HOPPER.multiprocessors // row_tiles
        return (whole or tiles) * tile_columns

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
        """Whether the dtype is narrower than the accumulation dtype."""
        return ITEMSIZE[self.dtype] < self.accumulation_itemsize

    @property
    def weight_accumulator(self) -> bool:
        """Whether dW needs a buffer in the accumulation dtype beside the gradient.

        Several token chunks add up in it. Gradients made in the forward wait in it for the upstream scalar, and so are
        rounded only once, in the last cast. (Then dX waits in the accumulation dtype as well.)
        """
        return self.low_precision and not self.alone and (self.one_pass or len(self.token_slices) > 1)

    @property
    def fused_columns(self) -> int:
        """Vocabulary entries in a block of the kernel backends' matrix."""
        return self.vocab if self.order == "tokens" else self.vocab_chunk

    @property
    def splits_hidden(self) -> bool:
        """Whether the kernels split tiles of dX along the vocabulary, because the programs' last turn would be idle."""
        if self.kind == "pallas":  # its kernels never do
            return False
        if self.knows_sums:  # and makes no dX
            return False
        tiles, at_once = self.hidden_tiles(min(self.token_chunk, self.tokens)), HOPPER.multiprocessors
        return ITEMSIZE[self.dtype] < 4 and tiles < HOPPER.full_turns * at_once * math.ceil(tiles / at_once)

    @property
    def hidden_parts(self) -> int:
        """In how many parts along the vocabulary Pallas' kernels make dX of a chunk, because all its tiles together
        would leave programs idle."""
        if self.kind != "pallas" or self.fused_columns < self.vocab or self.knows_sums:
            return 1
        together = HOPPER.programs_together[self.kind]
        rows, columns = self.gradient_tile
        tiles = math.ceil(min(self.token_chunk, self.tokens) / (rows * together)) * math.ceil(self.hidden / columns)

        def turns(parts: int) -> float:
            return math.ceil(tiles * parts / (HOPPER.multiprocessors // together)) / parts

        most = min(HOPPER.most_parts, self.vocab // HOPPER.part_entries)
        overhead = HOPPER.split_overhead_turns
        best = min(range(1, most + 1), key=lambda parts: turns(parts) + parts * overhead, default=1)
        return best if turns(best) < HOPPER.full_turns * turns(1) else 1

    def hidden_tiles(self, rows: int) -> int:
        """Tiles of ``rows`` rows of dX."""
        tile_rows, tile_columns = self.gradient_tile
        return math.ceil(rows / tile_rows) * math.ceil(self.hidden / tile_columns)

    @property
    def gradient_tile(self) -> Tile:
        """Rows and columns of a tile of dX or dW."""
        return gradient_tile(self.hidden, self.kind)


def promised_bytes(cut: Cut) -> int:
    """The promise of the backend that the cut is for."""
    if cut.order == "both":
        return max(map(promised_bytes, cut.halves))
    return {"triton": _triton, "pallas": _pallas, "eager": _eager, "xla": _xla}[cut.kind](cut)


def _triton(cut: Cut) -> int:
    item = ITEMSIZE[cut.dtype]
    rows = cut.token_chunk
    matrix = 0 if cut.lends else rows * round_up(cut.fused_columns, ROW_ALIGNMENT_BYTES // item) * item
    operand = 0 if cut.lends and cut.alone else rows * row_stride(cut.hidden, item) * item
    # Sums, and statistics, of every column tile of the first product.
    lines = _PARTIAL_SUMS * math.ceil(cut.vocab / _LINE_COLUMNS[cut.dtype]) * cut.token_chunk * 4
    smoothing = 3 * SMOOTHING_BLOCK * cut.hidden * 4
    vectors = 4 * (2 * _ROW_VECTORS * cut.tokens + 16 * rows + _VOCAB_VECTORS * cut.vocab + 16 * cut.hidden)
    sums = 0 if cut.lends_waiting else cut.waiting_bytes  # dX, which waits for the upstream gradient
    if cut.token_chunk < cut.tokens and cut.order == "tokens" and not cut.lends_low:
        # The lower bits of dW's sum; the upper 16 lie where dW will be.
        sums += cut.weight_entries * cut.low_bytes
    if cut.sums_slices:
        sums += cut.vocab_chunk * cut.low_bytes
    if cut.fused_columns < cut.vocab and not cut.alone:
        sums += cut.tokens * cut.hidden * 4
    if cut.splits_hidden:
        vectors += HOPPER.multiprocessors * math.prod(HOPPER.tile) * 4
    gathered = rows * row_stride(cut.hidden, item) * item if cut.turned else 0  # the weight's rows of the targets
    if cut.one_pass:
        return matrix + operand + gathered + lines + sums + smoothing + vectors
    # If lse is known and there is one chunk of tokens, dX's buffer holds the operand until dX is written.
    lent = cut.token_chunk >= cut.tokens and cut.hidden * item % 16 == 0 and not cut.lends
    backward = matrix + (max(sums, operand) if lent else sums + operand)
    if cut.knows_sums:
        return max(backward, smoothing) + vectors
    return max(operand + gathered + lines + smoothing, backward) + vectors


def _pallas(cut: Cut) -> int:
    """As :func:`_triton`, in whole tiles. Arrays whose sizes are no multiples of a tile are copied."""
    item = ITEMSIZE[cut.dtype]
    rows, size = round_up(cut.token_chunk, HOPPER.tile[0]), round_up(cut.hidden, HOPPER.tile[1])
    along_vocab = PADDED_HIDDEN if cut.turned else PADDED_VOCAB
    hidden, vocab = round_up(cut.hidden, PADDED_HIDDEN), round_up(cut.vocab, along_vocab)
    copies = 0
    if (hidden, vocab) != (cut.hidden, cut.vocab):
        copies += 2 * vocab * hidden * item  # the weight, and its gradient before it is cut
    if hidden != cut.hidden:
        copies += 2 * cut.tokens * hidden * item
    if cut.turned and cut.token_chunk < cut.tokens:
        copies += vocab * hidden * item  # the last chunk writes dW as [D, V], beside the sum [V, D]
    matrix = round_up(cut.token_chunk, 8) * round_up(cut.fused_columns, ROW_ALIGNMENT_BYTES // item) * item
    operand = rows * size * item
    sums_at_most = _PARTIAL_SUMS - cut.in_place  # label smoothing that sums logits takes two passes
    lines = sums_at_most * math.ceil(cut.vocab / _LINE_COLUMNS[cut.dtype]) * rows * 4
    gathered = operand if cut.turned else 0  # the weight's rows of the targets, in the order of these
    vectors = 4 * (2 * _ROW_VECTORS * (cut.tokens + rows) + 16 * rows + _VOCAB_VECTORS * vocab + 16 * size)
    # Sums down a matrix's columns (the bias gradient, label smoothing) go by way of about √rows partial sums.
    vectors += 8 * (math.isqrt(vocab) + 1) * size
    if not cut.in_place:
        vectors += 4 * (math.isqrt(cut.token_chunk) + 1) * cut.fused_columns
    positions = cut.tokens + cut.token_chunk  # whole chunks, each begun at a multiple of 8
    sums = cut.hidden_parts * rows * hidden * 4 if cut.hidden_parts > 1 else 0
    if cut.token_chunk < cut.tokens:
        sums += vocab * hidden if item < 4 and not cut.alone else 0
        sums += positions * hidden * (4 if cut.one_pass else item)  # dX in the order of the positions
    if cut.fused_columns < cut.vocab and not cut.alone:
        sums += cut.tokens * hidden * 4
    if cut.in_place:  # dW is made when dX is there, so its operand and the targets' rows are scratch
        return copies + 2 * operand + gathered + max(lines, sums) + vectors
    if cut.one_pass:
        return copies + matrix + operand + gathered + lines + sums + vectors
    # During the slices of the vocabulary the operand lies where dX will be, if it has dX's shape. (On several devices
    # it has another. There Shard.scratch_bytes counts dX's float32 share, which is written later.)
    lent = cut.fused_columns < cut.vocab and cut.tokens % 8 == 0 and hidden == cut.hidden and not cut.alone
    backward = matrix + (max(sums, operand) if lent else sums + operand)
    if cut.knows_sums:
        return copies + backward + vectors
    return copies + max(operand + gathered + lines, backward) + vectors


def _eager(cut: Cut) -> int:
    item, low = cut.accumulation_itemsize, cut.low_precision
    several = cut.token_chunk < cut.tokens
    row, narrow = cut.hidden * item, cut.hidden * ITEMSIZE[cut.dtype] if low else 0
    block = cut.token_chunk * cut.vocab_chunk * item
    upcast = cut.vocab_chunk * row if low else 0  # the weight's block, if operands are converted
    # dX and dW in the accumulation dtype. During the blocks the gradients' own buffers do not exist yet.
    sums = cut.vocab * row if cut.weight_accumulator else 0
    sums += cut.tokens * row if cut.one_pass and low else 0
    early = sums - sums * ITEMSIZE[cut.dtype] // item
    # For a chunk's tokens: x, x times its factors, and dX before rounding. The next chunk begins while they are live.
    rows = cut.token_chunk * row
    kept = rows * (3 if low and not cut.one_pass else 2)
    begun = (kept if several else 0) + cut.token_chunk * (row + narrow)
    gathered = (1 + several) * rows + min(cut.token_chunk, ANCHOR_ROWS) * (row + narrow)  # w[y]
    if cut.one_pass:
        held = cut.token_chunk * cut.row_stride * item
        # First the softcap's slope and an elementwise temporary; then the weight's block.
        work = max((1 + several) * rows + 2 * block, kept + max(block * 3 // 2, upcast))
    else:
        held = block
        rounded = 0 if cut.weight_accumulator else upcast  # a block of dW before it is rounded
        # The softcap's slope and the entropy's coefficient; then the weight's blocks.
        work = kept + max(2 * block, upcast + rounded)
    return max(sums, early + held + max(work, begun, gathered)) + _vectors(cut)


def _xla(cut: Cut) -> int:
    item, wide = cut.accumulation_itemsize, cut.order == "tokens" and cut.vocab_chunk > TOKENS_ORDER_BLOCK
    columns = TOKENS_ORDER_BLOCK if wide else cut.vocab_chunk
    held = cut.token_chunk * cut.row_stride * item if cut.one_pass else 0
    # A block's logits, two elementwise temporaries, a ragged last block, and one more if operands are converted.
    block = (5 if cut.low_precision else 4) * cut.token_chunk * columns * item
    block += 2 * columns * cut.hidden * item  # the weight's block upcast, its gradient's product
    if wide:
        # Beside the logits: first the product from which a bias or a softcap makes them, then what other products read.
        beside = cut.token_chunk * cut.row_stride * item
        block = max(block, beside if cut.one_pass else 2 * beside)  # in one pass the logits are what is held
    token_rows = (3 if cut.low_precision else 2) * cut.token_chunk * cut.hidden * item  # x, scaled x, dX if low
    anchor_rows = 2 * min(cut.token_chunk, ANCHOR_ROWS) * cut.hidden * item  # w[y] and its product with x
    accumulator = cut.vocab * cut.hidden * item if cut.weight_accumulator else 0
    if cut.one_pass and cut.low_precision:
        accumulator += cut.tokens * cut.hidden * item
    return held + block + token_rows + anchor_rows + _vectors(cut) + accumulator


def _vectors(cut: Cut) -> int:
    """The vectors of plain operations."""
    return 8 * (_ROW_VECTORS * cut.tokens + _VOCAB_VECTORS * cut.vocab + 4 * cut.hidden)
