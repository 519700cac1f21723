"""The floor: three bare products of the same sizes, what a linear cross-entropy step cannot do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# The logits of a floor chunk; larger chunks make the bare products no faster.
FLOOR_CHUNK = 4096


def torch_floor(x: Any, w: Any) -> Callable[[], object]:
    """z = x wᵀ, dX = z w, dW += zᵀ x by cuBLAS, in chunks of tokens, dW in float32 when there are several."""
    import torch

    tokens, vocab = x.shape[0], w.shape[0]
    chunk = min(FLOOR_CHUNK, tokens)
    single = chunk == tokens
    x, w = x.detach(), w.detach()
    z = torch.empty(chunk, vocab, device=x.device, dtype=x.dtype)
    dx = torch.empty_like(x)
    dw = torch.empty(w.shape, device=x.device, dtype=x.dtype if single else torch.float32)

    def step() -> None:
        for start in range(0, tokens, chunk):
            part = x[start : start + chunk]
            rows = z[: part.shape[0]]
            torch.mm(part, w.t(), out=rows)
            torch.mm(rows, w, out=dx[start : start + chunk])
            if single:
                torch.mm(rows.t(), part, out=dw)
            elif start == 0:
                torch.mm(rows.t(), part, out_dtype=torch.float32, out=dw)
            else:
                torch.addmm(dw, rows.t(), part, out_dtype=torch.float32, out=dw)

    return step
