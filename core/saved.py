"""What autograd keeps between a forward and its backward, as a table. The frameworks fill it; this imports neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from logitless.spec import check_count

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

    def to_depth(self, depth: int) -> SavedTensors:
        """The layers of a block as one row: rows whose paths begin with the same ``depth`` names are added up.

        A path is a module's in PyTorch: at depth 2 all of "layers.3.attention.out" and "layers.3.norm" is "layers.3".
        """
        check_count("depth", depth, 1)
        blocks: dict[str, list[SavedRow]] = {}
        for row in self.rows:
            blocks.setdefault(".".join(row.where.split(".")[:depth]), []).append(row)
        return SavedTensors(tuple(_added(where, rows) for where, rows in blocks.items()))

    def table(self, title: str | None = None) -> Table:
        """A table in MiB; ``rich.print`` of the object itself prints it as well."""
        from rich.table import Table

        table = Table("where", "arrays", "activations [MiB]", "share", "weights [MiB]", title=title)
        total = max(1, self.activation_bytes)
        for row in (*self.rows, _added("all", self.rows)):
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


def _added(where: str, rows: Iterable[SavedRow]) -> SavedRow:
    """The rows as one."""
    counts = [(row.arrays, row.activation_bytes, row.weight_bytes) for row in rows]
    arrays, activation, weight = (sum(column) for column in zip((0, 0, 0), *counts, strict=True))
    return SavedRow(where, arrays, activation, weight)
