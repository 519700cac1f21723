"""Losses on top of per-token values: preferences, policies, distillation. Mirror of jax_impl/losses.py.

No logits are held on any side. Every loss is a few operations on what :func:`linear_log_probs` gives, but for the
distillation, which looks at whole distributions (torch_impl/distillation.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless import numerics, objectives, spec
from logitless.objectives import (
    Aggregation,
    DistillationOptions,
    DPOOptions,
    DPOStats,
    PolicyOptions,
    PolicyStats,
)
from logitless.planning import ChunkPlan, check_plan_argument
from logitless.spec import LossOptions, Reduction
from logitless.torch_impl import checks, steps
from logitless.torch_impl.api import linear_log_probs
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.call import XP, Arrays, Request
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.distillation import Distillation, DivergenceFunction, Heads
from logitless.torch_impl.kernels import first_check


def dpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reference_log_prob: Tensor,
    mask: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, DPOStats[Tensor]]:
    """Direct preference optimisation, from hidden states, without logits.

        log π(y) = Σ_t log p(y_t) over the tokens that count
        h        = β [(log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l))]
        ℓ        = −(1 − ε) log σ(h) − ε log σ(−h)                      for every pair (y_w chosen, y_l rejected)

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; ε: Mitchell 2023, "A note on DPO with noisy preferences".

    Arguments:
        hidden: [2 B, T, D]: B chosen sequences, then the B rejected ones, as TRL concatenates them.
        weight, bias: [V, D], [V]; target [2 B, T], already shifted: position t of hidden predicts target t.
        reference_log_prob: of the reference model, constant: [2 B, T] per token (``linear_log_probs`` of that model
            without gradient), or [2 B] sums over the tokens that count.
        mask: [2 B, T] of any dtype: tokens with 0 do not count; nor do those whose target is ignore_index.
        beta: β, greater than 0. label_smoothing: ε in [0, 0.5].
        reduction: "mean" or "sum" over pairs, or "none": [B].
        the others: as for :func:`linear_log_probs`.
        return_stats: also return :class:`logitless.objectives.DPOStats`, without gradient.

    Returns the loss in float32 (float64 for float64 input), or (loss, DPOStats); differentiable once in hidden, weight
    and bias. Raises as :func:`linear_log_probs`.
    """
    options = DPOOptions(beta, label_smoothing, reduction)
    spec.check_flags(return_stats=return_stats)
    checks.check_tensors(Arrays(hidden, weight, bias, target))
    target, counted = _counted(target, mask, ignore_index, hidden)
    objectives.check_pairs(checks.info(target))
    shapes = {"[2 B, T] =": tuple(target.shape), "[2 B] =": tuple(target.shape[:1])}
    reference = _constant("reference_log_prob", reference_log_prob, shapes, hidden)
    log_prob, _ = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, plan=plan,
        memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    log_sigmoid = torch.nn.functional.logsigmoid
    loss, stats = numerics.dpo(XP, options, log_prob, reference.to(log_prob.dtype), counted, log_sigmoid)
    return (loss, DPOStats(*(values.detach() for values in stats))) if return_stats else loss


def clipped_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    advantage: Tensor,
    old_log_prob: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    aggregation: Aggregation = "token_mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, PolicyStats[Tensor]]:
    """The clipped objective of PPO and GRPO with entropy bonus and KL penalty, from hidden states, without logits.

        ρ = exp(log p(y) − log p_old(y))              d = log p_ref(y) − log p(y)
        ℓ = −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) − entropy_coef · H + kl_coef · (eᵈ − d − 1)

    token_mean: Σ ℓ / number of tokens that count. sequence_mean: the mean over sequences of each one's mean over its
    tokens that count; a sequence without any is left out. Nothing counts: 0. Both differences of log-probabilities are
    cut off at ±20 nats, with no gradient beyond.

    Sources: PPO, arXiv:1707.06347, eq. 7; GRPO (sequence_mean, A from groups), arXiv:2402.03300, eq. 3; token_mean and
    clip_high, DAPO, arXiv:2503.14476; the KL estimator k3, Schulman, joschu.net/blog/kl-approx.html.

    Arguments:
        hidden: [..., T, D]; weight, bias: [V, D], [V]; target: [..., T], already shifted.
        advantage: A, constant, [..., T] or one per sequence [...]: for GRPO (r − mean) / std of the group, made by you.
        old_log_prob: [..., T], constant, of the policy that sampled; None: this policy itself (ρ = 1 with gradient).
        reference_log_prob: [..., T], constant; given exactly when kl_coef is above 0.
        mask: [..., T] of any dtype: tokens with 0 do not count; nor do those whose target is ignore_index.
        clip_low in [0, 1]; clip_high, entropy_coef and kl_coef at least 0.
        normalizer: replaces token_mean's number of tokens (Dr. GRPO's constant, the tokens of the whole batch) or
            sequence_mean's number of sequences: a number, or a constant tensor without axes.
        temperature: the sampler's, which divides what the softcap gives; the others: as for :func:`linear_log_probs`.
        return_stats: also return :class:`logitless.objectives.PolicyStats`, without gradient.

    Returns the loss in float32 (float64 for float64 input), or (loss, PolicyStats); differentiable once in hidden,
    weight and bias. Raises as :func:`linear_log_probs`.
    """
    options = PolicyOptions(clip_low, clip_high, entropy_coef, kl_coef, aggregation)
    options.check_reference(reference_log_prob is not None)
    spec.check_flags(return_stats=return_stats)
    checks.check_tensors(Arrays(hidden, weight, bias, target))
    checks.check_normalizer(normalizer, "mean", hidden.device)
    target, counted = _counted(target, mask, ignore_index, hidden)
    per_token = {"target's shape": tuple(target.shape)}
    per_sequence = {"one per sequence": tuple(target.shape[:-1])}
    advantage = _constant("advantage", advantage, per_token | per_sequence, hidden)
    if old_log_prob is not None:
        old_log_prob = _constant("old_log_prob", old_log_prob, per_token, hidden)
    if reference_log_prob is not None:
        reference_log_prob = _constant("reference_log_prob", reference_log_prob, per_token, hidden)
    log_prob, entropy = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, with_entropy=entropy_coef > 0, plan=plan, memory_budget=memory_budget,
        backend=backend,
    )  # fmt: skip

    def wide(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(log_prob.dtype)

    old, reference = wide(old_log_prob), wide(reference_log_prob)
    tokens = numerics.PolicyTokens(counted, advantage.to(log_prob.dtype), old, reference)
    losses, stats = numerics.policy_losses(XP, options, tokens, log_prob, entropy, Tensor.detach)
    loss = numerics.aggregate(XP, losses, counted.to(losses.dtype), aggregation, normalizer)
    return (loss, stats) if return_stats else loss


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    *,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Divergence between a teacher's and a student's next-token distributions, with neither side's logits held.

        p = softmax(z_teacher / τ)      q = softmax(z_student / τ)      m = β p + (1 − β) q
        ℓ = KL(p ‖ q)                                  β = 0, forward KL
            β KL(p ‖ m) + (1 − β) KL(q ‖ m)            0 < β < 1, the generalised Jensen-Shannon divergence
            KL(q ‖ p)                                  β = 1, reverse KL

    Sources: Hinton et al. 2015, arXiv:1503.02531 (its factor τ² is not applied: multiply by it if you want it); Agarwal
    et al. 2023 (GKD), arXiv:2306.13649, with β = 0 and 1 as in TRL's GKD trainer.

    Both logsumexps come first, then tiles of both sides' logits, in the forward and again in the backward:
    4·N·V·(D + D_teacher) flops, then 2·N·V·(3 D + D_teacher).

    Arguments:
        hidden, weight, bias: the student's: [..., D], [V, D], [V].
        teacher_hidden, teacher_weight, teacher_bias: [..., D_teacher], [V, D_teacher], [V], constant: never a gradient.
            Their dtype may be another than the student's. V must be the same: slice a padded vocabulary.
        mask: [...] of any dtype: tokens with 0 do not count (for labels with ignored tokens: ``labels != -100``).
        beta: β in [0, 1]. temperature: τ, greater than 0; it divides what the softcap gives.
        reduction: "mean" over the tokens that count (0 if none), "sum", or "none": [...].
        normalizer: replaces mean's denominator: a number, or a constant tensor without axes.
        logit_scale, softcap, and teacher's: of the models, as for :func:`linear_cross_entropy`.
        memory_budget: bytes of scratch beyond inputs and gradients; None: tiles of up to 2048 × 2048.
        backend: of the pass for the logsumexps, as for :func:`linear_cross_entropy`; the rest is plain operations.

    Returns the loss in float32 (float64 for float64 student input), differentiable once in hidden, weight and bias.
    Raises as :func:`linear_cross_entropy`; what is wrong with the teacher's arrays is named so.
    """
    options = DistillationOptions(
        beta, temperature, reduction, logit_scale, softcap, teacher_logit_scale, teacher_softcap
    )
    tracing.check_transforms("distillation_loss", takes_one=False)
    _check_types(hidden=hidden, weight=weight, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight)
    checks.check_normalizer(normalizer, reduction, hidden.device)
    teacher = teacher_hidden, teacher_weight
    objectives.check_sides(*map(checks.info, (hidden, weight, *teacher)))
    target = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
    target, counted = _counted(target, mask, -100, hidden)
    own, other = options.logits(teacher=False), options.logits(teacher=True)
    lse, dtype = _logsumexp(Arrays(hidden, weight, bias, target), own, memory_budget, backend)
    try:
        arrays = Arrays(*teacher, teacher_bias, target)
        teacher_lse, teacher_dtype = _logsumexp(arrays, other, memory_budget, backend)
    except (TypeError, ValueError) as error:
        raise type(error)(objectives.of_teacher(str(error))) from None
    tile = objectives.distillation_tile(
        tokens=target.numel(), hidden=hidden.shape[-1], teacher_hidden=teacher_hidden.shape[-1],
        vocab=weight.shape[0], dtype=checks.dtype_name(dtype), memory_budget=memory_budget,
    )  # fmt: skip
    call = Distillation(options.beta, own, other, dtype, teacher_dtype, tile)
    constants = (
        teacher_hidden.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )
    heads = Heads(hidden, weight, bias, *constants, target, lse, teacher_lse.to(lse.dtype))
    losses = _divergence(call, heads)
    if reduction == "mean":
        counted = counted.reshape(-1).to(losses.dtype)
        return numerics.aggregate(XP, losses, counted, "token_mean", normalizer)
    return losses.reshape(target.shape) if reduction == "none" else losses.sum()


# ---------------------------------------------------------------------------------------------------------------------
# Shared


@tracing.outside_graphs
def _divergence(call: Distillation, heads: Heads) -> Tensor:
    # Loops over tiles: a graph would hold every one of them.
    losses: Tensor = DivergenceFunction.apply(call, *heads)  # type: ignore[no-untyped-call]
    return losses


@tracing.outside_graphs
@torch.no_grad()
def _logsumexp(
    arrays: Arrays, options: LossOptions, memory_budget: int | None, backend: str | None
) -> tuple[Tensor, torch.dtype]:
    """log Σ_j exp(z_j) of every token in two parts, [2, N], 0 where it does not count; and the dtype of the products.

    The first is a logit not far below the largest: where logits are large, the sum of the parts would lose what
    divergences need, and so would parts from a logit far below the largest.
    """
    if checks.is_placed(arrays.hidden) or checks.is_placed(arrays.weight):
        raise NotImplementedError(
            "hidden, weight: got a DTensor, allowed are one device's tensors: to_local() gives them"
        )
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(None, memory_budget)
    request = Request(
        "none", -100, 0.0, 0.0, options.logit_scale, options.softcap, temperature=1.0, plan=None,
        memory_budget=memory_budget, backend=backend, statistics=False,
    )  # fmt: skip
    plain, call = first_check.checked(lambda: checks.ready(arrays, None, request))
    detached: Any = [None if array is None else array.detach() for array in plain]  # from forward mode, too
    return steps.logsumexp(Arrays(*detached), call), call.compute_dtype


def _counted(target: Tensor, mask: Tensor | None, ignore_index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The targets with ignore_index where the mask is 0, so that no work is done there; and which tokens count."""
    spec.check_ignore_index(ignore_index)
    counted = target != ignore_index
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: got {type(mask).__name__}, allowed is a torch.Tensor or None")
        objectives.check_mask(checks.info(mask), tuple(target.shape))
        if mask.device != hidden.device:
            raise ValueError(f"mask: got device {mask.device}, allowed is hidden's {hidden.device}")
        counted = counted & (mask != 0)
    return target.masked_fill(~counted, ignore_index), counted


def _check_types(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, allowed is a torch.Tensor")


def _constant(name: str, tensor: Tensor, shapes: dict[str, tuple[int, ...]], hidden: Tensor) -> Tensor:
    """A tensor of known numbers, checked."""
    _check_types(**{name: tensor})
    objectives.check_constant(name, checks.info(tensor), shapes)
    if tensor.device != hidden.device:
        raise ValueError(f"{name}: got device {tensor.device}, allowed is hidden's {hidden.device}")
    if tensor.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires grad, allowed is a constant: detach it")
    return tensor
