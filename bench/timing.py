"""Timing of several variants beside each other: interleaved rounds, medians, so that a ratio is of one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

Step = Callable[[], object]


def interleaved_ms(steps: dict[str, Step], rounds: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Run every step once to warm up, then ``rounds`` times in turn; yields (rounds done, all times so far in ms).

    A step must return only when its work is done (block on JAX arrays, synchronise a GPU).
    """
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(1, rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
        yield done, times


def median_ms(times: list[float]) -> float:
    return statistics.median(times)
