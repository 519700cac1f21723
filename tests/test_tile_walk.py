"""Which tile of a product has which number: every tile has one, and a group of row tiles walks the columns together."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import interpreted

torch = pytest.importorskip("torch", reason="PyTorch's kernels")

MOST_TILES = 2**31 - 1

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def tiles_from(device: str, first: int, count: int, row_tiles: int, column_tiles: int, group: int) -> Any:
    """[count, 2]: row and column of the tiles with the numbers from ``first`` on, as the kernels find them."""
    walk_kernels = pytest.importorskip("walk_kernels", reason="triton is not installed")
    places = torch.full((2, count), -1, dtype=torch.int32, device=device)
    walk_kernels.tiles_kernel[(1,)](*places, first, row_tiles, column_tiles, COUNT=count, GROUP=group)
    return places.T.cpu()


def by_division(number: int, row_tiles: int, column_tiles: int, group: int) -> tuple[int, int]:
    """The same by its definition."""
    above, inner = divmod(number, group * column_tiles)
    column, row = divmod(inner, min(row_tiles - above * group, group))
    return above * group + row, column


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(1, 1, 4), (7, 5, 4), (8, 1, 8), (33, 3, 8), (5, 9, 1), (20, 7, 16)])
def test_every_tile_has_one_number(device: str, sizes: tuple[int, int, int]) -> None:
    rows, columns, _ = sizes
    found = [tuple(place) for place in tiles_from(device, 0, rows * columns, *sizes).tolist()]
    assert found == [by_division(number, *sizes) for number in range(rows * columns)]
    assert sorted(found) == [(row, column) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("column_tiles", [1, 3, 501, 1000, 4096, 46341])
def test_numbers_may_be_as_large_as_an_int32(device: str, column_tiles: int) -> None:
    """Where a group ends, the quotient by multiplication is most easily one too small."""
    group = 8
    row_tiles = MOST_TILES // column_tiles
    width = group * column_tiles
    for whole in (1, 2, MOST_TILES // width // 3, MOST_TILES // width - 1):
        first = whole * width - 2
        found = tiles_from(device, first, 4, row_tiles, column_tiles, group).tolist()
        assert found == [
            list(by_division(number, row_tiles, column_tiles, group)) for number in range(first, first + 4)
        ]
