"""The promise of Triton's plans from both sides, on a CPU: what the host allocates, with the kernels left out.

A launch does nothing here, so that sizes of models cost milliseconds; every buffer is made all the same. Hopper's own
kernels hold one more, the parts of dX that are split along the vocabulary: it is added. On a GPU tests/test_memory.py
measures with the kernels.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
pytest.importorskip("triton", reason="triton is not installed")

from implementations import TorchTriton  # noqa: E402
from test_memory import SHARE, SIZES, SLACK, WHOLE, assert_tight, greedy, measured_scratch  # noqa: E402

from logitless import ChunkPlan, plan  # noqa: E402
from logitless.hardware import HOPPER  # noqa: E402
from logitless.torch_impl.given_logits import fused as logits_fused  # noqa: E402
from logitless.torch_impl.kernels import launch  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU"),
]
IMPL = TorchTriton()


def nothing(kernel: Any, *grid: int) -> Any:
    return lambda *arguments, **options: None


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches do nothing. What they would have written is 0, which is a valid index too."""
    for module in (launch, logits_fused):
        monkeypatch.setattr(module, "launch", nothing)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)


def split_parts(chosen: ChunkPlan) -> int:
    return HOPPER.multiprocessors * math.prod(HOPPER.tile) * 4 if chosen.splits_hidden else 0


@pytest.mark.every_value
@pytest.mark.case(31)
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", WHOLE)
def test_promise_is_what_is_needed(kind: str, dtype: str) -> None:
    tokens, hidden, vocab = SIZES[True]
    chosen = plan(tokens=tokens, hidden=hidden, vocab=vocab, dtype=dtype, fused=True, **WHOLE[kind])
    used = max(measured_scratch(IMPL, chosen, dtype, True, options) for options in greedy(chosen))
    if chosen.order == "both":  # the first half alone splits tiles, and the second may be the one that needs more
        assert used <= chosen.scratch_bytes
        assert chosen.scratch_bytes <= SHARE * (used + split_parts(chosen)) + SLACK
        return
    assert_tight(used + split_parts(chosen), chosen.scratch_bytes)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_promise_counts_a_dx_that_is_made_early(dtype: str) -> None:
    tokens, hidden, vocab = SIZES[True]
    one = plan(tokens=tokens, hidden=hidden, vocab=vocab, dtype=dtype, fused=True, order="tokens", chunk=tokens)
    chosen = dataclasses.replace(one, early_hidden=True)
    used = max(measured_scratch(IMPL, chosen, dtype, True, options) for options in greedy(chosen))
    assert_tight(used + split_parts(chosen), chosen.scratch_bytes)
