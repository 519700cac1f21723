"""The head over several devices, in one call: ``python bench/sharded.py --output DIR --ranks 2 4``.

Runs from a checkout without installing anything, starts a process for every rank, and writes sharded.json: time,
scratch of a rank, speed-up over one device and difference from its results. NCCL where there are GPUs; with ``--cpu``
gloo, to try it. A framework is a module with a function that runs in one rank (FRAMEWORKS).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SHAPES = {
    "llama": (16384, 4096, 128256, "bfloat16"),
    "gemma": (8192, 2304, 256000, "bfloat16"),
    "small": (256, 32, 1000, "float32"),
}


def torch_rank(rank: int, ranks: int, store: str, names: list[str], rounds: int, cpu: bool, answer: Any) -> None:
    """One rank of PyTorch's rows: a process of its own."""
    import torch
    import torch.distributed as dist

    from bench import sharded_torch

    device = torch.device("cpu" if cpu else f"cuda:{rank}")
    if not cpu:
        torch.cuda.set_device(device)
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for name in names:
        shape = sharded_torch.Shape(*SHAPES[name])
        rows += sharded_torch.measure(dist.group.WORLD, shape, rounds, device)
    if rank == 0:
        answer.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def torch_rows(ranks: int, names: list[str], rounds: int, cpu: bool) -> list[dict[str, Any]]:
    """Start the ranks, and return their rows."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        answer: Any = processes.get_context("spawn").SimpleQueue()
        given = (ranks, str(Path(folder) / "store"), names, rounds, cpu, answer)
        processes.spawn(torch_rank, given, ranks, join=True)
        rows: list[dict[str, Any]] = answer.get()
        return rows


FRAMEWORKS = {"torch": torch_rows}


def main() -> int:
    from bench import checkout

    parser = checkout.parser(__doc__, "sharded.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", nargs="*", default=["llama"], choices=list(SHAPES))
    parser.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS), choices=list(FRAMEWORKS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timed steps of every variant")
    parser.add_argument("--cpu", action="store_true", help="processes on this machine's cores, over gloo")
    arguments = parser.parse_args()
    with checkout.results(arguments.output / "sharded.json", arguments.commit) as found:
        found["rows"] = []
        for framework in arguments.frameworks:
            for ranks in arguments.ranks:
                rows = FRAMEWORKS[framework](ranks, arguments.shapes, arguments.rounds, arguments.cpu)
                found["rows"] += rows
                print(*rows, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
