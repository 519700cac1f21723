"""TRL's trainers with our losses: ``patch_trl()`` before training, and nothing else changes.

TRL's trainers replace a model's forward, and get their numbers per token from hidden states in one function, which is
replaced here: ``_ChunkedLogProbFunction`` (from TRL 1.15 on by all trainers, before by asynchronous GRPO), and SFT's
``_chunked_cross_entropy_loss`` (TRL 1.4 to 1.14).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType

from logitless import spec
from logitless.planning import Preference, check_limits
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.integrations.trl_losses import Limits, LogProbInputs, LossInputs, cross_entropy, log_probs

# How to take back what was replaced; empty where nothing is.
_UNDO: list[Callable[[], None]] = []


def patch_trl(*, plan: Preference | None = None, memory_budget: int | None = None, backend: str | None = None) -> None:
    """Make TRL's trainers compute their losses by :func:`linear_log_probs` and :func:`linear_cross_entropy`.

        patch_trl()
        SFTTrainer(model, ...).train()  # or DPO, GRPO, KTO, RLOO

    For all models and trainers of this process, whether they are made before or after. The results are TRL's: the
    label's log-probability at the trainer's temperature and the entropy, per token and differentiable; and without
    gradient, where the trainer asks for them, log Σ p², the mean of the logits, and whether the label is the likeliest
    token. Those cost one more product, log Σ p² two. TRL's chunk sizes have no effect.

    In TRL before 1.15 only asynchronous GRPO and SFT's ``loss_type="chunked_nll"`` (its default from 1.7 on) are
    replaced, and a warning says so. Where a trainer uses the model's own loss, use :func:`patch`.

    Arguments: plan (a name), memory_budget, backend: as for :func:`linear_cross_entropy`.

    Raises ImportError without TRL; NotImplementedError for a TRL without these functions (before 1.4), or where they
    take what is not known here; RuntimeError where it was called already. Under DeepSpeed's ZeRO-3 a trainer's forward
    raises NotImplementedError.
    """
    check_limits(plan, memory_budget)
    spec.check_backend(backend, BACKENDS)
    if _UNDO:
        raise RuntimeError(
            "trl: its losses are replaced already, allowed is one patch_trl at a time: unpatch_trl first"
        )
    version = _module("trl").__version__
    utils, sft = _module("trl.trainer.utils"), _module("trl.trainer.sft_trainer")
    function = getattr(utils, "_ChunkedLogProbFunction", None)
    if function is None:
        raise NotImplementedError(
            f"trl: version {version} has no _ChunkedLogProbFunction that could be replaced, allowed is 1.4 or newer; "
            f"its SFTTrainer uses the model's own loss, which patch(model) replaces"
        )
    limits: Limits = {"plan": plan, "memory_budget": memory_budget, "backend": backend}
    log_prob_names = _checked_names(function.forward, LogProbInputs, version)
    loss = getattr(sft, "_chunked_cross_entropy_loss", None)
    loss_names = () if loss is None else _checked_names(loss, LossInputs, version)
    function.apply = _called_by(log_prob_names, functools.partial(log_probs, limits))
    _UNDO.append(lambda: delattr(function, "apply"))  # the class inherits one
    if loss is not None:
        vars(sft)["_chunked_cross_entropy_loss"] = _called_by(loss_names, functools.partial(cross_entropy, limits))
        _UNDO.append(lambda: setattr(sft, "_chunked_cross_entropy_loss", loss))
    if not hasattr(utils, "add_fused_lm_head"):
        warnings.warn(
            f"logitless: in TRL {version} patch_trl replaces asynchronous GRPO's loss and SFT's "
            f"loss_type='chunked_nll' alone; the other trainers make full logits there: TRL 1.15 or newer does not",
            stacklevel=2,
        )


def unpatch_trl() -> None:
    """Take back :func:`patch_trl`. Raises RuntimeError where there is nothing to take back."""
    if not _UNDO:
        raise RuntimeError("trl: its losses are not replaced, allowed is unpatch_trl after patch_trl")
    while _UNDO:
        _UNDO.pop()()


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _checked_names(theirs: Callable[..., object], known: type, version: str) -> tuple[str, ...]:
    """The names of a function's arguments, in the order of this TRL. Raises NotImplementedError for an unknown one."""
    names = tuple(name for name in inspect.signature(theirs).parameters if name != "ctx")
    unknown = [name for name in names if name not in known.__annotations__]
    if unknown:
        raise NotImplementedError(
            f"trl: in version {version} {theirs.__qualname__} takes {', '.join(unknown)}, which is not known here, "
            f"allowed are {', '.join(known.__annotations__)}: use TRL 1.16"
        )
    return names


def _called_by(names: tuple[str, ...], ours: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        return ours(**dict(zip(names, arguments, strict=False)), **named)

    return call
