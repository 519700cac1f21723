"""Time and energy of a step in steady state: ``python -m bench energy --output DIR`` writes DIR/energy.json.

A GPU at its power limit takes as long over a step as the step's energy takes to spend. In a row of steps of seconds
both repeat to about 0.2 %; single steps scatter with what ran before them. Timed are the floor and our kernels, in
turn, in another order every round, each after untimed steps of its own; with ``--products`` also each product alone,
ours and cuBLAS's on the same operands. Energy is the GPU's own counter (NVML, by the package nvidia-ml-py), which moves
about ten times a second: the power between moves, times the time of a step.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.registry import SHARED, Results, register
from bench.shapes import SHAPES, named
from bench.variants import in_turn

if TYPE_CHECKING:
    from bench.gpu import Step

IN_FLIGHT = 4  # steps that the host is ahead, so that the GPU never waits for it
EDGE_S = 0.05  # at both ends of a row of steps, where the counter may speak of what was before or after


class Meter:
    """Notes the GPU's energy counter whenever it moves, while the context lasts."""

    def __init__(self, joules: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._joules, self._clock = joules, clock
        self._moves: list[tuple[float, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.note()

    def note(self) -> None:
        """Look at the counter."""
        joules = self._joules()
        if not self._moves or joules != self._moves[-1][1]:
            self._moves.append((self._clock(), joules))

    def watts(self, start: float, stop: float) -> float:
        """The mean power between the first and the last move of the counter from ``start`` to ``stop`` [s]."""
        inside = [move for move in self._moves if start <= move[0] <= stop]
        if len(inside) < 2:
            raise ValueError(f"window: got {stop - start:.3f} s with {len(inside)} moves of the counter, allowed is 2")
        (first, before), (last, after) = inside[0], inside[-1]
        return (after - before) / (last - first)


def nvml_joules() -> Callable[[], float]:
    """What reads the energy counter of torch's current GPU [J]."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def row_of_steps(step: Step, meter: Meter, warm_s: float, window_s: float) -> dict[str, float]:
    """Mean time and power of the steps of ``window_s``, after those of ``warm_s``."""
    import torch

    def event() -> Any:
        mark = torch.cuda.Event(enable_timing=True, blocking=True)
        mark.record()
        return mark

    def run(seconds: float) -> tuple[Any, Any, int]:
        first, steps, ahead, start = event(), 0, collections.deque[Any](), time.perf_counter()
        while time.perf_counter() - start < seconds:
            step()
            steps += 1
            ahead.append(event())
            if len(ahead) >= IN_FLIGHT:
                ahead.popleft().synchronize()
        return first, ahead[-1], steps

    run(warm_s)
    start = time.perf_counter()
    first, last, steps = run(window_s)
    stop = time.perf_counter()
    last.synchronize()
    return {"time_ms": first.elapsed_time(last) / steps, "watts": meter.watts(start + EDGE_S, stop - EDGE_S)}


def rows_of(name: str, sizes: dict[str, Any], rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One row a variant: medians of its rounds, their ratios to the first variant's, and the rounds."""
    rows = []
    for variant, of_variant in rounds.items():
        each = [one | {"joules": one["time_ms"] * one["watts"] / 1e3} for one in of_variant]
        middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
        rows.append({"shape": name, **sizes, "variant": variant, **middle, "rounds": each})
    for row in rows:
        row["over_floor"] = row["time_ms"] / rows[0]["time_ms"]
        row["joules_over_floor"] = row["joules"] / rows[0]["joules"]
    return rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """How rows of steps are timed."""

    meter: Meter
    rounds: int
    warm_s: float
    window_s: float

    def of(
        self, name: str, sizes: dict[str, Any], steps: dict[str, Step], restore: Step | None = None
    ) -> list[dict[str, Any]]:
        """A row a step, its ratios to the first's; ``restore`` comes before each row of steps."""
        rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in steps}
        for variant in in_turn(steps, self.rounds):
            if restore is not None:
                restore()
            rounds[variant].append(row_of_steps(steps[variant], self.meter, self.warm_s, self.window_s))
        return rows_of(name, sizes, rounds)


def measure(name: str, rows: Rows, alone: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows of a shape: the floor and every plan of the kernels, or each product ``alone``."""
    from bench import gpu
    from bench.products import products

    arrays = gpu.arrays_of("torch", named(name))
    steps = {kind: gpu.step_of(arrays, chosen, "triton") for kind, chosen in gpu.kernel_plans(arrays).items()}
    if alone:
        for product in products(arrays, steps["triton"]).values():
            yield rows.of(name, arrays.shape.sizes(), product.steps, product.restore)
    else:
        yield rows.of(name, arrays.shape.sizes(), {"floor": arrays.floor(), **steps})


@register(
    "time and energy of a step in steady state, and of each product alone",
    shapes=list(SHAPES),
    rounds=3,
    seconds=1.5,
    arguments={
        "--products": {**SHARED["shapes"], "default": [], "help": "shapes of products alone; --shapes are of steps"},
        "--warm": {"type": float, "default": 0.5, "metavar": "S", "help": "untimed steps before each row of steps"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    with Meter(nvml_joules()) as meter:
        rows = Rows(meter, options.rounds, options.warm, options.seconds)
        for key, shapes in (("rows", options.shapes), ("products", options.products)):
            for name in shapes:
                for measured in measure(name, rows, alone=key == "products"):
                    results.add(measured, key)
