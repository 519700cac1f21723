"""cut-cross-entropy's names for the same losses: a program that uses them changes an import.

    from logitless.torch_impl.integrations.cce import linear_cross_entropy  # was: cut_cross_entropy

Signatures, defaults and meanings are those of cut-cross-entropy 25.6. What differs:

- ``impl``, ``filter_eps``, ``accum_e_fp32``, ``accum_c_fp32``, ``filter_e_grad`` and ``filter_c_grad`` tune its kernels
  and change nothing here: sums are float32, and no part of a gradient is left out. Their values are checked.
- If no token counts, the mean is 0, not NaN. Errors name hidden, weight and target for e, c and targets.
- DTensors are taken. ``reduce_e_grad=False`` is refused.
- ``cce_patch`` takes a model of any architecture, not an architecture's name, and only its mean.
"""

from __future__ import annotations

import enum

from torch import Tensor, nn

from logitless import spec
from logitless.spec import Reduction
from logitless.torch_impl import api
from logitless.torch_impl.huggingface.patch import patch
from logitless.torch_impl.integrations.cce_options import (
    LinearCrossEntropyImpl,
    VocabParallelOptions,
    check_tuning,
    compute_z_loss,
    group_of,
)

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyImpl",
    "VocabParallelOptions",
    "cce_patch",
    "compute_z_loss",
    "linear_cross_entropy",
]


def linear_cross_entropy(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    softcap: float | None = None, reduction: Reduction = "mean", shift: bool | int = 0, return_lse: bool = False,
    filter_eps: float | str | None = "auto", accum_e_fp32: bool = False, accum_c_fp32: bool = False,
    filter_e_grad: bool = True, filter_c_grad: bool = True, impl: str | enum.Enum = LinearCrossEntropyImpl.CCE,
    vocab_parallel_options: VocabParallelOptions | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`logitless.torch_impl.linear_cross_entropy` by cut-cross-entropy's name and order of arguments.

    e [..., D], c [V, D], targets [...], bias [V]. With a ``shift`` (True is 1) e is [..., T, D] and targets [..., T],
    of one axis or more, and results per token are [..., T − shift]. Returns the loss, or (loss, lse), both
    differentiable. Raises as that function; NotImplementedError for ``reduce_e_grad=False``.
    """
    check_tuning(
        filter_eps, impl, accum_e_fp32=accum_e_fp32, accum_c_fp32=accum_c_fp32, filter_e_grad=filter_e_grad,
        filter_c_grad=filter_c_grad,
    )  # fmt: skip
    shift = int(shift) if isinstance(shift, bool) else shift
    found = api.linear_cross_entropy(
        e, c, targets, bias, ignore_index=ignore_index, softcap=softcap, reduction=reduction, shift=shift,
        return_lse=return_lse,
        process_group=None if vocab_parallel_options is None else group_of(vocab_parallel_options, c),
    )  # fmt: skip
    # The last positions have no target, and cut-cross-entropy no results for them.
    loss, *lse = (v[..., : v.shape[-1] - shift] if v.dim() else v for v in (found if return_lse else (found,)))
    return (loss, lse[0]) if return_lse else loss


class LinearCrossEntropy(nn.Module):
    """``forward(e, c, targets, bias=None)`` is the function above, with these options."""

    def __init__(
        self, ignore_index: int = -100, softcap: float | None = None, reduction: Reduction = "mean",
        shift: bool | int = 0, filter_eps: float | str | None = "auto", accum_e_fp32: bool = False,
        accum_c_fp32: bool = False, filter_e_grad: bool = True, filter_c_grad: bool = True,
        impl: str | enum.Enum = LinearCrossEntropyImpl.CCE, return_lse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        spec.LossOptions(reduction, ignore_index, softcap=softcap)
        self.ignore_index, self.softcap, self.reduction, self.shift = ignore_index, softcap, reduction, shift
        self.filter_eps, self.accum_e_fp32, self.accum_c_fp32 = filter_eps, accum_e_fp32, accum_c_fp32
        self.filter_e_grad, self.filter_c_grad = filter_e_grad, filter_c_grad
        self.impl, self.return_lse = impl, return_lse

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of e [..., D] times c [V, D] against targets [...]."""
        return linear_cross_entropy(
            e, c, targets, bias, self.ignore_index, self.softcap, self.reduction, self.shift, self.return_lse,
            self.filter_eps, self.accum_e_fp32, self.accum_c_fp32, self.filter_e_grad, self.filter_c_grad, self.impl,
        )  # fmt: skip


def cce_patch(
    model_type_or_model: nn.Module, impl: str | enum.Enum = LinearCrossEntropyImpl.CCE, reduction: str = "mean",
    filter_eps: float | str | None = "auto", accum_e_fp32: bool = False, accum_c_fp32: bool = False,
    filter_e_grad: bool = True, filter_c_grad: bool = True, train_only: bool = False,
) -> nn.Module:  # fmt: skip
    """:func:`logitless.torch_impl.patch` of a model, which it returns; ``unpatch`` takes it back.

    ``train_only`` changes nothing: in eval mode the logits are made when something reads them. Raises as ``patch``;
    NotImplementedError for an architecture's name and for another reduction.
    """
    check_tuning(
        filter_eps, impl, accum_e_fp32=accum_e_fp32, accum_c_fp32=accum_c_fp32, filter_e_grad=filter_e_grad,
        filter_c_grad=filter_c_grad, train_only=train_only,
    )  # fmt: skip
    if not isinstance(model_type_or_model, nn.Module):
        raise NotImplementedError(
            f"model_type_or_model: got {model_type_or_model!r:.80}, allowed is a model: cce_patch(model)"
        )
    if reduction != "mean":
        raise NotImplementedError(
            f"reduction: got {reduction!r}, allowed is 'mean': capture_lm_head gives hidden states and a head for "
            f"linear_cross_entropy(..., shift=1, reduction={reduction!r})"
        )
    return patch(model_type_or_model)
