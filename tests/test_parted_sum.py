"""The 24 bits of float32 that several chunks' sum of dW has between two chunks: in both frameworks the same."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from logitless.tolerances import BOUND

# A kernel's own NaN has all bits of its fraction set, so that whatever is added to it runs into the sign.
SPECIAL = (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF)
SPECIAL += (0x3F800080, 0x3F80007F, 0xBF8000FF, 0x3FFFFFFF)
COUNT = 2048


def values() -> np.ndarray[Any, Any]:
    bits = np.random.default_rng(0).integers(0, 2**32, COUNT, np.uint32)
    nan = np.isnan(bits.view(np.float32))
    bits[nan] |= np.uint32(0x00400000)  # hardware makes no other ones
    bits[: len(SPECIAL)] = SPECIAL
    return bits.view(np.float32)


def parted(value: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """The upper 16 bits and the next 8, and what they are together."""
    bits = value.view(np.uint32)
    rounded = np.where(np.isnan(value), bits, bits + np.uint32(0x80))
    return (rounded >> 16).astype(np.uint16), (rounded >> 8).astype(np.uint8), rounded & np.uint32(0xFFFFFF00)


def check(high: Any, low: Any, joined: Any) -> None:
    for made, wanted in zip((high, low, joined), parted(values()), strict=True):
        assert np.array_equal(np.asarray(made).view(wanted.dtype), wanted)


def test_it_is_as_close_as_24_bits_can_be() -> None:
    """Of the truth above: half of the last bit that is kept; NaN and infinity stay what they are."""
    given, joined = values(), parted(values())[2].view(np.float32)
    assert np.array_equal(np.isnan(given), np.isnan(joined))
    assert np.array_equal(given[np.isinf(given)], joined[np.isinf(given)])
    normal = np.isfinite(joined) & (np.abs(given) > 1e-30)
    assert np.count_nonzero(normal) > COUNT // 2
    error = np.abs(joined[normal].astype(np.float64) / given[normal] - 1)
    assert BOUND["parted sum"] / 2 < error.max() <= BOUND["parted sum"]


@pytest.mark.parametrize(("dtype", "more"), [("bfloat16", 1.003), ("float16", 1.15)])
def test_a_sum_over_many_chunks_is_as_good_as_its_last_rounding(dtype: str, more: float) -> None:
    """256 chunks: what the last rounding, to dW's dtype, adds to the error is nearly all of it."""
    parts = np.random.default_rng(1).standard_normal((256, COUNT)).astype(np.float32)
    truth, total = parts.sum(0, dtype=np.float64), np.zeros(COUNT, np.float32)
    for part in parts:
        total = parted(total + part)[2].view(np.float32)
    low = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float16
    made, once = (np.linalg.norm(value.astype(low).astype(np.float64) - truth) for value in (total, truth))
    assert made <= more * once


def test_in_jax() -> None:
    jax = pytest.importorskip("jax", reason="JAX's own kernels")
    from logitless.jax_impl.kernels import arithmetic

    jnp = jax.numpy
    high, low = arithmetic.parted(jnp.asarray(values()), jnp.bfloat16)
    check(jax.lax.bitcast_convert_type(high, jnp.uint16), low, arithmetic.joined(high, low))


def on_torch(device: str, kernel: Any) -> None:
    """What a kernel(value, high, low, joined, COUNT) makes."""
    import torch

    value = torch.from_numpy(values()).to(device)
    made = [torch.empty(COUNT, dtype=dtype, device=device) for dtype in (torch.int16, torch.int8, torch.float32)]
    kernel[1,](value, *made, COUNT, num_warps=4)
    check(*(array.cpu().numpy() for array in made))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU")
def test_in_triton() -> None:
    pytest.importorskip("torch", reason="PyTorch's kernels")
    parted_kernels = pytest.importorskip("parted_kernels", reason="triton is not installed")
    on_torch("cpu", parted_kernels.triton_kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton_kernel", "gluon_kernel"])
def test_in_triton_on_a_gpu(name: str) -> None:
    pytest.importorskip("torch", reason="PyTorch's kernels")
    parted_kernels = pytest.importorskip("parted_kernels", reason="triton is not installed")
    on_torch("cuda", getattr(parted_kernels, name))
