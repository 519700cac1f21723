"""JAX on several GPUs against one: what ``python -m bench sharded --framework jax`` measures.

One step is loss, dX and dW of ``jax_impl.sharded_linear_cross_entropy`` under jax.jit, arrays lying as it cuts them.

    tensor    the vocabulary over all devices, the same problem on more of them
    sequence  the same, hidden's tokens cut over the same axis
    data      the tokens over all devices, N tokens on each (weak scaling): every device has the whole weight

Rows: milliseconds (median of interleaved rounds), the compiler's temporary bytes on a device, bytes that a
device gives to collectives of [N, D] and [V, D], and ``over_one``, the time over that of one device on the same N
(tensor, sequence: 1 / devices at best; data: 1 at best).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.registry import Results
from bench.shapes import named
from bench.sharded import powers_of_two
from bench.timing import interleaved_ms, median_ms
from logitless.jax_impl import linear_cross_entropy, sharded_linear_cross_entropy

KINDS = ("tensor", "sequence", "data")


class Variant:
    """One kind on some devices: a compiled step and what is known of it before it runs."""

    def __init__(self, kind: str, count: int, sizes: tuple[int, int, int], backend: str | None) -> None:
        tokens, hidden, vocab = sizes
        tokens *= count if kind == "data" else 1
        rows = -(-vocab // count) * count
        mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
        axes = {"data_axis": "x"} if kind == "data" else {"vocab_axis": "x", "vocab": vocab}
        sharded = sharded_linear_cross_entropy(mesh, sequence_parallel=kind == "sequence", **axes)
        loss = linear_cross_entropy if count == 1 else sharded
        specs = {"tensor": (P(), P("x"), P()), "sequence": (P("x"), P("x"), P()), "data": (P("x"), P(), P("x"))}[kind]
        cuts = tuple(NamedSharding(mesh, spec) for spec in specs)

        def make() -> Any:
            keys = jax.random.split(jax.random.key(0), 3)
            x = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
            w = jax.random.normal(keys[1], (rows if kind != "data" else vocab, hidden), jnp.bfloat16)
            return x, w * jnp.bfloat16(hidden**-0.5), jax.random.randint(keys[2], (tokens,), 0, vocab)

        def step(x: Any, w: Any, y: Any) -> Any:
            return jax.value_and_grad(lambda x, w: loss(x, w, y, backend=backend), (0, 1))(x, w)

        self.arrays = jax.jit(make, out_shardings=cuts)()
        self.compiled = jax.jit(step).lower(*self.arrays).compile()
        operand = {"tensor": 4 * tokens * hidden, "sequence": 6 * tokens * hidden, "data": 2 * vocab * hidden}[kind]
        self.row: dict[str, Any] = {
            "kind": kind, "devices": count, "tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16",
            "plan": "balanced",
            "temp_bytes": int(self.compiled.memory_analysis().temp_size_in_bytes),
            "collective_bytes": operand if count > 1 else 0,
        }  # fmt: skip

    def __call__(self) -> Any:
        return jax.block_until_ready(self.compiled(*self.arrays))


def measure(sizes: tuple[int, int, int], counts: list[int], rounds: int, backend: str | None) -> list[dict[str, Any]]:
    """Rows of every kind on every number of devices, beside one device."""
    rows = []
    for kind in KINDS:
        variants = {str(count): Variant(kind, count, sizes, backend) for count in [1, *counts]}
        losses = [float(variant()[0]) for variant in variants.values()]
        times = interleaved_ms(variants, rounds)
        one = median_ms(times["1"])
        for (name, variant), loss in zip(variants.items(), losses, strict=True):
            time_ms = median_ms(times[name])
            rows.append(variant.row | {"time_ms": time_ms, "over_one": time_ms / one, "loss": loss})
    return rows


def run(options: argparse.Namespace, results: Results) -> None:
    devices = jax.devices()
    counts = options.devices or powers_of_two(len(devices))
    results.machine["devices"] = [str(device) for device in devices]
    for shape in map(named, options.shapes):
        sizes = shape.tokens, shape.hidden, shape.vocab
        results.add(measure(sizes, counts, options.rounds or 10, options.backend))
