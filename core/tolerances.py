"""The one tolerance table. No test, check or benchmark has another, and nothing outside this file loosens it.

With T the float64 truth on the same inputs and B the ideal full-logits path of the dtype (:mod:`logitless.ideal`), an
implementation K passes when for each of loss, dhidden, dweight and dbias

    error(K, T) <= RATIO · error(B, T) + TINY[dtype]

error(A, T) = ‖A − T‖ / ‖T‖ over the whole array (the plain norm of A where T is zero). Of dweight it must hold over the
rows of the commonest targets as well (COMMONEST), where a trained model's gradients cancel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

RATIO = 1.35

# What rounding of a different but equally good order of summation may add, where B happens to be exact.
TINY = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-5}

# Largest relative error of the target's logit gradient at any confidence, and of the loss of a confident token.
TARGET_GRADIENT = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}

# Gradients of small random problems, compared with float64 or another call, where the ideal path says little: one
# rounding to the dtype and one of an operand. Losses and values per token are float32 for every dtype.
GRADIENT = {"float64": 1e-12, "float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}

# One element of a random problem's gradient: one rounding, and in float32 the order of a sum.
ROUNDING = {"float64": 1e-13, "float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Losses on top of values per token, and their gradients: one rounding to the dtype and one of an operand.
ON_TOP_LOSS = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6}
ON_TOP_GRADIENT = {"float64": 1e-12, "float32": 5e-6, "float16": 1.5e-3, "bfloat16": 1e-2}

# Kernels beside plain operations of the same dtype, at the first call on a chip: wide, for what is looked for is wrong.
FIRST_CALL = {"float32": 1e-2, "float16": 3e-2, "bfloat16": 3e-2}

# AReaL's own table for its fused log-probabilities. Each number is both an absolute and a relative tolerance; for a
# large weight gradient it is absolute only.
AREAL = {
    "forward float32": 1e-5,
    "forward bfloat16": 2e-2,
    "forward float16": 1e-2,
    "temperature float32": 1e-5,
    "backward hidden": 1e-4,
    "backward weight": 1e-4,
    "backward weight large": 5e-4,
}

# Replaces RATIO for a dW that is rounded once, and for the rows of its commonest targets.
ROUNDED_ONCE = 1.1

# Relative: float32 values that several operations amplify (powers, differences of logits near 200, a training step).
CHAIN = 1e-5
# Relative: what is left where numbers a thousand times as large cancel.
CANCELLED = 1e-4
# Relative: values from logits near 200 or from float16 inputs have three digits.
THREE_DIGITS = 1e-3

# Per element: relative and absolute tolerance, as the frameworks' own assert functions take them.
ELEMENTS = {
    "the same sums": {"rtol": 1e-6, "atol": 1e-7},
    "compiled": {"rtol": 1e-5, "atol": 1e-7},
    "another order": {"rtol": 1e-5, "atol": 1e-6},
    "another size": {"rtol": 1e-5, "atol": 1e-5},
    "mapped": {"rtol": 1e-4, "atol": 1e-6},
    "long sums": {"rtol": 1e-4, "atol": 1e-5},
    "long sums bfloat16": {"rtol": 2e-2, "atol": 1e-5},
    "models in two frameworks": {"rtol": 2e-4, "atol": 2e-4},
    "bfloat16 loss": {"rtol": 1e-2, "atol": 0.0},
    "bfloat16 logits": {"rtol": 1e-2, "atol": 1e-2},
    "bfloat16 gradients": {"rtol": 1e-2, "atol": 1e-4},
    "bfloat16 products": {"rtol": 0.05, "atol": 0.1},
    "float64": {"rtol": 1e-10, "atol": 1e-12},
}
# A slope beside a quotient of float64 differences, as pytest.approx takes them.
DIFFERENCES = {"rel": 1e-5, "abs": 1e-6}

# Each for one test, named for what it compares. Errors are relative unless the name says otherwise.
BOUND = {
    # test_reference.py: explicit full logits lose log 2 beside 2^24, and p - 1 near p = 1.
    "tied float64": 1e-8,
    "confident float64": 1e-12,
    "tied float64 autograd": 1e-8,
    "confident float64 autograd": 1e-10,
    "bounds of float64, absolute": 1e-12,
    "given and own logits float64": 1e-14,
    # test_losses.py: a divergence from itself.
    "zero divergence, absolute": 1e-7,
    "policy from rounded probabilities": 2e-5,
    # Gradients in bfloat16 that two programs round in different places.
    "autocast bfloat16": 5e-3,
    "scaled backwards bfloat16": 5e-3,
    "pallas beside xla bfloat16": 6e-3,
    "full logits beside ours bfloat16": 2e-2,
    "added bfloat16": 2.0**-8,
    "block of ones bfloat16": 1e-2,
    # Of the demo's losses after a dozen updates, whose own bound is 1e-3.
    "demo": 2e-5,
    # Flops that were counted against the formula; XLA counts element-wise work as well.
    "flops": 0.02,
    "flops of XLA": 0.06,
    # A first loss is near log V.
    "first loss of the demo, absolute": 0.05,
    "first loss of a page": 0.2,
    "first loss of the sharded page": 0.05,
    "first loss of an example": 0.1,
    # Times the error of one chunk, and of rounding the truth.
    "chunks beside one, times": 1.1,
    "gather beside rounding, times": 1.05,
    # A parameter's gradient counts on the scale of the largest one's, this share of it at least.
    "share of the largest gradient": 0.01,
    # float32 training in two frameworks.
    "losses of 300 steps": 1e-5,
    "parameters after 300 steps": 1e-4,
    # A sum in two parts of 16 bits.
    "parted sum": 2.0**-16,
    # Rounding of what the command prints.
    "printed bytes": 0.005,
    "printed cost, absolute": 5e-4,
    # Two errors that another framework's bridge may change.
    "errors of one bridge": 0.2,
    # A test's own truth, from probabilities near 1 in float64.
    "quotient near one": 0.02,
    # In nats: log-probabilities from float32 sums, the mismatch of two of them, those from bfloat16 logits near 3.
    "log-probs, absolute": 1e-5,
    "mismatch of log-probs, absolute": 2e-5,
    "log-probs of bfloat16 logits, absolute": 0.1,
    # A small model one token at a time and all at once.
    "decoder bfloat16": 0.05,
    # Examples on two ranks beside one; logged numbers have four digits.
    "example on two ranks": 1e-3,
    "logged": 1e-4,
}

# Two implementations that both pass may differ by the sum of their allowances.
OUTPUTS = ("loss", "dhidden", "dweight", "dbias")
# The rows of dweight that belong to the commonest targets of a problem with the tag "trained".
COMMONEST = "dweight of the commonest targets"


def error(value: ArrayLike, truth: ArrayLike) -> float:
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
