"""jax_in_torch and torch_in_jax: a function of one framework as a differentiable function of the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from logitless.interop.dlpack import require_both, type_name

if TYPE_CHECKING:
    from logitless.interop.arguments import Pytree


def jax_in_torch(fn: Callable[..., object], *, autocast: Sequence[str] = ()) -> Callable[..., Pytree]:
    """``fn``, a JAX function, as a differentiable function of torch tensors. Wrap once, call often.

    ``fn`` is compiled by jax.jit once for every combination of shapes, dtypes, constants and arguments that require a
    gradient. Tensors are shared with JAX and results are JAX's own memory: nothing is copied, except what
    ``docs/interop.md`` lists (views with gaps, int64 without x64). Only gradients that are wanted are computed, once
    differentiable, for any upstream gradients and as often as the graph is kept; without any wanted (no argument
    requires one, or torch.no_grad) only the value is. torch.compile runs the call as it is, outside its graph.

    Args:
        fn: a function that jax.jit takes, of pytrees of arrays and constants; it returns a pytree of arrays. It is
            traced, so it must not read what changes between calls.
        autocast: names of parameters of ``fn`` whose floating tensors torch.autocast casts, as it casts the arguments
            of a matrix product; gradients come in the tensors' own dtype. None by default: dtypes arrive as they are.

    Returns:
        A function of the same arguments, with torch tensors (and jax.Arrays, as constants: PRNG keys) for arrays. Any
        other leaf is a constant, hashable; another value compiles anew. It returns torch tensors.

    Raises:
        ImportError: torch or jax is not installed.
        TypeError: ``fn`` is not callable; at a call: a leaf of another type, a dtype that cannot be exchanged.
        ValueError: ``autocast`` names no parameter; at a call: tensors on several devices, sparse, meta, float64
            without x64, int64 that does not fit, as for :func:`logitless.interop.to_jax`. The message names the place.
    """
    require_both("jax_in_torch")
    import torch

    from logitless.interop.into_torch import JaxInTorch

    _check_callable(fn)
    bridge = JaxInTorch(fn, autocast)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def bridged(*args: object, **kwargs: object) -> Pytree:
        return bridge(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Pytree:
        return bridged(*args, **kwargs)

    return call


def torch_in_jax(fn: Callable[..., object]) -> Callable[..., Pytree]:
    """``fn``, a torch function, as a JAX function with a custom VJP.

    Eagerly, also under jax.grad and jax.vjp outside jit, ``fn`` runs at once on tensors that share JAX's memory, and
    its results are shared with JAX: nothing is copied. Inside jit, vmap, scan, checkpoint, … it becomes a callback to
    the host, with these costs: on a GPU every array travels to the host and back; a backward runs the forward again;
    under vmap the calls come one by one. Shapes are then found by running ``fn`` on fake tensors.

    Only gradients that are differentiated are computed; once differentiable in reverse mode. What ``fn`` closes over
    (a module's parameters) is constant: pass parameters as arguments (torch.func.functional_call).

    Args:
        fn: a function of pytrees of tensors and constants that returns a pytree of tensors. It must not write to its
            arguments, nor later to its results. Inside jit it must be pure: it may run any number of times.

    Returns:
        A function of the same arguments, with jax.Arrays (NumPy arrays are taken too) for tensors. Any other leaf is a
        constant, hashable, handed on as it is. It returns jax.Arrays.

    Raises:
        ImportError: torch or jax is not installed.
        TypeError: ``fn`` is not callable; at a call: a torch tensor or another unhashable leaf, a dtype that cannot be
            exchanged, a result that is no tensor.
        ValueError: at a call: arrays on several devices, sparse arrays, a result that to_jax refuses, an argument that
            ``fn`` wrote to.
        NotImplementedError: a second derivative.
    """
    require_both("torch_in_jax")
    from logitless.interop.into_jax import call_torch

    _check_callable(fn)

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Pytree:
        return call_torch(fn, args, kwargs)

    return call


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"fn: got {type_name(fn)}, allowed is a function")
