"""Ways to compute a head's loss, side by side: ``python -m bench gist`` writes gist.json, and a plot beside it.

A head with a bias on B × T tokens, forward and all gradients. The five rows of the gist "chunked_lce.py" by its names
(https://gist.github.com/Chillee/22cd93e11b887db1f596ab754d60a899): Liger-Kernel where it is installed, full logits, and
chunks of 1024 tokens whose gradients are made in the forward, both eager and compiled. Beside them chunks that are
checkpointed, and ours. All of them are a mean over the tokens that count, also where the tokens are no
multiple of the chunk. A time is the median of interleaved rounds, host included; scratch is the peak beyond inputs and
gradients. Runs on a CUDA device, or at small sizes on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses

from bench.registry import Results, register


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    length: int
    hidden: int
    vocab: int
    dtype: str
    bias: bool
    ignored: float
    """Share of tokens without a loss."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@register(
    "time and memory of a head's loss, the ways people write it and ours",
    rounds=7,
    seed=0,
    arguments={
        "--batch": {"type": int, "default": 32},
        "--length": {"type": int, "default": 1024},
        "--hidden": {"type": int, "default": 768},
        "--vocab": {"type": int, "default": 128256},
        "--bias": {"action": argparse.BooleanOptionalAction, "default": True},
        "--ignored": {"type": float, "default": 0.0, "help": "share of tokens without a loss"},
        "--dtype": {"help": "default: bfloat16 on a GPU, float32 on a CPU"},
        "--chunk": {"type": int, "default": 4096, "help": "tokens in a chunk that is checkpointed"},
        "--memory-budget": {"type": int, "metavar": "MIB", "help": "ours once more, within it"},
        "--compile": {"action": argparse.BooleanOptionalAction, "default": True},
        "--device": {"help": "default: cuda where there is one"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    import torch

    from bench import head_losses, plots

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    sizes = Sizes(options.batch, options.length, options.hidden, options.vocab, dtype, options.bias, options.ignored)
    budget = None if options.memory_budget is None else options.memory_budget << 20
    losses = head_losses.variants(sizes, options.chunk, options.compile, budget)
    results.add(head_losses.measure(sizes, losses, device, options.rounds, options.seed))
    plots.gist(results.values, results.file.with_suffix(".png"))
    print(f"written to {results.file} and {results.file.with_suffix('.png').name}")
