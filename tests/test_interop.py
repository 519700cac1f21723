"""interop.to_jax and interop.to_torch: what is shared, what is copied, what is refused, and how long memory lives."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="interop exchanges arrays between torch and jax, and jax is not installed")
torch = pytest.importorskip(
    "torch", reason="interop exchanges arrays between torch and jax, and torch is not installed"
)
jnp = jax.numpy

from logitless.interop import dlpack, lifetime, to_jax, to_torch  # noqa: E402 (it may be imported, not called, without torch)

ALIGNMENT = 64
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")  # only with x64
SHARED_DTYPES = tuple(dtype for dtype in dlpack.EXCHANGED_DTYPES if dtype not in WIDE_DTYPES)

# NaNs with payloads and signs, quiet and signalling; infinities, minus zero, subnormals. Bits, as unsigned integers.
SPECIAL_BITS = {
    "float32": (0x7FC00001, 0x7FA00001, 0xFFFFFFFF, 0xFF812345, 0x7F800000, 0x80000000, 0x00000001),
    "float64": (0x7FF8000000000001, 0x7FF4000000000001, 0xFFFFFFFFFFFFFFFF, 0xFFF0000000000000, 1 << 63, 1),
}
SPECIAL_BITS["complex64"] = SPECIAL_BITS["float32"] + (0x3F800000,)
SPECIAL_BITS["complex128"] = SPECIAL_BITS["float64"]


def x64_for(dtype: str) -> AbstractContextManager[Any]:
    return jax.enable_x64(True) if dtype in WIDE_DTYPES else nullcontext()


def itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def tensor_from_bytes(raw: bytes, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Any:
    """A tensor of exactly these bytes that starts ``offset`` bytes past a 64-byte boundary."""
    buffer = torch.empty(len(raw) + 2 * ALIGNMENT, dtype=torch.uint8)
    start = -buffer.data_ptr() % ALIGNMENT + offset
    part = buffer[start : start + len(raw)]
    part.copy_(torch.from_numpy(np.frombuffer(raw, np.uint8).copy()))
    return part.view(getattr(torch, dtype)).reshape(shape)


def ramp(shape: tuple[int, ...], dtype: str = "float32", offset: int = 0) -> Any:
    """0, 1, 2, … (bool: 0, 1, 0, 1, …), at a known alignment."""
    count = math.prod(shape)
    values = torch.arange(count) % 2 if dtype == "bool" else torch.arange(count) % 100
    values = values.to(getattr(torch, dtype))
    return tensor_from_bytes(tensor_bytes(values), dtype, shape, offset)


def tensor_bytes(tensor: Any) -> bytes:
    """The elements' bytes in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def array_bytes(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def array_address(array: Any) -> int:
    return int(array.unsafe_buffer_pointer())


class TestSharedMemory:
    """Every claim of zero copy, as an equality of addresses."""

    @pytest.mark.parametrize("dtype", dlpack.EXCHANGED_DTYPES)
    @pytest.mark.parametrize("copy", [None, False])
    def test_to_jax_shares_every_dtype(self, dtype: str, copy: bool | None) -> None:
        tensor = ramp((3, 5), dtype)
        with x64_for(dtype):
            array = to_jax(tensor, copy=copy)
        assert array_address(array) == tensor.data_ptr()
        assert array.dtype.name == dtype
        assert array.shape == (3, 5)
        assert array_bytes(array) == tensor_bytes(tensor)

    @pytest.mark.parametrize("dtype", dlpack.EXCHANGED_DTYPES)
    @pytest.mark.parametrize("copy", [None, False])
    def test_to_torch_shares_every_dtype(self, dtype: str, copy: bool | None) -> None:
        with x64_for(dtype):
            array = jnp.asarray(np.arange(15).reshape(3, 5) % 2).astype(dtype)
            tensor = to_torch(array, copy=copy)
        assert tensor.data_ptr() == array_address(array)
        assert tensor.dtype == getattr(torch, dtype)
        assert tuple(tensor.shape) == (3, 5)
        assert not tensor.requires_grad
        assert tensor_bytes(tensor) == array_bytes(array)

    @pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
    def test_wide_array_leaves_jax_whole_after_x64_is_off_again(self, dtype: str) -> None:
        with jax.enable_x64(True):
            array = jnp.asarray([2**40 + 1, 3], dtype=dtype)
        for copy in (None, True):
            assert to_torch(array, copy=copy).tolist() == [2**40 + 1, 3]

    def test_there_and_back_is_the_same_memory(self) -> None:
        tensor = ramp((4, 6))
        back = to_torch(to_jax(tensor))
        assert back.data_ptr() == tensor.data_ptr()
        assert back.stride() == tensor.stride()

    @pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
    def test_every_order_of_the_axes_is_shared_both_ways(self, axes: tuple[int, ...]) -> None:
        tensor = ramp((2, 3, 4)).permute(axes)
        array = to_jax(tensor, copy=False)
        assert array_address(array) == tensor.data_ptr()
        assert array_bytes(array) == tensor_bytes(tensor)
        back = to_torch(array, copy=False)
        assert back.data_ptr() == tensor.data_ptr()
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)

    def test_channels_last_is_shared(self) -> None:
        tensor = ramp((2, 3, 4, 5)).permute(0, 3, 1, 2)
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        array = to_jax(tensor, copy=False)
        assert array_address(array) == tensor.data_ptr()
        assert array_bytes(array) == tensor_bytes(tensor)

    def test_leading_slice_is_shared(self) -> None:
        tensor = ramp((8, 16))[2:5]  # 2 rows of 64 bytes on: still on a boundary
        assert array_address(to_jax(tensor, copy=False)) == tensor.data_ptr()

    @pytest.mark.parametrize("make", [lambda: torch.nn.Parameter(ramp((2, 8))).detach(), lambda: frozen_parameter()])
    def test_parameters_are_shared_once_without_gradient(self, make: Callable[[], Any]) -> None:
        parameter = make()
        assert array_address(to_jax(parameter, copy=False)) == parameter.data_ptr()

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
    def test_single_elements_are_shared(self, shape: tuple[int, ...]) -> None:
        tensor = ramp((1,)).reshape(shape) + 7
        array = to_jax(tensor, copy=False)
        assert array_address(array) == tensor.data_ptr()
        assert array.shape == shape
        assert float(array.reshape(())) == 7.0
        back = to_torch(array)
        assert tuple(back.shape) == shape
        assert back.data_ptr() == tensor.data_ptr()

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
    @pytest.mark.parametrize("copy", [None, False, True])
    def test_empty_arrays_pass_both_ways(self, shape: tuple[int, ...], copy: bool | None) -> None:
        array = to_jax(torch.empty(shape, dtype=torch.bfloat16), copy=copy)
        assert (array.shape, array.dtype.name) == (shape, "bfloat16")
        tensor = to_torch(array, copy=copy)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.bfloat16)

    def test_empty_view_at_any_address_and_stride_passes(self) -> None:
        for empty in (ramp((4, 8))[3:3, 1:], ramp((4, 8))[:, 1:1], ramp((8,))[3:3], ramp((1, 4))[:0].expand(0, 4)):
            assert to_jax(empty, copy=False).shape == tuple(empty.shape)

    def test_writes_show_on_the_other_side(self) -> None:
        """As documented: an alias shows writes, even where JAX takes an array to be immutable."""
        tensor = ramp((4,))
        array = to_jax(tensor)
        tensor[0] = 42
        assert np.asarray(array)[0] == 42
        source = jnp.arange(4.0) + 0
        to_torch(source)[0] = 42
        assert np.asarray(source)[0] == 42


def frozen_parameter() -> Any:
    return torch.nn.Parameter(ramp((2, 8)), requires_grad=False)


class TestBits:
    """Every bit arrives unchanged."""

    @pytest.mark.parametrize("dtype", [dtype for dtype in SHARED_DTYPES if dtype != "bool" and itemsize(dtype) <= 2])
    @pytest.mark.parametrize("copy", [None, True])
    def test_every_pattern_of_the_narrow_dtypes(self, dtype: str, copy: bool | None) -> None:
        bits = 8 * itemsize(dtype)
        raw = np.arange(2**bits, dtype=f"uint{bits}").tobytes()
        array = to_jax(tensor_from_bytes(raw, dtype, (2**bits,)), copy=copy)
        assert array_bytes(array) == raw
        assert tensor_bytes(to_torch(array, copy=copy)) == raw

    @pytest.mark.parametrize("dtype", SPECIAL_BITS)
    @pytest.mark.parametrize("copy", [None, True])
    def test_nan_payloads_and_other_special_values(self, dtype: str, copy: bool | None) -> None:
        word = "uint32" if dtype in ("float32", "complex64") else "uint64"
        raw = np.array(SPECIAL_BITS[dtype], dtype=word).tobytes()
        with x64_for(dtype):
            array = to_jax(tensor_from_bytes(raw, dtype, (-1,)), copy=copy)
            assert array_bytes(array) == raw
            assert tensor_bytes(to_torch(array, copy=copy)) == raw

    @settings(max_examples=150, deadline=None)
    @given(data=st.data(), dtype=st.sampled_from(dlpack.EXCHANGED_DTYPES), copy=st.sampled_from([None, True]))
    def test_round_trip_of_any_bytes(self, data: st.DataObject, dtype: str, copy: bool | None) -> None:
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4), label="shape"))
        axes = data.draw(st.permutations(range(len(shape))), label="axes")
        offset = data.draw(st.integers(0, 2 * ALIGNMENT // itemsize(dtype) - 1), label="offset") * itemsize(dtype)
        size = math.prod(shape) * itemsize(dtype)
        raw = data.draw(st.binary(min_size=size, max_size=size), label="raw")
        if dtype == "bool":
            raw = bytes(byte & 1 for byte in raw)
        tensor = tensor_from_bytes(raw, dtype, shape, offset % ALIGNMENT).permute(axes)
        before = tensor_bytes(tensor)
        with x64_for(dtype):
            array = to_jax(tensor, copy=copy)
            back = to_torch(array, copy=copy)
        assert (array.dtype.name, array.shape) == (dtype, tuple(tensor.shape))
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert array_bytes(array) == tensor_bytes(back) == tensor_bytes(tensor) == before
        if tensor.numel():
            shared = copy is None and offset % ALIGNMENT == 0
            assert (array_address(array) == tensor.data_ptr()) is shared
            assert (back.data_ptr() == array_address(array)) is (copy is None)


class TestLayout:
    @pytest.mark.parametrize(
        "view",
        [
            pytest.param(lambda t: t[:, ::2], id="step in a row"),
            pytest.param(lambda t: t[::2], id="every other row"),
            pytest.param(lambda t: t[:, :4], id="left half"),
            pytest.param(lambda t: t[:, 1:], id="labels shifted by one"),
            pytest.param(lambda t: t[:, ::8], id="one column"),
            pytest.param(lambda t: t[:1].expand(4, 8), id="expanded"),
            pytest.param(lambda t: t[0, 0].expand(3), id="expanded from one element"),
            pytest.param(lambda t: t.as_strided((4, 8), (1, 1)), id="overlapping windows"),
            pytest.param(lambda t: t.diagonal(), id="diagonal"),
        ],
    )
    @pytest.mark.parametrize("dtype", ["float32", "int64"])  # int64 is converted, and refused all the same
    def test_views_that_leave_gaps_or_overlap_are_refused(self, view: Callable[[Any], Any], dtype: str) -> None:
        tensor = view(ramp((4, 8), dtype))
        for copy in (None, False):
            with pytest.raises(ValueError, match=r"strides .* give tensor\.contiguous\(\) or ask for copy=True"):
                to_jax(tensor, copy=copy)
        # both remedies work
        assert to_jax(tensor.contiguous()).tolist() == tensor.tolist()
        assert to_jax(tensor, copy=True).tolist() == tensor.tolist()

    @settings(max_examples=300, deadline=None)
    @given(dims=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 13)), max_size=4))
    @example(dims=[(1, 0), (4, 1)])
    @example(dims=[(4, 8), (1, 77), (8, 1)])
    @example(dims=[(2, 1), (2, 1)])
    def test_shared_exactly_when_each_element_of_one_block_is_used_once(self, dims: list[tuple[int, int]]) -> None:
        shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
        tensor = ramp((256,)).as_strided(shape, strides)
        touched = sorted(
            sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in np.ndindex(*shape)
        )
        if touched == list(range(len(touched))):
            array = to_jax(tensor, copy=False)
            assert array_address(array) == tensor.data_ptr()
            assert array.tolist() == tensor.tolist()
        else:
            with pytest.raises(ValueError, match="does not fill one block of memory"):
                to_jax(tensor)
            assert to_jax(tensor, copy=True).tolist() == tensor.tolist()


class TestCopyKeyword:
    @pytest.mark.parametrize("offset", [4, 8, 16, 32, 48, 60])
    def test_misaligned_buffer(self, offset: int) -> None:
        tensor = ramp((3, 5), offset=offset).T
        array = to_jax(tensor)
        assert array_address(array) != tensor.data_ptr()
        assert array_bytes(array) == tensor_bytes(tensor)
        with pytest.raises(ValueError, match=rf"starts {offset} bytes past a 64-byte boundary.*copy=False.*copy=None"):
            to_jax(tensor, copy=False)

    def test_copy_of_a_misaligned_buffer_is_finished_on_return(self) -> None:
        """JAX's own copy runs on in the background, and would take in what is written to the tensor afterwards."""
        tensor = ramp((1 << 24,), offset=4)
        for _ in range(3):
            tensor.fill_(1)
            array = to_jax(tensor)
            tensor.fill_(2)
            assert (np.asarray(array) == 1).all()

    @pytest.mark.parametrize("view", [lambda t: t, lambda t: t.T, lambda t: t[::2], lambda t: t[0, 0]])
    def test_true_gives_memory_of_its_own_to_jax(self, view: Callable[[Any], Any]) -> None:
        """jax.dlpack.from_dlpack(copy=True) still shares memory on the CPU (jax 0.10.2 and 0.11.2)."""
        tensor = view(ramp((4, 8)))
        expected = tensor.tolist()
        array = to_jax(tensor, copy=True)
        assert array_address(array) != tensor.data_ptr()
        assert to_torch(array).is_contiguous()
        tensor.fill_(-1)
        assert array.tolist() == expected

    def test_true_gives_memory_of_its_own_to_torch(self) -> None:
        for array in (jnp.arange(12.0).reshape(3, 4), to_jax(ramp((3, 4)).T), jnp.float32(5)):
            expected = array.tolist()
            tensor = to_torch(array, copy=True)
            assert tensor.data_ptr() != array_address(array)
            tensor.fill_(-1)
            assert array.tolist() == expected

    @pytest.mark.parametrize("copy", [0, 1, "no", np.True_])
    def test_other_values_are_refused(self, copy: Any) -> None:
        with pytest.raises(TypeError, match="copy must be None, False or True"):
            to_jax(ramp((2,)), copy=copy)
        with pytest.raises(TypeError, match="copy must be None, False or True"):
            to_torch(jnp.zeros(2), copy=copy)


class TestWideDtypesWithoutX64:
    @pytest.mark.parametrize(
        ("dtype", "target", "values"),
        [
            ("int64", "int32", [0, -100, -(2**31), 2**31 - 1]),
            ("uint64", "uint32", [0, 1, 2**31, 2**32 - 1]),
        ],
    )
    @pytest.mark.parametrize("copy", [None, True])
    def test_integers_that_fit_are_converted(self, dtype: str, target: str, values: list[int], copy: Any) -> None:
        tensor = torch.tensor(values, dtype=getattr(torch, dtype)).reshape(2, 2).T
        array = to_jax(tensor, copy=copy)
        assert array.dtype.name == target
        assert array.tolist() == tensor.tolist()
        tensor.fill_(7)
        assert array.tolist() != tensor.tolist()

    @pytest.mark.parametrize(
        ("dtype", "bad"),
        [
            ("int64", 2**31),
            ("int64", -(2**31) - 1),
            ("int64", 2**32),  # its low 32 bits are 0: a wrap would make it a valid label
            ("int64", 2**63 - 1),
            ("int64", -(2**63)),
            ("uint64", 2**32),
            ("uint64", 2**63),
            ("uint64", 2**64 - 1),
        ],
    )
    @pytest.mark.parametrize("copy", [None, True])
    def test_the_first_integer_that_does_not_fit_is_named(self, dtype: str, bad: int, copy: Any) -> None:
        values = np.arange(12, dtype=dtype).reshape(3, 4)
        values[1, 2] = bad
        values[2, 0] = np.iinfo(dtype).max
        with pytest.raises(ValueError, match=rf"{dtype} values that do not fit.* first is {bad} at index \(1, 2\)"):
            to_jax(torch.from_numpy(values), copy=copy)
        transposed = torch.from_numpy(np.ascontiguousarray(values.T)).T  # the same order, whatever the memory's
        with pytest.raises(ValueError, match=rf"first is {bad} at index \(1, 2\)"):
            to_jax(transposed, copy=copy)
        with jax.enable_x64(True):
            assert to_jax(torch.from_numpy(values)).tolist() == values.tolist()

    def test_a_single_integer_that_does_not_fit(self) -> None:
        with pytest.raises(ValueError, match=rf"first is {2**40} at index \(\)"):
            to_jax(torch.tensor(2**40))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31) - 2, -(2**31) + 2)), max_size=6))
    def test_never_a_silent_wrap(self, values: list[int]) -> None:
        tensor = torch.tensor(values, dtype=torch.int64)
        misfits = [value for value in values if not -(2**31) <= value < 2**31]
        if misfits:
            with pytest.raises(ValueError, match=rf"the first is {misfits[0]} at"):
                to_jax(tensor)
        else:
            assert to_jax(tensor).tolist() == values

    @pytest.mark.parametrize("dtype", ["int64", "uint64"])
    def test_conversion_is_a_copy_that_can_be_forbidden(self, dtype: str) -> None:
        with pytest.raises(ValueError, match=r"int32 copy because JAX's x64 mode is off, but copy=False"):
            to_jax(ramp((2,), dtype), copy=False)

    @pytest.mark.parametrize(("dtype", "target"), [("float64", "float32"), ("complex128", "complex64")])
    @pytest.mark.parametrize("copy", [None, False, True])
    def test_floats_that_would_be_rounded_are_refused(self, dtype: str, target: str, copy: Any) -> None:
        tensor = torch.tensor([1 / 3], dtype=getattr(torch, dtype))
        with pytest.raises(
            ValueError, match=rf"{dtype}, which JAX would round to {target}.*jax_enable_x64.*{target}\)"
        ):
            to_jax(tensor, copy=copy)
        assert to_jax(tensor.to(getattr(torch, target))).dtype.name == target

    def test_empty_labels_pass(self) -> None:
        assert to_jax(torch.empty(0, 3, dtype=torch.int64)).dtype.name == "int32"


class TestTensorsThatAreRefused:
    def test_requires_grad_names_detach(self) -> None:
        parameter = torch.nn.Parameter(ramp((2, 8)))
        for tensor in (parameter, parameter * 2, parameter.T):
            for copy in (None, False, True):
                with pytest.raises(ValueError, match=r"requires a gradient.*tensor\.detach\(\)"):
                    to_jax(tensor, copy=copy)

    def test_forward_mode_tangent(self) -> None:
        import torch.autograd.forward_ad as forward_ad

        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(4), torch.ones(4))
            with pytest.raises(ValueError, match="forward-mode tangent"):
                to_jax(dual)
            assert to_jax(forward_ad.unpack_dual(dual).primal).tolist() == [1.0] * 4

    def test_pending_conjugation(self) -> None:
        tensor = torch.tensor([1 + 2j]).conj()
        with pytest.raises(ValueError, match=r"resolve_conj\(\)"):
            to_jax(tensor, copy=True)
        assert to_jax(tensor.resolve_conj()).tolist() == [1 - 2j]

    def test_pending_negation(self) -> None:
        """torch exports such a tensor with the wrong sign and raises nothing."""
        tensor = torch.tensor([1 + 2j]).conj().imag
        assert tensor.is_neg()
        with pytest.raises(ValueError, match=r"resolve_neg\(\)"):
            to_jax(tensor.expand(1), copy=True)
        assert to_jax(tensor.resolve_neg()).tolist() == [-2.0]

    @pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
    @pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
    def test_other_layouts(self, convert: str) -> None:
        if convert == "to_mkldnn" and not torch.backends.mkldnn.is_available():
            pytest.skip("this torch is built without oneDNN")
        tensor = getattr(ramp((4, 8)), convert)()
        with pytest.raises(ValueError, match=r"must be strided.*\.to_dense\(\)"):
            to_jax(tensor)
        assert to_jax(tensor.to_dense()).shape == (4, 8)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", ["strided", "jagged"])
    def test_nested(self, layout: str) -> None:
        parts = [torch.zeros(2), torch.zeros(3)]
        nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
        with pytest.raises(ValueError, match=r"nested tensor.*to_padded_tensor"):
            to_jax(nested)

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_quantized(self) -> None:
        tensor = torch.quantize_per_tensor(ramp((4,)), 1.0, 0, torch.qint8)
        with pytest.raises(ValueError, match=r"quantized.*\.dequantize\(\)"):
            to_jax(tensor)

    def test_meta(self) -> None:
        with pytest.raises(ValueError, match="meta device and holds no data"):
            to_jax(torch.empty(3, device="meta"))

    def test_subclasses(self) -> None:
        class Named(torch.Tensor):
            pass

        tensor = ramp((4,)).as_subclass(Named)
        with pytest.raises(TypeError, match=r"plain torch\.Tensor.*subclass .*Named.*as_subclass"):
            to_jax(tensor)
        assert to_jax(tensor.as_subclass(torch.Tensor)).tolist() == [0, 1, 2, 3]

    def test_fake_tensor(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.zeros(4)
        with pytest.raises(TypeError, match="FakeTensor"):
            to_jax(fake)

    @pytest.mark.parametrize("detach", [False, True])
    def test_inside_torch_func_transforms(self, detach: bool) -> None:
        def function(row: Any) -> Any:
            to_jax(row.detach() if detach else row)
            return row.sum()

        for transform in (torch.func.grad, torch.func.vmap):
            with pytest.raises(ValueError, match=r"torch\.func transforms"):
                transform(function)(ramp((2, 8)))
        with pytest.raises(ValueError, match="holds no memory"):
            torch.func.functionalize(function)(ramp((2, 8)))

    def test_freed_storage(self) -> None:
        tensor = ramp((16,)).clone()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"shape \(16,\) holds no memory"):
            to_jax(tensor)

    def test_symbolic_zeros(self) -> None:
        with pytest.raises(ValueError, match="holds no memory"):
            to_jax(torch._efficientzerotensor((2, 2)))

    @pytest.mark.parametrize("dtype", ["complex32", "bits8", "float4_e2m1fn_x2", "int4", "uint3", "uint1"])
    def test_dtypes_that_only_torch_has(self, dtype: str) -> None:
        """torch exports its 1- to 7-bit integers as whole bytes and raises nothing."""
        if not hasattr(torch, dtype):
            pytest.skip(f"this torch has no {dtype}")
        tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype))
        with pytest.raises(TypeError, match=f"tensor has dtype {dtype}, .*allowed are bool, .*float8_e5m2"):
            to_jax(tensor)

    @pytest.mark.parametrize("value", [3.0, None, np.zeros(3), "text"])
    def test_other_types(self, value: Any) -> None:
        with pytest.raises(TypeError, match=rf"must be a torch\.Tensor, got .*{type(value).__name__}"):
            to_jax(value)

    def test_a_jax_array_is_not_a_tensor(self) -> None:
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
            to_jax(jnp.zeros(3))

    def test_devices_that_jax_does_not_take(self) -> None:
        with pytest.raises(NotImplementedError, match=r"tensor is on mps:0.*\.cpu\(\)"):
            dlpack._check_tensor_device(types.SimpleNamespace(device=torch.device("mps:0")))

    def test_cuda_tensor_without_jax_for_cuda(self) -> None:
        if jax.default_backend() != "cpu":
            pytest.skip("JAX has a GPU here")
        with pytest.raises(NotImplementedError, match=r"JAX has no CUDA backend here.*\.cpu\(\)"):
            dlpack._check_tensor_device(types.SimpleNamespace(device=torch.device("cuda:0")))


class TestArraysThatAreRefused:
    @pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint, jax.eval_shape])
    def test_tracers(self, transform: Any) -> None:
        def function(x: Any) -> Any:
            to_torch(x)
            return x

        wrapped = (lambda x: jax.eval_shape(function, x)) if transform is jax.eval_shape else transform(function)
        argument = jnp.ones(2) if transform is jax.vmap else jnp.float32(1)
        if transform is jax.checkpoint:  # it traces only under a derivative
            wrapped = jax.grad(wrapped)
        with pytest.raises(TypeError, match=r"JAX tracer \(\w+\).*outside jit, grad, vmap"):
            wrapped(argument)

    def test_deleted(self) -> None:
        array = jnp.arange(3.0) + 0
        array.delete()
        with pytest.raises(ValueError, match=r"shape \(3,\) has been deleted, for example donated"):
            to_torch(array)

    def test_donated(self) -> None:
        array = jnp.arange(3.0) + 0
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        with pytest.raises(ValueError, match="deleted"):
            to_torch(array)

    def test_prng_keys(self) -> None:
        with pytest.raises(TypeError, match=r"PRNG keys.*jax\.random\.key_data"):
            to_torch(jax.random.key(0))
        assert to_torch(jax.random.key_data(jax.random.key(0))).dtype == torch.uint32

    @pytest.mark.parametrize("dtype", ["int4", "uint2", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"])
    def test_dtypes_that_only_jax_has(self, dtype: str) -> None:
        with pytest.raises(TypeError, match=f"array has dtype {dtype}, .*allowed are bool, .*float8_e5m2"):
            to_torch(jnp.zeros(4, dtype))

    @pytest.mark.parametrize("value", [3.0, None, np.zeros(3), "text"])
    def test_other_types(self, value: Any) -> None:
        with pytest.raises(TypeError, match=rf"must be a jax\.Array, got .*{type(value).__name__}"):
            to_torch(value)

    def test_things_that_only_describe_an_array(self) -> None:
        for value in (jax.ShapeDtypeStruct((2,), jnp.float32), torch.zeros(2)):
            with pytest.raises(TypeError, match=r"must be a jax\.Array"):
                to_torch(value)

    def test_sharded_and_replicated_arrays(self) -> None:
        run_python(
            """
            import jax, jax.numpy as jnp, pytest
            jax.config.update("jax_num_cpu_devices", 2)
            from jax.sharding import NamedSharding, PartitionSpec
            from logitless.interop import to_torch

            first, second = jax.devices()
            mesh = jax.make_mesh((2,), ("rows",))
            whole = jnp.arange(8.0)
            for spec in (PartitionSpec("rows"), PartitionSpec()):
                array = jax.device_put(whole, NamedSharding(mesh, spec))
                for copy in (None, False, True):
                    with pytest.raises(ValueError, match=r"over 2 devices .*jax\\.device_put.*shard\\.data"):
                        to_torch(array, copy=copy)
                # both remedies work
                assert to_torch(jax.device_put(array, first)).tolist() == whole.tolist()
                parts = [to_torch(shard.data) for shard in array.addressable_shards]
                assert parts[1].tolist() == (whole[4:] if spec else whole).tolist()
            assert to_torch(jax.device_put(whole, second)).tolist() == whole.tolist()
            """
        )

    @pytest.mark.parametrize(
        ("platform", "reason"), [("tpu", "torch takes cpu and gpu"), ("gpu", "torch has no CUDA device here")]
    )
    def test_devices_that_torch_does_not_have(self, platform: str, reason: str) -> None:
        if platform == "gpu" and torch.cuda.is_available():
            pytest.skip("torch has a GPU here")
        sharding = types.SimpleNamespace(device_set=[types.SimpleNamespace(id=0, platform=platform)])
        array = types.SimpleNamespace(is_deleted=lambda: False, sharding=sharding, shape=(3,))
        with pytest.raises(
            NotImplementedError, match=rf'{reason}.*jax\.device_put\(array, jax\.devices\("cpu"\)\[0\]\)'
        ):
            dlpack._check_array_state(array)


class Batch(NamedTuple):
    ids: Any
    extra: Any


class TestPytrees:
    def test_containers_of_every_kind_there_and_back(self) -> None:
        tree = {"a": [ramp((2, 8)), (ramp((16,), "bfloat16"),)], "b": Batch(ramp((16,), "int32"), None), "c": {}}
        arrays = to_jax(tree, copy=False)
        assert jax.tree.structure(arrays) == jax.tree.structure(tree)
        assert isinstance(arrays["b"], Batch)
        pairs = list(zip(jax.tree.leaves(arrays), jax.tree.leaves(tree), strict=True))
        assert len(pairs) == 3
        assert all(array_address(array) == tensor.data_ptr() for array, tensor in pairs)
        back = to_torch(arrays)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        assert all(
            one.data_ptr() == other.data_ptr()
            for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True)
        )

    def test_a_modules_state_dict(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        arrays = to_jax(module.state_dict())
        assert list(arrays) == list(module.state_dict())
        assert all(array_address(arrays[name]) == p.data_ptr() for name, p in module.named_parameters())
        assert arrays["1.num_batches_tracked"].dtype == jnp.int32  # int64, checked and copied
        other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        other.load_state_dict(to_torch(arrays))
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))

    def test_copies_go_through_to_every_leaf(self) -> None:
        tree = {"a": ramp((4,)), "b": [ramp((8,))[::2]]}
        arrays = to_jax(tree, copy=True)
        tree["a"].zero_()
        assert np.asarray(arrays["a"]).tolist() == [0, 1, 2, 3]
        copied = to_torch(arrays, copy=True)
        copied["a"].zero_()
        assert np.asarray(arrays["a"]).tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("leaf", "kind", "words"),
        [
            (1.5, TypeError, r"must be a torch\.Tensor, got builtins\.float"),
            (torch.ones(2, requires_grad=True), ValueError, r"requires a gradient.*\.detach\(\)"),
            (torch.tensor([2**40]), ValueError, r"int64 values that do not fit int32"),
            (torch.empty(2, device="meta"), ValueError, "meta device"),
        ],
    )
    def test_errors_name_the_place(self, leaf: Any, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=rf"at \['model'\]\[1\]: tensor {words}|at \['model'\]\[1\]: .*{words}"):
            to_jax({"model": [torch.zeros(2), leaf]})

    def test_errors_of_arrays_name_the_place(self) -> None:
        with pytest.raises(TypeError, match=r"at \['x'\]: array must be a jax\.Array, got torch\.Tensor"):
            to_torch({"x": torch.zeros(2)})
        with pytest.raises(TypeError, match=r"at \.ids: array is a JAX tracer"):
            jax.jit(lambda x: to_torch(Batch(x, None)))(1.0)

    def test_sparse_matrices_are_no_containers(self) -> None:
        from jax.experimental import sparse

        matrix = sparse.BCOO.fromdense(jnp.eye(3))
        for value in (matrix, [matrix]):
            with pytest.raises(TypeError, match=r"must be a jax\.Array, got jax\.experimental\.sparse"):
                to_torch(value)


class TestReleaseAfter:
    """The waiting thread of lifetime.py, which needs no GPU."""

    def test_memory_is_held_until_the_wait_is_over(self) -> None:
        class Memory:
            pass

        memory, passed = Memory(), threading.Event()
        alive = weakref.ref(memory)
        lifetime.release_after(passed.wait, memory)
        del memory
        time.sleep(0.05)
        gc.collect()
        assert alive() is not None
        passed.set()
        deadline = time.monotonic() + 10
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive() is None

    def test_a_lease_describes_its_memory_and_hands_it_over_when_dropped(self) -> None:
        tensor, order = ramp((4, 6), "bfloat16").t(), []
        finished = threading.Event()

        def last_use() -> Callable[[], object]:
            order.append("dropped")
            return lambda: (order.append("waited"), finished.set())

        lease = lifetime.Lease(tensor, last_use)
        interface = lease.__cuda_array_interface__
        assert interface["shape"] == (6, 4)
        assert interface["strides"] == (2, 12)  # bytes
        assert (interface["typestr"], interface["data"]) == ("<i2", (tensor.data_ptr(), False))
        assert order == []
        del lease
        assert finished.wait(10)
        assert order == ["dropped", "waited"]

    def test_a_wait_that_fails_does_not_end_the_thread(self) -> None:
        finished = threading.Event()
        lifetime.release_after(lambda: 1 / 0, None)
        lifetime.release_after(finished.set, None)
        assert finished.wait(10)

    def test_the_process_ends_after_the_waits(self) -> None:
        """A thread that is inside a framework when the interpreter ends would abort the process."""
        code = """
            import time
            from logitless.interop import lifetime

            def wait():
                time.sleep(0.5)
                print("waited", flush=True)

            class Late:
                def __del__(self):
                    lifetime.release_after(print, None)

            lifetime.release_after(wait, None)
            late = Late()
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "waited\n", "")

    def test_a_lease_that_lives_to_the_end_asks_nobody(self) -> None:
        """At the end of the interpreter, the frameworks' modules go before the lease does."""
        code = """
            import torch
            from logitless.interop import lifetime

            lease = lifetime.Lease(torch.ones(1), lambda: print("asked", torch.cuda.current_stream))
            lease.itself = lease
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    @pytest.mark.parametrize("dtype", dlpack.EXCHANGED_DTYPES)
    def test_every_dtype_is_a_view_of_its_carrier(self, dtype: str) -> None:
        """What the lease exports is integers of the same size; the dtype comes back by a view."""
        tensor = ramp((3, 4), dtype)
        carrier = {1: "int8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[tensor.element_size()]
        back = tensor.view(getattr(torch, carrier)).view(tensor.dtype)
        assert tensor_bytes(back) == tensor_bytes(tensor)
        assert np.dtype(lifetime._TYPES[tensor.element_size()]) == np.dtype(carrier)


class TestLifetime:
    """The receiver keeps the memory alive, and lets it go with its last reference."""

    def owner(self) -> Any:
        """A NumPy array on a 64-byte boundary. Both frameworks hold the object, a weak reference sees its end."""
        buffer = np.empty(4096 + ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % ALIGNMENT
        owner = buffer[start : start + 4096].view(np.float32)
        owner[:] = np.arange(1024)
        return owner

    def test_jax_keeps_the_tensor_alive(self) -> None:
        owner = self.owner()
        alive = weakref.ref(owner)
        tensor = torch.from_numpy(owner)
        array = to_jax(tensor, copy=False)
        del owner, tensor
        gc.collect()
        assert alive() is not None
        assert np.asarray(array).tolist() == list(range(1024))
        del array
        gc.collect()
        assert alive() is None

    def test_torch_keeps_the_array_alive(self) -> None:
        owner = self.owner()
        alive = weakref.ref(owner)
        array = jax.dlpack.from_dlpack(owner, copy=False)
        tensor = to_torch(array)
        view = tensor[512:]
        del owner, array, tensor
        gc.collect()
        assert alive() is not None
        assert view.tolist() == list(range(512, 1024))
        del view
        gc.collect()
        assert alive() is None

    def test_a_copy_lets_the_tensor_go(self) -> None:
        owner = self.owner()
        alive = weakref.ref(owner)
        array = to_jax(torch.from_numpy(owner), copy=True)
        del owner
        gc.collect()
        assert alive() is None
        assert np.asarray(array).tolist() == list(range(1024))

    def test_freed_memory_is_not_handed_out_again(self) -> None:
        tensor = torch.arange(1 << 16, dtype=torch.float32)
        array = to_jax(tensor, copy=False)
        del tensor
        gc.collect()
        others = [torch.full((1 << 16,), -1.0) for _ in range(20)]
        assert all(other.data_ptr() != array_address(array) for other in others)
        assert np.asarray(array).tolist() == list(range(1 << 16))

    def test_deleting_the_array_leaves_the_tensor(self) -> None:
        array = jnp.arange(1 << 16, dtype=jnp.float32) + 0
        tensor = to_torch(array)
        array.delete()
        others = [jnp.full(1 << 16, -1.0).block_until_ready() for _ in range(20)]
        assert all(array_address(other) != tensor.data_ptr() for other in others)
        assert tensor.tolist() == list(range(1 << 16))

    def test_donation_never_writes_to_shared_memory(self) -> None:
        update = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
        tensor = torch.arange(1 << 16, dtype=torch.float32)
        update(to_jax(tensor, copy=False)).block_until_ready()
        assert torch.equal(tensor, torch.arange(1 << 16))
        array = jnp.arange(1 << 16, dtype=jnp.float32) + 0
        shared = to_torch(array)
        update(array).block_until_ready()
        assert torch.equal(shared, torch.arange(1 << 16))

    def test_to_torch_waits_for_the_computation(self) -> None:
        @jax.jit
        def slow(x: Any) -> Any:
            return jax.lax.fori_loop(0, 20, lambda _, power: power @ x / 500, x)

        ones = jnp.ones((500, 500))
        slow(ones).block_until_ready()
        for copy in (None, True):
            assert bool((to_torch(slow(ones), copy=copy) == 1).all())


class TestDocumentation:
    def test_every_dtype_is_on_the_page(self) -> None:
        page = (Path(__file__).parents[1] / "docs" / "interop.md").read_text(encoding="utf-8")
        ranges = ("int16", "uint16")  # inside "int8 to int32" and "uint8 to uint32"
        assert [dtype for dtype in dlpack.EXCHANGED_DTYPES if dtype not in page and dtype not in ranges] == []


class TestCompiled:
    def test_inside_torch_compile_with_disable(self) -> None:
        """The documented way to call it from a compiled function."""
        function = torch.compiler.disable(to_jax)

        @torch.compile(backend="eager")
        def compiled(x: Any) -> Any:
            return function(x + 1)

        assert compiled(torch.zeros(3)).tolist() == [1.0] * 3


class TestImports:
    def test_importing_interop_imports_no_framework(self) -> None:
        run_python(
            """
            import sys
            import logitless.interop
            assert not {"torch", "jax"} & set(sys.modules), sorted(sys.modules)
            """
        )

    @pytest.mark.parametrize("package", ["torch", "jax"])
    @pytest.mark.parametrize("function", [to_jax, to_torch])
    def test_a_missing_framework_is_named(
        self, package: str, function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
        with pytest.raises(
            ImportError, match=rf'{function.__name__} needs {package}.*"logitless\[{package}\]"'
        ) as caught:
            function(None)
        assert caught.value.name == package

    def test_a_broken_framework_is_not_called_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> Any:
            raise ModuleNotFoundError("No module named 'jaxlib'", name="jaxlib")

        monkeypatch.setattr(dlpack.importlib, "import_module", broken)
        with pytest.raises(ModuleNotFoundError, match="jaxlib"):
            to_torch(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or jax.default_backend() != "gpu", reason="needs a GPU in both")
class TestGpu:
    def test_every_dtype_is_shared_both_ways(self) -> None:
        for dtype in dlpack.EXCHANGED_DTYPES:
            tensor = ramp((3, 5), dtype).cuda().T
            with x64_for(dtype):
                array = to_jax(tensor, copy=False)
            assert array_address(array) == tensor.data_ptr(), dtype
            assert array_bytes(array) == tensor_bytes(tensor.cpu()), dtype
            assert to_torch(array, copy=False).data_ptr() == tensor.data_ptr(), dtype


def run_python(program: str) -> None:
    """Run a program in a fresh interpreter; its assertions are ours."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
