"""A training loop in JAX and optax with logitless as the last layer: ``python examples/jax_training.py``."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import optax
except ImportError as error:
    raise SystemExit(f"{error}: pip install optax") from None

from logitless.jax_impl import linear_cross_entropy

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


def loss_of(parameters: dict[str, jax.Array], ids: jax.Array) -> Any:
    def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(x + state @ parameters["recurrent"])
        return state, state

    inputs = parameters["embedding"][ids[:, :-1]]
    _, hidden = jax.lax.scan(cell, jnp.zeros((ids.shape[0], WIDTH)), inputs.swapaxes(0, 1))
    target = ids[:, 1:].swapaxes(0, 1)
    return linear_cross_entropy(hidden, parameters["head"], target, z_loss=1e-4, memory_budget=16 * 2**20)


def main() -> float:
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.5,
        "recurrent": jax.random.normal(keys[1], (WIDTH, WIDTH)) * WIDTH**-0.5,
        "head": jax.random.normal(keys[2], (VOCABULARY, WIDTH)) * 0.02,
    }
    # A sequence to be learned: every id is followed by its successor times three.
    start = jax.random.randint(keys[3], (16, 1), 0, VOCABULARY)
    powers = [start]
    for _ in range(32):
        powers.append(powers[-1] * 3 % VOCABULARY)
    ids = jnp.concatenate(powers, axis=1)
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(parameters)

    @jax.jit
    def update(parameters: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(parameters, ids)
        updates, state = optimizer.update(grads, state, parameters)
        return loss, optax.apply_updates(parameters, updates), state

    for step in range(STEPS):
        loss, parameters, state = update(parameters, state)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
