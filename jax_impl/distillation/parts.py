"""The losses of whole rows of the student's logits, and the gradient of a tile. Mirror of
torch_impl/distillation/parts.py.

With p the teacher's and q the student's probabilities of a token and m = β p + (1 − β) q:

    divergence = Σ_j p (log p − log q) − p + q                                 β = 0
                 Σ_j β p (log p − log m) + (1 − β) q (log q − log m)           0 < β < 1
                 Σ_j q (log q − log p) − q + p                                 β = 1

    ∂/∂z_j     = q_j − p_j                                                     β = 0
                 (1 − β) q_j (log q_j − log m_j − Σ_k q_k (log q_k − log m_k)) 0 < β < 1
                 q_j (log q_j − log p_j − Σ_k q_k (log q_k − log p_k))         β = 1

The terms − p + q (or − q + p) have the sum 0: with them the error of lse enters in second order.

A divergence between whole distributions takes the student's lse. One between K given ids and one class for all others
takes the ids' logits and the logsumexp of the others: no 1 − Σ_k q_k cancels. The hard loss is the same with the target
as the only id.

Where devices share the vocabulary, each adds up its own entries. A token's sums are exchanged before the first
gradient: that needs Σ_k over all entries. In padding z is −inf.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from logitless.jax_impl.call import Inputs
from logitless.jax_impl.chunk import unpadded
from logitless.jax_impl.distillation.teachers import (
    Teacher,
    columns_of,
    id_of,
    normalized,
    put_columns,
    row_lse,
    row_sums,
)
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.slices import Index, take
from logitless.objectives import WholeRows
from logitless.spec import LossOptions

Kept = tuple[Array, ...]
"""What the gradient needs, [C, ...] each, of one chunk or of all."""


class Part(Protocol):
    """A loss on the student's logits z."""

    def of_rows(self, z: Array, first: Index) -> tuple[Array, Kept, Array]:
        """Of whole rows [C, V] the losses [C], what the gradient needs, and the gradient itself, for who wants it."""

    def gradient(self, kept: Kept, z: Array, first: Index, start: Index) -> Array:
        """∂ loss / ∂z of a tile [C, B]."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """From a teacher of the whole vocabulary."""

    teacher: Teacher
    beta: float
    shard: Shard

    def of_rows(self, z: Array, first: Index) -> tuple[Array, Kept, Array]:
        lse, t = row_lse(z, self.shard), self._teacher_tile(z, first, 0)
        teacher_lse = row_lse(t, self.shard) if self.teacher.has_logits else ()
        log_p, log_q = normalized(t, teacher_lse), normalized(z, lse)
        losses, mean = self.shard.total(divergence_rows(log_p, log_q, self.beta))
        return losses, (*lse, *teacher_lse, mean), divergence_gradient(log_p, log_q, mean, self.beta)

    def gradient(self, kept: Kept, z: Array, first: Index, start: Index) -> Array:
        *lses, mean = kept
        log_p = normalized(self._teacher_tile(z, first, start), tuple(lses[2:]))
        return divergence_gradient(log_p, normalized(z, tuple(lses[:2])), mean, self.beta)

    def _teacher_tile(self, z: Array, first: Index, start: Index) -> Array:
        return unpadded(self.teacher.tile(first, z.shape[0], start, z.shape[1]), self.shard.limit(), start)


@dataclasses.dataclass(frozen=True)
class GivenIds:
    """Of a few ids of every token, and one class for all others: what both losses of such classes share."""

    ids: Array  # [N, K] int32, −1 where not known
    shard: Shard

    def scaled(self, z: Array, first: Index) -> Array:
        """The logits that the loss is of."""
        return z

    def judged(self, log_q: Array, first: Index) -> tuple[Array, Array]:
        """The losses [C], and their gradients in the logits of the classes [C, K + 1], the last one the others'."""
        raise NotImplementedError

    def of_rows(self, z: Array, first: Index) -> tuple[Array, Kept, Array]:
        (tokens, width), z = z.shape, self.scaled(z, first)
        columns = self._columns(z, first, 0)
        logits = jnp.take_along_axis(z, jnp.minimum(columns, width - 1), axis=1)
        logits = self.shard.total(jnp.where(columns < width, logits, 0.0))
        logits = jnp.where(take(self.ids, first, tokens) < 0, -jnp.inf, logits)
        others = put_columns(z, columns, -jnp.inf)
        highest, total = row_sums(others, self.shard)
        losses, kept = self.of_classes(logits, highest, jnp.log(total), first)
        return losses, kept, _others_gradient(kept, others, columns)

    def of_classes(self, logits: Array, highest: Array, log_total: Array, first: Index) -> tuple[Array, Kept]:
        """From the ids' logits [C, K], −inf where not known, and the logsumexp of the others in two parts, [C] each:
        the losses [C], and what the gradient needs."""
        anchor = jnp.maximum(highest, logits.max(axis=1))
        rest = (highest - anchor) + log_total
        log_q = _log_softmax(jnp.concatenate([logits - anchor[:, None], rest[:, None]], axis=1))
        losses, slopes = self.judged(log_q, first)
        return losses, (highest, jnp.where(jnp.isneginf(log_total), 0.0, log_total), slopes)

    def gradient(self, kept: Kept, z: Array, first: Index, start: Index) -> Array:
        columns = self._columns(z, first, start)
        return _others_gradient(kept, put_columns(self.scaled(z, first), columns, -jnp.inf), columns)

    def _columns(self, z: Array, first: Index, start: Index) -> Array:
        return columns_of(self.ids, first, z.shape[0], id_of(self.shard, start), z.shape[1])


def _others_gradient(kept: Kept, others: Array, columns: Array) -> Array:
    """From the others' logits, −inf at the ids."""
    highest, log_total, slopes = kept
    dz = jnp.exp((others - highest[:, None]) - log_total[:, None]) * slopes[:, -1:]
    return put_columns(dz, columns, slopes[:, :-1])


@dataclasses.dataclass(frozen=True)
class RestClass(GivenIds):
    """The divergence from a teacher of K ids and one class for all others."""

    log_p: Array  # [N, K + 1]
    beta: float

    def judged(self, log_q: Array, first: Index) -> tuple[Array, Array]:
        log_p = take(self.log_p, first, log_q.shape[0])
        losses, mean = divergence_rows(log_p, log_q, self.beta)
        return losses, divergence_gradient(log_p, log_q, mean, self.beta)


@dataclasses.dataclass(frozen=True)
class Hard(GivenIds):
    """coef · −log q(target) at temperature 1, of logits that were divided by ``temperature``."""

    coef: float
    temperature: Array | float  # [N] or one for all

    def scaled(self, z: Array, first: Index) -> Array:
        return z * self._temperature(first, z.shape[0])

    def judged(self, log_q: Array, first: Index) -> tuple[Array, Array]:
        nll = -log_q[:, :1]
        gone = -jnp.expm1(-nll)  # 1 − q: no difference
        slopes = jnp.concatenate([-gone, gone], axis=1)
        return self.coef * nll[:, 0], slopes * (self.coef * self._temperature(first, nll.shape[0]))

    def _temperature(self, first: Index, tokens: int) -> Array | float:
        if isinstance(self.temperature, float):
            return self.temperature
        return take(self.temperature, first, tokens)[:, None]


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses on the student's logits, and what makes them."""

    inputs: Inputs
    """The student's."""
    parts: list[Part]
    """The hard loss, if there is one, and the divergence."""
    options: LossOptions
    order: WholeRows

    @property
    def hard(self) -> Hard | None:
        part = self.parts[0]
        return part if isinstance(part, Hard) else None


# ---------------------------------------------------------------------------------------------------------------------
# The mathematics, on tiles and on classes


def _log_softmax(z: Array) -> Array:
    """Of classes; the likeliest one keeps the digits of 1 − p."""
    place = jnp.argmax(z, axis=1)[:, None]
    z = z - jnp.take_along_axis(z, place, axis=1)
    return z - jnp.log1p(put_columns(jnp.exp(z), place, 0.0).sum(axis=1, keepdims=True))


def _weighted(p: Array, log_ratio: Array) -> Array:
    """p · log_ratio, 0 where p is 0 (there log_ratio may be infinite or NaN)."""
    return jnp.where(p == 0, 0.0, p * log_ratio)


def _log_ratios(log_p: Array, log_q: Array, beta: float) -> tuple[Array, Array]:
    """log (p / m) and log (q / m) for 0 < β < 1, of full relative precision where p and q are close."""
    gap = log_q - log_p
    share = jnp.where(gap > 0, beta, 1 - beta)  # of the smaller one in m
    log_m = jnp.log1p(share * jnp.expm1(-jnp.abs(gap)))  # log (m / max(p, q)): no exponential is large
    return -jnp.maximum(gap, 0) - log_m, jnp.minimum(gap, 0) - log_m


def divergence_rows(log_p: Array, log_q: Array, beta: float) -> tuple[Array, Array]:
    """This device's share of each row's divergence, and of Σ_j q (log q − log m) (0 where β is 0)."""
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


def divergence_gradient(log_p: Array, log_q: Array, mean: Array, beta: float) -> Array:
    """∂ divergence / ∂z of a tile."""
    q = jnp.exp(log_q)
    if beta == 0:
        return q - jnp.exp(log_p)
    gap = log_q - log_p if beta == 1 else _log_ratios(log_p, log_q, beta)[1]
    gradient = _weighted(q, gap - mean[:, None])
    return gradient if beta == 1 else (1 - beta) * gradient
