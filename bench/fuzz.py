"""Random problems over every option, layout, dtype, backend, transform and framework, held against float64.

    python bench/fuzz.py --problems 20000 --seed 7 --shard 0/2 --output fuzz.json    # on a CPU: eager, Triton, XLA
    python bench/fuzz.py --problems 500 --seed 7 --device cuda --processes 12 --output fuzz_gpu.json
    python bench/fuzz.py --seed 7 --only 1234    # one problem again

A problem is a function of (seed, number, device, backends). A run that was stopped goes on where it was: what is done
is in FILE.part, a line a batch. On a CPU the Triton kernels are interpreted, but for bfloat16, which their interpreter
cuts off where it is to be rounded; the Pallas kernels run on a GPU only. What is judged, and how strictly, is in
bench/fuzzing/truth.py.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT)] if sys.path[:1] == [str(ROOT / "bench")] else sys.path[:1]

from bench import checkout  # noqa: E402 (the folder above is where it is)

BATCH = 50
BATCHES_PER_PROCESS = 30
SHOWN = 40


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--problems", type=int, default=200)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--shard", default="0/1", help="K/S: of S equal shares of the problems, the one with number K")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--backends", default="", help="only these, with commas between: eager, triton, xla, pallas")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--output", type=Path, help="the results file")
    made.add_argument("--only", type=int, metavar="NUMBER", help="this problem alone; nothing is written")
    made.add_argument("--commit", help="commit of this checkout, where it has no git history")
    return made


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
    return f"python bench/fuzz.py --seed {seed}{more} --only {number}"


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
        "wrong_ones": wrong,
    }


def fuzz(arguments: argparse.Namespace, header: dict[str, Any], part_file: Path | None) -> dict[str, Any]:
    """All batches that are not in the part file yet; the results of all."""
    # On a GPU most problems compile kernels: with larger batches the last process would run alone for long.
    todo = batches(arguments.problems, arguments.shard, 5 if arguments.device == "cuda" else BATCH)
    done = _begun(part_file, header)
    known = {tuple(part["numbers"]) for part in done}
    backends = tuple(filter(None, arguments.backends.split(",")))
    left = [numbers for numbers in todo if (numbers[0], numbers[-1]) not in known]
    started, total = time.perf_counter(), sum(map(len, left))
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(part_file.open("a")) if part_file else None
        for part in _carried_out(arguments, left, backends):
            done.append(part)
            if lines is not None:
                lines.write(json.dumps(part) + "\n")
                lines.flush()
            _progress(arguments, done, known, total, time.perf_counter() - started)
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
    arguments: argparse.Namespace, left: list[list[int]], backends: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    if arguments.processes == 1:
        for numbers in left:
            yield run_batch(arguments.seed, numbers, arguments.device, backends)
        return
    paths = [str(ROOT), *sys.path]  # what is started anew finds the same packages
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    prepare(arguments.device)
    with concurrent.futures.ProcessPoolExecutor(
        arguments.processes, multiprocessing.get_context("spawn"), max_tasks_per_child=BATCHES_PER_PROCESS
    ) as pool:
        waiting = [pool.submit(run_batch, arguments.seed, n, arguments.device, backends) for n in left]
        for finished in concurrent.futures.as_completed(waiting):
            yield finished.result()


def _progress(
    arguments: argparse.Namespace, done: list[dict[str, Any]], known: set[Any], total: int, seconds: float
) -> None:
    made = sum(part["problems"] for part in done if tuple(part["numbers"]) not in known)
    wrong = sum(len(part["wrong"]) for part in done)
    rest = seconds / max(1, made) * (total - made)
    for one in done[-1]["wrong"] if wrong <= SHOWN else []:
        print(f"\nwrong: {one['command']}\n  " + "\n  ".join(one["wrong"]), file=sys.stderr)
    end = "\n" if made == total else ""
    line = f"seed {arguments.seed}: {made} of {total} problems, {wrong} wrong, {rest:.0f} s left   "
    print("\r" + line, end=end, file=sys.stderr, flush=True)


def show_one(arguments: argparse.Namespace) -> int:
    """Carry out one problem and print it; 1 if it is wrong."""
    prepare(arguments.device)
    from bench.fuzzing.judge import judged
    from bench.fuzzing.problems import draw

    backends = tuple(filter(None, arguments.backends.split(",")))
    verdict = judged(draw(arguments.seed, arguments.only, arguments.device, backends))
    print(verdict.problem)
    print("\n".join(verdict.wrong) if verdict.wrong else "right")
    return 1 if verdict.wrong else 0


def main(arguments: argparse.Namespace) -> int:
    """Carry out what the arguments ask for; 1 if anything is wrong."""
    prepare(arguments.device)
    output = arguments.output
    if arguments.only is None and output is None:
        raise SystemExit("--output: the results file has to be named")
    with contextlib.ExitStack() as stack:
        file = output or Path(os.devnull)
        if arguments.only is not None:
            stack.enter_context(checkout.packages())
            return show_one(arguments)
        found = stack.enter_context(checkout.results(file, arguments.commit))
        asked = {name: getattr(arguments, name) for name in ("problems", "seed", "shard", "device", "backends")}
        header = found | {"asked": asked}
        part_file = file.with_suffix(file.suffix + ".part")
        found |= {"asked": asked} | fuzz(arguments, header, part_file)
        part_file.unlink()
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
