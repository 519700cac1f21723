"""Axolotl's plugin: models compute their loss by :func:`logitless.torch_impl.patch`, TRL's trainers by patch_trl.

plugins:
  - logitless.torch_impl.integrations.axolotl.LogitlessPlugin
logitless_memory_budget: 2147483648  # or logitless_plan: lean; may be left out, as may logitless_z_loss
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel
from torch import nn

from logitless.planning import Preference
from logitless.torch_impl.huggingface.patch import patch
from logitless.torch_impl.integrations.trl import patch_trl

if TYPE_CHECKING:

    class BasePlugin:
        """What is used of Axolotl's, which is not always installed."""
else:
    from axolotl.integrations.base import BasePlugin

# Axolotl's own options that replace the same loss.
OTHERS = ("cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy", "liger_cross_entropy")


class Configuration(Protocol):
    """What is read of a run's configuration, where a missing entry is None."""

    def get(self, name: str, /) -> object: ...


class LogitlessArgs(BaseModel):
    """The plugin's entries in a configuration; their meanings are those of :func:`logitless.torch_impl.patch`."""

    logitless_plan: Preference | None = None
    logitless_memory_budget: int | None = None
    logitless_z_loss: float = 0.0
    logitless_backend: str | None = None


class LogitlessPlugin(BasePlugin):
    """Patches the model after it was loaded, adapters included; with ``rl`` TRL's losses, before."""

    def get_input_args(self) -> str:
        """Where the plugin's entries are."""
        return f"{LogitlessArgs.__module__}.{LogitlessArgs.__qualname__}"

    def pre_model_load(self, cfg: Configuration) -> None:
        """Replace TRL's losses for ``rl``. Raises ValueError beside Axolotl's other options for this loss."""
        taken = [name for name in OTHERS if cfg.get(name)]
        if taken:
            raise ValueError(f"{taken[0]}: got True beside LogitlessPlugin, allowed is one of them: set it to false")
        if cfg.get("rl"):
            args = _args(cfg)
            if args.logitless_z_loss:
                raise ValueError("logitless_z_loss: got a value beside rl, allowed is 0: TRL's losses have none")
            patch_trl(
                plan=args.logitless_plan, memory_budget=args.logitless_memory_budget, backend=args.logitless_backend
            )

    def post_model_load(self, cfg: Configuration, model: nn.Module) -> None:
        """Patch the model, in place; with ``rl`` nothing. Raises as :func:`logitless.torch_impl.patch`."""
        if not cfg.get("rl"):
            args = _args(cfg)
            patch(
                model,
                plan=args.logitless_plan,
                memory_budget=args.logitless_memory_budget,
                z_loss=args.logitless_z_loss,
                backend=args.logitless_backend,
            )


def _args(cfg: Configuration) -> LogitlessArgs:
    given = {name: cfg.get(name) for name in LogitlessArgs.model_fields}
    return LogitlessArgs.model_validate({name: value for name, value in given.items() if value is not None})
