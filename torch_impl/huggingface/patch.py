"""Hugging Face models whose forward with labels computes its loss without logits.

``patch(model)`` keeps the model's own forward. While that runs with labels, the LM head is a recorder of its input and
the model's loss function is a linear cross-entropy of what was recorded: no architecture is copied, and whatever the
model does around the loss (a mixture's auxiliary loss, caches, output tuples) stays its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logitless import spec
from logitless.planning import check_memory_budget
from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.compiled import tracing
from logitless.torch_impl.distributed import dtensors
from logitless.torch_impl.huggingface.lazy_logits import LazyLogits, refused
from logitless.torch_impl.huggingface.lm_head import (
    Recorder,
    check_head,
    check_probes,
    find_head,
    is_probes,
    logit_options,
    replaced,
)

# What transformers computes where a causal language model is given labels: the one loss that is replaced.
CAUSAL_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")

# Where a function that patch made keeps its Patch.
_MARK = "logitless_patch"


@dataclasses.dataclass(frozen=True)
class Patch:
    """What patch was asked for, and what unpatch needs."""

    head_name: str
    """The head's path inside the module that runs it, so that a copy of the model finds its own head."""
    return_logits: bool | None
    loss_options: dict[str, Any]
    before: Any
    """The instance's own forward, or None where it is its class's."""
    signature: inspect.Signature


def patch(
    model: nn.Module,
    *,
    return_logits: bool | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> nn.Module:
    """Make ``model(input_ids, labels=labels)`` compute its loss by :func:`linear_cross_entropy`, without logits.

        patch(model)
        loss = model(input_ids, labels=labels).loss

    The loss is transformers' ForCausalLMLoss: the mean over labels that are not ignore_index, each label the target of
    the position before it (or ``shift_labels``, not shifted), divided by ``num_items_in_batch`` where that is given
    (Trainer does); 0, not NaN, where no label counts. What the model adds to it, as mixtures of experts do, is added
    still. Gradients go to the head's own parameters, tied or not. A forward without labels, and so generation, is
    untouched.

    The head is found and its logit scale and softcap are read as :func:`capture_lm_head` does, in every forward anew,
    and every forward is checked: a model that does anything else with its logits is refused.

    Arguments:
        model: a causal language model of transformers, or one inside a wrapper (PEFT), changed in place.
        return_logits: whether a forward with labels also makes logits (one product more, and their memory). None: in
            eval mode only, for metrics, when something reads them. Where they are not made, ``output.logits`` has their
            shape, and what reads its elements is a RuntimeError that says so.
        label_smoothing, z_loss, memory_budget, backend: as for :func:`linear_cross_entropy`, in eval mode too. The
            smallest budget grows with the tokens of a batch, so one that nothing fits is refused in the forward.

    A trainer that replaces the model's forward afterwards, as TRL's does (add_fused_lm_head), goes around the loss that
    is replaced here: a warning says so once, and patch refuses a model whose forward is TRL's already. A forward
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
    check_memory_budget(memory_budget)
    spec.check_backend(backend, BACKENDS)
    owner, head = find_head(model)
    _check(owner, head)
    forward = owner.__dict__.get("forward")
    if any(_patch_of(layer) is not None for layer in _layers(forward)):
        raise RuntimeError("model: got one that is patched already, allowed is one patch at a time: unpatch it first")
    _refuse_trl(owner, forward)
    signature = inspect.signature(owner.forward)
    if "labels" not in signature.parameters:
        raise NotImplementedError(f"model: the forward of {type(owner).__name__} takes no labels, so it has no loss")
    head_name = next(name for name, module in owner.named_modules() if module is head)
    loss_options = {
        "label_smoothing": label_smoothing, "z_loss": z_loss, "memory_budget": memory_budget, "backend": backend
    }  # fmt: skip
    chosen = Patch(head_name, return_logits, loss_options, forward, signature)
    owner.__dict__["forward"] = types.MethodType(_make_forward(chosen), owner)
    _WATCHED[owner] = _Watch(owner.register_forward_hook(_watch, with_kwargs=True))
    return model


@dataclasses.dataclass
class _Watch:
    """What became of a patched model's forwards."""

    handle: Any
    ran: bool = False
    """Whether the patched forward has run since the last look."""
    bypassed: bool = False
    """Whether the warnings were given."""
    full: bool = False


_WATCHED: weakref.WeakKeyDictionary[nn.Module, _Watch] = weakref.WeakKeyDictionary()


@tracing.outside_graphs
def _watch(owner: nn.Module, _: Any, named: dict[str, Any], __: Any) -> None:
    """After every forward of the owner: whether one with labels was the patched one. A copy of the model has none."""
    watch = _WATCHED.get(owner)
    if watch is None:
        return
    ran, watch.ran = watch.ran, False
    if not ran and not watch.bypassed and named.get("labels") is not None:
        watch.bypassed = True
        by = _module_of(owner.__dict__.get("forward")) or "other code"
        warnings.warn(
            f"logitless: {by} has replaced the forward of the patched {type(owner).__name__}: its loss is not the one "
            f"of patch, which has no effect here",
            stacklevel=2,
        )


def _module_of(forward: Any) -> str | None:
    """The module that a function was written in, whatever functools.wraps has copied to it."""
    function = getattr(forward, "__func__", forward)
    return getattr(function, "__globals__", {}).get("__name__")


def _refuse_trl(owner: nn.Module, forward: Any) -> None:
    if str(_module_of(forward)).split(".")[0] == "trl":
        raise NotImplementedError(
            f"model: the forward of {type(owner).__name__} is TRL's already (add_fused_lm_head): it computes "
            f"log-probabilities of its own and never calls the loss that patch replaces; allowed is a trainer that "
            f"takes the model's loss (transformers.Trainer)"
        )


def _warn_full_logits(owner: nn.Module) -> None:
    """A forward without labels in training: somebody else's loss, of full logits."""
    watch = _WATCHED.get(owner)
    if watch is None or watch.full or not owner.training or not torch.is_grad_enabled():
        return
    watch.full = True
    warnings.warn(
        f"logitless: a forward of the patched {type(owner).__name__} without labels makes full logits in training, as "
        f"Trainer does with label_smoothing_factor or compute_loss_func: use patch(model, label_smoothing=...), and "
        f"let the model compute its loss",
        stacklevel=2,
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
        found = _patch_of(forward)
        if found is None:
            covered = covered or any(_patch_of(layer) is not None for layer in _layers(forward))
        else:
            if found.before is None:
                del owner.__dict__["forward"]
            else:
                owner.__dict__["forward"] = found.before
            watch = _WATCHED.pop(owner, None)
            if watch is not None:
                watch.handle.remove()
            return model
    raise RuntimeError(
        "model: its patched forward was wrapped since, allowed is to take that off first (accelerate: "
        "accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        if covered
        else "model: got one that is not patched"
    )


def _layers(forward: Any) -> list[Any]:
    """A forward and what it wraps, as functools.wraps leaves it to be found."""
    layers = []
    while forward is not None:
        layers.append(forward)
        forward = getattr(forward, "__wrapped__", None)
    return layers


def _patch_of(forward: Any) -> Patch | None:
    """The patch whose forward this is; functools.wraps copies attributes to wrappers, but a mark knows its function."""
    function, found = getattr(forward, _MARK, (None, None))
    return found if function is not None and function is getattr(forward, "__func__", forward) else None


# ---------------------------------------------------------------------------------------------------------------------
# The forward


def _make_forward(chosen: Patch) -> Callable[..., Any]:
    """The method that stands for the owner's forward.

    A function, bound as any method is: it is copied with the model, accelerate can wrap it, and it is pickled by its
    name, so that a saved model is the plain one.
    """
    # One for each model that has this forward, which copies have too, and the same in all its calls: torch.compile
    # compiles the model's forward for this one object.
    recorders: weakref.WeakKeyDictionary[nn.Module, Recorder] = weakref.WeakKeyDictionary()

    # Outside of torch.compile's graphs itself, unlike the model's forward that it calls.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def run(owner: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = chosen.before
        original = types.MethodType(type(owner).forward, owner) if before is None else before
        if owner in _WATCHED:
            _WATCHED[owner].ran = True
        if _labels(chosen.signature, arguments, named) is None:
            _warn_full_logits(owner)
            return original(*arguments, **named)
        recorder = recorders.setdefault(owner, Recorder())
        try:
            return _forward_with_loss(owner, original, chosen, recorder, arguments, named)
        finally:
            recorder.hidden = None

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return run(self, arguments, named)

    # Trainer reads which arguments a model takes. No __wrapped__: who unwraps all layers would take this one off too.
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [receiver, *chosen.signature.parameters.values()]
    forward.__signature__ = chosen.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(forward, _MARK, (forward, chosen))
    return forward


def _labels(signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if "labels" in named or not arguments:
        return named.get("labels")
    try:
        return signature.bind_partial(*arguments, **named).arguments.get("labels")
    except TypeError:  # a wrong call: the model's own forward says so
        return None


def _forward_with_loss(
    owner: nn.Module,
    original: Callable[..., Any],
    chosen: Patch,
    recorder: Recorder,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """The model's own forward with head and loss function replaced, and then its output with logits or without."""
    head = owner.get_submodule(chosen.head_name)
    _check(owner, head)
    if isinstance(head.__dict__.get("forward"), Recorder):
        raise RuntimeError(
            "model: its LM head is recorded already, by capture_lm_head or another thread (torch.nn.DataParallel), "
            "allowed is one forward at a time"
        )
    loss = _Loss(owner, head, recorder, chosen.loss_options, chosen.return_logits)
    try:
        with replaced(head, "forward", recorder), replaced(owner, "_loss_function", loss):
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


class _Loss:
    """Stands for a model's loss function in one forward: the same arguments, but probes in the logits' place."""

    def __init__(
        self, owner: nn.Module, head: nn.Module, recorder: Recorder, loss_options: dict[str, Any],
        with_logits: bool | None,
    ) -> None:  # fmt: skip
        self.owner, self.head, self.recorder = owner, head, recorder
        self.loss_options, self.with_logits = loss_options, with_logits
        self.logit_scale, self.softcap = logit_options(owner)
        self.probes: Tensor | None = None
        """What the model has made of the probes."""
        self.logits: Tensor | None = None

    @tracing.outside_graphs
    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """transformers' ForCausalLMLoss, which takes other arguments and does not use them either."""
        hidden = self._checked_hidden(logits, vocab_size)
        # Now, inside the model's forward: where the weight is sharded, only then it is whole.
        weight: Any = self.head.weight
        bias: Any = self.head.bias
        self.logits = self._logits(hidden, weight, bias, logits.dtype)
        return linear_cross_entropy(
            hidden,
            weight,
            _target(hidden, labels, shift_labels, ignore_index),
            bias,
            ignore_index=ignore_index,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            normalizer=num_items_in_batch,
            **self.loss_options,
        )

    def _checked_hidden(self, logits: Tensor, vocab_size: int | None) -> Tensor:
        """What was recorded, if the logits are all of its, and have been given a scale and a softcap at most."""
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
        vocab = len(self.head.weight)  # type: ignore[arg-type]
        if vocab_size != vocab:
            raise NotImplementedError(
                f"model: {name} computes its loss over {vocab_size} classes, allowed are all {vocab} of its LM head"
            )
        check_probes(self.logit_scale, self.softcap, logits)
        self.probes = logits
        return hidden

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The output's logits: made, to be made when something reads them, or never."""
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
        if self.logit_scale != 1.0:
            z = z * self.logit_scale
        z = z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap
        return z.to(dtype)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden weightᵀ + bias; of a weight that tensor parallelism has cut, all of it on every rank."""
    if not dtensors.is_dtensor(weight) or dtensors.is_dtensor(hidden):
        return nn.functional.linear(hidden, weight, bias)
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    whole: Any = DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)
    z: Any = nn.functional.linear(whole, weight, bias)
    logits: Tensor = z.full_tensor()
    return logits


def _target(hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The target of every position: the label after it, and none for the last; or what the caller has shifted."""
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if given is None or given.numel() != hidden.shape[:-1].numel():
        shape = None if given is None else tuple(given.shape)
        raise ValueError(
            f"{name}: got shape {shape}, allowed is one label for each of {tuple(hidden.shape[:-1])} logits"
        )
    if shift_labels is None:
        given = nn.functional.pad(given, (0, 1), value=ignore_index)[..., 1:]
    return given.reshape(hidden.shape[:-1]).to(hidden.device)


@tracing.outside_graphs
def _with_logits(output: Any, probes: Tensor, logits: Tensor | None) -> Any:
    """A model's output with logits in the probes' place, or without them, as transformers leaves out what is None."""
    if isinstance(output, dict):
        entries = {key: logits if value is probes or key == "logits" else value for key, value in output.items()}
        return type(output)(**{key: value for key, value in entries.items() if value is not None})
    if isinstance(output, tuple):
        values = (logits if value is probes or is_probes(value) else value for value in output)
        return tuple(value for value in values if value is not None)
    raise NotImplementedError(f"model: its forward gave {type(output).__name__}, allowed are a dict and a tuple")


def _check(owner: nn.Module, head: nn.Module) -> None:
    """Raise NotImplementedError unless head and loss are those that are replaced."""
    check_head(head)
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        raise NotImplementedError(
            "model: its LM head has forward or backward hooks, which would see no logits, allowed is a head without: "
            "remove them first"
        )
    if not isinstance(getattr(type(owner), "loss_function", None), property):
        raise NotImplementedError(
            f"model: {type(owner).__name__} has no loss_function, allowed is a causal language model of transformers"
        )
    own: Any = owner.loss_function
    if (getattr(own, "__module__", None), getattr(own, "__name__", None)) != CAUSAL_LOSS:
        raise NotImplementedError(
            f"model: its loss_function is {getattr(own, '__qualname__', own)!r}, allowed is transformers' "
            f"ForCausalLMLoss, which is the loss that is computed here"
        )
