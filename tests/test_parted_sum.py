"""The 24 bits of float32 that several chunks' sum of dW has between two chunks: in both frameworks the same. And the 20
that it has in PyTorch where there are few chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import interpreted

from logitless.scratch import MOST_NARROW_CHUNKS
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


def parted(value: np.ndarray[Any, Any], low_bits: int = 8) -> tuple[np.ndarray[Any, Any], ...]:
    """The upper 16 bits and the next 8 or 4, and what they are together. Of 4 bits each, two neighbours are a byte."""
    bits, kept = value.view(np.uint32), 16 - low_bits
    rounded = np.where(np.isnan(value), bits, bits + np.uint32(1 << (kept - 1)))
    low = (rounded >> 8).astype(np.uint8)
    if low_bits == 4:
        low = (low[0::2] & 0xF0) | (low[1::2] >> 4)
    return (rounded >> 16).astype(np.uint16), low, rounded >> kept << kept


def check(high: Any, low: Any, joined: Any, low_bits: int = 8) -> None:
    for made, wanted in zip((high, low, joined), parted(values(), low_bits), strict=True):
        assert np.array_equal(np.asarray(made).view(wanted.dtype), wanted)


@pytest.mark.parametrize("low_bits", [8, 4])
def test_it_is_as_close_as_its_bits_can_be(low_bits: int) -> None:
    """Of the truth above: half of the last bit that is kept; NaN and infinity stay what they are."""
    given, joined = values(), parted(values(), low_bits)[2].view(np.float32)
    assert np.array_equal(np.isnan(given), np.isnan(joined))
    assert np.array_equal(given[np.isinf(given)], joined[np.isinf(given)])
    normal = np.isfinite(joined) & (np.abs(given) > 1e-30)
    assert np.count_nonzero(normal) > COUNT // 2
    error = np.abs(joined[normal].astype(np.float64) / given[normal] - 1)
    bound = BOUND["parted sum"] * 2 ** (8 - low_bits)
    assert bound / 2 < error.max() <= bound


@pytest.mark.parametrize(
    ("dtype", "low_bits", "chunks", "more"),
    [("bfloat16", 8, 256, 1.003), ("float16", 8, 256, 1.15), ("bfloat16", 4, MOST_NARROW_CHUNKS, 1.08)],
)
def test_a_sum_over_chunks_is_as_good_as_its_last_rounding(dtype: str, low_bits: int, chunks: int, more: float) -> None:
    """What the last rounding, to dW's dtype, adds to the error is nearly all of it."""
    parts = np.random.default_rng(1).standard_normal((chunks, COUNT)).astype(np.float32)
    truth, total = parts.sum(0, dtype=np.float64), np.zeros(COUNT, np.float32)
    for part in parts:
        total = parted(total + part, low_bits)[2].view(np.float32)
    low = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float16
    made, once = (np.linalg.norm(value.astype(low).astype(np.float64) - truth) for value in (total, truth))
    assert made <= more * once


def test_in_jax() -> None:
    jax = pytest.importorskip("jax", reason="JAX's own kernels")
    from logitless.jax_impl.kernels import arithmetic

    jnp = jax.numpy
    high, low = arithmetic.parted(jnp.asarray(values()), jnp.bfloat16)
    check(jax.lax.bitcast_convert_type(high, jnp.uint16), low, arithmetic.joined(high, low))


def on_torch(device: str, kernel: Any, low_bits: int, pairs: bool = False) -> tuple[Any, ...]:
    """What a kernel(value, high, low, joined, COUNT, LOW_BITS) makes; ``pairs``: it writes two neighbours at a time."""
    import torch

    value = torch.from_numpy(values()).to(device)
    sizes = ((COUNT, torch.int16), (COUNT * low_bits // 8, torch.int8), (COUNT, torch.float32))
    made = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
    high, low, joined = made
    if pairs:
        high, low = high.view(torch.int32), low.view(torch.int16) if low_bits == 8 else low
    kernel[1,](value, high, low, joined, COUNT, low_bits, num_warps=4)
    return tuple(array.cpu().numpy() for array in made)


@pytest.mark.parametrize("low_bits", [8, 4])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_in_triton(device: str, low_bits: int) -> None:
    pytest.importorskip("torch", reason="PyTorch's kernels")
    parted_kernels = pytest.importorskip("parted_kernels", reason="triton is not installed")
    check(*on_torch(device, parted_kernels.triton_kernel, low_bits), low_bits)


@pytest.mark.gpu
@pytest.mark.parametrize("low_bits", [8, 4])
def test_in_gluon_on_a_gpu(low_bits: int) -> None:
    """A sum of zeros is +0, and a NaN is the hardware's own."""
    pytest.importorskip("torch", reason="PyTorch's kernels")
    parted_kernels = pytest.importorskip("parted_kernels", reason="triton is not installed")
    value = values()
    nan, (wanted_high, wanted_low, _) = np.isnan(value), parted(values() + np.float32(0), low_bits)
    high, low, _ = on_torch("cuda", parted_kernels.gluon_kernel, low_bits, pairs=True)
    made = high.view(np.uint16)
    assert np.array_equal(made[~nan], wanted_high[~nan])
    assert np.isnan((made[nan].astype(np.uint32) << 16).view(np.float32)).all()
    same = ~nan if low_bits == 8 else ~(nan[0::2] | nan[1::2])
    assert np.array_equal(low.view(np.uint8)[same], wanted_low[same])
