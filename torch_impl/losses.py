"""Losses on top of per-token values: preferences and policies. Mirror of jax_impl/losses.py.

No logits are held on any side. Every loss is a few operations on what :func:`linear_log_probs` gives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import numerics, objectives, spec
from logitless.objectives import (
    Aggregation,
    DPOOptions,
    DPOStats,
    KLEstimator,
    KTOOptions,
    KTOStats,
    Objective,
    PairLoss,
    PolicyOptions,
    PolicyStats,
    Ratio,
    SamplerCorrection,
)
from logitless.planning import ChunkPlan, Preference
from logitless.spec import Reduction
from logitless.torch_impl import checks
from logitless.torch_impl.api import linear_log_probs
from logitless.torch_impl.call import XP, Arrays


def dpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reference_log_prob: Tensor | None = None,
    mask: Tensor | None = None,
    loss_type: PairLoss = "dpo",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    nll_coef: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor | tuple[Tensor, DPOStats[Tensor]]:
    """Losses of preference pairs (DPO, IPO, CPO, SimPO, ORPO), from hidden states, without logits.

        log π(y) = Σ_t log p(y_t) over the |y| tokens that count                 (y_w chosen, y_l rejected)
        "dpo"    s = log π(y) − log π_ref(y)              h = β (s_w − s_l) − m
        "cpo"    s = log π(y)                             h = β (s_w − s_l) − m
        "simpo"  s = log π(y) / |y|                       h = β (s_w − s_l) − m
        "ipo"    s = (log π(y) − log π_ref(y)) / |y|
        "orpo"   s = log π(y) / |y|                       h = log e^s_w / (1 − e^s_w) − log e^s_l / (1 − e^s_l)

        ℓ = −(1 − ε) log σ(h) − ε log σ(−h)               dpo, cpo, simpo
        ℓ = (s_w − s_l − 1 / (2 β))²                      ipo
        ℓ = −β log σ(h)                                   orpo
        ℓ + γ B / Σ_w |y_w| · (−log π(y_w))               every pair's whole loss; of all, the mean nll of chosen tokens

    Sources: DPO, arXiv:2305.18290, eq. 7; ε: Mitchell 2023, "A note on DPO with noisy preferences"; IPO,
    arXiv:2310.12036, eq. 17, divided by |y| as in TRL; CPO, arXiv:2401.08417, eq. 3, and its nll; SimPO,
    arXiv:2405.14734, eq. 6; ORPO, arXiv:2403.07691, eqs. 6 and 7; γ beside DPO, arXiv:2404.19733, eq. 1. A sequence
    without a token that counts has s = 0. ORPO's log odds are at most 20 nats, with no gradient beyond.

    Arguments:
        hidden: [2 B, T, D]: B chosen sequences, then the B rejected ones, as TRL concatenates them.
        weight, bias: [V, D], [V]; target [2 B, T], already shifted: position t of hidden predicts target t.
        reference_log_prob: of the reference model, constant: [2 B, T] per token (``linear_log_probs`` of that model
            without gradient), or [2 B] sums over the tokens that count. Given exactly for "dpo" and "ipo".
        mask: [2 B, T] of any dtype: tokens with 0 do not count; nor do those whose target is ignore_index.
        loss_type: "dpo", "ipo", "cpo", "simpo" or "orpo".
        beta: β in [1e-15, 1e15]. label_smoothing: ε in [0, 0.5]. margin: m, at least 0, SimPO's γ. ipo and orpo take
            neither ε nor m.
        nll_coef: γ, at least 0; None: 1 for "cpo" and "orpo", 0 for the others.
        reduction: "mean" or "sum" over pairs, or "none": [B].
        the others: as for :func:`linear_log_probs`.
        return_stats: also return :class:`logitless.objectives.DPOStats`, without gradient.

    Returns the loss in float32 (float64 for float64 input), or (loss, DPOStats); differentiable once in hidden, weight
    and bias. Raises as :func:`linear_log_probs`.
    """
    options = DPOOptions(beta, label_smoothing, reduction, loss_type, margin, nll_coef)
    options.check_reference(reference_log_prob is not None)
    spec.check_flags(return_stats=return_stats)
    _check_head(Arrays(hidden, weight, bias, target), sequence_parallel)
    target, counted = checks.counted_target(target, mask, ignore_index, hidden)
    objectives.check_pairs(checks.info(target))
    shapes = {"[2 B, T] =": tuple(target.shape), "[2 B] =": tuple(target.shape[:1])}
    if reference_log_prob is not None:
        reference_log_prob = checks.known_constant("reference_log_prob", reference_log_prob, shapes, hidden)
    log_prob, _ = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, plan=plan, memory_budget=memory_budget, backend=backend,
        process_group=process_group,
        sequence_parallel=sequence_parallel
    )  # fmt: skip
    reference = None if reference_log_prob is None else reference_log_prob.to(log_prob.dtype)
    loss, stats = numerics.dpo(XP, options, log_prob, reference, counted, torch.nn.functional.logsigmoid)
    return (loss, DPOStats(*map(Tensor.detach, stats))) if return_stats else loss


def kto_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    desirable: Tensor,
    reference_log_prob: Tensor,
    kl: Tensor | float,
    mask: Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor | tuple[Tensor, KTOStats[Tensor]]:
    """Kahneman-Tversky optimisation of single sequences, from hidden states, without logits.

        s = log π(y) − log π_ref(y), each Σ_t log p(y_t) over the tokens that count            z = max(kl, 0)
        ℓ = λ_D (1 − σ(β (s − z)))          of a desirable sequence
        ℓ = λ_U (1 − σ(β (z − s)))          of another one

    Source: KTO, arXiv:2402.01306, eq. 7. With kl = 0 it is the unpaired APO-zero, arXiv:2408.06266, eq. 7.

    Arguments:
        hidden: [B, T, D]; weight, bias: [V, D], [V]; target: [B, T], already shifted.
        desirable: [B] of any dtype: 0 where the sequence is not desirable.
        reference_log_prob: of the reference model, constant: [B, T] per token, or [B] sums over the tokens that count.
        kl: an estimate of KL(π ‖ π_ref), constant: a number, or a tensor without axes or [B]. KTO's is the mean of s
            over completions of other prompts (``linear_log_probs`` of both models, without gradient); under
            torch.compile give it as a tensor, because it changes.
        mask: [B, T] of any dtype: tokens with 0 do not count; nor do those whose target is ignore_index.
        beta: β in [1e-15, 1e15]. desirable_weight, undesirable_weight: λ_D and λ_U, at least 0.
        reduction: "mean" or "sum" over sequences, or "none": [B].
        the others: as for :func:`linear_log_probs`.
        return_stats: also return :class:`logitless.objectives.KTOStats`, without gradient.

    Returns the loss in float32 (float64 for float64 input), or (loss, KTOStats); differentiable once in hidden, weight
    and bias. Raises as :func:`linear_log_probs`.
    """
    options = KTOOptions(beta, desirable_weight, undesirable_weight, reduction)
    spec.check_flags(return_stats=return_stats)
    _check_head(Arrays(hidden, weight, bias, target), sequence_parallel)
    target, counted = checks.counted_target(target, mask, ignore_index, hidden)
    objectives.check_sequences(checks.info(target))
    rows = tuple(target.shape[:1])
    desirable = checks.flags("desirable", desirable, {"one per sequence [B] =": rows}, hidden)
    shapes = {"[B, T] =": tuple(target.shape), "[B] =": rows}
    reference_log_prob = checks.known_constant("reference_log_prob", reference_log_prob, shapes, hidden)
    if isinstance(kl, Tensor):
        kl = checks.known_constant("kl", kl, {"without axes": (), "[B] =": rows}, hidden)
    else:
        spec.check_number("kl", kl, also="a tensor")
    log_prob, _ = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, plan=plan, memory_budget=memory_budget, backend=backend,
        process_group=process_group,
        sequence_parallel=sequence_parallel
    )  # fmt: skip
    reference = reference_log_prob.to(log_prob.dtype)
    # Filled on the device, a number is no copy from the host, which would be waited for.
    kl = kl.to(log_prob.dtype) if isinstance(kl, Tensor) else log_prob.new_full((), kl)
    sequences = numerics.KTOSequences(counted, desirable, reference, kl)
    loss, stats = numerics.kto(XP, options, sequences, log_prob, torch.nn.functional.logsigmoid)
    return (loss, KTOStats(*map(Tensor.detach, stats))) if return_stats else loss


def clipped_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    advantage: Tensor,
    old_log_prob: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
    sampler_log_prob: Tensor | None = None,
    mask: Tensor | None = None,
    objective: Objective = "clip",
    ratio: Ratio = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_times_ratio: bool = False,
    sampler_correction: SamplerCorrection = "token_truncate",
    sampler_limit: float = 2.0,
    aggregation: Aggregation = "token_mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    with_entropy: bool = False,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor | tuple[Tensor, PolicyStats[Tensor]]:
    """The clipped objectives of PPO, GRPO and their kin, with entropy bonus and KL penalty, without logits.

        ρ = exp(log p(y) − log p_old(y))                                  ratio="token"
        ρ = exp(mean of log p(y) − log p_old(y) over the sequence)        ratio="sequence"
        c = clip(ρ, 1 − clip_low, 1 + clip_high)
        J = min(ρ A, c A)                        objective="clip"; where A < 0, max(min(ρ A, c A), dual_clip · A)
        J = sg(c) A log p(y)                     objective="cispo"; sg: without gradient
        w = min(p_old(y) / p_sampler(y), sampler_limit), or 1, without gradient
        ℓ = −w J − entropy_coef · H + kl_coef · K [· ρ]            [if kl_times_ratio]
        K = −d (k1), d² / 2 (k2), eᵈ − d − 1 (k3)                  d = log p_ref(y) − log p(y)

    A sequence's ratio has, in J, the gradient of each token's own log p; with one advantage a sequence that is the
    gradient of the ratio itself. token_mean: Σ ℓ / number of tokens that count. sequence_mean: the mean over sequences
    of each one's mean over its tokens that count; a sequence without any is left out. Nothing counts: 0. Logarithms of
    ratios, and k3's d, are cut off at ±20 nats, with no gradient beyond.

    Sources: PPO, arXiv:1707.06347, eq. 7; GRPO (sequence_mean, A from groups), arXiv:2402.03300, eq. 3; token_mean and
    clip_high, DAPO, arXiv:2503.14476; Dr. GRPO (token_mean with a constant normalizer), arXiv:2503.20783; dual
    clip, arXiv:1912.09729; CISPO, arXiv:2506.13585, eqs. 4 and 5; GSPO and GSPO-token (ratio="sequence"),
    arXiv:2507.18071, eqs. 5 to 14; k1 to k3, Schulman, joschu.net/blog/kl-approx.html; K · ρ, DeepSeek-V3.2,
    arXiv:2512.02556; w, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".

    Arguments:
        hidden: [..., T, D]; weight, bias: [V, D], [V]; target: [..., T], already shifted.
        advantage: A, constant, [..., T] or one per sequence [...]: for GRPO (r − mean) / std of the group, made by you.
        old_log_prob: [..., T], constant, of the policy that sampled; None: this policy itself (ρ = 1 with gradient).
        reference_log_prob: [..., T], constant; given exactly when kl_coef is above 0.
        sampler_log_prob: [..., T], constant: what the program that sampled says of its tokens; None: no w.
        mask: [..., T] of any dtype: tokens with 0 do not count; nor do those whose target is ignore_index.
        objective: "clip" or "cispo". ratio: "token" or "sequence".
        clip_low in [0, 1] (1: no lower bound); clip_high, entropy_coef and kl_coef at least 0.
        dual_clip: above 1, with objective="clip"; None: where A < 0 ρ has no upper bound.
        kl_estimator: "k1", "k2" or "k3". kl_times_ratio: whether K is multiplied by ρ, with ρ's gradient, which makes
            K's gradient that of the KL divergence; TRL's default.
        sampler_correction: "token_truncate" as above; "token_mask": w is 0 beyond the limit; "sequence_truncate" and
            "sequence_mask": of the product of a sequence's quotients. sampler_limit: above 0.
        normalizer: replaces token_mean's number of tokens (Dr. GRPO's constant, the tokens of the whole batch) or
            sequence_mean's number of sequences: a number, or a constant tensor without axes.
        temperature: the sampler's, which divides what the softcap gives; the others: as for :func:`linear_log_probs`.
        return_stats: also return :class:`logitless.objectives.PolicyStats`, without gradient. with_entropy: with the
            entropy also where entropy_coef is 0.

    Returns the loss in float32 (float64 for float64 input), or (loss, PolicyStats); differentiable once in hidden,
    weight and bias. Raises as :func:`linear_log_probs`.
    """
    options = PolicyOptions(
        clip_low, clip_high, entropy_coef, kl_coef, aggregation, objective, ratio, dual_clip, kl_estimator,
        kl_times_ratio, sampler_correction, sampler_limit,
    )  # fmt: skip
    options.check_reference(reference_log_prob is not None)
    spec.check_flags(return_stats=return_stats, with_entropy=with_entropy)
    _check_head(Arrays(hidden, weight, bias, target), sequence_parallel)
    checks.check_normalizer(normalizer, "mean", hidden.device)
    target, counted = checks.counted_target(target, mask, ignore_index, hidden)
    per_token = {"target's shape": tuple(target.shape)}
    per_sequence = {"one per sequence": tuple(target.shape[:-1])}
    advantage = checks.known_constant("advantage", advantage, per_token | per_sequence, hidden)
    others = {
        "old_log_prob": old_log_prob, "reference_log_prob": reference_log_prob, "sampler_log_prob": sampler_log_prob
    }  # fmt: skip
    known = [None if a is None else checks.known_constant(name, a, per_token, hidden) for name, a in others.items()]
    log_prob, entropy = linear_log_probs(
        hidden, weight, target, bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, with_entropy=entropy_coef > 0 or with_entropy, plan=plan,
        memory_budget=memory_budget, backend=backend, process_group=process_group,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    wide = [None if a is None else a.to(log_prob.dtype) for a in known]
    tokens = numerics.PolicyTokens(counted, advantage.to(log_prob.dtype), *wide)
    losses, stats = numerics.policy_losses(XP, options, tokens, log_prob, entropy, Tensor.detach)
    loss = numerics.aggregate(XP, losses, counted.to(losses.dtype), aggregation, normalizer)
    return (loss, stats) if return_stats else loss


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _check_head(arrays: Arrays, sequence_parallel: bool) -> None:
    """Check what is read before :func:`linear_log_probs` checks all; it alone knows how many ranks share hidden."""
    spec.check_flags(sequence_parallel=sequence_parallel)
    if sequence_parallel:
        for name in ("hidden", "weight", "target"):
            checks.check_type(name, getattr(arrays, name), strided=False)
    else:
        checks.check_tensors(arrays)
