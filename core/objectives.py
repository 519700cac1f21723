"""The losses on top of per-token values (preferences, policies, distillation): options, statistics, checks, tiles.

What both frameworks' ``losses`` share. Nothing here imports an array library.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, get_args

from logitless.scratch import TOKEN_TILE, VOCAB_TILE, slices
from logitless.spec import (
    FLOAT_DTYPES,
    ITEMSIZE,
    REDUCTIONS,
    A,
    ArrayInfo,
    LossOptions,
    Reduction,
    check_choice,
    check_dtype,
    check_factor,
    check_number,
)

Aggregation = Literal["token_mean", "sequence_mean"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

MASK_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", *FLOAT_DTYPES)

# Differences of log-probabilities are cut off here before the exponential. exp(20) and its products with advantages and
# gradients stay finite in float32. verl cuts off at the same place.
LARGEST_LOG_RATIO = 20.0

# A tile of a distillation's logits has at most this many tokens and vocabulary entries.
LARGEST_TILE = 2048
# How many matrices of a tile's size, and how many copies of its rows of hidden and weight, are live at once.
TILE_MATRICES = 8
TILE_ROWS = 4


@dataclasses.dataclass(frozen=True)
class DPOOptions:
    """The options of ``dpo_loss``, checked."""

    beta: float
    label_smoothing: float
    reduction: Reduction

    def __post_init__(self) -> None:
        check_number("beta", self.beta, low=0.0, open_low=True)
        check_number("label_smoothing", self.label_smoothing, low=0.0, high=0.5)
        check_choice("reduction", self.reduction, REDUCTIONS)


class DPOStats(NamedTuple, Generic[A]):
    """Per pair, [B] each, no gradient."""

    chosen_log_prob: A
    """Σ log π(y_w) over the tokens that count [nats]."""
    rejected_log_prob: A
    chosen_reward: A
    """β (log π(y_w) − log π_ref(y_w)), the implicit reward."""
    rejected_reward: A


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """The options of ``clipped_policy_loss``, checked."""

    clip_low: float
    clip_high: float
    entropy_coef: float
    kl_coef: float
    aggregation: Aggregation

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, low=0.0, high=1.0)
        check_number("clip_high", self.clip_high, low=0.0)
        check_number("entropy_coef", self.entropy_coef, low=0.0)
        check_number("kl_coef", self.kl_coef, low=0.0)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)

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
    """π / π_old."""
    clipped: A
    """Whether the clipped side of the minimum was taken, so that the token has no policy gradient; bool."""
    entropy: A | None
    """None unless entropy_coef is above 0 [nats]."""
    kl: A | None
    """The k3 estimate of KL(π ‖ π_ref); None unless kl_coef is above 0 [nats]."""


@dataclasses.dataclass(frozen=True)
class DistillationOptions:
    """The options of ``distillation_loss``, checked: of the divergence, and of both sides' logits."""

    beta: float
    temperature: float
    reduction: Reduction
    logit_scale: float
    softcap: float | None
    teacher_logit_scale: float
    teacher_softcap: float | None

    def __post_init__(self) -> None:
        check_number("beta", self.beta, low=0.0, high=1.0)
        check_factor("temperature", self.temperature)
        check_choice("reduction", self.reduction, REDUCTIONS)
        for name in ("logit_scale", "teacher_logit_scale"):
            check_factor(name, getattr(self, name))
        for name in ("softcap", "teacher_softcap"):
            if getattr(self, name) is not None:
                check_factor(name, getattr(self, name), also="None")

    def logits(self, teacher: bool) -> LossOptions:
        """The options of z / τ: τ divides what the softcap gives, as a sampler's temperature does."""
        scale = self.teacher_logit_scale if teacher else self.logit_scale
        softcap = self.teacher_softcap if teacher else self.softcap
        return LossOptions("none", logit_scale=scale, softcap=softcap).tempered(self.temperature)


@dataclasses.dataclass(frozen=True)
class Tile:
    """How many tokens and vocabulary entries of both sides' logits a distillation holds at a time."""

    tokens: int
    vocab: int
    token_chunk: int
    vocab_chunk: int
    hidden: int
    teacher_hidden: int
    itemsize: int
    """Bytes of an element of logits, sums and accumulators."""

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
        """A promise: bytes beyond inputs and gradients that the divergence and its gradients hold at any time."""
        matrices = TILE_MATRICES * self.token_chunk * self.vocab_chunk
        rows = TILE_ROWS * (self.token_chunk + self.vocab_chunk) * (self.hidden + self.teacher_hidden)
        vectors = 24 * self.tokens + 4 * self.vocab
        return self.itemsize * (matrices + rows + vectors + self.tokens * self.hidden)


def distillation_tile(
    *, tokens: int, hidden: int, teacher_hidden: int, vocab: int, dtype: str, memory_budget: int | None = None
) -> Tile:
    """The largest tile, up to LARGEST_TILE each way, whose ``scratch_bytes`` fit the budget.

    Arguments: N, D, the teacher's D, V; the dtype of the student's hidden; bytes, or None for the largest tile. Raises
    ValueError for a budget that the smallest tile does not fit.
    """
    itemsize = max(4, ITEMSIZE[dtype])

    def tile(side: int) -> Tile:
        chunk, block = min(max(1, tokens), max(side, TOKEN_TILE)), min(vocab, max(side, VOCAB_TILE))
        return Tile(tokens, vocab, chunk, block, hidden, teacher_hidden, itemsize)

    sides = [LARGEST_TILE >> step for step in range(int(math.log2(LARGEST_TILE // TOKEN_TILE)) + 1)]
    tiles = [tile(side) for side in sides]
    if memory_budget is None:
        return tiles[0]
    for candidate in tiles:
        if candidate.scratch_bytes <= memory_budget:
            return candidate
    raise ValueError(
        f"memory_budget: got {memory_budget} bytes, allowed for tokens={tokens}, hidden={hidden}, teacher's "
        f"hidden={teacher_hidden}, vocab={vocab} is at least {tiles[-1].scratch_bytes}"
    )


def check_pairs(target: ArrayInfo) -> None:
    """Raise ValueError unless target is [2 B, T]: the chosen sequences, then the rejected ones."""
    if len(target.shape) != 2 or target.shape[0] % 2:
        raise ValueError(
            f"target: got shape {target.shape}, allowed is [2 B, T]: B chosen sequences, then the B rejected ones"
        )


def check_constant(name: str, info: ArrayInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check an array of known numbers: floating, with one of the shapes (name in errors → shape)."""
    check_dtype(name, info, FLOAT_DTYPES)
    if info.shape not in shapes.values():
        allowed = " or ".join(f"{words} {shape}" for words, shape in shapes.items())
        raise ValueError(f"{name}: got shape {info.shape}, allowed is {allowed}")


def check_mask(info: ArrayInfo, shape: tuple[int, ...]) -> None:
    """Check a mask: any dtype of numbers, one element per token."""
    check_dtype("mask", info, MASK_DTYPES)
    if info.shape != shape:
        raise ValueError(f"mask: got shape {info.shape}, allowed is one element per token {shape}")


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


def of_teacher(words: str) -> str:
    """An error's text about hidden, weight and bias, as a text about the teacher's."""
    return re.sub(r"\b(hidden|weight|bias)\b", r"teacher_\1", words)
