"""LM heads that PEFT has wrapped, each as one product: logits = hidden weightᵀ + bias.

    modules_to_save           the weight and bias of the copy that is trained
    trainable_token_indices   the weight with the trained rows in it, which PEFT makes in every forward too
    LoRA                      x Wᵀ + s · drop(x) Aᵀ Bᵀ = [x, s · drop(x) Aᵀ] [W, B]ᵀ

With LoRA, [W, B] of r columns more is a copy of W as long as the step lasts, and has a gradient of its size, of which
B's columns are used. No weight is merged. PEFT is not imported: its classes are known by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

COPY, TOKENS = ("peft.utils.other", "ModulesToSaveWrapper"), ("peft.utils.other", "TrainableTokensWrapper")
LORA = ("peft.tuners.lora.layer", "Linear")


class Product(NamedTuple):
    """The arguments of a linear cross-entropy that stand for a head and what went into it."""

    hidden: Tensor
    """[..., D], with LoRA [..., D + r]."""
    weight: Tensor
    """[V, D], with LoRA [V, D + r]."""
    bias: Tensor | None


class _Adapted(Protocol):
    """What PEFT's wrappers have in common."""

    active_adapters: list[str]
    disable_adapters: bool


class _Wrapper(_Adapted, Protocol):
    _adapters: set[str]
    original_module: nn.Module
    modules_to_save: Mapping[str, nn.Module]
    token_adapter: _Tokens
    weight: Tensor


class _Tokens(_Adapted, Protocol):
    base_layer: nn.Module
    merged: bool


class _Lora(_Adapted, Protocol):
    base_layer: nn.Module
    merged: bool
    lora_A: Mapping[str, nn.Module]
    lora_B: Mapping[str, nn.Linear]
    lora_dropout: Mapping[str, nn.Module]
    lora_variant: Mapping[str, object]
    scaling: Mapping[str, float]

    def _cast_input_dtype(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...

    def unmerge(self) -> None: ...


def plain_layer(head: nn.Module) -> nn.Module:
    """The layer under PEFT's wrapper whose weight is used; without a wrapper the head itself."""
    kind, wrapper = _kind(head), cast(_Wrapper, head)
    if kind == COPY:
        return wrapper.modules_to_save[wrapper.active_adapters[0]] if _is_on(wrapper) else wrapper.original_module
    if kind == TOKENS:
        return wrapper.token_adapter.base_layer
    return cast(_Lora, head).base_layer if kind == LORA else head


def check_product(head: nn.Module) -> None:
    """Raise NotImplementedError where :func:`product` would: for a variant of LoRA that is no product (DoRA)."""
    if _kind(head) == LORA:
        lora = cast(_Lora, head)
        if not (lora.disable_adapters or lora.merged):
            _active(lora)


def product(head: nn.Module, hidden: Tensor) -> Product:
    """What stands for ``head(hidden)``, hidden [..., D]. Raises as :func:`check_product`."""
    layer, kind = cast(nn.Linear, plain_layer(head)), _kind(head)
    plain = Product(hidden, layer.weight, layer.bias)
    if kind == LORA:
        return _with_lora(cast(_Lora, head), plain)
    if kind == TOKENS:
        wrapper = cast(_Wrapper, head)
        if _is_on(wrapper) and not wrapper.token_adapter.merged:
            return Product(hidden, wrapper.weight, None)  # PEFT adds no bias here
    return plain


def _with_lora(head: _Lora, plain: Product) -> Product:
    """[x, s · drop(x) Aᵀ], [W, B] and b + s · B's bias, over all active adapters."""
    if head.disable_adapters and head.merged:
        head.unmerge()  # as its own forward does
    if head.disable_adapters or head.merged:
        return plain
    hidden, weight, bias = plain
    for name in _active(head):
        down, up = head.lora_A[name], head.lora_B[name]
        x = head._cast_input_dtype(plain.hidden, up.weight.dtype)
        low = down(head.lora_dropout[name](x)) * head.scaling[name]
        hidden = torch.cat([hidden, low.to(hidden.dtype)], -1)
        weight = torch.cat([weight, up.weight.to(weight.dtype)], -1)
        if up.bias is not None:
            more = (up.bias * head.scaling[name]).to(weight.dtype)
            bias = more if bias is None else bias + more
    return Product(hidden, weight, bias)


def _active(head: _Lora) -> list[str]:
    """The adapters that this layer adds."""
    names = [name for name in head.active_adapters if name in head.lora_A]
    for name in names:
        if name in head.lora_variant:
            raise NotImplementedError(
                f"model: the adapter {name!r} of its LM head is {type(head.lora_variant[name]).__name__}, allowed is "
                f"plain LoRA: use_dora=False and no other variant in the LoraConfig, or merge_adapter() to evaluate"
            )
    return names


def _kind(head: nn.Module) -> tuple[str, str]:
    return type(head).__module__, type(head).__qualname__


def _is_on(wrapper: _Wrapper) -> bool:
    """Whether an adapter is in use, and is one of this wrapper's."""
    active = wrapper.active_adapters
    return bool(active) and not wrapper.disable_adapters and all(name in wrapper._adapters for name in active)
