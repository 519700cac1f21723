"""Kernels that are lowered once, kept, and compiled side by side.

JAX takes 0.1 to 0.4 s to lower one of the kernels, and as long or longer to compile it, one after the other. So what a
launch leaves in a traced program is a call that says what the kernel depends on. When the program is lowered for a CUDA
device, the call becomes the kernel as jax.export gives it: lowered once for all programs of the process that call it.
A thread begins to compile it while the next kernel is lowered. XLA then finds it compiled, because Mosaic GPU keeps
compiled kernels under a digest of their source.

Where JAX's compilation cache is a folder, exported kernels are kept there too, in ``logitless``. The body of a kernel
that is there is not even traced.

Its counterpart is torch_impl/kernels/rehearsal.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax import Array, export
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from logitless import spec
from logitless.jax_impl.kernels.architecture import pair, programs

Run = Callable[..., Sequence[Array]]
"""Takes a launch's arguments as arrays. Gives its outputs, then the new values of the arguments that it writes to."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that a kernel reads or makes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    written: bool = False
    """Whether the kernel writes to what it reads there."""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Everything that a kernel depends on."""

    name: str
    options: Hashable
    """What its body depends on beside the arrays. Its repr() says all of it."""
    grid: int | None
    operands: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    programs: int = dataclasses.field(default_factory=programs)
    pair: int = dataclasses.field(default_factory=pair)

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        return [operand.struct for operand in self.operands]

    @property
    def results(self) -> list[Operand]:
        return [*self.outputs, *(operand for operand in self.operands if operand.written)]


class Kernel:
    """A kernel that traced programs call."""

    def __init__(self, signature: Signature, run: Run) -> None:
        self.signature = signature
        self.made: ClosedJaxpr | export.Exported = _read(signature) or traced(signature, run)
        self.begun = False
        """Whether a thread compiles it, or has."""

    def exported(self) -> export.Exported:
        """The kernel, lowered when it is first asked for."""
        if not isinstance(self.made, export.Exported):
            # jax does not promise that its later versions run this custom call. What is kept, this version alone reads.
            unsafe = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
            with jax.enable_x64(False):
                exporting = export.export(jax.jit(jaxpr_as_fun(self.made)), platforms=["cuda"], disabled_checks=unsafe)
                self.made = exporting(*self.signature.structs)
            _write(self.signature, self.made)
        return self.made


# The kernels that some traced program of this process calls.
kernels: weakref.WeakValueDictionary[Signature, Kernel] = weakref.WeakValueDictionary()


def call(signature: Signature, run: Run, arrays: Sequence[Array]) -> list[Array]:
    """``run(*arrays)``, which becomes the kernel where the program is lowered for a CUDA device; an error elsewhere."""
    kernel = kernels.get(signature)
    if kernel is None:
        kernel = kernels[signature] = Kernel(signature, run)
    results: list[Array] = _call.bind(*arrays, kernel=kernel)
    return results


def traced(signature: Signature, run: Run) -> ClosedJaxpr:
    """The kernel's body, traced at once: ``run`` holds arrays of the program around it, and is not kept."""
    with jax.enable_x64(False):  # kernels count in 32 bits
        return jax.make_jaxpr(run)(*signature.structs)


# ---------------------------------------------------------------------------------------------------------------------
# What stands in a traced program


def _run(*arrays: Array, kernel: Kernel) -> list[Array]:
    """Outside of jax.jit, or where jax.disable_jit() is on."""
    with jax.disable_jit(False):
        results: list[Array] = jax.jit(functools.partial(_call.bind, kernel=kernel))(*arrays)
    return results


def _lower(context: mlir.LoweringRuleContext, *operands: object, kernel: Kernel) -> Any:
    exported = kernel.exported()
    _compile_beside(kernel)
    return mlir.lower_fun(exported.call, multiple_results=True)(context, *operands)


def _refuse(context: mlir.LoweringRuleContext, *_: object, **__: object) -> NoReturn:
    device = " and ".join(context.module_context.platforms)
    raise spec.unavailable_error("pallas", spec.needs_cuda(device), usable="xla")


# What is traced on a machine without a GPU may be compiled for one. So the device is known when this is lowered.
_call: Any = Primitive("logitless_kernel")
_call.multiple_results = True
_call.def_impl(_run)
_call.def_abstract_eval(lambda *_, kernel: [ShapedArray(r.shape, r.struct.dtype) for r in kernel.signature.results])
mlir.register_lowering(_call, _lower, platform="cuda")
mlir.register_lowering(_call, _refuse)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled side by side


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="logitless-compile")


def device() -> jax.Device | None:
    """The GPU that kernels are compiled for before XLA asks, or None: what is lowered here is for another machine."""
    first: jax.Device = jax.devices()[0]
    return first if first.platform == "gpu" else None


def _compile_beside(kernel: Kernel) -> None:
    """Begin to compile the kernel, once. What goes wrong, the whole program's compilation finds again."""
    target = device()
    if target is None or kernel.begun:
        return
    kernel.begun = True
    sharding = jax.sharding.SingleDeviceSharding(target)
    arrays = [jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=sharding) for o in kernel.signature.operands]
    # Lowered here: with two threads that did so at a time, jax 0.11.2 once ended in a segmentation fault.
    _compilers().submit(jax.jit(kernel.exported().call).lower(*arrays).compile)


# ---------------------------------------------------------------------------------------------------------------------
# Kept in the folder of JAX's compilation cache


def folder() -> Path | None:
    """Where lowered kernels are kept, or None: JAX has no cache, or one that is no folder, or no flatbuffers to write
    with."""
    enabled: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    place: str | None = jax.config.jax_compilation_cache_dir if enabled else None  # type: ignore[attr-defined]
    if not place or "://" in place or importlib.util.find_spec("flatbuffers") is None:
        return None
    return Path(place) / "logitless"


@functools.cache
def _code() -> str:
    """A digest of the versions of jax and of this package's source."""
    digest = hashlib.sha256(f"{jax.__version__} {version('jaxlib')}".encode())
    for path in sorted(Path(spec.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(signature: Signature) -> Path | None:
    place = folder()
    return place and place / hashlib.sha256(f"{_code()} {signature!r}".encode()).hexdigest()


def _read(signature: Signature) -> export.Exported | None:
    """The kernel that is kept; None if there is none, only a part of one, or none that may be read."""
    path = _path(signature)
    try:
        kept = path.read_bytes() if path else b""
    except OSError:
        return None
    digest, content = kept[:32], kept[32:]
    return export.deserialize(bytearray(content)) if hashlib.sha256(content).digest() == digest else None


def _write(signature: Signature, exported: export.Exported) -> None:
    path = _path(signature)
    if path is None:
        return
    content = bytes(exported.serialize())
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(content).digest() + content)
        part.replace(path)
    except OSError as failure:
        warnings.warn(f"a lowered kernel cannot be kept in JAX's compilation cache: {failure}", RuntimeWarning, 2)
