"""The public functions for PyTorch: checks once, chooses a plan and a backend, and calls the autograd functions.

Mirror of jax_impl/api.py; the names, arguments, defaults and meanings are the same in both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from logitless import spec
from logitless.planning import ChunkPlan, check_plan_argument, check_plan_sizes
from logitless.planning import plan as make_plan
from logitless.spec import ArrayInfo, LossOptions, Reduction, TokenStats
from logitless.torch_impl import layouts
from logitless.torch_impl.autograd import LinearCrossEntropyFunction, LinearLogProbsFunction
from logitless.torch_impl.call import Arrays, Call, LatePlan
from logitless.torch_impl.compiled import tracing, transforms
from logitless.torch_impl.kernels import fused

BACKENDS = ("triton", "eager")


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
    temperature: float = 1.0,
    normalizer: Tensor | float | None = None,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    process_group: Any = None,
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
        temperature: divides z last of all, after the softcap, as a sampler's does; greater than 0.
        normalizer: replaces mean's denominator (the number of items in the whole batch): a number, or a tensor without
            axes, constant.
        plan: a ChunkPlan of :func:`logitless.plan` for these sizes; None: chosen by memory_budget.
        memory_budget: bytes of scratch beyond inputs and gradients; None: the rule of :mod:`logitless.planning`.
        backend: "triton" (kernels: bfloat16, float16, float32 on a CUDA GPU of compute capability 9.x, or CPU
            tensors under TRITON_INTERPRET=1), "eager" (plain operations, anywhere), or None: the first that runs.
        return_stats: also return :class:`logitless.TokenStats`, without gradient.
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

    Returns the loss in float32 (float64 for float64 input), or a tuple: the loss, then TokenStats and
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
        return_stats=return_stats, sequence_parallel=sequence_parallel, defer_weight_grad=defer_weight_grad
    )
    beyond = process_group is not None or sequence_parallel or accumulate_into is not None or defer_weight_grad
    if beyond or _placed(weight) or _placed(hidden):
        from logitless.torch_impl.distributed import sharding  # it reads this module

        request = sharding.Request(
            LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap).tempered(temperature),
            return_stats, False, plan, memory_budget, backend, process_group, sequence_parallel, accumulate_into,
            defer_weight_grad,
        )  # fmt: skip
        arrays = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
        arrays |= {"token_weight": token_weight, "class_weight": class_weight}
        made = sharding.linear_cross_entropy(arrays, normalizer, request)
        asked = tuple(value for value in made if value is not None)
        return asked if len(asked) > 1 else asked[0]
    loss, *stats = _linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        token_weight,
        class_weight,
        normalizer,
        (reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap, temperature),
        None if plan is None else dataclasses.astuple(plan),
        memory_budget,
        return_stats,
        backend,
    )
    return (loss, TokenStats(*stats)) if return_stats else loss


# torch.compile puts these two calls into its graph as they are and traces their tensor operations later, which are
# those of ops.py: choosing a plan is Python over integers, and nothing for a graph. Their arguments are tensors and
# constants for that reason.


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    normalizer: Tensor | float | None,
    option_values: tuple[Any, ...],
    plan_values: tuple[Any, ...] | None,
    memory_budget: int | None,
    return_stats: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """The loss and, if asked for, the statistics."""
    transforms.check("linear_cross_entropy")
    arrays = Arrays(hidden, weight, bias, target, token_weight, class_weight)
    call = _loss_call(arrays, normalizer, option_values, plan_values, memory_budget, return_stats, backend)
    arrays = arrays if call.traced else layouts.plain(arrays)
    if transforms.active():
        return transforms.loss(arrays, normalizer, call)
    apply: Any = LinearCrossEntropyFunction.apply
    made = apply(*arrays, normalizer, call)
    return tuple(value for value in made if value is not None)


def _loss_call(
    arrays: Arrays,
    normalizer: Tensor | float | None,
    option_values: tuple[Any, ...],
    plan_values: tuple[Any, ...] | None,
    memory_budget: int | None,
    return_stats: bool,
    backend: str | None,
) -> Call:
    """Everything about a loss that is not an array, all of it checked."""
    *values, temperature = map(tracing.number, option_values)
    options = LossOptions(*values).tempered(temperature)
    given = arrays._asdict()
    constants = {name: given.pop(name) for name in ("token_weight", "class_weight")}
    dtype = _check_tensors({name: given[name] for name in ("hidden", "weight", "target", "bias")}, constants)
    _check_normalizer(normalizer, options.reduction, arrays.hidden.device)
    _check_targets(arrays.target, arrays.weight.shape[0], options.ignore_index)
    one_pass = options.reduction != "none" and options.separable
    name = _backend(backend, arrays.hidden, dtype)
    chosen = _plan(arrays.target, arrays.weight, dtype, plan_values, memory_budget, one_pass, options.separable, name)
    return _call(options, chosen, dtype, return_stats, name, arrays.hidden)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    with_entropy: bool = False,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    process_group: Any = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and, if asked for, the entropy of every token, without holding the logits.

        log_prob_i = z_{i,y_i} − lse_i        entropy_i = −Σ_j p_ij log p_ij

    Both [...] in float32 (float64 for float64 input), differentiable once in hidden, weight and bias for any upstream
    gradients; both 0, without gradient, for an ignored token. Forward 2·N·D·V flops, backward 6; without entropy, and
    with a ``memory_budget`` of somewhat more than N·V·itemsize for the kernels ("triton"), 2 and 4: then exponentials
    [N, V] wait in the input dtype from forward to backward.

    Arguments as for :func:`linear_cross_entropy`. Returns (log_prob, entropy), entropy None unless ``with_entropy``.
    """
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(plan, memory_budget)
    spec.check_flags(with_entropy=with_entropy, sequence_parallel=sequence_parallel)
    if process_group is not None or sequence_parallel or _placed(weight) or _placed(hidden):
        from logitless.torch_impl.distributed import sharding

        options = LossOptions("none", ignore_index, logit_scale=logit_scale, softcap=softcap).tempered(temperature)
        request = sharding.Request(
            options, with_entropy, True, plan, memory_budget, backend, process_group, sequence_parallel
        )
        arrays = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
        made: tuple[Tensor, Tensor | None] = sharding.linear_log_probs(arrays, request)
        return made
    plan_values = None if plan is None else dataclasses.astuple(plan)
    log_prob, *entropy = _linear_log_probs(
        hidden, weight, target, bias, logit_scale, softcap, temperature, ignore_index, with_entropy, plan_values,
        memory_budget, backend,
    )  # fmt: skip
    return log_prob, entropy[0] if with_entropy else None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    with_entropy: bool,
    plan_values: tuple[Any, ...] | None,
    memory_budget: int | None,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """log p(target) and, if asked for, the entropy."""
    transforms.check("linear_log_probs")
    given = (ignore_index, logit_scale, softcap, temperature)
    ignore_index, logit_scale, softcap, temperature = map(tracing.number, given)
    options = LossOptions("none", ignore_index, logit_scale=logit_scale, softcap=softcap).tempered(temperature)
    dtype = _check_tensors({"hidden": hidden, "weight": weight, "target": target, "bias": bias}, {})
    _check_targets(target, weight.shape[0], ignore_index)
    name = _backend(backend, hidden, dtype)
    hold = options.separable and not with_entropy
    chosen = _plan(target, weight, dtype, plan_values, memory_budget, False, hold, name)
    call = _call(options, chosen, dtype, with_entropy, name, hidden)
    arrays = Arrays(hidden, weight, bias, target)
    arrays = arrays if call.traced else layouts.plain(arrays)
    if transforms.active():
        return transforms.log_probs(arrays, call)
    apply: Any = LinearLogProbsFunction.apply
    made = apply(*arrays[:4], call)
    return tuple(value for value in made if value is not None)


def _placed(tensor: object) -> bool:
    """Whether it is a DTensor; nothing is imported, and a compiler sees an attribute only."""
    return hasattr(tensor, "placements")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _info(tensor: Tensor) -> ArrayInfo:
    return ArrayInfo(tuple(tensor.shape), _dtype_name(tensor.dtype))


def _check_tensors(
    arrays: dict[str, Tensor | None], constants: dict[str, Tensor | None], shared_axis: int = 0, ranks: int = 1
) -> torch.dtype:
    """Types, devices, sizes and dtypes; returns the dtype of the computation (autocast's where it applies).

    ``ranks`` hold hidden together, one after another along ``shared_axis``.
    """
    for name, tensor in (arrays | constants).items():
        if tensor is None and name in ("bias", "token_weight", "class_weight"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, allowed is a torch.Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: got layout {tensor.layout}, allowed is torch.strided")
    hidden, weight, target = arrays["hidden"], arrays["weight"], arrays["target"]
    assert hidden is not None
    assert weight is not None
    assert target is not None
    for name, tensor in (arrays | constants).items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: got device {tensor.device}, allowed is hidden's {hidden.device}")
    for name, tensor in constants.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires grad, allowed is a constant: detach it, or weight the losses of "
                f"reduction='none' yourself"
            )
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    infos = [None if tensor is None else _info(tensor) for tensor in (*arrays.values(), *constants.values())]
    given_hidden, given_weight, given_target = infos[:3]
    assert given_hidden is not None
    assert given_weight is not None
    assert given_target is not None
    if ranks > 1:
        sizes = list(given_hidden.shape)
        sizes[shared_axis] *= ranks
        given_hidden = ArrayInfo(tuple(sizes), given_hidden.dtype)
    spec.check_arrays(given_hidden, given_weight, given_target, *infos[3:], mixed_dtypes=autocast)
    if autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(hidden.dtype, weight.dtype)


def check_counted(target: Tensor, token_weight: Tensor | None, class_weight: Tensor | None) -> None:
    """Types, devices, sizes and dtypes of what mean's denominator is made of."""
    given = {"target": target, "token_weight": token_weight, "class_weight": class_weight}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (name == "target" or tensor is not None):
            raise TypeError(f"{name}: got {type(tensor).__name__}, allowed is a torch.Tensor")
        if tensor is not None and tensor.device != target.device:
            raise ValueError(f"{name}: got device {tensor.device}, allowed is target's {target.device}")
    infos: Any = (None if tensor is None else _info(tensor) for tensor in given.values())
    spec.check_counted(*infos)


def _check_normalizer(normalizer: Tensor | float | None, reduction: str, device: torch.device) -> None:
    info = _info(normalizer) if isinstance(normalizer, Tensor) else None
    # A symbol is some finite number; asking which would make the compiled code one for this number.
    spec.check_normalizer(1.0 if tracing.is_symbol(normalizer) else normalizer, info, reduction)
    if not isinstance(normalizer, Tensor):
        return
    if normalizer.requires_grad:
        raise ValueError("normalizer: got a tensor that requires grad, allowed is a constant: detach it")
    if normalizer.device != device and normalizer.device.type != "cpu":
        raise ValueError(f"normalizer: got device {normalizer.device}, allowed is hidden's {device} or the CPU")


def _check_targets(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Look at the ids where looking costs no synchronisation; elsewhere an id outside makes that token's loss NaN."""
    if target.device.type != "cpu" or tracing.is_traced(target):
        return
    outside = ((target < 0) | (target >= vocab)) & (target != ignore_index)
    if bool(outside.any()):
        position = tuple(int(axis[0]) for axis in torch.nonzero(outside, as_tuple=True))
        raise spec.out_of_range_error(position, int(target[position]), vocab, ignore_index)


def _backend(name: str | None, hidden: Tensor, dtype: torch.dtype) -> str:
    """The backend to use: the one asked for, or the kernels where they run on a GPU, else plain operations."""
    device = hidden.device
    reason = fused.unavailable(device, dtype)
    if name == "triton" and reason is not None:
        raise spec.unavailable_error(name, reason, usable="eager")
    if name is None:
        name = "triton" if device.type == "cuda" and reason is None else "eager"
    return name


def _call(
    options: LossOptions,
    plan: ChunkPlan | LatePlan,
    dtype: torch.dtype,
    statistics: bool,
    backend: str,
    hidden: Tensor,
) -> Call:
    return Call(options, plan, dtype, statistics, torch.is_grad_enabled(), backend, _traced(hidden))


def _traced(hidden: Tensor) -> bool:
    """Whether torch.compile or torch.func is looking."""
    return tracing.is_traced(hidden) or transforms.active()


def _plan(
    target: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    plan_values: tuple[Any, ...] | None,
    memory_budget: int | None,
    one_pass: bool,
    hold: bool,
    backend: str,
) -> ChunkPlan | LatePlan:
    """``hold``: whether the call can hold its exponentials for an upstream gradient per token, if a budget is given."""
    tokens, vocab, size = target.numel(), *map(tracing.number, weight.shape)
    name = _dtype_name(dtype)
    if plan_values is not None:
        given = ChunkPlan(*map(tracing.number, plan_values))
        check_plan_sizes(given, tracing.number(tokens), size, vocab, name)
        return given

    def choose(tokens: int) -> ChunkPlan:
        return make_plan(
            tokens=tokens,
            hidden=size,
            vocab=vocab,
            dtype=name,
            memory_budget=budget,
            one_pass=one_pass,
            device="cpu" if target.device.type == "cpu" else "gpu",
            fused=backend == "triton",
            eager=backend == "eager",
            hold=hold and budget is not None and not _traced(weight),
        )

    budget = tracing.number(memory_budget)
    if tracing.is_symbol(tokens):
        return tracing.symbolic_plan(tokens, choose, budget, chunk_waits=backend == "triton")
    return choose(tokens)
