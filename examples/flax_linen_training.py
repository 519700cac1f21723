"""A training loop in Flax Linen with logitless as the last layer: ``python examples/flax_linen_training.py``."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
    import optax
except ImportError as error:
    raise SystemExit(f"{error}: pip install flax optax") from None

from logitless.jax_impl import linear_cross_entropy

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


class Head(nn.Module):
    """An LM head whose result is the loss. Its kernel is [V, D]: the transpose of nn.Dense's."""

    @nn.compact
    def __call__(self, hidden: jax.Array, target: jax.Array) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(0.02), (VOCABULARY, hidden.shape[-1]))
        return linear_cross_entropy(hidden, kernel, target, z_loss=1e-4)


class Model(nn.Module):
    """An embedding, a recurrent layer and the head: the loss of ids [B, T + 1]."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> Any:
        kernel = self.param("recurrent", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        embedding = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(0.5))
        inputs = embedding(ids[:, :-1]).swapaxes(0, 1)

        def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(x + state @ kernel)
            return state, state

        _, hidden = jax.lax.scan(cell, jnp.zeros((ids.shape[0], WIDTH)), inputs)
        return nn.remat(Head)(name="head")(hidden, ids[:, 1:].swapaxes(0, 1))


def main() -> float:
    model, optimizer = Model(), optax.adamw(3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    powers = [jax.random.randint(jax.random.key(1), (16, 1), 0, VOCABULARY)]
    for _ in range(32):
        powers.append(powers[-1] * 3 % VOCABULARY)
    ids = jnp.concatenate(powers, axis=1)
    variables = model.init(jax.random.key(0), ids)
    state = optimizer.init(variables)

    @jax.jit
    def update(variables: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(model.apply)(variables, ids)
        updates, state = optimizer.update(grads, state, variables)
        return loss, optax.apply_updates(variables, updates), state

    for step in range(STEPS):
        loss, variables, state = update(variables, state)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
