"""A GPTModel of megatron-core whose forward with labels makes no logits, in versions with and without other seams.

While the model runs with labels, its output layer records what it is given, and ``compute_language_model_loss``
computes the loss from that: once for the main loss, and once for every depth of multi-token prediction.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from logitless import spec
from logitless.planning import Preference, check_limits
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.huggingface.lm_head import PROBES
from logitless.torch_impl.integrations.megatron import ColumnParallelLinear
from logitless.torch_impl.integrations.megatron_loss import head_loss, scale_of
from logitless.torch_impl.integrations.options import Options

LOSS, MARK = "compute_language_model_loss", "logitless_megatron"


class _Head:
    """A patched model's output layer and loss, and what the one leaves for the other."""

    def __init__(self, owner: nn.Module, layer: ColumnParallelLinear, limits: Options) -> None:
        self.layer, self.limits = layer, limits
        self.signature, self.own_forward = inspect.signature(owner.forward), layer.forward
        self.own_loss: Callable[[Tensor, Tensor], Tensor] = getattr(owner, LOSS)
        self.scored = self.warned = False
        self.waiting: tuple[Tensor, Tensor | None] | None = None
        self.handle = owner.register_forward_pre_hook(self.begins, with_kwargs=True)

    def begins(self, _: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        self.scored = self.signature.bind_partial(*arguments, **named).arguments.get("labels") is not None
        self.waiting = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, *given: object, **named: object
    ) -> tuple[Tensor, Tensor | None]:
        """The output layer's: its logits, or in a forward with labels probes in their place."""
        if not self.scored:
            return self.own_forward(input_, weight, *given, **named)
        if self.waiting is not None:
            raise NotImplementedError("model: it runs its output layer twice before a loss, allowed is a loss of each")
        self.waiting = input_, weight
        return torch.tensor(PROBES, dtype=torch.float32), None

    def loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """compute_language_model_loss [b, s]: of what was recorded, or, with a warning, of logits made elsewhere."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            if not self.warned:
                warnings.warn("logitless: the patched model computes a loss of full logits here", stacklevel=2)
            self.warned = True
            return self.own_loss(labels, logits)
        if logits.shape != (len(PROBES),):
            raise NotImplementedError("model: it cuts or rearranges its logits before its loss, allowed is a factor")
        options: Options = {**self.limits, "logit_scale": scale_of(logits)}
        return head_loss(self.layer, *waiting, labels, **options)


def patch_megatron(
    model: nn.Module, *, plan: Preference | None = None, memory_budget: int | None = None, backend: str | None = None
) -> nn.Module:
    """Make ``model(tokens, positions, mask, labels=labels)`` compute its losses [b, s] without logits.

    model: a GPTModel of megatron-core, or what wraps one; changed in place. A pipeline stage without an output layer
    stays as it is. A forward without labels is untouched. Losses and gradients are those of the model's own path
    (``vocab_parallel_cross_entropy``), with tensor and sequence parallelism, shared embeddings and multi-token
    prediction; a label of −100 has a loss of 0. The others: as for :func:`linear_cross_entropy`; plan is a name.

    Returns the model. Raises TypeError for what is not a module; NotImplementedError for a model without these methods,
    and, from the forward, where it does more with its logits than to scale them, or as
    :func:`.megatron_loss.head_loss`; RuntimeError where it is patched already.
    """
    check_limits(plan, memory_budget)
    spec.check_backend(backend, BACKENDS)
    owner = _owner(model)
    if owner is None:
        return model
    if MARK in owner.__dict__:
        raise RuntimeError("model: got one that is patched already, allowed is one patch at a time")
    layer = getattr(owner, "output_layer", None)
    if not isinstance(layer, ColumnParallelLinear):
        raise NotImplementedError(f"model: its output_layer is {type(layer).__name__}, allowed is ColumnParallelLinear")
    head = _Head(owner, layer, {"plan": plan, "memory_budget": memory_budget, "backend": backend})
    layer.__dict__["forward"] = head.forward
    owner.__dict__ |= {LOSS: head.loss, MARK: head}
    return model


def unpatch_megatron(model: nn.Module) -> nn.Module:
    """Take back :func:`patch_megatron`. Returns the model. Raises RuntimeError where it is not patched."""
    owner = _owner(model)
    if owner is None:
        return model
    head = owner.__dict__.pop(MARK, None)
    if head is None:
        raise RuntimeError("model: got one that is not patched")
    head.handle.remove()
    del head.layer.__dict__["forward"], owner.__dict__[LOSS]
    return model


def _owner(model: object) -> nn.Module | None:
    """The module that runs output layer and loss; None on a pipeline stage that has neither."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed is a torch.nn.Module")
    owners = [module for module in model.modules() if callable(getattr(module, LOSS, None))]
    if len(owners) != 1:
        raise NotImplementedError(
            f"model: found {len(owners)} modules with {LOSS} in {type(model).__name__}, allowed is one GPTModel"
        )
    return owners[0] if getattr(owners[0], "post_process", True) else None
