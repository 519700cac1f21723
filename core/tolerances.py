"""The one tolerance table. No test, check or benchmark has another, and nothing outside this file loosens it.

With T the float64 truth on the same inputs and B the ideal full-logits path of the dtype (:mod:`logitless.ideal`), an
implementation K passes when for each of loss, dhidden, dweight and dbias

    error(K, T) <= RATIO · error(B, T) + TINY[dtype]

error(A, T) = ‖A − T‖ / ‖T‖ over the whole array (the plain norm of A where T is zero). Of dweight it must hold over the
rows of the commonest targets as well (COMMONEST), where a trained model's gradients cancel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RATIO = 1.35

# What rounding of a different but equally good order of summation may add, where B happens to be exact.
TINY = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-5}

# Largest relative error of the target's logit gradient at any confidence, and of the loss of a confident token.
TARGET_GRADIENT = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}

# Of gradients of small random problems that the rule's ideal path is not made for, beside float64 or another call:
# what one rounding to the dtype, and one of an operand, add. Losses and values per token are float32 for every dtype.
GRADIENT = {"float64": 1e-12, "float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}

# What one rounding, and in float32 the order of a sum, may add to one element of a random problem's gradient.
ROUNDING = {"float64": 1e-13, "float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Of the losses on top of values per token, and of their gradients: what comes through a loss of many tokens has one
# rounding to the dtype, and one of its operands on the way.
ON_TOP_LOSS = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6}
ON_TOP_GRADIENT = {"float64": 1e-12, "float32": 5e-6, "float16": 1.5e-3, "bfloat16": 1e-2}

# AReaL's own table for its fused log-probabilities, absolute and relative tolerance at once: of the forward by dtype,
# of float32 with a temperature, and of float32 gradients; of a large weight gradient the absolute one alone.
AREAL = {
    "forward float32": 1e-5,
    "forward bfloat16": 2e-2,
    "forward float16": 1e-2,
    "temperature float32": 1e-5,
    "backward hidden": 1e-4,
    "backward weight": 1e-4,
    "backward weight large": 5e-4,
}

# Of dW and of its commonest targets' rows, in place of RATIO: a dW that is rounded once has at most this.
ROUNDED_ONCE = 1.1

# Between two implementations that both pass: the sum of their allowances is what they may differ by.
OUTPUTS = ("loss", "dhidden", "dweight", "dbias")
# The rows of dweight that belong to the commonest targets of a problem with the tag "trained".
COMMONEST = "dweight of the commonest targets"


def error(value: Any, truth: Any) -> float:
    """‖value − truth‖ / ‖truth‖ in float64; places where both are the same infinity count as equal, NaN never does."""
    a, b = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"value: got shape {a.shape}, allowed is the truth's {b.shape}")
    same = (a == b) & np.isinf(b)
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, a - b)
    scale = float(np.linalg.norm(np.where(same, 0.0, b)))
    return float(np.linalg.norm(difference)) / (scale if scale > 0 else 1.0)


def allowance(ideal_error: float, dtype: str) -> float:
    """The largest error that passes where the ideal path has ``ideal_error``."""
    return RATIO * ideal_error + TINY[dtype]
