"""A divergence between two linear softmaxes, tile by tile, in plain operations. Mirror of jax_impl/distillation.py.

With p the teacher's and q the student's probabilities of a token and m = β p + (1 − β) q:

    divergence = Σ_j p (log p − log q)                                         β = 0
                 Σ_j β p (log p − log m) + (1 − β) q (log q − log m)           0 < β < 1
                 Σ_j q (log q − log p)                                         β = 1

    ∂/∂z_j     = q_j − p_j                                                     β = 0
                 (1 − β) q_j (log q_j − log m_j − Σ_k q_k (log q_k − log m_k)) 0 < β < 1
                 q_j (log q_j − log p_j − divergence)                          β = 1

lse of both sides is known, so a tile [C, B] of both sides' logits is all that is ever held. It comes in two parts, a
logit not far below the largest and the rest, so that large logits cost no accuracy, nor do saturated sides. At β = 0
and 1 the terms − p + q (or − q + p), of sum 0, are added: then the error of lse enters in second order.

Rounding: as in eager.py, with the gradient of a tile rounded to the student's dtype on a GPU, and accumulated in
float32.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from logitless import numerics
from logitless.objectives import Tile
from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.autograd import Derivatives, SavedContext, differentiable_once, reverse_only
from logitless.torch_impl.call import XP, Arrays, Inputs


class Heads(NamedTuple):
    """Both sides' arrays as the caller gave them, and what is known of their tokens."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    teacher_hidden: Tensor  # [..., D_teacher]
    teacher_weight: Tensor  # [V, D_teacher]
    teacher_bias: Tensor | None  # [V]
    target: Tensor  # [...], which says what counts
    temperature: Tensor | None  # [...]; None: the options have it
    lse: Tensor  # [2, N]: two parts, whose sum it is
    teacher_lse: Tensor  # [2, N]


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Everything about a call that is not an array: β, both sides' logits, the dtypes of their products, the tile."""

    beta: float
    options: LossOptions
    teacher_options: LossOptions
    compute_dtype: torch.dtype
    teacher_compute_dtype: torch.dtype
    tile: Tile


@dataclasses.dataclass(frozen=True)
class Side:
    """One side's arrays: what gives its log-probabilities of a tile."""

    inputs: Inputs
    options: LossOptions
    lse: Tensor  # [2, N]: two parts, whose sum it is

    def rows(self, rows: slice) -> Tensor:
        """The chunk's hidden states [C, D] in the products' dtype, 0 where a token does not count."""
        return chunk.rows_of(self.inputs, rows)

    def logits(self, x: Tensor, rows: slice, start: int, stop: int) -> Tensor:
        """z of a tile, [C, B], in the accumulation dtype; x [C, D] are its tokens' hidden states."""
        out = x.new_empty((x.shape[0], stop - start), dtype=self.inputs.accumulation_dtype)
        return chunk.logits_block(x, self.inputs, rows, start, stop, self.options, out)

    def log_probs(self, z: Tensor, rows: slice) -> Tensor:
        """log softmax(z) in place of a tile's logits, [C, B]."""
        anchor, rest = self.lse[:, rows].unsqueeze(2)
        return z.sub_(anchor).sub_(rest)


def _weighted(p: Tensor, log_ratio: Tensor) -> Tensor:
    """p · log_ratio in place of log_ratio, 0 where p is 0 (there log_ratio may be infinite or NaN)."""
    return log_ratio.mul_(p).masked_fill_(p == 0, 0.0)


def _log_ratios(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log (p / m) and log (q / m) for 0 < β < 1, of full relative precision where p and q are close."""
    gap = log_q - log_p
    share = torch.full_like(gap, 1 - beta).masked_fill_(gap > 0, beta)  # of the smaller one in m
    log_m = share.mul_(gap.abs().neg_().expm1_()).log1p_()  # log (m / max(p, q)): no exponential is large
    return gap.clamp(min=0).neg_().sub_(log_m), gap.clamp_(max=0).sub_(log_m)


def _divergence_rows(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The tile's share of each row's divergence, and of Σ_j q (log q − log m) (0 where β is 0)."""
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


def _gradient(log_p: Tensor, log_q: Tensor, mean: Tensor, beta: float) -> Tensor:
    """∂ divergence / ∂z of a tile."""
    if beta == 0:
        return log_q.exp_().sub_(log_p.exp_())
    gap = log_q - log_p if beta == 1 else _log_ratios(log_p, log_q, beta)[1]
    gradient = _weighted(log_q.exp_(), gap.sub_(mean.unsqueeze(1)))
    return gradient if beta == 1 else gradient.mul_(1 - beta)


class DivergenceContext(SavedContext):
    """What the backward finds of its forward."""

    call: Distillation


class DivergenceFunction(torch.autograd.Function):
    """The divergence of every token, [N], 0 where it does not count; differentiable in the student's arrays."""

    @staticmethod
    def forward(ctx: DivergenceContext, call: Distillation, *tensors: Tensor | None) -> Tensor:
        heads = Heads(*tensors)  # type: ignore[arg-type]
        with torch.autocast(heads.hidden.device.type, enabled=False):
            student, teacher = _sides(heads, call)
            total, mean = torch.zeros_like(heads.lse[0]), torch.zeros_like(heads.lse[0])
            for first, last in call.tile.token_slices:
                rows = slice(first, last)
                x, teacher_x = student.rows(rows), teacher.rows(rows)
                for start, stop in call.tile.vocab_slices:
                    log_p = teacher.log_probs(teacher.logits(teacher_x, rows, start, stop), rows).to(total.dtype)
                    log_q = student.log_probs(student.logits(x, rows, start, stop), rows)
                    part, student_part = _divergence_rows(log_p, log_q, call.beta)
                    total[rows] += part
                    mean[rows] += student_part
        ctx.call = call
        ctx.save_for_backward(*heads, mean)
        return total.masked_fill_(~student.inputs.valid, 0.0)

    jvp = reverse_only("distillation_loss")

    @staticmethod
    @differentiable_once("distillation_loss")
    def backward(ctx: DivergenceContext, kept: tuple[Tensor, ...], upstream: Tensor) -> Derivatives:
        heads, mean = Heads(*kept[:-1]), kept[-1]
        with torch.autocast(mean.device.type, enabled=False):
            gradients = _gradients(heads, mean, upstream, ctx.call, ctx.needs_input_grad[1:4])
        like = zip(gradients, kept[:3], strict=True)
        return (None, *(None if g is None else g.to(a.dtype).reshape(a.shape) for g, a in like), *(None,) * 7)


def _sides(heads: Heads, call: Distillation) -> tuple[Side, Side]:
    own = Arrays(heads.hidden, heads.weight, heads.bias, heads.target, temperature=heads.temperature)
    teacher_head = heads.teacher_hidden, heads.teacher_weight, heads.teacher_bias
    other = Arrays(*teacher_head, heads.target, temperature=heads.temperature)
    student = chunk.prepare(own, call.options, call.compute_dtype)
    teacher = chunk.prepare(other, call.teacher_options, call.teacher_compute_dtype)
    return Side(student, call.options, heads.lse), Side(teacher, call.teacher_options, heads.teacher_lse)


def _gradients(
    heads: Heads, mean: Tensor, upstream: Tensor, call: Distillation, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """dX, dW and db, each None unless wanted: 6·N·D·V flops and 2·N·V times the teacher's D."""
    student, teacher = _sides(heads, call)
    inputs = student.inputs
    factor = numerics.row_upstream(XP, inputs, call.options, inputs.wide(upstream))
    # Operands in a narrow dtype: the largest factor stays out of their rounding, and of float16's range.
    unit = numerics.largest_factor(XP, factor)
    factor = factor / unit

    def logit_gradient(rows: slice, x: Tensor, start: int, stop: int) -> Tensor:
        dz = _logit_gradient(student, teacher, rows, x, start, stop, mean, call)
        return dz.mul_(factor[rows].unsqueeze(1))

    wanted = needs[0], needs[1], needs[2]
    return chunk.tile_gradients(inputs, call.tile, wanted, heads.weight.dtype, unit, logit_gradient)


def _logit_gradient(
    student: Side, teacher: Side, rows: slice, x: Tensor, start: int, stop: int, mean: Tensor, call: Distillation
) -> Tensor:
    """∂ divergence / ∂(logit_scale · r) of a tile, 0 where a token does not count."""
    log_p = teacher.log_probs(teacher.logits(teacher.rows(rows), rows, start, stop), rows).to(mean.dtype)
    z = student.logits(x, rows, start, stop)
    cap = call.options.softcap
    slope = None if cap is None else chunk.slope(z, call.options, student.inputs.temperature_column(rows))
    dz = _gradient(log_p, student.log_probs(z, rows), mean[rows], call.beta)
    if slope is not None:
        dz.mul_(slope)
    return dz.masked_fill_(~student.inputs.valid[rows].unsqueeze(1), 0.0)
