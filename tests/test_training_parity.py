"""The demo's model trained in PyTorch and in JAX from the same bytes: the same losses at every step.

In float32 on the CPU both runs differ by the order of sums only. In bfloat16 on a GPU that order alone moves a run, so
the band is measured: the same framework, with the vocabulary of the loss worked on in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="two frameworks are compared, and jax is not installed")
torch = pytest.importorskip("torch", reason="two frameworks are compared, and torch is not installed")
optax = pytest.importorskip("optax", reason="the JAX run's optimizer is optax's")

from logitless import plan  # noqa: E402
from logitless.interop import to_jax, to_torch  # noqa: E402
from logitless.interop.demo import jax_model, torch_model  # noqa: E402
from logitless.interop.demo.settings import DemoSettings, initial_parameters  # noqa: E402
from logitless.tolerances import BOUND  # noqa: E402

SETTINGS = DemoSettings(vocabulary=500, width=32, layers=1, heads=4, sequence=16, batch=4, steps=300)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """With several threads such small steps are slower, and many times slower beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(settings: DemoSettings) -> Any:
    """[steps, batch, sequence + 1] ids of a language that can be learnt: counting by steps of 1 to 3, from anywhere."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, settings.vocabulary, (settings.steps, settings.batch, 1))
    stride = rng.integers(1, 4, (settings.steps, settings.batch, 1))
    ids = start + stride * np.arange(settings.sequence + 1)
    return (ids % settings.vocabulary).astype(np.int32)


def silent(step: int, loss: float) -> None:
    """Called after every step of a training run."""


def shared_bytes(settings: DemoSettings) -> dict[str, Any]:
    """The initial parameters as torch tensors, whose memory JAX shares."""
    made = initial_parameters(settings, settings.vocabulary)
    return {name: torch.from_numpy(array).clone() for name, array in made.items()}


def test_float32_on_the_cpu() -> None:
    initial = shared_bytes(SETTINGS)
    with jax.default_device(jax.devices("cpu")[0]):
        shared = to_jax(initial, copy=False)
        assert all(shared[name].unsafe_buffer_pointer() == initial[name].data_ptr() for name in initial)
        ids = batches(SETTINGS)
        in_torch = torch_model.train(initial, ids, SETTINGS, torch_model.logitless_loss, silent)
        in_jax = jax_model.train(shared, ids, SETTINGS, jax_model.logitless_loss, silent)
    one, other = np.array(in_torch.losses), np.array(in_jax.losses)
    assert one.shape == (300,)
    assert one[-20:].mean() < 0.7 * one[0]  # it has learnt, so that 300 different points were compared
    assert np.abs(one / other - 1).max() <= BOUND["losses of 300 steps"]
    assert set(in_torch.parameters) == set(initial)
    for name, array in to_torch(in_jax.parameters).items():
        mine = in_torch.parameters[name]
        assert not torch.equal(mine, initial[name])
        difference = torch.linalg.vector_norm(mine - array) / torch.linalg.vector_norm(mine)
        assert difference <= BOUND["parameters after 300 steps"], name


def test_a_wrong_gradient_would_be_seen() -> None:
    """Guard of the test above: a last class without a gradient is outside the tolerances."""
    initial, ids = shared_bytes(SETTINGS), batches(SETTINGS)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, head: Any) -> Any:
            return head.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return torch.cat([gradient[:-1], torch.zeros_like(gradient[-1:])])

    def wrong_loss(hidden: Any, head: Any, target: Any) -> Any:
        return torch_model.logitless_loss(hidden, Wrong.apply(head), target)

    right = torch_model.train(initial, ids, SETTINGS, torch_model.logitless_loss, silent)
    wrong = torch_model.train(initial, ids, SETTINGS, wrong_loss, silent)
    assert np.abs(np.array(wrong.losses) / np.array(right.losses) - 1).max() > BOUND["losses of 300 steps"]


@pytest.mark.gpu
def test_bfloat16_on_the_gpu_within_the_band_of_another_order_of_sums() -> None:
    """The loss in bfloat16 with each framework's best backend; the model around it in float32."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    settings = dataclasses.replace(SETTINGS, width=128, vocabulary=4096, batch=8, sequence=64)
    initial, ids = {name: tensor.cuda() for name, tensor in shared_bytes(settings).items()}, batches(settings)

    tokens = settings.batch * settings.sequence
    lean = plan(tokens=tokens, hidden=128, vocab=4096, dtype="bfloat16", order="vocab", chunk=512, fused=True)

    def torch_loss(chosen: Any) -> Any:
        def loss(hidden: Any, head: Any, target: Any) -> Any:
            from logitless.torch_impl import linear_cross_entropy

            low = hidden.bfloat16(), head.bfloat16()
            return linear_cross_entropy(*low, target, plan=chosen)

        return loss

    def jax_loss(hidden: Any, head: Any, target: Any) -> Any:
        from logitless.jax_impl import linear_cross_entropy

        return linear_cross_entropy(hidden.astype("bfloat16"), head.astype("bfloat16"), target)

    runs = [torch_model.train(initial, ids, settings, torch_loss(chosen), silent) for chosen in (None, lean)]
    with jax.default_matmul_precision("highest"):
        in_jax = jax_model.train(to_jax(initial), ids, settings, jax_loss, silent)
    one, other, third = (np.array(run.losses) for run in (*runs, in_jax))
    band = np.abs(other / one - 1)
    assert band.max() > 0  # the second order of sums is another one
    across = np.abs(third / one - 1)
    assert across.max() <= 3 * band.max()
    assert np.sqrt((across**2).mean()) <= 3 * np.sqrt((band**2).mean())
    assert one[-20:].mean() < 0.7 * one[0]
