"""Stand-ins for programs that are not installed: the classes and functions that our adapters meet, as documented."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def put_in(path: str, **names: Any) -> None:
    """Make ``import path`` find a module with these names, where the package is not installed."""
    if is_installed(path.split(".")[0]):
        return
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__path__ = []
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    for name, value in names.items():
        setattr(sys.modules[path], name, value)


@contextlib.contextmanager
def without(package: str, ours: str) -> Iterator[None]:
    """Afterwards neither a stand-in of the package nor our adapter is left among the modules."""
    stands_in = not is_installed(package)
    yield
    if stands_in:
        for name in [name for name in sys.modules if name.split(".")[0] == package or name == ours]:
            del sys.modules[name]


def torchtitan() -> None:
    """Of torchtitan 0.3's ``components/loss.py``."""

    class CrossEntropyLoss:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            global_vocab_size: int | None = None

    class ChunkedLossWrapper:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8
            loss_fn: Any = dataclasses.field(default_factory=CrossEntropyLoss.Config)

        def set_lm_head(self, lm_head: Any) -> None:
            self.lm_head = lm_head

    put_in("torchtitan.components.loss", ChunkedLossWrapper=ChunkedLossWrapper, CrossEntropyLoss=CrossEntropyLoss)


def axolotl() -> None:
    """Of Axolotl 0.19's ``integrations/base.py``."""

    class BasePlugin:
        def get_input_args(self) -> str | None:
            return None

        def pre_model_load(self, cfg: Any) -> None:
            pass

        def post_model_load(self, cfg: Any, model: Any) -> None:
            pass

    put_in("axolotl.integrations.base", BasePlugin=BasePlugin)


def verl() -> None:
    """Of verl 0.9's ``utils/kernel/linear_cross_entropy.py``, and a module that has imported the function."""

    def linear_cross_entropy(
        hidden: Any, weight: Any, labels: Any, temperature: Any = 1.0, reduction: Any = "none", group: Any = None
    ) -> Any:
        raise AssertionError("verl's own needs a GPU")

    put_in("verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=linear_cross_entropy)
    put_in("verl.models.mcore.model_forward_fused", linear_cross_entropy=linear_cross_entropy)
