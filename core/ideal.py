"""The ideal full-logits path of a dtype. An implementation may be at most 1.35 times as wrong as this path.

Logits and softmax are float32. The logits' gradient (with its upstream factor, up to a common scale) is rounded to the
dtype, products accumulate in float32, and results are rounded to the dtype. For "float64" nothing is rounded: then it
is a second route to the truth, by full logits, a row maximum and explicit dlogits, without the anchored algorithm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.problems import Case
from logitless.rounding import Floats, round_to


def ideal_gradients(
    case: Case, product: Callable[[Floats, Floats], Floats] = np.matmul, lse_upstream: Floats | float = 0.0
) -> dict[str, Floats]:
    """loss, dhidden, dweight and dbias of ``case`` by full logits in its dtype, as float64 NumPy arrays.

    ``product`` multiplies two matrices. Another BLAS than NumPy's sums in another order. ``lse_upstream`` [N] or a
    scalar is the upstream gradient of every token's lse.
    """
    dtype = case.problem.dtype
    real: type[np.floating] = np.float64 if dtype == "float64" else np.float32
    o, target = case.problem.options, case.target.reshape(-1)
    x = case.hidden.reshape(-1, case.problem.hidden).astype(real)
    w = case.weight.astype(real)
    vocab, index = w.shape[0], np.arange(target.size)
    valid = target != o.ignore_index
    y = np.where(valid, target, 0)
    b = np.zeros(vocab, real) if case.bias is None else case.bias.astype(real)
    k = np.ones(vocab, real) if case.class_weight is None else case.class_weight.astype(real)
    t = np.ones(target.size, real) if case.token_weight is None else case.token_weight.reshape(-1).astype(real)
    t = np.where(valid, t, 0)

    z = (product(x, w.T) + b) * real(o.logit_scale)
    slope: Floats | np.floating = real(1)
    if o.softcap is not None:
        z = real(o.softcap) * np.tanh(z / real(o.softcap))
        slope = 1 - (z / real(o.softcap)) ** 2
    highest = z.max(axis=1, keepdims=True)
    p = np.exp(z - highest)
    total = p.sum(axis=1, keepdims=True)
    lse = (highest + np.log(total))[:, 0]
    p = p / total
    smooth = real(o.label_smoothing / vocab)
    loss = (1 - real(o.label_smoothing)) * k[y] * (lse - z[index, y]) + real(o.z_loss) * lse**2
    if o.label_smoothing:
        loss = loss + smooth * np.sum(k * (lse[:, None] - z), axis=1)
    loss = np.where(valid, t * loss, 0)

    beta = (1 - real(o.label_smoothing)) * k[y]
    dz = p * (beta + smooth * k.sum() + 2 * real(o.z_loss) * lse)[:, None] - smooth * k
    dz[index, y] -= beta
    rows = np.where(valid, case.upstream_rows() * t * o.logit_scale, 0).astype(real)
    lse_rows = np.where(valid, np.broadcast_to(lse_upstream, valid.shape) * o.logit_scale, 0).astype(real)
    # In float16 the scale includes the class weights, because of its range.
    size = np.abs(beta) + abs(smooth * k.sum()) if dtype == "float16" else np.ones_like(beta)
    unit = (np.abs(rows * np.where(size > 0, size, 1)) + np.abs(lse_rows)).max(initial=0) or real(1)
    dz = dz * (rows / unit)[:, None] + p * (lse_rows / unit)[:, None]
    dz = round_to(np.where(valid[:, None], dz * slope, 0), dtype).astype(real)
    loss = case.reduce(loss.astype(np.float64))
    return {"loss": loss} | _products(dz, w, np.where(valid[:, None], x, 0), unit, case, product)


def _products(
    dz: Floats, w: Floats, x: Floats, unit: np.floating, case: Case, product: Callable[[Floats, Floats], Floats]
) -> dict[str, Floats]:
    """The gradients of ``unit`` · ``dz`` [N, V], rounded.

    A common scale costs nothing (loss scaling), so the largest factor is not rounded.
    """
    dtype = case.problem.dtype
    return {
        "dhidden": round_to(product(dz, w) * unit, dtype).astype(np.float64).reshape(case.hidden.shape),
        "dweight": round_to(product(dz.T, x) * unit, dtype).astype(np.float64),
        "dbias": round_to(dz.sum(axis=0) * unit, dtype).astype(np.float64),
    }
