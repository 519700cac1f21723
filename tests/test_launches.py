"""Launches of Triton's kernels: which are of one kind, and what the first and the later launches of a kind do."""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch_impl")
triton = pytest.importorskip("triton", reason="these tests are about launches of Triton's kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel, make_backend  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor  # noqa: E402
from triton.runtime.build import compile_module_from_src  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from logitless.torch_impl.kernels import launch as launches  # noqa: E402
from logitless.torch_impl.kernels import rehearsal  # noqa: E402


def probe(first, second, desc, number, scale, FLAG: triton.language.constexpr, SIZE: triton.language.constexpr):
    """A kernel of every sort of argument."""


PROBE = JITFunction(probe)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
BINDER = create_function_from_signature(PROBE.signature, PROBE.params, BACKEND)
ROOM = torch.zeros(256)


def described(dtype: Any, block: list[int]) -> Any:
    return TensorDescriptor(ROOM.view(dtype)[:128].view(2, 64), [2, 64], [64, 1], block)


DTYPES = torch.float32, torch.bfloat16, torch.int32, torch.int8
# What each argument may be, and each option.
VALUES: dict[str, list[Any]] = {
    "first": [None, *(ROOM.view(dtype)[start:] for dtype in DTYPES for start in (0, 1, 2, 4, 8, 16))],
    "desc": [None, *(described(dtype, [r, c]) for dtype in DTYPES[:2] for r in (1, 2) for c in (16, 32))],
    "number": [
        None,
        0,
        1,
        2,
        15,
        16,
        17,
        4096,
        2**31 - 1,
        2**31,
        2**63,
        -1,
        -(2**31),
        -(2**31) - 1,
        -(2**31) - 16,
        True,
        False,
    ],
    "scale": [0.0, 1.0, 2.5, 0, 1],
    "FLAG": [True, False],
    "SIZE": [16, 32],
    "num_warps": [4, 8],
}
USUAL = {
    "first": ROOM,
    "second": ROOM,
    "desc": None,
    "number": 7,
    "scale": 1.0,
    "FLAG": True,
    "SIZE": 16,
    "num_warps": 4,
}


def called(**values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of the usual launch, with ``values`` in place of some."""
    every = list((USUAL | values).items())
    return tuple(value for _, value in every[:5]), dict(every[5:])


def compiled_for(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What Triton compiles for, by its own rule."""
    _, specialization, rest = BINDER(*arguments, **options)
    return repr((specialization, rest))


@pytest.mark.parametrize("name", VALUES)
def test_one_kind_is_compiled_once(name: str) -> None:
    """Whatever makes Triton compile anew is another kind: any two values of an argument or of an option."""
    for one, other in itertools.combinations(VALUES[name], 2):
        calls = called(**{name: one}), called(**{name: other})
        if compiled_for(*calls[0]) != compiled_for(*calls[1]):
            assert launches.kind_of(PROBE, 0, *calls[0]) != launches.kind_of(PROBE, 0, *calls[1]), (one, other)


class Marked(torch.Tensor):
    """A user's own class of tensors."""


def test_what_kinds_have_in_common() -> None:
    """New tensors of the same dtype and alignment are of one kind, whatever their shapes and classes; so are other
    floats, and integers for which Triton compiles the same. A kind holds no tensor."""
    given = torch.empty(64), torch.empty(64), None, 7, 1.0
    kind = launches.kind_of(PROBE, 0, given, {"FLAG": True})
    again = torch.empty(16, 4), torch.nn.Parameter(torch.empty(64)).as_subclass(Marked), None, 9001, 2.5
    assert launches.kind_of(PROBE, 0, again, {"FLAG": True}) == kind
    assert launches.kind_of(PROBE, 1, again, {"FLAG": True}) != kind
    assert launches.kind_of(JITFunction(probe), 0, again, {"FLAG": True}) != kind


class Compiled:
    """A kernel compiled for a kind, with its launches and those that a profiler could see."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.seen: list[tuple[Any, ...]] = []

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        assert rest[:5] == ("function", "metadata", None, None, None)
        self.launched.append(((x, y, z), stream, *rest[5:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values, stream: self.seen.append((grid, stream, *values))


class Kernel(JITFunction):
    """Counts what it compiles."""

    def __init__(self) -> None:
        super().__init__(probe)
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return compile_and_launch


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current device and stream, and no kind known."""
    now = SimpleNamespace(device=0, stream=5)
    active = SimpleNamespace(get_current_device=lambda: now.device, get_current_stream=lambda device: now.stream)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launches, "compiled", {})
    return now


def test_triton_is_asked_once_for_a_kind(current: SimpleNamespace) -> None:
    kernel, x = Kernel(), torch.empty(64)
    launch = launches.launch(kernel, 3)
    launch(x, x, None, 7, 1.0, SIZE=16, FLAG=True, num_warps=4)
    assert [made.launched for made in kernel.made] == [[]]
    y = torch.empty(64)
    current.stream = 6
    launches.launch(kernel, 4, 2)(y, x, None, 7, 2.0, SIZE=16, FLAG=True, num_warps=4)
    assert [made.launched for made in kernel.made] == [[((4, 2, 1), 6, y, x, None, 7, 2.0, True, 16)]]
    launch(y[1:], x, None, 7, 2.0, SIZE=16, FLAG=True, num_warps=4)
    launch(y, x, None, 7, 2.0, SIZE=16, FLAG=True, num_warps=8)
    current.device = 1
    launch(y, x, None, 7, 2.0, SIZE=16, FLAG=True, num_warps=4)
    assert len(kernel.made) == 4


def test_a_new_kind_waits_while_kernels_are_loaded(current: SimpleNamespace) -> None:
    """Another thread's rehearsal loads them, for instance."""
    kernel, x = Kernel(), torch.empty(64)
    launch = launches.launch(kernel, 3)
    launch(x, x, None, 7, 1.0, SIZE=16, FLAG=True)
    new = threading.Thread(target=launch, args=(x, x, None, 16, 1.0), kwargs={"SIZE": 16, "FLAG": True})
    with launches.loading:
        new.start()
        new.join(0.3)
        assert len(kernel.made) == 1
        launch(x, x, None, 7, 1.0, SIZE=16, FLAG=True)
    new.join()
    assert [len(made.launched) for made in kernel.made] == [1, 0]


def test_a_profiler_sees_every_launch(current: SimpleNamespace) -> None:
    """Triton tells it of launches."""
    kernel, x, looks = Kernel(), torch.empty(64), print
    for number in range(3):
        if number == 1:
            triton.knobs.runtime.launch_enter_hook.add(looks)
        try:
            launches.launch(kernel, 3)(x, x, None, 7, 1.0, SIZE=16, FLAG=True)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(looks)
    (made,) = kernel.made
    assert made.seen == made.launched == [((3, 1, 1), 5, x, x, None, 7, 1.0, True, 16)]


def test_kinds_do_not_pile_up(current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MOST_KINDS", 3)
    kernel, x = Kernel(), torch.empty(64)
    for number in range(10):
        launches.launch(kernel, 1)(x, x, None, 7, 1.0, SIZE=number, FLAG=True)
        assert len(launches.compiled) <= 3
    launches.launch(kernel, 1)(x, x, None, 7, 1.0, SIZE=9, FLAG=True)
    assert len(kernel.made) == 10


# ---------------------------------------------------------------------------------------------------------------------
# The rehearsal. Triton compiles for a GPU without one; only loading is left out.


def small_kernel(out, SIZE: triton.language.constexpr):
    triton.language.store(out, SIZE)


def hidden_kernel(out, SIZE: triton.language.constexpr):
    triton.language.store(out, SIZE)


def logits_kernel(out, SIZE: triton.language.constexpr):
    triton.language.store(out, SIZE)


def weight_kernel(out, SIZE: triton.language.constexpr):
    triton.language.store(out, SIZE)


def wrong_kernel(out, SIZE: triton.language.constexpr):
    triton.language.static_assert(SIZE == 0, "a kernel that cannot be compiled")


class FakeDriver:
    """The driver of a machine with a Hopper GPU."""

    def __init__(self, launcher_cls: Any) -> None:
        self.launcher_cls = launcher_cls

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


@pytest.fixture(params=[False, True], ids=["launchers need no compiler", "launchers built ahead"])
def built_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(rehearsal, "make_launcher", print if request.param else None)
    return bool(request.param)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, built_ahead: bool) -> SimpleNamespace:
    """What is seen of Triton's front end, (name, when entered, when left), the names of what was loaded, and the
    sources whose launchers were built ahead."""
    if rehearsal.AsyncCompileMode is None:
        pytest.skip("this Triton compiles one kernel at a time")
    seen = SimpleNamespace(front_ends=[], loaded=[], launchers=[])
    make_ir = ASTSource.make_ir

    def make_ir_slowly(source: Any, *arguments: Any, **options: Any) -> Any:
        entered = time.perf_counter()
        time.sleep(0.02)
        try:
            return make_ir(source, *arguments, **options)
        finally:
            seen.front_ends.append((source.fn.__name__, entered, time.perf_counter()))

    def load(kernel: Any) -> None:
        assert not built_ahead or kernel.src in seen.launchers, "loaded while its launcher is built"
        seen.loaded.append(kernel.name)
        kernel._run = print

    def build(source: Any, metadata: Any) -> None:
        time.sleep(1)
        assert (metadata.tensordesc_meta, metadata.launch_pdl) == ([], None)
        seen.launchers.append(source)  # or load() finds it missing: nobody reads what a build raises

    monkeypatch.setattr(ASTSource, "make_ir", make_ir_slowly)
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(rehearsal, "_rehearsed", set())
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver(build))
    return seen


def test_kernels_are_in_the_front_end_one_at_a_time(compiling: SimpleNamespace, built_ahead: bool) -> None:
    """Those first that take longest; each is compiled and loaded once, and a call's kind is rehearsed once."""
    out = torch.zeros(4)
    kernels = [JITFunction(function) for function in (small_kernel, hidden_kernel, logits_kernel)]

    def step() -> None:
        for kernel in [*kernels, kernels[0]]:
            launches.launch(kernel, 1)(out, SIZE=16)

    for _ in range(2):
        rehearsal.rehearse("kind", torch.device("cuda"), step)
    assert [name for name, _, _ in compiling.front_ends] == [*rehearsal.LONGEST[:2], "small_kernel"]
    for (_, _, left), (_, entered, _) in itertools.pairwise(compiling.front_ends):
        assert left <= entered
    assert set(compiling.loaded) == {"logits_kernel", "hidden_kernel", "small_kernel"}
    assert len(compiling.launchers) == 3 * built_ahead
    assert not rehearsal.rehearsing()


def test_what_indexes_in_a_rehearsal_is_an_index() -> None:
    """No kernel writes new tensors there; PyTorch's own operations index with them all the same."""
    makers = (
        lambda: torch.empty(4096, dtype=torch.int32),
        lambda: torch.empty_like(torch.ones(4096, dtype=torch.int64)),
        lambda: torch.ones(1, dtype=torch.int32).new_empty(4096),
    )
    for make in makers:
        for _ in range(20):
            torch.full_like(make(), 7)  # what the next tensor finds in its memory
            with rehearsal.IndexesAreZero():
                assert not make().any()


def test_one_kernel_in_the_back_end_does_not_hold_up_another_in_the_front_end(
    compiling: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    stages = CUDABackend.make_llir

    def wait(backend: Any, source: Any, *rest: Any) -> Any:
        if "logits_kernel" in str(source):
            assert left.wait(30), "the second kernel waits for the first to be compiled"
        return stages(backend, source, *rest)

    def leave(source: Any, *arguments: Any, **options: Any) -> Any:
        made = slowly(source, *arguments, **options)
        if source.fn.__name__ == "small_kernel":
            left.set()
        return made

    slowly = ASTSource.make_ir
    monkeypatch.setattr(ASTSource, "make_ir", leave)
    monkeypatch.setattr(CUDABackend, "make_llir", wait)
    out = torch.zeros(4)
    kernels = [JITFunction(function) for function in (small_kernel, logits_kernel)]
    rehearsal.rehearse("kind", torch.device("cuda"), lambda: [launches.launch(k, 1)(out, SIZE=16) for k in kernels])
    assert set(compiling.loaded) == {"logits_kernel", "small_kernel"}


@pytest.mark.parametrize("fails", ["compilation", "call"])
def test_a_rehearsal_that_fails_says_so_and_ends(compiling: SimpleNamespace, fails: str) -> None:
    out = torch.zeros(4)
    kernels = [JITFunction(function) for function in (small_kernel, wrong_kernel, logits_kernel)]

    def step() -> None:
        for kernel in kernels if fails == "compilation" else kernels[::2]:
            launches.launch(kernel, 1)(out, SIZE=16)
        if fails == "call":
            raise ValueError("not such a call")

    with pytest.raises(Exception, match="cannot be compiled" if fails == "compilation" else "not such a call"):
        rehearsal.rehearse("kind", torch.device("cuda"), step)
    assert not rehearsal.rehearsing()
    assert {"logits_kernel", "small_kernel"} <= {name for name, _, _ in compiling.front_ends}


@pytest.mark.parametrize("built_ahead", [True], ids=["launchers built ahead"], indirect=True)
def test_a_launcher_does_not_wait_for_the_front_end(
    compiling: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, make_ir = threading.Event(), ASTSource.make_ir

    def build(source: Any, metadata: Any) -> None:
        compiling.launchers.append(source)
        built.set()

    def wait(source: Any, *arguments: Any, **options: Any) -> Any:
        assert built.wait(30), "the launcher waits for the front end"
        return make_ir(source, *arguments, **options)

    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver(build))
    monkeypatch.setattr(ASTSource, "make_ir", wait)
    out, kernel = torch.zeros(4), JITFunction(small_kernel)
    rehearsal.rehearse("kind", torch.device("cuda"), lambda: launches.launch(kernel, 1)(out, SIZE=16))
    assert compiling.loaded == ["small_kernel"]


@gluon.jit
def described_kernel(desc, out):
    gl.store(out, desc.shape[0])


def described_by_triton_kernel(desc, out):
    triton.language.store(out, desc.shape[0])


@pytest.mark.parametrize("built_ahead", [True], ids=["launchers built ahead"], indirect=True)
def test_a_launcher_with_descriptors_waits_until_it_is_known_how_they_are_passed(
    compiling: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known of Gluon's kernels when they leave the front end; Triton's are built when they are loaded."""
    passed = []

    def build(source: Any, metadata: Any) -> None:
        passed.append((source.fn.__name__, [meta["block_size"] for meta in metadata.tensordesc_meta]))

    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver(build))
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: setattr(kernel, "_run", print))
    out, matrix = torch.zeros(4, dtype=torch.int32), torch.zeros(64, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.bfloat16)

    by_triton = JITFunction(described_by_triton_kernel)

    def step() -> None:
        launches.launch(described_kernel, 1)(GluonDescriptor.from_tensor(matrix, [16, 32], layout), out)
        launches.launch(by_triton, 1)(TensorDescriptor.from_tensor(matrix, [16, 32]), out)

    rehearsal.rehearse("kind", torch.device("cuda"), step)
    assert passed == [("described_kernel", [[16, 32]])]


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("before", "within"), [(0.005, 0.001), (0.0030015, 0.001), (0.0002505, 0.00025)], ids=["usual", "longer", "short"]
)
@pytest.mark.parametrize("collects", [True, False], ids=["collecting", "not collecting"])
def test_a_rehearsal_is_not_disturbed(
    compiling: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, before: float, within: float, collects: bool
) -> None:
    """Its threads take short turns, and no garbage is collected. All is as before once it has ended, in an error,
    too."""
    turns: list[float] = []
    make_ir = ASTSource.make_ir

    def look(source: Any, *arguments: Any, **options: Any) -> Any:
        assert not gc.isenabled()
        turns.append(sys.getswitchinterval())
        return make_ir(source, *arguments, **options)

    def rehearse(function: Any) -> None:
        kernel = JITFunction(function)
        rehearsal.rehearse(function, torch.device("cuda"), lambda: launches.launch(kernel, 1)(out, SIZE=16))

    monkeypatch.setattr(ASTSource, "make_ir", look)
    out, usual = torch.zeros(4), (gc.isenabled(), sys.getswitchinterval())
    as_before = _collect(collects), _take_turns(before)
    try:
        rehearse(small_kernel)
        assert (gc.isenabled(), sys.getswitchinterval()) == as_before
        with pytest.raises(Exception, match="cannot be compiled"):
            rehearse(wrong_kernel)
        assert (gc.isenabled(), sys.getswitchinterval()) == as_before
    finally:
        _collect(usual[0])
        _take_turns(usual[1])
    assert turns == pytest.approx([within, within])


def _collect(garbage: bool) -> bool:
    """Switch garbage collection on or off, and return whether it is on."""
    (gc.enable if garbage else gc.disable)()
    return gc.isenabled()


def _take_turns(seconds: float) -> float:
    """Let threads take turns of ``seconds``, and return the turn in whole microseconds."""
    sys.setswitchinterval(seconds)
    return sys.getswitchinterval()


# A module as Triton's launchers are: of the same name as the others, and to be initialized once.
MODULE = """
#include <Python.h>
static PyObject *launch(PyObject *module, PyObject *none) { return PyUnicode_FromString("%s"); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_probe_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="needs a C compiler, as Triton's launchers do")
@pytest.mark.parametrize("built_ahead", [True], ids=["launchers built ahead"], indirect=True)
def test_kernels_loaded_side_by_side_have_their_own_launchers(
    compiling: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has one object for all modules of a name that are loaded again."""

    def launcher(source: Any, metadata: Any) -> Any:
        module = compile_module_from_src(MODULE % source.fn.__name__, "probe_launcher")
        time.sleep(0.1)  # the others load theirs
        compiling.launchers.append(source)
        return module.launch

    def load(kernel: Any) -> None:
        kernel._run = triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        compiling.loaded.append((kernel.name, kernel._run()))

    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver(launcher))
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    functions = small_kernel, hidden_kernel, logits_kernel, weight_kernel
    for function in functions:
        assert compile_module_from_src(MODULE % function.__name__, "probe_launcher").launch() == function.__name__
    out = torch.zeros(4)
    kernels = [JITFunction(function) for function in functions]
    rehearsal.rehearse("kind", torch.device("cuda"), lambda: [launches.launch(k, 1)(out, SIZE=16) for k in kernels])
    names = [function.__name__ for function in functions]
    assert sorted(compiling.loaded) == sorted(zip(names, names, strict=True))


def test_a_call_beside_a_rehearsal_waits_for_its_end(
    compiling: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not rehearse the same kernels again."""
    loading, go_on = threading.Event(), threading.Event()

    def load(kernel: Any) -> None:
        loading.set()
        assert go_on.wait(30)
        compiling.loaded.append(kernel.name)
        kernel._run = print

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    out, kernel = torch.zeros(4), JITFunction(small_kernel)

    def call() -> None:
        rehearsal.rehearse("kind", torch.device("cuda"), lambda: launches.launch(kernel, 1)(out, SIZE=16))

    threads = [threading.Thread(target=call) for _ in range(2)]
    threads[0].start()
    assert loading.wait(30)
    threads[1].start()
    threads[1].join(0.5)
    waits = threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join()
    assert waits
    assert compiling.loaded == ["small_kernel"]
