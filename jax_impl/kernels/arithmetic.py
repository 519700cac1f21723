"""Arithmetic of the kernels on values in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Container

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless import spec

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


def held_of(gap: Array, dtype: DTypeLike) -> Array:
    """A logit relative to the anchor as it waits, in the bits of a 16-bit float."""
    # Rounded by being added to a number without fractions, of which the lower 16 bits are zeros.
    steps = (jnp.maximum(gap, spec.LOWEST_HELD) + spec.HELD_BELOW) * spec.HELD_STEPS + 1.5 * 2.0**23
    return lax.bitcast_convert_type(lax.bitcast_convert_type(steps, jnp.int32).astype(jnp.int16), dtype)


def gap_of(held: Array) -> tuple[Array, Array]:
    """The logit relative to the anchor, and whether it is so low that its probability is 0."""
    steps = lax.bitcast_convert_type(held, jnp.int16)
    return steps.astype(jnp.float32) * (1.0 / spec.HELD_STEPS) - spec.HELD_BELOW, steps == spec.HELD_NOTHING


def known_share(log_p: Array, has: Container[str], of: Callable[[str], Factor]) -> Array:
    """p (alpha + gamma log p + delta p): what a row whose lse is known puts in the gradient's matrix, but for the slope
    and the factor. ``of`` gives the row's number of a name. What it does not have counts as 1, 0 and 0."""
    p = jnp.exp2(log_p * LOG2E)
    if "alpha" not in has:
        return p
    coefficient = of("alpha")
    if "gamma" in has:
        coefficient = coefficient + of("gamma") * jnp.maximum(log_p, spec.LOWEST_GAP)
    if "delta" in has:
        coefficient = coefficient + of("delta") * p
    return p * coefficient


def joined(high: Array, low: Array) -> Array:
    """float32 from its upper 16 and the next 8 bits."""
    upper = lax.bitcast_convert_type(high, jnp.int16).astype(jnp.int32)
    lower = low.astype(jnp.int32) & 0xFF
    bits = lax.shift_left(upper, jnp.int32(16)) | lax.shift_left(lower, jnp.int32(8))
    return lax.bitcast_convert_type(bits, jnp.float32)


def exp(x: Array) -> Array:
    return jnp.exp2(x * LOG2E)


def expm1_below(x: Array) -> Array:
    """exp(x) − 1 for x ≤ 0, of full relative precision near 0: its series there. (A division would cost more.)"""
    near = jnp.maximum(x, -0.25)
    series = 1.0 + near * (1 / 5) * (1.0 + near * (1 / 6))
    series = near * (1.0 + near * 0.5 * (1.0 + near * (1 / 3) * (1.0 + near * 0.25 * series)))
    return jnp.where(x > -0.25, series, exp(x) - 1.0)


def log1p_below(s: Array) -> Array:
    """log(1 + s) for −1 < s ≤ 0, of full relative precision near 0: its series there."""
    near = jnp.maximum(s, -0.125)
    series = 1 / 5 - near * (1 / 6 - near * (1 / 7 - near * (1 / 8)))
    series = near * (1.0 - near * (0.5 - near * (1 / 3 - near * (0.25 - near * series))))
    return jnp.where(s > -0.125, series, jnp.log(1.0 + s))


def log1p_of_share(s: Array) -> Array:
    """log(1 + s) for 0 ≤ s ≤ 1, of full relative precision: 2 artanh(s / (2 + s))."""
    return _twice_artanh(s / (2.0 + s))


def log_of_sum(total: Array) -> Array:
    """log(total), a number of 1 to 2³², of full relative precision; of 0 it is −∞.

    A GPU's own logarithm is wrong by 2e-7 near 1. This one halves the number until it is near 1, which rounds nothing.
    """
    rest, halvings = total, jnp.float32(0.0)
    for power in (16, 8, 4, 2, 1):
        large = rest >= 2.0**power
        rest, halvings = jnp.where(large, rest * 2.0**-power, rest), jnp.where(large, halvings + power, halvings)
    large = rest > math.sqrt(2.0)
    rest, halvings = jnp.where(large, rest * 0.5, rest), jnp.where(large, halvings + 1.0, halvings)
    found = halvings * math.log(2.0) + _twice_artanh((rest - 1.0) / (rest + 1.0))
    logarithm: Array = jnp.where(total == 0.0, -math.inf, found)
    return logarithm


def _twice_artanh(f: Array) -> Array:
    """For |f| ≤ 1/3, by its series."""
    square, series = f * f, jnp.float32(1 / 17)
    for denominator in range(15, 0, -2):
        series = 1 / denominator + square * series
    twice: Array = 2.0 * f * series
    return twice
