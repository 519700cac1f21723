"""One rank's slice of the vocabulary, and what the ranks tell each other: the collectives of a sharded call.

Rank r holds w[start_r : start_r + V_r], in the order of the ranks. Of every chunk of tokens the ranks exchange

    the anchors     one sum of C numbers: the rank that owns y_i gives z_{i, y_i}, the others 0
    the sums        one gather of C records: each rank's anchor, Σ exp(z_ij − anchor), and what else was asked for
    dX              one sum of C × D numbers in the accumulation dtype, beside whatever is computed next

A rank's anchor is the target's logit, or the largest logit of its own slice where that is far above (the rescue). So a
record is a pair (shift, sum); every rank combines all pairs in the order of the ranks, relative to the largest shift,
and has the same bits. Where the plain operations hold exponentials, the rows' largest logits are known before the first
of these: there one maximum of C numbers goes ahead, and the shifts are one number.

On one device a :class:`Shard` is whole and nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import numerics
from logitless.spec import CLASS_SUMS, LOWEST_GAP


def _named(new: str, old: str) -> Any:  # a function of either name
    # PyTorch 2.13 renames two collectives.
    return getattr(dist, new, None) or getattr(dist, old)


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> object: ...


class _Sending(threading.local):
    """What this thread's collectives do beside communicating."""

    note: Callable[..., Work | None] | None = None
    """Called in place of a collective, with it, its tensors and its options."""


sending = _Sending()


def _send(function: Callable[..., Work | None], *tensors: Tensor, **options: object) -> Work | None:
    """``function(*tensors, **options)``: every collective of a sharded step."""
    if sending.note is not None:
        return sending.note(function, tensors, options)
    return function(*tensors, **options)


_XP = cast("numerics.Namespace[Tensor]", torch)  # call.py, which has it for all others, imports this module


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank's slice of the vocabulary and the group that holds the whole; of one device the whole itself."""

    vocab: int
    """V: entries of all ranks together."""
    start: int = 0
    """The global id of this rank's first entry."""
    group: dist.ProcessGroup | None = None
    """None on one device."""
    rank: int = 0
    ranks: int = 1
    sequence_parallel: bool = False
    """Whether hidden comes in, and dX goes out, as this rank's slice of the tokens."""
    largest: int = 0
    """Entries of the largest slice. The plan is for these."""
    quiet: bool = False
    """Whether nothing is sent: in a rehearsal, which makes shapes and no numbers."""

    @property
    def split(self) -> bool:
        return self.group is not None

    def sum(self, value: Tensor) -> Tensor:
        """Σ over the ranks, in place."""
        if self.split and not self.quiet:
            _send(dist.all_reduce, value, group=self.group)
        return value

    def max(self, value: Tensor) -> Tensor:
        """The largest over the ranks."""
        if not self.split or self.quiet:
            return value
        value = value.clone()
        _send(dist.all_reduce, value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def start_sum(self, value: Tensor) -> Work | None:
        """Begin Σ over the ranks, in place; ``value`` holds it once the returned work has been waited for."""
        return None if self.quiet else _send(dist.all_reduce, value, group=self.group, async_op=True)

    def gather(self, value: Tensor) -> Tensor:
        """Every rank's ``value`` [n, ...], one after another: [ranks · n, ...]."""
        out = value.new_empty(self.ranks * value.shape[0], *value.shape[1:])
        if not self.quiet:
            _send(_named("all_gather_single", "all_gather_into_tensor"), out, value.contiguous(), group=self.group)
        return out

    def start_scatter(self, rows: Tensor) -> tuple[Tensor, Work | None]:
        """Begin Σ over the ranks of ``rows`` [N, D], of which this rank gets its N / ranks."""
        out = rows.new_empty(rows.shape[0] // self.ranks, *rows.shape[1:])
        if self.quiet:
            return out, None
        scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        return out, _send(scatter, out, rows, group=self.group, async_op=True)

    def tokens_of(self, tokens: int) -> slice:
        """This rank's slice of the tokens under sequence parallelism."""
        own = tokens // self.ranks
        return slice(self.rank * own, (self.rank + 1) * own)

    def local_ids(self, ids: Tensor, entries: int) -> Tensor:
        """Global ids to places in this rank's slice of ``entries``; −1 for an id that another rank owns."""
        local = ids - self.start
        return local.masked_fill_((local < 0) | (local >= entries), -1)

    def scratch_bytes(self, tokens: int, hidden: int, itemsize: int) -> int:
        """Bytes that a sharded call holds beyond its plan's promise: dX in float32 (float64), the records, and under
        sequence parallelism the gathered hidden states."""
        wide = max(4, itemsize)
        records = 3 * len(RECORD) * self.ranks * tokens * wide
        gathered = tokens * hidden * (itemsize + wide) if self.sequence_parallel else 0
        return tokens * hidden * wide + records + gathered


def whole(vocab: int) -> Shard:
    """The shard of a call on one device."""
    return Shard(vocab)


# ---------------------------------------------------------------------------------------------------------------------
# The sums of a chunk

Record = dict[str, Tensor]
"""What one rank knows of a chunk's rows after its own first product, [C] each: "anchor", and of CLASS_SUMS what was
asked for. An argmax is a global id."""
RECORD = ("anchor", *CLASS_SUMS)


@dataclasses.dataclass(frozen=True)
class Lines:
    """Every rank's record as a line, [ranks, C] each, sums relative to the one ``anchor``."""

    anchor: Tensor  # [C]: the largest of the ranks' anchors
    share: Tensor  # [C]: exp(this rank's anchor − anchor), what this rank's exponentials still lack
    sums: dict[str, Tensor]

    def merged(self) -> dict[str, Tensor]:
        """The lines together, [C] each."""
        return {name: self._merged(CLASS_SUMS[name].merge, lines) for name, lines in self.sums.items()}

    def _merged(self, how: str, lines: Tensor) -> Tensor:
        if how == "sum":
            return lines.sum(dim=0)
        if how != "first":
            return lines.amax(dim=0) if how == "max" else lines.amin(dim=0)
        highest, beyond = self.sums["highest"], torch.iinfo(lines.dtype).max
        first = torch.where(highest == highest.amax(dim=0), lines, beyond).amin(dim=0)
        return first.masked_fill_(first == beyond, 0)  # a row of NaN has no largest


def exchange(shard: Shard, record: Record) -> Lines:
    """All ranks' records, one gather; on every rank the same."""
    dtype = record["s"].dtype
    whole_dtype = torch.int64 if dtype == torch.float64 else torch.int32
    if "argmax" in record:  # its bits: nothing computes with them on the way
        record = record | {"argmax": record["argmax"].to(whole_dtype).view(dtype)}
    sent = torch.stack(list(record.values()))
    got = shard.gather(sent).view(shard.ranks, *sent.shape)
    of = {name: got[:, place] for place, name in enumerate(record)}

    anchors = of.pop("anchor")
    anchor = anchors.amax(dim=0)
    shift = (anchors - anchor).clamp(min=LOWEST_GAP)
    if "argmax" in of:
        of["argmax"] = of["argmax"].contiguous().view(whole_dtype)
    return Lines(anchor, shift[shard.rank].exp(), of | numerics.moved_sums(_XP, of, shift))


def check_member(process_group: dist.ProcessGroup | None) -> None:
    """Raise TypeError unless ``process_group`` is one (or None, the default), ValueError unless this rank is in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("process_group: got one before torch.distributed.init_process_group(), allowed is after it")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group: got {type(process_group).__name__}, allowed is a torch.distributed.ProcessGroup"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError("process_group: got one that this rank is not in, allowed is one of its own groups")
