"""The check of a chip on which the kernels were never run: a small problem goes before their first call.

The kernels were run on Hopper. For other chips they were compiled only. There, the first call of a kind computes a
small problem by its kernels and by plain operations. A kind is what the kernels depend on: dtypes, the hidden size,
options, whether there are several chunks. If the results differ or a launch fails, the kernels are unavailable on that
device for that dtype from then on, and one warning says why. A temperature per token was run on no GPU yet, so its
first call is checked on Hopper too.

``LOGITLESS_CHECK=0`` turns the check off, ``LOGITLESS_CHECK=1`` has it on every chip. It is never made while a CUDA
graph is captured or torch.compile traces: there the kernels run unchecked, as they do in calls on several ranks, whose
ranks must use the same backend, and on given logits. No mirror: Pallas' kernels are built for Hopper alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from logitless.planning import ChunkPlan
from logitless.tolerances import FIRST_CALL
from logitless.torch_impl import autograd
from logitless.torch_impl.call import Arrays, Call, is_turned
from logitless.torch_impl.kernels import architecture
from logitless.torch_impl.kernels.trial import REPORT, is_new, relative_error, wanted

# A small problem has several tiles of every product, and as many chunks as it takes to add them up.
MOST_TOKENS, MOST_VOCAB = 1088, 512
TOKEN_CHUNK, VOCAB_CHUNK = 384, 256

Kind = tuple[object, ...]
_passed: set[Kind] = set()


def checked(ready: Callable[[], tuple[Arrays, Call]]) -> tuple[Arrays, Call]:
    """``ready()``, once more if its kernels have not passed: then it makes a call without them."""
    arrays, call = ready()
    return (arrays, call) if passes(arrays, call) else ready()


def passes(arrays: Arrays, call: Call) -> bool:
    """Whether the call's kernels may run: they need no check, or they have passed it. If not, they are unavailable."""
    if call.backend != "triton" or call.traced or not arrays.target.numel():
        return True
    if not wanted(arrays.hidden.device, arrays.temperature is not None):
        return True
    kind = _kind(arrays, call)
    if kind in _passed:
        return True
    reason = compare(arrays, call)
    if reason is None:
        _passed.add(kind)
        return True
    _give_up(arrays, call.compute_dtype, reason)
    return False


def compare(arrays: Arrays, call: Call) -> str | None:
    """What is wrong with the kernels' results for a small problem of the call's kind, or None."""
    small, plan = _small(arrays, call)
    alone = dataclasses.replace(call, plan=plan, deferred=None, number=None)
    plain = dataclasses.replace(alone, plan=dataclasses.replace(plan, kind="eager"), backend="eager")
    # The check's own tensors are none of the caller's: torch.utils.checkpoint counts those that are saved.
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        expected = _results(small, plain)
        try:
            found = _results(small, alone)
        except Exception as failure:  # a compiler, a launch or the driver may raise anything; the warning says what
            return f"{type(failure).__name__}: {failure}"
    allowed = FIRST_CALL[str(call.compute_dtype).removeprefix("torch.")]
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    wrong = [error for error in errors if not error <= allowed]
    return f"a result is off by {max(wrong):.1e}, allowed is {allowed:.1e}" if wrong else None


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _kind(arrays: Arrays, call: Call) -> Kind:
    """What the kernels of a call depend on."""
    present = tuple(None if array is None else array.dtype for array in arrays)
    options = call.options
    chosen = (options.reduction, *(bool(value) for value in dataclasses.astuple(options)[2:]))
    plan, weight = call.chunk_plan, arrays.weight
    flags = (plan.kernel_kind, call.statistics, call.log_probs, call.lse, call.differentiate)
    into = None if call.into is None else call.into.dtype
    steps = tuple(stride % 16 for stride in weight.stride())
    layout = (weight.shape[1], steps, is_turned(weight), weight.data_ptr() % 16, arrays.hidden.requires_grad)
    return arrays.hidden.device, call.compute_dtype, present, chosen, flags, layout, weight.requires_grad, into


def _small(arrays: Arrays, call: Call) -> tuple[Arrays, ChunkPlan]:
    """Random arrays with the call's layouts, few tokens and few entries; in several chunks if the call has several."""
    plan, device = call.chunk_plan, arrays.hidden.device
    tokens, vocab = (_few(arrays.target.numel(), MOST_TOKENS), _few(arrays.weight.shape[0], MOST_VOCAB))
    random = torch.Generator(device).manual_seed(0)

    def matrix(array: Tensor, rows: int, width: int, stride: int, scale: float) -> Tensor:
        """[rows, width] random numbers that begin as the array does."""
        first = array.data_ptr() % 16 // array.element_size()
        size = first + rows * stride
        memory = torch.randn(size, generator=random, dtype=torch.float32, device=device).mul_(scale).to(array.dtype)
        return memory[first:].view(rows, stride)[:, :width]

    def like(array: Tensor | None, rows: int, scale: float) -> Tensor | None:
        """[rows, ...] random numbers with the array's alignment."""
        if array is None:
            return None
        if array.dim() < 2:
            values = matrix(array, rows, 1, 1, scale).squeeze(1)
        elif is_turned(array):
            gap = (array.stride(1) - array.shape[0]) % 16  # behind a row in memory
            values = matrix(array, array.shape[1], rows, rows + gap, scale).T
        else:
            width = array.shape[1]
            values = matrix(array, rows, width, max(array.stride(0), width) if array.stride(1) == 1 else width, scale)
        return values.requires_grad_(array.requires_grad)

    hidden = like(arrays.hidden.reshape(-1, arrays.hidden.shape[-1]), tokens, 1.0)
    weight = like(arrays.weight, vocab, arrays.weight.shape[1] ** -0.5)
    assert hidden is not None
    assert weight is not None
    hidden.requires_grad_(arrays.hidden.requires_grad)
    target = torch.randint(vocab, (tokens,), generator=random, device=device).to(arrays.target.dtype)
    target[::7] = call.options.ignore_index
    flat = [None if v is None else v.reshape(-1) for v in (arrays.token_weight, arrays.temperature)]
    positive = [like(v, n, 1.0) for v, n in ((flat[0], tokens), (arrays.class_weight, vocab), (flat[1], tokens))]
    token_weight, class_weight, temperature = (None if v is None else v.abs_() for v in positive)
    if temperature is not None:
        temperature += 0.5
    small = Arrays(hidden, weight, like(arrays.bias, vocab, 1.0), target, token_weight, class_weight, temperature)
    chunk = min(plan.token_chunk, TOKEN_CHUNK) if len(plan.token_slices) > 1 else tokens
    block = min(plan.vocab_chunk, VOCAB_CHUNK if plan.order != "tokens" and len(plan.vocab_slices) > 1 else vocab)
    at_a_time, summed = min(plan.weight_tokens, TOKEN_CHUNK), max(0, vocab - VOCAB_CHUNK) if plan.summed else 0
    # So small a dW has no room for a chunk.
    return small, dataclasses.replace(
        plan, tokens=tokens, vocab=vocab, token_chunk=chunk, vocab_chunk=block, weight_tokens=at_a_time,
        summed=summed, lends=plan.in_place, sum_bits=plan.sum_bits if plan.low_bits < 8 else 24,
    )  # fmt: skip


def _few(number: int, most: int) -> int:
    """At most about ``most``, and a multiple of 16 if ``number`` is: compilers ask whether it is."""
    return number if number <= most else most + number % 16


def _results(arrays: Arrays, call: Call) -> list[Tensor]:
    """Losses and gradients, or what dW was added to; of the statistics those that do not jump."""
    into = None if call.into is None else torch.zeros_like(arrays.weight, dtype=call.into.dtype)
    call = dataclasses.replace(call, into=into)
    values = [value for value in autograd.values(arrays, None, call) if value.is_floating_point()]
    leaves, results = [a for a in arrays if a is not None and a.requires_grad], [value.detach() for value in values]
    if not (call.differentiate and leaves):
        return results
    total = sum(value.sum() for value in values if value.requires_grad)
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, leaves, allow_unused=into is not None)
    return [*results, *(gradient for gradient in (*gradients, into) if gradient is not None)]


def _give_up(arrays: Arrays, dtype: torch.dtype, reason: str) -> None:
    """The kernels are unavailable. Where they were run before, that is said of a temperature per token alone."""
    device, each = arrays.hidden.device, arrays.temperature is not None
    record = architecture.architecture_of(dtype, device.index, True, each=each).name
    chip = architecture.chip_of(device.index)
    why = f"they failed the check of their first call on this chip ({chip}, {record!r}): {reason}"
    alone = each and not is_new(device.index)
    architecture.refused[device, dtype, alone] = why
    beside = " beside a temperature per token" if alone else ""
    warnings.warn(
        f"logitless: the Triton kernels are not used for {dtype} on {device}{beside}: {why}. Plain operations "
        f"(backend='eager') are used instead; {REPORT}",
        RuntimeWarning,
        stacklevel=2,
    )
