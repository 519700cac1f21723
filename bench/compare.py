"""Two checkouts in turn on one GPU: ``python bench/compare.py BEFORE --framework torch --output DIR``.

What a change costs is less than what a GPU's clock drifts by between two programs. Here each checkout has a process of
its own, which keeps its arrays and kernels, and the two take turns in rows of steps of a second, in another order every
round. Where its arrays lie in the GPU's memory moves a process by as much as 2 %, so that the processes start anew
several times. The floor is the same code in both: its ratios say how far those of a run can be trusted.

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
    """The first line of the standard input names a shape; every other one, a variant to be timed."""
    from bench.gpu_check import make_overlay
    from bench.timing import burst_ms

    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(make_overlay(Path(folder), checkout)))
        steps, wait = variants(framework, sys.stdin.readline().strip())
        _answer(list(steps))
        for line in sys.stdin:
            _answer(burst_ms(steps[line.strip()], wait, seconds)[0])


def _answer(value: Any) -> None:
    print("answer", json.dumps(value), flush=True)


class Side:
    """A checkout's process."""

    def __init__(self, checkout: Path, arguments: argparse.Namespace, program: Path = Path(__file__)) -> None:
        given = ["--framework", arguments.framework, "--seconds", str(arguments.seconds), "--serve"]
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(checkout), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


def compared(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a variant: medians of both sides, and the median of all rounds' ratios, after over before."""
    times: dict[str, dict[str, list[float]]] = {}
    order = random.Random(0)
    for _ in range(arguments.starts):
        sides = {side: Side(path, arguments) for side, path in zip(SIDES, (arguments.checkout, ROOT), strict=True)}
        for side in sides.values():
            side.start(name)
        kinds, _ = (side.answer() for side in sides.values())
        for _ in range(arguments.rounds):
            for kind in order.sample(kinds, len(kinds)):
                for side in order.sample(SIDES, len(SIDES)):
                    sides[side].start(kind)
                    times.setdefault(kind, {side: [] for side in SIDES})[side].append(sides[side].answer())
        for side in sides.values():
            side.end()
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
    parser.add_argument("--starts", type=int, default=3, help="of both processes")
    parser.add_argument("--rounds", type=int, default=2, help="of every start")
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
    for name in arguments.shapes:
        rows = compared(name, arguments)
        for row in rows:
            print(f"{name} {row['variant']}: {row['after_ms']:.3f} ms, {row['ratio']:.4f}", flush=True)
        found.setdefault(f"{arguments.framework}_rows", []).extend(rows)
        file.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT)]
    main()
