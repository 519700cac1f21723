"""The public functions on given ids and on the largest logits. Mirror of jax_impl/given_ids/api.py."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import spec
from logitless.given_ids import check_ids_array, check_k, ids_cut, of_whole_budget, rest_of_budget
from logitless.planning import check_plan_argument
from logitless.torch_impl import checks
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.call import Arrays, Request, temperatures
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.distributed import parallel, sharding
from logitless.torch_impl.given_ids.steps import IdsCall, TokenLogProbsFunction, largest_logits
from logitless.torch_impl.kernels import first_check


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    backend: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """log p of K given ids a token, without holding the logits.

        log_prob_ik = z_{i, id_ik} − lse_i

    For speculative decoding, sparse teachers and multiple choice. With one id a token it is :func:`linear_log_probs`.
    Differentiable once in hidden, weight and bias, for any upstream gradients. The forward takes 2·N·D·V flops by the
    backend and 2·N·K·D for gathered rows of the weight, the backward 6·N·D·V in plain operations, a tile of logits at
    a time.

    Arguments:
        hidden, weight, bias: [..., D], [V, D], [V], as for :func:`linear_cross_entropy`.
        ids: [..., K] int32 or int64 ids in [0, V), or ignore_index; or [K], the same for all tokens, which costs one
            product with K rows. K at least 1; an id may come more than once. On a CPU an id outside raises ValueError;
            on a GPU its log-probability is NaN, without gradient.
        ignore_index: marks ids without a log-probability: 0, and no gradient. May be an id inside the vocabulary. A
            token whose ids are all ignored is left out of the work, and its hidden state is never read.
        memory_budget: bytes of scratch beyond inputs, results and gradients; None: tiles of up to 2048 × 8192, and the
            rule of :mod:`logitless.planning` for the pass for lse.
        logit_scale, softcap, temperature, backend, process_group, sequence_parallel: as for
            :func:`linear_cross_entropy`. The backend is that of the pass for lse. With a process_group, ids are the
            same on every rank and count from the first rank's first entry. DTensors are refused.

    Returns [..., K] in float32 (float64 for float64 input). More than two equal ids of one token add their gradients
    in any order on a GPU, unless torch.use_deterministic_algorithms is on. Leaves torch.compile's graph. Raises as
    :func:`linear_cross_entropy`.
    """
    own, number = temperatures(temperature)
    request = _request(
        ignore_index, logit_scale, softcap, number, memory_budget, backend, process_group, sequence_parallel
    )
    return _token_log_probs(hidden, weight, ids, bias, own, request)


def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    memory_budget: int | None = None,
    backend: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p and ids of the k most likely ids of every token, most likely first, without holding the logits.

    Exact: the k largest logits, as they are computed in float32 (float64), and of equal ones the first ids. The
    log-probabilities are differentiable once in hidden, weight and bias, as those of :func:`linear_token_log_probs` of
    these ids. 4·N·D·V flops forward, of which the search is in plain operations, and 6 backward.

    Arguments:
        k: 1 to V, over all ranks.
        the others: as for :func:`linear_token_log_probs`.

    Returns (log_prob, ids): [..., k] in float32 (float64 for float64 input), and [..., k] int64. A token with a NaN
    among its logits has NaN, and ids that mean nothing. Raises as :func:`linear_token_log_probs`.
    """
    own, number = temperatures(temperature)
    request = _request(-100, logit_scale, softcap, number, memory_budget, backend, process_group, sequence_parallel)
    return _top_k(hidden, weight, k, bias, own, request)


def _request(
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    memory_budget: int | None,
    backend: str | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> Request:
    """Of the pass for lse. Nothing is held for its backward."""
    spec.check_backend(backend, BACKENDS)
    check_plan_argument(None, memory_budget)
    spec.check_flags(sequence_parallel=sequence_parallel)
    return Request(
        "none", ignore_index, 0.0, 0.0, logit_scale, softcap, temperature, None, memory_budget, backend,
        statistics=False, log_probs=True, lse=True, group=group, sequence_parallel=sequence_parallel,
    )  # fmt: skip


@tracing.outside_graphs
def _token_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: Tensor | None, request: Request
) -> Tensor:
    # Loops over tiles: a graph would hold every one of them.
    tracing.check_transforms("linear_token_log_probs", takes_one=False)
    shape = _tokens(hidden, weight, request)
    checks.check_type("ids", ids)
    checks.check_device("ids", ids, "hidden's", hidden.device)
    check_ids_array(checks.info(ids), shape)
    facts: dict[str, object] = {"the shape of ids": tuple(ids.shape), "the ids": _visible(ids)}
    given = Arrays(hidden, weight, bias, _target(hidden, ids, shape, request.ignore_index), temperature=temperature)
    arrays, call = _ready(given, request, ids.shape[-1], facts)
    checks.check_ids(ids, _vocab(arrays, call), request.ignore_index, name="ids")
    flat = ids if ids.dim() == 1 and len(shape) != 0 else ids.reshape(-1, ids.shape[-1])
    log_prob: Tensor = TokenLogProbsFunction.apply(  # type: ignore[no-untyped-call]
        call, flat, None, *arrays.head
    )
    return log_prob.reshape(*shape, ids.shape[-1])


@tracing.outside_graphs
def _top_k(
    hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None, temperature: Tensor | None, request: Request
) -> tuple[Tensor, Tensor]:
    tracing.check_transforms("linear_top_k", takes_one=False)
    shape = _tokens(hidden, weight, request)
    check_k(k, 2**31 - 1)
    target = torch.zeros(shape, dtype=torch.long, device=hidden.device)
    given = Arrays(hidden, weight, bias, target, temperature=temperature)
    arrays, call = _ready(given, request, int(k), {"k": int(k)})
    check_k(k, _vocab(arrays, call))
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        logits, ids = largest_logits(arrays, call)
    log_prob: Tensor = TokenLogProbsFunction.apply(  # type: ignore[no-untyped-call]
        call, ids, logits, *arrays.head
    )
    return log_prob.reshape(*shape, int(k)), ids.reshape(*shape, int(k))


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _tokens(hidden: Tensor, weight: Tensor, request: Request) -> tuple[int, ...]:
    """The shape of the tokens of all ranks."""
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        checks.check_type(name, tensor)
        if checks.is_placed(tensor):
            raise NotImplementedError(
                f"{name}: got a DTensor, allowed is a plain tensor: to_local() gives it, and process_group says which "
                f"ranks share the vocabulary"
            )
    shape = tuple(hidden.shape[:-1])
    if request.group is not None:
        parallel.check_member(request.group)
        if request.sequence_parallel and shape:
            shape = (shape[0] * dist.get_world_size(request.group), *shape[1:])
    return shape


def _target(hidden: Tensor, ids: Tensor, shape: tuple[int, ...], ignore_index: int) -> Tensor:
    """Which tokens count, as a target: 0, or ignore_index. Which id the lse is anchored at is known later."""
    spec.check_ignore_index(ignore_index)
    target = torch.zeros(shape, dtype=torch.long, device=hidden.device)
    return target.masked_fill_(ids.eq(ignore_index).all(dim=-1), ignore_index)


def _visible(ids: Tensor) -> object:
    """What ranks compare of ids: all of them, where looking costs nothing."""
    return ids.tolist() if ids.device.type == "cpu" else 0


def _vocab(arrays: Arrays, call: IdsCall) -> int:
    """V of all ranks."""
    shard = call.call.shard
    return arrays.weight.shape[0] if shard is None else shard.vocab


def _ready(arrays: Arrays, request: Request, count: int, facts: dict[str, object]) -> tuple[Arrays, IdsCall]:
    """The checked call, and how its work is cut."""
    budget = request.memory_budget
    wide = 8 if torch.float64 in (arrays.hidden.dtype, arrays.weight.dtype) else 4
    request = request._replace(memory_budget=rest_of_budget(budget, arrays.target.numel(), count, wide))
    try:
        if request.group is not None or request.sequence_parallel:
            placed, call = sharding.ready(arrays, None, request, facts)
            arrays = placed.arrays
        else:
            arrays, call = first_check.checked(lambda: checks.ready(arrays, None, request))
    except ValueError as error:
        raise ValueError(of_whole_budget(str(error), budget, request.memory_budget)) from None
    own, size = arrays.weight.shape
    cut = ids_cut(
        tokens=arrays.target.numel(), hidden=size, vocab=own if call.shard is None else call.shard.largest, ids=count,
        dtype=checks.dtype_name(call.compute_dtype), memory_budget=budget,
    )  # fmt: skip
    return arrays, IdsCall(call, dataclasses.replace(cut, tile=dataclasses.replace(cut.tile, vocab=own)))
