"""Where the buffers of a step that was written down lie: in few pieces of memory, each taken and dropped with a part.

A part takes its pieces when it begins, at once. What the forward leaves for the backward is one piece, until the step
ends. Where that breaks the plan's promise, the backward is cut in two: what only its first half reads of the forward is
a piece that is dropped between them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from logitless.scratch import round_up
from logitless.torch_impl.kernels.program import Launch, Operation, Part, Place, Program, exchanged, places

# A buffer begins at a multiple of so many bytes; one of a few numbers at a multiple of the second. Triton has compiled
# the kernels for addresses that are multiples of 16.
BOUNDARY, SHORT_BOUNDARY = 128, 16
# The span of a buffer that is needed all the time.
ALWAYS = -1, 2**31
# Scratch that is free earlier than other scratch is a piece of its own if it has more bytes. Smaller scratch lies with
# what is held longest: each piece costs the host an allocation.
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
    """While it is kept, no other storage has the same key in ``Recorder.of_storage``."""

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


@dataclasses.dataclass
class Piece:
    """Memory of a program."""

    nbytes: int
    first: int
    last: int
    """The parts that have it."""


def cuts(ended: Sequence[Ended], buffers: Sequence[Buffer]) -> Iterator[list[Ended]]:
    """The parts as they are, then with the last one cut in two: behind the last step that reads some large buffer."""
    yield list(ended)
    if len(ended) < 2:
        return
    *before, last = ended
    large = {i for i, buffer in enumerate(buffers) if buffer.is_scratch and buffer.nbytes > SMALL}
    ends = {stop + 1 for _, stop in _spans(last.done, large).values()}
    for cut in sorted(ends - {len(last.done)}):
        yield [*before, Ended(last.done[:cut], (), set()), dataclasses.replace(last, done=last.done[cut:])]


class Layout:
    """The pieces of a program, and what lies where in them."""

    def __init__(self, buffers: Sequence[Buffer], ended: Sequence[Ended]) -> None:
        self.buffers, self.ended = buffers, ended
        self.inside: dict[int, tuple[int, int]] = {}
        """Where in a program's pieces a buffer is: the piece's number among the program's buffers, offset."""
        self.pieces: list[Piece] = []
        self.held: list[int] = []
        """The buffers of the piece that the first part leaves to the end."""
        self.saved = set[int]().union(*(part.saved for part in ended))
        self.zeros = {i for i, buffer in enumerate(buffers) if buffer.source == "zeros"}
        self.returned = {place.buffer for part in ended for place in places(part.result)} - self.saved
        self.first: dict[int, int] = {}
        """The first and the last part that reads or writes a buffer."""
        self.last: dict[int, int] = {}
        for number, part in enumerate(ended):
            for place in [*itertools.chain(*(step.read for step in part.done)), *places(part.result)]:
                self.first.setdefault(place.buffer, number)
                self.last[place.buffer] = number
        # What is zeroed for a later part is zeroed with the rest.
        self.first |= {i: 0 for i in self.first if i in self.zeros and i not in self.returned}
        self.new = [self._lay_out(number) for number in range(len(ended))]
        """Of each part, which pieces it takes."""

    @property
    def scratch_bytes(self) -> int:
        """What the program holds at once beyond results, at most."""
        parts = range(len(self.ended))
        return max(sum(piece.nbytes for piece in self.pieces if piece.first <= n <= piece.last) for n in parts)

    def program(self) -> Program:
        """The program; what was written down is part of it from then on."""
        return Program(len(self.buffers) + len(self.pieces), [self._part(number) for number in range(len(self.ended))])

    def _own(self, number: int) -> list[int]:
        """The buffers that a part is the first to use."""
        return [i for i, b in enumerate(self.buffers) if b.is_scratch and self.first.get(i) == number]

    def _lay_out(self, number: int) -> range:
        """Place the scratch of a part; the new pieces."""
        begin, end = len(self.pieces), len(self.ended) - 1
        own = [i for i in self._own(number) if i not in self.returned]
        # What is zeroed, and what is saved, is small. It may live longest, so it has a piece of its own.
        lasting = sorted((i for i in own if i in self.saved or i in self.zeros), key=lambda i: i not in self.zeros)
        groups: dict[int, list[int]] = {}
        for i in own:
            if i not in lasting:
                groups.setdefault(self.last[i], []).append(i)
        spans = _spans(self.ended[number].done, {*groups.get(number, ()), *self.held})
        if number in groups:
            groups[number] = self._beside_held(groups[number], spans, number)
        longest = max(groups, default=number)
        for last in [last for last in groups if last != longest]:
            if sum(self.buffers[i].nbytes for i in groups[last]) <= SMALL:
                groups[longest] += groups.pop(last)
        if lasting:
            self._add_piece(lasting, spans, number, end)
        for last in sorted((last for last in groups if groups[last]), reverse=True):
            self._add_piece(groups[last], spans, number, last)
        if not self.held and end > number:
            self.held = groups.get(end, [])
        return range(begin, len(self.pieces))

    def _part(self, number: int) -> Part:
        ended, end = self.ended[number], len(self.ended) - 1
        results = [(i, self.buffers[i].origin) for i in self._own(number) if i in self.returned]
        own = [i for i in self._own(number) if i in self.zeros]
        zeroing = self._zeroing(
            [i for i in own if i not in self.returned], [place for i, place in results if i in self.zeros]
        )
        for step in ended.done:
            step.settle(self._settled)
        pieces = [(len(self.buffers) + i, self.pieces[i].nbytes) for i in self.new[number]]
        dropped = [
            len(self.buffers) + i for i, piece in enumerate(self.pieces) if piece.last == number and number < end
        ]
        return Part(pieces, results, [*zeroing, *ended.done], exchanged(ended.result, Place, self._settled), dropped)

    def _zeroing(self, inside: list[int], results: list[Place]) -> list[Operation]:
        """Zeroes these buffers, which begin a piece, and these results."""
        zeroed = [place._replace(offset=0, is_whole=True) for place in results]
        if inside:
            end = max(self.inside[i][1] + self.buffers[i].nbytes for i in inside)
            size = (round_up(end, SHORT_BOUNDARY) // 4,)
            zeroed.append(Place(self.inside[inside[0]][0], 0, size, (1,), torch.float32))
        return [Operation(torch.ops.aten.zero_.default, [place], {}, None) for place in zeroed]

    def _settled(self, place: Place) -> Place:
        """The place in a program's buffers; it may be all of a tensor that a frame has."""
        number, inside = place.buffer, self.inside.get(place.buffer)
        if inside is not None:
            return place._replace(buffer=inside[0], offset=inside[1] + place.offset)
        return place._replace(is_whole=place[2:5] == self.buffers[number].origin[2:5] and place.offset == 0)

    def _add_piece(self, numbers: list[int], spans: Mapping[int, tuple[int, int]], first: int, last: int) -> None:
        """A new piece of these buffers. Buffers whose spans do not meet may lie in the same memory."""
        placed = list[tuple[int, int, int]]()
        for i in numbers:
            begin = self._free_place(i, placed, spans)
            placed.append((begin, begin + self.buffers[i].nbytes, i))
            self.inside[i] = len(self.buffers) + len(self.pieces), begin
        self.pieces.append(Piece(round_up(max(end for _, end, _ in placed), SHORT_BOUNDARY), first, last))

    def _beside_held(self, numbers: list[int], spans: Mapping[int, tuple[int, int]], number: int) -> list[int]:
        """Buffers of a later part go where held ones were, once these are not read any more. Returns those that find no
        room there."""
        if not self.held:
            return numbers
        piece, spans = self.inside[self.held[0]][0], dict(spans)
        placed = []
        for i in self.held:
            if self.last[i] >= number:  # it is there from the beginning
                spans[i] = -1, ALWAYS[1] if self.last[i] > number else spans[i][1]
                begin = self.inside[i][1]
                placed.append((begin, begin + self.buffers[i].nbytes, i))
        for i in sorted(numbers, key=lambda i: -self.buffers[i].nbytes):
            begin = self._free_place(i, placed, spans)
            end = begin + self.buffers[i].nbytes
            if i in spans and end <= self.pieces[piece - len(self.buffers)].nbytes:
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


def _spans(done: Sequence[Launch | Operation], numbers: set[int]) -> dict[int, tuple[int, int]]:
    """The first and the last step that reads or writes each of these buffers."""
    spans: dict[int, tuple[int, int]] = {}
    for step, each in enumerate(done):
        for place in each.read:
            if place.buffer in numbers:
                spans[place.buffer] = spans.get(place.buffer, (step, step))[0], step
    return spans
