"""Every tolerance of a test has a name in core/tolerances.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitless import tolerances

TESTS = Path(__file__).parent
KEYWORDS = ("rtol", "atol", "rel", "abs")
# A comparison with a bare number below this is taken for a bound on an error.
SMALL = 0.01


def has_number(tree: ast.AST) -> bool:
    """Whether a number other than 0 stands in the expression."""
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return any(type(value) in (int, float) and value != 0 for value in constants)


def calls_error(tree: ast.AST) -> bool:
    """Whether the expression calls ``error`` of the table."""
    names = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(isinstance(name, ast.Name) and name.id == "error" for name in names)


def is_bound(limit: ast.AST, of_error: bool) -> bool:
    """Whether an upper limit of a comparison is a tolerance that is written out."""
    small = [n for n in ast.walk(limit) if isinstance(n, ast.Constant) and type(n.value) is float]
    if of_error:
        return bool(small)
    return isinstance(limit, ast.Constant) and type(limit.value) is float and 0 < limit.value < SMALL


def literals(text: str) -> Iterator[int]:
    """The lines of a test file in which a tolerance is a number."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            if any(keyword.arg in KEYWORDS and has_number(keyword.value) for keyword in node.keywords):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            upper = [limit for operator, limit in pairs if isinstance(operator, ast.Lt | ast.LtE)]
            if any(is_bound(limit, calls_error(node.left)) for limit in upper):
                yield node.lineno


def test_no_tolerance_is_written_out() -> None:
    found = {path.name: sorted(set(literals(path.read_text()))) for path in sorted(TESTS.glob("*.py"))}
    found = {name: lines for name, lines in found.items() if lines}
    assert not found, f"name the tolerances in core/tolerances.py: {found}"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("assert_close(a, b, rtol=1e-5, atol=0)", 1),
        ("assert a == approx(b, rel=TINY['float32'])", 0),
        ("assert_close(a, b, **ELEMENTS['compiled'])", 0),
        ("assert error(a, b) <= 2 * 1e-6", 1),
        ("assert error(a, b) <= 2 * TINY['float32']", 0),
        ("assert error(a, b) > 1e-3", 0),
        ("assert np.abs(a - b).max() <= 1e-3", 1),
        ("assert share <= 0.5", 0),
    ],
)
def test_the_test_above_finds_numbers(line: str, count: int) -> None:
    assert len(list(literals(line))) == count


def test_every_bound_is_used() -> None:
    """A bound that no test uses would be looser than needed without anybody noticing."""
    used = "\n".join(path.read_text() for path in TESTS.glob("*.py"))
    unused = [name for name in tolerances.BOUND if f'BOUND["{name}"]' not in used and "float64" not in name]
    unused += [name for name in tolerances.ELEMENTS if f'"{name}"' not in used]
    assert not unused
