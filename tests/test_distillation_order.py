"""Of how many tokens a distillation makes whole rows, and whether it holds the gradient: integers, no GPU."""

from __future__ import annotations

import itertools

import pytest

from logitless.objectives import DEFAULT_BUDGET, ROWS, DistillationSizes, RowsBy, WholeRows, distillation_order

SIZES = [
    DistillationSizes(4096, 4096, 128256, "bfloat16", 4096),
    DistillationSizes(8192, 2048, 151936, "bfloat16", 4096),
    DistillationSizes(300, 64, 50257, "float32", ids=41),
    DistillationSizes(1000, 512, 32000, "float16", whole_rows=True),
    DistillationSizes(32768, 4096, 128256, "bfloat16", 8192, ranks=2),
    DistillationSizes(1, 8, 5, "float64", 8),
    DistillationSizes(0, 8, 5, "float32", 8),
]
WAYS = [(sizes, by) for sizes in SIZES for by in ROWS]
in_every_way = pytest.mark.parametrize(("sizes", "by"), WAYS)


def order_of(sizes: DistillationSizes, by: RowsBy, budget: int | None, gradients: bool = True) -> WholeRows:
    operand = 2 if sizes.dtype in ("bfloat16", "float16") else sizes.itemsize
    return distillation_order(sizes, operand_itemsize=operand * gradients, by=by, memory_budget=budget)


def least(sizes: DistillationSizes, by: RowsBy, gradients: bool = True) -> int:
    with pytest.raises(ValueError, match="got 1 bytes") as raised:
        order_of(sizes, by, 1, gradients)
    return int(str(raised.value).split()[-1])


@pytest.mark.case(31)
@pytest.mark.parametrize("gradients", [True, False])
@in_every_way
def test_every_budget_is_kept(sizes: DistillationSizes, by: RowsBy, gradients: bool) -> None:
    """The smallest that its error names works, one byte less does not, and more never buys fewer rows."""
    smallest = least(sizes, by, gradients)
    with pytest.raises(ValueError, match=f"is at least {smallest}$"):
        order_of(sizes, by, smallest - 1, gradients)
    budgets = [smallest, *(smallest * 2**power for power in range(1, 12))]
    orders = [order_of(sizes, by, budget, gradients) for budget in budgets]
    assert all(order.scratch_bytes <= budget for order, budget in zip(orders, budgets, strict=True))
    for one, more in itertools.pairwise(orders):
        assert (one.again is None) <= (more.again is None), "a held gradient is given up for more memory"
        if (one.again is None) == (more.again is None):
            assert one.token_chunk <= more.token_chunk
        if one.again and more.again:
            areas = [tile.token_chunk * tile.vocab_chunk for tile in (one.again, more.again)]
            assert areas[0] <= areas[1]
    assert gradients or all(order.again is None for order in orders)


@in_every_way
def test_rows_and_tiles_cover_everything_once(sizes: DistillationSizes, by: RowsBy) -> None:
    for budget in (least(sizes, by), 3 * least(sizes, by), None):
        order = order_of(sizes, by, budget)
        for cut in (order, order.again or order):
            for slices, length in ((cut.token_slices, sizes.tokens), (cut.vocab_slices, sizes.vocab)):
                edges = [0, *(stop for _, stop in slices)]
                assert [start for start, _ in slices] == edges[:-1]
                assert edges[-1] == length


def test_the_default_holds_the_gradient_within_eight_gib() -> None:
    """More tokens than that: it is made again. And no default is refused."""
    assert order_of(SIZES[0], "kernel", None) == order_of(SIZES[0], "kernel", DEFAULT_BUDGET)
    assert order_of(SIZES[0], "kernel", None).again is None
    assert order_of(SIZES[4], "kernel", None).again is not None
    long = DistillationSizes(2**20, 4096, 128256, "bfloat16", 4096)
    assert least(long, "kernel") > DEFAULT_BUDGET
    assert order_of(long, "kernel", None).token_chunk == 1024


def test_a_ranks_part_is_cut_as_the_largest_is() -> None:
    """All ranks go over the same tokens."""
    for budget in (None, 2 * least(SIZES[4], "plain")):
        order = order_of(SIZES[4], "plain", budget)
        part = order.of_part(1000)
        assert part.token_slices == order.token_slices
        assert part.scratch_bytes <= order.scratch_bytes
        assert part.again is None or part.again.vocab_slices[-1][1] == 1000
