"""When kernels are tried on a small problem before their first call, and how far off a result is."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from logitless.torch_impl.kernels import architecture

REPORT = "please report this with the output of `python -m logitless doctor`"


def wanted(device: torch.device, each: bool = False) -> bool:
    """Whether kernels on the device are checked, and can be now. ``each``: with a temperature per token."""
    asked = os.environ.get("LOGITLESS_CHECK", "")
    new = is_new(device.index) or (each and device.type == "cuda")
    if asked == "0" or (asked != "1" and not new):
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def is_new(index: int | None) -> bool:
    """Whether the kernels were never run on a CUDA or ROCm device's chip."""
    return not architecture.was_run(architecture.chip_of(index))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖, infinite where a number is none."""
    difference = torch.linalg.vector_norm(found.float() - expected.float())
    error = float(difference / torch.linalg.vector_norm(expected.float()).clamp_min(torch.finfo(torch.float32).tiny))
    return error if error == error else float("inf")
