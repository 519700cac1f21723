"""What waits for what: chunk after chunk, and under jax.vmap problem after problem.

No mirror: PyTorch launches in the order of its program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.slices import Carry, Index, varied

Result = TypeVar("Result")


def after(done: Carry, first: Index) -> tuple[Carry, Array]:
    """``done``, and ``first`` once that is there. Chunks that need nothing of each other would hold two matrices."""
    number = jnp.asarray(first, jnp.int32)
    if isinstance(first, int) and first == 0:  # a constant: what follows from it is made once
        return done, number
    both: tuple[Carry, Array] = lax.optimization_barrier((done, number))
    return both


def blocks(body: Callable[[Carry, Index], Carry], state: Carry, count: int, size: int) -> Carry:
    """state = body(state, first) for ``count`` blocks of ``size``.

    The first one is in the loop, too: outside of it, XLA would compile its operations once more. Each waits for the one
    before, even where XLA unrolls the loop.
    """
    if count < 2:
        return body(state, jnp.int32(0)) if count else state
    if parallel.tracked():
        state = varied(lambda state: body(state, jnp.int32(0)), state)
    last: Carry = lax.fori_loop(0, count, lambda i, state: body(*after(state, i * size)), state)
    return last


def one_by_one(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function``, which jax.vmap runs for one problem after the other: each fills the device with its kernels."""
    if jax.__version_info__ >= (0, 11):
        return jax.custom_batching.sequential_vmap(function)  # type: ignore[no-any-return]
    return lambda first, *rest: function(_refuse_vmap(first), *rest)


@jax.custom_batching.custom_vmap
def _refuse_vmap(arrays: Carry) -> Carry:
    """The arrays themselves. jax before 0.11 cannot lower a batching rule around what is written in place."""
    return arrays


@_refuse_vmap.def_vmap
def _say_why_not(*_: object) -> NoReturn:
    raise NotImplementedError(
        f"backend='pallas' under jax.vmap needs jax 0.11 or newer, this is {jax.__version__}; use backend='xla', or "
        f"jax.lax.map"
    )
