"""Models of transformers that compute their loss inside of their forward: encoder-decoders and masked language models.

Their loss is CrossEntropyLoss()(logits, labels): the mean over labels that are not -100, not shifted. The model's own
forward runs without labels, its LM head recorded, and the loss is computed after it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from logitless.torch_impl.huggingface.lm_head import is_probes, replaced
from logitless.torch_impl.huggingface.model_loss import ModelLoss

# Classes whose forward does this and nothing else with its logits. Each one is tested.
INLINE = frozenset(
    {
        "AlbertForMaskedLM",
        "BartForConditionalGeneration",
        "BertForMaskedLM",
        "DistilBertForMaskedLM",
        "ElectraForMaskedLM",
        "LEDForConditionalGeneration",
        "MBartForConditionalGeneration",
        "MT5ForConditionalGeneration",
        "MarianMTModel",
        "PegasusForConditionalGeneration",
        "RobertaForMaskedLM",
        "T5ForConditionalGeneration",
        "XLMRobertaForMaskedLM",
    }
)

# BART's buffer [1, V], which is added to the logits.
LOGITS_BIAS = "final_logits_bias"


class _Decoder(Protocol):
    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor: ...


def is_inline(owner: nn.Module) -> bool:
    """Whether it is one of these models."""
    return type(owner).__name__ in INLINE and type(owner).__module__.startswith("transformers.models.")


def computes_its_loss(owner: nn.Module) -> bool:
    """Whether a model's forward computes a cross-entropy itself, and never calls a loss function."""
    names = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    used = () if names is None else names.co_names
    return "CrossEntropyLoss" in used and "loss_function" not in used


def forward_with_loss(
    owner: nn.Module,
    original: Callable[..., object],
    loss: ModelLoss,
    bound: inspect.BoundArguments,
) -> object:
    """The output of a forward with labels, its head recorded: loss, probes in the place of logits, and the rest."""
    labels = cast(Tensor, bound.arguments["labels"])
    bound.arguments["labels"] = None
    known = bound.signature.parameters
    given = [name for name in ("decoder_input_ids", "decoder_inputs_embeds") if bound.arguments.get(name) is not None]
    if "decoder_input_ids" in known and not given:
        bound.arguments["decoder_input_ids"] = cast(_Decoder, owner).prepare_decoder_input_ids_from_labels(labels)
    logits_bias = getattr(owner, LOGITS_BIAS, None)
    if logits_bias is not None:
        bound.arguments["use_cache"] = False  # as BART's own forward with labels does
    without = contextlib.nullcontext()
    with (
        without if logits_bias is None else replaced(owner, LOGITS_BIAS, torch.tensor([[0.0]], dtype=logits_bias.dtype))
    ):
        output = original(*bound.args, **bound.kwargs)
    loss.extra_bias = None if logits_bias is None else logits_bias.flatten()
    probes = _probes_of(output)
    value = loss(probes, labels, loss.vocab)
    if isinstance(output, dict):
        return type(output)(**{"loss": value, **output})
    return (value, *cast(tuple[object, ...], output))


def _probes_of(output: object) -> Tensor:
    found = output.get("logits") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
    if not is_probes(found):
        raise NotImplementedError(
            f"model: its forward gave {type(output).__name__} without the logits of its LM head, allowed are these"
        )
    return found
