"""The losses of a tile of the student's logits, and their gradients. Mirror of torch_impl/distillation/parts.py.

With p the teacher's and q the student's probabilities of a token and m = β p + (1 − β) q:

    divergence = Σ_j p (log p − log q) − p + q                                 β = 0
                 Σ_j β p (log p − log m) + (1 − β) q (log q − log m)           0 < β < 1
                 Σ_j q (log q − log p) − q + p                                 β = 1

    ∂/∂z_j     = q_j − p_j                                                     β = 0
                 (1 − β) q_j (log q_j − log m_j − Σ_k q_k (log q_k − log m_k)) 0 < β < 1
                 q_j (log q_j − log p_j − Σ_k q_k (log q_k − log p_k))         β = 1

The terms − p + q (or − q + p) have the sum 0: with them the error of lse enters in second order.

A divergence between whole distributions takes the student's lse, which is known before the tiles. One between K given
ids and one class for all others takes the ids' logits and the logsumexp of the others, which come from the tiles: no
1 − Σ_k q_k cancels. The hard loss is the same with the target as the only id.

Where devices share the vocabulary, each adds up its own entries. A token's sums are exchanged when its tiles are done,
before the first gradient: that needs Σ_k over all entries. In padding z is −inf.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from logitless.jax_impl.chunk import unpadded
from logitless.jax_impl.distillation.teachers import (
    Teacher,
    columns_of,
    id_of,
    normalized,
    of_all_devices,
    put_columns,
    row_lse,
)
from logitless.jax_impl.distributed.parallel import Shard
from logitless.jax_impl.slices import Index, take
from logitless.spec import LOWEST_ANCHOR

Sums = tuple[Array, ...]
"""What is added up over the tiles of a chunk of tokens, [C, ...] each."""
Kept = tuple[Array, ...]
"""What the gradient needs, [C, ...] each, of one chunk or of all."""


class Part(Protocol):
    """A loss on the student's logits z, a tile [C, B] at a time."""

    def start(self, first: Index, tokens: int) -> Sums:
        """The sums before the first tile."""

    def add(self, sums: Sums, z: Array, first: Index, start: Index) -> Sums:
        """The sums with a tile."""

    def finish(self, sums: Sums, first: Index) -> tuple[Array, Kept]:
        """The losses [C], and what the gradient needs."""

    def gradient(self, kept: Kept, z: Array, first: Index, start: Index) -> Array:
        """∂ loss / ∂z of a tile."""

    def of_rows(self, z: Array, first: Index) -> tuple[Array, Array]:
        """The losses [C] and ∂ loss / ∂z [C, V] of whole rows."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """From a teacher of the whole vocabulary."""

    teacher: Teacher
    lse: Array | None  # [2, N], the student's; None where rows are whole
    beta: float
    shard: Shard

    def start(self, first: Index, tokens: int) -> Sums:
        assert self.lse is not None
        zero = jnp.zeros(tokens, self.lse.dtype)
        return zero, zero

    def add(self, sums: Sums, z: Array, first: Index, start: Index) -> Sums:
        total, mean = divergence_rows(self._log_p(z, first, start), self._log_q(z, first), self.beta)
        return sums[0] + total, sums[1] + mean

    def finish(self, sums: Sums, first: Index) -> tuple[Array, Kept]:
        losses, mean = self.shard.total((sums[0], sums[1]))
        return losses, (mean,)

    def gradient(self, kept: Kept, z: Array, first: Index, start: Index) -> Array:
        return divergence_gradient(self._log_p(z, first, start), self._log_q(z, first), kept[0], self.beta)

    def of_rows(self, z: Array, first: Index) -> tuple[Array, Array]:
        log_p, log_q = self._log_p(z, first, 0), normalized(z, row_lse(z, self.shard))
        losses, mean = self.shard.total(divergence_rows(log_p, log_q, self.beta))
        return losses, divergence_gradient(log_p, log_q, mean, self.beta)

    def _log_p(self, z: Array, first: Index, start: Index) -> Array:
        return unpadded(self.teacher.log_probs(first, z.shape[0], start, z.shape[1]), self.shard.limit(), start)

    def _log_q(self, z: Array, first: Index) -> Array:
        assert self.lse is not None
        return normalized(z, take(self.lse, first, z.shape[0], axis=1))


@dataclasses.dataclass(frozen=True)
class GivenIds:
    """Of a few ids of every token, and one class for all others: what both losses of such classes share."""

    ids: Array  # [N, K] int32, −1 where not known
    dtype: jnp.dtype
    shard: Shard

    def start(self, first: Index, tokens: int) -> Sums:
        """The ids' logits; the largest logit of the others, and Σ exp(z − largest) over them."""
        zero = jnp.zeros(tokens, self.dtype)
        return jnp.zeros((tokens, self.ids.shape[1]), self.dtype), jnp.full_like(zero, LOWEST_ANCHOR), zero

    def scaled(self, z: Array, first: Index) -> Array:
        """The logits that the loss is of."""
        return z

    def judged(self, log_q: Array, first: Index) -> tuple[Array, Array]:
        """The losses [C], and their gradients in the logits of the classes [C, K + 1], the last one the others'."""
        raise NotImplementedError

    def add(self, sums: Sums, z: Array, first: Index, start: Index) -> Sums:
        logits, highest, total = sums
        (tokens, width), z = z.shape, self.scaled(z, first)
        columns = columns_of(self.ids, first, tokens, id_of(self.shard, start), width)
        found = jnp.take_along_axis(z, jnp.minimum(columns, width - 1), axis=1)
        others = put_columns(z, columns, -jnp.inf)
        above = jnp.maximum(highest, others.max(axis=1))
        total = total * jnp.exp(highest - above) + jnp.exp(others - above[:, None]).sum(axis=1)
        return logits + jnp.where(columns < width, found, 0.0), above, total

    def finish(self, sums: Sums, first: Index) -> tuple[Array, Kept]:
        logits, highest, total = sums
        logits, (highest, total) = self.shard.total(logits), of_all_devices(self.shard, highest, total)
        logits = jnp.where(take(self.ids, first, logits.shape[0]) < 0, -jnp.inf, logits)
        anchor = jnp.maximum(highest, logits.max(axis=1))
        others = (highest - anchor) + jnp.log(total)
        log_q = _log_softmax(jnp.concatenate([logits - anchor[:, None], others[:, None]], axis=1))
        losses, slopes = self.judged(log_q, first)
        return losses, (highest, jnp.log(jnp.where(total > 0, total, 1.0)), slopes)

    def gradient(self, kept: Kept, z: Array, first: Index, start: Index) -> Array:
        highest, log_total, slopes = kept
        columns = columns_of(self.ids, first, z.shape[0], id_of(self.shard, start), z.shape[1])
        others = put_columns(self.scaled(z, first), columns, -jnp.inf)
        dz = jnp.exp((others - highest[:, None]) - log_total[:, None]) * slopes[:, -1:]
        return put_columns(dz, columns, slopes[:, :-1])

    def of_rows(self, z: Array, first: Index) -> tuple[Array, Array]:
        losses, kept = self.finish(self.add(self.start(first, z.shape[0]), z, first, 0), first)
        return losses, self.gradient(kept, z, first, 0)


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


def divergence_gradient(log_p: Array, log_q: Array, mean: Array, beta: float) -> Array:
    """∂ divergence / ∂z of a tile."""
    q = jnp.exp(log_q)
    if beta == 0:
        return q - jnp.exp(log_p)
    gap = log_q - log_p if beta == 1 else _log_ratios(log_p, log_q, beta)[1]
    gradient = _weighted(q, gap - mean[:, None])
    return gradient if beta == 1 else (1 - beta) * gradient
