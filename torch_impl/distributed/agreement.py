"""The ranks of a sharded call compare what they were given before the first collective whose size depends on it.

A rank that arrives with another shape, dtype or option, or whose own arguments are refused, makes the call an error on
every rank. What is compared is a fixed number of integers, so that this exchange fits whatever the ranks hold.

The integers go over the group's CPU backend wherever it has one ("cpu:gloo,cuda:nccl", or gloo alone), at every call,
and the device is never waited for. A group of NCCL alone has no such way: there the integers go through the GPU and the
host waits for them, once for every combination of them; a rank that differs from a combination that the others have
compared before is found by the group's own timeout.
"""

from __future__ import annotations

import hashlib
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.torch_impl.distributed.parallel import Shard

_REFUSED, _TAKEN = 0, 1
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], list[list[int]]]] = (
    weakref.WeakKeyDictionary()
)


def number_of(value: object) -> int:
    """An integer that stands for ``value`` on every rank alike: of a number of words or options, 60 bits of a hash."""
    if isinstance(value, (bool, int)):
        return int(value)
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def refuse(group: dist.ProcessGroup, device: torch.device, length: int) -> None:
    """Tell the others that this rank raises an error of its own."""
    _exchange(group, device, [_REFUSED] + [0] * length, keep=False)


def agree(
    group: dist.ProcessGroup, device: torch.device, facts: dict[str, object], vocab: int, sequence_parallel: bool
) -> Shard:
    """This rank's :class:`Shard`, with the sizes of all of them; ``facts`` (words → value) must be the same everywhere.

    Raises ValueError on every rank where they differ, or where a rank has refused its arguments.
    """
    every = _sizes(group, device, facts, vocab)
    rank = dist.get_rank(group)
    return Shard(sum(every), sum(every[:rank]), group, rank, len(every), sequence_parallel, largest=max(every))


def _sizes(group: dist.ProcessGroup, device: torch.device, facts: dict[str, object], vocab: int) -> list[int]:
    """V of every rank, after comparing the facts."""
    own = [_TAKEN, vocab, *map(number_of, facts.values())]
    rows = _exchange(group, device, own, keep=True)
    for rank, row in enumerate(rows):
        if row[0] == _REFUSED:
            raise ValueError(f"process_group: rank {rank} of the group refused its arguments; its own error says why")
    for place, (name, value) in enumerate(facts.items(), start=2):
        column = [row[place] for row in rows]
        if len(set(column)) > 1:
            shown = ", ".join(map(str, column)) if isinstance(value, (bool, int)) else "different ones"
            raise ValueError(
                f"process_group: the ranks were given {shown} as {name}, allowed is the same on every rank of the group"
            )
    return [row[1] for row in rows]


def _exchange(group: dist.ProcessGroup, device: torch.device, own: list[int], keep: bool) -> list[list[int]]:
    over_cpu = device.type == "cpu" or "cpu:" in str(dist.get_backend_config(group))
    compared = _compared.setdefault(group, {})
    if keep and not over_cpu and tuple(own) in compared:
        return compared[tuple(own)]
    sent = torch.tensor(own, dtype=torch.int64, device="cpu" if over_cpu else device)
    rows: list[Tensor] = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, sent, group=group)
    numbers: list[list[int]] = torch.stack(rows).tolist()
    if keep and not over_cpu:
        compared[tuple(own)] = numbers
    return numbers
