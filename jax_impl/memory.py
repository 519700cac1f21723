"""How much scratch a compiled JAX function needs, as its compiler planned it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def temp_bytes(function: Callable[..., object], *arguments: Any) -> int:
    """Bytes of temporary memory of `function`, compiled by jax.jit for these arguments.

    XLA assigns every buffer of a program at compile time; this is the size of the memory it sets aside for values that
    are neither arguments nor results (`temp_size_in_bytes` of the compiled program's memory analysis). Buffers whose
    lifetimes do not overlap share space, so it is a peak, not a sum. Nothing is executed.

    Not counted: arguments, results, and an intermediate value that XLA keeps in a result's own buffer before the result
    is written there; arrays that `function` closes over (they become constants of the program: pass them as arguments);
    memory that a library call takes at run time (packing buffers inside a matrix product).

    Arguments:
        function: any function that jax.jit takes, or one that it has returned (its donations and static arguments then
            hold).
        arguments: arrays, or jax.ShapeDtypeStruct where only shape and dtype are known; pytrees of them.

    Returns: bytes, ≥ 0.

    Raises:
        NotImplementedError: this backend of JAX gives no memory analysis.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    analysis = jitted.lower(*arguments).compile().memory_analysis()
    if analysis is None:
        raise NotImplementedError(
            f"JAX's {jax.default_backend()!r} backend gives no memory analysis of a compiled program; "
            "the 'cpu' and 'gpu' backends give one"
        )
    return int(analysis.temp_size_in_bytes)
