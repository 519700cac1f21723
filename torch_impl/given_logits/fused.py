"""The loss on given logits by Triton kernels: the functions of eager.py, launched."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from logitless.numerics import LogitRows
from logitless.spec import LossOptions
from logitless.torch_impl.call import Inputs, TokenSums
from logitless.torch_impl.kernels.kernel_call import column_block
from logitless.torch_impl.kernels.launch import launch
from logitless.torch_impl.kernels.rows import on_device

with contextlib.suppress(ImportError):  # without triton fused.unavailable() says so before anything here is called
    from logitless.torch_impl.given_logits import kernels as logits_kernels

BLOCK, WARPS = 4096, 8  # 16 logits a thread


def _options(inputs: Inputs, options: LossOptions) -> dict[str, object]:
    scale, cap = options.logit_scale, options.softcap
    return {
        "scale": float(scale),
        "cap": float(cap or 0.0),
        "HAS_SCALE": scale != 1.0,
        "HAS_CAP": cap is not None,
        "HAS_CLASS": inputs.class_weight is not None,
        "BLOCK": column_block(inputs.hidden.shape[1], BLOCK),
        "num_warps": WARPS,
    }


def token_sums(inputs: Inputs, options: LossOptions, statistics: bool) -> TokenSums:
    """:func:`eager.token_sums`."""
    tokens, vocab = inputs.hidden.shape
    weighted, device = options.label_smoothing > 0, inputs.hidden.device

    def new(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(tokens, dtype=dtype, device=device) if wanted else None

    target_logit, anchor, log_total = (torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(3))
    sums = TokenSums(
        target_logit, anchor, log_total, new(weighted), new(statistics), new(statistics, torch.int32), new(statistics),
        new(statistics), new(statistics),
    )  # fmt: skip
    if tokens:
        with on_device(device):
            launch(logits_kernels.sums_kernel, tokens)(
                inputs.hidden, inputs.target, inputs.valid.view(torch.int8), inputs.inside.view(torch.int8),
                inputs.class_weight, target_logit, anchor, log_total, sums.weighted_logits, sums.entropy, sums.argmax,
                sums.max_logit, sums.min_logit, sums.others_squared, vocab, inputs.hidden.stride(0),
                SUM_LOGITS=weighted, STATISTICS=statistics, **_options(inputs, options),
            )  # fmt: skip
    return sums


def gradient(inputs: Inputs, options: LossOptions, known: LogitRows[Tensor], out: Tensor) -> None:
    """:func:`eager.gradient`."""
    tokens, vocab = inputs.hidden.shape
    if not tokens:
        return
    with on_device(out.device):
        launch(logits_kernels.gradient_kernel, tokens)(
            inputs.hidden, out, inputs.target, inputs.valid.view(torch.int8), inputs.class_weight, known.anchor,
            known.log_total, known.factor, known.target, known.smooth, vocab, inputs.hidden.stride(0), out.stride(0),
            SMOOTH=known.smooth is not None,
            NARROWED=out.dtype != inputs.hidden.dtype and out.data_ptr() == inputs.hidden.data_ptr(),
            **_options(inputs, options),
        )  # fmt: skip
