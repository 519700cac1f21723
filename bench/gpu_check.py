"""Everything that is judged on a GPU, in one call: ``python bench/gpu_check.py --output DIR``.

Runs from a checkout without installing anything (an overlay folder of links named logitless goes on the path): first
pytest on everything marked for the GPU (its output also in DIR/tests.txt), then timings beside the floor, written as
DIR/gpu_check.json.

There are two parts, PyTorch's (``--shapes``, ``--sweeps``) and JAX's (``--jax-shapes``). A part without a shape is left
out, as JAX's is by default. ``--first-calls N``: PyTorch's first calls in N fresh processes. JAX alone, and both:

    python bench/gpu_check.py --output DIR --peers --shapes --jax-shapes liger gist gemma llama --rounds 4
    python bench/gpu_check.py --output DIR --peers --jax-shapes liger gist gemma llama

``--update FILE`` takes what this call does not run from an earlier results file: each part keeps the machine, versions
and commit that it was measured with (``machine``, ``token_machine``, ``jax_machine``, ``first_call_machine``;
``tests_commit``). More files may follow, of which ``FILE:tokens`` or ``FILE:torch,jax`` gives these parts alone, in
place of what came before. (With ``--tests "" --shapes`` nothing is run, and they are put together.) ``--rows-only``
keeps the other shapes of a part, too: the rows of this call's shapes (and with "small" the errors) take the place of
the earlier ones, and say their own commit; ``FILE:llama`` gives PyTorch's rows of that shape alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SHAPES = ("liger", "gist", "gemma", "llama", "odd", "even", "small")

# What a results file holds of each part.
TORCH_KEYS = ("machine", "rows", "sweeps", "errors")
FIRST_CALL_KEYS = ("first_call_machine", "first_call_s")
TOKEN_KEYS = ("token_machine", "token_rows")
JAX_TOKEN_KEYS = ("jax_token_machine", "jax_token_rows")
JAX_KEYS = ("jax_machine", "jax_first_call_s", "jax_rows", "jax_errors")
PARTS = {
    "torch": TORCH_KEYS,
    "first_calls": FIRST_CALL_KEYS,
    "tokens": TOKEN_KEYS,
    "jax": JAX_KEYS,
    "jax_tokens": JAX_TOKEN_KEYS,
}


def make_overlay(folder: Path, root: Path = ROOT) -> Path:
    """A folder with a package ``logitless`` made of links to the four packages of a checkout."""
    package = folder / "logitless"
    package.mkdir()
    for source in (root / "core").iterdir():
        (package / source.name).symlink_to(source)
    for name in ("torch_impl", "jax_impl", "interop"):
        (package / name).symlink_to(root / name)
    return folder


def run_tests(overlay: Path, selection: list[str], log: Path) -> int:
    """pytest with the overlay on the path, its output also in ``log``; 0 when everything passed."""
    folders = [str(overlay), str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, folders))
    environment = os.environ | {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    plugins = ["-p", "no:cacheprovider", "-p", "bench.tracebacks"]
    command = [sys.executable, "-m", "pytest", *plugins, "--no-header", *selection]
    with (
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        log.open("w") as file,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            for out in (sys.stdout, file):
                print(line, end="", file=out, flush=True)
    return process.returncode


def torch_rows(shapes: list[str], rounds: int, peers: bool, errors: bool = False) -> Iterator[tuple[str, Any]]:
    """(key, value) of the rows of these shapes, and of the errors."""
    from bench import gpu

    for name in shapes:
        yield "rows", gpu.measure(name, rounds, peers)
    if errors:
        yield "errors", gpu.errors()


def torch_part(shapes: list[str], sweeps: list[str], rounds: int, peers: bool) -> Iterator[tuple[str, Any]]:
    """(key, value) of PyTorch's part as they become known; lists come in pieces."""
    from bench import gpu

    yield "rows", []
    yield "sweeps", []
    yield from torch_rows(shapes, rounds, peers)
    for name in sweeps:
        yield "sweeps", gpu.sweep(name, max(2, rounds // 2), peers)  # for plots
    yield "errors", gpu.errors() if shapes else []
    gpu.torch.cuda.empty_cache()


def first_call_part(processes: int) -> Iterator[tuple[str, Any]]:
    """(key, value) of PyTorch's first calls, each time in a fresh process that finds nothing compiled."""
    command = "import json; from bench import gpu; print(json.dumps(gpu.first_call_seconds()))"
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": cache}
            done = subprocess.run([sys.executable, "-c", command], env=environment, stdout=subprocess.PIPE, check=True)
        yield "first_call_s", [json.loads(done.stdout.splitlines()[-1])]


def jax_rows(shapes: list[str], rounds: int, peers: bool, errors: bool = False) -> Iterator[tuple[str, Any]]:
    """As :func:`torch_rows`."""
    from bench import gpu_jax

    for name in shapes:
        yield "jax_rows", gpu_jax.measure(name, rounds, peers)
    if errors:
        yield "jax_errors", gpu_jax.errors()


def jax_part(shapes: list[str], rounds: int, peers: bool) -> Iterator[tuple[str, Any]]:
    """(key, value) of JAX's part as they become known; lists come in pieces."""
    from bench import gpu_jax

    yield "jax_first_call_s", gpu_jax.first_call_seconds()
    yield "jax_rows", []
    yield from jax_rows(shapes, rounds, peers)
    yield "jax_errors", gpu_jax.errors()


def token_part(rounds: int, peers: bool) -> Iterator[tuple[str, Any]]:
    """(key, value) of PyTorch's values per token."""
    from bench import gpu_tokens

    yield "token_rows", gpu_tokens.measure(rounds, peers)
    gpu_tokens.torch.cuda.empty_cache()


def jax_token_part(rounds: int) -> Iterator[tuple[str, Any]]:
    """(key, value) of JAX's values per token."""
    from bench import gpu_jax

    yield "jax_token_rows", gpu_jax.measure_tokens(rounds)


class Results:
    """The results file: what earlier ones hold, and over it the parts of this call, written piece by piece."""

    def __init__(self, file: Path, update: list[str]) -> None:
        """``update``: earlier files, the first whole, of the others whole or the parts that are named after a colon."""
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.values: dict[str, Any] = {}
        for given in update:
            name, _, parts = given.partition(":")
            values = json.loads(Path(name).read_text())
            named = parts.split(",") if parts else []
            keys = [key for part in named if part not in SHAPES for key in PARTS[part]] if parts else list(values)
            self.values |= {key: values[key] for key in keys if key in values}
            shapes = [part for part in named if part in SHAPES]
            if shapes:
                made = values["machine"]
                self._compare("machine", made)
                # A row that does not say its commit has its own file's, which is no longer beside it.
                rows = [{"commit": made["commit"]} | row for row in values["rows"] if row["shape"] in shapes]
                self._put_rows("rows", rows)
        self._write()

    def run(self, keys: tuple[str, ...], machine: dict[str, Any], part: Iterator[tuple[str, Any]]) -> None:
        """``part`` instead of what there was of its ``keys``; the first of them is its machine's."""
        for key in keys:
            self.values.pop(key, None)
        self.add(keys[0], machine)
        for key, value in part:
            self.add(key, value)

    def replace_rows(self, machine_key: str, machine: dict[str, Any], part: Iterator[tuple[str, Any]]) -> None:
        """The rows of some shapes alone, and errors; the others were measured on such a machine (``machine_key``)."""
        self._compare(machine_key, machine)
        for key, made in part:
            self._put_rows(key, [row | {"commit": machine["commit"]} for row in made])
            self._write()
            print(key, *{row.get("shape") for row in made}, flush=True)

    def _compare(self, machine_key: str, machine: dict[str, Any]) -> None:
        """Rows beside others were measured on such a GPU and with the same versions."""
        earlier = self.values[machine_key]
        here = {name: machine["versions"].get(name) for name in earlier["versions"]}
        if (earlier["gpu"], earlier["versions"]) != (machine["gpu"], here):
            raise ValueError(f"rows: got {machine}, allowed is what the other rows were measured with: {earlier}")

    def _put_rows(self, key: str, made: list[dict[str, Any]]) -> None:
        """``made`` in place of the rows of its shapes."""
        shapes = {row.get("shape") for row in made}
        others = [row for row in self.values[key] if row.get("shape") not in shapes]
        self.values[key] = sorted(others + made, key=lambda row: SHAPES.index(row.get("shape", SHAPES[0])))

    def add(self, key: str, value: Any) -> None:
        if isinstance(value, list):
            for row in value:
                print({k: v for k, v in row.items() if k not in ("hidden", "dtype")}, flush=True)
            value = self.values.get(key, []) + value
        else:
            print(key, value, flush=True)
        self.values[key] = value
        self._write()

    def _write(self) -> None:
        self.file.write_text(json.dumps(self.values, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu_check.json and tests.txt")
    parser.add_argument("--tests", default="tests -m gpu", help="pytest's arguments in one string; empty: no tests")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="of PyTorch's part")
    parser.add_argument("--jax-shapes", nargs="*", default=[], choices=list(SHAPES), help="of JAX's part")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which every variant is timed (of sweeps half)")
    parser.add_argument("--peers", action="store_true", help="also time what else is installed")
    parser.add_argument("--sweeps", nargs="*", default=[], choices=["tokens", "vocab", "memory"])
    parser.add_argument("--first-calls", type=int, default=0, metavar="N", help="PyTorch's, in N fresh processes")
    parser.add_argument("--per-token", action="store_true", help="also log-probs, entropy and statistics")
    parser.add_argument("--jax-per-token", action="store_true", help="also log-probs and entropy in JAX")
    parser.add_argument("--commit", help="commit of this checkout, where it has no git history")
    parser.add_argument("--rows-only", action="store_true", help="with --update: keep the other shapes' rows")
    parser.add_argument("--update", nargs="*", default=[], metavar="FILE[:PARTS]", help="earlier results to keep")
    arguments = parser.parse_args()
    if arguments.rows_only and not arguments.update:
        parser.error("--rows-only: got no --update FILE, allowed is one: its other rows are kept")
    others = (arguments.sweeps, arguments.first_calls, arguments.per_token, arguments.jax_per_token)
    if arguments.rows_only and any(others):
        parser.error("--rows-only: allowed beside it are --shapes and --jax-shapes, whose rows it replaces")
    results = Results(arguments.output / "gpu_check.json", arguments.update)
    # JAX and torch share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with tempfile.TemporaryDirectory() as folder:
        overlay = make_overlay(Path(folder))
        log = arguments.output / "tests.txt"
        failed = run_tests(overlay, shlex.split(arguments.tests), log) if arguments.tests else 0
        sys.path[:0] = [str(overlay), str(ROOT)]
        os.environ["TRITON_CACHE_DIR"] = str(overlay / "cache")  # nothing is left behind
        from bench import machine

        here = machine.describe(arguments.commit)
        if arguments.tests:
            results.add("tests_exit_status", failed)
            results.add("tests_commit", here["commit"])
        how = {"rounds": arguments.rounds, "peers": arguments.peers}
        if arguments.rows_only:
            # Errors are taken at the sizes of "small".
            for key, shapes, rows in (
                ("jax_machine", arguments.jax_shapes, jax_rows),
                ("machine", arguments.shapes, torch_rows),
            ):
                if shapes:
                    results.replace_rows(key, here, rows(shapes, errors="small" in shapes, **how))
            return failed
        if arguments.first_calls:
            results.run(FIRST_CALL_KEYS, here, first_call_part(arguments.first_calls))
        if arguments.shapes or arguments.sweeps:
            results.run(TORCH_KEYS, here, torch_part(arguments.shapes, arguments.sweeps, **how))
        if arguments.per_token:
            results.run(TOKEN_KEYS, here, token_part(**how))
        if arguments.jax_per_token:
            results.run(JAX_TOKEN_KEYS, here, jax_token_part(arguments.rounds))
        if arguments.jax_shapes:
            results.run(JAX_KEYS, here, jax_part(arguments.jax_shapes, **how))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
