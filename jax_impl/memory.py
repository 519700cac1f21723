"""How much scratch a compiled JAX function needs, as its compiler planned it."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
from jax.stages import Compiled, Lowered

# On the CPU, XLA gives groups of operations to the YNN library as one fusion. No analysis counts the library's buffers.
# With this option the library gets single matrix products only, so that every buffer between them is XLA's.
_YNN_FUSION = "__ynn_fusion"
_SINGLE_PRODUCTS: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def temp_bytes(function: Callable[..., object], *arguments: object) -> int:
    """Bytes of temporary memory of `function`, compiled by jax.jit for these arguments.

    XLA assigns every buffer of a program at compile time; this is the size of the memory it sets aside for values that
    are neither arguments nor results (`temp_size_in_bytes` of the compiled program's memory analysis). Buffers whose
    lifetimes do not overlap share space, so it is a peak, not a sum. Nothing is executed.

    On the CPU a fusion may hide a matrix product's result inside a library (max(x @ w) shows no temporary at all).
    Where that happens the program is compiled a second time without such fusions and the larger number is returned: an
    upper bound then, never too little.

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
    lowered: Lowered = (function if hasattr(function, "lower") else jax.jit(function)).lower(*arguments)
    compiled = lowered.compile()
    temp = _analysed_temp_bytes(compiled)
    if _hides_a_product(compiled.as_text() or ""):
        temp = max(temp, _analysed_temp_bytes(lowered.compile(_SINGLE_PRODUCTS)))
    return temp


def _analysed_temp_bytes(compiled: Compiled) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotImplementedError(
            f"JAX's {jax.default_backend()!r} backend gives no memory analysis of a compiled program; "
            "the 'cpu' and 'gpu' backends give one"
        )
    return int(analysis.temp_size_in_bytes)


def _hides_a_product(program: str) -> bool:
    """Whether a library fusion of this optimised HLO text holds a matrix product that is not the fusion's result."""
    fusions = [line for line in program.splitlines() if _YNN_FUSION in line]
    fused = {name for line in fusions for name in re.findall(r"calls=%?([\w.\-]+)", line)}
    current = ""
    for line in program.splitlines():
        if opening := re.match(r"%?([\w.\-]+) .*\{$", line):
            current = opening[1]
        elif current in fused and " dot(" in line and not line.lstrip().startswith("ROOT"):
            return True
    return False
