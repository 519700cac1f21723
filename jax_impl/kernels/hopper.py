"""The three products of the target-anchored chunk on Hopper (compute capability 9), in Pallas Mosaic GPU.

Mirror of torch_impl/kernels/hopper.py.

Rows and positions. Ignored tokens are left out: ``order`` lists the valid tokens first, ``count`` is their number, both
on the device. A *position* p counts valid tokens; ``order[p]`` is the token. A chunk is the positions first ≤ p <
first + C; its *row* r is p − first. Arrays on the device say what a kernel works on: how many row tiles, and which. So
a chunk of ignored tokens costs a launch and nothing more, and the host never waits.

The matrices of a chunk, row-major:

    x  [C, D]   hidden states of the rows; zero where no row exists
    e  [C, S]   exponentials (or the gradient itself, where lse is known) over S vocabulary entries, S a multiple of 64;
                zero past the vocabulary's end. Rows past the last row's tile are not written.

Every product is one persistent kernel of three warpgroups. Two multiply: each has 64 rows of a tile [128, 256], or they
take whole tiles [128, 192] in turn. The third copies operands by TMA, which reads zero outside a matrix and stores
nothing there. Programs come in pairs (clusters) that share the operand of their tiles' columns. The caller pads vectors
to whole tiles.

Every sum has a fixed order: the results are the same bit by bit from run to run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless import spec
from logitless.jax_impl.kernels.architecture import HOPPER, Tiles, pair, programs
from logitless.jax_impl.kernels.arithmetic import (
    LINES,
    LOG2E,
    Factor,
    capped,
    held_of,
    joined,
    known_share,
    parted,
    sloped,
)
from logitless.jax_impl.kernels.launch import (
    ACC,
    COLUMN_LAYOUT,
    ROW_LAYOUT,
    Arguments,
    Ref,
    References,
    Scratch,
    Shapes,
    launch,
    load,
    load_matrix,
    transposed,
)
from logitless.jax_impl.slices import Index

Begun = TypeVar("Begun")
TILE_ROWS, STEP, MULTIPLYING, TILING = HOPPER.tile_rows, HOPPER.step, HOPPER.multiplying, HOPPER.tiling
WARPGROUP_ROWS = HOPPER.warpgroup_rows
# How a piece of a tile lies in registers that is stored transposed.
TURNED_LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED
# Columns of a tile that are stored at a time: of e, and of gradients, which may come with float32 sums. 128 bytes each.
STAGED, STAGED_FLOAT32 = 64, 32


def _scalar(r: References, name: str, turned: bool = False) -> Array:
    """The first row of a chunk, or the first entry of a slice of the vocabulary: a multiple of what moves together.

    ``turned``: the entries are a matrix' columns, of which more move together.
    """
    return pl.multiple_of(r[name][0], STEP if turned else TILING)


def _entries(r: References, most: int) -> Index:
    """How many vocabulary entries a block has: what "columns" says, where there is one, else ``most``."""
    return r["columns"][0] if "columns" in r else most


def _along_rows(vector: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(vector, shape, [0])


def _along_columns(vector: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(vector, shape, [1])


def _transforms(dtype: DTypeLike, width: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How [rows, width] lies in shared memory, for TMA and for the tensor cores."""
    swizzle = min(128, width * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((TILING, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


# ---------------------------------------------------------------------------------------------------------------------
# Products


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A matrix of a product in global memory."""

    reference: Ref
    depth_first: bool
    """Whether its first axis is the product's depth."""
    start: Index = 0
    """Where along one of its axes the product begins."""
    start_axis: int = 0

    def shape(self, width: int) -> tuple[int, int]:
        """Of the block that one step reads."""
        return (STEP, width) if self.depth_first else (width, STEP)

    def block(self, width: int, tile: Array, k: Index) -> Ref:
        """The part of the matrix that step k of a tile reads."""
        begins, sizes = [tile * width, k * STEP], [width, STEP]
        if self.depth_first:
            begins, sizes = begins[::-1], sizes[::-1]
        begins[self.start_axis] = self.start + begins[self.start_axis]
        rows, columns = map(pl.ds, begins, sizes)
        return self.reference.at[rows, columns]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A warpgroup's part of a tile, half of it or all, and where that lies."""

    m: Array
    """Which row tile."""
    n: Array
    """Which column tile."""
    warpgroup: Array
    width: int
    exists: Array
    """False where a pair's second row tile would lie behind the last."""
    height: int
    part: Index = 0
    """Which part of the product's depth."""

    @property
    def number(self) -> Array:
        """How many parts of ``height`` rows lie above."""
        return self.m if self.height == TILE_ROWS else self.m * MULTIPLYING + self.warpgroup

    @property
    def row(self) -> Array:
        return self.number * self.height

    @property
    def column(self) -> Array:
        return self.n * self.width

    @property
    def shape(self) -> tuple[int, int]:
        return self.height, self.width


def pair_rows() -> int:
    """Rows of the row tiles that a pair of programs works on."""
    return TILE_ROWS * pair()


def listed_rows() -> int:
    """Places that the listed rows of one pair may take: they begin at a multiple of TILING."""
    return pair_rows() + TILING


@dataclasses.dataclass(frozen=True)
class _Listed:
    """Rows that are added to some of a product's rows, in more steps of the tiles that have such rows.

    The left operand of these steps is made here: 0s and 1s that say to which row of the tile each listed row is added.
    """

    rows: Ref
    """[places, columns of the product], in the order of the product's rows."""
    bounds: Ref
    """Where the listed rows of each pair of row tiles begin, and where the last end. Their first block begins at the
    multiple of TILING before."""
    numbers: Ref
    """[pairs · listed_rows() + STEP] int32: to which of the pair's rows each row of its blocks is added, or −1."""

    def pair(self, tile: _Tile) -> Array:
        return lax.div(tile.m, pair())

    def first(self, tile: _Tile) -> Array:
        return lax.div(self.bounds[self.pair(tile)], TILING) * TILING

    def steps(self, tile: _Tile) -> Array:
        begin, end = (self.bounds[self.pair(tile) + side] for side in (0, 1))
        return jnp.where(begin < end, lax.div(end - self.first(tile) + (STEP - 1), STEP), 0)

    def block(self, tile: _Tile, k: Index) -> Ref:
        first = pl.multiple_of(self.first(tile) + k * STEP, TILING)
        return self.rows.at[pl.ds(first, STEP), pl.ds(tile.column, tile.width)]

    def ask(self, tile: _Tile, k: Index, depth_first: bool) -> Array:
        """To which rows of the pair those of step k are added: [STEP]. ``depth_first``: as the left operand is."""
        layout = ROW_LAYOUT if depth_first else COLUMN_LAYOUT
        return load(self.numbers, self.pair(tile) * listed_rows() + k * STEP, STEP, layout)

    def chosen(self, tile: _Tile, asked: Array, depth_first: bool, dtype: jnp.dtype) -> Array:
        """The left operand, [rows of the warpgroup's part, STEP] or its transpose, from what :meth:`ask` gave."""
        shape = (STEP, tile.height) if depth_first else (tile.height, STEP)
        along = _along_rows if depth_first else _along_columns
        row = plgpu.broadcasted_iota(jnp.int32, shape, int(depth_first), layout=plgpu.Layout.WGMMA)
        here = row == along(asked - (tile.row - self.pair(tile) * pair_rows()), shape)
        return jnp.where(here, 1.0, 0.0).astype(dtype)


def _of_rows(r: References, name: str, tile: _Tile) -> Array:
    """The tile's part of a vector along the rows."""
    return load(r[name], tile.row, tile.height, ROW_LAYOUT)


def _product(
    a: _Operand, b: _Operand, counts: tuple[Index, Index], steps: Index, *, tiles: Tiles,
    row_tile: Callable[[Array], Array], begin: Callable[[_Tile], Begun],
    epilogue: Callable[[_Tile, Begun, Array], None], listed: _Listed | None = None,
    arrived: Callable[[_Tile], None] | None = None, parts: int = 1,
) -> None:  # fmt: skip
    """Σ_k a_ik b_kj over ``steps`` blocks of depth, for counts[0] × counts[1] tiles that the programs share.

    parts: each tile comes that many times, with another part of the depth, ``steps`` blocks each.
    row_tile: which row tile the i-th is. The tiles are walked in groups of ``tiles.group`` row tiles, for the L2 cache.
    begin(tile) runs before a tile's first multiplication, epilogue(tile, what begin returned, value) after the last,
    both in the multiplying warpgroups. value is float32 in registers: [64, columns], or in turn [128, columns].

    The steps of all of a program's tiles go through ``tiles.stages`` slots of shared memory. ``ready[s]``: slot s was
    loaded. ``free[s]``: every warpgroup that multiplies it, in both programs of the pair, has done so. ``turn[1]``: the
    second warpgroup may begin its tile, HOPPER.skew steps behind the first. So one's epilogue runs beside the other's
    products.

    ``tiles.in_turn``: each warpgroup has every other tile of the program to itself, so that all of its epilogue runs
    beside the other's products. Each waits for its own steps only, by a ``ready`` of its own for every slot (a barrier
    must be waited for in every phase). ``turn[w]``: warpgroup w may begin a tile, because the other has asked for the
    last product of its own.

    listed: rows that are added to the sum, in steps behind the tile's own. Then the i-th row tile is tile i.
    arrived(tile) runs in each multiplying warpgroup when nothing of the tile's operands is still to be read.
    """
    width, stages, in_turn = tiles.columns, tiles.stages, tiles.in_turn
    shapes = a.shape(TILE_ROWS), b.shape(width)
    dtype = a.reference.dtype
    paced = jnp.asarray(steps) >= stages  # else the first warpgroup could be two tiles ahead
    paired = pair() > 1
    pairs = pl.cdiv(counts[0], pair()), counts[1] * parts
    height = TILE_ROWS if in_turn else WARPGROUP_ROWS
    barrier: type[plgpu.Barrier] | functools.partial[plgpu.ClusterBarrier] = plgpu.Barrier
    if paired:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",))

    @functools.partial(
        pl.run_scoped,
        a_slots=plgpu.SMEM((stages, *shapes[0]), dtype, transforms=_transforms(dtype, STEP)),
        b_slots=plgpu.SMEM((stages, *shapes[1]), dtype, transforms=_transforms(dtype, STEP)),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages * (MULTIPLYING if in_turn else 1)),
        free=barrier(num_arrivals=1 if in_turn else MULTIPLYING, num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=MULTIPLYING),
        collective_axes="warpgroup",
    )
    def scope(a_slots: Ref, b_slots: Ref, ready: Ref, free: Ref, turn: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")
        rows = pl.ds(0 if in_turn else warpgroup * height, height)

        def each_tile(work: Callable[[_Tile, Array, Index], None]) -> None:
            """work(tile, its first step's number, its steps for listed rows) for the program's tiles."""

            @plgpu.nd_loop((pairs[0] * pairs[1],), collective_axes="program", init_carry=jnp.int32(0))
            def _(info: plgpu.NDLoopInfo, carry: Array) -> Array:
                i, n = plgpu.planar_snake(info.index[0], pairs, 0, tiles.group // pair())
                i = i * HOPPER.pair + lax.axis_index("pair") if paired else i
                exists = i < counts[0]  # else the pair's other program has the last row tile
                m = row_tile(jnp.minimum(i, counts[0] - 1))
                owner = lax.rem(info.local_index, MULTIPLYING) if in_turn else warpgroup
                part, n = (0, n) if parts == 1 else (lax.div(n, counts[1]), lax.rem(n, counts[1]))
                tile = _Tile(m, n, owner, width, exists, height, part)
                more = 0 if listed is None else listed.steps(tile)  # asked for long before it is needed
                own = (warpgroup == MULTIPLYING) | (warpgroup == owner) if in_turn else True
                pl.when(own)(lambda: work(tile, carry, more))
                return carry + steps + more

        def loaded(tile: _Tile, slot: Array) -> Ref:
            return ready.at[tile.warpgroup * stages + slot if in_turn else slot]

        def load(tile: _Tile, number: Array, more: Index) -> None:
            def step(k: Array, own: Ref, shared: Ref) -> None:
                slot = lax.rem(number + k, stages)
                plgpu.barrier_wait(free.at[slot])
                plgpu.copy_gmem_to_smem(own, a_slots.at[slot], loaded(tile, slot))
                receivers = "pair" if paired else None
                plgpu.copy_gmem_to_smem(shared, b_slots.at[slot], loaded(tile, slot), collective_axes=receivers)

            def own_step(k: Array, _: None) -> None:
                place = k if parts == 1 else k + tile.part * steps
                step(k, a.block(TILE_ROWS, tile.m, place), b.block(width, tile.n, place))

            def listed_step(of: _Listed, k: Array, _: None) -> None:
                # ready expects two blocks; any block of a will do.
                step(steps + k, a.block(TILE_ROWS, tile.m, 0), of.block(tile, k))

            lax.fori_loop(0, steps, own_step, None)
            if listed is not None:
                lax.fori_loop(0, more, functools.partial(listed_step, listed), None)

        def multiply(tile: _Tile, number: Array, more: Index) -> None:
            @functools.partial(pl.run_scoped, total=ACC((height, width), jnp.float32))
            def accumulate(total: Ref) -> None:
                begun = begin(tile)
                asked = None if listed is None else listed.ask(tile, 0, a.depth_first)
                waits = True if in_turn else paced & (warpgroup == 1)
                pl.when(waits)(lambda: plgpu.barrier_wait(turn.at[tile.warpgroup]))

                def step(k: Array, left: Array | None = None) -> None:
                    slot = lax.rem(number + k, stages)
                    plgpu.barrier_wait(loaded(tile, slot))
                    if left is not None:
                        own = a_slots.at[slot, :, rows] if a.depth_first else a_slots.at[slot, rows]
                        own[...] = left
                        plgpu.commit_smem()
                    mine = transposed(a_slots.at[slot, :, rows]) if a.depth_first else a_slots.at[slot, rows]
                    plgpu.wgmma(total, mine, b_slots.at[slot] if b.depth_first else transposed(b_slots.at[slot]))
                    plgpu.wgmma_wait(1)
                    before = lax.rem(number + k + stages - 1, stages)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

                def own_step(k: Array, _: None) -> None:
                    step(k)
                    if not in_turn:
                        pl.when(paced & (warpgroup == 0) & (k == HOPPER.skew))(lambda: plgpu.barrier_arrive(turn.at[1]))

                def listed_step(of: _Listed, k: Array, asked: Array) -> Array:
                    step(steps + k, of.chosen(tile, asked, a.depth_first, dtype))
                    return of.ask(tile, k + 1, a.depth_first)

                lax.fori_loop(0, steps, own_step, None)
                if listed is not None:
                    lax.fori_loop(0, more, functools.partial(listed_step, listed), asked)
                if in_turn:
                    plgpu.barrier_arrive(turn.at[1 - tile.warpgroup])
                if arrived is not None:
                    arrived(tile)
                value = total[...]
                last = lax.rem(number + steps + more + stages - 1, stages)
                pl.when(steps + more > 0)(lambda: plgpu.barrier_arrive(free.at[last]))
                pl.when(tile.exists)(lambda: epilogue(tile, begun, value))

        @pl.when(warpgroup == MULTIPLYING)
        def _() -> None:
            plgpu.set_max_registers(tiles.loading_registers, action="decrease")
            each_tile(load)
            for slot in range(stages):  # until nothing of the pair is on its way to this program
                plgpu.barrier_wait(free.at[slot])

        @pl.when(warpgroup < MULTIPLYING)
        def _() -> None:
            plgpu.set_max_registers(tiles.multiplying_registers, action="increase")

            @pl.when(warpgroup == 0 if in_turn else True)
            def _() -> None:
                for slot in range(stages):
                    plgpu.barrier_arrive(free.at[slot])

            if in_turn:
                pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            each_tile(multiply)
            if in_turn:  # the warpgroup whose turn would be next waits for it: a barrier's last phase counts, too
                taken = pl.cdiv(pairs[0] * pairs[1] - lax.axis_index("program"), lax.axis_size("program"))
                pl.when(lax.rem(taken, MULTIPLYING) == warpgroup)(lambda: plgpu.barrier_wait(turn.at[warpgroup]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _staging(dtype: DTypeLike, width: int, height: int = WARPGROUP_ROWS) -> object:
    """Shared memory for parts of a tile on their way: per warpgroup, two slots [height, width]."""
    return plgpu.SMEM((MULTIPLYING, 2, height, width), dtype, transforms=_transforms(dtype, width))


def _pieces(tile: _Tile, size: int, width: int) -> int:
    """In how many pieces of ``width`` columns a tile is stored, in a matrix of ``size`` columns.

    Where the matrix is one piece wide, the pieces outside must not be stored: TMA is not told of an axis of length 1.
    """
    return 1 if size <= width else tile.width // width


def _store(
    tile: _Tile, piece: Callable[[Index, Array], Array], value: Array, width: int, staging: References,
    to: References, size: int, turned: bool = False,
) -> None:  # fmt: skip
    """Store a warpgroup's part of a tile by TMA ``to`` its part of a matrix of ``size`` columns.

    It goes piece(number, value's columns) by piece: see :func:`_store_piece`. They are a loop: as one after the other,
    the kernel would take twice as long to lower.
    """
    count = _pieces(tile, size, width)
    cuts = _cuts(value, count, width)

    def step(number: Index, _: None = None) -> None:
        part = piece(number, cuts[0]() if count == 1 else lax.switch(number, cuts))
        _store_piece(tile, number, count, part, staging, to, turned)

    if count == 1:
        step(0)
    else:
        lax.fori_loop(0, count, step, None)


def _cuts(value: Array, count: int, width: int) -> list[Callable[[], Array]]:
    """What takes the first ``count`` pieces out of a tile: registers have no index, so it has to be a choice."""
    edges = [((0, first), (value.shape[0], first + width)) for first in range(0, count * width, width)]
    return [functools.partial(lax.slice, value, *edge) for edge in edges]


def _store_piece(
    tile: _Tile, number: Index, count: int, value: Array, staging: References, to: References, turned: bool = False
) -> None:
    """Store the piece with this ``number`` of a part of a tile that goes in ``count`` pieces.

    It is rounded to "out", or to "out" and "low" (:func:`arithmetic.parted`). ``turned``: the matrix lies transposed,
    and so does what is staged.
    """
    slot, width, dtype = lax.rem(number, 2), value.shape[1], staging["out"].dtype
    parts = parted(value, dtype) if "low" in to else (value.astype(dtype),)
    # One piece may be on its way, but not from this slot. The last piece of the tile before may be in it, where the
    # number of pieces is odd.
    if count % 2:
        pl.when(number == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    for name, part in zip(to, parts, strict=True):
        if turned:
            transposed(staging[name].at[tile.warpgroup, slot])[...] = plgpu.layout_cast(part, TURNED_LAYOUT)
        else:
            staging[name][tile.warpgroup, slot] = part
    plgpu.commit_smem()
    for name, matrix in to.items():
        columns = pl.ds(number * width, width)
        place = matrix.at[columns, :] if turned else matrix.at[:, columns]
        last = name == tuple(to)[-1]
        plgpu.copy_smem_to_gmem(staging[name].at[tile.warpgroup, slot], place, commit_group=last)


# ---------------------------------------------------------------------------------------------------------------------
# The first product

# Vectors along the rows. A tile reads its own part of each.
ROW_VECTORS = (
    "target", "anchor", "log_total", "factor", "element", "alpha", "gamma", "delta", "sigma", "temperature"
)  # fmt: skip

# What the epilogue gives.
SUMS = "sums"  # sums per row only
ANCHORED = "anchored"  # sums, and exponentials relative to the anchor, 0 at the target
KNOWN = "known"  # the gradient's matrix, from lse
HELD = "held"  # sums, and logits relative to the anchor, that wait for sums.held_matrix
HIGHEST = "highest"  # the largest logit of every row
# Where tiles may go in turn: the epilogue works piece by piece.
IN_TURN = (ANCHORED, KNOWN)


@dataclasses.dataclass(frozen=True)
class Logits:
    """What is the same for all tiles of a first product."""

    mode: str
    columns: int
    """Vocabulary entries, without padding."""
    scale: float = 1.0
    cap: float | None = None
    entropy: bool = False
    extremes: bool = False
    """The largest logit of every row, the first column that has it, the smallest logit, and the exponentials' square
    sum."""
    sum_logits: bool = False
    group: int = HOPPER.logits.group
    turned: bool = False
    """Whether the weight is [D, V]."""
    each: bool = False
    """Whether each row has a temperature of its own."""
    across: bool = False
    """Whether e is stored transposed."""

    @property
    def seldom(self) -> bool:
        """Whether the kernel mostly has no tile. Then it has one epilogue for all of them, and is made in less time."""
        return self.mode == HIGHEST

    @property
    def tiles(self) -> Tiles:
        """They go in turn, but not where softcap, temperatures or statistics need many registers."""
        plain = self.cap is None and not self.each and self.lines in (("sum",), ())
        in_turn = self.mode in IN_TURN and plain
        return dataclasses.replace(HOPPER.logits_in_turn if in_turn else HOPPER.logits, group=self.group)

    @property
    def shape(self) -> tuple[int, int]:
        """What a warpgroup has of a tile."""
        return TILE_ROWS if self.tiles.in_turn else WARPGROUP_ROWS, self.tiles.columns

    @property
    def piece(self) -> int:
        """How many columns of a tile its epilogue works on at a time."""
        return STAGED // 2 if self.extremes else STAGED

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.shape[1])

    @property
    def lines(self) -> tuple[str, ...]:
        """The names of the partial sums that are written."""
        if self.mode == KNOWN:
            return ()
        if self.mode == HIGHEST:
            return ("highest",)
        names = ["sum"] + ["gap"] * self.entropy + ["highest", "lowest", "argmax", "squares"] * self.extremes
        return (*names, *["logit_sum"] * self.sum_logits)


def logits(config: Logits, arguments: Arguments, outputs: Shapes) -> dict[str, Array]:
    """Sums of the logits' rows, and a block of e, from z = f(x wᵀ + b), which is not stored.

    z covers the vocabulary entries start ≤ j < start + columns. Column tile n writes line n of each [n, rows] buffer.

    Arguments:
        tiles: [1 + ⌈C / 128⌉] int32: how many row tiles, then which.
        start: [1] int32: the first vocabulary entry.
        columns: [1] int32, or none: how many there are, at most config.columns. e's other tiles are not written.
        limit: [1] int32, or none: entries from there on count as past the end.
        x: [C, D]; w: [V, D], or [D, V] with config.turned; bias: [tiles of V] float32, or none.
        target: [rows] int32; anchor: [rows] float32; temperature: [rows] float32, with config.each.
        hits: [rows / config.shape[0], column tiles] int32: how many targets lie in a warpgroup's part of a tile. None
            with config.seldom.
        class_weight: [tiles of V] float32, where logits are summed, or beside sigma.
        log_total, factor, element: [rows] float32, for KNOWN; alpha, gamma, delta, sigma, too, if they are not trivial.
    ``outputs`` (or arguments that are references): e [C, S], with config.across [S, C], or larger; and config.lines
    [column tiles, rows] float32. argmax is the column within the tile.
    """

    def body(r: References) -> None:
        start = _scalar(r, "start", config.turned)
        end = _entries(r, config.columns)
        column_tiles = pl.cdiv(end, config.shape[1])
        if "limit" in r:
            end = jnp.minimum(end, r["limit"][0] - start)

        def begin(tile: _Tile) -> tuple[Array | None, dict[str, Array]]:
            """The number of targets in the tile, and its vectors: asked for here, waited for after the products."""
            vectors = {name: _of_rows(r, name, tile) for name in ROW_VECTORS if name in r}
            return (None if config.seldom else r["hits"][tile.number, tile.n]), vectors

        def epilogue(tile: _Tile, begun: tuple[Array | None, dict[str, Array]], value: Array) -> None:
            """Most tiles have no target and lie inside the vocabulary; their epilogue is shorter."""
            if begun[0] is None:
                finish(tile, begun[1], value, True)
                return
            careful = (tile.column + tile.width > end) | (begun[0] > 0)
            lax.cond(careful, lambda: finish(tile, begun[1], value, True), lambda: finish(tile, begun[1], value, False))

        def finish(tile: _Tile, vectors: dict[str, Array], value: Array, careful: bool) -> None:
            e, width = r.get("e"), config.piece
            count = tile.width // width if e is None else _pieces(tile, e.shape[0 if config.across else 1], width)

            def piece(number: Index, z: Array, lines: dict[str, Array]) -> dict[str, Array]:
                """Store e of some columns; the lines with their sums."""
                first = number * width
                place = tile.column + first
                if "bias" in r:
                    z = z + _along_columns(load(r["bias"], start + place, width, COLUMN_LAYOUT), z.shape)
                column = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
                here = column < end - place if careful else None
                block = _Block(r, vectors, start + place, column, here)
                z = capped(z, *block.scales(config))
                make = {KNOWN: _known, HIGHEST: _highest}.get(config.mode, _exponentials)
                values, sums = make(config, block, z)
                lines = _merged(lines, sums, first)
                if e is not None:
                    rows, columns = pl.ds(tile.row, tile.height), pl.ds(tile.column, tile.width)
                    to = e.at[columns, rows] if config.across else e.at[rows, columns]
                    _store_piece(tile, number, count, values, {"out": r["staging"]}, {"out": to}, config.across)
                return lines

            cuts = _cuts(value, count, width)
            lines: dict[str, Array] = {}
            if config.extremes:
                lines = lax.fori_loop(
                    0, count, lambda number, lines: piece(number, lax.switch(number, cuts), lines), _no_sums(config)
                )
            else:
                for number, cut in enumerate(cuts):
                    lines = piece(number, cut(), lines)
            for name, values in lines.items():
                r[name][tile.n, pl.ds(tile.row, tile.height)] = values

        _product(
            _Operand(r["x"], depth_first=False),
            _Operand(r["w"], depth_first=config.turned, start=start, start_axis=int(config.turned)),
            (r["tiles"][0], column_tiles),
            pl.cdiv(r["x"].shape[1], STEP),
            tiles=config.tiles,
            row_tile=lambda i: r["tiles"][i + 1],
            begin=begin,
            epilogue=epilogue,
        )

    holds = config.mode in (ANCHORED, KNOWN, HELD)
    staged = (config.shape[0], config.piece) if config.across else (config.piece, config.shape[0])
    scratch: Scratch = {"staging": _staging(arguments["x"].dtype, *staged)} if holds else {}
    return launch(body, arguments, outputs, name=f"logits_{config.mode}", options=config, grid=None, scratch=scratch)


def _no_sums(config: Logits) -> dict[str, Array]:
    """The lines before the first piece, for a loop over the pieces.

    It has to be a loop where there are many lines. Of pieces one after the other, ptxas puts the sums off until the
    last one: it spilled up to 444 bytes a thread, and ptxas 13.0.88 took one spilled index for another. So it added the
    bias of other columns.
    """
    nothing = {"sum": 0.0, "max": -math.inf, "first": 0.0, "min": math.inf}

    def line(name: str) -> Array:
        how = spec.CLASS_SUMS[LINES.get(name, name)].merge
        values: Array = plgpu.layout_cast(jnp.full(config.shape[0], nothing[how], jnp.float32), ROW_LAYOUT)
        return values

    return {name: line(name) for name in config.lines}


def _merged(lines: dict[str, Array], piece: dict[str, Array], first: Index) -> dict[str, Array]:
    """Partial sums with those of the piece that begins ``first`` columns on, as spec.CLASS_SUMS says."""
    if "argmax" in piece:
        piece = piece | {"argmax": piece["argmax"] + jnp.asarray(first, jnp.float32)}
    if not lines:
        return piece

    def together(name: str, before: Array, value: Array) -> Array:
        how = spec.CLASS_SUMS[LINES.get(name, name)].merge
        if how == "first":
            return jnp.where(piece["highest"] > lines["highest"], value, before)  # of equal ones the first
        return {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[how](before, value)

    return {name: together(name, lines[name], piece[name]) for name in lines}


@dataclasses.dataclass(frozen=True)
class _Block:
    """Some columns of a warpgroup's part of a tile of logits."""

    r: References
    vectors: dict[str, Array]
    """Those of ROW_VECTORS that there are, for its rows."""
    place: Array
    """Its first vocabulary entry."""
    column: Array
    """Each element's column, from the first."""
    here: Array | None
    """Which columns are in the vocabulary, or None where all are and none is a target."""

    def rows(self, name: str) -> Array:
        """A vector along the rows, broadcast."""
        return _along_rows(self.vectors[name], self.column.shape)

    def columns(self, name: str) -> Array:
        """A vector along the vocabulary, broadcast."""
        values = load(self.r[name], self.place, self.column.shape[1], COLUMN_LAYOUT)
        return _along_columns(values, self.column.shape)

    def scales(self, config: Logits) -> tuple[Factor, Factor | None]:
        """logit_scale and softcap, divided by the rows' temperatures: f(r) / T is f with these two."""
        if not config.each:
            return config.scale, config.cap
        cold = 1.0 / self.vectors["temperature"]
        scale, *cap = (_along_rows(cold * v, self.column.shape) for v in (config.scale, config.cap) if v is not None)
        return scale, cap[0] if cap else None

    def is_target(self) -> Array:
        return self.column == _along_rows(self.vectors["target"] - self.place, self.column.shape)

    def real(self, z: Array, nothing: float) -> Array:
        """z, or ``nothing`` past the vocabulary's end."""
        return z if self.here is None else jnp.where(self.here, z, nothing)


def _exponentials(config: Logits, b: _Block, z: Array) -> tuple[Array, dict[str, Array]]:
    """exp(z − anchor), 0 at the target and past the vocabulary, or for HELD the logit itself. And the rows' partial
    sums by name."""
    anchor = jnp.maximum(b.vectors["anchor"], spec.LOWEST_ANCHOR)
    gap = z - _along_rows(anchor, z.shape)
    e = jnp.exp2(gap * LOG2E)
    if b.here is not None:
        e = jnp.where(b.here, jnp.where(b.is_target(), 0.0, e), 0.0)
    lines = {"sum": jnp.sum(e, axis=1)}
    if config.entropy:
        lines["gap"] = jnp.sum(e * jnp.maximum(gap, spec.LOWEST_GAP), axis=1)
    if config.extremes:
        above = b.real(z, -jnp.inf)
        top = jnp.max(above, axis=1)
        # The first column that has it.
        first = jnp.where(above == _along_rows(top, z.shape), b.column, z.shape[1])
        lines |= {"highest": top, "argmax": jnp.min(first, axis=1).astype(jnp.float32)}
        lines["lowest"] = jnp.min(b.real(z, jnp.inf), axis=1)
        lines["squares"] = jnp.sum(e * e, axis=1) * spec.SQUARED_SCALE**2
    if config.sum_logits:
        counted = b.real(z, 0.0)
        if "class_weight" in b.r:
            counted = counted * b.columns("class_weight")
        lines["logit_sum"] = jnp.sum(counted, axis=1)
    if config.mode == HELD:
        return held_of(gap, b.r["e"].dtype), lines
    return sloped(e, z, b.scales(config)[1]) if config.mode == ANCHORED else e, lines


def _highest(config: Logits, b: _Block, z: Array) -> tuple[Array, dict[str, Array]]:
    """Each row's largest logit."""
    return z, {"highest": jnp.max(b.real(z, -jnp.inf), axis=1)}


def _known(config: Logits, b: _Block, z: Array) -> tuple[Array, dict[str, Array]]:
    """factor · slope · [p (alpha + gamma log p + delta p) − sigma k], ``element`` at the target, and 0 past the
    vocabulary."""
    e = known_share((z - b.rows("anchor")) - b.rows("log_total"), b.r, b.rows)
    if "sigma" in b.r:
        sigma = b.rows("sigma")
        e = e - (sigma * b.columns("class_weight") if "class_weight" in b.r else sigma)
    e = sloped(e, z, b.scales(config)[1]) * b.rows("factor")
    if b.here is not None:
        e = jnp.where(b.here, jnp.where(b.is_target(), b.rows("element"), e), 0.0)
    return e, {}


# ---------------------------------------------------------------------------------------------------------------------
# The two products of the gradients


def gradient_columns(row_tiles: int, size: int, parts: int = 1) -> int:
    """Columns of a gradient's tile, of ``size`` in all: those with which the programs' turns are shortest."""

    def turns(width: int) -> int:
        tiles = -(-row_tiles // pair()) * -(-size // width) * parts
        return -(-tiles // programs()) * width

    return min(HOPPER.gradient_columns, key=turns)


def _with_sums(
    r: References, part_of: Callable[[Ref, _Tile], Ref], names: tuple[str, ...], fresh: Array | None = None
) -> tuple[Callable[[_Tile], None], Callable[[_Tile, Index, Array], Array]]:
    """(begin, add) with which a product's tiles get what was summed before. The next pieces are always on their way.

    add(tile, number, piece): piece plus the number-th [64, 32] of the warpgroup's part of the sum, which lies in the
    matrix of that one name, or in the two of :func:`arithmetic.parted`. With ``fresh`` the sum holds nothing yet, and
    is not read.
    """
    if "arrived" not in r:
        return lambda tile: None, lambda tile, number, piece: piece
    arrived = r["arrived"]
    width = STAGED_FLOAT32

    def fetch(tile: _Tile, number: Index) -> None:
        slot = lax.rem(number, 2)
        for name in names:
            part = part_of(r[name], tile).at[:, pl.ds(number * width, width)]
            loading = r[f"loading_{name}"].at[tile.warpgroup, slot]
            plgpu.copy_gmem_to_smem(part, loading, arrived.at[tile.warpgroup * 2 + slot])

    def begin(tile: _Tile) -> None:
        @pl.when(tile.exists if fresh is None else tile.exists & (fresh == 0))
        def _() -> None:
            for number in range(2):
                fetch(tile, number)

    def added(tile: _Tile, number: Index, piece: Array) -> Array:
        slot = lax.rem(number, 2)
        plgpu.barrier_wait(arrived.at[tile.warpgroup * 2 + slot])
        loaded = [r[f"loading_{name}"][tile.warpgroup, slot] for name in names]
        summed = [plgpu.layout_cast(part, plgpu.Layout.WGMMA) for part in loaded]
        total = piece + (summed[0] if len(names) == 1 else joined(*summed))

        @pl.when(number + 2 < tile.width // width)
        def _() -> None:
            plgpu.commit_smem()
            fetch(tile, number + 2)

        return total

    def add(tile: _Tile, number: Index, piece: Array) -> Array:
        if fresh is None:
            return added(tile, number, piece)
        total: Array = lax.cond(fresh == 0, lambda: added(tile, number, piece), lambda: piece)
        return total

    return begin, add


def _staged_columns(staged: dict[str, DTypeLike], adds: bool) -> int:
    """Columns of the pieces in which a gradient's tile leaves. 16 bits alone leave room for 128 bytes of a row."""
    narrow = all(jnp.dtype(dtype).itemsize == 2 for dtype in staged.values())
    return STAGED if narrow and len(staged) == 1 and not adds else STAGED_FLOAT32


def _gradient_scratch(
    staged: dict[str, DTypeLike], width: int, added: dict[str, DTypeLike], turned: bool = False
) -> Scratch:
    """Shared memory for pieces of a gradient's tile, ``width`` columns each, and for what is added: dtypes by name."""
    shape = (WARPGROUP_ROWS, width) if turned else (width, WARPGROUP_ROWS)
    scratch: Scratch = {f"staging_{name}": _staging(dtype, *shape) for name, dtype in staged.items()}
    scratch |= {f"loading_{name}": _staging(dtype, STAGED_FLOAT32) for name, dtype in added.items()}
    if added:
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(added), num_barriers=2 * MULTIPLYING)
    return scratch


def hidden(
    arguments: Arguments, outputs: Shapes, *, adds: bool, turned: bool, across: bool = False, parts: int = 1
) -> dict[str, Array]:
    """dX of a chunk from S vocabulary entries, by position.

        value = e w        with factor: factor ⊙ (e w) + rest ⊙ target_rows, for what e's target's element lacks
        float32 out:       out[first + r] = value (+ out[first + r] with ``adds``, unless it is ``fresh``)
        low precision:     out[first + r] = scale · (value + smooth_r · weighted_rows)
        parts of depth:    out[row tiles · 128 · p + r] = value of the p-th part of the vocabulary, first 0

    Arguments:
        tiles: [1 + …] int32 as for :func:`logits`; first, start: [1] int32; w: [V, D], or turned [D, V].
        e: [C, S], or ``across`` [S, C]; it may be larger.
        columns: [1] int32, or none: how many vocabulary entries there are, at most S.
        factor, rest: [rows] float32, target_rows: [rows, D] w_y, in one pass.
        fresh: [1] int32, with ``adds``: whether out holds nothing yet.
        scale: [1] float32; smooth: [rows], weighted_rows: [tiles of D] float32, with label smoothing.
    ``outputs`` (or a reference, as with ``adds``): out [≥ first + C, D].
    """
    staged = {"out": {**outputs, **arguments}["out"].dtype}
    staged_columns = _staged_columns(staged, adds)

    def body(r: References) -> None:
        out, first = r["out"], _scalar(r, "first")
        size = r["w"].shape[0 if turned else 1]
        most_tiles = r["tiles"].shape[0] - 1
        columns = gradient_columns(most_tiles, size, parts)

        def part_of(matrix: Ref, tile: _Tile) -> Ref:
            behind = first + tile.row if parts == 1 else tile.part * (most_tiles * TILE_ROWS) + tile.row
            return matrix.at[pl.ds(behind, WARPGROUP_ROWS), pl.ds(tile.column, tile.width)]

        begin, add = _with_sums(r, part_of, ("out",), r["fresh"][0] if adds else None)

        def epilogue(tile: _Tile, _: None, value: Array) -> None:
            shape = (WARPGROUP_ROWS, staged_columns)

            def along(name: str) -> Array:
                return _along_rows(_of_rows(r, name, tile), shape)

            if "factor" in r:
                value = value * _along_rows(_of_rows(r, "factor", tile), tile.shape)

            def piece(number: Index, part: Array) -> Array:
                column, width = number * staged_columns, staged_columns
                if "rest" in r:
                    # What lies behind the last column is not stored.
                    inside = pl.multiple_of(jnp.minimum(tile.column + column, size - width), width)
                    rows = r["target_rows"].at[pl.ds(tile.row, WARPGROUP_ROWS), pl.ds(inside, width)]
                    share = along("rest") if parts == 1 else along("rest") * jnp.where(tile.part == 0, 1.0, 0.0)
                    part = part + share * load_matrix(rows)
                part = add(tile, number, part)
                if "smooth" in r:
                    weights = load(r["weighted_rows"], tile.column + column, width, COLUMN_LAYOUT)
                    part = part + along("smooth") * _along_columns(weights, shape)
                return part * r["scale"][0] if "scale" in r else part

            _store(tile, piece, value, staged_columns, {"out": r["staging_out"]}, {"out": part_of(out, tile)}, size)

        _product(
            _Operand(r["e"], depth_first=across),
            _Operand(r["w"], depth_first=not turned, start=_scalar(r, "start", turned), start_axis=int(turned)),
            (r["tiles"][0], pl.cdiv(size, columns)),
            pl.cdiv(_entries(r, r["e"].shape[0 if across else 1]), STEP * parts),
            tiles=dataclasses.replace(HOPPER.hidden_sum if adds else HOPPER.hidden, columns=columns),
            row_tile=lambda i: r["tiles"][i + 1],
            begin=begin,
            epilogue=epilogue,
            parts=parts,
        )

    scratch = _gradient_scratch(staged, staged_columns, staged if adds else {})
    options = (adds, turned, across, parts)
    return launch(body, arguments, outputs, name="hidden", options=options, grid=None, scratch=scratch)


def in_place_pairs(size: int, row_tiles: int) -> int:
    """How many pairs of programs make a dW with so many columns where e lies: whole rows of tiles at a time."""
    beside = -(-size // gradient_columns(row_tiles, size))
    if beside > programs():
        raise ValueError(
            f"plan: got one with lends=True for hidden states of {size} numbers, allowed on a device of "
            f"{programs() * pair()} multiprocessors is one without: dW in place needs {beside * pair()}"
        )
    return programs() // beside * beside


def weight(
    arguments: Arguments, outputs: Shapes, *, columns: int, adds: bool, turned: bool, in_place: bool = False
) -> dict[str, Array]:
    """dW of vocabulary entries start ≤ j < start + columns from a chunk.

        without scale:  sum = eᵀ x (+ sum with ``adds``, unless it is ``fresh``)
        with it:        out = scale · (eᵀ x + sum with ``adds`` − k_j smooth_x)
        with listed:    the same, with a row of ``listed`` added to some entries' sums

    The sum has 24 bits of float32, in two matrices: the upper 16 in ``out`` and the next 8 in ``low``.

    Arguments:
        rows: [1] int32: how many rows e and x have; start: [1] int32: the first vocabulary entry.
        columns: [1] int32, or none: how many entries there are, where there may be fewer than the keyword says.
        e: [C, S]; x: [C, D]; low: [V, D] int8, with ``adds``; scale: [1] float32.
        fresh: [1] int32: whether the sum holds nothing yet, with ``adds`` and without scale.
        high: [V, D], a sum's upper 16 bits that do not lie in out: with ``turned`` and ``adds``.
        smooth_x: [tiles of D], class_weight: [tiles of V] float32, with label smoothing.
        listed: [places, D], bounds, numbers, or none of them: see :class:`_Listed`.
    ``outputs`` (or references, as with ``adds``): out [V, D], and low without scale. Where e has no rows, sums stay as
    they are, and fresh ones become 0. ``turned``: out is [D, V]; a sum is not.

    ``in_place``: e is none of the arguments. eᵀ is the first columns of out, or e its first rows if that is turned. All
    column tiles of a row tile read the same part of e, and are stored over it. So each counts itself in the row tile's
    semaphore when its operands have come, and is stored when all have.

    Nobody waits for ever. The column tiles of a row tile are neighbours in the order of tiles, and each has a program
    of its own (:func:`in_place_pairs`). Programs take tiles in that order, and all of them run: there are no more than
    the device has multiprocessors. So the first row tile that is not complete waits for products alone.
    """
    final, high, most_tiles = "scale" in arguments, "high" if turned else "out", -(-columns // TILE_ROWS)
    dtype = {**outputs, **arguments}["out"].dtype
    staged = {"out": dtype} if final else {"out": dtype, "low": jnp.int8}
    staged_columns = _staged_columns(staged, adds)

    def body(r: References) -> None:
        start = _scalar(r, "start", turned)
        rows = r["rows"][0]
        row_tiles: Index = pl.cdiv(_entries(r, columns), TILE_ROWS)
        tile_columns = gradient_columns(most_tiles, r["x"].shape[1])
        fresh = r["fresh"][0] if "fresh" in r else None
        if fresh is not None:
            row_tiles = jnp.where((rows > 0) | (fresh > 0), row_tiles, 0)

        def part_of(matrix: Ref, tile: _Tile, turned: bool = False) -> Ref:
            rows, columns = pl.ds(start + tile.row, WARPGROUP_ROWS), pl.ds(tile.column, tile.width)
            return matrix.at[columns, rows] if turned else matrix.at[rows, columns]

        begin, add = _with_sums(r, part_of, (high, "low"), fresh)
        e, across = r.get("e", r["out"]), in_place and not turned
        column_tiles = pl.cdiv(r["x"].shape[1], tile_columns)
        # The interpreter has no semaphores. There e is a copy.
        waits = in_place and "e" not in r
        readers = pl.get_global(plgpu.SemaphoreType.REGULAR((most_tiles * MULTIPLYING,))) if waits else None

        def arrived(tile: _Tile) -> None:
            if readers is not None:
                pl.when(tile.exists)(lambda: pl.semaphore_signal(readers.at[tile.number]))

        def epilogue(tile: _Tile, _: None, value: Array) -> None:
            shape = (WARPGROUP_ROWS, staged_columns)
            if readers is not None:
                pl.semaphore_wait(readers.at[tile.number], column_tiles, decrement=False)

            def piece(number: Index, part: Array) -> Array:
                column, width = number * staged_columns, staged_columns
                part = add(tile, number, part)
                if "smooth_x" in r:
                    share = _along_columns(load(r["smooth_x"], tile.column + column, width, COLUMN_LAYOUT), shape)
                    if "class_weight" in r:
                        k = load(r["class_weight"], start + tile.row, WARPGROUP_ROWS, ROW_LAYOUT)
                        share = share * _along_rows(k, shape)
                    part = part - share
                return part * r["scale"][0] if final else part

            to = {name: part_of(r[name], tile, turned) for name in staged}
            staging, width = {name: r[f"staging_{name}"] for name in staged}, r["x"].shape[1]
            _store(tile, piece, value, staged_columns, staging, to, width, turned)

        tiles = dataclasses.replace(HOPPER.weight_sum if adds else HOPPER.weight, columns=tile_columns)
        _product(
            _Operand(e, depth_first=not across),
            _Operand(r["x"], depth_first=True),
            (row_tiles, column_tiles),
            lax.div(rows + (STEP - 1), STEP),
            tiles=dataclasses.replace(tiles, group=pair()) if in_place else tiles,
            row_tile=lambda i: i,
            begin=begin,
            epilogue=epilogue,
            listed=_Listed(r["listed"], r["bounds"], r["numbers"]) if "listed" in r else None,
            arrived=arrived,
        )

    scratch = _gradient_scratch(staged, staged_columns, {high: dtype, "low": jnp.int8} if adds else {}, turned)
    options = (columns, adds, turned, in_place)
    pairs = in_place_pairs(arguments["x"].shape[1], most_tiles) if in_place and "e" not in arguments else None
    return launch(body, arguments, outputs, name="weight", options=options, grid=None, scratch=scratch, pairs=pairs)
