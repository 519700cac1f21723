"""The loss with its gradients as values, for steps that say where and when dW is made."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless import spec
from logitless.jax_impl import checks, vjp
from logitless.jax_impl.call import (
    Arrays,
    Gradients,
    RawArrays,
    Request,
    accumulation_dtype,
    taking_wrappers,
    temperatures,
)
from logitless.jax_impl.distributed.parallel import AxisName
from logitless.jax_impl.weight_grad import steps
from logitless.jax_impl.weight_grad.deferred import DeferredWeightGrad
from logitless.planning import ChunkPlan, Preference
from logitless.spec import Reduction, TokenStats


@taking_wrappers
def linear_cross_entropy_value_and_grad(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
    upstream: Array | float = 1.0,
    accumulate_into: Array | None = None,
    defer_weight_grad: bool = False,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    token_weight: Array | None = None,
    class_weight: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Array | float = 1.0,
    normalizer: Array | float | None = None,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    shift: int = 0,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> tuple[Array | tuple[Array, TokenStats[Array]], Gradients | tuple[Array, DeferredWeightGrad]]:
    """:func:`linear_cross_entropy` and its gradients as values, with dW added to a buffer or made later.

        loss, (dhidden, dweight, dbias) = linear_cross_entropy_value_and_grad(hidden, weight, target, bias)

    This is jax.value_and_grad(linear_cross_entropy, argnums=(0, 1, 3)), times ``upstream``. Give dhidden to the rest of
    the model's backward: ``hidden, pullback = jax.vjp(model, parameters)``, then ``pullback(dhidden)``.

    PyTorch's linear_cross_entropy has ``accumulate_into`` and ``defer_weight_grad`` itself. JAX's cannot: jax.grad asks
    for dW when it asks for dhidden, as a new array. So here the gradients are results.

    Arguments:
        upstream: the gradient of what is minimised with respect to the loss, such as a loss scale: a number, or an
            array of the loss's shape. Of reduction="none" a number counts for every token.
        accumulate_into: [V, D] buffer, float32 (float64 for float64 input) or weight's dtype. In dweight's place comes
            the buffer plus dW. Donate it (``jax.jit(step, donate_argnums=...)``), and dW is added in its own memory:
            nothing of dW's size is made, for any plan. A buffer narrower than float32 takes each entry once, in one
            chunk of tokens or by slices of the vocabulary: 8·N·D·V flops where the plan is another. Plain operations
            only: the kernels add to no buffer, so backend="pallas" is refused, and None is "xla", with a warning where
            the kernels would run.
        defer_weight_grad: the gradients are (dhidden, :class:`DeferredWeightGrad`), whose ``compute(weight)`` gives
            (dweight, dbias) later, with 2·N·D·V flops more. A buffer is given to it, not here.
        return_stats: the value is (loss, TokenStats).

    The others are those of :func:`linear_cross_entropy`; the weight is [V, D]. With ``axis_name`` dhidden is complete
    and dweight is of this device's rows, each summed over the axes over which its argument does not vary; a buffer is
    this device's own and is summed over nothing.

    Takes 6·N·D·V flops for "mean" and "sum" in one pass, 8 otherwise.

    Returns (value, gradients). Gradients have each argument's dtype and shape, dbias is None without a bias.

    Raises as :func:`linear_cross_entropy`; NotImplementedError for a derivative of the results.
    """
    spec.check_flags(defer_weight_grad=defer_weight_grad)
    if defer_weight_grad and accumulate_into is not None:
        raise ValueError(
            "accumulate_into: got a buffer beside defer_weight_grad, allowed is None: give it to "
            "DeferredWeightGrad.compute"
        )
    own, number = temperatures(temperature)
    # A normalizer may be a number.
    raw: RawArrays = Arrays(
        hidden, weight, bias, target, token_weight, class_weight, normalizer, own, accumulate_into  # type: ignore[arg-type]
    )  # fmt: skip
    request = Request(
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
        logit_scale=logit_scale, softcap=softcap, temperature=number, plan=plan, memory_budget=memory_budget,
        backend=backend, statistics=return_stats, shift=shift, defers=defer_weight_grad,
    )  # fmt: skip
    arrays, call = checks.ready(raw, request, checks.shard_of(weight, axis_name, vocab, sequence_parallel))
    checks.check_upstream(upstream, reduction, arrays.target.shape)
    factor = jnp.asarray(upstream, accumulation_dtype(arrays.hidden.dtype))
    if reduction == "none":
        factor = jnp.broadcast_to(factor, arrays.target.shape)
    if not defer_weight_grad:
        made = steps.value_and_grad(call, arrays, factor)
        return made.value, made.gradients
    made, kept = steps.value_and_hidden_grad(call, arrays, factor)
    _, like, bias_like = vjp.likes_of(arrays)
    assert made.gradients.hidden is not None
    rest: Arrays[Array | None] = arrays._replace(weight=None)  # type: ignore[arg-type]
    return made.value, (made.gradients.hidden, DeferredWeightGrad(rest, kept, call, (like, bias_like)))
