"""What a backend of the loss on given logits does, as a type, and the backends by name.

``inputs.hidden`` is the logits, [N, V].
"""

from __future__ import annotations

from typing import Protocol

import jax
from jax import Array

from logitless.jax_impl.call import Inputs, TokenSums
from logitless.jax_impl.given_logits.xla import LogitRows
from logitless.spec import LossOptions


class LogitsBackend(Protocol):
    """A module with these functions: given_logits/xla.py and given_logits/fused.py."""

    def unavailable(self, device: jax.Device | None, dtype: str, /) -> str | None:
        """Why this backend cannot compute in ``dtype`` on that device, or None. Device None: tracing, not known."""

    def token_sums(self, inputs: Inputs, options: LossOptions, statistics: bool, block: int, /) -> TokenSums:
        """[N] each: lse, nll and, if asked for, statistics. ``block``: how many logits are summed at a time."""

    def gradient(self, inputs: Inputs, options: LossOptions, known: LogitRows, in_place: bool, /) -> Array:
        """[N, V] in the logits' dtype, 0 where ignored; ``in_place``: written over the logits."""


def backend_named(name: str) -> LogitsBackend:
    """The backend of that name. Pallas is imported when its backend is first asked for."""
    if name == "pallas":
        from logitless.jax_impl.given_logits import fused

        return fused
    from logitless.jax_impl.given_logits import xla

    return xla
