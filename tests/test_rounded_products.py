"""PyTorch's switch for float32 products, torch.set_float32_matmul_precision("medium"): on a CPU they round what they
read to bfloat16. A loss in bfloat16 keeps its accuracy then, and is faster where the CPU multiplies bfloat16."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="this test is about PyTorch")

from implementations import PLANS, TRAINED, TorchEager, assert_within, in_turn, run_case  # noqa: E402

from logitless import plan, torch_impl  # noqa: E402
from logitless.problems import PROBLEMS, Problem  # noqa: E402
from logitless.torch_impl import call, chunk  # noqa: E402

MATMUL = getattr(torch.backends.mkldnn, "matmul", None)
pytestmark = pytest.mark.skipif(MATMUL is None, reason="torch 2.8 has no switch of the CPU alone")


@pytest.fixture
def medium() -> Iterator[None]:
    """The switch, as the test's."""
    assert MATMUL is not None
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "bf16"
    yield
    MATMUL.fp32_precision = before


@pytest.fixture
def rounded(medium: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any CPU rounds, also one that has no such products, and products that PyTorch finds too small for them."""
    exact = chunk.product

    def product(a: Any, b: Any, out: Any, add: bool) -> None:
        if call.rounds_products(a):
            a, b = (operand.bfloat16().float() for operand in (a, b))
        exact(a, b, out, add)

    monkeypatch.setattr(chunk, "product", product)


OTHERS = [problem for problem in PROBLEMS if not {"trained", "large"} & set(problem.tags)]


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize(("problem", "kind"), in_turn(TRAINED, [*PLANS][1:], always=["one_chunk"]))
def test_dweight_keeps_its_digits(problem: Problem, kind: str) -> None:
    """The matrix is rounded with the rows' factors in it. If the hidden states had them, they would be rounded too."""
    problem = problem.with_dtype("bfloat16")
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": "bfloat16"}
    assert_within(problem, run_case(TorchEager(), problem.case(), plan=plan(**sizes, **PLANS[kind])))


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize("problem", OTHERS, ids=lambda problem: problem.name)
def test_within_the_rule(problem: Problem) -> None:
    problem = problem.with_dtype("bfloat16")
    assert_within(problem, run_case(TorchEager(), problem.case()))


@pytest.mark.usefixtures("medium")
def test_vectors_are_never_rounded() -> None:
    matrix, vector = torch.randn(64, 512), torch.randn(512)
    truth = (matrix.double() @ vector.double()).numpy()
    found = chunk.vector_product(matrix, vector).numpy()
    assert np.abs(found - truth).max() < 512**0.5 * np.finfo(np.float32).eps * np.abs(truth).max()


def test_both_spellings_are_seen(medium: None) -> None:
    assert MATMUL is not None
    values = torch.zeros(1)
    assert call.rounds_products(values)
    assert not call.rounds_products(values.double())
    assert not call.rounds_products(values.to("meta"))
    MATMUL.fp32_precision = "ieee"
    assert not call.rounds_products(values)
    torch.set_float32_matmul_precision("medium")
    try:
        assert call.rounds_products(values)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not call.rounds_products(values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_that_is_rounded_is_said(medium: None, dtype: str) -> None:
    """It has more digits than bfloat16."""
    x, w = (torch.randn(8, 4, dtype=getattr(torch, dtype)) for _ in range(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch_impl.linear_cross_entropy(x, w, torch.arange(8))
    assert [("float16" in str(each.message), "highest" in str(each.message)) for each in said] == [(True, True)] * (
        dtype == "float16"
    )
