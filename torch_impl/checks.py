"""What every call goes through before it runs: tensors are checked, a plan is chosen, kernels get memory they can read.

Mirror of jax_impl/checks.py. An error names the argument, what came and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from logitless import objectives, spec
from logitless.planning import ChunkPlan, Preference, check_plan_sizes
from logitless.planning import Request as PlanRequest
from logitless.planning import choose as choose_plan
from logitless.scratch import Kind
from logitless.spec import ArrayInfo, LossOptions, Reduction, WeightLayout
from logitless.torch_impl.backend import backend_named, chosen_backend
from logitless.torch_impl.call import TENSORS, Arrays, Call, LatePlan, Request, is_turned
from logitless.torch_impl.chunk import all_inside
from logitless.torch_impl.compiled import tracing

# ---------------------------------------------------------------------------------------------------------------------
# A whole call


def ready(arrays: Arrays, normalizer: Tensor | float | None, request: Request) -> tuple[Arrays, Call]:
    """A call on one device: its arrays as the kernels read them, and everything else, all of it checked.

    What was checked of shapes, dtypes and options is not checked again in another call that has them.
    """
    signature = _signature(arrays, request)
    call = None if signature is None else _calls.get(signature)
    # A backend may have become unavailable.
    if call is None or call.backend != _backend(arrays, request, call.compute_dtype):
        arrays, call = _checked(arrays, normalizer, request)
        if signature is not None:
            if len(_calls) >= MOST_CALLS:
                _calls.clear()
            call = _calls[signature] = dataclasses.replace(call, number=next(_numbers))
    else:
        check_normalizer(normalizer, request.reduction, arrays.hidden.device)
        arrays = arrays._replace(target=scored(arrays, request, arrays.weight.shape[0]))
    return (arrays if call.traced else plain(arrays)), call


# Calls of this many signatures are known. A token count is part of a signature.
MOST_CALLS = 4096
_calls: dict[tuple[object, ...], Call] = {}
_numbers = itertools.count()
# Classes of the constants that are known by their signature. A tuple is a plan.
CONSTANTS = frozenset((int, float, bool, str, type(None), tuple))


def _signature(arrays: Arrays, request: Request) -> tuple[object, ...] | None:
    """All that checks and a plan depend on, but for values and what backends there are; None where somebody is looking,
    or where an argument is of another class.

    Equal constants of two classes are two: one of them may be refused.
    """
    kinds = [*map(type, request), *(map(type, request.plan) if isinstance(request.plan, tuple) else ())]
    if torch.compiler.is_compiling() or tracing.in_transform() or not CONSTANTS.issuperset(kinds):
        return None
    found: list[object] = [*request, *kinds, torch.is_grad_enabled()]
    for tensor in arrays:
        found.append(type(tensor))
        if tensor is not None:
            if type(tensor) not in TENSORS:
                return None
            found += (tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad)
            if tensor.layout is torch.strided:
                found += (tensor.stride(), tensor.is_neg(), tensor.data_ptr() % 16)
    kind = arrays.hidden.device.type if type(arrays.hidden) in TENSORS else ""
    if kind not in ("cuda", "cpu"):
        return None
    return (*found, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


def _checked(arrays: Arrays, normalizer: Tensor | float | None, request: Request) -> tuple[Arrays, Call]:
    """The call, and its arrays with the ids that it scores."""
    options = loss_options(request)
    dtype, backend = check_call(arrays, normalizer, request)
    arrays = arrays._replace(target=scored(arrays, request, arrays.weight.shape[0]))
    plan, traced = _chosen_plan(arrays, request, options, dtype, backend), tracing.is_looked_at(arrays.hidden)
    grad = torch.is_grad_enabled()
    call = Call(
        options, plan, dtype, request.statistics, grad, backend, traced, log_probs=request.log_probs, lse=request.lse
    )
    return arrays, call


def loss_options(request: Request) -> LossOptions:
    """The checked options, temperature included."""
    names = (field.name for field in dataclasses.fields(LossOptions))
    options = LossOptions(**{name: tracing.number(getattr(request, name)) for name in names})
    return options.tempered(tracing.number(request.temperature))


def check_call(
    arrays: Arrays, normalizer: Tensor | float | None, request: Request, shared_axis: int = 0, ranks: int = 1
) -> tuple[torch.dtype, Kind]:
    """Check what one rank can check alone; the dtype of the computation and the backend.

    ``ranks`` hold hidden together, one after another along ``shared_axis``.
    """
    dtype = check_tensors(arrays, shared_axis, ranks)
    spec.check_shift(tracing.number(request.shift), tuple(arrays.target.shape))
    check_normalizer(normalizer, request.reduction, arrays.hidden.device)
    return dtype, _backend(arrays, request, dtype)


def _backend(arrays: Arrays, request: Request, dtype: torch.dtype) -> Kind:
    return chosen_backend(request.backend, arrays.hidden.device, dtype, arrays.temperature is not None)


def given_plan(arrays: Arrays, request: Request, dtype: torch.dtype, vocab: int | None = None) -> ChunkPlan:
    """The request's own plan, made for these sizes. ``vocab``: of the largest shard."""
    assert isinstance(request.plan, tuple)
    plan = ChunkPlan(*map(tracing.number, request.plan)).in_narrow_blocks
    tokens = tracing.number(arrays.target.numel())
    own, size = map(tracing.number, arrays.weight.shape)
    check_plan_sizes(plan, tokens, size, own if vocab is None else vocab, dtype_name(dtype))
    if plan.has_room and vocab is not None:
        raise ValueError(NO_FREE_ROWS)
    if plan.order == "both" and tracing.is_looked_at(arrays.weight):
        raise ValueError(
            "plan: got one of order 'both', allowed inside torch.compile and torch.func are 'tokens' and 'vocab': what "
            "waits between the halves is no tensor of a graph"
        )
    turned = is_turned(arrays.weight)
    # A turned dW has the vocabulary along its rows, which no part of it has to itself.
    return dataclasses.replace(plan.with_whole_slices if turned else plan, turned=turned)


def planner(arrays: Arrays, dtype: torch.dtype, backend: Kind, vocab: int | None = None) -> Callable[..., ChunkPlan]:
    """What chooses the plan for these arrays; ``tokens`` and what is left open are for the caller to say."""
    own, size = map(tracing.number, arrays.weight.shape)
    request = functools.partial(
        PlanRequest,
        hidden=size,
        vocab=own if vocab is None else vocab,
        dtype=dtype_name(dtype),
        device="cpu" if arrays.hidden.device.type == "cpu" else "gpu",
        kind=backend,
        turned=is_turned(arrays.weight),
    )
    return lambda **more: choose_plan(request(**more))


def _chosen_plan(
    arrays: Arrays, request: Request, options: LossOptions, dtype: torch.dtype, backend: Kind
) -> ChunkPlan | LatePlan:
    tokens, budget = arrays.target.numel(), tracing.number(request.memory_budget)
    if isinstance(request.plan, tuple):
        plan = given_plan(arrays, request, dtype)
        may = _may_wait(arrays, request, options) and _may_lend(arrays, request, dtype, backend)
        if plan.has_room and not (may if plan.in_place else _may_free(arrays, dtype, backend)):
            raise ValueError(NO_FREE_ROWS)
        return plan
    one_pass = options.reduction != "none" and options.separable and not request.lse
    waits = _may_wait(arrays, request, options)
    lends = waits and _may_lend(arrays, request, dtype, backend)
    hold = waits and (budget is not None or preference(request) == "fast")
    choose = functools.partial(
        planner(arrays, dtype, backend), memory_budget=budget, one_pass=one_pass, hold=hold, lends=lends,
        prefer=preference(request), frees=_may_free(arrays, dtype, backend),
        early=one_pass and not tracing.is_looked_at(arrays.weight),
    )  # fmt: skip
    if tracing.is_symbol(tokens):
        products_wait = backend_named(backend).PRODUCTS_WAIT
        return tracing.symbolic_plan(tokens, lambda n: choose(tokens=n), budget, products_wait, preference(request))
    return choose(tokens=tokens)


def preference(request: Request) -> Preference:
    """Which plan the call prefers, if it was given none."""
    return cast(Preference, request.plan) if isinstance(request.plan, str) else "balanced"


NO_FREE_ROWS = (
    "plan: got one with lends=True, allowed is one without: either this call makes no dW of its own (accumulate_into, "
    "a deferred, frozen or sharded weight, torch.compile), or its results (entropy, lse) or its GPU and dtype need "
    "another way"
)


def _may_wait(arrays: Arrays, request: Request, options: LossOptions) -> bool:
    """Whether exponentials can wait for an upstream gradient per token, or logits for several."""
    return options.separable and not request.lse and not tracing.is_looked_at(arrays.weight)


def _may_lend(arrays: Arrays, request: Request, dtype: torch.dtype, backend: Kind) -> bool:
    """Whether what waits can lie in dW's rows: exponentials, where the backward of a call on one device makes dW. A dW
    that goes elsewhere, and those of several ranks, are sharding.py's."""
    if request.log_probs and request.statistics:  # logits wait
        return False
    wanted = torch.is_grad_enabled() and arrays.weight.requires_grad and arrays.temperature is None
    return wanted and backend_named(backend).lends(arrays.weight, dtype)


def _may_free(arrays: Arrays, dtype: torch.dtype, backend: Kind) -> bool:
    """Whether such a dW's memory can be there before dW is made. What torch.compile or torch.func looks at leaves no
    memory behind between forward and backward."""
    wanted = torch.is_grad_enabled() and arrays.weight.requires_grad and arrays.weight.dtype == dtype
    return wanted and backend == "triton" and not tracing.is_looked_at(arrays.weight)


# ---------------------------------------------------------------------------------------------------------------------
# One argument, or one kind of them


def check_tensors(arrays: Arrays, shared_axis: int = 0, ranks: int = 1) -> torch.dtype:
    """Types, devices, sizes and dtypes; returns the dtype of the computation (autocast's where it applies).

    ``ranks`` hold hidden together, one after another along ``shared_axis``.
    """
    hidden, weight, bias, target, token_weight, class_weight, temperature = arrays
    optional = {"bias": bias, "token_weight": token_weight, "class_weight": class_weight, "temperature": temperature}
    present: dict[str, Tensor] = {"hidden": hidden, "weight": weight, "target": target}
    present |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in present.items():
        check_type(name, tensor)
    for name, tensor in present.items():
        check_device(name, tensor, "hidden's", hidden.device)
    for name in ("token_weight", "class_weight"):
        check_constant(name, optional[name])
    if temperature is not None and temperature.requires_grad:
        raise ValueError("temperature: got a tensor that requires grad, allowed is a constant: detach it")
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    infos = {name: info(tensor) for name, tensor in present.items()}
    if ranks > 1:
        sizes = list(hidden.shape)
        sizes[shared_axis] *= ranks
        infos["hidden"] = ArrayInfo(tuple(sizes), dtype_name(hidden.dtype))
    spec.check_arrays(**infos, mixed_dtypes=autocast)
    if autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(hidden.dtype, weight.dtype)


def check_counted(target: Tensor, token_weight: Tensor | None, class_weight: Tensor | None) -> None:
    """Types, devices, sizes and dtypes of what mean's denominator is made of."""
    infos: list[ArrayInfo | None] = []
    for name, tensor in (("target", target), ("token_weight", token_weight), ("class_weight", class_weight)):
        if tensor is not None or name == "target":
            check_type(name, tensor, strided=False)
        if tensor is not None:
            check_device(name, tensor, "target's", target.device)
        infos.append(None if tensor is None else info(tensor))
    spec.check_counted(info(target), *infos[1:])


def check_type(name: str, tensor: object, *, strided: bool = True) -> None:
    """Raise TypeError unless ``tensor`` is a tensor, of plain layout if ``strided``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, allowed is a torch.Tensor")
    if strided and tensor.layout != torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, allowed is torch.strided")


def check_device(name: str, tensor: Tensor, owner: str, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is on the ``device`` of its ``owner``."""
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, allowed is {owner} {device}")


def check_constant(name: str, tensor: Tensor | None) -> None:
    """Raise ValueError if a gradient is asked of what has none."""
    if tensor is not None and tensor.requires_grad:
        raise ValueError(
            f"{name}: got a tensor that requires grad, allowed is a constant: detach it, or weight the losses of "
            f"reduction='none' yourself"
        )


def check_normalizer(normalizer: Tensor | float | None, reduction: Reduction, device: torch.device) -> None:
    """Raise TypeError or ValueError unless mean's denominator is a number, a constant tensor without axes, or None."""
    described = info(normalizer) if isinstance(normalizer, Tensor) else None
    # A symbol is some finite number; asking which would make the compiled code one for this number.
    spec.check_normalizer(1.0 if tracing.is_symbol(normalizer) else normalizer, described, reduction)
    if not isinstance(normalizer, Tensor):
        return
    if normalizer.requires_grad:
        raise ValueError("normalizer: got a tensor that requires grad, allowed is a constant: detach it")
    if normalizer.device != device and normalizer.device.type != "cpu":
        raise ValueError(f"normalizer: got device {normalizer.device}, allowed is hidden's {device} or the CPU")


def scored(arrays: Arrays, request: Request, vocab: int) -> Tensor:
    """The ids that the positions are scored against, checked: target, moved to the front by the request's shift."""
    target, shift, ignore_index = arrays.target, tracing.number(request.shift), tracing.number(request.ignore_index)
    check_ids(target[..., shift:] if shift else target, vocab, ignore_index, shift)
    if shift:
        target = torch.nn.functional.pad(target[..., shift:], (0, shift), value=ignore_index)
    if arrays.temperature is not None:
        _check_temperatures(arrays.temperature, target, ignore_index)
    return target


def _check_temperatures(temperature: Tensor, target: Tensor, ignore_index: int) -> None:
    """Look at the temperatures of the tokens that count, where looking costs no synchronisation."""
    if temperature.device.type != "cpu" or tracing.is_traced(temperature):
        return
    inside = (temperature >= spec.SMALLEST_FACTOR) & (temperature <= spec.LARGEST_FACTOR)
    outside = ~inside & (target != ignore_index)
    if bool(outside.any()):
        position = tuple(int(axis[0]) for axis in torch.nonzero(outside, as_tuple=True))
        raise spec.temperature_error(position, float(temperature[position]))


def ids_outside(target: Tensor, vocab: int, ignore_index: int) -> Tensor:
    """Which ids are neither of the vocabulary nor ignore_index, bool [...]."""
    return ((target < 0) | (target >= vocab)) & (target != ignore_index)


def check_ids(target: Tensor, vocab: int, ignore_index: int, shift: int = 0, name: str = "target") -> None:
    """Look at the ids where looking costs no synchronisation; elsewhere an id outside makes that token's loss NaN.

    ``shift``: how many there were before them along the last axis. ``name``: of the argument, for the error.
    """
    if target.device.type != "cpu" or tracing.is_traced(target):
        return
    if all_inside(target, vocab):
        return
    outside = ids_outside(target, vocab, ignore_index)
    if bool(outside.any()):
        position = tuple(int(axis[0]) for axis in torch.nonzero(outside, as_tuple=True))
        given = (*position[:-1], position[-1] + shift) if shift else position
        raise spec.out_of_range_error(given, int(target[position]), vocab, ignore_index, name)


def counted_target(target: Tensor, mask: Tensor | None, ignore_index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The targets with ignore_index where the mask is 0, so that no work is done there; and which tokens count."""
    spec.check_ignore_index(ignore_index)
    counted = target != ignore_index
    if mask is not None:
        counted = counted & flags("mask", mask, {"one element per token": tuple(target.shape)}, hidden)
    return target.masked_fill(~counted, ignore_index), counted


def flags(name: str, tensor: Tensor, shapes: dict[str, tuple[int, ...]], hidden: Tensor) -> Tensor:
    """Where a tensor of yes and no is not 0, checked."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name}: got {type(tensor).__name__}, allowed is a torch.Tensor{' or None' * (name == 'mask')}"
        )
    objectives.check_flag_array(name, info(tensor), shapes)
    check_device(name, tensor, "hidden's", hidden.device)
    return tensor != 0


def known_constant(name: str, tensor: Tensor, shapes: dict[str, tuple[int, ...]], hidden: Tensor) -> Tensor:
    """A tensor of known numbers, checked."""
    check_type(name, tensor, strided=False)
    objectives.check_constant(name, info(tensor), shapes)
    check_device(name, tensor, "hidden's", hidden.device)
    if tensor.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires grad, allowed is a constant: detach it")
    return tensor


def laid_out(weight: Tensor, hidden: Tensor, layout: WeightLayout) -> Tensor:
    """A weight as [V, D]: a view of one that came as [D, V]."""
    if layout == "vd" or not (isinstance(weight, Tensor) and isinstance(hidden, Tensor)):
        return weight  # another type is refused later
    spec.check_weight_layout(layout)
    spec.check_turned_weight(tuple(weight.shape), tuple(hidden.shape))
    return weight.T


def info(tensor: Tensor) -> ArrayInfo:
    """Shape and dtype, as the checks of :mod:`logitless.spec` read them."""
    return ArrayInfo(tuple(tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in both frameworks."""
    return str(dtype).removeprefix("torch.")


def is_placed(tensor: object) -> bool:
    """Whether it is a DTensor; nothing is imported, and a compiler sees an attribute only."""
    return hasattr(tensor, "placements")


# ---------------------------------------------------------------------------------------------------------------------
# Memory that kernels read. They read a vector element after element and a matrix by the distance of its rows, whatever
# a tensor's strides say, and know nothing of PyTorch's negative bit (``z.conj().imag``). Plain operations take any
# layout.


def plain(arrays: Arrays) -> Arrays:
    """A call's arrays as the kernels read them. The copies are differentiable, and made only where needed."""
    hidden, weight, bias, target, *rest = arrays
    bias, *rest = (None if v is None else vector(v) for v in (bias, *rest))
    return Arrays(signed(hidden), _matrix(weight), bias, vector(target), *rest)


def vector(tensor: Tensor) -> Tensor:
    """``tensor`` without gaps, in the order of its axes: itself, or a copy of a part, an expanded or a moved one."""
    tensor = signed(tensor)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def signed(tensor: Tensor) -> Tensor:
    """``tensor`` with the signs that its memory has."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _matrix(tensor: Tensor) -> Tensor:
    """``tensor`` with rows that do not overlap: an expanded weight is copied, as TMA may refuse its strides.

    Rows of any distance stay as they are; where the last axis has steps, the kernels' host code copies.
    """
    tensor = signed(tensor)
    rows, columns = tensor.shape
    return tensor.contiguous() if rows > 1 and tensor.stride(0) < columns and tensor.stride(1) == 1 else tensor
