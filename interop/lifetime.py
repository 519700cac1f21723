"""On a GPU: shared memory goes back to its allocator only when the other framework's stream has passed its last use.

Both allocators hand freed memory out again at once, because all their own work is in one stream's order. The other
framework's work is not: a tensor of JAX's memory, dropped right after ``y = tensor @ w``, would be overwritten by JAX's
next result while torch's product still waits to run; and the same the other way round. (On a CPU neither can happen:
torch computes synchronously, and JAX holds its inputs until it has read them.)

So what is shared on a GPU is owned by a lease. When the receiver drops it, the lease hands the memory to a thread that
waits until the receiver's stream has come to this point, and only then lets go. The host never waits, but at its exit.
"""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import torch

# Exported as plain integers of the same size, viewed as the real dtype afterwards: the interface knows no bfloat16.
_TYPES = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


class Lease:
    """CUDA memory that lives on until ``wait_for_last_use`` has returned, counted from when the lease was dropped.

    Args:
        tensor: what owns the memory, not empty.
        last_use: called when the lease is dropped, in any thread, quickly; gives what the waiting thread has to call.
    """

    def __init__(self, tensor: torch.Tensor, last_use: Callable[[], Callable[[], object]]) -> None:
        self.tensor, self.last_use = tensor, last_use
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _TYPES[size],
            "data": (tensor.data_ptr(), False),
            "version": 3,
            "stream": None,
        }

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the frameworks that would be asked are taken apart already
            release_after(self.last_use(), self.tensor)


def leased_to_torch(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (JAX's), to be let go when torch's streams have passed the point where torch dropped it."""
    import torch

    first = torch.cuda.current_stream(tensor.device)

    def last_use() -> Callable[[], object]:
        events = []
        for stream in {first, torch.cuda.current_stream(tensor.device)}:
            events.append(stream.record_event())
        return lambda: [event.synchronize() for event in events]

    return _through_lease(tensor, last_use)


def leased_to_jax(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (torch's), to be let go when JAX's stream has passed the point where JAX dropped it."""
    index = tensor.device.index
    return _through_lease(tensor, lambda: functools.partial(_wait_for_jax, index))


def _through_lease(tensor: torch.Tensor, last_use: Callable[[], Callable[[], object]]) -> torch.Tensor:
    import torch

    if tensor.numel() == 0:
        return tensor
    plain: torch.Tensor = torch.as_tensor(Lease(tensor, last_use), device=tensor.device)
    return plain.view(tensor.dtype)


def _wait_for_jax(device_index: int) -> None:
    """Enqueue something on the device's compute stream and wait for it: what was enqueued before is done then."""
    import jax

    (device,) = (device for device in jax.local_devices(backend="cuda") if device.local_hardware_id == device_index)
    jax.block_until_ready(_tick()(jax.device_put(0, device)))


@functools.cache
def _tick() -> Callable[[jax.Array], jax.Array]:
    import jax

    return jax.jit(lambda count: count + 1)


# ---------------------------------------------------------------------------------------------------------------------
# The waiting thread

_waiting: queue.SimpleQueue[tuple[Callable[[], object], object] | None] = queue.SimpleQueue()
_log = logging.getLogger(__name__)
_start = threading.Lock()
_thread: threading.Thread | None = None
_closed = False
# Of the exit: a device that hangs is not waited for.
EXIT_SECONDS = 10.0


def release_after(wait: Callable[[], object], memory: object) -> None:
    """Hold ``memory`` until ``wait`` has returned, in a thread of its own; may be called from a finalizer."""
    _waiting.put((wait, memory))
    _ensure_thread()


def _ensure_thread() -> None:
    global _thread
    if _thread is not None or _closed or not _start.acquire(blocking=False):
        return
    try:
        _thread = _thread or threading.Thread(target=_release, name="logitless-interop", daemon=True)
        if not _thread.is_alive():
            _thread.start()
            atexit.register(_close)  # before the frameworks' own exits: they were imported earlier
    except RuntimeError:  # the interpreter is shutting down, and all memory with it
        pass
    finally:
        _start.release()


def _release() -> None:
    while (item := _waiting.get()) is not None:
        wait, memory = item
        try:
            wait()
        except Exception:  # the device is lost or the interpreter is going; its memory is then nobody's to protect
            _log.exception("waiting for the last use of shared memory failed")
        del wait, memory, item


def _close() -> None:
    """Let the thread end: a thread that waits in a framework's C++ when the interpreter goes aborts the process."""
    global _closed
    _closed = True
    _waiting.put(None)
    if _thread is not None:
        _thread.join(EXIT_SECONDS)
