"""What stands for a model's loss function while its patched forward runs.

Importing this imports torch's compiler, which must leave these functions alone.
"""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import Tensor, nn

from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.distributed import dtensors
from logitless.torch_impl.huggingface.adapters import plain_layer, product
from logitless.torch_impl.huggingface.lazy_logits import LazyLogits, refused
from logitless.torch_impl.huggingface.lm_head import Recorder, check_probes, is_probes, logit_options
from logitless.torch_impl.huggingface.patched import LossArguments


class ModelLoss:
    """Stands for a model's loss function in one forward: the same arguments, but probes in the logits' place."""

    def __init__(
        self, owner: nn.Module, head: nn.Module, recorder: Recorder, loss_arguments: LossArguments,
        with_logits: bool | None,
    ) -> None:  # fmt: skip
        self.owner, self.head, self.recorder = owner, head, recorder
        self.loss_arguments, self.with_logits = loss_arguments, with_logits
        self.options = logit_options(owner)
        self.probes: Tensor | None = None
        """The probes after what the model does to its logits."""
        self.logits: Tensor | None = None
        self.shifts = True
        """Whether a label is the target of the position before it."""
        self.extra_bias: Tensor | None = None
        """[V], what the model adds to its head's logits."""

    @property
    def vocab(self) -> int:
        """V: the classes of the head."""
        return len(cast(Tensor, plain_layer(self.head).weight))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: object,
    ) -> object:
        """transformers' ForCausalLMLoss or ForMaskedLMLoss, which take other arguments and do not use them either."""
        # Now, inside the model's forward: where the weight is sharded, only then it is whole.
        hidden, weight, bias = product(self.head, self._checked_hidden(logits, vocab_size))
        if self.extra_bias is not None:
            extra = self.extra_bias.to(weight.dtype)
            bias = extra if bias is None else bias + extra
        if not self.shifts:
            shift_labels = labels
        self.logits = self._logits(hidden, weight, bias, logits.dtype)
        return linear_cross_entropy(
            hidden,
            weight,
            shifted_target(hidden, labels, shift_labels, ignore_index),
            bias,
            ignore_index=ignore_index,
            normalizer=num_items_in_batch,
            **self.options,
            **self.loss_arguments,
        )

    def _checked_hidden(self, logits: Tensor, vocab_size: int | None) -> Tensor:
        """What was recorded. Raises if the model did more with its logits than a scale and a softcap, or cut them."""
        hidden, name = self.recorder.hidden, type(self.owner).__name__
        if hidden is None or self.probes is not None:
            raise NotImplementedError(
                f"model: {name} computes a loss of other logits than its LM head's, or more than one, allowed is one "
                f"loss of these"
            )
        if not is_probes(logits) or logits.shape[:-1] != hidden.shape[:-1]:
            raise NotImplementedError(
                f"model: {name} cuts or rearranges its logits before its loss, allowed is one target for each of them"
            )
        if vocab_size != self.vocab:
            raise NotImplementedError(
                f"model: {name} computes its loss over {vocab_size} classes, allowed are all {self.vocab} of its head"
            )
        check_probes(self.options, logits)
        self.probes = logits
        return hidden

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The output's logits: computed now, when something reads them, or never."""
        shape = (*hidden.shape[:-1], len(weight))
        if self.with_logits is False or (self.with_logits is None and self.owner.training):
            # float32: what casts a model's 16-bit results has nothing to do with it.
            return LazyLogits.of(refused, shape, torch.float32, hidden.device)
        make = functools.partial(self._make_logits, hidden, weight, bias, dtype)
        # A weight that FSDP has gathered is whole inside of the forward alone.
        if self.with_logits or any("FSDP" in type(module).__name__ for module in self.owner.modules()):
            return make()
        version, grad = weight._version, torch.is_grad_enabled()

        def later() -> Tensor:
            if weight._version != version:
                raise RuntimeError(
                    "logits: the LM head's weight was changed after the forward that these are of, allowed is to read "
                    "them before; patch(model, return_logits=True) makes them at once"
                )
            with torch.set_grad_enabled(grad):
                return make()

        return LazyLogits.of(later, shape, dtype, hidden.device)

    def _make_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """z = f(hidden weightᵀ + bias), [..., V], rounded where models round it."""
        z = _linear(hidden, weight, bias)
        scale, softcap = self.options["logit_scale"], self.options["softcap"]
        if scale != 1.0:
            z = z * scale
        z = z if softcap is None else torch.tanh(z / softcap) * softcap
        return z.to(dtype)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden weightᵀ + bias; of a weight that tensor parallelism has cut, all of it on every rank."""
    if not dtensors.is_dtensor(weight) or dtensors.is_dtensor(hidden):
        return nn.functional.linear(hidden, weight, bias)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    whole = DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)
    z = nn.functional.linear(whole, weight, bias)
    assert isinstance(z, DTensor)
    return z.full_tensor()


def shifted_target(hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The target of every position: the label after it, and none for the last; or what the caller has shifted."""
    name, ids = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if ids is None or ids.numel() != hidden.shape[:-1].numel():
        shape = None if ids is None else tuple(ids.shape)
        raise ValueError(
            f"{name}: got shape {shape}, allowed is one label for each of {tuple(hidden.shape[:-1])} logits"
        )
    if shift_labels is None:
        ids = nn.functional.pad(ids, (0, 1), value=ignore_index)[..., 1:]
    return ids.reshape(hidden.shape[:-1]).to(hidden.device)
