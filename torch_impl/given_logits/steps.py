"""The forward and the backward of a loss on given logits, and both as operations that torch.compile puts into graphs.

Backends differ in two functions here, :class:`LogitsBackend`. The rest is that of :class:`backend.Backend`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from logitless import numerics
from logitless.numerics import LogitRows
from logitless.spec import STATISTICS, LossOptions, TokenStats
from logitless.torch_impl import checks
from logitless.torch_impl.backend import backend_named
from logitless.torch_impl.call import XP, Arrays, Inputs, TokenSums, accumulation_dtype

Prepared = TypeVar("Prepared", bound=Inputs, contravariant=True)


class LogitsArrays(NamedTuple):
    """A call's arrays as the caller gave them, the normalizer apart."""

    logits: Tensor  # [..., V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    class_weight: Tensor | None  # [V]


@dataclasses.dataclass(frozen=True)
class LogitsCall:
    """Everything about a call that is not an array."""

    options: LossOptions
    statistics: bool
    backend: str
    in_place: bool
    traced: bool
    """Whether torch.compile is looking. Then the steps are opaque operations."""


class Loss(NamedTuple):
    """What a forward leaves."""

    loss: Tensor
    stats: tuple[Tensor | None, ...]
    saved: tuple[Tensor, ...]
    """For the backward: the normalizer's factor, and of every token target_logit, anchor and log_total."""


class LogitsBackend(Protocol[Prepared]):
    """``inputs.hidden`` is the logits [N, V]."""

    def token_sums(self, inputs: Prepared, options: LossOptions, statistics: bool, /) -> TokenSums:
        """[N] each: what the forward knows of every token."""

    def gradient(self, inputs: Prepared, options: LossOptions, known: LogitRows[Tensor], out: Tensor, /) -> None:
        """The gradient to ``out`` [N, V], which may be the logits themselves."""


def _backend(name: str) -> LogitsBackend[Any]:
    """The backend of that name. Only the backend that has prepared inputs reads them, so their type does not matter."""
    if name == "triton":
        from logitless.torch_impl.given_logits import fused

        return fused
    from logitless.torch_impl.given_logits import eager

    return eager


def plain(arrays: LogitsArrays) -> LogitsArrays:
    """As :func:`checks.plain`; logits of any layout are copied where they are read."""
    logits, target, *weights = arrays
    token_weight, class_weight = (None if weight is None else checks.vector(weight) for weight in weights)
    return LogitsArrays(checks.signed(logits), checks.vector(target), token_weight, class_weight)


def empty_like(logits: Tensor) -> Tensor:
    """Memory for a gradient."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _prepare(arrays: LogitsArrays, call: LogitsCall) -> Inputs:
    """The logits stand where hidden states do; of a weight only its length V is read."""
    logits = arrays.logits.reshape(-1, arrays.logits.shape[-1])
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    inputs: Inputs = backend_named(call.backend).prepare(
        Arrays(logits, logits.t(), None, *arrays[1:]), call.options, logits.dtype
    )
    return inputs


def loss(arrays: LogitsArrays, normalizer: Tensor | float | None, call: LogitsCall) -> Loss:
    """The loss, the statistics (or Nones), and what the backward needs."""
    options, backend, shape = call.options, backend_named(call.backend), arrays.target.shape
    with torch.autocast(arrays.logits.device.type, enabled=False):
        inputs = _prepare(arrays, call)
        norm = backend.normalizer(inputs, options, normalizer)
        sums = _backend(call.backend).token_sums(inputs, options, call.statistics)
        if options.reduction == "none":
            total = backend.losses(inputs, options, sums).reshape(shape)
        else:
            total = backend.total_loss(inputs, options, sums, norm)
        stats = numerics.token_stats(XP, inputs, sums) if call.statistics else (None,) * len(TokenStats._fields)
    shaped = tuple(None if value is None else value.reshape(shape) for value in stats)
    return Loss(total, shaped, (norm, sums.target_logit, sums.anchor, sums.log_total))


def gradient(arrays: LogitsArrays, saved: Sequence[Tensor], upstream: Tensor, call: LogitsCall, out: Tensor) -> None:
    """The gradient of the loss to ``out``, logits' shape and dtype, contiguous."""
    options = call.options
    norm, target_logit, anchor, log_total = saved
    with torch.autocast(out.device.type, enabled=False):
        inputs = _prepare(arrays, call)
        per_token = upstream.reshape(-1).to(norm.dtype) if options.reduction == "none" else upstream * norm
        g = numerics.row_upstream(XP, inputs, options, inputs.wide(per_token))
        known = numerics.logit_rows(XP, inputs, options, TokenSums(target_logit, anchor, log_total), g)
        _backend(call.backend).gradient(inputs, options, known, out.view(-1, out.shape[-1]))


# ---------------------------------------------------------------------------------------------------------------------
# The same as operations that torch.compile puts into its graphs; ``call`` is in JSON

_ARRAYS = "Tensor logits, Tensor target, Tensor? token_weight, Tensor? class_weight"


def _text(call: LogitsCall) -> str:
    return json.dumps([dataclasses.astuple(call.options), call.statistics, call.backend])


def _call(text: str) -> LogitsCall:
    options, statistics, backend = json.loads(text)
    return LogitsCall(LossOptions(*options), statistics, backend, in_place=False, traced=False)


@torch.library.custom_op(
    "logitless::logits_loss", mutates_args=(), schema=f"({_ARRAYS}, Tensor? normalizer, str call) -> Tensor[]"
)
def _loss_operation(*arguments: Any) -> list[Tensor]:
    """[loss, the statistics if asked for, four for the backward]."""
    *tensors, normalizer, text = arguments
    total, stats, saved = loss(plain(LogitsArrays(*tensors)), normalizer, _call(text))
    return [value for value in (total, *stats, *saved) if value is not None]


@_loss_operation.register_fake
def _(*arguments: Any) -> list[Tensor]:
    arrays, call = LogitsArrays(*arguments[:4]), _call(arguments[-1])
    dtype, shape = accumulation_dtype(arrays.logits.dtype), arrays.target.shape

    def new(shape: Sequence[int], dtype: torch.dtype = dtype) -> Tensor:
        return arrays.logits.new_empty(shape, dtype=dtype)

    results = [new(shape if call.options.reduction == "none" else ())]
    if call.statistics:
        results += [new(shape, getattr(torch, row.dtype or "", dtype)) for row in STATISTICS.values()]
    return [*results, new(()), *(new((arrays.target.numel(),)) for _ in range(3))]


@torch.library.custom_op(
    "logitless::logits_gradient",
    mutates_args=(),
    schema=f"({_ARRAYS}, Tensor[] saved, Tensor upstream, str call) -> Tensor",
)
def _gradient_operation(*arguments: Any) -> Tensor:
    *tensors, saved, upstream, text = arguments
    arrays = plain(LogitsArrays(*tensors))
    out = empty_like(arrays.logits)
    gradient(arrays, saved, upstream, _call(text), out)
    return out


@_gradient_operation.register_fake
def _(*arguments: Any) -> Tensor:
    return empty_like(arguments[0])


def traced_loss(arrays: LogitsArrays, normalizer: Tensor | float | None, call: LogitsCall) -> Loss:
    """:func:`loss`."""
    logits = arrays.logits
    if normalizer is not None and not isinstance(normalizer, Tensor):  # a number here may be a symbol
        dtype = accumulation_dtype(logits.dtype)
        normalizer = torch.full((), normalizer, dtype=dtype, device=logits.device)
    total, *rest = torch.ops.logitless.logits_loss(*arrays, normalizer, _text(call))
    stats = tuple(rest[:-4]) if call.statistics else (None,) * len(TokenStats._fields)
    return Loss(total, stats, tuple(rest[-4:]))


def traced_gradient(arrays: LogitsArrays, saved: Sequence[Tensor], upstream: Tensor, call: LogitsCall) -> Tensor:
    """:func:`gradient`, in memory of its own."""
    out: Tensor = torch.ops.logitless.logits_gradient(*arrays, list(saved), upstream, _text(call))
    return out
