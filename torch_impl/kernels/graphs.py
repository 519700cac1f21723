"""CUDA graphs of what a repeated step does: one launch in place of all, where the memory is the same again.

A graph holds the addresses that its kernels read and write. So there is one for each set of addresses that was seen a
few times, and a step with other addresses is launched kernel by kernel. What PyTorch's operations make inside a graph
lies in memory of the graphs, which all of one stream share: it is read within the graph only.

A graph is a matter of time alone: it has the kernels of the launches, in their order. Where none can be made, and while
somebody else captures, the launches are made one by one. No mirror: XLA makes such graphs itself.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from typing import Protocol

import torch

# Addresses are seen so many times before a graph is made of them: it takes about as long as ten steps without.
RUNS_BEFORE = 3
# Graphs alive, over all programs. Each holds some of the driver's memory.
MOST_GRAPHS = 256


class Graph(Protocol):
    """torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class Captures(Protocol):
    """What is done with certain memory, and its graph: program.Bound."""

    runs: int
    graph: Graph | None


class Launches(Protocol):
    """program.Frame."""

    stream: int


alive: collections.deque[Captures] = collections.deque()
_capturing = threading.Lock()


def run(bound: Captures, work: Callable[[], None], frame: Launches, device: torch.device) -> None:
    """``work()``, or its graph. ``work`` launches on ``frame.stream``, the current stream of ``device``."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.is_current_stream_capturing():
        work()
        return
    if bound.graph is None:
        bound.runs += 1
        if bound.runs == RUNS_BEFORE:
            bound.graph = _captured(work, frame, device)
            _keep(bound)
    if bound.graph is None:
        work()
    else:
        bound.graph.replay()


def _captured(work: Callable[[], None], frame: Launches, device: torch.device) -> Graph | None:
    """The graph of ``work()``, which is not done; None where there can be none."""
    if not _capturing.acquire(blocking=False):  # another thread captures on the same stream
        return None
    graph, own = torch.cuda.CUDAGraph(), frame.stream
    side = _side_stream(device)
    try:
        with torch.cuda.stream(side):
            frame.stream = side.cuda_stream
            graph.capture_begin(pool=_pool(device, own), capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
    except RuntimeError:
        return None
    finally:
        frame.stream = own
        _capturing.release()
    return graph


def _keep(bound: Captures) -> None:
    """One more graph; the oldest goes where there are too many."""
    if bound.graph is not None:
        alive.append(bound)
        if len(alive) > MOST_GRAPHS:
            oldest = alive.popleft()
            oldest.graph, oldest.runs = None, 0


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A capture needs a stream of its own, on which nothing runs."""
    return torch.cuda.Stream(device)


@functools.cache
def _pool(device: torch.device, stream: int) -> torch.cuda._POOL_HANDLE:
    """The memory of the graphs that run on a stream."""
    return torch.cuda.graph_pool_handle()
