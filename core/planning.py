"""Choosing the chunk plan: how many tokens, or how much of the vocabulary, a call works on at a time.

Integers in, a frozen dataclass out, without an array library or a device. Both frameworks carry out the same plan.
:mod:`logitless.scratch` says what a plan promises, :mod:`logitless.cost` what it costs.

Three orders (docs/design.md):

``tokens``  chunks of C tokens with the whole vocabulary. One pass holds the C × V exponentials: 6·N·D·V flops. It needs
            a dW accumulator [V, D] only if there are several chunks and dW's own buffer is not precise enough to add
            in. (The kernels keep 20 or 24 bits of a sum, the upper 16 of them in dW's buffer.)
``vocab``   first the statistics of all tokens (2·N·D·V flops), then slices of the vocabulary (6 more). It holds
            N × slice and accumulates dX. Each slice of dW is finished at once, so nothing of size V × D exists beside
            the gradient. (Slices are larger if dW can lend its memory: ``lent_slices``.)
``both``    chunks of tokens for the sums and dX, then slices of the vocabulary for dW, whose logits are made again:
            8·N·D·V flops. It holds a chunk or a slice, and no sum over either. Until the second half makes dW, a
            chunk's exponentials can lie in its memory. For that a part of dW is enough. The rest can be made with dX,
            as in the tokens order (``ChunkPlan.summed``): 6·N·D·V flops and 2·N·D for each entry that is not.

The kernel backends hold exponentials in the input dtype. They leave the last chunk's products to the backward, so a
plan of one chunk needs no accumulator. Such a plan can also wait for an upstream gradient per token (``hold``): all
tokens' exponentials are held until it arrives, for 6·N·D·V flops instead of 8.

Without a budget, the plan with the smallest scratch is chosen among those that cost little more than the cheapest: 5 %
("balanced", the default), 0.5 % ("fast") or 50 % ("lean"). Of those that hold at most 10 % more ("lean": twice as
much, up to 64 MiB, and no more than the default plan), the fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from logitless.cost import relative_cost
from logitless.hardware import ACCUMULATOR_TOKENS, HOPPER, Device
from logitless.scratch import (
    PADDED_HIDDEN,
    ROW_ALIGNMENT_BYTES,
    TOKEN_TILE,
    TOKENS_ORDER_BLOCK,
    VOCAB_TILE,
    Cut,
    Kind,
    Order,
    gradient_tile,
    promised_bytes,
    round_up,
)
from logitless.spec import FLOAT_DTYPES, ITEMSIZE, WeightLayout, check_flags, check_weight_layout

ORDERS: tuple[Order, ...] = ("tokens", "vocab", "both")

Preference = Literal["fast", "balanced", "lean"]
# How much more than the fastest plan a plan may cost, if it holds less. Of plans that are nearly equal, the smaller one
# is taken even for "fast". The leanest plans of all would cost many times the fastest.
SLACK: dict[Preference, float] = {"fast": 1.005, "balanced": 1.05, "lean": 1.5}
# How much more than the smallest of these a plan may hold, if it is faster: nobody waits longer for so little. "lean"
# may hold twice as much, for the leanest plans of all hold next to nothing; but no more than so many bytes beyond, nor
# than the default plan.
SCRATCH_SLACK = 1.1
MOST_MORE = 64 * 2**20

# XLA on a GPU has all columns in one block if their number is a multiple of this. Else rows of such a block start
# between the 16 bytes that cuBLAS reads at once, and narrow blocks are faster.
ALIGNED_COLUMNS = 8
# In the order "both", for dW: entries of a slice, and tokens of a chunk where its sum over chunks is possible.
WEIGHT_SLICES = (128, 256, 512, 1024, 2048, 4096, 8192)
WEIGHT_CHUNKS = (1024, 2048, 4096, 8192, 16384)
# In the order "both", entries whose dW is made after dX are a multiple of so many: whole tiles, and whole blocks of the
# kernels' lists of targets.
LATER_GRAIN = 256
# PyTorch's "eager" on a GPU starts every operation from the host, about 6 µs each. So a block has this many elements
# there, which keeps the GPU busy for longer than that.
EAGER_GPU_BLOCK = 2**26


@dataclasses.dataclass(frozen=True)
class ChunkPlan(Cut):
    """How a call is cut. Made by :func:`plan`, used by ``linear_cross_entropy(plan=...)`` of both frameworks."""

    @property
    def fused(self) -> bool:
        """Whether ``scratch_bytes`` is for the kernel backends ("triton", "pallas"), not the portable ones."""
        return self.kernels

    @property
    def padded(self) -> bool:
        """Whether ``scratch_bytes`` counts whole tiles, and padded copies where V % 8 or D % 64 is not 0 ("pallas")."""
        return self.kind == "pallas"

    @property
    def in_narrow_blocks(self) -> ChunkPlan:
        """The plan for all but XLA on a GPU. Its blocks are narrow, and it stays within the same promise."""
        if self.kind != "xla" or self.order != "tokens":
            return self
        return dataclasses.replace(self, vocab_chunk=min(self.vocab_chunk, TOKENS_ORDER_BLOCK))

    @property
    def flops(self) -> int:
        """Flops of the matrix products, forward and all gradients: 6·N·D·V in one pass, 8·N·D·V otherwise; in the order
        "both" 2·N·D more for each entry whose dW is made after dX."""
        logits = 1 if self.one_pass else 2
        again = self.later if self.order == "both" else 0
        return 2 * self.tokens * self.hidden * ((logits + 2) * self.vocab + again)

    @property
    def scratch_bytes(self) -> int:
        """A promise: bytes beyond inputs and gradients that are live at any time, forward and backward, any option."""
        return promised_bytes(self)

    @property
    def full_logits_bytes(self) -> int:
        """For comparison: logits and their gradient held whole in the accumulation dtype."""
        return 2 * self.tokens * self.vocab * self.accumulation_itemsize

    def relative_cost(self, device: Device) -> float:
        """Modelled time relative to 6·N·D·V flops: the formula of :mod:`logitless.cost`."""
        return relative_cost(self, device)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a plan is asked for, checked. See :func:`plan` for the fields."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    kind: Kind = "xla"
    memory_budget: int | None = None
    order: Order | None = None
    chunk: int | None = None
    one_pass: bool = True
    hold: bool = False
    device: Device = "gpu"
    lends: bool = False
    prefer: Preference = "balanced"
    turned: bool = False
    frees: bool = False
    early: bool = False
    """Whether the forward may make dX of its only chunk."""

    def __post_init__(self) -> None:
        for name, low in (("tokens", 0), ("hidden", 1), ("vocab", 1)):
            _check_integer(name, getattr(self, name), low)
        check_memory_budget(self.memory_budget)
        if self.chunk is not None:
            _check_integer("chunk", self.chunk, 1)
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, allowed are {', '.join(FLOAT_DTYPES)}")
        if self.order is not None and self.order not in ORDERS:
            raise ValueError(f"order: got {self.order!r}, allowed are None, {', '.join(map(repr, ORDERS))}")
        if self.device not in ACCUMULATOR_TOKENS:
            raise ValueError(f"device: got {self.device!r}, allowed are {', '.join(map(repr, ACCUMULATOR_TOKENS))}")
        if self.chunk is not None and self.order is None:
            raise ValueError(
                f"order: got None beside chunk={self.chunk}, allowed are {', '.join(map(repr, ORDERS))}: chunk counts "
                f"along it"
            )
        check_preference("prefer", self.prefer)
        if self.prefer != "balanced" and self.memory_budget is not None:
            raise ValueError(
                f"prefer: got {self.prefer!r} beside a memory_budget, allowed is one of the two: with a budget the "
                "fastest plan that fits is taken"
            )
        if self.kernels and self.dtype == "float64":
            raise ValueError("fused: got True beside dtype='float64', allowed is False: the kernels have no float64")

    @property
    def kernels(self) -> bool:
        """Whether the plan is for the kernels."""
        return self.kind in ("triton", "pallas")

    @property
    def in_one_pass(self) -> bool:
        """Whether gradients may follow at once. In float16 the kernels need lse first."""
        return self.one_pass and not (self.kernels and self.dtype == "float16")

    @property
    def holds(self) -> bool:
        """Whether one chunk may wait for an upstream gradient per token."""
        return self.hold and self.kernels and self.dtype != "float16" and self.tokens > 0 and not self.in_one_pass

    @property
    def can_lend(self) -> bool:
        """Whether the exponentials of all tokens fit into dW's rows, whose tiles are made at a time."""
        if not (self.lends and self.kernels and self.dtype == "bfloat16"):
            return False
        if self.kind == "pallas" and self.hidden <= PADDED_HIDDEN:  # a tile must not be stored wider than the rows
            return False
        beside = math.ceil(self.hidden / HOPPER.tile[1]) * HOPPER.programs_together[self.kind]
        fits = 0 < self.tokens <= self.hidden and beside <= HOPPER.multiprocessors
        return fits and self.prefer != "fast"  # beside dW is as fast, or faster

    @property
    def can_free(self) -> bool:
        """Whether the exponentials of a chunk of tokens may lie in dW's memory before dW is made."""
        return self.frees and self.kind == "triton"

    @property
    def leaves_gpu_idle(self) -> bool:
        """Whether the GPU would be idle between the forward and the backward, if dX were left to the backward."""
        small = 2 * self.tokens * self.hidden * self.vocab < HOPPER.idle_flops
        return self.early and small and self.kind == "triton"

    def plan(self, order: Order, one_pass: bool, token_chunk: int, vocab_chunk: int, lends: bool = False) -> ChunkPlan:
        """One of the plans to choose from."""
        sizes = (self.tokens, self.hidden, self.vocab, self.dtype)
        sum_bits = 20 if self.can_free and not self.turned else 24
        made = ChunkPlan(
            *sizes, order, one_pass, token_chunk, vocab_chunk, self.kind, lends, self.turned, sum_bits=sum_bits
        )
        return dataclasses.replace(made, early_hidden=True) if self.leaves_gpu_idle and made.holds_all else made


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
    lends: bool = False,
    prefer: Preference = "balanced",
    weight_layout: WeightLayout = "vd",
) -> ChunkPlan:
    """Choose how to cut a linear cross-entropy call.

    Arguments:
        tokens, hidden, vocab: N, D and V.
        dtype: of hidden and weight: "bfloat16", "float16", "float32" or "float64".
        memory_budget: bytes of scratch that ``scratch_bytes`` must not exceed; None: as ``prefer`` says.
        order: "tokens", "vocab", "both", or None for whichever costs less within the budget. ("both" is among these
            where the exponentials may lie in dW's memory: with ``lends``.)
        chunk: tokens (or, in the vocab order, vocabulary entries) in a chunk, taken as it is; needs ``order``.
        one_pass: False when the upstream gradient arrives per token, after the forward (reduction="none", log-probs).
        device: "gpu", "cpu" or "tpu": whose balance of arithmetic and bandwidth the cost formula assumes. XLA on a GPU
            works on all of the vocabulary at a time.
        fused: whether the scratch is that of the kernel backends ("triton", "pallas"; float16 always knows lse first
            there) or of the portable ones.
        padded: with ``fused``, whether the scratch is that of "pallas", which works on whole tiles, and on copies where
            V % 8 or D % 64 is not 0.
        hold: with ``fused`` and one_pass=False, whether the plan may be one chunk in one pass all the same: N × V
            exponentials in the input dtype are held from the forward until the upstream gradients arrive, or for
            log-probabilities with statistics as many logits. (Calls allow that with a memory_budget, or where speed is
            preferred.)
        eager: whether the scratch is that of PyTorch's "eager", which is less than XLA's.
        lends: with ``fused``, whether the exponentials may lie in dW's rows until dW is made there, which takes one
            pass in every reduction: on Hopper, bfloat16, tokens ≤ hidden. (Calls allow it if they make dW themselves,
            and differentiate losses or log-probabilities alone. JAX copies that memory unless one program has forward
            and backward.) In the order "both", whether those of a chunk may lie in dW's memory: PyTorch. (Calls allow
            it if they make dW themselves, in the dtype of hidden.)
        prefer: without a budget or a chunk, the smallest scratch that stays within 5 % ("balanced"), 0.5 % ("fast") or
            50 % ("lean") of the fastest plan, by the cost formula of :mod:`logitless.cost`.
        weight_layout: "dv" for a weight that lies in memory as [D, V]: with ``fused``, its rows of a chunk's targets
            are scratch. (A call with a plan of the other layout counts them all the same.)

    Returns a frozen :class:`ChunkPlan`. Raises ValueError or TypeError for a bad argument; a budget that no plan fits
    is a ValueError that names the smallest scratch there is.
    """
    check_flags(one_pass=one_pass, fused=fused, padded=padded, hold=hold, eager=eager, lends=lends)
    check_weight_layout(weight_layout)
    kind: Kind = "eager" if eager else "xla"
    if fused:
        kind = "pallas" if padded else "triton"
    request = Request(
        tokens, hidden, vocab, dtype, kind, memory_budget, order, chunk, one_pass, hold, device, lends, prefer,
        weight_layout == "dv", lends,
    )  # fmt: skip
    if fused and eager:
        raise ValueError("eager: got True beside fused=True, allowed is False: a backend is one of the two")
    return choose(request)


@functools.lru_cache(maxsize=1024)
def choose(request: Request) -> ChunkPlan:
    """The plan for ``request``."""
    candidates = _candidates(request)
    device, budget = request.device, request.memory_budget
    if budget is not None:
        smallest = min(candidate.scratch_bytes for candidate in candidates)
        candidates = [candidate for candidate in candidates if candidate.scratch_bytes <= budget]
        if not candidates:
            raise ValueError(
                f"memory_budget: got {budget} bytes, allowed for tokens={request.tokens}, hidden={request.hidden}, "
                f"vocab={request.vocab}, dtype={request.dtype} is at least {smallest}"
            )
        return min(candidates, key=lambda candidate: (candidate.relative_cost(device), candidate.scratch_bytes))
    limit = SLACK[request.prefer] * min(candidate.relative_cost(device) for candidate in candidates)
    candidates = [candidate for candidate in candidates if candidate.relative_cost(device) <= limit]
    least = min(candidate.scratch_bytes for candidate in candidates)
    enough = SCRATCH_SLACK * least
    if request.prefer == "lean":
        default = choose(dataclasses.replace(request, prefer="balanced"))
        enough = min(least + min(least, MOST_MORE), default.scratch_bytes)
    return min(
        (candidate for candidate in candidates if candidate.scratch_bytes <= enough),
        key=lambda candidate: (candidate.relative_cost(device), candidate.scratch_bytes),
    )


def _candidates(request: Request) -> list[ChunkPlan]:
    """The plans to choose from."""
    tokens, vocab, order, chunk = request.tokens, request.vocab, request.order, request.chunk
    candidates: list[ChunkPlan] = []
    if order in (None, "tokens"):
        sizes = [chunk] if chunk else _balanced_sizes(tokens, TOKEN_TILE)
        if request.kernels and not chunk:
            sizes = _with_whole_turns(sizes, tokens)
        one_pass, most = request.in_one_pass, max(1, tokens)
        candidates += [request.plan("tokens", one_pass, min(size, most), _block(request, size)) for size in sizes]
        if request.can_lend and (chunk is None or chunk >= tokens):
            candidates.append(request.plan("tokens", True, tokens, _block(request, tokens), lends=True))
        if request.holds and (chunk is None or chunk >= tokens):
            candidates.append(request.plan("tokens", True, tokens, _block(request, tokens)))
    if order in (None, "vocab"):
        sizes = [chunk] if chunk else _balanced_sizes(vocab, VOCAB_TILE)
        candidates += [request.plan("vocab", False, max(1, tokens), min(size, vocab)) for size in sizes]
        if request.can_free and not request.turned:
            widths = [chunk] if chunk else _widths(request)
            pairs = ((few, min(vocab, width)) for few in WEIGHT_CHUNKS if few < tokens for width in widths)
            candidates += [request.plan("vocab", False, few, width) for few, width in pairs]
    if order == "both" or (order is None and _wants_both(request)):
        candidates += _of_both(request)
    return candidates


def _wants_both(request: Request) -> bool:
    """Whether the order "both" is worth a look: where little scratch is asked for. It is never within 5 % of the
    fastest plan. Where the sums are made before, it takes longest (10·N·D·V flops), so there a budget has to ask."""
    asked = request.memory_budget is not None or (request.prefer == "lean" and request.in_one_pass)
    return asked and request.can_free and not request.can_lend and request.tokens > 0


def _of_both(request: Request) -> list[ChunkPlan]:
    """Plans of the order "both"."""
    tokens, vocab, chunk = request.tokens, request.vocab, request.chunk
    sizes = [min(chunk, max(1, tokens))] if chunk else _balanced_sizes(tokens, TOKEN_TILE)
    if request.kernels:
        return _best_halves(request, sizes)
    # A slice's matrix is as large as a chunk's.
    pairs = ((size, max(VOCAB_TILE, size * vocab // max(1, tokens) // VOCAB_TILE * VOCAB_TILE)) for size in sizes)
    return [request.plan("both", request.in_one_pass, size, min(width, vocab)) for size, width in pairs]


def _best_halves(request: Request, sizes: list[int]) -> list[ChunkPlan]:
    """The fastest two halves for every scratch that one of them takes; ``sizes``: of the first one's chunks."""
    tokens, vocab, device = request.tokens, request.vocab, request.device
    base = request.plan("both", request.in_one_pass, sizes[0], vocab)
    firsts = [dataclasses.replace(base, token_chunk=size) for size in sizes]
    chunks = [0]
    if request.can_free:
        chunks += [few for few in WEIGHT_CHUNKS if few < tokens and not request.turned]
        firsts = [lending for first in firsts for lending in _lending(first)] or firsts
    seconds = [
        dataclasses.replace(base, vocab_chunk=min(vocab, width), weight_tokens=chunk)
        for width in _widths(request)
        for chunk in chunks
    ]

    def rated(plans: list[ChunkPlan], half: int) -> list[tuple[float, int, ChunkPlan]]:
        made = [(plan.halves[half], plan) for plan in plans]
        rows = [(part.relative_cost(device), part.scratch_bytes, plan) for part, plan in made]
        # What a first half makes of dW, the second need not: two products of three, as good as they get.
        rows = [(cost - 2 / 3 * plan.summed / vocab, scratch, plan) for cost, scratch, plan in rows]
        return sorted(rows, key=_rating)

    first_rated, second_rated = rated(firsts, 0), rated(seconds, 1)
    least = max(min(scratch for _, scratch, _ in each) for each in (first_rated, second_rated))
    found = []
    for limit in sorted({scratch for _, scratch, _ in first_rated + second_rated if scratch >= least}):
        first = next(plan for _, scratch, plan in first_rated if scratch <= limit)
        second = next(plan for _, scratch, plan in second_rated if scratch <= limit)
        chunk, width = second.weight_tokens, second.vocab_chunk
        found.append(dataclasses.replace(first, weight_tokens=chunk, vocab_chunk=width))
    return found


def _widths(request: Request) -> list[int]:
    """Entries of a slice: among them as many as fill a turn or a few with tiles of dW."""
    rows, columns = gradient_tile(request.hidden, request.kind)
    beside = math.ceil(request.hidden / columns)
    whole = (turns * HOPPER.multiprocessors // beside * rows for turns in (1, 2, 3))
    return sorted({min(request.vocab, width) for width in (*WEIGHT_SLICES, *whole) if width})


def _lending(first: ChunkPlan) -> list[ChunkPlan]:
    """The plan with dW's memory in use, where it has the room. Exponentials lie in all of dW, or in as little of it as
    takes them, with and without the lower bits of sums. Or these bits lie there alone."""
    inside, low = dataclasses.replace(first, lends=True), first.low_bytes
    plans = [inside]
    if first.token_chunk < first.tokens and not first.turned:
        plans += [_with_least_room(inside, 0), _with_least_room(inside, low)]
        if low:
            plans.append(_with_least_room(dataclasses.replace(first, lends_sums=True), low))
    fits = (plan for plan in plans if plan.summed >= 0 and plan.lent_bytes <= plan.room_bytes)
    return [plan for plan in fits if plan.lends or plan.summed]


def _with_least_room(kept: ChunkPlan, low_bytes: int) -> ChunkPlan:
    """The plan with as many entries later as it takes to keep there what it keeps in dW, and ``low_bytes`` for each of
    the others."""
    row = kept.hidden * ITEMSIZE[kept.dtype]
    needed = kept.lent_bytes + ROW_ALIGNMENT_BYTES + kept.vocab * low_bytes
    return dataclasses.replace(kept, summed=kept.vocab - round_up(math.ceil(needed / (row + low_bytes)), LATER_GRAIN))


def _rating(rated: tuple[float, int, ChunkPlan]) -> tuple[float, int]:
    return rated[:2]


def _block(request: Request, token_chunk: int) -> int:
    """Columns of a block in the tokens order."""
    columns = TOKENS_ORDER_BLOCK
    if request.device == "gpu" and request.kind == "xla" and request.vocab % ALIGNED_COLUMNS == 0:
        columns = request.vocab
    elif request.device == "gpu" and request.kind == "eager":
        columns = max(columns, round_up(EAGER_GPU_BLOCK // token_chunk, VOCAB_TILE))
    return min(request.vocab, columns)


def check_preference(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a :data:`Preference`."""
    if not isinstance(value, str) or value not in SLACK:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(repr, SLACK))}")


def check_plan_argument(plan: object, memory_budget: int | None) -> None:
    """Raise TypeError or ValueError unless ``plan`` is one, a preference or None, and no budget is given beside it."""
    if plan is None:
        return
    if isinstance(plan, str):
        check_preference("plan", plan)
    elif not isinstance(plan, ChunkPlan):
        raise TypeError(
            f"plan: got {type(plan).__name__}, allowed is a ChunkPlan from logitless.plan(...), "
            f"{', '.join(map(repr, SLACK))} or None"
        )
    if memory_budget is not None:
        raise ValueError("memory_budget: got a value beside a plan, allowed is one of the two: the plan has its budget")


def check_limits(plan: object, memory_budget: int | None) -> None:
    """Raise TypeError or ValueError unless both may be fixed before a call's sizes are known: ``plan`` is a preference
    or None, ``memory_budget`` None or an integer of at least 1, and one of them is None."""
    if plan is not None and not isinstance(plan, str):
        raise TypeError(
            f"plan: got {type(plan).__name__}, allowed are {', '.join(map(repr, SLACK))} and None: a ChunkPlan is for "
            f"one call's sizes"
        )
    check_plan_argument(plan, memory_budget)
    check_memory_budget(memory_budget)


def check_plan_sizes(plan: ChunkPlan, tokens: int, hidden: int, vocab: int, dtype: str) -> None:
    """Raise ValueError unless ``plan`` was made for these sizes."""
    sizes = (plan.tokens, plan.hidden, plan.vocab, plan.dtype)
    if sizes != (tokens, hidden, vocab, dtype):
        raise ValueError(
            f"plan: got one for (tokens, hidden, vocab, dtype) = {sizes}, "
            f"allowed is one for this call's {(tokens, hidden, vocab, dtype)}"
        )


def check_memory_budget(memory_budget: object) -> None:
    """Raise TypeError or ValueError unless ``memory_budget`` is None or an integer of at least 1."""
    if memory_budget is not None:
        _check_integer("memory_budget", memory_budget, 1)


def _check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__} {value!r}, allowed is an integer")
    if value < low:
        raise ValueError(f"{name}: got {value}, allowed is at least {low}")


def _balanced_sizes(length: int, tile: int) -> list[int]:
    """Every size of equal chunks of ``length``, rounded up to ``tile``. Only rounding makes a last chunk shorter."""
    if length <= tile:
        return [max(1, length)]
    tiles = math.ceil(length / tile)
    counts = range(1, tiles + 1) if tiles <= 4096 else _spread_counts(tiles)
    return sorted({min(length, round_up(math.ceil(length / count), tile)) for count in counts})


def _with_whole_turns(sizes: list[int], length: int) -> list[int]:
    """Also larger chunks, with a smaller last one, whose tiles fill the multiprocessors better."""
    rounded = (round_up(size, TOKEN_TILE * more) for size in sizes for more in (2, 4, 8, 16))
    return sorted({*sizes, *(size for size in rounded if size < length)})


def _spread_counts(tiles: int) -> list[int]:
    # Above 4096 tiles the sizes are so close that steps of 1 % lose nothing.
    steps = math.ceil(math.log(tiles) / math.log(1.01))
    return sorted({min(tiles, round(1.01**step)) for step in range(steps + 1)} | {tiles})
