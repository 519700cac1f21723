"""A model's forward without its logits: the LM head is replaced by a recorder of its input.

What comes out of the head in the logits' place is a handful of probes. The model does with them what it does with
logits, and the result is compared with ``softcap · tanh(logit_scale · probe / softcap)``, so that a model that treats
its logits in a way not known here is refused, whatever its configuration says.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Exact in every floating dtype; far enough apart to show a scale, a shift, a cap and a threshold.
PROBES = (-64.0, -1.0, 0.0, 0.5, 8.0, 64.0)

# The names of a head where a model does not say which one it is (``get_output_embeddings``).
HEAD_NAMES = ("lm_head", "embed_out", "output_projection")

# Where Hugging Face models keep what they do to logits: attributes of the model, then of its configuration.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere, Cohere2; Falcon-H1
DIVISORS = ("logits_scaling",)  # Granite, GraniteMoe
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma 2; RecurrentGemma; xLSTM


class CapturedHead:
    """What :func:`capture_lm_head` found: the arguments of a linear cross-entropy but for the target."""

    def __init__(self, head: nn.Linear, logit_scale: float, softcap: float | None) -> None:
        self.weight: Tensor = head.weight
        """[V, D]: the head's own parameter, which may be the embedding's too; gradients go there."""
        self.bias: Tensor | None = head.bias
        self.logit_scale = logit_scale
        self.softcap = softcap
        self._recorded: Tensor | None = None
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """[..., D]: what went into the head in the latest forward of the module, attached to its graph.

        Raises RuntimeError before that.
        """
        if self._hidden is None:
            raise RuntimeError(
                "hidden: no forward of the module that was given to capture_lm_head has run its LM head yet; call that "
                "module itself, inside the with block"
            )
        return self._hidden

    @property
    def options(self) -> dict[str, Any]:
        """logit_scale and softcap, as keyword arguments of the losses."""
        return {"logit_scale": self.logit_scale, "softcap": self.softcap}


@contextlib.contextmanager
def capture_lm_head(module: nn.Module) -> Iterator[CapturedHead]:
    """Run ``module``'s forward without logits: its LM head only records what it is given.

        with capture_lm_head(model) as head:
            model(input_ids, attention_mask=mask)
        loss = linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)

    The head is what ``module.get_output_embeddings()`` gives, of the module or of the one inner module that has it
    (PEFT, DistributedDataParallel), else the one inner module called lm_head, embed_out or output_projection. It must
    be a torch.nn.Linear with a floating weight. Tied weights, a bias, autocast and torch.no_grad are as in the model.
    logit_scale and softcap are read where Hugging Face models keep them (Cohere's logit_scale, Granite's
    logits_scaling, Falcon-H1's lm_head_multiplier, Gemma 2's final_logit_softcapping, RecurrentGemma's logits_soft_cap,
    xLSTM's output_logit_soft_cap), and every forward is checked to do just that.

    The model's own output holds len(PROBES) numbers in place of each token's logits: do not use it. Labels must not be
    given to the model: its own loss would be of those numbers. The target is shifted by the caller. The module is as
    before when the block ends, whatever happens in it. On a GPU the check waits for the forward.

    Arguments: module: a model whose output is the logits, has them as ``.logits`` or under "logits", or first in a
    tuple.

    Yields a :class:`CapturedHead`. Raises TypeError for what is not a module; NotImplementedError, with the reason, for
    a head that cannot be found or is not a plain linear map, and, from the forward, for a model that treats its logits
    otherwise; ValueError for labels; RuntimeError where the head is captured already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {type(module).__name__}, allowed is a torch.nn.Module")
    owner, head = _find_head(module)
    captured = CapturedHead(head, *_logit_options(owner))
    if isinstance(head.__dict__.get("forward"), _Recorder):
        raise RuntimeError("module: got one whose LM head is captured already, allowed is one capture at a time")
    handles = [
        module.register_forward_pre_hook(lambda _, __, options: _begin(captured, options), with_kwargs=True),
        module.register_forward_hook(lambda _, __, output: _publish(captured, output)),
    ]
    # An instance's own forward, as others patch it (accelerate does), not another module: parameters, their names and
    # hooks stay where they are.
    before = head.__dict__.get("forward")
    head.__dict__["forward"] = _Recorder(captured)
    try:
        yield captured
    finally:
        if before is None:
            del head.__dict__["forward"]
        else:
            head.__dict__["forward"] = before
        for handle in handles:
            handle.remove()


class _Recorder:
    """A head's forward: keeps its input, and gives probes where logits would be."""

    def __init__(self, captured: CapturedHead) -> None:
        self.captured = captured

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.captured._recorded is not None:
            raise NotImplementedError("module: it runs its LM head more than once in one forward, allowed is once")
        self.captured._recorded = hidden
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        probes = torch.tensor(PROBES, dtype=dtype, device=hidden.device)
        return probes.expand(*hidden.shape[:-1], len(PROBES)).clone()


def _begin(captured: CapturedHead, options: dict[str, Any]) -> None:
    """A forward begins: nothing is recorded, and labels are refused."""
    captured._recorded = captured._hidden = None
    if options.get("labels") is not None:
        raise ValueError(
            "labels: got some inside capture_lm_head, allowed is None: the model makes no logits here; compute the "
            "loss from head.hidden and head.weight"
        )


def _publish(captured: CapturedHead, output: Any) -> None:
    """Check what the model has made of the probes, then let its hidden states be read."""
    recorded, captured._recorded = captured._recorded, None
    if recorded is None:
        raise NotImplementedError("module: its forward did not run the LM head that was found; nothing was captured")
    logits = _logits_of(output)
    if logits is None:
        raise NotImplementedError(
            f"module: its forward gave {type(output).__name__} without logits that could be checked, allowed are "
            f"logits, an output with .logits or 'logits', or a tuple that begins with them"
        )
    if logits.numel():
        _check_probes(captured, logits.detach().reshape(-1, len(PROBES))[0])
    captured._hidden = recorded


def _logits_of(output: Any) -> Tensor | None:
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None:
        found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, Tensor) and found.dim() and found.shape[-1] == len(PROBES) else None


def _check_probes(captured: CapturedHead, made: Tensor) -> None:
    scale, cap = captured.logit_scale, captured.softcap
    expected = [scale * probe if cap is None else cap * math.tanh(scale * probe / cap) for probe in PROBES]
    # A model may work in bfloat16: a few roundings of each number.
    eps = torch.finfo(torch.bfloat16).eps
    right = [abs(value - known) <= 2 * eps * abs(known) for value, known in zip(made.tolist(), expected, strict=True)]
    if not all(right):
        raise NotImplementedError(
            f"module: its logits are not z = f(hidden @ weight.T + bias) with the logit_scale = {scale:g} and softcap "
            f"= {cap} that its configuration says: it makes {[round(v, 4) for v in made.tolist()]} of {list(PROBES)}; "
            f"allowed is what linear_cross_entropy computes"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Finding the head and what is done to its logits


def _find_head(module: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """The module whose forward runs the head, and the head."""
    found: dict[int, tuple[str, nn.Module, Any]] = {}
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
    _check_head(head)
    return owner, head


def _output_embeddings(owner: nn.Module) -> nn.Module | None:
    """What the model says its head is; the class's own method, not one that a wrapper passes on."""
    if not callable(getattr(type(owner), "get_output_embeddings", None)):
        return None
    try:
        head = owner.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # an inner model of transformers: has the method, but no head
        return None
    return head if isinstance(head, nn.Module) else None


def _check_head(head: nn.Module) -> None:
    """Raise NotImplementedError unless the head is a plain linear map."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise NotImplementedError(
            f"module: its LM head is {type(head).__name__}, allowed is a torch.nn.Linear: merge an adapter, and "
            f"leave the head out of a quantisation, first"
        )
    if head.weight.dim() != 2 or not head.weight.is_floating_point():
        raise NotImplementedError(
            f"module: its LM head's weight is {head.weight.dtype} of shape {tuple(head.weight.shape)}, allowed is a "
            f"floating [V, D]"
        )


def _logit_options(owner: nn.Module) -> tuple[float, float | None]:
    """logit_scale and softcap, from the owner of the head or its configuration."""
    scale = 1.0
    for name in MULTIPLIERS:
        value = _setting(owner, name)
        scale *= 1.0 if value is None else value
    for name in DIVISORS:
        value = _setting(owner, name)
        scale /= 1.0 if value is None else value
    caps = [value for value in (_setting(owner, name) for name in SOFTCAPS) if value is not None]
    return scale, caps[0] if caps else None


def _setting(owner: nn.Module, name: str) -> float | None:
    config = getattr(owner, "config", None)
    text_config: Any = getattr(config, "get_text_config", lambda: None)
    for place in (owner, text_config(), config):
        value = getattr(place, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise NotImplementedError(f"module: its {name} is {value!r}, allowed is a number greater than 0")
        return float(value)
    return None
