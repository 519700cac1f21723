"""``plan`` and ``memory_budget`` of what is set up before any call: patches, registrations and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logitless import plan


def check_refusals(set_up: Callable[..., Any]) -> None:
    """Wrong ones are refused when ``set_up`` is called, before a step."""
    with pytest.raises(ValueError, match=r"^plan: got 'quick', allowed are 'fast', 'balanced', 'lean'"):
        set_up(plan="quick")
    with pytest.raises(TypeError, match=r"^plan: got ChunkPlan, allowed are 'fast', 'balanced', 'lean' and None"):
        set_up(plan=plan(tokens=8, hidden=4, vocab=16, dtype="float32"))
    with pytest.raises(TypeError, match=r"^plan: got int, allowed are"):
        set_up(plan=3)
    with pytest.raises(ValueError, match=r"^memory_budget: got a value beside a plan, allowed is one of the two"):
        set_up(plan="lean", memory_budget=2**20)
    with pytest.raises(ValueError, match=r"^memory_budget: got 0, allowed is at least 1"):
        set_up(memory_budget=0)


def note_plans(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[Any]:
    """The plans that these functions of a module will be called with, in order."""
    plans: list[Any] = []
    for name in names or ("linear_cross_entropy",):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, own=own, **k: plans.append(k["plan"]) or own(*a, **k))
    return plans
