"""What the bridges cost: ``python -m bench bridges --output DIR`` writes DIR/bridges.json.

A step is the loss and both gradients, in bfloat16. Each bridge is timed beside the native step
of the function that it wraps: the same compiled JAX function, the same torch function. Steps run in a row and the clock
stops when the device is done, so host work counts only where the device waits for it; ``host_ms`` is how long one call
keeps the host. Variants take turns, round after round.

Needs a GPU in both frameworks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.registry import Results, register
from bench.shapes import Shape, named

NATIVE = {"jax_in_torch": "jax", "jax_in_torch, int64 labels": "jax", "torch_in_jax": "torch"}


def steps(shape: Shape) -> dict[str, Callable[[], Any]]:
    """Name → one step; what it returns becomes ready when the device is done."""
    import jax

    from bench import gpu_torch
    from logitless import interop, jax_impl, torch_impl

    arrays = gpu_torch.Arrays(shape)
    ids = arrays.y.int()
    x, w, y = interop.to_jax((arrays.x.detach(), arrays.w.detach(), ids))
    # The native JAX step takes the labels as an argument too: as a constant they could be compiled into it.
    native = jax.jit(jax.value_and_grad(jax_impl.linear_cross_entropy, argnums=(0, 1)))
    in_torch = interop.jax_in_torch(jax_impl.linear_cross_entropy)
    in_jax = interop.torch_in_jax(torch_impl.linear_cross_entropy)
    both = jax.value_and_grad(lambda x, w: in_jax(x, w, y), argnums=(0, 1))
    return {
        "jax": lambda: native(x, w, y),
        "jax_in_torch": arrays.step(in_torch, target=ids),
        "jax_in_torch, int64 labels": arrays.step(in_torch),
        "torch": arrays.step(torch_impl.linear_cross_entropy, target=ids),
        "torch_in_jax": lambda: both(x, w),
    }


def _wait(result: Any) -> None:
    import jax
    import torch

    jax.block_until_ready(jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else 0, result))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Time of a step, and of the host's part of it [ms], over ``repeats`` steps in a row."""
    _wait(step())
    start = time.perf_counter()
    for _ in range(repeats):
        result = step()
    returned = time.perf_counter()
    _wait(result)
    done = time.perf_counter()
    return (done - start) / repeats * 1e3, (returned - start) / repeats * 1e3


def measure(shape: Shape, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row a variant: medians of all rounds, and the bridges' overhead over their native step."""
    variants = steps(shape)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for step in variants.values():
        _wait(step())
        _wait(step())
    for _ in range(rounds):
        for name, step in variants.items():
            times[name].append(timed(step, repeats))
    rows = {
        name: shape.sizes() | {"variant": name, "time_ms": statistics.median(t for t, _ in of_step)}
        | {"host_ms": statistics.median(h for _, h in of_step), "rounds": rounds, "repeats": repeats}
        for name, of_step in times.items()
    }  # fmt: skip
    for name, native in NATIVE.items():
        rows[name]["native"] = native
        rows[name]["overhead_percent"] = 100 * (rows[name]["time_ms"] / rows[native]["time_ms"] - 1)
    return list(rows.values())


@register(
    "what jax_in_torch and torch_in_jax cost over the function that they wrap",
    shapes=["liger"],
    rounds=10,
    arguments={"--repeats": {"type": int, "default": 10, "help": "steps in a row"}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    for name in options.shapes:
        results.add(measure(named(name), options.rounds, options.repeats))
