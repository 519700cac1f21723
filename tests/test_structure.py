"""The structure of the package, read from its sources (tests/structure.py counts).

What breaks a rule today stands in a list below. A list may only become shorter: a new violation fails, and so does an
entry that no longer breaks its rule. Then remove the entry. The goal is that every list is empty, and that ``Any``
stands in the package 250 times at most.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import structure

ROOT = Path(__file__).resolve().parent.parent
MOST_FILES = 15

# Imports inside functions that close a circle on purpose: (who, whom) and why.
LAZY: dict[tuple[str, str], str] = {}
CIRCLES: list[list[str]] = []
PRIVATE_REACHES: dict[str, list[str]] = {}
LONG: set[str] = set()
WIDE: set[str] = set()
MOST_ANYS = 154  # goal: 250


@functools.cache
def sources() -> dict[str, structure.Module]:
    """Every module of the package, read when the first test asks for them."""
    return structure.modules(ROOT)


def inside(*packages: str) -> list[structure.Module]:
    """The modules of some of the packages, by the names of their folders."""
    return [module for module in sources().values() if module.path.split("/")[0] in packages]


@functools.cache
def imported(module: structure.Module) -> list[structure.Import]:
    return structure.imports(module, sources())


def test_no_circle_of_imports() -> None:
    found = structure.circles(structure.edges(sources(), frozenset(LAZY)))
    assert found == CIRCLES, "modules import each other; imports in functions count too"


def test_lazy_imports_that_are_allowed_are_there() -> None:
    there = {(module.name, entry.target) for module in sources().values() for entry in imported(module) if entry.lazy}
    assert set(LAZY) <= there


def test_nobody_reaches_for_anothers_private_names() -> None:
    found = {module.path: structure.private_reaches(module, sources()) for module in sources().values()}
    assert {path: sorted(set(names)) for path, names in found.items() if names} == PRIVATE_REACHES


def test_interop_is_imported_by_nobody_below_it() -> None:
    """Commands may import it when they run."""
    found = {
        f"{module.path}: {entry.target}"
        for module in inside("core", "torch_impl", "jax_impl")
        for entry in imported(module)
        if entry.target.startswith("logitless.interop") and not (module.path == "core/cli.py" and entry.lazy)
    }
    assert not found


@pytest.mark.parametrize(
    ("folder", "others"),
    [("torch_impl", ("jax", "logitless.jax_impl")), ("jax_impl", ("torch", "triton", "logitless.torch_impl"))],
)
def test_an_implementation_imports_no_other_framework(folder: str, others: tuple[str, ...]) -> None:
    found = {
        f"{module.path}: {entry.target}"
        for module in inside(folder)
        for entry in imported(module)
        if any(f"{entry.target}.".startswith(f"{other}.") for other in others)
    }
    assert not found


def test_the_core_imports_frameworks_only_where_they_are_asked_for() -> None:
    found = {
        f"{module.path}: {entry.target}"
        for module in inside("core")
        for entry in imported(module)
        if entry.target.split(".")[0] in ("torch", "jax") and not entry.lazy
    }
    assert not found


@pytest.mark.parametrize("folder", ["torch_impl", "jax_impl"])
def test_few_files_at_the_top(folder: str) -> None:
    assert len(list((ROOT / folder).glob("*.py"))) <= MOST_FILES


def test_integrations_are_small() -> None:
    """One small file a program, so that whoever knows the program sees at once what is done to it."""
    files = [path for folder in ("torch_impl", "jax_impl") for path in (ROOT / folder / "integrations").glob("*.py")]
    assert len(files) > 15
    assert {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) >= 120} == {}


def test_host_functions_are_short() -> None:
    """Public functions and code of the device may be longer."""
    assert set(structure.too_long(sources())) == LONG


def test_host_functions_take_few_parameters() -> None:
    assert set(structure.too_wide(sources())) == WIDE


def test_any_becomes_rarer() -> None:
    assert sum(map(structure.anys, sources().values())) <= MOST_ANYS


def test_no_tensor_is_of_the_default_dtype_or_device() -> None:
    """torch.set_default_dtype(torch.bfloat16) would make sums of bfloat16 without a word."""
    assert structure.by_default(sources()) == {}


# ---------------------------------------------------------------------------------------------------------------------
# The counting can go red


def package(**sources: str) -> dict[str, structure.Module]:
    """Modules of a made-up package."""
    return {
        f"logitless.{name}": structure.Module(f"core/{name}.py", f"logitless.{name}", 1, ast.parse(text))
        for name, text in sources.items()
    }


def test_a_circle_through_a_function_is_found() -> None:
    known = package(
        a="import logitless.b",
        b="def f():\n    from logitless import c",
        c="from logitless.a import x",
        d="import logitless.a",
    )
    assert structure.circles(structure.edges(known)) == [["logitless.a", "logitless.b", "logitless.c"]]
    without = frozenset({("logitless.b", "logitless.c")})
    assert structure.circles(structure.edges(known, without)) == []


def test_a_private_reach_is_found() -> None:
    known = package(
        a="_x = 1", b="from logitless import a\na._x + a.y + a.__doc__", c="from logitless.a import _x, y", d="self._x"
    )
    counts = {name: len(structure.private_reaches(module, known)) for name, module in known.items()}
    assert counts == {"logitless.a": 0, "logitless.b": 1, "logitless.c": 1, "logitless.d": 0}


def test_long_and_wide_functions_are_found() -> None:
    nine = ", ".join("abcdefghi")
    body = "\n".join(["    x = 1"] * 50)
    known = package(
        a=f"def long():\n{body}\ndef wide({nine}): ...\nclass C:\n    def fits(self, {nine[:-3]}): ...",
        b=f"@triton.jit\ndef kernel({nine}):\n{body}",
        c=f"from jax.experimental import pallas\ndef host():\n    def body({nine}):\n        helper()\n    run(body)\n"
        f"def helper({nine}):\n{body}",
    )
    assert structure.too_long(known) == {"core/a.py:long": 51}
    assert structure.too_wide(known) == {"core/a.py:wide": 9}


def test_a_tensor_of_the_default_dtype_is_found() -> None:
    known = package(
        a="x = torch.zeros(3, device=d)\ny = torch.empty(3, dtype=torch.float32, device=d)\nz = torch.ones(3, **how)"
    )
    assert structure.by_default(known) == {"core/a.py:1": "torch.zeros without dtype"}
