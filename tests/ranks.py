"""A pool of processes that are the ranks of a gloo group on the CPU: started once, asked many times."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from interpreter import make_quicker

TIMEOUT_S = 60  # of a collective; nothing here takes a tenth of it
_groups: dict[int, Any] = {}


def group_of(ranks: int) -> Any:
    """In a rank: the group of the first ``ranks`` ranks."""
    return _groups[ranks]


def _serve(rank: int, ranks: int, store: str, timeout_s: float, sizes: tuple[int, ...], pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    make_quicker()
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    for size in sizes:
        _groups[size] = dist.new_group(list(range(size)), timeout=limit)
    while (asked := pipe.recv()) is not None:
        function, arguments = asked
        try:
            pipe.send((True, function(rank, *arguments)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Failed(Exception):
    """A rank raised; ``kind`` is the error's type, ``words`` what it said."""

    def __init__(self, rank: int, kind: str, words: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {words}\n{trace}")
        self.kind, self.words = kind, words


class Ranks:
    """Use as a context: the processes end with it."""

    def __init__(self, ranks: int, timeout_s: float = TIMEOUT_S, sizes: tuple[int, ...] = ()) -> None:
        """``sizes``: how many ranks the groups of :func:`group_of` have."""
        self.ranks, self.timeout_s, self.sizes = ranks, timeout_s, sizes

    def __enter__(self) -> Ranks:
        # A server that has imported everything is forked: the imports are paid once.
        context: Any = multiprocessing.get_context("forkserver")
        modules = ["torch", "torch.distributed.tensor", "logitless.torch_impl", "implementations"]
        context.set_forkserver_preload([*modules, "triton.runtime.interpreter"])
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(self.ranks):
            here, there = context.Pipe()
            given = (rank, self.ranks, store, self.timeout_s, self.sizes, there)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.send(None)
            except OSError:  # it has ended
                continue
            process.join(5)
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.folder.cleanup()

    def outcomes(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """The result of ``function(rank, *arguments)`` on each of the first ``ranks`` ranks: a value, or a Failed."""
        chosen = self.pipes[:ranks]
        for pipe in chosen:
            pipe.send((function, arguments))
        return [self._answer(rank, pipe) for rank, pipe in enumerate(chosen)]

    def _answer(self, rank: int, pipe: Any) -> Any:
        limit = 2 * self.timeout_s + 60
        if not pipe.poll(limit):
            raise TimeoutError(f"rank {rank} has not answered for {limit:.0f} s: it hangs")
        try:
            good, made = pipe.recv()
        except EOFError:
            return Failed(rank, "EOFError", "the process has ended", "")
        return made if good else Failed(rank, *made)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """The values, or the first error."""
        made = self.outcomes(function, *arguments, ranks=ranks)
        for value in made:
            if isinstance(value, Failed):
                raise value
        return made
