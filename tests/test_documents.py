"""The code in the README, in the pages of docs/ and in the examples runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_ins

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
    for name in (*(("torch", "jax") if kind == "interop" else (kind,)), *(["flax"] if "from flax " in code else [])):
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


@pytest.mark.parametrize("code", MODEL_BLOCKS, ids=["model", "adapter", "fallback", "trl", "liger", "cce", "sharded"])
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


def example(name: str) -> str:
    return str(ROOT / "examples" / f"{name}_training.py")


@pytest.fixture
def stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the program that an example is for, where the tests have one and the package is not installed."""
    name = request.node.callspec.params["name"]
    with stand_ins.without(name, ""):
        if name in ("levanter", "tokamax"):
            getattr(stand_ins, name)()
        yield


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("torch", "torch"),
        ("jax", "jax optax"),
        pytest.param("jax_sharded", "jax optax", marks=pytest.mark.slow),
        pytest.param("accelerate", "torch accelerate transformers", marks=pytest.mark.slow),
        pytest.param("cce", "torch", marks=pytest.mark.slow),
        pytest.param("kernels", "torch kernels", marks=pytest.mark.slow),
        pytest.param("levanter", "jax optax", marks=pytest.mark.slow),
        pytest.param("liger", "torch", marks=pytest.mark.slow),
        pytest.param("lightning", "torch lightning transformers", marks=pytest.mark.slow),
        pytest.param("peft", "torch peft transformers", marks=pytest.mark.slow),
        pytest.param("tokamax", "jax optax", marks=pytest.mark.slow),
        pytest.param("transformers", "torch transformers accelerate", marks=pytest.mark.slow),
        pytest.param("trl", "torch trl", marks=pytest.mark.slow),
        pytest.param("flax", "flax optax", marks=pytest.mark.slow),
        pytest.param("flax_linen", "flax optax", marks=pytest.mark.slow),
        pytest.param("equinox", "equinox optax", marks=pytest.mark.slow),
    ],
)
def test_examples_learn(name: str, needs: str, stand_in: None, capsys: pytest.CaptureFixture[str]) -> None:
    for module in needs.split():
        pytest.importorskip(module, reason="the example needs it")
    last = runpy.run_path(example(name))["main"]()
    first = float(capsys.readouterr().out.split("loss ")[1].split()[0])
    assert first == pytest.approx(np.log(4096), rel=BOUND["first loss of an example"])
    assert last < 0.7 * first


@pytest.mark.slow  # test_verl.py guards what it calls
def test_the_example_of_verl_earns_rewards() -> None:
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason="the example needs it")
    assert runpy.run_path(example("verl"))["main"]() > 0.75  # half of the ids are rewarded at first


def rank_run(rank: int, name: str) -> list[float]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    losses: list[float] = runpy.run_path(example(name))["train"]()
    return losses


@pytest.mark.slow  # test_megatron_head.py, test_torchtitan.py and test_sharded_head.py guard what they call
@pytest.mark.parametrize(("name", "vocabulary"), [("deepspeed", 4096), ("megatron", 4096), ("torchtitan", 2048)])
def test_examples_learn_on_two_ranks(name: str, vocabulary: int) -> None:
    pytest.importorskip("torch", reason="the ranks are torch's")
    pytest.importorskip(name, reason="the example needs it")
    from ranks import Ranks

    with Ranks(2) as pool:  # of its own: the programs leave groups and settings behind
        for losses in pool.run(rank_run, name):
            assert losses[0] == pytest.approx(np.log(vocabulary), rel=BOUND["first loss of an example"])
            assert losses[-1] < 0.7 * losses[0]


# The package that an example is for, where its name is not the example's.
PACKAGE = {"flax_linen": "flax", "jax": "optax", "jax_sharded": "optax", "verl": "transformers"}
OPTIONAL = sorted(
    path.stem.removesuffix("_training")
    for path in (ROOT / "examples").glob("*.py")
    if path.stem.split("_")[0] not in ("torch", "cce", "liger")
)


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_example_without_its_package_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, text = PACKAGE.get(name, name), Path(example(name)).read_text()
    for framework in ("torch", "jax"):
        if f"\nimport {framework}\n" in text:
            pytest.importorskip(framework, reason="the example needs it")
    monkeypatch.delitem(sys.modules, "logitless.interop.demo.jax_model", raising=False)  # which has imported optax
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"^[^\n]*: pip install [^\n]*{package}[^\n]*$"):
        runpy.run_path(example(name))


def test_the_configuration_for_axolotl_is_the_plugins() -> None:
    """Axolotl itself is not run: the entries are checked by the plugin's model of them, the path by importing it."""
    yaml = pytest.importorskip("yaml", reason="the configuration is YAML")
    pytest.importorskip("trl", reason="the plugin imports TRL's adapter")
    configuration = yaml.safe_load((ROOT / "examples" / "axolotl_training.yml").read_text())
    ours = "logitless.torch_impl.integrations.axolotl"
    with stand_ins.without("axolotl", ours):
        stand_ins.axolotl()
        module = importlib.import_module(ours)
        assert configuration["plugins"] == [f"{ours}.{module.LogitlessPlugin.__name__}"]
        entries = {name: value for name, value in configuration.items() if name.startswith("logitless_")}
        assert module.LogitlessArgs(**entries).model_fields_set == set(entries) == {"logitless_memory_budget"}
        module.LogitlessPlugin().pre_model_load(configuration)


def test_every_example_is_named_on_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES if page.startswith("docs"))
    for path in (ROOT / "examples").iterdir():
        if path.is_file():
            assert f"`examples/{path.name}`" in text


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


def test_the_words_of_the_limits_quote_the_results() -> None:
    """Ratios of plain operations: on a GPU over the floor at large sizes, in bfloat16 on a CPU over full logits."""
    text = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    gpu, cpu = (
        json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text()) for name in ("gpu_check", "portable")
    )
    eager = [row for row in gpu["rows"] if row["variant"] == "eager"]
    large = [row["over_floor"] for row in eager if row["tokens"] * row["vocab"] > 2**28]
    ours = [row for row in cpu["rows"] if (row["implementation"], row["dtype"]) == ("torch_eager", "bfloat16")]
    narrow = [row["time_over_full_logits"] for row in ours if row["variant"] in ("default", "lean")]
    assert f"{min(large):.1f} to {max(large):.1f} times [the floor]" in text
    least, most = (f"{ratio(narrow):.1f}" for ratio in (min, max))
    assert f"{least if least == most else f'{least} to {most}'} times as fast as ours" in text
    medium = [row for row in cpu["rows"] if row["implementation"] == "torch_eager, medium"]
    allowed = [row["time_over_full_logits"] for row in medium if row["variant"] in ("default", "lean")]
    assert f"{min(allowed):.2f} to {max(allowed):.2f} of the time of full logits" in text
    small = json.loads((ROOT / "bench" / "results" / "small_cpu.json").read_text())["rows"]
    torch_ratio, jax_ratio = (f"{row['over_full_logits']:.1f}" for row in small if row["variant"].endswith("default"))
    assert f"take {torch_ratio} times as long as full logits with PyTorch" in text
    assert f"and {jax_ratio} times with JAX" in text


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
