"""The head over several devices, in one call: ``python -m bench sharded --framework torch --devices 2 4``.

Writes sharded.json for PyTorch and sharded_jax.json for JAX: time, scratch of a device, and speed beside one device.
With ``--per-token`` it writes sharded_tokens.json: log-probabilities with entropy, in PyTorch. bench/sharded_torch.py,
bench/sharded_jax.py and bench/sharded_tokens.py say what the rows are.
"""

from __future__ import annotations

import argparse
import importlib
import itertools

from bench.registry import Results, register


def powers_of_two(largest: int) -> list[int]:
    """From 2 on."""
    return list(itertools.takewhile(lambda count: count <= largest, (2**power for power in itertools.count(1))))


def kind_of(options: argparse.Namespace) -> str:
    """Which module measures, and names the results file."""
    if options.per_token and options.framework != "torch":
        raise SystemExit(f"--per-token: got it beside --framework {options.framework}, allowed is torch")
    return "tokens" if options.per_token else str(options.framework)


def file_of(options: argparse.Namespace) -> str:
    kind = kind_of(options)
    return "sharded.json" if kind == "torch" else f"sharded_{kind}.json"


@register(
    "the head over several devices, beside one",
    file=file_of,
    preallocate=True,  # each framework runs alone
    framework="torch",
    shapes=["llama"],
    rounds=None,
    arguments={
        "--devices": {"nargs": "*", "type": int, "help": "numbers of devices beside one; default: 2, 4, …, all"},
        "--dtype": {"default": "bfloat16", "help": "of PyTorch"},
        "--backend": {"choices": ["pallas", "xla"], "help": "of JAX; default: what linear_cross_entropy chooses"},
        "--per-token": {"action": "store_true", "help": "log-probabilities with entropy beside materialised logits"},
        "--cpu": {"action": "store_true", "help": "of PyTorch, to try it: two processes on this machine's cores"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    """PyTorch has 5 rounds of several steps by default, JAX 10 of one."""
    importlib.import_module(f"bench.sharded_{kind_of(options)}").run(options, results)
