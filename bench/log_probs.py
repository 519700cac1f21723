"""Log-probabilities with the entropy, forward and backward apart: ``python -m bench log_probs``.

What RL asks of a head: log p(target) and the entropy of every token, and the gradients of the hidden states and of the
head, for a random upstream gradient of each. Beside ours stand full logits, alone and compiled, TRL's chunks, verl's
kernel and Liger-Kernel's for Hopper; and both GRPO losses, ours and Liger-Kernel's, of SEQUENCES equal sequences.

The floor is four bare products by cuBLAS: the logits once for the forward and once for the backward, dX and dW. What
keeps the logits or their exponentials needs three.

Times and bytes are those of phases.py. ``log_prob_error`` and ``entropy_error`` are the mean |value − truth| of a token
[nats]; the truth is float64 arithmetic on the same numbers.
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

from bench import phases
from bench.phases import Step, Way
from bench.registry import Results, register
from bench.shapes import named
from bench.variants import peer

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu_torch import Arrays

SHAPES = ("2048x4096x131072", "8192x2048x131072", "8192x4096x131072", "4096x4096x128256")
PLANS = ("balanced", "fast", "lean")
SEQUENCES = 8
# Entries of a block in TRL's trainers.
TRL_BLOCK = 32768
# Tokens of the truth at a time.
TRUTH_ROWS = 256


def ours(backend: str) -> dict[str, Way]:
    """By the name of the plan."""
    from logitless.torch_impl import linear_log_probs

    names = {plan: f"{backend}, {plan}" if plan != "balanced" else backend for plan in PLANS}
    values = functools.partial(linear_log_probs, with_entropy=True, backend=backend)
    return {names[plan]: Way(functools.partial(values, plan=plan if backend == "triton" else None)) for plan in PLANS}


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


def truth(arrays: Arrays) -> list[Tensor]:
    """Log-probabilities and entropies in float64."""
    import torch

    w = arrays.w.detach().double()
    parts = []
    for rows, target in zip(arrays.x.detach().split(TRUTH_ROWS), arrays.y.split(TRUTH_ROWS), strict=True):
        log_p = torch.log_softmax(rows.double() @ w.t(), 1)
        parts.append((log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def row_of(arrays: Arrays, name: str, way: Way, floor_ms: float, true: list[Tensor]) -> dict[str, Any]:
    row = phases.row_of(arrays, name, way, TokenStep)
    if "error" in row:
        return row
    row["over_floor"] = row["both_ms"] / floor_ms
    step = TokenStep(arrays, way)
    values = step.forward()
    if isinstance(values, tuple):
        errors = [float((v.detach() - t).abs().mean()) for v, t in zip(values, true, strict=True)]
        row |= dict(zip(("log_prob_error", "entropy_error"), errors, strict=True))
    return row


@register(
    "log-probabilities with the entropy, forward and backward apart, beside TRL, verl and Liger-Kernel",
    shapes=list(SHAPES),
    peers=True,
    arguments={"--backend": {"default": "triton", "choices": ("triton", "eager"), "help": "ours"}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    from bench.floor import torch_four_products
    from bench.gpu import forget
    from bench.gpu_torch import Arrays

    for name in options.shapes:
        arrays = Arrays(named(name))
        products = torch_four_products(arrays.x.detach(), arrays.w.detach())
        true, floor = truth(arrays), phases.floor_row(arrays, products)
        results.add([floor])
        ways = ours(options.backend) | (peers() if options.peers else {})
        for variant, way in (ways | grpo(arrays, options.backend, options.peers)).items():
            results.add([row_of(arrays, variant, way, floor["both_ms"], true)])
            forget("torch")
        del arrays, ways, products
