"""Arithmetic of the kernels on values in registers."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

LOG2E = math.log2(math.e)
# What two of a kernel's lines of sums are in spec.CLASS_SUMS. The others have their names there.
LINES = {"sum": "s", "gap": "gap_sum"}


def tanh(t: Array) -> Array:
    """tanh in float32: an odd polynomial near 0, where 1 − e⁻²ᵗ would cancel."""
    magnitude, square = jnp.abs(t), t * t
    small = t * (
        1.0 + square * (-0.333333333 + square * (0.133333333 + square * (-0.0539682540 + square * 0.0218694885)))
    )
    decay = jnp.exp2(magnitude * (LOG2E * -2.0))
    large = (1.0 - decay) / (1.0 + decay)
    large = jnp.where(t < 0.0, -large, large)
    return jnp.where(magnitude < 0.15, small, large)


Factor = Array | float
"""One for all elements, or an array of their shape."""


def capped(z: Array, scale: Factor, cap: Factor | None) -> Array:
    """f(r): logit_scale, then softcap."""
    if not isinstance(scale, float) or scale != 1.0:
        z = z * scale
    return z if cap is None else cap * tanh(z * (1.0 / cap))


def sloped(values: Array, z: Array, cap: Factor | None) -> Array:
    """``values`` times the softcap's derivative, 1 − (z / cap)²."""
    if cap is None:
        return values
    part = z * (1.0 / cap)
    return values * (1.0 - part * part)


def parted(value: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """The upper 16 bits of float32, as ``dtype``, and the next 8, rounded.

    A NaN stays as it is: what rounding adds would run into its sign.
    """
    bits = lax.bitcast_convert_type(value, jnp.int32)
    bits = jnp.where(value == value, bits + 0x80, bits)
    high = lax.shift_right_logical(bits, jnp.int32(16)).astype(jnp.int16)
    low = lax.shift_right_logical(bits, jnp.int32(8)).astype(jnp.int8)
    return lax.bitcast_convert_type(high, dtype), low


def joined(high: Array, low: Array) -> Array:
    """float32 from its upper 16 and the next 8 bits."""
    upper = lax.bitcast_convert_type(high, jnp.int16).astype(jnp.int32)
    lower = low.astype(jnp.int32) & 0xFF
    bits = lax.shift_left(upper, jnp.int32(16)) | lax.shift_left(lower, jnp.int32(8))
    return lax.bitcast_convert_type(bits, jnp.float32)
