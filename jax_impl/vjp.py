"""How the chunk's two verbs become differentiable functions. Mirror of torch_impl/autograd.py.

| caller | forward | backward | flops |
| --- | --- | --- | --- |
| nothing to differentiate | sums | – | 2·N·D·V |
| mean, sum, a plan in one pass | sums and gradients | multiply by the upstream scalar, in the last cast | 6 |
| none, log-probs, a plan that knows lse first | sums | gradients with what arrived | 8 |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from logitless.jax_impl import fused, xla
from logitless.planning import ChunkPlan
from logitless.spec import LossOptions, TokenStats

# Backends are modules with the same functions.
MODULES: dict[str, Any] = {"xla": xla, "pallas": fused}


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array: hashable, so that it is a static argument of jax.jit."""

    options: LossOptions
    plan: ChunkPlan
    statistics: bool
    backend: str
    """A key of MODULES."""

    @property
    def module(self) -> Any:
        return MODULES[self.backend]

    @property
    def one_pass(self) -> bool:
        possible = self.plan.one_pass and self.options.separable and self.options.reduction != "none"
        return possible and bool(self.module.one_pass(jnp.dtype(self.plan.dtype)))


class Arrays(NamedTuple):
    """A call's arrays as the user gave them; None where there is none."""

    hidden: Any  # [..., D]
    weight: Any  # [V, D]
    bias: Any  # [V]
    target: Any  # [...]
    token_weight: Any  # [...]
    class_weight: Any  # [V]
    normalizer: Any  # []


class _Known(NamedTuple):
    """Residuals unless the gradients are made in the forward: what the backward makes them from."""

    arrays: Arrays
    sums: xla.TokenSums


def prepare(arrays: Arrays, ignore_index: int) -> xla.Inputs:
    """Flatten, mark ignored and outside ids, and bring everything to the dtypes of the computation."""
    hidden, weight = arrays.hidden, arrays.weight
    accumulation = xla.accumulation_dtype(hidden.dtype)
    flat = arrays.target.reshape(-1)
    valid = flat != ignore_index
    inside = ~valid | ((flat >= 0) & (flat < weight.shape[0]))
    weights = jnp.ones(flat.shape, accumulation)
    if arrays.token_weight is not None:
        weights = arrays.token_weight.reshape(-1).astype(accumulation)
    return xla.Inputs(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=arrays.bias,
        target=jnp.where(valid & inside, flat, 0).astype(jnp.int32),
        valid=valid,
        inside=inside,
        token_weight=jnp.where(valid, weights, 0.0),
        class_weight=None if arrays.class_weight is None else arrays.class_weight.astype(accumulation),
    )


def _row_upstream(inputs: xla.Inputs, options: LossOptions, upstream: Array) -> Array:
    """g_i: upstream (per token or one for all) times token weight and logit_scale; exactly 0 for an ignored token."""
    rows = upstream.astype(inputs.accumulation_dtype) * inputs.token_weight * options.logit_scale
    return jnp.where(inputs.valid, rows, 0.0)


def _perturbed(leaf: Any) -> bool:
    return leaf is not None and leaf.perturbed


def _values_and_needs(primals: Arrays) -> tuple[Arrays, xla.Needs]:
    """Strip the marks of what is differentiated off the arguments; a constant must not have one."""
    refuse_perturbed(primals)
    needs = xla.Needs(*(_perturbed(leaf) for leaf in primals[:3]))
    return _once(Arrays(*(None if leaf is None else leaf.value for leaf in primals))), needs


def refuse_perturbed(primals: Any) -> None:
    """Raise ValueError where a constant is differentiated."""
    for name in ("token_weight", "class_weight", "normalizer"):
        if _perturbed(getattr(primals, name)):
            raise ValueError(
                f"{name}: got an array that is differentiated, allowed is a constant: jax.lax.stop_gradient it, or "
                f"weight the losses of reduction='none' yourself"
            )


def _cotangents(gradients: xla.Gradients, arguments: Any) -> tuple[Arrays]:
    """The last cast: the argument's dtype and shape; None for what was not wanted."""

    def cast(gradient: Array | None, like: Any) -> Array | None:
        return None if gradient is None else gradient.astype(like.dtype).reshape(like.shape)

    made = [cast(gradient, like) for gradient, like in zip(gradients, arguments, strict=True)]
    hidden, weight, bias = made
    return (Arrays(hidden, weight, bias, None, None, None, None),)


def _zero(cotangent: Any) -> bool:
    return cotangent is None or isinstance(cotangent, SymbolicZero)


@jax.custom_jvp
def _once(arrays: Any) -> Any:
    """The arrays themselves, refusing a second derivative: what is made of them moves as bits, and those have none."""
    return arrays


@_once.defjvp
def _refuse_twice(_: Any, __: Any) -> Any:
    raise NotImplementedError(
        "linear_cross_entropy and linear_log_probs can be differentiated once: got a derivative of their gradient "
        "(grad of grad, jvp of grad); a loss on full logits can be differentiated again"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def _loss_output(
    call: Call, arrays: Arrays, inputs: xla.Inputs, sums: xla.TokenSums, norm: Array
) -> tuple[Array, TokenStats | None]:
    shape = arrays.target.shape
    losses = xla.losses(inputs, call.options, sums)
    loss = losses.reshape(shape) if call.options.reduction == "none" else losses.sum() * norm
    if not call.statistics:
        return loss, None
    return loss, TokenStats(*(values.reshape(shape) for values in xla.token_stats(inputs, sums)))


def _loss_from_sums(call: Call, arrays: Arrays) -> tuple[tuple[Array, TokenStats | None], xla.TokenSums]:
    inputs = prepare(arrays, call.options.ignore_index)
    norm = xla.normalizer(inputs, call.options, arrays.normalizer)
    sums = call.module.token_sums(inputs, call.options, call.plan, call.statistics)
    return _loss_output(call, arrays, inputs, sums, norm), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: Call, arrays: Arrays) -> tuple[Array, TokenStats | None]:
    return _loss_from_sums(call, arrays)[0]


def _loss_forward(call: Call, primals: Arrays) -> tuple[tuple[Array, TokenStats | None], Any]:
    arrays, needs = _values_and_needs(primals)
    like = tuple(None if leaf is None else jnp.zeros((0, *leaf.shape), leaf.dtype) for leaf in arrays[:3])
    if not (call.one_pass and any(needs)):
        output, sums = _loss_from_sums(call, arrays)
        return output, (_Known(arrays, sums), _flags(needs), like)
    inputs = prepare(arrays, call.options.ignore_index)
    norm = xla.normalizer(inputs, call.options, arrays.normalizer)
    g = _row_upstream(inputs, call.options, norm)
    sums, held = call.module.loss_gradients(inputs, call.options, call.plan, g, needs, call.statistics)
    output = _loss_output(call, arrays, inputs, sums, norm)
    return output, (held, _flags(needs), like)


def _flags(needs: xla.Needs) -> tuple[Any, ...]:
    """Which gradients are wanted, as a structure (a residual must be made of arrays): () for yes, None for no."""
    return tuple(() if needed else None for needed in needs)


def _needs(flags: tuple[Any, ...]) -> xla.Needs:
    return xla.Needs(*(flag is not None for flag in flags))


def _shapes(like: tuple[Any, ...]) -> list[Any]:
    return [None if leaf is None else jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in like]


def _loss_backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Arrays]:
    kept, flags, like = residuals
    upstream = cotangents[0]
    if _zero(upstream):
        return (Arrays(*(None,) * len(Arrays._fields)),)
    upstream = _once(upstream)
    if not isinstance(kept, _Known):
        gradients = call.module.finish(kept, call.options, call.plan, _needs(flags), upstream)
        return _cotangents(gradients, _shapes(like))
    arrays = kept.arrays
    inputs = prepare(arrays, call.options.ignore_index)
    norm = xla.normalizer(inputs, call.options, arrays.normalizer)
    per_token = upstream.reshape(-1) if call.options.reduction == "none" else upstream * norm
    g = _row_upstream(inputs, call.options, per_token)
    known = xla.known_loss_rows(inputs, call.options, kept.sums, g)
    gradients = call.module.known_gradients(inputs, call.options, call.plan, known, g, _needs(flags))
    return _cotangents(gradients, _shapes(like))


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs and entropy


def _log_probs_from_sums(call: Call, arrays: Arrays) -> tuple[tuple[Array, Array | None], xla.TokenSums]:
    inputs = prepare(arrays, call.options.ignore_index)
    sums = call.module.token_sums(inputs, call.options, call.plan, call.statistics)
    shape = arrays.target.shape
    log_prob = jnp.where(inputs.valid, -sums.nll, 0.0).reshape(shape)
    entropy = None if sums.entropy is None else jnp.where(inputs.valid, sums.entropy, 0.0).reshape(shape)
    return (log_prob, entropy), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(call: Call, arrays: Arrays) -> tuple[Array, Array | None]:
    return _log_probs_from_sums(call, arrays)[0]


def _log_probs_forward(call: Call, primals: Arrays) -> tuple[tuple[Array, Array | None], Any]:
    arrays, needs = _values_and_needs(primals)
    output, sums = _log_probs_from_sums(call, arrays)
    return output, (_Known(arrays, sums), _flags(needs))


def _log_probs_backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Arrays]:
    (arrays, sums), flags = residuals
    g_log_prob, g_entropy = cotangents
    if _zero(g_log_prob) and _zero(g_entropy):
        return (Arrays(*(None,) * len(Arrays._fields)),)
    inputs = prepare(arrays, call.options.ignore_index)

    def rows(cotangent: Any) -> Array:
        flat = jnp.zeros(inputs.target.shape) if _zero(cotangent) else _once(cotangent).reshape(-1)
        return _row_upstream(inputs, call.options, flat)

    g2 = None if _zero(g_entropy) else rows(g_entropy)
    known = xla.known_log_prob_rows(call.options, sums, rows(g_log_prob), g2)
    gradients = call.module.known_gradients(inputs, call.options, call.plan, known, known.factor, _needs(flags))
    return _cotangents(gradients, arrays[:3])


_log_probs.defvjp(_log_probs_forward, _log_probs_backward, symbolic_zeros=True)


# Compiled once for a Call and shapes, also when the caller does not use jax.jit.
loss_and_stats = jax.jit(_loss, static_argnums=0)
log_probs_and_entropy = jax.jit(_log_probs, static_argnums=0)
