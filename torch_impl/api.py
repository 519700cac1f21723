"""The public functions for PyTorch. Mirror of jax_impl/api.py: names, arguments, defaults and meanings are the same.

A call becomes :class:`Arrays` and a :class:`Request`. one_device.py takes them on, or distributed/sharding.py where a
call is on several ranks or leaves dW elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import Tensor

from logitless import spec
from logitless.planning import ChunkPlan, Preference, check_plan_argument
from logitless.spec import LogProbResults, Reduction, TokenStats, WeightLayout
from logitless.torch_impl import checks, one_device
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.call import Arrays, Request, temperatures
from logitless.torch_impl.distributed import sharding

PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(ChunkPlan))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    normalizer: Tensor | float | None = None,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    return_lse: bool = False,
    shift: int = 0,
    weight_layout: WeightLayout = "vd",
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    accumulate_into: Tensor | None = None,
    defer_weight_grad: bool = False,
) -> Any:
    """Cross-entropy of ``softmax(f(hidden @ weight.T + bias))`` against ``target``, without holding the logits.

    With z = logit_scale · (hidden weightᵀ + bias), then z = softcap · tanh(z / softcap) if a softcap is given, and z
    divided by the temperature:

        ℓ_i = t_i [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + z_loss · lse_i² ]

    mean = Σ ℓ_i / Σ t_i k_{y_i} over tokens that are not ignored (or Σ ℓ_i / normalizer); 0, with zero gradients, when
    no token counts. Differentiable once in hidden, weight and bias.

    Arguments:
        hidden: [..., D] bfloat16, float16, float32 or float64.
        weight: [V, D], hidden's dtype (under autocast any), as torch.nn.Linear stores it.
        target: [...] int32 or int64 ids in [0, V), or ignore_index. On a CPU an id outside raises ValueError; on a GPU
            and inside torch.compile that token's loss is NaN.
        bias: [V], weight's dtype.
        reduction: "mean", "sum" or "none" ([...] losses).
        ignore_index: marks tokens without a loss: loss 0, gradient exactly 0. May be an id inside the vocabulary.
        token_weight: t, [...] floating, constant (no gradient).
        class_weight: k, [V] floating, constant, as in torch.nn.CrossEntropyLoss(weight=).
        label_smoothing: ε in [0, 1].
        z_loss: factor of lse², at least 0.
        logit_scale: of the model, greater than 0.
        softcap: of the model, greater than 0, or None.
        temperature: divides z last of all, after the softcap, as a sampler's does; greater than 0. A number, or one per
            token, [...] floating, constant (no gradient).
        normalizer: replaces mean's denominator (the number of items in the whole batch): a number, or a tensor without
            axes, constant.
        plan: a ChunkPlan of :func:`logitless.plan` for these sizes; or "fast", "balanced" or "lean", the least scratch
            within 0.5, 5 or 50 % of the fastest plan; None: the fastest that fits memory_budget, else "balanced".
        memory_budget: bytes of scratch beyond inputs and gradients; None: as ``plan`` says.
        backend: "triton" (kernels: bfloat16, float16, float32 on a GPU of docs/chips.md, or CPU tensors under
            TRITON_INTERPRET=1), "eager" (plain operations, anywhere), or None: the first that runs.
        return_stats: also return :class:`logitless.TokenStats`, without gradient.
        return_lse: also return lse, [...] in the loss's dtype, 0 for an ignored token; class and token weights are no
            part of it. Both it and the loss are differentiable, with any upstream gradients: ∂lse_i / ∂z_ij = p_ij.
            With gradients a call costs 8·N·D·V flops, for every reduction, and nothing is held for the backward.
        shift: position i is scored against target[..., i + shift], and the last ``shift`` positions are ignored: 1
            for a causal model whose hidden [..., T, D] and target [..., T] come from the same tokens. Less than T.
            Nothing is copied but the target; token_weight, results and gradients stay at hidden's positions.
        weight_layout: "vd", or "dv" for a weight that is [D, V], as a Flax kernel is; then its gradient and
            accumulate_into are [D, V] too. It is read as it lies, without a copy. So is any weight whose transpose is
            contiguous: give other functions ``weight.T``.
        process_group: the torch.distributed ranks that share the vocabulary: weight, bias and class_weight are this
            rank's consecutive entries [V_r, ...], in the order of the ranks, of any sizes; hidden and target are the
            same on every rank, ids count from the first rank's first entry, and so must be the upstream gradient. Loss
            and statistics are the same on every rank; hidden's gradient is complete, weight's is of this rank's
            entries. A DTensor weight of placement Shard(0) says this by itself (docs/sharding_torch.md).
        sequence_parallel: with a process_group: hidden [N / R, ..., D] is this rank's equal share of the tokens, along
            its first axis and in the order of the ranks, and so is its gradient; target and token_weight are of all
            tokens.
        accumulate_into: [V, D] buffer, float32 (float64 for float64 input) or weight's dtype: the backward adds dW to
            it, and weight.grad stays as it was. Nothing of dW's size is made, but for a parameter with Megatron's
            ``grad_added_to_main_grad``: that is set, and .grad is a placeholder, which Megatron's hook takes away.
            Costs 8·N·D·V flops where the forward could make dW only in a buffer of its own: backend "eager", or
            several chunks.
        defer_weight_grad: also return a :class:`DeferredWeightGrad`: the backward makes hidden's gradient only, its
            ``compute()`` those of weight and bias, later, with 2·N·D·V flops more; what is kept is said there.

    Returns the loss in float32 (float64 for float64 input), or a tuple: the loss, then lse, TokenStats and
    DeferredWeightGrad where they were asked for. Gradients have each argument's dtype and shape. Nothing is written to
    an argument but accumulate_into; on a GPU nothing synchronises with the host. The last four arguments leave
    torch.compile's graph.

    Raises ValueError or TypeError naming the argument, what came and what is allowed; NotImplementedError for a backend
    that cannot run. In a process_group an error of one rank's arguments, or ranks that were given different sizes,
    dtypes or options, is an error on every rank.
    """
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(plan, memory_budget)
    spec.check_flags(
        return_stats=return_stats, return_lse=return_lse, sequence_parallel=sequence_parallel,
        defer_weight_grad=defer_weight_grad,
    )  # fmt: skip
    each, number = temperatures(temperature)
    weight = checks.laid_out(weight, hidden, weight_layout)
    if weight_layout == "dv":
        if defer_weight_grad:
            raise ValueError("defer_weight_grad: got True beside weight_layout='dv', allowed is False")
        accumulate_into = accumulate_into.T if isinstance(accumulate_into, Tensor) else accumulate_into
    arrays = Arrays(hidden, weight, bias, target, token_weight, class_weight, each)
    request = Request(
        reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap, number, _fields(plan),
        memory_budget, backend, return_stats, False, return_lse, shift, process_group, sequence_parallel,
        accumulate_into, defer_weight_grad,
    )  # fmt: skip
    deferred = None
    if _is_apart(arrays, request):
        values, deferred = sharding.values(arrays, normalizer, request)
    else:
        values = one_device.values(arrays, normalizer, request)
    own = 2 if return_lse else 1
    stats = [TokenStats(*values[own:])] if return_stats else []
    results = (*values[:own], *stats, *([deferred] if defer_weight_grad else []))
    return results if len(results) > 1 else results[0]


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    ignore_index: int = -100,
    with_entropy: bool = False,
    return_stats: bool = False,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    weight_layout: WeightLayout = "vd",
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> LogProbResults[Tensor]:
    """log p(target) and, if asked for, entropy and statistics of every token, without holding the logits.

        log_prob_i = z_{i,y_i} − lse_i    entropy_i = −Σ_j p_ij log p_ij    sum_p_squared_i = Σ_j p_ij²

    All [...] in float32 (float64 for float64 input), differentiable once in hidden, weight and bias for any upstream
    gradients; all 0, without gradient, for an ignored token. Forward 2·N·D·V flops, backward 6; log_prob alone, and
    with a ``memory_budget`` of somewhat more than N·V·itemsize for the kernels ("triton"), 2 and 4: then exponentials
    [N, V] wait in the input dtype from forward to backward.

    Arguments:
        with_entropy: also return the entropy.
        return_stats: also return the entropy and :class:`logitless.TokenStats`, from the same forward. Of the
            statistics lse, entropy and sum_p_squared are differentiable:

                ∂lse/∂z_j = p_j      ∂entropy/∂z_j = −p_j (log p_j + entropy)
                ∂sum_p_squared/∂z_j = 2 p_j (p_j − sum_p_squared)

            The others are constants. The Rényi-2 entropy is −log sum_p_squared. stats.entropy is entropy.
        the others: as for :func:`linear_cross_entropy`.

    Returns (log_prob, entropy), entropy None unless ``with_entropy``; with ``return_stats`` (log_prob, entropy, stats).
    """
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(plan, memory_budget)
    statistics = spec.wanted_statistics(with_entropy, return_stats)
    spec.check_flags(sequence_parallel=sequence_parallel)
    each, number = temperatures(temperature)
    weight = checks.laid_out(weight, hidden, weight_layout)
    arrays = Arrays.of_head(hidden, weight, bias, target, each)
    request = Request(
        "none", ignore_index, 0.0, 0.0, logit_scale, softcap, number, _fields(plan), memory_budget, backend,
        statistics, True, group=process_group, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    if _is_apart(arrays, request):
        (log_prob, *more), _ = sharding.values(arrays, None, request)
    else:
        log_prob, *more = one_device.values(arrays, None, request)
    return spec.log_prob_results(statistics, log_prob, more)


def _fields(plan: ChunkPlan | Preference | None) -> tuple[Any, ...] | str | None:
    # dataclasses.astuple copies deeply, and takes 16 times as long.
    return tuple([getattr(plan, name) for name in PLAN_FIELDS]) if isinstance(plan, ChunkPlan) else plan


def _is_apart(arrays: Arrays, request: Request) -> bool:
    """Whether a call is on several ranks, or leaves dW elsewhere: one device's graph cannot hold it."""
    asked = request.group is not None or request.sequence_parallel or request.into is not None or request.deferred
    return asked or checks.is_placed(arrays.weight) or checks.is_placed(arrays.hidden)
