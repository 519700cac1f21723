"""Random problems over every option, layout, dtype, backend, transform and framework, held against float64.

    python -m bench fuzz --problems 20000 --seed 7 --shard 0/2 --output DIR    # on a CPU: eager, Triton, XLA
    python -m bench fuzz --problems 500 --seed 7 --device cuda --processes 12 --output DIR
    python -m bench fuzz --seed 7 --only 1234    # one problem again

A problem is a function of (seed, number, device, backends). Writes fuzz_cpu.json, fuzz_gpu.json or, of a shard,
fuzz_cpu_0_of_2.json; its rows are the problems with a wrong result. A run that was stopped goes on where it was: what
is done is in a file with .part behind its name, a line a batch. On a CPU the Triton kernels are interpreted, but for
bfloat16, which their interpreter cuts off where it is to be rounded; the Pallas kernels run on a GPU only. What is
judged, and how strictly, is in bench/fuzzing/truth.py.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.registry import Results, register

BATCH = 50
BATCHES_PER_PROCESS = 30
SHOWN = 40


def prepare(device: str) -> None:
    """What has to be in the environment before a framework is imported: as in tests/conftest.py."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    if device == "cuda":
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
        return
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if importlib.util.find_spec("jax") is not None and importlib.metadata.version("jax").startswith("0.10."):
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))


def run_batch(seed: int, numbers: list[int], device: str, backends: tuple[str, ...]) -> dict[str, Any]:
    """Counts of every option's values, and what is wrong, of some problems."""
    prepare(device)
    import warnings

    from bench.fuzzing.judge import judged
    from bench.fuzzing.problems import draw

    warnings.simplefilter("ignore")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong = []
    for number in numbers:
        problem = draw(seed, number, device, backends)
        verdict = judged(problem)
        for name, value in problem.choices().items():
            counts[name][value] += 1
        if verdict.wrong:
            command = reproducing(seed, number, device, backends)
            wrong.append({"command": command, "wrong": list(verdict.wrong), "problem": repr(problem)})
    return {"numbers": [numbers[0], numbers[-1]], "problems": len(numbers), "counts": counts, "wrong": wrong}


def reproducing(seed: int, number: int, device: str, backends: tuple[str, ...]) -> str:
    """The command that carries out this problem alone."""
    more = f" --device {device}" if device != "cpu" else ""
    more += f" --backends {','.join(backends)}" if backends else ""
    return f"python -m bench fuzz --seed {seed}{more} --only {number}"


def batches(problems: int, shard: str, size: int = BATCH) -> list[list[int]]:
    """The numbers of a shard's problems, in batches."""
    part, parts = map(int, shard.split("/"))
    if not 0 <= part < parts:
        raise SystemExit(f"--shard: got {shard}, allowed is K/S with K from 0 to S - 1")
    numbers = list(range(part, problems, parts))
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts of all batches together, and every wrong one."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for part in parts:
        for name, values in part["counts"].items():
            counts[name].update(values)
    wrong = [one for part in parts for one in part["wrong"]]
    return {
        "problems": sum(part["problems"] for part in parts),
        "wrong": len(wrong),
        "counts": {name: dict(sorted(values.items())) for name, values in sorted(counts.items())},
        "rows": wrong,
    }


def fuzz(options: argparse.Namespace, header: dict[str, Any], part_file: Path | None) -> dict[str, Any]:
    """All batches that are not in the part file yet; the results of all."""
    # On a GPU most problems compile kernels: with larger batches the last process would run alone for long.
    todo = batches(options.problems, options.shard, 5 if options.device == "cuda" else BATCH)
    done = _begun(part_file, header)
    known = {tuple(part["numbers"]) for part in done}
    backends = tuple(filter(None, options.backends.split(",")))
    left = [numbers for numbers in todo if (numbers[0], numbers[-1]) not in known]
    started, total = time.perf_counter(), sum(map(len, left))
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(part_file.open("a")) if part_file else None
        for part in _carried_out(options, left, backends):
            done.append(part)
            if lines is not None:
                lines.write(json.dumps(part) + "\n")
                lines.flush()
            _progress(options, done, known, total, time.perf_counter() - started)
    if known:  # in the order of their numbers, however they came
        done.sort(key=lambda part: part["numbers"])
    return merged(done)


def _begun(part_file: Path | None, header: dict[str, Any]) -> list[dict[str, Any]]:
    """The batches of a run that was stopped; a new part file has the header alone."""
    if part_file is None:
        return []
    if not part_file.exists():
        part_file.write_text(json.dumps(header) + "\n")
        return []
    first, *lines = part_file.read_text().splitlines()
    if json.loads(first) != json.loads(json.dumps(header)):
        raise SystemExit(f"{part_file}: begun with other arguments or at another commit; delete it to begin anew")
    return [json.loads(line) for line in lines if line.endswith("}")]


def _carried_out(
    options: argparse.Namespace, left: list[list[int]], backends: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    if options.processes == 1:
        for numbers in left:
            yield run_batch(options.seed, numbers, options.device, backends)
        return
    prepare(options.device)
    with concurrent.futures.ProcessPoolExecutor(
        options.processes, multiprocessing.get_context("spawn"), max_tasks_per_child=BATCHES_PER_PROCESS
    ) as pool:
        waiting = [pool.submit(run_batch, options.seed, n, options.device, backends) for n in left]
        for finished in concurrent.futures.as_completed(waiting):
            yield finished.result()


def _progress(
    options: argparse.Namespace, done: list[dict[str, Any]], known: set[Any], total: int, seconds: float
) -> None:
    count = sum(part["problems"] for part in done if tuple(part["numbers"]) not in known)
    wrong = sum(len(part["wrong"]) for part in done)
    rest = seconds / max(1, count) * (total - count)
    for one in done[-1]["wrong"] if wrong <= SHOWN else []:
        print(f"\nwrong: {one['command']}\n  " + "\n  ".join(one["wrong"]), file=sys.stderr)
    end = "\n" if count == total else ""
    line = f"seed {options.seed}: {count} of {total} problems, {wrong} wrong, {rest:.0f} s left   "
    print("\r" + line, end=end, file=sys.stderr, flush=True)


def show_one(options: argparse.Namespace) -> int:
    """Carry out one problem and print it; 1 if it is wrong."""
    prepare(options.device)
    from bench.fuzzing.judge import judged
    from bench.fuzzing.problems import draw

    backends = tuple(filter(None, options.backends.split(",")))
    verdict = judged(draw(options.seed, options.only, options.device, backends))
    print(verdict.problem)
    print("\n".join(verdict.wrong) if verdict.wrong else "right")
    return 1 if verdict.wrong else 0


def file_of(options: argparse.Namespace) -> str:
    shard = "" if options.shard == "0/1" else f"_{options.shard.replace('/', '_of_')}"
    return f"fuzz_{'gpu' if options.device == 'cuda' else 'cpu'}{shard}.json"


@register(
    "random problems over every option, layout, dtype and backend, against float64",
    file=file_of,
    seed=0,
    arguments={
        "--problems": {"type": int, "default": 200},
        "--shard": {"default": "0/1", "help": "K/S: of S equal shares of the problems, the one with number K"},
        "--device": {"choices": ("cpu", "cuda"), "default": "cpu"},
        "--backends": {"default": "", "help": "only these, with commas between: eager, triton, xla, pallas"},
        "--processes": {"type": int, "default": 1},
        "--only": {"type": int, "metavar": "NUMBER", "help": "this problem alone; nothing is written"},
    },
)
def run(options: argparse.Namespace, results: Results) -> int:
    """1 if anything is wrong."""
    prepare(options.device)
    if options.only is not None:
        return show_one(options)
    asked = {name: getattr(options, name) for name in ("problems", "seed", "shard", "device", "backends")}
    part_file = results.file.with_suffix(".json.part")
    results.write(**fuzz(options, {"machine": results.machine, "asked": asked}, part_file))
    part_file.unlink()
    return 1 if results.values["wrong"] else 0
