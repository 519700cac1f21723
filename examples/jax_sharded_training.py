"""Training on a mesh, tokens over one axis, the vocabulary over the other: ``python examples/jax_sharded_training.py``.

The demo's small transformer is compiled by jax.jit with Auto axes. Only the loss is told how its arrays lie. Without
GPUs the host stands for four devices.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

try:
    from logitless.interop.demo.jax_model import train
except ImportError as error:
    raise SystemExit(f"{error}: pip install optax") from None

from logitless.interop.demo.settings import DemoSettings, initial_parameters
from logitless.jax_impl import sharded_linear_cross_entropy

VOCABULARY, STEPS = 4096, 20


def main() -> float:
    count = jax.device_count()
    vocab = 2 if count % 2 == 0 else 1
    mesh = jax.make_mesh((count // vocab, vocab), ("data", "vocab"), axis_types=(AxisType.Auto, AxisType.Auto))

    def placed(array: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    settings = DemoSettings(
        vocabulary=VOCABULARY, width=64, layers=1, sequence=32, batch=4 * count, steps=STEPS, learning_rate=1e-2
    )
    parameters = {
        name: placed(array, "vocab" if name == "head" else None)
        for name, array in initial_parameters(settings, VOCABULARY).items()
    }
    # A sequence to be learned: every id is followed by its successor times three.
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (settings.batch, 1))
    powers = ids * 3 ** np.arange(settings.sequence + 1) % VOCABULARY
    batches = [placed(powers.astype(np.int32), "data")] * STEPS

    def report(step: int, loss: float) -> None:
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss:.4f}")

    loss = sharded_linear_cross_entropy(mesh, vocab_axis="vocab", data_axis="data")
    run = train(parameters, batches, settings, loss, report)
    print(f"the head lies as {run.parameters['head'].sharding.spec} on {count} devices")
    return run.losses[-1]


if __name__ == "__main__":
    main()
