"""A kernel that holds multiprocessors of a GPU, for tests of kernels whose programs then cannot all run at a time."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BYTES = 64 * 2**10  # of shared memory: with them none of our product kernels fits beside a program


@gluon.jit
def nanoseconds():
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def hold_kernel(started_ptr, done_ptr, late_ptr, room_ptr, most_ns, SIZE: gl.constexpr):
    """Each program counts itself in ``started`` and ends when ``done`` is set. After ``most_ns`` it ends anyway, and
    counts itself in ``late``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    room = gl.allocate_shared_memory(gl.int32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    place = room_ptr + gl.arange(0, SIZE, layout=layout)
    room.store(gl.load(place))
    gl.atomic_add(started_ptr, 1)
    end = nanoseconds() + most_ns
    done = gl.load(done_ptr, volatile=True)
    while (done == 0) & (nanoseconds() < end):
        done = gl.load(done_ptr, volatile=True)
    if done == 0:
        gl.atomic_add(late_ptr, 1)
    gl.store(place, room.load(layout))
