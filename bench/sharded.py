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
    """By which module, and where its rows are."""
    return "tokens" if options.per_token else str(options.framework)


@register(
    "the head over several devices, beside one",
    file=lambda options: {"torch": "sharded.json"}.get(kind := kind_of(options), f"sharded_{kind}.json"),
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
