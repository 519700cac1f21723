"""A torch function as a JAX function with a custom VJP: the work behind interop.torch_in_jax.

The arguments decide how it runs:

    arrays   (eager)         torch runs at once, on shared memory; autograd's graph waits in the VJP's residuals
    tracers  (jit, vmap, …)  a callback to the host (callback.py); the backward runs the forward again
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from logitless.interop import arguments, dlpack
from logitless.interop.arguments import Args, Kwargs, Pytree
from logitless.interop.callback import gradients_by_callback, value_by_callback
from logitless.interop.torch_call import Call, Tape
from logitless.jax_impl.residuals import Packed, packed, unpacked

WANTED = "a jax.Array"


Tree = TypeVar("Tree")


def call_torch(fn: Callable[..., object], args: Args, kwargs: Kwargs) -> Pytree:
    """``fn`` of JAX's arrays; see interop.torch_in_jax."""
    arrays, layout = arguments.split(args, kwargs, _is_array, WANTED)
    for number, array in enumerate(arrays):
        _check(array, arrays[0], lambda number: arguments.array_name(args, kwargs, _is_array, number), number)
    return _value(Call(fn, layout), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _value(call: Call, arrays: list[Array]) -> Pytree:
    if _traced(arrays):
        return value_by_callback(call, _once(arrays))
    with torch.no_grad():
        results, tree = call.run([dlpack.to_torch(array) for array in arrays])
    return jax.tree.unflatten(tree, [dlpack.share(result) for result in results])


def _forward(call: Call, primals: list[CustomVJPPrimal]) -> tuple[Pytree, Packed | Tape]:
    arrays = [primal.value for primal in primals]
    wanted = tuple(
        number
        for number, primal in enumerate(primals)
        if primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.inexact)
    )
    if _traced(arrays):
        arrays = _once(arrays)
        return value_by_callback(call, arrays), packed(arrays, [number in wanted for number in range(len(arrays))])
    tape, tree = call.run_with_graph([dlpack.to_torch(array) for array in arrays], wanted)
    return jax.tree.unflatten(tree, [dlpack.share(result) for result in tape.results]), tape


def _backward(call: Call, residuals: Packed | Tape, cotangents: Pytree) -> tuple[list[Array | None]]:
    flat = jax.tree.leaves(cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    present = tuple(not isinstance(leaf, SymbolicZero) and leaf.dtype != jax.dtypes.float0 for leaf in flat)
    upstream = _once([leaf for leaf, here in zip(flat, present, strict=True) if here])
    tape = residuals if isinstance(residuals, Tape) else None
    arrays: list[Array] = []
    if isinstance(residuals, Tape):
        wanted, count = tuple(residuals.inputs), residuals.count
    else:
        arrays, flags = unpacked(residuals)
        wanted, count = tuple(number for number, flag in enumerate(flags) if flag), len(arrays)
    if not upstream or not wanted:
        return ([None] * count,)
    if tape is None or _traced(upstream):  # traced: the pullback of an eager call, itself under jit or vmap
        gradients = gradients_by_callback(tape or call, wanted, present, arrays, upstream)
    else:
        waiting = iter([dlpack.to_torch(cotangent) for cotangent in upstream])
        arrived = [next(waiting) if here else None for here in present]
        gradients = [dlpack.share(gradient) for gradient in tape.gradients(arrived, keep=True)]
    placed = dict(zip(wanted, gradients, strict=True))
    return ([placed.get(number) for number in range(count)],)


_value.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_jvp
def _once(arrays: Tree) -> Tree:
    """The arrays themselves. A second derivative is refused, because JAX cannot differentiate torch's graph."""
    return arrays


@_once.defjvp
def _refuse_twice(_: object, __: object) -> NoReturn:
    raise NotImplementedError(
        "a function of torch_in_jax can be differentiated once, in reverse mode: got a derivative of its gradient "
        "(grad of grad, jvp of grad)"
    )


def _is_array(value: object) -> TypeGuard[Array]:
    return isinstance(value, jax.Array)


def _traced(arrays: Iterable[object]) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _check(array: Array, first: Array, name: Callable[[int], str], number: int) -> None:
    """Refuse an array that cannot be exchanged or lies on another device than the first, in the caller's names."""
    if isinstance(array, jax.core.Tracer):
        if array.dtype.name not in dlpack.EXCHANGED_DTYPES:
            raise TypeError(f"{name(number)}: {dlpack.dtype_error('array', array.dtype.name)}")
        return
    with arguments.named(name, number):
        dlpack.check_array(array)
    if not isinstance(first, jax.core.Tracer) and array.devices() != first.devices():
        (one,), (other,) = first.devices(), array.devices()
        raise ValueError(
            f"arguments are on several devices: got {name(0)} on {one}, {name(number)} on {other}, allowed is one "
            "device for all arrays"
        )
