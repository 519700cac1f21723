"""What the programs of an interpreted Triton kernel read and write.

Each address must lie in an array that the kernel was given. Where one program writes, no other program may read or
write, unless by atomic operations. Results need not show either fault: there is memory behind an array too, and
interpreted programs run one after another. (compute-sanitizer's racecheck looks at shared memory only.)
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


class AccessError(AssertionError):
    """A kernel's programs touch what they must not."""


@dataclasses.dataclass
class Accesses:
    """The accesses of one launch."""

    kernel: str
    arrays: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """First byte, and the one after the last, of what the kernel was given."""
    touched: dict[str, list[tuple[NDArray[Any], int]]] = dataclasses.field(default_factory=dict)
    """(addresses, program) by what was done there."""

    def give(self, value: Any) -> None:
        value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value  # a descriptor's
        if isinstance(value, torch.Tensor) and value.numel():
            last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
            self.arrays.append((value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()))

    def add(self, what: str, pointers: Any, mask: Any) -> None:
        chosen = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        addresses = np.unique(pointers.data[chosen].astype(np.int64))
        program: Any = np.ravel_multi_index(
            interpreter.interpreter_builder.grid_idx, interpreter.interpreter_builder.grid_dim
        )
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = [(addresses >= start) & (addresses + size <= end) for start, end in self.arrays]
        if not np.any(inside, axis=0).all():
            raise AccessError(f"{self.kernel}: program {program} {what} outside of what it was given")
        self.touched.setdefault(what, []).append((addresses, program))

    def check(self) -> None:
        """Check that no two programs are in each other's way."""
        owned, owners = self._sorted(WRITE)
        if (np.diff(owned) == 0).any():  # each program is there once
            raise AccessError(f"{self.kernel}: two programs write to one place")
        for what in (READ, ATOMIC):
            addresses, programs = self._sorted(what)
            place = np.searchsorted(owned, addresses)
            same = np.append(owned, -1)[place] == addresses
            if (np.append(owners, -1)[place] != programs)[same].any():
                raise AccessError(f"{self.kernel}: one program writes where another {what}")
        if np.isin(self._sorted(READ)[0], self._sorted(ATOMIC)[0]).any():
            raise AccessError(f"{self.kernel}: one program reads what others change atomically")

    def _sorted(self, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Addresses and the programs that touched them, each pair once."""
        parts = [np.stack([a, np.full_like(a, program)]) for a, program in self.touched.get(what, ())]
        pairs = np.unique(np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1), axis=1)
        return pairs[0], pairs[1]


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
        watch("create_atomic_rmw", ATOMIC, 1, 3)
        patch.setattr(executor, "_init_args_hst", given)
        patch.setattr(executor, "__call__", checked_run)
        yield
