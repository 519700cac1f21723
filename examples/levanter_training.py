"""A training loop with levanter's fused loss, computed by logitless: ``python examples/levanter_training.py``.

levanter's releases (1.1) do not have these kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import optax
    from levanter.kernels.pallas.fused_cross_entropy_loss import fused_cross_entropy_loss_and_logsumexp_penalty
except ImportError as error:
    raise SystemExit(f"{error}: pip install optax, and levanter from marin's repository") from None

from logitless.jax_impl.integrations.levanter import register_levanter

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


def loss_of(parameters: dict[str, jax.Array], ids: jax.Array) -> Any:
    def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(x + state @ parameters["recurrent"])
        return state, state

    inputs = parameters["embedding"][ids[:, :-1]].swapaxes(0, 1)
    _, hidden = jax.lax.scan(cell, jnp.zeros((ids.shape[0], WIDTH)), inputs)
    labels = ids[:, 1:].swapaxes(0, 1)
    return fused_cross_entropy_loss_and_logsumexp_penalty(
        hidden.reshape(-1, WIDTH), labels.ravel(), parameters["head"], logsumexp_weight=1e-4,
        implementation="logitless",
    )  # fmt: skip


def main() -> float:
    register_levanter(memory_budget=16 * 2**20)
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.5,
        "recurrent": jax.random.normal(keys[1], (WIDTH, WIDTH)) * WIDTH**-0.5,
        "head": jax.random.normal(keys[2], (WIDTH, VOCABULARY)) * 0.02,
    }
    # A sequence to be learned: every id is followed by its successor times three.
    ids = jax.random.randint(keys[3], (16, 1), 0, VOCABULARY) * 3 ** jnp.arange(33, dtype="uint32") % VOCABULARY
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
