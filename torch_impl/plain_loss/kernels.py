"""The Triton kernel of plain_loss beside those of given_logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(values_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out = values · factor, rounded to out's dtype. Both lie in memory alike, without gaps. A program has BLOCK of
    them."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    values = tl.load(values_ptr + place, mask=mask, other=0.0) * tl.load(factor_ptr)
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=mask)
