"""Every case of docs/cases.md that is due has a test with its number."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CASES = TESTS.parent / "docs" / "cases.md"

NOT_DUE: dict[int, str] = {}


def listed_cases() -> list[int]:
    """The numbers at the start of a line of docs/cases.md, in order."""
    return [int(found) for found in re.findall(r"^(\d+)\. ", CASES.read_text(encoding="utf-8"), flags=re.MULTILINE)]


def marked_cases(source: str) -> set[int]:
    """Numbers of every ``pytest.mark.case(...)`` in a test module, wherever it stands."""
    return {
        argument.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
    }


@functools.cache
def covered_cases() -> dict[int, set[str]]:
    """Case number → names of the test modules that mark it."""
    covered: dict[int, set[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for number in marked_cases(path.read_text(encoding="utf-8")):
            covered.setdefault(number, set()).add(path.name)
    return covered


def test_the_cases_are_numbered_from_1_without_gaps() -> None:
    cases = listed_cases()
    assert len(cases) >= 32
    assert cases == list(range(1, len(cases) + 1))


def test_every_case_that_is_due_has_a_test() -> None:
    missing = set(listed_cases()) - set(covered_cases()) - set(NOT_DUE)
    assert not missing, f"no test is marked with these cases of docs/cases.md: {sorted(missing)}"


def test_no_test_names_a_case_that_does_not_exist_or_is_not_due() -> None:
    unknown = {number: names for number, names in covered_cases().items() if number not in listed_cases()}
    assert not unknown, f"cases that docs/cases.md does not have: {unknown}"
    now_due = set(covered_cases()) & set(NOT_DUE)
    assert not now_due, f"these have tests now, so they are due: take them out of NOT_DUE: {sorted(now_due)}"


def test_markers_are_found_wherever_they_stand() -> None:
    source = """
import pytest
pytestmark = pytest.mark.case(1)
@pytest.mark.case(2, 3)
@pytest.mark.parametrize("x", [pytest.param(0, marks=pytest.mark.case(4)), pytest.param(1, marks=pytest.mark.skip)])
def test_something(x): "pytest.mark.case(5)"  # pytest.mark.case(6)
"""
    assert marked_cases(source) == {1, 2, 3, 4}
