"""The command line of all benchmarks: their names, the options that they share, and the one format of their results.

A benchmark is a module of this folder, listed in MODULES, with a function that is registered:

    @register("what it measures, in a line", rounds=5, shapes=("liger",), arguments={"--repeats": {"type": int}})
    def run(options, results): ...

It imports a framework only when it runs, so that ``--help`` needs none. While it runs, the checkout's packages are
found as ``logitless``, so that nothing has to be installed.

A results file is a JSON object: ``benchmark``, ``machine`` (processor, GPU, versions, commit), ``options``, and
``rows``, a list of objects. Some benchmarks have more lists of rows, by other names. The parts of ``check`` may be
measured by several calls: each has a machine of its own, and there are no options. Files from before this format lack
``benchmark`` and ``options``, and have some options beside the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import machine, shapes
from bench.checkout import ROOT, packages

MODULES = (
    "all", "accumulation", "architectures", "check", "compare", "distillation", "energy", "gist", "grpo", "hf",
    "log_probs", "long", "phases", "sharded", "bridges", "logits", "portable", "fuzz", "sanitize", "scale", "real_head",
    "report", "rl", "small", "tpu",
)  # fmt: skip
RESULTS = ROOT / "bench" / "results"

# Options that several benchmarks take: one that is registered with ``rounds=5`` takes --rounds, 5 by default.
SHARED: dict[str, dict[str, Any]] = {
    "rounds": {"type": int, "help": "how often each variant is timed"},
    "seconds": {"type": float, "help": "how long each timed row of steps is"},
    "shapes": {"nargs": "*", "type": shapes.name_of, "metavar": "SHAPE",
               "help": f"{', '.join(shapes.SHAPES)}, or tokens, hidden size and vocabulary as 4096x4096x128256"},
    "framework": {"choices": ("torch", "jax")},
    "peers": {"action": argparse.BooleanOptionalAction, "help": "also time other implementations that are installed"},
    "seed": {"type": int, "help": "of the random numbers"},
}  # fmt: skip
# Options of every benchmark that writes results.
WRITING: dict[str, dict[str, Any]] = {
    "output": {"type": Path, "metavar": "DIR", "help": "folder of the results file", "default": RESULTS},
    "commit": {"help": "commit of this checkout, where it has no git history"},
}


class Results:
    """One results file. It is written whenever rows are added, so that a run that is cut short leaves what it has."""

    def __init__(self, file: Path, benchmark: str, options: Mapping[str, Any]) -> None:
        self.file, self.commit = file, options.get("commit")
        file.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured
        plain = {name: value for name, value in options.items() if name not in WRITING}
        self.values: dict[str, Any] = {"benchmark": benchmark, "options": json.loads(json.dumps(plain, default=str))}

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        return machine.describe(self.commit)

    def add(self, rows: Sequence[Mapping[str, Any]], key: str = "rows") -> None:
        """Print rows, and write them behind the others of this key."""
        for row in rows:
            print({name: value for name, value in row.items() if not isinstance(value, (list, dict))}, flush=True)
        self.write(**{key: [*self.values.get(key, []), *rows]})

    def write(self, **values: Any) -> None:
        self.values |= values
        self.values = {"benchmark": self.values["benchmark"], "machine": self.machine} | self.values
        write_json(self.file, self.values)


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n")


Run = Callable[[argparse.Namespace, Results], "int | None"]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    name: str
    help: str
    run: Run
    shared: Mapping[str, Any]
    """The shared options that it takes, with their defaults."""
    arguments: Mapping[str, Mapping[str, Any]]
    """Its own options, with what argparse is told of each."""
    file: str | Callable[[argparse.Namespace], str] | None
    """The results file's name, by the options where it depends on them; None for a benchmark that writes none."""
    preallocate: bool
    """Whether JAX takes its share of the GPU's memory at once, unless the environment says otherwise."""

    def results(self, options: argparse.Namespace) -> Results:
        name = self.file(options) if callable(self.file) else self.file
        return Results(Path(os.devnull) if name is None else options.output / name, self.name, vars(options))

    def add_to(self, commands: Any) -> None:
        text = sys.modules[self.run.__module__].__doc__
        raw = argparse.RawDescriptionHelpFormatter
        parser = commands.add_parser(self.name, help=self.help, description=text, formatter_class=raw)
        for name, default in self.shared.items():
            parser.add_argument(f"--{name}", **SHARED[name], default=default)
        for name, settings in self.arguments.items():
            parser.add_argument(name, **settings)
        for name, settings in WRITING.items() if self.file is not None else ():
            parser.add_argument(f"--{name}", **settings)
        parser.set_defaults(benchmark=self, parser=parser)


BENCHMARKS: dict[str, Benchmark] = {}


def register(
    help: str,
    *,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    file: str | Callable[[argparse.Namespace], str] | None = "NAME.json",
    preallocate: bool = False,
    **shared: Any,
) -> Callable[[Run], Run]:
    """The decorated function as the benchmark that is named after its module."""

    def registered(run: Run) -> Run:
        name = run.__module__.rpartition(".")[2]
        named = file.replace("NAME", name) if isinstance(file, str) else file
        BENCHMARKS[name] = Benchmark(name, help, run, shared, arguments or {}, named, preallocate)
        return run

    return registered


def parser() -> argparse.ArgumentParser:
    for name in MODULES:
        importlib.import_module(f"bench.{name}")
    command = argparse.ArgumentParser("python -m bench", description="Time, memory and correctness, measured.")
    commands = command.add_subparsers(metavar="NAME", required=True)
    for name in MODULES:
        BENCHMARKS[name].add_to(commands)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    benchmark, command = vars(options).pop("benchmark"), vars(options).pop("parser")
    # JAX and torch share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", str(benchmark.preallocate).lower())
    with packages():
        try:
            return benchmark.run(options, benchmark.results(options)) or 0
        except argparse.ArgumentError as refused:
            command.error(str(refused))
