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


def xla_floor(x: Any, w: Any) -> tuple[Any, Any]:
    """The same as a function for jax.jit: (dX, dW), the results kept so that no product is left out."""
    import jax.numpy as jnp
    from jax import lax

    tokens, size = x.shape
    chunk = min(FLOOR_CHUNK, tokens)
    if tokens % chunk:
        raise ValueError(f"x: got {tokens} tokens, allowed is a multiple of {chunk}")

    def products(part: Any) -> tuple[Any, Any]:
        z = part @ w.T
        kept = x.dtype if chunk == tokens else jnp.float32
        return z @ w, jnp.dot(z.T, part, preferred_element_type=kept)

    if chunk == tokens:
        return products(x)

    def add(dw: Any, part: Any) -> tuple[Any, Any]:
        dx, more = products(part)
        return dw + more, dx

    parts = x.reshape(-1, chunk, size)
    dx, dw = products(parts[0])
    dw, others = lax.scan(add, dw, parts[1:])
    return jnp.concatenate([dx, others.reshape(-1, size)]), dw


def torch_four_products(x: Any, w: Any) -> Callable[[], object]:
    """The logits once more before the three: the floor of a gradient that arrives per token."""
    import torch

    gradients = torch_floor(x, w)
    z = torch.empty(FLOOR_CHUNK, len(w), device=x.device, dtype=x.dtype)

    def step() -> None:
        for start in range(0, len(x), FLOOR_CHUNK):
            part = x[start : start + FLOOR_CHUNK]
            torch.mm(part, w.t(), out=z[: len(part)])
        gradients()

    return step
