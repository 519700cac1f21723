"""The LM head of somebody else's model: found, its input recorded, and what the model does to its result checked.

What comes out of a recorded head in the logits' place is a handful of probes. The model does with them what it does
with logits, and the result is compared with ``softcap · tanh(logit_scale · probe / softcap)``, so that a model that
treats its logits in a way not known here is refused, whatever its configuration says. The probes are on the CPU
wherever the model is: what the model does to them is numbers from its configuration, and reading them waits for no GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TypedDict, TypeGuard

import torch
from torch import Tensor, nn

from logitless.torch_impl.huggingface import adapters

# Exact in every floating dtype; far enough apart to show a scale, a shift, a cap and a threshold.
PROBES = (-64.0, -1.0, 0.0, 0.5, 8.0, 64.0)

# The names of a head where a model does not say which one it is (``get_output_embeddings``).
HEAD_NAMES = ("lm_head", "embed_out", "output_projection")

# Where Hugging Face models keep what they do to logits: attributes of the model, then of its configuration.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere, Cohere2; Falcon-H1
DIVISORS = ("logits_scaling",)  # Granite, GraniteMoe
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma 2; RecurrentGemma; xLSTM

# Where the hooks come from that gather a module's weights around its forward: FSDP2's, DeepSpeed's.
GATHERERS = ("torch.distributed.", "deepspeed.")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")

_ABSENT = object()


# ---------------------------------------------------------------------------------------------------------------------
# Recording


class Recorder:
    """A head's forward: keeps its input, and gives probes where logits would be."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        """[..., D]: what went into the head."""

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None:
            raise NotImplementedError("module: it runs its LM head more than once in one forward, allowed is once")
        self.hidden = hidden
        kind = hidden.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        return torch.tensor(PROBES, dtype=dtype).expand(*hidden.shape[:-1], len(PROBES)).clone()


@contextlib.contextmanager
def replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Within the block, ``value`` is an attribute of the instance; afterwards it is as before, whatever happened.

    An instance's own forward, as others patch it (accelerate does), not another module: parameters, their names and
    hooks stay where they are.
    """
    before = module.__dict__.get(name, _ABSENT)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def is_gathered(head: nn.Module) -> bool:
    """Whether all hooks of a head are there to gather its weight: it is whole inside of the head's forward alone."""
    hooks = [hook for name in HOOKS for hook in getattr(head, name).values()]
    return bool(hooks) and all(_origin(hook).startswith(GATHERERS) for hook in hooks)


def _origin(hook: object) -> str:
    """The module that a hook was written in."""
    hook = getattr(hook, "func", hook)  # a partial's
    return str(getattr(hook, "__module__", ""))


def check_probes(options: LogitOptions, results: Tensor) -> None:
    """Raise NotImplementedError unless ``results`` [..., len(PROBES)] are the probes after scale and softcap."""
    if not results.numel():
        return
    logit_scale, softcap = options["logit_scale"], options["softcap"]
    expected = [
        logit_scale * probe if softcap is None else softcap * math.tanh(logit_scale * probe / softcap)
        for probe in PROBES
    ]
    values = results.detach().reshape(-1, len(PROBES))[0].tolist()
    # A model may work in bfloat16: a few roundings of each number.
    eps = torch.finfo(torch.bfloat16).eps
    right = [abs(value - known) <= 2 * eps * abs(known) for value, known in zip(values, expected, strict=True)]
    if not all(right):
        raise NotImplementedError(
            f"module: its logits are not z = f(hidden @ weight.T + bias) with the logit_scale = {logit_scale:g} and "
            f"softcap = {softcap} that its configuration says: it makes {[round(v, 4) for v in values]} of "
            f"{list(PROBES)}; allowed is what linear_cross_entropy computes"
        )


def is_probes(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor [..., len(PROBES)], as the logits of a recorded forward are."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == len(PROBES)


# ---------------------------------------------------------------------------------------------------------------------
# Finding the head and what is done to its logits


def find_head(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The module whose forward runs the head, and the head, which may be PEFT's."""
    found: dict[int, tuple[str, nn.Module, nn.Module]] = {}
    for name, owner in module.named_modules():
        head = _output_embeddings(owner)
        if head is not None:
            found.setdefault(id(head), (name, owner, head))
    if not found:
        for name, owner in module.named_modules():
            for attribute in HEAD_NAMES:
                head = owner._modules.get(attribute)
                if head is not None:
                    found.setdefault(id(head), (name, owner, head))
    if len(found) != 1:
        places = ", ".join(f"{type(owner).__name__} ({name or 'itself'})" for name, owner, _ in found.values())
        raise NotImplementedError(
            f"module: found {len(found)} LM heads in {type(module).__name__}{': ' if places else ''}{places}; "
            f"allowed is one: from get_output_embeddings(), or a torch.nn.Linear called {', '.join(HEAD_NAMES)}"
        )
    ((_, owner, head),) = found.values()
    return owner, checked_head(head)


def _output_embeddings(owner: nn.Module) -> nn.Module | None:
    """What the model says its head is; the class's own method, not one that a wrapper passes on."""
    if not callable(getattr(type(owner), "get_output_embeddings", None)):
        return None
    try:
        head = owner.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # an inner model of transformers: has the method, but no head
        return None
    return head if isinstance(head, nn.Module) else None


def checked_head(head: nn.Module) -> nn.Module:
    """The head itself. Raises NotImplementedError unless it is a plain linear map, or one that PEFT has adapted."""
    check_forward(head)
    weight = adapters.plain_layer(head).weight
    shape = whole_shape(weight)
    if not isinstance(weight, Tensor) or len(shape) != 2 or not weight.is_floating_point():
        raise NotImplementedError(
            f"module: its LM head's weight is {getattr(weight, 'dtype', None)} of shape {shape}, allowed is a floating "
            f"[V, D]"
        )
    return head


def whole_shape(weight: object) -> tuple[int, ...]:
    """[V, D] of a weight, also where DeepSpeed's ZeRO-3 has taken it away."""
    return tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))


def check_forward(head: nn.Module) -> None:
    """Raise NotImplementedError unless a head's forward is that of a plain linear map, or of one under PEFT."""
    layer = adapters.plain_layer(head)
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise NotImplementedError(
            f"module: its LM head is a {type(layer).__module__}.{type(layer).__qualname__}, allowed is a "
            f"torch.nn.Linear: merge an adapter (merge_and_unload) that is not PEFT's LoRA, modules_to_save or "
            f"trainable_token_indices, and leave the head out of a quantisation, first"
        )
    for one in {head, layer}:
        own = one.__dict__.get("forward")
        if own is not None and not isinstance(own, Recorder) and not (_is_quiet_hook(one) or _is_parallel(own)):
            raise NotImplementedError(
                f"module: its LM head's forward was replaced on the instance by {_name_of(own)}, which would be left "
                f"out, allowed is torch.nn.Linear's own: take it off first"
            )


def _is_quiet_hook(head: nn.Module) -> bool:
    """Whether the instance's forward is accelerate's and changes no value: one of its hooks that move tensors, or do
    nothing, and leave the weight where it is."""
    hook = getattr(head, "_hf_hook", None)
    if hook is None or getattr(head.__dict__.get("_old_forward"), "__func__", None) is not nn.Linear.forward:
        return False
    hooks = hook.hooks if type(hook).__name__ == "SequentialHook" else (hook,)
    known = all(type(one).__name__ in ("ModelHook", "AlignDevicesHook") for one in hooks)
    return known and not any(getattr(one, "offload", False) for one in hooks)


def _is_parallel(forward: object) -> bool:
    """Whether the instance's forward is that of transformers' tensor parallelism, which a sharded loss stands for."""
    module = str(getattr(getattr(forward, "__func__", forward), "__module__", ""))
    return module.startswith("transformers.") and module.endswith(".tensor_parallel")


def _name_of(function: object) -> str:
    function = getattr(function, "__func__", getattr(function, "func", function))
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


class LogitOptions(TypedDict):
    """What a model does to its logits, as keyword arguments of the losses."""

    logit_scale: float
    softcap: float | None


def logit_options(owner: nn.Module) -> LogitOptions:
    """The options from the owner of the head or its configuration."""
    # A setting is never 0.
    scale = math.prod(_setting(owner, name) or 1.0 for name in MULTIPLIERS)
    scale /= math.prod(_setting(owner, name) or 1.0 for name in DIVISORS)
    caps = [value for value in (_setting(owner, name) for name in SOFTCAPS) if value is not None]
    return {"logit_scale": scale, "softcap": caps[0] if caps else None}


def check_whole(owner: nn.Module, head: nn.Module) -> None:
    """Raise NotImplementedError where the configuration counts other classes than the head: the model may cut logits.

    The probes cannot show that: they are fewer than the classes that are left.
    """
    config = getattr(owner, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    expected, weight = getattr(text_config, "vocab_size", None), getattr(head, "weight", None)
    if not isinstance(expected, int) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return  # a weight of one axis waits to be gathered
    if len(weight) != expected:
        raise NotImplementedError(
            f"module: its configuration has vocab_size {expected} and its LM head {len(weight)} rows, allowed is one "
            f"number for both: otherwise the model may cut its logits"
        )


def _setting(owner: nn.Module, name: str) -> float | None:
    config = getattr(owner, "config", None)
    text_config = getattr(config, "get_text_config", lambda: None)
    for place in (owner, text_config(), config):
        value = getattr(place, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise NotImplementedError(f"module: its {name} is {value!r}, allowed is a number greater than 0")
        return float(value)
    return None
