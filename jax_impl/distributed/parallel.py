"""What the devices of a mesh tell each other when each holds a slice of the vocabulary. Mirror of
torch_impl/distributed/parallel.py.

A device holds ``columns`` rows of the weight, in the order of the axis, and computes its own share of a call. Three
things are shared, all through :class:`Shard`, whose methods do nothing without an axis:

    the anchors    Σ over devices: the owner of a target's row knows its logit, the others add 0       [N]
    the sums       the largest anchor of a row, then Σ over devices of what is relative to it          [C], per chunk
    dX             Σ over devices, in the accumulation dtype; scattered where tokens are sharded       [N, D]

dW and db are each device's own. Everything is deterministic: the collectives are, and no device decides alone.

Types under ``jax.shard_map(check_vma=True)``: JAX knows that a sum over an axis is the same on all of its devices. A
gradient is summed over exactly those axes over which it varies and its argument does not.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless import spec
from logitless.spec import ArrayInfo

AxisName = str | tuple[str, ...]

Tree = TypeVar("Tree")

_LAST = 2**31 - 1


def names_of(axis: AxisName | None) -> tuple[str, ...]:
    """The axes of an axis_name, none for None."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def varying(array: Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Names of the manual axes over which ``array`` differs from device to device, as far as JAX tracks it."""
    found = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if found is None else frozenset(found.varying)


def tracked() -> bool:
    """Whether this is traced inside of jax.shard_map(check_vma=True)."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes) and bool(varying(lax.axis_index(axes[0])))


def vary_over(array: Array, axes: frozenset[str]) -> Array:
    """``array`` with a type that varies over ``axes`` too."""
    missing = tuple(sorted(axes - varying(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def matched(gradient: Array, axes: frozenset[str]) -> Array:
    """``gradient`` summed over the axes over which it varies and its argument does not. ``axes``: the argument's."""
    over = tuple(sorted(varying(gradient) - axes))
    return vary_over(lax.psum(gradient, over) if over else gradient, axes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shard:
    """This device's slice of the vocabulary; the default is all of it, on one device."""

    axis_name: AxisName | None = None
    """The mesh axis over which the vocabulary is cut."""
    devices: int = 1
    columns: int = 0
    """Rows of the weight on every device."""
    vocab: int = 0
    """How many ids there are. Rows beyond them are padding."""
    sequence_parallel: bool = False
    """Whether hidden is cut along its tokens over the same axis."""
    batch_axes: tuple[str, ...] = ()
    """Axes over whose devices mean's denominator is summed."""

    @property
    def active(self) -> bool:
        return self.axis_name is not None

    @property
    def padded(self) -> bool:
        return self.active and self.devices * self.columns != self.vocab

    def first(self) -> Array:
        """The id of this device's first row."""
        return (lax.axis_index(self.axis_name) * self.columns).astype(jnp.int32)

    def place(self, target: Array) -> Array:
        """Ids as rows of this device's slice, −1 for another device's."""
        if not self.active:
            return target
        place = target - self.first()
        return jnp.where((place >= 0) & (place < self.columns), place, -1)

    def limit(self) -> Array | None:
        """How many of this device's rows are ids; None where all are."""
        return jnp.clip(self.vocab - self.first(), 0, self.columns) if self.padded else None

    def weights(self, class_weight: Array | None, dtype: DTypeLike) -> Array | None:
        """Class weights, with 0 for padding, so that padding takes no part in label smoothing."""
        limit = self.limit()
        if limit is None:
            return class_weight
        k = jnp.ones(self.columns, dtype) if class_weight is None else class_weight
        return jnp.where(jnp.arange(self.columns) < limit, k, 0.0)

    def gather(self, hidden: Array) -> Array:
        """All tokens' hidden states [N, D] from this device's [N / devices, D]."""
        return lax.all_gather(hidden, self.axis_name, axis=0, tiled=True) if self.sequence_parallel else hidden

    def scratch_bytes(self, tokens: int, hidden: int, itemsize: int) -> int:
        """Bytes that a device holds beyond its plan's promise.

        They are its share of dX before the sum, all tokens' hidden states under sequence parallelism, and the vectors
        of the anchors.
        """
        if not self.active:
            return 0
        wide = max(4, itemsize)
        return tokens * (hidden * (wide + itemsize * self.sequence_parallel) + 8 * wide)

    def total(self, tree: Tree) -> Tree:
        """Σ over the devices."""
        return lax.psum(tree, self.axis_name) if self.active else tree

    def largest(self, tree: Tree) -> Tree:
        """The devices' maximum, per element."""
        return lax.pmax(tree, self.axis_name) if self.active else tree

    def winner(self, argmax: Array, here: Array) -> Array:
        """The lowest id with the maximum. ``argmax``: this device's; ``here``: whether this device has the maximum."""
        if not self.active:
            return argmax
        lowest = lax.pmin(jnp.where(here, argmax + self.first(), _LAST), self.axis_name)
        return jnp.where(lowest == _LAST, 0, lowest)  # no device has it where a logit is NaN

    def batch_total(self, tree: Tree) -> Tree:
        """Σ over the devices of the batch."""
        return lax.psum(tree, self.batch_axes) if self.batch_axes else tree

    def reduce_hidden(self, gradient: Array, axes: frozenset[str]) -> Array:
        """dX from the devices' shares. ``axes``: the axes over which hidden varies.

        If hidden varies over the vocabulary's axis, every device has its own hidden, and so its own gradient.
        """
        if not self.active:
            return gradient
        if self.sequence_parallel:
            scattered: Array = lax.psum_scatter(gradient, self.axis_name, scatter_dimension=0, tiled=True)
            return scattered
        return gradient if axes.issuperset(names_of(self.axis_name)) else self.total(gradient)


WHOLE = Shard()


def make_shard(axis_name: AxisName | None, vocab: int | None, sequence_parallel: bool, columns: int) -> Shard:
    """This device's slice, from checked arguments. Raises ValueError or TypeError."""
    spec.check_flags(sequence_parallel=sequence_parallel)
    if axis_name is None:
        for name, value in (("vocab", vocab), ("sequence_parallel", sequence_parallel or None)):
            if value is not None:
                raise ValueError(f"{name}: got {value!r} without axis_name, allowed is only beside one")
        return WHOLE
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not (isinstance(names, tuple) and names and all(isinstance(name, str) for name in names)):
        raise TypeError(f"axis_name: got {axis_name!r}, allowed is a name, a tuple of names, or None")
    try:
        devices = lax.axis_size(axis_name)
    except NameError as error:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"axis_name: got {axis_name!r}, allowed are the axes of a jax.shard_map around this call: here {bound}"
        ) from error
    whole = devices * columns if vocab is None else vocab
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise TypeError(f"vocab: got {type(vocab).__name__} {vocab!r}, allowed is an integer or None")
    if not 1 <= whole <= devices * columns:
        raise ValueError(
            f"vocab: got {vocab}, allowed is 1 to {devices * columns}: {devices} devices hold {columns} rows each"
        )
    return Shard(axis_name, devices, columns, whole, bool(sequence_parallel))


def gathered_info(info: ArrayInfo, shard: Shard) -> ArrayInfo:
    """The shape and dtype of hidden once it is gathered."""
    if not shard.sequence_parallel:
        return info
    if len(info.shape) < 2:
        raise ValueError(f"hidden: got shape {info.shape} beside sequence_parallel, allowed is [tokens, ..., D]")
    return dataclasses.replace(info, shape=(info.shape[0] * shard.devices, *info.shape[1:]))
