"""Launches of Triton's kernels: which are of one kind, and what happens at the first of a kind and at the others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch_impl")
triton = pytest.importorskip("triton", reason="these tests are about launches of Triton's kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from logitless.torch_impl import launches  # noqa: E402


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
    "number": [None, 0, 1, 2, 15, 16, 17, 4096, 2**31 - 1, 2**31, True, False],
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
    """Arguments and options of a launch that is the usual one but for ``values``."""
    every = list((USUAL | values).items())
    return tuple(value for _, value in every[:5]), dict(every[5:])


def compiled_for(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """By Triton's own rule."""
    _, specialization, rest = BINDER(*arguments, **options)
    return repr((specialization, rest))


@pytest.mark.parametrize("name", VALUES)
def test_one_kind_is_compiled_once(name: str) -> None:
    """What Triton would compile anew is of another kind: any two values of an argument, or of an option."""
    for one, other in itertools.combinations(VALUES[name], 2):
        calls = called(**{name: one}), called(**{name: other})
        if compiled_for(*calls[0]) != compiled_for(*calls[1]):
            assert launches.kind_of(PROBE, 0, *calls[0]) != launches.kind_of(PROBE, 0, *calls[1]), (one, other)


class Marked(torch.Tensor):
    """A user's own class of tensors."""


def test_what_kinds_have_in_common() -> None:
    """New tensors of the same dtype and alignment, other shapes and classes of them, and other floats are of one kind,
    which holds no tensor."""
    given = torch.empty(64), torch.empty(64), None, 7, 1.0
    kind = launches.kind_of(PROBE, 0, given, {"FLAG": True})
    again = torch.empty(16, 4), torch.nn.Parameter(torch.empty(64)).as_subclass(Marked), None, 7, 2.5
    assert launches.kind_of(PROBE, 0, again, {"FLAG": True}) == kind
    assert launches.kind_of(PROBE, 1, again, {"FLAG": True}) != kind
    assert launches.kind_of(JITFunction(probe), 0, again, {"FLAG": True}) != kind


class Compiled:
    """What was compiled for a kind; its launches, and those that a profiler could see."""

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
    monkeypatch.setattr(launches, "_compiled", {})
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


def test_a_profiler_sees_every_launch(current: SimpleNamespace) -> None:
    """Which Triton tells of launches."""
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
        launches.launch(kernel, 1)(x, x, None, number, 1.0, SIZE=16, FLAG=True)
        assert len(launches._compiled) <= 3
    launches.launch(kernel, 1)(x, x, None, 9, 1.0, SIZE=16, FLAG=True)
    assert len(kernel.made) == 10
