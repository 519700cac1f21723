"""The Pallas Mosaic GPU kernels of the target-anchored chunk; jax_impl/kernels/fused.py calls them. Mirror of
torch_impl/kernels/portable.py.

Rows and positions. Ignored tokens are left out: ``order`` lists the valid tokens first, ``count`` is their number, both
on the device. A *position* p counts valid tokens; ``order[p]`` is the token. A chunk is the positions first ≤ p <
first + C; its *row* r is p − first. What a kernel works on is said by arrays on the device (how many row tiles, which),
so a chunk of ignored tokens costs a launch and nothing more, and the host never waits.

The matrices of a chunk, row-major:

    x  [C, D]   hidden states of the rows; zero where no row exists
    e  [C, S]   exponentials (or the gradient itself, where lse is known) over S vocabulary entries, S a multiple of 64;
                zero past the vocabulary's end. Rows past the last row's tile are not written.

Every product is one persistent kernel of three warpgroups: two multiply, each 64 rows of a tile [128, 256] or, in turn,
each a tile [128, 192]; the third copies operands by TMA, which fills with zero what lies outside a matrix and stores
nothing there. Programs come in pairs (clusters) that share the operand of their tiles' columns. Vectors along rows are
padded to whole tiles by the caller, those along the vocabulary or D as well.

Every sum has a fixed order: the results are the same bit by bit from run to run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from logitless import spec
from logitless.hardware import HOPPER

# Its load and some names differ between the two lines of jax that are supported.
_PLGPU: Any = plgpu
LOG2E = math.log2(math.e)
NO_ROW = spec.NO_ROW

# A product's tile, half of its rows for each multiplying warpgroup, and the depth of one step; the columns of a tile of
# which one warpgroup has all rows.
TILE_ROWS, TILE_COLUMNS, STEP = 128, 256, 64
TURN_COLUMNS = 192
WARPGROUP_ROWS = TILE_ROWS // 2
# Of a gradient's tiles, the better first.
GRADIENT_COLUMNS = (256, 192)
MULTIPLYING = 2
# Rows that are moved together: chunks and slices begin at a multiple.
TILING = 8
STAGES = 4
# Programs of a pair work on two row tiles and the same columns, whose operand each loads half of, for both.
PAIR = 2
# How many steps the second multiplying warpgroup lags behind the first; registers of a thread that loads or multiplies.
SKEW = 1
LOADING_REGISTERS, MULTIPLYING_REGISTERS = (40, 24), (232, 240)  # with half of every tile, and with tiles in turn
# Columns of a tile that are stored at a time: of e, and of gradients, which may come with float32 sums. 128 bytes each.
STAGED, STAGED_FLOAT32 = 64, 32

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)


def interpreted() -> bool:
    """Whether a kernel that is traced now is interpreted on the CPU."""
    return os.environ.get("LOGITLESS_PALLAS_INTERPRET") == "1"


def can_interpret() -> bool:
    """Whether this jax has the interpreter."""
    return bool(jax.__version_info__ >= (0, 11))


def pair() -> int:
    """Programs of a pair. The interpreter knows no clusters."""
    return 1 if interpreted() else PAIR


def programs() -> int:
    """Pairs of persistent programs: one program per multiprocessor."""
    if interpreted():
        return 2
    device = jax.devices()[0]
    return (int(device.core_count) if device.platform == "gpu" else HOPPER.multiprocessors) // pair()


def _refuse(context: Any, *_: Any) -> Any:
    device = " and ".join(context.module_context.platforms)
    raise spec.unavailable_error("pallas", spec.needs_cuda(device), usable="xla")


# Its argument, in what is compiled for a CUDA device. Only then is the device known: what is traced on a machine that
# has none may be compiled for another.
_on_cuda: Any = Primitive("logitless_on_cuda")
_on_cuda.def_impl(lambda array: array)
_on_cuda.def_abstract_eval(lambda array: array)
batching.defvectorized(_on_cuda)
mlir.register_lowering(_on_cuda, lambda _, array: [array], platform="cuda")
mlir.register_lowering(_on_cuda, _refuse)


def launch(
    body: Callable[[dict[str, Any]], None], arguments: dict[str, Any], outputs: dict[str, Any], *, name: str,
    grid: int, threads: int | None, scratch: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run ``body`` on references by name. An argument that is a jax.Ref is written in place: read it by ``written``.
    With ``threads`` (warpgroups), the grid is of pairs of programs.

    The barriers keep XLA from fusing a slice of an argument, or the place in a larger array that an output goes to,
    with the kernel (dynamic_slice_fusion), as it does under jax.vmap and lax.scan. Such a fusion loses what a kernel
    writes in place, and its addresses are not aligned as the kernels need (seen with jax 0.11.2).
    """
    names = (*arguments, *outputs)

    def kernel(*references: Any) -> None:
        def scoped(**scratch_references: Any) -> None:
            body(dict(zip(names, references, strict=True)) | scratch_references)

        pl.run_scoped(scoped, collective_axes="warpgroup" if threads else (), **(scratch or {}))

    threaded: dict[str, Any] = {}
    if threads is not None:
        threaded = {"num_threads": threads, "thread_name": "warpgroup"}
        if pair() > 1:
            threaded |= {"cluster": (pair(),), "cluster_names": ("pair",)}
    # Not plgpu.kernel: its rule for jax.vmap refuses references in jax 0.10.
    call: Any = pl.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        mesh=plgpu.Mesh(grid=(grid,), grid_names=("program",), **threaded),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=_PLGPU.InterpretGPUParams(detect_races=True) if interpreted() else None,
        name=name,
    )
    known = (lambda a: a) if interpreted() else _on_cuda.bind
    given = [a if isinstance(a, jax.Ref) else lax.optimization_barrier(known(a)) for a in arguments.values()]
    with jax.enable_x64(False):  # kernels count in 32 bits
        made = call(*given)
    return dict(zip(outputs, lax.optimization_barrier(made), strict=True))


def reference(value: Array) -> Any:
    """A jax.Ref for kernels to write to, behind a barrier as every other argument of theirs (:func:`launch`)."""
    return jax.new_ref(lax.optimization_barrier(value))


def written(reference: Any) -> Array:
    """What a jax.Ref holds after the kernels that write to it."""
    value: Array = lax.optimization_barrier(reference[...])
    return value


def load(reference: Any, start: Array | int, size: int, layout: Any) -> Array:
    """``size`` elements of a vector from ``start``, laid out along a product's rows or columns."""
    part = reference.at[pl.ds(start, size)]
    before = ((),) if jax.__version_info__ < (0, 11) else ()
    values: Array = _PLGPU.load(part, *before, layout=layout, optimized=False)
    return values


def _scalar(r: dict[str, Any], name: str) -> Any:
    """The first row of a chunk, or the first entry of a slice of the vocabulary: a multiple of TILING."""
    return pl.multiple_of(r[name][0], TILING)


def _along_rows(vector: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(vector, shape, [0])


def _along_columns(vector: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(vector, shape, [1])


def _transposed(reference: Any) -> Any:
    if jax.__version_info__ < (0, 11):
        return _PLGPU.transpose_ref(reference, (1, 0))
    return reference.transpose((1, 0))


def _transforms(dtype: Any, width: int) -> tuple[Any, ...]:
    """How [rows, width] lies in shared memory, for TMA and for the tensor cores."""
    swizzle = min(128, width * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((TILING, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


# ---------------------------------------------------------------------------------------------------------------------
# Products


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A matrix of a product in global memory."""

    reference: Any
    depth_first: bool
    """Whether its first axis is the product's depth."""
    start: Any = 0
    """Where along its first axis the product begins."""

    def shape(self, width: int) -> tuple[int, int]:
        """Of one step's block."""
        return (STEP, width) if self.depth_first else (width, STEP)

    def block(self, width: int, tile: Any, k: Any) -> Any:
        """The part of the matrix that step k of a tile reads."""
        if self.depth_first:
            return self.reference.at[pl.ds(self.start + k * STEP, STEP), pl.ds(tile * width, width)]
        return self.reference.at[pl.ds(self.start + tile * width, width), pl.ds(k * STEP, STEP)]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Where a warpgroup's part of a tile lies, half of it or all: its first row and column; the tile's number along
    both."""

    m: Array
    n: Array
    warpgroup: Array
    width: int
    exists: Array
    """Not where a pair's second row tile would be behind the last."""
    height: int = WARPGROUP_ROWS

    @property
    def number(self) -> Array:
        """Which ``height`` rows these are."""
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
    """As many rows as a pair's blocks of listed rows may begin with."""
    return pair_rows() + TILING


@dataclasses.dataclass(frozen=True)
class _Listed:
    """Rows that are added to some of a product's rows: more steps of the tiles that have such rows.

    Their left operand is the 0s and 1s that say which row of the tile each listed one belongs to.
    """

    rows: Any
    """[places, columns of the product], in the order of the product's rows."""
    bounds: Array
    """Where the rows of each pair of row tiles begin, and where the last end. A pair's first block begins at the
    multiple of TILING before."""
    numbers: Array
    """[pairs · listed_rows() + STEP] int32: which of its pair's rows each row of its blocks is; −1 where it is none."""

    def pair(self, tile: _Tile) -> Array:
        return lax.div(tile.m, pair())

    def first(self, tile: _Tile) -> Array:
        return lax.div(self.bounds[self.pair(tile)], TILING) * TILING

    def steps(self, tile: _Tile) -> Array:
        begin, end = (self.bounds[self.pair(tile) + side] for side in (0, 1))
        return jnp.where(begin < end, lax.div(end - self.first(tile) + (STEP - 1), STEP), 0)

    def block(self, tile: _Tile, k: Array | int) -> Any:
        first = pl.multiple_of(self.first(tile) + k * STEP, TILING)
        return self.rows.at[pl.ds(first, STEP), pl.ds(tile.column, tile.width)]

    def ask(self, tile: _Tile, k: Array | int) -> Array:
        """Which rows of the pair step k has: [STEP]."""
        return load(self.numbers, self.pair(tile) * listed_rows() + k * STEP, STEP, ROW_LAYOUT)

    def chosen(self, tile: _Tile, asked: Array, dtype: jnp.dtype) -> Array:
        """[STEP, rows of the warpgroup's part]: 1 where a listed row is the tile's."""
        shape = (STEP, tile.height)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        here = row == _along_rows(asked - (tile.row - self.pair(tile) * pair_rows()), shape)
        return jnp.where(here, 1.0, 0.0).astype(dtype)


def _of_rows(r: dict[str, Any], name: str, tile: _Tile) -> Array:
    """The tile's part of a vector along the rows."""
    return load(r[name], tile.row, tile.height, ROW_LAYOUT)


def _product(
    a: _Operand, b: _Operand, tiles: tuple[Any, Any], steps: Any, *, group: int, row_tile: Callable[[Any], Any],
    begin: Callable[[_Tile], Any], epilogue: Callable[[_Tile, Any, Any], None], stages: int = STAGES,
    width: int = TILE_COLUMNS, in_turn: bool = False, listed: _Listed | None = None,
) -> None:  # fmt: skip
    """Σ_k a_ik b_kj over ``steps`` blocks of depth, for tiles[0] × tiles[1] tiles, ``width`` columns wide, that the
    programs share.

    ``row_tile`` says which row tile the i-th is. The tile numbers go through the columns in groups of ``group`` row
    tiles, for the L2 cache. begin(tile) runs before a tile's first multiplication, epilogue(tile, what begin returned,
    value) after the last, both in the multiplying warpgroups; value is [64, width] float32 in registers, or in turn
    [128, width].

    The steps of all of a program's tiles go through ``stages`` slots of shared memory. ``ready[s]``: slot s was loaded;
    ``free[s]``: every warpgroup that multiplies it, in both programs of the pair, has done so; ``turn[1]``: the second
    warpgroup may begin its tile, SKEW steps behind the first, so that one's epilogue runs beside the other's products.

    ``in_turn``: each warpgroup has every other one of the program's tiles for itself, and all of one's
    epilogue runs beside the other's products. Each waits for its own steps only, by a ``ready`` of its own for
    every slot (a barrier must be waited for in every phase); ``turn[w]``: warpgroup w may begin a tile, as the other
    has asked for the last product of its own.

    ``listed``: rows that are added to the sum, in steps behind the tile's own; a is depth first then, and every row
    tile in its place.
    """
    shapes = a.shape(TILE_ROWS), b.shape(width)
    dtype = a.reference.dtype
    paced = jnp.asarray(steps) >= stages  # else the first warpgroup could be two tiles ahead
    paired = pair() > 1
    pairs = pl.cdiv(tiles[0], pair()), tiles[1]
    height = TILE_ROWS if in_turn else WARPGROUP_ROWS
    barrier: Any = functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",)) if paired else plgpu.Barrier

    @functools.partial(
        pl.run_scoped,
        a_slots=plgpu.SMEM((stages, *shapes[0]), dtype, transforms=_transforms(dtype, STEP)),
        b_slots=plgpu.SMEM((stages, *shapes[1]), dtype, transforms=_transforms(dtype, STEP)),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages * (MULTIPLYING if in_turn else 1)),
        free=barrier(num_arrivals=1 if in_turn else MULTIPLYING, num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=MULTIPLYING),
        collective_axes="warpgroup",
    )
    def scope(a_slots: Any, b_slots: Any, ready: Any, free: Any, turn: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        rows = pl.ds(0 if in_turn else warpgroup * height, height)

        def each_tile(work: Callable[[_Tile, Any], None]) -> None:
            """work(tile, its first step's number) for the program's tiles."""

            @plgpu.nd_loop((pairs[0] * pairs[1],), collective_axes="program", init_carry=jnp.int32(0))
            def _(info: Any, carry: Array) -> Array:
                i, n = plgpu.planar_snake(info.index[0], pairs, 0, group // pair())
                i = i * PAIR + lax.axis_index("pair") if paired else i
                exists = i < tiles[0]  # or the pair's other program has the last row tile
                m = row_tile(jnp.minimum(i, tiles[0] - 1))
                owner = lax.rem(info.local_index, MULTIPLYING) if in_turn else warpgroup
                tile = _Tile(m, n, owner, width, exists, height)
                own = (warpgroup == MULTIPLYING) | (warpgroup == owner) if in_turn else True
                pl.when(own)(lambda: work(tile, carry))
                return carry + all_steps(tile)

        def all_steps(tile: _Tile) -> Array:
            return jnp.asarray(steps if listed is None else steps + listed.steps(tile))

        def loaded(tile: _Tile, slot: Any) -> Any:
            return ready.at[tile.warpgroup * stages + slot if in_turn else slot]

        def load(tile: _Tile, number: Any) -> None:
            def step(k: Array, own: Any, shared: Any) -> None:
                slot = lax.rem(number + k, stages)
                plgpu.barrier_wait(free.at[slot])
                plgpu.copy_gmem_to_smem(own, a_slots.at[slot], loaded(tile, slot))
                receivers = "pair" if paired else None
                plgpu.copy_gmem_to_smem(shared, b_slots.at[slot], loaded(tile, slot), collective_axes=receivers)

            def own_step(k: Array, _: None) -> None:
                step(k, a.block(TILE_ROWS, tile.m, k), b.block(width, tile.n, k))

            def listed_step(of: _Listed, k: Array, _: None) -> None:
                # Of a any block will do: ready expects two.
                step(steps + k, a.block(TILE_ROWS, tile.m, 0), of.block(tile, k))

            lax.fori_loop(0, steps, own_step, None)
            if listed is not None:
                lax.fori_loop(0, listed.steps(tile), functools.partial(listed_step, listed), None)

        def multiply(tile: _Tile, number: Any) -> None:
            @functools.partial(pl.run_scoped, total=_PLGPU.ACC((height, width), jnp.float32))
            def accumulate(total: Any) -> None:
                begun = begin(tile)
                asked = None if listed is None else listed.ask(tile, 0)
                waits = True if in_turn else paced & (warpgroup == 1)
                pl.when(waits)(lambda: plgpu.barrier_wait(turn.at[tile.warpgroup]))

                def step(k: Array, left: Array | None = None) -> None:
                    slot = lax.rem(number + k, stages)
                    plgpu.barrier_wait(loaded(tile, slot))
                    if left is not None:
                        a_slots[slot, :, rows] = left
                        plgpu.commit_smem()
                    mine = _transposed(a_slots.at[slot, :, rows]) if a.depth_first else a_slots.at[slot, rows]
                    plgpu.wgmma(total, mine, b_slots.at[slot] if b.depth_first else _transposed(b_slots.at[slot]))
                    plgpu.wgmma_wait(1)
                    before = lax.rem(number + k + stages - 1, stages)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

                def own_step(k: Array, _: None) -> None:
                    step(k)
                    if not in_turn:
                        pl.when(paced & (warpgroup == 0) & (k == SKEW))(lambda: plgpu.barrier_arrive(turn.at[1]))

                def listed_step(of: _Listed, k: Array, asked: Array) -> Array:
                    step(steps + k, of.chosen(tile, asked, dtype))
                    return of.ask(tile, k + 1)

                lax.fori_loop(0, steps, own_step, None)
                if listed is not None:
                    lax.fori_loop(0, listed.steps(tile), functools.partial(listed_step, listed), asked)
                if in_turn:
                    plgpu.barrier_arrive(turn.at[1 - tile.warpgroup])
                value = total[...]
                last = lax.rem(number + all_steps(tile) + stages - 1, stages)
                pl.when(all_steps(tile) > 0)(lambda: plgpu.barrier_arrive(free.at[last]))
                pl.when(tile.exists)(lambda: epilogue(tile, begun, value))

        @pl.when(warpgroup == MULTIPLYING)
        def _() -> None:
            plgpu.set_max_registers(LOADING_REGISTERS[in_turn], action="decrease")
            each_tile(load)
            for slot in range(stages):  # nothing of the pair is on its way to this program any more
                plgpu.barrier_wait(free.at[slot])

        @pl.when(warpgroup < MULTIPLYING)
        def _() -> None:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS[in_turn], action="increase")

            @pl.when(warpgroup == 0 if in_turn else True)
            def _() -> None:
                for slot in range(stages):
                    plgpu.barrier_arrive(free.at[slot])

            if in_turn:
                pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            each_tile(multiply)
            if in_turn:  # whose turn it would be next
                taken = pl.cdiv(pairs[0] * pairs[1] - lax.axis_index("program"), lax.axis_size("program"))
                pl.when(lax.rem(taken, MULTIPLYING) == warpgroup)(lambda: plgpu.barrier_wait(turn.at[warpgroup]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _staging(dtype: Any, width: int, height: int = WARPGROUP_ROWS) -> Any:
    """Shared memory for parts of a tile on their way: per warpgroup, two slots [height, width]."""
    return plgpu.SMEM((MULTIPLYING, 2, height, width), dtype, transforms=_transforms(dtype, width))


def _pieces(tile: _Tile, size: int, width: int) -> int:
    """How many pieces of a tile's row may lie inside a matrix of ``size`` columns.

    What lies outside must not be asked for where the matrix is one piece wide: TMA is not told of an axis of length 1.
    """
    return 1 if size <= width else tile.width // width


def _store(
    tile: _Tile, piece: Callable[[int, int], Any], width: int, staging: dict[str, Any], to: dict[str, Any], size: int
) -> None:  # fmt: skip
    """A warpgroup's part of a tile, piece(column, width) at a time, by TMA ``to`` its part of a matrix of ``size``
    columns: rounded to "out", or to "out" and "low" (:func:`_parted`)."""
    pieces = _pieces(tile, size, width)
    for number in range(pieces):
        slot = number % 2
        value, dtype = piece(number * width, width), staging["out"].dtype
        parts = _parted(value, dtype) if "low" in to else (value.astype(dtype),)
        # One piece may be on its way, but not from this slot: an odd number of pieces ends where the next tile begins.
        plgpu.wait_smem_to_gmem(0 if number == 0 and pieces % 2 else 1, wait_read_only=True)
        for name, part in zip(to, parts, strict=True):
            staging[name][tile.warpgroup, slot] = part
        plgpu.commit_smem()
        for name, matrix in to.items():
            place = matrix.at[:, pl.ds(number * width, width)]
            last = name == tuple(to)[-1]
            plgpu.copy_smem_to_gmem(staging[name].at[tile.warpgroup, slot], place, commit_group=last)


# ---------------------------------------------------------------------------------------------------------------------
# The first product

# What lies along the rows, of which a tile reads its own.
ROW_VECTORS = ("target", "anchor", "log_total", "factor", "element", "alpha", "gamma", "sigma")

# What its epilogue makes.
SUMS = "sums"  # sums per row only
ANCHORED = "anchored"  # sums, and exponentials relative to the anchor, 0 at the target
KNOWN = "known"  # the gradient's matrix, from lse
HIGHEST = "highest"  # the largest logit of every row
# Where each warpgroup has whole tiles: the epilogue works piece by piece.
IN_TURN = (ANCHORED, KNOWN)


@dataclasses.dataclass(frozen=True)
class Logits:
    """What is the same for every tile of a first product."""

    mode: str
    columns: int
    """Vocabulary entries, without padding."""
    scale: float = 1.0
    cap: float | None = None
    entropy: bool = False
    extremes: bool = False
    """The largest logit of every row and where it first is, and the smallest."""
    sum_logits: bool = False
    group: int = 8

    @property
    def in_turn(self) -> bool:
        """Whether each warpgroup has whole tiles; not where softcap or statistics need many registers."""
        return self.mode in IN_TURN and self.cap is None and self.lines in (("sum",), ())

    @property
    def shape(self) -> tuple[int, int]:
        """What a warpgroup has of a tile."""
        return (TILE_ROWS, TURN_COLUMNS) if self.in_turn else (WARPGROUP_ROWS, TILE_COLUMNS)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.shape[1])

    @property
    def lines(self) -> tuple[str, ...]:
        """Names of the partial sums that it writes."""
        if self.mode == KNOWN:
            return ()
        if self.mode == HIGHEST:
            return ("highest",)
        made = ["sum"] + ["gap"] * self.entropy + ["highest", "lowest", "argmax"] * self.extremes
        return (*made, *["logit_sum"] * self.sum_logits)


def tanh(t: Any) -> Any:
    """tanh in float32: an odd polynomial near 0, where 1 − e⁻²ᵗ would cancel."""
    magnitude, square = jnp.abs(t), t * t
    small = t * (
        1.0 + square * (-0.333333333 + square * (0.133333333 + square * (-0.0539682540 + square * 0.0218694885)))
    )
    decay = jnp.exp2(magnitude * (LOG2E * -2.0))
    large = (1.0 - decay) / (1.0 + decay)
    large = jnp.where(t < 0.0, -large, large)
    return jnp.where(magnitude < 0.15, small, large)


def _capped(z: Any, config: Logits) -> Any:
    """f(r): logit_scale, then softcap."""
    if config.scale != 1.0:
        z = z * config.scale
    return z if config.cap is None else config.cap * tanh(z * (1.0 / config.cap))


def _sloped(e: Any, z: Any, config: Logits) -> Any:
    """e times the softcap's derivative, 1 − (z / cap)²."""
    if config.cap is None:
        return e
    part = z * (1.0 / config.cap)
    return e * (1.0 - part * part)


def logits(config: Logits, arguments: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """z = f(x wᵀ + b) for vocabulary entries start ≤ j < start + columns, never stored; of it the sums of its rows
    (column tile n writes line n of each [n, rows] buffer) and its block of e.

    Arguments:
        tiles: [1 + ⌈C / 128⌉] int32: how many row tiles, then which.
        start: [1] int32: the first vocabulary entry; limit: [1] int32, where there is one: entries from there on count
            as past the end.
        x [C, D], w [V, D]; bias [tiles of V] float32 if there is one; target [rows] int32; anchor [rows] float32.
        hits: [rows / config.shape[0], column tiles] int32: how many targets lie in a warpgroup's part of a tile.
        class_weight: [tiles of V] float32, where logits are summed or sigma is given.
        log_total, factor, element, and alpha, gamma, sigma if they are not trivial: [rows] float32, for KNOWN.
    ``outputs`` (or arguments that are references): e [C, S], and config.lines [column tiles, rows]; argmax is the
    column within the tile, as float32.
    """

    def body(r: dict[str, Any]) -> None:
        start = _scalar(r, "start")
        end: Any = config.columns
        if "limit" in r:
            end = jnp.minimum(end, r["limit"][0] - start)

        def begin(tile: _Tile) -> tuple[Any, dict[str, Any]]:
            """Asked for here, waited for after the products."""
            vectors = {name: _of_rows(r, name, tile) for name in ROW_VECTORS if name in r}
            return r["hits"][tile.number, tile.n], vectors

        def epilogue(tile: _Tile, begun: tuple[Any, dict[str, Any]], value: Any) -> None:
            """Most tiles have no target and lie inside the vocabulary: theirs is shorter."""
            careful = (tile.column + tile.width > end) | (begun[0] > 0)
            lax.cond(careful, lambda: finish(tile, begun[1], value, True), lambda: finish(tile, begun[1], value, False))

        def finish(tile: _Tile, vectors: dict[str, Any], value: Any, careful: bool) -> None:
            lines: dict[str, Any] = {}

            def piece(first: int, width: int) -> Any:
                """e of some columns; their sums are added to the lines."""
                z, place = value[:, first : first + width], tile.column + first
                if "bias" in r:
                    z = z + _along_columns(load(r["bias"], start + place, width, COLUMN_LAYOUT), z.shape)
                z = _capped(z, config)
                column = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
                here = column < end - place if careful else None
                make = {SUMS: _exponentials, ANCHORED: _exponentials, KNOWN: _known, HIGHEST: _highest}[config.mode]
                e, made = make(config, _Block(r, vectors, start + place, column, here), z)
                for name, values in made.items():  # only sums come in several pieces
                    lines[name] = lines[name] + values if name in lines else values
                return e

            if "e" in r:
                whole = None if config.in_turn else piece(0, tile.width).astype(r["e"].dtype)
                to = r["e"].at[pl.ds(tile.row, tile.height), pl.ds(tile.column, tile.width)]
                parts = piece if whole is None else lambda first, width: whole[:, first : first + width]
                _store(tile, parts, STAGED, {"out": r["staging"]}, {"out": to}, r["e"].shape[1])
            else:
                piece(0, tile.width)
            for name, values in lines.items():
                r[name][tile.n, pl.ds(tile.row, tile.height)] = values

        _product(
            _Operand(r["x"], depth_first=False),
            _Operand(r["w"], depth_first=False, start=start),
            (r["tiles"][0], config.column_tiles),
            pl.cdiv(r["x"].shape[1], STEP),
            group=config.group,
            row_tile=lambda i: r["tiles"][i + 1],
            begin=begin,
            epilogue=epilogue,
            width=config.shape[1],
            in_turn=config.in_turn,
        )

    holds = config.mode in (ANCHORED, KNOWN)
    scratch = {"staging": _staging(arguments["x"].dtype, STAGED, config.shape[0])} if holds else {}
    return launch(
        body, arguments, outputs, name=f"logits_{config.mode}", grid=programs(), threads=MULTIPLYING + 1,
        scratch=scratch,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Block:
    """Some columns of a warpgroup's part of a tile of logits."""

    r: dict[str, Any]
    vectors: dict[str, Any]
    """Of ROW_VECTORS those that there are, for its rows."""
    place: Any
    """Its first vocabulary entry."""
    column: Any
    """The number of each element's column in it."""
    here: Any
    """Which columns are in the vocabulary, or None where all are and none is a target."""

    def rows(self, name: str) -> Any:
        """A vector along the rows, broadcast."""
        return _along_rows(self.vectors[name], self.column.shape)

    def columns(self, name: str) -> Any:
        """A vector along the vocabulary, broadcast."""
        values = load(self.r[name], self.place, self.column.shape[1], COLUMN_LAYOUT)
        return _along_columns(values, self.column.shape)

    def is_target(self) -> Any:
        return self.column == _along_rows(self.vectors["target"] - self.place, self.column.shape)

    def real(self, z: Any, nothing: float) -> Any:
        """z, or ``nothing`` past the vocabulary's end."""
        return z if self.here is None else jnp.where(self.here, z, nothing)


def _exponentials(config: Logits, b: _Block, z: Any) -> tuple[Any, dict[str, Any]]:
    """exp(z − anchor), 0 at the target and past the vocabulary; and the rows' partial sums by name."""
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
        # The first column that holds it: columns are exact in float32.
        first = jnp.where(above == _along_rows(top, z.shape), -b.column.astype(jnp.float32), -float(z.shape[1]))
        lowest = -jnp.max(-b.real(z, jnp.inf), axis=1)
        lines |= {"highest": top, "argmax": -jnp.max(first, axis=1), "lowest": lowest}
    if config.sum_logits:
        counted = b.real(z, 0.0)
        if "class_weight" in b.r:
            counted = counted * b.columns("class_weight")
        lines["logit_sum"] = jnp.sum(counted, axis=1)
    return _sloped(e, z, config) if config.mode == ANCHORED else e, lines


def _highest(config: Logits, b: _Block, z: Any) -> tuple[Any, dict[str, Any]]:
    """Each row's largest logit."""
    return z, {"highest": jnp.max(b.real(z, -jnp.inf), axis=1)}


def _known(config: Logits, b: _Block, z: Any) -> tuple[Any, dict[str, Any]]:
    """factor · slope · [p (alpha + gamma log p) − sigma k], with ``element`` at the target; 0 past the vocabulary."""
    gap = (z - b.rows("anchor")) - b.rows("log_total")
    e = jnp.exp2(gap * LOG2E)
    if "alpha" in b.r:
        coefficient = b.rows("alpha")
        if "gamma" in b.r:
            coefficient = coefficient + b.rows("gamma") * jnp.maximum(gap, spec.LOWEST_GAP)
        e = e * coefficient
    if "sigma" in b.r:
        sigma = b.rows("sigma")
        e = e - (sigma * b.columns("class_weight") if "class_weight" in b.r else sigma)
    e = _sloped(e, z, config) * b.rows("factor")
    if b.here is not None:
        e = jnp.where(b.here, jnp.where(b.is_target(), b.rows("element"), e), 0.0)
    return e, {}


# ---------------------------------------------------------------------------------------------------------------------
# The two products of the gradients


def gradient_columns(row_tiles: int, size: int) -> int:
    """How wide a gradient's tiles are over ``size`` columns: the width with which the programs' turns are shortest."""

    def turns(width: int) -> int:
        tiles = -(-row_tiles // pair()) * -(-size // width)
        return -(-tiles // programs()) * width

    return min(GRADIENT_COLUMNS, key=turns)


def _parted(value: Any, dtype: Any) -> tuple[Any, Any]:
    """The upper 16 bits of float32, as ``dtype``, and the next 8, rounded. (A NaN as it is: what is added would run
    into its sign.)"""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    bits = jnp.where(value == value, bits + 0x80, bits)
    high = lax.shift_right_logical(bits, jnp.int32(16)).astype(jnp.int16)
    low = lax.shift_right_logical(bits, jnp.int32(8)).astype(jnp.int8)
    return lax.bitcast_convert_type(high, dtype), low


def _joined(high: Any, low: Any) -> Any:
    """float32 from its upper 16 and the next 8 bits."""
    upper = lax.bitcast_convert_type(high, jnp.int16).astype(jnp.int32)
    lower = low.astype(jnp.int32) & 0xFF
    bits = lax.shift_left(upper, jnp.int32(16)) | lax.shift_left(lower, jnp.int32(8))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _with_sums(
    r: dict[str, Any], part_of: Callable[[Any, _Tile], Any], names: tuple[str, ...]
) -> tuple[Callable[[_Tile], None], Callable[[_Tile, int, Any], Any]]:
    """How a product's tile gets what was summed before: (begin, add), with the next pieces always on their way.

    add(tile, number, piece): piece plus the number-th [64, 32] of the warpgroup's part of the sum: the matrix
    ``names`` names, or both of its parts.
    """
    if "arrived" not in r:
        return lambda tile: None, lambda tile, number, piece: piece
    arrived = r["arrived"]
    width = STAGED_FLOAT32

    def fetch(tile: _Tile, number: int) -> None:
        slot = number % 2
        for name in names:
            part = part_of(r[name], tile).at[:, pl.ds(number * width, width)]
            loading = r[f"loading_{name}"].at[tile.warpgroup, slot]
            plgpu.copy_gmem_to_smem(part, loading, arrived.at[tile.warpgroup * 2 + slot])

    def begin(tile: _Tile) -> None:
        @pl.when(tile.exists)
        def _() -> None:
            for number in range(2):
                fetch(tile, number)

    def add(tile: _Tile, number: int, piece: Any) -> Any:
        slot = number % 2
        plgpu.barrier_wait(arrived.at[tile.warpgroup * 2 + slot])
        loaded = [r[f"loading_{name}"][tile.warpgroup, slot] for name in names]
        summed = [plgpu.layout_cast(part, plgpu.Layout.WGMMA) for part in loaded]
        total = piece + (summed[0] if len(names) == 1 else _joined(*summed))
        if number + 2 < tile.width // width:
            plgpu.commit_smem()
            fetch(tile, number + 2)
        return total

    return begin, add


def _staged_columns(staged: dict[str, Any], adds: bool) -> int:
    """How wide the pieces are in which a gradient's tile leaves: 16 bits alone leave room for 128 bytes of a row."""
    narrow = all(jnp.dtype(dtype).itemsize == 2 for dtype in staged.values())
    return STAGED if narrow and len(staged) == 1 and not adds else STAGED_FLOAT32


def _gradient_scratch(staged: dict[str, Any], width: int, added: dict[str, Any]) -> dict[str, Any]:
    """Shared memory for what leaves a gradient's tile, ``width`` columns at a time, and what is added to it: dtypes by
    name."""
    scratch = {f"staging_{name}": _staging(dtype, width) for name, dtype in staged.items()}
    scratch |= {f"loading_{name}": _staging(dtype, STAGED_FLOAT32) for name, dtype in added.items()}
    if added:
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(added), num_barriers=2 * MULTIPLYING)
    return scratch


def hidden(arguments: dict[str, Any], outputs: dict[str, Any], *, adds: bool, group: int = 4) -> dict[str, Any]:
    """dX of a chunk from S vocabulary entries, by position.

        value = e w        with factor: factor ⊙ (e w) + rest ⊙ target_rows (what e's target's element lacks)
        float32 out:       out[first + r] = value (+ out[first + r] with ``adds``)
        low precision:     out[first + r] = scale · (value + smooth_r · weighted_rows)

    Arguments:
        tiles [1 + …] int32 as for :func:`logits`; first, start [1] int32.
        e [C, S], w [V, D]; factor, rest [rows] float32 and target_rows [rows, tiles of D]: w_y, in one pass.
        scale [1] float32; smooth [rows], weighted_rows [tiles of D] float32 with label smoothing.
    ``outputs`` (or a reference): out [≥ first + C, D]. With ``adds`` a reference.
    """

    staged = {"out": (outputs | arguments)["out"].dtype}
    staged_columns = _staged_columns(staged, adds)

    def body(r: dict[str, Any]) -> None:
        out, first = r["out"], _scalar(r, "first")
        size = r["w"].shape[1]
        tile_width = gradient_columns(r["tiles"].shape[0] - 1, size)

        def part_of(matrix: Any, tile: _Tile) -> Any:
            return matrix.at[pl.ds(first + tile.row, WARPGROUP_ROWS), pl.ds(tile.column, tile.width)]

        begin, add = _with_sums(r, part_of, ("out",))

        def epilogue(tile: _Tile, _: None, value: Any) -> None:
            shape = (WARPGROUP_ROWS, staged_columns)

            def along(name: str) -> Any:
                return _along_rows(_of_rows(r, name, tile), shape)

            if "factor" in r:
                value = value * _along_rows(_of_rows(r, "factor", tile), tile.shape)

            def piece(column: int, width: int) -> Any:
                part = value[:, column : column + width]
                if "rest" in r:
                    rows = r["target_rows"].at[pl.ds(tile.row, WARPGROUP_ROWS), pl.ds(tile.column + column, width)]
                    part = part + along("rest") * _load_matrix(rows)
                part = add(tile, column // width, part)
                if "smooth" in r:
                    weights = load(r["weighted_rows"], tile.column + column, width, COLUMN_LAYOUT)
                    part = part + along("smooth") * _along_columns(weights, shape)
                return part * r["scale"][0] if "scale" in r else part

            _store(tile, piece, staged_columns, {"out": r["staging_out"]}, {"out": part_of(out, tile)}, size)

        _product(
            _Operand(r["e"], depth_first=False),
            _Operand(r["w"], depth_first=True, start=_scalar(r, "start")),
            (r["tiles"][0], pl.cdiv(size, tile_width)),
            r["e"].shape[1] // STEP,
            group=group,
            row_tile=lambda i: r["tiles"][i + 1],
            begin=begin,
            epilogue=epilogue,
            stages=3 if adds else STAGES,
            width=tile_width,
        )

    return launch(
        body, arguments, outputs, name="hidden", grid=programs(), threads=MULTIPLYING + 1,
        scratch=_gradient_scratch(staged, staged_columns, staged if adds else {}),
    )  # fmt: skip


def _load_matrix(part: Any) -> Any:
    """A part of a matrix in global memory, as float32 in a product's layout."""
    if jax.__version_info__ < (0, 11):
        return _PLGPU.load(part, (), layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    return _PLGPU.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)


def weight(
    arguments: dict[str, Any], outputs: dict[str, Any], *, columns: int, adds: bool, group: int = 8
) -> dict[str, Any]:
    """dW of vocabulary entries start ≤ j < start + columns from a chunk.

        without scale:  sum = eᵀ x (+ sum with ``adds``)
        with it:        out = scale · (eᵀ x + sum with ``adds`` − k_j smooth_x)
        with listed:    the same, and to some entries' sums a row of ``listed`` is added

    The sum has 24 bits of float32, in two matrices: the upper 16 in ``out`` and the next 8 in ``low``.

    Arguments:
        rows, start: [1] int32: how many rows of e and x there are; the first vocabulary entry.
        e [C, S], x [C, D]; low [V, D] int8 where ``adds``; scale [1] float32; smooth_x [tiles of D] and class_weight
        [tiles of V] float32 with label smoothing.
        listed [places, D], bounds, numbers, or none of them (:func:`add_targets`): see :class:`_Listed`.
    ``outputs`` (or references, as with ``adds``): out [V, D], and low without scale. Without rows, sums stay as they
    are.
    """
    final = "scale" in arguments
    parts = {"out": (outputs | arguments)["out"].dtype, "low": jnp.int8}
    staged = {"out": parts["out"]} if final else parts
    staged_columns = _staged_columns(staged, adds)

    def body(r: dict[str, Any]) -> None:
        out, start = r["out"], _scalar(r, "start")
        rows = r["rows"][0]
        row_tiles: Any = pl.cdiv(columns, TILE_ROWS)
        tile_width = gradient_columns(row_tiles, r["x"].shape[1])
        if adds and not final:
            row_tiles = jnp.where(rows > 0, row_tiles, 0)

        def part_of(matrix: Any, tile: _Tile) -> Any:
            return matrix.at[pl.ds(start + tile.row, WARPGROUP_ROWS), pl.ds(tile.column, tile.width)]

        begin, add = _with_sums(r, part_of, ("out", "low"))

        def epilogue(tile: _Tile, _: None, value: Any) -> None:
            shape = (WARPGROUP_ROWS, staged_columns)

            def piece(column: int, width: int) -> Any:
                part = add(tile, column // width, value[:, column : column + width])
                if "smooth_x" in r:
                    share = _along_columns(load(r["smooth_x"], tile.column + column, width, COLUMN_LAYOUT), shape)
                    if "class_weight" in r:
                        k = load(r["class_weight"], start + tile.row, WARPGROUP_ROWS, ROW_LAYOUT)
                        share = share * _along_rows(k, shape)
                    part = part - share
                return part * r["scale"][0] if final else part

            to = {name: part_of(r[name], tile) for name in staged}
            _store(tile, piece, staged_columns, {name: r[f"staging_{name}"] for name in staged}, to, out.shape[1])

        _product(
            _Operand(r["e"], depth_first=True),
            _Operand(r["x"], depth_first=True),
            (row_tiles, pl.cdiv(r["x"].shape[1], tile_width)),
            lax.div(rows + (STEP - 1), STEP),
            group=group,
            row_tile=lambda i: i,
            begin=begin,
            epilogue=epilogue,
            stages=3 if adds else STAGES,
            width=tile_width,
            listed=_Listed(r["listed"], r["bounds"], r["numbers"]) if "listed" in r else None,
        )

    return launch(
        body, arguments, outputs, name="weight", grid=programs(), threads=MULTIPLYING + 1,
        scratch=_gradient_scratch(staged, staged_columns, parts if adds else {}),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# dX by token

# Tokens, and columns of D, that one program owns.
RUN, RUN_COLUMNS = 32, 256


def by_token(arguments: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """out_i = scale · (made_p + smooth_i weighted_rows) where p = position_i is not negative, else 0.

    Arguments: position [blocks of RUN] int32; made [positions, D]; scale [1] float32 if it is not 1; smooth [blocks of
    RUN], weighted_rows [tiles of D] float32 with label smoothing.
    ``outputs`` (or a reference): out [N, D].
    One program: RUN tokens and RUN_COLUMNS columns.
    """
    made, out = arguments["made"], (outputs | arguments)["out"]
    column_tiles = -(-made.shape[1] // RUN_COLUMNS)
    blocks = arguments["position"].shape[0] // RUN

    def body(r: dict[str, Any]) -> None:
        program = lax.axis_index("program")
        first, column_tile = lax.div(program, column_tiles) * RUN, lax.rem(program, column_tiles)
        columns = pl.ds(column_tile * RUN_COLUMNS, RUN_COLUMNS)

        @pl.loop(0, RUN)
        def fetch(place: Any) -> None:
            row = pl.ds(jnp.maximum(r["position"][first + place], 0), 1)
            plgpu.copy_gmem_to_smem(r["made"].at[row, columns], r["rows"].at[pl.ds(place, 1), :], r["arrived"])

        plgpu.barrier_wait(r["arrived"])
        weights = r["weighted_rows"][columns] if "smooth" in r else None

        @pl.loop(0, RUN)
        def step(place: Any) -> None:
            value = r["rows"][place, :].astype(jnp.float32)
            if weights is not None:
                value = value + r["smooth"][first + place] * weights
            if "scale" in r:
                value = value * r["scale"][0]
            here = lax.broadcast_in_dim(r["position"][first + place] >= 0, value.shape, [])
            r["staging"][place, :] = jnp.where(here, value, 0.0).astype(out.dtype)

        plgpu.commit_smem()

        @pl.loop(0, RUN)
        def store(place: Any) -> None:
            token = first + place
            row = r["staging"].at[pl.ds(place, 1), :]
            pl.when(token < out.shape[0])(lambda: _store_row(row, r["out"], token, column_tile))

        plgpu.wait_smem_to_gmem(0)

    scratch = {
        "rows": plgpu.SMEM((RUN, RUN_COLUMNS), made.dtype),
        "staging": plgpu.SMEM((RUN, RUN_COLUMNS), out.dtype),
        "arrived": plgpu.Barrier(num_arrivals=RUN),
    }
    return launch(body, arguments, outputs, name="by_token", grid=blocks * column_tiles, threads=None, scratch=scratch)


def _store_row(row: Any, out: Any, number: Any, column_tile: Any) -> None:
    """[1, RUN_COLUMNS] to a row of ``out``, and of a row's last tile no more than the matrix has.

    A row that is one piece in memory is stored as that many bytes, which would run on into the row below.
    """
    full, rest = divmod(out.shape[1], RUN_COLUMNS)
    start = column_tile * RUN_COLUMNS

    def store(width: int) -> None:
        plgpu.copy_smem_to_gmem(row.at[:, pl.ds(0, width)], out.at[pl.ds(number, 1), pl.ds(start, width)])

    if not rest:
        store(RUN_COLUMNS)
    elif not full:
        store(rest)
    else:
        pl.when(column_tile < full)(lambda: store(RUN_COLUMNS))
        pl.when(column_tile == full)(lambda: store(rest))


# ---------------------------------------------------------------------------------------------------------------------
# The bias' gradient

# Rows and columns of e that are moved together, and rows that are added between two tests for the last row.
SUMMED_ROWS, SUMMED_COLUMNS, UNROLLED = 64, 256, 8


def column_sums(arguments: dict[str, Any]) -> Array:
    """db_j = Σ_r factor_r e_rj in float32 over the chunk's rows, in their order: [tiles of S].

    Arguments: rows [1] int32: how many rows of e there are; e [C, S]; factor [rows] float32, or none.
    One program: SUMMED_COLUMNS columns, which it reads once.
    """
    tiles = -(-arguments["e"].shape[1] // SUMMED_COLUMNS)

    def body(r: dict[str, Any]) -> None:
        tile, rows = lax.axis_index("program"), r["rows"][0]
        columns = pl.ds(tile * SUMMED_COLUMNS, SUMMED_COLUMNS)

        def add(indices: Any, block: Any, *rest: Any) -> Any:
            (*factors, total) = rest
            here = rows - indices[0] * SUMMED_ROWS

            def some(number: Any, total: Any) -> Any:
                for place in (number * UNROLLED + i for i in range(UNROLLED)):
                    row = block[place, :].astype(jnp.float32)
                    row = row * factors[0][place] if factors else row
                    total = total + jnp.where(lax.broadcast_in_dim(place < here, row.shape, []), row, 0.0)
                return total

            total = lax.fori_loop(0, SUMMED_ROWS // UNROLLED, some, total)
            plgpu.commit_smem()  # all have read the block when the next one is asked for
            return total

        read = [(r["e"].at[:, columns], plgpu.BlockSpec((SUMMED_ROWS, SUMMED_COLUMNS), lambda k: (k, 0)))]
        if "factor" in r:
            read.append((r["factor"], plgpu.BlockSpec((SUMMED_ROWS,), lambda k: (k,))))
        layout = plgpu.Layout.WG_STRIDED((SUMMED_COLUMNS,), 2)
        r["out"][columns] = plgpu.emit_pipeline(
            add,
            grid=(pl.cdiv(rows, SUMMED_ROWS),),
            in_specs=[specification for _, specification in read],
            max_concurrent_steps=STAGES,
            init_carry=plgpu.layout_cast(jnp.zeros(SUMMED_COLUMNS, jnp.float32), layout),
        )(*(reference for reference, _ in read))

    out = {"out": jax.ShapeDtypeStruct((tiles * SUMMED_COLUMNS,), jnp.float32)}
    made: Array = launch(body, arguments, out, name="column_sums", grid=tiles, threads=None)["out"]
    return made


# ---------------------------------------------------------------------------------------------------------------------
# The targets' element of dW

# What add_targets knows of each token.
TARGET_VECTORS = ("factor", "value", "stored")


def add_targets(arguments: dict[str, Any]) -> Array:
    """What the products lack of the targets' elements of dW, relative to the unit:

        with low:     sum_k += Σ_{i: key_i = k} value_i x_i − stored_i · rounded(factor_i x_i)
        without it:   out_k = that, for :func:`weight` to add; other rows stay as they are

    The products have stored_i from e. Both terms are as large as the others' sum, which cancels them where a head
    predicts its targets well; the difference is as small as one rounding, so dW must have it before it is rounded.

    Arguments:
        key: [blocks of RUN + RUN] int32: which row of out a token's target has, sorted; the number of rows where there
        is none.
        token: int32: the tokens in that order, so that every sum has the order of the tokens; factor, value, stored:
            theirs in that order, float32. All as long as key.
        x [N, D] hidden states by token; out, a reference [keys, D]; low, one too where out is a sum of several chunks
        (:func:`weight`).
    One program: RUN places of the list and RUN_COLUMNS columns. A run of one target that begins and ends here is added
    at once; of another the sum over these places is left in ``part``, row 2 b for a run that came from the block
    before, row 2 b + 1 for one that begins in block b, and :func:`add_long_runs` adds them.
    """
    x, out = arguments["x"], arguments["out"]
    summed = _summed(arguments)
    blocks = arguments["key"].shape[0] // RUN - 1
    column_tiles = -(-x.shape[1] // RUN_COLUMNS)
    vocab = out.shape[0]

    def body(r: dict[str, Any]) -> None:
        program = lax.axis_index("program")
        block, column_tile = lax.div(program, column_tiles), lax.rem(program, column_tiles)
        columns = pl.ds(column_tile * RUN_COLUMNS, RUN_COLUMNS)
        for name in ("key", "token", *TARGET_VECTORS):
            plgpu.copy_gmem_to_smem(r[name].at[pl.ds(block * RUN, RUN)], r[f"{name}_here"], r["listed"])
        plgpu.barrier_wait(r["listed"])

        @pl.loop(0, RUN)
        def fetch(place: Array) -> None:
            row = pl.ds(r["token_here"][place], 1)
            plgpu.copy_gmem_to_smem(r["x"].at[row, columns], r["rows"].at[pl.ds(place, 1), :], r["arrived"])
            row = pl.ds(jnp.minimum(r["key_here"][place], vocab - 1), 1)
            for name in summed:
                plgpu.copy_gmem_to_smem(
                    r[name].at[row, columns], r[f"{name}_rows"].at[pl.ds(place, 1), :], r["arrived"]
                )

        plgpu.barrier_wait(r["arrived"])
        before = jnp.where(block > 0, r["key"][jnp.maximum(block * RUN - 1, 0)], -1)
        after = r["key"][(block + 1) * RUN]

        def step(place: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, previous, came = carry
            target = r["key_here"][place]
            same = target == previous
            came = jnp.logical_and(came, same)  # still the run that came from the block before
            factor, value, stored = (r[f"{name}_here"][place] for name in TARGET_VECTORS)
            row = r["rows"][place, :]
            operand = (row.astype(jnp.float32) * factor).astype(row.dtype).astype(jnp.float32)
            total = jnp.where(lax.broadcast_in_dim(same, total.shape, []), total, 0.0)
            total = total + (value * row.astype(jnp.float32) - stored * operand)
            last = place == RUN - 1
            following = jnp.where(last, after, r["key_here"][jnp.minimum(place + 1, RUN - 1)])
            ends, real = following != target, target < vocab

            @pl.when(real & ends & jnp.logical_not(came))
            def _() -> None:
                _put_target(r, place, total, target, column_tile)

            @pl.when(real & came & (ends | last))
            def _() -> None:
                r["part"][2 * block, columns] = total

            @pl.when(real & last & jnp.logical_not(ends) & jnp.logical_not(came))
            def _() -> None:
                r["part"][2 * block + 1, columns] = total

            return total, target, came

        start = plgpu.layout_cast(jnp.zeros(RUN_COLUMNS, jnp.float32), plgpu.Layout.WG_STRIDED((RUN_COLUMNS,), 2))
        lax.fori_loop(0, RUN, step, (start, before, block > 0))
        plgpu.wait_smem_to_gmem(0)

    part = jax.ShapeDtypeStruct((2 * blocks, column_tiles * RUN_COLUMNS), jnp.float32)
    scratch = {
        "key_here": plgpu.SMEM((RUN,), jnp.int32),
        "token_here": plgpu.SMEM((RUN,), jnp.int32),
        **{f"{name}_here": plgpu.SMEM((RUN,), jnp.float32) for name in TARGET_VECTORS},
        "rows": plgpu.SMEM((RUN, RUN_COLUMNS), x.dtype),
        "out_rows": plgpu.SMEM((RUN, RUN_COLUMNS), out.dtype),
        **{f"{name}_rows": plgpu.SMEM((RUN, RUN_COLUMNS), arguments[name].dtype) for name in summed},
        "listed": plgpu.Barrier(num_arrivals=2 + len(TARGET_VECTORS)),
        "arrived": plgpu.Barrier(num_arrivals=RUN * (1 + len(summed))),
    }
    grid = blocks * column_tiles
    outputs = launch(body, arguments, {"part": part}, name="add_targets", grid=grid, threads=None, scratch=scratch)
    return outputs["part"]  # type: ignore[no-any-return]


def _summed(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The two matrices of a sum that the targets' elements are added to, or none."""
    return ("out", "low") if "low" in arguments else ()


def _put_target(r: dict[str, Any], place: Array | int, total: Array, target: Array, column_tile: Array) -> None:
    """A target's row, to memory by way of a row of shared memory, which holds the sum's where there is one."""
    dtype, summed = r["out"].dtype, _summed(r)
    if summed:
        sums = (r[f"{name}_rows"][place, :] for name in summed)
        parts = dict(zip(summed, _parted(total + _joined(*sums), dtype), strict=True))
    else:
        parts = {"out": total.astype(dtype)}
    for name, part in parts.items():
        r[f"{name}_rows"][place, :] = part
    plgpu.commit_smem()
    for name in parts:
        _store_row(r[f"{name}_rows"].at[pl.ds(place, 1), :], r[name], target, column_tile)


def add_long_runs(arguments: dict[str, Any]) -> None:
    """One program, one block of RUN places and RUN_COLUMNS columns: a run that begins in it and leaves it, from the
    pieces that :func:`add_targets` left. Arguments: key as there, part, and the references out and, of a sum, low."""
    summed = _summed(arguments)
    out, column_tiles = arguments["out"], arguments["part"].shape[1] // RUN_COLUMNS
    blocks, vocab = arguments["part"].shape[0] // 2, out.shape[0]

    def body(r: dict[str, Any]) -> None:
        program = lax.axis_index("program")
        block, column_tile = lax.div(program, column_tiles), lax.rem(program, column_tiles)
        columns = pl.ds(column_tile * RUN_COLUMNS, RUN_COLUMNS)
        first, target = r["key"][block * RUN], r["key"][block * RUN + RUN - 1]
        before = jnp.where(block > 0, r["key"][jnp.maximum(block * RUN - 1, 0)], -1)
        begins = (first != target) | (before != target)
        leaves = r["key"][(block + 1) * RUN] == target

        @pl.when(begins & leaves & (target < vocab))
        def _() -> None:
            for name in summed:
                row = r[name].at[pl.ds(target, 1), columns]
                plgpu.copy_gmem_to_smem(row, r[f"{name}_rows"], r["arrived"])
            if summed:
                plgpu.barrier_wait(r["arrived"])

            def more(carry: tuple[Array, Array]) -> Array:
                same: Array = r["key"][carry[0] * RUN] == target
                return same

            def add(carry: tuple[Array, Array]) -> tuple[Array, Array]:
                following, total = carry
                return following + 1, total + r["part"][2 * following, columns]

            _, total = lax.while_loop(more, add, (block + 1, r["part"][2 * block + 1, columns]))
            _put_target(r, 0, total, target, column_tile)
            plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {
        f"{name}_rows": plgpu.SMEM((1, RUN_COLUMNS), arguments[name].dtype) for name in ("out", *summed)
    }
    if summed:
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(summed))
    launch(body, arguments, {}, name="add_long_runs", grid=blocks * column_tiles, threads=None, scratch=scratch)
