"""On a GPU: shared memory goes back to its allocator only when the other framework's stream has passed its last use.

Both allocators hand freed memory out again at once, because all their own work is in one stream's order. The other
framework's work is not. Take a tensor of JAX's memory that is dropped right after ``y = tensor @ w``: JAX's next result
would overwrite it while torch's product still waits to run. The same can happen the other way round. (On a CPU neither
can happen: torch computes synchronously, and JAX holds its inputs until it has read them.)

So a lease owns what is shared on a GPU. When the receiver drops it, the lease hands the memory to a thread. The thread
waits until the receiver's stream has reached this point, and only then frees the memory. The host waits only at exit.
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

# The interface knows no bfloat16, so memory is exported as integers of the same size and viewed as the real dtype.
_TYPES = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


class Lease:
    """CUDA memory that outlives the lease until the receiver's last use of it has run.

    Args:
        tensor: what owns the memory, not empty.
        last_use: called when the lease is dropped, in any thread; must be quick. Returns what the waiting thread calls.
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
        if not ending():  # else the frameworks are gone already
            release_after(self.last_use(), self.tensor)


def leased_to_torch(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (JAX's), freed when torch's streams have passed the point where torch dropped it."""
    import torch

    first = torch.cuda.current_stream(tensor.device)

    def last_use() -> Callable[[], object]:
        events = []
        for stream in {first, torch.cuda.current_stream(tensor.device)}:
            events.append(stream.record_event())
        return lambda: [event.synchronize() for event in events]

    return _through_lease(tensor, last_use)


def leased_to_jax(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (torch's), freed when JAX's stream has passed the point where JAX dropped it."""
    index = tensor.device.index
    return _through_lease(tensor, lambda: functools.partial(_wait_for_jax, index))


def _through_lease(tensor: torch.Tensor, last_use: Callable[[], Callable[[], object]]) -> torch.Tensor:
    import torch

    if tensor.numel() == 0:
        return tensor
    plain: torch.Tensor = torch.as_tensor(Lease(tensor, last_use), device=tensor.device)
    return plain.view(tensor.dtype)


def _wait_for_jax(device_index: int) -> None:
    """Enqueue something on the device's compute stream and wait for it. Everything enqueued before is then done."""
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
# At exit, a device that hangs is waited for no longer than this.
EXIT_SECONDS = 10.0


def release_after(wait: Callable[[], object], memory: object) -> None:
    """Hold ``memory`` until ``wait`` has returned, in a thread of its own. A finalizer may call this."""
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
        except Exception:  # the device is lost or the interpreter is ending: there is no memory left to protect
            _log.exception("waiting for the last use of shared memory failed")
        del wait, memory, item


def _close() -> None:
    """End the thread. One that still waits in a framework's C++ when the interpreter ends would abort the process."""
    global _closed
    _closed = True
    _waiting.put(None)
    if _thread is not None:
        _thread.join(EXIT_SECONDS)
