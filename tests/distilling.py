"""Who distils in the tests, and in which order: by whole rows or by tiles."""

from __future__ import annotations

import pytest
from implementations import MORE_DTYPES, WITH_INTERPRETED, and_interpreted

from logitless.objectives import ROWS, DistillationSizes, Tile, WholeRows, distillation_order

ORDERS = ("rows", "tiles")
RAGGED = 32


DISTILLING = and_interpreted
# For tests whose subject is not the dtype: they take ``impl.dtype``.
DISTILLING_DTYPES = pytest.mark.parametrize("impl", [*WITH_INTERPRETED, *MORE_DTYPES])


def cut_raggedly(monkeypatch: pytest.MonkeyPatch, order: str, tokens: int, vocab: int) -> None:
    """Rows or tiles of RAGGED tokens, tiles of as many entries, of which the last are fewer."""
    for name in ("LARGEST_TILE", "TOKEN_TILE", "VOCAB_TILE"):
        monkeypatch.setattr(f"logitless.objectives.{name}", RAGGED)
    rows_of(monkeypatch, *(RAGGED,) * (order == "rows"))
    for by in ROWS:
        cut = distillation_order(DistillationSizes(tokens, 12, vocab, "float32"), operand_itemsize=4, by=by)
        assert isinstance(cut, WholeRows if order == "rows" else Tile)
        assert (len(cut.token_slices), len(cut.vocab_slices)) == (-(-tokens // RAGGED), -(-vocab // RAGGED))
        assert len(cut.token_slices) > 1


def rows_of(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
    """Whole rows of one of these numbers of tokens at a time, whoever makes them; of none: no whole rows."""
    for by, rows in ROWS.items():
        monkeypatch.setitem(ROWS, by, rows._replace(tokens=tokens))


IN_EITHER_ORDER = pytest.mark.parametrize("order", ORDERS)


def take_order(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Of :data:`IN_EITHER_ORDER`: whole rows are the default."""
    if order == "tiles":
        rows_of(monkeypatch)
