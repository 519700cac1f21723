"""A training loop in Flax NNX with logitless as the last layer: ``python examples/flax_training.py``."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{error}: pip install flax optax") from None

from logitless.jax_impl import capture_lm_head, linear_cross_entropy

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


class Model(nnx.Module):
    """An embedding, a recurrent layer and an LM head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=nnx.initializers.normal(0.5), rngs=rngs)
        self.recurrent = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        small = nnx.initializers.normal(0.02)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits [T, B, V] of ids [B, T]."""
        kernel = self.recurrent.kernel[...]

        def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(x + state @ kernel)
            return state, state

        inputs = self.embedding(ids).swapaxes(0, 1)
        return self.head(jax.lax.scan(cell, jnp.zeros((ids.shape[0], WIDTH)), inputs)[1])


def loss_of(model: Model, ids: jax.Array) -> Any:
    head = capture_lm_head(model)(ids[:, :-1])
    target = ids[:, 1:].swapaxes(0, 1)
    return linear_cross_entropy(head.hidden, head.weight, target, head.bias, z_loss=1e-4, **head.options)


@nnx.jit
def update(model: Model, optimizer: nnx.Optimizer, ids: jax.Array) -> Any:
    loss, grads = nnx.value_and_grad(loss_of)(model, ids)
    optimizer.update(model, grads)
    return loss


def main() -> float:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    # A sequence to be learned: every id is followed by its successor times three.
    powers = [jax.random.randint(jax.random.key(1), (16, 1), 0, VOCABULARY)]
    for _ in range(32):
        powers.append(powers[-1] * 3 % VOCABULARY)
    ids = jnp.concatenate(powers, axis=1)
    for step in range(STEPS):
        loss = update(model, optimizer, ids)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
