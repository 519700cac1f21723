"""A training loop in Flax NNX with logitless as the last layer: ``python examples/flax_training.py``."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{error}: pip install flax optax") from None

from logitless.jax_impl import linear_cross_entropy

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


class Model(nnx.Module):
    """An embedding, a recurrent layer, and a head whose kernel is [V, D]: the transpose of nnx.Linear's."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=nnx.initializers.normal(0.5), rngs=rngs)
        self.recurrent = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.head = nnx.Param(jax.random.normal(rngs.params(), (VOCABULARY, WIDTH)) * 0.02)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Hidden states [T, B, D] of ids [B, T]."""
        kernel = self.recurrent.kernel[...]

        def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(x + state @ kernel)
            return state, state

        inputs = self.embedding(ids).swapaxes(0, 1)
        return jax.lax.scan(cell, jnp.zeros((ids.shape[0], WIDTH)), inputs)[1]


def loss_of(model: Model, ids: jax.Array) -> Any:
    hidden = model(ids[:, :-1])
    return linear_cross_entropy(hidden, model.head, ids[:, 1:].swapaxes(0, 1), z_loss=1e-4)


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
