"""Cross-entropy on logits that already exist: the same meaning as linear_cross_entropy, the gradient in place if asked.

Mirror of jax_impl/given_logits/api.py. The forward reads the logits once and keeps three numbers per token. The
backward reads them again and writes the gradient, to memory of its own or over the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless import spec
from logitless.spec import LossOptions, Reduction, TokenStats
from logitless.torch_impl import checks
from logitless.torch_impl.autograd import Derivatives, SavedContext, differentiable_once, own, reverse_only
from logitless.torch_impl.backend import BACKENDS, chosen_backend
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.given_logits import steps
from logitless.torch_impl.given_logits.steps import LogitsArrays, LogitsCall


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
) -> Tensor | tuple[Tensor, TokenStats[Tensor]]:
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
    arrays = arrays if traced else steps.plain(arrays)
    logits, target, *_ = arrays
    checks.check_normalizer(normalizer, options.reduction, logits.device)
    checks.check_ids(target, logits.shape[-1], options.ignore_index)
    writes = in_place and not traced and torch.is_grad_enabled() and logits.requires_grad
    if writes:
        _check_may_be_overwritten(logits)
    name = chosen_backend(backend, logits.device, logits.dtype)
    call = LogitsCall(options, return_stats, name, writes, traced)
    results = CrossEntropyFunction.apply(call, normalizer, *arrays)  # type: ignore[no-untyped-call]
    return tuple(value for value in results if value is not None)


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


class Context(SavedContext):
    """What the backward finds of its forward."""

    call: LogitsCall
    spent: bool
    """Whether a backward has written over the logits."""


def _check_unspent(ctx: Context) -> None:
    if ctx.spent:
        raise RuntimeError(
            "cross_entropy: the first backward wrote the gradient over the logits (inplace_backward=True): there is "
            "nothing to make it from again; inplace_backward=False allows a second backward"
        )


class CrossEntropyFunction(torch.autograd.Function):
    """The loss and the statistics (or Nones)."""

    @staticmethod
    def forward(
        ctx: Context, call: LogitsCall, normalizer: Tensor | float | None, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        arrays = LogitsArrays(*tensors)  # type: ignore[arg-type]
        loss, stats, saved = (steps.traced_loss if call.traced else steps.loss)(arrays, normalizer, call)
        ctx.call, ctx.spent = call, False
        ctx.save_for_backward(*arrays, *saved)
        results = [None if value is None else own(value) for value in stats]
        ctx.mark_non_differentiable(*(value for value in results if value is not None))
        return (own(loss), *results)

    jvp = reverse_only("cross_entropy")

    @staticmethod
    @differentiable_once("cross_entropy", check=_check_unspent)
    def backward(ctx: Context, kept: tuple[Tensor, ...], upstream: Tensor, *_: Tensor | None) -> Derivatives:
        call = ctx.call
        ctx.spent = call.in_place
        arrays, saved = LogitsArrays(*kept[:4]), kept[4:]
        if call.traced:
            return None, None, steps.traced_gradient(arrays, saved, upstream, call), None, None, None
        out = arrays.logits.detach() if call.in_place else steps.empty_like(arrays.logits)
        steps.gradient(arrays, saved, upstream, call, out)
        if call.in_place:  # kernels write without telling autograd
            torch.autograd.graph.increment_version(out)
        return None, None, out, None, None, None
