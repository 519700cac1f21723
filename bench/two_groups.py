"""A control for bench/sanitize.py: what racecheck says of a kernel whose groups of warps share nothing of their own."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def transposed_part(out_ptr, HALF: gl.constexpr):
    """One group: 32 × 32 numbers, laid out by rows and then by columns, which takes a way through shared memory."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, rows))
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, rows))
    value = gl.convert_layout(32 * i[:, None] + j[None, :] + 1024 * HALF, columns)
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, columns))
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, columns))
    gl.store(out_ptr + 1024 * HALF + 32 * j[None, :] + i[:, None], value)


@gluon.jit
def two_groups_kernel(out_ptr):
    """Two groups of four warps, each with its half of out [2, 32, 32]: 32 × 32 numbers, transposed."""
    gl.warp_specialize([(transposed_part, (out_ptr, 0)), (transposed_part, (out_ptr, 1))], [4], [64])


def run() -> None:
    import torch

    out = torch.empty(2, 32, 32, dtype=torch.int32, device="cuda")
    kernel: Any = two_groups_kernel
    kernel[(4,)](out, num_warps=4)
    numbers = torch.arange(2048, dtype=torch.int32, device="cuda").view(2, 32, 32)
    assert torch.equal(out, numbers.transpose(1, 2)), "the control's result is wrong"
