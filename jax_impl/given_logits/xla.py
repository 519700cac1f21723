"""The loss on given logits in plain operations: any device that XLA compiles for.

Mirror of torch_impl/given_logits/eager.py.

XLA for GPUs fuses row sums and gradient into loops over the logits, which convert to float32 on the way, so that
nothing else of their size is made; on a CPU a few rows at a time are summed. The gradient has the logits' shape and
dtype and is made element by element from them: where they are not read afterwards (a value inside jax.jit, or an
argument that was donated) XLA may write it in their place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from logitless import numerics
from logitless.jax_impl.call import Inputs, TokenSums
from logitless.jax_impl.chunk import RunningSums, capped, empty_sums, is_target, put_sums, slope
from logitless.jax_impl.slices import Index, bits, floats, for_slices, take
from logitless.spec import LossOptions

LogitRows = numerics.LogitRows[Array]


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Plain operations run on every device."""
    return None


def token_sums(inputs: Inputs, options: LossOptions, statistics: bool, block: int) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token, ``block`` logits at a time; ``inputs.hidden`` is the
    logits, [N, V]. An ignored token's row counts as zeros."""
    (all_tokens, vocab), k = inputs.hidden.shape, inputs.class_weight
    raw_dtype, dtype = inputs.hidden.dtype, inputs.accumulation_dtype

    def chunk(all_sums: TokenSums, first: Index, tokens: int) -> TokenSums:
        def rows(array: Array) -> Array:
            return array if tokens == all_tokens else take(array, first, tokens)

        r, target, valid = rows(inputs.hidden), rows(inputs.target), rows(inputs.valid)
        own = floats(jnp.take_along_axis(bits(r), target[:, None], axis=1)[:, 0], raw_dtype)
        target_logit = capped(jnp.where(valid, own, 0).astype(dtype), options)
        target_logit = jnp.where(rows(inputs.inside), target_logit, jnp.nan)
        z = jnp.where(valid[:, None], capped(r.astype(dtype), options), 0.0)
        running = RunningSums.start(target_logit, target, statistics).observe(z, 0).rescue().with_block(z, 0)
        weighted = None
        if options.label_smoothing:  # a class of weight 0 may have a logit of −inf
            weighted = (z if k is None else jnp.where(k == 0, 0.0, k * z)).sum(axis=1)
        return put_sums(all_sums, running.finish(weighted), first)

    empty = empty_sums(inputs, options.label_smoothing > 0, statistics)
    return for_slices(all_tokens, min(max(1, all_tokens), max(1, block // vocab)), chunk, empty)


def gradient(inputs: Inputs, options: LossOptions, known: LogitRows, in_place: bool) -> Array:
    """[N, V] in the logits' dtype. Where it lies is for XLA to say, asked ``in_place`` or not."""
    z = capped(inputs.hidden.astype(inputs.accumulation_dtype), options)
    dz = jnp.exp((z - known.anchor[:, None]) - known.log_total[:, None]) * known.factor[:, None]
    if known.smooth is not None:
        dz = dz - known.smooth[:, None] * (1.0 if inputs.class_weight is None else inputs.class_weight[None, :])
    if options.softcap is not None:
        dz = dz * slope(z, options)
    dz = jnp.where(is_target(inputs.target, 0, z.shape[1]), known.target[:, None], dz)
    return jnp.where(inputs.valid[:, None], dz, 0.0).astype(inputs.hidden.dtype)
