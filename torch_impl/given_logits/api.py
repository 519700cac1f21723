"""Cross-entropy on logits that already exist: the same meaning as linear_cross_entropy, the gradient in place if asked.

Mirror of jax_impl/given_logits/api.py.

The forward reads the logits once and keeps three numbers per token; the backward
reads them again and writes the gradient, to memory of its own or over the logits. The last section holds both steps as
opaque operations, for torch.compile.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import numerics, spec
from logitless.spec import LossOptions, Reduction, TokenStats
from logitless.torch_impl import checks
from logitless.torch_impl.autograd import differentiable_once, own, reverse_only
from logitless.torch_impl.backend import BACKENDS, chosen_backend
from logitless.torch_impl.call import XP, Arrays, Inputs, TokenSums, accumulation_dtype
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.given_logits import eager as logits_eager
from logitless.torch_impl.given_logits import fused as logits_fused

# Backends are modules with the same functions.
MODULES: dict[str, Any] = {"eager": logits_eager, "triton": logits_fused}


class LogitsArrays(NamedTuple):
    """A call's arrays as they were given, the normalizer apart."""

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
    """A key of MODULES."""
    in_place: bool
    traced: bool
    """Whether torch.compile is looking: then the steps are opaque operations."""


def cross_entropy(
    logits: Tensor,
    target: Tensor,
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
    inplace_backward: bool = False,
    backend: str | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """Cross-entropy of ``softmax(f(logits))`` against ``target``: :func:`linear_cross_entropy` on given logits.

    With z = logit_scale · logits, then z = softcap · tanh(z / softcap) if a softcap is given, and z divided by the
    temperature:

        ℓ_i = t_i [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + z_loss · lse_i² ]

    mean = Σ ℓ_i / Σ t_i k_{y_i} over tokens that are not ignored (or Σ ℓ_i / normalizer); 0, with a zero gradient, when
    no token counts. Arithmetic in float32 (float64 for float64); the gradient is rounded once. Its element at the
    target is −(the others' probability), never p − 1: right to the last digits as p → 1. Differentiable once.

    Arguments:
        logits: [..., V] bfloat16, float16, float32 or float64. Leading axes that cannot be seen as one without a copy
            (``logits[:, :-1]``) are copied: shift the target instead, and ignore its last position.
        target: [...] int32 or int64 ids in [0, V), or ignore_index. On a CPU an id outside raises ValueError; on a GPU
            and inside torch.compile that token's loss is NaN.
        inplace_backward: write the gradient over the logits in the backward, so that no second tensor of their size is
            made. Nothing is written under torch.no_grad, where logits require no grad, or in the forward. The logits
            must be contiguous, the result of an operation (a leaf's values would be lost) and a whole tensor or a
            reshaped one (of a view of a part, other parts would be left as logits). Afterwards they hold the gradient:
            a second backward is refused, and so is, by autograd, the backward of any other operation that needs their
            values. Inside torch.compile, which plans buffers itself, it changes nothing.
        backend: "triton" (kernels: bfloat16, float16, float32, where :func:`linear_cross_entropy`'s run), "eager", or
            None: the first that runs.
        the others: as for :func:`linear_cross_entropy`.
        return_stats: also return :class:`logitless.TokenStats`, without gradient.

    Returns the loss in float32 (float64 for float64 logits), or (loss, TokenStats). The gradient has logits' dtype and
    shape.

    Raises ValueError or TypeError naming the argument, what came and what is allowed; NotImplementedError for a backend
    that cannot run; RuntimeError for a second backward in place.
    """
    spec.check_backend(backend, BACKENDS)
    loss, *stats = _cross_entropy(
        LogitsArrays(logits, target, token_weight, class_weight),
        normalizer,
        (reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap, temperature),
        return_stats,
        inplace_backward,
        backend,
    )
    return (loss, TokenStats(*stats)) if return_stats else loss


@tracing.kept_whole
def _cross_entropy(
    given: LogitsArrays,
    normalizer: Tensor | float | None,
    option_values: tuple[Any, ...],
    return_stats: bool,
    in_place: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """The loss and, if asked for, the statistics."""
    tracing.check_transforms("cross_entropy", takes_one=False)
    spec.check_flags(inplace_backward=in_place, return_stats=return_stats)
    *values, temperature = map(tracing.number, option_values)
    options = LossOptions(*values).tempered(temperature)
    arrays = LogitsArrays(*given)
    _check_tensors(arrays)
    traced = tracing.is_traced(arrays.logits)
    arrays = arrays if traced else _plain(arrays)
    logits, target, *_ = arrays
    checks.check_normalizer(normalizer, options.reduction, logits.device)
    checks.check_ids(target, logits.shape[-1], options.ignore_index)
    writes = in_place and not traced and torch.is_grad_enabled() and logits.requires_grad
    if writes:
        _check_may_be_overwritten(logits)
    name = chosen_backend(backend, logits.device, logits.dtype)
    call = LogitsCall(options, return_stats, name, writes, traced)
    apply: Any = CrossEntropyFunction.apply
    made = apply(*arrays, normalizer, call)
    return tuple(value for value in made if value is not None)


def _check_tensors(arrays: LogitsArrays) -> None:
    for name, tensor in arrays._asdict().items():
        if tensor is None and name in ("token_weight", "class_weight"):
            continue
        checks.check_type(name, tensor)
        checks.check_device(name, tensor, "logits'", arrays.logits.device)
        if name != "logits":
            checks.check_constant(name, tensor)
    logits, target, *weights = (None if tensor is None else checks.info(tensor) for tensor in arrays)
    assert logits is not None
    assert target is not None
    spec.check_logits(logits, target, *weights)


def _plain(arrays: LogitsArrays) -> LogitsArrays:
    """As :func:`checks.plain`; logits of any layout are copied where they are read."""
    logits, target, *weights = arrays
    token_weight, class_weight = (None if weight is None else checks.vector(weight) for weight in weights)
    return LogitsArrays(checks.signed(logits), checks.vector(target), token_weight, class_weight)


def _check_may_be_overwritten(logits: Tensor) -> None:
    """Refuse what a gradient must not be written over: the caller's own values, and parts of a larger tensor."""
    base, came = logits._base, None
    if logits.is_leaf or (base is not None and base.is_leaf):
        came = "a leaf, whose values would be lost"
    elif base is not None and base.numel() != logits.numel():
        came = f"a view of a part of a tensor of shape {tuple(base.shape)}"
    elif not logits.is_contiguous():
        came = f"strides {logits.stride()}"
    if came is not None:
        raise ValueError(
            f"logits: got {came}, with inplace_backward=True allowed is a contiguous result of an operation, whole or "
            f"reshaped; inplace_backward=False takes any"
        )


def _check_unspent(ctx: Any) -> None:
    if ctx.spent:
        raise RuntimeError(
            "cross_entropy: the first backward wrote the gradient over the logits (inplace_backward=True): there is "
            "nothing to make it from again; inplace_backward=False allows a second backward"
        )


class CrossEntropyFunction(torch.autograd.Function):
    """The loss and the eight statistics (or Nones)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        token_weight: Tensor | None,
        class_weight: Tensor | None,
        normalizer: Tensor | float | None,
        call: LogitsCall,
    ) -> tuple[Any, ...]:
        arrays = LogitsArrays(logits, target, token_weight, class_weight)
        loss, stats, saved = (_traced_loss if call.traced else _loss)(arrays, normalizer, call)
        ctx.call, ctx.spent = call, False
        ctx.save_for_backward(*arrays, *saved)
        made = tuple(None if value is None else own(value) for value in (loss, *stats))
        ctx.mark_non_differentiable(*(value for value in made[1:] if value is not None))
        return made

    jvp = reverse_only("cross_entropy")

    @staticmethod
    @differentiable_once("cross_entropy", check=_check_unspent)
    def backward(ctx: Any, kept: tuple[Any, ...], upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        call = ctx.call
        ctx.spent = call.in_place
        arrays, saved = LogitsArrays(*kept[:4]), kept[4:]
        if call.traced:
            return _traced_gradient(arrays, saved, upstream, call), *(None,) * 5
        out = arrays.logits.detach() if call.in_place else torch.empty_like(
            arrays.logits, memory_format=torch.contiguous_format
        )  # fmt: skip
        _gradient(arrays, saved, upstream, call, out)
        if call.in_place:  # kernels write without telling autograd
            torch.autograd.graph.increment_version(out)
        return out, *(None,) * 5


# ---------------------------------------------------------------------------------------------------------------------
# The two steps


def _prepare(arrays: LogitsArrays, call: LogitsCall) -> Inputs:
    """The logits stand where hidden states do; of a weight only its length V is read."""
    logits = arrays.logits.reshape(-1, arrays.logits.shape[-1])
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    given = Arrays(logits, logits.t(), None, *arrays[1:])
    made: Inputs = MODULES[call.backend].prepare(given, call.options, logits.dtype)
    return made


def _loss(
    arrays: LogitsArrays, normalizer: Tensor | float | None, call: LogitsCall
) -> tuple[Tensor, tuple[Any, ...], list[Any]]:
    """The loss, the eight statistics (or Nones), and what the backward needs."""
    options, backend, shape = call.options, MODULES[call.backend], arrays.target.shape
    with torch.autocast(arrays.logits.device.type, enabled=False):
        inputs = _prepare(arrays, call)
        norm = backend.normalizer(inputs, options, normalizer)
        sums = backend.token_sums(inputs, options, call.statistics)
        if options.reduction == "none":
            loss = backend.losses(inputs, options, sums).reshape(shape)
        else:
            loss = backend.total_loss(inputs, options, sums, norm)
        stats = numerics.token_stats(XP, inputs, sums) if call.statistics else (None,) * len(TokenStats._fields)
    shaped = tuple(None if value is None else value.reshape(shape) for value in stats)
    return loss, shaped, [norm, sums.target_logit, sums.anchor, sums.log_total]


def _gradient(arrays: LogitsArrays, saved: Any, upstream: Tensor, call: LogitsCall, out: Tensor) -> None:
    """The gradient of the loss to ``out``, logits' shape and dtype, contiguous."""
    options, backend = call.options, MODULES[call.backend]
    norm, target_logit, anchor, log_total = saved
    with torch.autocast(out.device.type, enabled=False):
        inputs = _prepare(arrays, call)
        per_token = upstream.reshape(-1).to(norm.dtype) if options.reduction == "none" else upstream * norm
        g = numerics.row_upstream(XP, inputs, options, inputs.wide(per_token))
        sums = TokenSums(target_logit, anchor, log_total)
        known = numerics.logit_rows(XP, inputs, options, sums, g)
        backend.gradient(inputs, options, known, out.view(-1, out.shape[-1]))


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
    """[loss, the eight statistics if asked for, four for the backward]."""
    *given, normalizer, text = arguments
    loss, stats, saved = _loss(_plain(LogitsArrays(*given)), normalizer, _call(text))
    return [value for value in (loss, *stats, *saved) if value is not None]


@_loss_operation.register_fake
def _(*arguments: Any) -> list[Tensor]:
    arrays, call = LogitsArrays(*arguments[:4]), _call(arguments[-1])
    dtype, shape = accumulation_dtype(arrays.logits.dtype), arrays.target.shape

    def new(shape: Any, dtype: torch.dtype = dtype) -> Tensor:
        return arrays.logits.new_empty(shape, dtype=dtype)

    made = [new(shape if call.options.reduction == "none" else ())]
    if call.statistics:
        dtypes = {"argmax": torch.int32, "correct": torch.bool}
        made += [new(shape, dtypes.get(name, dtype)) for name in TokenStats._fields]
    return [*made, new(()), *(new((arrays.target.numel(),)) for _ in range(3))]


@torch.library.custom_op(
    "logitless::logits_gradient",
    mutates_args=(),
    schema=f"({_ARRAYS}, Tensor[] saved, Tensor upstream, str call) -> Tensor",
)
def _gradient_operation(*arguments: Any) -> Tensor:
    *given, saved, upstream, text = arguments
    arrays = _plain(LogitsArrays(*given))
    out = torch.empty_like(arrays.logits, memory_format=torch.contiguous_format)
    _gradient(arrays, saved, upstream, _call(text), out)
    return out


@_gradient_operation.register_fake
def _(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[0], memory_format=torch.contiguous_format)


def _traced_loss(
    arrays: LogitsArrays, normalizer: Tensor | float | None, call: LogitsCall
) -> tuple[Tensor, tuple[Any, ...], list[Any]]:
    logits = arrays.logits
    if normalizer is not None and not isinstance(normalizer, Tensor):  # a number here may be a symbol
        dtype = accumulation_dtype(logits.dtype)
        normalizer = torch.full((), normalizer, dtype=dtype, device=logits.device)
    loss, *rest = torch.ops.logitless.logits_loss(*arrays, normalizer, _text(call))
    return loss, tuple(rest[:-4]) if call.statistics else (None,) * len(TokenStats._fields), rest[-4:]


def _traced_gradient(arrays: LogitsArrays, saved: Any, upstream: Tensor, call: LogitsCall) -> Tensor:
    made: Tensor = torch.ops.logitless.logits_gradient(*arrays, list(saved), upstream, _text(call))
    return made
