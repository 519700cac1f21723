"""PyTorch's operations in a form that writes into given memory, for steps that are repeated. No mirror: XLA compiles a
whole program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from logitless.torch_impl.kernels.program import Unfit

aten = torch.ops.aten
Writes = Callable[..., object]
"""Called with the memory and the operation's arguments."""


def _fill(out: Tensor, *_: object, **__: object) -> None:
    out.fill_(1)


def _scalar(out: Tensor, value: float, **_: object) -> None:
    out.fill_(value)


def _full(out: Tensor, _: object, value: float, **__: object) -> None:
    out.fill_(value)


def _arange(out: Tensor, *bounds: float, **_: object) -> None:
    torch.arange(*bounds, out=out)


def _copy(out: Tensor, values: Tensor, **_: object) -> None:
    out.copy_(values)


def _masked_fill(out: Tensor, values: Tensor, mask: Tensor, value: float) -> None:
    out.copy_(values).masked_fill_(mask, value)


def _pad(out: Tensor, values: Tensor, pad: Sequence[int], value: float = 0) -> None:
    out.fill_(value)
    for axis, before in zip(range(-1, -len(pad), -1), pad[::2], strict=False):
        out = out.narrow(axis, before, values.shape[axis])
    out.copy_(values)


def _subtracted_from(out: Tensor, values: Tensor, other: float) -> None:
    torch.neg(values, out=out).add_(other)


def _sum(
    out: Tensor, values: Tensor, axes: list[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    aten.sum.IntList_out(values, axes, keepdim, dtype=dtype, out=out)


# Operations whose own form makes memory first, or that have none.
OWN: dict[OpOverload, Writes] = {
    aten.ones.default: _fill,
    aten.ones_like.default: _fill,
    aten.scalar_tensor.default: _scalar,
    aten.full.default: _full,
    aten.arange.default: _arange,
    aten.arange.start_step: _arange,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.masked_fill.Scalar: _masked_fill,
    aten.constant_pad_nd.default: _pad,
    aten.rsub.Scalar: _subtracted_from,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
}


@functools.cache
def writing(function: OpOverload) -> Writes:
    """What writes the result of ``function`` into its first argument. Raises :class:`Unfit` where there is nothing."""
    if function in OWN:
        return OWN[function]
    names = [argument.name for argument in function._schema.arguments]
    for name in (f"{function._overloadname}_out", "out"):
        found = getattr(function.overloadpacket, name, None)
        if found is None:
            continue
        arguments = found._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        if len(outs) == 1 and [argument.name for argument in arguments if not argument.is_out] == names:
            return functools.partial(_into, cast("Writes", found), outs[0])
    raise Unfit


def _into(function: Writes, name: str, out: Tensor, *arguments: object, **named: object) -> None:
    function(*arguments, **named, **{name: out})
