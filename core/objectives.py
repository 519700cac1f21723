"""The losses on top of per-token values (preferences, policies, distillation): options, statistics, checks, tiles.

What both frameworks' ``losses`` share. Nothing here imports an array library.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, get_args

from logitless.scratch import ROW_ALIGNMENT_BYTES, TOKEN_TILE, VOCAB_TILE, round_up, slices
from logitless.spec import (
    FLOAT_DTYPES,
    ITEMSIZE,
    REDUCTIONS,
    TARGET_DTYPES,
    A,
    ArrayInfo,
    LossOptions,
    Reduction,
    check_choice,
    check_dtype,
    check_factor,
    check_flags,
    check_number,
)

Aggregation = Literal["token_mean", "sequence_mean"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
Objective = Literal["clip", "cispo"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
Ratio = Literal["token", "sequence"]
RATIOS: tuple[str, ...] = get_args(Ratio)
KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
SAMPLER_CORRECTIONS: tuple[str, ...] = get_args(SamplerCorrection)
PairLoss = Literal["dpo", "ipo", "cpo", "simpo", "orpo"]
PAIR_LOSSES: tuple[str, ...] = get_args(PairLoss)
Rest = Literal["class", "spread", "drop"]
RESTS: tuple[str, ...] = get_args(Rest)

MASK_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", *FLOAT_DTYPES)

# Differences of log-probabilities are cut off here before the exponential. exp(20) and its products with advantages and
# gradients stay finite in float32. verl cuts off at the same place.
LARGEST_LOG_RATIO = 20.0

# A block of the vocabulary that is made or converted at a time has at most this many entries, and a tile of logits in
# plain operations as many tokens.
LARGEST_TILE = 2048
# How many matrices of a tile's size, and how many copies of its rows of hidden and weight, are live at once.
TILE_MATRICES = 7
TILE_ROWS = 2
# Tokens and entries of a tile that kernels make. A tile of all tokens needs no sum of dW over tiles. The wider tiles
# are, the less often the sum of dX is read and written.
KERNEL_TILE = 8192, 4096
# Elements of dW that PyTorch makes at a time from a gradient that kernels made, where no kernel makes all of it.
KERNEL_PART = 2**23
# Classes of a token that lie in the registers of one program: given ids, and one for the rest.
KERNEL_CLASSES = 4096
# A tile of whole rows has this many times as many elements: rows of a large vocabulary would be few.
WHOLE_ROWS = 4
# What a distillation may take where its caller sets no budget.
DEFAULT_BUDGET = 8 * 2**30
# How many arrays of a number for each given id are live at once: of all tokens, and of a tile's tokens.
ALL_PAIRS = 6
TILE_PAIRS = 16
# How many numbers of every other rank are live for each of a tile's tokens.
RANK_RECORDS = 8

# The largest sum of a token's given probabilities: bfloat16 rounds each of them by up to 0.4 %.
LARGEST_SUM = 1.01


@dataclasses.dataclass(frozen=True)
class DPOOptions:
    """The options of ``dpo_loss``, checked."""

    beta: float
    label_smoothing: float
    reduction: Reduction
    loss_type: PairLoss = "dpo"
    margin: float = 0.0
    nll_coef: float | None = None

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, PAIR_LOSSES)
        check_factor("beta", self.beta)
        check_number("label_smoothing", self.label_smoothing, low=0.0, high=0.5)
        check_number("margin", self.margin, low=0.0)
        check_choice("reduction", self.reduction, REDUCTIONS)
        if self.nll_coef is not None:
            check_number("nll_coef", self.nll_coef, low=0.0, also="None")
        if self.loss_type in ("ipo", "orpo"):
            for name in ("label_smoothing", "margin"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}: got {getattr(self, name)} beside loss_type={self.loss_type!r}, allowed is 0"
                    )

    @property
    def averaged(self) -> bool:
        """Whether a sequence's log-probability is divided by its number of tokens."""
        return self.loss_type in ("ipo", "simpo", "orpo")

    @property
    def nll_weight(self) -> float:
        """γ, with the loss's own where none was given."""
        if self.nll_coef is None:
            return 1.0 if self.loss_type in ("cpo", "orpo") else 0.0
        return self.nll_coef

    def check_reference(self, has_reference: bool) -> None:
        """Raise ValueError unless a reference is given exactly where the loss has one."""
        if self.loss_type in ("dpo", "ipo") and not has_reference:
            raise ValueError(
                f"reference_log_prob: got None beside loss_type={self.loss_type!r}, allowed is an array of target's "
                f"shape, or one number per sequence"
            )
        if self.loss_type not in ("dpo", "ipo") and has_reference:
            raise ValueError(
                f"reference_log_prob: got an array beside loss_type={self.loss_type!r}, allowed is None: this loss "
                f"has no reference model"
            )


class DPOStats(NamedTuple, Generic[A]):
    """Per pair, [B] each, no gradient."""

    chosen_log_prob: A
    """Σ log π(y_w) over the tokens that count [nats]."""
    rejected_log_prob: A
    chosen_reward: A
    """β s_w, the implicit reward: of DPO β (log π(y_w) − log π_ref(y_w))."""
    rejected_reward: A


@dataclasses.dataclass(frozen=True)
class KTOOptions:
    """The options of ``kto_loss``, checked."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    reduction: Reduction

    def __post_init__(self) -> None:
        check_factor("beta", self.beta)
        check_number("desirable_weight", self.desirable_weight, low=0.0)
        check_number("undesirable_weight", self.undesirable_weight, low=0.0)
        check_choice("reduction", self.reduction, REDUCTIONS)


class KTOStats(NamedTuple, Generic[A]):
    """Per sequence, [B] each, no gradient."""

    log_prob: A
    """Σ log π(y) over the tokens that count [nats]."""
    reward: A
    """β (log π(y) − log π_ref(y)), the implicit reward."""


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """The options of ``clipped_policy_loss``, checked."""

    clip_low: float
    clip_high: float
    entropy_coef: float
    kl_coef: float
    aggregation: Aggregation
    objective: Objective = "clip"
    ratio: Ratio = "token"
    dual_clip: float | None = None
    kl_estimator: KLEstimator = "k3"
    kl_times_ratio: bool = False
    sampler_correction: SamplerCorrection = "token_truncate"
    sampler_limit: float = 2.0

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, low=0.0, high=1.0)
        check_number("clip_high", self.clip_high, low=0.0)
        check_number("entropy_coef", self.entropy_coef, low=0.0)
        check_number("kl_coef", self.kl_coef, low=0.0)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("ratio", self.ratio, RATIOS)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_flags(kl_times_ratio=self.kl_times_ratio)
        check_choice("sampler_correction", self.sampler_correction, SAMPLER_CORRECTIONS)
        check_number("sampler_limit", self.sampler_limit, low=0.0, open_low=True)
        if self.dual_clip is not None:
            check_number("dual_clip", self.dual_clip, low=1.0, open_low=True, also="None")
            if self.objective != "clip":
                raise ValueError(
                    f"dual_clip: got {self.dual_clip} beside objective={self.objective!r}, allowed is None: only "
                    f"objective='clip' has a side without bound"
                )

    def check_reference(self, has_reference: bool) -> None:
        """Raise ValueError where a KL term is asked for without a reference, or a reference without a KL term."""
        if self.kl_coef > 0 and not has_reference:
            raise ValueError(
                f"reference_log_prob: got None beside kl_coef={self.kl_coef}, allowed is an array of target's shape"
            )
        if self.kl_coef == 0 and has_reference:
            raise ValueError("kl_coef: got 0 beside a reference_log_prob, allowed is a number greater than 0")


class PolicyStats(NamedTuple, Generic[A]):
    """Per token, shaped like ``target``, no gradient; 0 (False) where a token does not count."""

    log_prob: A
    ratio: A
    """ρ = π / π_old, of the token or of its sequence."""
    clipped: A
    """Whether a bound of the ratio was taken: with objective "clip" the token has no policy gradient then; bool."""
    entropy: A | None
    """None unless with_entropy, or entropy_coef is above 0 [nats]."""
    kl: A | None
    """The estimate of KL(π ‖ π_ref), before it is multiplied by a ratio; None unless kl_coef is above 0 [nats]."""
    sampler_weight: A | None = None
    """w, what the policy's term was multiplied by; None without sampler_log_prob."""


@dataclasses.dataclass(frozen=True)
class DistillationOptions:
    """The options of the distillations, checked: of the divergence, the hard loss, and both sides' logits."""

    beta: float
    temperature: float
    reduction: Reduction
    logit_scale: float
    softcap: float | None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None
    nll_coef: float = 0.0

    def __post_init__(self) -> None:
        check_number("beta", self.beta, low=0.0, high=1.0)
        check_factor("temperature", self.temperature)
        check_choice("reduction", self.reduction, REDUCTIONS)
        for name in ("logit_scale", "teacher_logit_scale"):
            check_factor(name, getattr(self, name))
        for name in ("softcap", "teacher_softcap"):
            if getattr(self, name) is not None:
                check_factor(name, getattr(self, name), also="None")
        check_number("nll_coef", self.nll_coef, low=0.0)

    def logits(self, teacher: bool) -> LossOptions:
        """The options of z / τ: τ divides what the softcap gives, as a sampler's temperature does."""
        scale = self.teacher_logit_scale if teacher else self.logit_scale
        softcap = self.teacher_softcap if teacher else self.softcap
        return LossOptions("none", logit_scale=scale, softcap=softcap).tempered(self.temperature)

    def check_target(self, has_target: bool) -> None:
        """Raise ValueError unless there are targets exactly where there is a hard loss."""
        if self.nll_coef > 0 and not has_target:
            raise ValueError(
                f"target: got None beside nll_coef={self.nll_coef}, allowed is an array of one id per token"
            )
        if self.nll_coef == 0 and has_target:
            raise ValueError(
                "nll_coef: got 0 beside a target, allowed is a number greater than 0; mask says which tokens count"
            )

    def check_rest(self, rest: str) -> None:
        """Raise ValueError unless ``rest`` is a name, and its divergence is finite."""
        check_choice("rest", rest, RESTS)
        if rest == "drop" and self.beta == 1:
            raise ValueError(
                f"beta: got {self.beta} beside rest='drop', allowed is less than 1: the reverse KL is infinite where "
                f"the teacher has no mass; rest='class' and rest='spread' have one"
            )


@dataclasses.dataclass(frozen=True)
class Tile:
    """How many tokens and vocabulary entries of the logits, of both sides of a distillation, are held at a time.

    Of a teacher that is no head, ``teacher_hidden`` is 0.
    """

    tokens: int
    vocab: int
    token_chunk: int
    vocab_chunk: int
    hidden: int
    teacher_hidden: int
    itemsize: int
    """Bytes of an element of logits, sums and accumulators."""
    ids: int = 0
    """Given ids of a token, and one more for the rest; 0 where there are none."""
    matrices: int = TILE_MATRICES
    """Matrices of a tile's size that are live at once, of the itemsize."""
    kernel_itemsize: int = 0
    """Bytes of an element of the products' operands, the gradient among them, where a kernel makes it from both sides'
    logits; 0: plain operations do, which need more of them."""
    row_copies: int = TILE_ROWS
    """Copies of its rows of hidden and weight that are live at once, of the itemsize."""
    ranks: int = 1
    """How many ranks share the vocabulary."""

    def of_part(self, vocab: int) -> Tile:
        """For a rank that has ``vocab`` entries, beside others that have more."""
        return dataclasses.replace(self, vocab=vocab)

    @property
    def token_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every chunk of tokens."""
        return slices(self.tokens, self.token_chunk)

    @property
    def vocab_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every block of the vocabulary."""
        return slices(self.vocab, self.vocab_chunk)

    @property
    def scratch_bytes(self) -> int:
        """A promise: bytes beyond inputs and gradients that the gradients, made a tile at a time, hold at any time."""
        chunk, block, sizes = self.token_chunk, self.vocab_chunk, self.hidden + self.teacher_hidden
        if self.kernel_itemsize:
            matrices = self.matrices * chunk * round_up(block, ROW_ALIGNMENT_BYTES)
            operands = chunk * (block + self.hidden)
            tile = self.itemsize * (matrices + block * self.hidden) + self.kernel_itemsize * operands
        else:
            tile = self.itemsize * self.matrices * chunk * block
        tile += self.itemsize * self.row_copies * (chunk + block) * sizes
        vectors = 24 * self.tokens + 4 * self.vocab
        pairs = (ALL_PAIRS * self.tokens + TILE_PAIRS * chunk) * self.ids
        records = RANK_RECORDS * (self.ranks - 1) * chunk
        return tile + self.itemsize * (vectors + pairs + records + self.tokens * self.hidden)


@dataclasses.dataclass(frozen=True)
class DistillationSizes:
    """What a distillation's memory depends on."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    """Of the student's hidden."""
    teacher_hidden: int = 0
    """0 of a teacher that is no head."""
    ids: int = 0
    """Given ids of a token, and one more for the rest; 0 where there are none."""
    whole_rows: bool = False
    """Whether the teacher gives all entries of a token at once: then a tile has them all, and fewer tokens instead."""
    ranks: int = 1
    """How many ranks share the vocabulary, of which the largest part has ``vocab`` entries."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of logits, sums and accumulators."""
        return max(4, ITEMSIZE[self.dtype])


class Rows(NamedTuple):
    """How whole rows of logits are made."""

    tokens: tuple[int, ...]
    """Of how many tokens at a time, the most first. Products of fewer tokens are slow."""
    matrices: int
    """Matrices [C, V] that are live at once."""
    tile_matrices: tuple[int, int]
    """The same of a tile that is made again: with operands of 16 bits, and with wider ones."""
    copies: int = 0
    """Copies of a block of the held gradient's columns, [N, B], that the backward makes."""
    kernel: bool = False
    """Whether a kernel makes losses and gradient, and the products of whole rows read the weights themselves, where
    others copy."""
    row_copies: int = TILE_ROWS
    """Copies of a tile's rows of hidden and weight that are live at once."""
    workspace: int = 0
    """Bytes that a product of whole rows takes beside its operands and its result."""


RowsBy = Literal[
    "kernel", "kernel, probabilities", "kernel, ids", "plain", "pallas", "pallas, probabilities", "pallas, ids", "xla"
]
ROWS: dict[RowsBy, Rows] = {
    # The kernels need the logits of both sides, or of the student alone where the teacher is a few ids. Making
    # log-probabilities of other teachers needs more, and so do plain operations, of which XLA fuses some.
    "kernel": Rows((1024, 512, 256, 128), 2, (2, 2), kernel=True, row_copies=0),
    "kernel, probabilities": Rows((1024, 512, 256, 128), 4, (3, 3), kernel=True, row_copies=0),
    "kernel, ids": Rows((1024, 512, 256, 128), 1, (1, 1), kernel=True, row_copies=0),
    "plain": Rows((256, 128), 10, (TILE_MATRICES, TILE_MATRICES)),
    # XLA copies slices of weights. The most that cuBLAS asks XLA for are 32 MiB.
    "pallas": Rows((1024, 512, 256, 128), 2, (2, 2), copies=1, kernel=True, row_copies=1, workspace=2**25),
    "pallas, probabilities": Rows(
        (1024, 512, 256, 128), 3, (3, 3), copies=1, kernel=True, row_copies=1, workspace=2**25
    ),
    "pallas, ids": Rows((1024, 512, 256, 128), 1, (1, 1), copies=1, kernel=True, row_copies=1, workspace=2**25),
    "xla": Rows((1024, 512, 256, 128), 6, (6, 3), copies=1),
}
# Of how many tokens whole rows are made where a budget leaves no room for more.
FEW_ROWS = 64, 32, 16, 8, 4, 2, 1


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Of how many tokens a distillation makes all logits at a time, of both sides, for the losses."""

    sizes: DistillationSizes
    token_chunk: int
    by: Rows
    operand_itemsize: int
    """Bytes of an element of the products' operands, the logits' gradient among them; 0 where none is wanted."""
    again: Tile | None = None
    """How the backward makes both sides' logits again. None: the forward makes the gradient of the student's too, [N,
    V], which is held until the backward."""

    def of_part(self, vocab: int) -> WholeRows:
        """For a rank that has ``vocab`` entries, beside others that have more."""
        again = self.again and self.again.of_part(vocab)
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, vocab=vocab), again=again)

    @property
    def token_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every chunk of tokens."""
        return slices(self.sizes.tokens, self.token_chunk)

    @property
    def vocab_chunk(self) -> int:
        """Of how many vocabulary entries plain operations make dW at a time from a held gradient. Beside PyTorch's
        kernels it is more where D is small: the GPU would wait for the host between many short products."""
        entries = LARGEST_TILE
        if self.by.kernel and not self.by.copies:
            entries = max(entries, min(KERNEL_TILE[0], KERNEL_PART // max(1, self.sizes.hidden)))
        return min(self.sizes.vocab, entries)

    @property
    def vocab_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every block of the vocabulary."""
        return slices(self.sizes.vocab, self.vocab_chunk)

    @property
    def scratch_bytes(self) -> int:
        """A promise: bytes beyond inputs and gradients that are held at any time."""
        if self.again is not None:
            return max(self._forward_bytes, self.again.scratch_bytes)
        of = self.sizes
        if not self.operand_itemsize:
            return self._forward_bytes
        row = round_up(of.vocab, ROW_ALIGNMENT_BYTES)
        held = self.operand_itemsize * of.tokens * (row + of.hidden)
        copies = self.by.copies * of.tokens + (1 if self.by.kernel else TILE_ROWS) * of.hidden
        made = of.itemsize * self.vocab_chunk * copies
        most = max(self._forward_bytes, self._vector_bytes + made) + self.by.workspace
        return held + most + of.itemsize * of.tokens * of.hidden

    @property
    def _forward_bytes(self) -> int:
        """Of the losses, and of a chunk's gradient."""
        of, chunk = self.sizes, self.token_chunk
        matrices = self.by.matrices * chunk * round_up(of.vocab, ROW_ALIGNMENT_BYTES)
        rows = TILE_ROWS * (chunk + (0 if self.by.kernel else LARGEST_TILE)) * (of.hidden + of.teacher_hidden)
        records = RANK_RECORDS * (of.ranks - 1) * chunk
        return of.itemsize * (matrices + rows + TILE_PAIRS * chunk * of.ids + records) + self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        """Of numbers of every token and every entry."""
        of = self.sizes
        return of.itemsize * (24 * of.tokens + 4 * of.vocab + ALL_PAIRS * of.tokens * of.ids)


def distillation_order(
    sizes: DistillationSizes, *, operand_itemsize: int, by: RowsBy, memory_budget: int | None = None
) -> WholeRows:
    """Whole rows of the most tokens that fit the budget beside the gradient, or else without it.

    Holding the gradient saves a product of each side. Arguments: bytes of an operand's element, 0 without gradients;
    what makes the rows; bytes, or None for DEFAULT_BUDGET, or twice the least if that is more. Raises ValueError for a
    budget that nothing fits.
    """
    rows = ROWS[by]

    def order(tokens: int, again: Tile | None) -> WholeRows:
        return WholeRows(sizes, max(1, min(sizes.tokens, tokens)), rows, operand_itemsize, again)

    held = [order(tokens, None) for tokens in rows.tokens]
    if held and held[0].scratch_bytes <= (memory_budget or DEFAULT_BUDGET):
        return held[0]  # most calls end here
    tiles = _tiles(sizes, rows, operand_itemsize) if operand_itemsize else []
    leanest = min(order(FEW_ROWS[-1], tile).scratch_bytes for tile in (None, *tiles[-1:]))
    budget = memory_budget or max(DEFAULT_BUDGET, 2 * leanest)
    largest = next((tile for tile in tiles if tile.scratch_bytes <= budget), None)
    again = [order(tokens, largest) for tokens in (*rows.tokens, *FEW_ROWS) if largest]
    for each in (*held, *again, *(order(tokens, None) for tokens in FEW_ROWS)):
        if each.scratch_bytes <= budget:
            return each
    teacher = f", teacher's hidden={sizes.teacher_hidden}" * bool(sizes.teacher_hidden)
    ids = f", {sizes.ids} ids a token" * bool(sizes.ids)
    raise ValueError(
        f"memory_budget: got {memory_budget} bytes, allowed for tokens={sizes.tokens}, hidden={sizes.hidden}{teacher}"
        f"{ids}, vocab={sizes.vocab} is at least {leanest}"
    )


def _tiles(sizes: DistillationSizes, by: Rows, operand_itemsize: int) -> list[Tile]:
    """From the largest to the smallest."""
    tokens, vocab, matrices = sizes.tokens, sizes.vocab, by.tile_matrices[operand_itemsize > 2]
    side, width = KERNEL_TILE if by.kernel else (LARGEST_TILE, LARGEST_TILE)

    def tile(side: int, width: int) -> Tile:
        block = vocab if sizes.whole_rows else min(vocab, max(width, VOCAB_TILE))
        rows = WHOLE_ROWS * LARGEST_TILE * side // vocab if sizes.whole_rows else side
        chunk = min(max(1, tokens), max(min(rows, LARGEST_TILE) if sizes.whole_rows else rows, TOKEN_TILE))
        return Tile(
            tokens, vocab, chunk, block, sizes.hidden, sizes.teacher_hidden, sizes.itemsize, sizes.ids, matrices,
            operand_itemsize if by.kernel else 0, by.row_copies, sizes.ranks,
        )  # fmt: skip

    tiles = [tile(side, width)]
    while side > TOKEN_TILE or width > VOCAB_TILE:  # the longer side is halved
        if side > width:
            side //= 2
        else:
            tiles.append(tile(side, width * 3 // 4))
            width //= 2
        tiles.append(tile(side, width))
    return tiles


def check_pairs(target: ArrayInfo) -> None:
    """Raise ValueError unless target is [2 B, T]: the chosen sequences, then the rejected ones."""
    if len(target.shape) != 2 or target.shape[0] % 2:
        raise ValueError(
            f"target: got shape {target.shape}, allowed is [2 B, T]: B chosen sequences, then the B rejected ones"
        )


def check_sequences(target: ArrayInfo) -> None:
    """Raise ValueError unless target is [B, T]: one sequence a row."""
    if len(target.shape) != 2:
        raise ValueError(f"target: got shape {target.shape}, allowed is [B, T]: one sequence a row")


def check_constant(name: str, info: ArrayInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check an array of known numbers: floating, with one of the shapes (name in errors → shape)."""
    check_dtype(name, info, FLOAT_DTYPES)
    _check_shape(name, info, shapes)


def check_flag_array(name: str, info: ArrayInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check an array of yes and no: any dtype of numbers, with one of the shapes (name in errors → shape)."""
    check_dtype(name, info, MASK_DTYPES)
    _check_shape(name, info, shapes)


def _check_shape(name: str, info: ArrayInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if info.shape not in shapes.values():
        allowed = " or ".join(f"{words} {shape}" for words, shape in shapes.items())
        raise ValueError(f"{name}: got shape {info.shape}, allowed is {allowed}")


def check_sides(hidden: ArrayInfo, weight: ArrayInfo, teacher_hidden: ArrayInfo, teacher_weight: ArrayInfo) -> None:
    """Check that both sides of a distillation have the same tokens and the same vocabulary."""
    if not hidden.shape or len(weight.shape) != 2 or not teacher_hidden.shape or len(teacher_weight.shape) != 2:
        shapes = hidden.shape, weight.shape, teacher_hidden.shape, teacher_weight.shape
        raise ValueError(
            f"hidden, weight, teacher_hidden, teacher_weight: got shapes {shapes}, allowed are [..., D], [V, D], "
            f"[..., D_teacher], [V, D_teacher]"
        )
    if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher_hidden: got leading axes {teacher_hidden.shape[:-1]}, allowed are hidden's {hidden.shape[:-1]}"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight: got V = {teacher_weight.shape[0]}, allowed is weight's V = {weight.shape[0]}: where one "
            f"of them is padded, slice it to the ids that both have"
        )


def check_sparse(ids: ArrayInfo, probs: ArrayInfo, tokens: tuple[int, ...]) -> None:
    """Check the ids and probabilities of a sparse teacher beside tokens of this shape."""
    check_dtype("ids", ids, TARGET_DTYPES)
    check_dtype("probs", probs, FLOAT_DTYPES)
    if len(ids.shape) != len(tokens) + 1 or ids.shape[:-1] != tokens or ids.shape[-1] < 1:
        raise ValueError(
            f"ids: got shape {ids.shape}, allowed is [..., K] with hidden's leading axes {tokens}, K at least 1"
        )
    if probs.shape != ids.shape:
        raise ValueError(f"probs: got shape {probs.shape}, allowed is that of ids {ids.shape}")


def sparse_error(position: tuple[int, ...], repeated: bool) -> ValueError:
    """The error for a token whose ids or probabilities are no distribution's. It is looked for only where that costs no
    synchronisation."""
    where = ", ".join(map(str, position))
    if repeated:
        return ValueError(f"ids: got an id more than once for the token ({where}), allowed are different ids")
    return ValueError(
        f"probs: got probabilities that are no distribution's for the token ({where}), allowed are numbers of at "
        f"least 0 whose sum is at most 1, or {LARGEST_SUM} for rounding"
    )


def of_teacher(words: str) -> str:
    """An error's text about hidden, weight and bias, as a text about the teacher's."""
    return re.sub(r"\b(hidden|weight|bias)\b", r"teacher_\1", words)


def check_dense(teacher: ArrayInfo, shape: tuple[int, ...]) -> None:
    """Check the array of a dense teacher; ``shape``: [..., V] of the student."""
    check_dtype("teacher", teacher, FLOAT_DTYPES)
    if teacher.shape != shape:
        raise ValueError(f"teacher: got shape {teacher.shape}, allowed is [..., V] = {shape}")


def check_teacher_rows(rows: ArrayInfo | None, came: object, shape: tuple[int, int]) -> None:
    """Check what a teacher's function returned; ``rows`` is None where ``came`` is no array."""
    if rows is None:
        raise TypeError(f"teacher: got a function that returns {type(came).__name__}, allowed is an array")
    if rows.shape != shape or rows.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"teacher: got a function that returns {rows.shape} of {rows.dtype}, allowed is [count, V] = {shape}, "
            f"floating"
        )
