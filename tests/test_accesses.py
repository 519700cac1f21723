"""tests/accesses.py finds the faults that it looks for."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import interpreted

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language

from accesses import checked  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

pytestmark = interpreted

BLOCK = tl.constexpr(8)


@triton.jit
def copy_kernel(source_ptr, out_ptr, count_ptr, size, start):
    """Each program copies BLOCK elements, and counts itself."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + start + place, mask=place < size, other=0.0)
    tl.store(out_ptr + place, values, mask=place < size)
    tl.atomic_add(count_ptr, 1)


@triton.jit
def overlapping_kernel(source_ptr, out_ptr, count_ptr, size, start):
    """Two programs store the element between their blocks."""
    place = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.load(source_ptr + place, mask=place < size, other=0.0), mask=place < size)


@triton.jit
def neighbour_kernel(source_ptr, out_ptr, count_ptr, size, start):
    """A program reads what the next one stores."""
    own = tl.program_id(0)
    tl.store(out_ptr + own, tl.load(out_ptr + own + 1))


@triton.jit
def counting_kernel(source_ptr, out_ptr, count_ptr, size, start):
    """A program reads what all count in."""
    tl.atomic_add(count_ptr, 1)
    tl.store(out_ptr + tl.program_id(0), tl.load(count_ptr).to(tl.float32))


@triton.jit
def ticket_kernel(source_ptr, out_ptr, state_ptr, size, waits):
    """Tickets 0 to 2 each store an element. Ticket 3 adds them up, and before that, if ``waits``, waits for them."""
    ticket = tl.atomic_add(state_ptr, 1, sem="relaxed")
    while ticket < 4:
        if ticket < 3:
            tl.store(out_ptr + ticket, tl.load(source_ptr + ticket))
            tl.atomic_add(state_ptr + 1, 1, sem="release")
        else:
            if waits:
                while tl.atomic_add(state_ptr + 1, 0, sem="acquire") < 3:
                    pass
            place = tl.arange(0, 4)
            tl.store(out_ptr + 4, tl.sum(tl.load(out_ptr + place, mask=place < 3, other=0.0), 0))
        ticket = tl.atomic_add(state_ptr, 1, sem="relaxed")


@triton.jit
def described_kernel(source, out, count_ptr, size, start):
    """Each program copies a block through descriptors."""
    out.store([tl.program_id(0) * 2, 0], source.load([tl.program_id(0) * start, 0]))


def launched(kernel: Any, size: int = 24, start: int = 0) -> torch.Tensor:
    source, out, count = torch.ones(24), torch.zeros(24), torch.zeros(2, dtype=torch.int32)
    with checked():
        kernel[(3,)](source, out, count, size, start)
    return out


def test_what_is_right_passes() -> None:
    launched(copy_kernel)
    launched(copy_kernel, size=20, start=4)
    assert launched(ticket_kernel, start=1)[4] == 3


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (copy_kernel, {"start": 1}, "copy_kernel: program 2 reads outside"),
        (copy_kernel, {"start": -1}, "copy_kernel: program 0 reads outside"),
        (overlapping_kernel, {}, "overlapping_kernel: two programs write to one place"),
        (neighbour_kernel, {}, "neighbour_kernel: one program writes where another reads"),
        (ticket_kernel, {}, "ticket_kernel: one program writes where another reads"),
        (counting_kernel, {}, "counting_kernel: one program reads what others change atomically"),
    ],
)
def test_what_is_wrong_is_found(kernel: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=message):
        launched(kernel, **options)


@pytest.mark.parametrize("step", [1, 2])
def test_descriptors_are_looked_at(step: int) -> None:
    """Programs may read the same rows. They may write only rows that exist."""
    matrix = torch.zeros(8, 4)
    read, written = (TensorDescriptor(m, [8, 4], [4, 1], [2, 4]) for m in (torch.ones(8, 4), matrix))
    with checked():
        described_kernel[(3,)](read, written, None, 0, step)
    assert matrix[:6].all()
    two_rows = TensorDescriptor(matrix[:2], [8, 4], [4, 1], [2, 4])  # says more than there is
    with pytest.raises(Exception, match="described_kernel: program 1 writes outside"), checked():
        described_kernel[(3,)](read, two_rows, None, 0, step)


def test_afterwards_nobody_looks() -> None:
    with checked():
        pass
    out = torch.zeros(24)
    overlapping_kernel[(3,)](torch.ones(24), out, None, 24, 0)
    assert out[:22].all()
