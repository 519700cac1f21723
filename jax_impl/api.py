"""The public functions for JAX: checks once, chooses a plan and a backend, and calls the functions with custom VJPs.

Mirror of torch_impl/api.py; the names, arguments, defaults and meanings are the same in both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless import spec
from logitless.jax_impl.backend import BACKENDS, backend_named, chosen_backend, device_of, on_several_devices
from logitless.jax_impl.call import Arrays, Call, Given, accumulation_dtype
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.distributed.parallel import AxisName, Shard
from logitless.jax_impl.vjp import log_probs_and_entropy, loss_and_stats
from logitless.planning import ChunkPlan, check_plan_argument, check_plan_sizes
from logitless.planning import plan as make_plan
from logitless.spec import ArrayInfo, LossOptions, Reduction, TokenStats

_OPTIONAL = ("bias", "token_weight", "class_weight")


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
    temperature: float = 1.0,
    normalizer: Array | float | None = None,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> Array | tuple[Array, TokenStats]:
    """Cross-entropy of ``softmax(f(hidden @ weight.T + bias))`` against ``target``, without holding the logits.

    With z = logit_scale · (hidden weightᵀ + bias), then z = softcap · tanh(z / softcap) if a softcap is given, and z
    divided by the temperature:

        ℓ_i = t_i [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + z_loss · lse_i² ]

    mean = Σ ℓ_i / Σ t_i k_{y_i} over tokens that are not ignored (or Σ ℓ_i / normalizer); 0, with zero gradients, when
    no token counts. Differentiable once, in reverse mode, in hidden, weight and bias; jax.jvp is refused by JAX.

    Arguments:
        hidden: [..., D] bfloat16, float16, float32, or float64 where x64 is on.
        weight: [V, D], hidden's dtype, as torch.nn.Linear stores it (the transpose of a Flax kernel).
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
        temperature: divides z last of all, after the softcap, as a sampler's does; greater than 0.
        normalizer: replaces mean's denominator (the number of items in the whole batch): a number, or an array without
            axes, constant.
        plan: a ChunkPlan of :func:`logitless.plan` for these sizes; None: chosen by memory_budget.
        memory_budget: bytes of scratch beyond inputs and gradients; None: the rule of :mod:`logitless.planning`.
        backend: "pallas" (kernels for bfloat16 and float16 on Hopper GPUs, or on a CPU under
            LOGITLESS_PALLAS_INTERPRET=1; float32 and float64 have none), "xla" (plain operations, anywhere), or None:
            the kernels where they run on a GPU, else "xla". While a function is traced, None asks JAX's default device,
            and "pallas" is taken as it is: what is traced may be compiled for another one. Compiled for one that is no
            CUDA device, it is a NotImplementedError that names "xla".
        return_stats: also return :class:`logitless.TokenStats`, without gradient.
        axis_name: inside of jax.shard_map, the mesh axis (or axes) over which the vocabulary is cut: weight, bias and
            class_weight are this device's part of it in the axis's order, hidden and target are the same on all its
            devices, and ids count through the whole vocabulary. The results are those of the whole vocabulary, the same
            on all devices; V above is its size. Gradients need check_vma=True, the kernels check_vma=False:
            :func:`sharded_linear_cross_entropy` takes both.
        vocab: with axis_name, V where it is smaller than the devices' rows together: rows beyond it (the last
            devices' last ones) are padding, take no part, and have gradient 0; they must hold finite numbers.
        sequence_parallel: with axis_name, hidden [N / devices, ..., D] is this device's part of the tokens, along the
            first axis and in the axis's order; target and token_weight are still those of all tokens.

    With axis_name a plan is one for this device's rows of the weight. NumPy arrays are taken as well. Numbers (options)
    are static: another value compiles anew.

    Returns the loss in float32 (float64 for float64 input), or (loss, TokenStats). Gradients have each argument's dtype
    and shape.

    Raises ValueError or TypeError naming the argument, what came and what is allowed; NotImplementedError for a backend
    that cannot run.
    """
    arrays: Given = Arrays(hidden, weight, bias, target, token_weight, class_weight, normalizer)
    call = loss_call(
        arrays, _shard(weight, axis_name, vocab, sequence_parallel), reduction=reduction, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature, plan=plan, memory_budget=memory_budget, backend=backend, return_stats=return_stats,
    )  # fmt: skip
    loss, stats = loss_and_stats(call, _arrays(arrays))
    return (loss, stats) if return_stats else loss


def linear_log_probs(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    with_entropy: bool = False,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> tuple[Array, Array | None]:
    """log p(target) and, if asked for, the entropy of every token, without holding the logits.

        log_prob_i = z_{i,y_i} − lse_i        entropy_i = −Σ_j p_ij log p_ij

    Both [...] in float32 (float64 for float64 input), differentiable once in hidden, weight and bias for any upstream
    gradients; both 0, without gradient, for an ignored token. Forward 2·N·D·V flops, backward 6; without entropy, and
    with a ``memory_budget`` of somewhat more than N·V·itemsize for the kernels ("pallas"), 2 and 4: then exponentials
    [N, V] wait in the input dtype from forward to backward.

    Arguments as for :func:`linear_cross_entropy`. Returns (log_prob, entropy), entropy None unless ``with_entropy``.
    """
    arrays: Given = Arrays(hidden, weight, bias, target)
    call = log_probs_call(
        arrays, _shard(weight, axis_name, vocab, sequence_parallel), logit_scale=logit_scale, softcap=softcap,
        temperature=temperature,
        ignore_index=ignore_index, with_entropy=with_entropy, plan=plan, memory_budget=memory_budget, backend=backend,
    )  # fmt: skip
    made = log_probs_and_entropy(call, _arrays(arrays))
    log_prob, entropy = made
    return log_prob, entropy


def loss_call(
    arrays: Given,
    shard: Shard,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    return_stats: bool = False,
) -> Call:
    """The call that :func:`linear_cross_entropy` makes on one device, its arguments checked."""
    spec.check_flags(return_stats=return_stats)
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(plan, memory_budget)
    options = LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    options = options.tempered(temperature)
    _check_arrays(arrays, shard)
    _check_normalizer(arrays.normalizer, reduction)
    _check_targets(arrays.target, shard.vocab or arrays.weight.shape[0], ignore_index)
    one_pass = reduction != "none" and options.separable
    name = _backend(backend, arrays, cut=False)
    chosen = _plan(arrays, shard, plan, memory_budget, one_pass, options.separable, name)
    return _call(options, chosen, return_stats, name, shard)


def log_probs_call(
    arrays: Given,
    shard: Shard,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    with_entropy: bool = False,
    plan: ChunkPlan | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> Call:
    """The call that :func:`linear_log_probs` makes on one device, its arguments checked."""
    spec.check_flags(with_entropy=with_entropy)
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(plan, memory_budget)
    options = LossOptions("none", ignore_index, logit_scale=logit_scale, softcap=softcap).tempered(temperature)
    _check_arrays(arrays, shard)
    _check_targets(arrays.target, shard.vocab or arrays.weight.shape[0], ignore_index)
    name = _backend(backend, arrays, cut=False)
    hold = options.separable and not with_entropy
    chosen = _plan(arrays, shard, plan, memory_budget, False, hold, name)
    call = _call(options, chosen, with_entropy, name, shard)
    return dataclasses.replace(call, holds=call.holds and not with_entropy)


def _call(options: LossOptions, plan: ChunkPlan, statistics: bool, name: str, shard: Shard) -> Call:
    """The call, with what its backend can do of its plan."""
    if not plan.tokens:
        name = "xla"  # nothing for a kernel to do
    backend, dtype = backend_named(name), jnp.dtype(plan.dtype)
    scalar = options.reduction != "none"
    one_pass = plan.one_pass and options.separable and scalar and backend.one_pass(dtype, options)
    holds = plan.holds_all and options.separable and not scalar and not shard.active and backend.holds(dtype)
    return Call(options, plan, statistics, name, shard, one_pass, holds)


def _shard(weight: Any, axis_name: Any, vocab: Any, sequence_parallel: bool) -> Shard:
    columns = weight.shape[0] if getattr(weight, "ndim", 0) == 2 else 1  # another shape is refused by _check_arrays
    return parallel.make_shard(axis_name, vocab, sequence_parallel, columns)


def _arrays(arrays: Given) -> Arrays[Array]:
    """The call's arrays as JAX's."""
    dtype = arrays.hidden.dtype
    made: Arrays[Array] = jax.tree.map(lambda array: _array(array, dtype), arrays)
    return made


def _x64() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def _backend(name: str | None, arrays: Given, cut: bool = True) -> str:
    """The backend to use: the one asked for, or the kernels where they run on a GPU, else plain operations.

    ``cut``: whether what runs are parts of the arrays, on one device each.
    """
    reason = None
    if parallel.tracked():
        reason = "jax.shard_map(check_vma=True) knows no kernels that write in place; sharded_linear_cross_entropy does"
    elif not cut and any(map(on_several_devices, arrays)):
        reason = "its kernels run on one device; sharded_linear_cross_entropy runs them on every device's part"
    return chosen_backend(name, arrays.hidden, reason, lambda *asked: backend_named("pallas").unavailable(*asked))


def _info(array: Any) -> ArrayInfo:
    return ArrayInfo(tuple(array.shape), str(array.dtype))


def _check_types(arrays: dict[str, Any], optional: tuple[str, ...]) -> None:
    """Every array is one of JAX's or NumPy's, and none would be rounded on its way in; None only where it may be."""
    for name, array in arrays.items():
        if array is None and name in optional:
            continue
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"{name}: got {type(array).__name__}, allowed is a jax.Array or a NumPy array")
        if isinstance(array, np.ndarray | np.generic) and array.dtype == np.float64 and not _x64():
            raise TypeError(
                f"{name}: got a NumPy array of dtype float64 while x64 is off, allowed are bfloat16, float16, float32: "
                f"it would be rounded; cast it, or turn jax_enable_x64 on"
            )


def _check_arrays(arrays: Given, shard: Shard) -> None:
    """Types, sizes and dtypes, and how the arrays lie on the devices of an axis."""
    given = arrays._asdict()
    given.pop("normalizer")
    _check_types(given, _OPTIONAL)
    infos = {name: None if array is None else _info(array) for name, array in given.items()}
    hidden, weight, target = (infos.pop(name) for name in ("hidden", "weight", "target"))
    assert hidden is not None
    assert weight is not None
    assert target is not None
    bias, token_weight, class_weight = (infos.get(name) for name in _OPTIONAL)
    hidden = parallel.gathered_info(hidden, shard)
    spec.check_arrays(hidden, weight, target, bias, token_weight, class_weight)
    parallel.check_untyped(arrays._asdict())
    parallel.check_types(shard, arrays._asdict())


def check_counted(target: Any, token_weight: Any, class_weight: Any) -> None:
    """Types, sizes and dtypes of what mean's denominator is made of."""
    given = {"target": target, "token_weight": token_weight, "class_weight": class_weight}
    _check_types(given, ("token_weight", "class_weight"))
    infos: Any = (None if array is None else _info(array) for array in given.values())
    spec.check_counted(*infos)


def _check_normalizer(normalizer: Any, reduction: str) -> None:
    is_array = isinstance(normalizer, jax.Array | np.ndarray | np.generic)
    spec.check_normalizer(normalizer, _info(normalizer) if is_array else None, reduction)


def _check_targets(target: Any, vocab: int, ignore_index: int) -> None:
    """Look at the ids where looking waits for nothing; elsewhere an id outside makes that token's loss NaN.

    A NumPy array is always looked at, before it is converted: int64 would be wrapped to int32.
    """
    ids = _readable(target)
    if ids is None:
        return
    outside = ((ids < 0) | (ids >= vocab)) & (ids != ignore_index)
    if outside.any():
        position = tuple(int(axis[0]) for axis in np.nonzero(outside))
        raise spec.out_of_range_error(position, int(ids[position]), vocab, ignore_index)


def _readable(array: Any) -> np.ndarray[Any, Any] | None:
    """The values where looking waits for nothing, else None."""
    if isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable and all(device.platform == "cpu" for device in array.devices())
    ):
        return None
    return np.asarray(array)


def _array(value: Any, dtype: Any) -> Array:
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return jnp.asarray(value)
    return jnp.asarray(value, accumulation_dtype(dtype))


def _plan(
    arrays: Given, shard: Shard, given: ChunkPlan | None, memory_budget: int | None, one_pass: bool, hold: bool,
    backend: str,
) -> ChunkPlan:  # fmt: skip
    """``hold``: whether the call can hold its exponentials for an upstream gradient per token, if a budget is given."""
    hidden, (vocab, size) = arrays.hidden, arrays.weight.shape
    tokens, name = math.prod(arrays.target.shape), str(hidden.dtype)
    if given is not None:
        check_plan_sizes(given, tokens, size, vocab, name)
        return given
    if memory_budget is not None and shard.active:
        beyond = shard.scratch_bytes(tokens, size, spec.ITEMSIZE[name])
        if memory_budget <= beyond:
            raise ValueError(
                f"memory_budget: got {memory_budget} bytes, allowed beside axis_name is more than {beyond}"
            )
        memory_budget -= beyond
    return make_plan(
        tokens=tokens,
        hidden=size,
        vocab=vocab,
        dtype=name,
        memory_budget=memory_budget,
        one_pass=one_pass,
        device="cpu" if device_of(hidden).platform == "cpu" else "gpu",
        fused=backend == "pallas",
        padded=backend == "pallas",
        hold=hold and memory_budget is not None and not shard.active,
    )
