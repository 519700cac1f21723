"""to_jax and to_torch for whole pytrees: state dicts, batches, nested containers. dlpack.py converts each leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from logitless.interop import dlpack

if TYPE_CHECKING:
    from logitless.interop.arguments import Pytree


def to_jax(tensor: Pytree, *, copy: bool | None = None) -> Pytree:
    """The same values as JAX arrays on the same device, bit for bit: of a tensor, or of every tensor of a pytree.

    The memory is shared where possible: a write to a tensor is then seen by the JAX array (which JAX takes to be
    immutable), so finish the JAX computations that read it first, or ask for a copy. The array keeps the memory alive.

    Args:
        tensor: a ``torch.Tensor`` or ``torch.nn.Parameter`` of any shape that does not require a gradient, on a CPU or
            CUDA device, with a dtype of ``EXCHANGED_DTYPES``, its elements in one block of memory in any order of the
            axes; or a pytree of such tensors (dict, list, tuple, named tuple, a module's ``state_dict()``; None stays).
        copy: None shares the memory where possible and copies in two cases: a CPU buffer that does not start on a
            64-byte boundary, and int64 (uint64) while ``jax_enable_x64`` is off. The latter becomes int32 (uint32)
            after a check of every value, which waits for a GPU tensor. False raises ValueError instead of copying. True
            always makes a fresh, contiguous copy, and so accepts views with steps and expanded views too.

    Returns:
        An array (a pytree of arrays of the same structure) of the tensor's shape and dtype, int32 for int64 and uint32
        for uint64 while x64 is off.

    Raises:
        ImportError: torch or jax is not installed.
        TypeError: not a torch tensor; a tensor subclass; a dtype that cannot be exchanged; ``copy`` is no bool.
        ValueError: requires_grad or a forward-mode tangent; sparse, nested, quantized, meta; no memory of its own; a
            pending conjugation or negation; steps, expanded or overlapping elements; float64 or complex128, or an
            integer that does not fit, while x64 is off; a copy is needed and ``copy=False``. The message names the
            remedy, and in a pytree the place.
        NotImplementedError: a device other than CPU and CUDA, or CUDA where JAX has no CUDA backend.
    """
    return _map(dlpack.to_jax, tensor, copy)


def to_torch(array: Pytree, *, copy: bool | None = None) -> Pytree:
    """The same values as torch tensors on the same device, bit for bit: of an array, or of every array of a pytree.

    Waits until the array is computed (on a GPU: makes torch's current stream wait). The memory is shared unless
    ``copy=True``: torch cannot mark it read-only, but JAX takes its arrays to be immutable and may hold the same buffer
    in several of them, so never write to the tensor in place. The tensor keeps the memory alive, on a GPU until torch's
    streams have passed the point where it was dropped.

    Args:
        array: a concrete ``jax.Array`` of any shape, whole on one CPU or GPU device, with a dtype of
            ``EXCHANGED_DTYPES``; or a pytree of such arrays (None stays).
        copy: None and False share the memory; True makes a fresh copy that may be written to.

    Returns:
        A tensor (a pytree of tensors of the same structure) of the array's shape and dtype that does not require a
        gradient.

    Raises:
        ImportError: torch or jax is not installed.
        TypeError: not a JAX array; a tracer (inside jit, grad, vmap, …); a PRNG key; a dtype that cannot be exchanged;
            ``copy`` is no bool.
        ValueError: a deleted (donated) array; an array on several devices.
        NotImplementedError: a device other than CPU and GPU, or a GPU array where torch has no CUDA device.
    """
    return _map(dlpack.to_torch, array, copy)


def _map(convert: Callable[..., object], tree: Pytree, copy: bool | None) -> Pytree:
    """``convert`` of every leaf. An error inside a container says at which place."""
    dlpack.require_both(convert.__name__)
    import jax

    from logitless.interop.arguments import is_sparse

    if tree is None or is_sparse(tree) or jax.tree_util.all_leaves([tree]):
        return convert(tree, copy=copy)

    def at_place(path: tuple[object, ...], leaf: object) -> object:
        try:
            return convert(leaf, copy=copy)
        except (TypeError, ValueError, NotImplementedError) as error:
            place = jax.tree_util.keystr(path)
            raise type(error)(f"at {place}: {error}") from error

    return jax.tree_util.tree_map_with_path(at_place, tree, is_leaf=is_sparse)
