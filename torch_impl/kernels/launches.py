"""Launches of Triton's kernels, by what was compiled for a launch of the same kind; and the rehearsal of a call, which
has all its kernels compiled side by side. No mirror: XLA compiles and launches a whole program.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    from triton import knobs
    from triton.runtime import build, driver
except ImportError:  # a CPU-only install; fused.unavailable() says so before anything here is called
    triton = None

try:
    from triton import AsyncCompileMode
    from triton.runtime.cache import triton_key
except ImportError:  # a Triton that compiles one kernel at a time
    AsyncCompileMode = None

try:
    from triton.backends.nvidia.driver import make_launcher
except ImportError:  # a Triton (3.7 and later) that needs no C compiler to launch a kernel
    make_launcher = None

COMPILERS, BUILDERS, LOADERS = 16, 6, 32  # threads
# Seconds, where Python's own is 5 ms: a compiler that comes back from LLVM waits so long for the one in the front end.
SHORT_TURN = 0.001
# The kernels that take longest to compile, the longest first.
LONGEST = "hidden_kernel", "logits_kernel", "weight_kernel", "finish_kernel"
# Of this many kinds of launches is known what was compiled; a kind has its token count, so that a program that never
# has as many tokens twice sees new ones all the time.
MOST_KINDS = 8192


class _Rehearsal(threading.local):
    """What takes the kernels that this thread's launches only compile, while a call is rehearsed; else None."""

    load: Callable[[Any], None] | None = None
    source: Any = None
    """Of the kernel that is asked for."""


_rehearsal = _Rehearsal()
_rehearsed: set[Any] = set()
# Held while kernels are compiled and loaded: to another thread Triton gives one that is not wholly loaded.
_loading = threading.Lock()
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
    _ = kernel.device_caches[driver.active.get_current_device()]  # makes what Triton keeps with a kernel
    if not issubclass(kernel.ASTSource, _Source):
        kernel.ASTSource = type("Source", (_Source, kernel.ASTSource), {})
    _rehearsal.load(kernel.warmup(*arguments, grid=grid, **options))


class _Source:
    """A kernel's source, on top of Triton's class of it, that tells when it is made and when it has left the front
    end."""

    left: Callable[[Any], None] | None = None
    """What is told, with the module that it has become."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if rehearsing():
            _rehearsal.source = self

    def make_ir(self, *arguments: Any, **options: Any) -> Any:
        module = super().make_ir(*arguments, **options)  # type: ignore[misc]
        if self.left is not None:
            self.left(module)
        return module

    @property
    def rank(self) -> int:
        """Where its kernel stands in LONGEST."""
        name = self.fn.__name__  # type: ignore[attr-defined]
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    @property
    def has_descriptors(self) -> bool:
        return any(str(kind).startswith("tensordesc") for kind in self.signature.values())  # type: ignore[attr-defined]


class _InTurn(Executor):
    """Has kernels compiled side by side, but for Triton's front end: that is Python, where threads only hinder each
    other. So one kernel at a time is in it, in the order of LONGEST. Launchers are built beside it."""

    def __init__(self, compilers: Executor, builders: Executor) -> None:
        self._compilers, self._builders = compilers, builders
        self._asked: list[tuple[Any, Callable[[], Any], Future[Any]]] = []
        self._launchers: dict[Any, Future[Any]] = {}

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._asked.append((_rehearsal.source, functools.partial(work, *arguments, **options), future))
        return future

    def start(self) -> None:
        """Begin with what has been asked for."""
        before = threading.Event()
        before.set()
        for source, work, future in sorted(self._asked, key=lambda asked: asked[0].rank):
            if not source.has_descriptors:
                self._begin_launcher(source, [])
            after = threading.Event()
            self._compilers.submit(self._compile, source, work, future, before, after)
            before = after

    def _compile(
        self, source: Any, work: Callable[[], Any], future: Future[Any], before: threading.Event, after: threading.Event
    ) -> None:
        def left(module: Any) -> None:
            after.set()
            # How descriptors are passed is in Gluon's modules from the beginning; in Triton's not before a later stage.
            if source.has_descriptors and source.ext != "ttir":
                self._begin_launcher(source, module.get_tensordesc_metadata())

        before.wait()
        source.left = left
        try:
            future.set_result(work())
        except BaseException as failure:
            future.set_exception(failure)
        finally:
            source.left = None
            after.set()

    def _begin_launcher(self, source: Any, passed: list[Any]) -> None:
        """If this Triton builds launchers; ``passed``: how the kernel's descriptors are."""
        if make_launcher is not None:
            self._launchers[source] = self._builders.submit(_build_launcher, source, passed)

    def wait_for_launcher(self, source: Any) -> None:
        """Until it is built, if it was begun: or it would be built twice."""
        if source in self._launchers:
            wait([self._launchers[source]])


class _Uncompiled:
    """What is known of a kernel before it is compiled: how its descriptors are passed. All else is None."""

    def __init__(self, passed: list[Any]) -> None:
        self.tensordesc_meta = passed

    def __getattr__(self, name: str) -> None:
        return None


def _build_launcher(source: Any, passed: list[Any]) -> None:
    """Leaves it in Triton's cache. What fails here fails when the kernel is loaded, too, and is reported there."""
    driver.active.launcher_cls(source, _Uncompiled(passed))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``, which looks at every argument to find what it has compiled, and takes
    longer over that than over the launch. So Triton is only asked about kinds of launches that are new."""
    device = driver.active.get_current_device()
    key = kind_of(kernel, device, arguments, options)
    found = _compiled.get(key)
    if found is None:
        with _loading:
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


@contextlib.contextmanager
def _modules_apart() -> Iterator[None]:
    """What Triton loads of its launchers is each one's own.

    They are extension modules of one name that can be initialized once. When such a module is loaded again, Python puts
    what it has into the one object that ``sys.modules`` has for the name. A thread that is about to take a launcher out
    of it would get the one that another thread has loaded meanwhile, for a kernel with other arguments.
    """
    if make_launcher is None:  # launchers are no modules
        yield
        return
    load, one_at_a_time = build._load_module_from_path, threading.Lock()

    def load_apart(name: str, path: str) -> SimpleNamespace:
        with one_at_a_time:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Python's threads take turns after SHORT_TURN at the latest, and none has all wait for a garbage collection."""
    before, collects = sys.getswitchinterval(), gc.isenabled()
    if before > SHORT_TURN:
        sys.setswitchinterval(SHORT_TURN)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if before > SHORT_TURN:
            sys.setswitchinterval(before + 0.5e-6)  # cut to whole microseconds; what was read may lie just below


def rehearse(kind: Any, device: torch.device, step: Callable[[], Any]) -> None:
    """Run ``step`` once for each ``kind`` of call, launching nothing: its kernels are compiled and loaded side by side
    and not one after another, so that a first call waits for the slowest and not for all."""
    if AsyncCompileMode is None or device.type != "cuda" or kind in _rehearsed:
        return
    with _loading:
        if kind not in _rehearsed:
            try:
                _rehearse(device, step)
            finally:
                _rehearsed.add(kind)


def _rehearse(device: torch.device, step: Callable[[], Any]) -> None:
    loads: list[Any] = []

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):
            made = kernel.result() if hasattr(kernel, "result") else kernel
            in_turn.wait_for_launcher(made.src)
            _ = made.run

    try:
        # A compiled kernel is loaded while others are still compiled.
        with (
            _modules_apart(),
            _undisturbed(),
            ThreadPoolExecutor(LOADERS) as loaders,
            ThreadPoolExecutor(BUILDERS) as builders,
            ThreadPoolExecutor(COMPILERS) as compilers,
        ):
            in_turn = _InTurn(compilers, builders)
            # What Triton makes once in a process, and before anything else: the hash of itself, its driver.
            for made in [loaders.submit(triton_key), loaders.submit(lambda: driver.active)]:
                made.result()
            _rehearsal.load = lambda kernel: loads.append(loaders.submit(load, kernel))
            # In a context of its own, as Triton 3.6 stays in its mode if a compilation fails.
            contextvars.copy_context().run(_have_compiled, step, in_turn)
            for loaded in loads:
                loaded.result()
    finally:
        _rehearsal.load = _rehearsal.source = None


def _have_compiled(step: Callable[[], Any], compilers: _InTurn) -> None:
    with AsyncCompileMode(compilers):
        try:
            step()
        finally:
            compilers.start()
