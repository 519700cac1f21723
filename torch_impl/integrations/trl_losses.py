"""What :mod:`.trl` puts in the place of TRL's functions. Arguments have TRL's names; N tokens."""

from __future__ import annotations

from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor

from logitless.planning import Preference
from logitless.torch_impl.api import linear_cross_entropy, linear_log_probs
from logitless.torch_impl.huggingface.lm_head import LogitOptions

STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")
EVERY = ("entropy", *STATISTICS)


class Limits(TypedDict):
    """What patch_trl was given for the losses."""

    plan: Preference | None
    memory_budget: int | None
    backend: str | None


class LogProbInputs(TypedDict, total=False):
    """What ``_ChunkedLogProbFunction.apply`` is given."""

    hidden: Tensor  # [N, D], from TRL 1.15 on, where outputs are asked for by name
    last_hidden: Tensor  # before
    weight: Required[Tensor]
    bias: Tensor | None  # from TRL 1.13 on
    targets: Required[Tensor]
    temperature: Required[float]
    chunk_size: int  # has no effect
    final_logit_softcapping: float | None
    logit_scale: float
    outputs: tuple[str, ...]


class LossInputs(TypedDict, total=False):
    """What ``_chunked_cross_entropy_loss`` is given."""

    hidden_states: Required[Tensor]
    lm_head_weight: Required[Tensor]
    lm_head_bias: Tensor | None
    labels: Tensor | None
    shift_labels: Tensor | None
    num_items_in_batch: Tensor | float | None
    chunk_size: int  # has no effect
    final_logit_softcapping: float | None
    logit_scale: float


def log_probs(limits: Limits, **given: Unpack[LogProbInputs]) -> tuple[Tensor | None, ...]:
    """``_ChunkedLogProbFunction.apply``: log-probabilities and entropies [N], and what else ``outputs`` has."""
    hidden = given["hidden"] if "hidden" in given else given["last_hidden"]
    hidden, weight, bias = _of_one_dtype(hidden, given["weight"], given.get("bias"))
    target, temperature, wanted = given["targets"], given["temperature"], given.get("outputs", EVERY)
    options: LogitOptions = {
        "logit_scale": given.get("logit_scale", 1.0), "softcap": given.get("final_logit_softcapping")
    }  # fmt: skip
    values, entropy, *stats = linear_log_probs(
        hidden, weight, target, bias, temperature=temperature, with_entropy="entropy" in wanted,
        return_stats="hidden" in given and bool({"is_top1", "log_sum_sq_probs"} & set(wanted)), **options, **limits,
    )  # fmt: skip
    entropy = entropy if "entropy" in wanted else None
    if "hidden" not in given:
        return values, entropy
    found: dict[str, Tensor] = {}
    if stats:
        squared = stats[0].sum_p_squared.detach().log()
        found = {"is_top1": stats[0].correct, "log_sum_sq_probs": squared.masked_fill(target == -100, 0.0)}
    if "mean_logits" in wanted:
        with torch.no_grad():  # smoothed altogether, the loss is lse − mean_j z_j
            smooth, lse = linear_cross_entropy(
                hidden, weight, target, bias, temperature=temperature, label_smoothing=1.0, reduction="none",
                return_lse=True, **options, **limits,
            )  # fmt: skip
        found["mean_logits"] = lse - smooth
    return values, entropy, *(found[name] if name in wanted else None for name in STATISTICS)


def cross_entropy(limits: Limits, **given: Unpack[LossInputs]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_chunked_cross_entropy_loss``: the loss, the number of right tokens, the sum of entropies, and the number of
    labels."""
    from logitless.torch_impl.huggingface.model_loss import shifted_target  # it imports torch's compiler

    hidden, weight, bias = _of_one_dtype(given["hidden_states"], given["lm_head_weight"], given.get("lm_head_bias"))
    target = shifted_target(hidden, given.get("labels"), given.get("shift_labels"), -100)
    loss, stats = linear_cross_entropy(
        hidden, weight, target, bias, logit_scale=given.get("logit_scale", 1.0),
        softcap=given.get("final_logit_softcapping"), normalizer=given.get("num_items_in_batch"), return_stats=True,
        **limits,
    )  # fmt: skip
    return loss, stats.correct.sum().float(), stats.entropy.sum(), (target != -100).sum()


def _of_one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """All in the wider dtype of hidden states and weight; autocast chooses by itself."""
    if hasattr(weight, "ds_id"):
        raise NotImplementedError(
            "trl: the LM head's weight is DeepSpeed's (ZeRO-3), which is whole within TRL's own functions alone, "
            "allowed is a weight that stays: use ZeRO-2 or FSDP2, or unpatch_trl()"
        )
    if hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    wide = torch.promote_types(hidden.dtype, weight.dtype)
    return hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
