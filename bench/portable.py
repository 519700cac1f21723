"""The portable backends on a CPU: one loss-and-gradients step beside the framework's own full-logits step.

``python -m bench portable`` writes portable.json. Inputs are random. Time: median of interleaved rounds. Scratch: bytes
beyond inputs and gradients, by torch's memory events and by XLA's buffer assignment. "torch_eager, medium" is after
``torch.set_float32_matmul_precision("medium")``, which matters to bfloat16 on a CPU that multiplies it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import timing
from bench.registry import Results, register
from bench.shapes import named

if TYPE_CHECKING:
    from logitless import ChunkPlan

Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int
    vocab: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step to time, and the bytes of scratch it needs."""

    name: str
    plan: ChunkPlan | None
    step: Callable[[], object]
    scratch_bytes: Callable[[], int]


def arrays(sizes: Sizes) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sizes.tokens, sizes.hidden), np.float32)
    w = rng.standard_normal((sizes.vocab, sizes.hidden), np.float32) * np.float32(sizes.hidden**-0.5)
    return x, w, rng.integers(0, sizes.vocab, sizes.tokens)


def plans(sizes: Sizes) -> dict[str, ChunkPlan]:
    """The default plan, a ladder of chunk sizes, and the lean order."""
    from logitless import plan

    fixed = {**dataclasses.asdict(sizes), "device": "cpu"}
    ladder = {
        f"{count} chunks": plan(**fixed, order="tokens", chunk=sizes.tokens // count) for count in (1, 2, 4, 8, 16)
    }
    return {"default": plan(**fixed), **ladder, "lean": plan(**fixed, order="vocab", chunk=2048)}


def variants_of(
    sizes: Sizes, measured: Callable[[Loss], tuple[Loss, Callable[[], int]]], full: Loss, ours: Loss, half: Loss
) -> list[Variant]:
    """Full logits, our loss by every plan, and ``half``, ours with every second token ignored, by the default;
    ``measured`` gives a loss's step, and what its scratch is."""
    chosen = plans(sizes)
    planned = {name: (plan, functools.partial(ours, plan=plan)) for name, plan in chosen.items()}
    ignored = chosen["default"], functools.partial(half, plan=chosen["default"])
    every = {"full logits": (None, full), **planned, "default, half ignored": ignored}
    return [Variant(name, chosen, *measured(loss)) for name, (chosen, loss) in every.items()]


def torch_variants(sizes: Sizes) -> list[Variant]:
    import torch

    from logitless.torch_impl import linear_cross_entropy
    from logitless.torch_impl.memory import peak_scratch_bytes

    dtype = getattr(torch, sizes.dtype)
    x, w, y = (torch.from_numpy(a) for a in arrays(sizes))
    x, w = (a.to(dtype).requires_grad_() for a in (x, w))

    def measured(loss: Loss) -> tuple[Loss, Callable[[], int]]:
        def step() -> None:
            x.grad = w.grad = None
            loss().backward()

        def scratch() -> int:
            x.grad = w.grad = None
            return peak_scratch_bytes(lambda: loss().backward()) - x.nbytes - w.nbytes

        return step, scratch

    def full() -> Any:
        return torch.nn.functional.cross_entropy((x @ w.t()).float(), y)

    some = torch.where(torch.arange(len(y)) % 2 == 0, y, -100)
    ours, half = (functools.partial(linear_cross_entropy, x, w, target) for target in (y, some))
    return variants_of(sizes, measured, full, ours, half)


def jax_variants(sizes: Sizes) -> list[Variant]:
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import linear_cross_entropy
    from logitless.jax_impl.memory import temp_bytes

    *floats, ids = arrays(sizes)
    x, w = (jnp.asarray(a).astype(sizes.dtype) for a in floats)
    y = jnp.asarray(ids.astype(np.int32))

    def measured(loss: Loss) -> tuple[Loss, Callable[[], int]]:
        jitted = jax.jit(jax.value_and_grad(loss, (0, 1)))
        return lambda: jax.block_until_ready(jitted(x, w, y)), lambda: temp_bytes(jitted, x, w, y)

    def full(x: Any, w: Any, y: Any) -> Any:
        z = jnp.dot(x, w.T, preferred_element_type=jnp.float32)
        return jnp.mean(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, y[:, None], 1)[:, 0])

    def half(x: Any, w: Any, y: Any, **options: Any) -> Any:
        return linear_cross_entropy(x, w, jnp.where(jnp.arange(len(y)) % 2 == 0, y, -100), **options)

    return variants_of(sizes, measured, full, linear_cross_entropy, half)


MEDIUM = "torch_eager, medium"
VARIANTS = {"torch_eager": torch_variants, "jax_xla": jax_variants}


@contextlib.contextmanager
def precision(implementation: str) -> Iterator[None]:
    """PyTorch's switch as the implementation's name says, while it lasts."""
    import torch

    torch.set_float32_matmul_precision("medium" if implementation == MEDIUM else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def measure(implementation: str, sizes: Sizes, variants: list[Variant], rounds: int) -> list[dict[str, Any]]:
    """A row for every variant; ratios are to full logits."""
    times = timing.interleaved_ms({variant.name: variant.step for variant in variants}, rounds)
    base = timing.median_ms(times["full logits"])
    return [
        {
            "implementation": implementation,
            **dataclasses.asdict(sizes),
            "variant": variant.name,
            "order": None if variant.plan is None else variant.plan.order,
            "chunks": None if variant.plan is None else variant.plan.chunks,
            "time_ms": round(timing.median_ms(times[variant.name]), 4),
            "times_ms": [round(value, 2) for value in times[variant.name]],
            "time_over_full_logits": round(timing.median_ms(times[variant.name]) / base, 4),
            "scratch_bytes": variant.scratch_bytes(),
            "promised_bytes": None if variant.plan is None else variant.plan.scratch_bytes,
        }
        for variant in variants
    ]


@register(
    "the portable backends against full logits on this CPU: time and scratch, both frameworks",
    shapes=["2048x512x32768"],
    rounds=7,
    arguments={"--dtype": {"nargs": "*", "default": ["float32", "bfloat16"]}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    for shape in map(named, options.shapes):
        for dtype in options.dtype:
            sizes = Sizes(shape.tokens, shape.hidden, shape.vocab, dtype)
            medium = {MEDIUM: torch_variants} if dtype == "bfloat16" else {}
            for implementation, make in (VARIANTS | medium).items():
                with precision(implementation):
                    results.add(measure(implementation, sizes, make(sizes), options.rounds))
