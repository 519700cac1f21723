"""The code in the README, in the pages of docs/ and in the examples runs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.tolerances import BOUND

ROOT = Path(__file__).resolve().parent.parent
PAGES = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
# A fenced block of Python in any of the forms that renderers know.
FENCE = re.compile(r"^\s*(?:`{3,}|~{3,})\s*\{?\s*\.?py", flags=re.MULTILINE | re.IGNORECASE)


def blocks_of(path: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / path).read_text(), flags=re.DOTALL | re.MULTILINE)


# How the blocks of a page are run: each alone, with a loss of tokens that know nothing; each alone, with another loss;
# each alone, with a model of transformers; or one after the other, as one program.
PLAIN_PAGES = ("README.md", "docs/quickstart_torch.md", "docs/quickstart_jax.md", "docs/plan.md")
LOSS_PAGES = ("docs/rl.md", "docs/companions.md")
MODEL_PAGES = ("docs/huggingface.md", "docs/programs.md")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "CONTRIBUTING.md": (),
    "docs/interop.md": ("torch", "jax"),
    "docs/sharding_torch.md": ("torch",),
    "docs/sharding_jax.md": ("jax",),
}

BLOCKS = blocks_of("README.md")
PLAIN_BLOCKS = [code for page in PLAIN_PAGES for code in blocks_of(page)]
LOSS_BLOCKS = [code for page in LOSS_PAGES for code in blocks_of(page)]
MODEL_BLOCKS = [code for page in MODEL_PAGES for code in blocks_of(page)]


def test_no_block_of_python_is_left_out() -> None:
    with_blocks = set()
    for page in PAGES:
        count = len(FENCE.findall((ROOT / page).read_text()))
        assert count == len(blocks_of(page)), f"{page}: a block that is not found: write it as ```python, not indented"
        if count:
            with_blocks.add(page)
    assert with_blocks == {*PLAIN_PAGES, *LOSS_PAGES, *MODEL_PAGES, *PROGRAMS}


def framework_of(code: str) -> str:
    """torch, jax, or interop, which needs both."""
    used = [name for name in ("torch", "jax") if re.search(rf"^import {name}$", code, flags=re.MULTILINE)]
    return "interop" if len(used) == 2 else used[0]


@pytest.mark.parametrize("code", PLAIN_BLOCKS, ids=framework_of)
def test_plain_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = framework_of(code)
    for name in ("torch", "jax") if kind == "interop" else (kind,):
        pytest.importorskip(name, reason="the block needs it")
    names: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), names)
    assert "loss" in capsys.readouterr().out
    assert float(names["loss"]) == pytest.approx(np.log(5000), rel=BOUND["first loss of a page"])


@pytest.mark.parametrize(
    "code",
    LOSS_BLOCKS,
    ids=lambda code: f"{framework_of(code)}-{code.split('import ')[-1].splitlines()[0].replace(', ', '-')}",
)
def test_blocks_of_the_losses_and_companions_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(framework_of(code), reason="the block needs it")
    names: dict[str, Any] = {}
    exec(compile(code, "docs", "exec"), names)
    assert capsys.readouterr().out.startswith("loss ")
    assert np.isfinite(float(names["loss"]))


@pytest.mark.parametrize("code", MODEL_BLOCKS, ids=["model", "adapter", "trl", "peft", "liger", "cce", "sharded"])
def test_blocks_of_the_models_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    for needed in ("torch", "transformers", "peft", "trl"):
        if f"\nfrom {needed} import" in code or f"import {needed}\n" in code:
            pytest.importorskip(needed, reason="the block needs it")
    names: dict[str, Any] = {}
    exec(compile(code, "docs", "exec"), names)
    if "patch_trl()" in code:  # its trainers are in tests/test_trl.py
        assert "computes its losses by logitless" in capsys.readouterr().out
        return
    loss = float(capsys.readouterr().out.split("loss ")[1])
    assert loss == pytest.approx(np.log(5000), rel=BOUND["first loss of a page"])


@pytest.mark.parametrize("page", PROGRAMS)
def test_blocks_run_as_a_program(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks run one after another, as on the page. torch.distributed has this process as its only rank."""
    for name in PROGRAMS[page]:
        pytest.importorskip(name, reason="the page needs it")
    if page == "docs/sharding_jax.md":
        import jax

        if jax.device_count() % 2:
            pytest.skip(f"the page's mesh has an even number of devices, here are {jax.device_count()}")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    try:
        exec(compile("\n".join(blocks_of(page)), page, "exec"), names)
    finally:
        if "dist" in names:
            names["dist"].destroy_process_group()
    losses = [float(loss) for loss in re.findall(r"^loss (.*)$", capsys.readouterr().out, flags=re.MULTILINE)]
    assert losses == pytest.approx([np.log(5000)] * len(losses), rel=BOUND["first loss of the sharded page"])
    assert len(losses) == {"docs/sharding_torch.md": 2, "docs/sharding_jax.md": 4}.get(page, 0)


def test_every_loss_has_a_block_per_framework() -> None:
    distillations = ("distillation_loss", "sparse_distillation_loss", "dense_distillation_loss")
    for name in ("dpo_loss", "kto_loss", "clipped_policy_loss", *distillations):
        using = [framework_of(code) for code in LOSS_BLOCKS if re.search(rf"\b{name}[(,]", code)]
        assert sorted(using) == ["jax", "torch"], name
    assert any("capture_lm_head(" in code for code in LOSS_BLOCKS)


def test_readme_is_short_and_has_a_block_per_framework() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert sorted(map(framework_of, BLOCKS)) == ["jax", "torch"]


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("torch", ()),
        ("jax", ("optax",)),
        ("jax_sharded", ("optax",)),
        pytest.param("trl", (), marks=pytest.mark.slow),
        pytest.param("flax", ("optax",), marks=pytest.mark.slow),
        pytest.param("flax_linen", ("optax",), marks=pytest.mark.slow),
        pytest.param("equinox", ("optax",), marks=pytest.mark.slow),
    ],
)
def test_examples_learn(name: str, needs: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for module in (name.split("_")[0], *needs):
        pytest.importorskip(module, reason="the example needs it")
    last = runpy.run_path(str(ROOT / "examples" / f"{name}_training.py"))["main"]()
    first = float(capsys.readouterr().out.split("loss ")[1].split()[0])
    assert first == pytest.approx(np.log(4096), rel=BOUND["first loss of an example"])
    assert last < 0.7 * first


def test_the_readme_quotes_the_gpu_results() -> None:
    """The tables of the GPU figures show the results file, and every row of the README's table is one of their rows."""
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench.report import gpu_table

    results = json.loads((ROOT / "bench" / "results" / "gpu_check.json").read_text())
    table = ""
    for key, file in (("rows", "gpu.md"), ("jax_rows", "gpu_jax.md")):
        if key in results:
            made = gpu_table(results[key])
            assert (ROOT / "docs" / "figures" / file).read_text() == made
            table += made
    quoted = re.findall(r"^\| \d+ × \d+ × \d+ \|.*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert quoted
    assert set(quoted) <= set(table.splitlines())


def test_the_tables_of_models_and_heads_are_those_of_the_results() -> None:
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench import report

    for name, table in (("hf", report.hf_table), ("gist", report.gist_table)):
        results = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        assert (ROOT / "docs" / "figures" / f"{name}.md").read_text() == table(results["rows"])


@pytest.mark.parametrize("name", ["architectures", "portable", "tpu"])
def test_a_table_is_that_of_the_results(name: str) -> None:
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench import report

    results = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    table = getattr(report, f"{name}_table")
    assert (ROOT / "docs" / "figures" / f"{name}.md").read_text() == table(results["rows"])
