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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SHAPES = ("liger", "gist", "gemma", "llama", "odd", "even", "small")


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
    folders = [str(overlay), str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, folders))
    environment = os.environ | {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--tests", default="tests -m gpu", help="pytest's arguments in one string; empty: no tests")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of four timed steps of every variant")
    parser.add_argument("--peers", action="store_true", help="also time what else is installed")
    parser.add_argument("--sweeps", nargs="*", default=[], choices=["tokens", "vocab", "memory"])
    parser.add_argument("--commit", help="commit of this checkout, where it has no git history")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overlay = make_overlay(Path(folder))
        failed = run_tests(overlay, shlex.split(arguments.tests)) if arguments.tests else 0
        sys.path[:0] = [str(overlay), str(ROOT)]
        os.environ["TRITON_CACHE_DIR"] = str(overlay / "cache")  # nothing is compiled yet when the first call is timed
        from bench import gpu, machine

        result: dict[str, Any] = {"machine": machine.describe(arguments.commit), "tests_exit_status": failed}
        result["first_call_s"] = gpu.first_call_seconds()
        result["rows"] = []
        result["sweeps"] = []
        for key, names, measure in (
            ("rows", arguments.shapes, gpu.measure),
            ("sweeps", arguments.sweeps, gpu.sweep),
        ):
            for name in names:
                rows = measure(name, arguments.rounds, arguments.peers)
                result[key] += rows
                for row in rows:
                    print({k: v for k, v in row.items() if k not in ("hidden", "dtype")}, flush=True)
        result["errors"] = gpu.errors() if arguments.shapes else []
        print(*result["errors"], result["first_call_s"], sep="\n", flush=True)
        (arguments.output / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
