"""The target-anchored chunk in jax.numpy, for any device that XLA compiles for. Mirror of torch_impl/eager.py.

Two verbs (docs/design.md): :func:`token_sums` reads the logits block by block and keeps sums per token only;
:func:`loss_gradients` and :func:`known_gradients` give dX, dW and db as well. All work on flat arrays ([N, D], [V, D])
in the accumulation dtype (float64 for float64 input, else float32). Chunks and blocks are loops with static sizes; a
ragged last one is a loop of its own; E, dX and dW are carried through the loops and updated in place.

Rounding: logits, exponentials and sums are float32. A block of the logits' gradient is rounded to the input dtype on
its way into the products (the platform is not known when a function is traced), which accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless import numerics
from logitless.jax_impl.call import XP, Gradients, Inputs, KnownRows, Needs, Statistics, TokenSums
from logitless.jax_impl.distributed import parallel
from logitless.jax_impl.distributed.parallel import Shard
from logitless.planning import ANCHOR_ROWS, ChunkPlan
from logitless.spec import LOWEST_ANCHOR, LOWEST_GAP, RESCUE_NATS, LossOptions

Carry = TypeVar("Carry")


# ---------------------------------------------------------------------------------------------------------------------
# Loops and slices


def _for_slices(length: int, size: int, body: Callable[[Carry, Any, int], Carry], carry: Carry) -> Carry:
    """carry = body(carry, start, size) for every slice: a loop over the full ones, then the ragged rest."""
    full, rest = divmod(length, size)
    if length and parallel.tracked():
        carry = _vary_as_made(lambda state: body(state, jnp.int32(0), min(size, length)), carry)
    if full == 1:
        carry = body(carry, 0, size)
    elif full > 1:
        carry = lax.fori_loop(jnp.int32(0), jnp.int32(full), lambda i, c: body(c, i * size, size), carry)
    if not rest:
        return carry
    # A loop whose length XLA does not see: unrolled, the rest's blocks are computed beside the loop's, or shared
    # between forward and backward, and held.
    once = lax.optimization_barrier(jnp.int32(1))
    carry = lax.fori_loop(jnp.int32(0), once, lambda i, c: body(c, full * size + i * rest, rest), carry)
    return carry


def _vary_as_made(body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """``carry`` with types that vary over the axes over which a loop's body makes it vary, which JAX asks for."""
    while True:
        made = jax.eval_shape(body, carry)
        wanted = jax.tree.map(lambda part, like: parallel.vary_over(part, parallel.varying(like)), carry, made)
        if jax.tree.map(parallel.varying, wanted) == jax.tree.map(parallel.varying, carry):
            return carry
        carry = wanted


def _bits(array: Array) -> Array:
    """A 16-bit float array as the integers it is made of, any other as it is.

    XLA on a CPU slices, gathers and updates 16-bit floats in float32: it would convert the whole array first, V × D
    that no plan has counted. Integers it moves as they are; the cast costs nothing.
    """
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype in (jnp.bfloat16, jnp.float16) else array


def _floats(bits: Array, dtype: Any) -> Array:
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def _stay(array: Array, where: Any) -> tuple[Array, Any]:
    """Tie a 16-bit array to where it is read: XLA would take its cast out of the loop, and copy the whole array."""
    return lax.optimization_barrier((array, where)) if array.dtype in (jnp.bfloat16, jnp.float16) else (array, where)


def _take(array: Array, start: Any, size: int) -> Array:
    """array[start:start + size]."""
    array, start = _stay(array, start)
    return _floats(lax.dynamic_slice_in_dim(_bits(array), start, size), array.dtype)


def _take_block(matrix: Array, rows: int, start: Any, size: int) -> Array:
    """matrix[:rows, start:start + size]; the matrix is never 16-bit."""
    return lax.dynamic_slice(matrix, (jnp.zeros_like(start), start), (rows, size))


def _put(array: Array, part: Array, start: Any, axis: int = 0) -> Array:
    """array with ``part`` at ``start``; along the other axis a part may be shorter and fills its beginning."""
    return _floats(lax.dynamic_update_slice_in_dim(_bits(array), _bits(part), start, axis), array.dtype)


def _rows_at(array: Array, indices: Array) -> Array:
    """array[indices] along the first axis."""
    array, indices = _stay(array, indices)
    return _floats(_bits(array)[indices], array.dtype)


def run_sums(ids: Array, values: Array) -> tuple[Array, Array]:
    """(sum of the values from the first of a run of equal ids up to here, where runs end), along the first axis. A scan
    over a fixed tree, so the same from run to run."""
    begins = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (a_begins, a), (b_begins, b) = left, right
        fresh = b_begins.reshape(-1, *(1,) * (b.ndim - 1))
        return a_begins | b_begins, jnp.where(fresh, b, a + b)

    _, sums = lax.associative_scan(join, (begins, values))
    return sums, jnp.concatenate([begins[1:], jnp.ones(1, bool)])


def _is_real(limit: Array, start: Any, size: int) -> Array:
    """[size]: whether column start + j is no padding."""
    columns: Array = start + jnp.arange(size, dtype=jnp.int32)
    return columns < limit


def _is_target(target: Array, start: Any, size: int) -> Array:
    """[C, size]: whether column start + j is the row's target."""
    columns: Array = start + jnp.arange(size, dtype=jnp.int32)
    return jnp.equal(target[:, None], columns)


# ---------------------------------------------------------------------------------------------------------------------
# One block of logits


def _product(a: Array, b: Array, dtype: Any) -> Array:
    """a b, accumulated in ``dtype``."""
    return jnp.dot(a, b, preferred_element_type=dtype)


def _capped(z: Array, options: LossOptions) -> Array:
    """f(r): logit_scale, then softcap."""
    if options.softcap is None:
        return z if options.logit_scale == 1.0 else z * options.logit_scale
    return options.softcap * jnp.tanh(z * (options.logit_scale / options.softcap))


def _slope(z: Array, options: LossOptions) -> Array:
    """1 − (z / cap)²: the softcap's derivative, from the capped logits."""
    assert options.softcap is not None
    return 1.0 - jnp.square(z / options.softcap)


def _logits_block(x: Array, inputs: Inputs, start: Any, size: int, options: LossOptions) -> Array:
    """z[:, start:start + size] of the rows x, in the accumulation dtype."""
    dtype = inputs.accumulation_dtype
    z = _product(x, _take(inputs.weight, start, size).T, dtype)
    if inputs.bias is not None:
        z = z + _take(inputs.bias, start, size).astype(dtype)
    return _capped(z, options)


def _target_logits(x: Array, inputs: Inputs, first: Any, options: LossOptions) -> Array:
    """The anchors a_i = z_{i, y_i}: one dot product per token; NaN for an id outside the vocabulary."""
    tokens = x.shape[0]
    if inputs.shared is not None:
        return _take(inputs.shared.target_logit, first, tokens)
    logits = _row_logits(x, inputs, _take(inputs.target, first, tokens), options)
    return jnp.where(_take(inputs.inside, first, tokens), logits, jnp.nan)


def own_target_logits(inputs: Inputs, options: LossOptions) -> Array:
    """The anchors [N] of the targets whose rows are on this device, 0 elsewhere."""
    place = inputs.shard.place(inputs.target)
    logits = _row_logits(_rows_of(inputs, 0, place.shape[0]), inputs, jnp.maximum(place, 0), options)
    return jnp.where(place >= 0, logits, 0.0)


def _row_logits(x: Array, inputs: Inputs, target: Array, options: LossOptions) -> Array:
    """z_{i, target_i} of the rows x."""
    dtype, tokens = inputs.accumulation_dtype, x.shape[0]

    def part(dots: Array, start: Any, size: int) -> Array:
        rows = _rows_at(inputs.weight, _take(target, start, size)).astype(dtype)
        return _put(dots, (rows * _take(x, start, size).astype(dtype)).sum(axis=1), start)

    dots = _for_slices(tokens, ANCHOR_ROWS, part, jnp.zeros(tokens, dtype))
    if inputs.bias is not None:
        dots = dots + inputs.bias[target].astype(dtype)
    return _capped(dots, options)


def _rows_of(inputs: Inputs, first: Any, size: int) -> Array:
    """The chunk's hidden states, zero for an ignored token whatever it holds."""
    x = _take(inputs.hidden, first, size)
    return jnp.where(_take(inputs.valid, first, size)[:, None], x, jnp.zeros((), x.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Sums per token


class _RunningSums(NamedTuple):
    """s_i = Σ_{j ≠ y_i} exp(z_ij − anchor_i) over the blocks seen so far, and what else was asked for."""

    target_logit: Array
    target: Array
    anchor: Array
    s: Array
    highest: Array
    gap_sum: Array | None  # Σ exp(z − anchor) (z − anchor), without the target
    lowest: Array | None
    argmax: Array | None
    limit: Array | None = None  # where padding begins, if there is any

    @staticmethod
    def start(target_logit: Array, target: Array, statistics: Statistics, limit: Array | None = None) -> _RunningSums:
        zero = jnp.zeros_like(target_logit)
        return _RunningSums(
            target_logit=target_logit,
            target=target,
            anchor=jnp.maximum(target_logit, LOWEST_ANCHOR),
            s=zero,
            highest=jnp.full_like(target_logit, -jnp.inf),
            gap_sum=zero if statistics else None,
            lowest=jnp.full_like(target_logit, jnp.inf) if statistics is True else None,
            argmax=jnp.zeros_like(target) if statistics is True else None,
            limit=limit,
        )

    def _real(self, z: Array, start: Any, padding: float) -> Array:
        """A block with ``padding`` where the weight is padded."""
        return z if self.limit is None else jnp.where(_is_real(self.limit, start, z.shape[1]), z, padding)

    def observe(self, z: Array, start: Any) -> _RunningSums:
        """Maximum (and minimum and first index of the maximum) of a block of logits."""
        above = self._real(z, start, -jnp.inf)
        block_highest = above.max(axis=1)
        sums = self._replace(highest=jnp.maximum(self.highest, block_highest))
        if self.argmax is None or self.lowest is None:
            return sums
        best = above.argmax(axis=1).astype(jnp.int32) + start
        return sums._replace(
            argmax=jnp.where(block_highest > self.highest, best, self.argmax),
            lowest=jnp.minimum(self.lowest, self._real(z, start, jnp.inf).min(axis=1)),
        )

    def rescue(self) -> _RunningSums:
        """Move the anchor of a row to its maximum where exponents would grow too large; rescale what was summed."""
        return self._moved(jnp.where(self.highest - self.anchor > RESCUE_NATS, self.highest, self.anchor))

    def _moved(self, moved: Array) -> _RunningSums:
        step = self.anchor - moved
        factor = jnp.exp(step)
        gap_sum = None if self.gap_sum is None else factor * (self.gap_sum + self.s * step)
        return self._replace(anchor=moved, s=self.s * factor, gap_sum=gap_sum)

    def exponentiate(self, z: Array, start: Any) -> tuple[_RunningSums, Array]:
        """exp(z − anchor), 0 at the target, and the sums with it."""
        gaps = z - self.anchor[:, None]
        e = jnp.where(_is_target(self.target, start, z.shape[1]), 0.0, self._real(jnp.exp(gaps), start, 0.0))
        sums = self._replace(s=self.s + e.sum(axis=1))
        if self.gap_sum is not None:
            sums = sums._replace(gap_sum=self.gap_sum + (e * jnp.maximum(gaps, LOWEST_GAP)).sum(axis=1))
        return sums, e

    def together(self, shard: Shard, weighted: Array | None) -> tuple[_RunningSums, Array | None]:
        """The sums over all devices, which may have moved their anchors differently, and that of ``weighted``."""
        if not shard.active:
            return self, weighted
        anchor = shard.largest(self.anchor)
        sums = self if self.argmax is None else self.extremes(shard)
        return sums._moved(anchor).total(shard, weighted)

    def extremes(self, shard: Shard) -> _RunningSums:
        """Maximum (and minimum and lowest id of the maximum) over all devices."""
        if not shard.active:
            return self
        if self.argmax is None or self.lowest is None:
            return self._replace(highest=shard.largest(self.highest))
        highest, negative = shard.largest((self.highest, -self.lowest))
        argmax = shard.winner(self.argmax, self.highest == highest)
        return self._replace(highest=highest, lowest=-negative, argmax=argmax)

    def total(self, shard: Shard, weighted: Array | None) -> tuple[_RunningSums, Array | None]:
        """The sums over all devices, which have the same anchors, and that of ``weighted``."""
        s, gap_sum, weighted = shard.total((self.s, self.gap_sum, weighted))
        return self._replace(s=s, gap_sum=gap_sum), weighted

    def e_target(self) -> Array:
        """exp(a − anchor): 1 but for a rescued row."""
        return jnp.exp(self.target_logit - self.anchor)

    def finish(self, weighted_logits: Array | None) -> TokenSums:
        log_total, entropy = numerics.finish_sums(XP, self.target_logit, self.anchor, self.s, self.gap_sum)
        statistics = self.argmax is not None
        return TokenSums(
            target_logit=self.target_logit,
            anchor=self.anchor,
            log_total=log_total,
            weighted_logits=weighted_logits,
            entropy=entropy,
            argmax=self.argmax,
            max_logit=self.highest if statistics else None,
            min_logit=self.lowest,
        )


def _empty_sums(inputs: Inputs, weighted: bool, statistics: Statistics) -> TokenSums:
    """[N] zeros for chunks to be put into."""
    zero = jnp.zeros(inputs.target.shape, inputs.accumulation_dtype)
    some = zero if statistics is True else None
    index = jnp.zeros(inputs.target.shape, jnp.int32) if statistics is True else None
    return TokenSums(zero, zero, zero, zero if weighted else None, zero if statistics else None, index, some, some)


def _put_sums(all_sums: TokenSums, part: TokenSums, first: Any) -> TokenSums:
    put: TokenSums = jax.tree.map(lambda whole, piece: _put(whole, piece, first), all_sums, part)
    return put


def token_sums(inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics) -> TokenSums:
    """lse, nll and, if asked for, statistics of every token: 2·N·D·V flops, one block [C, B] of logits at a time."""
    smoothing, shard = _Smoothing.prepare(inputs, options, plan), inputs.shard
    sum_logits = options.label_smoothing > 0 and not options.separable

    def chunk(all_sums: TokenSums, first: Any, tokens: int) -> TokenSums:
        x = _rows_of(inputs, first, tokens)
        target = shard.place(_take(inputs.target, first, tokens))
        running = _RunningSums.start(_target_logits(x, inputs, first, options), target, statistics, shard.limit())
        weighted = jnp.zeros_like(running.s) if sum_logits else None

        def block(carry: Any, start: Any, size: int) -> Any:
            running, weighted = carry
            z = _logits_block(x, inputs, start, size, options)
            if weighted is not None:
                k = inputs.class_weight
                weighted = weighted + (z.sum(axis=1) if k is None else z @ _take(k, start, size))
            running, _ = running.observe(z, start).rescue().exponentiate(z, start)
            return running, weighted

        running, weighted = _for_slices(plan.vocab, plan.vocab_chunk, block, (running, weighted))
        if smoothing is not None:
            weighted = smoothing.weighted_logits(x, options)
        running, weighted = running.together(shard, weighted)
        return _put_sums(all_sums, running.finish(weighted), first)

    empty = _empty_sums(inputs, options.label_smoothing > 0, statistics)
    return _for_slices(plan.tokens, plan.token_chunk, chunk, empty)


# ---------------------------------------------------------------------------------------------------------------------
# From sums to losses and row factors


def normalizer(inputs: Inputs, options: LossOptions, given: Array | None) -> Array:
    """What the sum of the token losses is multiplied by: 1 / Σ t k_y for mean, 0 where no token counts."""
    one = jnp.ones((), inputs.accumulation_dtype)
    if options.reduction != "mean":
        return one
    if given is not None:
        return one / given.astype(one.dtype)
    counts = numerics.counts(XP, inputs)
    if not inputs.shard.batch_axes:
        return jnp.where((counts != 0).any(), one / counts.sum(), 0.0)
    total, number = inputs.shard.batch_total((counts.sum(), (counts != 0).sum()))
    return jnp.where(number > 0, one / total, 0.0)


def _class_weights_of(inputs: Inputs, first: Any, target: Array) -> Array | float:
    """The class weights of a chunk's targets."""
    if inputs.class_weight is None:
        return 1.0
    if inputs.shared is not None and inputs.shared.class_weight is not None:
        return _take(inputs.shared.class_weight, first, target.shape[0])
    return inputs.class_weight[target]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


class _Smoothing(NamedTuple):
    """Label smoothing's rank-one part: every dz_ij has −(ε/V) t g k_j, so nothing of it needs the C × V matrix."""

    factor: float  # ε / V
    weighted_rows: Array  # Σ_j k_j w_j, [D]
    weighted_bias: Array  # Σ_j k_j b_j

    @staticmethod
    def prepare(inputs: Inputs, options: LossOptions, plan: ChunkPlan) -> _Smoothing | None:
        """None where there is no smoothing, or where a softcap makes it part of the matrix."""
        if not options.label_smoothing or not options.separable:
            return None
        dtype, k = inputs.accumulation_dtype, inputs.class_weight

        def add(rows: Array, start: Any, size: int) -> Array:
            block = _take(inputs.weight, start, size).astype(dtype)
            return rows + (block.sum(axis=0) if k is None else _take(k, start, size) @ block)

        rows = _for_slices(plan.vocab, plan.vocab_chunk, add, jnp.zeros(inputs.hidden.shape[1], dtype))
        bias = jnp.zeros((), dtype)
        if inputs.bias is not None:
            b = inputs.bias.astype(dtype)
            bias = b.sum() if k is None else b @ k
        return _Smoothing(options.label_smoothing / inputs.vocab, rows, bias)

    def weighted_logits(self, x: Array, options: LossOptions) -> Array:
        """Σ_j k_j z_ij = scale · (x_i · Σ_j k_j w_j + Σ_j k_j b_j)."""
        return (x.astype(self.weighted_rows.dtype) @ self.weighted_rows + self.weighted_bias) * options.logit_scale


class _Accumulators:
    """How dX, dW and db are gathered, block by block; the arrays themselves are carried as :class:`Gradients`."""

    def __init__(
        self,
        inputs: Inputs,
        plan: ChunkPlan,
        needs: Needs,
        smoothing: _Smoothing | None,
        g: Array,
        hidden_dtype: Any,
        unit: Array,
    ) -> None:
        """``unit``: as large as the matrix's elements get."""
        self.inputs, self.plan, self.needs, self.smoothing, self.g = inputs, plan, needs, smoothing, g
        self.dtype, self.hidden_dtype = inputs.accumulation_dtype, hidden_dtype
        self.low = inputs.hidden.dtype != self.dtype
        # Several chunks add to dW in the accumulation dtype; a single one finishes each block in the weight's.
        self.direct = plan.weight_accumulator or not self.low
        # Low-precision operands: the largest factor is taken out of the matrix and put back in float32. float16 could
        # not hold it (loss scaling, class weights), and 1/N would round all targets' elements to the same side.
        self.unit = unit if self.low and plan.tokens else None

    def start(self) -> tuple[Gradients, Array]:
        """Zeros for what is wanted, and Σ_i g_i x_i for smoothing."""
        vocab, size = self.inputs.weight.shape
        weight_dtype = self.dtype if self.direct else self.inputs.weight.dtype
        zeros = Gradients(
            hidden=jnp.zeros(self.inputs.hidden.shape, self.hidden_dtype) if self.needs.hidden else None,
            weight=jnp.zeros((vocab, size), weight_dtype) if self.needs.weight else None,
            bias=jnp.zeros(vocab, self.dtype) if self.needs.bias else None,
        )
        return zeros, jnp.zeros(size, self.dtype)

    def add_chunk(
        self, state: tuple[Gradients, Array], first: Any, x: Array, factor: Array, matrix: Callable[[Any, int], Array]
    ) -> tuple[Gradients, Array]:
        """The products of the tokens from ``first``. matrix(start, size): their block of E, which lacks ``factor``."""
        gradients, smooth_x = state
        tokens = x.shape[0]
        g = _take(self.g, first, tokens)
        if self.smoothing is not None:
            smooth_x = smooth_x + g @ x.astype(self.dtype)
        # float32 operands: the factor goes to the rows of dX and of x, never to the matrix. Low-precision operands: the
        # matrix is rounded anyway, so it is rounded once, factor included, and x is read as it came.
        element_factor = factor if self.unit is None else factor / self.unit
        scaled_x = x if self.low else x * factor[:, None]

        def block(carry: Any, start: Any, size: int) -> Any:
            hidden_part, weight, bias = carry
            e = matrix(start, size)
            if bias is not None:
                bias = _put(bias, _take(bias, start, size) + e.T @ factor, start)
            operand = (e * element_factor[:, None]).astype(x.dtype) if self.low else e
            if hidden_part is not None:
                rows = _take(self.inputs.weight, start, size)
                hidden_part = hidden_part + _product(operand, rows, self.dtype)
            if weight is not None:
                part = _product(operand.T, scaled_x, self.dtype)
                if self.direct:
                    part = _take(weight, start, size) + part
                else:
                    part = self._finish_weight(part, smooth_x, start, size).astype(weight.dtype)
                weight = _put(weight, part, start)
            return hidden_part, weight, bias

        hidden_part = jnp.zeros(x.shape, self.dtype) if self.needs.hidden else None
        carry = (hidden_part, gradients.weight, gradients.bias)
        carry = _for_slices(self.plan.vocab, self.plan.vocab_chunk, block, carry)
        hidden_part, weight, bias = carry
        hidden = gradients.hidden
        if hidden is not None and hidden_part is not None:
            hidden = _put(hidden, self._finish_hidden(hidden_part, factor, g).astype(hidden.dtype), first)
        return Gradients(hidden, weight, bias), smooth_x

    def _finish_hidden(self, part: Array, factor: Array, g: Array) -> Array:
        """Row factors on dX, and smoothing's share of it."""
        if not self.low:
            part = part * factor[:, None]
        elif self.unit is not None:
            part = part * self.unit
        if self.smoothing is not None:
            part = part - (self.smoothing.factor * g)[:, None] * self.smoothing.weighted_rows
        return part

    def _finish_weight(self, part: Array, smooth_x: Array, start: Any, size: int) -> Array:
        """What a block of dW still lacks when all tokens are in it."""
        if self.unit is not None:
            part = part * self.unit
        if self.smoothing is not None:
            k = self.inputs.class_weight
            ones = jnp.ones(size, self.dtype) if k is None else _take(k, start, size)
            part = part - ones[:, None] * (self.smoothing.factor * smooth_x)
        return part

    def finish(self, state: tuple[Gradients, Array]) -> Gradients:
        gradients, smooth_x = state
        weight, bias = gradients.weight, gradients.bias
        if weight is not None and self.direct:
            weight = self._finish_weight(weight, smooth_x, 0, self.plan.vocab)
        if bias is not None and self.smoothing is not None:
            share = self.smoothing.factor * self.g.sum()
            bias = bias - (share if self.inputs.class_weight is None else share * self.inputs.class_weight)
        return gradients._replace(weight=weight, bias=bias)


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Plain operations run on every device."""
    return None


def one_pass(dtype: Any, options: LossOptions) -> bool:
    """Whether a chunk's matrix can be scaled into ``dtype``'s range before lse is known: float16's is too small for
    what a z-loss, 2 λ lse, may make of it."""
    return bool(dtype != jnp.float16 or not options.z_loss)


def holds(dtype: Any) -> bool:
    """Whether exponentials can wait for an upstream gradient per token: here gradients are made at once, or anew."""
    return False


def token_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Exponentials that wait for upstream gradients per token: not here, see :func:`holds`."""
    raise NotImplementedError


def finish(held: Gradients, options: LossOptions, plan: ChunkPlan, needs: Needs, upstream: Array) -> Gradients:
    """What :func:`loss_gradients` left, times the upstream scalar."""
    return Gradients(*(None if part is None else part.astype(upstream.dtype) * upstream for part in held))


def loss_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool
) -> tuple[TokenSums, Gradients]:
    """Sums and gradients in one pass, 6·N·D·V flops: the exponentials of a chunk are held, anchored at the target.

    g [N]: upstream gradient times normalizer, token weight and logit_scale, 0 where ignored. For a plan in one pass and
    separable options.
    """
    dtype, shard = inputs.accumulation_dtype, inputs.shard
    smoothing = _Smoothing.prepare(inputs, options, plan)
    # dX waits for the upstream scalar in the accumulation dtype, as dW does (weight_accumulator).
    unit = numerics.loss_unit(XP, inputs, options, g)
    accumulators = _Accumulators(inputs, plan, needs, smoothing, g, dtype, unit)

    def chunk(carry: Any, first: Any, tokens: int) -> Any:
        all_sums, state, e = carry
        x = _rows_of(inputs, first, tokens)
        target = shard.place(_take(inputs.target, first, tokens))

        def logits(carry: Any, start: Any, size: int) -> Any:
            e, running = carry
            z = _logits_block(x, inputs, start, size, options)
            return _put(e, z, start, axis=1), running.observe(z, start)

        def exponentials(carry: Any, start: Any, size: int) -> Any:
            e, running = carry
            z = _take_block(e, tokens, start, size)
            running, block = running.exponentiate(z, start)
            if options.softcap is not None:
                block = block * _slope(z, options)
            return _put(e, block, start, axis=1), running

        running = _RunningSums.start(_target_logits(x, inputs, first, options), target, statistics, shard.limit())
        e, running = _for_slices(plan.vocab, plan.vocab_chunk, logits, (e, running))
        # The exponentials that are held are relative to the same anchor on all devices.
        running = running.extremes(shard).rescue()
        e, running = _for_slices(plan.vocab, plan.vocab_chunk, exponentials, (e, running))
        weighted = None if smoothing is None else smoothing.weighted_logits(x, options)
        running, weighted = running.total(shard, weighted)
        part = running.finish(weighted)

        k = _class_weights_of(inputs, first, target)
        alpha, beta = numerics.alpha_beta(XP, inputs, options, part.lse, k)
        element = numerics.target_over_alpha(XP, alpha, beta, running.e_target(), running.s)
        valid = _take(inputs.valid, first, tokens)
        element = jnp.where(valid, numerics.sloped(XP, element, part.target_logit, options), 0.0)

        def matrix(start: Any, size: int) -> Array:
            return jnp.where(_is_target(target, start, size), element[:, None], _take_block(e, tokens, start, size))

        factor = _take(g, first, tokens) * alpha / (running.s + running.e_target())
        factor = jnp.where(valid, factor, 0.0)
        state = accumulators.add_chunk(state, first, x, factor, matrix)
        return _put_sums(all_sums, part, first), state, e

    empty = _empty_sums(inputs, options.label_smoothing > 0, statistics)
    # The one C × V matrix, for every chunk: a ragged last one uses its first rows.
    carry = (empty, accumulators.start(), jnp.zeros((plan.token_chunk, plan.vocab), dtype))
    all_sums, state, _ = _for_slices(plan.tokens, plan.token_chunk, chunk, carry)
    return all_sums, accumulators.finish(state)


def _known_block(
    z: Array, known: KnownRows, first: Any, target: Array, start: Any, k: Array | None, options: LossOptions,
    limit: Array | None,
) -> Array:  # fmt: skip
    """The matrix of :class:`KnownRows` from a block of logits."""
    tokens = z.shape[0]

    def column(values: Array) -> Array:
        return _take(values, first, tokens)[:, None]

    log_p = (z - column(known.anchor)) - column(known.log_total)
    e = jnp.exp(log_p)
    if known.alpha is not None:
        coefficient = column(known.alpha)
        if known.gamma is not None:
            coefficient = coefficient + column(known.gamma) * jnp.maximum(log_p, LOWEST_GAP)
        e = e * coefficient
    if known.sigma is not None:
        e = e - column(known.sigma) * (1.0 if k is None else k)
    if options.softcap is not None:
        e = e * _slope(z, options)
    if limit is not None:
        e = jnp.where(_is_real(limit, start, z.shape[1]), e, 0.0)
    return jnp.where(_is_target(target, start, z.shape[1]), column(known.target), e)


def known_gradients(
    inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Array, needs: Needs
) -> Gradients:
    """Gradients when lse is known, 6·N·D·V flops, either order of the plan: one block [C, B] at a time.

    g [N]: as for :func:`loss_gradients`; here only label smoothing's rank-one part and the matrix's unit read it.
    """
    smoothing = _Smoothing.prepare(inputs, options, plan)
    # Devices' shares of dX are rounded after they are summed.
    hidden_dtype = inputs.accumulation_dtype if inputs.shard.active else inputs.hidden.dtype
    known = known.of(XP, inputs.valid)
    unit = known.unit(XP) if inputs.hidden.dtype == jnp.float16 else numerics.largest_factor(XP, g)
    accumulators = _Accumulators(inputs, plan, needs, smoothing, g, hidden_dtype, unit)

    def chunk(state: Any, first: Any, tokens: int) -> Any:
        x = _rows_of(inputs, first, tokens)
        target = inputs.shard.place(_take(inputs.target, first, tokens))

        def matrix(start: Any, size: int) -> Array:
            z = _logits_block(x, inputs, start, size, options)
            k = None if inputs.class_weight is None else _take(inputs.class_weight, start, size)
            return _known_block(z, known, first, target, start, k, options, inputs.shard.limit())

        return accumulators.add_chunk(state, first, x, _take(known.factor, first, tokens), matrix)

    return accumulators.finish(_for_slices(plan.tokens, plan.token_chunk, chunk, accumulators.start()))
