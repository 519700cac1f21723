"""The forward of a patched model. Importing this imports torch's compiler, which must leave these functions alone."""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from logitless.torch_impl.huggingface.adapters import plain_layer
from logitless.torch_impl.huggingface.inline_loss import INLINE, computes_its_loss, forward_with_loss, is_inline
from logitless.torch_impl.huggingface.lm_head import Recorder, checked_head, is_gathered, is_probes, replaced
from logitless.torch_impl.huggingface.model_loss import ModelLoss
from logitless.torch_impl.huggingface.patched import MARK, TRL, TRL_REMEDY, WATCHED, Patch, module_of

# What transformers computes where a language model is given labels: the losses that are replaced, and whether they
# shift the labels.
LOSSES: dict[tuple[object, object], bool] = {
    ("transformers.loss.loss_utils", "ForCausalLMLoss"): True,
    ("transformers.loss.loss_utils", "ForMaskedLMLoss"): False,
}

# What a model's forward is called with.
Arguments = tuple[object, ...]
Named = dict[str, object]


def make_forward(chosen: Patch) -> Callable[..., object]:
    """The method that stands for the owner's forward.

    A function, bound as any method is: it is copied with the model, accelerate can wrap it, and it is pickled by its
    name, so that a saved model is the plain one.
    """
    # One for each model that has this forward, which copies have too, and the same in all its calls: torch.compile
    # compiles the model's forward for this one object.
    recorders: weakref.WeakKeyDictionary[nn.Module, Recorder] = weakref.WeakKeyDictionary()

    # Outside of torch.compile's graphs itself, unlike the model's forward that it calls.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def run(owner: nn.Module, arguments: Arguments, named: Named) -> object:
        before = chosen.before
        original = types.MethodType(type(owner).forward, owner) if before is None else before
        if owner in WATCHED:
            WATCHED[owner].ran = True
        if _labels(chosen.signature, arguments, named) is None:
            _warn_full_logits(owner)
            return original(*arguments, **named)
        recorder = recorders.setdefault(owner, Recorder())
        try:
            return _forward_with_loss(owner, original, chosen, recorder, arguments, named)
        finally:
            recorder.hidden = None

    def forward(self: nn.Module, *arguments: object, **named: object) -> object:
        return run(self, arguments, named)

    # Trainer reads which arguments a model takes. No __wrapped__: who unwraps all layers would take this one off too.
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [receiver, *chosen.signature.parameters.values()]
    forward.__signature__ = chosen.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(forward, MARK, (forward, chosen))
    return forward


def _labels(signature: inspect.Signature, arguments: Arguments, named: Named) -> object:
    if "labels" in named or not arguments:
        return named.get("labels")
    try:
        return signature.bind_partial(*arguments, **named).arguments.get("labels")
    except TypeError:  # a wrong call: the model's own forward says so
        return None


def _forward_with_loss(
    owner: nn.Module,
    original: Callable[..., object],
    chosen: Patch,
    recorder: Recorder,
    arguments: Arguments,
    named: Named,
) -> object:
    """The model's own forward with head and loss function replaced, and then its output with logits or without."""
    head = checked_head(owner.get_submodule(chosen.head_name))
    check_model(owner, head)
    if isinstance(head.__dict__.get("forward"), Recorder):
        raise RuntimeError(
            "model: its LM head is recorded already, by capture_lm_head or another thread (torch.nn.DataParallel), "
            "allowed is one forward at a time"
        )
    loss = ModelLoss(owner, head, recorder, chosen.loss_arguments, chosen.return_logits)
    inline = is_inline(owner)
    loss.shifts = not inline and LOSSES[_loss_of(owner)]
    try:
        with loss.recording(), replaced(owner, "_loss_function", loss):
            if inline:
                output = forward_with_loss(owner, original, loss, chosen.signature.bind(*arguments, **named))
            else:
                output = original(*arguments, **named)
    except NotImplementedError:
        raise
    except Exception as error:
        if recorder.hidden is None or loss.probes is not None:
            raise
        raise NotImplementedError(
            f"model: {type(owner).__name__} computes its loss itself, or does more with its logits before than a scale "
            f"and a softcap, which failed on the probes in their place ({type(error).__name__}: {error}); allowed is a "
            f"model that gives its logits to its loss_function"
        ) from error
    if loss.probes is None:
        raise NotImplementedError(
            f"model: the forward of {type(owner).__name__} with labels did not call its loss_function, allowed is a "
            f"model whose loss that is"
        )
    return _with_logits(output, loss.probes, loss.logits)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_logits(output: object, probes: Tensor, logits: Tensor | None) -> object:
    """A model's output with logits in the probes' place, or without them, as transformers leaves out what is None."""
    if isinstance(output, dict):
        entries = {key: logits if value is probes or key == "logits" else value for key, value in output.items()}
        return type(output)(**{key: value for key, value in entries.items() if value is not None})
    if isinstance(output, tuple):
        values = (logits if value is probes or is_probes(value) else value for value in output)
        return tuple(value for value in values if value is not None)
    raise NotImplementedError(f"model: its forward gave {type(output).__name__}, allowed are a dict and a tuple")


def check_model(owner: nn.Module, head: nn.Module) -> None:
    """Raise NotImplementedError unless head and loss are those that are replaced."""
    layer = plain_layer(head)
    gathered = layer is head and is_gathered(head)
    if any(
        one._backward_hooks
        or one._backward_pre_hooks
        or (not gathered and (one._forward_hooks or one._forward_pre_hooks))
        for one in {head, layer}
    ):
        raise NotImplementedError(
            "model: its LM head has forward or backward hooks, which would see no logits, allowed is a head without, "
            "or with those alone by which FSDP2 or DeepSpeed gather its weight: remove the others first"
        )
    if not isinstance(getattr(type(owner), "loss_function", None), property):
        raise NotImplementedError(
            f"model: {type(owner).__name__} has no loss_function, allowed is a causal language model of transformers"
        )
    if is_inline(owner):
        return
    if computes_its_loss(owner):
        raise NotImplementedError(
            f"model: {type(owner).__name__} computes its loss itself, allowed is a model that calls its loss_function, "
            f"or one of {', '.join(sorted(INLINE))}"
        )
    if _loss_of(owner) not in LOSSES:
        own = owner.loss_function
        raise NotImplementedError(
            f"model: its loss_function is {getattr(own, '__qualname__', own)!r}, allowed is transformers' "
            f"ForCausalLMLoss or ForMaskedLMLoss, which is the loss that is computed here"
        )


def _loss_of(owner: nn.Module) -> tuple[object, object]:
    own = owner.loss_function
    return getattr(own, "__module__", None), getattr(own, "__name__", None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def watch_forward(owner: nn.Module, _: object, named: Named, __: object) -> None:
    """After every forward of the owner: whether one with labels was the patched one. A copy of the model has none."""
    watch = WATCHED.get(owner)
    if watch is None:
        return
    ran, watch.ran = watch.ran, False
    if not ran and not watch.bypassed and named.get("labels") is not None:
        watch.bypassed = True
        by = module_of(owner.__dict__.get("forward")) or "other code"
        warnings.warn(
            f"logitless: {by} has replaced the forward of the patched {type(owner).__name__}: its loss is not the one "
            f"of patch, which has no effect here{TRL_REMEDY if by.split('.')[0] == 'trl' else ''}",
            stacklevel=2,
        )


def _warn_full_logits(owner: nn.Module) -> None:
    """A forward without labels in training: somebody else's loss, of full logits."""
    watch = WATCHED.get(owner)
    if watch is None or watch.full or not owner.training or not torch.is_grad_enabled():
        return
    watch.full = True
    warnings.warn(
        f"logitless: a forward of the patched {type(owner).__name__} without labels makes full logits in training, as "
        f"Trainer does with label_smoothing_factor or compute_loss_func: use patch(model, label_smoothing=...), and "
        f"let the model compute its loss. For TRL's DPO and GRPO use TRL 1.15 or newer, and {TRL}()",
        stacklevel=2,
    )
