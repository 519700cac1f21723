"""A new GPU architecture is one file of products and one record: an imaginary one is registered, run and compiled."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch_impl")
pytest.importorskip("triton", reason="these tests are about Triton's kernels")

from compiled_kernels import compiled_by  # noqa: E402
from imaginary import Imaginary, imaginary  # noqa: E402
from implementations import TorchTriton, assert_within, problem_named, run_case  # noqa: E402

from logitless import plan, torch_impl  # noqa: E402
from logitless.tolerances import GRADIENT, error  # noqa: E402
from logitless.torch_impl.kernels import architecture, tiles  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here")


@INTERPRETED
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


DISTILLATIONS = ("a distillation of a mixture", "a distillation made again", "a distillation from ids")
ONE_CHUNK = ("one chunk", *DISTILLATIONS)
ROW_KERNELS = {"row_losses_kernel", "tile_gradient_kernel", "ids_losses_kernel"}
SUMS = ("one chunk", "chunks", "chunks, 20 bits")


@pytest.mark.parametrize(
    ("chips", "calls"),
    [
        ("10.0 gfx942", ONE_CHUNK),
        pytest.param("8.9", SUMS, marks=pytest.mark.slow),
        pytest.param("8.6", ONE_CHUNK, marks=pytest.mark.slow),
        pytest.param("8.0 10.0 gfx942", SUMS, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_chips_that_are_not_here(chips: str, calls: tuple[str, ...], tmp_path: Path) -> None:
    """One with descriptors, AMD's, and the one with the least shared memory; bench/results has every chip and call."""
    command = [sys.executable, "-m", "bench", "architectures", "--chips", *chips.split(), "--precisions", "half"]
    command += ["--calls", *calls, "--output", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    rows = json.loads((tmp_path / "architectures.json").read_text())["rows"]
    assert done.returncode == 0, [row for row in rows if not row["ok"]]
    for chip in chips.split():
        kernels = {row["kernel"] for row in rows if row["architecture"] == chip}
        assert {"logits_kernel", "hidden_kernel", "weight_kernel"} <= kernels
        assert kernels & ROW_KERNELS == (ROW_KERNELS if calls == ONE_CHUNK else set())


@pytest.mark.parametrize(
    ("dtype", "chip", "aligned", "name"),
    [
        ("bfloat16", "9.0", True, "hopper"),
        ("bfloat16", "9.0", False, "portable, 16 bits"),
        ("float16", None, True, "portable, 16 bits"),
        ("float32", "9.0", True, "portable, float32"),
        ("bfloat16", "8.0", True, "ampere"),
        ("bfloat16", "8.9", True, "small"),
        ("float16", "12.0", True, "small"),
        ("bfloat16", "8.9", False, "unaligned"),
        ("bfloat16", "10.0", True, "blackwell"),
        ("bfloat16", "gfx942", True, "cdna"),
        ("float32", "gfx950", True, "pointers, float32"),
    ],
)
def test_the_record_of_a_call(
    dtype: str, chip: str | None, aligned: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "chip_of", lambda index: chip)
    found = architecture.architecture_of(getattr(torch, dtype), 0, aligned)
    assert found.name == name
    assert set(found.tiles) == set(tiles.KERNELS)


@INTERPRETED
@pytest.mark.parametrize(("vocab", "entries", "taken"), [(260, 260, 1), (257, 257, 0), (512, 256, 2), (512, 509, 0)])
def test_a_buffer_whose_rows_start_anywhere(
    vocab: int, entries: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record that wants rows on 16 bytes takes a call that adds dW to a buffer [D, V] whose rows, or whose parts of
    rows for some entries of the vocabulary, are not."""
    products = Imaginary()
    first = dataclasses.replace(imaginary(products, "ieee", None), aligned=True)
    monkeypatch.setattr(architecture, "ARCHITECTURES", [first, *architecture.ARCHITECTURES])
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=generator) for rows in (8, vocab))
    weight = weight.div_(8.0).requires_grad_()
    target, into = torch.randint(vocab, (8,), generator=generator), torch.zeros(64, vocab).T
    sizes = {"tokens": 8, "hidden": 64, "vocab": vocab, "dtype": "float32", "fused": True}
    chosen = plan(**sizes, order="vocab", chunk=entries) if entries < vocab else None
    loss = torch_impl.linear_cross_entropy(hidden, weight, target, backend="triton", accumulate_into=into, plan=chosen)
    loss.backward()
    assert products.launched["weight"] == taken
    logits = hidden.double() @ weight.double().T
    truth = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), weight)[0]
    assert error(into.double().numpy(), truth.double().numpy()) <= GRADIENT["float32"]


@pytest.mark.every_value
@INTERPRETED
@pytest.mark.parametrize("order", ["default", "vocab", pytest.param("tokens", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("chip", "dtype", "hidden"),
    [
        ("8.0", "float16", 40),
        ("8.0", "float32", 40),
        ("10.0", "float16", 40),
        pytest.param("8.9", "float16", 40, marks=pytest.mark.slow),
        pytest.param("8.9", "float16", 37, marks=pytest.mark.slow),
        pytest.param("gfx942", "float16", 40, marks=pytest.mark.slow),
    ],
)
def test_every_record_computes_right(
    chip: str, dtype: str, hidden: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles and its way to read operands, interpreted."""
    monkeypatch.setattr(architecture, "chip_of", lambda index: chip)
    problem = dataclasses.replace(problem_named("odd_all"), hidden=hidden).with_dtype(dtype)
    sizes = {"tokens": problem.tokens, "hidden": hidden, "vocab": problem.vocab, "dtype": dtype}
    chosen = None if order == "default" else plan(**sizes, fused=True, order=order, chunk=128)
    assert_within(problem, run_case(TorchTriton(), problem.case(), plan=chosen))


def test_without_gluon_the_portable_file_has_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "chip_of", lambda index: "9.0")
    monkeypatch.setattr(architecture, "has_products", lambda products: products.__name__ != "_hopper")
    assert architecture.architecture_of(torch.bfloat16, 0, True).name == "portable, 16 bits"


@pytest.mark.parametrize("low_bits", [8, 4])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=5)), ids=str)
def test_a_warp_moves_every_chunks_sum_on_hopper(flags: tuple[bool, ...], low_bits: int) -> None:
    """But where a result lacks label smoothing's part, and where it is turned: there threads read the sum."""
    final, reads, smooth, targets, turned = flags
    found = next(each for each in architecture.ARCHITECTURES if each.name == "hopper")
    call = SimpleNamespace(describe_matrix=lambda *block: None)
    kind = tiles.WeightKind(final, True, reads, smooth, targets, False, turned, low_bits)
    low = torch.empty((2, 2), dtype=torch.int8)
    own = found.products().weight(call, found.tiles[tiles.WEIGHT_SUM], kind, low, True)
    assert (own.values["SLOTS"] > 0) == own.pairs == (not (turned or (final and smooth)))
