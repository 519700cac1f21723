"""A kernel of one program that writes down which tiles have which numbers, for test_tile_walk.py, and the same by
division."""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.torch_impl.kernels import portable as kernels


@triton.jit(do_not_specialize=["first", "row_tiles", "column_tiles"])
def tiles_kernel(row_ptr, column_ptr, first, row_tiles, column_tiles, COUNT: tl.constexpr, GROUP: tl.constexpr):
    reciprocal = kernels.reciprocal_of(column_tiles, GROUP)
    for i in range(COUNT):
        row, column = kernels.tile_of(first + i, row_tiles, column_tiles, reciprocal, GROUP)
        tl.store(row_ptr + i, row)
        tl.store(column_ptr + i, column)


def by_division(number: int, row_tiles: int, column_tiles: int, group: int) -> tuple[int, int]:
    """Row and column of a tile, by the definition."""
    above, inner = divmod(number, group * column_tiles)
    column, row = divmod(inner, min(row_tiles - above * group, group))
    return above * group + row, column
