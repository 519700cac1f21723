"""What XLA makes of plain operations on a GPU at the sizes of models: scratch within the plan's promise, and logits
that one product writes. Only compiled, not run: for the device that is there, or for an H200 that is only described."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
from test_pallas_memory import TARGETS, sharding_of  # noqa: E402

from logitless import ChunkPlan, plan  # noqa: E402
from logitless.jax_impl import checks, linear_cross_entropy, xla  # noqa: E402
from logitless.scratch import TOKENS_ORDER_BLOCK  # noqa: E402

TOKENS, HIDDEN, VOCAB = 8192, 2048, 65536
CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 30.0, "bias": True},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "temperature": {"temperature": True},
    "per token": {"reduction": "none", "bias": True},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "odd": {"vocab": VOCAB - 1},
    "one chunk": {"chunk": TOKENS},
}


def compiled(target: str, chosen: ChunkPlan, **options: Any) -> Any:
    """A step of loss and gradients, with this plan."""
    sharding = sharding_of(target)

    def array(*shape: int, dtype: Any = chosen.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, w, b = array(TOKENS, HIDDEN), array(chosen.vocab, HIDDEN), array(chosen.vocab)
    y, numbers = array(TOKENS, dtype=jnp.int32), array(TOKENS, dtype=jnp.float32)
    with_bias = options.pop("bias", False)
    tempered = options.pop("temperature", False)

    def loss(x: Any, w: Any, b: Any, y: Any, numbers: Any) -> Any:
        more = options | ({"temperature": numbers} if tempered else {})
        losses = linear_cross_entropy(x, w, y, b if with_bias else None, plan=chosen, backend="xla", **more)
        return (losses * numbers).sum() if losses.ndim else losses

    step = jax.value_and_grad(loss, (0, 1, 2) if with_bias else (0, 1))
    # A GPU that is there times cuBLAS beside XLA's own products, which fuse more. A described one times nothing.
    described = None if sharding is None else {"xla_gpu_enable_triton_gemm": False}
    return jax.jit(step).lower(x, w, b, y, numbers).compile(described)


@pytest.fixture
def for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls plan as for a GPU, whatever is there."""
    monkeypatch.setattr(checks, "KINDS", {})


@pytest.mark.case(31)
@pytest.mark.usefixtures("for_a_gpu")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_scratch_stays_within_the_promise(name: str, target: str) -> None:
    options = dict(CALLS[name])
    dtype, vocab, chunk = options.pop("dtype", "bfloat16"), options.pop("vocab", VOCAB), options.pop("chunk", 2048)
    chosen = plan(
        tokens=TOKENS, hidden=HIDDEN, vocab=vocab, dtype=dtype, order="tokens", chunk=chunk,
        one_pass=options.get("reduction") != "none",
    )  # fmt: skip
    assert chosen.vocab_chunk == (vocab if vocab % 8 == 0 else TOKENS_ORDER_BLOCK)
    found = compiled(target, chosen, **options)
    assert found.memory_analysis().temp_size_in_bytes <= chosen.scratch_bytes
    if chosen.vocab_chunk == vocab:
        assert not moves_logits(found, chosen)


@pytest.mark.usefixtures("for_a_gpu")
@pytest.mark.parametrize("target", TARGETS)
def test_logits_in_narrow_blocks_are_moved(target: str) -> None:
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": "bfloat16"}
    chosen = plan(**sizes, order="tokens", chunk=2048)  # type: ignore[arg-type]
    narrow = dataclasses.replace(chosen, vocab_chunk=TOKENS_ORDER_BLOCK)
    assert moves_logits(compiled(target, narrow), narrow)


def test_a_cpu_has_narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    used, gradients = [], xla.loss_gradients

    def seen(inputs: Any, options: Any, plan: ChunkPlan, *more: Any) -> Any:
        used.append(plan)
        return gradients(inputs, options, plan, *more)

    monkeypatch.setattr(xla, "loss_gradients", seen)
    chosen = plan(tokens=8, hidden=4, vocab=2 * TOKENS_ORDER_BLOCK, dtype="float32", order="tokens", chunk=8)
    x, w, y = jnp.ones((8, 4)), jnp.ones((chosen.vocab, 4)), jnp.zeros(8, jnp.int32)
    jax.grad(linear_cross_entropy)(x, w, y, plan=chosen, backend="xla")
    assert [plan.vocab_chunk for plan in used] == [TOKENS_ORDER_BLOCK]
    assert chosen.vocab_chunk > TOKENS_ORDER_BLOCK


def moves_logits(program: Any, chosen: ChunkPlan) -> bool:
    """Whether a chunk's logits are put together from blocks."""
    logits = f"f32[{chosen.token_chunk},{chosen.vocab}]"
    return any(logits in line and "dynamic-update-slice(" in line for line in program.as_text().splitlines())
