"""Launches of Triton's kernels, by what was compiled for a launch of the same kind; and the rehearsal of a call, which
has all its kernels compiled side by side. No mirror: XLA compiles and launches a whole program.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    from triton import knobs
    from triton.runtime import driver
except ImportError:  # a CPU-only install; fused.unavailable() says so before anything here is called
    triton = None

try:
    from triton import AsyncCompileMode
except ImportError:  # a Triton that compiles one kernel at a time
    AsyncCompileMode = None

COMPILERS, LOADERS = 16, 32  # threads
# Of this many kinds of launches is known what was compiled; a kind has its token count, so that a program that never
# has as many tokens twice sees new ones all the time.
MOST_KINDS = 8192


class _Rehearsal(threading.local):
    """What takes the kernels that this thread's launches only compile, while a call is rehearsed; else None."""

    load: Callable[[Any], None] | None = None


_rehearsal = _Rehearsal()
_rehearsed: set[Any] = set()
# By kind: the kernel (so that no other one gets its id), what was compiled of it, and the options that this takes as
# arguments, in its order.
_compiled: dict[tuple[Any, ...], tuple[Any, Any, list[str]]] = {}


def rehearsing() -> bool:
    """Whether this thread's launches only compile."""
    return _rehearsal.load is not None


def launch(kernel: Any, *grid: int) -> Any:
    """What launches ``kernel`` on the grid; while a call is rehearsed, what has it compiled."""
    if rehearsing():
        return functools.partial(_compile, kernel, grid)
    if isinstance(kernel, triton.JITFunction):
        return functools.partial(_launch, kernel, grid)
    return kernel[grid]  # interpreted


def _compile(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    assert _rehearsal.load is not None
    _rehearsal.load(kernel.warmup(*arguments, grid=grid, **options))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``, which looks at every argument to find what it has compiled, and takes
    longer over that than over the launch. So Triton is only asked about kinds of launches that are new."""
    device = driver.active.get_current_device()
    key = kind_of(kernel, device, arguments, options)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        if hasattr(compiled, "result"):  # the caller has Triton compile in the background
            compiled = compiled.result()
        if len(_compiled) >= MOST_KINDS:
            _compiled.clear()
        _compiled[key] = kernel, compiled, kernel.arg_names[len(arguments) :]
        return
    _, compiled, names = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    values = (*arguments, *[options[name] for name in names])
    if _watched():
        compiled[x, y, z](*values, stream=stream)
    else:
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def _watched() -> bool:
    """Whether somebody, a profiler, is told of launches: one hook or none in Triton 3.4, a chain of them since."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def kind_of(kernel: Any, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What a compiled kernel depends on, and perhaps more: launches of one kind are launches of one compiled kernel.

    Of a tensor that is its dtype and its alignment; of a descriptor its dtype and block (which give its layout here);
    of a float, that it is one; of everything else, options included, the value. Options are no tensors.
    """
    kind: list[Any] = [id(kernel), device]
    add = kind.append
    for value in arguments:
        of = type(value)
        if value is None:
            add(None)
        elif isinstance(value, Tensor):
            add(value.dtype)
            add(value.data_ptr() % 16)
        elif of is float:
            add(of)
        elif of is not int and hasattr(value, "block_shape"):
            add(value.base.dtype)
            kind += value.block_shape
        else:
            add(of)
            add(value)
    kind += options.items()
    return tuple(kind)


def rehearse(kind: Any, device: torch.device, step: Callable[[], Any]) -> None:
    """Run ``step`` once for each ``kind`` of call, launching nothing: its kernels are compiled and loaded side by side
    and not one after another, so that a first call waits for the slowest and not for all."""
    if AsyncCompileMode is None or device.type != "cuda" or kind in _rehearsed:
        return
    _rehearsed.add(kind)
    loads: list[Any] = []

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):
            made = kernel.result() if hasattr(kernel, "result") else kernel
            _ = made.run  # builds what launches it

    try:
        # A compiled kernel is loaded while others are still compiled.
        with ThreadPoolExecutor(LOADERS) as loaders, ThreadPoolExecutor(COMPILERS) as compilers:
            _rehearsal.load = lambda kernel: loads.append(loaders.submit(load, kernel))
            with AsyncCompileMode(compilers):
                step()
            for loaded in loads:
                loaded.result()
    finally:
        _rehearsal.load = None
