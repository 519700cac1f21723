"""The options that the adapters hand on to :func:`logitless.torch_impl.linear_cross_entropy`."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from logitless.planning import ChunkPlan, Preference
from logitless.spec import Reduction


class Options(TypedDict, total=False):
    """Keyword arguments of that function, with its meanings."""

    reduction: Reduction
    ignore_index: int
    token_weight: Tensor | None
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None
    temperature: float
    normalizer: Tensor | float | None
    plan: ChunkPlan | Preference | None
    memory_budget: int | None
    backend: str | None
    shift: int
