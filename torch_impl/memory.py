"""How much memory one call takes at its peak, measured where PyTorch allocates it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_SENTINEL_BYTES = 4096
_ALLOCATION_TAG = "Allocation"


def peak_scratch_bytes(function: Callable[[], object]) -> int:
    """Peak of the bytes allocated during one call of `function`, beyond what was live before it.

        peak = max over time of (bytes that the call has allocated − those of them that it has freed again)

    Counted: every tensor storage that PyTorch allocates, internal temporaries included, on the CPU and on every CUDA
    device; the peaks of several devices are added. What the call returns is live at the end, so it counts too: the
    scratch beyond the results is this number minus the bytes of the results. A view allocates nothing and counts
    nothing. A CUDA allocation is counted in the allocator's blocks of 512 bytes.

    Not counted: memory that never passes through PyTorch's allocators (packing buffers inside a BLAS, NumPy arrays),
    and CPU memory allocated by a thread that the call starts itself.

    The CPU is metered with the memory events of torch.profiler, CUDA with the caching allocator's requested bytes
    (whose peak statistics are reset). If the call frees memory that is older than itself, CUDA's meter sets that off
    against new memory; the CPU's does not.

    Arguments:
        function: called exactly once, without arguments. Call it once before if it builds caches on its first use.

    Returns: bytes, ≥ 0.

    Raises:
        RuntimeError: another profiler is active, or this build of PyTorch reports no memory events. A silent meter is
            an error, never a zero.
    """
    # Garbage freed in the middle of the call would hide as many bytes of new memory.
    gc.collect()
    live_before = _start_cuda_meters()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sentinel = torch.empty(_SENTINEL_BYTES, dtype=torch.uint8, device="cpu")
        del sentinel
        result = function()
    del result
    cuda_peak = sum(_requested(device, "peak") - before for device, before in live_before.items())
    return _host_peak_bytes(profiler) + cuda_peak


def _start_cuda_meters() -> dict[int, int]:
    """Reset every CUDA device's peak, and return the bytes that are live on it now."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.init()
    live_before: dict[int, int] = {}
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
        live_before[device] = _requested(device, "current")
    return live_before


def _requested(device: int, when: str) -> int:
    """Bytes that were asked for, without what the caching allocator rounds them up by (to 512, or by up to 1 MiB)."""
    return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"])


def _host_peak_bytes(profiler: profile) -> int:
    """Peak of the CPU bytes that were allocated after the sentinel and not yet freed."""
    live: dict[int, int] = {}
    total = peak = 0
    allocations = _host_allocations(profiler)
    if [size for _, size in allocations[:2]] != [_SENTINEL_BYTES, -_SENTINEL_BYTES]:
        raise RuntimeError(
            f"torch.profiler of torch {torch.__version__} did not report a known allocation of {_SENTINEL_BYTES} bytes "
            f"(first events: {allocations[:2]}); peak_scratch_bytes cannot measure with this build"
        )
    for address, size in allocations[2:]:
        if size > 0:
            live[address] = size
            total += size
        else:
            total -= live.pop(address, 0)  # 0: the block is older than the call
        peak = max(peak, total)
    return peak


def _host_allocations(profiler: profile) -> list[tuple[int, int]]:
    """(address, bytes) of every CPU allocation, and (address, −bytes) of every free, in the order of time."""
    kineto = profiler.profiler.kineto_results if profiler.profiler is not None else None
    pending: list[Any] = [] if kineto is None else list(kineto.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == _ALLOCATION_TAG and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda event: event[0])]
