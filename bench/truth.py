"""A head's loss and gradients in float64 on the device of its arrays, in PyTorch, and how far others are from them.

The logits exist for a chunk of tokens only. So sizes fit whose logits would not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from logitless.tolerances import allowance

Outputs = dict[str, Tensor]
"""Tensors by name, such as loss, dhidden and dweight."""
IGNORED = -100
# Logits that are held in float64, and tokens.
HELD, CHUNK = 2**28, 1024


def float32_sums(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, which is not rounded to their dtype."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@torch.no_grad()
def truth_and_ideal(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    upstream: Tensor,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> tuple[Outputs, Outputs]:
    """loss [N], dhidden [rows, D] and dweight [columns, D] in float64, of Σ upstream · loss: the truth, and the ideal.

    The ideal path (:mod:`logitless.ideal`) rounds the gradient of the logits once, to the dtype of ``x``. Its results
    are left to be rounded by :func:`compared`. Ignored tokens are -100 in ``y``.

    With ``rows`` (sorted) and ``columns``, only these rows of the gradients are made. Then the logits are sums in
    float32 of products that are exact, which takes far less time at these sizes.
    """
    sampled = rows is not None
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    picked = slice(None) if columns is None else columns
    exact, unit = w.double(), upstream.abs().max().double()
    loss = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    dhidden: list[list[Tensor]] = [[], []]
    dweight = [exact.new_zeros(exact[picked].shape) for _ in range(2)]
    size = max(1, min(CHUNK, HELD // len(w)))
    for start in range(0, len(x), size):
        part, ids, factor = (tensor[start : start + size] for tensor in (x, y, upstream))
        index = torch.where(ids == IGNORED, 0, ids)[:, None]
        hidden = part.double()
        z = float32_sums(part, w.t()).double() if sampled else hidden @ exact.t()
        lse = z.logsumexp(1)
        loss[start : start + size] = torch.where(ids == IGNORED, 0, lse - z.gather(1, index)[:, 0])
        dz = z.sub_(lse[:, None]).exp_()
        dz.scatter_add_(1, index, torch.full_like(dz[:, :1], -1))
        dz *= torch.where(ids == IGNORED, 0, factor.double() / unit)[:, None]
        inside = rows[(rows >= start) & (rows < start + size)] - start
        for low, dx, dw in zip((False, True), dhidden, dweight, strict=True):
            gradient = dz.to(x.dtype).double() if low else dz
            dx.append(gradient[inside] @ exact)
            dw.addmm_(gradient[:, picked].t(), hidden)
    truth, ideal = (
        {"loss": loss, "dhidden": torch.cat(dx).mul_(unit), "dweight": dw.mul_(unit)}
        for dx, dw in zip(dhidden, dweight, strict=True)
    )
    return truth, ideal


def relative(value: Tensor, truth: Tensor, scale: float = 1.0) -> float:
    """‖scale · value − truth‖ / ‖truth‖ in float64."""
    norm = float(truth.norm())
    return float(value.to(torch.float64, copy=True).mul_(scale).sub_(truth).norm()) / (norm or 1.0)


@torch.no_grad()
def compared(outputs: Mapping[str, Tensor], truth: Outputs, ideal: Outputs, scale: float = 1.0) -> dict[str, float]:
    """Of every output its error, and the error that is allowed: NAME_error and NAME_allowed.

    Truth and ideal are ``scale`` times as large as the outputs: for a mean of n tokens beside the truth of a sum, n.
    """
    fields: dict[str, float] = {}
    dtype = str(outputs["dhidden"].dtype).removeprefix("torch.")
    for name, value in outputs.items():
        rounded = ideal[name].div(scale).to(value.dtype)
        fields[f"{name}_error"] = relative(value, truth[name], scale)
        fields[f"{name}_allowed"] = allowance(relative(rounded, truth[name], scale), dtype)
    return fields


def passes(fields: Mapping[str, float]) -> bool:
    """Whether every error is allowed."""
    names = [name.removesuffix("_error") for name in fields if name.endswith("_error")]
    return all(fields[f"{name}_error"] <= fields[f"{name}_allowed"] for name in names)
