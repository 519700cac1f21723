"""A distillation's rows and tiles in plain operations. Mirror of torch_impl/distillation/plain.py."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless.jax_impl.chunk import logits_block, slope, temperature_column, unpadded
from logitless.jax_impl.distillation.parts import Kept, Losses
from logitless.jax_impl.distillation.teachers import whole_logits
from logitless.jax_impl.slices import Index, put, take


def held_gradient(of: Losses) -> Array:
    """:meth:`RowFunctions.held_gradient`."""
    inputs = of.inputs
    return jnp.zeros((inputs.hidden.shape[0], inputs.weight.shape[0]), inputs.hidden.dtype)


def row_losses(
    of: Losses, first: Index, tokens: int, keep: bool, held: Array | None
) -> tuple[Array, list[Kept], Array | None]:
    """:meth:`RowFunctions.row_losses`."""
    inputs, options = of.inputs, of.options
    z = unpadded(whole_logits(inputs, first, tokens, options), inputs.shard.limit(), 0)
    losses, kept, slopes = zip(*(part.of_rows(z, first) for part in of.parts), strict=True)
    dz = sum(slopes[1:], slopes[0])
    if options.softcap is not None:
        dz = dz * slope(z, options, temperature_column(inputs, first, tokens))
    valid, dz = take(inputs.valid, first, tokens), unpadded(dz, inputs.shard.limit(), 0, 0.0)
    dz = jnp.where(valid[:, None], dz, 0.0).astype(inputs.hidden.dtype)
    total = jnp.where(valid, sum(losses[1:], losses[0]), 0.0)
    return total, list(kept) if keep else [], None if held is None else put(held, dz, first)


def tile_gradient(
    of: Losses, kept: list[Kept], factor: Array, x: Array, first: Index, start: Index, columns: int
) -> Array:
    """:meth:`RowFunctions.tile_gradient`."""
    inputs, options, tokens = of.inputs, of.options, x.shape[0]
    z = unpadded(logits_block(x, inputs, first, start, columns, options), inputs.shard.limit(), start)
    slopes = [part.gradient(each, z, first, start) for part, each in zip(of.parts, kept, strict=True)]
    dz = sum(slopes[1:], slopes[0])
    if options.softcap is not None:
        dz = dz * slope(z, options, temperature_column(inputs, first, tokens))
    dz = unpadded(dz * factor[:, None], inputs.shard.limit(), start, 0.0)
    return jnp.where(take(inputs.valid, first, tokens)[:, None], dz, 0.0)
