"""The demo's small transformer and its training loop in JAX; interop/demo/torch_model.py is the same, line by line.

B sequences in a batch, T tokens in a sequence, D width, H heads, V vocabulary. All parameters are float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from logitless.interop.demo.settings import Batches, DemoSettings, OnStep, TrainingRun
from logitless.jax_impl.api import linear_cross_entropy
from logitless.jax_impl.memory import temp_bytes

Parameters = dict[str, Array]
LossFunction = Callable[[Array, Array, Array], Array]
"""(hidden [..., D], head [V, D], target [...]) → mean loss."""


def logitless_loss(hidden: Array, head: Array, target: Array) -> Array:
    """This library's loss: the logits are never whole."""
    loss = linear_cross_entropy(hidden, head, target)
    assert isinstance(loss, Array)
    return loss


def full_logits_loss(hidden: Array, head: Array, target: Array) -> Array:
    """What JAX users write: all logits [..., V], then optax's softmax cross-entropy."""
    losses: Array = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, target)
    return losses.mean()


def attention(parameters: Parameters, layer: int, stream: Array, settings: DemoSettings) -> Array:
    """Causal self-attention branch: stream [B, T, D] → [B, T, D]."""
    normed = rms_norm(stream, parameters[f"{layer}.attention_norm"], settings)
    joined = normed @ parameters[f"{layer}.attention_in"].T
    # [B, T, 3 D] → three of [B, T, H, D / H]
    query, key, value = jnp.moveaxis(joined.reshape(*stream.shape[:-1], 3, settings.heads, -1), -3, 0)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(stream.shape) @ parameters[f"{layer}.attention_out"].T


def feed_forward(parameters: Parameters, layer: int, stream: Array, settings: DemoSettings) -> Array:
    """Two products around a GELU (its tanh form, which both frameworks have): [B, T, D] → [B, T, D]."""
    normed = rms_norm(stream, parameters[f"{layer}.feed_forward_norm"], settings)
    inner = jax.nn.gelu(normed @ parameters[f"{layer}.feed_forward_in"].T, approximate=True)
    return inner @ parameters[f"{layer}.feed_forward_out"].T


def rms_norm(stream: Array, scale: Array, settings: DemoSettings) -> Array:
    """stream / √(mean(stream²) + norm_epsilon) · scale, over the last axis."""
    mean_square = jnp.square(stream).mean(-1, keepdims=True)
    return stream * jax.lax.rsqrt(mean_square + settings.norm_epsilon) * scale


def hidden_states(parameters: Parameters, tokens: Array, settings: DemoSettings) -> Array:
    """tokens [B, T] → what the LM head reads [B, T, D]: a pre-norm transformer with learned positions."""
    stream = parameters["embedding"][tokens] + parameters["positions"][: tokens.shape[-1]]
    for layer in range(settings.layers):
        stream = stream + attention(parameters, layer, stream, settings)
        stream = stream + feed_forward(parameters, layer, stream, settings)
    return rms_norm(stream, parameters["final_norm"], settings)


def train(
    initial: Parameters, batches: Batches, settings: DemoSettings, loss_function: LossFunction, on_step: OnStep
) -> TrainingRun:
    """Train from `initial` on the batches in their order, by jax.value_and_grad and optax.adamw in one jitted step.

    Nothing is donated: `initial` may be another framework's memory.
    """
    optimizer = optax.adamw(
        settings.learning_rate,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )

    def loss_of(parameters: Parameters, tokens: Array) -> Array:
        hidden = hidden_states(parameters, tokens[:, :-1], settings)
        return loss_function(hidden, parameters["head"], tokens[:, 1:])

    @jax.jit
    def update(
        parameters: Parameters, state: optax.OptState, tokens: Array
    ) -> tuple[Parameters, optax.OptState, Array]:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    parameters, state = initial, optimizer.init(initial)
    losses: list[float] = []
    times_s: list[float] = []
    for step, batch in enumerate(batches):
        start = time.perf_counter()
        parameters, state, loss = jax.block_until_ready(update(parameters, state, batch))
        losses.append(loss.item())
        times_s.append(time.perf_counter() - start)
        on_step(step, losses[-1])
    return TrainingRun(tuple(losses), tuple(times_s), parameters)


def loss_scratch_bytes(loss_function: LossFunction, hidden: Array, head: Array, target: Array) -> int:
    """Compiled scratch of the loss and its two gradients, beyond the inputs and beyond the loss and gradients.

    hidden [N, D], head [V, D], target [N].
    """
    return temp_bytes(jax.value_and_grad(loss_function, argnums=(0, 1)), hidden, head, target)
