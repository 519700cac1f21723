"""CUDA graphs of repeated steps: when one is made, launched, dropped, and what happens where none can be.

CUDA's driver has a stand-in here. tests/test_gpu.py has the graphs themselves.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
pytest.importorskip("triton", reason="the steps are those of Triton's kernels")

from logitless.torch_impl.kernels import graphs  # noqa: E402

DEVICE = torch.device("cuda", 0)
OWN, SIDE = 7, 8


class Frame:
    stream = OWN


class Bound:
    runs, graph = 0, None


class Stream:
    cuda_stream = SIDE


class Driver:
    """Writes down which of its functions is called, and fails where it is told to."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.fails: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name in ("cuStreamEndCapture", "cuGraphInstantiateWithFlags"):
                made = arguments[1] if name == "cuStreamEndCapture" else arguments[0]
                made._obj.value = 1
            return 700 if name in self.fails else 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    monkeypatch.setattr(graphs, "_side_stream", lambda _: Stream())
    monkeypatch.setattr(graphs, "_allocations", lambda _: driver.called.count("allocate"))
    monkeypatch.setattr(graphs, "alive", collections.deque())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def runs(driver: Driver, bound: Bound, times: int, work: Any = None) -> list[str]:
    """On which streams the work was done, or "graph" where a graph was launched instead."""
    streams: list[Any] = []
    for _ in range(times):
        before, frame = driver.called.count("cuGraphLaunch"), Frame()
        graphs.run(bound, work or (lambda frame: streams.append(frame.stream)), frame, DEVICE)
        assert frame.stream == OWN
        if driver.called.count("cuGraphLaunch") > before:
            streams.append("graph")
    return streams


def test_the_third_run_is_captured_and_launched(driver: Driver) -> None:
    bound = Bound()
    assert runs(driver, bound, 5) == [OWN, OWN, SIDE, "graph", "graph", "graph"]
    assert driver.called.count("cuGraphDestroy") == 1
    assert len(graphs.alive) == 1
    bound.graph = None
    assert driver.called[-1] == "cuGraphExecDestroy"


@pytest.mark.parametrize(
    "name", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "allocate"]
)
def test_without_a_graph_the_launches_are_made(driver: Driver, name: str) -> None:
    """The driver refuses; or memory was made within, which would be somebody else's later."""
    bound, done = Bound(), []

    def work(frame: Frame) -> None:
        done.append(frame.stream)
        if name == "allocate":
            driver.allocate()

    driver.fails = {name}
    runs(driver, bound, 5, work)
    captured = [] if name == "cuStreamBeginCapture_v2" else [SIDE]
    assert done == [OWN, OWN, *captured, OWN, OWN, OWN]
    assert bound.graph is None
    assert not graphs.alive
    assert not graphs._capturing.locked()


def test_an_error_of_the_work_ends_the_capture(driver: Driver) -> None:
    bound = Bound()
    runs(driver, bound, 2)

    def work(frame: Frame) -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        runs(driver, bound, 1, work)
    assert driver.called == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]
    assert not graphs._capturing.locked()
    assert runs(driver, bound, 1) == [OWN]


def test_somebody_elses_capture_takes_the_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound()
    runs(driver, bound, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert runs(driver, bound, 1) == [OWN]


def test_another_threads_capture_is_not_waited_for(driver: Driver) -> None:
    bound = Bound()
    with graphs._capturing:
        assert runs(driver, bound, 3) == [OWN, OWN, OWN]
    assert not driver.called


def test_the_oldest_graph_goes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    bounds = [Bound() for _ in range(3)]
    for bound in bounds:
        runs(driver, bound, 3)
    assert [bound.graph is None for bound in bounds] == [True, False, False]
    assert runs(driver, bounds[0], 4) == [OWN] * 4  # it waits for longer than a new one
    del bounds[1], bound
    assert sum(ref() is not None for ref in graphs.alive) == 1


def test_a_part_is_cut_where_no_graph_can_have_a_step() -> None:
    from logitless.torch_impl.kernels import program

    def steps(pattern: str) -> list[Any]:
        return [program.Operation(len, [], {}, no_graph=letter == "-") for letter in pattern]

    def cut(pattern: str) -> list[tuple[int, bool]]:
        return [(len(segment.done), segment.graph) for segment in program._segments(steps(pattern))]

    assert cut("") == []
    assert cut("ggg") == [(3, True)]
    assert cut("gg-g--gg") == [(2, True), (1, False), (1, True), (2, False), (2, True)]
    assert cut("-") == [(1, False)]
    most = "g-" * program.MOST_SEGMENTS
    assert len(cut(most)) == 2 * program.MOST_SEGMENTS
    assert cut(f"{most}g") == [(2 * program.MOST_SEGMENTS + 1, False)]
