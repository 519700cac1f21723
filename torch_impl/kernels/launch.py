"""Launches of Triton's kernels, by what was compiled for a launch of the same kind.

No mirror: XLA compiles and launches a whole program.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

try:
    import triton
    from triton import knobs
    from triton.runtime import driver
except ImportError:  # a CPU-only install; fused.unavailable() says so before anything here is called
    triton = None

# What was compiled is known of this many kinds of launches.
MOST_KINDS = 8192
LAUNCH_OPTIONS = ("num_warps", "num_stages", "launch_cooperative_grid")


class _Instead(threading.local):
    """What this thread's launches do instead of running a kernel, or beside it."""

    run: Callable[..., None] | None = None
    """Called in place of a launch, with the kernel, its grid, its arguments and its options."""
    note: Callable[..., None] | None = None
    """Called with what launches, and the same."""


instead = _Instead()
# Held while kernels are compiled and loaded: Triton hands another thread a kernel that is not wholly loaded.
loading = threading.Lock()


class Ready(NamedTuple):
    """What was compiled for a kind of launches."""

    kernel: object
    """Kept so that no other kernel gets its id."""
    compiled: Any
    names: list[str]
    """The options that the compiled kernel takes as arguments, in its order."""

    def on(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches it on the grid, unknown to a profiler: called with the stream, its arguments and the options;
        an address may stand for a tensor. It is Triton's own launcher, as all versions from 3.4 to 3.9 have it."""
        x, y, z = (*grid, 1, 1)[:3]
        run, function, metadata = self.compiled.run, self.compiled.function, self.compiled.packed_metadata
        return lambda stream, *values: run(x, y, z, stream, function, metadata, None, None, None, *values)


compiled: dict[tuple[Any, ...], Ready] = {}


def cdiv(value: int, step: int) -> int:
    """How many steps hold ``value``."""
    return -(-value // step)


def launch(kernel: Any, *grid: int) -> Any:
    """What launches ``kernel`` on the grid, or does what this thread does instead."""
    if instead.run is not None:
        return functools.partial(instead.run, kernel, grid)
    is_compiled = isinstance(kernel, triton.JITFunction)
    start = functools.partial(_launch, kernel, grid) if is_compiled else kernel[grid]  # interpreted
    return start if instead.note is None else functools.partial(instead.note, start, kernel, grid)


def launch_named(kernel: Any, grid: tuple[int, ...], values: Mapping[str, Any]) -> None:
    """Launch ``kernel`` on ``grid``, each of its parameters by name from ``values``.

    Other values are not read, so that what several launches share is one record. A kernel's constants have upper-case
    names and come last.
    """
    arguments, constants = _parameters(kernel)
    options = {name: values[name] for name in LAUNCH_OPTIONS if name in values}
    launch(kernel, *grid)(
        *[values[name] for name in arguments], **{name: values[name] for name in constants}, **options
    )


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's arguments and of its constants."""
    names = tuple(kernel.arg_names)
    return tuple(n for n in names if not n.isupper()), tuple(n for n in names if n.isupper())


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``, which looks at every argument to find what it has compiled, and takes
    longer over that than over the launch. So Triton is only asked about kinds of launches that are new."""
    device = driver.active.get_current_device()
    key = kind_of(kernel, device, arguments, options)
    found = compiled.get(key)
    if found is None:
        with loading:
            new = kernel[grid](*arguments, **options)
        if hasattr(new, "result"):  # the caller has Triton compile in the background
            new = new.result()
        if len(compiled) >= MOST_KINDS:
            compiled.clear()
        compiled[key] = Ready(kernel, new, kernel.arg_names[len(arguments) :])
        return
    stream = driver.active.get_current_stream(device)
    values = (*arguments, *[options[name] for name in found.names])
    if is_watched():
        x, y, z = (*grid, 1, 1)[:3]
        found.compiled[x, y, z](*values, stream=stream)
    else:
        found.on(grid)(stream, *values)


def ready_for(kernel: object, arguments: Sequence[object], options: dict[str, Any]) -> Ready | None:
    """What was compiled for a launch that has been made on the current device; None of an interpreted kernel."""
    if not isinstance(kernel, triton.JITFunction):
        return None
    return compiled.get(kind_of(kernel, driver.active.get_current_device(), tuple(arguments), options))


def current_stream() -> int:
    """Of the current device."""
    stream: int = driver.active.get_current_stream(driver.active.get_current_device())
    return stream


def is_watched() -> bool:
    """Whether somebody, a profiler, is told of launches: one hook or none in Triton 3.4, a chain of them since."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def kind_of(kernel: Any, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What a compiled kernel depends on, and perhaps more: launches of one kind are launches of one compiled kernel.

    Of a tensor that is its dtype and its alignment; of a descriptor its dtype and block (which give its layout here);
    of a float, that it is one; of an integer what Triton may compile for: whether it is 1, a multiple of 16, and how
    many bits it takes; of everything else, options included, the value. Options are no tensors.
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
        elif of is int:
            add((value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value >= 2**63))
        elif hasattr(value, "block_shape"):
            add(value.base.dtype)
            kind += value.block_shape
        else:
            add(of)
            add(value)
    kind += options.items()
    return tuple(kind)
