"""A step that was seen before is repeated from what was written down of it, without its Python.

The second call of a kind is written down while it runs (recording.py). A later call of the kind gets its memory in a
few pieces and repeats the list (program.py): the launches of the first two, and so their bits. A kind that is seen once
costs nothing but its name.

The Triton backend runs its steps through :func:`run_step`; of a compiled call, these are whole operations of
compiled/ops.py. Steps that others look at (dispatch modes, profilers of launches), and those that add to a buffer run
as they are. With ``LOGITLESS_REPEAT=0`` all do. A step of several ranks is repeated with its collectives, whether the
other ranks repeat theirs or not. No mirror: XLA compiles a whole program.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from logitless.torch_impl.call import TENSORS, Arrays, Call, Needs
from logitless.torch_impl.kernels import launch, rehearsal
from logitless.torch_impl.kernels.program import Program
from logitless.torch_impl.kernels.recording import Finishes, Recorded, Recorder

Result = TypeVar("Result")

FORWARDS = frozenset(("loss", "log_probs"))
# Programs are known of this many kinds, and this many kinds are known to have been seen. Then both begin anew.
MOST_PROGRAMS, MOST_SEEN = 256, 8192


@dataclasses.dataclass
class Settings:
    """What holds for all steps of the process."""

    off: bool = os.environ.get("LOGITLESS_REPEAT") == "0"
    """Whether they run as they are."""
    on_cpu: bool = False
    """Whether steps on a CPU are repeated too: for tests, and to measure the host alone."""


class Forward(Protocol):
    """What the forward of a step leaves: steps.Loss, steps.LogProbs."""

    waiting: Finishes | None
    saved: tuple[Tensor, ...]

    def _replace(self, *, waiting: Finishes | None) -> object: ...


settings = Settings()
programs: dict[Hashable, Program | None] = {}
"""By kind; None: it cannot be repeated."""
seen: set[Hashable] = set()


def run_step(
    name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result],
    others: Sequence[Tensor | float | None] = (),
) -> Result:  # fmt: skip
    """``step(call)``, repeated if its kind was written down. ``others``: what else it reads beside ``call``."""
    kind = _kind_of(name, arrays, call, needs, others)
    if kind is None:
        return rehearsal.run_step(name, arrays, call, needs, step)
    program = programs.get(kind)
    given = [tensor for tensor in (*arrays, *others) if isinstance(tensor, Tensor)]
    if program is not None:
        return cast("Result", program.run(given, arrays.hidden.device))
    if kind in seen and kind not in programs:
        step = functools.partial(_written_down, kind, given, step)
    elif len(seen) >= MOST_SEEN:
        seen.clear()
    seen.add(kind)
    return rehearsal.run_step(name, arrays, call, needs, step)


def _kind_of(
    name: str, arrays: Arrays, call: Call, needs: Needs, others: Sequence[Tensor | float | None]
) -> Hashable | None:
    """What a step's host code depends on, and perhaps more; None: it runs as it is."""
    device = arrays.hidden.device
    if settings.off or (device.type != "cuda" and not settings.on_cpu):
        return None
    if call.into is not None or call.deferred is not None:
        return None
    if not arrays.target.numel() or torch._C._len_torch_dispatch_stack() or launch.is_watched():
        return None
    kind: list[Hashable] = [name, device, call, needs, torch.get_float32_matmul_precision()]
    places: list[int] = []
    # A backward's arrays may have been unpacked by somebody's hooks, in another layout.
    for tensors, are_known in ((arrays, call.number is not None and name in FORWARDS), (others, False)):
        for tensor in tensors:
            if type(tensor) in TENSORS:
                found = cast("Tensor", tensor)
                places.append(found.data_ptr())
                if not are_known:
                    kind += (found.dtype, found.shape, found.stride(), places[-1] % 16)
            elif isinstance(tensor, Tensor):
                return None
            elif not are_known:
                kind.append(tensor)
    if len(set(places)) < len(places):  # which of them are the same memory
        kind += map(places.index, places)
    return tuple(kind)


def _written_down(kind: Hashable, given: Sequence[Tensor], step: Callable[[Call], Result], call: Call) -> Result:
    """``step(call)``, written down."""
    if rehearsal.rehearsing():
        return step(call)
    recorder = Recorder(given)
    with recorder.noting():
        result = step(call)
    publish = functools.partial(_publish, kind, recorder, _promised(call))
    forward = cast("Forward", result)
    waiting = getattr(forward, "waiting", None)
    if waiting is None:
        recorder.end_part(result, getattr(forward, "saved", ()))
        publish()
        return result
    recorder.end_part(forward._replace(waiting=None), forward.saved)
    return cast("Result", forward._replace(waiting=Recorded(waiting, recorder, publish)))


def _promised(call: Call) -> int:
    """Bytes that the step may hold: the plan's, and what ranks exchange."""
    plan, shard = call.chunk_plan, call.shard
    more = 0 if shard is None else shard.scratch_bytes(plan.tokens, plan.hidden, call.compute_dtype.itemsize)
    return plan.scratch_bytes + more


def _publish(kind: Hashable, recorder: Recorder, promised: int) -> None:
    """Have later calls repeat the step, if a program of it keeps the promise of memory."""
    if len(programs) >= MOST_PROGRAMS:
        programs.clear()
    programs[kind] = recorder.program(promised)
