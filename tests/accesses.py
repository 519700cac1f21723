"""What the programs of an interpreted Triton kernel read and write.

Each address must lie in an array that the kernel was given. Where one program writes, no other program may read or
write, unless one of the two comes after the other for certain. Results need not show either fault: there is memory
behind an array too, and interpreted programs run one after another. (compute-sanitizer's racecheck looks at shared
memory only.)

Programs run in any order, but for what atomic operations say. What a program did before an atomic operation that is a
"release" comes before what another does after one on the same address that is an "acquire", and saw it. One that is
"relaxed" draws work that any program could have got: what follows is looked at as another program's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

READ, WRITE, ATOMIC = "reads", "writes", "changes atomically"
SEMANTICS = {value: name.lower() for name, value in vars(interpreter._ir.MEM_SEMANTIC).items() if name.isupper()}


class AccessError(AssertionError):
    """A kernel's programs touch what they must not."""


@dataclasses.dataclass
class Accesses:
    """The accesses of one launch."""

    kernel: str
    arrays: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """First byte, and the one after the last, of what the kernel was given."""
    touched: dict[str, list[tuple[NDArray[Any], int]]] = dataclasses.field(default_factory=dict)
    """(addresses, stretch) by what was done there."""
    program: int = -1
    before: list[int] = dataclasses.field(default_factory=list)
    """Of every stretch of work between two such atomic operations, in the order in which they ran: the stretches that
    come before it for certain, as bits."""
    released: dict[int, int] = dataclasses.field(default_factory=dict)
    """The same of what acquires an address now."""

    def give(self, value: Any) -> None:
        value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value  # a descriptor's
        if isinstance(value, torch.Tensor) and value.numel():
            last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
            self.arrays.append((value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()))

    def add(self, what: str, pointers: Any, mask: Any) -> None:
        chosen = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        addresses = np.unique(pointers.data[chosen].astype(np.int64))
        program = self._program()
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = [(addresses >= start) & (addresses + size <= end) for start, end in self.arrays]
        if not np.any(inside, axis=0).all():
            raise AccessError(f"{self.kernel}: program {program} {what} outside of what it was given")
        self.touched.setdefault(what, []).append((addresses, len(self.before) - 1))

    def _program(self) -> int:
        """The number of the program that runs."""
        builder = interpreter.interpreter_builder
        program = int(np.ravel_multi_index(builder.grid_idx, builder.grid_dim))
        if program != self.program:
            self.program = program
            self.before.append(0)
        return program

    def order(self, address: int, semantics: str) -> None:
        """What an atomic operation there says of the order, after it was done."""
        so_far = self.before[-1] | 1 << len(self.before) - 1
        if semantics == "relaxed":
            self.before.append(0)
        elif semantics == "release":
            self.released[address] = self.released.get(address, 0) | so_far
            self.before.append(so_far)
        elif semantics == "acquire":
            self.before.append(so_far | self.released.get(address, 0))

    def check(self) -> None:
        """Check that no two programs are in each other's way."""
        kinds = [READ, WRITE, ATOMIC]
        parts = [
            np.stack([addresses, np.full_like(addresses, stretch), np.full_like(addresses, kinds.index(what))])
            for what in kinds
            for addresses, stretch in self.touched.get(what, ())
        ]
        every = np.unique(np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1), axis=1)
        starts = np.flatnonzero(np.diff(every[0], prepend=-1))
        if not starts.size:
            return
        stops = np.append(starts[1:], every.shape[1])
        least, most = np.minimum.reduceat(every[2], starts), np.maximum.reduceat(every[2], starts)
        shared = (every[1, starts] != every[1, stops - 1]) & (most > 0) & (least < 2)  # by more than reads, or atomics
        for start, stop in zip(starts[shared], stops[shared], strict=True):
            self._check_place([(int(stretch), kinds[kind]) for stretch, kind in every[1:, start:stop].T])

    def _check_place(self, done: list[tuple[int, str]]) -> None:
        """``done``: which stretches did what to an address, in their order. If each is after the last that changed the
        address, and after all that read it since, the others are, too."""
        since: list[tuple[int, str]] = []
        for stretch, what in done:
            for other, did in since:
                if {what, did} in ({READ}, {ATOMIC}) or other == stretch or self.before[stretch] >> other & 1:
                    continue
                if what == did:
                    raise AccessError(f"{self.kernel}: two programs write to one place")
                if WRITE in (what, did):
                    rest = did if what == WRITE else what
                    raise AccessError(f"{self.kernel}: one program writes where another {rest}")
                raise AccessError(f"{self.kernel}: one program reads what others change atomically")
            if what == WRITE:
                since = []
            since.append((stretch, what))


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Every interpreted launch raises :class:`AccessError` where its programs touch what they must not."""
    executor = interpreter.GridExecutor
    to_host, run = executor._init_args_hst, executor.__call__
    now: list[Accesses] = []

    def watch(name: str, what: str, pointers: int, mask: int) -> None:
        """Watch an operation of the interpreter; ``pointers`` and ``mask`` say which of its arguments they are."""
        operation = getattr(interpreter.InterpreterBuilder, name)

        def watched(self: Any, *arguments: Any, **options: Any) -> Any:
            now[-1].add(what, arguments[pointers], arguments[mask])
            return operation(self, *arguments, **options)

        patch.setattr(interpreter.InterpreterBuilder, name, watched)

    plain = interpreter.InterpreterBuilder.create_atomic_rmw

    def atomic(self: Any, operation: Any, pointers: Any, values: Any, mask: Any, semantics: Any, scope: Any) -> Any:
        now[-1].add(ATOMIC, pointers, mask)
        result = plain(self, operation, pointers, values, mask, semantics, scope)
        if pointers.data.size == 1:
            now[-1].order(int(pointers.data.item()), SEMANTICS[semantics])
        return result

    def given(self: Any, *arguments: Any) -> Any:
        positional, named = to_host(self, *arguments)
        for value in (*positional, *named.values()):
            now[-1].give(value)
        return positional, named

    def checked_run(self: Any, *arguments: Any, **options: Any) -> Any:
        now.append(Accesses(self.fn.__name__))
        try:
            made = run(self, *arguments, **options)
            now[-1].check()
            return made
        finally:
            now.pop()

    with pytest.MonkeyPatch.context() as patch:
        watch("create_masked_load", READ, 0, 1)
        watch("create_masked_store", WRITE, 0, 2)
        patch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", atomic)
        patch.setattr(executor, "_init_args_hst", given)
        patch.setattr(executor, "__call__", checked_run)
        yield
