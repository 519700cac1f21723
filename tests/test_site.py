"""What the site's pages take from elsewhere exists and is up to date.

``make docs`` builds the site. These tests need none of its packages, unless a test says so.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"


def loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = loaded("docs/site_hooks.py")


def signature(path: str, name: str) -> dict[str, Any]:
    """Arguments of a function and their defaults, ... where there is none, from the source."""
    (function,) = (
        node
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    given = function.args
    without = len(given.args) - len(given.defaults)
    defaults = [None] * without + list(given.defaults) + list(given.kw_defaults)
    names = [argument.arg for argument in given.args + given.kwonlyargs]
    values = (... if default is None else ast.literal_eval(default) for default in defaults)
    return dict(zip(names, values, strict=True))


def test_the_options_page_has_every_argument() -> None:
    row = re.compile(r"^\| `(\w+)` \|(.*?)\| .* \| (both|PyTorch|JAX) \|$", flags=re.MULTILINE)
    rows = row.findall((ROOT / "docs" / "options.md").read_text())
    for framework, path in (("PyTorch", "torch_impl/api.py"), ("JAX", "jax_impl/api.py")):
        shown = {
            name: ast.literal_eval(default.strip(" `")) if default.strip() else ...
            for name, default, where in rows
            if where in ("both", framework)
        }
        assert shown == signature(path, "linear_cross_entropy"), framework


def test_the_plan_page_shows_what_the_command_prints() -> None:
    from typer.testing import CliRunner

    from logitless import cli

    page = (ROOT / "docs" / "plan.md").read_text()
    found = re.search(r"```sh\npython -m logitless (plan .*)\n```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert found is not None
    printed = CliRunner().invoke(cli.app, shlex.split(found[1]), env={"COLUMNS": "100"}).stdout
    assert [line.rstrip() for line in printed.splitlines()] == found[2].splitlines()


def test_the_drawings_are_those_of_the_program(tmp_path: Path) -> None:
    """Their words and numbers; how they are drawn depends on the version of matplotlib."""
    pytest.importorskip("matplotlib", reason="it draws them")
    made = runpy.run_path(str(FIGURES / "draw.py"))
    made["main"](tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([*made["DRAWINGS"], "tolerances.md"])
    assert sorted(path.name for path in FIGURES.glob("*.svg")) == sorted(made["DRAWINGS"])
    for name in names:
        new, committed = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, FIGURES))
        if name.endswith(".svg"):
            new, committed = ("\n".join(re.findall(r"<!-- (.*?) -->", text)) for text in (new, committed))
            assert len(new.splitlines()) > 10
        assert new == committed, f"{name}: run python docs/figures/draw.py"


def test_the_table_of_errors_is_that_of_the_results() -> None:
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench.report import error_table

    results = json.loads((ROOT / "bench" / "results" / "gpu_check.json").read_text())
    for key, file in (("errors", "gpu_errors.md"), ("jax_errors", "gpu_jax_errors.md")):
        if key in results:
            assert (FIGURES / file).read_text() == error_table(results[key])


def test_every_figure_and_table_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for path in FIGURES.iterdir():
        if path.suffix in (".md", ".png", ".svg"):
            assert f"figures/{path.name})" in pages, path.name


class TestHooks:
    def test_a_link_alone_becomes_what_it_leads_to(self) -> None:
        filled = HOOKS.filled("before\n\n[Limits](../README.md#limits)\n\n[table](figures/tolerances.md)\n")
        assert filled.startswith("before\n\n- ")
        assert filled.endswith((FIGURES / "tolerances.md").read_text() + "\n")
        inside = "a [link](../CONTRIBUTING.md) in a line, and [one](rl.md)"
        assert HOOKS.filled(inside) == "a [link](contributing.md) in a line, and [one](rl.md)"

    def test_a_section_ends_at_the_next_heading_of_its_level(self) -> None:
        inner = "a\n\n### Inner\n\n```sh\n# no heading\n## nor this\n```"
        text = f"# Title\n\nfirst\n\n## One two\n\n{inner}\n\n## Three\n\nb\n"
        assert HOOKS.section(text, "") == "first"
        assert HOOKS.section(text, "one-two") == inner
        assert HOOKS.section(text, "three") == "b"
        with pytest.raises(ValueError, match="anchor: got 'four'"):
            HOOKS.section(text, "four")

    def test_links_of_the_root_lead_to_pages(self) -> None:
        text = "[a](docs/rl.md) [b](CONTRIBUTING.md) [c](Makefile) ![d](docs/figures/gpu.png) [e](docs/figures/gpu.md)"
        made = "[a](rl.md) [b](contributing.md) c (`Makefile`) ![d](figures/gpu.png) [e](figures.md)"
        assert HOOKS.relinked(text) == made

    def test_every_public_module_can_be_found_by_its_name(self, tmp_path: Path) -> None:
        HOOKS.make_importable(tmp_path)
        for name in ("logitless/planning.py", "logitless/torch_impl/api.py", "logitless/interop/__init__.py"):
            folder, _, rest = name.removeprefix("logitless/").rpartition("/")
            assert (tmp_path / name).read_text() == (ROOT / (folder or "core") / rest).read_text()

    def test_the_api_pages_have_every_public_name(self) -> None:
        for page, source in (("logitless", "core"), *((name, name) for name in ("torch_impl", "jax_impl", "interop"))):
            names = re.search(r"__all__ = \[(.*?)\]", (ROOT / source / "__init__.py").read_text(), flags=re.DOTALL)
            assert names is not None
            package = "logitless" if page == "logitless" else f"logitless.{page}"
            shown = re.findall(
                rf"^::: {package}\.(\w+)$", (ROOT / "docs" / "api" / f"{page}.md").read_text(), flags=re.M
            )
            assert sorted(shown) == sorted(name for name in re.findall(r'"(\w+)"', names[1]) if name != "__version__")


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe", reason="its extension; make docs installs it")
    as_markdown = loaded("docs/site_docstrings.py").as_markdown
    sections = "Args:\n    x, y: [V],\n        two lines.\n    the others: as for g.\n\nReturns:\n    A\n    b.\n"
    made = as_markdown(f"What :func:`f` does.\n\n    a = b\n\n{sections}")
    lines = [line for line in made.splitlines() if line]
    assert lines[:2] == ["What `f` does.", "    a = b"]
    assert lines[2:5] == ["**Arguments:**", "- `x`, `y`: [V], two lines.", "- the others: as for g."]
    assert lines[5:] == ["**Returns:**", "A", "b."]
    assert as_markdown("Arguments: x: one.\n\nRaises nothing.") == "\n**Arguments:** x: one.\n\nRaises nothing."
