"""A control for bench/sanitize.py: what racecheck says of a kernel whose groups of warps share nothing but a barrier.

The groups are those of torch_impl/kernels/hopper.py, two of four warps and a single warp; so is the barrier.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def transposed_part(out_ptr, begin, HALF: gl.constexpr):
    """A group of four: 32 × 32 numbers, laid out by rows and then by columns, which takes a way through the group's own
    shared memory; they are written after ``begin``."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, rows))
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, rows))
    value = gl.convert_layout(32 * i[:, None] + j[None, :] + 1024 * HALF, columns)
    mbarrier.wait(begin, 0)
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, columns))
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, columns))
    gl.store(out_ptr + 1024 * HALF + 32 * j[None, :] + i[:, None], value)


@gluon.jit
def begin_parts(begin):
    """The single warp."""
    mbarrier.arrive(begin)


@gluon.jit
def warp_groups_kernel(out_ptr):
    """out [2, 32, 32]: the numbers from 0 on, each 32 × 32 of them transposed."""
    begin = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(begin, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(transposed_part, (out_ptr, begin, 0)), (transposed_part, (out_ptr, begin, 1)), (begin_parts, (begin,))],
        [4, 1],
        [64, 24],
    )


def run() -> None:
    import torch

    out = torch.empty(2, 32, 32, dtype=torch.int32, device="cuda")
    kernel: Any = warp_groups_kernel
    kernel[(4,)](out, num_warps=4)
    numbers = torch.arange(2048, dtype=torch.int32, device="cuda").view(2, 32, 32)
    assert torch.equal(out, numbers.transpose(1, 2)), "the control's result is wrong"
    print("ran: all", flush=True)
