"""Exchange of single arrays by DLPack: shared memory where possible, else an error or a documented copy.

The frameworks' own ``from_dlpack`` is safe only for plain inputs. Without an error it

- drops a pending negation and a forward-mode tangent,
- reads garbage from fake and freed tensors,
- turns 4-bit integers into bytes,
- wraps int64 and rounds float64 while JAX's x64 mode is off,
- copies a misaligned buffer after it has returned.

So everything is checked here first, and every copy is made here, before the function returns.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from logitless.interop.lifetime import leased_to_jax, leased_to_torch

if TYPE_CHECKING:
    import jax
    import torch

# The dtypes that both frameworks hold and both DLPack exporters describe; torch and JAX give them the same names.
# A list of what is allowed, because torch exports its 1- to 7-bit integers as whole bytes without a word.
EXCHANGED_DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip

# What JAX makes of the wide dtypes while its x64 mode is off, and the range of integers that fit.
_NARROWED = {"int64": ("int32", -(2**31), 2**31 - 1), "uint64": ("uint32", 0, 2**32 - 1)}
_ROUNDED = {"float64": "float32", "complex128": "complex64"}

_ENABLE_X64 = 'jax.config.update("jax_enable_x64", True)'

# JAX's CPU client shares only buffers that start on such a boundary (bytes). torch's allocator always gives one.
_JAX_CPU_ALIGNMENT = 64

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def keeps_current_device(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``function``, which leaves torch's current device as it was.

    CUDA has one current device per thread, which torch relies on. JAX leaves it at whichever GPU it used last.
    """

    @functools.wraps(function)
    def keeping(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return function(*args, **kwargs)  # torch has chosen no device yet
        with torch.cuda.device(torch.cuda.current_device()):
            return function(*args, **kwargs)

    return keeping


@keeps_current_device
def to_jax(tensor: torch.Tensor, *, copy: bool | None = None, lease: bool = True) -> jax.Array:
    """The same values as a ``jax.Array`` on the same device, bit for bit.

    See :func:`logitless.interop.to_jax`, which takes pytrees too. ``lease=False``: on a GPU the caller makes sure that
    the memory outlives JAX's use of it.
    """
    require_both("to_jax")
    import jax.dlpack
    import torch

    _check_copy(copy)
    _check_tensor_kind(tensor)
    _check_tensor_device(tensor)
    _check_tensor_state(tensor)
    source = _shareable(tensor, copy)
    # copy=False: what JAX cannot share must fail, because JAX's own copy may still read the source after the return.
    on_gpu = source.device.type == "cuda"
    with torch.cuda.device(source.device) if on_gpu else nullcontext():  # torch exports from its current device only
        leased = leased_to_jax(source) if on_gpu and lease else source
        array: jax.Array = jax.dlpack.from_dlpack(leased, copy=False)
    return array


def share(tensor: torch.Tensor, *, lease: bool = True) -> jax.Array:
    """to_jax for the bridges, which handle gradients themselves: detached, and contiguous where it must be.

    to_jax refuses some layouts in memory (steps, expanded, a pending conjugation). Here they are copied, as torch's own
    functions do. For everything else this raises what to_jax raises.
    """
    import torch

    plain = tensor.detach()
    if plain.layout == torch.strided and not plain.is_nested:
        plain = plain.resolve_conj().resolve_neg()
        if not fills_one_block(plain):
            plain = plain.contiguous()
    return to_jax(plain, lease=lease)


@keeps_current_device
def to_torch(array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
    """The same values as a ``torch.Tensor`` on the same device, bit for bit.

    See :func:`logitless.interop.to_torch`, which takes pytrees too.
    """
    require_both("to_torch")
    from torch.utils.dlpack import from_dlpack

    _check_copy(copy)
    check_array(array)
    # JAX makes the copy, not torch's clone: then the result owns its memory alone, however soon the source is dropped.
    tensor = from_dlpack(array.copy() if copy else array)
    return leased_to_torch(tensor) if tensor.is_cuda else tensor


def require_both(needed_by: str) -> None:
    """Raise an ImportError that says what to install unless torch and jax are there."""
    for package in ("torch", "jax"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise  # the package is there, something inside it is not
            raise ImportError(
                f"logitless.interop.{needed_by} needs {package}, which is not installed: "
                f'pip install "logitless[{package}]"',
                name=package,
            ) from error


def _check_copy(copy: object) -> None:
    if copy is not None and not isinstance(copy, bool):
        raise TypeError(f"copy must be None, False or True, got {copy!r}")


def type_name(value: object) -> str:
    """``torch.Tensor``, ``builtins.list``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def dtype_error(argument: str, dtype: str) -> TypeError:
    return TypeError(
        f"{argument} has dtype {dtype}, which cannot be exchanged by DLPack; allowed are {', '.join(EXCHANGED_DTYPES)}"
    )


# --- torch to JAX ---------------------------------------------------------------------------------------------------


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor_kind(tensor: object) -> None:
    """Refuse everything but a dense, plain torch tensor of an exchanged dtype."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type_name(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        remedy = "torch.nested.to_padded_tensor" if tensor.is_nested else ".to_dense()"
        raise ValueError(f"tensor must be strided, got {kind}: convert it first, for example with {remedy}")
    # DLPack would export a subclass's storage, whatever the subclass makes of it.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"tensor must be a plain torch.Tensor or torch.nn.Parameter, got the subclass {type_name(tensor)}: take "
            "the plain tensor out of it first (.full_tensor() of a DTensor, .as_subclass(torch.Tensor) of one that "
            "only adds names)"
        )
    if tensor.is_quantized:
        raise ValueError(f"tensor is quantized ({tensor.dtype}): exchange .dequantize() or .int_repr()")
    dtype = dtype_name(tensor)
    if dtype not in EXCHANGED_DTYPES:
        raise dtype_error("tensor", dtype)


def _check_tensor_device(tensor: torch.Tensor) -> None:
    import jax

    kind = tensor.device.type
    if kind == "meta":
        raise ValueError("tensor is on the meta device and holds no data: give one on cpu or cuda")
    if kind not in ("cpu", "cuda"):
        raise NotImplementedError(f"tensor is on {tensor.device}; JAX takes cpu and cuda: move it with .cpu()")
    if kind == "cuda":
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            raise NotImplementedError(
                f"tensor is on {tensor.device}, but JAX has no CUDA backend here: move it with .cpu() or install "
                "JAX's CUDA plugin"
            ) from error


def _check_tensor_state(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory does not say all that it means."""
    from torch.autograd import forward_ad

    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise ValueError(
            "tensor has no memory of its own, as inside torch.func transforms (grad, vmap, …): call to_jax outside them"
        ) from error
    if tensor.requires_grad:
        raise ValueError("tensor requires a gradient, which would not flow through JAX: give tensor.detach()")
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(
            "tensor carries a forward-mode tangent, which would not flow through JAX: "
            "give torch.autograd.forward_ad.unpack_dual(tensor).primal"
        )
    if tensor.is_conj():
        raise ValueError("tensor is a conjugated view, its memory holds other values: give tensor.resolve_conj()")
    if tensor.is_neg():
        raise ValueError("tensor is a negated view, its memory holds other values: give tensor.resolve_neg()")
    if address == 0 and tensor.numel() > 0:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} holds no memory (its storage was freed, or it stands for zeros or "
            "for a traced value): materialize it first"
        )


def _shareable(tensor: torch.Tensor, copy: bool | None) -> torch.Tensor:
    """``tensor`` itself if JAX can share its memory, else a finished copy. Raises ValueError if neither is allowed.

    torch makes every copy: it is complete when this returns, or on a GPU in the stream's order. JAX's own copy of a
    misaligned buffer would go on in the background, and see what the caller writes to the tensor afterwards.
    """
    import torch

    if not copy and not fills_one_block(tensor):
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} does not fill one block of memory "
            "(a view with steps, expanded or overlapping): give tensor.contiguous() or ask for copy=True"
        )
    narrow = _narrowed(tensor, copy)
    if narrow is not None:
        return narrow
    if copy:
        return tensor.clone(memory_format=torch.contiguous_format)
    if tensor.device.type != "cpu" or tensor.data_ptr() % _JAX_CPU_ALIGNMENT == 0:
        return tensor
    if copy is False:
        raise ValueError(
            f"tensor starts {tensor.data_ptr() % _JAX_CPU_ALIGNMENT} bytes past a {_JAX_CPU_ALIGNMENT}-byte boundary, "
            "so JAX needs a copy, but copy=False: allow it with copy=None or start the buffer on a boundary"
        )
    return tensor.clone()


def fills_one_block(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, each once, with the axes in any order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue  # its stride is never used
        if stride != expected:
            return False
        expected *= size
    return True


def jax_dtype(tensor: torch.Tensor) -> str:
    """The dtype of a tensor's values in JAX: its own, or a 32-bit integer while x64 is off.

    Raises TypeError for a dtype that cannot be exchanged, ValueError for one that JAX would round.
    """
    import jax

    dtype = dtype_name(tensor)
    if dtype not in EXCHANGED_DTYPES:
        raise dtype_error("tensor", dtype)
    if dtype not in (*_NARROWED, *_ROUNDED) or jax.dtypes.canonicalize_dtype(dtype).name == dtype:
        return dtype
    if dtype in _ROUNDED:
        raise ValueError(
            f"tensor has dtype {dtype}, which JAX would round to {_ROUNDED[dtype]} because its x64 mode is off: "
            f"set {_ENABLE_X64} or give tensor.to(torch.{_ROUNDED[dtype]})"
        )
    return _NARROWED[dtype][0]


def exact(tensor: torch.Tensor, target: str) -> torch.Tensor:
    """``tensor`` in the dtype that jax_dtype gave. Raises ValueError for an integer that does not fit."""
    if dtype_name(tensor) == target:
        return tensor
    outside = _outside(tensor)
    if bool(outside.any()):
        raise _does_not_fit(tensor, target, outside)
    return _cut(tensor, target)


def exact_later(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """``tensor`` in a dtype that JAX takes, and on a GPU a check of its values, which raises if one does not fit.

    Call the check after the work on the tensor has been enqueued. Then the device need not wait for the host.
    """
    import torch

    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_nested
    if not (plain and tensor.is_cuda) or (dtype := dtype_name(tensor)) not in _NARROWED:
        return tensor, None
    target = jax_dtype(tensor)
    if target == dtype:
        return tensor, None
    outside = _outside(tensor)
    some, known = outside.any().to("cpu", non_blocking=True), torch.cuda.Event()
    known.record(torch.cuda.current_stream(tensor.device))

    def check() -> None:
        known.synchronize()
        if some:
            raise _does_not_fit(tensor, target, outside)

    return _cut(tensor, target), check


def _cut(tensor: torch.Tensor, target: str) -> torch.Tensor:
    """64-bit integers as 32-bit ones, whether they fit or not."""
    import torch

    return tensor.view(torch.int64).to(getattr(torch, target), memory_format=torch.contiguous_format)


def _outside(tensor: torch.Tensor) -> torch.Tensor:
    """Which 64-bit integers do not fit 32 bits."""
    import torch

    _, low, high = _NARROWED[dtype_name(tensor)]
    # torch cannot compare uint64. As int64, what is too large for it is negative and falls below uint32's range.
    signed = tensor.view(torch.int64)
    return (signed < low) | (signed > high)


def _does_not_fit(tensor: torch.Tensor, target: str, outside: torch.Tensor) -> ValueError:
    dtype = dtype_name(tensor)
    _, low, high = _NARROWED[dtype]
    index = tuple(outside.nonzero()[0].tolist())
    return ValueError(
        f"tensor has {dtype} values that do not fit {target}, which JAX uses while its x64 mode is off: the first "
        f"is {tensor[index].item()} at index {index}, allowed are {low} to {high}; set {_ENABLE_X64} to keep "
        f"{dtype}"
    )


def _narrowed(tensor: torch.Tensor, copy: bool | None) -> torch.Tensor | None:
    """An exact 32-bit copy of 64-bit integers while JAX's x64 mode is off, None where none is needed.

    Raises:
        ValueError: a 64-bit float, a value outside the 32-bit range, or ``copy`` is False.
    """
    dtype, target = dtype_name(tensor), jax_dtype(tensor)
    if dtype == target:
        return None
    if copy is False:
        raise ValueError(
            f"tensor has dtype {dtype}, which becomes a {target} copy because JAX's x64 mode is off, but copy=False: "
            f"set {_ENABLE_X64} or allow the copy with copy=None"
        )
    return exact(tensor, target)


# --- JAX to torch ---------------------------------------------------------------------------------------------------


def check_array(array: jax.Array) -> None:
    """Raise what to_torch raises for ``array``."""
    _check_array_kind(array)
    _check_array_state(array)


def _check_array_kind(array: object) -> None:
    """Refuse everything but a concrete JAX array of an exchanged dtype."""
    import jax
    import jax.numpy as jnp

    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"array is a JAX tracer ({type(array).__name__}), which has no memory: call to_torch outside jit, grad, "
            "vmap and the other transformations"
        )
    if not isinstance(array, jax.Array):
        raise TypeError(f"array must be a jax.Array, got {type_name(array)}")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"array holds PRNG keys ({array.dtype}): exchange jax.random.key_data(array)")
    if array.dtype.name not in EXCHANGED_DTYPES:
        raise dtype_error("array", array.dtype.name)


def _check_array_state(array: jax.Array) -> None:
    import torch

    if array.is_deleted():
        raise ValueError(f"array of shape {array.shape} has been deleted, for example donated to a jitted function")
    devices: list[jax.Device] = sorted(array.sharding.device_set, key=lambda device: device.id)
    if len(devices) > 1:
        raise ValueError(
            f"array is spread over {len(devices)} devices ({array.sharding}); to_torch takes an array on one device: "
            "gather it with jax.device_put(array, jax.devices()[0]) or exchange shard.data of array.addressable_shards"
        )
    platform = devices[0].platform
    if platform not in ("cpu", "gpu", "cuda", "rocm"):
        raise NotImplementedError(
            f"array is on a {platform} device; torch takes cpu and gpu: move it with "
            'jax.device_put(array, jax.devices("cpu")[0])'
        )
    if platform != "cpu" and not torch.cuda.is_available():
        raise NotImplementedError(
            f"array is on {devices[0]}, but torch has no CUDA device here: move it with "
            'jax.device_put(array, jax.devices("cpu")[0]) or install torch for CUDA'
        )
