"""The rows of a chunk: what both backends, given logits and distillation share.

A chunk is some tokens, a block some columns of their logits. Mirror of torch_impl/chunk.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, Needs, TokenSums, ValidFirst
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.slices import Index, for_slices, put, put_rows, rows_at, take
from logitless.objectives import Tile
from logitless.planning import ChunkPlan
from logitless.spec import (
    CLASS_SUMS,
    LOWEST_ANCHOR,
    LOWEST_GAP,
    RESCUE_NATS,
    SQUARED_SCALE,
    LossOptions,
    Statistics,
    class_sums,
)

Product = Callable[[Array, Array], Array]

Vectors = TypeVar("Vectors")
"""Vectors [N] in a container."""

# ---------------------------------------------------------------------------------------------------------------------
# One block of logits


def unpadded(z: Array, limit: Array | None, start: Index, value: float = -jnp.inf) -> Array:
    """z, [C, B] from column ``start`` on, with ``value`` in the columns from ``limit`` on, which are padding."""
    if limit is None:
        return z
    columns: Array = start + jnp.arange(z.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(columns < limit, z, value)


def is_target(target: Array, start: Index, size: int) -> Array:
    """[C, size]: whether column start + j is the row's target."""
    columns: Array = start + jnp.arange(size, dtype=jnp.int32)[None, :]
    return jnp.equal(target[:, None], columns)


def product(a: Array, b: Array, dtype: DTypeLike) -> Array:
    """a b, accumulated in ``dtype``."""
    return jnp.dot(a, b, preferred_element_type=dtype)


def vector_product(matrix: Array, vector: Array) -> Array:
    """matrix @ vector, neither of them rounded. By default a GPU rounds float32 to TF32, a TPU to bfloat16."""
    return jnp.matmul(matrix, vector, precision=jax.lax.Precision.HIGHEST)


def column_sums(matrix: Array, factor: Array) -> Array:
    """Σ_i factor_i matrix_ij. On a GPU a product would need the matrix in memory; a sum is fused with what makes it."""
    sums: Array = jax.lax.platform_dependent(
        matrix, factor,
        cpu=lambda matrix, factor: vector_product(matrix.T, factor),
        default=lambda matrix, factor: (matrix * factor[:, None]).sum(axis=0),
    )  # fmt: skip
    return sums


def by_blocks_on_cpu(whole: Product, by_blocks: Product, a: Array, b: Array) -> Array:
    """``whole(a, b)``; on a CPU ``by_blocks(a, b)`` of 16-bit floats, which XLA converts to float32 there first."""
    if jnp.dtype(a.dtype).itemsize > 2:
        return whole(a, b)
    made: Array = jax.lax.platform_dependent(a, b, cpu=by_blocks, default=whole)
    return made


def capped(z: Array, options: LossOptions, temperature: Array | None = None) -> Array:
    """f(r): logit_scale, then softcap, then the tokens' own temperatures."""
    if options.softcap is not None:
        z = options.softcap * jnp.tanh(z * (options.logit_scale / options.softcap))
    elif options.logit_scale != 1.0:
        z = z * options.logit_scale
    return z if temperature is None else z / temperature


def slope(z: Array, options: LossOptions, temperature: Array | None = None) -> Array:
    """1 − (z / cap)²: the softcap's derivative, from the capped logits and the tokens' own temperatures."""
    assert options.softcap is not None
    return 1.0 - jnp.square(z / options.softcap if temperature is None else z / options.softcap * temperature)


def temperature_column(inputs: Inputs, first: Index, tokens: int) -> Array | None:
    """[C, 1] of the tokens from ``first``, if each has its own."""
    return None if inputs.temperature is None else take(inputs.temperature, first, tokens)[:, None]


def logits_block(x: Array, inputs: Inputs, first: Index, start: Index, size: int, options: LossOptions) -> Array:
    """z[:, start:start + size] of the rows x, in the accumulation dtype. ``first``: x's first token."""
    dtype = inputs.accumulation_dtype
    z = product(x, weight_rows(inputs, start, size).T, dtype)
    if inputs.bias is not None:
        z = z + take(inputs.bias, start, size).astype(dtype)[None, :]
    return capped(z, options, temperature_column(inputs, first, x.shape[0]))


def weight_rows(inputs: Inputs, start: Index, size: int) -> Array:
    """The weight's rows of the entries from ``start``, [size, D]."""
    turned = inputs.turned_weight
    return take(inputs.weight, start, size) if turned is None else take(turned, start, size, axis=1).T


def weight_at(inputs: Inputs, entries: Array) -> Array:
    """The weight's rows of these entries, [..., D]."""
    turned = inputs.turned_weight
    return rows_at(inputs.weight, entries) if turned is None else rows_at(turned, entries, axis=1).T


def compacted(inputs: Inputs, plan: ChunkPlan) -> Inputs:
    """The inputs with the valid tokens first, so that chunks behind them need not be computed. Unchanged where there is
    one chunk. Unchanged, too, where devices share the work: all of them have to take every step together."""
    if plan.token_chunk >= plan.tokens or inputs.shard.active or parallel.tracked():
        return inputs
    order = ValidFirst.of(inputs.valid)
    names = "target", "valid", "inside", "token_weight", "temperature"
    present = {name: values for name in names if (values := getattr(inputs, name)) is not None}
    return inputs._replace(order=order, **{name: values[order.token] for name, values in present.items()})


def count_of(inputs: Inputs) -> Array | None:
    """How many of the tokens, in their order, are to be computed; None for all of them."""
    return None if inputs.order is None else most_valid(inputs.valid)


@jax.custom_batching.custom_vmap
def most_valid(valid: Array) -> Array:
    """The largest number of valid tokens along the last axis."""
    return valid.sum(axis=-1, dtype=jnp.int32).max()


@most_valid.def_vmap
def _of_all_problems(size: int, batched: list[bool], valid: Array) -> tuple[Array, bool]:
    """One number for all problems: a loop whose length differs among them would copy all that it carries."""
    return most_valid(valid), False


def by_position(inputs: Inputs, vectors: Vectors) -> Vectors:
    """Vectors that have the tokens' order in the inputs' order."""
    return vectors if inputs.order is None else _picked(vectors, inputs.order.token)


def by_token(inputs: Inputs, vectors: Vectors) -> Vectors:
    """Vectors that have the inputs' order in the tokens' order."""
    return vectors if inputs.order is None else _picked(vectors, inputs.order.position)


def _picked(vectors: Vectors, places: Array) -> Vectors:
    picked: Vectors = jax.tree.map(lambda vector: vector[places], vectors)
    return picked


def put_tokens(array: Array, rows: Array, first: Index, inputs: Inputs) -> Array:
    """array [N, D] with those rows that belong to the tokens from ``first``."""
    if inputs.order is None:
        return put(array, rows, first)
    return put_rows(array, rows, take(inputs.order.token, first, rows.shape[0]))


def rows_of(inputs: Inputs, first: Index, size: int) -> Array:
    """The chunk's hidden states, zero for an ignored token whatever it holds."""
    if inputs.order is None:
        x = take(inputs.hidden, first, size)
    else:
        x = rows_at(inputs.hidden, take(inputs.order.token, first, size))
    return jnp.where(take(inputs.valid, first, size)[:, None], x, jnp.zeros((), x.dtype))


def tile_gradients(
    inputs: Inputs, tile: Tile, needs: Needs, unit: Array, logit_gradient: Callable[[Array, Index, Index, int], Array]
) -> Gradients:
    """dX, dW and db from the gradient of the raw logits, a tile at a time: 4·N·D·V flops beside its own.

    ``logit_gradient(x, first, start, columns)`` is a tile of it divided by ``unit``, [C, B]; x [C, D] are the hidden
    states of the tokens from ``first``. dX and db are in the accumulation dtype. dW is in the weight's: a block of the
    vocabulary is done with all its tokens before the next begins, so that its rows of dW are rounded once and no
    accumulator of dW's size exists.
    """
    dtype, (vocab, size) = inputs.accumulation_dtype, inputs.weight.shape

    def block(carry: Gradients, start: Index, columns: int) -> Gradients:
        def chunk(carry: Gradients, first: Index, tokens: int) -> Gradients:
            dx, part, bias_part = carry
            x = rows_of(inputs, first, tokens)
            dz = logit_gradient(x, first, start, columns)
            operand = dz.astype(x.dtype)
            if dx is not None:
                rows = product(operand, take(inputs.weight, start, columns), dtype)
                dx = put(dx, take(dx, first, tokens) + rows, first)
            if part is not None:
                part = part + product(operand.T, x, dtype)
            return Gradients(dx, part, None if bias_part is None else bias_part + dz.sum(axis=0, dtype=dtype))

        parts = Gradients(
            hidden=carry.hidden,
            weight=jnp.zeros((columns, size), dtype) if needs.weight else None,
            bias=jnp.zeros(columns, dtype) if needs.bias else None,
        )
        dx, part, bias_part = for_slices(tile.tokens, tile.token_chunk, chunk, parts)
        dw, db = carry.weight, carry.bias
        if dw is not None and part is not None:
            dw = put(dw, (part * unit).astype(inputs.weight.dtype), start)
        if db is not None and bias_part is not None:
            db = put(db, bias_part * unit, start)
        return Gradients(dx, dw, db)

    zeros = Gradients(
        hidden=jnp.zeros(inputs.hidden.shape, dtype) if needs.hidden else None,
        weight=jnp.zeros((vocab, size), inputs.weight.dtype) if needs.weight else None,
        bias=jnp.zeros(vocab, dtype) if needs.bias else None,
    )
    gradients = for_slices(vocab, tile.vocab_chunk, block, zeros)
    return gradients._replace(hidden=None if gradients.hidden is None else gradients.hidden * unit)


# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


class RunningSums(NamedTuple):
    """s_i = Σ_{j ≠ y_i} exp(z_ij − anchor_i) over the blocks seen so far, and what else of CLASS_SUMS was asked for."""

    target_logit: Array
    target: Array
    anchor: Array
    sums: dict[str, Array]
    limit: Array | None = None  # where padding begins, if there is any

    @staticmethod
    def start(target_logit: Array, target: Array, statistics: Statistics, limit: Array | None = None) -> RunningSums:
        sums = {name: jnp.zeros_like(target_logit) for name in class_sums(statistics)}
        sums["highest"] = jnp.full_like(target_logit, -jnp.inf)
        if statistics is True:
            sums |= {"lowest": jnp.full_like(target_logit, jnp.inf), "argmax": jnp.zeros_like(target)}
        return RunningSums(target_logit, target, jnp.maximum(target_logit, LOWEST_ANCHOR), sums, limit)

    @property
    def s(self) -> Array:
        return self.sums["s"]

    @property
    def highest(self) -> Array:
        return self.sums["highest"]

    def observe(self, z: Array, start: Index) -> RunningSums:
        """Maximum (and minimum and first index of the maximum) of a block of logits."""
        above, highest = unpadded(z, self.limit, start), self.highest
        block_highest = above.max(axis=1)
        sums = self.sums | {"highest": jnp.maximum(highest, block_highest)}
        if "argmax" in sums:
            best = above.argmax(axis=1).astype(jnp.int32) + start
            sums["argmax"] = jnp.where(block_highest > highest, best, sums["argmax"])
            sums["lowest"] = jnp.minimum(sums["lowest"], unpadded(z, self.limit, start, jnp.inf).min(axis=1))
        return self._replace(sums=sums)

    def rescue(self) -> RunningSums:
        """Move a row's anchor to its maximum where exponents would grow too large. Its sums are rescaled."""
        return self._moved(jnp.where(self.highest - self.anchor > RESCUE_NATS, self.highest, self.anchor))

    def _moved(self, moved: Array) -> RunningSums:
        sums = self.sums | numerics.moved_sums(XP, self.sums, self.anchor - moved)
        return self._replace(anchor=moved, sums=sums)

    def exponentials(self, z: Array, start: Index) -> Array:
        """exp(z − anchor), 0 at the target."""
        e = unpadded(jnp.exp(z - self.anchor[:, None]), self.limit, start, 0.0)
        return jnp.where(is_target(self.target, start, z.shape[1]), 0.0, e)

    def with_block(self, z: Array, start: Index) -> RunningSums:
        """The sums with a block's exponentials."""
        e, sums = self.exponentials(z, start), self.sums.copy()
        sums["s"] = sums["s"] + e.sum(axis=1)
        if "gap_sum" in sums:
            gaps = jnp.maximum(z - self.anchor[:, None], LOWEST_GAP)
            sums["gap_sum"] = sums["gap_sum"] + (e * gaps).sum(axis=1)
        if "squares" in sums:
            sums["squares"] = sums["squares"] + jnp.square(SQUARED_SCALE * e).sum(axis=1)
        return self._replace(sums=sums)

    def together(self, shard: Shard, weighted: Array | None) -> tuple[RunningSums, Array | None]:
        """The sums over all devices. Their anchors may have moved differently."""
        if not shard.active:
            return self, weighted
        anchor = shard.largest(self.anchor)
        sums = self.extremes(shard) if "argmax" in self.sums else self
        return sums._moved(anchor).total(shard, weighted)

    def extremes(self, shard: Shard) -> RunningSums:
        """Maximum (and minimum and lowest id of the maximum) over all devices."""
        if not shard.active:
            return self
        signs = {"max": 1, "min": -1}
        ways = {name: CLASS_SUMS[name].merge for name in self.sums}
        found = shard.largest({name: signs[how] * self.sums[name] for name, how in ways.items() if how in signs})
        sums = self.sums | {name: signs[ways[name]] * value for name, value in found.items()}
        if "argmax" in sums:
            sums["argmax"] = shard.winner(sums["argmax"], self.highest == sums["highest"])
        return self._replace(sums=sums)

    def total(self, shard: Shard, weighted: Array | None) -> tuple[RunningSums, Array | None]:
        """The sums over all devices. Their anchors are the same."""
        added = {name: value for name, value in self.sums.items() if CLASS_SUMS[name].merge == "sum"}
        added, weighted = shard.total((added, weighted))
        return self._replace(sums=self.sums | added), weighted

    def e_target(self) -> Array:
        """exp(a − anchor): 1 but for a rescued row."""
        return jnp.exp(self.target_logit - self.anchor)

    def finish(self, weighted_logits: Array | None) -> TokenSums:
        sums, known = self.sums, (self.target_logit, self.anchor, self.s)
        log_total, entropy = numerics.finish_sums(XP, *known, sums.get("gap_sum"))
        found = TokenSums(self.target_logit, self.anchor, log_total, weighted_logits, entropy)
        if "argmax" not in sums:
            return found
        return found._replace(
            argmax=sums["argmax"],
            max_logit=sums["highest"],
            min_logit=sums["lowest"],
            others_squared=numerics.squared_shares(XP, *known, sums["squares"]),
        )


def empty_sums(inputs: Inputs, weighted: bool, statistics: Statistics) -> TokenSums:
    """[N] zeros for chunks to be put into."""
    zero = jnp.zeros(inputs.target.shape, inputs.accumulation_dtype)
    some = zero if statistics is True else None
    index = jnp.zeros(inputs.target.shape, jnp.int32) if statistics is True else None
    entropy = zero if statistics else None
    return TokenSums(zero, zero, zero, zero if weighted else None, entropy, index, some, some, some)


def put_sums(all_sums: TokenSums, part: TokenSums, first: Index) -> TokenSums:
    """``all_sums`` with those of the tokens from ``first``."""
    sums: TokenSums = jax.tree.map(lambda whole, piece: put(whole, piece, first), all_sums, part)
    return sums


class Smoothing(NamedTuple):
    """Label smoothing's rank-one part: every dz_ij has −(ε/V) t g k_j, so nothing of it needs the C × V matrix."""

    factor: float  # ε / V
    weighted_rows: Array  # Σ_j k_j w_j, [D]
    weighted_bias: Array  # Σ_j k_j b_j

    @staticmethod
    def prepare(inputs: Inputs, options: LossOptions, sums: Callable[[], tuple[Array, Array]]) -> Smoothing | None:
        """None where there is no smoothing, or where a softcap makes it part of the matrix.

        sums: weighted_rows and weighted_bias, as the backend adds them.
        """
        if not options.label_smoothing or not options.separable:
            return None
        return Smoothing(options.label_smoothing / inputs.vocab, *sums())

    def weighted_logits(self, x: Array, options: LossOptions, temperature: Array | None = None) -> Array:
        """Σ_j k_j z_ij = scale · (x_i · Σ_j k_j w_j + Σ_j k_j b_j), divided by the token's own temperature."""
        rows = vector_product(x.astype(self.weighted_rows.dtype), self.weighted_rows)
        z = (rows + self.weighted_bias) * options.logit_scale
        return z if temperature is None else z / temperature


def normalizer(inputs: Inputs, options: LossOptions, denominator: Array | None) -> Array:
    """What the sum of the token losses is multiplied by: 1 / Σ t k_y for mean, 0 where no token counts."""
    one = jnp.ones((), inputs.accumulation_dtype)
    if options.reduction != "mean":
        return one
    if denominator is not None:
        return one / denominator.astype(one.dtype)
    counts = numerics.counts(XP, inputs)
    if not inputs.shard.batch_axes:
        return jnp.where((counts != 0).any(), one / counts.sum(), 0.0)
    total, number = inputs.shard.batch_total((counts.sum(), (counts != 0).sum()))
    return jnp.where(number > 0, one / total, 0.0)
