"""A chunk's rows of logits, by the kernels of the loss on given logits: one read for the sums, one for the gradient.
And the last pass over whole gradients.

PyTorch's own operations go over a row nine times. These kernels ask nothing of a GPU but Triton. So they are tried
where the products' kernels are not used, and not used where a trial fails.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from logitless.numerics import LogitRows
from logitless.spec import LossOptions
from logitless.tolerances import FIRST_CALL
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Arrays, Inputs, TokenSums
from logitless.torch_impl.given_logits import eager
from logitless.torch_impl.kernels.launch import cdiv, launch
from logitless.torch_impl.kernels.rows import on_device
from logitless.torch_impl.kernels.trial import REPORT, relative_error, wanted

SCALED = 4096  # elements of a program
TYPES = ("cuda",) if importlib.util.find_spec("triton") else ()  # of devices that have the kernels
# Rows and classes of the problem that a new chip is tried with. A row is no whole number of blocks.
TRIED = 5, 4999
# What went wrong on a device, with logits' gradients of a dtype; None: nothing.
_failures: dict[tuple[torch.device, torch.dtype], str | None] = {}


def losses(z: Tensor, inputs: Inputs, rows: slice, options: LossOptions, out: Tensor) -> Tensor:
    """The losses [C] of the tokens ``rows``, whose logits are z [C, V] before they are scaled. To ``out`` [C, V], which
    may be z or the first halves of its rows, goes the gradient of their sum, without the scale's factor."""
    from logitless.torch_impl.given_logits import fused

    return _losses(fused.token_sums, fused.gradient, z, inputs, rows, options, out)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient times the factor [], in ``dtype``; in its own memory where that is its dtype."""
    from logitless.torch_impl.plain_loss import kernels

    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    with on_device(out.device):
        launch(kernels.scale_kernel, cdiv(out.numel(), SCALED))(gradient, factor, out, out.numel(), BLOCK=SCALED)
    return out


def _losses(
    token_sums: Callable[[Inputs, LossOptions, bool], TokenSums],
    gradient: Callable[[Inputs, LossOptions, LogitRows[Tensor], Tensor], None],
    z: Tensor, inputs: Inputs, rows: slice, options: LossOptions, out: Tensor,
) -> Tensor:  # fmt: skip
    given = dataclasses.replace(
        inputs, hidden=z, target=inputs.target[rows], valid=inputs.valid[rows], inside=inputs.inside[rows]
    )
    sums = token_sums(given, options, False)
    known = LogitRows(sums.anchor, sums.log_total, torch.ones_like(sums.anchor), torch.expm1(-sums.nll), None)
    gradient(given, options, known, out)
    return sums.nll


def are_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels are used on the device, for products of ``dtype``. Before the first call on a chip on which
    they were never run, a small problem is tried. One warning says what failed."""
    if device.type not in TYPES or dtype == torch.float64:
        return False
    if (device, dtype) not in _failures:
        if not wanted(device):
            return True
        _failures[device, dtype] = why = _trial(device, dtype)
        if why is not None:
            warnings.warn(
                f"logitless: plain operations for {dtype} on {device} take no kernel between their products, which "
                f"makes them slower: {why}; {REPORT}",
                RuntimeWarning,
                stacklevel=2,
            )
    return _failures[device, dtype] is None


def _trial(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with a small problem's losses and gradient, and with a gradient's last pass."""
    (tokens, vocab), options = TRIED, LossOptions()
    random = torch.Generator(device).manual_seed(0)
    z = torch.randn((tokens, vocab), generator=random, dtype=torch.float32, device=device)
    target = torch.randint(vocab, (tokens,), generator=random, device=device)
    inputs = chunk.prepare(Arrays(z, z.T, None, target), options, z.dtype)
    true, factor = torch.empty_like(z), torch.full((), 0.5, dtype=z.dtype, device=device)
    expected = _losses(eager.token_sums, eager.gradient, z, inputs, slice(None), options, true)
    try:
        found = z.view(dtype)[:, :vocab]  # in the logits' rows, as products read it
        made = losses(z, inputs, slice(None), options, found)
        results = (made, expected), (found, true), (scaled(true.clone(), factor, dtype), true * factor)
        error = max(relative_error(one, other) for one, other in results)
    except Exception as failure:  # a compiler, a launch or the driver may raise anything; the warning says what
        return f"{type(failure).__name__}: {failure}"
    allowed = FIRST_CALL[str(dtype).removeprefix("torch.")]
    return None if error <= allowed else f"a result is off by {error:.1e}, allowed is {allowed:.1e}"
