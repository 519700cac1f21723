"""An entry of tokamax's ``IMPLEMENTATIONS`` of its linear softmax cross-entropy loss.

    register_tokamax()
    tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, implementation="logitless")

tokamax holds the weight as [H, V], which is read as it lies.
"""

from __future__ import annotations

import functools
from typing import cast

from jax import Array

from logitless.jax_impl.api import linear_cross_entropy
from logitless.jax_impl.integrations.options import NAME, implementations, limits, take_back
from logitless.planning import Preference
from logitless.spec import Reduction, TokenStats

__all__ = ["linear_softmax_cross_entropy_loss", "register_tokamax", "unregister_tokamax"]

REGISTRY = "tokamax._src.ops.linear_softmax_cross_entropy_loss.api"


def linear_softmax_cross_entropy_loss(
    x: Array,
    labels: Array,
    w: Array,
    *,
    reduction: Reduction = "sum",
    return_residuals: bool = False,
    plan: Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> Array | tuple[Array, tuple[Array]]:
    """−log softmax(x w) at the labels, called as an entry of tokamax's ``IMPLEMENTATIONS`` is.

    x [B, H], labels [B], w [H, V]. Returns the loss, a number or [B] for "none"; or (loss, (lse,)) with
    ``return_residuals``, lse [B] without gradient, as tokamax's. Both are float32, or float64 for float64 input.
    "mean" divides by B. A label of −100 is ignored: its loss and lse are 0 and "mean" does not count it. tokamax
    documents no such label.

    Gradients are JAX's own: of x and w in their dtypes and layouts for any upstream gradient, none of the labels.

    Raises as :func:`logitless.jax_impl.linear_cross_entropy`, which names hidden, weight and target for x, w, labels.
    """
    found = linear_cross_entropy(
        x, w, labels, reduction=reduction, return_stats=return_residuals, plan=plan, memory_budget=memory_budget,
        backend=backend, weight_layout="dv",
    )  # fmt: skip
    if not isinstance(found, tuple):
        return found
    loss, stats = cast(tuple[Array, TokenStats[Array]], found)
    return loss, (stats.lse,)


def register_tokamax(
    *, plan: Preference | None = None, memory_budget: int | None = None, backend: str | None = None
) -> None:
    """Make ``implementation="logitless"`` one of tokamax's. A second call replaces the options of the first.

    Arguments: plan (a name), memory_budget, backend: as for :func:`logitless.jax_impl.linear_cross_entropy`.

    tokamax itself refuses a ``precision``. Its autotuning does not see this entry, which has nothing to tune.

    Raises ImportError without tokamax; ValueError and TypeError for the arguments.
    """
    entry = functools.partial(linear_softmax_cross_entropy_loss, **limits(plan, memory_budget, backend))
    implementations(REGISTRY)[NAME] = entry


def unregister_tokamax() -> None:
    """Take back :func:`register_tokamax`. Raises RuntimeError where there is nothing to take back."""
    take_back("tokamax", REGISTRY)
