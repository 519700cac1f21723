"""Modules of flax.nnx, which a forward may change, run as functions.

A trace may not write to variables that were made outside of it. So copies of the modules are made inside of it and run,
and what they have changed is written to the modules afterwards. Nothing here imports flax.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import jax
from jax import Array


class Nnx(Protocol):
    """What is used of flax.nnx."""

    Module: type

    def clone(self, node: tuple[object, ...]) -> tuple[object, ...]: ...
    def state(self, node: object) -> object: ...
    def update(self, node: object, state: object) -> None: ...


class Call:
    """A forward with its arguments, and the modules among them."""

    def __init__(self, forward: Callable[..., object], arguments: tuple[object, ...], named: dict[str, object]) -> None:
        while isinstance(forward, functools.partial):
            arguments, named, forward = (*forward.args, *arguments), {**forward.keywords, **named}, forward.func
        self._forward, self._given = forward, (arguments, named)
        self._nnx = cast(Nnx | None, sys.modules.get("flax.nnx"))  # None: no module can be of it
        owner = getattr(forward, "__self__", None)
        leaves = jax.tree.leaves((forward, owner, arguments, named), is_leaf=self._is_module)
        self._modules = list({id(leaf): leaf for leaf in leaves if self._is_module(leaf)}.values())

    def _is_module(self, value: object) -> bool:
        return self._nnx is not None and isinstance(value, self._nnx.Module)

    def run(self) -> tuple[object, list[Array]]:
        """What the forward gives, of copies of the modules, and the copies' state after it."""
        copies = self._nnx.clone(tuple(self._modules)) if self._nnx is not None and self._modules else ()
        copy_of = {id(each): copy for each, copy in zip(self._modules, copies, strict=True)}
        forward = cast(Callable[..., object], copy_of.get(id(self._forward), self._forward))
        if isinstance(forward, types.MethodType) and id(forward.__self__) in copy_of:
            forward = types.MethodType(forward.__func__, copy_of[id(forward.__self__)])
        # Makes variables anew that lie in an argument without a module.
        arguments, named = jax.tree.map(
            lambda leaf: copy_of.get(id(leaf), leaf), self._given, is_leaf=self._is_module
        )  # fmt: skip
        output = forward(*arguments, **named)
        state = self._state_of(copies)
        if _structure(state) != _structure(self._state_of(self._modules)):
            raise NotImplementedError("forward: it makes new variables of flax.nnx, allowed are changes of its own")
        return output, jax.tree.leaves(state)

    def update(self, arrays: list[Array]) -> None:
        """Write changes of the state to the modules."""
        old, tree = jax.tree.flatten(self._state_of(self._modules))
        if self._nnx is not None and any(new is not each for new, each in zip(arrays, old, strict=True)):
            for module, state in zip(self._modules, jax.tree.unflatten(tree, arrays), strict=True):
                self._nnx.update(module, state)

    def _state_of(self, modules: Iterable[object]) -> list[object]:
        return [] if self._nnx is None else [self._nnx.state(each) for each in modules]


def _structure(tree: object) -> object:
    return jax.tree.structure(tree)
