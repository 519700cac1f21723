"""A step that was seen before is repeated from what was written down of it, without its Python.

What the kernels' host code does depends on shapes, dtypes, layouts and options, and on no value. So the second call of
a kind is written down while it runs: its launches, PyTorch's own operations, and where in memory each reads and writes.
A later call of the kind gets its memory in a few pieces and repeats the list. Its launches are those of the first two,
and so are its bits. A kind that is seen once costs nothing but its name.

This file is the only one that knows of it: the Triton backend runs its steps through :func:`run_step`. Steps that
others look at (torch.compile, dispatch modes, profilers of launches), those of several ranks, and those that add to a
buffer run as they are. No mirror: XLA compiles a whole program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.scratch import round_up
from logitless.torch_impl.call import Arrays, Call, Gradients, Needs
from logitless.torch_impl.kernels import launch, rehearsal
from logitless.torch_impl.kernels.rows import on_device

Result = TypeVar("Result")

aten = torch.ops.aten
EMPTY = frozenset(
    (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default)
)
ZEROS = frozenset((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default))
READS_VALUES = frozenset((aten._local_scalar_dense.default, aten.nonzero.default))

# Programs are known of this many kinds, and this many kinds are known to have been seen. Then both begin anew.
MOST_PROGRAMS, MOST_SEEN = 256, 8192
# As far apart as pieces of memory begin that PyTorch gives out one by one.
BOUNDARY = 512

PLAIN = (Tensor, torch.nn.Parameter)
CONSTANTS = frozenset((int, float, bool, torch.dtype, torch.device))


class _Settings(threading.local):
    off = False
    """Whether this thread's steps run as they are."""
    on_cpu = False
    """Whether steps on a CPU are repeated too: for tests, and to measure the host alone."""


settings = _Settings()


class Place(NamedTuple):
    """A tensor, as part of a buffer."""

    buffer: int
    offset: int  # bytes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_whole: bool = False
    """Whether it is the tensor that the buffer is known by: nothing else has to be made."""


@dataclasses.dataclass
class Buffer:
    """Memory of a step."""

    origin: Place
    """What the buffer was when it appeared; its offset is that in the storage."""
    nbytes: int
    source: str
    """"given", "empty", "zeros", or "made" by an operation."""
    weak: StorageWeakRef

    @property
    def is_scratch(self) -> bool:
        return self.source in ("empty", "zeros")


class Frame:
    """The memory of one run of a program."""

    __slots__ = ("memory", "start", "stream")

    def __init__(self, buffers: int) -> None:
        self.start = [0] * buffers
        """Addresses."""
        self.memory: list[Tensor | None] = [None] * buffers
        """The tensors that they are in."""
        self.stream = 0

    def tensor(self, place: Place) -> Tensor:
        memory = self.memory[place.buffer]
        assert memory is not None
        if place.is_whole:
            return memory
        item = place.dtype.itemsize
        begin = self.start[place.buffer] + place.offset - memory.data_ptr() + memory.storage_offset() * memory.itemsize
        flat = memory if memory.dtype == place.dtype else memory.view(place.dtype)
        return flat.as_strided(place.size, place.stride, begin // item)


# ---------------------------------------------------------------------------------------------------------------------
# What is done


class Address:
    """What a launch reads of a descriptor's matrix."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Launch:
    """A launch of a compiled kernel, or of an interpreted one."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """arguments: :class:`Place` where there was a tensor, (descriptor, Place) where there was a descriptor."""
        self.kernel, self.grid, self.options = kernel, grid, options
        self.start: Callable[..., None] | None = None
        """What launches a compiled kernel."""
        self.values = list(arguments)
        self.places = [(i, v) for i, v in enumerate(arguments) if isinstance(v, Place)]
        self.described = [(i, *v) for i, v in enumerate(arguments) if isinstance(v, tuple) and not isinstance(v, Place)]
        self.late: list[tuple[int, int, int]] = []
        """Arguments whose memory an operation makes while the part runs: position, buffer, offset."""

    @property
    def read(self) -> list[Place]:
        return [place for _, place in self.places] + [place for *_, place in self.described]

    def settle(self, settled: Callable[[Any], Any], made: set[int]) -> None:
        self.places = [(i, settled(place)) for i, place in self.places]
        self.described = [(i, descriptor, settled(place)) for i, descriptor, place in self.described]
        self.late = [(i, place.buffer, place.offset) for i, place in self.places if place.buffer in made]
        if any(place.buffer in made for *_, place in self.described):
            raise Unfit

    def bound(self, start: Sequence[int]) -> list[Any]:
        """The arguments for buffers that begin there."""
        values = self.values.copy()
        for i, place in self.places:
            values[i] = start[place.buffer] + place.offset
        for i, descriptor, place in self.described:
            values[i] = _moved(descriptor, Address(start[place.buffer] + place.offset, place.dtype))
        return values

    def interpret(self, frame: Frame) -> None:
        values = self.values.copy()
        for i, place in self.places:
            values[i] = frame.tensor(place)
        for i, descriptor, place in self.described:
            values[i] = _moved(descriptor, frame.tensor(place))
        self.kernel[self.grid](*values, **self.options)


def _moved(descriptor: Any, base: Tensor | Address | None) -> Any:
    """The descriptor for a matrix elsewhere, which is not checked again."""
    moved = object.__new__(type(descriptor))
    moved.__dict__ = {**descriptor.__dict__, "base": base}
    return moved


class Operation:
    """One of PyTorch's operations."""

    def __init__(self, function: Any, arguments: list[Any], named: dict[str, Any], made: int | None) -> None:
        """arguments, named: :class:`Place` where there was a tensor; made: the buffer of a new result."""
        self.function, self.arguments, self.named, self.made = function, arguments, named, made
        self.frees: tuple[int, ...] = ()
        """Buffers of other operations that are not read after this one."""

    @property
    def read(self) -> list[Place]:
        return [*_places(self.arguments), *_places(self.named)]

    def settle(self, settled: Callable[[Any], Any], made: set[int]) -> None:
        self.arguments, self.named = settled(self.arguments), settled(self.named)

    def run(self, frame: Frame) -> None:
        arguments = [_filled(value, frame.tensor) for value in self.arguments]
        named = {name: _filled(value, frame.tensor) for name, value in self.named.items()} if self.named else {}
        result = self.function(*arguments, **named)
        if self.made is not None:
            frame.memory[self.made], frame.start[self.made] = result, result.data_ptr()
        for buffer in self.frees:
            frame.memory[buffer] = None


def _places(value: Any) -> Iterator[Place]:
    if isinstance(value, Place):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _places(each)
    elif isinstance(value, dict):
        yield from _places(list(value.values()))
    elif isinstance(value, Gradients):
        yield from _places((value.hidden, value.weight, value.bias))


def _filled(value: Any, of_place: Callable[[Place], Any]) -> Any:
    """``value`` with something for every place; it may be made of lists, tuples, named tuples and gradients."""
    kind = type(value)
    if kind is Place:
        return of_place(value)
    if value is None or kind in CONSTANTS:
        return value
    if kind is list:
        return [_filled(v, of_place) for v in value]
    if kind is dict:
        return {name: _filled(v, of_place) for name, v in value.items()}
    if kind is tuple:
        return tuple([_filled(v, of_place) for v in value])
    if isinstance(value, tuple):
        return kind(*[_filled(v, of_place) for v in value])
    if kind is Gradients:
        return Gradients(*[_filled(v, of_place) for v in (value.hidden, value.weight, value.bias)])
    return value


# ---------------------------------------------------------------------------------------------------------------------
# A program: a step, and what finishes it


@dataclasses.dataclass
class Part:
    """What is done from one return to the caller to the next."""

    pieces: list[tuple[int, int, list[tuple[int, int]]]]
    """Memory to get: its bytes, how many of them are zeroed, and which buffer begins at which byte."""
    results: list[tuple[int, Place, bool]]
    """Buffers of their own, for the caller: what they are, and whether they are zeroed."""
    done: list[Launch | Operation]
    result: Any
    """What the step returns, with :class:`Place` for tensors."""
    dropped: list[int]
    """Buffers that are not read any more."""
    bound: tuple[list[int], list[Any]] | None = None
    """Where the buffers began in the last run, and every step's arguments then: memory is often the same again."""

    def run(self, frame: Frame, device: torch.device) -> Any:
        start, memory = frame.start, frame.memory
        for nbytes, zeroed, begins in self.pieces:
            piece = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
            if zeroed:
                (piece if zeroed == nbytes else piece[: zeroed // 4]).zero_()
            address = piece.data_ptr()
            for buffer, offset in begins:
                start[buffer], memory[buffer] = address + offset, piece
        for buffer, place, zero in self.results:
            new = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=device)
            start[buffer], memory[buffer] = new.data_ptr(), new.zero_() if zero else new
        self._do(frame)
        result = _filled(self.result, frame.tensor)
        for buffer in self.dropped:
            memory[buffer] = None
        return result


    def _do(self, frame: Frame) -> None:
        start, stream = frame.start, frame.stream
        bound = self.bound
        if bound is None or bound[0] != start:
            arguments = [step.bound(start) if isinstance(step, Launch) else [] for step in self.done]
            bound = self.bound = start.copy(), arguments
        for step, values in zip(self.done, bound[1], strict=True):
            if isinstance(step, Operation):
                step.run(frame)
            elif step.start is None:
                step.interpret(frame)
            elif step.late:
                values = values.copy()
                for i, buffer, offset in step.late:
                    values[i] = start[buffer] + offset
                step.start(stream, *values)
            else:
                step.start(stream, *values)


class Program:
    """A kind of step, written down."""

    def __init__(self, buffers: int, parts: Sequence[Part]) -> None:
        self.buffers, self.first = buffers, parts[0]
        self.last = parts[1] if len(parts) > 1 else None

    def run(self, given: Sequence[Tensor], device: torch.device) -> Any:
        frame = Frame(self.buffers)
        for i, tensor in enumerate(given):
            frame.memory[i], frame.start[i] = tensor, tensor.data_ptr()
        with on_device(device):
            frame.stream = 0 if settings.on_cpu else launch.current_stream()
            result = self.first.run(frame, device)
        return result if self.last is None else result._replace(waiting=Repeated(self, frame, len(given), device))


class Repeated:
    """What waits for the upstream gradient after a repeated forward."""

    def __init__(self, program: Program, frame: Frame, given: int, device: torch.device) -> None:
        self.program, self.frame, self.given, self.device = program, frame, given, device

    def finish(self, upstream: Tensor) -> Gradients:
        """As what waits of a call that is not repeated: once."""
        frame, last = self.frame, self.program.last
        assert last is not None
        upstream = upstream.contiguous()
        frame.memory[self.given], frame.start[self.given] = upstream, upstream.data_ptr()
        with on_device(self.device):
            frame.stream = 0 if settings.on_cpu else launch.current_stream()
            return cast("Gradients", last.run(frame, self.device))


# ---------------------------------------------------------------------------------------------------------------------
# Writing down


@dataclasses.dataclass
class Ended:
    """A part that has been written down."""

    done: list[Launch | Operation]
    result: Any
    saved: set[int]
    """Buffers that are returned, but that only we read."""
    alive: set[int]
    """Buffers that somebody holds at its end."""


class Unfit(Exception):
    """A step cannot be repeated."""


class Recorder(TorchDispatchMode):
    """Notes what a step does while it does it."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.buffers: list[Buffer] = []
        self.of_storage: dict[int, list[int]] = {}
        self.ended: list[Ended] = []
        self.done: list[Launch | Operation] = []
        self.unfit = self.is_launching = False
        for tensor in given:
            self._add(tensor, "given")
        self.upstream = len(given)
        self.buffers.append(self.buffers[0])  # until there is an upstream gradient, nobody asks for it

    def _add(self, tensor: Tensor, source: str) -> int:
        storage = tensor.untyped_storage()
        item = tensor.dtype.itemsize
        if source == "given":
            nbytes = item * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        else:
            nbytes = storage.nbytes()
        offset = tensor.storage_offset() * item
        number, key = len(self.buffers), storage._cdata
        origin = Place(number, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        self.buffers.append(Buffer(origin, nbytes, source, StorageWeakRef(storage)))
        self.of_storage.setdefault(key, []).append(number)
        return number

    def place(self, tensor: Tensor) -> Place:
        """Where the tensor is."""
        offset = tensor.storage_offset() * tensor.dtype.itemsize
        found = []
        for number in self.of_storage.get(tensor.untyped_storage()._cdata, ()):
            buffer = self.buffers[number]
            if 0 <= offset - buffer.origin.offset < max(1, buffer.nbytes):
                found.append(number)
        if len(found) != 1:  # unknown memory, or two arguments that overlap
            raise Unfit
        inside = offset - self.buffers[found[0]].origin.offset
        return Place(found[0], inside, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _noted(self, value: Any) -> Any:
        """``value`` with places for tensors."""
        if isinstance(value, Tensor):
            return self.place(value)
        if isinstance(value, Gradients):
            return Gradients(*[self._noted(v) for v in (value.hidden, value.weight, value.bias)])
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self._noted(v) for v in value])
        if isinstance(value, (list, tuple)):
            return type(value)(self._noted(v) for v in value)
        return {k: self._noted(v) for k, v in value.items()} if isinstance(value, dict) else value

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = function(*args, **named)
        if self.unfit or self.is_launching:
            return result
        try:
            self._note_operation(function, args, named, result)
        except Unfit:
            self.unfit = True
        return result

    def _note_operation(self, function: Any, args: Any, named: Any, result: Any) -> None:
        if function in EMPTY or function in ZEROS:
            self._add(result, "zeros" if function in ZEROS else "empty")
            return
        if function in READS_VALUES or not isinstance(result, Tensor):
            raise Unfit
        arguments, named = self._noted(list(args)), self._noted(named)
        is_known = result.untyped_storage()._cdata in self.of_storage
        if is_known and not function._schema.is_mutable:
            return  # a view
        made = None if is_known else self._add(result, "made")
        self.done.append(Operation(function, arguments, named, made))

    def launch(self, start: Any, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch, and note it; what an interpreter does with tensors is no operation of the step."""
        self.is_launching = True
        try:
            start(*arguments, **options)
        finally:
            self.is_launching = False
        if not self.unfit:
            self._note_launch(kernel, grid, arguments, options)

    def _note_launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]
    ) -> None:
        try:
            values = [self._argument(value) for value in arguments]
        except Unfit:
            self.unfit = True
            return
        noted = Launch(kernel, grid, values, dict(options))
        if launch.is_compiled(kernel):
            ready = launch.ready_for(kernel, arguments, options)
            noted.start = ready.on(grid)
            noted.values += [options[name] for name in ready.names]
        self.done.append(noted)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.place(value)
        if hasattr(value, "block_shape"):
            return _moved(value, None), self.place(value.base)
        return value

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        launch.instead.note = self.launch
        try:
            with self:
                yield
        finally:
            launch.instead.note = None

    def end_part(self, result: Any, saved: Sequence[Tensor | None]) -> None:
        """Close a part. ``result``: what is returned, without what waits; ``saved``: of it, what only we read."""
        try:
            if not self.unfit:
                kept = {place.buffer for place in _places(self._noted(tuple(saved)))}
                alive = {i for i, buffer in enumerate(self.buffers) if not buffer.weak.expired()}
                self.ended.append(Ended(self.done, self._noted(result), kept, alive))
        except Unfit:
            self.unfit = True
        self.done = []

    def begin_last(self, upstream: Tensor) -> None:
        """Begin the part that finishes the gradients."""
        storage = upstream.untyped_storage()
        number, item = self.upstream, upstream.dtype.itemsize
        origin = Place(
            number, upstream.storage_offset() * item, tuple(upstream.shape), upstream.stride(), upstream.dtype
        )
        self.buffers[number] = Buffer(origin, upstream.numel() * item, "given", StorageWeakRef(storage))
        self.of_storage.setdefault(storage._cdata, []).append(number)

    def program(self) -> Program | None:
        """What was written down, if it can be repeated."""
        try:
            return None if self.unfit else self._program()
        except Unfit:
            return None

    def _program(self) -> Program:
        first: dict[int, int] = {}
        """In which part a buffer is first used."""
        for number, ended in enumerate(self.ended):
            for place in [*itertools.chain(*(step.read for step in ended.done)), *_places(ended.result)]:
                first.setdefault(place.buffer, number)
            for step in ended.done:
                if isinstance(step, Operation) and step.made is not None:
                    first.setdefault(step.made, number)
        returned = [{place.buffer for place in _places(ended.result)} - ended.saved for ended in self.ended]
        parts = [self._part(number, first, set().union(*returned)) for number in range(len(self.ended))]
        return Program(len(self.buffers), parts)

    def _part(self, number: int, first: dict[int, int], returned: set[int]) -> Part:
        ended, zeros = self.ended[number], {i for i, b in enumerate(self.buffers) if b.source == "zeros"}
        new = [i for i, b in enumerate(self.buffers) if b.is_scratch and first.get(i) == number]
        results = [i for i in new if i in returned]
        # What is zeroed is small; so is what is saved, and lives longest.
        lasting = [i for i in new if i not in returned and (i in ended.saved or i in zeros)]
        rest = [i for i in new if i not in returned and i not in lasting]
        held, brief = [i for i in rest if i in ended.alive], [i for i in rest if i not in ended.alive]
        pieces = [self._piece(numbers) for numbers in (lasting, held, brief) if numbers]
        kept = returned | ended.saved | ended.alive
        made = {i for i, b in enumerate(self.buffers) if b.source == "made" and first.get(i) == number} - kept
        born = {step.made for step in ended.done if isinstance(step, Operation) and step.made is not None}
        _free_early(ended.done, made)
        own = [(i, self.buffers[i].origin, i in zeros) for i in results]
        settled = functools.partial(_filled, of_place=functools.partial(self._settled, returned=returned))
        for step in ended.done:
            step.settle(settled, born)
        return Part(pieces, own, ended.done, settled(ended.result), [*brief, *made])

    def _settled(self, place: Place, returned: set[int]) -> Place:
        """The place, which may be all of a tensor that a frame has."""
        buffer = self.buffers[place.buffer]
        is_tensor = not buffer.is_scratch or place.buffer in returned
        return place._replace(is_whole=is_tensor and place[2:5] == buffer.origin[2:5] and place.offset == 0)

    def _piece(self, numbers: list[int]) -> tuple[int, int, list[tuple[int, int]]]:
        """Zeroed buffers first."""
        begins, end, zeroed = [], 0, 0
        for i in sorted(numbers, key=lambda i: self.buffers[i].source != "zeros"):
            begins.append((i, end))
            end += round_up(self.buffers[i].nbytes, BOUNDARY)
            zeroed = end if self.buffers[i].source == "zeros" else zeroed
        return end, zeroed, begins

    def scratch_bytes(self, program: Program) -> int:
        """What is held at once beyond results, at most."""
        made = sum(buffer.nbytes for buffer in self.buffers if buffer.source == "made")
        first, last = program.first, program.last
        return made + sum(piece[0] for part in (first, last) if part is not None for piece in part.pieces)


def _free_early(done: Sequence[Launch | Operation], made: set[int]) -> None:
    """What operations make is freed by the first operation behind its last reader."""
    last = {place.buffer: i for i, step in enumerate(done) for place in step.read}
    left = {buffer for buffer in made if buffer in last}
    for i, step in enumerate(done):
        if isinstance(step, Operation):
            step.frees = tuple(buffer for buffer in left if last[buffer] <= i)
            left -= set(step.frees)


# ---------------------------------------------------------------------------------------------------------------------
# The steps


class Recorded:
    """What waits after a forward that was written down; its end is written down too."""

    def __init__(self, waiting: Any, recorder: Recorder, publish: Callable[[], None]) -> None:
        self.waiting, self.recorder, self.publish = waiting, recorder, publish

    def finish(self, upstream: Tensor) -> Gradients:
        upstream, recorder, waiting = upstream.contiguous(), self.recorder, self.waiting
        recorder.begin_last(upstream)
        with recorder.noting():
            gradients: Gradients = waiting.finish(upstream)
        del waiting, self.waiting
        recorder.end_part(gradients, ())
        self.publish()
        return gradients


programs: dict[Any, Program | None] = {}
"""By kind; None: it cannot be repeated."""
seen: set[Any] = set()


def run_step(
    name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result],
    others: Sequence[Tensor | float | None] = (),
) -> Result:  # fmt: skip
    """``step(call)``, repeated if its kind was written down. ``others``: what else it reads beside ``call``."""
    key = _kind_of(name, arrays, call, needs, others)
    if key is None:
        return rehearsal.run_step(name, arrays, call, needs, step)
    program = programs.get(key)
    given = [tensor for tensor in (*arrays, *others) if isinstance(tensor, Tensor)]
    if program is not None:
        return cast("Result", program.run(given, arrays.hidden.device))
    if key in programs or key not in seen:
        if len(seen) >= MOST_SEEN:
            seen.clear()
        seen.add(key)
        return rehearsal.run_step(name, arrays, call, needs, step)
    return rehearsal.run_step(name, arrays, call, needs, functools.partial(_write_down, key, given, step))


def _kind_of(name: str, arrays: Arrays, call: Call, needs: Needs, others: Sequence[Tensor | float | None]) -> Any:
    """What a step's host code depends on, and perhaps more; None: it runs as it is."""
    device = arrays.hidden.device
    if device.type != "cuda" and not settings.on_cpu:
        return None
    if call.shard is not None or call.into is not None or call.deferred is not None or call.traced or settings.off:
        return None
    if not arrays.target.numel() or torch._C._len_torch_dispatch_stack() or launch.is_watched():
        return None
    kind: list[Any] = [name, device, call, needs, torch.get_float32_matmul_precision()]
    for tensor in (*arrays, *others):
        if type(tensor) in PLAIN:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16)
        elif isinstance(tensor, Tensor):
            return None
        else:
            kind.append(tensor)
    return tuple(kind)


def _write_down(key: Any, given: Sequence[Tensor], step: Callable[[Call], Any], call: Call) -> Any:
    """``step(call)``, written down."""
    if rehearsal.rehearsing():
        return step(call)
    recorder = Recorder(given)
    with recorder.noting():
        result = step(call)
    waiting = getattr(result, "waiting", None)
    alone = result if waiting is None else result._replace(waiting=None)
    recorder.end_part(alone, getattr(result, "saved", ()))
    promised = call.chunk_plan.scratch_bytes

    def publish() -> None:
        if len(programs) >= MOST_PROGRAMS:
            programs.clear()
        program = recorder.program()
        fits = program is not None and recorder.scratch_bytes(program) <= promised
        programs[key] = program if fits else None

    if waiting is None:
        publish()
        return result
    return result._replace(waiting=Recorded(waiting, recorder, publish))
