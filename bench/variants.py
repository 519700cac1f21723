"""What both frameworks' GPU benches share: variants of a shape side by side, and the rows of a results file.

Every variant runs in turn, round after round and in another order each, so that clocks and temperature are the same for
all; a time is the median of all rounds, a ratio is of one run.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.shapes import Shape

# The mode of torch.compile that has CUDA graphs, in the names of variants.
REDUCE_OVERHEAD = "reduce-overhead"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step of a shape: how it is metered and how it is timed."""

    scratch_bytes: Callable[[], int | None]
    """Runs the step until it is warm; the bytes that it needs beyond inputs and gradients, None where nobody can
    say."""
    sample_ms: Callable[[], list[float]]
    """The times of one round."""
    promised_bytes: int | None = None


def described(failure: Exception) -> str:
    """A failure in a line, for a row."""
    return f"{type(failure).__name__}: {failure}"[:300]


def peer(module: str, function: str) -> Any:
    """A function of another implementation; None, and a line that says why, where it cannot be imported. Any failure
    counts: such packages import much that other packages' versions can break."""
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as failure:
        print(f"left out: {module}: {described(failure)}")
        return None


def in_turn(variants: Iterable[str], rounds: int) -> Iterator[str]:
    """Every variant once a round, in another order each."""
    names, order = list(variants), random.Random(0)
    for _ in range(rounds):
        yield from order.sample(names, len(names))


def measured_rows(
    name: str, shape: Shape, variants: dict[str, Variant], rounds: int, floors: tuple[str, ...] = ("floor",)
) -> list[dict[str, Any]]:
    """One row a variant: median time, its ratio to the fastest of ``floors``, scratch. A failure is a row that says
    how, so that a peer may fail in its own way."""
    rows: dict[str, dict[str, Any]] = {}
    for variant, what in variants.items():
        row: dict[str, Any] = {"shape": name, **shape.sizes(), "variant": variant}
        row["promised_bytes"] = what.promised_bytes
        try:
            row["scratch_bytes"] = what.scratch_bytes()
        except Exception as failure:
            row["error"] = described(failure)
        rows[variant] = row
    running = [variant for variant in variants if "error" not in rows[variant]]
    times: dict[str, list[float]] = {variant: [] for variant in running}
    for variant in in_turn(running, rounds):
        times[variant] += variants[variant].sample_ms()
    for variant in running:
        rows[variant]["time_ms"] = statistics.median(times[variant])
    floor = min((rows[variant]["time_ms"] for variant in floors if variant in running), default=None)
    for variant in running if floor is not None else ():
        rows[variant]["over_floor"] = rows[variant]["time_ms"] / floor
    return list(rows.values())
