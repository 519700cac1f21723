"""The records that a call passes along, one name each. Mirror of jax_impl/call.py.

:class:`Arrays` is what the caller gave, :class:`Call` everything about the call that is not an array, :class:`Inputs`
the arrays as a backend reads them. :class:`Needs` says which gradients are wanted, :class:`Gradients` holds them, and
:class:`TokenSums` holds what the forward knows of every token, :class:`KnownRows` what the backward makes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import numerics
from logitless.planning import ChunkPlan, Preference
from logitless.scratch import Kind
from logitless.spec import STATISTICS, LossOptions, Reduction, Statistics, differentiable_statistics
from logitless.torch_impl.distributed.deferred import DeferredWeightGrad
from logitless.torch_impl.distributed.parallel import Shard

XP = cast("numerics.Namespace[Tensor]", torch)
"""The array namespace of :mod:`logitless.numerics`. mypy cannot match a module of overloads with a Protocol."""

TokenSums = numerics.TokenSums[Tensor]
KnownRows = numerics.KnownRows[Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, losses and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What products read: a CPU has no product from low precision into float32, so it reads float32."""
    return dtype if device.type == "cuda" else accumulation_dtype(dtype)


def rounds_products(values: Tensor) -> bool:
    """Whether PyTorch may round to bfloat16 what a product of such tensors reads: float32 on a CPU, by PyTorch's own
    switch, ``torch.set_float32_matmul_precision("medium")``."""
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return False
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.8 has the older switch alone
    return torch.get_float32_matmul_precision() == "medium" if matmul is None else matmul.fp32_precision == "bf16"


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors, by name."""


class Arrays(NamedTuple):
    """A call's arrays as the caller gave them, the normalizer apart."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    target: Tensor  # [...]
    token_weight: Tensor | None = None  # [...]
    class_weight: Tensor | None = None  # [V]
    temperature: Tensor | None = None  # [...]; None: one number for all tokens, which is among the options

    @staticmethod
    def of_head(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor | None
    ) -> Arrays:
        """A call's without weights of tokens and classes."""
        return Arrays(hidden, weight, bias, target, temperature=temperature)

    @property
    def head(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """What :meth:`of_head` takes."""
        return self.hidden, self.weight, self.bias, self.target, self.temperature


# Classes of tensors that are nothing else: what is known of a call by their shapes and dtypes is all there is.
TENSORS = frozenset((Tensor, torch.nn.Parameter))


def temperatures(temperature: Tensor | float) -> tuple[Tensor | None, float]:
    """One per token or None, and what the options say."""
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)


class Request(NamedTuple):
    """What a call asks for beside arrays and a normalizer, as the caller wrote it.

    Constants only, but for the last four fields, so that torch.compile can put it into a graph.
    """

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None
    temperature: float
    plan: tuple[Any, ...] | str | None
    """The fields of a ChunkPlan, or which plan is preferred."""
    memory_budget: int | None
    backend: str | None
    statistics: Statistics
    """Of a loss none or all."""
    log_probs: bool = False
    """Whether log-probabilities are asked for, and not a loss."""
    lse: bool = False
    """Whether a loss comes with every token's lse, differentiable too."""
    shift: int = 0
    """How many positions the target is moved to the front."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the vocabulary, or None."""
    sequence_parallel: bool = False
    into: Tensor | None = None
    """The buffer that the backward adds dW to, or None."""
    deferred: bool = False
    """Whether dW and db are computed after the backward."""


@dataclasses.dataclass(frozen=True)
class LatePlan:
    """A plan that is chosen when the call runs, because the number of tokens is a symbol until then.

    Nothing that is kept between forward and backward may depend on it.
    """

    one_pass: bool
    memory_budget: int | None
    prefer: Preference = "balanced"


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array."""

    options: LossOptions
    plan: ChunkPlan | LatePlan
    """Inside torch.compile a ChunkPlan's tokens and token_chunk may be symbols."""
    compute_dtype: torch.dtype
    """The dtype of the products' operands: the arrays' own, or autocast's."""
    statistics: Statistics
    differentiate: bool
    """Whether autograd is recording."""
    backend: Kind
    """A name that :func:`backend.backend_named` knows."""
    traced: bool = False
    """Whether torch.compile or torch.func is looking. Then the steps are the opaque operations of compiled/ops.py."""
    shard: Shard | None = None
    """This rank's slice of the vocabulary, if the call is sharded."""
    into: Tensor | None = None
    """The buffer that the backward adds dW to, or None."""
    deferred: DeferredWeightGrad | None = None
    """What computes dW and db after the backward, or None."""
    log_probs: bool = False
    """Whether log-probabilities are asked for, and not a loss."""
    lse: bool = False
    """Whether a loss comes with every token's lse, differentiable too: its upstream gradient arrives per token."""
    number: int | None = None
    """Of all calls with these options, on arrays with these dtypes, shapes, strides and alignments; None: of none."""

    @property
    def differentiable(self) -> int:
        """How many of the results have a gradient. They come first."""
        return 1 + (len(differentiable_statistics(self.statistics)) if self.log_probs else self.lse)

    @property
    def constants(self) -> int:
        """How many of the results are statistics without gradient."""
        if self.statistics is not True:
            return 0
        return len(STATISTICS) - (self.differentiable - 1 if self.log_probs else 0)

    @property
    def chunk_plan(self) -> ChunkPlan:
        """The plan of a call that runs, where it is chosen."""
        assert isinstance(self.plan, ChunkPlan)
        return self.plan


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A call's arrays, flattened and checked."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D], hidden's dtype; sharded: this rank's entries, as bias and class_weight
    bias: Tensor | None  # [V]
    ids: Tensor  # [N] int64, 0 where ignored or outside the vocabulary
    target: Tensor  # [N] int64, its place in weight; sharded: −1 where another rank has it
    valid: Tensor  # [N] bool, False where ignored
    inside: Tensor  # [N] bool, False for an id outside the vocabulary: that token's loss becomes NaN
    token_weight: Tensor  # [N] accumulation dtype, 0 where ignored
    class_weight: Tensor | None  # [V] accumulation dtype
    shard: Shard
    shared_classes: Tensor | None  # sharded, with class weights: k_y of every token and Σ_j k_j, [N + 1]
    order: Tensor | None  # the rows of hidden that the other arrays are of; None: all
    temperature: Tensor | None  # [N] accumulation dtype, 1 where ignored; None: the options have it

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.hidden.dtype)

    @property
    def operand_dtype(self) -> torch.dtype:
        return operand_dtype(self.hidden.dtype, self.hidden.device)

    @property
    def tokens(self) -> int:
        return self.target.shape[0]

    def wide(self, values: Tensor) -> Tensor:
        """``values`` in the accumulation dtype."""
        return values.to(self.accumulation_dtype)

    def temperature_column(self, rows: slice) -> Tensor | None:
        """[C, 1] of the tokens ``rows``, if each has its own."""
        return None if self.temperature is None else self.temperature[rows].unsqueeze(1)

    @property
    def vocab(self) -> int:
        """V, of all ranks together."""
        return self.shard.vocab

    def token_class_weight(self, rows: slice = slice(None)) -> Tensor | None:
        """k_y of the tokens ``rows``."""
        if self.class_weight is None:
            return None
        if self.shared_classes is None:
            return self.class_weight[self.target[rows]]
        return self.shared_classes[:-1][rows]

    def target_class_weight(self) -> Tensor | float:
        k = self.token_class_weight()
        return 1.0 if k is None else k

    def class_weight_sum(self) -> Tensor | float:
        if self.class_weight is None:
            return float(self.vocab)
        return self.class_weight.sum() if self.shared_classes is None else self.shared_classes[-1]

    def largest_class_weight(self) -> Tensor | float:
        """max |k_j|."""
        return 1.0 if self.class_weight is None else self.shard.max(self.class_weight.abs().amax().reshape(1))


def is_turned(weight: Tensor) -> bool:
    """Whether a weight [V, D] lies in memory as a matrix [D, V]: each element behind that of the entry before."""
    vocab, size = weight.shape
    return bool(weight.stride(0) == 1 and size > 1 and weight.stride(1) >= vocab > 1)  # no symbol


def empty_like_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A new matrix [V, D] without gaps that lies in memory as the weight does."""
    vocab, size = weight.shape
    turned = is_turned(weight)
    matrix = weight.new_empty((size, vocab) if turned else (vocab, size), dtype=dtype)
    return matrix.T if turned else matrix


@dataclasses.dataclass(frozen=True)
class Needs:
    """The dtype of each gradient that is wanted, else None; a product that serves none of them is not run."""

    hidden: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    into: Tensor | None = dataclasses.field(default=None, compare=False)
    """What dW is added to, [V, D] of the dtype ``weight``; None: dW is a tensor of its own."""
    room: Tensor | None = dataclasses.field(default=None, compare=False)
    """dW's memory, if it is there already. Until dW is made, something else may lie in it."""

    @classmethod
    def of(cls, arrays: Arrays, wanted: Sequence[bool]) -> Needs:
        """Gradients of hidden, weight and bias in their own dtypes; ``wanted``: of which, in this order."""
        pairs = zip(arrays[:3], wanted, strict=True)
        hidden, weight, bias = (array.dtype if needed and array is not None else None for array, needed in pairs)
        return cls(hidden, weight, bias)

    @property
    def any(self) -> bool:
        return any((self.hidden, self.weight, self.bias))

    @property
    def hidden_alone(self) -> Needs:
        return Needs(self.hidden, None, None)

    @property
    def weight_alone(self) -> Needs:
        return dataclasses.replace(self, hidden=None, bias=None)


NO_GRADIENTS = Needs(None, None, None)


def is_one(factor: Tensor) -> bool:
    """Whether the factor [] is 1, where asking costs no synchronisation."""
    return factor.is_cpu and factor.item() == 1.0


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients that were wanted, None in place of the others.

    Those of weight and bias may be in the accumulation dtype: the caller makes the last cast.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    factor: Tensor | None = None
    """[] what they still lack."""

    def finish(self, upstream: Tensor) -> Gradients:
        """Times the upstream scalar, in place: the buffers are ours."""
        factor = upstream if self.factor is None else upstream * self.factor
        if not is_one(factor):
            for gradient in (self.hidden, self.weight, self.bias):
                if gradient is not None:
                    gradient.mul_(factor)
        return Gradients(self.hidden, self.weight, self.bias)

    def like(self, arrays: Arrays) -> tuple[Tensor | None, ...]:
        """Those of hidden, weight and bias in the dtypes and shapes of these arrays."""
        pairs = zip((self.hidden, self.weight, self.bias), arrays[:3], strict=True)
        return tuple(None if g is None or a is None else g.to(a.dtype).reshape(a.shape) for g, a in pairs)

    def tensors(self, layout: Layout) -> list[Tensor]:
        """The gradients that the layout names, as they lie in memory: a turned weight's is [D, V]. The factor comes
        too, and is 1 where they lack none."""
        lying = self
        if self.weight is not None and is_turned(self.weight):
            lying = dataclasses.replace(self, weight=self.weight.T)
        if self.factor is None:
            shape, dtype = layout["factor"]
            device = next(g.device for g in (self.hidden, self.weight, self.bias) if g is not None)
            lying = dataclasses.replace(lying, factor=torch.ones(shape, dtype=dtype, device=device))
        return [getattr(lying, name).contiguous() for name in layout]


NOTHING = Gradients(None, None, None)
