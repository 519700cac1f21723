"""MaxText's vocabulary tiling without logits: ``patch_maxtext()`` before training, and ``num_vocab_tiling=2``.

MaxText's trainer calls ``vocab_tiling_nnx_loss(model, hidden_states, data, config, is_train)`` where
``num_vocab_tiling`` is above 1. How far above has no effect here.

An own head (``logits_via_embedding=False``) is [D, V] in MaxText. One device reads it as it lies. On several it is
transposed on the way in and its gradient on the way out, which may be a copy of D × V each way, beyond
``memory_budget``. A tied head is [V, D] everywhere.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn, cast

import jax.numpy as jnp
from jax import Array

from logitless.jax_impl.integrations.maxtext_head import Config, Model, head_of, loss_on
from logitless.jax_impl.integrations.options import limits
from logitless.planning import Preference
from logitless.spec import TokenStats

__all__ = ["patch_maxtext", "unpatch_maxtext", "vocab_tiling_nnx_loss"]

MODULE, NAME, LINEN = "maxtext.utils.vocabulary_tiling", "vocab_tiling_nnx_loss", "vocab_tiling_linen_loss"
IGNORED = -100

# How to take back what was replaced; empty where nothing is.
_UNDO: list[Callable[[], None]] = []


def vocab_tiling_nnx_loss(
    model: Model,
    hidden_states: Array,
    data: Mapping[str, Array],
    config: Config,
    is_train: bool,
    *,
    plan: Preference | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """The sum of the losses and that of the z-losses in it, by MaxText's name and arguments.

    hidden_states [B, T, D] of the decoder, before its last norm; in ``data`` "targets" and "targets_segmentation", both
    [B, T]: a token whose segment is 0 does not count. With z the logits of ``model``'s own norm, dropout and head:

        total_loss = Σ lse_i − z_{i,y_i} + z_loss_multiplier · lse_i²        total_z_loss = Σ z_loss_multiplier · lse_i²

    Both are float32 (float64 for float64 input). total_loss is differentiable in hidden_states, norm and head;
    total_z_loss has no gradient, as MaxText's. Sums of products and the softmax are float32 whatever the config says of
    logits. The mesh may cut batch and vocabulary.

    Raises NotImplementedError for a model without MaxText's own decoder, explicit sharding, a head that waits in host
    memory, a kernel with a scale (fp8), and a mesh that cuts sequences; as the loss's checks.
    """
    from flax import nnx

    dtype, head = head_of(model, config)
    loss_of = loss_on(model.mesh, config)
    normed = model.decoder.decoder_norm(hidden_states)
    # A copy draws the dropout: the model's own count of random numbers stays as it is, as with MaxText's loss.
    hidden = nnx.clone(model.decoder.dropout)(normed, deterministic=not (is_train and config.enable_dropout))
    target = jnp.where(data["targets_segmentation"] != 0, data["targets"], IGNORED)
    found = loss_of(
        hidden.astype(dtype), target=target, reduction="sum", z_loss=config.z_loss_multiplier, return_stats=True,
        plan=plan, memory_budget=memory_budget, backend=backend, **head,
    )  # fmt: skip
    loss, stats = cast(tuple[Array, TokenStats[Array]], found)
    return loss, config.z_loss_multiplier * jnp.square(stats.lse).sum()


def patch_maxtext(
    *, plan: Preference | None = None, memory_budget: int | None = None, backend: str | None = None
) -> None:
    """Make MaxText's trainer compute its tiled losses by :func:`vocab_tiling_nnx_loss`, for all models of this process.

    Arguments: plan (a name), memory_budget, backend: as for :func:`logitless.jax_impl.linear_cross_entropy`.

    Raises ImportError without MaxText, RuntimeError where it was called already, ValueError and TypeError for the
    arguments. Afterwards a Linen model's tiled loss (``enable_nnx=False`` in MaxText before 0.2.5) raises
    NotImplementedError.
    """
    limited = functools.partial(vocab_tiling_nnx_loss, **limits(plan, memory_budget, backend))
    ours = {NAME: limited, LINEN: _refuse_linen}
    if _UNDO:
        raise RuntimeError("maxtext: its loss is replaced already, allowed is one patch_maxtext: unpatch_maxtext first")
    theirs = vars(importlib.import_module(MODULE))
    if NAME not in theirs:
        raise NotImplementedError(f"maxtext: this version has no {NAME}, allowed is 0.2.3 or newer")
    replaced = {name: (theirs[name], function) for name, function in ours.items() if name in theirs}
    for module in list(sys.modules.values()):  # MaxText's trainer imports the functions themselves
        if getattr(module, "__name__", "").startswith("maxtext."):
            for name, (own, function) in replaced.items():
                if getattr(module, name, None) is own:
                    setattr(module, name, function)
                    _UNDO.append(functools.partial(setattr, module, name, own))


def unpatch_maxtext() -> None:
    """Take back :func:`patch_maxtext`. Raises RuntimeError where there is nothing to take back."""
    if not _UNDO:
        raise RuntimeError("maxtext: its loss is not replaced, allowed is unpatch_maxtext after patch_maxtext")
    while _UNDO:
        _UNDO.pop()()


def _refuse_linen(*_: object) -> NoReturn:
    raise NotImplementedError("model: got a Linen model, allowed is an NNX model (enable_nnx=True)")
