"""JAX's plain operations compiled for TPUs that are not there: ``python -m bench tpu``. Needs libtpu (pip), and no TPU.

XLA says how much scratch a step of loss and gradients takes, which is held against the plan's promise. Nothing runs.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from bench.registry import Results, register

CHIPS = {"v5e": ("v5e:2x2", "v5litepod-4"), "v6e": ("v6e:2x2", "v6e-4")}
# Tokens, hidden size, vocabulary, dtype, budget [MiB]: one chunk, slices of the vocabulary, chunks of tokens.
STEPS: tuple[tuple[int, int, int, str, int | None], ...] = (
    (4096, 2048, 32768, "bfloat16", None),
    (4096, 4096, 128256, "bfloat16", None),
    (4096, 4096, 128256, "bfloat16", 600),
    (16384, 2048, 50257, "bfloat16", 1500),
    (4096, 2048, 32768, "float32", None),
)


def row(chip: str, tokens: int, hidden: int, vocab: int, dtype: str, budget: int | None) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from logitless import plan
    from logitless.jax_impl import linear_cross_entropy

    device = topologies.get_topology_desc(CHIPS[chip][0], platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    bytes_ = None if budget is None else budget * 2**20
    chosen = plan(tokens=tokens, hidden=hidden, vocab=vocab, dtype=dtype, device="tpu", memory_budget=bytes_)

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def step(x: Any, w: Any, y: Any, last: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return linear_cross_entropy(x, w, y, plan=chosen, backend="xla")

        return jax.value_and_grad(loss, (0, 1))(x, w)

    x, w, y = array(tokens, hidden), array(vocab, hidden), array(tokens, dtype=jnp.int32)
    program = jax.jit(step, donate_argnums=3, keep_unused=True).lower(x, w, y, (x, w)).compile()
    used, promised = program.memory_analysis().temp_size_in_bytes, chosen.scratch_bytes
    found = {"chip": chip, "tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": dtype, "order": chosen.order}
    return found | {
        "chunks": chosen.chunks, "scratch_bytes": used, "promised_bytes": promised, "kept": used <= promised
    }  # fmt: skip


@register("JAX's plain operations compiled for TPUs that are not there, and their scratch")
def run(options: argparse.Namespace, results: Results) -> None:
    for chip, (_, accelerator) in CHIPS.items():
        # What libtpu would otherwise ask the machine for.
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        os.environ["TPU_ACCELERATOR_TYPE"] = accelerator
        for step in STEPS:
            results.add([row(chip, *step)])
