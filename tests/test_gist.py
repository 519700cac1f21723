"""The benchmark of ways to compute a head's loss: all compute the same, and its files are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the benchmark is of PyTorch")
pytest.importorskip("matplotlib", reason="it draws a plot")

import typer  # noqa: E402
from typer.main import get_command  # noqa: E402

from bench import gist  # noqa: E402
from logitless.tolerances import TINY, error  # noqa: E402


@pytest.mark.parametrize("bias", [True, False])
def test_every_variant_is_the_same_mean(bias: bool) -> None:
    """Over the tokens that count, where neither they nor all tokens are a multiple of the chunk."""
    sizes = gist.Sizes(3, 37, 16, 203, "float32", bias=bias, ignored=0.3)
    *leaves, y = gist.arrays(sizes, "cpu")
    assert 0 < (y == gist.IGNORED).sum() < len(y) == 111

    def outcome(loss: Any) -> list[Any]:
        made = loss(*leaves, y)
        return [made, *torch.autograd.grad(made * 3, [leaf for leaf in leaves if leaf is not None])]

    truth = outcome(gist.full_logits)
    made = gist.variants(sizes, chunk=16, compiled=False, budget=1 << 20)
    assert len(made) >= 6
    for name, loss in made.items():
        for value, true in zip(outcome(loss), truth, strict=True):
            assert error(value.detach().numpy(), true.detach().numpy()) <= 3 * TINY["float32"], name


def test_the_command_writes_its_files(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    sizes = {"batch": 2, "length": 33, "hidden": 8, "vocab": 101, "chunk": 16, "ignored": 0.2, "rounds": 2}
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    app = typer.Typer()
    app.command()(gist.main)
    given += ["--no-compile", "--device", "cpu", "--output", str(path)]
    get_command(app).main(given, standalone_mode=False)
    made = json.loads(path.read_text())
    assert made["machine"]["cores"] >= 1
    assert len({row["variant"] for row in made["rows"]}) == len(made["rows"]) >= 5
    for row in made["rows"]:
        assert row["time_ms"] > 0
        assert row["scratch_bytes"] > 0
        assert row["loss"] == pytest.approx(made["rows"][0]["loss"], rel=1e-5)
    assert path.with_suffix(".png").stat().st_size > 1000
