"""The demo's small transformer and its training loop in PyTorch; interop/demo/jax_model.py is the same, line by line.

B sequences in a batch, T tokens in a sequence, D width, H heads, V vocabulary. All parameters are float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from logitless.interop.demo.settings import Batches, DemoSettings, OnStep, TrainingRun
from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.memory import peak_scratch_bytes

Parameters = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [..., D], head [V, D], target [...]) → mean loss."""


def logitless_loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """This library's loss: the logits are never whole."""
    loss = linear_cross_entropy(hidden, head, target)
    assert isinstance(loss, Tensor)
    return loss


def full_logits_loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """PyTorch's own: all logits [B·T, V], then torch.nn.functional.cross_entropy."""
    return F.cross_entropy(F.linear(hidden, head).flatten(0, -2), target.flatten())


def attention(parameters: Parameters, layer: int, stream: Tensor, settings: DemoSettings) -> Tensor:
    """Causal self-attention branch: stream [B, T, D] → [B, T, D]."""
    normed = rms_norm(stream, parameters[f"{layer}.attention_norm"], settings)
    joined = F.linear(normed, parameters[f"{layer}.attention_in"])
    # [B, T, 3 D] → three of [B, H, T, D / H]
    query, key, value = joined.unflatten(-1, (3, settings.heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(-2), parameters[f"{layer}.attention_out"])


def feed_forward(parameters: Parameters, layer: int, stream: Tensor, settings: DemoSettings) -> Tensor:
    """Two products around a GELU (its tanh form, which both frameworks have): [B, T, D] → [B, T, D]."""
    normed = rms_norm(stream, parameters[f"{layer}.feed_forward_norm"], settings)
    inner = F.gelu(F.linear(normed, parameters[f"{layer}.feed_forward_in"]), approximate="tanh")
    return F.linear(inner, parameters[f"{layer}.feed_forward_out"])


def rms_norm(stream: Tensor, scale: Tensor, settings: DemoSettings) -> Tensor:
    """stream / √(mean(stream²) + norm_epsilon) · scale, over the last axis."""
    mean_square = stream.square().mean(-1, keepdim=True)
    return stream * torch.rsqrt(mean_square + settings.norm_epsilon) * scale


def hidden_states(parameters: Parameters, tokens: Tensor, settings: DemoSettings) -> Tensor:
    """tokens [B, T] → what the LM head reads [B, T, D]: a pre-norm transformer with learned positions."""
    stream = parameters["embedding"][tokens] + parameters["positions"][: tokens.shape[-1]]
    for layer in range(settings.layers):
        stream = stream + attention(parameters, layer, stream, settings)
        stream = stream + feed_forward(parameters, layer, stream, settings)
    return rms_norm(stream, parameters["final_norm"], settings)


def train(
    initial: Parameters, batches: Batches, settings: DemoSettings, loss_function: LossFunction, on_step: OnStep
) -> TrainingRun:
    """Train a copy of `initial` on the batches in their order, by autograd and torch.optim.AdamW."""
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in initial.items()}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    device = initial["embedding"].device
    losses: list[float] = []
    times_s: list[float] = []
    for step, batch in enumerate(batches):
        start = time.perf_counter()
        tokens = torch.from_numpy(batch).long().to(device)
        optimizer.zero_grad()
        hidden = hidden_states(parameters, tokens[:, :-1], settings)
        loss = loss_function(hidden, parameters["head"], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times_s.append(time.perf_counter() - start)
        on_step(step, losses[-1])
    return TrainingRun(tuple(losses), tuple(times_s), {name: p.detach() for name, p in parameters.items()})


def loss_scratch_bytes(loss_function: LossFunction, hidden: Tensor, head: Tensor, target: Tensor) -> int:
    """Measured peak of the loss and its two gradients, beyond the inputs and beyond the loss and gradients themselves.

    hidden [N, D] and head [V, D] without requires_grad, target [N].
    """
    hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()

    def results() -> tuple[Tensor, ...]:
        loss = loss_function(hidden, head, target)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, head))

    result_bytes = sum(result.nbytes for result in results())
    return max(0, peak_scratch_bytes(results) - result_bytes)
