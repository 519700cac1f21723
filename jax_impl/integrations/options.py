"""What a registration fixes for every later call of an adapter."""

from __future__ import annotations

from typing import TypedDict

from logitless import spec
from logitless.jax_impl.backend import BACKENDS
from logitless.planning import check_memory_budget


class Limits(TypedDict):
    """Keyword arguments of :func:`logitless.jax_impl.linear_cross_entropy`."""

    memory_budget: int | None
    backend: str | None


def limits(memory_budget: int | None, backend: str | None) -> Limits:
    """Both, checked at the registration already. Raises ValueError and TypeError."""
    check_memory_budget(memory_budget)
    spec.check_backend(backend, BACKENDS)
    return {"memory_budget": memory_budget, "backend": backend}
