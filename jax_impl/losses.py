"""Losses on top of per-token values: preferences, policies, distillation. Mirror of torch_impl/losses.py.

No logits are held on any side. Every loss is a few operations on what :func:`linear_log_probs` gives, but for the
distillation, which looks at whole distributions (jax_impl/distillation.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from logitless import numerics, objectives, spec
from logitless.jax_impl import checks, vjp
from logitless.jax_impl.api import linear_log_probs
from logitless.jax_impl.call import XP, Arrays, RawArray, RawArrays, Request
from logitless.jax_impl.distillation import DivergenceArrays, DivergenceCall, divergence
from logitless.jax_impl.distributed.parallel import WHOLE
from logitless.objectives import (
    Aggregation,
    DistillationOptions,
    DPOOptions,
    DPOStats,
    PolicyOptions,
    PolicyStats,
)
from logitless.planning import ChunkPlan
from logitless.spec import LossOptions, Reduction


def dpo_loss(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
    reference_log_prob: Array,
    mask: Array | None = None,
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
) -> Array | tuple[Array, DPOStats[Array]]:
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
    checks.check_arrays(Arrays(hidden, weight, bias, target), WHOLE)
    target, counted = _counted(target, mask, ignore_index)
    objectives.check_pairs(checks.info(target))
    shapes = {"[2 B, T] =": tuple(target.shape), "[2 B] =": tuple(target.shape[:1])}
    reference = _constant("reference_log_prob", reference_log_prob, shapes)
    log_prob, _ = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, plan=plan,
        memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    reference = reference.astype(log_prob.dtype)
    loss, stats = numerics.dpo(XP, options, log_prob, reference, counted, jax.nn.log_sigmoid)
    return (loss, DPOStats(*map(lax.stop_gradient, stats))) if return_stats else loss


def clipped_policy_loss(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
    advantage: Array,
    old_log_prob: Array | None = None,
    reference_log_prob: Array | None = None,
    mask: Array | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    aggregation: Aggregation = "token_mean",
    normalizer: Array | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, PolicyStats[Array]]:
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
            sequence_mean's number of sequences: a number, or a constant array without axes.
        temperature: the sampler's, which divides what the softcap gives; the others: as for :func:`linear_log_probs`.
        return_stats: also return :class:`logitless.objectives.PolicyStats`, without gradient.

    Returns the loss in float32 (float64 for float64 input), or (loss, PolicyStats); differentiable once in hidden,
    weight and bias. Raises as :func:`linear_log_probs`.
    """
    options = PolicyOptions(clip_low, clip_high, entropy_coef, kl_coef, aggregation)
    options.check_reference(reference_log_prob is not None)
    spec.check_flags(return_stats=return_stats)
    checks.check_arrays(Arrays(hidden, weight, bias, target), WHOLE)
    checks.check_normalizer(normalizer, "mean")
    target, counted = _counted(target, mask, ignore_index)
    per_token = {"target's shape": tuple(target.shape)}
    per_sequence = {"one per sequence": tuple(target.shape[:-1])}
    advantage = _constant("advantage", advantage, per_token | per_sequence)
    if old_log_prob is not None:
        old_log_prob = _constant("old_log_prob", old_log_prob, per_token)
    if reference_log_prob is not None:
        reference_log_prob = _constant("reference_log_prob", reference_log_prob, per_token)
    log_prob, entropy = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, with_entropy=entropy_coef > 0, plan=plan, memory_budget=memory_budget,
        backend=backend,
    )  # fmt: skip

    def wide(values: Array | None) -> Array | None:
        return None if values is None else values.astype(log_prob.dtype)

    old, reference = wide(old_log_prob), wide(reference_log_prob)
    tokens = numerics.PolicyTokens(counted, advantage.astype(log_prob.dtype), old, reference)
    losses, stats = numerics.policy_losses(XP, options, tokens, log_prob, entropy, lax.stop_gradient)
    loss = numerics.aggregate(XP, losses, counted.astype(losses.dtype), aggregation, normalizer)
    return (loss, stats) if return_stats else loss


def distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    bias: Array | None = None,
    *,
    teacher_bias: Array | None = None,
    mask: Array | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Array | float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> Array:
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
        normalizer: replaces mean's denominator: a number, or a constant array without axes.
        logit_scale, softcap, and teacher's: of the models, as for :func:`linear_cross_entropy`.
        memory_budget: bytes of scratch beyond inputs and gradients; None: tiles of up to 2048 × 2048.
        backend: of the pass for the logsumexps, as for :func:`linear_cross_entropy`; the rest is plain operations.

    Returns the loss in float32 (float64 for float64 student input), differentiable once in hidden, weight and bias.
    Raises as :func:`linear_cross_entropy`; what is wrong with the teacher's arrays is named so.
    """
    options = DistillationOptions(
        beta, temperature, reduction, logit_scale, softcap, teacher_logit_scale, teacher_softcap
    )
    sides = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    for name, array in sides.items():
        checks.check_type(name, array)
    checks.check_normalizer(normalizer, reduction)
    objectives.check_sides(*map(checks.info, (hidden, weight, teacher_hidden, teacher_weight)))
    target, counted = _counted(np.zeros(hidden.shape[:-1], np.int32), mask, -100)
    own, other = options.logits(teacher=False), options.logits(teacher=True)
    lse = _logsumexp(Arrays(hidden, weight, bias, target), own, memory_budget, backend)
    try:
        teacher = Arrays(teacher_hidden, teacher_weight, teacher_bias, target)
        teacher_lse = _logsumexp(teacher, other, memory_budget, backend)
    except (TypeError, ValueError) as error:
        raise type(error)(objectives.of_teacher(str(error))) from None
    tile = objectives.distillation_tile(
        tokens=target.size, hidden=hidden.shape[-1], teacher_hidden=teacher_hidden.shape[-1], vocab=weight.shape[0],
        dtype=str(hidden.dtype), memory_budget=memory_budget,
    )  # fmt: skip
    call = DivergenceCall(options.beta, own, other, tile)
    arrays = DivergenceArrays(
        jnp.asarray(hidden), jnp.asarray(weight), None if bias is None else jnp.asarray(bias),
        _stopped(teacher_hidden), _stopped(teacher_weight), None if teacher_bias is None else _stopped(teacher_bias),
        jnp.asarray(target), lse, teacher_lse.astype(lse.dtype),
    )  # fmt: skip
    losses: Array = divergence(call, arrays)
    if reduction == "mean":
        counted = counted.reshape(-1).astype(losses.dtype)
        return numerics.aggregate(XP, losses, counted, "token_mean", normalizer)
    return losses.reshape(target.shape) if reduction == "none" else losses.sum()


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _stopped(values: RawArray) -> Array:
    return lax.stop_gradient(jnp.asarray(values))


def _logsumexp(raw: RawArrays, options: LossOptions, memory_budget: int | None, backend: str | None) -> Array:
    """log Σ_j exp(z_j) of every token in two parts, [2, N], without gradient; 0 where it does not count.

    The first is a logit not far below the largest: where logits are large, the sum of the parts would lose what
    divergences need, and so would parts from a logit far below the largest.
    """
    checks.check_arrays(raw, WHOLE)
    bias = None if raw.bias is None else _stopped(raw.bias)
    raw = raw._replace(hidden=_stopped(raw.hidden), weight=_stopped(raw.weight), bias=bias)
    request = Request(
        reduction="none", logit_scale=options.logit_scale, softcap=options.softcap, memory_budget=memory_budget,
        backend=backend,
    )  # fmt: skip
    arrays, call = checks.ready(raw, request, WHOLE)
    parts: Array = vjp.logsumexp(call, arrays)
    return parts


def _counted(target: RawArray, mask: RawArray | None, ignore_index: int) -> tuple[Array, Array]:
    """The targets with ignore_index where the mask is 0, so that no work is done there; and which tokens count.

    Targets of NumPy stay so while the mask is NumPy's too: then their ids can be looked at.
    """
    spec.check_ignore_index(ignore_index)
    counted = target != ignore_index
    if mask is not None:
        checks.check_type("mask", mask)
        objectives.check_mask(checks.info(mask), tuple(target.shape))
        counted = counted & (mask != 0)
    if isinstance(target, np.ndarray):
        if isinstance(counted, np.ndarray | np.generic):
            masked = np.where(counted, target, ignore_index).astype(target.dtype)
            return masked, jnp.asarray(counted)  # type: ignore[return-value]  # what takes an Array takes NumPy's too
        # An id that int32 cannot hold stays outside the vocabulary, instead of wrapping into it.
        target = np.where(target == target.astype(np.int32), target, np.iinfo(np.int32).max).astype(np.int32)
    return jnp.where(counted, jnp.asarray(target), jnp.asarray(ignore_index, target.dtype)), jnp.asarray(counted)


def _constant(name: str, values: RawArray, shapes: dict[str, tuple[int, ...]]) -> Array:
    """An array of known numbers, checked; without gradient."""
    checks.check_type(name, values)
    objectives.check_constant(name, checks.info(values), shapes)
    return _stopped(values)
