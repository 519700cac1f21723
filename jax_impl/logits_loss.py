"""Cross-entropy on logits that already exist, with linear_cross_entropy's meaning. Mirror of torch_impl/logits_loss.py.

Plain operations only: XLA for GPUs fuses row sums and gradient into loops over the logits, which convert to float32 on
the way, so that nothing else of their size is made; on a CPU a few rows at a time are summed. The gradient has the
logits' shape and dtype and is made element by element from them: where they are not read afterwards (a value inside
jax.jit, or an argument that was donated) XLA may write it in their place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from logitless import spec
from logitless.jax_impl import api, vjp, xla
from logitless.spec import LossOptions, Reduction, TokenStats

# Logits that a CPU sums at a time: there XLA stores what it sums. A GPU sums what it reads, and takes all of them.
CPU_BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array: hashable, so that it is a static argument of jax.jit."""

    options: LossOptions
    statistics: bool
    block: int
    """Logits that are summed at a time."""


class Arrays(NamedTuple):
    """A call's arrays as the user gave them; None where there is none."""

    logits: Any  # [..., V]
    target: Any  # [...]
    token_weight: Any  # [...]
    class_weight: Any  # [V]
    normalizer: Any  # []


class _Rows(NamedTuple):
    """∂ loss / ∂r_ij = slope_ij (factor_i p_ij − smooth_i k_j), with ``target`` at j = y_i; [N] each."""

    factor: Array
    target: Array
    smooth: Array | None


def cross_entropy(
    logits: Array,
    target: Array,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    token_weight: Array | None = None,
    class_weight: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    normalizer: Array | float | None = None,
    backend: str | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, TokenStats]:
    """Cross-entropy of ``softmax(f(logits))`` against ``target``: :func:`linear_cross_entropy` on given logits.

    With z = logit_scale · logits, then z = softcap · tanh(z / softcap) if a softcap is given:

        ℓ_i = t_i [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + z_loss · lse_i² ]

    mean = Σ ℓ_i / Σ t_i k_{y_i} over tokens that are not ignored (or Σ ℓ_i / normalizer); 0, with a zero gradient, when
    no token counts. Arithmetic in float32 (float64 for float64); the gradient is rounded once. Its element at the
    target is −(the others' probability), never p − 1: right to the last digits as p → 1. Differentiable once, in
    reverse mode, in the logits.

    Arguments:
        logits: [..., V] bfloat16, float16, float32, or float64 where x64 is on. Under jax.jit the gradient may take
            their place in memory: where they are a value that nothing reads later, or a donated argument.
        target: [...] int32 or int64 ids in [0, V), or ignore_index. An id outside raises ValueError where it can be
            looked at without waiting (a NumPy array, a concrete array on a CPU); elsewhere that token's loss is NaN.
        backend: "xla" or None: the only one.
        the others: as for :func:`linear_cross_entropy`.
        return_stats: also return :class:`logitless.TokenStats`, without gradient.

    Returns the loss in float32 (float64 for float64 logits), or (loss, TokenStats). The gradient has logits' dtype and
    shape.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.
    """
    spec.check_backend(backend, api.BACKENDS)
    if backend == "pallas":
        raise spec.unavailable_error(backend, "a loss on given logits has no kernels", usable="xla")
    options = LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    given = {"logits": logits, "target": target, "token_weight": token_weight, "class_weight": class_weight}
    api._check_types(given, ("token_weight", "class_weight"))
    spec.check_logits(*(None if array is None else api._info(array) for array in given.values()))  # type: ignore[arg-type]
    api._check_normalizer(normalizer, reduction)
    api._check_targets(target, logits.shape[-1], ignore_index)
    arrays = Arrays(logits, target, token_weight, class_weight, normalizer)
    block = CPU_BLOCK if api._device(logits).platform == "cpu" else max(1, logits.size)
    call = Call(options, return_stats, block)
    loss, stats = _jitted(call, Arrays(*(None if a is None else api._array(a, logits.dtype) for a in arrays)))
    return (loss, stats) if return_stats else loss


# ---------------------------------------------------------------------------------------------------------------------
# The two steps


def _prepare(arrays: Arrays, options: LossOptions) -> xla.Inputs:
    """The logits stand where hidden states do; of a weight only its length V is read."""
    vocab = arrays.logits.shape[-1]
    weight = jax.ShapeDtypeStruct((vocab, 0), arrays.logits.dtype)
    logits = arrays.logits.reshape(-1, vocab)
    given = vjp.Arrays(logits, weight, None, arrays.target, arrays.token_weight, arrays.class_weight, None)
    return vjp.prepare(given, options.ignore_index)


def _sums(inputs: xla.Inputs, call: Call) -> xla.TokenSums:
    """lse, nll and, if asked for, statistics of every token; an ignored token's row counts as zeros."""
    options, (all_tokens, vocab), k = call.options, inputs.hidden.shape, inputs.class_weight
    raw_dtype, dtype = inputs.hidden.dtype, inputs.accumulation_dtype

    def chunk(all_sums: xla.TokenSums, first: Any, tokens: int) -> xla.TokenSums:
        def rows(array: Array) -> Array:
            return array if tokens == all_tokens else xla._take(array, first, tokens)

        r, target, valid = rows(inputs.hidden), rows(inputs.target), rows(inputs.valid)
        given = xla._floats(jnp.take_along_axis(xla._bits(r), target[:, None], axis=1)[:, 0], raw_dtype)
        target_logit = xla._capped(jnp.where(valid, given, 0).astype(dtype), options)
        target_logit = jnp.where(rows(inputs.inside), target_logit, jnp.nan)
        z = jnp.where(valid[:, None], xla._capped(r.astype(dtype), options), 0.0)
        running = xla._RunningSums.start(target_logit, target, call.statistics).observe(z, 0).rescue()
        running, _ = running.exponentiate(z, 0)
        weighted = None
        if options.label_smoothing:  # a class of weight 0 may have a logit of −inf
            weighted = (z if k is None else jnp.where(k == 0, 0.0, k * z)).sum(axis=1)
        return xla._put_sums(all_sums, running.finish(weighted), first)

    empty = xla._empty_sums(inputs, options.label_smoothing > 0, call.statistics)
    return xla._for_slices(all_tokens, min(max(1, all_tokens), max(1, call.block // vocab)), chunk, empty)


def _rows(inputs: xla.Inputs, options: LossOptions, sums: xla.TokenSums, g: Array) -> _Rows:
    """The rows of the gradient.

    The target's element has 1 − p = −expm1(−nll), the other exponentials' share: p − 1 would cancel as p → 1.
    """
    k_y, smooth = inputs.target_class_weight(), options.label_smoothing / inputs.weight.shape[0]
    beta = (1.0 - options.label_smoothing) * k_y
    rest = smooth * inputs.class_weight_sum() + 2.0 * options.z_loss * sums.lse
    p, q = jnp.exp(-sums.nll), -jnp.expm1(-sums.nll)
    target = xla._sloped(g * (rest * p - beta * q - smooth * k_y), sums.target_logit, options)
    return _Rows(g * (beta + rest), target, g * smooth if smooth else None)


def _gradient(inputs: xla.Inputs, options: LossOptions, sums: xla.TokenSums, known: _Rows) -> Array:
    """[N, V] in the logits' dtype."""
    z = xla._capped(inputs.hidden.astype(inputs.accumulation_dtype), options)
    dz = jnp.exp((z - sums.anchor[:, None]) - sums.log_total[:, None]) * known.factor[:, None]
    if known.smooth is not None:
        dz = dz - known.smooth[:, None] * (1.0 if inputs.class_weight is None else inputs.class_weight)
    if options.softcap is not None:
        dz = dz * xla._slope(z, options)
    dz = jnp.where(xla._is_target(inputs.target, 0, z.shape[1]), known.target[:, None], dz)
    return jnp.where(inputs.valid[:, None], dz, 0.0).astype(inputs.hidden.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Differentiable


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: Call, arrays: Arrays) -> tuple[Array, TokenStats | None]:
    return _loss_and_sums(call, arrays)[0]


def _loss_and_sums(call: Call, arrays: Arrays) -> tuple[tuple[Array, TokenStats | None], xla.TokenSums]:
    options, shape = call.options, arrays.target.shape
    inputs = _prepare(arrays, options)
    sums = _sums(inputs, call)
    losses = xla.losses(inputs, options, sums)
    if options.reduction == "none":
        loss = losses.reshape(shape)
    else:
        loss = losses.sum() * xla.normalizer(inputs, options, arrays.normalizer)
    if not call.statistics:
        return (loss, None), sums
    return (loss, TokenStats(*(values.reshape(shape) for values in xla.token_stats(inputs, sums)))), sums


def _loss_forward(call: Call, primals: Arrays) -> tuple[tuple[Array, TokenStats | None], Any]:
    vjp.refuse_perturbed(primals)
    arrays = vjp._once(Arrays(*(None if leaf is None else leaf.value for leaf in primals)))
    output, sums = _loss_and_sums(call, arrays)
    return output, (
        arrays,
        sums._replace(weighted_logits=None, entropy=None, argmax=None, max_logit=None, min_logit=None),
    )


def _loss_backward(call: Call, residuals: tuple[Arrays, xla.TokenSums], cotangents: Any) -> tuple[Arrays]:
    (arrays, sums), upstream, options = residuals, cotangents[0], call.options
    if vjp._zero(upstream):
        return (Arrays(*(None,) * len(Arrays._fields)),)
    inputs = _prepare(arrays, options)
    norm = xla.normalizer(inputs, options, arrays.normalizer)
    upstream = vjp._once(upstream)
    g = vjp._row_upstream(inputs, options, upstream.reshape(-1) if options.reduction == "none" else upstream * norm)
    made = _gradient(inputs, options, sums, _rows(inputs, options, sums, g))
    return (Arrays(made.reshape(arrays.logits.shape), None, None, None, None),)


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)

# Compiled once for a Call and shapes, also when the caller does not use jax.jit.
_jitted = jax.jit(_loss, static_argnums=0)
