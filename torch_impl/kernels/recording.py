"""Writing a step down while it runs: its launches, PyTorch's operations, and where in memory each reads and writes.

What the kernels' host code does depends on shapes, dtypes, layouts and options, and on no value. So what it did once it
does again. What may depend on a value, and what reads memory that nobody gave, makes a step unfit to be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from logitless.torch_impl.call import Gradients
from logitless.torch_impl.compiled.tracing import OperationMode
from logitless.torch_impl.distributed.parallel import Work, sending
from logitless.torch_impl.kernels import launch
from logitless.torch_impl.kernels.layout import Buffer, Ended, Layout, cuts
from logitless.torch_impl.kernels.program import (
    Kernel,
    Launch,
    Operation,
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


class Recorder(OperationMode):
    """Notes what a step does while it does it."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[Buffer] = []
        self.of_storage: dict[int, list[int]] = {}
        self.ended: list[Ended] = []
        self.done: list[Launch | Operation] = []
        self.is_unfit = self.is_launching = False
        self.sent = 0
        """Collectives so far."""
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
        self.ended.append(Ended(self.done, self._noted(result), kept))

    def begin_last(self, upstream: Tensor) -> None:
        """Begin the part that finishes the gradients."""
        self.buffers[self.upstream] = _buffer(self.upstream, upstream, "given")
        self.of_storage.setdefault(upstream.untyped_storage()._cdata, []).append(self.upstream)

    def program(self, promised: int) -> Program | None:
        """What was written down, if it can be repeated and holds at most so many bytes at once."""
        if self.is_unfit:
            return None
        for ended in cuts(self.ended, self.buffers):
            layout = Layout(self.buffers, ended)
            if layout.scratch_bytes <= promised:
                return layout.program()
        return None


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
