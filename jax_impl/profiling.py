"""What a forward keeps for its backward, and the loss's share of it. Mirror of torch_impl/profiling.py."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any  # options, which the loss checks

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import print_saved_residuals

from logitless.jax_impl.api import linear_cross_entropy
from logitless.saved import SavedTensors


def profile_saved_residuals(
    function: Callable[..., object],
    *arguments: object,
    weight_argnums: int | Sequence[int] | None = None,
    **options: object,
) -> SavedTensors:
    """List what ``jax.vjp(function, *arguments)`` keeps for the backward, from jax.ad_checkpoint.print_saved_residuals.

    A row is an argument, a line of source that made something, or a name of jax.ad_checkpoint.checkpoint_name.
    Arguments count as weights (all of them, or those that ``weight_argnums`` names), everything else as activations, a
    weight's copy in another dtype too. Nothing is run: this is what JAX's differentiation asks for before XLA, which
    may still share memory or compute again.

    Arguments:
        function: of floating arrays, or pytrees of them, and of numbers; options go to it as they are.
        arguments: arrays, or jax.ShapeDtypeStruct where only shape and dtype are known.
        weight_argnums: positions of the arguments that are weights, as jax.grad's ``argnums``: 0 for the parameters of
            a block f(parameters, x), whose input then is an activation. None: all arguments.

    Returns :class:`logitless.saved.SavedTensors`; ``rich.print`` shows it as a table.

    Raises TypeError or ValueError naming the argument, what came and what is allowed.
    """
    weights = _weight_names(function, len(arguments), weight_argnums)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(function, *arguments, **options)
    rows = list(_residuals(text.getvalue()))
    if weights is not None:
        rows = [(where, size, argument and _named(where, weights)) for where, size, argument in rows]
    return SavedTensors.of(rows)


def _weight_names(
    function: Callable[..., object], count: int, argnums: int | Sequence[int] | None
) -> tuple[str, ...] | None:
    """What JAX calls the arguments of these positions."""
    if argnums is None:
        return None
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"weight_argnums: got {argnums!r}, allowed are integers or None")
        if not 0 <= number < count:
            raise ValueError(f"weight_argnums: got {number}, allowed are 0 to {count - 1}")
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        several = parameter.kind is parameter.VAR_POSITIONAL
        names += [f"{parameter.name}[{i}]" for i in range(count - len(names))] if several else [parameter.name]
    return tuple(names[number] for number in numbers)


def _named(where: str, names: tuple[str, ...]) -> bool:
    """Whether ``where`` is one of the arguments, or a part of one."""
    return any(where == name or where.startswith((f"{name}[", f"{name}.")) for name in names)


def profile_losses(
    hidden: Array, weight: Array, target: Array, bias: Array | None = None, **options: Any
) -> dict[str, SavedTensors]:
    """What the loss keeps for its backward, with full logits and without: {"full logits": ..., "logitless": ...}.

    hidden [..., D], weight [V, D], target [...], bias [V] as for :func:`linear_cross_entropy`, whose other options the
    second takes (``memory_budget``, ``plan``, ``backend``, ...); the first is logsumexp − logit on float32 logits. What
    comes in counts as weights.
    """

    def full(x: Array, w: Array, b: Array | None) -> Array:
        z = jnp.dot(x, w.T, preferred_element_type=jnp.float32)
        z = z if b is None else z + b.astype(z.dtype)
        return jnp.mean(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, target[..., None], -1)[..., 0])

    def ours(x: Array, w: Array, b: Array | None) -> object:
        return linear_cross_entropy(x, w, target, b, **options)

    losses = {"full logits": full, "logitless": ours}
    return {name: profile_saved_residuals(loss, hidden, weight, bias) for name, loss in losses.items()}


def _residuals(text: str) -> Iterator[tuple[str, int, bool]]:
    """(where, bytes, whether it is an argument) of every line ``f32[8,16] output of tanh from FILE:LINE (f)``."""
    for line in text.splitlines():
        found = re.fullmatch(r"(\w+)\[([\d,]*)\](?:\{.*\})? (.*)", line)
        if found is None:
            continue
        dtype, shape, where = found.groups()
        bits = re.search(r"\d+", dtype)  # a bool has none in its name
        size = math.prod(map(int, filter(None, shape.split(",")))) * (int(bits[0]) if bits else 8) // 8
        argument = re.fullmatch(r"from the argument (.*)", where)
        if size:
            yield (argument[1] if argument else _place(where)), size, argument is not None


def _place(where: str) -> str:
    """``tanh, model.py:12 (f)`` from JAX's words."""
    found = re.fullmatch(r"(?:output of )?(.*?) from (\S*?):(\d+)(?::\d+)?(?:-\S*)? \((.*)\)", where)
    return where if found is None else f"{found[1]}, {PurePath(found[2]).name}:{found[3]} ({found[4]})"
