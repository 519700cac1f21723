"""Which tile of a product has which number: every tile has one, and a group of row tiles walks the columns together."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import interpreted

torch = pytest.importorskip("torch", reason="PyTorch's kernels")
pytest.importorskip("triton", reason="these tests are about Triton's kernels")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from walk_kernels import by_division, tiles_kernel  # noqa: E402

from logitless.torch_impl.kernels.tiles import SQUARE_GROUP  # noqa: E402

MOST_TILES = 2**31 - 1

pytestmark = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def tiles_from(device: str, first: int, count: int, row_tiles: int, column_tiles: int, group: int) -> Any:
    """[count, 2]: row and column of the tiles with the numbers from ``first`` on, as the kernels find them."""
    places = torch.full((2, count), -1, dtype=torch.int32, device=device)
    tiles_kernel[(1,)](*places, first, row_tiles, column_tiles, COUNT=count, GROUP=group)
    return places.T.cpu()


@settings(deadline=None)
@given(sizes=st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 24)))
@example(sizes=(20, 7, SQUARE_GROUP))
def test_every_tile_has_one_number(device: str, sizes: tuple[int, int, int]) -> None:
    rows, columns, _ = sizes
    found = [tuple(place) for place in tiles_from(device, 0, rows * columns, *sizes).tolist()]
    assert found == [by_division(number, *sizes) for number in range(rows * columns)]
    assert sorted(found) == [(row, column) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize("column_tiles", [1, 3, 501, 1000, 4096, 46341])
def test_numbers_may_be_as_large_as_an_int32(device: str, column_tiles: int) -> None:
    """Where a group ends, the quotient by multiplication is most easily one too small."""
    group = 8
    row_tiles = MOST_TILES // column_tiles
    width = group * column_tiles
    for whole in (1, 2, MOST_TILES // width // 3, MOST_TILES // width - 1):
        first = whole * width - 2
        found = tiles_from(device, first, 4, row_tiles, column_tiles, group).tolist()
        wanted = [by_division(first + i, row_tiles, column_tiles, group) for i in range(4)]
        assert found == list(map(list, wanted))


@pytest.mark.parametrize(("row_tiles", "column_tiles"), [(32, 501), (64, 16), (33, 17)])
def test_a_turn_of_the_programs_is_as_square_as_its_tiles(device: str, row_tiles: int, column_tiles: int) -> None:
    """Of 132 programs, 128 have 16 row tiles of 128 beside 8 column tiles of 256."""
    rows, columns = tiles_from(device, 0, 128, row_tiles, column_tiles, SQUARE_GROUP).T
    assert (len(rows.unique()), len(columns.unique())) == (16, 8)
