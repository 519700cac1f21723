"""Modules of flax.nnx, which a forward may change, run as functions.

A trace may not write to variables that were made outside of it. So copies of the modules are made inside of it and run,
and what they have changed is written to the modules afterwards. Nothing here imports flax.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import jax
from jax import Array


class Call:
    """A forward with its arguments, and the modules among them."""

    def __init__(self, forward: Callable[..., object], arguments: tuple[object, ...], named: dict[str, object]) -> None:
        self._forward, self._given = forward, (arguments, named)
        self._nnx: Any = sys.modules.get("flax.nnx")
        leaves = jax.tree.leaves(
            (forward, getattr(forward, "__self__", None), arguments, named), is_leaf=self._is_module
        )
        self._modules = list({id(leaf): leaf for leaf in leaves if self._is_module(leaf)}.values())
        self._tree: Any = None

    def _is_module(self, value: object) -> bool:
        return self._nnx is not None and isinstance(value, self._nnx.Module)

    def run(self) -> tuple[object, list[Array]]:
        """What the forward gives, of copies of the modules, and the copies' state after it."""
        copies = self._nnx.clone(tuple(self._modules)) if self._modules else ()
        copy_of = {id(each): copy for each, copy in zip(self._modules, copies, strict=True)}

        def inside(value: Any) -> Any:  # variables outside of a module are made anew
            return jax.tree.map(lambda leaf: copy_of.get(id(leaf), leaf), value, is_leaf=self._is_module)

        forward, owner = self._forward, getattr(self._forward, "__self__", None)
        if id(forward) in copy_of:
            forward = copy_of[id(forward)]
        elif id(owner) in copy_of:
            forward = types.MethodType(getattr(forward, "__func__"), copy_of[id(owner)])  # noqa: B009
        arguments, named = inside(self._given)
        output = forward(*arguments, **named)
        arrays, self._tree = jax.tree.flatten([self._nnx.state(each) for each in copies])
        return output, arrays

    def update(self, arrays: list[Array]) -> None:
        """Write changes of the state to the modules."""
        if not self._modules:
            return
        old, tree = jax.tree.flatten([self._nnx.state(each) for each in self._modules])
        if tree != self._tree:
            raise NotImplementedError("forward: it makes new variables of flax.nnx, allowed are changes of its own")
        if any(new is not each for new, each in zip(arrays, old, strict=True)):
            for module, state in zip(self._modules, jax.tree.unflatten(tree, arrays), strict=True):
                self._nnx.update(module, state)
