"""Log-probabilities with the entropy side by side: ``python -m bench log_probs --framework torch``, then ``jax``.

What RL asks of a head: log p(target) and the entropy of every token, and the gradients of the hidden states and of the
head, for a random upstream gradient of each. Beside ours stand full logits, alone and compiled, TRL's chunks, verl's
kernel and Liger-Kernel's for Hopper; and both GRPO losses, ours and Liger-Kernel's, of SEQUENCES equal sequences.

The floor is four bare products by cuBLAS: the logits once for the forward and once for the backward, dX and dW. What
keeps the logits or their exponentials needs three.

PyTorch's times and bytes are those of phases.py. In JAX a step is one program: its ``forward_ms`` is the time of the
values alone, compiled without gradients. ``log_prob_error`` and ``entropy_error`` are the mean |value − truth| of a
token [nats]; the truth is float64 arithmetic on the same numbers.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bench import phases
from bench.phases import Step, Way
from bench.registry import Results, register
from bench.shapes import Shape, named
from bench.variants import measured_rows, peer

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu_torch import Arrays

SHAPES = ("2048x4096x131072", "8192x2048x131072", "8192x4096x131072", "4096x4096x128256")
PLANS = ("balanced", "fast", "lean")
BACKENDS = ("triton", "eager", "pallas", "xla")
# Bursts of a row in JAX.
ROUNDS = 4
SEQUENCES = 8
# Entries of a block in TRL's trainers.
TRL_BLOCK = 32768
# Tokens of the truth at a time.
TRUTH_ROWS = 256


def plans(backend: str) -> dict[str, str]:
    """By what they are called in results."""
    return {f"{backend}, {plan}" if plan != "balanced" else backend: plan for plan in PLANS}


def ours(backend: str) -> dict[str, Way]:
    """By the name of the plan."""
    from logitless.torch_impl import linear_log_probs

    values = functools.partial(linear_log_probs, with_entropy=True, backend=backend)
    return {name: Way(functools.partial(values, plan=plan)) for name, plan in plans(backend).items()}


def full_logits(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    log_p = torch.log_softmax((x @ w.t()).float(), 1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def peers() -> dict[str, Way]:
    """Those that are installed."""
    import torch

    found = {"torch, full logits": Way(full_logits), "torch.compile, full logits": Way(torch.compile(full_logits))}
    if chunks := peer("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"):
        options = 1.0, TRL_BLOCK, None, 1.0, ("entropy",)
        found["TRL, chunks"] = Way(lambda x, w, y: chunks.apply(x, w, None, y, *options)[:2])
    if kernel := peer("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"):
        found["verl, kernel"] = Way(lambda x, w, y: kernel(x, w, y, 1.0, "none"))
    module = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    if cute := peer(module, "LigerFusedScaledCrossEntropySM90Function"):

        def of_liger(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            nll, entropy = cute.apply(x, w, y, 1.0, -100, 1, True)
            return -nll, entropy

        found["Liger-Kernel, CuTe"] = Way(of_liger)
    return found


def grpo(arrays: Arrays, backend: str, with_peers: bool) -> dict[str, Way]:
    """Losses of the same sequences, advantages and old log-probabilities, without a reference; the mean over tokens."""
    import torch

    from logitless.torch_impl import clipped_policy_loss, linear_log_probs

    x, w, y = arrays.x.detach(), arrays.w.detach(), arrays.y
    generator = torch.Generator(x.device).manual_seed(2)
    shape = SEQUENCES, len(y) // SEQUENCES
    advantage = torch.randn(SEQUENCES, device=x.device, generator=generator)
    noise = 0.1 * torch.randn(shape, device=x.device, generator=generator)
    old = linear_log_probs(x, w, y, backend=backend)[0].view(shape) + noise

    def our_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        known = {"advantage": advantage, "old_log_prob": old, "backend": backend}
        loss: Tensor = clipped_policy_loss(x.view(*shape, -1), w, y.view(shape), **known)
        return loss

    found = {f"{backend}, GRPO loss": Way(our_loss)}
    if with_peers and (kind := peer("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")):
        loss, mask = kind(beta=0.0, use_ref_model=False), torch.ones(shape, device=x.device)

        def of_liger(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            rows: Tensor = loss(
                x.view(*shape, -1), w, y.view(shape), mask, advantage, old_per_token_logps=old
            )[0]  # fmt: skip
            return rows

        found["Liger-Kernel, GRPO loss"] = Way(of_liger)
    return found


class TokenStep(Step):
    """Of a loss, or of two values of every token."""

    def backward(self, values: Any) -> None:
        import torch

        if isinstance(values, torch.Tensor):
            values.backward()
            return
        upstream = self.upstream, self.upstream.flip(0)
        torch.autograd.backward(values, [g.to(v.dtype) for g, v in zip(upstream, values, strict=True)])


def truth(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
    """Log-probabilities and entropies in float64."""
    import torch

    w, parts = w.detach().double(), []
    for rows, target in zip(x.detach().split(TRUTH_ROWS), y.long().split(TRUTH_ROWS), strict=True):
        log_p = torch.log_softmax(rows.double() @ w.t(), 1)
        parts.append((log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def row_of(arrays: Arrays, name: str, way: Way, floor_ms: float, true: list[Tensor]) -> dict[str, Any]:
    row = phases.row_of(arrays, name, way, TokenStep)
    if "error" in row:
        return row
    row["over_floor"] = row["both_ms"] / floor_ms
    values = TokenStep(arrays, way).forward()
    return row | (errors(values, true) if isinstance(values, tuple) else {})


def errors(values: tuple[Tensor, ...], true: list[Tensor]) -> dict[str, float]:
    means = [float((v.detach() - t).abs().mean()) for v, t in zip(values, true, strict=True)]
    return dict(zip(("log_prob_error", "entropy_error"), means, strict=True))


def torch_rows(shape: Shape, backend: str, with_peers: bool) -> Iterator[dict[str, Any]]:
    from bench.floor import torch_four_products
    from bench.gpu import forget
    from bench.gpu_torch import Arrays

    arrays = Arrays(shape)
    products = torch_four_products(arrays.x.detach(), arrays.w.detach())
    true, floor = truth(arrays.x, arrays.w, arrays.y), phases.floor_row(arrays, products)
    yield floor
    ways = ours(backend) | (peers() if with_peers else {})
    for variant, way in (ways | grpo(arrays, backend, with_peers)).items():
        yield row_of(arrays, variant, way, floor["both_ms"], true)
        forget("torch")


def jax_rows(shape: Shape, backend: str, with_peers: bool) -> Iterator[dict[str, Any]]:
    """Ours by each plan, and full logits. All are compiled before the first is timed."""
    from bench.gpu_jax import Arrays, compile_all
    from bench.timing import burst_ms
    from logitless.interop import to_torch
    from logitless.jax_impl import linear_log_probs

    arrays = Arrays(shape)
    values = functools.partial(linear_log_probs, with_entropy=True, backend=backend)
    ways = {name: functools.partial(values, plan=plan) for name, plan in plans(backend).items()}
    ways |= {"JAX, full logits": jax_full_logits} if with_peers else {}
    steps = {name: arrays.token_step(way) for name, way in ways.items()}
    forwards = {name: arrays.forward(way) for name, way in ways.items()}
    compile_all([*steps.values(), *forwards.values()])
    variants = {"floor": arrays.token_floor()} | {name: step.variant() for name, step in steps.items()}
    true = truth(*to_torch((arrays.x, arrays.w, arrays.y)))
    for row in measured_rows(f"{shape.tokens}x{shape.hidden}x{shape.vocab}", shape, variants, ROUNDS):
        name = row["variant"]
        if "error" not in row:
            row["both_ms"] = row.pop("time_ms")
        if name in steps and "error" not in row:
            row |= errors(to_torch(steps[name]()[0]), true)
            row["forward_ms"] = statistics.median(burst_ms(forwards[name], forwards[name].wait))
        yield row


def jax_full_logits(x: Any, w: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    log_p = jax.nn.log_softmax(jnp.dot(x, w.T, preferred_element_type=jnp.float32))
    return jnp.take_along_axis(log_p, y[:, None], 1)[:, 0], -(jnp.exp(log_p) * log_p).sum(1)


@register(
    "log-probabilities with the entropy, forward and backward apart, beside TRL, verl and Liger-Kernel",
    file=lambda options: "log_probs_jax.json" if options.framework == "jax" else "log_probs.json",
    framework="torch",
    shapes=list(SHAPES),
    peers=True,
    arguments={"--backend": {"choices": BACKENDS, "help": "ours; by default triton in PyTorch and pallas in JAX"}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    rows, kernels = (jax_rows, "pallas") if options.framework == "jax" else (torch_rows, "triton")
    for name in options.shapes:
        for row in rows(named(name), options.backend or kernels, options.peers):
            results.add([row])
