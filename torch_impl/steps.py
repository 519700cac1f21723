"""A call's forward and its backward, on tensors alone: what autograd runs directly, and torch.compile through ops.py.

| caller | forward | backward | flops |
| --- | --- | --- | --- |
| nothing to differentiate | sums | – | 2·N·D·V |
| mean, sum, a plan in one pass | sums and gradients | multiply by the upstream scalar, in the last cast | 6 |
| mean, sum, such a plan of the order "both" | sums, dX, db, part of dW | the same for these; the rest of dW | 6 to 8 |
| with lse as a result | sums | gradients with what arrived | 8 |
| none, log-probs, a plan that knows lse first | sums | gradients with what arrived | 8 |
| none, log-probs, a plan in one pass and one chunk (kernels) | sums, exponentials | gradients with what arrived | 6 |
| log-probs with statistics, such a plan | sums, logits | the same | 6 |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from logitless import numerics
from logitless.planning import ChunkPlan
from logitless.spec import Statistics, TokenStats, differentiable_statistics, log_prob_statistics
from logitless.torch_impl import backend as backends
from logitless.torch_impl.backend import Waiting, adds_in_one_pass, backend_named
from logitless.torch_impl.call import (
    XP,
    Arrays,
    Call,
    Gradients,
    Inputs,
    Needs,
    TokenSums,
    accumulation_dtype,
)

Result = TypeVar("Result")

LARGEST_NUMBER = 1e38
"""Beyond it a normalizer is no float32, and stays the number that it is."""


def one_pass(call: Call) -> bool:
    """Whether a loss's forward computes its gradients too, if any are wanted."""
    possible = call.plan.one_pass and call.options.separable and call.options.reduction != "none" and not call.lse
    if call.into is not None and call.deferred is None:
        possible = possible and adds_in_one_pass(backend_named(call.backend), call.chunk_plan)
    return possible and backend_named(call.backend).one_pass(call.compute_dtype, call.options)


def holds(call: Call) -> bool:
    """Whether a call whose upstream gradient arrives per token holds its exponentials until then."""
    if call.traced or call.lse or call.shard is not None or not backend_named(call.backend).holds(call.compute_dtype):
        return False
    return call.chunk_plan.holds_all and call.options.separable and call.options.reduction == "none"


class Loss(NamedTuple):
    """What a loss's forward leaves."""

    loss: Tensor
    lse: Tensor | None
    stats: tuple[Tensor | None, ...]
    saved: tuple[Tensor, ...]
    """For the backward: what autograd may save as it does any tensor."""
    waiting: Waiting | None
    """Gradients that wait for the upstream scalar and may be finished once, or None."""


class LogProbs(NamedTuple):
    """What the forward of log-probabilities leaves."""

    log_prob: Tensor
    stats: tuple[Tensor, ...]
    """Those of :func:`spec.log_prob_statistics`."""
    saved: tuple[Tensor, ...]
    waiting: Waiting | None
    """As in :class:`Loss`."""
    held: Tensor | None = None
    """Logits that wait for the first backward, or None."""


_AS_IT_IS = contextlib.nullcontext()


def _no_autocast(arrays: Arrays) -> contextlib.AbstractContextManager[object]:
    # The products inside choose their dtypes themselves.
    kind = arrays.hidden.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def _run_step(
    name: str, arrays: Arrays, call: Call, needs: Needs, step: Callable[[Call], Result], *others: Tensor | float | None
) -> Result:
    """The result of a whole step, run by the call's backend; of a traced call, compiled/ops.py runs more as one step.
    ``others``: all tensors that it reads beside ``arrays``. What else it reads depends on ``call``."""
    return step(call) if call.traced else backend_named(call.backend).run_step(name, arrays, call, needs, step, others)


def _cast(gradients: Gradients, arrays: Arrays) -> Gradients:
    """The last cast: each argument's dtype and shape."""

    def like(gradient: Tensor | None, argument: Tensor | None) -> Tensor | None:
        if gradient is None or argument is None:
            return None
        if gradient.dtype == argument.dtype and gradient.shape == argument.shape:
            return gradient
        return gradient.to(argument.dtype).reshape(argument.shape)

    return Gradients(
        like(gradients.hidden, arrays.hidden), like(gradients.weight, arrays.weight), like(gradients.bias, arrays.bias)
    )


def shaped(values: Tensor, shape: torch.Size) -> Tensor:
    """``values`` [N] in the tokens' shape; as they are if they have it: autograd wants a copy of a view."""
    return values if values.shape == shape else values.reshape(shape)


def _prepare(arrays: Arrays, call: Call) -> Inputs:
    """The backend's inputs; under sequence parallelism from the hidden states of all ranks."""
    if call.shard is not None and call.shard.sequence_parallel:
        arrays = arrays._replace(hidden=call.shard.gather(arrays.hidden.to(call.compute_dtype)))
    inputs: Inputs = backend_named(call.backend).prepare(arrays, call.options, call.compute_dtype, call.shard)
    return inputs


def loss(arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs) -> Loss:
    """The loss, lse (or None), the statistics (or Nones), and what the backward needs for the gradients
    ``needs``."""
    if call.backend == "triton" and not isinstance(normalizer, Tensor | None) and abs(normalizer) < LARGEST_NUMBER:
        # A number that may change with every batch is no part of what a repeated step has written down.
        device = arrays.hidden.device
        normalizer = torch.full((), normalizer, dtype=accumulation_dtype(call.compute_dtype), device=device)
    return _run_step("loss", arrays, call, needs, lambda call: _loss(arrays, normalizer, call, needs), normalizer)


def _loss(arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs) -> Loss:
    options, backend, statistics = call.options, backend_named(call.backend), call.statistics is True
    waiting: Waiting | None = None
    with _no_autocast(arrays):
        if one_pass(call):
            made = backend.plain_loss(arrays, normalizer, call, needs)
            if made is not None:
                return Loss(made[0], None, (None,) * len(TokenStats._fields), (), made[1])
        inputs = _prepare(arrays, call)
        norm = backend.normalizer(inputs, options, normalizer)
        if needs.any and one_pass(call):
            plan = call.chunk_plan
            sums, waiting = backends.loss_gradients(backend, inputs, options, plan, norm, needs, statistics)
        elif needs.any and holds(call):
            sums, waiting = backend.token_gradients(inputs, options, call.chunk_plan, needs, statistics)
        else:
            summed = None if options.reduction == "none" else norm
            sums = backend.token_sums(inputs, options, call.chunk_plan.forward, statistics, summed)
        if options.reduction == "none":
            total = shaped(backend.losses(inputs, options, sums), arrays.target.shape)
        else:
            total = backend.total_loss(inputs, options, sums, norm)
        lse = shaped(sums.lse.masked_fill(~inputs.valid, 0.0), arrays.target.shape) if call.lse else None
        found = numerics.token_stats(XP, inputs, sums) if statistics else (None,) * len(TokenStats._fields)
        stats = tuple(None if value is None else shaped(value, arrays.target.shape) for value in found)
    kept = needs.any or call.deferred is not None
    saved = (norm, sums.target_logit, sums.anchor, sums.log_total) if kept else ()
    return Loss(total, lse, stats, saved, waiting)


def loss_gradients(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], waiting: Waiting | None, upstream: Tensor,
    g_lse: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients: finished from what waits, else recomputed (the per-token upstream has just arrived, or what waited
    is used up)."""
    if waiting is not None:
        with _no_autocast(arrays):
            return _cast(waiting.finish(upstream.to(accumulation_dtype(call.compute_dtype))), arrays)
    return _run_step(
        "loss_gradients", arrays, call, needs, lambda call: _known_loss(arrays, call, needs, saved, upstream, g_lse),
        *saved, upstream, g_lse,
    )  # fmt: skip


def _known_loss(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], upstream: Tensor, g_lse: Tensor | None
) -> Gradients:
    options = call.options
    norm, target_logit, anchor, log_total = saved
    with _no_autocast(arrays):
        inputs = _prepare(arrays, call)
        per_token = upstream.reshape(-1).to(norm.dtype) if options.reduction == "none" else upstream * norm
        g = numerics.row_upstream(XP, inputs, options, inputs.wide(per_token))
        sums = TokenSums(target_logit, anchor, log_total)
        if g_lse is None:
            known = numerics.known_loss_rows(XP, inputs, options, sums, g)
        else:
            h = numerics.lse_upstream(XP, inputs, options, inputs.wide(g_lse.reshape(-1)))
            known = numerics.known_loss_and_lse_rows(XP, inputs, options, sums, g, h)
        backend = backend_named(call.backend)
        return _cast(backends.known_gradients(backend, inputs, options, call.chunk_plan, known, g, needs), arrays)


def held_gradients(arrays: Arrays, call: Call, needs: Needs, held: list[Tensor], upstream: Tensor) -> Gradients:
    """The gradients from what waited as a list of tensors (``waiting.tensors()``), none of which is written to."""
    backend = backend_named(call.backend)

    def inputs(weight: Tensor | None) -> Inputs:
        """Made where they are read; ``weight``: autocast's copy, if it waited too."""
        whole = arrays if weight is None else arrays._replace(weight=weight)
        prepared: Inputs = backend.prepare(whole, call.options, call.compute_dtype)
        return prepared

    with _no_autocast(arrays):
        dtype = call.compute_dtype
        upstream = upstream.to(accumulation_dtype(dtype))
        plan = cast(ChunkPlan, call.plan)  # a LatePlan if no products wait: then nobody reads it
        gradients = backend.held_gradients(inputs, arrays, call.options, dtype, plan, needs, held, upstream)
        return _cast(gradients, arrays)


def log_probs(arrays: Arrays, call: Call, needs: Needs) -> LogProbs:
    """log p(target) and the statistics per token, and what the backward needs if any gradient is wanted."""
    return _run_step("log_probs", arrays, call, needs, lambda call: _log_probs(arrays, call, needs))


def _log_probs(arrays: Arrays, call: Call, needs: Needs) -> LogProbs:
    backend = backend_named(call.backend)
    waiting: Waiting | None = None
    held: Tensor | None = None
    with _no_autocast(arrays):
        inputs = _prepare(arrays, call)
        if needs.any and holds(call) and call.statistics:
            sums, held = backend.token_logits(inputs, call.options, call.chunk_plan, call.statistics)
        elif needs.any and holds(call):
            sums, waiting = backend.token_gradients(inputs, call.options, call.chunk_plan, needs, False)
        else:
            sums = backend.token_sums(inputs, call.options, call.chunk_plan.forward, call.statistics)
        shape = arrays.target.shape
        log_prob = shaped(backend.log_probs(inputs, sums), shape)
        found: dict[str, Tensor] = {}
        if call.statistics is True:
            found = numerics.token_stats(XP, inputs, sums)._asdict()
        elif call.statistics:
            found = {"entropy": backend.entropy(inputs, sums)}
    stats = tuple(shaped(found[name], shape) for name in log_prob_statistics(call.statistics))
    if not needs.any:
        return LogProbs(log_prob, stats, (), waiting)
    more = (getattr(sums, name) for name in kept_sums(call.statistics))
    return LogProbs(log_prob, stats, (sums.target_logit, sums.anchor, sums.log_total, *more), waiting, held)


def kept_sums(statistics: Statistics) -> tuple[str, ...]:
    """What the backward of log-probabilities needs of a token's sums beside those that every backward needs."""
    if statistics is True:
        return ("entropy", "others_squared")
    return ("entropy",) if statistics else ()


def log_probs_gradients(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], waiting: Waiting | Tensor | None,
    upstream: Sequence[Tensor | None],
) -> Gradients:  # fmt: skip
    """The gradients, when all upstream gradients have arrived: finished from what waits, a Waiting or logits, else
    recomputed.

    upstream: of log_prob and of the statistics that have one, in their order; None: 0.
    """
    if not isinstance(waiting, Tensor | None):
        with _no_autocast(arrays):
            assert upstream[0] is not None
            return _cast(waiting.finish(-upstream[0].to(saved[0].dtype)), arrays)
    return _run_step(
        "log_probs_gradients", arrays, call, needs,
        lambda call: _known_log_probs(arrays, call, needs, saved, upstream, waiting), *saved, *upstream, waiting,
    )  # fmt: skip


def _known_log_probs(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], upstream: Sequence[Tensor | None],
    held: Tensor | None,
) -> Gradients:  # fmt: skip
    target_logit, anchor, log_total, *rest = saved
    backend = backend_named(call.backend)
    with _no_autocast(arrays):
        inputs = _prepare(arrays, call)
        sums = TokenSums(target_logit, anchor, log_total, **dict(zip(kept_sums(call.statistics), rest, strict=True)))

        g_log_prob, *others = (None if g is None else inputs.wide(g.reshape(-1)) for g in upstream)
        named = zip(differentiable_statistics(call.statistics), others, strict=True)
        g = {name: values for name, values in named if values is not None}
        known = backend.log_prob_rows(inputs, call.options, sums, g_log_prob, g)
        plan, options = call.chunk_plan, call.options
        if held is None:
            gradients = backends.known_gradients(backend, inputs, options, plan, known, known.factor, needs)
        else:
            gradients = backend.logits_gradients(inputs, options, plan, known, needs, held)
        return _cast(gradients, arrays)
