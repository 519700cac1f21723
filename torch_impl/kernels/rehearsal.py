"""The rehearsal of a first call: all its kernels are compiled side by side before the call runs.

Without it a first call would wait for its kernels one after the other. The call runs once with launches that only
compile, and then as usual. This file is the only one that knows of it: the Triton backend runs its steps through
:func:`run_step`, and launch.py lets a thread do something else instead of a launch. No mirror: XLA compiles a whole
program.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from logitless.spec import LossOptions
from logitless.torch_impl.call import Arrays, Call, Needs
from logitless.torch_impl.compiled.tracing import OperationMode
from logitless.torch_impl.kernels.launch import instead, loading

with contextlib.suppress(ImportError):  # a CPU-only install; fused.unavailable() says so before a kernel is launched
    from triton.runtime import build, driver

try:
    from triton import AsyncCompileMode
    from triton.runtime.cache import triton_key
except ImportError:  # a Triton that compiles one kernel at a time
    AsyncCompileMode = None

try:
    from triton.backends.nvidia.driver import make_launcher
except ImportError:  # a Triton (3.7 and later) that needs no C compiler to launch a kernel
    make_launcher = None

NEW_TENSORS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
)
COMPILERS, BUILDERS, LOADERS = 16, 6, 32  # threads
# Seconds, where Python's own is 5 ms: a compiler that comes back from LLVM waits so long for the one in the front end.
SHORT_TURN = 0.001
# The kernels that take longest to compile, the longest first.
LONGEST = "hidden_kernel", "logits_kernel", "weight_kernel", "finish_kernel"
# Options whose kernels depend on whether they are set, not on their value.
SWITCHES = tuple(field.name for field in dataclasses.fields(LossOptions))[2:]

Result = TypeVar("Result")


class _Asked(threading.local):
    """What this thread has asked Triton for."""

    source: Any = None
    """The source of the kernel that was asked for last; None outside of a rehearsal."""


_asked = _Asked()
_rehearsed: set[Any] = set()


def rehearsing() -> bool:
    """Whether this thread's launches only compile."""
    return instead.run is not None


def run_step(name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result]) -> Result:
    """``step(call)``, rehearsed before if no call of its kind was: a kind is what kernels are compiled for."""
    quiet = call
    if call.shard is not None:
        quiet = dataclasses.replace(call, shard=dataclasses.replace(call.shard, quiet=True))

    def rehearsal() -> None:
        with IndexesAreZero():  # type: ignore[no-untyped-call]
            waiting = getattr(step(quiet), "waiting", None)
            if waiting is not None:
                waiting.finish(torch.ones((), dtype=torch.float32, device=arrays.hidden.device))

    rehearse(_kind_of(name, arrays, call, needs), arrays.hidden.device, rehearsal)
    return step(call)


def _kind_of(name: str, arrays: Arrays, call: Call, needs: Needs) -> tuple[Any, ...]:
    plan, options = call.chunk_plan, call.options
    sizes = (arrays.target.numel(), *arrays.weight.shape, *arrays.weight.stride(), plan.vocab_chunk)
    dtypes = tuple(None if array is None else array.dtype for array in arrays)
    results = (call.statistics, call.lse)
    flags = (plan.kernel_kind, plan.splits_hidden, results, call.compute_dtype)
    chosen = (options.reduction, options.separable, *(bool(getattr(options, switch)) for switch in SWITCHES))
    ranks = (call.shard is None, call.shard is not None and call.shard.sequence_parallel)
    of_sizes = tuple((n % 16 == 0, n == 1) for n in sizes)  # what Triton compiles a kernel for
    return name, arrays.hidden.device, dtypes, of_sizes, flags, chosen, needs, needs.into is None, ranks


class IndexesAreZero(OperationMode):
    """New integer tensors hold zeros: no kernel writes them in a rehearsal, and PyTorch's own operations index with
    them."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation in NEW_TENSORS and not result.dtype.is_floating_point:
            result.zero_()
        return result


def _compile(load: Callable[[Any], None], kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """In place of a launch: have the kernel compiled, and hand it to ``load``."""
    _ = kernel.device_caches[driver.active.get_current_device()]  # makes what Triton keeps with a kernel
    if not issubclass(kernel.ASTSource, _Source):
        kernel.ASTSource = type("Source", (_Source, kernel.ASTSource), {})
    load(kernel.warmup(*arguments, grid=grid, **options))


class _Source:
    """A kernel's source, on top of Triton's class of it, that tells when it is made and when it has left the front
    end."""

    left: Callable[[Any], None] | None = None
    """What is told, with the module that it has become."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if rehearsing():
            _asked.source = self

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
        self._asked.append((_asked.source, functools.partial(work, *arguments, **options), future))
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
    with loading:
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
            instead.run = functools.partial(_compile, lambda kernel: loads.append(loaders.submit(load, kernel)))
            # In a context of its own, as Triton 3.6 stays in its mode if a compilation fails.
            contextvars.copy_context().run(_have_compiled, step, in_turn)
            for loaded in loads:
                loaded.result()
    finally:
        instead.run = _asked.source = None


def _have_compiled(step: Callable[[], Any], compilers: _InTurn) -> None:
    with AsyncCompileMode(compilers):
        try:
            step()
        finally:
            compilers.start()
