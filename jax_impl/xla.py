"""The target-anchored chunk in jax.numpy, for any device that XLA compiles for. Mirror of torch_impl/eager.py.

Two verbs (docs/design.md): :func:`token_sums` reads the logits block by block and keeps only sums per token.
:func:`loss_gradients` and :func:`known_gradients` also give dX, dW and db. All work on flat arrays ([N, D], [V, D]) in
the accumulation dtype (float64 for float64 input, else float32). Chunks and blocks are loops with static sizes, and a
ragged last one is a loop of its own. The loops carry a chunk's logits, dX and dW and update them in place. Where tokens
are cut in chunks, those that count come first, and the loops end behind the last of them. On a GPU one block has the
whole vocabulary (``plan.vocab_chunk``).

Rounding: logits, exponentials and sums are float32. A block of the logits' gradient is rounded to the input dtype
before the products, because a traced function does not know its platform. The products accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, KnownRows, Needs, TokenSums
from logitless.jax_impl.chunk import (
    RunningSums,
    Smoothing,
    by_position,
    by_token,
    capped,
    column_sums,
    compacted,
    count_of,
    empty_sums,
    is_target,
    logits_block,
    product,
    put_sums,
    put_tokens,
    rows_of,
    slope,
    temperature_column,
    unpadded,
    vector_product,
    weight_at,
    weight_rows,
)
from logitless.jax_impl.slices import Index, add_to, for_slices, put, take, take_block
from logitless.planning import ChunkPlan
from logitless.scratch import ANCHOR_ROWS
from logitless.spec import LOWEST_GAP, LossOptions, Statistics

# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


def _target_logits(x: Array, inputs: Inputs, first: Index, options: LossOptions) -> Array:
    """The anchors a_i = z_{i, y_i}, one dot product per token. NaN for an id outside the vocabulary."""
    tokens = x.shape[0]
    if inputs.shared is not None:
        return take(inputs.shared.target_logit, first, tokens)
    logits = _row_logits(x, inputs, first, take(inputs.target, first, tokens), options)
    return jnp.where(take(inputs.inside, first, tokens), logits, jnp.nan)


def own_target_logits(inputs: Inputs, options: LossOptions) -> Array:
    """The anchors [N] of the targets whose rows are on this device, 0 elsewhere."""
    place = inputs.shard.place(inputs.target)
    logits = _row_logits(rows_of(inputs, 0, place.shape[0]), inputs, 0, jnp.maximum(place, 0), options)
    return jnp.where(place >= 0, logits, 0.0)


def _row_logits(x: Array, inputs: Inputs, first: Index, target: Array, options: LossOptions) -> Array:
    """z_{i, target_i} of the rows x, of the tokens from ``first``."""
    dtype, tokens = inputs.accumulation_dtype, x.shape[0]

    def part(dots: Array, start: Index, size: int) -> Array:
        rows = weight_at(inputs, take(target, start, size)).astype(dtype)
        return put(dots, (rows * take(x, start, size).astype(dtype)).sum(axis=1), start)

    dots = for_slices(tokens, ANCHOR_ROWS, part, jnp.zeros(tokens, dtype))
    if inputs.bias is not None:
        dots = dots + inputs.bias[target].astype(dtype)
    return capped(dots, options, _temperatures(inputs, first, tokens))


def _temperatures(inputs: Inputs, first: Index, tokens: int) -> Array | None:
    """[C] of the tokens from ``first``, if each has its own."""
    return None if inputs.temperature is None else take(inputs.temperature, first, tokens)


def _start(
    inputs: Inputs, options: LossOptions, x: Array, target: Array, first: Index, statistics: Statistics
) -> RunningSums:
    """A chunk's sums before its first block."""
    return RunningSums.start(_target_logits(x, inputs, first, options), target, statistics, inputs.shard.limit())


def token_sums(inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics) -> TokenSums:
    """Every token's lse, nll and, if asked for, statistics. 2·N·D·V flops, one block [C, B] of logits at a time."""
    inputs = compacted(inputs, plan)
    smoothing, shard = _smoothing_of(inputs, options, plan), inputs.shard
    sum_logits = options.label_smoothing > 0 and not options.separable

    def chunk(all_sums: TokenSums, first: Index, tokens: int) -> TokenSums:
        x = rows_of(inputs, first, tokens)
        target = shard.place(take(inputs.target, first, tokens))
        running = _start(inputs, options, x, target, first, statistics)
        weighted = jnp.zeros_like(running.s) if sum_logits else None

        def block(carry: tuple[RunningSums, Array | None], start: Index, size: int) -> tuple[RunningSums, Array | None]:
            running, weighted = carry
            z = logits_block(x, inputs, first, start, size, options)
            if weighted is not None:
                k = inputs.class_weight
                weighted = weighted + (z.sum(axis=1) if k is None else vector_product(z, take(k, start, size)))
            return running.observe(z, start).rescue().with_block(z, start), weighted

        running, weighted = for_slices(plan.vocab, plan.vocab_chunk, block, (running, weighted))
        if smoothing is not None:
            weighted = smoothing.weighted_logits(x, options, _temperatures(inputs, first, tokens))
        running, weighted = running.together(shard, weighted)
        return put_sums(all_sums, running.finish(weighted), first)

    empty = empty_sums(inputs, options.label_smoothing > 0, statistics)
    return by_token(inputs, for_slices(plan.tokens, plan.token_chunk, chunk, empty, count_of(inputs)))


def _class_weights_of(inputs: Inputs, first: Index, target: Array) -> Array | float:
    """The class weights of a chunk's targets."""
    if inputs.class_weight is None:
        return 1.0
    if inputs.shared is not None and inputs.shared.class_weight is not None:
        return take(inputs.shared.class_weight, first, target.shape[0])
    return inputs.class_weight[target]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def _smoothing_of(inputs: Inputs, options: LossOptions, plan: ChunkPlan) -> Smoothing | None:
    """Label smoothing's sums over the vocabulary, block by block."""
    dtype, k = inputs.accumulation_dtype, inputs.class_weight

    def add(rows: Array, start: Index, size: int) -> Array:
        block = weight_rows(inputs, start, size).astype(dtype)
        return rows + (block.sum(axis=0) if k is None else vector_product(block.T, take(k, start, size)))

    def sums() -> tuple[Array, Array]:
        rows = for_slices(plan.vocab, plan.vocab_chunk, add, jnp.zeros(inputs.hidden.shape[1], dtype))
        bias = jnp.zeros((), dtype)
        if inputs.bias is not None:
            b = inputs.bias.astype(dtype)
            bias = b.sum() if k is None else vector_product(b, k)
        return rows, bias

    return Smoothing.prepare(inputs, options, sums)


State = tuple[Gradients, Array]
"""The gradients so far, and Σ_i g_i x_i for label smoothing; beside a caller's buffer that of the last chunk alone."""


class _Accumulators:
    """How dX, dW and db accumulate, block by block. The loops carry the arrays themselves, as :class:`Gradients`."""

    def __init__(
        self,
        inputs: Inputs,
        plan: ChunkPlan,
        needs: Needs,
        smoothing: Smoothing | None,
        g: Array,
        hidden_dtype: DTypeLike,
        unit: Array,
    ) -> None:
        """``unit``: the size of the matrix's largest elements."""
        self.inputs, self.plan, self.needs, self.smoothing, self.g = inputs, plan, needs, smoothing, g
        self.dtype, self.hidden_dtype = inputs.accumulation_dtype, hidden_dtype
        self.low = inputs.hidden.dtype != self.dtype
        # Several chunks add to dW in the accumulation dtype. A single chunk finishes each block in the weight's dtype.
        # A buffer of the caller's takes each block of each chunk once it is whole: with its unit and smoothing's share.
        self.adds = inputs.into is not None
        self.direct = (plan.weight_accumulator or not self.low) and not self.adds
        # Low-precision operands: the matrix is divided by the largest factor, and the products are multiplied by it in
        # float32. float16 could not hold it (loss scaling, class weights). 1/N would round all targets' elements to the
        # same side.
        self.unit = unit if self.low and plan.tokens else None

    def start(self) -> State:
        """Zeros, or the caller's buffer, for the wanted gradients, and zeros for Σ_i g_i x_i."""
        vocab, size = self.inputs.weight.shape
        weight_dtype = self.dtype if self.direct or self.inputs.precision.wide_weight else self.inputs.weight.dtype
        weight = jnp.zeros((vocab, size), weight_dtype) if self.inputs.into is None else self.inputs.into
        weight = weight.T if self.inputs.turned else weight  # dW lies as the weight does
        begun = Gradients(
            hidden=jnp.zeros(self.inputs.hidden.shape, self.hidden_dtype) if self.needs.hidden else None,
            weight=weight if self.needs.weight else None,
            bias=jnp.zeros(vocab, self.dtype) if self.needs.bias else None,
        )
        return begun, jnp.zeros(size, self.dtype)

    def add_chunk(
        self, state: State, first: Index, x: Array, factor: Array, matrix: Callable[[Index, int], Array]
    ) -> State:
        """Add the products of the tokens from ``first``. matrix(start, size): their block of E, without ``factor``."""
        gradients, smooth_x = state
        tokens = x.shape[0]
        g = take(self.g, first, tokens)
        if self.smoothing is not None:
            share = vector_product(x.astype(self.dtype).T, g)
            smooth_x = share if self.adds else smooth_x + share
        # float32 operands: the factor goes to the rows of dX and of x, never to the matrix. Low-precision operands: the
        # matrix is rounded once, with the factor in it, and x stays as it is.
        element_factor = factor if self.unit is None else factor / self.unit
        scaled_x = x if self.low else x * factor[:, None]

        def block(carry: Gradients, start: Index, size: int) -> Gradients:
            hidden_part, weight, bias = carry
            e = matrix(start, size)
            if bias is not None:
                bias = put(bias, take(bias, start, size) + column_sums(e, factor), start)
            operand = (e * element_factor[:, None]).astype(x.dtype) if self.low else e
            if hidden_part is not None:
                rows = weight_rows(self.inputs, start, size)
                hidden_part = hidden_part + product(operand, rows, self.dtype)
            if weight is not None:
                part = product(operand.T, scaled_x, self.dtype)
                if not self.direct:
                    part = self._finish_weight(part, smooth_x, start, size)
                part, axis = (part.T, 1) if self.inputs.turned else (part, 0)
                if self.direct or self.adds:
                    weight = add_to(weight, part, start, axis)
                else:
                    weight = put(weight, part.astype(weight.dtype), start, axis)
            return Gradients(hidden_part, weight, bias)

        carry = gradients._replace(hidden=jnp.zeros(x.shape, self.dtype) if self.needs.hidden else None)
        hidden_part, weight, bias = for_slices(self.plan.vocab, self.plan.vocab_chunk, block, carry)
        hidden = gradients.hidden
        if hidden is not None and hidden_part is not None:
            rows = self._finish_hidden(hidden_part, factor, g).astype(hidden.dtype)
            hidden = put_tokens(hidden, rows, first, self.inputs)
        return Gradients(hidden, weight, bias), smooth_x

    def _finish_hidden(self, part: Array, factor: Array, g: Array) -> Array:
        """dX with its row factors and smoothing's share."""
        if not self.low:
            part = part * factor[:, None]
        elif self.unit is not None:
            part = part * self.unit
        if self.smoothing is not None:
            part = part - (self.smoothing.factor * g)[:, None] * self.smoothing.weighted_rows[None, :]
        return part

    def _finish_weight(self, part: Array, smooth_x: Array, start: Index, size: int) -> Array:
        """A block of dW with its unit and smoothing's share, once all tokens of ``smooth_x`` are in it."""
        if self.unit is not None:
            part = part * self.unit
        if self.smoothing is not None:
            k = self.inputs.class_weight
            ones = jnp.ones(size, self.dtype) if k is None else take(k, start, size)
            part = part - ones[:, None] * (self.smoothing.factor * smooth_x)[None, :]
        return part

    def finish(self, state: State) -> Gradients:
        gradients, smooth_x = state
        weight, bias = gradients.weight, gradients.bias
        if weight is not None and self.inputs.turned:
            weight = weight.T
        if weight is not None and self.direct:
            weight = self._finish_weight(weight, smooth_x, 0, self.plan.vocab)
        if bias is not None and self.smoothing is not None:
            share = self.smoothing.factor * self.g.sum()
            bias = bias - (share if self.inputs.class_weight is None else share * self.inputs.class_weight)
        return gradients._replace(weight=weight, bias=bias)


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Plain operations run on every device."""
    return None


def one_pass(dtype: jnp.dtype, options: LossOptions) -> bool:
    """Whether a chunk's matrix can be scaled into ``dtype``'s range before lse is known.

    A z-loss multiplies it by 2 λ lse, for which float16's range is too small.
    """
    return bool(dtype != jnp.float16 or not options.z_loss)


def holds(dtype: jnp.dtype) -> bool:
    """Whether exponentials can wait for an upstream gradient per token. These gradients are made at once or anew."""
    return False


def token_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Never called, see :func:`holds`."""
    raise NotImplementedError


def token_logits(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics
) -> tuple[TokenSums, Array]:
    """Never called, see :func:`holds`."""
    raise NotImplementedError


def logits_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, needs: Needs, logits: Array
) -> Gradients:
    """Never called, see :func:`holds`."""
    raise NotImplementedError


def finish(held: Gradients, options: LossOptions, plan: ChunkPlan, needs: Needs, upstream: Array) -> Gradients:
    """The gradients of :func:`loss_gradients`, times the upstream scalar."""
    return Gradients(*(None if part is None else part.astype(upstream.dtype) * upstream for part in held))


def _held_logits(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, z: Array, x: Array, first: Index, running: RunningSums
) -> tuple[Array, RunningSums]:
    """The logits of a chunk in the first rows of ``z``, and this device's sums of their exponentials."""
    tokens = x.shape[0]

    def logits(carry: tuple[Array, RunningSums], start: Index, size: int) -> tuple[Array, RunningSums]:
        z, running = carry
        block = logits_block(x, inputs, first, start, size, options)
        return put(z, block, start, axis=1), running.observe(block, start)

    def sums(running: RunningSums, start: Index, size: int) -> RunningSums:
        return running.with_block(take_block(z, tokens, start, size), start)

    z, running = for_slices(plan.vocab, plan.vocab_chunk, logits, (z, running))
    # On all devices the chunk's exponentials have the same anchor.
    running = running.extremes(inputs.shard).rescue()
    return z, for_slices(plan.vocab, plan.vocab_chunk, sums, running)


def loss_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Sums and gradients in one pass, 6·N·D·V flops. A chunk's logits are held. Their exponentials, anchored at the
    target, are made twice: for the sums and for the products.

    For a plan in one pass and separable options. g [N]: upstream gradient times normalizer, token weight and
    logit_scale, 0 where ignored.
    """
    inputs, dtype = compacted(inputs, plan), inputs.accumulation_dtype
    g = by_position(inputs, g)
    smoothing = _smoothing_of(inputs, options, plan)
    # dX waits for the upstream scalar in the accumulation dtype, like dW (weight_accumulator).
    unit = numerics.loss_unit(XP, inputs, options, g)
    accumulators = _Accumulators(inputs, plan, needs, smoothing, g, dtype, unit)

    def chunk(carry: tuple[TokenSums, State, Array], first: Index, tokens: int) -> tuple[TokenSums, State, Array]:
        all_sums, state, z = carry
        x = rows_of(inputs, first, tokens)
        target = inputs.shard.place(take(inputs.target, first, tokens))
        running = _start(inputs, options, x, target, first, statistics)
        z, running = _held_logits(inputs, options, plan, z, x, first, running)
        own = _temperatures(inputs, first, tokens)
        weighted = None if smoothing is None else smoothing.weighted_logits(x, options, own)
        running, weighted = running.total(inputs.shard, weighted)
        part = running.finish(weighted)

        k = _class_weights_of(inputs, first, target)
        alpha, beta = numerics.alpha_beta(XP, inputs, options, part.lse, k)
        element = numerics.target_over_alpha(XP, alpha, beta, running.e_target(), running.s)
        valid = take(inputs.valid, first, tokens)
        element = jnp.where(valid, numerics.sloped(XP, element, part.target_logit, options, own), 0.0)

        def matrix(start: Index, size: int) -> Array:
            block = take_block(z, tokens, start, size)
            e = running.exponentials(block, start)
            if options.softcap is not None:
                e = e * slope(block, options, temperature_column(inputs, first, tokens))
            return jnp.where(is_target(target, start, size), element[:, None], e)

        factor = take(g, first, tokens) * alpha / (running.s + running.e_target())
        factor = jnp.where(valid, factor, 0.0)
        state = accumulators.add_chunk(state, first, x, factor, matrix)
        return put_sums(all_sums, part, first), state, z

    empty = empty_sums(inputs, options.label_smoothing > 0, statistics)
    # All chunks use one C × V matrix. A ragged last chunk uses its first rows.
    carry = (empty, accumulators.start(), jnp.zeros((plan.token_chunk, plan.vocab), dtype))
    all_sums, state, _ = for_slices(plan.tokens, plan.token_chunk, chunk, carry, count_of(inputs))
    return by_token(inputs, all_sums), accumulators.finish(state)


def _known_block(
    z: Array, known: KnownRows, first: Index, target: Array, start: Index, k: Array | None, inputs: Inputs,
    options: LossOptions,
) -> Array:  # fmt: skip
    """A block of the matrix of :class:`KnownRows`, from its logits."""
    tokens = z.shape[0]
    known = jax.tree.map(lambda values: take(values, first, tokens), known)
    log_p = (z - known.anchor[:, None]) - known.log_total[:, None]
    e = jnp.exp(log_p)
    if known.alpha is not None:
        coefficient = known.alpha[:, None]
        if known.gamma is not None:
            coefficient = coefficient + known.gamma[:, None] * jnp.maximum(log_p, LOWEST_GAP)
        if known.delta is not None:
            coefficient = coefficient + known.delta[:, None] * e
        e = e * coefficient
    if known.sigma is not None:
        e = e - known.sigma[:, None] * (1.0 if k is None else k[None, :])
    if options.softcap is not None:
        e = e * slope(z, options, temperature_column(inputs, first, tokens))
    e = unpadded(e, inputs.shard.limit(), start, 0.0)
    return jnp.where(is_target(target, start, z.shape[1]), known.target[:, None], e)


def known_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Array, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, for both orders of the plan. One block [C, B] at a time.

    g [N] as for :func:`loss_gradients`. Only label smoothing's rank-one part and the matrix's unit read it.
    """
    smoothing = _smoothing_of(inputs, options, plan)
    # The devices' shares of dX are rounded after their sum.
    hidden_dtype = inputs.accumulation_dtype if inputs.shard.active else inputs.hidden.dtype
    known = known.of(XP, inputs.valid)
    inputs = compacted(inputs, plan)
    known, g = by_position(inputs, (known, g))
    # The factors are not g where alpha is given, nor in float16.
    whole = inputs.hidden.dtype == jnp.float16 or known.alpha is not None
    unit = known.unit(XP) if whole else numerics.largest_factor(XP, g)
    accumulators = _Accumulators(inputs, plan, needs, smoothing, g, hidden_dtype, unit)

    def chunk(state: State, first: Index, tokens: int) -> State:
        x = rows_of(inputs, first, tokens)
        target = inputs.shard.place(take(inputs.target, first, tokens))

        def matrix(start: Index, size: int) -> Array:
            z = logits_block(x, inputs, first, start, size, options)
            k = None if inputs.class_weight is None else take(inputs.class_weight, start, size)
            return _known_block(z, known, first, target, start, k, inputs, options)

        return accumulators.add_chunk(state, first, x, take(known.factor, first, tokens), matrix)

    state = for_slices(plan.tokens, plan.token_chunk, chunk, accumulators.start(), count_of(inputs))
    return accumulators.finish(state)
