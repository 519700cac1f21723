"""Writing a step down while it runs: its launches, PyTorch's operations, and where in memory each reads and writes.

What the kernels' host code does depends on shapes, dtypes, layouts and options, and on no value. So what it did once it
does again. What may depend on a value, and what reads memory that nobody gave, makes a step unfit to be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from logitless.scratch import round_up
from logitless.torch_impl.call import Gradients
from logitless.torch_impl.compiled.tracing import OperationMode
from logitless.torch_impl.distributed.parallel import Work, sending
from logitless.torch_impl.kernels import launch
from logitless.torch_impl.kernels.program import (
    Kernel,
    Launch,
    Operation,
    Part,
    Place,
    Program,
    Sends,
    Unfit,
    Waits,
    exchanged,
    moved,
    places,
)
from logitless.torch_impl.kernels.writing import writing

Result = TypeVar("Result")

aten = torch.ops.aten
EMPTY = frozenset(
    (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default)
)
ZEROS = frozenset((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default))
# A buffer begins at a multiple of so many bytes; one of a few numbers at a multiple of the second. Triton has compiled
# the kernels for addresses that are multiples of 16.
BOUNDARY, SHORT_BOUNDARY = 128, 16
# The span of a buffer that is needed all the time.
ALWAYS = -1, 2**31
# Scratch that a part's end frees is a piece of its own if it has more bytes. Smaller scratch lies with what is held
# longer: each piece costs the host an allocation.
SMALL = 2**20


@dataclasses.dataclass
class Buffer:
    """Memory of a step."""

    origin: Place
    """What the buffer was when it appeared; its offset is that in the storage."""
    nbytes: int
    source: str
    """"given", "empty" or "zeros"."""
    storage: StorageWeakRef
    """While it is kept, no other storage has the same key in ``of_storage``."""

    @property
    def is_scratch(self) -> bool:
        return self.source != "given"


@dataclasses.dataclass
class Ended:
    """A part that has been written down."""

    done: list[Launch | Operation]
    result: object
    saved: set[int]
    """Buffers that are returned, but that only we read."""
    alive: set[int]
    """Buffers that somebody holds at its end."""


class Recorder(OperationMode):
    """Notes what a step does while it does it."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[Buffer] = []
        self.of_storage: dict[int, list[int]] = {}
        self.ended: list[Ended] = []
        self.done: list[Launch | Operation] = []
        self.is_unfit = self.is_launching = False
        self.inside: dict[int, tuple[int, int]] = {}
        """Where in a program's pieces a buffer is: piece, offset."""
        self.sent = 0
        """Collectives so far."""
        self.sizes: list[int] = []
        """Of these pieces, in bytes."""
        self.brief: list[int] = []
        """Of them, of those that a part drops at its end."""
        self.held: list[int] = []
        """The buffers that the first part leaves to the last, all in one piece."""
        for tensor in given:
            self._add(tensor, "given")
        self.upstream = len(given)
        self.buffers.append(self.buffers[0])  # until there is an upstream gradient, nobody asks for it

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """What this thread does is noted."""
        launch.instead.note, sending.note = self.launch, self.send
        try:
            with self:
                yield
        finally:
            launch.instead.note = sending.note = None

    # -----------------------------------------------------------------------------------------------------------------
    # Memory

    def _add(self, tensor: Tensor, source: str) -> int:
        number = len(self.buffers)
        self.buffers.append(_buffer(number, tensor, source))
        self.of_storage.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        return number

    def place(self, tensor: Tensor) -> Place:
        """Where the tensor is."""
        offset, found = int(tensor.storage_offset()) * tensor.dtype.itemsize, []
        for number in self.of_storage.get(tensor.untyped_storage()._cdata, ()):
            buffer = self.buffers[number]
            if 0 <= offset - buffer.origin.offset < max(1, buffer.nbytes):
                found.append(number)
        if len({self.buffers[number].origin.offset for number in found}) != 1:
            raise Unfit  # unknown memory, or arguments that overlap and are not the same
        inside = offset - self.buffers[found[0]].origin.offset
        return Place(found[0], inside, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _noted(self, value: object) -> object:
        """``value`` with places for tensors."""
        return exchanged(value, Tensor, self.place)

    # -----------------------------------------------------------------------------------------------------------------
    # What is done

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if not self.is_launching:
            # Below autograd, as in an operation of torch.compile's, nobody has taken it apart.
            with self:
                parts: object = function.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        result: object = function(*args, **named)
        if not self.is_launching:
            self._note(self._note_operation, function, args, named, result)
        return result

    def _note(self, note: Callable[..., None], *arguments: object) -> None:
        """``note(*arguments)``, unless the step is unfit, or turns out to be.

        No context manager: in Python 3.12 contextlib keeps what it has swallowed until garbage is collected, and with
        it the frames of the step and their memory.
        """
        if not self.is_unfit:
            try:
                note(*arguments)
            except Unfit:
                self.is_unfit = True

    def _note_operation(
        self, function: OpOverload, args: Sequence[object], named: dict[str, object], result: object
    ) -> None:
        if not isinstance(result, Tensor):  # numbers that were read, or several tensors
            if isinstance(result, (tuple, list)):
                self._note_several(function, args, named, result)
                return
            raise Unfit
        if function in EMPTY or function in ZEROS:
            self._add(result, "zeros" if function in ZEROS else "empty")
            return
        arguments, options = self._noted(list(args)), self._noted(named)
        call: Callable[..., object] = function
        out = None
        if result.untyped_storage()._cdata not in self.of_storage:
            call = writing(function)
            self._add(result, "empty")
            out = self.place(result)
        elif not function._schema.is_mutable or torch.Tag.inplace_view in function.tags:
            return  # a view
        self.done.append(Operation(call, cast("list[object]", arguments), cast("dict[str, object]", options), out))

    def _note_several(
        self, function: OpOverload, args: Sequence[object], named: dict[str, object], result: Sequence[object]
    ) -> None:
        """Views, as ``split`` gives them, and results in memory that is there, as of ``sort``."""
        tensors = [value for value in result if isinstance(value, Tensor)]
        known = [tensor.untyped_storage()._cdata in self.of_storage for tensor in tensors]
        if len(tensors) != len(result) or not all(known):
            raise Unfit
        if function._schema.is_mutable:
            noted = cast("list[object]", self._noted(list(args))), cast("dict[str, object]", self._noted(named))
            self.done.append(Operation(function, *noted, no_graph=True))

    def launch(
        self, start: Callable[..., None], kernel: Kernel, grid: tuple[int, ...], *arguments: object, **options: object
    ) -> None:
        """Launch, and note it; what an interpreter does with tensors is no operation of the step."""
        self.unnoted(start, *arguments, **options)
        self._note(self._note_launch, kernel, grid, arguments, options)

    def _note_launch(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[object], options: dict[str, object]
    ) -> None:
        values = [self._argument(value) for value in arguments]
        ready = launch.ready_for(kernel, arguments, options)
        if ready is not None:
            values += [options[name] for name in ready.names]
        self.done.append(Launch(kernel, grid, values, options, None if ready is None else ready.on(grid)))

    def send(
        self, function: Callable[..., Work | None], tensors: Sequence[Tensor], options: dict[str, object]
    ) -> Work | None:
        """A collective, noted; and so is the wait for it, if it is only begun."""
        work = self.unnoted(function, *tensors, **options)
        self.sent += 1
        self._note(self._note_sent, function, tensors, options, self.sent if work is not None else None)
        return None if work is None else Sent(work, self, self.sent, tensors)

    def unnoted(self, function: Callable[..., Result], *arguments: object, **options: object) -> Result:
        """``function(...)``, of which nothing is noted."""
        self.is_launching = True
        try:
            return function(*arguments, **options)
        finally:
            self.is_launching = False

    def _note_sent(
        self, function: Callable[..., object], tensors: Sequence[Tensor], options: dict[str, object], number: int | None
    ) -> None:
        places = cast("list[object]", self._noted(list(tensors)))
        if number is None:
            self.done.append(Operation(function, places, options, no_graph=True))
        else:
            self.done.append(Sends(number, function, places, options))

    def note_wait(self, number: int, tensors: Sequence[Tensor]) -> None:
        """The collective of this number has been waited for."""
        self._note(lambda: self.done.append(Waits(number, cast("list[object]", self._noted(list(tensors))))))

    def _argument(self, value: object) -> object:
        if hasattr(value, "block_shape"):
            return moved(value, None), self.place(value.base)  # type: ignore[attr-defined]
        return self._noted(value)

    # -----------------------------------------------------------------------------------------------------------------
    # Parts

    def end_part(self, result: object, saved: Sequence[Tensor | None]) -> None:
        """Close a part. ``result``: what is returned, without what waits; ``saved``: of it, what only we read."""
        self._note(self._note_end, result, saved)
        self.done = []

    def _note_end(self, result: object, saved: Sequence[Tensor | None]) -> None:
        kept = {place.buffer for place in places(self._noted(tuple(saved)))}
        alive = {i for i, buffer in enumerate(self.buffers) if not buffer.storage.expired()}
        self.ended.append(Ended(self.done, self._noted(result), kept, alive))

    def begin_last(self, upstream: Tensor) -> None:
        """Begin the part that finishes the gradients."""
        self.buffers[self.upstream] = _buffer(self.upstream, upstream, "given")
        self.of_storage.setdefault(upstream.untyped_storage()._cdata, []).append(self.upstream)

    def program(self) -> Program | None:
        """What was written down, if it can be repeated."""
        try:
            return None if self.is_unfit else self._program()
        except Unfit:
            return None

    def _program(self) -> Program:
        returned = {place.buffer for ended in self.ended for place in places(ended.result)}
        returned -= set().union(*(ended.saved for ended in self.ended))
        first: dict[int, int] = {}
        """In which part a buffer is first used."""
        for number, ended in enumerate(self.ended):
            for place in [*itertools.chain(*(step.read for step in ended.done)), *places(ended.result)]:
                first.setdefault(place.buffer, number)
        # What is zeroed for a later part is zeroed with the rest.
        first |= {i: 0 for i in first if self.buffers[i].source == "zeros" and i not in returned}
        parts = [self._part(number, first, returned) for number in range(len(self.ended))]
        return Program(len(self.buffers) + len(self.sizes), parts)

    def _part(self, number: int, first: dict[int, int], returned: set[int]) -> Part:
        ended, zeros = self.ended[number], {i for i, b in enumerate(self.buffers) if b.source == "zeros"}
        new = [i for i, b in enumerate(self.buffers) if b.is_scratch and first.get(i) == number]
        results = [(i, self.buffers[i].origin) for i in new if i in returned]
        # What is zeroed, and what is saved, is small. It may live longest, so it has a piece of its own.
        lasting = [i for i in new if i not in returned and (i in ended.saved or i in zeros)]
        lasting.sort(key=lambda i: i not in zeros)
        rest = [i for i in new if i not in returned and i not in lasting]
        held, brief = [i for i in rest if i in ended.alive], [i for i in rest if i not in ended.alive]
        spans = _spans(ended.done, set(brief) | set(self.held))
        brief = self._beside_held(brief, spans)
        if held and sum(self.buffers[i].nbytes for i in brief) <= SMALL:
            held, brief = held + brief, []
        pieces = [self._piece(numbers, spans) for numbers in (lasting, held, brief) if numbers]
        for step in ended.done:
            step.settle(self._settled)
        zeroing = self._zeroing([i for i in lasting if i in zeros], [place for i, place in results if i in zeros])
        self.held = self.held or held
        dropped = [pieces[-1][0]] if brief else []
        self.brief += [pieces[-1][1]] if brief else []
        return Part(pieces, results, [*zeroing, *ended.done], exchanged(ended.result, Place, self._settled), dropped)

    def _zeroing(self, inside: list[int], results: list[Place]) -> list[Operation]:
        """Zeroes these buffers, which begin a piece, and these results."""
        places = [place._replace(offset=0, is_whole=True) for place in results]
        if inside:
            end = max(self.inside[i][1] + self.buffers[i].nbytes for i in inside)
            size = (round_up(end, SHORT_BOUNDARY) // 4,)
            places.append(Place(self.inside[inside[0]][0], 0, size, (1,), torch.float32))
        return [Operation(aten.zero_.default, [place], {}, None) for place in places]

    def _settled(self, place: Place) -> Place:
        """The place in a program's buffers; it may be all of a tensor that a frame has."""
        number, inside = place.buffer, self.inside.get(place.buffer)
        if inside is not None:
            return place._replace(buffer=inside[0], offset=inside[1] + place.offset)
        return place._replace(is_whole=place[2:5] == self.buffers[number].origin[2:5] and place.offset == 0)

    def _piece(self, numbers: list[int], spans: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        """A new piece of these buffers, and its size. Buffers whose spans do not meet may lie in the same memory."""
        piece, placed = len(self.buffers) + len(self.sizes), list[tuple[int, int, int]]()
        for i in numbers:
            begin = self._free_place(i, placed, spans)
            placed.append((begin, begin + self.buffers[i].nbytes, i))
            self.inside[i] = piece, begin
        self.sizes.append(round_up(max(end for _, end, _ in placed), SHORT_BOUNDARY))
        return piece, self.sizes[-1]

    def _beside_held(self, numbers: list[int], spans: Mapping[int, tuple[int, int]]) -> list[int]:
        """Buffers of a later part go where held ones were, once these are not read any more. Returns those that find no
        room there."""
        if not self.held:
            return numbers
        piece, spans = self.inside[self.held[0]][0], dict(spans)
        placed = []
        for i in self.held:
            if i in spans:  # it is there from the beginning
                spans[i] = -1, spans[i][1]
                begin = self.inside[i][1]
                placed.append((begin, begin + self.buffers[i].nbytes, i))
        for i in sorted(numbers, key=lambda i: -self.buffers[i].nbytes):
            begin = self._free_place(i, placed, spans)
            end = begin + self.buffers[i].nbytes
            if i in spans and end <= self.sizes[piece - len(self.buffers)]:
                placed.append((begin, end, i))
                self.inside[i] = piece, begin
        return [i for i in numbers if i not in self.inside]

    def _free_place(self, i: int, placed: Sequence[tuple[int, int, int]], spans: Mapping[int, tuple[int, int]]) -> int:
        """The first place in a piece where a buffer meets none of the ``placed`` (start, end, buffer) at any time."""
        size, (start, stop) = self.buffers[i].nbytes, spans.get(i, ALWAYS)
        boundary = BOUNDARY if size >= BOUNDARY else SHORT_BOUNDARY
        begin = 0
        for other, end, number in sorted(placed):
            since, until = spans.get(number, ALWAYS)
            if until < start or stop < since:
                continue
            if begin + size <= other:
                break
            begin = max(begin, round_up(end, boundary))
        return begin

    def scratch_bytes(self) -> int:
        """What the program holds at once beyond results, at most."""
        return sum(self.sizes) - sum(self.brief) + max(self.brief, default=0)


def _spans(done: Sequence[Launch | Operation], numbers: set[int]) -> dict[int, tuple[int, int]]:
    """The first and the last step that reads or writes each of these buffers."""
    spans: dict[int, tuple[int, int]] = {}
    for step, each in enumerate(done):
        for place in each.read:
            if place.buffer in numbers:
                spans[place.buffer] = spans.get(place.buffer, (step, step))[0], step
    return spans


def _buffer(number: int, tensor: Tensor, source: str) -> Buffer:
    """A tensor's memory; of what is given only what the tensor covers, as others may be in the same storage."""
    storage, item, stride = tensor.untyped_storage(), tensor.dtype.itemsize, tensor.stride()
    covered = item * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True)))
    origin = Place(number, int(tensor.storage_offset()) * item, tuple(tensor.shape), stride, tensor.dtype)
    nbytes = covered if source == "given" else storage.nbytes()
    return Buffer(origin, nbytes, source, StorageWeakRef(storage))


class Sent:
    """A collective under way in a step that is written down."""

    def __init__(self, work: Work, recorder: Recorder, number: int, tensors: Sequence[Tensor]) -> None:
        self.work, self.recorder, self.number, self.tensors = work, recorder, number, tensors

    def wait(self) -> None:
        self.recorder.unnoted(self.work.wait)
        self.recorder.note_wait(self.number, self.tensors)


class Finishes(Protocol):
    """What waits for the upstream gradient."""

    def finish(self, upstream: Tensor, /) -> Gradients: ...


class Recorded:
    """What waits after a forward that was written down; its end is written down too."""

    def __init__(self, waiting: Finishes, recorder: Recorder, publish: Callable[[], None]) -> None:
        self.waiting: Finishes | None = waiting
        self.recorder, self.publish = recorder, publish

    def finish(self, upstream: Tensor) -> Gradients:
        """As what waits does: once."""
        upstream, recorder, waiting = upstream.contiguous(), self.recorder, self.waiting
        assert waiting is not None
        recorder.begin_last(upstream)
        with recorder.noting():
            gradients = waiting.finish(upstream)
        waiting = self.waiting = None
        recorder.end_part(gradients, ())
        self.publish()
        return gradients
