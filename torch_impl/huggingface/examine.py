"""What a model of transformers would get, from its configuration: nothing of its weights is read or made."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from logitless.torch_impl.huggingface.adapters import plain_layer
from logitless.torch_impl.huggingface.lm_head import find_head, logit_options
from logitless.torch_impl.huggingface.patch import patch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclasses.dataclass(frozen=True)
class HeadReport:
    """A model's LM head and what :func:`patch` does with it."""

    model: str
    """The model's class."""
    dtype: str
    """The configuration's dtype; where it says none, bfloat16."""
    refusal: str
    """Why patch refuses the model; empty where it takes it."""
    head: str = ""
    """The head's place and class; empty, and the rest as it stands here, where there is none that could be taken."""
    vocab: int = 0
    hidden: int = 0
    bias: bool = False
    tied: bool = False
    """Whether the head's weight is the input embedding's."""
    logit_scale: float = 1.0
    softcap: float | None = None


def examine_model(name_or_path: str) -> HeadReport:
    """Read a configuration and look at the model that it describes, on torch's meta device.

    name_or_path: a folder with a config.json, or such a file, for which nothing is fetched; or a model's name on the
    Hugging Face Hub, as ``from_pretrained`` takes it. Raises ValueError where there is no configuration, or none of a
    model that transformers has; ImportError without transformers.
    """
    config = _config(name_or_path)
    names = config.architectures or []
    transformers = importlib.import_module("transformers")
    made = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if made is None:
        raise ValueError(
            f"model: got {name_or_path!r}, whose architectures are {names}, allowed is a class of transformers "
            f"{transformers.__version__} in the configuration's 'architectures'"
        )
    with torch.device("meta"):
        model: nn.Module = made(config)
    dtype = str(getattr(config, "dtype", None) or torch.bfloat16).removeprefix("torch.")
    try:
        owner, head = find_head(model)
        options = logit_options(owner)
    except NotImplementedError as refused:
        return HeadReport(type(model).__name__, dtype, str(refused))
    layer = cast(nn.Linear, plain_layer(head))
    place = next(name for name, module in model.named_modules() if module is head)
    vocab, hidden = layer.weight.shape
    return HeadReport(
        type(model).__name__,
        dtype,
        _refusal(model),
        f"{place}, {type(head).__name__}",
        vocab,
        hidden,
        layer.bias is not None,
        _is_tied(model, layer),
        **options,
    )


def _config(name_or_path: str) -> PretrainedConfig:
    from transformers import AutoConfig

    # A name on the hub is NAME or OWNER/NAME.
    local = Path(name_or_path).exists() or name_or_path[:1] in "./~" or name_or_path.count("/") > 1
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name_or_path, local_files_only=local)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"model: got {name_or_path!r}, allowed is a folder with a config.json that transformers knows, or a name "
            f"that it can fetch one for: {reason}"
        ) from error
    return config


def _refusal(model: nn.Module) -> str:
    try:
        patch(model)
    except NotImplementedError as refused:
        return str(refused)
    return ""


def _is_tied(model: nn.Module, layer: nn.Linear) -> bool:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(embedding.weight is layer.weight for embedding in embeddings)
