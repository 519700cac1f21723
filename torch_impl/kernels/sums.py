"""The forward's sums per token, and the first product that they are made from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from logitless.scratch import SMOOTHING_BLOCK, round_up
from logitless.spec import Statistics
from logitless.torch_impl.call import KnownRows, TokenSums
from logitless.torch_impl.chunk import Smoothing
from logitless.torch_impl.distributed import parallel
from logitless.torch_impl.kernels.kernel_call import NOT_KNOWN, KernelCall, addresses
from logitless.torch_impl.kernels.launch import cdiv
from logitless.torch_impl.kernels.rows import TOKEN_BLOCK, TURN_BLOCK
from logitless.torch_impl.kernels.tiles import LOGITS

with contextlib.suppress(ImportError):  # without triton, fused.unavailable() says so before a kernel is launched
    from logitless.torch_impl.kernels import portable as kernels


# The kernels' pointers to lines of partial sums, and what these are in spec.CLASS_SUMS.
LINES = {
    "sum_ptr": "s",
    "gap_ptr": "gap_sum",
    "highest_ptr": "highest",
    "argmax_ptr": "argmax",
    "lowest_ptr": "lowest",
    "logit_sum_ptr": "logit_sum",
    "squares_ptr": "squares",
}


# Rows that a program of finish_kernel takes at a time, and tokens whose losses it adds up in a turn: the same for all
# calls, for the kernel takes long to compile.
FINISHED_ROWS, SUMMED_TOKENS = 8, 2048


@dataclasses.dataclass(frozen=True)
class Factors:
    """What turns sums into row factors, and the factors themselves, by position. g is relative to ``unit``."""

    g: Tensor  # [N] by token
    class_weight: Tensor | None  # k_y, [N] by token
    smooth: Tensor | None  # (ε/V) K
    factor: Tensor  # u
    target_value: Tensor  # the target's element of the gradient, u T; e is 0 there
    token_value: Tensor  # u T by token

    @classmethod
    def of_rows(cls, factor: Tensor) -> Factors:
        """Of the factors alone, where a matrix has the targets' elements in it."""
        nothing = torch.zeros_like(factor)
        return cls(factor, None, None, factor, nothing, nothing)

    def times(self, c: KernelCall, upstream: Tensor) -> tuple[Factors, Tensor]:
        """From those for the upstream gradient 1 those for ``upstream``, by token; and what they are relative to."""
        new = {name: torch.empty_like(getattr(self, name)) for name in ("g", "token_value", "factor", "target_value")}
        unit = self.factor.new_empty(())
        with c.on_device():
            c.launch(
                kernels.upstream_kernel, 1, upstream_ptr=upstream, valid_ptr=c.inputs.valid.view(torch.int8),
                relative_ptr=self.g, token_value_ptr=self.token_value, factor_ptr=self.factor,
                target_value_ptr=self.target_value, largest_ptr=c.inputs.largest, unit_ptr=unit,
                **{("" if name == "g" else "out_") + f"{name}_ptr": tensor for name, tensor in new.items()},
                BLOCK=TURN_BLOCK if c.tokens > TOKEN_BLOCK else TOKEN_BLOCK, num_warps=16,
            )  # fmt: skip
        return dataclasses.replace(self, **new), unit


def relative_factors(c: KernelCall) -> Factors:
    """Row factors to be made, relative to logit_scale times the largest token weight."""
    inputs, smooth = c.inputs, None
    if c.options.label_smoothing:
        share = c.options.label_smoothing / inputs.vocab * inputs.class_weight_sum()
        smooth = share if isinstance(share, Tensor) else torch.full((), share, dtype=torch.float32, device=c.device)
    padded = c.row_target.shape[0]
    k = inputs.token_class_weight()
    return Factors(inputs.relative, k, smooth, c.empty(padded), c.empty(padded), c.empty(c.tokens))


def known_by_position(c: KernelCall, known: KnownRows) -> tuple[dict[str, Tensor | None], Tensor]:
    """The first product's vectors where lse is known, by position, and the unit; factor and target are relative to it.

    The target's element lacks its factor in :class:`KnownRows`, and has it here.
    """
    names = ("anchor", "log_total", "alpha", "gamma", "delta", "sigma")
    given = ((name, getattr(known, name)) for name in names)
    others = {f"{name}_ptr": vector.contiguous() for name, vector in given if vector is not None}
    length = c.row_target.shape[0]
    rows = c.empty(2 + len(others), round_up(length, 4))  # each begins on 16 bytes
    unit = rows.new_empty(())
    with c.on_device():
        c.launch(
            kernels.known_kernel, 1, **dict.fromkeys(f"{name}_ptr" for name in names) | others,
            factor_ptr=known.factor, target_ptr=known.target, unit_ptr=unit, out_ptr=rows, length=length,
            stride=rows.stride(0), BLOCK=TURN_BLOCK, num_warps=16,
        )  # fmt: skip
    present = ("factor_ptr", "target_value_ptr", *others)
    return NOT_KNOWN | dict(zip(present, rows[:, :length].unbind(), strict=True)), unit


class Sums:
    """The forward's sums per token, and the lines of partial sums that they are made from."""

    def __init__(
        self, call: KernelCall, statistics: Statistics, norm: Tensor | None = None, held: bool = False
    ) -> None:
        """norm: of a loss that is a sum. held: whether logits are stored, in the place of exponentials."""
        self.stored = kernels.HELD.value if held else kernels.ANCHORED.value
        o = call.options
        self.call, self.with_entropy, self.statistics = call, bool(statistics), statistics is True
        self.sum_logits = o.label_smoothing > 0 and not o.separable
        self.tile = call.tiles(LOGITS)
        self.lines = cdiv(call.vocab, self.tile.bn)
        self.smoothing = Smoothing.prepare(call.inputs, o, SMOOTHING_BLOCK)

        def line(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return call.empty(self.lines, call.chunk, dtype) if wanted else None

        # By the kernels' names for them, [lines, C] each.
        self.partial = {
            "sum_ptr": line(True),
            "gap_ptr": line(self.with_entropy),
            "highest_ptr": line(self.statistics),
            "argmax_ptr": line(self.statistics, torch.int32),
            "lowest_ptr": line(self.statistics),
            "logit_sum_ptr": line(self.sum_logits),
            "squares_ptr": line(self.statistics),
        }
        self.highest, self.list = call.empty(call.chunk), call.empty(call.chunk, torch.int32)
        self.state = call.empty(kernels.STATE.value, torch.int32)

        def vector(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return call.empty(call.tokens, dtype) if wanted else None

        self.target_logit, self.out_anchor, self.log_total = (call.empty(call.tokens) for _ in range(3))
        # Of a separable loss its numbers come before the product, and those of ignored tokens not at all.
        self.weighted = torch.zeros(call.tokens, dtype=torch.float32, device=call.device) if o.label_smoothing else None
        self.entropy, self.argmax = vector(self.with_entropy), vector(self.statistics, torch.int32)
        self.max_logit, self.min_logit, self.others_squared = (vector(self.statistics) for _ in range(3))
        # Losses with other options, and of several ranks, have a kernel of their own.
        plain = norm is not None and call.tokens and not (o.label_smoothing or call.shard.split)
        self.norm = norm if plain and call.inputs.class_weight is None else None
        self.total = None if self.norm is None else torch.empty_like(self.norm)

    def gather(self, first: int, x: Tensor) -> None:
        """The chunk's hidden states into x, its anchors, and label smoothing's share of the loss."""
        c, s = self.call, self.smoothing
        c.gather(
            first, x, anchor_ptr=c.anchor[first:], highest_ptr=self.highest, state_ptr=self.state,
            weighted_rows_ptr=s.weighted_rows if s else None, weighted_ptr=self.weighted,
        )  # fmt: skip
        c.shard.sum(c.anchor[first : first + c.chunk])

    def product(self, first: int, x: Tensor, e: Tensor | None) -> None:
        """The first product: partial sums and, if ``e`` is given, what is stored."""
        c = self.call
        c.logits(first, x, e, slice(0, c.vocab), mode=self._mode(e), partial=self.partial)

    def _mode(self, e: Tensor | None) -> int:
        mode: int = kernels.SUMS.value if e is None else self.stored
        return mode

    def finish(
        self, first: int, x: Tensor, e: Tensor | None, factors: Factors | None, scale_rows: bool = False
    ) -> None:
        """Sums to results; rows whose exponents grew too large once more, anchored at their maximum. ``scale_rows``:
        x becomes u ⊙ x, for dW."""
        split = self.call.shard.split
        record = self.call.empty(len(parallel.RECORD), self.call.chunk) if split else None
        own = None if split else factors
        self._finish(first, x, e, own, scale_rows, record=record)
        if record is not None:
            self._finish(first, x, e, factors, scale_rows, lines=self._exchange(record))

    def _exchange(self, record: Tensor) -> parallel.Lines:
        """The records of all ranks; ``record`` [fields, C] is this one's."""
        wanted = {"anchor"} | {LINES[name] for name, lines in self.partial.items() if lines is not None}
        mine = {name: field for name, field in zip(parallel.RECORD, record, strict=True) if name in wanted}
        if "argmax" in mine:
            mine["argmax"] = mine["argmax"].view(torch.int32) + self.call.shard.start
        return parallel.exchange(self.call.shard, mine)

    def _finish(
        self, first: int, x: Tensor, e: Tensor | None, factors: Factors | None, scale_rows: bool,
        record: Tensor | None = None, lines: parallel.Lines | None = None,
    ) -> None:  # fmt: skip
        c, o, f = self.call, self.call.options, factors
        read: Mapping[str, Tensor | None] = self.partial
        if lines is not None:
            parts = {pointer: lines.sums.get(name) for pointer, name in LINES.items()}
            read = {pointer: None if part is None else part.contiguous() for pointer, part in parts.items()}
        blocks, norm = cdiv(c.chunk, FINISHED_ROWS), self.norm if first + c.chunk >= c.tokens else None
        c.launch(
            kernels.finish_kernel, blocks if lines is not None else max(blocks, c.programs), **read,
            **self._written(first, f), **addresses(x=x, e=e), anchor_ptr=c.anchor[first:],
            row_anchor_ptr=self.highest if lines is None else lines.anchor, list_ptr=self.list, state_ptr=self.state,
            share_ptr=None if lines is None else lines.share.contiguous(), row_target_ptr=c.row_target[first:],
            record_ptr=record, weight_ptr=c.inputs.token_weight, norm_ptr=norm, loss_ptr=self.total, first=first,
            lines=self.lines if lines is None else c.shard.ranks, columns=c.vocab,
            e_column_stride=0 if e is None else e.stride(1), keep=1.0 - o.label_smoothing, z_loss=float(o.z_loss),
            ENTROPY=self.with_entropy, STATISTICS=self.statistics, SUM_LOGITS=self.sum_logits, FACTORS=f is not None,
            SCALE_ROWS=f is not None and scale_rows, STORE=self._mode(e), LOSS=norm is not None,
            HAS_CLASS=f is not None and f.class_weight is not None, SMOOTH=f is not None and f.smooth is not None,
            RECORD=record is not None, SHARED=lines is not None, BR=FINISHED_ROWS, BL=128, BM=16,
            BN=self.tile.bn, BK=16, BLOCK=SUMMED_TOKENS, num_warps=8,
        )  # fmt: skip

    def _written(self, first: int, factors: Factors | None) -> dict[str, Tensor | None]:
        """Pointers of finish_kernel: the results by token, and the row factors that it reads and makes."""
        f = factors
        return {
            "out_target_ptr": self.target_logit,
            "out_anchor_ptr": self.out_anchor,
            "out_total_ptr": self.log_total,
            "out_weighted_ptr": self.weighted,
            "out_entropy_ptr": self.entropy,
            "out_argmax_ptr": self.argmax,
            "out_highest_ptr": self.max_logit,
            "out_lowest_ptr": self.min_logit,
            "out_squared_ptr": self.others_squared,
            "g_ptr": f.g if f else None,
            "k_ptr": f.class_weight if f else None,
            "smooth_ptr": f.smooth if f else None,
            "factor_ptr": f.factor[first:] if f else None,
            "target_value_ptr": f.target_value[first:] if f else None,
            "token_value_ptr": f.token_value if f else None,
        }

    def result(self) -> TokenSums:
        weighted = self.weighted
        if weighted is not None and self.smoothing is not None:
            bias, temperature = self.smoothing.weighted_bias, self.call.inputs.temperature
            bias = bias * self.call.options.logit_scale
            weighted = weighted + (bias if temperature is None else bias / temperature)
        return TokenSums(
            self.target_logit, self.out_anchor, self.log_total, weighted, self.entropy,
            self.argmax, self.max_logit, self.min_logit, self.others_squared, self.total,
        )  # fmt: skip
