"""What every call goes through before it runs: its arrays are checked, a backend and a plan are chosen.

Mirror of torch_impl/checks.py. An error names the argument, what came and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from logitless import objectives, spec
from logitless.hardware import Device
from logitless.jax_impl.backend import BACKENDS, backend_named, chosen_backend, device_of, on_several_devices
from logitless.jax_impl.call import (
    Arrays,
    Call,
    Needs,
    RawArray,
    RawArrays,
    Request,
    accumulation_dtype,
    as_jax,
)
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.distributed.parallel import AxisName, Shard
from logitless.planning import ChunkPlan, check_plan_argument, check_plan_sizes
from logitless.planning import Request as PlanRequest
from logitless.planning import choose as choose_plan
from logitless.scratch import PADDED_HIDDEN
from logitless.spec import ArrayInfo, LossOptions, WeightLayout

KINDS: dict[str, Device] = {"cpu": "cpu", "tpu": "tpu"}
"""Of JAX's platforms that are no GPU, what a plan calls them."""
NO_BUFFER = "its kernels add dW to no buffer"
"""The reason of :func:`spec.unavailable_error` for accumulate_into."""

# ---------------------------------------------------------------------------------------------------------------------
# A whole call


def ready(raw: RawArrays, request: Request, shard: Shard) -> tuple[Arrays[Array], Call]:
    """A call on one device: its arrays as JAX's, and everything else, all of it checked."""
    if not request.log_probs:
        spec.check_flags(return_stats=request.statistics, return_lse=request.lse)
    spec.check_backend(request.backend, BACKENDS)
    check_plan_argument(request.plan, request.memory_budget)
    options = loss_options(request)
    check_arrays(raw, shard)
    spec.check_shift(request.shift, tuple(raw.target.shape))
    check_normalizer(raw.normalizer, request.reduction)
    check_ids(raw.target, shard.vocab or raw.weight.shape[0], options.ignore_index, request.shift)
    if raw.temperature is not None:
        _check_temperatures(raw.temperature, raw.target, options.ignore_index, request.shift)
    name = usable_backend(request.backend, raw, cut=False)
    plan, other = _chosen_plans(raw, shard, request, options, name)
    arrays = as_jax(raw, raw.hidden.dtype)
    arrays = arrays._replace(target=shifted(arrays.target, request.shift, options.ignore_index))
    call = _planned(options, plan, request, name, shard)
    if other is not None:
        call = dataclasses.replace(call, frozen=_planned(options, other, request, name, shard))
    return arrays, call


def shifted(target: Array, shift: int, ignore_index: int) -> Array:
    """The ids that the positions are scored against: target[..., i + shift], ignore_index at the last positions."""
    if not shift:
        return target
    before = [(0, 0)] * (target.ndim - 1)
    return jnp.pad(target[..., shift:], (*before, (0, shift)), constant_values=ignore_index)


def loss_options(request: Request) -> LossOptions:
    """The checked options, temperature included."""
    options = LossOptions(
        request.reduction, request.ignore_index, request.label_smoothing, request.z_loss, request.logit_scale,
        request.softcap,
    )  # fmt: skip
    return options.tempered(request.temperature)


def usable_backend(
    name: str | None, raw: RawArrays, *, cut: bool = True, beside: Iterable[object] = (),
    unavailable: Callable[[jax.Device | None, str], str | None] | None = None,
) -> str:  # fmt: skip
    """The backend to use. ``cut``: whether what runs are parts of the arrays, on one device each.

    beside: what else the kernels read. unavailable: of other kernels than the product's, as theirs.
    """
    asked = unavailable or (lambda *of: backend_named("pallas").unavailable(*of))
    reason = None
    if parallel.tracked():
        reason = "jax.shard_map(check_vma=True) knows no kernels that write in place; sharded_linear_cross_entropy does"
    elif not cut and any(map(on_several_devices, (*raw, *beside))):
        reason = "its kernels run on one device; sharded_linear_cross_entropy runs them on every device's part"

    def chosen(reason: str | None) -> str:
        return chosen_backend(name, raw.hidden, reason, asked)

    what, why = _plain_only(raw) if isinstance(raw, Arrays) else (None, None)
    if what is not None and name is None and chosen(reason) == "pallas":
        warnings.warn(
            f"{what}; the Pallas kernels are not used, for {why}. Plain operations are; backend='xla' asks for them "
            f"without this warning",
            RuntimeWarning,
            stacklevel=2,
        )
    return chosen(reason or why)


def _plain_only(raw: RawArrays) -> tuple[str, str] | tuple[None, None]:
    """What the kernels cannot do of a call, and why not."""
    if raw.accumulate_into is not None:
        return "accumulate_into: got a buffer", NO_BUFFER
    return None, None


def shard_of(weight: RawArray, axis_name: AxisName | None, vocab: int | None, sequence_parallel: bool) -> Shard:
    """This device's slice of the vocabulary."""
    rows = weight.shape[0] if getattr(weight, "ndim", 0) == 2 else 1  # check_arrays refuses another shape
    return parallel.make_shard(axis_name, vocab, sequence_parallel, rows)


NO_FREE_ROWS = (
    "plan: got one with lends=True, allowed is one without: either this call makes no dW of its own (a deferred or "
    "sharded weight, or a float32 one beside narrower hidden states), or dW has no room (it takes 65 hidden units, and "
    "as many as tokens), or the call's options and results (class weights, lse, statistics per token) need another way"
)


def _may_lend(raw: RawArrays, shard: Shard, request: Request, options: LossOptions) -> bool:
    """Whether the exponentials that wait can lie in dW's memory. (Where the weight turns out to get no gradient, the
    call has another plan.)"""
    waits = options.separable and not request.lse and not (request.log_probs and request.statistics)
    fits = math.prod(raw.target.shape) <= raw.weight.shape[1] > PADDED_HIDDEN
    return waits and fits and not (request.defers or shard.active) and raw.weight.dtype == raw.hidden.dtype


def _chosen_plans(
    raw: RawArrays, shard: Shard, request: Request, options: LossOptions, backend: str
) -> tuple[ChunkPlan, ChunkPlan | None]:
    """The plan. If that needs dW's memory, also the one where the weight gets no gradient."""
    hidden, (vocab, size) = raw.hidden, raw.weight.shape
    tokens, dtype, budget = math.prod(raw.target.shape), str(hidden.dtype), request.memory_budget
    kind = KINDS.get(device_of(hidden).platform, "gpu")
    lends = backend == "pallas" and _may_lend(raw, shard, request, options)
    if isinstance(request.plan, ChunkPlan):
        check_plan_sizes(request.plan, tokens, size, vocab, dtype)
        check_adds(request.plan, raw.accumulate_into, raw.hidden)
        fits = request.plan if kind == "gpu" else request.plan.in_narrow_blocks
        given = dataclasses.replace(fits, turned=request.turned)
        if backend != "pallas" or not given.in_place:
            return given, None
        if not lends:
            raise ValueError(NO_FREE_ROWS)
        return given, dataclasses.replace(given, lends=False)
    # A call can hold its exponentials, or logits, for upstream gradients per token, if a budget allows it, or speed is
    # preferred.
    hold = options.separable and (budget is not None or request.plan == "fast")
    if budget is not None and shard.active:
        beyond = shard.scratch_bytes(tokens, size, spec.ITEMSIZE[dtype])
        if budget <= beyond:
            raise ValueError(f"memory_budget: got {budget} bytes, allowed beside axis_name is more than {beyond}")
        budget -= beyond
    wanted = PlanRequest(
        tokens=tokens,
        hidden=size,
        vocab=vocab,
        dtype=dtype,
        memory_budget=budget,
        one_pass=options.reduction != "none" and options.separable and not request.lse,
        device=kind,
        kind="pallas" if backend == "pallas" else "xla",
        hold=hold and not shard.active and not request.lse,
        prefer=request.plan or "balanced",
        turned=request.turned,
        lends=lends,
    )
    plan = choose_plan(wanted)
    if plan.in_place:
        return plan, choose_plan(dataclasses.replace(wanted, lends=False))
    if _rounds_chunks(plan, raw.accumulate_into, hidden):
        plan = choose_plan(dataclasses.replace(wanted, one_pass=False, order="vocab"))
    return plan, None


def _rounds_chunks(plan: ChunkPlan, into: RawArray | None, hidden: RawArray) -> bool:
    """Whether a buffer would round what it has after each of several chunks."""
    narrow = into is not None and into.dtype != accumulation_dtype(hidden.dtype)
    return narrow and plan.with_whole_slices.adds_chunks


def check_adds(plan: ChunkPlan, into: RawArray | None, hidden: RawArray) -> None:
    """Raise ValueError if a narrow buffer would round a gradient more than once: it takes one addition per entry."""
    if into is not None and _rounds_chunks(plan, into, hidden):
        raise ValueError(
            f"plan: got one of {len(plan.token_slices)} chunks of tokens beside accumulate_into of {into.dtype}, "
            f"allowed is one chunk of tokens, or order='vocab' or 'both': each chunk would be rounded"
        )


def _planned(options: LossOptions, plan: ChunkPlan, request: Request, name: str, shard: Shard) -> Call:
    """The call, with what its backend can do of its plan."""
    if not plan.tokens:
        name = "xla"  # nothing for a kernel to do
    backend, dtype = backend_named(name), jnp.dtype(plan.dtype)
    now = options.separable and not request.lse
    one_pass = now and plan.one_pass and options.reduction != "none" and backend.one_pass(dtype, options)
    holds = now and plan.holds_all and options.reduction == "none" and not shard.active and backend.holds(dtype)
    return Call(options, plan, request.statistics, name, shard, one_pass, holds, request.lse, request.log_probs)


# ---------------------------------------------------------------------------------------------------------------------
# One argument, or one kind of them


def info(array: RawArray) -> ArrayInfo:
    return ArrayInfo(tuple(array.shape), str(array.dtype))


def laid_out(weight: Array, hidden: Array, layout: WeightLayout) -> Array:
    """A weight as [V, D]. XLA makes no copy of the transpose, and the kernels read what it was made from."""
    if layout == "vd" or not all(isinstance(array, jax.Array | np.ndarray) for array in (weight, hidden)):
        return weight  # another type is refused later
    spec.check_weight_layout(layout)
    spec.check_turned_weight(tuple(weight.shape), tuple(hidden.shape))
    return weight.T


def check_types(arrays: Mapping[str, object], optional: tuple[str, ...] = ()) -> None:
    """Check that all arrays are JAX's or NumPy's and that none would be rounded. Only ``optional`` ones may be None."""
    for name, array in arrays.items():
        if array is None and name in optional:
            continue
        check_type(name, array)
        wide = isinstance(array, np.ndarray | np.generic) and array.dtype == np.float64
        if wide and not jax.config.read("jax_enable_x64"):
            raise TypeError(
                f"{name}: got a NumPy array of dtype float64 while x64 is off, allowed are bfloat16, float16, float32: "
                f"it would be rounded; cast it, or turn jax_enable_x64 on"
            )


def check_type(name: str, array: object) -> None:
    if not isinstance(array, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name}: got {type(array).__name__}, allowed is a jax.Array or a NumPy array")


def check_arrays(raw: RawArrays, shard: Shard) -> None:
    """Check types, sizes and dtypes, and how the arrays lie on the devices of an axis."""
    arrays = raw._asdict()
    del arrays["normalizer"]
    check_types(arrays, ("bias", "token_weight", "class_weight", "temperature", "accumulate_into"))
    hidden = parallel.gathered_info(info(raw.hidden), shard)
    others = raw.bias, raw.token_weight, raw.class_weight, raw.temperature
    optional = (None if array is None else info(array) for array in others)
    # Weights in float32 beside narrower hidden states, as mixed-precision training has them.
    mixed = str(raw.weight.dtype) == "float32" and hidden.dtype in ("bfloat16", "float16")
    spec.check_arrays(hidden, info(raw.weight), info(raw.target), *optional, mixed_dtypes=mixed)
    if raw.accumulate_into is not None:
        check_buffer(raw.accumulate_into, info(raw.weight), raw.hidden)
    _check_uncut(raw)
    _check_placement(shard, raw)


def check_buffer(into: object, weight: ArrayInfo, hidden: RawArray) -> None:
    """Raise unless dW may be added to ``into``: [V, D], in the accumulation dtype or the weight's."""
    check_types({"accumulate_into": into})
    made, wide = info(cast(RawArray, into)), str(accumulation_dtype(hidden.dtype))
    if made.shape != weight.shape:
        raise ValueError(f"accumulate_into: got shape {made.shape}, allowed is weight's {weight.shape}")
    if made.dtype not in (wide, weight.dtype):
        raise TypeError(f"accumulate_into: got dtype {made.dtype}, allowed are {wide} and weight's {weight.dtype}")


def check_upstream(upstream: object, reduction: str, shape: tuple[int, ...]) -> None:
    """Check the gradient of what is minimised with respect to the loss: a finite number, or an array like the loss."""
    if not isinstance(upstream, jax.Array | np.ndarray | np.generic):
        spec.check_number("upstream", upstream, also="an array of the loss's shape")
        return
    check_types({"upstream": upstream})
    spec.check_dtype("upstream", info(upstream), spec.FLOAT_DTYPES)
    allowed = shape if reduction == "none" else ()
    if upstream.shape != allowed:
        raise ValueError(f"upstream: got shape {upstream.shape}, allowed is a number or the loss's shape {allowed}")


def check_counted(target: RawArray, token_weight: RawArray | None, class_weight: RawArray | None) -> None:
    """Check types, sizes and dtypes of the arrays of mean's denominator."""
    arrays = {"target": target, "token_weight": token_weight, "class_weight": class_weight}
    check_types(arrays, ("token_weight", "class_weight"))
    spec.check_counted(
        info(target), *(None if array is None else info(array) for array in (token_weight, class_weight))
    )


def check_normalizer(normalizer: object, reduction: str) -> None:
    known = info(normalizer) if isinstance(normalizer, jax.Array | np.ndarray | np.generic) else None
    spec.check_normalizer(normalizer, known, reduction)


def check_ids(target: RawArray, vocab: int, ignore_index: int, shift: int = 0, name: str = "target") -> None:
    """Raise ValueError for an id outside, where looking at the ids waits for nothing. Else that token's loss is NaN.

    The first ``shift`` ids along the last axis are no position's target. A NumPy array is always looked at before it
    is converted, because int64 would wrap to int32. ``name``: of the argument, for the error.
    """
    ids = readable(target)
    if ids is None:
        return
    outside = ((ids < 0) | (ids >= vocab)) & (ids != ignore_index)
    if shift:
        outside = outside & (np.arange(ids.shape[-1]) >= shift)
    if outside.any():
        position = tuple(int(axis[0]) for axis in np.nonzero(outside))
        raise spec.out_of_range_error(position, int(ids[position]), vocab, ignore_index, name)


def _check_temperatures(temperature: RawArray, target: RawArray, ignore_index: int, shift: int) -> None:
    """Look at the temperatures of the tokens that count, where looking waits for nothing."""
    values, ids = readable(temperature), readable(target)
    if values is None or ids is None:
        return
    counted = ids != ignore_index
    if shift:
        counted = np.concatenate([counted[..., shift:], np.zeros_like(counted[..., :shift])], axis=-1)
    outside = counted & ~((values >= spec.SMALLEST_FACTOR) & (values <= spec.LARGEST_FACTOR))
    if outside.any():
        position = tuple(int(axis[0]) for axis in np.nonzero(outside))
        raise spec.temperature_error(position, float(values[position]))


def stopped(values: RawArray) -> Array:
    """A JAX array without gradient."""
    return lax.stop_gradient(jnp.asarray(values))


def counted_target(target: RawArray, mask: RawArray | None, ignore_index: int) -> tuple[Array, Array]:
    """The targets with ignore_index where the mask is 0, so that no work is done there; and which tokens count.

    Targets of NumPy stay so while the mask is NumPy's too: then their ids can be looked at.
    """
    spec.check_ignore_index(ignore_index)
    counted = target != ignore_index
    if mask is not None:
        check_flags("mask", mask, {"one element per token": tuple(target.shape)})
        counted = counted & (mask != 0)
    if isinstance(target, np.ndarray):
        if isinstance(counted, np.ndarray | np.generic):
            masked = np.where(counted, target, ignore_index).astype(target.dtype)
            return masked, jnp.asarray(counted)  # type: ignore[return-value]  # what takes an Array takes NumPy's too
        target = narrow(target)
    return jnp.where(counted, jnp.asarray(target), jnp.asarray(ignore_index, target.dtype)), jnp.asarray(counted)


def check_flags(name: str, values: RawArray, shapes: dict[str, tuple[int, ...]]) -> None:
    check_type(name, values)
    objectives.check_flag_array(name, info(values), shapes)


def known_constant(name: str, values: RawArray, shapes: dict[str, tuple[int, ...]]) -> Array:
    """An array of known numbers, checked; without gradient."""
    check_type(name, values)
    objectives.check_constant(name, info(values), shapes)
    return stopped(values)


def narrow(ids: RawArray) -> Array:
    """Ids as int32. One that int32 cannot hold stays outside the vocabulary."""
    if isinstance(ids, np.ndarray | np.generic):
        ids = np.where(ids == ids.astype(np.int32), ids, np.iinfo(np.int32).max)
    return jnp.asarray(ids).astype(jnp.int32)


def readable(array: RawArray) -> NDArray[np.integer] | None:
    """The values, if looking at them waits for nothing, else None."""
    if isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable and all(device.platform == "cpu" for device in array.devices())
    ):
        return None
    return np.asarray(array)


def check_constants(primals: object) -> None:
    """Raise ValueError if a constant is differentiated."""
    for name in ("token_weight", "class_weight", "normalizer", "temperature"):
        leaf = getattr(primals, name, None)
        if leaf is not None and leaf.perturbed:
            raise ValueError(
                f"{name}: got an array that is differentiated, allowed is a constant: jax.lax.stop_gradient it, or "
                f"weight the losses of reduction='none' yourself"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Several devices


def check_tracked(shard: Shard, needs: Needs) -> None:
    """Raise ValueError if gradients are wanted and JAX does not say which of them must be summed."""
    if shard.active and any(needs) and not parallel.tracked():
        raise ValueError(
            f"axis_name: got {shard.axis_name!r} of a jax.shard_map with check_vma=False, allowed for gradients "
            f"is check_vma=True (else JAX does not say what must be summed), or sharded_linear_cross_entropy"
        )


def _check_placement(shard: Shard, raw: RawArrays) -> None:
    """Raise ValueError if JAX knows (check_vma=True) that an array lies on the devices in a wrong way."""
    if not shard.active or not parallel.tracked():
        return
    names = set(parallel.names_of(shard.axis_name))
    wanted = {"weight": True, "target": False, "token_weight": False, "normalizer": False, "temperature": False}
    if shard.sequence_parallel:
        wanted["hidden"] = True
    if raw.accumulate_into is not None:
        wanted["accumulate_into"] = True
    for name, differs in wanted.items():
        array = getattr(raw, name)
        if not isinstance(array, jax.Array):
            if differs:
                raise ValueError(f"{name}: got the same array on every device, allowed is each device's part of it")
            continue
        if differs and parallel.varying(array) & names != names:
            raise ValueError(
                f"{name}: got an array that is the same on all devices of {shard.axis_name!r}, allowed is each "
                f"device's part of it (in_specs of jax.shard_map)"
            )
        if not differs:
            check_same(name, array, shard)


def check_same(name: str, array: RawArray, shard: Shard) -> None:
    """Raise ValueError if JAX knows (check_vma=True) that the devices of the axis have different arrays."""
    if not shard.active or not parallel.tracked() or not isinstance(array, jax.Array):
        return
    if parallel.varying(array) & set(parallel.names_of(shard.axis_name)):
        raise ValueError(
            f"{name}: got an array that varies over {shard.axis_name!r}, allowed is the same one on all its "
            f"devices (in_specs of jax.shard_map without that axis)"
        )


def _check_uncut(raw: RawArrays) -> None:
    """Raise ValueError if Explicit axes of a mesh cut an array: JAX cannot derive the types of loops over its parts."""
    for name, array in raw._asdict().items():
        sharding = getattr(jax.typeof(array), "sharding", None) if isinstance(array, jax.Array) else None
        if sharding is not None and any(axis is not None for axis in sharding.spec):
            raise ValueError(
                f"{name}: got an array that Explicit axes of a mesh cut, {sharding.spec}, allowed is an uncut one, or "
                f"sharded_linear_cross_entropy(mesh, ...) instead, or a jax.shard_map around this call"
            )
