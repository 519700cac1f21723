"""A divergence between two linear softmaxes, tile by tile. Mirror of torch_impl/distillation.py.

With p the teacher's and q the student's probabilities of a token and m = β p + (1 − β) q:

    divergence = Σ_j p (log p − log q)                                         β = 0
                 Σ_j β p (log p − log m) + (1 − β) q (log q − log m)           0 < β < 1
                 Σ_j q (log q − log p)                                         β = 1

    ∂/∂z_j     = q_j − p_j                                                     β = 0
                 (1 − β) q_j (log q_j − log m_j − Σ_k q_k (log q_k − log m_k)) 0 < β < 1
                 q_j (log q_j − log p_j − divergence)                          β = 1

lse of both sides is known, so a tile [C, B] of both sides' logits is all that is ever held. It comes in two parts, a
logit and the rest, so that large logits cost no accuracy. At β = 0 and 1 the terms − p + q (or − q + p), of sum 0, are
added: then the error of lse enters in second order.

Rounding: as in xla.py, with the gradient of a tile rounded to the student's dtype, and accumulated in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal

from logitless import numerics
from logitless.jax_impl import vjp
from logitless.jax_impl.call import XP, Arrays, Gradients, Inputs, Leaf, Needs
from logitless.jax_impl.chunk import logits_block, rows_of, slope, temperature_column, tile_gradients
from logitless.jax_impl.residuals import Packed, packed, unpacked
from logitless.jax_impl.slices import Index, for_slices, put, take
from logitless.objectives import Tile
from logitless.spec import LossOptions


@dataclasses.dataclass(frozen=True)
class DivergenceCall:
    """Everything about a call that is not an array: β, both sides' logits, the tile. A static argument of jax.jit."""

    beta: float
    options: LossOptions
    teacher_options: LossOptions
    tile: Tile


class DivergenceArrays(NamedTuple, Generic[Leaf]):
    """A call's arrays, or one thing for each of them; None where there is no bias."""

    hidden: Leaf  # [..., D]
    weight: Leaf  # [V, D]
    bias: Leaf | None  # [V]
    teacher_hidden: Leaf  # [..., D_teacher]
    teacher_weight: Leaf  # [V, D_teacher]
    teacher_bias: Leaf | None  # [V]
    target: Leaf  # [...] −100 where a token does not count, else 0
    temperature: Leaf | None  # [...]; None: the options have it
    lse: Leaf  # [2, N]
    teacher_lse: Leaf  # [2, N]


class Side(NamedTuple):
    """One side's arrays: what gives its log-probabilities of a tile."""

    inputs: Inputs
    options: LossOptions
    lse: Array  # [2, N]: two parts, whose sum it is

    def rows(self, first: Index, tokens: int) -> Array:
        """The chunk's hidden states [C, D], 0 where a token does not count."""
        return rows_of(self.inputs, first, tokens)

    def logits(self, x: Array, first: Index, start: Index, size: int) -> Array:
        """z of a tile, [C, B], in the accumulation dtype; x [C, D] are its rows, from ``first``."""
        return logits_block(x, self.inputs, first, start, size, self.options)

    def log_probs(self, z: Array, first: Index) -> Array:
        """log softmax(z) of a tile's logits, [C, B]."""
        anchor, rest = (take(part, first, z.shape[0])[:, None] for part in self.lse)
        return (z - anchor) - rest


def _weighted(p: Array, log_ratio: Array) -> Array:
    """p · log_ratio, 0 where p is 0 (there log_ratio may be infinite or NaN)."""
    return jnp.where(p == 0, 0.0, p * log_ratio)


def _log_ratios(log_p: Array, log_q: Array, beta: float) -> tuple[Array, Array]:
    """log (p / m) and log (q / m) for 0 < β < 1, of full relative precision where p and q are close."""
    gap = log_q - log_p
    share = jnp.where(gap > 0, beta, 1 - beta)  # of the smaller one in m
    log_m = jnp.log1p(share * jnp.expm1(-jnp.abs(gap)))  # log (m / max(p, q)): no exponential is large
    return -jnp.maximum(gap, 0) - log_m, jnp.minimum(gap, 0) - log_m


def _divergence_rows(log_p: Array, log_q: Array, beta: float) -> tuple[Array, Array]:
    """The tile's share of each row's divergence, and of Σ_j q (log q − log m) (0 where β is 0)."""
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if beta == 0:
        total = (_weighted(p, log_p - log_q) - p + q).sum(axis=1)
        return total, jnp.zeros_like(total)
    if beta == 1:
        student = _weighted(q, log_q - log_p)
        return (student - q + p).sum(axis=1), student.sum(axis=1)
    from_p, from_q = _log_ratios(log_p, log_q, beta)
    mean = _weighted(q, from_q).sum(axis=1)
    return beta * _weighted(p, from_p).sum(axis=1) + (1 - beta) * mean, mean


def _gradient(log_p: Array, log_q: Array, mean: Array, beta: float) -> Array:
    """∂ divergence / ∂z of a tile."""
    q = jnp.exp(log_q)
    if beta == 0:
        return q - jnp.exp(log_p)
    gap = log_q - log_p if beta == 1 else _log_ratios(log_p, log_q, beta)[1]
    gradient = _weighted(q, gap - mean[:, None])
    return gradient if beta == 1 else (1 - beta) * gradient


def _sides(call: DivergenceCall, arrays: DivergenceArrays[Array]) -> tuple[Side, Side]:
    student = Arrays(arrays.hidden, arrays.weight, arrays.bias, arrays.target, temperature=arrays.temperature)
    teacher = student._replace(hidden=arrays.teacher_hidden, weight=arrays.teacher_weight, bias=arrays.teacher_bias)
    ignored = call.options.ignore_index
    return (
        Side(Inputs.of(student, ignored), call.options, arrays.lse),
        Side(Inputs.of(teacher, ignored), call.teacher_options, arrays.teacher_lse),
    )


def _forward(call: DivergenceCall, arrays: DivergenceArrays[Array]) -> tuple[Array, Array]:
    """The divergence of every token, 0 where it does not count, and Σ_j q (log q − log m): [N] each."""
    (student, teacher), tile = _sides(call, arrays), call.tile

    def chunk(sums: tuple[Array, Array], first: Index, tokens: int) -> tuple[Array, Array]:
        x, teacher_x = student.rows(first, tokens), teacher.rows(first, tokens)

        def block(carry: tuple[Array, Array], start: Index, size: int) -> tuple[Array, Array]:
            log_q = student.log_probs(student.logits(x, first, start, size), first)
            log_p = teacher.log_probs(teacher.logits(teacher_x, first, start, size), first).astype(log_q.dtype)
            total, mean = _divergence_rows(log_p, log_q, call.beta)
            return carry[0] + total, carry[1] + mean

        zero = jnp.zeros(tokens, student.lse.dtype)
        total, mean = for_slices(tile.vocab, tile.vocab_chunk, block, (zero, zero))
        return put(sums[0], total, first), put(sums[1], mean, first)

    zero = jnp.zeros_like(student.lse[0])
    total, mean = for_slices(tile.tokens, tile.token_chunk, chunk, (zero, zero))
    return jnp.where(student.inputs.valid, total, 0.0), mean


def _gradients(
    call: DivergenceCall, arrays: DivergenceArrays[Array], mean: Array, upstream: Array, needs: Needs
) -> Gradients:
    """dX, dW and db, each None unless wanted: 6·N·D·V flops and 2·N·V times the teacher's D."""
    student, teacher = _sides(call, arrays)
    inputs = student.inputs
    factor = numerics.row_upstream(XP, inputs, call.options, inputs.wide(upstream))
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, factor)
    factor = factor / unit

    def logit_gradient(x: Array, first: Index, start: Index, columns: int) -> Array:
        dz = _logit_gradient(call, student, teacher, x, first, start, columns, mean)
        return dz * take(factor, first, x.shape[0])[:, None]

    return tile_gradients(inputs, call.tile, needs, unit, logit_gradient)


def _logit_gradient(
    call: DivergenceCall, student: Side, teacher: Side, x: Array, first: Index, start: Index, columns: int, mean: Array
) -> Array:
    """∂ divergence / ∂(logit_scale · r) of a tile, 0 where a token does not count."""
    tokens = x.shape[0]
    teacher_z = teacher.logits(teacher.rows(first, tokens), first, start, columns)
    log_p = teacher.log_probs(teacher_z, first).astype(mean.dtype)
    z = student.logits(x, first, start, columns)
    dz = _gradient(log_p, student.log_probs(z, first), take(mean, first, tokens), call.beta)
    if call.options.softcap is not None:
        dz = dz * slope(z, call.options, temperature_column(student.inputs, first, tokens))
    return jnp.where(take(student.inputs.valid, first, tokens)[:, None], dz, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(call: DivergenceCall, arrays: DivergenceArrays[Array]) -> Array:
    return _forward(call, arrays)[0]


def _divergence_forward(call: DivergenceCall, primals: DivergenceArrays[CustomVJPPrimal]) -> tuple[Array, Packed]:
    needs = [leaf is not None and leaf.perturbed for leaf in primals[:3]]
    arrays: DivergenceArrays[Array] = vjp.values_of(primals)
    losses, mean = _forward(call, arrays)
    return losses, packed((arrays, mean), needs)


def _divergence_backward(
    call: DivergenceCall, residuals: Packed, cotangent: vjp.Cotangent
) -> tuple[DivergenceArrays[Array | None]]:
    (arrays, mean), flags = unpacked(residuals)
    upstream, gradients = vjp.arrived(cotangent), Gradients(None, None, None)
    if upstream is not None:
        gradients = _gradients(call, arrays, mean, upstream, Needs(*flags))
    pairs = zip(gradients, arrays[:3], strict=True)
    hidden, weight, bias = (None if g is None else g.astype(a.dtype).reshape(a.shape) for g, a in pairs)
    return (DivergenceArrays(hidden, weight, bias, *(None,) * 7),)


_divergence.defvjp(_divergence_forward, _divergence_backward, symbolic_zeros=True)

# Compiled once for a DivergenceCall and shapes, also when the caller does not use jax.jit.
divergence = jax.jit(_divergence, static_argnums=0)
