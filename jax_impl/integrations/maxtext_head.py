"""The head of a MaxText model, and the loss on MaxText's mesh. MaxText ships no types: here is what is read of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import EllipsisType
from typing import Protocol, TypedDict

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from logitless.jax_impl.api import linear_cross_entropy
from logitless.jax_impl.distributed.parallel import names_of
from logitless.jax_impl.distributed.sharding import sharded_linear_cross_entropy
from logitless.spec import TokenStats, WeightLayout

LOGITS = ("activation_embed_and_logits_batch", "activation_length", "activation_vocab")


class Config(Protocol):
    shard_mode: object
    parameter_memory_host_offload: bool
    enable_dropout: bool
    z_loss_multiplier: float
    logits_via_embedding: bool
    normalize_embedding_logits: bool
    final_logits_soft_cap: float | None
    emb_dim: int
    dtype: DTypeLike


class Variable(Protocol):
    def __getitem__(self, index: EllipsisType) -> Array: ...


class Dense(Protocol):
    kernel: Variable
    bias: Variable | None
    dtype: DTypeLike


class Embedder(Protocol):
    embedding: Variable


class Decoder(Protocol):
    decoder_norm: Callable[[Array], Array]
    dropout: Callable[..., Array]
    logits_dense: Dense


class Model(Protocol):
    mesh: Mesh
    decoder: Decoder
    token_embedder: Embedder


class Head(TypedDict):
    """Arguments of the loss that belong to the head."""

    weight: Array
    weight_layout: WeightLayout
    bias: Array | None
    logit_scale: float
    softcap: float | None


def loss_on(mesh: Mesh, config: Config) -> Callable[..., Array | tuple[Array | TokenStats[Array], ...]]:
    """The loss of arrays that lie on the mesh as MaxText's rules say."""
    if str(getattr(config.shard_mode, "value", config.shard_mode)) != "auto":
        raise NotImplementedError(f"shard_mode: got {config.shard_mode}, allowed is auto")
    if mesh.size == 1:
        return linear_cross_entropy
    spec = importlib.import_module("maxtext.utils.sharding").create_sharding(mesh, LOGITS).spec
    batch, length, vocab = (names_of(axes) for axes in spec)
    if any(mesh.shape[name] > 1 for name in length):
        raise NotImplementedError(f"mesh: got one that cuts sequences over {length}, allowed is a cut of the batch")
    return sharded_linear_cross_entropy(mesh, vocab_axis=vocab or None, data_axis=batch or None)


def head_of(model: Model, config: Config) -> tuple[DTypeLike, Head]:
    """The dtype of the hidden states that the head multiplies, and the head."""
    if not (hasattr(model.decoder, "decoder_norm") and hasattr(model.decoder, "dropout")):
        raise NotImplementedError(
            f"model: got one with {type(model.decoder).__name__}, allowed is MaxText's NNXDecoder"
        )
    if config.parameter_memory_host_offload:
        raise NotImplementedError("parameter_memory_host_offload: got True, allowed is False: a head on the device")
    layout: WeightLayout = "vd" if config.logits_via_embedding else "dv"
    if config.logits_via_embedding:
        scale = config.emb_dim**-0.5 if config.normalize_embedding_logits else 1.0
        dtype, weight, bias = config.dtype, model.token_embedder.embedding[...], None
        softcap = config.final_logits_soft_cap or None
    else:
        dense, scale, softcap = model.decoder.logits_dense, 1.0, None
        if getattr(dense, "kernel_scale", None) is not None:
            raise NotImplementedError("logits_dense: got a kernel with a scale (fp8), allowed is one without")
        dtype, weight = dense.dtype, dense.kernel[...]
        bias = None if dense.bias is None else dense.bias[...]
    if weight.dtype != jnp.float32:  # which is taken beside narrower hidden states as it is
        weight = weight.astype(dtype)
    return dtype, {"weight": weight, "weight_layout": layout, "bias": bias, "logit_scale": scale, "softcap": softcap}
