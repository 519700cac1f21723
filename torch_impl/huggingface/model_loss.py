"""What stands for a model's loss function while its patched forward runs.

Importing this imports torch's compiler, which must leave these functions alone.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.distributed import dtensors
from logitless.torch_impl.huggingface.adapters import plain_layer, product
from logitless.torch_impl.huggingface.lazy_logits import LazyLogits, refused
from logitless.torch_impl.huggingface.lm_head import (
    HOOKS,
    Recorder,
    check_probes,
    is_gathered,
    is_probes,
    logit_options,
    replaced,
    whole_shape,
)
from logitless.torch_impl.huggingface.patched import LossArguments

Result = TypeVar("Result")


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
        self.hooks = {name: getattr(head, name) for name in HOOKS} if is_gathered(head) else {}
        """Those that gather the head's weight: they run around the loss, and not where the head is recorded."""

    @property
    def vocab(self) -> int:
        """V: the classes of the head."""
        return whole_shape(plain_layer(self.head).weight)[0]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block the head only records its input."""
        with contextlib.ExitStack() as stack:
            for name in self.hooks:
                stack.enter_context(replaced(self.head, name, OrderedDict()))
            stack.enter_context(replaced(self.head, "forward", self.recorder))
            yield

    def _inside(self, function: Callable[[Tensor], Result], hidden: Tensor) -> Result:
        """``function(hidden)``, where the head's weight is whole: for a gathered head, in place of its forward."""
        if not self.hooks:
            return function(hidden)
        with contextlib.ExitStack() as stack:
            for name, hooks in self.hooks.items():
                stack.enter_context(replaced(self.head, name, hooks))
            stack.enter_context(replaced(self.head, "forward", function))
            return cast("Result", self.head(hidden))

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
        hidden, shifted = self._checked_hidden(logits, vocab_size), shift_labels if self.shifts else labels
        target = shifted_target(hidden, labels, shifted, ignore_index)

        def compute(hidden: Tensor) -> tuple[object, Tensor | None]:
            hidden, weight, bias = product(self.head, hidden)
            if self.extra_bias is not None:
                extra = self.extra_bias.to(weight.dtype)
                bias = extra if bias is None else bias + extra
            loss = linear_cross_entropy(
                hidden,
                weight,
                target,
                bias,
                ignore_index=ignore_index,
                normalizer=num_items_in_batch,
                **self.options,
                **self.loss_arguments,
            )
            if self._makes_logits():
                return loss, self._make_logits(hidden, weight, bias, logits.dtype)
            self.logits = self._lazy_logits(hidden, weight, bias, logits.dtype)
            return loss, None

        # Now, inside the model's forward: where the weight is sharded, only then it is whole.
        loss, made = self._inside(compute, hidden)
        self.logits = self.logits if made is None else made
        return loss

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

    def _refuses_logits(self) -> bool:
        return self.with_logits is False or (self.with_logits is None and self.owner.training)

    def _makes_logits(self) -> bool:
        """Whether the output's logits are made now."""
        if self._refuses_logits():
            return False
        # A weight that is gathered is whole inside of a forward alone.
        return bool(self.with_logits or self.hooks) or any("FSDP" in type(m).__name__ for m in self.owner.modules())

    def _lazy_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The output's logits: computed when something reads them, or never."""
        shape = (*hidden.shape[:-1], len(weight))
        if self._refuses_logits():
            # float32: what casts a model's 16-bit results has nothing to do with it.
            return LazyLogits.of(refused, shape, torch.float32, hidden.device)
        version, grad = weight._version, torch.is_grad_enabled()

        def later() -> Tensor:
            if weight._version != version:
                raise RuntimeError(
                    "logits: the LM head's weight was changed after the forward that these are of, allowed is to read "
                    "them before; patch(model, return_logits=True) makes them at once"
                )
            with torch.set_grad_enabled(grad):
                return self._make_logits(hidden, weight, bias, dtype)

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
