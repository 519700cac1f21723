"""CUDA graphs of what a repeated step does: one launch in place of all, where the memory is the same again.

A graph holds the addresses that its kernels read and write. So there is one for each set of addresses that was seen a
few times. A step with other addresses is launched kernel by kernel. A graph has the kernels of these launches, in their
order, and so their bits. Where there can be none, and while somebody else captures, the launches are made one by one.

The graphs are made by CUDA's driver. ``torch.cuda.CUDAGraph`` would keep memory for each, and while it captures, no
other thread may draw random numbers on the GPU. No mirror: XLA makes such graphs itself.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

# Addresses are seen so many times before a graph is made of them: those of a warm-up may not come again.
RUNS_BEFORE = 3
# Graphs alive, over all programs. Each holds some of the driver's memory.
MOST_GRAPHS = 64
# The driver's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do is no part of a capture, and allowed.
THREAD_LOCAL = 1


class Frame(Protocol):
    """The memory of one run, and the stream that it launches on."""

    stream: int


F = TypeVar("F", bound=Frame)


class Bound(Protocol):
    """What is done with buffers at certain addresses."""

    runs: int
    graph: Graph | None


alive: collections.deque[weakref.ref[Bound]] = collections.deque()
_capturing = threading.Lock()


class Graph:
    """A CUDA graph that can be launched."""

    def __init__(self, captured: ctypes.c_void_p) -> None:
        self.launchable = ctypes.c_void_p()
        self.destroy = _driver().cuGraphExecDestroy  # at Python's end there may be no module any more
        _call("cuGraphInstantiateWithFlags", ctypes.byref(self.launchable), captured, ctypes.c_ulonglong(0))

    def launch(self, stream: int) -> None:
        _call("cuGraphLaunch", self.launchable, ctypes.c_void_p(stream))

    def __del__(self) -> None:
        if self.launchable:
            self.destroy(self.launchable)


def run(bound: Bound, work: Callable[[F], None], frame: F, device: torch.device) -> None:
    """``work(frame)``, or its graph, on ``frame.stream``: the current stream of ``device``, which is current."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.is_current_stream_capturing():
        work(frame)
        return
    graph = bound.graph
    if graph is None:
        bound.runs += 1
        if bound.runs == RUNS_BEFORE:
            graph = bound.graph = _captured(work, frame, device)
            _keep(bound)
    if graph is None:
        work(frame)
    else:
        graph.launch(frame.stream)


def _captured(work: Callable[[F], None], frame: F, device: torch.device) -> Graph | None:
    """The graph of ``work(frame)``, which is not done; None where there can be none."""
    if not _capturing.acquire(blocking=False):  # another thread captures on this stream
        return None
    captured, side, own = ctypes.c_void_p(), _side_stream(device), frame.stream
    made = _allocations(device)
    try:
        frame.stream = side.cuda_stream
        with torch.cuda.stream(side):
            stream = ctypes.c_void_p(side.cuda_stream)
            _call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
            try:
                work(frame)
            finally:
                _call("cuStreamEndCapture", stream, ctypes.byref(captured))
        # Memory that was made meanwhile is somebody else's by the graph's first launch.
        return Graph(captured) if _allocations(device) == made else None
    except RuntimeError:
        return None
    finally:
        if captured:
            _driver().cuGraphDestroy(captured)
        frame.stream = own
        _capturing.release()


def _keep(bound: Bound) -> None:
    """One more graph. Where there are too many, the oldest goes."""
    if bound.graph is None:
        return
    alive.append(weakref.ref(bound))
    while len(alive) > MOST_GRAPHS:
        oldest = alive.popleft()()
        if oldest is not None:
            oldest.graph, oldest.runs = None, -MOST_GRAPHS


def _allocations(device: torch.device) -> int:
    """How often memory has been asked for."""
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A capture needs a stream of its own, on which nothing runs."""
    return torch.cuda.Stream(device)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """A function of CUDA's driver. Raises RuntimeError where it fails."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: got error {code} of CUDA's driver")
