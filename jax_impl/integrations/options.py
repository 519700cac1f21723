"""What a registration fixes for every later call of an adapter, and where an entry stands."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypedDict

from logitless import spec
from logitless.jax_impl.backend import BACKENDS
from logitless.planning import Preference, check_limits

# Of our entry in a program's implementations.
NAME = "logitless"


class Limits(TypedDict):
    """Keyword arguments of :func:`logitless.jax_impl.linear_cross_entropy`."""

    plan: Preference | None
    memory_budget: int | None
    backend: str | None


def limits(plan: Preference | None, memory_budget: int | None, backend: str | None) -> Limits:
    """All of them, checked at the registration already. Raises ValueError and TypeError."""
    check_limits(plan, memory_budget)
    spec.check_backend(backend, BACKENDS)
    return {"plan": plan, "memory_budget": memory_budget, "backend": backend}


def implementations(module: str) -> dict[str, Callable[..., object]]:
    """The ``IMPLEMENTATIONS`` of a program's module, by name. Raises ImportError without it."""
    found: dict[str, Callable[..., object]] = importlib.import_module(module).IMPLEMENTATIONS
    return found


def take_back(program: str, module: str) -> None:
    """Take our entry out of a module's implementations. Raises RuntimeError where there is none."""
    if implementations(module).pop(NAME, None) is None:
        raise RuntimeError(f"{program}: has no entry of ours, allowed is unregister_{program} after register_{program}")
