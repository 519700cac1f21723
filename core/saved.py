"""What autograd keeps between a forward and its backward, as a table. The frameworks fill it; this imports neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class SavedRow:
    """What is kept at one place: a layer's path in PyTorch, an argument or a line of source in JAX."""

    where: str
    arrays: int
    """Memory of its own that is kept: several views of one storage count once."""
    activation_bytes: int
    """Made in the forward, and live only for the backward."""
    weight_bytes: int
    """Live anyway: a module's parameters and buffers in PyTorch, the function's arguments in JAX."""


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """Rows in the order in which the forward reached them, none of them empty."""

    rows: tuple[SavedRow, ...]

    @property
    def activation_bytes(self) -> int:
        return sum(row.activation_bytes for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        return sum(row.weight_bytes for row in self.rows)

    @classmethod
    def of(cls, found: Iterable[tuple[str, int, bool]]) -> SavedTensors:
        """Rows from (where, bytes, whether it is a weight) of every array."""
        rows: dict[str, SavedRow] = {}
        for where, size, is_weight in found:
            row = rows.get(where, SavedRow(where, 0, 0, 0))
            activation, weight = (0, size) if is_weight else (size, 0)
            rows[where] = SavedRow(where, row.arrays + 1, row.activation_bytes + activation, row.weight_bytes + weight)
        return cls(tuple(rows.values()))

    def table(self, title: str | None = None) -> Table:
        """A table in MiB; ``rich.print`` of the object itself prints it as well."""
        from rich.table import Table

        table = Table("where", "arrays", "activations [MiB]", "share", "weights [MiB]", title=title)
        total = max(1, self.activation_bytes)
        sums = SavedRow("all", sum(r.arrays for r in self.rows), self.activation_bytes, self.weight_bytes)
        for row in (*self.rows, sums):
            table.add_row(
                row.where or "(outside of layers)",
                str(row.arrays),
                f"{row.activation_bytes / 2**20:.2f}",
                f"{row.activation_bytes / total:.0%}",
                f"{row.weight_bytes / 2**20:.2f}",
                end_section=row is self.rows[-1] if self.rows else False,
            )
        return table

    def __rich__(self) -> Table:
        return self.table()
