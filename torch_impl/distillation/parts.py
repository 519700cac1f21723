"""The losses of whole rows of the student's logits, and the gradient of a tile. Mirror of
jax_impl/distillation/parts.py.

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

Where ranks share the vocabulary, each adds up its own entries. A token's sums are exchanged before the first gradient:
that needs Σ_k over all entries.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from logitless.objectives import WholeRows
from logitless.spec import LossOptions
from logitless.torch_impl.call import Inputs
from logitless.torch_impl.distillation.teachers import Teacher, columns_of, normalized, row_lse, row_sums
from logitless.torch_impl.distributed.parallel import Shard

Kept = tuple[Tensor, ...]
"""What the gradient needs, [C, ...] each, of one chunk or of all."""
TeacherTile = tuple[Tensor, Tensor | None]
"""Logits of a tile, [C, B], and their logsumexps in two parts, [2, C]; or log-probabilities and None."""


class Part(Protocol):
    """A loss on the student's logits z."""

    def of_rows(self, z: Tensor, rows: slice, differentiate: bool) -> tuple[Tensor, Kept, Tensor | None]:
        """Of whole rows [C, V] the losses [C], what the gradient needs, and if it is wanted the gradient itself.

        The last part of a call may write to z.
        """

    def gradient(self, kept: Kept, z: Tensor, rows: slice, start: int) -> Tensor:
        """∂ loss / ∂z of a tile [C, B]. The last part of a call may write to z."""


class TileFunctions(Protocol):
    """What a kernel does of a tile of logits whose logsumexps, [2, C], are known."""

    def logits_sums(self, z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, /) -> tuple[Tensor, Tensor]:
        """:func:`divergence_rows`, which leaves the tile as it is."""

    def logits_gradient(self, z: Tensor, lse: Tensor, teacher: TeacherTile, beta: float, mean: Tensor, /) -> Tensor:
        """:func:`divergence_gradient`, in place of z."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """From a teacher of the whole vocabulary."""

    teacher: Teacher
    beta: float
    shard: Shard
    by_tile: TileFunctions | None = None
    """None for plain operations."""

    def of_rows(self, z: Tensor, rows: slice, differentiate: bool) -> tuple[Tensor, Kept, Tensor | None]:
        lse, t = row_lse(z, self.shard), self.teacher.tile(rows, 0, z.shape[1])
        teacher_lse = row_lse(t, self.shard) if self.teacher.has_logits else None
        dz = None
        if self.by_tile is not None:
            teacher = t, teacher_lse
            losses, mean = self._of_all_ranks(*self.by_tile.logits_sums(z, lse, teacher, self.beta))
            if differentiate:
                dz = self.by_tile.logits_gradient(z, lse, teacher, self.beta, mean)
        else:
            log_p, log_q = normalized(t, teacher_lse), normalized(z, lse)
            own = divergence_rows(log_p, log_q.clone() if differentiate else log_q, self.beta)
            losses, mean = self._of_all_ranks(*own)
            if differentiate:
                dz = divergence_gradient(log_p, log_q, mean, self.beta)
        return losses, (*lse, *(() if teacher_lse is None else teacher_lse), mean), dz

    def gradient(self, kept: Kept, z: Tensor, rows: slice, start: int) -> Tensor:
        *lses, mean = kept
        lse, teacher_lse = torch.stack(lses[:2]), torch.stack(lses[2:]) if lses[2:] else None
        t = self.teacher.tile(rows, start, start + z.shape[1])
        if self.by_tile is not None:
            return self.by_tile.logits_gradient(z, lse, (t, teacher_lse), self.beta, mean)
        return divergence_gradient(normalized(t, teacher_lse), normalized(z, lse), mean, self.beta)

    def _of_all_ranks(self, losses: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        if not self.shard.split:
            return losses, mean
        losses, mean = self.shard.sum(torch.stack([losses, mean]))
        return losses, mean


@dataclasses.dataclass(frozen=True)
class GivenIds:
    """Of a few ids of every token, and one class for all others: what both losses of such classes share."""

    ids: Tensor  # [N, K] int64, −1 where not known
    shard: Shard

    def scaled(self, z: Tensor, rows: slice) -> Tensor:
        """The logits that the loss is of."""
        return z

    def judged(self, log_q: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The losses [C], and their gradients in the logits of the classes [C, K + 1], the last one the others'."""
        raise NotImplementedError

    def of_rows(self, z: Tensor, rows: slice, differentiate: bool) -> tuple[Tensor, Kept, Tensor | None]:
        columns, padded = self._padded(z, rows, 0)
        logits = self.shard.sum(padded.gather(1, columns)).masked_fill_(self.ids[rows] < 0, -torch.inf)
        highest, total = row_sums(padded.scatter_(1, columns, -torch.inf)[:, : z.shape[1]], self.shard)
        anchor = torch.maximum(highest, logits.amax(dim=1))
        others = (highest - anchor) + total.log()
        losses, slopes = self.judged(_log_softmax(torch.cat([logits - anchor[:, None], others[:, None]], dim=1)), rows)
        kept = highest, torch.where(total > 0, total, 1.0).log(), slopes
        return losses, kept, self._gradient(kept, columns, padded) if differentiate else None

    def gradient(self, kept: Kept, z: Tensor, rows: slice, start: int) -> Tensor:
        columns, padded = self._padded(z, rows, start)
        return self._gradient(kept, columns, padded.scatter_(1, columns, -torch.inf))

    def _gradient(self, kept: Kept, columns: Tensor, padded: Tensor) -> Tensor:
        """From and in place of the others' logits, −inf at the ids."""
        highest, log_total, slopes = kept
        others = padded[:, :-1]
        dz = others.sub_(highest.unsqueeze(1)).sub_(log_total.unsqueeze(1)).exp_().mul_(slopes[:, -1:])
        padded.scatter_(1, columns, slopes[:, :-1])
        return dz

    def _padded(self, z: Tensor, rows: slice, start: int) -> tuple[Tensor, Tensor]:
        """The ids' columns in the tile, [C, K], and a copy of its logits with one column more, of 0, for the ids that
        lie in other tiles."""
        columns = columns_of(self.ids[rows], self.shard.start + start, z.shape[1])
        return columns, torch.nn.functional.pad(self.scaled(z, rows), (0, 1))


@dataclasses.dataclass(frozen=True)
class RestClass(GivenIds):
    """The divergence from a teacher of K ids and one class for all others."""

    log_p: Tensor  # [N, K + 1]
    beta: float

    def judged(self, log_q: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_p = self.log_p[rows]
        losses, mean = divergence_rows(log_p, log_q.clone(), self.beta)
        return losses, divergence_gradient(log_p.clone(), log_q, mean, self.beta)


@dataclasses.dataclass(frozen=True)
class Hard(GivenIds):
    """coef · −log q(target) at temperature 1, of logits that were divided by ``temperature``."""

    coef: float
    temperature: Tensor | float  # [N, 1] or one for all

    def scaled(self, z: Tensor, rows: slice) -> Tensor:
        return z * (self.temperature if isinstance(self.temperature, float) else self.temperature[rows])

    def judged(self, log_q: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        nll = -log_q[:, 0]
        gone = -torch.expm1(-nll)  # 1 − q: no difference
        factor = self.coef * (self.temperature if isinstance(self.temperature, float) else self.temperature[rows, 0])
        return self.coef * nll, torch.stack([-gone * factor, gone * factor], dim=1)


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


def _log_softmax(z: Tensor) -> Tensor:
    """Of classes; the likeliest one keeps the digits of 1 − p."""
    highest, place = z.max(dim=1, keepdim=True)
    z = z - highest
    return z - z.exp().scatter_(1, place, 0.0).sum(dim=1, keepdim=True).log1p_()


def _weighted(p: Tensor, log_ratio: Tensor) -> Tensor:
    """p · log_ratio in place of log_ratio, 0 where p is 0 (there log_ratio may be infinite or NaN)."""
    return log_ratio.mul_(p).masked_fill_(p == 0, 0.0)


def _log_ratios(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log (p / m) and log (q / m) for 0 < β < 1, of full relative precision where p and q are close."""
    gap = log_q - log_p
    share = torch.full_like(gap, 1 - beta).masked_fill_(gap > 0, beta)  # of the smaller one in m
    log_m = share.mul_(gap.abs().neg_().expm1_()).log1p_()  # log (m / max(p, q)): no exponential is large
    return gap.clamp(min=0).neg_().sub_(log_m), gap.clamp_(max=0).sub_(log_m)


def divergence_rows(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """This rank's share of each row's divergence, and of Σ_j q (log q − log m) (0 where β is 0). Writes to log_q."""
    p = log_p.exp()
    if beta == 0:
        terms = _weighted(p, log_p - log_q).sub_(p).add_(log_q.exp_())
        return terms.sum(dim=1), torch.zeros_like(terms[:, 0])
    q = log_q.exp()
    if beta == 1:
        student = _weighted(q, log_q - log_p)
        mean = student.sum(dim=1)
        return student.sub_(q).add_(p).sum(dim=1), mean
    from_p, from_q = _log_ratios(log_p, log_q, beta)
    mean = _weighted(q, from_q).sum(dim=1)
    return beta * _weighted(p, from_p).sum(dim=1) + (1 - beta) * mean, mean


def divergence_gradient(log_p: Tensor, log_q: Tensor, mean: Tensor, beta: float) -> Tensor:
    """∂ divergence / ∂z of a tile. Writes to both."""
    if beta == 0:
        return log_q.exp_().sub_(log_p.exp_())
    gap = log_q - log_p if beta == 1 else _log_ratios(log_p, log_q, beta)[1]
    gradient = _weighted(log_q.exp_(), gap.sub_(mean.unsqueeze(1)))
    return gradient if beta == 1 else gradient.mul_(1 - beta)
