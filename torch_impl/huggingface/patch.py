"""Hugging Face models whose forward with labels computes its loss without logits.

``patch(model)`` keeps the model's own forward. While that runs with labels, the LM head is a recorder of its input and
the model's loss function is a linear cross-entropy of what was recorded: no architecture is copied, and whatever the
model does around the loss (a mixture's auxiliary loss, caches, output tuples) stays its own.
"""

from __future__ import annotations

import inspect
import types

from torch import nn

from logitless import spec
from logitless.planning import Preference, check_limits
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.huggingface.lm_head import find_head
from logitless.torch_impl.huggingface.patched import (
    TRL_REMEDY,
    WATCHED,
    LossArguments,
    Patch,
    Watch,
    module_of,
    patch_of,
)


def patch(
    model: nn.Module,
    *,
    return_logits: bool | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    plan: Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> nn.Module:
    """Make ``model(input_ids, labels=labels)`` compute its loss by :func:`linear_cross_entropy`, without logits.

        patch(model)
        loss = model(input_ids, labels=labels).loss

    The loss is transformers' ForCausalLMLoss: the mean over labels that are not ignore_index, each label the target of
    the position before it (or ``shift_labels``, not shifted), divided by ``num_items_in_batch`` where that is given
    (Trainer does); 0, not NaN, where no label counts. What the model adds to it, as mixtures of experts do, is added
    still. Masked language models and encoder-decoders have their own loss, of labels that are not shifted
    (:mod:`.inline_loss`). Gradients go to the head's own parameters, tied or not. A forward without labels, and so
    generation, is untouched.

    The head is found and its logit scale and softcap are read as :func:`capture_lm_head` does, in every forward anew,
    and every forward is checked: a model that does anything else with its logits is refused.

    Arguments:
        model: a language model of transformers, or one inside a wrapper (PEFT), changed in place.
        return_logits: whether a forward with labels also makes logits (one product more, and their memory). None: in
            eval mode only, for metrics, when something reads them. Where they are not made, ``output.logits`` has their
            shape, and what reads its elements is a RuntimeError that says so.
        label_smoothing, z_loss, plan, memory_budget, backend: as for :func:`linear_cross_entropy`, in eval mode too.
            plan is a name. The smallest budget grows with the tokens of a batch, so one that nothing fits is refused in
            the forward.

    A trainer that replaces the model's forward afterwards, as TRL's does (add_fused_lm_head), goes around the loss that
    is replaced here: a warning says so once, and patch refuses a model whose forward is TRL's already. What replaces
    TRL's own losses is :func:`logitless.torch_impl.integrations.trl.patch_trl`. A forward
    without labels in training makes full logits, which Trainer's label_smoothing_factor and compute_loss_func ask for:
    another warning says that once.

    Returns the model. Raises TypeError or ValueError for an argument; NotImplementedError, with the reason, for a model
    whose head is not a plain linear map, has hooks of its own, or whose loss is another, here or in its first forward
    with labels; RuntimeError where the model is patched already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed is a torch.nn.Module")
    if return_logits is not None and not isinstance(return_logits, bool):
        raise TypeError(f"return_logits: got {return_logits!r}, allowed are True, False and None")
    spec.LossOptions(label_smoothing=label_smoothing, z_loss=z_loss)
    check_limits(plan, memory_budget)
    spec.check_backend(backend, BACKENDS)
    from logitless.torch_impl.huggingface import forward as patched_forward  # it imports torch's compiler

    owner, head = find_head(model)
    patched_forward.check_model(owner, head)
    forward = owner.__dict__.get("forward")
    if any(patch_of(layer) is not None for layer in _layers(forward)):
        raise RuntimeError("model: got one that is patched already, allowed is one patch at a time: unpatch it first")
    _refuse_trl(owner, forward)
    signature = inspect.signature(owner.forward)
    if "labels" not in signature.parameters:
        raise NotImplementedError(f"model: the forward of {type(owner).__name__} takes no labels, so it has no loss")
    head_name = next(name for name, module in owner.named_modules() if module is head)
    loss_arguments: LossArguments = {
        "label_smoothing": label_smoothing, "z_loss": z_loss, "plan": plan, "memory_budget": memory_budget,
        "backend": backend,
    }  # fmt: skip
    chosen = Patch(head_name, return_logits, loss_arguments, forward, signature)
    owner.__dict__["forward"] = types.MethodType(patched_forward.make_forward(chosen), owner)
    WATCHED[owner] = Watch(owner.register_forward_hook(patched_forward.watch_forward, with_kwargs=True))
    return model


def _refuse_trl(owner: nn.Module, forward: object) -> None:
    if str(module_of(forward)).split(".")[0] == "trl":
        raise NotImplementedError(
            f"model: the forward of {type(owner).__name__} is TRL's already (add_fused_lm_head): it computes "
            f"log-probabilities of its own and never calls the loss that patch replaces; allowed is a trainer that "
            f"takes the model's loss (transformers.Trainer){TRL_REMEDY}"
        )


def unpatch(model: nn.Module) -> nn.Module:
    """Take back :func:`patch`: the model is as before it. Returns the model.

    Raises TypeError for what is not a module; RuntimeError where the model is not patched, or where something was put
    over the patched forward since (accelerate's mixed precision: take it off first).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed is a torch.nn.Module")
    covered = False
    for owner in model.modules():
        forward = owner.__dict__.get("forward")
        found = patch_of(forward)
        if found is None:
            covered = covered or any(patch_of(layer) is not None for layer in _layers(forward))
        else:
            if found.before is None:
                del owner.__dict__["forward"]
            else:
                owner.__dict__["forward"] = found.before
            watch = WATCHED.pop(owner, None)
            if watch is not None:
                watch.handle.remove()
            return model
    raise RuntimeError(
        "model: its patched forward was wrapped since, allowed is to take that off first (accelerate: "
        "accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        if covered
        else "model: got one that is not patched"
    )


def _layers(forward: object) -> list[object]:
    """A forward and what it wraps, as functools.wraps leaves it to be found."""
    layers = []
    while forward is not None:
        layers.append(forward)
        forward = getattr(forward, "__wrapped__", None)
    return layers
