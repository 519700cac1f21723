"""The records that a call passes along, one name each. Mirror of torch_impl/call.py.

:class:`Arrays` and :class:`Request` are what the caller gave. :class:`Call` is everything about a checked call that is
not an array, :class:`Inputs` the arrays as a backend reads them. :class:`Needs` says which gradients are wanted,
:class:`Gradients` holds them. :class:`TokenSums` holds what the forward knows of every token, :class:`KnownRows` what
the backward makes of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

from logitless import numerics
from logitless.jax_impl.distributed.parallel import WHOLE, Shard
from logitless.jax_impl.residuals import Pytree
from logitless.planning import ChunkPlan, Preference
from logitless.spec import LossOptions, Reduction, Statistics, differentiable_statistics

Leaf = TypeVar("Leaf", covariant=True)
Given = ParamSpec("Given")
Result = TypeVar("Result")

XP: numerics.Namespace[Array] = jnp
"""The array namespace of :mod:`logitless.numerics`."""

TokenSums = numerics.TokenSums[Array]
KnownRows = numerics.KnownRows[Array]


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of sums, losses and statistics: float64 for float64, else float32."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


class Arrays(NamedTuple, Generic[Leaf]):
    """A call's arrays as the caller gave them, or one thing for each of them: its layout, its gradient."""

    hidden: Leaf  # [..., D]
    weight: Leaf  # [V, D]
    bias: Leaf | None  # [V]
    target: Leaf  # [...]
    token_weight: Leaf | None = None  # [...]
    class_weight: Leaf | None = None  # [V]
    normalizer: Leaf | None = None  # []
    temperature: Leaf | None = None  # [...]; None: one number for all tokens, which is among the options
    accumulate_into: Leaf | None = None  # [V, D], what dW is added to


RawArray = Array | NDArray[np.generic] | np.generic
"""An array as it comes: JAX's or NumPy's."""

RawArrays = Arrays[RawArray]


def taking_wrappers(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, for arrays that are wrapped too: whatever has ``__jax_array__``, such as flax.nnx.Param."""

    def plain(value: object) -> object:
        if isinstance(value, jax.Array | np.ndarray | np.generic | type):
            return value
        convert = getattr(value, "__jax_array__", None)
        return convert() if callable(convert) else value

    @functools.wraps(function)
    def call(*arguments: Given.args, **named: Given.kwargs) -> Result:
        values = {name: plain(value) for name, value in named.items()}
        return function(*map(plain, arguments), **values)  # type: ignore[arg-type]  # arrays in the place of wrappers

    return call


def temperatures(temperature: RawArray | float) -> tuple[RawArray | None, float]:
    """One per token or None, and what the options say."""
    is_array = isinstance(temperature, jax.Array | np.ndarray)
    return (temperature, 1.0) if is_array else (None, temperature)  # type: ignore[return-value]


def as_jax(raw: Pytree, dtype: DTypeLike) -> Pytree:
    """The same with JAX arrays in place of NumPy's and of numbers; ``dtype``: that of what is differentiated."""

    def converted(value: ArrayLike) -> Array:
        if isinstance(value, jax.Array):
            return value
        if isinstance(value, np.ndarray | np.generic):
            return jnp.asarray(value)
        return jnp.asarray(value, accumulation_dtype(dtype))

    return jax.tree.map(converted, raw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a call asks for beside its arrays, as the caller wrote it. Hashable."""

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    plan: ChunkPlan | Preference | None = None
    memory_budget: int | None = None
    backend: str | None = None
    statistics: Statistics = False
    """Of a loss none or all."""
    log_probs: bool = False
    """Whether log-probabilities are asked for, and not a loss."""
    lse: bool = False
    """Whether a loss comes with every token's lse, differentiable too."""
    shift: int = 0
    """How many positions the target is moved to the front."""
    turned: bool = False
    """Whether the weight came as [D, V]; its array here is the transpose of that."""
    defers: bool = False
    """Whether dW is made later, by another call."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array: hashable, so that it is a static argument of jax.jit."""

    options: LossOptions
    plan: ChunkPlan
    statistics: Statistics
    backend: str
    """A name that :func:`backend.backend_named` knows."""
    shard: Shard = WHOLE
    """This device's slice of the vocabulary."""
    one_pass: bool = False
    """Whether the forward makes the gradients, which then wait for the upstream scalar."""
    holds: bool = False
    """Whether the forward holds its exponentials, because the upstream gradient arrives per token."""
    lse: bool = False
    """Whether a loss comes with every token's lse, differentiable too: its upstream gradient arrives per token."""
    log_probs: bool = False
    """Whether log-probabilities are asked for, and not a loss."""
    frozen: Call | None = None
    """The call where the weight gets no gradient, if this one needs dW's memory."""

    def making(self, needs: Needs) -> Call:
        """The call that makes these gradients."""
        return self if needs.weight or self.frozen is None else self.frozen

    @property
    def differentiable(self) -> int:
        """How many of the results have a gradient. They come first."""
        return 1 + (len(differentiable_statistics(self.statistics)) if self.log_probs else self.lse)


class Shared(NamedTuple):
    """What the devices have told each other before the first product: the same on all that share a vocabulary."""

    target_logit: Array  # [N], NaN for an id outside the vocabulary
    class_weight: Array | None  # [N], the targets'
    class_weight_sum: Array | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Precision:
    """What is known of a call's dtypes, and is no array."""

    wide_weight: bool = False
    """Whether the weight was float32 beside narrower hidden states: its gradient is not rounded to their dtype."""


class ValidFirst(NamedTuple):
    """An order of the tokens: the valid ones, then the ignored ones, each in their own order."""

    token: Array  # [N] int32, by position
    position: Array  # [N] int32, by token
    number: Array  # [] int32: how many are valid

    @staticmethod
    def of(valid: Array) -> ValidFirst:
        counted = valid.astype(jnp.int32)
        number, seen = counted.sum(dtype=jnp.int32), jnp.cumsum(counted, dtype=jnp.int32)
        token = jnp.arange(valid.shape[0], dtype=jnp.int32)
        position = jnp.where(valid, seen - 1, number + token - seen)
        placed = jnp.zeros_like(token).at[position].set(token, unique_indices=True)
        return ValidFirst(placed, position, number)


class Inputs(NamedTuple):
    """A call's arrays, flattened and checked."""

    hidden: Array  # [N, D]
    weight: Array  # [V, D], hidden's dtype: a float32 one beside narrower hidden states is rounded to it
    bias: Array | None  # [V]
    target: Array  # [N] int32, 0 where ignored or outside the vocabulary
    valid: Array  # [N] bool, False where ignored
    inside: Array  # [N] bool, False for an id outside the vocabulary: that token's loss becomes NaN
    token_weight: Array  # [N] accumulation dtype, 0 where ignored
    class_weight: Array | None  # [V] accumulation dtype
    shard: Shard = WHOLE  # with an axis, V of the arrays above is that of this device's slice
    shared: Shared | None = None
    precision: Precision = Precision()
    temperature: Array | None = None  # [N] accumulation dtype, 1 where ignored; None: the options have it
    into: Array | None = None  # [V, D] in its own dtype: dW is this plus dW; None: dW alone
    turned_weight: Array | None = None  # [D, V], where the weight came so: then this is read
    order: ValidFirst | None = None  # of the vectors above; None: the tokens' own, which hidden always has

    @staticmethod
    def of(arrays: Arrays[Array], ignore_index: int, shard: Shard = WHOLE, turned: bool = False) -> Inputs:
        """The arrays flattened, ignored and outside ids marked, all in the dtypes of the computation."""
        hidden, weight = arrays.hidden, arrays.weight
        vocab = shard.vocab if shard.active else weight.shape[0]
        accumulation, wide = accumulation_dtype(hidden.dtype), weight.dtype != hidden.dtype
        flat = arrays.target.reshape(-1)
        valid = flat != ignore_index
        inside = ~valid | ((flat >= 0) & (flat < vocab))
        weights = jnp.ones(flat.shape, accumulation)
        if arrays.token_weight is not None:
            weights = arrays.token_weight.reshape(-1).astype(accumulation)
        class_weight = None if arrays.class_weight is None else arrays.class_weight.astype(accumulation)
        temperature = None if arrays.temperature is None else arrays.temperature.reshape(-1).astype(accumulation)
        return Inputs(
            hidden=shard.gather(hidden.reshape(-1, hidden.shape[-1])),
            weight=weight.astype(hidden.dtype) if wide else weight,
            bias=arrays.bias.astype(hidden.dtype) if wide and arrays.bias is not None else arrays.bias,
            target=jnp.where(valid & inside, flat, 0).astype(jnp.int32),
            valid=valid,
            inside=inside,
            token_weight=jnp.where(valid, weights, 0.0),
            class_weight=class_weight,
            shard=shard,
            precision=Precision(wide),
            temperature=None if temperature is None else jnp.where(valid, temperature, 1.0),
            into=arrays.accumulate_into,
            turned_weight=weight.T.astype(hidden.dtype) if turned else None,  # XLA sees that two transposes are none
        )

    @property
    def turned(self) -> bool:
        """Whether the weight came as [D, V]."""
        return self.turned_weight is not None

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        return accumulation_dtype(self.hidden.dtype)

    @property
    def ids(self) -> Array:
        """[N] the target: ids are those of the whole vocabulary on every device."""
        return self.target

    def wide(self, values: Array) -> Array:
        """``values`` in the accumulation dtype."""
        return values.astype(self.accumulation_dtype)

    @property
    def vocab(self) -> int:
        """V, of all devices together."""
        return self.shard.vocab if self.shard.active else int(self.weight.shape[0])

    def target_class_weight(self) -> Array | float:
        if self.class_weight is None:
            return 1.0
        if self.shared is not None:
            assert self.shared.class_weight is not None
            return self.shared.class_weight
        return self.class_weight[self.target]

    def class_weight_sum(self) -> Array | float:
        if self.class_weight is None:
            return float(self.vocab)
        if self.shared is not None:
            assert self.shared.class_weight_sum is not None
            return self.shared.class_weight_sum
        return self.class_weight.sum()

    def largest_class_weight(self) -> Array | float | None:
        """max |k_j|; None where the products' dtype can hold what is not scaled by it."""
        if self.hidden.dtype != jnp.float16:
            return None
        return 1.0 if self.class_weight is None else self.shard.largest(jnp.abs(self.class_weight).max())


class Needs(NamedTuple):
    """Which gradients are wanted; a product that serves none of them is not run."""

    hidden: bool
    weight: bool
    bias: bool


NOTHING = Needs(False, False, False)


class Gradients(NamedTuple):
    """The gradients that were wanted, None in place of the others.

    They may be in the accumulation dtype: the caller makes the last cast.
    """

    hidden: Array | None
    weight: Array | None
    bias: Array | None
