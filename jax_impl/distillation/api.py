"""The public distillations: from a teacher's head, from sparse and from dense targets. Mirror of
torch_impl/distillation/api.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless import numerics, objectives, spec
from logitless.jax_impl import checks
from logitless.jax_impl.backend import BACKENDS
from logitless.jax_impl.call import (
    XP,
    Arrays,
    RawArray,
    RawArrays,
    Request,
    accumulation_dtype,
    as_jax,
    taking_wrappers,
    temperatures,
)
from logitless.jax_impl.distillation.steps import (
    Constants,
    Distillation,
    DistillationArrays,
    FromDense,
    FromHead,
    FromIds,
    Soft,
    divergence,
)
from logitless.jax_impl.distillation.teachers import DenseRows, Program
from logitless.jax_impl.distributed.parallel import AxisName, Shard
from logitless.objectives import DistillationOptions, DistillationSizes, Rest, RowsBy, WholeRows
from logitless.planning import check_memory_budget
from logitless.spec import LossOptions, Reduction


@taking_wrappers
def distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    bias: Array | None = None,
    *,
    teacher_bias: Array | None = None,
    target: Array | None = None,
    nll_coef: float = 0.0,
    mask: Array | None = None,
    beta: float = 0.0,
    temperature: Array | float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Array | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
) -> Array:
    """Divergence between a teacher's and a student's next-token distributions, with neither side's logits held.

        p = softmax(z_teacher / τ)      q = softmax(z_student / τ)      m = β p + (1 − β) q
        ℓ = KL(p ‖ q)                                  β = 0, forward KL
            β KL(p ‖ m) + (1 − β) KL(q ‖ m)            0 < β < 1, the generalised Jensen-Shannon divergence
            KL(q ‖ p)                                  β = 1, reverse KL
        ℓ − γ log softmax(z_student)_y                 with a target y: the hard loss, without τ, in the same passes

    Sources: Hinton et al. 2015, arXiv:1503.02531 (its factor τ² is not applied: multiply by it if you want it); Agarwal
    et al. 2023 (GKD), arXiv:2306.13649, with β = 0 and 1 as in TRL's GKD trainer. Hinton's mixture
    (1 − α) τ² ℓ + α nll is (1 − α) τ² times this loss with γ = α / ((1 − α) τ²).

    Whole rows of both sides' logits exist for up to 1024 tokens at a time: 2·N·V·(D + D_teacher) flops, then 4·N·D·V,
    with the gradient of the student's logits, N·V numbers, between forward and backward. Where these do not fit the
    memory_budget, a few numbers of every token are held instead, and the backward makes both sides' logits again, a
    tile at a time: 2·N·V·(D + D_teacher) flops more.

    Arguments:
        hidden, weight, bias: the student's: [..., D], [V, D], [V].
        teacher_hidden, teacher_weight, teacher_bias: [..., D_teacher], [V, D_teacher], [V], constant: never a gradient.
            Their dtype may be another than the student's. V must be the same: slice a padded vocabulary.
        target: y, [...], already shifted; given exactly when nll_coef is above 0. A token with ignore_index does not
            count, in neither loss.
        nll_coef: γ, at least 0.
        mask: [...] of any dtype: tokens with 0 do not count (for labels with ignored tokens: ``labels != -100``).
        beta: β in [0, 1].
        temperature: τ, greater than 0; it divides what the softcap gives. A number, or one per token, [...] floating,
            constant.
        reduction: "mean" over the tokens that count (0 if none), "sum", or "none": [...].
        normalizer: replaces mean's denominator: a number, or a constant array without axes.
        logit_scale, softcap, and teacher's: of the models, as for :func:`linear_cross_entropy`.
        memory_budget: bytes of scratch beyond inputs and gradients; None: 8 GiB, or twice what it takes at least if
            that is more. A value without gradients is counted as one with them.
        backend: as for :func:`linear_cross_entropy`: whether kernels make losses and gradient. These take float32 too.
            XLA makes the products, and everything where devices share the vocabulary.
        axis_name, vocab: of the devices that share the vocabulary, as for :func:`linear_cross_entropy`. weight, bias,
            teacher_weight and teacher_bias are this device's rows, of the same ids; all else is the same on all of
            them. dX is summed over the devices.

    Returns the loss in float32 (float64 for float64 student input), differentiable once in hidden, weight and bias.
    Raises as :func:`linear_cross_entropy`; what is wrong with the teacher's arrays is named so.
    """
    each, number = temperatures(temperature)
    options = DistillationOptions(
        beta, number, reduction, logit_scale, softcap, teacher_logit_scale, teacher_softcap, nll_coef
    )
    given = _Given(hidden, weight, bias, target, mask, each, ignore_index)
    shard = checks.shard_of(weight, axis_name, vocab, sequence_parallel=False)
    teacher = _HeadTeacher(teacher_hidden, teacher_weight, teacher_bias, options.logits(teacher=True))
    return _loss(given, options, teacher, _Limits(normalizer, memory_budget, backend, shard))


@taking_wrappers
def sparse_distillation_loss(
    hidden: Array,
    weight: Array,
    ids: Array,
    probs: Array,
    bias: Array | None = None,
    *,
    rest: Rest = "class",
    target: Array | None = None,
    nll_coef: float = 0.0,
    mask: Array | None = None,
    beta: float = 0.0,
    temperature: Array | float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Array | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
) -> Array:
    """Divergence from a teacher of which K ids a token and their probabilities are known, without the logits.

        q = softmax(z / τ)      P = Σ_k p_k      R = 1 − P, the rest's mass
        rest="class"     p = (p_1, ..., p_K, R)            q = (q_1, ..., q_K, Σ of all other q_j)
        rest="spread"    p_j = R / (V − K) of every other id      q over all ids
        rest="drop"      p = (p_1, ..., p_K) / P, 0 elsewhere     q over all ids: the whole softmax, not of the K ids
        ℓ = KL(p ‖ q)                                  β = 0, forward KL
            β KL(p ‖ m) + (1 − β) KL(q ‖ m)            0 < β < 1, the generalised Jensen-Shannon divergence
            KL(q ‖ p)                                  β = 1, reverse KL; infinite where p is 0 and q is not
        ℓ − γ log softmax(z)_y                         with a target y: the hard loss, without τ, in the same passes

    With m = β p + (1 − β) q. "class" takes nothing for known that the teacher did not say: its divergence is at most
    that of any teacher with these probabilities. The mass of all other ids is a sum over them, no 1 − Σ_k q_k, so a
    student that is sure loses no digits.

    Whole rows of logits take 2·N·D·V flops forward and 4 backward, as in :func:`distillation_loss`; where the backward
    makes them again, 6. Kernels make losses and gradient of "spread" alone.

    Arguments:
        hidden, weight, bias: the student's: [..., D], [V, D], [V].
        ids: [..., K] int32 or int64, different ids in [0, V) for each token, or ignore_index where a token has fewer.
            A token without any does not count. K at least 1.
        probs: [..., K] floating, constant: of the teacher at its own temperature, at least 0, with a sum of at most 1.
            Where rounding took the sum above 1, they are divided by it.
        rest: what the rest's mass becomes. "drop" has no reverse KL: it would be infinite.
        ignore_index: marks what is no id, in ids and in target.
        temperature: τ of the student alone; the others: as for :func:`distillation_loss`.
        axis_name: ids and probs are the same on all its devices, and ids count through the whole vocabulary.

    Where looking waits for nothing (a CPU, outside of jax.jit), ids outside or repeated and probabilities that are no
    distribution's raise ValueError; elsewhere that token's loss is NaN, without gradient.

    Returns the loss in float32 (float64 for float64 input), differentiable once in hidden, weight and bias. Raises as
    :func:`linear_cross_entropy`.
    """
    each, number = temperatures(temperature)
    options = DistillationOptions(beta, number, reduction, logit_scale, softcap, nll_coef=nll_coef)
    options.check_rest(rest)
    given = _Given(hidden, weight, bias, target, mask, each, ignore_index)
    shard = checks.shard_of(weight, axis_name, vocab, sequence_parallel=False)
    return _loss(given, options, _SparseTeacher(ids, probs, rest), _Limits(normalizer, memory_budget, backend, shard))


@taking_wrappers
def dense_distillation_loss(
    hidden: Array,
    weight: Array,
    teacher: Array | DenseRows,
    bias: Array | None = None,
    *,
    log_teacher: bool = False,
    target: Array | None = None,
    nll_coef: float = 0.0,
    mask: Array | None = None,
    beta: float = 0.0,
    temperature: Array | float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Array | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    axis_name: AxisName | None = None,
    vocab: int | None = None,
) -> Array:
    """Divergence from a teacher of which all probabilities are known, which are read or made a chunk at a time.

        q = softmax(z / τ)      m = β p + (1 − β) q
        ℓ = KL(p ‖ q) = Σ_j p_j (log p_j − log q_j)    β = 0, forward KL
            β KL(p ‖ m) + (1 − β) KL(q ‖ m)            0 < β < 1, the generalised Jensen-Shannon divergence
            KL(q ‖ p)                                  β = 1, reverse KL; infinite where p is 0 and q is not
        ℓ − γ log softmax(z)_y                         with a target y: the hard loss, without τ, in the same passes

    Rows of the teacher have the sum 1. Where rounding gave them another, the KL divergences are Σ_j p_j (log p_j −
    log q_j) − p_j + q_j, of p and q as β says: least where q is p.

    Whole rows of logits take 2·N·D·V flops forward and 4 backward, as in :func:`distillation_loss`; where the backward
    makes them again, 6.

    Arguments:
        hidden, weight, bias: the student's: [..., D], [V, D], [V].
        teacher: p, constant, at the teacher's own temperature; nothing looks at its values. Either

            - an array [..., V] of any floating dtype, of which rows of up to 1024 tokens, or a tile, are worked on at a
              time;
            - a function ``rows(start, count)`` that returns the rows [count, V] of ``count`` tokens from ``start`` on,
              counted through the flattened leading axes. ``start`` is a traced number, ``count`` a static one. It runs
              once for every chunk of tokens in the forward. Where the backward makes the logits again, it runs there,
              too, in chunks of another size, and the gradient of the weight is added up in float32 (float64) beside
              itself.
              What the function closes over gets no gradient. Outside of jax.jit every call compiles it anew.
              ``jax.pure_callback`` in it reads a file.
        log_teacher: whether teacher holds log-probabilities, as ``log_target`` of torch.nn.functional.kl_div.
        ignore_index: marks tokens in target that do not count.
        temperature: τ of the student alone; the others: as for :func:`distillation_loss`.
        axis_name: teacher is the part of every row that belongs to this device's rows of the weight, [..., V] with the
            weight's own V, and so is what a function returns. What stands in padding is not looked at.

    Returns the loss in float32 (float64 for float64 input), differentiable once in hidden, weight and bias. Raises as
    :func:`linear_cross_entropy`.
    """
    each, number = temperatures(temperature)
    options = DistillationOptions(beta, number, reduction, logit_scale, softcap, nll_coef=nll_coef)
    spec.check_flags(log_teacher=log_teacher)
    given = _Given(hidden, weight, bias, target, mask, each, ignore_index)
    shard = checks.shard_of(weight, axis_name, vocab, sequence_parallel=False)
    return _loss(
        given, options, _DenseTeacher(teacher, log_teacher), _Limits(normalizer, memory_budget, backend, shard)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The road of a call


class _Limits(NamedTuple):
    """What a caller says of reduction, memory and devices."""

    normalizer: Array | float | None
    memory_budget: int | None
    backend: str | None
    shard: Shard


class _Given(NamedTuple):
    """The student's side of a call, as the caller wrote it."""

    hidden: RawArray
    weight: RawArray
    bias: RawArray | None
    target: RawArray | None
    mask: RawArray | None
    temperature: RawArray | None
    ignore_index: int


class _Student(NamedTuple):
    """The student's side of a call, checked."""

    raw: RawArrays
    """As they came. Their target says which tokens count: 0, or −100 where not."""
    shard: Shard
    kernel: bool
    """Whether kernels make the losses, where they can."""
    counted: Array
    """[...]"""
    wrong: Array
    """[...]: tokens that count, but whose loss is NaN, without gradient."""
    ignore_index: int
    hard: Array | None
    """[N], the ids of the hard loss, 0 where a token does not count."""

    @property
    def vocab(self) -> int:
        """V, of all devices together."""
        return self.shard.vocab or self.raw.weight.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """Of sums and losses."""
        return accumulation_dtype(self.raw.hidden.dtype)

    def order(self, teacher: _Teacher, memory_budget: int | None) -> WholeRows:
        (vocab, size), dtype, tokens = self.raw.weight.shape, self.raw.hidden.dtype, math.prod(self.counted.shape)
        sizes = teacher.sizes(DistillationSizes(tokens, size, vocab, str(dtype)))
        if memory_budget is not None:
            memory_budget -= self.shard.scratch_bytes(tokens, size, dtype.itemsize)
        by = teacher.rows_by if self.kernel and not self.shard.active else "xla"
        return objectives.distillation_order(sizes, operand_itemsize=dtype.itemsize, by=by, memory_budget=memory_budget)

    def without(self, wrong: Array) -> _Student:
        """The student, with more wrong tokens."""
        raw = self.raw._replace(target=jnp.where(wrong, -100, jnp.asarray(self.raw.target)))
        return self._replace(raw=raw, wrong=self.wrong | wrong)


class _Known(NamedTuple):
    """What a call knows of its teacher."""

    soft: Soft
    constants: Constants
    student: _Student


class _Teacher(Protocol):
    """A teacher as the caller wrote it."""

    @property
    def arrays(self) -> tuple[object, ...]:
        """What the losses read of it."""

    @property
    def rows_by(self) -> RowsBy:
        """What makes whole rows where kernels run."""

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        """The student's sizes, and its own."""

    def check(self, given: _Given, shard: Shard) -> Array | None:
        """Check it beside the student's arrays. Of which tokens it knows something, [...]; None: of all."""

    def known(self, student: _Student, limits: _Limits, order: WholeRows) -> _Known:
        """What the losses need of it."""


def _loss(given: _Given, options: DistillationOptions, teacher: _Teacher, limits: _Limits) -> Array:
    options.check_target(given.target is not None)
    for name in ("hidden", "weight"):
        checks.check_type(name, getattr(given, name))
    checks.check_normalizer(limits.normalizer, options.reduction)
    _check_same(limits.shard, mask=given.mask, target=given.target, normalizer=limits.normalizer)
    about = teacher.check(given, limits.shard)
    student = _student(given, options, about, limits, teacher.arrays)
    order = student.order(teacher, limits.memory_budget)
    known = teacher.known(student, limits, order)
    student, own = known.student, options.logits(teacher=False)
    temperature = float(options.temperature)
    call = Distillation(known.soft, options.beta, options.nll_coef, temperature, own, order, limits.shard)
    arrays: Arrays[Array] = as_jax(student.raw, given.hidden.dtype)
    if arrays.temperature is not None:
        arrays = arrays._replace(temperature=checks.stopped(arrays.temperature))
    losses: Array = divergence(call, DistillationArrays(arrays, student.hard, known.constants))
    losses = jnp.where(student.wrong.reshape(-1), jnp.nan, losses)
    if options.reduction == "mean":
        counted = student.counted.reshape(-1).astype(losses.dtype)
        return numerics.aggregate(XP, losses, counted, "token_mean", limits.normalizer)
    return losses.reshape(student.counted.shape) if options.reduction == "none" else losses.sum()


def _check_same(shard: Shard, **arrays: object) -> None:
    """Raise ValueError if JAX knows that the devices of the axis have different ones."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            checks.check_same(name, array, shard)


def _student(
    given: _Given, options: DistillationOptions, about: Array | None, limits: _Limits, beside: tuple[object, ...]
) -> _Student:
    """``about``: of which tokens the teacher knows something. ``beside``: its arrays."""
    hidden, shard, tokens = given.hidden, limits.shard, given.hidden.shape[:-1]
    vocab = shard.vocab or given.weight.shape[0]
    zero = np.zeros(tokens, np.int32)
    target = zero if given.target is None else given.target
    checks.check_arrays(Arrays(hidden, given.weight, given.bias, target, temperature=given.temperature), shard)
    spec.check_ignore_index(given.ignore_index)
    counted = jnp.ones(tokens, bool) if about is None else about
    if given.target is not None:
        counted = counted & jnp.asarray(given.target != given.ignore_index)
    if given.mask is not None:
        checks.check_flags("mask", given.mask, {"one element per token": tuple(tokens)})
        counted = counted & jnp.asarray(given.mask != 0)
    ids = jnp.where(counted, checks.narrow(target), 0)
    checks.check_ids(ids, vocab, given.ignore_index)
    wrong = (ids < 0) | (ids >= vocab)
    scored = jnp.where(counted & ~wrong, jnp.asarray(zero), -100)
    raw: RawArrays = Arrays(hidden, given.weight, given.bias, scored, temperature=given.temperature)
    _check(raw, options.logits(teacher=False), limits)
    name = checks.usable_backend(limits.backend, raw, cut=False, beside=beside, unavailable=_unavailable)
    hard = None if given.target is None else jnp.where(wrong, 0, ids).reshape(-1)
    return _Student(raw, shard, name == "pallas", counted, wrong, given.ignore_index, hard)


def _unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Why the kernels cannot run there, or None."""
    from logitless.jax_impl.distillation import fused  # imports Pallas

    return fused.unavailable(device, dtype)


def _check(raw: RawArrays, options: LossOptions, limits: _Limits) -> None:
    """Check a side's arrays and options, as for the logits' logsumexp."""
    spec.check_backend(limits.backend, BACKENDS)
    check_memory_budget(limits.memory_budget)
    checks.check_arrays(raw, limits.shard)
    bias = None if raw.bias is None else checks.stopped(raw.bias)
    raw = raw._replace(hidden=checks.stopped(raw.hidden), weight=checks.stopped(raw.weight), bias=bias)
    request = Request(reduction="none", logit_scale=options.logit_scale, softcap=options.softcap, backend="xla")
    checks.ready(raw, request, limits.shard)


# ---------------------------------------------------------------------------------------------------------------------
# Teachers


class _HeadTeacher(NamedTuple):
    hidden: RawArray
    weight: RawArray
    bias: RawArray | None
    options: LossOptions

    @property
    def arrays(self) -> tuple[object, ...]:
        return self.hidden, self.weight, self.bias

    @property
    def rows_by(self) -> RowsBy:
        return "pallas"

    def check(self, given: _Given, shard: Shard) -> None:
        for name in ("hidden", "weight"):
            checks.check_type(f"teacher_{name}", getattr(self, name))
        objectives.check_sides(*map(checks.info, (given.hidden, given.weight, self.hidden, self.weight)))

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        return dataclasses.replace(of_student, teacher_hidden=self.hidden.shape[-1])

    def known(self, student: _Student, limits: _Limits, order: WholeRows) -> _Known:
        raw: RawArrays = student.raw._replace(hidden=self.hidden, weight=self.weight, bias=self.bias)
        try:
            _check(raw, self.options, limits)
        except (TypeError, ValueError) as error:
            raise type(error)(objectives.of_teacher(str(error))) from None
        head = jax.tree.map(checks.stopped, raw)
        return _Known(FromHead(self.options), (head,), student)


class _SparseTeacher(NamedTuple):
    ids: RawArray
    probs: RawArray
    rest: Rest

    @property
    def arrays(self) -> tuple[object, ...]:
        return self.ids, self.probs

    @property
    def rows_by(self) -> RowsBy:
        return "pallas, probabilities" if self.rest == "spread" else "pallas, ids"

    def check(self, given: _Given, shard: Shard) -> Array:
        checks.check_types({"ids": self.ids, "probs": self.probs})
        spec.check_ignore_index(given.ignore_index)
        objectives.check_sparse(checks.info(self.ids), checks.info(self.probs), tuple(given.hidden.shape[:-1]))
        _check_same(shard, ids=self.ids, probs=self.probs)
        return jnp.asarray(self.ids != given.ignore_index).any(axis=-1)

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        return dataclasses.replace(of_student, ids=self.ids.shape[-1] + 1)

    def known(self, student: _Student, limits: _Limits, order: WholeRows) -> _Known:
        vocab, count = student.vocab, self.ids.shape[-1]
        ids = jnp.where(student.counted[..., None], checks.narrow(self.ids), student.ignore_index)
        checks.check_ids(ids, vocab, student.ignore_index, name="ids")
        ignored = ids == student.ignore_index
        known = ~ignored & (ids >= 0) & (ids < vocab)
        probs = checks.stopped(self.probs).astype(student.dtype)
        # Each place without an id counts as an id of its own.
        sorted_ids = jnp.sort(jnp.where(ignored, -1 - jnp.arange(count, dtype=ids.dtype), ids), axis=-1)
        repeated = (sorted_ids[..., 1:] == sorted_ids[..., :-1]).any(axis=-1)
        no_sum = student.counted & ~numerics.is_distribution(XP, probs, ~ignored, self.rest)
        for wrong, kind in ((repeated, True), (no_sum, False)):
            seen = checks.readable(wrong)
            if seen is not None and seen.any():
                position = tuple(map(int, np.argwhere(seen)[0]))
                raise objectives.sparse_error(position, repeated=kind)
        student = student.without(repeated | no_sum | (~ignored & ~known).any(axis=-1))
        spread, flat = self.rest == "spread", jnp.where(known, ids, -1).reshape(-1, count)
        log_p, log_rest = numerics.sparse_teacher(XP, probs.reshape(-1, count), flat >= 0, self.rest, vocab)
        return _Known(FromIds(spread), (flat, log_p, log_rest), student)


class _DenseTeacher(NamedTuple):
    source: RawArray | DenseRows
    log: bool

    @property
    def arrays(self) -> tuple[object, ...]:
        return (self.source,)

    @property
    def rows_by(self) -> RowsBy:
        return "pallas, probabilities"

    def check(self, given: _Given, shard: Shard) -> None:
        if isinstance(self.source, jax.Array | np.ndarray):
            checks.check_types({"teacher": self.source})
            objectives.check_dense(checks.info(self.source), (*given.hidden.shape[:-1], given.weight.shape[0]))
        elif not callable(self.source):
            raise TypeError(
                f"teacher: got {type(self.source).__name__}, allowed is a jax.Array, a NumPy array or a function "
                f"rows(start, count)"
            )

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        return dataclasses.replace(of_student, whole_rows=callable(self.source))

    def known(self, student: _Student, limits: _Limits, order: WholeRows) -> _Known:
        vocab = student.raw.weight.shape[0]
        if callable(self.source):
            cuts = order.token_slices + (order.again.token_slices if order.again else ())
            program, values = Program.of(self.source, sorted({stop - start for start, stop in cuts}), vocab)
            return _Known(FromDense(program, self.log), (values,), student)
        flat = checks.stopped(self.source).reshape(-1, vocab)
        return _Known(FromDense(None, self.log), (flat,), student)
