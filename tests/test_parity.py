"""interop.compare and ``python -m logitless parity``: what agrees, what does not, what is read from users' files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import run

from logitless.interop import compare, load_case
from logitless.interop.parity import Comparison, Measure
from logitless.interop.parity_report import notes
from logitless.interop.runners import NEEDS, RUNNERS, reference
from logitless.problems import BY_NAME, Case
from logitless.rounding import round_to
from logitless.spec import LossOptions
from logitless.tolerances import BOUND, RATIO, TINY

HAVE = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax")}
RUNS = {name for name, needs in NEEDS.items() if all(HAVE[package] for package in needs)}


def statuses(comparison: Comparison) -> dict[str, str]:
    return {row.implementation: row.status for row in comparison.rows}


def write_arrays(path: Path, *, with_bias: bool = False, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "hidden": rng.standard_normal((3, 7, 5)).astype(np.float32),
        "weight": rng.standard_normal((11, 5)).astype(np.float32),
        "target": rng.integers(0, 11, (3, 7)),
    }
    if with_bias:
        arrays["bias"] = rng.standard_normal(11).astype(np.float32)
    arrays = {name: array for name, array in (arrays | changes).items() if array is not None}
    np.savez(path, **arrays)
    return arrays


# ---------------------------------------------------------------------------------------------------------------------
# compare


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["odd_bias", "odd_none_most"])
def test_everything_here_agrees(name: str, dtype: str) -> None:
    problem = BY_NAME[name].with_dtype(dtype)
    comparison = compare(problem)
    found = statuses(comparison)
    assert set(found) == set(RUNNERS)
    assert {n for n, status in found.items() if status == "agrees"} >= RUNS - {"triton", "pallas"}
    assert "fails" not in found.values()
    for row in comparison.rows:
        assert (row.status == "agrees") == (set(row.measures) == {"loss", "dhidden", "dweight", "dbias"})
        assert (row.status == "skipped") == bool(row.reason)
    assert comparison.agrees
    assert (comparison.problem, comparison.dtype) == (name, dtype)
    assert comparison.sizes == {"tokens": 188, "hidden": 31, "vocab": 123}


@pytest.mark.parametrize("output", ["loss", "dhidden", "dweight", "dbias"])
@pytest.mark.parametrize("share", [0.3, 3.0])
def test_the_rule_is_that_of_the_tolerance_table(output: str, share: float) -> None:
    """An implementation that is exact except for one output, which is wrong by a share of the allowance."""
    problem = BY_NAME["odd_bias"].with_dtype("bfloat16")
    measured = compare(problem, {"exact": reference}).rows[0].measures[output]
    assert measured.error == 0.0
    assert measured.allowed == RATIO * measured.ideal_error + TINY["bfloat16"]

    def wrong(case: Case) -> dict[str, Any]:
        made = reference(case)
        return made | {output: made[output] * (1 + share * measured.allowed)}

    comparison = compare(problem, {"mine": wrong})
    assert comparison.agrees == (share < 1)
    (row,) = comparison.rows
    assert row.status == ("agrees" if share < 1 else "disagrees")
    assert row.measures[output].error == pytest.approx(share * measured.allowed)
    assert row.measures[output].in_ideal_errors == pytest.approx(row.measures[output].error / measured.ideal_error)
    assert [name for name, measure in row.measures.items() if not measure.passes] == ([output] if share > 1 else [])


def test_an_implementation_that_raises_or_gives_nan_disagrees() -> None:
    def broken(case: Case) -> dict[str, Any]:
        raise ZeroDivisionError("by zero")

    comparison = compare("odd", {"broken": broken, "nan": lambda case: reference(case) | {"loss": np.nan}})
    assert statuses(comparison) == {"broken": "fails", "nan": "disagrees"}
    assert "broken fails: ZeroDivisionError: by zero" in notes([comparison])
    assert not comparison.agrees
    written = json.dumps(comparison.to_dict(), allow_nan=False)
    assert json.loads(written)["rows"][1]["loss"]["error"] is None


def test_a_skipped_implementation_fails_only_who_asked_for_it() -> None:
    def elsewhere(case: Case) -> dict[str, Any]:
        raise NotImplementedError("backend: 'x' cannot run here: no X")

    comparison = compare("odd", {"elsewhere": elsewhere, "exact": reference})
    assert statuses(comparison) == {"elsewhere": "skipped", "exact": "agrees"}
    assert not comparison.agrees
    unasked = Comparison("odd", "float32", {}, comparison.rows, required=())
    assert unasked.agrees
    assert "elsewhere skipped: backend: 'x' cannot run here: no X" in notes([comparison])


def test_the_reference_alone_is_no_agreement() -> None:
    comparison = compare("odd", ["reference"])
    assert statuses(comparison) == {"reference": "agrees"}
    assert not comparison.agrees


def test_the_reference_is_held_against_another_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case) -> dict[str, Any]:
        return reference(case) | {"loss": reference(case)["loss"] * 1.01}

    monkeypatch.setattr("logitless.interop.parity.reference", wrong)  # the truth of the others
    monkeypatch.setitem(RUNNERS, "reference", wrong)
    assert statuses(compare("odd", ["reference"])) == {"reference": "disagrees"}


def test_the_reference_agrees_where_the_other_computation_is_inexact() -> None:
    """Two tied classes at logits of 2²⁴: log 2 by full logits is wrong in the ninth digit, in float64 too."""
    assert statuses(compare(BY_NAME["tied"].with_dtype("float64"), ["reference"])) == {"reference": "agrees"}


def test_implementations_see_identical_bytes() -> None:
    if not (HAVE["torch"] and HAVE["jax"]):
        pytest.skip("needs both frameworks")
    comparison = compare("odd_bias", ["eager", "torch_in_jax", "xla", "jax_in_torch"])
    rows = {row.implementation: row.measures for row in comparison.rows}
    # The same function on the same bytes, through another framework: the same bits.
    assert rows["eager"] == rows["torch_in_jax"]
    own, bridged = (rows[name]["dhidden"].error for name in ("xla", "jax_in_torch"))
    assert own == pytest.approx(bridged, rel=BOUND["errors of one bridge"])


@pytest.mark.parametrize(
    ("problem", "implementations", "words"),
    [
        ("nothing", None, "problem: got 'nothing', allowed are block, "),
        (3, None, "problem: got int, allowed is a name, a Problem or a Case"),
        ("odd", ["cuda"], "implementations: got 'cuda', allowed are several of reference, eager"),
        ("odd", "eager", "implementations: got 'eager', allowed are several of"),
        ("odd", [], r"implementations: got \[\], allowed are several of"),
    ],
)
def test_bad_arguments(problem: Any, implementations: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        compare(problem, implementations)


def test_a_measure_without_an_ideal_error_has_no_ratio() -> None:
    assert Measure(1e-9, 0.0, 1e-6).in_ideal_errors is None
    assert not Measure(float("nan"), 1.0, 1.0).passes


# ---------------------------------------------------------------------------------------------------------------------
# The user's own arrays


@pytest.mark.parametrize("bias", [False, True])
def test_arrays_from_npz(tmp_path: Path, bias: bool) -> None:
    arrays = write_arrays(tmp_path / "mine.npz", with_bias=bias)
    case = load_case(tmp_path / "mine.npz")
    assert (case.problem.dtype, case.problem.shape, case.problem.vocab) == ("float32", (3, 7), 11)
    assert all(np.array_equal(getattr(case, name), array) for name, array in arrays.items())
    assert (case.bias is None) != bias
    if HAVE["jax"]:
        assert compare(case, ["xla"]).agrees


def test_arrays_are_rounded_to_the_dtype_asked_for(tmp_path: Path) -> None:
    arrays = write_arrays(tmp_path / "mine.npz")
    case = load_case(tmp_path / "mine.npz", dtype="bfloat16", options=LossOptions(reduction="none", ignore_index=3))
    assert case.problem.dtype == "bfloat16"
    assert np.array_equal(case.weight, round_to(arrays["weight"], "bfloat16"))
    assert case.upstream.shape == (3, 7)
    assert case.problem.options.ignore_index == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_arrays_from_safetensors(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("safetensors", reason="the file is of its format")
    torch = pytest.importorskip("torch", reason="NumPy has no bfloat16 to write")
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "hidden": torch.randn(6, 5, generator=generator).to(getattr(torch, dtype)),
        "weight": torch.randn(11, 5, generator=generator).to(getattr(torch, dtype)),
        "target": torch.randint(0, 11, (6,), generator=generator),
        "something_else": torch.zeros(2),
    }
    save_file(tensors, tmp_path / "mine.safetensors")
    case = load_case(tmp_path / "mine.safetensors")
    assert case.problem.dtype == dtype
    for name in ("hidden", "weight", "target"):
        assert np.array_equal(getattr(case, name), tensors[name].double().numpy())
    assert compare(case, ["eager"]).agrees


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": None}, "mine.npz: got no weight, allowed are arrays named hidden, weight, target, bias"),
        ({"target": np.zeros((3, 7))}, "mine.npz: target: got dtype float64, allowed are integers"),
        ({"target": np.zeros((3, 6), int)}, r"mine.npz: target: got shape \(3, 6\), allowed is hidden's leading axes"),
        ({"target": np.full((3, 7), 11)}, r"mine.npz: target: got id 11 at index \(0, 0\), allowed are 0 to 10"),
        ({"weight": np.zeros((11, 5))}, "mine.npz: weight: got dtype float64 beside hidden's float32"),
        ({"hidden": np.zeros((3, 7, 5), int)}, "mine.npz: hidden: got dtype int64, allowed are bfloat16"),
        ({"bias": np.zeros(5, np.float32)}, r"mine.npz: bias: got shape \(5,\), allowed is \[V\]"),
        ({"hidden": np.zeros((3, 7, 5), "V2")}, "mine.npz: hidden: got dtype .*bfloat16 that it does not know"),
        ({"hidden": np.array([{}])}, r"mine\.npz: .*allow_pickle"),
    ],
)
def test_bad_arrays(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_arrays(tmp_path / "mine.npz", **changes)
    with pytest.raises((TypeError, ValueError), match=f"arrays: {words}"):
        load_case(tmp_path / "mine.npz")


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "text.safetensors").write_text("no archive")
    for name, words in (
        ("mine.bin", "allowed is a file named .npz or .safetensors"),
        ("none.npz", "which is no file"),
        ("text.npz", "text.npz: "),
    ):
        with pytest.raises(ValueError, match=f"(arrays|path): .*{words}"):
            load_case(tmp_path / name)
    write_arrays(tmp_path / "mine.npz")
    with pytest.raises(ValueError, match="dtype: got 'int8', allowed are bfloat16"):
        load_case(tmp_path / "mine.npz", dtype="int8")
    if importlib.util.find_spec("safetensors"):
        with pytest.raises(ValueError, match=r"text\.safetensors: cannot be read"):
            load_case(tmp_path / "text.safetensors")


def test_safetensors_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    (tmp_path / "mine.safetensors").write_bytes(b"")
    with pytest.raises(ImportError, match=r'needs the package safetensors: pip install "logitless\[safetensors\]"'):
        load_case(tmp_path / "mine.safetensors")


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_the_command_prints_tables_and_writes_json(tmp_path: Path) -> None:
    code, output, _ = run("parity", "odd", "confident_wrong", "--json", str(tmp_path / "parity.json"))
    assert code == 0
    for title in ("odd: 188 × 31 × 123, float32", "confident_wrong: 112 × 16 × 1000, bfloat16"):
        assert title in output
    assert output.count("reference") >= 4
    written = json.loads((tmp_path / "parity.json").read_text())
    assert written["agrees"] is True
    assert [(c["problem"], c["dtype"]) for c in written["comparisons"]] == [
        ("odd", "float32"), ("odd", "bfloat16"), ("confident_wrong", "float32"), ("confident_wrong", "bfloat16"),
    ]  # fmt: skip
    rows = {row["implementation"]: row for row in written["comparisons"][1]["rows"]}
    assert set(rows) == set(RUNNERS)
    ran = next(row for name, row in rows.items() if name != "reference" and row["status"] == "agrees")
    assert ran["dweight"]["error"] <= ran["dweight"]["allowed"]
    assert ran["dweight"]["error_over_ideal"] == ran["dweight"]["error"] / ran["dweight"]["ideal_error"]


def test_the_command_fails_on_disagreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "eager" if HAVE["torch"] else "xla"
    monkeypatch.setitem(RUNNERS, name, lambda case: reference(case) | {"dweight": 1.1 * reference(case)["dweight"]})
    code, output, errors = run("parity", "odd", "--dtype", "float32", "--json", str(tmp_path / "parity.json"))
    assert code == 1
    assert "disagrees" in output
    assert "error: no agreement on odd float32" in errors
    assert json.loads((tmp_path / "parity.json").read_text())["agrees"] is False


def test_the_command_fails_when_what_was_asked_for_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(case: Case) -> dict[str, Any]:
        raise NotImplementedError("no such device")

    monkeypatch.setitem(RUNNERS, "pallas", elsewhere)
    monkeypatch.setitem(NEEDS, "pallas", ())
    code, output, _ = run("parity", "odd", "--implementation", "pallas")
    assert code == 1
    assert "pallas skipped: no such device" in output


def test_the_command_takes_the_users_arrays(tmp_path: Path) -> None:
    write_arrays(tmp_path / "mine.npz", target=np.full((3, 7), 4))
    name = "eager" if HAVE["torch"] else "xla"
    arguments = ["parity", "--arrays", str(tmp_path / "mine.npz"), "--implementation", name]
    code, output, _ = run(*arguments)
    assert code == 0
    assert "mine.npz: 21 × 5 × 11, float32" in output
    code, output, _ = run(*arguments, "--dtype", "bfloat16", "--ignore-index", "4")
    assert code == 0
    assert "mine.npz: 21 × 5 × 11, bfloat16" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "problems: got 'nothing', allowed are block"),
        (("--dtype", "int8"), "dtype: got 'int8', allowed are bfloat16"),
        (("odd", "--implementation", "cuda"), "implementations: got 'cuda', allowed are several of"),
        (("--arrays", "none.npz"), "path: got 'none.npz', which is no file"),
        (
            ("odd", "--implementation", "reference", "--json", "/no/such/folder/x.json"),
            "json: got '/no/such/folder/x.js",
        ),
    ],
)
def test_mistakes_end_with_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    code, _, errors = run("parity", *arguments)
    assert code == 2
    assert f"error: {words}" in errors
