"""The public functions for JAX. Each checks its arguments once and calls a function with a custom VJP.

Mirror of torch_impl/api.py; the names, arguments, defaults and meanings are the same in both.
"""

from __future__ import annotations

from jax import Array

from logitless import spec
from logitless.jax_impl import checks
from logitless.jax_impl.call import Arrays, RawArrays, Request, taking_wrappers, temperatures
from logitless.jax_impl.distributed.parallel import AxisName
from logitless.jax_impl.vjp import log_probs_and_stats, loss_and_stats
from logitless.planning import ChunkPlan, Preference
from logitless.spec import LogProbResults, Reduction, TokenStats, WeightLayout


@taking_wrappers
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
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
    return_lse: bool = False,
    shift: int = 0,
    weight_layout: WeightLayout = "vd",
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> Array | tuple[Array | TokenStats[Array], ...]:
    """Cross-entropy of ``softmax(f(hidden @ weight.T + bias))`` against ``target``, without holding the logits.

    With z = logit_scale · (hidden weightᵀ + bias), then z = softcap · tanh(z / softcap) if a softcap is given, and z
    divided by the temperature:

        ℓ_i = t_i [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + z_loss · lse_i² ]

    mean = Σ ℓ_i / Σ t_i k_{y_i} over tokens that are not ignored (or Σ ℓ_i / normalizer); 0, with zero gradients, when
    no token counts. Differentiable once, in reverse mode, in hidden, weight and bias; jax.jvp is refused by JAX.

    Arguments:
        hidden: [..., D] bfloat16, float16, float32, or float64 where x64 is on.
        weight: [V, D], hidden's dtype, as torch.nn.Linear stores it (the transpose of a Flax kernel). float32 beside
            bfloat16 or float16 hidden states: it is rounded to their dtype, in a copy beside the plan's scratch, and
            dW is float32. (Plain operations add and keep it in float32; the kernels round it to hidden's dtype first.)
        target: [...] int32 or int64 ids in [0, V), or ignore_index. An id outside raises ValueError where it can be
            looked at without waiting (a NumPy array, a concrete array on a CPU); elsewhere that token's loss is NaN.
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
        normalizer: replaces mean's denominator (the number of items in the whole batch): a number, or an array without
            axes, constant.
        plan: a ChunkPlan of :func:`logitless.plan` for these sizes; or "fast", "balanced" or "lean", the least scratch
            within 0.5, 5 or 50 % of the fastest plan; None: the fastest that fits memory_budget, else "balanced".
        memory_budget: bytes of scratch beyond inputs and gradients; None: as ``plan`` says.
        backend: "pallas" (kernels for bfloat16 and float16 on Hopper GPUs, or on a CPU under
            LOGITLESS_PALLAS_INTERPRET=1; float32 and float64 have none), "xla" (plain operations, anywhere), or None:
            the kernels where they run on a GPU, else "xla". While a function is traced, None asks JAX's default device,
            and "pallas" is taken as it is: what is traced may be compiled for another one. Compiled for one that is no
            CUDA device, it is a NotImplementedError that names "xla".
        return_stats: also return :class:`logitless.TokenStats`, without gradient.
        return_lse: also return lse, [...] in the loss's dtype, 0 for an ignored token; class and token weights are no
            part of it. Both it and the loss are differentiable, with any upstream gradients: ∂lse_i / ∂z_ij = p_ij.
            With gradients a call costs 8·N·D·V flops, for every reduction, and nothing is held for the backward.
        shift: position i is scored against target[..., i + shift], and the last ``shift`` positions are ignored: 1
            for a causal model whose hidden [..., T, D] and target [..., T] come from the same tokens. Less than T.
            Nothing is copied but the target; token_weight, results and gradients stay at hidden's positions.
        weight_layout: "vd", or "dv" for a weight that is [D, V], as a Flax kernel is; its gradient is [D, V] too. It is
            read as it lies, without a copy. The kernels sum dW as [V, D] where a plan has several chunks of tokens, and
            turn the sum at the end; the plan's scratch counts it.
        axis_name: inside of jax.shard_map, the mesh axis (or axes) over which the vocabulary is cut: weight, bias and
            class_weight are this device's part of it in the axis's order, hidden and target are the same on all its
            devices, and ids count through the whole vocabulary. The results are those of the whole vocabulary, the same
            on all devices; V above is its size. Gradients need check_vma=True, the kernels check_vma=False:
            :func:`sharded_linear_cross_entropy` takes both.
        vocab: with axis_name, V where it is smaller than the devices' rows together: rows beyond it (the last
            devices' last ones) are padding, take no part, and have gradient 0; they must hold finite numbers.
        sequence_parallel: with axis_name, hidden [N / devices, ..., D] is this device's part of the tokens, along the
            first axis and in the axis's order; target and token_weight are still those of all tokens.

    With axis_name a plan is one for this device's rows of the weight. NumPy arrays are taken as well, and what has
    ``__jax_array__``, such as flax.nnx.Param. Numbers (options) are static: another value compiles anew.

    Returns the loss in float32 (float64 for float64 input), or a tuple: the loss, then lse and TokenStats where they
    were asked for. Gradients have each argument's dtype and shape.

    Raises ValueError or TypeError naming the argument, what came and what is allowed; NotImplementedError for a backend
    that cannot run.
    """
    # A normalizer may be a number.
    own, number = temperatures(temperature)
    weight = checks.laid_out(weight, hidden, weight_layout)
    raw: RawArrays = Arrays(hidden, weight, bias, target, token_weight, class_weight, normalizer, own)  # type: ignore[arg-type]
    request = Request(
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
        logit_scale=logit_scale, softcap=softcap, temperature=number, plan=plan, memory_budget=memory_budget,
        backend=backend, statistics=return_stats, lse=return_lse, shift=shift, turned=weight_layout == "dv",
    )  # fmt: skip
    arrays, call = checks.ready(raw, request, checks.shard_of(weight, axis_name, vocab, sequence_parallel))
    results = tuple(value for value in loss_and_stats(call, arrays) if value is not None)
    return results if len(results) > 1 else results[0]


@taking_wrappers
def linear_log_probs(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Array | float = 1.0,
    ignore_index: int = -100,
    with_entropy: bool = False,
    return_stats: bool = False,
    plan: ChunkPlan | Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    weight_layout: WeightLayout = "vd",
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> LogProbResults[Array]:
    """log p(target) and, if asked for, entropy and statistics of every token, without holding the logits.

        log_prob_i = z_{i,y_i} − lse_i    entropy_i = −Σ_j p_ij log p_ij    sum_p_squared_i = Σ_j p_ij²

    All [...] in float32 (float64 for float64 input), differentiable once in hidden, weight and bias for any upstream
    gradients; all 0, without gradient, for an ignored token. Forward 2·N·D·V flops, backward 6. With the kernels
    ("pallas") 2 and 4, where exponentials [N, V] wait in the input dtype from forward to backward. Those of log_prob
    alone do so in dW's memory, if that has room for them, and all do with ``plan="fast"`` or a ``memory_budget`` of
    somewhat more than N·V·itemsize.

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
    statistics = spec.wanted_statistics(with_entropy, return_stats)
    own, number = temperatures(temperature)
    weight = checks.laid_out(weight, hidden, weight_layout)
    raw: RawArrays = Arrays(hidden, weight, bias, target, temperature=own)
    request = Request(
        reduction="none", ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, temperature=number,
        plan=plan, memory_budget=memory_budget, backend=backend, statistics=statistics, log_probs=True,
        turned=weight_layout == "dv",
    )  # fmt: skip
    arrays, call = checks.ready(raw, request, checks.shard_of(weight, axis_name, vocab, sequence_parallel))
    log_prob, *found = log_probs_and_stats(call, arrays)
    return spec.log_prob_results(statistics, log_prob, found)
