"""What is shipped, and what importing it brings along."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]  # package name → folder

# What a source distribution holds beside the packages.
OTHER_FOLDERS = ("tests", "bench", "docs", "examples")
ROOT_FILES = ("pyproject.toml", "MANIFEST.in", "Makefile", "mkdocs.yml", "README.md", "LICENSE", "CHANGELOG.md",
              "CONTRIBUTING.md")  # fmt: skip

FRAMEWORKS = {"torch": ("torch", "triton", "functorch"), "jax": ("jax", "jaxlib")}

EXTRAS = ("matplotlib", "ml_dtypes", "optax", "rich", "scipy", "tokenizers", "typer")

# Stands before all finders: what it names cannot be imported, whether it is installed or not.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter outside the repository, with ``path`` first on the module search path."""
    insert = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    return subprocess.run(
        [sys.executable, "-P", "-c", insert + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(sys.prefix),
        check=False,
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, and the wheel that was built from it.

    They are built in a copy of the sources, so that the build leaves nothing in the working tree.
    """
    pytest.importorskip("build", reason="building a wheel needs the package 'build' of the dev extra")
    copy = tmp_path_factory.mktemp("source")
    for name in (*ROOT_FILES, ".ci/run"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for folder in (*FOLDERS.values(), *OTHER_FOLDERS):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (found,) = distributions.glob("*.whl")
    return found


def test_every_folder_with_modules_is_listed_as_a_package() -> None:
    packages = {
        ".".join((package, *path.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if path.is_dir() and any(path.glob("*.py"))
    }
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])
    assert len(FOLDERS) == 4


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {"logitless/py.typed"}
    for package, folder in FOLDERS.items():
        prefix = package.replace(".", "/")
        expected |= {f"{prefix}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {f"{package.replace('.', '/')}/__init__.py" for package in FOLDERS} <= names


def test_the_source_distribution_holds_the_tests_and_all_that_they_read(distributions: Path) -> None:
    (found,) = distributions.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        str(path.relative_to(ROOT))
        for folder in (*FOLDERS.values(), *OTHER_FOLDERS)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {*expected, *ROOT_FILES, ".ci/run"} <= names


def test_the_wheel_says_what_the_project_says(wheel: Path) -> None:
    import logitless

    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        licenses = [name for name in archive.namelist() if name.startswith(f"{info}/licenses/")]
    assert metadata["Version"] == PROJECT["project"]["version"] == logitless.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licenses == [f"{info}/licenses/LICENSE"]
    assert {"torch", "jax", "demo", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert "logitless = logitless.cli:main" in scripts


def test_the_unpacked_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import logitless
chosen = logitless.plan(tokens=300, hidden=16, vocab=1000, dtype="float32")
print(logitless.__file__, chosen.tokens)
"""
    done = run_python(code, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "logitless" / "__init__.py"), "300"]


def test_the_core_imports_neither_framework_nor_any_extra() -> None:
    blocked = [name for names in FRAMEWORKS.values() for name in names] + list(EXTRAS)
    code = """
import logitless, logitless.planning, logitless.spec
logitless.plan(tokens=300, hidden=16, vocab=1000, dtype="float32")
print(*sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules}))
"""
    done = run_python(BLOCKER + code, ",".join(blocked))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(("own", "other"), [("torch", "jax"), ("jax", "torch")])
def test_one_framework_is_enough_for_its_implementation(own: str, other: str) -> None:
    if importlib.util.find_spec(own) is None:
        pytest.skip(f"{own} is not installed here")
    # ml_dtypes and scipy are jax's own.
    blocked = [*FRAMEWORKS[other], *(set(EXTRAS) - {"ml_dtypes", "scipy"})]
    code = f"""
import logitless.{own}_impl as implementation
print(implementation.linear_cross_entropy.__module__, {own!r} in sys.modules)
print(*sorted(BLOCKED & {{name.partition(".")[0] for name in sys.modules}}))
"""
    done = run_python(BLOCKER + code, ",".join(blocked))
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.splitlines()
    assert first == f"logitless.{own}_impl.api True"
    assert rest == ""


def test_the_blocker_blocks() -> None:
    done = run_python(BLOCKER + "import colorsys", "colorsys")
    assert done.returncode != 0
    assert "colorsys is blocked" in done.stderr
