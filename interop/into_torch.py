"""A JAX function as a differentiable torch function: the work behind interop.jax_in_torch.

    forward   tensors → arrays (shared) → compiled fn, with its pullback where a gradient is wanted → tensors (shared)
    backward  upstream tensors → arrays → compiled pullback → gradients

The pullback's residuals wait in torch's graph as saved tensors. They are freed with the graph, moved by saved-tensor
hooks, and checked for writes in place. That holds for the caller's own tensors, shared with JAX, too.

On a GPU the exchange orders the streams. JAX waits for torch's current stream before it reads an argument. torch's
current stream waits for JAX before it goes on after the call, because every call returns at least one result. So
arguments may be overwritten or freed as soon as the call has returned, as with any torch function. They need no lease
(lifetime.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.extend.core import jaxpr_as_fun
from numpy.typing import NDArray
from torch import Tensor

from logitless.interop import arguments, dlpack, exchange
from logitless.interop.arguments import Args, Kwargs, Layout, Pytree
from logitless.interop.residuals import Source, sources

WANTED = "a torch.Tensor or a jax.Array"


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What tracing a forward has found. Compared by identity: each compiled forward has one."""

    output_tree: jax.tree_util.PyTreeDef
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    pullback_tree: jax.tree_util.PyTreeDef
    residuals: tuple[Source, ...]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Forward:
    """What a compiled forward returns. ``extra``: the residuals that are neither arguments nor outputs."""

    outputs: tuple[Array, ...]
    extra: tuple[Array, ...]
    traced: Traced

    def tree_flatten(self) -> tuple[tuple[tuple[Array, ...], tuple[Array, ...]], Traced]:
        return (self.outputs, self.extra), self.traced

    @classmethod
    def tree_unflatten(cls, traced: Traced, children: tuple[tuple[Array, ...], tuple[Array, ...]]) -> Forward:
        outputs, extra = children
        return cls(outputs, extra, traced)


class JaxInTorch:
    """The bridge of one function and its compiled parts.

    Args:
        fn: the JAX function.
        autocast: names of parameters of ``fn`` that torch.autocast casts.
    """

    def __init__(self, fn: Callable[..., object], autocast: Sequence[str]) -> None:
        self.fn = fn
        if isinstance(autocast, str) or not isinstance(autocast, Sequence):
            raise TypeError(f"autocast: got {autocast!r}, allowed is a tuple of names of parameters")
        self.autocast = tuple(autocast)
        self.signature = _signature_with(fn, self.autocast) if self.autocast else None
        self.value = jax.jit(self._apply, static_argnums=0)
        self.forward = jax.jit(self._forward, static_argnums=(0, 1))
        self.backward = jax.jit(_pull_back, static_argnums=(0, 1))

    @dlpack.keeps_current_device
    def __call__(self, *args: object, **kwargs: object) -> Pytree:
        """``fn`` of the tensors; see interop.jax_in_torch."""
        if self.signature is not None:
            args, kwargs = self._cast(self.signature, args, kwargs)
        leaves, layout = arguments.split(args, kwargs, _is_array, WANTED)
        arrays, checks = self._arrays(leaves, args, kwargs)
        tensors = [value if isinstance(value, Tensor) else None for value in leaves]
        wanted = tuple(
            number for number, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad
        ) if torch.is_grad_enabled() else ()  # fmt: skip
        if not wanted:
            result = exchange.to_torch(self.value(layout, tuple(arrays)))
        else:
            traced: list[Traced] = []
            flat = _Call.apply(self, layout, wanted, arrays, traced, *tensors)  # type: ignore[no-untyped-call]
            result = jax.tree.unflatten(traced[0].output_tree, flat)
        for check in checks:
            check()
        return result

    def _apply(self, layout: Layout, arrays: Sequence[Array]) -> Pytree:
        args, kwargs = layout.join(arrays)
        return jax.tree.map(jnp.asarray, self.fn(*args, **kwargs))

    def _forward(self, layout: Layout, wanted: tuple[int, ...], arrays: tuple[Array, ...]) -> Forward:
        """The outputs, and the residuals of the pullback. A first trace shows which residuals need not be returned."""

        def with_pullback(arrays: Sequence[Array]) -> Pytree:
            def of_wanted(chosen: Sequence[Array]) -> Pytree:
                every = list(arrays)
                for number, value in zip(wanted, chosen, strict=True):
                    every[number] = value
                return self._apply(layout, every)

            return jax.vjp(of_wanted, [arrays[number] for number in wanted])

        closed, shapes = jax.make_jaxpr(with_pullback, return_shape=True)(arrays)
        outputs, output_tree = jax.tree.flatten(shapes[0])
        pullback_tree = jax.tree.structure(shapes[1])
        found = sources(closed.jaxpr, len(outputs))
        values = jaxpr_as_fun(closed)(*jax.tree.leaves(arrays))
        extra = [value for value, source in zip(values[len(outputs) :], found, strict=True) if source.kind == "extra"]
        traced = Traced(output_tree, tuple(outputs), pullback_tree, found)
        return Forward(tuple(values[: len(outputs)]), tuple(extra), traced)

    def _arrays(
        self, leaves: list[Tensor | Array], args: Args, kwargs: Kwargs
    ) -> tuple[list[Array], list[Callable[[], None]]]:
        """Every argument as a JAX array, and the checks to run once they are in use.

        Raises ValueError for tensors on several devices.
        """

        def name(number: int) -> str:
            return arguments.array_name(args, kwargs, _is_array, number)

        devices: dict[torch.device | jax.Device, int] = {}
        for number, value in enumerate(leaves):
            if isinstance(value, Tensor):
                devices.setdefault(value.device, number)
        if len(devices) > 1:
            places = ", ".join(f"{name(number)} on {device}" for device, number in devices.items())
            raise ValueError(f"arguments are on several devices: got {places}, allowed is one device for all tensors")
        arrays: list[Array] = []
        checks: list[Callable[[], None]] = []
        for number, value in enumerate(leaves):
            with arguments.named(name, number):
                if isinstance(value, Tensor):
                    value, check = dlpack.exact_later(value)
                    value = dlpack.share(value, lease=False)
                    if check is not None:
                        checks.append(functools.partial(_checked, name, number, check))
                arrays.append(value)
        return arrays, checks

    def _cast(self, signature: inspect.Signature, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The named parameters cast as torch.autocast casts a matrix product's arguments."""
        bound = signature.bind(*args, **kwargs)
        for name in self.autocast:
            if name in bound.arguments:
                bound.arguments[name] = jax.tree.map(_autocast, bound.arguments[name])
        return bound.args, bound.kwargs


def _checked(name: Callable[[int], str], number: int, check: Callable[[], None]) -> None:
    with arguments.named(name, number):
        check()


class _Context(torch.autograd.function.FunctionCtx):
    """What a backward finds of its forward."""

    saved_tensors: tuple[Tensor, ...]
    bridge: JaxInTorch
    traced: Traced
    wanted: tuple[int, ...]
    count: int
    """Of the arguments."""
    config: list[Callable[[], AbstractContextManager[object]]]
    kept: list[int | tuple[Array]]


class _Call(torch.autograd.Function):
    """One differentiated call of the bridge. Outputs and gradients are flat."""

    @staticmethod
    def forward(
        ctx: _Context,
        bridge: JaxInTorch,
        layout: Layout,
        wanted: tuple[int, ...],
        arrays: list[Array],
        traced: list[Traced],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        result = bridge.forward(layout, wanted, tuple(arrays))
        traced.append(result.traced)
        outputs = tuple(dlpack.to_torch(array) for array in result.outputs)
        ctx.mark_non_differentiable(*(out for out in outputs if not (out.is_floating_point() or out.is_complex())))
        ctx.bridge, ctx.traced, ctx.wanted, ctx.count = bridge, result.traced, wanted, len(tensors)
        ctx.config = _config()
        ctx.kept, saved = _keep(result, arrays, tensors, outputs)
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    @dlpack.keeps_current_device
    def backward(ctx: _Context, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; without a graph a second derivative would be 0, silently
            raise NotImplementedError(
                "a function of jax_in_torch can be differentiated once: got create_graph=True; differentiate twice in "
                "JAX, inside the function"
            )
        saved = ctx.saved_tensors  # raises after a write in place, and after the graph was freed
        present = tuple(gradient is not None for gradient in upstream)
        gradients: list[Tensor | None] = [None] * ctx.count
        if any(present):
            with ExitStack() as stack:
                for setting in ctx.config:
                    stack.enter_context(setting())
                residuals = [
                    dlpack.share(saved[item], lease=False) if isinstance(item, int) else item[0] for item in ctx.kept
                ]
                cotangents = [dlpack.share(gradient, lease=False) for gradient in upstream if gradient is not None]
                arrived = ctx.bridge.backward(ctx.traced, present, residuals, cotangents)
            for number, gradient in zip(ctx.wanted, arrived, strict=True):
                gradients[number] = dlpack.to_torch(gradient)
        return (None, None, None, None, None, *gradients)


def _pull_back(
    traced: Traced, present: tuple[bool, ...], residuals: list[Array], cotangents: list[Array]
) -> list[Array]:
    """Gradients of the wanted arguments. torch's gradient of a complex number is the conjugate of JAX's."""
    waiting = iter(cotangents)
    pullback = jax.tree.unflatten(traced.pullback_tree, residuals)
    flat: list[Array | NDArray[np.void]] = []
    for output, arrived in zip(traced.outputs, present, strict=True):
        if arrived:
            flat.append(jnp.conj(next(waiting)))
        elif jnp.issubdtype(output.dtype, jnp.inexact):
            flat.append(jnp.zeros(output.shape, output.dtype))
        else:
            flat.append(np.zeros(output.shape, jax.dtypes.float0))
    (gradients,) = pullback(jax.tree.unflatten(traced.output_tree, flat))
    return [jnp.conj(gradient) for gradient in gradients]


def _keep(
    result: Forward, arrays: list[Array], tensors: Sequence[Tensor | None], outputs: Sequence[Tensor]
) -> tuple[list[int | tuple[Array]], list[Tensor]]:
    """The residuals: an index into the tensors that torch saves, or a one-tuple of an array that only JAX can hold.

    A residual that shares memory with an argument or an output is saved as that tensor: torch counts writes to it.
    """
    kept: list[int | tuple[Array]] = []
    saved: list[Tensor] = []
    for source in result.traced.residuals:
        tensor: Tensor | None = None
        if source.kind == "argument":
            array, own = arrays[source.index], tensors[source.index]
            if own is not None and own.numel() and array.unsafe_buffer_pointer() == own.data_ptr():
                tensor = own
        elif source.kind == "output":
            array, tensor = result.outputs[source.index], outputs[source.index]
        else:
            array = result.extra[source.index]
            if array.size and array.dtype.name in dlpack.EXCHANGED_DTYPES:
                tensor = dlpack.to_torch(array)
        if tensor is None:
            kept.append((array,))
        else:
            kept.append(len(saved))
            saved.append(tensor)
    return kept, saved


def _config() -> list[Callable[[], AbstractContextManager[object]]]:
    """This thread's settings that change a backward's numbers. torch may run the backward in another thread."""
    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    promotion = jax.config.jax_numpy_dtype_promotion  # type: ignore[attr-defined]
    return [
        lambda: jax.enable_x64(x64),
        lambda: jax.default_matmul_precision(precision),
        lambda: jax.numpy_dtype_promotion(promotion),
    ]


def _is_array(value: object) -> TypeGuard[Tensor | Array]:
    return isinstance(value, Tensor | jax.Array)


def _autocast(value: object) -> object:
    """A floating tensor in autocast's dtype, if autocast is on for its device. float64 stays, as in torch."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
        return value
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


def _signature_with(fn: Callable[..., object], names: tuple[str, ...]) -> inspect.Signature:
    """The signature of ``fn``; ValueError unless it has these parameters."""
    signature = inspect.signature(fn)
    for name in names:
        if name not in signature.parameters:
            known = ", ".join(signature.parameters)
            raise ValueError(f"autocast: got {name!r}, allowed are names of the function's parameters: {known}")
    return signature
