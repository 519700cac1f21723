"""How the chunk's two verbs become differentiable functions. Mirror of jax_impl/vjp.py.

| caller | forward | backward | flops |
| --- | --- | --- | --- |
| nothing to differentiate | sums | – | 2·N·D·V |
| mean, sum, a plan in one pass | sums and gradients | multiply by the upstream scalar, in the last cast | 6 |
| none, log-probs, a plan that knows lse first | sums | gradients with what arrived | 8 |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitless.planning import ChunkPlan
from logitless.spec import LossOptions, TokenStats
from logitless.torch_impl import eager, fused

# Backends are modules with the same functions.
MODULES: dict[str, Any] = {"eager": eager, "triton": fused}


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array."""

    options: LossOptions
    plan: ChunkPlan
    compute_dtype: torch.dtype
    """Of the products' operands: the arrays' own, or autocast's."""
    statistics: bool
    differentiate: bool
    """Whether autograd is recording."""
    backend: str
    """A key of MODULES."""


def prepare(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> eager.Inputs:
    """Flatten, mark ignored and outside ids, and bring everything to the dtypes of the computation."""
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    flat = target.reshape(-1).long()
    valid = flat != ignore_index
    inside = ~valid | ((flat >= 0) & (flat < weight.shape[0]))
    ones = torch.ones(flat.shape, dtype=accumulation, device=flat.device)
    weights = ones if token_weight is None else token_weight.reshape(-1).to(accumulation)
    return eager.Inputs(
        hidden=hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        target=flat.masked_fill(~(valid & inside), 0),
        valid=valid,
        inside=inside,
        token_weight=weights.masked_fill(~valid, 0.0),
        class_weight=None if class_weight is None else class_weight.to(accumulation),
    )


def _no_autocast(device: torch.device) -> torch.autocast:
    # The products inside choose their dtypes themselves.
    return torch.autocast(device.type, enabled=False)


def _row_upstream(inputs: eager.Inputs, options: LossOptions, upstream: Tensor) -> Tensor:
    """g_i: upstream (per token or one for all) times token weight and logit_scale; exactly 0 for an ignored token."""
    rows = upstream.to(inputs.accumulation_dtype) * inputs.token_weight * options.logit_scale
    return rows.masked_fill(~inputs.valid, 0.0)


def _needs(ctx: Any, *arguments: Tensor | None) -> eager.Needs:
    """Gradients are made in the dtype of the argument, which under autocast is not the products'."""
    wanted = zip(ctx.needs_input_grad[:3], arguments, strict=True)
    return eager.Needs(*(tensor.dtype if needed and tensor is not None else None for needed, tensor in wanted))


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The last cast: the argument's dtype and shape."""
    if gradient is None or like is None:
        return None
    return gradient.to(like.dtype).reshape(like.shape)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss and the eight statistics (or Nones), from hidden, weight, bias and what is not differentiated.

    What the forward made of the gradients waits in ctx.waiting for the upstream scalar; the first backward takes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        token_weight: Tensor | None,
        class_weight: Tensor | None,
        normalizer: Tensor | float | None,
        call: Call,
    ) -> tuple[Any, ...]:
        options, backend = call.options, MODULES[call.backend]
        ctx.call, ctx.waiting = call, None
        with _no_autocast(hidden.device):
            arrays = (hidden, weight, bias, target, token_weight, class_weight)
            inputs = prepare(*arrays, options.ignore_index, call.compute_dtype)
            norm = eager.normalizer(inputs, options, normalizer)
            needs = _needs(ctx, hidden, weight, bias)
            one_pass = call.plan.one_pass and options.separable and options.reduction != "none"
            one_pass = one_pass and backend.one_pass(call.compute_dtype)
            if call.differentiate and needs.any and one_pass:
                g = _row_upstream(inputs, options, norm)
                sums, ctx.waiting = backend.loss_gradients(inputs, options, call.plan, g, needs, call.statistics)
            else:
                sums = backend.token_sums(inputs, options, call.plan, call.statistics)
            losses = eager.losses(inputs, options, sums)
            loss = losses.reshape(target.shape) if options.reduction == "none" else losses.sum() * norm
            stats = eager.token_stats(inputs, sums) if call.statistics else (None,) * len(TokenStats._fields)
        ctx.save_for_backward(*arrays, norm, sums.target_logit, sums.anchor, sums.log_total)
        shaped = tuple(None if value is None else value.reshape(target.shape) for value in stats)
        ctx.mark_non_differentiable(*(value for value in shaped if value is not None))
        return (loss, *shaped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        call, nothing = ctx.call, (None,) * 5
        waiting, ctx.waiting = ctx.waiting, None
        saved: Any = ctx.saved_tensors
        hidden, weight, bias, target, token_weight, class_weight, norm, target_logit, anchor, log_total = saved
        arrays = hidden, weight, bias, target, token_weight, class_weight
        with _no_autocast(hidden.device):
            if waiting is not None:
                grads = waiting.finish(upstream.to(norm.dtype))
            else:  # recomputed: the per-token upstream has just arrived, or what waited is used up
                inputs = prepare(*arrays, call.options.ignore_index, call.compute_dtype)
                per_token = upstream.reshape(-1).to(norm.dtype) if call.options.reduction == "none" else upstream * norm
                g = _row_upstream(inputs, call.options, per_token)
                sums = eager.TokenSums(target_logit, anchor, log_total, None, None, None, None, None)
                known = eager.known_loss_rows(inputs, call.options, sums, g)
                grads = MODULES[call.backend].known_gradients(
                    inputs, call.options, call.plan, known, g, _needs(ctx, hidden, weight, bias)
                )
            return (
                _cast(grads.hidden, hidden),
                _cast(grads.weight, weight),
                _cast(grads.bias, bias),
                *nothing,
            )


class LinearLogProbsFunction(torch.autograd.Function):
    """log p(target) and entropy (or None) per token; gradients are made when both upstream gradients have arrived."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        with _no_autocast(hidden.device):
            inputs = prepare(hidden, weight, bias, target, None, None, call.options.ignore_index, call.compute_dtype)
            sums = MODULES[call.backend].token_sums(inputs, call.options, call.plan, call.statistics)
            ignored = ~inputs.valid
            log_prob = (-sums.nll).masked_fill(ignored, 0.0).reshape(target.shape)
            entropy = None if sums.entropy is None else sums.entropy.masked_fill(ignored, 0.0).reshape(target.shape)
        ctx.call = call
        ctx.save_for_backward(
            hidden, weight, bias, target, sums.target_logit, sums.anchor, sums.log_total, sums.entropy
        )
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_log_prob: Tensor, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        hidden, weight, bias, target, target_logit, anchor, log_total, entropy = ctx.saved_tensors
        with _no_autocast(hidden.device):
            inputs = prepare(hidden, weight, bias, target, None, None, call.options.ignore_index, call.compute_dtype)
            sums = eager.TokenSums(target_logit, anchor, log_total, None, entropy, None, None, None)
            g1 = _row_upstream(inputs, call.options, g_log_prob.reshape(-1))
            g2 = None if g_entropy is None else _row_upstream(inputs, call.options, g_entropy.reshape(-1))
            known = eager.known_log_prob_rows(call.options, sums, g1, g2)
            grads = MODULES[call.backend].known_gradients(
                inputs, call.options, call.plan, known, known.factor, _needs(ctx, hidden, weight, bias)
            )
            return (
                _cast(grads.hidden, hidden),
                _cast(grads.weight, weight),
                _cast(grads.bias, bias),
                None,
                None,
            )
