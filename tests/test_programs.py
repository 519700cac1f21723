"""The record of the programs that were tested, tests/programs.toml: its table, its versions, and that it is whole."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

from bench import report

ROOT = Path(__file__).resolve().parent.parent
ROWS, PINS = report.tested_programs()
TESTED: dict[str, set[str]] = {}
for _row in ROWS:
    TESTED.setdefault(_row["package"], set()).update(_row["versions"])
ADAPTERS = {row["adapter"] for row in ROWS if "adapter" in row}


def test_the_table_is_that_of_the_record() -> None:
    made = report.programs_table(ROWS, PINS)
    assert (ROOT / "docs" / "figures" / "programs.md").read_text() == made, "run python -m bench report"
    assert "(figures/programs.md)" in (ROOT / "docs" / "programs.md").read_text()


@pytest.mark.parametrize("package", [package for package, versions in TESTED.items() if versions])
def test_the_installed_version_is_one_of_the_record(package: str) -> None:
    try:
        version = importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert version in TESTED[package], "add the version to tests/programs.toml once its tests have passed"


def test_the_versions_that_the_makefile_pins_are_in_it() -> None:
    pinned = {(package, version) for package, version in PINS if package in TESTED}
    assert pinned
    assert {(package, version) for package, version in pinned if version not in TESTED[package]} == set()


def test_every_adapter_has_a_row() -> None:
    """A helper's name begins with its adapter's: cce_options.py is of cce.py."""
    for side in ("torch_impl", "jax_impl"):
        folder = Path(side) / "integrations"
        adapters = {path for path in ADAPTERS if Path(path).parent == folder}
        assert all((ROOT / path).exists() for path in adapters)
        names = tuple(Path(path).stem for path in adapters)
        files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "options"}
        assert {name for name in files if not name.startswith(names)} == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['program']} {' '.join(row['versions'])}")
def test_the_tests_of_a_row_are_about_it(row: dict[str, Any]) -> None:
    text = "".join((ROOT / "tests" / name).read_text() for name in row["tests"])
    if "adapter" in row:
        assert re.search(rf"integrations(\.| import ){Path(row['adapter']).stem}\b", text)
    if row.get("otherwise") == "a stand-in":
        assert "stand_ins." in text or "stand-in" in text
    if row["program"] == "levanter":
        return  # no package has its kernels
    assert row["versions"]
    assert row["package"].split("-")[0] in text
