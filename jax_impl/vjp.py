"""How the chunk's two verbs become differentiable functions. Mirror of torch_impl/autograd.py.

| caller | forward | backward | flops |
| --- | --- | --- | --- |
| nothing to differentiate | sums | – | 2·N·D·V |
| mean, sum, a plan in one pass | sums and gradients | multiply by the upstream scalar, in the last cast | 6 |
| mean, sum, such a plan of the order "both" | sums and dX | the same for dX; dW and db | 8 |
| with lse as a result | sums | gradients with what arrived | 8 |
| none, log-probs, a plan that knows lse first | sums | gradients with what arrived | 8 |
| none, log-probs, a plan in one pass and one chunk (kernels) | sums, exponentials | gradients with what arrived | 6 |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from logitless import numerics
from logitless.jax_impl import checks
from logitless.jax_impl.backend import backend_named, known_gradients
from logitless.jax_impl.call import NOTHING, XP, Arrays, Call, Gradients, Inputs, Needs, Shared, TokenSums
from logitless.jax_impl.chunk import normalizer
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.residuals import Packed, Pytree, packed, unpacked
from logitless.spec import LossOptions, TokenStats, differentiable_statistics, log_prob_statistics

Tree = TypeVar("Tree")

Cotangent = Array | SymbolicZero | None
Loss = tuple[Array, TokenStats[Array] | None]
LossAndLse = tuple[Array, Array | None, TokenStats[Array] | None]
LogProbs = tuple[Array, ...]

# Nothing arrived, so no gradient is made.
NO_COTANGENTS: Arrays[Array | None] = Arrays(None, None, None, None)


class Known(NamedTuple):
    """What the backward computes the gradients from, unless the forward has computed them."""

    arrays: Arrays[Array]
    sums: TokenSums
    shared: Shared | None


class KnownLogits(NamedTuple):
    """The same of log-probabilities whose logits wait."""

    known: Known
    logits: Array


class Halves(NamedTuple):
    """What the backward of the order "both" needs: dX waits, dW and db are computed."""

    known: Known
    hidden: object
    upstream: Array | None
    """The part of the upstream scalar that the waiting dX has already."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Like:
    """An argument's shape and dtype, and the axes over which it varies. Its gradient must match."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    varying: frozenset[str]

    def cast(self, gradient: Array) -> Array:
        """The last cast of a gradient."""
        return parallel.matched(gradient.astype(self.dtype).reshape(self.shape), self.varying)


Likes = tuple[Like, Like, Like | None]
"""Of hidden, weight and bias."""


def likes_of(arrays: Arrays[Array]) -> Likes:
    """What the gradients of hidden, weight and bias must look like."""

    def like(array: Array) -> Like:
        return Like(array.shape, array.dtype, parallel.varying(array))

    return like(arrays.hidden), like(arrays.weight), None if arrays.bias is None else like(arrays.bias)


def _inputs(call: Call, arrays: Arrays[Array], shared: Shared | None = None) -> Inputs:
    """The flat arrays, and what the devices share before the first product. ``shared``: if it is known already."""
    shard, options = call.shard, call.options
    inputs = Inputs.of(arrays, options.ignore_index, shard, call.plan.turned)
    if not shard.active:
        return inputs
    if options.label_smoothing or inputs.class_weight is not None:
        inputs = inputs._replace(class_weight=shard.weights(inputs.class_weight, inputs.accumulation_dtype))
    if shared is not None:
        return inputs._replace(shared=shared)
    k, place = inputs.class_weight, shard.place(inputs.target)
    own = Shared(
        target_logit=backend_named(call.backend).own_target_logits(inputs, options),
        class_weight=None if k is None else jnp.where(place >= 0, k[jnp.maximum(place, 0)], 0.0),
        class_weight_sum=None if k is None else k.sum(),
    )
    total = shard.total(own)
    return inputs._replace(shared=total._replace(target_logit=jnp.where(inputs.inside, total.target_logit, jnp.nan)))


def values_and_needs(primals: Arrays[CustomVJPPrimal]) -> tuple[Arrays[Array], Needs]:
    """The arrays without JAX's marks, and which gradients are wanted. Raises ValueError for a constant's gradient."""
    checks.check_constants(primals)
    hidden, weight, bias = (leaf is not None and leaf.perturbed for leaf in primals[:3])
    return values_of(primals), Needs(hidden, weight, bias)


def values_of(primals: Pytree) -> Pytree:
    """The arrays without JAX's marks. They cannot be differentiated again."""
    values = jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal))
    return differentiable_once(values)


def cotangents_of(gradients: Gradients, likes: Likes, shard: Shard) -> tuple[Arrays[Array | None]]:
    """The gradients in their arguments' dtypes and shapes, None if not wanted. dX is summed over the devices."""
    if gradients.hidden is not None:
        gradients = gradients._replace(hidden=shard.reduce_hidden(gradients.hidden, likes[0].varying))
    pairs = zip(gradients, likes, strict=True)
    hidden, weight, bias = (None if g is None or like is None else like.cast(g) for g, like in pairs)
    return (Arrays(hidden, weight, bias, None),)


def arrived(cotangent: Cotangent) -> Array | None:
    """The upstream gradient, or None where it is zero. It cannot be differentiated again."""
    if cotangent is None or isinstance(cotangent, SymbolicZero):
        return None
    upstream: Array = differentiable_once(cotangent)
    return upstream


@jax.custom_jvp
def differentiable_once(arrays: Tree) -> Tree:
    """The arrays themselves. A second derivative is refused: slices of them move as bits, which have no derivative."""
    return arrays


@differentiable_once.defjvp
def _refuse_twice(_: object, __: object) -> NoReturn:
    raise NotImplementedError(
        "linear_cross_entropy and linear_log_probs can be differentiated once: got a derivative of their gradient "
        "(grad of grad, jvp of grad); a loss on full logits can be differentiated again"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def loss_output(
    options: LossOptions, statistics: bool, shape: tuple[int, ...], inputs: Inputs, sums: TokenSums, norm: Array
) -> Loss:
    """The loss and, if asked for, statistics of ``shape``; ``norm``: what the sum of the losses is multiplied by."""
    losses = numerics.losses(XP, inputs, options, sums)
    loss = losses.reshape(shape) if options.reduction == "none" else losses.sum() * norm
    if not statistics:
        return loss, None
    return loss, TokenStats(*(values.reshape(shape) for values in numerics.token_stats(XP, inputs, sums)))


def _outputs(call: Call, arrays: Arrays[Array], inputs: Inputs, sums: TokenSums, norm: Array) -> LossAndLse:
    shape = arrays.target.shape
    loss, stats = loss_output(call.options, call.statistics is True, shape, inputs, sums, norm)
    return loss, jnp.where(inputs.valid, sums.lse, 0.0).reshape(shape) if call.lse else None, stats


def loss_and_sums(
    call: Call, arrays: Arrays[Array], needs: Needs, upstream: Array | None = None
) -> tuple[LossAndLse, Known, object]:
    """(loss, lse, statistics), what gradients can be computed from anew, and those that wait, or None.

    ``upstream``: the upstream scalar where it is known already. Then 1 must arrive at the gradients that wait.
    """
    call = call.making(needs)
    inputs, backend, held = _inputs(call, arrays), backend_named(call.backend), None
    now = Needs(needs.hidden, False, False) if call.plan.order == "both" else needs
    norm = normalizer(inputs, call.options, arrays.normalizer)
    if (call.one_pass or call.holds) and any(needs):
        factor = norm if upstream is None else norm * upstream
        g = numerics.row_upstream(XP, inputs, call.options, inputs.wide(factor))
        make = backend.token_gradients if call.holds else backend.loss_gradients
        given = inputs if now == needs else inputs._replace(into=None)
        sums, held = make(given, call.options, call.plan.forward, g, now, call.statistics is True)
    else:
        sums = backend.token_sums(inputs, call.options, call.plan.forward, call.statistics)
    known = Known(arrays, sums, inputs.shared)
    if call.plan.order == "both" and held is not None:
        held = Halves(known, held, upstream)
    return _outputs(call, arrays, inputs, sums, norm), known, held


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: Call, arrays: Arrays[Array]) -> LossAndLse:
    return loss_and_sums(call, arrays, NOTHING)[0]


def loss_forward(call: Call, arrays: Arrays[Array], needs: Needs) -> tuple[LossAndLse, object]:
    """(loss, lse, statistics), and what :func:`loss_gradients` needs."""
    output, known, held = loss_and_sums(call, arrays, needs)
    return output, known if held is None else held


def _loss_forward(call: Call, primals: Arrays[CustomVJPPrimal]) -> tuple[LossAndLse, Packed]:
    arrays, needs = values_and_needs(primals)
    checks.check_tracked(call.shard, needs)
    output, kept = loss_forward(call, arrays, needs)
    return output, packed((kept, likes_of(arrays)), needs)


def _loss_backward(call: Call, residuals: Packed, cotangents: tuple[Cotangent, ...]) -> tuple[Arrays[Array | None]]:
    (kept, likes), needs = unpacked(residuals)
    upstream, g_lse = map(arrived, cotangents[:2])
    if upstream is None and g_lse is None:
        return (NO_COTANGENTS,)
    return cotangents_of(loss_gradients(call, kept, Needs(*needs), upstream, g_lse), likes, call.shard)


def loss_gradients(call: Call, kept: object, needs: Needs, upstream: Array | None, g_lse: Array | None) -> Gradients:
    """Gradients from what :func:`loss_forward` kept; of hidden, this device's share."""
    call = call.making(needs)
    backend = backend_named(call.backend)
    if isinstance(kept, Halves):
        return _halves_gradients(call, kept, needs, upstream)
    if not isinstance(kept, Known):
        assert upstream is not None  # gradients are made or begun only where lse is no result
        return backend.finish(kept, call.options, call.plan, needs, upstream)
    arrays = kept.arrays
    inputs = _inputs(call, arrays, kept.shared)
    norm = normalizer(inputs, call.options, arrays.normalizer)
    if upstream is None:
        upstream = jnp.zeros(inputs.target.shape if call.options.reduction == "none" else ())
    per_token = upstream.reshape(-1) if call.options.reduction == "none" else upstream * norm
    g = numerics.row_upstream(XP, inputs, call.options, inputs.wide(per_token))
    if g_lse is None:
        known = numerics.known_loss_rows(XP, inputs, call.options, kept.sums, g)
    else:
        h = numerics.lse_upstream(XP, inputs, call.options, inputs.wide(g_lse.reshape(-1)))
        known = numerics.known_loss_and_lse_rows(XP, inputs, call.options, kept.sums, g, h)
    return known_gradients(backend, inputs, call.options, call.plan, known, g, needs)


def _halves_gradients(call: Call, kept: Halves, needs: Needs, upstream: Array | None) -> Gradients:
    """dX from what waits, then dW and db."""
    assert upstream is not None  # as for all that waits
    hidden, known = None, kept.known
    if needs.hidden:
        first, alone = call.plan.forward, Needs(True, False, False)
        hidden = backend_named(call.backend).finish(kept.hidden, call.options, first, alone, upstream).hidden
        assert hidden is not None
        if not call.shard.active:  # the devices' shares are rounded after their sum
            hidden = hidden.astype(known.arrays.hidden.dtype)
        hidden, upstream = lax.optimization_barrier((hidden, upstream))  # their scratch is not held at once
    whole = upstream if kept.upstream is None else upstream * kept.upstream
    return loss_gradients(call, known, needs._replace(hidden=False), whole, None)._replace(hidden=hidden)


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs and entropy


def log_probs_forward(call: Call, arrays: Arrays[Array], needs: Needs) -> tuple[LogProbs, object]:
    """log_prob, the statistics of :func:`spec.log_prob_statistics`, and what :func:`log_probs_gradients` needs."""
    call = call.making(needs)
    inputs, backend, kept, logits = _inputs(call, arrays), backend_named(call.backend), None, None
    if call.holds and any(needs) and call.statistics:
        sums, logits = backend.token_logits(inputs, call.options, call.plan, call.statistics)
    elif call.holds and any(needs):
        g = numerics.row_upstream(XP, inputs, call.options, inputs.wide(jnp.ones(())))
        sums, kept = backend.token_gradients(inputs, call.options, call.plan, g, needs, False)
    else:
        sums = backend.token_sums(inputs, call.options, call.plan.forward, call.statistics)
    found = {} if sums.entropy is None else {"entropy": jnp.where(inputs.valid, sums.entropy, 0.0)}
    if call.statistics is True:
        found = numerics.token_stats(XP, inputs, sums)._asdict()
    values = (jnp.where(inputs.valid, -sums.nll, 0.0), *(found[name] for name in log_prob_statistics(call.statistics)))
    output = tuple(value.reshape(arrays.target.shape) for value in values)
    if kept is None:
        kept = Known(arrays, sums, inputs.shared)
    return output, kept if logits is None else KnownLogits(kept, logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(call: Call, arrays: Arrays[Array]) -> LogProbs:
    return log_probs_forward(call, arrays, NOTHING)[0]


def _log_probs_forward(call: Call, primals: Arrays[CustomVJPPrimal]) -> tuple[LogProbs, Packed]:
    arrays, needs = values_and_needs(primals)
    checks.check_tracked(call.shard, needs)
    output, kept = log_probs_forward(call, arrays, needs)
    return output, packed((kept, likes_of(arrays)), needs)


def _log_probs_backward(
    call: Call, residuals: Packed, cotangents: tuple[Cotangent, ...]
) -> tuple[Arrays[Array | None]]:
    (kept, likes), needs = unpacked(residuals)
    upstream = tuple(map(arrived, cotangents[: call.differentiable]))
    if all(cotangent is None for cotangent in upstream):
        return (NO_COTANGENTS,)
    return cotangents_of(log_probs_gradients(call, kept, Needs(*needs), *upstream), likes, call.shard)


def log_probs_gradients(
    call: Call, kept: object, needs: Needs, g_log_prob: Array | None, *others: Array | None
) -> Gradients:
    """Gradients from what :func:`log_probs_forward` kept; of hidden, this device's share.

    others: the upstream gradients of the statistics that have one, in their order.
    """
    call = call.making(needs)
    backend, logits = backend_named(call.backend), None
    if isinstance(kept, KnownLogits):
        kept, logits = kept
    if not isinstance(kept, Known):
        assert g_log_prob is not None  # exponentials wait only where no statistics are asked for
        return backend.finish(kept, call.options, call.plan, needs, -g_log_prob)
    inputs = _inputs(call, kept.arrays, kept.shared)

    def rows(cotangent: Array | None) -> Array:
        flat = jnp.zeros(inputs.target.shape) if cotangent is None else cotangent.reshape(-1)
        return numerics.row_upstream(XP, inputs, call.options, inputs.wide(flat))

    named = zip(differentiable_statistics(call.statistics), others, strict=True)
    g = {name: rows(cotangent) for name, cotangent in named if cotangent is not None}
    known = numerics.known_log_prob_rows(XP, inputs, call.options, kept.sums, rows(g_log_prob), g)
    if logits is not None:
        return backend.logits_gradients(inputs, call.options, call.plan, known, needs, logits)
    return known_gradients(backend, inputs, call.options, call.plan, known, known.factor, needs)


_log_probs.defvjp(_log_probs_forward, _log_probs_backward, symbolic_zeros=True)


# Compiled once for a Call and shapes, also when the caller does not use jax.jit.
loss_and_stats = jax.jit(_loss, static_argnums=0)
log_probs_and_stats = jax.jit(_log_probs, static_argnums=0)
