"""Count what Triton would compile for steps of many token counts, where there is no GPU, and print it as JSON.

Run by test_replay.py: a process of its own, because where Triton interprets kernels it compiles none. Arguments: token
counts.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
from triton.runtime import driver

from bench.architectures import as_on
from logitless.torch_impl import linear_cross_entropy, linear_log_probs

HIDDEN, VOCAB = 64, 512
STEPS = {
    "loss": linear_cross_entropy,
    "everything": functools.partial(linear_cross_entropy, label_smoothing=0.1, softcap=5.0, return_stats=True),
    "log_probs": lambda *arrays, **options: linear_log_probs(*arrays, with_entropy=True, **options)[0].sum(),
}


def main(counts: list[int]) -> dict[str, list[int]]:
    """How many kernels there are after every token count, by step."""
    kinds: set[Any] = set()

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        *_, binder = kernel.device_caches[driver.active.get_current_device()]
        _, specialization, rest = binder(*arguments, **options)
        kinds.add((kernel.fn.__name__, repr(specialization), repr(sorted(rest.items()))))

    found: dict[str, list[int]] = {}
    with as_on("9.0", note):
        for name, step in STEPS.items():
            kinds.clear()
            found[name] = []
            for tokens in counts:
                hidden = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
                weight = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
                target = torch.zeros(tokens, dtype=torch.int64)
                value = step(hidden, weight, target, backend="triton")
                (value[0] if isinstance(value, tuple) else value).backward()
                found[name].append(len(kinds))
    return found


if __name__ == "__main__":
    json.dump(main([int(n) for n in sys.argv[1:]]), sys.stdout)
