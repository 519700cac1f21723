"""The kernels that go along matrices row by row: dX by token, the bias' gradient, and the targets' elements of dW.

Each program is one warpgroup and owns some columns of some rows.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from logitless.jax_impl.kernels.arithmetic import gap_of, joined, known_share, parted, sloped
from logitless.jax_impl.kernels.launch import Arguments, Ref, References, Scratch, Shapes, launch
from logitless.jax_impl.kernels.pieces import Piece, Row, over

# Rows, and columns of D, that one program owns.
RUN, RUN_COLUMNS = 32, 256


def by_token(arguments: Arguments, outputs: Shapes) -> dict[str, Array]:
    """dX by token, from dX by position: scale · (made_p + smooth_i weighted_rows) for p = position_i, 0 where p is −1.

    Arguments:
        position: [blocks of RUN] int32; made: [positions, D]; scale: [1] float32, or none for 1.
        smooth: [blocks of RUN], weighted_rows: [tiles of D] float32, with label smoothing.
    ``outputs`` (or a reference): out [N, D].
    """
    by_position, out = arguments["made"], {**outputs, **arguments}["out"]
    column_tiles = -(-by_position.shape[1] // RUN_COLUMNS)
    blocks = arguments["position"].shape[0] // RUN

    def body(r: References) -> None:
        program = lax.axis_index("program")
        first, column_tile = lax.div(program, column_tiles) * RUN, lax.rem(program, column_tiles)
        columns = pl.ds(column_tile * RUN_COLUMNS, RUN_COLUMNS)

        @pl.loop(0, RUN)
        def fetch(place: Array) -> None:
            row = pl.ds(jnp.maximum(r["position"][first + place], 0), 1)
            plgpu.copy_gmem_to_smem(r["made"].at[row, columns], r["rows"].at[pl.ds(place, 1), :], r["arrived"])

        plgpu.barrier_wait(r["arrived"])
        weights = r["weighted_rows"][columns] if "smooth" in r else None

        @pl.loop(0, RUN)
        def step(place: Array) -> None:
            value = r["rows"][place, :].astype(jnp.float32)
            if weights is not None:
                value = value + r["smooth"][first + place] * weights
            if "scale" in r:
                value = value * r["scale"][0]
            here = lax.broadcast_in_dim(r["position"][first + place] >= 0, value.shape, [])
            r["staging"][place, :] = jnp.where(here, value, 0.0).astype(out.dtype)

        plgpu.commit_smem()

        @pl.loop(0, RUN)
        def store(place: Array) -> None:
            token = first + place
            row = r["staging"].at[pl.ds(place, 1), :]
            pl.when(token < out.shape[0])(lambda: _store_row(row, r["out"], token, column_tile))

        plgpu.wait_smem_to_gmem(0)

    scratch: Scratch = {
        "rows": plgpu.SMEM((RUN, RUN_COLUMNS), by_position.dtype),
        "staging": plgpu.SMEM((RUN, RUN_COLUMNS), out.dtype),
        "arrived": plgpu.Barrier(num_arrivals=RUN),
    }
    return launch(body, arguments, outputs, name="by_token", options=(), grid=blocks * column_tiles, scratch=scratch)


def _store_row(row: Ref, out: Ref, number: Array, column_tile: Array) -> None:
    """Store [1, RUN_COLUMNS] in a row of ``out``, without the columns that the matrix does not have.

    A row is one piece in memory and is stored as so many bytes: too long a one would run on into the row below.
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
# Logits that waited


def held_gradient(row: Row, vocab: int, arguments: Arguments) -> None:
    """The gradient's matrix in place of the logits that waited (arithmetic.held_of), all of them: factor · slope ·
    p (alpha + gamma log p + delta p), ``element`` at the target, 0 past the vocabulary and where there is no row.

    Arguments:
        e: [C, row.width], a reference; rows: [1] int32: how many rows there are; target: [≥ C] int32.
        anchor, log_total, factor, element: [≥ C] float32; alpha, gamma, delta, too, if they are not trivial;
        temperature, where each token has its own.
    A program, one warpgroup, owns a row. It goes over it piece by piece.
    """

    def body(r: References) -> None:
        number = lax.axis_index("program")
        known = {name: r[name][number] for name in arguments if name not in ("e", "rows")}
        cap = row.cap
        if cap is not None and "temperature" in known:
            cap = cap / known["temperature"]
        columns = row.columns()

        def value(piece: Piece, held: Array) -> Array:
            gap, is_nothing = gap_of(held)
            share = known_share(gap - known["log_total"], known, known.__getitem__)
            dz = sloped(share, known["anchor"] + gap, cap) * known["factor"]
            # Where a row's logits are no numbers, neither is its logsumexp, nor any element of its gradient.
            dz = jnp.where(is_nothing, 0.0 * known["log_total"], dz)
            dz = jnp.where(columns == known["target"] - piece.start, known["element"], dz)
            return jnp.where(columns < vocab - piece.start, dz, 0.0)

        def put(piece: Piece, dz: Array) -> None:
            r["e"][number, pl.ds(piece.start, row.lanes)] = dz.astype(row.dtype)

        def turn(pieces: Sequence[Piece], _: None) -> None:
            held = [piece.of(r["e"].at[number], row) for piece in pieces]
            if any(piece.shared for piece in pieces):
                plgpu.commit_smem()  # all threads have read what two pieces share
            for piece, logits in zip(pieces, held, strict=True):
                put(piece, value(piece, logits))

        def clear(pieces: Sequence[Piece], _: None) -> None:
            for piece in pieces:
                put(piece, row.filled(0.0))

        here = number < r["rows"][0]
        pl.when(here)(lambda: over(row, turn, None))
        pl.when(jnp.logical_not(here))(lambda: over(row, clear, None))

    launch(body, arguments, {}, name="held_gradient", options=(row, vocab), grid=arguments["e"].shape[0])


# ---------------------------------------------------------------------------------------------------------------------
# The bias' gradient

# Rows and columns of e that are moved together, and rows that one turn of the loop adds.
SUMMED_ROWS, SUMMED_COLUMNS, UNROLLED = 64, 256, 8
# Blocks of rows that are on their way at once.
SUMMED_STAGES = 4


def column_sums(arguments: Arguments) -> Array:
    """db_j = Σ_r factor_r e_rj in float32 over the chunk's rows, in their order: [tiles of S].

    Arguments: rows: [1] int32: how many rows e has; e: [C, S]; factor: [rows] float32, or none.
    A program has SUMMED_COLUMNS columns, which it reads once.
    """
    tiles = -(-arguments["e"].shape[1] // SUMMED_COLUMNS)

    def body(r: References) -> None:
        tile, rows = lax.axis_index("program"), r["rows"][0]
        columns = pl.ds(tile * SUMMED_COLUMNS, SUMMED_COLUMNS)

        def add(indices: tuple[Array], block: Ref, *rest: Ref) -> Array:
            (*factors, total) = rest
            here = rows - indices[0] * SUMMED_ROWS

            def some(number: Array, total: Array) -> Array:
                for place in (number * UNROLLED + i for i in range(UNROLLED)):
                    row = block[place, :].astype(jnp.float32)
                    row = row * factors[0][place] if factors else row
                    total = total + jnp.where(lax.broadcast_in_dim(place < here, row.shape, []), row, 0.0)
                return total

            total = lax.fori_loop(0, SUMMED_ROWS // UNROLLED, some, total)
            plgpu.commit_smem()  # all threads have read the block when the next one is asked for
            return total  # type: ignore[no-any-return]

        read = [(r["e"].at[:, columns], plgpu.BlockSpec((SUMMED_ROWS, SUMMED_COLUMNS), lambda k: (k, 0)))]
        if "factor" in r:
            read.append((r["factor"], plgpu.BlockSpec((SUMMED_ROWS,), lambda k: (k,))))
        layout = plgpu.Layout.WG_STRIDED((SUMMED_COLUMNS,), 2)
        r["out"][columns] = plgpu.emit_pipeline(
            add,
            grid=(pl.cdiv(rows, SUMMED_ROWS),),
            in_specs=[specification for _, specification in read],
            max_concurrent_steps=SUMMED_STAGES,
            init_carry=plgpu.layout_cast(jnp.zeros(SUMMED_COLUMNS, jnp.float32), layout),
        )(*(reference for reference, _ in read))

    out = {"out": jax.ShapeDtypeStruct((tiles * SUMMED_COLUMNS,), jnp.float32)}
    return launch(body, arguments, out, name="column_sums", options=(), grid=tiles)["out"]


# ---------------------------------------------------------------------------------------------------------------------
# The targets' element of dW

# What add_targets knows of every token.
TARGET_VECTORS = ("factor", "value", "stored")


def add_targets(arguments: Arguments) -> Array:
    """Add what the products lack of the targets' elements of dW, relative to the unit:

        with low:     sum_k += Σ_{i: key_i = k} value_i x_i − stored_i · rounded(factor_i x_i)
        without it:   out_k = that, for :func:`hopper.weight` to add; other rows stay as they are

    The products have stored_i from e. Where a head predicts its targets well, both terms are as large as the sum of all
    the others, which cancels them. The difference is as small as one rounding, so dW needs it before it is rounded.

    Arguments:
        key: [blocks of RUN + RUN] int32, sorted: the row of out for each token's target, or the number of rows where
            there is none.
        token: int32, as long: the tokens in that order, those of one target in their own. So each sum has their order.
        factor, value, stored: float32, as long: the tokens' own, in that order.
        x: [N, D] hidden states by token. out: a reference [keys, D]; low: one too, where out is a sum of several chunks
        (:func:`hopper.weight`).

    A program has RUN places of the list. It adds a run of one target at once if that begins and ends here. Else it
    leaves the sum over its places in ``part``, for :func:`add_long_runs`: in row 2 b if the run came from the block
    before, in row 2 b + 1 if it begins in block b. ``part`` is returned.
    """
    x, out = arguments["x"], arguments["out"]
    summed = _summed(arguments)
    blocks = arguments["key"].shape[0] // RUN - 1
    column_tiles = -(-x.shape[1] // RUN_COLUMNS)
    vocab = out.shape[0]

    def body(r: References) -> None:
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
            came = jnp.logical_and(came, same)  # whether it is still the run that came from the block before
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
    scratch: Scratch = {
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
    return launch(body, arguments, {"part": part}, name="add_targets", options=(), grid=grid, scratch=scratch)["part"]


def _summed(names: Container[str]) -> tuple[str, ...]:
    """The two matrices of a sum that the targets' elements are added to, or none."""
    return ("out", "low") if "low" in names else ()


def _put_target(r: References, place: Array | int, total: Array, target: Array, column_tile: Array) -> None:
    """Store a target's row by way of a row of shared memory. Where there is a sum, that row holds the sum's."""
    dtype, summed = r["out"].dtype, _summed(r)
    if summed:
        sums = (r[f"{name}_rows"][place, :] for name in summed)
        parts = dict(zip(summed, parted(total + joined(*sums), dtype), strict=True))
    else:
        parts = {"out": total.astype(dtype)}
    for name, part in parts.items():
        r[f"{name}_rows"][place, :] = part
    plgpu.commit_smem()
    for name in parts:
        _store_row(r[f"{name}_rows"].at[pl.ds(place, 1), :], r[name], target, column_tile)


def add_long_runs(arguments: Arguments) -> None:
    """Add the runs that leave the block they begin in, from the parts that :func:`add_targets` left.

    Arguments: key, out and low as there, and part. A program has the run that begins in its block.
    """
    summed = _summed(arguments)
    out, column_tiles = arguments["out"], arguments["part"].shape[1] // RUN_COLUMNS
    blocks, vocab = arguments["part"].shape[0] // 2, out.shape[0]

    def body(r: References) -> None:
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

    scratch: Scratch = {
        f"{name}_rows": plgpu.SMEM((1, RUN_COLUMNS), arguments[name].dtype) for name in ("out", *summed)
    }
    if summed:
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(summed))
    launch(body, arguments, {}, name="add_long_runs", options=(), grid=blocks * column_tiles, scratch=scratch)
