"""Everything that is judged on a GPU, in one call: ``python bench/gpu_check.py --output DIR``.

Runs from a checkout without installing anything (an overlay folder of links named logitless goes on the path): first
pytest on everything marked for the GPU, then timings beside the floor, written as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# N, D, V
SHAPES = {
    "liger": (4096, 4096, 128256),
    "gist": (32768, 768, 128256),
    "gemma": (8192, 2304, 256000),
    "llama": (16384, 4096, 128256),
}


def make_overlay(folder: Path) -> Path:
    """A folder with a package ``logitless`` made of links to the checkout's four packages."""
    package = folder / "logitless"
    package.mkdir()
    for source in (ROOT / "core").iterdir():
        (package / source.name).symlink_to(source)
    for name in ("torch_impl", "jax_impl", "interop"):
        (package / name).symlink_to(ROOT / name)
    return folder


def run_tests(overlay: Path, selection: list[str]) -> int:
    """pytest with the overlay on the path; 0 when everything passed."""
    paths = os.pathsep.join([str(overlay), str(ROOT / "tests"), str(ROOT)])
    paths = os.pathsep.join(filter(None, [paths, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def cuda_times_ms(step: Callable[[], object], budget_s: float = 1.0) -> list[float]:
    """CUDA-event times of single steps, after two warm-ups."""
    import torch

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(4, min(30, int(budget_s / max(time.perf_counter() - start, 1e-4))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for first, last in pairs:
        first.record()
        step()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in pairs]


def time_shape(name: str) -> list[dict[str, Any]]:
    """Floor, PyTorch's own full logits, and the eager backend by default and lean."""
    import statistics

    import torch

    from bench.floor import torch_floor
    from logitless import plan
    from logitless.torch_impl import linear_cross_entropy
    from logitless.torch_impl.memory import peak_scratch_bytes

    tokens, hidden, vocab = SHAPES[name]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(vocab, hidden, device="cuda") * hidden**-0.5).bfloat16().requires_grad_()
    y = torch.randint(0, vocab, (tokens,), device="cuda")
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16", "device": "gpu"}
    plans = {"eager default": plan(**sizes), "eager lean": plan(**sizes, order="vocab", chunk=4096)}

    def ours(chosen: Any) -> Callable[[], None]:
        def step() -> None:
            x.grad = w.grad = None
            linear_cross_entropy(x, w, y, plan=chosen).backward()

        return step

    def full() -> None:
        x.grad = w.grad = None
        torch.nn.functional.cross_entropy((x @ w.t()).float(), y).backward()

    steps = {"floor": torch_floor(x, w), **{key: ours(chosen) for key, chosen in plans.items()}, "full logits": full}
    rows = []
    for key, step in steps.items():
        row: dict[str, Any] = {"shape": name, **sizes, "variant": key}
        try:
            times = cuda_times_ms(step)
            x.grad = w.grad = None
            scratch = peak_scratch_bytes(step)
            if key != "floor":
                scratch -= x.nbytes + w.nbytes
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        else:
            promised = plans[key].scratch_bytes if key in plans else None
            row |= {"time_ms": statistics.median(times), "scratch_bytes": scratch, "promised_bytes": promised}
            row["over_floor"] = row["time_ms"] / rows[0]["time_ms"] if rows else 1.0
        rows.append(row)
        print({k: v for k, v in row.items() if k not in sizes}, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--tests", default="tests -m gpu", help="pytest's arguments in one string; empty: no tests")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--commit", help="commit of this checkout, where it has no git history")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overlay = make_overlay(Path(folder))
        failed = run_tests(overlay, shlex.split(arguments.tests)) if arguments.tests else 0
        sys.path[:0] = [str(overlay), str(ROOT)]
        from bench import machine

        rows = [row for name in arguments.shapes for row in time_shape(name)]
        result = {"machine": machine.describe(arguments.commit), "tests_exit_status": failed, "rows": rows}
        (arguments.output / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
