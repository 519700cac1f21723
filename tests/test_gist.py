"""The benchmark of ways to compute a head's loss: all ways agree, and the files are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the benchmark is of PyTorch")
pytest.importorskip("matplotlib", reason="it draws a plot")

from bench import gist, head_losses, registry  # noqa: E402
from logitless.tolerances import CHAIN, TINY, error  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.late(where=lambda p: (p["batch"], p["bias"]) in ((4, True), (3, False)))
@pytest.mark.parametrize(
    ("batch", "length", "ignored", "bias"),
    [(3, 37, 0.3, True), (3, 37, 0.3, False), (4, 16, 0.3, True), (1, 13, 0.5, True), (1, 1, 0.0, True)],
    ids=["ragged", "no bias", "whole chunks", "less than a chunk", "one token"],
)
def test_every_variant_is_the_same_mean(
    batch: int, length: int, ignored: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over the tokens that count, whether some or all of them count."""
    sizes = gist.Sizes(batch, length, 16, 203, "float32", bias=bias, ignored=ignored)
    *leaves, y = head_losses.arrays(sizes, "cpu")
    assert (y != head_losses.IGNORED).any()
    assert (y == head_losses.IGNORED).any() == (ignored > 0)

    def outcome(loss: Any) -> list[Any]:
        made = loss(*leaves, y)
        return [made, *torch.autograd.grad(made * 3, [leaf for leaf in leaves if leaf is not None])]

    truth = outcome(head_losses.full_logits)
    monkeypatch.setattr(head_losses, "GIST_CHUNK", 16)
    made = head_losses.variants(sizes, chunk=16, compiled=False, budget=1 << 20)
    rows = {"eager (non-chunked)", "eager (chunked)", "chunks, checkpoint", "logitless", "logitless, 1 MiB"}
    assert set(made) - {"liger lce"} == rows
    for name, loss in made.items():
        for value, true in zip(outcome(loss), truth, strict=True):
            assert error(value.detach().numpy(), true.detach().numpy()) <= 3 * TINY["float32"], name


@pytest.mark.slow  # above are its variants, and test_parity.py has a command that writes its files
def test_the_command_writes_its_files(tmp_path: Path) -> None:
    path = tmp_path / "gist.json"
    sizes = {"batch": 2, "length": 33, "hidden": 8, "vocab": 101, "chunk": 16, "ignored": 0.2, "rounds": 2}
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    given += ["--no-compile", "--device", "cpu", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "gist", *given], cwd=ROOT, check=True, timeout=300)
    made = json.loads(path.read_text())
    assert made["machine"]["cores"] >= 1
    assert len({row["variant"] for row in made["rows"]}) == len(made["rows"]) >= 4
    for row in made["rows"]:
        assert row["time_ms"] > 0
        assert row["scratch_bytes"] > 0
        assert row["loss"] == pytest.approx(made["rows"][0]["loss"], rel=CHAIN)
    assert path.with_suffix(".png").stat().st_size > 1000


def test_the_results_are_those_of_the_command_alone() -> None:
    """Where it writes them, at its own sizes."""
    defaults = vars(registry.parser().parse_args(["gist"]))
    result = json.loads((defaults["output"] / "gist.json").read_text())
    for row in result["rows"]:
        names = ("batch", "length", "hidden", "vocab", "bias", "ignored")
        assert {name: row[name] for name in names} == {name: defaults[name] for name in names}, row["variant"]
        assert row["dtype"] == "bfloat16"
    assert {name: result["options"][name] for name in ("rounds", "chunk")} == {
        name: defaults[name] for name in ("rounds", "chunk")
    }
