"""The parity check's table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from logitless.interop.parity import Comparison, Measure
from logitless.tolerances import OUTPUTS, RATIO

STYLES = {"agrees": "green", "skipped": "yellow"}
HEADINGS = {"loss": "loss", "dhidden": "dX", "dweight": "dW", "dbias": "db"}


NOTE = (
    f"Errors against float64 in units of the ideal path's (allowed: {RATIO} × and a little, core/tolerances.py); a "
    "plain number is a relative error, where the ideal path's counts for nothing. The reference is held against a "
    "second float64 computation."
)


def table(comparison: Comparison) -> Table:
    """One row per implementation. Errors are in units of the ideal path's, or plain where that path makes none."""
    sizes = " × ".join(str(size) for size in comparison.sizes.values())
    grid = Table(title=f"{escape(comparison.problem)}: {sizes}, {comparison.dtype}", title_justify="left")
    grid.add_column("implementation", no_wrap=True)
    for output in OUTPUTS:
        grid.add_column(HEADINGS[output], justify="right", no_wrap=True)
    grid.add_column("status", no_wrap=True)
    for row in comparison.rows:
        style = STYLES.get(row.status, "red")
        cells = [_cell(row.measures.get(output)) for output in OUTPUTS]
        grid.add_row(row.implementation, *cells, f"[{style}]{row.status}[/{style}]")
    return grid


def notes(comparisons: Sequence[Comparison]) -> str:
    """How to read the tables, and why implementations did not run. Each reason stands once."""
    reasons = {
        f"{row.implementation} {row.status}: {escape(row.reason)}": None
        for comparison in comparisons
        for row in comparison.rows
        if row.reason
    }
    return "\n".join([NOTE, *reasons])


def _cell(measure: Measure | None) -> str:
    if measure is None:
        return "–"
    ratio = measure.in_ideal_errors
    # Where the allowance is mostly its constant part, the ratio of two roundings says nothing.
    tells = ratio is not None and measure.allowed <= 2 * RATIO * measure.ideal_error
    text = f"{ratio:.2f} ×" if tells else f"{measure.error:.1e}"
    return text if measure.passes else f"[red]{text}[/red]"
