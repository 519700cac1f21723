"""Calls that one device's graph cannot hold: a sharded vocabulary, DTensors, a buffer for dW, a deferred dW.

Called by api.py with its arguments; checks once, has the ranks agree, plans for the largest shard, and calls the same
autograd functions. torch.compile leaves its graph here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.planning import ChunkPlan, check_plan_sizes
from logitless.planning import plan as make_plan
from logitless.spec import LossOptions, TokenStats
from logitless.torch_impl import api, layouts, steps
from logitless.torch_impl.autograd import LinearCrossEntropyFunction, LinearLogProbsFunction
from logitless.torch_impl.call import Arrays, Call, accumulation_dtype
from logitless.torch_impl.deferred import DeferredWeightGrad
from logitless.torch_impl.distributed import agreement, parallel, placements
from logitless.torch_impl.distributed.parallel import Shard


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything about a call that is no array."""

    options: LossOptions
    statistics: bool
    log_probs: bool
    plan: ChunkPlan | None
    memory_budget: int | None
    backend: str | None
    group: Any
    sequence_parallel: bool
    into: Any = None
    deferred: bool = False


class _AddedToMainGrad(torch.autograd.Function):
    """The weight itself, where Megatron's DistributedDataParallel waits for its gradient.

    Megatron's hook runs when a parameter's .grad arrives, and with overlap_grad_reduce refuses None. As its own fused
    kernels do: the parameter is marked, and gets a .grad that nobody reads, which the hook throws away.
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


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="process_group, DTensors, accumulate_into and defer_weight_grad run outside of a graph"
)
def linear_cross_entropy(
    arrays: dict[str, Any], normalizer: Tensor | float | None, request: Request
) -> tuple[Any, ...]:
    """(loss, TokenStats or None, DeferredWeightGrad or None); ``arrays`` by the names of the arguments."""
    given = arrays["weight"], arrays["bias"]
    placed, call = _prepared(arrays, normalizer, request)
    a = placed.arrays
    if call.into is not None and not request.deferred and hasattr(given[0], "grad_added_to_main_grad"):
        a["weight"] = _AddedToMainGrad.apply(a["weight"], given[0])  # type: ignore[no-untyped-call]
    if request.deferred:
        _check_leaves(given)
        call = dataclasses.replace(call, deferred=DeferredWeightGrad(*given))
    apply: Any = LinearCrossEntropyFunction.apply
    loss, *stats = apply(
        a["hidden"], a["weight"], a["bias"], a["target"], a["token_weight"], a["class_weight"], normalizer, call
    )
    if request.options.reduction == "none":
        loss = _moved(loss, placed)
    made = TokenStats(*(_moved(value, placed) for value in stats)) if request.statistics else None
    return loss, made, call.deferred


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="process_group and DTensors run outside of a graph"
)
def linear_log_probs(arrays: dict[str, Any], request: Request) -> tuple[Tensor, Tensor | None]:
    """(log p, entropy or None)."""
    placed, call = _prepared(arrays | {"token_weight": None, "class_weight": None}, None, request)
    a = placed.arrays
    apply: Any = LinearLogProbsFunction.apply
    log_prob, entropy = apply(a["hidden"], a["weight"], a["bias"], a["target"], call)
    return _moved(log_prob, placed), None if entropy is None else _moved(entropy, placed)


def _moved(value: Tensor, placed: placements.Placed) -> Tensor:
    """The tokens' axes in the order they were given."""
    return value.movedim(0, placed.token_axis) if placed.token_axis else value


def _prepared(
    arrays: dict[str, Any], normalizer: Tensor | float | None, request: Request
) -> tuple[placements.Placed, Call]:
    """Plain checked tensors, tokens' shared axis first, and the call on them."""
    if request.group is not None:
        parallel.check_member(request.group)
    elif request.sequence_parallel and not placements.is_dtensor(arrays["weight"]):
        raise ValueError("sequence_parallel: got True without a process_group, allowed is False")
    placed = placements.localize(arrays, request.group, request.sequence_parallel)
    device = next((a.device for a in placed.arrays.values() if isinstance(a, Tensor)), torch.device("cpu"))
    shard = None
    if placed.group is None:
        dtype, backend = _checked(placed, normalizer, request)
    else:
        try:
            dtype, backend = _checked(placed, normalizer, request)
            facts = _facts(placed.arrays, dtype, backend, request)
        except (TypeError, ValueError, NotImplementedError):
            agreement.refuse(placed.group, device, 1 + FACTS)
            raise
        vocab = placed.arrays["weight"].shape[0]
        shard = agreement.agree(placed.group, device, facts, vocab, placed.token_axis is not None)
    a = placed.arrays
    a.update(layouts.plain(Arrays(**{name: a[name] for name in Arrays._fields}))._asdict())
    vocab = a["weight"].shape[0]
    api._check_targets(a["target"], shard.vocab if shard else vocab, request.options.ignore_index)
    plan = _plan(a, dtype, backend, request, shard, shard.largest if shard else vocab)
    grad = torch.is_grad_enabled()
    into: Any = request.into if grad else None
    call = Call(
        request.options, plan, dtype, request.statistics, grad, backend, shard=shard,
        into=into._local_tensor if placements.is_dtensor(into) else into,
    )  # fmt: skip
    return placed, call


def _checked(placed: placements.Placed, normalizer: Tensor | float | None, request: Request) -> tuple[torch.dtype, str]:
    """Every check that one rank can make alone; the dtype of the computation and the backend."""
    a, axis = placed.arrays, placed.token_axis
    hidden = a["hidden"]
    ranks = 1 if axis is None else dist.get_world_size(placed.group)
    if axis is not None and isinstance(hidden, Tensor) and hidden.ndim < 2:
        raise ValueError(
            f"hidden: got shape {tuple(hidden.shape)}, allowed under sequence parallelism is [N / R, ..., D]"
        )
    arrays = {name: a[name] for name in ("hidden", "weight", "target", "bias")}
    constants = {name: a[name] for name in ("token_weight", "class_weight")}
    dtype = api._check_tensors(arrays, constants, axis or 0, ranks)
    api._check_normalizer(normalizer, request.options.reduction, hidden.device)
    backend = api._backend(request.backend, hidden, dtype)
    if request.into is not None:
        _check_buffer(request.into, a["weight"], dtype, backend)
    if axis:
        for name in ("hidden", "target", "token_weight"):
            a[name] = None if a[name] is None else a[name].movedim(axis, 0)
    return dtype, backend


def _check_buffer(into: Any, weight: Tensor, dtype: torch.dtype, backend: str) -> None:
    """accumulate_into: what dW may be added to."""
    if placements.is_dtensor(into):
        into = into._local_tensor
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
    if into.requires_grad or not into.is_contiguous() or (backend == "triton" and into.data_ptr() % 16):
        raise ValueError(
            "accumulate_into: got a tensor that requires grad, is not contiguous or (triton) does not start on 16 "
            "bytes, allowed is a plain buffer"
        )
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError("accumulate_into: got a buffer beside a weight that requires no grad, allowed is None")


def _check_leaves(parameters: tuple[Any, ...]) -> None:
    for name, parameter in zip(("weight", "bias"), parameters, strict=True):
        if parameter is not None and not parameter.is_leaf:
            raise ValueError(
                f"{name}: got a tensor that others were computed into, allowed beside defer_weight_grad is "
                f"a leaf: its grad is written to"
            )


def _words(value: Any) -> str:
    return "none" if value is None else str(value.dtype)


def _facts(a: dict[str, Any], dtype: torch.dtype, backend: str, request: Request) -> dict[str, object]:
    """What must be the same on every rank, words → value."""
    target, plan = a["target"], request.plan
    ids: object = 0
    if target.device.type == "cpu":  # where looking costs nothing
        ids = target.reshape(-1).tolist()
    return {
        "hidden's number of elements": a["hidden"].numel(),
        "hidden's size D": a["hidden"].shape[-1],
        "the number of tokens": target.numel(),
        "the shape of target": tuple(target.shape),
        "the target's ids": ids,
        "the dtype of hidden": _words(a["hidden"]),
        "the dtype of weight": _words(a["weight"]),
        "the dtype of the computation": str(dtype),
        "the dtype of bias": _words(a["bias"]),
        "whether there is a token_weight": a["token_weight"] is not None,
        "whether there is a class_weight": a["class_weight"] is not None,
        "whether hidden requires grad": bool(a["hidden"].requires_grad),
        "whether anything requires grad": any(isinstance(v, Tensor) and v.requires_grad for v in a.values()),
        "whether autograd is on": torch.is_grad_enabled(),
        "the options": (request.options, request.statistics, request.log_probs, request.sequence_parallel),
        "the plan": None if plan is None else dataclasses.astuple(plan),
        "the memory budget": -1 if request.memory_budget is None else request.memory_budget,
        "the backend and what becomes of dW": (backend, _words(request.into), request.deferred),
    }


FACTS = 18  # the length of _facts


def _plan(
    a: dict[str, Any], dtype: torch.dtype, backend: str, request: Request, shard: Shard | None, largest: int
) -> ChunkPlan:
    """The plan for the largest shard, which every rank makes alike, cut to this rank's entries."""
    tokens, (vocab, size), name = a["target"].numel(), a["weight"].shape, api._dtype_name(dtype)
    given, budget = request.plan, request.memory_budget
    if given is not None:
        check_plan_sizes(given, tokens, size, largest, name)
        _check_adds(given, request, dtype)
        return _cut(given, vocab)
    if budget is not None and shard is not None:
        more = shard.scratch_bytes(tokens, size, dtype.itemsize)
        if budget <= more:
            raise ValueError(
                f"memory_budget: got {budget} bytes, allowed is more than {more}, what the exchange between ranks takes"
            )
        budget -= more
    adds = request.into is not None and not request.deferred and torch.is_grad_enabled()
    narrow = adds and request.into.dtype != accumulation_dtype(dtype)

    def choose(one_pass: bool) -> ChunkPlan:
        return make_plan(
            tokens=tokens, hidden=size, vocab=largest, dtype=name, memory_budget=budget, one_pass=one_pass,
            order="vocab" if narrow and not one_pass else None,
            device="cpu" if a["hidden"].device.type == "cpu" else "gpu", fused=backend == "triton",
            eager=backend == "eager",
        )  # fmt: skip

    one_pass = request.options.reduction != "none" and request.options.separable and not request.log_probs
    chosen = choose(one_pass)
    if adds and not (chosen.one_pass and steps.adds_in_one_pass(backend, chosen)):
        chosen = choose(False)
    return _cut(chosen, vocab)


def _check_adds(plan: ChunkPlan, request: Request, dtype: torch.dtype) -> None:
    """A narrow buffer takes each entry's gradient in one addition, rounded once."""
    narrow = request.into is not None and request.into.dtype != accumulation_dtype(dtype)
    if narrow and len(plan.token_slices) > 1:
        raise ValueError(
            f"plan: got one of {len(plan.token_slices)} chunks of tokens beside accumulate_into of "
            f"{request.into.dtype}, allowed is one chunk of tokens or order='vocab': each chunk would be rounded"
        )


def _cut(plan: ChunkPlan, vocab: int) -> ChunkPlan:
    return dataclasses.replace(plan, vocab=vocab, vocab_chunk=min(plan.vocab_chunk, vocab))
