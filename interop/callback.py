"""torch inside compiled JAX, by callbacks to the host.

A callback computes and allocates nothing in JAX, because that can deadlock. It returns NumPy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from logitless.interop import dlpack
from logitless.interop.arguments import Pytree
from logitless.interop.torch_call import Call, Tape

# Shape and dtype of each array. Dtypes are names, so that this is hashable.
Shapes = tuple[tuple[tuple[int, ...], str], ...]


@dataclasses.dataclass(frozen=True)
class _Value:
    """The callback of a forward: arrays → the call's results, computed on ``device``."""

    call: Call
    device: str
    shapes: Shapes

    def __call__(self, *arrays: Array) -> list[NDArray[np.generic]]:
        with torch.no_grad():
            results, _ = self.call.run([_tensor(array, self.device) for array in arrays])
        return [_numpy(result, *shape) for result, shape in zip(results, self.shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """The callback of a backward: arrays and the upstream gradients that are present → gradients of the wanted arrays.

    ``source`` is a call, whose forward runs again, or the tape of an eager call. With a tape ``arrays`` is 0.
    """

    source: Call | Tape
    wanted: tuple[int, ...]
    present: tuple[bool, ...]
    arrays: int
    device: str
    shapes: Shapes

    def __call__(self, *arrays: Array) -> list[NDArray[np.generic]]:
        tensors = [_tensor(array, self.device) for array in arrays]
        if isinstance(self.source, Tape):
            tape = self.source
        else:
            tape, _ = self.source.run_with_graph(tensors[: self.arrays], self.wanted)
        arrived = iter(tensors[self.arrays :])
        upstream = [next(arrived) if here else None for here in self.present]
        gradients = tape.gradients(upstream, keep=isinstance(self.source, Tape))
        return [_numpy(gradient, *shape) for gradient, shape in zip(gradients, self.shapes, strict=True)]


def value_by_callback(call: Call, arrays: Sequence[Array]) -> Pytree:
    """The call's results as a callback of the compiled program."""
    device = _device()
    shapes, tree = _result_shapes(call, arrays, device)
    results = jax.pure_callback(_Value(call, device, shapes), _structs(shapes), *arrays, vmap_method="sequential")
    return jax.tree.unflatten(tree, results)


def gradients_by_callback(
    source: Call | Tape,
    wanted: tuple[int, ...],
    present: tuple[bool, ...],
    arrays: Sequence[Array],
    upstream: Sequence[Array],
) -> list[Array]:
    """Gradients of the wanted arguments as a callback of the compiled program."""
    if isinstance(source, Tape):
        inputs = source.inputs.values()
        device = str(next(iter(inputs)).device)
        shapes: Shapes = tuple((tuple(tensor.shape), dlpack.dtype_name(tensor)) for tensor in inputs)
    else:
        device = _device()
        shapes = tuple((arrays[number].shape, arrays[number].dtype.name) for number in wanted)
    host = _Gradients(source, wanted, present, len(arrays), device, shapes)
    gradients: list[Array] = jax.pure_callback(host, _structs(shapes), *arrays, *upstream, vmap_method="sequential")
    return gradients


def _device() -> str:
    """Where torch computes: on the GPU if JAX uses one by default and torch can, else on the CPU."""
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def _structs(shapes: Shapes) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


def _result_shapes(call: Call, arrays: Sequence[Array], device: str) -> tuple[Shapes, jax.tree_util.PyTreeDef]:
    """Shapes and JAX dtypes of the results, and their structure, from a run on fake tensors.

    Raises RuntimeError if the function cannot run on fake tensors, ValueError for a result that JAX would round.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [torch.empty(a.shape, dtype=getattr(torch, a.dtype.name), device=device) for a in arrays]
        try:
            results, tree = call.run(fakes)
        except (TypeError, ValueError, NotImplementedError):
            raise
        except Exception as error:
            raise RuntimeError(
                "inside jit, vmap, … shapes are found by running the function on fake tensors, which failed "
                f"({type(error).__name__}: {error}): its shapes must not depend on values (.item(), masks, nonzero); "
                "call it outside jit instead"
            ) from error
    return tuple((tuple(result.shape), dlpack.jax_dtype(result)) for result in results), tree


def _tensor(array: Array, device: str) -> Tensor:
    """A callback's argument as a tensor."""
    return dlpack.to_torch(array).to(device)


def _numpy(tensor: Tensor, shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """A result as the callback returns it. Raises ValueError unless it has the promised shape and fits the dtype."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"the function returned shape {tuple(tensor.shape)}, on fake tensors it was {shape}")
    plain = dlpack.exact(tensor.detach().resolve_conj().resolve_neg().cpu(), dtype).contiguous()
    bits = plain.reshape(-1).view(torch.uint8).numpy()
    return bits.view(jnp.dtype(dtype)).reshape(shape) if bits.size else np.zeros(shape, jnp.dtype(dtype))
