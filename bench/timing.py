"""Timing of several variants beside each other: interleaved rounds, medians, so that a ratio is of one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Step = Callable[[], object]


def interleaved_ms(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """The times [ms] of every step: run once to warm up, then ``rounds`` times in turn.

    A step must return only when its work is done (block on JAX arrays, synchronise a GPU).
    """
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def median_ms(times: list[float]) -> float:
    return statistics.median(times)


# Of a burst: how long it runs untimed, so that the clock settles, and timed.
WARM_S = 0.4
TIMED_S = 0.2


def burst_ms(step: Step, wait: Callable[[], object], timed_s: float = TIMED_S) -> list[float]:
    """Mean time of a step, by the host's clock, of several started back to back: [milliseconds].

    Both frameworks return from a step before the device has done it. A single step waited for would carry the host's
    own time to start it and to learn of its end, 0.1 to 0.3 ms; in a row of steps all but the first are started while
    the device is busy, as between two events on a stream, and what is left is divided by their number. At least two
    steps, and as many as take ``timed_s``. ``wait`` returns when everything started is done.
    """
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < WARM_S:
        step()
        wait()
        number += 1
    one = (time.perf_counter() - begin) / number
    repeats = max(2, round(timed_s / one))
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    wait()
    return [(time.perf_counter() - begin) / repeats * 1e3]
