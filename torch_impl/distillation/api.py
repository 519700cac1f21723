"""The public distillations: from a teacher's head, from sparse and from dense targets. Mirror of
jax_impl/distillation/api.py.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from logitless import numerics, objectives, spec
from logitless.objectives import KERNEL_CLASSES, DistillationOptions, DistillationSizes, Rest, RowsBy, WholeRows
from logitless.planning import check_memory_budget
from logitless.spec import ArrayInfo, LossOptions, Reduction
from logitless.torch_impl import checks
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.call import XP, Arrays, Call, Request, accumulation_dtype, operand_dtype, temperatures
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.distillation.steps import (
    FUNCTIONS,
    Constants,
    Distillation,
    FromDense,
    FromHead,
    FromIds,
    Soft,
)
from logitless.torch_impl.distillation.teachers import DenseRows
from logitless.torch_impl.distributed import parallel, sharding
from logitless.torch_impl.kernels import first_check


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    *,
    teacher_bias: Tensor | None = None,
    target: Tensor | None = None,
    nll_coef: float = 0.0,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: Tensor | float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
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
        normalizer: replaces mean's denominator: a number, or a constant tensor without axes.
        logit_scale, softcap, and teacher's: of the models, as for :func:`linear_cross_entropy`.
        memory_budget: bytes of scratch beyond inputs and gradients; None: 8 GiB, or twice what it takes at least if
            that is more.
        backend: as for :func:`linear_cross_entropy`: whether kernels make losses and gradient.
        process_group: the ranks that share the vocabulary, as for :func:`linear_cross_entropy`. weight, bias,
            teacher_weight and teacher_bias are this rank's rows, of the same ids; all else is the same on every rank.
            dX is summed over the ranks.

    Returns the loss in float32 (float64 for float64 student input), differentiable once in hidden, weight and bias.
    Raises as :func:`linear_cross_entropy`; what is wrong with the teacher's arrays is named so.
    """
    each, number = temperatures(temperature)
    options = DistillationOptions(
        beta, number, reduction, logit_scale, softcap, teacher_logit_scale, teacher_softcap, nll_coef
    )
    tracing.check_transforms("distillation_loss", takes_one=False)
    given = _Given(hidden, weight, bias, target, mask, each, ignore_index)
    teacher = _HeadTeacher(teacher_hidden, teacher_weight, teacher_bias, options.logits(teacher=True))
    return _loss(
        "distillation_loss", given, options, teacher, _Limits(normalizer, memory_budget, backend, process_group)
    )


def sparse_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    bias: Tensor | None = None,
    *,
    rest: Rest = "class",
    target: Tensor | None = None,
    nll_coef: float = 0.0,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: Tensor | float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
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
    makes them again, 6.

    Arguments:
        hidden, weight, bias: the student's: [..., D], [V, D], [V].
        ids: [..., K] int32 or int64, different ids in [0, V) for each token, or ignore_index where a token has fewer.
            A token without any does not count. K at least 1.
        probs: [..., K] floating, constant: of the teacher at its own temperature, at least 0, with a sum of at most 1.
            Where rounding took the sum above 1, they are divided by it.
        rest: what the rest's mass becomes. "drop" has no reverse KL: it would be infinite.
        ignore_index: marks what is no id, in ids and in target.
        temperature: τ of the student alone; the others: as for :func:`distillation_loss`.
        process_group: ids and probs are the same on every rank, and ids count from the first rank's first entry.

    Where looking costs no synchronisation (on a CPU), ids outside or repeated and probabilities that are no
    distribution's raise ValueError; elsewhere that token's loss is NaN, without gradient.

    Returns the loss in float32 (float64 for float64 input), differentiable once in hidden, weight and bias. Raises as
    :func:`linear_cross_entropy`.
    """
    each, number = temperatures(temperature)
    options = DistillationOptions(beta, number, reduction, logit_scale, softcap, nll_coef=nll_coef)
    options.check_rest(rest)
    tracing.check_transforms("sparse_distillation_loss", takes_one=False)
    given = _Given(hidden, weight, bias, target, mask, each, ignore_index)
    teacher = _SparseTeacher(ids, probs, rest)
    return _loss(
        "sparse_distillation_loss", given, options, teacher, _Limits(normalizer, memory_budget, backend, process_group)
    )


def dense_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor | NDArray[np.generic] | DenseRows,
    bias: Tensor | None = None,
    *,
    log_teacher: bool = False,
    target: Tensor | None = None,
    nll_coef: float = 0.0,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: Tensor | float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
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

            - a tensor [..., V] of any floating dtype and layout. It may lie on another device than hidden, as in the
              host's memory: rows of up to 1024 tokens, or a tile, move at a time;
            - a NumPy array [..., V], such as a memory-mapped one: as many rows, or a tile, are read at a time;
            - a function ``rows(start, count)`` that returns the rows [count, V] of ``count`` tokens from ``start`` on,
              counted through the flattened leading axes. It is called once for every chunk of tokens in the forward.
              Where the backward makes the logits again, it is called there, too, in chunks of another size, and the
              gradient of the weight is added up in float32 (float64) beside itself.
        log_teacher: whether teacher holds log-probabilities, as ``log_target`` of torch.nn.functional.kl_div.
        ignore_index: marks tokens in target that do not count.
        temperature: τ of the student alone; the others: as for :func:`distillation_loss`.
        process_group: teacher is the part of every row that belongs to this rank's rows of the weight, [..., V] with
            the weight's own V, and so is what a function returns: as a head that is parallel over the vocabulary
            leaves it.

    Returns the loss in float32 (float64 for float64 input), differentiable once in hidden, weight and bias. Raises as
    :func:`linear_cross_entropy`.
    """
    each, number = temperatures(temperature)
    options = DistillationOptions(beta, number, reduction, logit_scale, softcap, nll_coef=nll_coef)
    spec.check_flags(log_teacher=log_teacher)
    tracing.check_transforms("dense_distillation_loss", takes_one=False)
    given = _Given(hidden, weight, bias, target, mask, each, ignore_index)
    known = _DenseTeacher(teacher, log_teacher)
    return _loss(
        "dense_distillation_loss", given, options, known, _Limits(normalizer, memory_budget, backend, process_group)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The road of a call


class _Limits(NamedTuple):
    """What a caller says of reduction, memory and ranks."""

    normalizer: Tensor | float | None
    memory_budget: int | None
    backend: str | None
    group: dist.ProcessGroup | None


class _Given(NamedTuple):
    """The student's side of a call, as the caller wrote it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    mask: Tensor | None
    temperature: Tensor | None
    ignore_index: int


class _Student(NamedTuple):
    """The student's side of a call, checked."""

    given: Arrays
    """As autograd sees them. Their target says which tokens count: 0, or −100 where not."""
    call: Call
    """Of the logits' logsumexp: dtypes, backend and ranks."""
    counted: Tensor
    """[...]"""
    wrong: Tensor
    """[...]: tokens that count, but whose loss is NaN, without gradient."""
    ignore_index: int
    hard: Tensor | None = None
    """[N], the ids of the hard loss, 0 where a token does not count."""

    @property
    def vocab(self) -> int:
        """V, of all ranks together."""
        return self.given.weight.shape[0] if self.call.shard is None else self.call.shard.vocab

    @property
    def dtype(self) -> torch.dtype:
        """Of sums and losses."""
        return accumulation_dtype(self.call.compute_dtype)

    @property
    def by_kernel(self) -> bool:
        """Whether the losses are the kernels', where they take them."""
        return self.call.backend == "triton"

    @property
    def differentiate(self) -> bool:
        """Whether some gradient is wanted."""
        arrays = self.given.hidden, self.given.weight, self.given.bias
        return self.call.differentiate and any(array is not None and array.requires_grad for array in arrays)

    def order(self, teacher: _Teacher, memory_budget: int | None) -> WholeRows:
        (own, size), dtype, shard = self.given.weight.shape, self.call.compute_dtype, self.call.shard
        operand = operand_dtype(dtype, self.given.hidden.device).itemsize if self.differentiate else 0
        vocab, ranks = (own, 1) if shard is None else (shard.largest, shard.ranks)
        of_student = DistillationSizes(self.counted.numel(), size, vocab, checks.dtype_name(dtype), ranks=ranks)
        sizes, by = teacher.sizes(of_student), teacher.rows_by if self.by_kernel and shard is None else "plain"
        order = objectives.distillation_order(sizes, operand_itemsize=operand, by=by, memory_budget=memory_budget)
        return order.of_part(own)

    def without(self, wrong: Tensor) -> _Student:
        """The student, with more wrong tokens."""
        given = self.given._replace(target=self.given.target.masked_fill(wrong, -100))
        return self._replace(given=given, wrong=self.wrong | wrong)


class _Known(NamedTuple):
    """What a call knows of its teacher."""

    soft: Soft
    constants: Constants
    student: _Student


class _Teacher(Protocol):
    """A teacher as the caller wrote it."""

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        """The student's sizes, and its own."""

    @property
    def rows_by(self) -> RowsBy:
        """What makes whole rows where kernels run."""

    def check(self, given: _Given) -> Tensor | None:
        """Check it beside the student's arrays. Of which tokens it knows something, [...]; None: of all."""

    def facts(self, counted: Tensor) -> tuple[object, object]:
        """What of it must be the same on every rank: options and shapes, and the numbers of tokens that count."""

    def known(self, student: _Student, limits: _Limits) -> _Known:
        """What the losses need of it."""


@tracing.outside_graphs
def _loss(name: str, given: _Given, options: DistillationOptions, teacher: _Teacher, limits: _Limits) -> Tensor:
    # Loops over tiles: a graph would hold every one of them.
    if limits.group is not None:
        parallel.check_member(limits.group)
    with sharding.refusing(limits.group, _device(given.hidden), FACTS):
        counted = _counted(given, options, teacher, limits)
        facts = _facts(name, given, options, teacher, counted)
    student = _student(given, options, counted, limits, facts)
    order = student.order(teacher, limits.memory_budget)
    known = teacher.known(student, limits)
    student, own = known.student, options.logits(teacher=False)
    call = Distillation(
        known.soft, options.beta, options.nll_coef, float(options.temperature), own, student.call.compute_dtype, order,
        student.by_kernel, student.differentiate, student.call.shard,
    )  # fmt: skip
    losses: Tensor = FUNCTIONS[name].apply(  # type: ignore[no-untyped-call]
        call, *student.given.head, student.hard, *known.constants
    )
    losses = losses.masked_fill(student.wrong.reshape(-1), torch.nan)
    if options.reduction == "mean":
        counted = student.counted.reshape(-1).to(losses.dtype)
        return numerics.aggregate(XP, losses, counted, "token_mean", limits.normalizer)
    return losses.reshape(student.counted.shape) if options.reduction == "none" else losses.sum()


def _device(hidden: object) -> torch.device:
    """Of what may be no tensor."""
    return hidden.device if isinstance(hidden, Tensor) else torch.device("cpu")


def _counted(given: _Given, options: DistillationOptions, teacher: _Teacher, limits: _Limits) -> Tensor:
    """Which tokens count, [...], after the checks that a rank can make alone."""
    options.check_target(given.target is not None)
    for array in ("hidden", "weight"):
        checks.check_type(array, getattr(given, array), strided=False)
    hidden, target = given.hidden, given.target
    checks.check_normalizer(limits.normalizer, options.reduction, hidden.device)
    about = teacher.check(given)
    tokens = hidden.shape[:-1]
    zero = torch.zeros(tokens, dtype=torch.long, device=hidden.device)
    checks.check_tensors(Arrays(hidden, given.weight, given.bias, zero if target is None else target))
    spec.check_ignore_index(given.ignore_index)
    counted = torch.ones_like(zero, dtype=torch.bool) if about is None else about
    if target is not None:
        counted = counted & (target != given.ignore_index)
    if given.mask is not None:
        counted = counted & checks.flags("mask", given.mask, {"one element per token": tuple(tokens)}, hidden)
    return counted


def _facts(
    name: str, given: _Given, options: DistillationOptions, teacher: _Teacher, counted: Tensor
) -> dict[str, object]:
    """What must be the same on every rank beside the student's arrays, by its name in errors."""
    own, numbers = teacher.facts(counted)
    target = given.target
    return {
        "the function, its options and its teacher's sizes": (name, options, own),
        "the ids of the hard loss": None if target is None else _seen(target.masked_fill(~counted, 0)),
        "the teacher's ids and probabilities": numbers,
    }


FACTS = 3  # the length of _facts


def _seen(tensor: Tensor) -> object:
    """What ranks compare of a tensor: all of it, where looking costs nothing."""
    return tensor.tolist() if tensor.device.type == "cpu" else 0


def _student(
    given: _Given, options: DistillationOptions, counted: Tensor, limits: _Limits, facts: dict[str, object]
) -> _Student:
    target = torch.zeros_like(counted, dtype=torch.long).masked_fill_(~counted, -100)
    arrays = Arrays(given.hidden, given.weight, given.bias, target, temperature=given.temperature)
    call = _checked(arrays, options.logits(teacher=False), limits, facts)
    student = _Student(arrays, call, counted, torch.zeros_like(counted), given.ignore_index)
    if given.target is None:
        return student
    ids = given.target.long().masked_fill(~counted, 0)
    checks.check_ids(ids, student.vocab, given.ignore_index)
    wrong = (ids < 0) | (ids >= student.vocab)
    return student.without(wrong)._replace(hard=ids.masked_fill(wrong, 0).reshape(-1))


def _checked(arrays: Arrays, options: LossOptions, limits: _Limits, facts: dict[str, object]) -> Call:
    """A side's arrays and options checked, as for the logits' logsumexp."""
    with sharding.refusing(limits.group, arrays.hidden.device, len(facts)):
        if checks.is_placed(arrays.hidden) or checks.is_placed(arrays.weight):
            raise NotImplementedError(
                "hidden, weight: got a DTensor, allowed are plain tensors: to_local() gives them, and process_group "
                "says which ranks share the vocabulary"
            )
        spec.check_backend(limits.backend, BACKENDS)
        check_memory_budget(limits.memory_budget)
    request = Request(
        "none", -100, 0.0, 0.0, options.logit_scale, options.softcap, temperature=1.0, plan=None,
        memory_budget=None, backend=limits.backend, statistics=False, group=limits.group,
    )  # fmt: skip
    if limits.group is None:
        return first_check.checked(lambda: checks.ready(arrays, None, request))[1]
    return sharding.ready(arrays, None, request, facts)[1]


# ---------------------------------------------------------------------------------------------------------------------
# Teachers


class _HeadTeacher(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: LossOptions

    def check(self, given: _Given) -> None:
        for name in ("hidden", "weight"):
            checks.check_type(f"teacher_{name}", getattr(self, name), strided=False)
        objectives.check_sides(*map(checks.info, (given.hidden, given.weight, self.hidden, self.weight)))

    def facts(self, counted: Tensor) -> tuple[object, object]:
        return (self.options, self.hidden.shape[-1]), None  # its arrays are compared as the student's are

    @property
    def rows_by(self) -> RowsBy:
        return "kernel"

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        return dataclasses.replace(of_student, teacher_hidden=self.hidden.shape[-1])

    def known(self, student: _Student, limits: _Limits) -> _Known:
        target, temperature = student.given.target, student.given.temperature
        try:
            arrays = Arrays(self.hidden, self.weight, self.bias, target, temperature=temperature)
            call = _checked(arrays, self.options, limits, {})
        except (TypeError, ValueError) as error:
            raise type(error)(objectives.of_teacher(str(error))) from None
        head = (None if array is None else array.detach() for array in arrays.head)
        return _Known(FromHead(self.options, call.compute_dtype), tuple(head), student)


class _SparseTeacher(NamedTuple):
    ids: Tensor
    probs: Tensor
    rest: Rest

    def check(self, given: _Given) -> Tensor:
        for name in ("ids", "probs"):
            checks.check_type(name, getattr(self, name), strided=False)
            checks.check_device(name, getattr(self, name), "hidden's", given.hidden.device)
        if self.probs.requires_grad:
            raise ValueError("probs: got a tensor that requires grad, allowed is a constant: detach it")
        spec.check_ignore_index(given.ignore_index)
        objectives.check_sparse(checks.info(self.ids), checks.info(self.probs), tuple(given.hidden.shape[:-1]))
        return (self.ids != given.ignore_index).any(dim=-1)

    def facts(self, counted: Tensor) -> tuple[object, object]:
        gone = ~counted.unsqueeze(-1)
        numbers = _seen(self.ids.masked_fill(gone, 0)), _seen(self.probs.detach().masked_fill(gone, 0.0))
        return (self.rest, tuple(self.ids.shape)), numbers

    @property
    def rows_by(self) -> RowsBy:
        if self.rest == "spread":
            return "kernel, probabilities"
        return "kernel, ids" if self.ids.shape[-1] < KERNEL_CLASSES else "plain"

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        return dataclasses.replace(of_student, ids=self.ids.shape[-1] + 1)

    def known(self, student: _Student, limits: _Limits) -> _Known:
        vocab, count = student.vocab, self.ids.shape[-1]
        ids = self.ids.long().masked_fill(~student.counted.unsqueeze(-1), student.ignore_index)
        checks.check_ids(ids, vocab, student.ignore_index, name="ids")
        ignored = ids == student.ignore_index
        known = ~ignored & (ids >= 0) & (ids < vocab)
        probs = self.probs.to(student.dtype)
        # Each place without an id counts as an id of its own.
        sorted_ids = torch.where(ignored, -1 - torch.arange(count, device=ids.device), ids).sort(dim=-1).values
        repeated = (sorted_ids[..., 1:] == sorted_ids[..., :-1]).any(dim=-1)
        no_sum = student.counted & ~numerics.is_distribution(XP, probs, ~ignored, self.rest)
        for wrong, kind in ((repeated, True), (no_sum, False)):
            if wrong.device.type == "cpu" and bool(wrong.any()):
                position = tuple(wrong.nonzero()[0].tolist())
                raise objectives.sparse_error(position, repeated=kind)
        student = student.without(repeated | no_sum | (~ignored & ~known).any(dim=-1))
        log_p, log_rest = numerics.sparse_teacher(
            XP, probs.reshape(-1, count), known.reshape(-1, count), self.rest, vocab
        )
        constants = (ids.masked_fill(~known, -1).reshape(-1, count), log_p, log_rest)
        return _Known(FromIds(self.rest == "spread"), constants, student)


class _DenseTeacher(NamedTuple):
    source: Tensor | NDArray[np.generic] | DenseRows
    log: bool

    def check(self, given: _Given) -> None:
        if isinstance(self.source, Tensor):
            checks.check_type("teacher", self.source)
            objectives.check_dense(checks.info(self.source), (*given.hidden.shape[:-1], given.weight.shape[0]))
            if self.source.device not in (given.hidden.device, torch.device("cpu")):
                raise ValueError(
                    f"teacher: got device {self.source.device}, allowed is hidden's {given.hidden.device} or the CPU"
                )
            if self.source.requires_grad:
                raise ValueError("teacher: got a tensor that requires grad, allowed is a constant: detach it")
        elif isinstance(self.source, np.ndarray):
            info = ArrayInfo(self.source.shape, self.source.dtype.name)
            objectives.check_dense(info, (*given.hidden.shape[:-1], given.weight.shape[0]))
        elif not callable(self.source):
            raise TypeError(
                f"teacher: got {type(self.source).__name__}, allowed is a torch.Tensor, a NumPy array or a function "
                f"rows(start, count)"
            )

    def facts(self, counted: Tensor) -> tuple[object, object]:
        return (self.log, callable(self.source)), None  # each rank has other columns

    @property
    def rows_by(self) -> RowsBy:
        return "kernel, probabilities"

    def sizes(self, of_student: DistillationSizes) -> DistillationSizes:
        return dataclasses.replace(of_student, whole_rows=callable(self.source))

    def known(self, student: _Student, limits: _Limits) -> _Known:
        shape = (*student.counted.shape, student.given.weight.shape[0])
        if isinstance(self.source, Tensor):
            return _Known(FromDense(None, self.log, shape), (self.source.detach(),), student)
        return _Known(FromDense(self.source, self.log, shape), (), student)
