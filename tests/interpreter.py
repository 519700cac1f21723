"""Triton's interpreter, made quicker: the same operations on the same numbers, with less beside them.

A test of interpreted kernels spends two thirds of its time on what changes nothing: types that are built anew for every
operation, the functions of triton.language replaced at every launch and every call of a function, and checks of integer
overflow whose outcome is thrown away.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def keep_on_its_argument(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function of one object, called once for each."""
    name = f"_kept_{function.__name__}"

    def kept(of: Any) -> Any:
        try:
            return of.__dict__[name]
        except KeyError:
            value = of.__dict__[name] = function(of)
            return value

    return kept


def build_types_once(core: Any) -> None:
    """A type of blocks is built once for each dtype and shape, and what a tensor has of its type once for each type."""
    build_block, build_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}

    def of_type(type: Any) -> tuple[Any, ...]:
        made = object.__new__(core.tensor)
        build_tensor(made, None, type)
        return made.shape, made.numel, made.dtype

    kept = keep_on_its_argument(of_type)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.is_ptr():  # there are new ones in every launch
            return build_block(self, element_ty, shape)
        key = element_ty.name, *shape
        if key not in blocks:
            build_block(self, element_ty, shape)
            kept(self)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = kept(type)

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def replace_the_language_once(interpreter: Any, language: Any) -> None:
    """Look through triton.language once, and replace what is found there once a launch, not at every call."""
    run, scope_of = interpreter.GridExecutor.__call__, interpreter._LangPatchScope
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    changes = [(where, name, getattr(where, name)) for where, name, _ in scope._changes]
    scope.restore()
    launched: list[bool] = []

    def replace(_: Any) -> Any:
        scope = scope_of()
        if launched:
            launched.clear()
            for change in changes:
                scope.set_attr(*change)
        return scope

    def launch(self: Any, *arguments: Any, **options: Any) -> Any:
        launched.append(True)
        return run(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace, launch


def make_quicker() -> None:
    """Make Triton's interpreter quicker, where kernels are interpreted, for the rest of the process."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        return
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older Triton, whose interpreter stays as slow as it is
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = keep_on_its_argument(interpreter._get_np_dtype)
    build_types_once(language.core)
    replace_the_language_once(interpreter, language)
