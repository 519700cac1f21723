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
def triton_kernel(value_ptr, high_ptr, low_ptr, joined_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    bits = kernels.rounded(tl.load(value_ptr + place))
    high, low = kernels.upper_bits(bits), kernels.lower_bits(bits)
    tl.store(high_ptr + place, high)
    tl.store(low_ptr + place, low)
    tl.store(joined_ptr + place, kernels.joined(high, low))


@gluon.jit
def gluon_kernel(value_ptr, high_ptr, low_ptr, joined_ptr, COUNT: gl.constexpr):
    place = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [4], [0]))
    bits = hopper.rounded(gl.load(value_ptr + place))
    high, low = hopper.upper_bits(bits), hopper.lower_bits(bits)
    gl.store(high_ptr + place, high)
    gl.store(low_ptr + place, low)
    gl.store(joined_ptr + place, hopper.joined(high, low))
