"""The public functions on given ids and on the largest logits. Mirror of torch_impl/given_ids/api.py."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import Array, lax

from logitless import spec
from logitless.given_ids import check_ids_array, check_k, ids_cut, of_whole_budget, rest_of_budget
from logitless.jax_impl import checks
from logitless.jax_impl.backend import BACKENDS
from logitless.jax_impl.call import Arrays, RawArray, RawArrays, Request, taking_wrappers, temperatures
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.distributed.parallel import AxisName, Shard
from logitless.jax_impl.given_ids.steps import IdsCall, largest_logits, token_log_probs
from logitless.planning import check_plan_argument


@taking_wrappers
def linear_token_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Array | float = 1.0,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    backend: str | None = None,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> Array:
    """log p of K given ids a token, without holding the logits.

        log_prob_ik = z_{i, id_ik} − lse_i

    For speculative decoding, sparse teachers and multiple choice. With one id a token it is :func:`linear_log_probs`.
    Differentiable once in hidden, weight and bias, for any upstream gradients. The forward takes 2·N·D·V flops by the
    backend and 2·N·K·D for gathered rows of the weight, the backward 6·N·D·V in plain operations, a tile of logits at
    a time.

    Arguments:
        hidden, weight, bias: [..., D], [V, D], [V], as for :func:`linear_cross_entropy`.
        ids: [..., K] int32 or int64 ids in [0, V), or ignore_index; or [K], the same for all tokens, which costs one
            product with K rows. K at least 1; an id may come more than once. Where it can be looked at without waiting
            an id outside raises ValueError; elsewhere its log-probability is NaN, without gradient.
        ignore_index: marks ids without a log-probability: 0, and no gradient. May be an id inside the vocabulary. A
            token whose ids are all ignored has no part in anything, and its hidden state is never read.
        memory_budget: bytes of scratch beyond inputs, results and gradients; None: tiles of up to 2048 × 8192, and the
            rule of :mod:`logitless.planning` for the pass for lse.
        logit_scale, softcap, temperature, backend, axis_name, vocab, sequence_parallel: as for
            :func:`linear_cross_entropy`. The backend is that of the pass for lse. With an axis_name, ids are the same
            on all its devices and count through the whole vocabulary.

    Returns [..., K] in float32 (float64 for float64 input). Equal ids of one token add their gradients in any order on
    a GPU. Raises as :func:`linear_cross_entropy`.
    """
    own, number = temperatures(temperature)
    request = Request(
        reduction="none", ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, temperature=number,
        memory_budget=memory_budget, backend=backend, log_probs=True, lse=True,
    )  # fmt: skip
    shard = _shard(hidden, weight, axis_name, vocab, sequence_parallel)
    shape = _tokens(hidden, shard)
    checks.check_types({"ids": ids})
    check_ids_array(checks.info(ids), shape)
    checks.check_same("ids", ids, shard)
    given: RawArrays = Arrays(hidden, weight, bias, np.zeros(shape, np.int32), temperature=own)
    arrays, call = _ready(given, request, shard, ids.shape[-1])
    checks.check_ids(ids, shard.vocab or weight.shape[0], request.ignore_index, name="ids")
    flat = ids if ids.ndim == 1 and shape else ids.reshape(-1, ids.shape[-1])
    log_prob: Array = token_log_probs(call, arrays, checks.narrow(flat), None)
    return log_prob.reshape(*shape, ids.shape[-1])


@taking_wrappers
def linear_top_k(
    hidden: Array,
    weight: Array,
    k: int,
    bias: Array | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Array | float = 1.0,
    memory_budget: int | None = None,
    backend: str | None = None,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> tuple[Array, Array]:
    """log p and ids of the k most likely ids of every token, most likely first, without holding the logits.

    Exact: the k largest logits, as they are computed in float32 (float64), and of equal ones the first ids. The
    log-probabilities are differentiable once in hidden, weight and bias, as those of :func:`linear_token_log_probs` of
    these ids. 4·N·D·V flops forward, of which the search is in plain operations, and 6 backward.

    Arguments:
        k: 1 to V, over all devices. Static.
        the others: as for :func:`linear_token_log_probs`.

    Returns (log_prob, ids): [..., k] in float32 (float64 for float64 input), and [..., k] int32. A token with a NaN
    among its logits has NaN, and ids that mean nothing. Raises as :func:`linear_token_log_probs`.
    """
    own, number = temperatures(temperature)
    request = Request(
        reduction="none", logit_scale=logit_scale, softcap=softcap, temperature=number,
        memory_budget=memory_budget, backend=backend, log_probs=True, lse=True,
    )  # fmt: skip
    shard = _shard(hidden, weight, axis_name, vocab, sequence_parallel)
    shape = _tokens(hidden, shard)
    check_k(k, shard.vocab or weight.shape[0])
    given: RawArrays = Arrays(hidden, weight, bias, np.zeros(shape, np.int32), temperature=own)
    arrays, call = _ready(given, request, shard, int(k))
    # The search has no gradient of its own.
    stopped = Arrays(*(None if array is None else lax.stop_gradient(array) for array in arrays))
    logits, ids = largest_logits(call, stopped)
    log_prob: Array = token_log_probs(call, arrays, ids, logits)
    return log_prob.reshape(*shape, int(k)), ids.reshape(*shape, int(k))


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _shard(
    hidden: RawArray, weight: RawArray, axis_name: AxisName | None, vocab: int | None, sequence_parallel: bool
) -> Shard:
    for name, array in (("hidden", hidden), ("weight", weight)):
        checks.check_type(name, array)
    if weight.ndim != 2:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, allowed is [V, D]")
    return checks.shard_of(weight, axis_name, vocab, sequence_parallel)


def _tokens(hidden: RawArray, shard: Shard) -> tuple[int, ...]:
    """The shape of the tokens of all devices."""
    if not hidden.ndim:
        raise ValueError("hidden: got shape (), allowed is [..., D]")
    return parallel.gathered_info(checks.info(hidden), shard).shape[:-1]


def _ready(arrays: Arrays[RawArray], request: Request, shard: Shard, count: int) -> tuple[Arrays[Array], IdsCall]:
    """The checked call, and how its work is cut."""
    spec.check_backend(request.backend, BACKENDS)
    check_plan_argument(None, request.memory_budget)
    budget, (own, size), dtype = request.memory_budget, arrays.weight.shape, str(arrays.hidden.dtype)
    tokens, wide = int(np.prod(arrays.target.shape)), 8 if dtype == "float64" else 4
    request = dataclasses.replace(request, memory_budget=rest_of_budget(budget, tokens, count, wide))
    try:
        ready, call = checks.ready(arrays, request, shard)
    except ValueError as error:
        raise ValueError(of_whole_budget(str(error), budget, request.memory_budget)) from None
    cut = ids_cut(tokens=tokens, hidden=size, vocab=own, ids=count, dtype=dtype, memory_budget=budget)
    return ready, IdsCall(call, cut)
