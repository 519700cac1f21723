"""A call's arguments and results, split into arrays and constants.

A pytree is what ``jax.tree`` calls one: dicts, lists, tuples, named tuples, None and registered classes, nested at
will. A leaf is an array or a constant. A constant (a number, a string, a plan, a function) becomes part of the compiled
program.
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
    """The place of an array in a layout."""

    def __repr__(self) -> str:
        return "<array>"


HOLE = _Hole()


@dataclasses.dataclass(frozen=True)
class Layout:
    """(args, kwargs) without their arrays. Hashable: equal layouts call the same compiled function.

    Constants are equal if both type and value are: 1, 1.0 and True differ, and so do 0.0 and −0.0.
    """

    tree: jax.tree_util.PyTreeDef
    leaves: tuple[Hashable, ...] = dataclasses.field(compare=False)
    key: tuple[Hashable, ...]

    def join(self, arrays: Sequence[object]) -> tuple[Args, Kwargs]:
        """(args, kwargs) with ``arrays`` in their places, in order."""
        waiting = iter(arrays)
        leaves = [next(waiting) if leaf is HOLE else leaf for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs


def split(
    args: Args, kwargs: Kwargs, is_array: Callable[[object], TypeGuard[A]], wanted: str
) -> tuple[list[A], Layout]:
    """The arrays of a call in order, and the layout of the rest.

    Raises TypeError, with the place, for a leaf that is neither an array nor hashable. ``wanted``: the error's words
    for an array.
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
    """What the caller calls the ``index``-th leaf of (args, kwargs)."""
    path = jax.tree_util.tree_flatten_with_path(call, is_leaf=is_sparse)[0][index][0]
    side, place, rest = path[0], path[1], path[2:]
    first = f"argument {place.idx}" if side.idx == 0 else str(place.key)
    return first + jax.tree_util.keystr(rest)


def is_sparse(value: object) -> bool:
    """Whether this is one of JAX's sparse matrices. They are pytrees, but their parts alone mean something else."""
    return type(value).__module__.startswith("jax.experimental.sparse")
