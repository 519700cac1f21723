"""Two checkouts in turn on one GPU: ``python bench/compare.py BEFORE --framework torch --output DIR``.

What a change costs is less than what a GPU's clock drifts by between two programs. Here each checkout has a process of
its own, which keeps its arrays and kernels, and the two take turns in rows of steps of a second, in another order every
round. The floor is the same code in both: its ratio says how far a ratio of this run can be trusted.

BEFORE is a folder with the other checkout's packages (``git worktree add BEFORE COMMIT``); this checkout's programs
time both. Writes DIR/compare.json; a second call with the same DIR adds its rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("before", "after")


def variants(framework: str, name: str) -> tuple[dict[str, Callable[[], object]], Callable[[], object]]:
    """The floor and our kernels' steps on a shape of bench/shapes.py, and what waits for them."""
    from bench.shapes import SHAPES

    shape = SHAPES[name]
    if framework == "torch":
        import torch

        from bench import gpu

        arrays, plans = gpu.Arrays(shape), gpu.kernel_plans(shape)
        steps: dict[str, Any] = {"floor": arrays.floor()}
        steps |= {kind: gpu.step_of(arrays, chosen, "triton") for kind, chosen in plans.items()}
        return steps, torch.cuda.synchronize
    from bench import gpu_jax
    from bench.floor import xla_floor

    made = gpu_jax.Arrays(shape)
    ours = {kind: step for kind, (step, _) in gpu_jax.ours(shape, made).items() if kind != "xla"}
    floor = gpu_jax.Step(gpu_jax.Program(xla_floor, made.x, made.floor_weight))
    ours = {"floor": floor} | ours
    gpu_jax.compile_all(ours.values())
    return dict(ours), lambda: [step.wait() for step in ours.values()]


def serve(checkout: Path, framework: str, seconds: float) -> None:
    """Time what the lines of the standard input name: ``shape`` makes a shape's steps, ``shape variant`` times one."""
    from bench.gpu_check import make_overlay
    from bench.timing import burst_ms

    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(make_overlay(Path(folder), checkout)))
        steps: dict[str, Callable[[], object]] = {}
        wait: Callable[[], object] = gc.collect
        for line in sys.stdin:
            name, _, variant = line.strip().partition(" ")
            if variant:
                answer: Any = burst_ms(steps[variant], wait, seconds)[0]
            else:
                steps.clear()
                gc.collect()  # the last shape's arrays
                steps, wait = variants(framework, name)
                answer = list(steps)
            print("answer", json.dumps(answer), flush=True)


class Side:
    """A checkout's process."""

    def __init__(self, checkout: Path, arguments: argparse.Namespace) -> None:
        given = ["--framework", arguments.framework, "--seconds", str(arguments.seconds), "--serve"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(checkout), *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def compared(name: str, sides: dict[str, Side], rounds: int) -> list[dict[str, Any]]:
    """A row a variant: medians of both sides, and the median of the rounds' ratios, after over before."""
    for side in sides.values():
        side.start(name)
    kinds, _ = (side.answer() for side in sides.values())
    times: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in sides} for kind in kinds}
    order = random.Random(0)
    for _ in range(rounds):
        for kind in order.sample(kinds, len(kinds)):
            for side in order.sample(list(sides), len(sides)):
                sides[side].start(f"{name} {kind}")
                times[kind][side].append(sides[side].answer())
    return [row_of(name, kind, made) for kind, made in times.items()]


def row_of(name: str, variant: str, times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    middles = {f"{side}_ms": statistics.median(made) for side, made in times.items()}
    return {"shape": name, "variant": variant, **middles, "ratio": statistics.median(ratios), "ratios": ratios}


def main() -> None:
    from bench import machine
    from bench.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="BEFORE")
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a row of steps is")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for compare.json")
    parser.add_argument("--commit", help="commit of this checkout, where it has no git history")
    parser.add_argument("--before", help="commit of the other one")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.checkout.resolve(), arguments.framework, arguments.seconds)
    file = arguments.output / "compare.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found |= {"machine": machine.describe(arguments.commit), "before": arguments.before}
    sides = {side: Side(path, arguments) for side, path in zip(SIDES, (arguments.checkout, ROOT), strict=True)}
    for name in arguments.shapes:
        rows = compared(name, sides, arguments.rounds)
        for row in rows:
            print(f"{name} {row['variant']}: {row['after_ms']:.3f} ms, {row['ratio']:.4f}", flush=True)
        found.setdefault(f"{arguments.framework}_rows", []).extend(rows)
        file.write_text(json.dumps(found, indent=1) + "\n")
    for side in sides.values():
        side.end()
    return None


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT)]
    main()
