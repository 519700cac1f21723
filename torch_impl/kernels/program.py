"""A step that was written down: its memory, its launches, PyTorch's own operations, in their order.

recording.py writes one down, layout.py gives it memory, replay.py decides when one is run. No mirror: XLA compiles a
whole program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from logitless.torch_impl.call import Gradients
from logitless.torch_impl.distributed.parallel import Work
from logitless.torch_impl.kernels import graphs, launch
from logitless.torch_impl.kernels.rows import on_device

CONSTANTS = frozenset((int, float, bool, torch.dtype, torch.device))
# For so many sets of addresses a part's arguments are kept.
MOST_BOUND = 16
# A part has at most so many graphs. One that is cut into more is large, and waits for the GPU.
MOST_SEGMENTS = 8


class Place(NamedTuple):
    """A tensor, as part of a buffer."""

    buffer: int
    offset: int  # bytes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_whole: bool = False
    """Whether it is the tensor that the buffer is known by: nothing else has to be made."""


class Unfit(Exception):
    """A step cannot be repeated."""


class Frame:
    """The memory of one run of a program."""

    __slots__ = ("memory", "start", "stream", "works")

    def __init__(self, buffers: int) -> None:
        self.start = [0] * buffers
        """Addresses."""
        self.memory: list[Tensor | None] = [None] * buffers
        """The tensors that they are in."""
        self.stream = 0
        self.works: dict[int, Work] = {}
        """Collectives that are under way."""

    def put(self, buffer: int, tensor: Tensor) -> None:
        """The tensor is the buffer."""
        self.memory[buffer], self.start[buffer] = tensor, tensor.data_ptr()

    def tensor(self, place: Place) -> Tensor:
        memory = self.memory[place.buffer]
        assert memory is not None
        if place.is_whole:
            return memory
        begin = place.offset + memory.storage_offset() * memory.itemsize
        flat = memory if memory.dtype == place.dtype else memory.view(place.dtype)
        return flat.as_strided(place.size, place.stride, begin // place.dtype.itemsize)


# ---------------------------------------------------------------------------------------------------------------------
# Places in what a step reads and returns: lists, tuples, named tuples, dicts and gradients


def places(value: object) -> Iterator[Place]:
    """All places in ``value``."""
    if isinstance(value, Place):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from places(each)
    elif isinstance(value, dict):
        yield from places(list(value.values()))
    elif isinstance(value, Gradients):
        yield from places((value.hidden, value.weight, value.bias))


def exchanged(value: object, kind: type, other: Callable[..., object]) -> object:
    """``value`` with ``other(x)`` for every x of the class ``kind``."""
    own = type(value)
    if isinstance(value, kind):
        return other(value)
    if value is None or own in CONSTANTS:
        return value
    if own is dict:
        named = cast("dict[str, object]", value)
        return {name: exchanged(v, kind, other) for name, v in named.items()}
    if isinstance(value, Gradients):
        new = [exchanged(v, kind, other) for v in (value.hidden, value.weight, value.bias)]
        return Gradients(*cast("list[Tensor | None]", new))
    if not isinstance(value, (list, tuple)):
        return value
    new = [exchanged(v, kind, other) for v in value]
    return _as(own, new)


def _as(own: type, values: list[object]) -> object:
    """A list, tuple or named tuple of these values."""
    return values if own is list else tuple(values) if own is tuple else own(*values)


def maker_of(value: object) -> Callable[[Frame], object]:
    """What makes ``value`` with tensors for places: as :func:`exchanged`, but looked through once."""
    own = type(value)
    if isinstance(value, Place):
        return lambda frame: frame.tensor(value)
    if isinstance(value, Gradients):
        parts = [maker_of(v) for v in (value.hidden, value.weight, value.bias)]
        return lambda frame: Gradients(*cast("list[Tensor | None]", [make(frame) for make in parts]))
    if not isinstance(value, (list, tuple)):
        return lambda frame: value
    makers = [(i, maker_of(v)) for i, v in enumerate(value) if any(True for _ in places(v))]

    def make(frame: Frame) -> object:
        new = list(value)
        for i, made in makers:
            new[i] = made(frame)
        return _as(own, new)

    return make


# ---------------------------------------------------------------------------------------------------------------------
# What is done


class Address:
    """What a launch reads of a descriptor's matrix."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def moved(descriptor: object, base: Tensor | Address | None) -> object:
    """The descriptor for a matrix elsewhere, which is not checked again."""
    new = object.__new__(type(descriptor))
    new.__dict__ = {**descriptor.__dict__, "base": base}
    return new


class Kernel(Protocol):
    """An interpreted one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


class Launch:
    """A launch of a compiled kernel, or of an interpreted one."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[object], options: dict[str, object],
        start: Callable[..., None] | None,
    ) -> None:  # fmt: skip
        """arguments: :class:`Place` where there was a tensor, (descriptor, Place) where there was a descriptor; start:
        what launches a compiled kernel. Without it, the kernel is launched as anybody launches one."""
        self.kernel, self.grid, self.options, self.start = kernel, grid, options, start
        self.values = list(arguments)
        self.places: list[tuple[int, Place]] = []
        self.described: list[tuple[int, object, Place]] = []
        for i, value in enumerate(arguments):
            if isinstance(value, Place):
                self.places.append((i, value))
            elif isinstance(value, tuple):
                self.described.append((i, *value))

    @property
    def read(self) -> list[Place]:
        return [place for _, place in self.places] + [place for *_, place in self.described]

    def settle(self, settled: Callable[[Place], Place]) -> None:
        """With what is known when all is written down."""
        self.places = [(i, settled(place)) for i, place in self.places]
        self.described = [(i, descriptor, settled(place)) for i, descriptor, place in self.described]

    def bound(self, start: Sequence[int]) -> list[object]:
        """The arguments for buffers that begin there."""
        values = self.values.copy()
        for i, place in self.places:
            values[i] = start[place.buffer] + place.offset
        for i, descriptor, place in self.described:
            values[i] = moved(descriptor, Address(start[place.buffer] + place.offset, place.dtype))
        return values

    def run(self, frame: Frame, values: Sequence[object]) -> None:
        """``values``: :meth:`bound`."""
        if self.start is None:
            self._launch_as_usual(frame)
        else:
            self.start(frame.stream, *values)

    def _launch_as_usual(self, frame: Frame) -> None:
        values = self.values.copy()
        for i, place in self.places:
            values[i] = frame.tensor(place)
        for i, descriptor, place in self.described:
            values[i] = moved(descriptor, frame.tensor(place))
        self.kernel[self.grid](*values, **self.options)


class Operation:
    """One of PyTorch's operations. What it would make is a buffer, which it writes."""

    def __init__(
        self, function: Callable[..., object], arguments: list[object], named: dict[str, object],
        out: Place | None = None, no_graph: bool = False,
    ) -> None:  # fmt: skip
        """arguments, named: :class:`Place` where there was a tensor; out: where a new result goes, the first argument
        of ``function`` then; no_graph: no graph can have it, for it makes memory while it runs, or talks to others."""
        self.function, self.named, self.no_graph = function, named, no_graph
        self.arguments = arguments if out is None else [out, *arguments]

    @property
    def read(self) -> list[Place]:
        return [*places(self.arguments), *places(self.named)]

    def settle(self, settled: Callable[[Place], Place]) -> None:
        """As of a launch."""
        self.arguments = cast("list[object]", exchanged(self.arguments, Place, settled))
        self.named = cast("dict[str, object]", exchanged(self.named, Place, settled))

    def bound(self, start: Sequence[int]) -> list[object]:
        return []

    def run(self, frame: Frame, values: Sequence[object]) -> None:
        self.result(frame)

    def result(self, frame: Frame) -> object:
        arguments = [exchanged(value, Place, frame.tensor) for value in self.arguments]
        named = {name: exchanged(value, Place, frame.tensor) for name, value in self.named.items()}
        return self.function(*arguments, **named)


class Sends(Operation):
    """Begins a collective, which is waited for later."""

    def __init__(self, number: int, function: Callable[..., object], tensors: list[object], options: object) -> None:
        super().__init__(function, tensors, cast("dict[str, object]", options), no_graph=True)
        self.number = number

    def run(self, frame: Frame, values: Sequence[object]) -> None:
        frame.works[self.number] = cast("Work", self.result(frame))


class Waits(Operation):
    """Waits for the collective of this number. It reads the tensors: until then their memory is not free."""

    def __init__(self, number: int, tensors: list[object]) -> None:
        super().__init__(lambda *_: None, tensors, {}, no_graph=True)
        self.number = number

    def run(self, frame: Frame, values: Sequence[object]) -> None:
        frame.works.pop(self.number).wait()


# ---------------------------------------------------------------------------------------------------------------------
# A program: a step, and what finishes it


class Segment(NamedTuple):
    """Steps of a part that follow each other, and whether one graph may have them all."""

    done: list[Launch | Operation]
    graph: bool


def _segments(done: Sequence[Launch | Operation]) -> list[Segment]:
    """The steps, cut where no graph can have one of them."""
    segments: list[Segment] = []
    for step in done:
        graph = not (isinstance(step, Operation) and step.no_graph)
        if segments and segments[-1].graph == graph:
            segments[-1].done.append(step)
        else:
            segments.append(Segment([step], graph))
    if sum(segment.graph for segment in segments) > MOST_SEGMENTS:
        return [Segment(list(done), graph=False)]
    return segments


class Bound:
    """A segment's arguments for buffers that begin at certain addresses: memory is often the same again."""

    __slots__ = ("__weakref__", "graph", "runs", "values")

    def __init__(self, values: list[list[object]]) -> None:
        self.values, self.runs = values, 0
        self.graph: graphs.Graph | None = None


class Part:
    """What is done from one return to the caller to the next."""

    def __init__(
        self, pieces: list[tuple[int, int]], results: list[tuple[int, Place]], done: Sequence[Launch | Operation],
        result: object, dropped: list[int],
    ) -> None:  # fmt: skip
        """pieces: buffers of scratch, and their sizes in bytes; results: buffers for the caller, and what they are;
        result: what the step returns, with :class:`Place` for tensors; dropped: buffers that are not read any more."""
        self.pieces, self.results, self.dropped = pieces, results, dropped
        self.make_result = maker_of(result)
        read = sorted({place.buffer for step in done for place in step.read})
        self.addresses = itemgetter(*read) if read else len
        self.segments = _segments(done)
        self.bound: dict[object, list[Bound]] = {}

    def run(self, frame: Frame, device: torch.device) -> object:
        for buffer, size in self.pieces:
            frame.put(buffer, torch.empty(size // 4, dtype=torch.float32, device=device))
        for buffer, place in self.results:
            frame.put(buffer, torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=device))
        where = frame.stream, self.addresses(frame.start)
        bound = self.bound.get(where)
        if bound is None:
            if len(self.bound) >= MOST_BOUND:
                self.bound.clear()  # with their graphs
            every = [[step.bound(frame.start) for step in segment.done] for segment in self.segments]
            bound = self.bound[where] = list(map(Bound, every))
        for segment, own in zip(self.segments, bound, strict=True):
            work = functools.partial(_do, segment, own)
            if segment.graph:
                graphs.run(own, work, frame, device)
            else:
                work(frame)
        result, memory = self.make_result(frame), frame.memory
        for buffer in self.dropped:
            memory[buffer] = None
        return result


def _do(segment: Segment, bound: Bound, frame: Frame) -> None:
    for step, values in zip(segment.done, bound.values, strict=True):
        step.run(frame, values)


class Forward(Protocol):
    """A forward's result, without what waits."""

    def _replace(self, *, waiting: Repeated) -> object: ...


class Program:
    """A kind of step, written down."""

    def __init__(self, buffers: int, parts: Sequence[Part]) -> None:
        """parts: the forward, and those that finish it, one after another."""
        self.buffers, self.first, self.rest = buffers, parts[0], parts[1:]

    def run(self, given: Sequence[Tensor], device: torch.device) -> object:
        """What the step returns for these tensors, in the order in which it was written down."""
        frame = Frame(self.buffers)
        for i, tensor in enumerate(given):
            frame.put(i, tensor)
        result = self.run_part(self.first, frame, device)
        if not self.rest:
            return result
        return cast("Forward", result)._replace(waiting=Repeated(self, frame, len(given), device))

    def run_part(self, part: Part, frame: Frame, device: torch.device) -> object:
        with on_device(device):
            frame.stream = launch.current_stream() if device.type == "cuda" else 0
            return part.run(frame, device)


class Repeated:
    """What waits for the upstream gradient after a repeated forward."""

    def __init__(self, program: Program, frame: Frame, given: int, device: torch.device) -> None:
        """given: where the upstream gradient goes."""
        self.program, self.frame, self.given, self.device = program, frame, given, device

    def finish(self, upstream: Tensor) -> Gradients:
        """As what waits of a call that is not repeated: once."""
        self.frame.put(self.given, upstream.contiguous())
        for part in self.program.rest:
            result = self.program.run_part(part, self.frame, self.device)
        return cast("Gradients", result)
