"""Liger-Kernel's names for the same losses: a program that uses them changes an import.

    from logitless.torch_impl.integrations.liger import LigerFusedLinearCrossEntropyLoss  # not: liger_kernel...

Signatures, defaults and meanings are those of liger-kernel 0.8. What differs:

- The mean with class weights and a z-loss: Liger divides the z-loss by the number of tokens. Here the whole loss is
  divided by one number, the sum of the targets' class weights (:mod:`logitless.spec`).
- If no token counts, the mean and the accuracy are 0, not NaN. Bad arguments are ValueError and TypeError.
- ``accum_dtype`` and ``chunk_mem_const`` change nothing: sums are float32. Given logits are not written over.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from logitless import spec
from logitless.spec import Reduction
from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.given_logits.api import cross_entropy
from logitless.torch_impl.integrations import liger_output as out
from logitless.torch_impl.integrations.liger_output import CrossEntropyOutput

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "liger_fused_linear_cross_entropy",
]


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
    reduction: Reduction = "mean", softcap: float | None = None, return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """:func:`linear_cross_entropy` by Liger's name, order and names of arguments; see the module for what differs.

    input [..., D], weight [V, D], target [...], bias [V]; ce_weight is class_weight, lse_square_scale is z_loss.
    use_token_scaling multiplies each token's loss by its target's probability, without gradient through it, for another
    forward; a mean divides by the same number. Returns the loss, or a :class:`CrossEntropyOutput`, whose z_loss has
    input's dtype. Raises as :func:`linear_cross_entropy`; NotImplementedError for an accum_dtype wider than the sums.
    """
    spec.check_flags(use_token_scaling=use_token_scaling)
    asked = out.Asked(return_z_loss, return_token_accuracy, return_predicted_tokens)
    out.check_without_effect(accum_dtype, chunk_mem_const, input.dtype)
    token_weight = normalizer = None
    if use_token_scaling:
        with torch.no_grad():
            _, stats = linear_cross_entropy(
                input, weight, target, bias, ignore_index=ignore_index, softcap=softcap, return_stats=True
            )
        token_weight = torch.exp(-stats.nll)
        normalizer = out.denominator(target, ignore_index, ce_weight) if reduction == "mean" else None
    found = linear_cross_entropy(
        input, weight, target, bias, class_weight=ce_weight, ignore_index=ignore_index, z_loss=lse_square_scale,
        label_smoothing=label_smoothing, reduction=reduction, softcap=softcap, token_weight=token_weight,
        normalizer=normalizer, return_stats=asked.any,
    )  # fmt: skip
    result = out.output(found, asked, target, ignore_index, lse_square_scale, reduction, ce_weight, token_weight)
    return out.in_dtype(result, None, input.dtype)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """``forward(lin_weight, _input, target, bias=None)`` is the function above, with these options."""

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: Reduction = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        spec.LossOptions(reduction, ignore_index, label_smoothing, lse_square_scale, softcap=softcap)
        self.ce_weight, self.ignore_index, self.lse_square_scale = ce_weight, ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.accum_dtype, self.use_token_scaling = return_z_loss, accum_dtype, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """The loss of _input [..., D] times lin_weight [V, D] against target [...]."""
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, self.ignore_index, self.lse_square_scale,
            self.label_smoothing, self.reduction, self.softcap, self.return_z_loss, self.accum_dtype,
            self.use_token_scaling, self.return_token_accuracy, self.return_predicted_tokens,
        )  # fmt: skip


class LigerCrossEntropyLoss(nn.Module):
    """``forward(_input, target)`` is :func:`cross_entropy` on logits [..., V], with these options."""

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: Reduction = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        spec.LossOptions(reduction, ignore_index, label_smoothing, lse_square_scale, softcap=softcap)
        self.weight, self.ignore_index, self.lse_square_scale = weight, ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """The loss of logits _input [..., V], in their dtype. AssertionError for an id out of bounds, as in Liger."""
        out.check_targets(target, _input.shape[-1], self.ignore_index)
        asked = out.Asked(self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens)
        found = cross_entropy(
            _input, target, class_weight=self.weight, ignore_index=self.ignore_index, z_loss=self.lse_square_scale,
            label_smoothing=self.label_smoothing, reduction=self.reduction, softcap=self.softcap,
            return_stats=asked.any,
        )  # fmt: skip
        result = out.output(found, asked, target, self.ignore_index, self.lse_square_scale, self.reduction, self.weight)
        return out.in_dtype(result, _input.dtype, _input.dtype)
