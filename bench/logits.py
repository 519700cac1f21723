"""The loss on given logits: ``python -m bench logits --output DIR`` writes DIR/logits.json.

A step is the loss and its gradient, N × V logits in bfloat16; a shape's hidden size plays no part. It cannot do with
less than two reads of the logits and a write of their gradient, so the floor is a bare copy that moves as many bytes:
one copy of all and one of half of them. ``gb_per_s`` counts those bytes for every variant, whatever it moves itself.
Variants take turns, round after round.

In place, PyTorch's gradient is written over the logits and JAX's logits are donated; the next step's logits are then
the last one's gradient, which takes no less work. Without a GPU for small sizes alone.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

from bench.registry import Results, register
from bench.shapes import Shape, named
from bench.timing import burst_ms
from bench.variants import Variant, measured_rows, peer

PASSES = 3  # two reads and a write
LogitLoss = Callable[[Any, Any], Any]


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch


class TorchArrays:
    """Logits and ids; what a step gives is dropped at the next."""

    def __init__(self, tokens: int, vocab: int) -> None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        self.logits = (3 * torch.randn(tokens, vocab, device=device, generator=generator)).bfloat16()
        self.target = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def floor(self) -> Callable[[], None]:
        out, half = self.logits.clone(), len(self.logits) // 2

        def step() -> None:
            out.copy_(self.logits)
            out[:half].copy_(self.logits[:half])

        return step

    def step(self, loss: LogitLoss) -> Callable[[], Any]:
        import torch

        leaf = self.logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(loss(leaf, self.target), leaf)

    def overwriting_step(self, loss: LogitLoss) -> Callable[[], Any]:
        """For a loss that writes over its logits: they are its own, and the result of an operation, which costs
        nothing."""
        import torch

        class Operand(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, seed: Any, values: Any) -> Any:
                return torch.empty(0, dtype=values.dtype, device=values.device).set_(values)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                return torch.zeros(()), None

        seed, own = torch.zeros((), requires_grad=True), self.logits.clone()
        operand: Any = Operand.apply
        return lambda: torch.autograd.grad(loss(operand(seed, own), self.target), seed)

    def variant(self, step: Callable[[], Any], gradient_bytes: int) -> Variant:
        from logitless.torch_impl.memory import peak_scratch_bytes

        def scratch_bytes() -> int:
            step(), step()
            return peak_scratch_bytes(step) - gradient_bytes

        return Variant(scratch_bytes, lambda: burst_ms(step, self.wait))


def torch_peers() -> Iterator[tuple[str, LogitLoss, bool]]:
    """Other implementations that are installed here, and whether each writes over its logits."""
    import torch

    yield "torch.compile", torch.compile(torch.nn.functional.cross_entropy), False
    if liger := peer("liger_kernel.transformers.functional", "liger_cross_entropy"):
        yield "Liger-Kernel, in place", lambda z, y: liger(z, y), True


def torch_variants(tokens: int, vocab: int, with_peers: bool) -> dict[str, Any]:
    import torch

    from logitless.torch_impl import cross_entropy

    arrays = TorchArrays(tokens, vocab)
    size = arrays.logits.nbytes
    variants = {"floor": arrays.variant(arrays.floor(), 0)}
    for backend in ("triton", "eager"):
        ours = functools.partial(cross_entropy, backend=backend)
        variants[f"torch, {backend}"] = arrays.variant(arrays.step(ours), size)
        in_place = functools.partial(ours, inplace_backward=True)
        variants[f"torch, {backend}, in place"] = arrays.variant(arrays.overwriting_step(in_place), 0)
    variants["torch.nn.functional"] = arrays.variant(arrays.step(torch.nn.functional.cross_entropy), size)
    for name, loss, writes in torch_peers() if with_peers else ():
        step = arrays.overwriting_step(loss) if writes else arrays.step(loss)
        variants[name] = arrays.variant(step, 0 if writes else size)
    return variants


# ---------------------------------------------------------------------------------------------------------------------
# JAX


class DonatedStep:
    """A step whose gradient lies where the logits were, and which are the next step's logits."""

    def __init__(self, loss: LogitLoss, logits: Any, target: Any) -> None:
        import jax
        import jax.numpy as jnp

        self.target, self.value, self.logits = target, None, jnp.copy(logits)
        self.compiled = jax.jit(jax.value_and_grad(loss), donate_argnums=0).lower(logits, target).compile()

    def __call__(self) -> None:
        self.value, self.logits = self.compiled(self.logits, self.target)

    def wait(self) -> None:
        import jax

        jax.block_until_ready(self.logits)

    def scratch_bytes(self) -> int:
        self(), self()
        self.wait()
        return int(self.compiled.memory_analysis().temp_size_in_bytes)


def _log_softmax(z: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    log_p = jax.nn.log_softmax(z.astype(jnp.float32), axis=1)
    return -jnp.take_along_axis(log_p, y[:, None], axis=1).mean()


def jax_variants(tokens: int, vocab: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from bench.gpu_jax import Step, compile_all
    from logitless.jax_impl import cross_entropy

    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.jit(lambda key: (3 * jax.random.normal(key, (tokens, vocab))).astype(jnp.bfloat16))(keys[0])
    target = jax.random.randint(keys[1], (tokens,), 0, vocab)
    losses = {f"jax, {backend}": functools.partial(cross_entropy, backend=backend) for backend in ("pallas", "xla")}
    steps = {
        name: Step(jax.value_and_grad(loss), logits, target)
        for name, loss in {**losses, "jnp, log_softmax": _log_softmax}.items()
    }
    compile_all(steps.values())
    variants = {name: step.variant() for name, step in steps.items()}
    for name, loss in losses.items():
        variants[f"{name}, in place"] = _donated_variant(functools.partial(loss, inplace_backward=True), logits, target)
    return variants


def _donated_variant(loss: LogitLoss, logits: Any, target: Any) -> Any:
    """Made when it is metered: what cannot run here is one row."""
    steps: list[DonatedStep] = []

    def scratch_bytes() -> int:
        steps.append(DonatedStep(loss, logits, target))
        return steps[0].scratch_bytes()

    return Variant(scratch_bytes, lambda: burst_ms(steps[0], steps[0].wait))


# ---------------------------------------------------------------------------------------------------------------------
# Both


def measure(tokens: int, vocab: int, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """One row for every variant: median time, its ratio to the floor, GB/s, scratch."""
    shape = Shape(tokens, 0, vocab)
    variants = torch_variants(tokens, vocab, with_peers) | jax_variants(tokens, vocab)
    rows = measured_rows("logits", shape, variants, rounds)
    for row in rows:
        del row["hidden"], row["promised_bytes"]
        if "time_ms" in row:
            row["gb_per_s"] = PASSES * tokens * vocab * 2 / row["time_ms"] / 1e6
    return rows


@register("the loss on given logits, beside a bare copy of as many bytes", shapes=["llama"], rounds=5, peers=True)
def run(options: argparse.Namespace, results: Results) -> None:
    for shape in map(named, options.shapes):
        results.add(measure(shape.tokens, shape.vocab, options.rounds, options.peers))
