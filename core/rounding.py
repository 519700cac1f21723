"""Rounding NumPy arrays to a dtype by name, bfloat16 included, without needing a package that has a bfloat16."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating]


def round_to(values: ArrayLike, dtype: str) -> Floats:
    """``values`` rounded to nearest even in ``dtype``, held in float32 (float64 for "float64"): exact to convert."""
    if dtype == "float64":
        return np.asarray(values, np.float64)
    single = np.asarray(values, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        raise ValueError(f"dtype: got {dtype!r}, allowed are bfloat16, float16, float32, float64")
    bits = np.atleast_1d(single).view(np.uint32)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    kept = np.where(np.isfinite(np.atleast_1d(single)), nearest_even, bits).astype(np.uint32)
    return kept.view(np.float32).reshape(single.shape)
