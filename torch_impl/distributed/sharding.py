"""Calls that a compiled graph cannot hold: a sharded vocabulary, DTensors, a buffer for dW, a deferred dW.

They are prepared as in checks.py, with three more steps. DTensors become local tensors, the ranks compare their
arguments, and the plan is for the largest shard. Then the same autograd functions run. torch.compile leaves its graph
here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.planning import ChunkPlan
from logitless.scratch import Kind
from logitless.spec import LossOptions
from logitless.torch_impl import autograd, checks
from logitless.torch_impl.backend import adds_in_one_pass, backend_named
from logitless.torch_impl.call import Arrays, Call, Request, accumulation_dtype
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.distributed import agreement, dtensors, parallel, placements
from logitless.torch_impl.distributed.deferred import DeferredWeightGrad
from logitless.torch_impl.distributed.parallel import Shard
from logitless.torch_impl.kernels import first_check


class _AddedToMainGrad(torch.autograd.Function):
    """The weight itself, for Megatron's DistributedDataParallel, which waits for the weight's gradient.

    Megatron's hook runs when a parameter's .grad arrives, and with overlap_grad_reduce it refuses None. So this does
    what Megatron's own fused kernels do: it marks the parameter and gives it a .grad that the hook throws away.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, parameter: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None]:
        parameter = ctx.parameter
        parameter.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
        return make(parameter, requires_grad=False), None


@tracing.outside_graphs
def values(
    arrays: Arrays, normalizer: Tensor | float | None, request: Request
) -> tuple[tuple[Tensor, ...], DeferredWeightGrad | None]:
    """The results of :func:`autograd.values`, and what computes dW later, if asked for."""
    placed, call = ready(arrays, normalizer, request)
    if placed.group is None and not first_check.passes(placed.arrays, call):
        placed, call = ready(arrays, normalizer, request)  # without the kernels
    local, axis = placed.arrays, placed.token_axis
    if request.deferred:
        _check_leaves(arrays)
        call = dataclasses.replace(call, deferred=DeferredWeightGrad(arrays.weight, arrays.bias))
    elif call.into is not None and hasattr(arrays.weight, "grad_added_to_main_grad"):
        weight = _AddedToMainGrad.apply(local.weight, arrays.weight)  # type: ignore[no-untyped-call]
        local = local._replace(weight=weight)
    results = autograd.values(local, normalizer, call)
    # The tokens' axes in the caller's order. A loss that is one number has none.
    return tuple(value.movedim(0, axis) if axis and value.dim() else value for value in results), call.deferred


def ready(
    arrays: Arrays, normalizer: Tensor | float | None, request: Request, more: dict[str, object] | None = None
) -> tuple[placements.Placed, Call]:
    """The checked tensors, with the tokens' shared axis first, and the call on them. Like :func:`checks.ready`.

    ``more``: what else must be the same on every rank, by its name in errors.
    """
    options = checks.loss_options(request)
    if request.group is not None:
        parallel.check_member(request.group)
    elif request.sequence_parallel and not dtensors.is_dtensor(arrays.weight):
        raise ValueError("sequence_parallel: got True without a process_group, allowed is False")
    placed, shard = placements.localize(arrays, request.group, request.sequence_parallel), None
    if placed.group is None:
        dtype, backend = _checked(placed, normalizer, request)
    else:
        with refusing(placed.group, placed.device, len(more or {})):
            dtype, backend = _checked(placed, normalizer, request)
            facts = _facts(placed, dtype, backend, request, options) | (more or {})
        vocab = placed.arrays.weight.shape[0]
        shard = agreement.agree(placed.group, placed.device, facts, vocab, placed.token_axis is not None)
    target = checks.scored(placed.arrays, request, shard.vocab if shard else placed.arrays.weight.shape[0])
    placed = dataclasses.replace(placed, arrays=placed.arrays._replace(target=target))
    local = checks.plain(placed.tokens_first)
    plan = _plan(local, request, options, dtype, backend, shard)
    grad = torch.is_grad_enabled()
    call = Call(
        options, plan, dtype, request.statistics, grad, backend, shard=shard,
        into=dtensors.local(request.into) if grad else None, log_probs=request.log_probs, lse=request.lse,
    )  # fmt: skip
    return dataclasses.replace(placed, arrays=local), call


@contextlib.contextmanager
def refusing(group: dist.ProcessGroup | None, device: torch.device, more: int) -> Iterator[None]:
    """Tell the group's other ranks, which :func:`ready` makes wait, if this rank's arguments are refused inside.

    ``more``: how many facts ready is given.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError):
        if group is not None:
            agreement.refuse(group, device, 1 + FACTS + more)
        raise


def _checked(
    placed: placements.Placed, normalizer: Tensor | float | None, request: Request
) -> tuple[torch.dtype, Kind]:
    """Make every check that one rank can make alone. Returns the dtype of the computation and the backend."""
    axis, hidden = placed.token_axis, placed.arrays.hidden
    ranks = 1 if axis is None else dist.get_world_size(placed.group)
    if axis is not None and isinstance(hidden, Tensor) and hidden.ndim < 2:
        raise ValueError(
            f"hidden: got shape {tuple(hidden.shape)}, allowed under sequence parallelism is [N / R, ..., D]"
        )
    dtype, backend = checks.check_call(placed.arrays, normalizer, request, axis or 0, ranks)
    if request.into is not None:
        _check_buffer(dtensors.local(request.into), placed.arrays.weight, dtype, backend)
    return dtype, backend


def _check_buffer(into: object, weight: Tensor, dtype: torch.dtype, backend: Kind) -> None:
    """Raise unless dW may be added to the tensor given as accumulate_into."""
    if not isinstance(into, Tensor):
        raise TypeError(f"accumulate_into: got {type(into).__name__}, allowed is a torch.Tensor")
    if into.shape != weight.shape:
        raise ValueError(
            f"accumulate_into: got shape {tuple(into.shape)}, allowed is this rank's weight's {tuple(weight.shape)}"
        )
    wide = accumulation_dtype(dtype)
    if into.dtype not in (wide, weight.dtype):
        raise TypeError(f"accumulate_into: got dtype {into.dtype}, allowed are {wide} and weight's {weight.dtype}")
    if into.device != weight.device:
        raise ValueError(f"accumulate_into: got device {into.device}, allowed is weight's {weight.device}")
    plain = into.is_contiguous() or into.T.is_contiguous()
    if into.requires_grad or not plain or into.data_ptr() % backend_named(backend).BUFFER_ALIGNMENT:
        raise ValueError(
            "accumulate_into: got a tensor that requires grad, is not contiguous (nor the transpose of one that is) or "
            "(triton) does not start on 16 bytes, allowed is a plain buffer"
        )
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError("accumulate_into: got a buffer beside a weight that requires no grad, allowed is None")


def _check_leaves(arrays: Arrays) -> None:
    for name in ("weight", "bias"):
        parameter = getattr(arrays, name)
        if parameter is not None and not parameter.is_leaf:
            raise ValueError(
                f"{name}: got a tensor that others were computed into, allowed beside defer_weight_grad is "
                f"a leaf: its grad is written to"
            )


def _dtype_of(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(tensor.dtype)


def _facts(
    placed: placements.Placed, dtype: torch.dtype, backend: Kind, request: Request, options: LossOptions
) -> dict[str, object]:
    """What must be the same on every rank, by its name in errors."""
    arrays = placed.tokens_first
    target = arrays.target
    ids: object = 0
    if target.device.type == "cpu":  # where looking costs nothing
        ids = target.reshape(-1).tolist()
    return {
        "hidden's number of elements": arrays.hidden.numel(),
        "hidden's size D": arrays.hidden.shape[-1],
        "the number of tokens": target.numel(),
        "the shape of target": tuple(target.shape),
        "the target's ids": ids,
        "the dtype of hidden": _dtype_of(arrays.hidden),
        "the dtype of weight": _dtype_of(arrays.weight),
        "the dtype of the computation": str(dtype),
        "the dtype of bias": _dtype_of(arrays.bias),
        "whether there is a token_weight": arrays.token_weight is not None,
        "whether there is a class_weight": arrays.class_weight is not None,
        "whether there is a temperature per token": arrays.temperature is not None,
        "whether hidden requires grad": bool(arrays.hidden.requires_grad),
        "whether anything requires grad": any(isinstance(v, Tensor) and v.requires_grad for v in arrays),
        "whether autograd is on": torch.is_grad_enabled(),
        "the options": (
            options,
            request.statistics,
            request.log_probs,
            request.lse,
            request.shift,
            request.sequence_parallel,
        ),
        "the plan": request.plan,
        "the memory budget": -1 if request.memory_budget is None else request.memory_budget,
        "the backend and what becomes of dW": (backend, _dtype_of(request.into), request.deferred),
    }


FACTS = 19  # the length of _facts


def _plan(
    arrays: Arrays, request: Request, options: LossOptions, dtype: torch.dtype, backend: Kind, shard: Shard | None
) -> ChunkPlan:
    """The plan for the largest shard, the same on every rank, cut to this rank's entries."""
    tokens, (vocab, size) = arrays.target.numel(), arrays.weight.shape
    largest, budget = shard.largest if shard else vocab, request.memory_budget
    if isinstance(request.plan, tuple):
        plan = checks.given_plan(arrays, request, dtype, largest)
        _check_adds(plan, request, dtype)
        return _cut(plan, vocab)
    if budget is not None and shard is not None:
        more = shard.scratch_bytes(tokens, size, dtype.itemsize)
        if budget <= more:
            raise ValueError(
                f"memory_budget: got {budget} bytes, allowed is more than {more}, what the exchange between ranks takes"
            )
        budget -= more
    adds = request.into is not None and not request.deferred and torch.is_grad_enabled()
    narrow = adds and _is_narrow(request.into, dtype)
    planned = checks.planner(arrays, dtype, backend, largest)

    def choose(one_pass: bool) -> ChunkPlan:
        order = "vocab" if narrow and not one_pass else None
        preferred = checks.preference(request)
        return planned(tokens=tokens, memory_budget=budget, one_pass=one_pass, order=order, prefer=preferred)

    plan = choose(options.reduction != "none" and options.separable and not request.lse)
    if adds and not (plan.one_pass and adds_in_one_pass(backend_named(backend), plan)):
        plan = choose(False)
    return _cut(plan, vocab)


def _is_narrow(into: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a buffer rounds what is added to it."""
    return into is not None and into.dtype != accumulation_dtype(dtype)


def _check_adds(plan: ChunkPlan, request: Request, dtype: torch.dtype) -> None:
    """Raise ValueError if a narrow buffer would round a gradient more than once: it takes one addition per entry."""
    if request.into is not None and _is_narrow(request.into, dtype) and plan.adds_chunks:
        raise ValueError(
            f"plan: got one that adds to dW chunk by chunk beside accumulate_into of {request.into.dtype}, allowed is "
            f"one chunk of tokens, or order='vocab' or 'both' with all tokens at a time: each chunk would be rounded"
        )


def _cut(plan: ChunkPlan, vocab: int) -> ChunkPlan:
    return dataclasses.replace(plan, vocab=vocab, vocab_chunk=min(plan.vocab_chunk, vocab))
