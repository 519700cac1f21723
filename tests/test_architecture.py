"""A new GPU architecture is one file of products and one record: an imaginary one is registered, run and compiled."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch_impl")
pytest.importorskip("triton", reason="these tests are about Triton's kernels")

from compiled_kernels import compiled_by  # noqa: E402
from imaginary import Imaginary, imaginary  # noqa: E402
from implementations import TorchTriton, assert_within, problem_named, run_case  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.torch_impl.kernels import architecture, tiles  # noqa: E402


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU")
def test_a_step_runs_by_a_registered_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record alone says which products a call takes and how large their tiles are."""
    products = Imaginary()
    first = imaginary(products, "ieee", None)
    monkeypatch.setattr(architecture, "ARCHITECTURES", [first, *architecture.ARCHITECTURES])
    problem = problem_named("odd_bias").with_dtype("float32")
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": "float32"}
    chosen = plan(**sizes, fused=True, order="tokens")
    assert_within(problem, run_case(TorchTriton(), problem.case(), plan=chosen))
    assert products.launched == {"logits": 1, "hidden": 1, "weight": 1}


def test_its_kernels_compile_with_its_tiles() -> None:
    made = compiled_by("compile_architecture.py")
    assert made["architecture"] == "imaginary"
    assert made["target"]
    assert made["products"] > 0


@pytest.mark.parametrize(
    ("dtype", "major", "descriptors", "name"),
    [
        ("bfloat16", 9, True, "hopper"),
        ("bfloat16", 9, False, "portable, 16 bits"),
        ("float16", None, True, "portable, 16 bits"),
        ("float32", 9, True, "portable, float32"),
    ],
)
def test_the_record_of_a_call(
    dtype: str, major: int | None, descriptors: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "major_of", lambda index: major)
    found = architecture.architecture_of(getattr(torch, dtype), 0, descriptors)
    assert found.name == name
    assert set(found.tiles) == set(tiles.KERNELS)


def test_without_gluon_the_portable_file_has_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "major_of", lambda index: 9)
    monkeypatch.setattr(architecture, "has_products", lambda products: products.__name__ != "_hopper")
    assert architecture.architecture_of(torch.bfloat16, 0, True).name == "portable, 16 bits"
