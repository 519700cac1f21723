"""Launches of Pallas kernels, and what reads a kernel's references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.jax_impl.kernels import lowered
from logitless.jax_impl.kernels.architecture import HOPPER, interpreted, pair, programs

Ref = Any
"""A reference in a kernel, or a part of one: Mosaic GPU's functions ask for classes that JAX does not publish."""
References = dict[str, Ref]
"""A kernel's references by name."""
Arguments = Mapping[str, Array | jax.Ref]
"""What a launch reads, by name, and a jax.Ref where it writes in place."""
Shapes = dict[str, jax.ShapeDtypeStruct]
Scratch = dict[str, object]
"""Shared memory and barriers by name."""

# Its load and some names differ between the two lines of jax that are supported.
_PLGPU: Any = plgpu
ACC = _PLGPU.ACC
# How a vector along a product's rows or columns lies in registers, as a matrix in Layout.WGMMA does.
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)


def launch(
    body: Callable[[References], None], arguments: Arguments, outputs: Shapes, *, name: str, options: Hashable,
    grid: int | None, scratch: Scratch | None = None, pairs: int | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Run ``body`` on references by name. Where an argument is a jax.Ref, read what was written by :func:`written`.

    options: everything beside the arrays' names, shapes and dtypes that ``body`` and ``scratch`` depend on; its repr()
    must say all of it. A kernel is made once for all launches that agree (lowered.py).
    grid: how many programs there are, of one warpgroup each. None: as many as run at once, in pairs, each with one
    warpgroup that loads beside those that multiply. ``pairs``: fewer pairs than that.

    The barriers keep XLA from fusing the kernel with a slice of an argument, or with the place in a larger array that
    an output goes to (dynamic_slice_fusion), as it does under jax.vmap and lax.scan. Such a fusion loses what a kernel
    writes in place, and its addresses are not aligned as the kernels need (seen with jax 0.11.2).
    """
    names = (*arguments, *outputs)

    def kernel(*references: Ref) -> None:
        def scoped(**scratch_references: Ref) -> None:
            body(dict(zip(names, references, strict=True)) | scratch_references)

        pl.run_scoped(scoped, collective_axes="warpgroup" if grid is None else (), **(scratch or {}))

    # Not plgpu.kernel: its rule for jax.vmap refuses references in jax 0.10.
    run = pl.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        mesh=_persistent(pairs or programs()) if grid is None else plgpu.Mesh(grid=(grid,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=_PLGPU.InterpretGPUParams(detect_races=True) if interpreted() else None,
        name=name,
    )
    if interpreted():
        operands = [a if isinstance(a, jax.Ref) else lax.optimization_barrier(a) for a in arguments.values()]
        with jax.enable_x64(False):  # kernels count in 32 bits
            results = run(*operands)
    else:
        results = _as_call(run, arguments, outputs, name, options, grid)
    return dict(zip(outputs, lax.optimization_barrier(results), strict=True))


def _as_call(
    run: Callable[..., Sequence[Array]], arguments: Arguments, outputs: Shapes, name: str, options: Hashable,
    grid: int | None,
) -> Sequence[Array]:  # fmt: skip
    """The outputs of a call of the kernel (lowered.py). A reference's value goes in as an array. What comes out for it
    takes its place."""
    described = tuple(
        lowered.Operand(key, a.shape, str(a.dtype), isinstance(a, jax.Ref)) for key, a in arguments.items()
    )
    made = tuple(lowered.Operand(key, a.shape, str(a.dtype)) for key, a in outputs.items())

    def on_arrays(*arrays: Array) -> list[Array]:
        operands = [jax.new_ref(a) if d.written else a for a, d in zip(arrays, described, strict=True)]
        results = run(*operands)
        return [*results, *(a[...] for a in operands if isinstance(a, jax.Ref))]

    values = [a[...] if isinstance(a, jax.Ref) else lax.optimization_barrier(a) for a in arguments.values()]
    results = lowered.call(lowered.Signature(name, options, grid, described, made), on_arrays, values)
    references = (a for a in arguments.values() if isinstance(a, jax.Ref))
    for reference, value in zip(references, results[len(outputs) :], strict=True):
        reference[...] = value
    return results[: len(outputs)]


def _persistent(pairs: int) -> plgpu.Mesh:
    """Programs that run at once, in pairs if there are clusters, of one warpgroup more than multiply."""
    threads = HOPPER.multiplying + 1
    mesh = plgpu.Mesh(grid=(pairs,), grid_names=("program",), num_threads=threads, thread_name="warpgroup")
    return mesh if pair() == 1 else dataclasses.replace(mesh, cluster=(pair(),), cluster_names=("pair",))


def reference(value: Array) -> jax.Ref:
    """A jax.Ref for kernels to write to, behind a barrier as every other argument of theirs (:func:`launch`)."""
    return jax.new_ref(lax.optimization_barrier(value))


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array that holds anything, for kernels to write to."""
    array: Array = lax.empty(shape, dtype)
    return array


def empty_beside(shape: tuple[int, ...], dtype: DTypeLike, *arrays: Array) -> Array:
    """:func:`empty`, tied to ``arrays`` that depend on the inputs.

    What depends on no input JAX moves out of jax.checkpoint and jax.lax.scan. A reference cannot come back in from
    there (seen with jax 0.10.2).
    """
    array: Array = lax.optimization_barrier((empty(shape, dtype), *arrays))[0]
    return array


def written(reference: jax.Ref) -> Array:
    """What a jax.Ref holds after the kernels that write to it."""
    value: Array = lax.optimization_barrier(reference[...])
    return value


def load(reference: Ref, start: Array | int, size: int, layout: object) -> Array:
    """``size`` elements of a vector from ``start``, laid out along a product's rows or columns."""
    return _load(reference.at[pl.ds(start, size)], layout)


def load_matrix(part: Ref) -> Array:
    """A part of a matrix in global memory, as float32 in a product's layout."""
    return _load(part, plgpu.Layout.WGMMA).astype(jnp.float32)


def _load(part: Ref, layout: object) -> Array:
    before = ((),) if jax.__version_info__ < (0, 11) else ()
    values: Array = _PLGPU.load(part, *before, layout=layout, optimized=False)
    return values


def transposed(reference: Ref) -> Ref:
    """A matrix of shared memory with its axes exchanged."""
    if jax.__version_info__ < (0, 11):
        return _PLGPU.transpose_ref(reference, (1, 0))
    return reference.transpose((1, 0))
