"""Kernels of one program around the functions of torch_impl/kernels/portable.py that part float32, in Triton and in
Gluon, which hopper.py calls them from: used by test_parted_sum.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from logitless.torch_impl.kernels import hopper
from logitless.torch_impl.kernels import portable as kernels


@triton.jit
def triton_kernel(value_ptr, high_ptr, low_ptr, joined_ptr, COUNT: tl.constexpr, LOW_BITS: tl.constexpr):
    row, column = tl.arange(0, 1), tl.arange(0, COUNT)
    place = row[:, None] * COUNT + column[None, :]
    bits = kernels.rounded(tl.load(value_ptr + place), LOW_BITS)
    kernels.put_sum(high_ptr, low_ptr, bits, row, 0, 1, COUNT, COUNT, False, LOW_BITS)
    tl.debug_barrier()
    low = kernels.get_low(low_ptr, row, 0, 1, COUNT, COUNT, False, LOW_BITS, COUNT)
    tl.store(joined_ptr + place, kernels.joined(tl.load(high_ptr + place), low))


@gluon.jit
def gluon_kernel(value_ptr, high_ptr, low_ptr, joined_ptr, COUNT: gl.constexpr, LOW_BITS: gl.constexpr):
    """As the multiplying groups add to a sum, two neighbours at a time: the values to nothing, then nothing to them."""
    pair = gl.arange(0, COUNT // 2, layout=gl.BlockedLayout([1], [32], [4], [0]))
    first = gl.load(value_ptr + 2 * pair)
    second = gl.load(value_ptr + 2 * pair + 1)
    high = gl.zeros_like(pair)
    low = gl.zeros_like(pair).to(gl.int16)
    for _ in gl.static_range(2):
        first, second = hopper.sum_of_pairs(first, second, high, low, LOW_BITS)
        high, low = hopper.parts_of_pairs(first, second, LOW_BITS)
        first = gl.zeros_like(first)
        second = gl.zeros_like(second)
    gl.store(high_ptr + pair, high)
    gl.store(low_ptr + pair, low.to(low_ptr.dtype.element_ty))
