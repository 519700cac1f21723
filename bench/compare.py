"""Two checkouts in turn on one GPU: ``python -m bench compare BEFORE --framework torch --output DIR``.

What a change costs is less than what a GPU's clock drifts by between two programs. Here each checkout has a process of
its own, which keeps its arrays and kernels, and the two take turns in rows of steps of a second, in another order every
round. Where its arrays lie in the GPU's memory moves a process by as much as 2 %, so that the processes start anew
several times. The floor is the same code in both: its ratios say how far those of a run can be trusted.

Both run their fastest plans: the default of one may take other memory than that of the other.

BEFORE is a folder with the other checkout's packages (``git worktree add BEFORE COMMIT``); this checkout's programs
time both. Writes DIR/compare.json; a second call with the same DIR adds its rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.checkout import ROOT, packages
from bench.registry import Results, register
from bench.shapes import SHAPES, named

SIDES = ("before", "after")


def variants(framework: str, name: str) -> tuple[dict[str, Callable[[], object]], Callable[[], object]]:
    """The floor's and our kernels' steps on a shape, and what waits for them."""
    from bench import gpu

    arrays = gpu.arrays_of(framework, named(name))
    steps = {"floor": arrays.floor()} | {
        kind: step for kind, (step, _) in gpu.kernel_steps(arrays, fastest=True).items()
    }
    arrays.prepare(steps.values())
    return dict(steps), lambda: arrays.wait(steps.values())


def serve(checkout: str, framework: str, seconds: float) -> None:
    """The first line of the standard input names a shape; every other one, a variant to be timed."""
    from bench.timing import burst_ms

    with packages(Path(checkout)):
        steps, wait = variants(framework, sys.stdin.readline().strip())
        _answer(list(steps))
        for line in sys.stdin:
            _answer(burst_ms(steps[line.strip()], wait, seconds)[0])


def _answer(value: Any) -> None:
    print("answer", json.dumps(value), flush=True)


class Side:
    """A checkout's process."""

    def __init__(self, checkout: Path, framework: str, seconds: float) -> None:
        program = f"from bench.compare import serve; serve({str(checkout.resolve())!r}, {framework!r}, {seconds})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the process of a checkout ended with {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compared(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a variant: medians of both sides, and the median of all rounds' ratios, after over before."""
    times: dict[str, dict[str, list[float]]] = {}
    order = random.Random(options.seed)
    for _ in range(options.starts):
        sides = {
            side: Side(path, options.framework, options.seconds)
            for side, path in zip(SIDES, (options.checkout, ROOT), strict=True)
        }
        for side in sides.values():
            side.start(name)
        kinds, _ = (side.answer() for side in sides.values())
        for _ in range(options.rounds):
            for kind in order.sample(kinds, len(kinds)):
                for side in order.sample(SIDES, len(SIDES)):
                    sides[side].start(kind)
                    times.setdefault(kind, {side: [] for side in SIDES})[side].append(sides[side].answer())
        for side in sides.values():
            side.end()
    return [{"framework": options.framework, **row_of(name, kind, of_kind)} for kind, of_kind in times.items()]


def row_of(name: str, variant: str, times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    middles = {f"{side}_ms": statistics.median(of_side) for side, of_side in times.items()}
    return {"shape": name, "variant": variant, **middles, "ratio": statistics.median(ratios), "ratios": ratios}


@register(
    "another checkout and this one in turn, in two processes: ratios of their times",
    framework="torch",
    shapes=list(SHAPES),
    rounds=2,
    seconds=1.0,
    seed=0,
    arguments={
        "checkout": {"type": Path, "metavar": "BEFORE", "help": "the other checkout's folder"},
        "--starts": {"type": int, "default": 3, "help": "of both processes; --rounds are of every start"},
        "--before": {"help": "commit of the other checkout, for the results file"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    if results.file.exists():
        results.values["rows"] = json.loads(results.file.read_text()).get("rows", [])
    for name in options.shapes:
        results.add(compared(name, options))
