"""dX, dW and db of a call: the second and third product, and the targets' elements."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.scratch import ROW_ALIGNMENT_BYTES, low_row_bytes, round_up
from logitless.torch_impl.call import Gradients, Layout, Needs, empty_like_weight, is_turned
from logitless.torch_impl.chunk import Smoothing
from logitless.torch_impl.kernels.kernel_call import KernelCall, addresses, at_end, at_start, is_across
from logitless.torch_impl.kernels.launch import cdiv
from logitless.torch_impl.kernels.sums import Factors
from logitless.torch_impl.kernels.tiles import HIDDEN, HIDDEN_SUM, WEIGHT, WEIGHT_SUM, Tiles, WeightKind

with contextlib.suppress(ImportError):  # without triton, fused.unavailable() says so before a kernel is launched
    from logitless.torch_impl.kernels import portable as kernels

# Tokens up to which targets are sorted by counting, in one launch, with their values and bounds: 24 µs for so many on
# an H200, where torch.sort alone takes 50.
MOST_RANKED = 8192
# Columns that one program of kernels.column_sums_kernel sums: as many as the tallest tile of dW has entries, or more.
COLUMN_BLOCK = 256


def is_parted(needs: Needs, several: bool) -> bool:
    """Whether the sum over chunks is in two parts: the upper 16 bits lie where dW will be, the next 8 or 4 in a matrix
    of their own.

    It is where dW has 16 bits and there are several chunks."""
    return several and needs.weight is not None and needs.into is None and needs.weight.itemsize == 2


def low_layout(vocab: int, size: int, bits: int, turned: bool = False) -> tuple[tuple[int, int], torch.dtype]:
    """Shape in memory and dtype of the matrix of the sum's lower ``bits``, 8 or 4. A row is padded, so that it starts
    on a boundary."""
    rows, width = (size, vocab) if turned else (vocab, size)
    return (rows, low_row_bytes(width, bits)), torch.int8


def waiting_layout(tokens: int, size: int, dtype: torch.dtype) -> Layout:
    """Shape and dtype of what holds dX of all chunks but the last until the upstream gradient arrives: dX's own memory,
    and where dX has 16 bits, a matrix of 8 more, so that it is rounded once."""
    shape = (tokens, size)
    if dtype.itemsize > 2:
        return {"waiting": (shape, dtype)}
    return {"waiting": (shape, torch.int16), "waiting_low": (shape, torch.int8)}


NO_SCALARS: dict[str, Tensor | None] = dict.fromkeys(("unit_ptr", "upstream_ptr", "scale_ptr"))


@dataclasses.dataclass(frozen=True)
class Targets:
    """The targets' elements of the gradient, sorted by target. Tokens of one target keep their own order, so that every
    sum has one; what is not in the vocabulary comes last."""

    key: Tensor  # [N] int32: the targets, ascending
    token: Tensor  # [N]: whose target that is
    value: Tensor  # [N]: its element, relative to the unit
    bounds: Tensor  # int32: the first place whose target is at least 0, TARGET_GRAIN, 2 · TARGET_GRAIN, …

    @classmethod
    def of(cls, c: KernelCall, keys: Tensor, by_token: Tensor, **scalars: Tensor) -> Targets:
        """keys: every token's target, V for what is not in the vocabulary; by_token: its element. scalars: of up to
        MOST_RANKED tokens what else kernels.sort_kernel makes."""
        end, grain = round_up(c.vocab, COLUMN_BLOCK), kernels.TARGET_GRAIN.value  # whole tiles and blocks
        edges = end // grain + 1
        if c.tokens > MOST_RANKED:
            key, token = _sorted(c, keys)
            bounds = torch.arange(0, end + 1, grain, dtype=torch.int32, device=c.device)
            # What is not in the vocabulary lies behind the last bound: its hidden states may be no numbers.
            bounds = torch.searchsorted(key, bounds.clamp_(max=c.vocab), out_int32=True)
            return cls(key, token, by_token.index_select(0, token), bounds)
        key, token, value = c.empty(c.tokens, torch.int32), c.empty(c.tokens, torch.int32), c.empty(c.tokens)
        bounds = c.empty(edges, torch.int32)
        c.launch(
            kernels.sort_kernel, cdiv(c.tokens, 16) + cdiv(edges, 16), key_ptr=keys, value_ptr=by_token,
            sorted_ptr=key, token_ptr=token, sorted_value_ptr=value, bounds_ptr=bounds, edges=edges, BI=16, BJ=512,
            **(NO_SCALARS | scalars),
        )  # fmt: skip
        return cls(key, token, value, bounds)

    def of_entries(self, start: int) -> Targets:
        """For a matrix that begins with the entry ``start``, a multiple of TARGET_GRAIN."""
        bounds = self.bounds[start // kernels.TARGET_GRAIN.value :]
        return dataclasses.replace(self, key=self.key - start, bounds=bounds)

    @property
    def pointers(self) -> dict[str, Tensor | None]:
        """By the kernels' names for them."""
        return {"key_ptr": self.key, "token_ptr": self.token, "value_ptr": self.value, "bounds_ptr": self.bounds}


@dataclasses.dataclass(frozen=True)
class GroupedTargets:
    """The targets by the chunk with which they enter a narrow sum. Those that a chunk has twice or more enter with it.
    All others, and all of the last chunk, enter with the last one.

    Without that the sum of a frequent target's row would be much larger than its result, and lose digits. A tile of dW
    with few targets takes as long as one with many, so those that a chunk has once are left for the end.
    """

    key: Tensor  # [N] int32: chunk by chunk the targets that enter with it, ascending
    token: Tensor  # [N] int32: whose target that is
    bounds: Tensor  # [chunks, edges] int32: as those of Targets, of each chunk

    @classmethod
    def of(cls, c: KernelCall) -> GroupedTargets:
        tokens, whole, block = c.tokens, torch.int32, 256
        chunks, edges = cdiv(tokens, c.chunk), round_up(c.vocab, COLUMN_BLOCK) // kernels.TARGET_GRAIN.value + 1
        # Sorted by target, a chunk's tokens of one target are neighbours: sorting keeps the order of positions.
        key, position = _sorted(c, c.inputs.key.index_select(0, c.order[:tokens]))
        group, token = c.empty(tokens, whole), c.empty(tokens, whole)
        c.launch(
            kernels.group_kernel, cdiv(tokens, block), key_ptr=key, position_ptr=position, group_ptr=group,
            token_ptr=token, late=chunks - 1, BLOCK=block,
        )  # fmt: skip
        group, place = _sorted(c, group)
        made = cls(c.empty(tokens, whole), c.empty(tokens, whole), c.empty(chunks, edges, whole))
        c.launch(
            kernels.list_kernel, cdiv(tokens, block) + cdiv(chunks * edges, block), group_ptr=group, place_ptr=place,
            key_ptr=key, token_ptr=token, listed_key_ptr=made.key, listed_token_ptr=made.token, bounds_ptr=made.bounds,
            steps=tokens.bit_length(), edges=edges, bounds=chunks * edges, BLOCK=block,
        )  # fmt: skip
        return made

    def of_chunk(self, c: KernelCall, first: int, by_token: Tensor) -> Targets:
        """Those of the chunk that begins at the position ``first``; by_token: every token's element."""
        return Targets(self.key, self.token, by_token.index_select(0, self.token), self.bounds[first // c.chunk])


def _sorted(c: KernelCall, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens' keys [N] int32, ascending, and their places before; equal ones keep their order."""
    key = torch.empty_like(keys)
    if c.tokens > MOST_RANKED:
        place = c.empty(c.tokens, torch.int64)
        torch.sort(keys, stable=True, out=(key, place))  # a repeated step needs memory that is there
        return key, place
    place = c.empty(c.tokens, torch.int32)
    nothing = {"value_ptr": None, "sorted_value_ptr": None, "bounds_ptr": None, "edges": 0, **NO_SCALARS}
    c.launch(
        kernels.sort_kernel, cdiv(c.tokens, 16), key_ptr=keys, sorted_ptr=key, token_ptr=place, **nothing, BI=16, BJ=512
    )
    return key, place


NO_TARGETS: Mapping[str, Tensor | None] = dict.fromkeys(("key_ptr", "token_ptr", "value_ptr", "bounds_ptr"))


def matrix_of(c: KernelCall, columns: int, weight: Tensor | None) -> Tensor:
    """e of a chunk [C, columns]; in a plan that lends, in dW, ``weight``: at the beginning of its memory. If dW is made
    in place, as eᵀ in the first columns of its rows, or if it is turned, in its first rows in memory."""
    if not c.plan.lends:
        return c.matrix(c.chunk, columns)
    assert weight is not None
    assert weight.dtype == c.dtype
    if c.plan.in_place:
        return weight[:, : c.chunk].T
    return at_start(weight, 0, c.chunk, columns)


def operand_of(c: KernelCall, e: Tensor, weight: Tensor | None) -> Tensor:
    """x of a chunk [C, D]; behind e where that lies in dW, ``weight``, before dW is made."""
    if weight is None or not c.plan.lends or c.plan.in_place:
        return c.operand()
    return at_start(weight, c.chunk * e.stride(0), c.chunk, c.size)


class GradientProducts:
    """dX, dW and db of a call, chunk by chunk and slice by slice."""

    def __init__(
        self, c: KernelCall, needs: Needs, smoothing: Smoothing | None, g: Tensor, unit: Tensor,
        weight: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``weight``: dW, if its memory is there already."""
        self.call, self.needs, self.smoothing, self.g, self.unit = c, needs, smoothing, g, unit
        self.last_targets: Targets | None = None
        self.hidden_sum: Tensor | None = None
        self.is_hidden_made = False
        self.waiting: Tensor | None = None
        self.waiting_low: Tensor | None = None
        self.weight_sum: Tensor | None = None
        self.parted = is_parted(needs, c.tokens > c.chunk)
        self.high: Tensor | None = None
        self.low: Tensor | None = None
        self.parts: Tensor | None = None
        # Under sequence parallelism dX is what comes back from the sum over the ranks.
        by_rank, room = c.shard.sequence_parallel, needs.room
        self.hidden = None if by_rank or needs.hidden is None else c.empty(c.tokens, c.size, needs.hidden)
        if weight is None and needs.weight is not None:
            weight = needs.into if needs.into is not None else room
            weight = empty_like_weight(c.weight, needs.weight) if weight is None else weight
        self.weight = weight
        self.turned = c.turned if weight is None else is_turned(weight)  # dW, which may be a given buffer
        self.works: list[Any] = []  # sums of dX over the ranks that are under way
        self.bias = torch.zeros(c.vocab, dtype=torch.float32, device=c.device) if needs.bias else None
        self.smooth_rows = None if smoothing is None else g * -smoothing.factor
        self.smooth_x = torch.zeros(c.size, dtype=torch.float32, device=c.device) if smoothing is not None else None

    @property
    def room(self) -> Tensor | None:
        """dW's memory, or as much of it as is made later."""
        room, plan = self.needs.room if self.weight is None else self.weight, self.call.plan
        return room[: plan.later] if plan.alone and room is not None else room

    @property
    def lent(self) -> Tensor | None:
        """dW, if its rows may hold something else until they are written."""
        wide = self.weight is not None and self.weight.itemsize >= self.call.dtype.itemsize
        return self.room if wide and self.needs.into is None else None

    def blocks(self, e: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the vocabulary, each with its matrix: of e, or larger, in rows of dW that are written later."""
        c, dw = self.call, self.lent
        for start, stop, lent in c.plan.lent_slices(0 if dw is None else c.size * dw.itemsize):
            block, columns = e[:, : stop - start], stop - start
            if lent:
                assert dw is not None
                block = at_end(dw, c.chunk, columns, c.dtype)
            if self.parted and c.plan.sums_slices:
                assert dw is not None
                (_, width), dtype = low_layout(columns, c.size, self.low_bits)
                behind = c.chunk * columns * c.dtype.itemsize + ROW_ALIGNMENT_BYTES
                assert self.weight is not None
                self.high, self.low = self.weight.view(torch.int16), None  # the last slice's makes room
                self.low = at_end(dw, columns, width, dtype, behind) if lent else c.empty(columns, width, dtype)
            yield slice(start, stop), block

    @property
    def low_bits(self) -> int:
        """Bits of the sum over chunks beside the upper 16. (4 share a byte with their neighbour's in memory, which in a
        turned dW is not the next column.)"""
        return 8 if self.turned else self.call.plan.low_bits

    @functools.cached_property
    def grouped_targets(self) -> GroupedTargets | None:
        """If dW is a sum of 20 bits."""
        return GroupedTargets.of(self.call) if self.parted and self.low_bits < 8 else None

    def _targets(self, first: int, by_token: Tensor, last: bool) -> Targets | None:
        """The targets that enter the sums with a chunk; ``last``: it is the last one."""
        c, grouped = self.call, self.grouped_targets
        if grouped is not None:
            return grouped.of_chunk(c, first, by_token)
        if not last:
            return None
        return self.last_targets or Targets.of(c, c.inputs.key, by_token)

    @property
    def _wants_targets(self) -> bool:
        return self.call.tokens > 0 and (bool(self.needs.weight) or self.bias is not None)

    def scale_for(self, upstream: Tensor, factors: Factors) -> Tensor:
        """unit · upstream, made by the kernel that sorts the last chunk's targets, if there is one. (With several ranks
        :meth:`add` sorts them, once dX is on its way to the others.)"""
        c = self.call
        if c.shard.split or c.tokens > MOST_RANKED or not self._wants_targets or self.grouped_targets is not None:
            return self.unit * upstream
        scale = torch.empty_like(self.unit)
        scalars = {"unit_ptr": self.unit, "upstream_ptr": upstream, "scale_ptr": scale}
        self.last_targets = Targets.of(c, c.inputs.key, factors.token_value, **scalars)
        return scale

    @property
    def scales_late(self) -> bool:
        """Whether a chunk's x becomes u ⊙ x in :meth:`add`, once its dX is on its way to other ranks. The last chunk's
        x has become so in the forward."""
        shard, needs = self.call.shard, self.needs
        return shard.split and not shard.sequence_parallel and bool(needs.hidden) and bool(needs.weight)

    def add_smooth_x(self, first: int, x: Tensor) -> None:
        """Σ_i g_i x_i of the chunk, from x as it came."""
        if self.smooth_x is not None:
            self._column_sums(x, self.g, first, self.smooth_x, None, by_token=True)

    def scale_operand(self, first: int, x: Tensor, factors: Factors) -> None:
        """u ⊙ x of the chunk, for dW."""
        c = self.call
        if self.needs.weight:
            c.launch(
                kernels.scale_rows_kernel, c.chunk, x_ptr=x, factor_ptr=factors.factor[first:], first=first,
                x_stride=x.stride(0), BLOCK=c.block,
            )  # fmt: skip

    def _column_sums(
        self, matrix: Tensor, factor: Tensor | None, first: int, out: Tensor, targets: Targets | None, by_token: bool
    ) -> None:
        c, columns = self.call, matrix.shape[1]
        c.launch(
            kernels.column_sums_kernel, cdiv(columns, COLUMN_BLOCK), matrix_ptr=matrix, factor_ptr=factor, out_ptr=out,
            first=first, stride=matrix.stride(0), column_stride=matrix.stride(1), columns=columns, BY_TOKEN=by_token,
            HAS_FACTOR=factor is not None, TARGETS=targets is not None, BR=16, BC=COLUMN_BLOCK, STAGES=4, num_warps=4,
            **(NO_TARGETS if targets is None else targets.pointers),
        )  # fmt: skip

    def add(
        self, first: int, x: Tensor, e: Tensor, entries: slice, factors: Factors | None, scale: Tensor | None
    ) -> None:
        """The products of a block e over ``entries``; scale: this is the last block of a result, and what it lacks."""
        c, targets = self.call, None
        if self.needs.hidden and c.shard.split and c.tokens:  # on its way to the others while dW is made
            self.add_hidden(first, e, entries, factors, None)
            if entries.stop == c.vocab:
                self._start_sum(first)
        # Short kernels first: a sum over the ranks that begins beside a product finds no multiprocessor free.
        if factors is not None and scale is None and self.scales_late:
            self.scale_operand(first, x, factors)
        if factors is not None and self._wants_targets:
            targets = self._targets(first, factors.token_value, scale is not None)
        if self.bias is not None:
            factor = None if factors is None else factors.factor[first:]
            self._column_sums(e, factor, first, self.bias[entries], targets, by_token=False)
        early = c.plan.in_place  # dW is made where e lies
        wanted = self.needs.hidden and not self.is_hidden_made
        if wanted and early:
            self.add_hidden(first, e, entries, factors, scale)
        # dW first: x may lie where dX will be.
        if self.needs.weight:
            last = scale is not None and (first + c.chunk >= c.tokens or self.needs.into is not None)
            self.add_weight(first, x, e, entries, scale if last else None, targets)
        if wanted and not (c.shard.split or early):
            last = scale is not None and entries.stop == c.vocab
            self.add_hidden(first, e, entries, factors, scale if last else None)

    def make_hidden(self, e: Tensor, factors: Factors) -> None:
        """dX of the only chunk, before the upstream scalar is there."""
        if self.needs.hidden and not self.call.shard.split:
            self.add_hidden(0, e, slice(0, self.call.vocab), factors, None)
            self.is_hidden_made = True

    def _start_sum(self, first: int) -> None:
        """Begin the sum over the ranks of a chunk's dX; under sequence parallelism of all of it, after the last one."""
        c = self.call
        assert self.hidden_sum is not None
        if not c.shard.sequence_parallel:
            self.works.append(c.shard.start_sum(self.hidden_sum[first : first + c.chunk]))
        elif first + c.chunk >= c.tokens:
            by_token = torch.empty_like(self.hidden_sum)
            one = torch.ones((), dtype=torch.float32, device=c.device)
            self._finish_hidden(by_token, one, c.tokens, smooth=False)
            self.hidden, work = c.shard.start_scatter(by_token)
            self.works.append(work)

    def _hidden_results(self, final: bool, waits: bool) -> dict[str, Any]:
        """Where a product of dX goes."""
        c, hidden = self.call, self.hidden
        if waits:
            assert hidden is not None
            if self.waiting is None:
                layout = waiting_layout(c.tokens, c.size, hidden.dtype)
                self.waiting = hidden.view(layout["waiting"][1])
                if "waiting_low" in layout:
                    shape, dtype = layout["waiting_low"]
                    room = self.room if c.plan.lends_waiting else None
                    self.waiting_low = c.empty(*shape, dtype) if room is None else at_end(room, c.tokens, c.size, dtype)
        elif not final and self.hidden_sum is None:
            self.hidden_sum = c.empty(c.tokens, c.size)
        return {
            "sum_ptr": self.hidden_sum,
            "out_ptr": self.waiting if waits else hidden,
            "low_ptr": self.waiting_low if waits else None,
            "FINAL": final,
            "WAITS": waits,
        }

    def add_hidden(self, first: int, e: Tensor, entries: slice, factors: Factors | None, scale: Tensor | None) -> None:
        c, s, final = self.call, self.smoothing, scale is not None
        # A chunk's dX is whole at once, unless the next slice or another rank adds to it.
        waits = not final and c.plan.hidden_waits and not c.shard.split
        t = c.architecture.tiles_of(HIDDEN if final or waits else HIDDEN_SUM, c.size)
        placed = self._hidden_results(final, waits)
        target_w = c.weight if c.target_weight is None else c.target_weight
        own = c.products.hidden(c, t, None if final or waits else self.hidden_sum, self.parts, s is not None)
        self.parts = own.parts
        results: dict[str, Any] = placed | {
            "factor_ptr": factors.factor[first:] if factors else None,
            "target_value_ptr": factors.target_value[first:] if factors else None,
            "row_target_ptr": c.row_target[first:],
            "scale_ptr": scale,
            "smooth_ptr": self.smooth_rows,
            "weighted_rows_ptr": s.weighted_rows if s else None,
            "first": first,
            "columns": entries.stop - entries.start,
            "target_w_ptr": target_w,
            "target_w_stride": target_w.stride(0),
            "ADD": entries.start > 0,
            "ROWS": factors is not None,
            "SMOOTH": s is not None,
            "GROUP": own.group,
        }
        c.launch(
            c.products.hidden_kernel, c.programs, **results, **own.values, w_ptr=c.weight[entries], **addresses(e=e),
            e_desc=c.describe_matrix(e, t.block_rows, t.bk), w_desc=c.describe_weight(entries, (t.bk, t.bn)),
            LENT=is_across(e),
        )  # fmt: skip
        if own.parts is not None:
            rows = 32
            combined = results | t.sizes | {"parts_ptr": own.parts, "SLICE": rows, "num_warps": 8}
            c.launch(kernels.combine_hidden_kernel, c.programs * t.bm // rows, **combined)

    def add_weight(
        self, first: int, x: Tensor, e: Tensor, entries: slice, scale: Tensor | None, targets: Targets | None
    ) -> None:
        c, into, final = self.call, self.needs.into is not None, scale is not None
        if c.plan.is_first_half:
            entries = slice(c.plan.later, c.vocab)
            e = e[:, entries]
        smooth = self.smoothing is not None and not (into and first + c.chunk < c.tokens)
        out: Any = self.weight if final else self._weight_accumulator()
        parted = self.parted and (first > 0 or not final)
        t = self._weight_tiles(out.dtype)
        reads = first > 0 if not into else out.dtype != torch.float32
        kind = WeightKind(
            final, parted, reads, smooth, targets is not None, c.plan.in_place, self.turned, self.low_bits
        )
        width = c.vocab if self.turned else c.size
        aligned = (width * out.element_size()) % 16 == 0
        summed, start, k = out if into else self.high if parted else self.weight_sum, entries.start, c.class_weight
        # Hopper's kernel has one descriptor for the upper bits that it reads and the result that it writes.
        assert not parted or (summed is not None and summed.data_ptr() == out.data_ptr())
        if c.plan.has_own_sum:
            summed = None if summed is None else summed[entries]
            targets = None if targets is None else targets.of_entries(start)
            out, k, start, entries = out[entries], None if k is None else k[entries], 0, slice(0, e.shape[1])
        own = c.products.weight(c, t, kind, self.low, aligned)
        described = None
        if own.by_descriptor:
            block = out[entries].view(torch.int32) if own.pairs else out[entries]
            described = c.describe_matrix(block, t.block_rows, own.columns)
        programs, placed = self._in_place(t)
        c.launch(
            c.products.weight_kernel, programs, **placed, **own.values, **addresses(e=e, x=x),
            e_desc=c.describe_matrix(e, t.bk, t.block_rows), x_desc=c.describe(x, t.bk, t.bn),
            sum_ptr=summed, low_ptr=self.low if parted else None, class_weight_ptr=k,
            out_desc=described, out_width=width, TURNED=self.turned,
            out_ptr=out, scale_ptr=scale, smooth_x_ptr=self.smooth_x_scaled if final and smooth else None,
            first=first, start=start, columns=entries.stop - entries.start, ADD=first > 0 or into, FINAL=final,
            INTO=into, PARTED=parted, SMOOTH=smooth, TARGETS=targets is not None, LOW_BITS=kind.low_bits,
            **(NO_TARGETS if targets is None else targets.pointers),
        )  # fmt: skip

    def _weight_tiles(self, dtype: torch.dtype) -> Tiles:
        """Those of dW, or of its sum. In place the widest: fewer programs wait for each other."""
        c, kernel = self.call, WEIGHT_SUM if dtype in (torch.float32, torch.int16) else WEIGHT
        return c.tiles(kernel) if c.plan.in_place else c.architecture.tiles_of(kernel, c.size)

    def _in_place(self, t: Tiles) -> tuple[int, dict[str, object]]:
        """How many programs make dW, and in which order. If e lies in its rows, the column tiles of a row of tiles are
        made at a time."""
        c = self.call
        if not c.plan.in_place:
            return c.programs, {"GROUP": t.group, "counter_ptr": None}
        beside = cdiv(c.size, t.bn)
        programs = c.programs // beside * beside
        cooperative = {"PROGRAMS": programs, "launch_cooperative_grid": True}
        return programs, {"GROUP": 1, "counter_ptr": c.counter, "LENT": True} | cooperative

    def _weight_accumulator(self) -> Tensor:
        """What a chunk's dW is added to that is not the last: the upper 16 bits of the sum, or all of it."""
        c, weight = self.call, self.weight
        if self.parted:
            if self.low is None and weight is not None:
                (rows, width), dtype = low_layout(c.plan.weight_entries, c.size, self.low_bits, self.turned)
                if c.plan.lends_low:
                    assert self.room is not None
                    behind = c.plan.waiting_bytes + ROW_ALIGNMENT_BYTES
                    low = at_end(self.room, rows, width, dtype, behind)
                else:
                    low = c.empty(rows, width, dtype)
                self.high, self.low = weight.view(torch.int16), low.T if self.turned else low
            assert self.high is not None
            return self.high
        if self.weight_sum is None:  # a float32 result is its own accumulator
            whole = weight is not None and weight.dtype == torch.float32
            self.weight_sum = weight if whole else empty_like_weight(c.weight, torch.float32)
        assert self.weight_sum is not None
        return self.weight_sum

    @functools.cached_property
    def smooth_x_scaled(self) -> Tensor | None:
        if self.smoothing is None or self.smooth_x is None:
            return None
        return self.smooth_x * self.smoothing.factor

    def _finish_hidden(self, out: Tensor, scale: Tensor, done_from: int, smooth: bool) -> None:
        c, s = self.call, self.smoothing
        c.launch(
            kernels.finish_hidden_kernel, c.tokens, sum_ptr=scale if self.hidden_sum is None else self.hidden_sum,
            waiting_ptr=self.waiting, low_ptr=self.waiting_low, out_ptr=out, scale_ptr=scale,
            smooth_ptr=self.smooth_rows, weighted_rows_ptr=s.weighted_rows if s else None,
            done_from=done_from, WAITS=self.waiting is not None, SMOOTH=smooth, BLOCK=c.block,
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
                done_from = c.tokens if c.shard.split or self.is_hidden_made else done_from
                self._finish_hidden(self.hidden, scale, done_from, smooth=s is not None)
        bias = self.bias
        if bias is not None:
            if s is not None:
                share = s.factor * self.g.sum()
                k = c.class_weight
                bias = bias - (share if k is None else share * k)
            bias = bias * scale
        return Gradients(self.hidden, self.weight if self.needs.into is None else None, bias)
