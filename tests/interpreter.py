"""Triton's interpreter, made quicker.

It replaces the functions of triton.language at every launch, and again at every call of a function that a kernel calls,
where they are replaced already. The second takes a third of a test's time.
"""

from __future__ import annotations

from typing import Any


def replace_the_language_once_a_launch() -> None:
    """Look through triton.language once for each module that a launch's functions are from."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older Triton, whose interpreter stays as slow as it is
        return
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[int] = set()

    def replace_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names in seen:
            return interpreter._LangPatchScope()
        seen.add(names)
        return replace(function)

    def launch(self: Any, *arguments: Any, **options: Any) -> Any:
        seen.clear()
        return run(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch
