"""The target-anchored chunk by Pallas kernels: the same verbs as jax_impl/xla.py.

Mirror of torch_impl/kernels/fused.py.

A loss's gradients in one pass are made in two steps: the forward writes a chunk's exponentials and, for every chunk but
the last, its products; the last chunk's products wait for the upstream scalar, so that dW is rounded once, with it, in
the epilogue of its last product. A plan with a single chunk needs no accumulator for that at all.

Rounding: logits, exponentials and sums are float32. What is stored of a chunk is rounded to the input dtype on its way
into the products, which accumulate in float32; what that rounding left out of the target's element, and of its share of
dW, is added in float32, before dW is rounded.

Sizes: a matrix moves in blocks of 8 rows and 64 columns, so a weight with V % 8 or D % 64 is copied, padded, and its
gradient is cut; a plan made with ``padded`` counts both. Next to the products the copies take under 2 % of the time.
Chunks of tokens and slices of the vocabulary begin at multiples of 8: a plan's smaller ones are rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless import numerics, spec
from logitless.jax_impl.call import XP, Gradients, Inputs, KnownRows, Needs, Statistics, TokenSums
from logitless.jax_impl.chunk import RunningSums, capped
from logitless.jax_impl.slices import Carry, Index, run_sums
from logitless.planning import ChunkPlan
from logitless.scratch import PADDED_HIDDEN, PADDED_VOCAB, round_up
from logitless.spec import LOWEST_ANCHOR, RESCUE_NATS, LossOptions

try:
    from logitless.jax_impl.kernels import pallas as kernels
except ImportError:  # no absl; unavailable() says so before anything here is called
    kernels = None  # type: ignore[assignment]

DTYPES = ("bfloat16", "float16")
# A row is done again when its sum says that one of its exponents may have passed the threshold.
RESCUE_SUM = math.exp(RESCUE_NATS)
# Row tiles that walk the vocabulary together share the first product's weight tiles; their hidden states stay in L2.
GROUP_BYTES = 8 * 2**20
# The largest target's value that is stored in e: no product of it overflows.
LARGEST_STORED = 2.0**60


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Why these kernels cannot run on ``device`` (None: not known while tracing), or None."""
    reason = unusable(device, dtype, DTYPES)
    if reason is not None or device is None or device.platform != "gpu":
        return reason
    return unbuilt(device)


def unbuilt(device: jax.Device) -> str | None:
    """Why no Pallas kernel was built for a GPU, or None."""
    capability = str(getattr(device, "compute_capability", "an unknown one"))
    return None if capability.startswith("9.") else spec.needs_hopper(capability)


def unusable(device: jax.Device | None, dtype: str, dtypes: tuple[str, ...]) -> str | None:
    """Why no Pallas kernel for ``dtypes`` can run on ``device``, whatever GPU that is, or None."""
    if kernels is None:
        return "absl-py is not installed, which JAX's Pallas modules for GPUs import"
    if dtype not in dtypes:
        return f"its kernels take {', '.join(dtypes[:-1])} and {dtypes[-1]}, not {dtype}"
    if device is None:
        return None
    if device.platform == "cpu" and kernels.interpreted():
        return None if kernels.can_interpret() else f"jax {jax.__version__} cannot interpret its kernels, 0.11 can"
    if device.platform != "gpu":
        return spec.needs_cuda(device.platform)
    return None


def _after(done: Carry, first: Index) -> tuple[Carry, Array]:
    """``first``, once ``done`` is there: chunks that need nothing of each other would hold two matrices."""
    both: tuple[Carry, Array] = lax.optimization_barrier((done, jnp.asarray(first, jnp.int32)))
    return both


def one_by_one(function: Callable[..., Any]) -> Any:
    """``function``, which jax.vmap runs for one problem after the other: each fills the device with its kernels."""
    if jax.__version_info__ >= (0, 11):
        return jax.custom_batching.sequential_vmap(function)
    return lambda first, *rest: function(_refuse_vmap(first), *rest)


@jax.custom_batching.custom_vmap
def _refuse_vmap(arrays: Any) -> Any:
    """The arrays themselves. jax before 0.11 cannot lower a batching rule around what is written in place."""
    return arrays


@_refuse_vmap.def_vmap
def _say_why_not(*_: object) -> NoReturn:
    raise NotImplementedError(
        f"backend='pallas' under jax.vmap needs jax 0.11 or newer, this is {jax.__version__}; use backend='xla', or "
        f"jax.lax.map"
    )


# ---------------------------------------------------------------------------------------------------------------------
# A call's rows and matrices


class _Call:
    """Everything that the kernels of one call share: its rows, its matrices, its constants."""

    def __init__(self, inputs: Inputs, options: LossOptions, plan: ChunkPlan) -> None:
        self.inputs, self.options, self.plan = inputs, options, plan
        self.dtype = inputs.hidden.dtype
        # Devices' shares of dX are rounded after they are summed.
        self.hidden_dtype = jnp.float32 if inputs.shard.active else self.dtype
        self.tokens, (self.vocab, self.size) = inputs.hidden.shape[0], inputs.weight.shape
        self.padded_size = round_up(self.size, PADDED_HIDDEN)
        self.padded_vocab = round_up(self.vocab, PADDED_VOCAB)
        more = self.padded_size - self.size
        self.hidden = jnp.pad(inputs.hidden, ((0, 0), (0, more)))
        self.weight = jnp.pad(inputs.weight, ((0, self.padded_vocab - self.vocab), (0, more)))
        self.bias = self._along_vocab(inputs.bias)
        self.class_weight = self._along_vocab(inputs.class_weight)
        limit = inputs.shard.limit()
        self.limit = None if limit is None else limit.reshape(1)
        self.chunk = _rounded_down(plan.token_chunk, self.tokens)
        self.columns = _rounded_down(plan.fused_columns, self.vocab)
        self.rows = round_up(self.chunk, kernels.TILE_ROWS)
        self.chunks = -(-self.tokens // self.chunk)
        self.group = min(64, max(8, GROUP_BYTES // (kernels.TILE_ROWS * self.padded_size * 2)))
        self._compact()

    def _along_vocab(self, values: Array | None) -> Array | None:
        """A vector along the vocabulary in whole tiles, wherever a slice begins, in float32."""
        if values is None:
            return None
        return jnp.pad(values.astype(jnp.float32), (0, round_up(self.vocab, 256) + 256 - self.vocab))

    def along_size(self, values: Array) -> Array:
        """A vector along D in whole tiles, however wide they are."""
        length = max(round_up(self.size, width) for width in kernels.GRADIENT_COLUMNS)
        return jnp.pad(values, (0, length - self.size))

    def _compact(self) -> None:
        """order: the valid tokens, then the ignored ones, each in their own order; position: its inverse."""
        valid = self.inputs.valid.astype(jnp.int32)
        self.count = valid.sum(dtype=jnp.int32)
        seen = jnp.cumsum(valid, dtype=jnp.int32)
        token = jnp.arange(self.tokens, dtype=jnp.int32)
        self.position = jnp.where(self.inputs.valid, seen - 1, self.count + token - seen)
        order = jnp.zeros(self.tokens, jnp.int32).at[self.position].set(token, unique_indices=True)
        self.order = jnp.pad(order, (0, (self.chunks + 1) * self.chunk + self.rows - self.tokens))

    def rows_at(self, first: Index) -> _Rows:
        """The rows of the chunk from position ``first``."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        number = jnp.clip(self.count - first, 0, self.chunk).astype(jnp.int32)
        exists = row < number
        token = jnp.where(exists, lax.dynamic_slice_in_dim(self.order, first, self.rows), 0)
        i = self.inputs
        target = jnp.where(exists & i.inside[token], i.shard.place(i.target)[token], -1)
        x = jnp.where(exists[:, None], self.hidden[token], jnp.zeros((), self.dtype))[: round_up(self.chunk, 8)]
        tiles = jnp.arange(-1, self.rows // kernels.TILE_ROWS, dtype=jnp.int32)
        tiles = tiles.at[0].set(-(-number // kernels.TILE_ROWS))
        return _Rows(jnp.asarray(first, jnp.int32).reshape(1), number.reshape(1), exists, token, target, x, tiles)

    def by_token(self, values: Carry) -> Carry:
        """Vectors by position to vectors by token."""
        vectors: Carry = jax.tree.map(lambda vector: vector[self.position], values)
        return vectors

    def matrix(self, columns: int) -> jax.ShapeDtypeStruct:
        """Shape of e over ``columns`` vocabulary entries."""
        return jax.ShapeDtypeStruct((round_up(self.chunk, 8), round_up(columns, kernels.STEP)), self.dtype)

    def config(self, mode: str, columns: int | None = None, **more: Any) -> kernels.Logits:
        o = self.options
        return kernels.Logits(mode, columns or self.vocab, o.logit_scale, o.softcap, group=self.group, **more)

    def first_product(self, config: kernels.Logits, rows: _Rows, start: Index = 0) -> dict[str, Any]:
        """What every first product reads."""
        height, width = config.shape
        tile = (rows.target - start) // width
        part = jnp.arange(self.rows, dtype=jnp.int32) // height
        hits = jnp.zeros((self.rows // height, config.column_tiles), jnp.int32)
        hits = hits.at[part, jnp.where(rows.target >= start, tile, config.column_tiles)].add(1, mode="drop")
        operands = {
            "tiles": rows.tiles,
            "start": jnp.asarray(start, jnp.int32).reshape(1),
            "x": rows.x,
            "w": self.weight,
        }
        operands |= {"target": rows.target, "hits": hits}
        if self.limit is not None:
            operands["limit"] = self.limit
        return operands if self.bias is None else operands | {"bias": self.bias}


class _Rows(NamedTuple):
    """A chunk's rows; vectors [tiles of C]."""

    first: Array  # [1]
    number: Array  # [1] how many there are
    exists: Array
    token: Array
    target: Array  # −1 for an id outside the vocabulary or on another device, and where there is no row
    x: Array  # [C, D]
    tiles: Array  # [1 + …] how many row tiles there are, and which


def _rounded_down(size: int, length: int) -> int:
    """A chunk's size: all of ``length``, or a multiple of what is moved together."""
    return max(1, length) if size >= length else max(kernels.TILING, size // kernels.TILING * kernels.TILING)


def _put(vector: Array, part: Array, first: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(vector, part, first[0], 0)


def _dots(a: Array, b: Array) -> Array:
    """Σ_d a_id b_id in float32; not a product of matrices, which could be rounded to TF32."""
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(axis=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


def _target_logits(c: _Call, rows: _Rows) -> Array:
    """The anchors a = z_y: NaN for an id outside the vocabulary, 0 where there is no row."""
    if c.inputs.shared is not None:
        return jnp.where(rows.exists, c.inputs.shared.target_logit[rows.token], 0.0)
    wanted = jnp.maximum(rows.target, 0)
    z = _row_logits(c.hidden[rows.token], c.weight, c.inputs.bias, wanted, c.options)
    return jnp.where(rows.exists, jnp.where(rows.target < 0, jnp.nan, z), 0.0)


def own_target_logits(inputs: Inputs, options: LossOptions) -> Array:
    """The anchors [N] of the targets whose rows are on this device, 0 elsewhere."""
    place = inputs.shard.place(inputs.target)
    x = jnp.where(inputs.valid[:, None], inputs.hidden, 0)
    z = _row_logits(x, inputs.weight, inputs.bias, jnp.maximum(place, 0), options)
    return jnp.where(place >= 0, z, 0.0)


def _row_logits(x: Array, weight: Array, bias: Array | None, target: Array, options: LossOptions) -> Array:
    """z_{i, target_i} of the rows x."""
    z = _dots(x, weight[target])
    if bias is not None:
        z = z + bias[target].astype(jnp.float32)
    return capped(z, options)


def _line_sums(c: _Call, rows: _Rows, lines: dict[str, Array], anchor: Array, target_logit: Array) -> RunningSums:
    """The column tiles' lines together, in a fixed order; zeros where there is no row."""

    def total(name: str) -> Array:
        return jnp.where(rows.exists, lines[name].sum(axis=0), 0.0)

    extremes = "highest" in lines
    highest = lines["highest"].max(axis=0) if extremes else jnp.zeros_like(anchor)
    argmax = None
    if extremes:
        line = lines["highest"].argmax(axis=0).astype(jnp.int32)
        place = jnp.take_along_axis(lines["argmax"], line[None], axis=0)[0]
        argmax = line * kernels.TILE_COLUMNS + place.astype(jnp.int32)
    return RunningSums(
        target_logit=target_logit,
        target=rows.target,
        anchor=anchor,
        s=total("sum"),
        highest=highest,
        gap_sum=total("gap") if "gap" in lines else None,
        lowest=lines["lowest"].min(axis=0) if extremes else None,
        argmax=argmax,
    )


def _sums(c: _Call, rows: _Rows, statistics: Statistics, holds: bool) -> tuple[RunningSums, Array | None, Array | None]:
    """The first product of a chunk: its sums, Σ k z where label smoothing asks for it, and the exponentials if
    ``holds``; of sums, those of all devices."""
    shard = c.inputs.shard
    sum_logits = c.options.label_smoothing > 0 and not c.options.separable
    mode = kernels.ANCHORED if holds else kernels.SUMS
    extremes = statistics is True
    config = c.config(mode, entropy=bool(statistics), extremes=extremes, sum_logits=sum_logits)
    target_logit = _target_logits(c, rows)
    anchor = jnp.maximum(target_logit, LOWEST_ANCHOR)
    arguments = c.first_product(config, rows)
    if sum_logits and c.class_weight is not None:
        arguments["class_weight"] = c.class_weight
    line = jax.ShapeDtypeStruct((config.column_tiles, c.rows), jnp.float32)
    outputs = dict.fromkeys(config.lines, line)
    if holds:
        outputs["e"] = c.matrix(c.vocab)

    def anchored(at: Array) -> dict[str, Any]:
        return arguments | {"anchor": jnp.where(rows.exists, at, kernels.NO_ROW)}

    lines = kernels.logits(config, anchored(anchor), outputs)
    sums = _line_sums(c, rows, lines, anchor, target_logit)
    again, moved = _rescued(c, rows, sums, extremes)
    references = {name: kernels.reference(value) for name, value in lines.items()}
    kernels.logits(config, anchored(moved) | {"tiles": again} | references, {})
    lines = {name: kernels.written(reference) for name, reference in references.items()}
    sums = _line_sums(c, rows, lines, moved, target_logit)
    weighted = jnp.where(rows.exists, lines["logit_sum"].sum(axis=0), 0.0) if sum_logits else None
    if extremes:
        sums = sums.extremes(shard)
    sums, weighted = sums.total(shard, weighted)
    return sums, weighted, lines.get("e")


def _rescued(c: _Call, rows: _Rows, sums: RunningSums, extremes: bool) -> tuple[Array, Array]:
    """Row tiles to be done again, and every row's anchor: its maximum where its exponents grew too large; ``extremes``:
    whether that is known."""
    flagged = rows.exists & (sums.s > RESCUE_SUM)
    again = _tiles_of(flagged)
    highest = sums.highest
    if not extremes:
        config = c.config(kernels.HIGHEST)
        line = jax.ShapeDtypeStruct((config.column_tiles, c.rows), jnp.float32)
        lines = kernels.logits(config, c.first_product(config, rows) | {"tiles": again}, {"highest": line})
        highest = lines["highest"].max(axis=0)
    moved = jnp.where(flagged, highest, sums.anchor)
    if c.inputs.shard.active:  # a row that one device flags moves on all of them
        moved = c.inputs.shard.largest(moved)
        again = _tiles_of(rows.exists & (moved > sums.anchor))
    return again, moved


def _tiles_of(flagged: Array) -> Array:
    """[1 + tiles]: how many row tiles hold a flagged row, then which."""
    tiles = flagged.reshape(-1, kernels.TILE_ROWS).any(axis=1)
    number = tiles.sum(dtype=jnp.int32)
    return jnp.concatenate([number.reshape(1), jnp.argsort(~tiles, stable=True).astype(jnp.int32)])


def _empty(c: _Call, parts: Carry) -> Carry:
    """Vectors by position for chunks to be put into, with the structure of one chunk's."""
    length = c.chunks * c.chunk + c.rows
    vectors: Carry = jax.tree.map(lambda part: jnp.zeros(length, part.dtype), parts)
    return vectors


def _chunks(c: _Call, body: Callable[[Carry, Index], Carry], begin: Callable[[], Carry], last: int) -> Carry:
    """carry = body(carry, first) for the chunks before ``last``; the first one starts it."""
    return _later_blocks(body, begin(), last, c.chunk)


def _later_blocks(body: Callable[[Carry, Index], Carry], state: Carry, count: int, size: int) -> Carry:
    """state = body(state, first) for ``count`` blocks of ``size`` but the first, which has made ``state``; each after
    the one before, also where XLA unrolls the loop, as it does one of a single turn."""
    return lax.fori_loop(1, count, lambda i, state: body(*_after(state, i * size)), state) if count > 1 else state


def token_sums(inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, and no C × V matrix."""
    run = one_by_one(lambda inputs: _token_sums(_Call(inputs, options, plan), statistics))
    return run(inputs)  # type: ignore[no-any-return]


def _token_sums(c: _Call, statistics: Statistics) -> TokenSums:
    smoothing = _Smoothing.prepare(c)

    def chunk(first: Index) -> tuple[Array, TokenSums]:
        rows = c.rows_at(first)
        sums, weighted, _ = _sums(c, rows, statistics, holds=False)
        return rows.first, sums.finish(weighted)

    def add(state: TokenSums, first: Index) -> TokenSums:
        at, part = chunk(first)
        return jax.tree.map(lambda vector, values: _put(vector, values, at), state, part)  # type: ignore[no-any-return]

    def begin() -> TokenSums:
        at, part = chunk(jnp.int32(0))
        return jax.tree.map(lambda vector, values: _put(vector, values, at), _empty(c, part), part)  # type: ignore[no-any-return]

    return _with_weighted(c, c.by_token(_chunks(c, add, begin, c.chunks)), smoothing)


def _with_weighted(c: _Call, sums: TokenSums, smoothing: _Smoothing | None) -> TokenSums:
    if smoothing is None:
        return sums
    return sums._replace(weighted_logits=c.inputs.shard.total(smoothing.weighted_logits(c)))


class _Smoothing(NamedTuple):
    """Label smoothing's rank-one part: every dz_ij has −(ε/V) t g k_j, so nothing of it needs the C × V matrix."""

    factor: float  # ε / V
    weighted_rows: Array  # Σ_j k_j w_j, [D]
    weighted_bias: Array  # Σ_j k_j b_j

    @staticmethod
    def prepare(c: _Call) -> _Smoothing | None:
        """None where there is no smoothing, or where a softcap makes it part of the matrix."""
        if not c.options.label_smoothing or not c.options.separable:
            return None
        i, k = c.inputs, c.inputs.class_weight
        w = i.weight.astype(jnp.float32)
        bias = jnp.zeros((), jnp.float32)
        if i.bias is not None:
            b = i.bias.astype(jnp.float32)
            bias = (b if k is None else b * k).sum()
        return _Smoothing(c.options.label_smoothing / i.vocab, (w if k is None else w * k[:, None]).sum(axis=0), bias)

    def weighted_logits(self, c: _Call) -> Array:
        """Σ_j k_j z_ij = scale · (x_i · Σ_j k_j w_j + Σ_j k_j b_j), by token."""
        return (_dots(c.inputs.hidden, self.weighted_rows) + self.weighted_bias) * c.options.logit_scale

    def weighted_hidden(self, c: _Call, g: Array) -> Array:
        """(ε/V) Σ_i g_i x_i, [D]; an ignored token may hold anything."""
        x = jnp.where(c.inputs.valid[:, None], c.inputs.hidden.astype(jnp.float32), 0.0)
        return self.factor * (x * g[:, None]).sum(axis=0)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


class _Factors(NamedTuple):
    """A chunk's row factors, relative to the unit: dz = factor · e, and ``value`` at the target."""

    factor: Array  # u
    value: Array  # u T
    stored: Array  # T as e has it

    @property
    def rest(self) -> Array:
        """What e's rounding left out of the target's element."""
        return self.value - self.factor * self.stored

    def times(self, upstream: Array) -> _Factors:
        """For upstream gradients that many times as large."""
        return self._replace(factor=self.factor * upstream, value=self.value * upstream)

    def operand(self, rows: _Rows, dtype: jnp.dtype) -> Array:
        """u ⊙ x, for dW."""
        return (rows.x.astype(jnp.float32) * self.factor[: rows.x.shape[0], None]).astype(dtype)


class _State(NamedTuple):
    """dX by position, dW and db as far as they are; None where not wanted or not begun."""

    hidden: Array | None = None  # [≥ N, D]
    weight: Array | None = None  # [V, D], or the upper 16 bits of its sum
    low: Array | None = None  # [V, D] int8: the next 8
    bias: Array | None = None  # [V] float32


class _Products:
    """dX, dW and db of a call, chunk by chunk and slice by slice."""

    def __init__(self, c: _Call, needs: Needs, g: Array, unit: Array) -> None:
        self.call, self.needs, self.g, self.unit = c, needs, g / unit, unit
        self.smoothing = s = _Smoothing.prepare(c)
        self.smooth: Array | None = None
        self.smooth_x: Array | None = None
        if s is not None:
            self.smooth = -s.factor * self.g
            self.smooth_x = s.weighted_hidden(c, self.g)

    def _rank_one(self, rows: _Rows) -> dict[str, Any]:
        """Label smoothing's part of dX."""
        if self.smoothing is None or self.smooth is None:
            return {}
        smooth = jnp.where(rows.exists, self.smooth[rows.token], 0.0)
        return {"smooth": smooth, "weighted_rows": self.call.along_size(self.smoothing.weighted_rows)}

    def hidden(
        self, state: _State, rows: _Rows, e: Array, start: Index, factors: _Factors | None, scale: Array | None
    ) -> _State:
        """dX from a block e; scale: what the rows still lack when no other block follows."""
        c = self.call
        if not self.needs.hidden:
            return state
        if c.inputs.shard.active:
            scale = None  # other devices' shares follow
        arguments = {"tiles": rows.tiles, "first": rows.first, "start": _index(start), "e": e, "w": c.weight}
        whole = c.columns >= c.vocab
        if factors is not None:
            width = kernels.gradient_columns(rows.tiles.shape[0] - 1, c.padded_size)
            more = round_up(c.padded_size, width) - c.padded_size
            target_rows = jnp.pad(c.weight[jnp.maximum(rows.target, 0)], ((0, 0), (0, more)))
            arguments |= {"factor": factors.factor, "rest": factors.rest, "target_rows": target_rows}
        if scale is not None:
            arguments |= {"scale": scale.reshape(1)} | self._rank_one(rows)
        length = round_up(c.chunk, 8) if c.chunks == 1 else round_up(c.chunks * c.chunk, 8)
        shape = jax.ShapeDtypeStruct((length, c.padded_size), jnp.float32 if scale is None else c.dtype)
        adds = state.hidden is not None and not whole
        results = _into(lambda a, o: kernels.hidden(a, o, adds=adds), arguments, {"out": state.hidden}, {"out": shape})
        return state._replace(hidden=results["out"])

    def weight(
        self, state: _State, rows: _Rows, e: Array, x: Array, start: Index, columns: int, scale: Array | None,
        listed: dict[str, Array] | None = None,
    ) -> _State:  # fmt: skip
        """dW of a block, added to the sum if there is one; scale: what the entries still lack when no other chunk
        follows; listed: rows that are added (:func:`_listed_targets`)."""
        c = self.call
        if not self.needs.weight:
            return state
        arguments = {"rows": rows.number, "start": _index(start), "e": e, "x": x} | (listed or {})
        outs, shapes = {"out": state.weight}, {"out": jax.ShapeDtypeStruct(c.weight.shape, c.dtype)}
        adds = state.low is not None
        if scale is None:
            outs["low"], shapes["low"] = state.low, jax.ShapeDtypeStruct(c.weight.shape, jnp.int8)
        else:
            arguments["scale"] = scale.reshape(1)
            if state.low is not None:
                arguments["low"] = state.low
            if self.smooth_x is not None:
                arguments["smooth_x"] = c.along_size(self.smooth_x)
                if c.class_weight is not None:
                    arguments["class_weight"] = c.class_weight
        results = _into(lambda a, o: kernels.weight(a, o, columns=columns, adds=adds), arguments, outs, shapes)
        return state._replace(weight=results["out"], low=results.get("low"))

    def bias(self, state: _State, rows: _Rows, e: Array, start: Index, columns: int, factor: Array | None) -> _State:
        """db of a block, relative to the unit."""
        if not self.needs.bias:
            return state
        arguments = {"rows": rows.number, "e": e} | ({} if factor is None else {"factor": factor})
        part = kernels.column_sums(arguments)[:columns]
        old = jnp.zeros(self.call.vocab, jnp.float32) if state.bias is None else state.bias
        part = part + lax.dynamic_slice_in_dim(old, start, columns)
        return state._replace(bias=lax.dynamic_update_slice_in_dim(old, part, start, 0))

    def finished_bias(self, bias: Array | None, scale: Array) -> Array | None:
        if bias is None:
            return None
        if self.smoothing is not None:
            share, k = self.smoothing.factor * self.g.sum(), self.call.inputs.class_weight
            bias = bias - (share if k is None else share * k)
        return bias * scale

    def finished_hidden(self, hidden: Array | None, scale: Array, lent: Array | None = None) -> Array | None:
        """dX by token: sums in float32 get their scale and label smoothing's part, ignored tokens 0.

        ``lent``: a matrix that nothing else will read, which dX lies in if it has dX's shape and dtype.
        """
        if hidden is None:
            return None
        c = self.call
        more = round_up(c.tokens, kernels.RUN) - c.tokens
        position = jnp.pad(jnp.where(c.inputs.valid, c.position, -1), (0, more), constant_values=-1)
        arguments = {"position": position, "made": hidden}
        if hidden.dtype == jnp.float32:
            arguments["scale"] = scale.astype(jnp.float32).reshape(1)
            if self.smoothing is not None and self.smooth is not None:
                arguments["smooth"] = jnp.pad(self.smooth, (0, more))
                arguments["weighted_rows"] = c.along_size(self.smoothing.weighted_rows)
        out = jax.ShapeDtypeStruct((c.tokens, c.padded_size), c.hidden_dtype)
        lends = lent is not None and (lent.shape, lent.dtype) == (out.shape, out.dtype)
        results = _into(kernels.by_token, arguments, {"out": lent if lends else None}, {"out": out})
        return results["out"][:, : c.size]

    def finished_weight(self, weight: Array | None) -> Array | None:
        c = self.call
        return None if weight is None else weight[: c.vocab, : c.size]


def _index(value: Index) -> Array:
    return jnp.asarray(value, jnp.int32).reshape(1)


def _into(
    kernel: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]], arguments: dict[str, Any],
    outs: dict[str, Array | None], shapes: dict[str, Any],
) -> dict[str, Array]:  # fmt: skip
    """The kernel's results: new arrays of ``shapes``, or ``outs`` written in place."""
    given = {name: out for name, out in outs.items() if out is not None}
    if not given:
        return kernel(arguments, shapes)
    references = {name: kernels.reference(out) for name, out in given.items()}
    kernel(arguments | references, {})
    return {name: kernels.written(reference) for name, reference in references.items()}


class _Waiting(NamedTuple):
    """Gradients made in the forward, waiting for the upstream gradient: the last chunk's exponentials, and sums."""

    x: Array | None  # u ⊙ x of the last chunk; None where u lacks the tokens' upstream gradients
    e: Array
    factors: _Factors
    by_token: _Factors  # of all tokens
    state: _State


class Held(NamedTuple):
    """What the backward needs."""

    inputs: Inputs
    g: Array  # by token
    waiting: _Waiting


def one_pass(dtype: jnp.dtype, options: LossOptions) -> bool:
    """Whether exponentials relative to the target can be held in ``dtype``: float16's range ends at 11 nats."""
    del options
    return bool(dtype != jnp.float16)


def holds(dtype: jnp.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token."""
    return bool(dtype != jnp.float16)


def _factors(c: _Call, rows: _Rows, running: RunningSums, part: TokenSums, g: Array) -> _Factors:
    """u = g α / (e_y + s), and u T with T = ((α − β) e_y − β s) / α; 0 where there is no row.

    T rounded is what e is to have at the target: where gradients cancel, dW must hold the targets before it is rounded.
    """
    alpha, beta = numerics.alpha_beta(XP, c.inputs, c.options, part.lse, _class_weights_of(c, rows))
    share = numerics.target_over_alpha(XP, alpha, beta, running.e_target(), running.s)
    share = numerics.sloped(XP, share, part.target_logit, c.options)
    factor = g[rows.token] * alpha / (running.s + running.e_target())
    factor = jnp.where(rows.exists, factor, 0.0)
    here = rows.exists & (rows.target >= 0) if c.inputs.shard.active else rows.exists
    fits = rows.exists & (rows.target >= 0) & (jnp.abs(share) < LARGEST_STORED)
    info = jnp.finfo(c.dtype)  # type: ignore[no-untyped-call]
    # Not a cast and back: XLA may leave such a pair out.
    stored = lax.reduce_precision(jnp.where(fits, share, 0.0), info.nexp, info.nmant)
    return _Factors(factor, jnp.where(here, factor * share, 0.0), stored)


def _class_weights_of(c: _Call, rows: _Rows) -> Array | float:
    """The targets' class weights of a chunk's rows."""
    if c.inputs.class_weight is None:
        return 1.0
    if c.inputs.shared is not None and c.inputs.shared.class_weight is not None:
        return c.inputs.shared.class_weight[rows.token]
    return c.inputs.class_weight[jnp.maximum(rows.target, 0)]


class _Forwarded(NamedTuple):
    """What the forward of one chunk gives."""

    rows: _Rows
    part: TokenSums
    factors: _Factors
    e: Array


def _forward(c: _Call, first: Index, g: Array, statistics: bool) -> _Forwarded:
    rows = c.rows_at(first)
    running, weighted, e = _sums(c, rows, statistics, holds=True)
    assert e is not None
    part = running.finish(weighted)
    factors = _factors(c, rows, running, part, g)
    column = jnp.where(rows.target >= 0, rows.target, e.shape[1])[: e.shape[0]]
    stored = factors.stored[: e.shape[0]].astype(e.dtype)
    e = e.at[jnp.arange(e.shape[0]), column].set(stored, mode="drop", unique_indices=True)
    return _Forwarded(rows, part, factors, e)


def _vectors(c: _Call, vectors: Any, forward: _Forwarded) -> Any:
    """``vectors`` by position, or new ones, with what a chunk's forward gives for its rows."""
    parts = (forward.part, forward.factors)
    vectors = _empty(c, parts) if vectors is None else vectors
    return jax.tree.map(lambda vector, part: _put(vector, part, forward.rows.first), vectors, parts)


def loss_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Held]:
    """Sums, and gradients that wait for the upstream scalar: 6·N·D·V flops. There is at least one token."""

    def run(inputs: Inputs, g: Array) -> Any:
        return _loss_gradients(_Call(inputs, options, plan), g, needs, statistics)

    sums, waiting = one_by_one(run)(inputs, g)
    return sums, Held(inputs, g, waiting)


def _loss_gradients(c: _Call, g: Array, needs: Needs, statistics: bool) -> tuple[TokenSums, _Waiting]:
    p = _Products(c, needs, g, numerics.largest_factor(XP, g))

    def chunk(carry: Any, first: Index) -> Any:
        vectors, state = carry
        forward = _forward(c, first, p.g, statistics)
        x = forward.factors.operand(forward.rows, c.dtype)
        state = p.weight(state, forward.rows, forward.e, x, 0, c.vocab, None)
        state = p.hidden(state, forward.rows, forward.e, 0, forward.factors, None)
        state = p.bias(state, forward.rows, forward.e, 0, c.vocab, forward.factors.factor)
        return _vectors(c, vectors, forward), state

    vectors, state = None, _State()
    if c.chunks > 1:
        vectors, state = _chunks(c, chunk, lambda: chunk((None, _State()), jnp.int32(0)), c.chunks - 1)
    (vectors, state), last = _after((vectors, state), (c.chunks - 1) * c.chunk)
    forward = _forward(c, last, p.g, statistics)
    sums, by_token = c.by_token(_vectors(c, vectors, forward))
    state = _last_bias(p, state, forward.rows, forward.e, forward.factors, by_token)
    if state.low is not None:
        state = _add_to_sum(c, state, by_token)
    x = forward.factors.operand(forward.rows, c.dtype)
    return _with_weighted(c, sums, p.smoothing), _Waiting(x, forward.e, forward.factors, by_token, state)


def _last_bias(p: _Products, state: _State, rows: _Rows, e: Array, factors: _Factors, by_token: _Factors) -> _State:
    """db with the last chunk's share, and what all targets' elements still lack."""
    state = p.bias(state, rows, e, 0, p.call.vocab, factors.factor)
    return state if state.bias is None else state._replace(bias=_add_target_sums(p.call, state.bias, by_token.rest))


def token_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Held]:
    """Sums, and exponentials that wait for an upstream gradient per token: 6·N·D·V flops, in a plan of one chunk."""

    def run(inputs: Inputs, g: Array) -> Any:
        c = _Call(inputs, options, plan)
        forward = _forward(c, jnp.int32(0), g / numerics.largest_factor(XP, g), statistics)
        sums, by_token = c.by_token(_vectors(c, None, forward))
        return _with_weighted(c, sums, _Smoothing.prepare(c)), _Waiting(
            None, forward.e, forward.factors, by_token, _State()
        )

    sums, waiting = one_by_one(run)(inputs, g)
    return sums, Held(inputs, g, waiting)


def finish(held: Held, options: LossOptions, plan: ChunkPlan, needs: Needs, upstream: Array) -> Gradients:
    """dX, dW and db with the upstream gradient, from what :func:`loss_gradients` or :func:`token_gradients` left."""

    def run(inputs: Inputs, g: Array, held: _Waiting, upstream: Array) -> Gradients:
        return _finish(_Call(inputs, options, plan), g, held, needs, upstream)

    return one_by_one(run)(*held, upstream)  # type: ignore[no-any-return]


def _finish(c: _Call, g: Array, held: _Waiting, needs: Needs, upstream: Array) -> Gradients:
    rows = c.rows_at(jnp.int32((c.chunks - 1) * c.chunk))
    if held.x is None:
        p, held = _arrived(c, g, held, rows, needs, jnp.where(c.inputs.valid, upstream.reshape(-1), 0.0))
        upstream = jnp.ones((), jnp.float32)
    else:
        p = _Products(c, needs, g, numerics.largest_factor(XP, g))
    assert held.x is not None
    scale = (p.unit * upstream).astype(jnp.float32)
    single = c.chunks == 1
    # Of several chunks the sum has them.
    listed = _listed_targets(c, held.by_token) if single and needs.weight else {}
    state = p.weight(held.state, rows, held.e, held.x, 0, c.vocab, scale, listed)
    if state.weight is not None:
        # dX's operand is gathered when dW's is not needed any more.
        weight, target = lax.optimization_barrier((state.weight, rows.target))
        state, rows = state._replace(weight=weight), rows._replace(target=target)
    state = p.hidden(state, rows, held.e, 0, held.factors, scale if single else None)
    return Gradients(
        p.finished_hidden(state.hidden, scale),
        p.finished_weight(state.weight),
        p.finished_bias(held.state.bias, scale),
    )


def _arrived(
    c: _Call, g: Array, held: _Waiting, rows: _Rows, needs: Needs, upstream: Array
) -> tuple[_Products, _Waiting]:
    """The products of g ⊙ upstream [N], and for them what waits for those of g: its row factors grow in proportion, and
    with them the operand and the bias gradient are known."""
    p = _Products(c, needs, g * upstream, numerics.largest_factor(XP, g * upstream))
    times = upstream * (numerics.largest_factor(XP, g) / p.unit)
    by_position = jnp.where(rows.exists, times[rows.token], 0.0)
    factors, by_token = held.factors.times(by_position), held.by_token.times(times)
    state = _last_bias(p, held.state, rows, held.e, factors, by_token)
    return p, _Waiting(factors.operand(rows, c.dtype), held.e, factors, by_token, state)


def _sorted_targets(c: _Call, values: Any) -> tuple[Array, Array, Any]:
    """The targets sorted, their tokens in the tokens' order, and their values; no target comes last."""
    place = c.inputs.shard.place(c.inputs.target)
    real = c.inputs.valid & c.inputs.inside
    key = jnp.where(real & (place >= 0) if c.inputs.shard.active else real, place, c.padded_vocab)
    key, token = lax.sort((key, jnp.arange(c.tokens, dtype=jnp.int32)), num_keys=1, is_stable=True)
    return key, token, jax.tree.map(lambda vector: vector[token], values)


def _add_targets(c: _Call, key: Array, token: Array, vectors: _Factors, outs: dict[str, Array]) -> dict[str, Array]:
    """``outs`` with what the products lack of the targets' elements of dW: a sum of several chunks, or rows alone.

    ``key``: which of the rows each token of the sorted ones has; their number where there is none.
    """
    rows, more = outs["out"].shape[0], round_up(c.tokens, kernels.RUN) + kernels.RUN - c.tokens
    keys = {"key": jnp.pad(key, (0, more), constant_values=rows)}
    lists = {"token": token} | vectors._asdict()
    lists = {name: jnp.pad(vector, (0, more)) for name, vector in lists.items()} | {"x": c.hidden}
    references = {name: kernels.reference(out) for name, out in outs.items()}
    part = kernels.add_targets(keys | lists | references)
    kernels.add_long_runs(keys | {"part": part} | references)
    return {name: kernels.written(out) for name, out in references.items()}


def _add_to_sum(c: _Call, state: _State, by_token: _Factors) -> _State:
    """The sum of several chunks, with what it lacks of the targets' elements."""
    assert state.weight is not None
    assert state.low is not None
    key, token, vectors = _sorted_targets(c, by_token)
    summed = _add_targets(c, key, token, vectors, {"out": state.weight, "low": state.low})
    return state._replace(weight=summed["out"], low=summed["low"])


def _listed_targets(c: _Call, by_token: _Factors) -> dict[str, Array]:
    """The rows of dW that hold what one chunk's product lacks of the targets' elements: arguments of kernels.weight."""
    key, token, vectors = _sorted_targets(c, by_token)
    real, first = key < c.padded_vocab, key != jnp.roll(key, 1).at[0].set(-1)
    seen = jnp.cumsum(first & real, dtype=jnp.int32)
    place, places = seen - 1, round_up(c.tokens, kernels.STEP)
    listed = jnp.zeros((places, c.padded_size), c.dtype)
    listed = _add_targets(c, jnp.where(real, place, places), token, vectors, {"out": listed})["out"]

    rows = kernels.pair_rows()
    pairs = round_up(c.vocab, rows) // rows
    behind = jnp.searchsorted(key, jnp.arange(pairs + 1, dtype=jnp.int32) * rows, method="scan_unrolled")
    bounds = jnp.where(behind > 0, seen[behind - 1], 0)
    pair, listed_rows = jnp.minimum(key // rows, pairs), kernels.listed_rows()
    size = pairs * listed_rows + kernels.STEP  # they are asked for a step ahead
    number = pair * listed_rows + place - bounds[pair] // kernels.TILING * kernels.TILING
    number = jnp.where(first & real, number, size)
    numbers = jnp.full(size, -1, jnp.int32).at[number].set(key - pair * rows, mode="drop")
    return {"listed": listed, "bounds": bounds, "numbers": numbers}


def _add_target_sums(c: _Call, bias: Array, values: Array) -> Array:
    """bias[y_i] += value_i, in a fixed order."""
    key, _, value = _sorted_targets(c, values)
    total, ends = run_sums(key, value)
    return bias.at[jnp.where(ends, key, c.padded_vocab)].add(total, mode="drop")


def known_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Array, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, either order of the plan."""

    def run(inputs: Inputs, known: KnownRows, g: Array) -> Gradients:
        return _known_gradients(_Call(inputs, options, plan), known, g, needs)

    return one_by_one(run)(inputs, known, g)  # type: ignore[no-any-return]


def _known_gradients(c: _Call, known: KnownRows, g: Array, needs: Needs) -> Gradients:
    unit = known.unit(XP)
    p = _Products(c, needs, g, unit)
    lent = None
    if c.columns < c.vocab:
        state, lent = _known_slices(c, p, known)
    else:
        state = _known_chunks(c, p, known)
    return Gradients(
        p.finished_hidden(state.hidden, unit, lent),
        p.finished_weight(state.weight),
        p.finished_bias(state.bias, unit),
    )


def _known_matrix(c: _Call, p: _Products, known: KnownRows, rows: _Rows, start: Index, columns: int) -> Array:
    """The gradient's matrix of a block, relative to the unit."""

    def pick(values: Array, nothing: float = 0.0) -> Array:
        return jnp.where(rows.exists, values[rows.token], nothing)

    factor = pick(known.factor / p.unit)
    vectors = {
        "anchor": pick(known.anchor, kernels.NO_ROW),
        "log_total": pick(known.log_total),
        "factor": factor,
        "element": factor * pick(known.target),
    }
    for name in ("alpha", "gamma", "sigma"):
        values = getattr(known, name)
        if values is not None:
            vectors[name] = pick(values)
    if known.sigma is not None and c.class_weight is not None:
        vectors["class_weight"] = c.class_weight
    config = c.config(kernels.KNOWN, columns)
    arguments = c.first_product(config, rows, start) | vectors
    e: Array = kernels.logits(config, arguments, {"e": c.matrix(columns)})["e"]
    return e


def _known_chunks(c: _Call, p: _Products, known: KnownRows) -> _State:
    """The tokens order: dX is finished chunk by chunk, dW with the last chunk."""

    def chunk(state: _State, first: Index, final: bool = False) -> _State:
        rows = c.rows_at(first)
        e = _known_matrix(c, p, known, rows, 0, c.vocab)
        state = p.weight(state, rows, e, rows.x, 0, c.vocab, p.unit if final else None)
        state = p.hidden(state, rows, e, 0, None, p.unit)
        return p.bias(state, rows, e, 0, c.vocab, None)

    state = _State()
    if c.chunks > 1:
        state = _chunks(c, chunk, lambda: chunk(_State(), jnp.int32(0)), c.chunks - 1)
    state, last = _after(state, (c.chunks - 1) * c.chunk)
    return chunk(state, last, final=True)


def _known_slices(c: _Call, p: _Products, known: KnownRows) -> tuple[_State, Array]:
    """The vocab order: dW is finished slice by slice, dX adds up in float32. Also rows.x, read for the last time."""
    rows = c.rows_at(jnp.int32(0))

    def part(state: _State, start: Index, columns: int) -> _State:
        e = _known_matrix(c, p, known, rows, start, columns)
        state = p.weight(state, rows, e, rows.x, start, columns, p.unit)
        state = p.hidden(state, rows, e, start, None, None)
        return p.bias(state, rows, e, start, columns, None)

    full, rest = divmod(c.vocab, c.columns)
    state = part(_State(), jnp.int32(0), c.columns)
    state = _later_blocks(lambda state, start: part(state, start, c.columns), state, full, c.columns)
    state, last = _after(state, full * c.columns)
    state = part(state, last, rest) if rest else state
    done: tuple[_State, Array] = lax.optimization_barrier((state, rows.x))
    return done
