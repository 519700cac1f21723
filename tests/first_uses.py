"""A program for test_replay.py: fails where the first uses of torch_impl import torch's compiler.

Three of each function: a step is written down the second time, and repeated from then on. And a rehearsal's mode, as
nothing is rehearsed without a GPU.
"""

from __future__ import annotations

import sys

import torch
from public_calls import backends, call_of, functions, outcome

from logitless.torch_impl.kernels import rehearsal, replay


def check(what: str) -> None:
    if "torch._dynamo" in sys.modules:
        sys.exit(f"imported by {what}")


replay.settings.on_cpu = True
for framework, name in functions():
    if framework != "torch" or name == "global_normalizer":  # that one takes a process group
        continue
    for backend in backends(framework, name):
        for _ in range(3):
            made, function, arguments = call_of(framework, name)
            outcome(made, function, arguments if backend is None else arguments | {"backend": backend})
        check(f"{name}, backend {backend}")
assert replay.programs
with rehearsal.IndexesAreZero():
    torch.empty(3, dtype=torch.int32, device="cpu")
check("a rehearsal")
print("done")
