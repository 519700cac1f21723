"""A training loop in Equinox with logitless as the last layer: ``python examples/equinox_training.py``."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import equinox as eqx
    import optax
except ImportError as error:
    raise SystemExit(f"{error}: pip install equinox optax") from None

from logitless.jax_impl import capture_lm_head, linear_cross_entropy

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


class Model(eqx.Module):
    """An embedding, a recurrent layer and an LM head."""

    embedding: jax.Array
    recurrent: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.5
        self.recurrent = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=keys[2])

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits [T, V] of one sequence of ids [T]."""

        def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(x + self.recurrent(state))
            return state, state

        return jax.vmap(self.head)(jax.lax.scan(cell, jnp.zeros(WIDTH), self.embedding[ids])[1])


@eqx.filter_value_and_grad
def loss_of(model: Model, ids: jax.Array) -> Any:
    head = capture_lm_head(jax.vmap(model))(ids[:, :-1])
    return linear_cross_entropy(head.hidden, head.weight, ids[:, 1:], head.bias, z_loss=1e-4, **head.options)


def main() -> float:
    model = Model(jax.random.key(0))
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    # A sequence to be learned: every id is followed by its successor times three.
    powers = [jax.random.randint(jax.random.key(1), (16, 1), 0, VOCABULARY)]
    for _ in range(32):
        powers.append(powers[-1] * 3 % VOCABULARY)
    ids = jnp.concatenate(powers, axis=1)

    @eqx.filter_jit
    def update(model: Model, state: Any) -> Any:
        loss, grads = loss_of(model, ids)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return loss, eqx.apply_updates(model, updates), state

    for step in range(STEPS):
        loss, model, state = update(model, state)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
