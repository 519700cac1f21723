"""The denominator of a mean over the tokens of several devices."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from logitless import spec
from logitless.jax_impl import checks
from logitless.jax_impl.call import taking_wrappers
from logitless.jax_impl.distributed.parallel import AxisName, make_shard


@taking_wrappers
def global_normalizer(
    target: Array,
    axis_name: AxisName,
    *,
    ignore_index: int = -100,
    token_weight: Array | None = None,
    class_weight: Array | None = None,
) -> Array:
    """The denominator of a mean over the tokens of all devices, for ``linear_cross_entropy(normalizer=...)``.

        Σ over the devices of axis_name of Σ_i t_i k_{y_i}, over tokens that are not ignored; 1 where none counts

    so that the sum of the devices' losses (jax.lax.psum) is the mean over all tokens, and 0 where there is none. To be
    called inside of jax.shard_map.

    Arguments:
        target: [...] ids of this device's tokens.
        axis_name: the axis or axes that the tokens are cut over.
        ignore_index: as for :func:`linear_cross_entropy`.
        token_weight: [...] floating.
        class_weight: [V] floating: all of them.

    Returns float32 (float64 where a weight is), without axes, the same on all devices. Raises ValueError for a shape
    that does not fit or an axis that is not bound.
    """
    spec.check_ignore_index(ignore_index)
    checks.check_counted(target, token_weight, class_weight)
    weights = [weight for weight in (token_weight, class_weight) if weight is not None]
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(*weights)) if weights else jnp.float32
    counts = (target != ignore_index).astype(dtype)
    if token_weight is not None:
        counts = jnp.where(target != ignore_index, token_weight, 0.0).astype(dtype)
    if class_weight is not None:
        inside = (target >= 0) & (target < class_weight.shape[0])
        counts = counts * class_weight[jnp.where(inside, target, 0)]
    make_shard(axis_name, None, False, 1)  # the axis is bound
    total, number = lax.psum((counts.sum(), (counts != 0).sum()), axis_name)
    return jnp.where(number > 0, total, jnp.ones_like(total))
