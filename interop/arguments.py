"""A call's arguments (and results) taken apart into arrays and constants.

A pytree here is what ``jax.tree`` takes for one: dicts, lists, tuples, named tuples, None and registered classes,
nested as you like. A leaf is an array, or a constant: a number, string, plan, function, … that becomes part of what is
compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import jax

from logitless.interop import dlpack

A = TypeVar("A")

Args = tuple[object, ...]
Kwargs = dict[str, object]

Pytree = Any
"""A pytree whose structure no type describes: what a function that is bridged takes and returns."""


class _Hole:
    """Where an array was taken out."""

    def __repr__(self) -> str:
        return "<array>"


HOLE = _Hole()


@dataclasses.dataclass(frozen=True)
class Layout:
    """(args, kwargs) without their arrays. Hashable: equal layouts call the same compiled function.

    Constants are equal when type and value are: 1, 1.0 and True are three, and so are 0.0 and −0.0.
    """

    tree: jax.tree_util.PyTreeDef
    leaves: tuple[Hashable, ...] = dataclasses.field(compare=False)
    key: tuple[Hashable, ...]

    def join(self, arrays: Sequence[object]) -> tuple[Args, Kwargs]:
        """(args, kwargs) with ``arrays`` in the places of the holes, in order."""
        waiting = iter(arrays)
        leaves = [next(waiting) if leaf is HOLE else leaf for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs


def split(
    args: Args, kwargs: Kwargs, is_array: Callable[[object], TypeGuard[A]], wanted: str
) -> tuple[list[A], Layout]:
    """The arrays of a call in order, and the layout that is left.

    Raises TypeError, naming the place, for a leaf that is neither an array (``wanted``: what to call those) nor
    hashable.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_sparse)
    arrays: list[A] = []
    rest: list[Hashable] = []
    key: list[Hashable] = []
    for index, leaf in enumerate(leaves):
        if is_array(leaf):
            arrays.append(leaf)
            rest.append(HOLE)
            key.append(HOLE)
            continue
        try:
            key.append((type(leaf), leaf.hex() if type(leaf) is float else leaf))
            hash(key[-1])
            allowed = not hasattr(leaf, "__dlpack__")  # another framework's array is no constant, hashable or not
        except TypeError:
            allowed = False
        if not allowed:
            place = leaf_name((args, kwargs), index)
            raise TypeError(f"{place}: got {dlpack.type_name(leaf)}, allowed is {wanted}, or a hashable constant")
        rest.append(leaf)
    return arrays, Layout(tree, tuple(rest), tuple(key))


def array_name(args: Args, kwargs: Kwargs, is_array: Callable[[object], bool], number: int) -> str:
    """What the caller calls the ``number``-th array of a call: ``argument 0``, ``argument 1['w']``, ``target``."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_sparse)
    places = [index for index, leaf in enumerate(leaves) if is_array(leaf)]
    return leaf_name((args, kwargs), places[number])


@contextmanager
def named(name: Callable[[int], str], number: int) -> Iterator[None]:
    """An error about an array begins with its name."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{name(number)}: {error}") from error


def leaf_name(call: tuple[Args, Kwargs], index: int) -> str:
    """The same for the ``index``-th leaf of (args, kwargs)."""
    path = jax.tree_util.tree_flatten_with_path(call, is_leaf=is_sparse)[0][index][0]
    side, place, rest = path[0], path[1], path[2:]
    first = f"argument {place.idx}" if side.idx == 0 else str(place.key)
    return first + jax.tree_util.keystr(rest)


def is_sparse(value: object) -> bool:
    """JAX's sparse matrices are pytrees of their parts; taken apart they would mean something else."""
    return type(value).__module__.startswith("jax.experimental.sparse")
