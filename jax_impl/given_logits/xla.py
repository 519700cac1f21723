"""The loss on given logits in plain operations: any device that XLA compiles for.

Mirror of torch_impl/given_logits/eager.py.

XLA for GPUs fuses row sums and gradient into loops over the logits, which convert to float32 on the way, so that
nothing else of their size is made; on a CPU a few rows at a time are summed. The gradient has the logits' shape and
dtype and is made element by element from them: where they are not read afterwards (a value inside jax.jit, or an
argument that was donated) XLA may write it in their place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from logitless.jax_impl import xla
from logitless.jax_impl.call import Inputs
from logitless.spec import LossOptions


class LogitRows(NamedTuple):
    """∂ loss / ∂r_ij = slope_ij (factor_i p_ij − smooth_i k_j), with ``target`` at j = y_i; [N] each.

    log p_ij = (z_ij − anchor_i) − log_total_i.
    """

    anchor: Array
    log_total: Array
    factor: Array
    target: Array
    smooth: Array | None


def logit_rows(inputs: Inputs, options: LossOptions, sums: xla.TokenSums, g: Array) -> LogitRows:
    """The rows of the gradient; g [N] as of :func:`vjp._row_upstream`.

    The target's element has 1 − p = −expm1(−nll), the other exponentials' share: p − 1 would cancel as p → 1.
    """
    k_y, smooth = inputs.target_class_weight(), options.label_smoothing / inputs.weight.shape[0]
    beta = (1.0 - options.label_smoothing) * k_y
    rest = xla.smooth_share(inputs, options) + 2.0 * options.z_loss * sums.lse
    p, q = jnp.exp(-sums.nll), -jnp.expm1(-sums.nll)
    target = xla._sloped(g * (rest * p - beta * q - smooth * k_y), sums.target_logit, options)
    return LogitRows(sums.anchor, sums.log_total, g * (beta + rest), target, g * smooth if smooth else None)


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Plain operations run on every device."""
    return None


def token_sums(inputs: Inputs, options: LossOptions, statistics: bool, block: int) -> xla.TokenSums:
    """lse, nll and, if asked for, statistics of every token, ``block`` logits at a time; ``inputs.hidden`` is the
    logits, [N, V]. An ignored token's row counts as zeros."""
    (all_tokens, vocab), k = inputs.hidden.shape, inputs.class_weight
    raw_dtype, dtype = inputs.hidden.dtype, inputs.accumulation_dtype

    def chunk(all_sums: xla.TokenSums, first: Any, tokens: int) -> xla.TokenSums:
        def rows(array: Array) -> Array:
            return array if tokens == all_tokens else xla._take(array, first, tokens)

        r, target, valid = rows(inputs.hidden), rows(inputs.target), rows(inputs.valid)
        given = xla._floats(jnp.take_along_axis(xla._bits(r), target[:, None], axis=1)[:, 0], raw_dtype)
        target_logit = xla._capped(jnp.where(valid, given, 0).astype(dtype), options)
        target_logit = jnp.where(rows(inputs.inside), target_logit, jnp.nan)
        z = jnp.where(valid[:, None], xla._capped(r.astype(dtype), options), 0.0)
        running = xla._RunningSums.start(target_logit, target, statistics).observe(z, 0).rescue()
        running, _ = running.exponentiate(z, 0)
        weighted = None
        if options.label_smoothing:  # a class of weight 0 may have a logit of −inf
            weighted = (z if k is None else jnp.where(k == 0, 0.0, k * z)).sum(axis=1)
        return xla._put_sums(all_sums, running.finish(weighted), first)

    empty = xla._empty_sums(inputs, options.label_smoothing > 0, statistics)
    return xla._for_slices(all_tokens, min(max(1, all_tokens), max(1, block // vocab)), chunk, empty)


def gradient(inputs: Inputs, options: LossOptions, known: LogitRows, in_place: bool) -> Array:
    """[N, V] in the logits' dtype. Where it lies is for XLA to say, asked ``in_place`` or not."""
    z = xla._capped(inputs.hidden.astype(inputs.accumulation_dtype), options)
    dz = jnp.exp((z - known.anchor[:, None]) - known.log_total[:, None]) * known.factor[:, None]
    if known.smooth is not None:
        dz = dz - known.smooth[:, None] * (1.0 if inputs.class_weight is None else inputs.class_weight)
    if options.softcap is not None:
        dz = dz * xla._slope(z, options)
    dz = jnp.where(xla._is_target(inputs.target, 0, z.shape[1]), known.target[:, None], dz)
    return jnp.where(inputs.valid[:, None], dz, 0.0).astype(inputs.hidden.dtype)
