"""What the bridges cost: ``python bench/bridges.py --output DIR`` writes DIR/bridges.json.

A step is the loss and both gradients, in bfloat16, at 4096 × 4096 × 128256. Each bridge is timed beside the native step
of the function that it wraps: the same compiled JAX function, the same torch function. Steps run in a row and the clock
stops when the device is done, so host work counts only where the device waits for it; ``host_ms`` is how long one call
keeps the host. Variants take turns, round after round.

Needs a GPU in both frameworks. Runs from a checkout without installing anything, as gpu_check.py does.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NATIVE = {"jax_in_torch": "jax", "jax_in_torch, int64 labels": "jax", "torch_in_jax": "torch"}


def steps(tokens: int, hidden: int, vocab: int) -> dict[str, Callable[[], Any]]:
    """Name → one step; what it returns becomes ready when the device is done."""
    import jax
    import torch

    from logitless import interop, jax_impl, torch_impl

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
    w = (torch.randn(vocab, hidden, device=device, generator=generator) * hidden**-0.5).bfloat16()
    y = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
    arrays = interop.to_jax({"x": x, "w": w, "y": y.int()})
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()

    def torch_step(loss: Callable[..., Any], labels: Any) -> Callable[[], Any]:
        def step() -> Any:
            x.grad = w.grad = None
            value = loss(x, w, labels)
            value.backward()
            return value

        return step

    def jax_step(loss: Callable[..., Any], *, jit: bool) -> Callable[[], Any]:
        both = jax.value_and_grad(lambda x, w: loss(x, w, arrays["y"]), argnums=(0, 1))
        compiled = jax.jit(both) if jit else both
        return lambda: compiled(arrays["x"], arrays["w"])

    # The native JAX step takes the labels as an argument too: as a constant they could be compiled into it.
    native = jax.jit(jax.value_and_grad(jax_impl.linear_cross_entropy, argnums=(0, 1)))
    in_torch = interop.jax_in_torch(jax_impl.linear_cross_entropy)
    return {
        "jax": lambda: native(arrays["x"], arrays["w"], arrays["y"]),
        "jax_in_torch": torch_step(in_torch, y.int()),
        "jax_in_torch, int64 labels": torch_step(in_torch, y),
        "torch": torch_step(torch_impl.linear_cross_entropy, y.int()),
        "torch_in_jax": jax_step(interop.torch_in_jax(torch_impl.linear_cross_entropy), jit=False),
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


def measure(tokens: int, hidden: int, vocab: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row a variant: medians of all rounds, and the bridges' overhead over their native step."""
    variants = steps(tokens, hidden, vocab)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for step in variants.values():
        _wait(step())
        _wait(step())
    for _ in range(rounds):
        for name, step in variants.items():
            times[name].append(timed(step, repeats))
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16"}
    rows = {
        name: sizes | {"variant": name, "time_ms": statistics.median(t for t, _ in made)}
        | {"host_ms": statistics.median(h for _, h in made), "rounds": rounds, "repeats": repeats}
        for name, made in times.items()
    }  # fmt: skip
    for name, native in NATIVE.items():
        rows[name]["native"] = native
        rows[name]["overhead_percent"] = 100 * (rows[name]["time_ms"] / rows[native]["time_ms"] - 1)
    return list(rows.values())


def main() -> None:
    from bench import checkout

    parser = checkout.parser(__doc__, "bridges.json")
    parser.add_argument("--sizes", type=int, nargs=3, default=[4096, 4096, 128256], metavar=("N", "D", "V"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=10, help="steps in a row")
    arguments = parser.parse_args()
    with checkout.results(arguments.output / "bridges.json", arguments.commit) as found:
        found["rows"] = measure(*arguments.sizes, arguments.rounds, arguments.repeats)
        print(*found["rows"], sep="\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
