"""Cross-entropy on logits that already exist, with linear_cross_entropy's meaning.

Mirror of torch_impl/given_logits/api.py.

The forward reads the logits (kernels once, plain operations twice) and keeps three numbers per token; the backward
reads them again and writes the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Generic, NamedTuple

import jax
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal

from logitless import numerics, spec
from logitless.jax_impl import checks, vjp
from logitless.jax_impl.backend import BACKENDS, chosen_backend, device_of, on_several_devices
from logitless.jax_impl.call import XP, Arrays, Inputs, Leaf, RawArray, TokenSums, as_jax, taking_wrappers
from logitless.jax_impl.chunk import normalizer
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.given_logits.backend import backend_named
from logitless.spec import LossOptions, Reduction, TokenStats

# Logits that a CPU sums at a time: there XLA stores what it sums. A GPU sums what it reads, and takes all of them.
CPU_BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class LogitsCall:
    """Everything about a call that is not an array: hashable, so that it is a static argument of jax.jit."""

    options: LossOptions
    statistics: bool
    block: int
    """Logits that are summed at a time."""
    backend: str
    """A name that :func:`backend.backend_named` knows."""
    in_place: bool


class LogitArrays(NamedTuple, Generic[Leaf]):
    """A call's arrays as the caller gave them, or one thing for each of them."""

    logits: Leaf  # [..., V]
    target: Leaf  # [...]
    token_weight: Leaf | None = None  # [...]
    class_weight: Leaf | None = None  # [V]
    normalizer: Leaf | None = None  # []


@taking_wrappers
def cross_entropy(
    logits: Array,
    target: Array,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    token_weight: Array | None = None,
    class_weight: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    normalizer: Array | float | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, TokenStats[Array]]:
    """Cross-entropy of ``softmax(f(logits))`` against ``target``: :func:`linear_cross_entropy` on given logits.

    With z = logit_scale · logits, then z = softcap · tanh(z / softcap) if a softcap is given, and z divided by the
    temperature:

        ℓ_i = t_i [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + z_loss · lse_i² ]

    mean = Σ ℓ_i / Σ t_i k_{y_i} over tokens that are not ignored (or Σ ℓ_i / normalizer); 0, with a zero gradient, when
    no token counts. Arithmetic in float32 (float64 for float64); the gradient is rounded once. Its element at the
    target is −(the others' probability), never p − 1: right to the last digits as p → 1. Differentiable once, in
    reverse mode, in the logits.

    Arguments:
        logits: [..., V] bfloat16, float16, float32, or float64 where x64 is on.
        target: [...] int32 or int64 ids in [0, V), or ignore_index. An id outside raises ValueError where it can be
            looked at without waiting (a NumPy array, a concrete array on a CPU); elsewhere that token's loss is NaN.
        inplace_backward: write the gradient over the logits in the backward, so that no second array of their size is
            made: under jax.jit, where they are a value that nothing reads later, or a donated argument. Elsewhere they
            are copied first, and keep their values: ask for it only where they go. Plain operations ("xla") are asked
            nothing: XLA itself says where it writes their gradient, in the logits' place where it can.
        backend: "pallas" (kernels for bfloat16, float16 and float32 on Hopper GPUs and newer, or on a CPU under
            LOGITLESS_PALLAS_INTERPRET=1), "xla" (plain operations, anywhere), or None: the kernels where they run on a
            GPU, else "xla". Logits that jax.jit spreads over several devices take "xla", or jax.shard_map.
        the others: as for :func:`linear_cross_entropy`.
        return_stats: also return :class:`logitless.TokenStats`, without gradient.

    Returns the loss in float32 (float64 for float64 logits), or (loss, TokenStats). The gradient has logits' dtype and
    shape.

    Raises ValueError or TypeError naming the argument, what came and what is allowed; NotImplementedError for a backend
    that cannot run.
    """
    spec.check_flags(inplace_backward=inplace_backward, return_stats=return_stats)
    spec.check_backend(backend, BACKENDS)
    options = LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap).tempered(temperature)
    named = {"logits": logits, "target": target, "token_weight": token_weight, "class_weight": class_weight}
    checks.check_types(named, ("token_weight", "class_weight"))
    spec.check_logits(*(None if array is None else checks.info(array) for array in named.values()))  # type: ignore[arg-type]
    checks.check_normalizer(normalizer, reduction)
    checks.check_ids(target, logits.shape[-1], ignore_index)
    # A normalizer may be a number.
    arrays: LogitArrays[RawArray] = LogitArrays(logits, target, token_weight, class_weight, normalizer)  # type: ignore[arg-type]
    block = CPU_BLOCK if device_of(logits).platform == "cpu" else max(1, logits.size)
    call = LogitsCall(options, return_stats, block, _backend(backend, arrays), inplace_backward)
    loss, stats = _jitted(call, as_jax(arrays, logits.dtype))
    return (loss, stats) if return_stats else loss


def _backend(name: str | None, arrays: LogitArrays[RawArray]) -> str:
    """The backend to use: the one asked for, or the kernels where they run on a GPU, else plain operations."""
    reason = None
    if parallel.tracked():
        reason = "jax.shard_map(check_vma=True) knows no kernels that write in place; with check_vma=False they run"
    elif any(map(on_several_devices, arrays)):
        reason = "its kernels run on one device; inside of jax.shard_map(check_vma=False) on every device's part"
    return chosen_backend(name, arrays.logits, reason, lambda *asked: backend_named("pallas").unavailable(*asked))


# ---------------------------------------------------------------------------------------------------------------------
# Differentiable


def _prepare(arrays: LogitArrays[Array], options: LossOptions) -> Inputs:
    """The logits stand where hidden states do; of a weight only its length V is read."""
    vocab = arrays.logits.shape[-1]
    weight = jax.ShapeDtypeStruct((vocab, 0), arrays.logits.dtype)
    logits = arrays.logits.reshape(-1, vocab)
    flat = Arrays(logits, weight, None, arrays.target, arrays.token_weight, arrays.class_weight)
    return Inputs.of(flat, options.ignore_index)  # type: ignore[arg-type]  # the weight is a shape


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: LogitsCall, arrays: LogitArrays[Array]) -> vjp.Loss:
    return _loss_and_sums(call, arrays)[0]


def _loss_and_sums(call: LogitsCall, arrays: LogitArrays[Array]) -> tuple[vjp.Loss, TokenSums]:
    inputs = _prepare(arrays, call.options)
    sums = backend_named(call.backend).token_sums(inputs, call.options, call.statistics, call.block)
    norm = normalizer(inputs, call.options, arrays.normalizer)
    return vjp.loss_output(call.options, call.statistics, arrays.target.shape, inputs, sums, norm), sums


def _loss_forward(
    call: LogitsCall, primals: LogitArrays[CustomVJPPrimal]
) -> tuple[vjp.Loss, tuple[LogitArrays[Array], TokenSums]]:
    checks.check_constants(primals)
    arrays: LogitArrays[Array] = vjp.values_of(primals)
    output, sums = _loss_and_sums(call, arrays)
    return output, (arrays, TokenSums(sums.target_logit, sums.anchor, sums.log_total))


def _loss_backward(
    call: LogitsCall, residuals: tuple[LogitArrays[Array], TokenSums], cotangents: tuple[vjp.Cotangent, ...]
) -> tuple[LogitArrays[Array | None]]:
    (arrays, sums), options = residuals, call.options
    upstream = vjp.arrived(cotangents[0])
    if upstream is None:
        return (LogitArrays(None, None),)
    inputs, backend = _prepare(arrays, options), backend_named(call.backend)
    norm = normalizer(inputs, options, arrays.normalizer)
    upstream = upstream.reshape(-1) if options.reduction == "none" else upstream * norm
    g = numerics.row_upstream(XP, inputs, options, inputs.wide(upstream))
    known = numerics.logit_rows(XP, inputs, options, sums, g)
    gradient = backend.gradient(inputs, options, known, call.in_place)
    return (LogitArrays(gradient.reshape(arrays.logits.shape), None),)


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)

# Compiled once for a LogitsCall and shapes, also when the caller does not use jax.jit.
_jitted = jax.jit(_loss, static_argnums=0)
