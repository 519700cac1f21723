"""The functions of :mod:`logitless.jax_impl.api` on arrays that lie on a mesh: jax.shard_map, done for the caller.

Forward and backward are one jax.shard_map each, and no derivative is taken through either. All communication between
devices is written here and in :mod:`logitless.jax_impl.distributed.parallel`. So JAX need not check the kernels, which
it cannot (``check_vma=False``). What the forward keeps for the backward stays on its device: every such array gets a
first axis with one entry per device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, ParamSpec, TypeVar  # Any: options, whose names are checked here and values by the call

import jax
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import spec
from logitless.jax_impl import checks, vjp
from logitless.jax_impl.api import linear_cross_entropy, linear_log_probs
from logitless.jax_impl.backend import BACKENDS
from logitless.jax_impl.call import (
    NOTHING,
    Arrays,
    Call,
    Gradients,
    Needs,
    RawArrays,
    Request,
    as_jax,
    taking_wrappers,
    temperatures,
)
from logitless.jax_impl.distributed.parallel import AxisName, Shard, names_of
from logitless.jax_impl.residuals import Packed, Pytree, packed, unpacked
from logitless.spec import LogProbResults, TokenStats, WeightLayout

Results = vjp.LossAndLse | vjp.LogProbs
"""The loss, lse or None and statistics or None; or log-probabilities and statistics."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Arguments of the functions inside jax.shard_map that follow from the mesh here.
_OF_SHARD = ("axis_name", "vocab", "sequence_parallel")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which axes of a mesh cut which arguments. Checked."""

    mesh: Mesh
    vocab_axis: AxisName | None
    data_axis: AxisName | None
    vocab: int | None
    sequence_parallel: bool

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh: got {type(self.mesh).__name__}, allowed is a jax.sharding.Mesh")
        for name, axes in (("vocab_axis", self.vocab_axes), ("data_axis", self.data_axes)):
            if not set(axes) <= set(self.mesh.axis_names):
                raise ValueError(f"{name}: got {axes}, allowed are the mesh's axes {tuple(self.mesh.axis_names)}")
        if set(self.vocab_axes) & set(self.data_axes):
            raise ValueError(f"data_axis: got {self.data_axis!r}, allowed is another one than vocab_axis")
        if not self.axes:
            raise ValueError(
                "vocab_axis: got None beside data_axis=None, allowed is an axis of the mesh for one of them"
            )
        for name, value in (("vocab", self.vocab), ("sequence_parallel", self.sequence_parallel or None)):
            if value is not None and not self.vocab_axes:
                raise ValueError(f"{name}: got {value!r} without vocab_axis, allowed is only beside one")

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return names_of(self.vocab_axis)

    @property
    def data_axes(self) -> tuple[str, ...]:
        return names_of(self.data_axis)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.data_axes + self.vocab_axes

    def devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    def shard(self, rows: int) -> Shard:
        """A device's slice of a weight with ``rows`` rows in all."""
        if not self.vocab_axes:
            return Shard(batch_axes=self.data_axes)
        devices = self.devices(self.vocab_axes)
        vocab = rows if self.vocab is None else self.vocab
        return Shard(self.vocab_axes, devices, rows // devices, vocab, self.sequence_parallel, self.data_axes)

    def cuts(self) -> Arrays[tuple[str, ...]]:
        """For each argument, the mesh axes that cut its first axis."""
        data, entries = self.data_axes, self.vocab_axes
        return Arrays(self.axes if self.sequence_parallel else data, entries, entries, data, data, entries, (), data)

    def specs(self) -> Arrays[P]:
        return Arrays(*(P(axes or None) for axes in self.cuts()))

    def check(self, arrays: RawArrays) -> None:
        """Raise ValueError if a first axis cannot be cut."""
        for name, array, axes in zip(Arrays._fields, arrays, self.cuts(), strict=True):
            shape = tuple(getattr(array, "shape", ()))
            if array is None or not axes or (shape and shape[0] % self.devices(axes) == 0):
                continue
            more = "; pad it with rows of zeros and give vocab" if axes == self.vocab_axes else ""
            raise ValueError(
                f"{name}: got shape {shape}, allowed is a first axis that is a multiple of {self.devices(axes)}, the "
                f"devices along {axes}{more}"
            )
        rows = arrays.weight.shape[0]
        if self.vocab is not None and not (type(self.vocab) is int and 1 <= self.vocab <= rows):
            raise ValueError(f"vocab: got {self.vocab!r}, allowed is 1 to the weight's {rows} rows")

    def whole(self, array: Array) -> Array:
        """The array on every device, if the mesh has Explicit axes: an axis that they cut has no slices."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        return jax.reshard(array, NamedSharding(self.mesh, P())) if explicit else array

    def placed(self, arrays: Arrays[Array]) -> Arrays[Array]:
        """The arrays laid out as they will be cut, if the mesh has Explicit axes. Else the compiler moves them."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return arrays

        def place(array: Array | None, spec: P) -> Array | None:
            return None if array is None else jax.reshard(array, NamedSharding(self.mesh, spec))

        return Arrays(*map(place, arrays, self.specs()))  # type: ignore[arg-type]  # None only where it came as None


@dataclasses.dataclass(frozen=True)
class _Setup:
    """Everything about a call that is not an array. Hashable."""

    layout: Layout
    rows: int
    """Rows of the whole weight."""
    request: Request

    @property
    def scalar(self) -> bool:
        """Whether the loss is one number, a sum over the data axes."""
        return self.request.reduction != "none"

    @property
    def output_specs(self) -> tuple[P, ...]:
        tokens = self.layout.specs().target
        if self.request.log_probs:
            return (tokens,) * (1 + len(spec.log_prob_statistics(self.request.statistics)))
        return (P() if self.scalar else tokens, tokens, tokens)

    @property
    def differentiable(self) -> int:
        """How many of the results may have a gradient. They come first."""
        return 1 + len(spec.differentiable_statistics(self.request.statistics)) if self.request.log_probs else 2

    def map(
        self, body: Callable[Arguments, Result], in_specs: Pytree, out_specs: Pytree
    ) -> Callable[Arguments, Result]:
        return jax.shard_map(body, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _forward(setup: _Setup, arrays: Arrays[Array], needs: Needs) -> tuple[Results, Pytree]:
    """The results, and what every device keeps for the backward."""
    forward: Callable[[Call, Arrays[Array], Needs], tuple[Results, Pytree]]
    forward = vjp.log_probs_forward if setup.request.log_probs else vjp.loss_forward
    layout = setup.layout

    def body(raw: RawArrays) -> tuple[Results, Pytree]:
        arrays, call = checks.ready(raw, setup.request, layout.shard(setup.rows))
        (value, *more), kept = forward(call, arrays, needs)
        if setup.scalar and layout.data_axes:
            value = lax.psum(value, layout.data_axes)
        return (value, *more), (call, vjp.likes_of(arrays), jax.tree.map(lambda part: part[None], kept))

    return setup.map(body, (layout.specs(),), (setup.output_specs, P(layout.axes)))(arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sharded(setup: _Setup, arrays: Arrays[Array]) -> Results:
    return _forward(setup, arrays, NOTHING)[0]


def _sharded_forward(setup: _Setup, primals: Arrays[CustomVJPPrimal]) -> tuple[Results, Packed]:
    arrays, needs = vjp.values_and_needs(primals)
    output, kept = _forward(setup, arrays, needs)
    return output, packed(kept, needs)


def _sharded_backward(
    setup: _Setup, residuals: Packed, cotangents: tuple[vjp.Cotangent, ...]
) -> tuple[Arrays[Array | None]]:
    (call, likes, kept), flags = unpacked(residuals)
    needs, layout = Needs(*flags), setup.layout
    upstream = tuple(map(vjp.arrived, cotangents[: setup.differentiable]))  # the others have none
    if all(cotangent is None for cotangent in upstream):
        return (vjp.NO_COTANGENTS,)
    gradients: Callable[..., Gradients] = vjp.log_probs_gradients if setup.request.log_probs else vjp.loss_gradients

    def body(kept: Pytree, upstream: tuple[Array | None, ...]) -> Arrays[Array | None]:
        own = gradients(call, jax.tree.map(lambda part: part[0], kept), needs, *upstream)
        (cotangents,) = vjp.cotangents_of(own, likes, call.shard)
        if not layout.data_axes:
            return cotangents

        def turned(weight: Array | None) -> Array | None:
            return weight if weight is None or not setup.request.turned else weight.T

        # dW is summed as it lies: else XLA copies it.
        weight, bias = lax.psum((turned(cotangents.weight), cotangents.bias), layout.data_axes)
        return cotangents._replace(weight=turned(weight), bias=bias)

    specs = layout.specs()
    in_specs = (P(layout.axes), setup.output_specs[: setup.differentiable])
    return (setup.map(body, in_specs, specs)(kept, upstream),)


_sharded.defvjp(_sharded_forward, _sharded_backward, symbolic_zeros=True)
_compiled = jax.jit(_sharded, static_argnums=0)


def _check_options(function: Callable[..., object], options: Iterable[str]) -> None:
    """Raise TypeError unless ``function`` has these arguments on a mesh too."""
    for name in options:
        if name in _OF_SHARD or name not in signature(function).parameters:
            raise TypeError(f"{function.__name__}() on a mesh got an unexpected keyword argument {name!r}")


def _run(layout: Layout, raw: RawArrays, request: Request) -> Results:
    layout.check(raw)
    spec.check_shift(request.shift, tuple(raw.target.shape))
    checks.check_ids(raw.target, layout.vocab or raw.weight.shape[0], request.ignore_index, request.shift)
    spec.check_backend(request.backend, BACKENDS)
    checks.usable_backend(request.backend, raw)  # refuse here, where the arrays' devices are known
    arrays = as_jax(raw, raw.hidden.dtype)
    if request.shift:  # here, where the whole target is: a part may end before its last positions' targets
        target = layout.whole(arrays.target)
        arrays = arrays._replace(target=checks.shifted(target, request.shift, request.ignore_index))
    setup = _Setup(layout, raw.weight.shape[0], dataclasses.replace(request, shift=0))
    arrays = layout.placed(arrays)
    results: Results = _compiled(setup, arrays)
    return results


def sharded_linear_cross_entropy(
    mesh: Mesh,
    *,
    vocab_axis: AxisName | None = None,
    data_axis: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> Callable[..., Array | tuple[Array | TokenStats[Array], ...]]:
    """:func:`linear_cross_entropy` of arrays that lie on ``mesh``. Each device works on its part of them.

    Returns a function with the same arguments (without axis_name, vocab and sequence_parallel), results and gradients.
    Call it outside of jax.shard_map, inside jax.jit or not. Its arrays are global. They are cut along their first axes,
    and moved if they lie otherwise:

        hidden, target, token_weight        over data_axis (hidden over vocab_axis as well under sequence_parallel);
                                            a temperature per token as target
        weight, bias, class_weight          over vocab_axis (a weight that is [D, V], along its second axis)
        the loss, the normalizer            on every device; reduction="none" and statistics as target

    mean divides by the valid tokens of all devices. Gradients have their arguments' layout. dW and db are summed over
    data_axis in the weight's dtype, dX over vocab_axis in the accumulation dtype. A ``plan`` is for one device.

    Arguments:
        mesh: with Auto or Explicit axes.
        vocab_axis, data_axis: names of axes of the mesh, tuples of names, or None: not cut.
        vocab: V, if the weight's last rows are padding. The number of rows must be a multiple of the devices along
            vocab_axis.
        sequence_parallel: hidden is cut along its first axis over data_axis and vocab_axis. Every call gathers it over
            vocab_axis.

    Raises ValueError or TypeError for an argument that does not fit the mesh; the returned function also as
    :func:`linear_cross_entropy`.
    """
    layout = Layout(mesh, vocab_axis, data_axis, vocab, sequence_parallel)

    @taking_wrappers
    def loss(
        hidden: Array, weight: Array, target: Array, bias: Array | None = None, *, token_weight: Array | None = None,
        class_weight: Array | None = None, normalizer: Array | float | None = None, return_stats: bool = False,
        return_lse: bool = False, weight_layout: WeightLayout = "vd", **options: Any,
    ) -> Array | tuple[Array | TokenStats[Array], ...]:  # fmt: skip
        _check_options(linear_cross_entropy, options)
        weight = checks.laid_out(weight, hidden, weight_layout)
        # A normalizer may be a number.
        own, number = temperatures(options.pop("temperature", 1.0))
        raw: RawArrays = Arrays(hidden, weight, bias, target, token_weight, class_weight, normalizer, own)  # type: ignore[arg-type]
        options["temperature"] = number
        turned = weight_layout == "dv"
        made = _run(layout, raw, Request(statistics=return_stats, lse=return_lse, turned=turned, **options))
        results = tuple(value for value in made if value is not None)
        return results if len(results) > 1 else results[0]

    return loss


def sharded_linear_log_probs(
    mesh: Mesh,
    *,
    vocab_axis: AxisName | None = None,
    data_axis: AxisName | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
) -> Callable[..., LogProbResults[Array]]:
    """:func:`linear_log_probs` of arrays that lie on ``mesh``; see :func:`sharded_linear_cross_entropy`."""
    layout = Layout(mesh, vocab_axis, data_axis, vocab, sequence_parallel)

    @taking_wrappers
    def log_probs(
        hidden: Array, weight: Array, target: Array, bias: Array | None = None, *, with_entropy: bool = False,
        return_stats: bool = False, weight_layout: WeightLayout = "vd", **options: Any,
    ) -> LogProbResults[Array]:  # fmt: skip
        _check_options(linear_log_probs, options)
        weight = checks.laid_out(weight, hidden, weight_layout)
        own, number = temperatures(options.pop("temperature", 1.0))
        statistics = spec.wanted_statistics(with_entropy, return_stats)
        request = Request(
            reduction="none", statistics=statistics, log_probs=True, temperature=number, turned=weight_layout == "dv",
            **options,
        )  # fmt: skip
        results: vjp.LogProbs = _run(layout, Arrays(hidden, weight, bias, target, temperature=own), request)  # type: ignore[assignment]
        return spec.log_prob_results(statistics, results[0], results[1:])

    return log_probs
