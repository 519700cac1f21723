"""An entry of levanter's ``IMPLEMENTATIONS`` of its fused cross-entropy loss (marin's ``lib/levanter``).

    register_levanter()
    fused_cross_entropy_loss_and_logsumexp_penalty(x, labels, w, implementation="logitless")

levanter holds the weight as [H, V], which is read as it lies.
"""

from __future__ import annotations

import functools
from typing import cast

import jax.numpy as jnp
from jax import Array
from jax.lax import Precision, PrecisionLike
from jax.typing import DTypeLike

from logitless.jax_impl.api import linear_cross_entropy
from logitless.jax_impl.integrations.options import NAME, implementations, limits, take_back
from logitless.planning import Preference
from logitless.spec import TokenStats

__all__ = ["linear_softmax_cross_entropy_loss", "register_levanter", "unregister_levanter"]

REGISTRY = "levanter.kernels.pallas.fused_cross_entropy_loss"


def linear_softmax_cross_entropy_loss(
    x: Array,
    labels: Array,
    w: Array,
    *,
    block_sizes: object = None,
    dtype: DTypeLike | None = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: PrecisionLike = None,
    return_argmax: bool = False,
    plan: Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """lse − z_label and lse per token, called as levanter's ``ArrayImpl`` is.

    x [B, H], labels [B], w [H, V]; z = x w, with ``logit_soft_cap`` cap · tanh(z / cap). Returns (loss, lse), both [B]
    and differentiable, so that levanter may add a logsumexp penalty, weights and a reduction; with ``return_argmax``
    (loss, lse, argmax), the first index of the largest logit, int32. Loss and lse are float32, or float64 for float64
    input. A label of −100 is ignored: its loss and lse are 0 and its argmax is −1.

    ``block_sizes`` tunes levanter's kernels and has no effect.

    Raises NotImplementedError for a ``dtype`` below float32 (sums and softmax are float32 here) and for a
    ``precision``; as :func:`logitless.jax_impl.linear_cross_entropy`, which names hidden, weight, target and softcap
    for x, w, labels and logit_soft_cap.
    """
    if dtype is not None and jnp.dtype(dtype).name not in ("float32", "float64"):
        raise NotImplementedError(
            f"dtype: got {jnp.dtype(dtype).name}, allowed are None, float32 and float64: logits are at least float32"
        )
    if precision not in (None, "default", Precision.DEFAULT):
        raise NotImplementedError(
            f"precision: got {precision!r}, allowed is None: jax.default_matmul_precision sets it for the products here"
        )
    found = linear_cross_entropy(
        x, w, labels, reduction="none", softcap=logit_soft_cap, return_lse=True, return_stats=return_argmax,
        plan=plan, memory_budget=memory_budget, backend=backend, weight_layout="dv",
    )  # fmt: skip
    if not return_argmax:
        return cast(tuple[Array, Array], found)
    loss, lse, stats = cast(tuple[Array, Array, TokenStats[Array]], found)
    return loss, lse, stats.argmax


def register_levanter(
    *, plan: Preference | None = None, memory_budget: int | None = None, backend: str | None = None
) -> None:
    """Make ``implementation="logitless"`` one of levanter's. A second call replaces the options of the first.

    Arguments: plan (a name), memory_budget, backend: as for :func:`logitless.jax_impl.linear_cross_entropy`.

    Raises ImportError without a levanter that has these kernels; ValueError and TypeError for the arguments.
    """
    entry = functools.partial(linear_softmax_cross_entropy_loss, **limits(plan, memory_budget, backend))
    implementations(REGISTRY)[NAME] = entry


def unregister_levanter() -> None:
    """Take back :func:`register_levanter`. Raises RuntimeError where there is nothing to take back."""
    take_back("levanter", REGISTRY)
