"""The layer ``ForCausalLMLoss`` of Hugging Face's kernels hub: transformers' loss, of logits or of hidden states.

The mapping of transformers 5.23 names such a layer, but none of its models calls one yet. A module that is marked with
``use_kernel_forward_from_hub("ForCausalLMLoss")`` gets this one by ``kernels.LocalLayerRepository``, or by its class.
"""

from __future__ import annotations

from torch import Tensor, nn

from logitless.torch_impl.api import linear_cross_entropy
from logitless.torch_impl.given_logits.api import cross_entropy

__all__ = ["ForCausalLMLoss"]


class ForCausalLMLoss(nn.Module):
    """A layer without parameters or options, as the hub's rules ask for."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits: Tensor | None,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        hidden_states: Tensor | None = None,
        lm_head_weight: Tensor | None = None,
        lm_head_bias: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """The mean over labels that count, or their sum / num_items_in_batch; 0 where none does.

        Arguments:
            logits: [B, T, V], or None beside hidden_states.
            labels: [B, T] ids, each the target of the position before it; shift_labels [B, T]: not shifted.
            vocab_size: V.
            hidden_states, lm_head_weight, lm_head_bias: [B, T, D], [V, D] and [V] or None. With these logits are not
                looked at.
            kwargs: have no effect, as in transformers' own.

        Returns the loss in float32 (float64 for float64). Raises ValueError for one of hidden_states and
        lm_head_weight alone, for logits and labels that are missing, and for another V.
        """
        target, shift = (labels, 1) if shift_labels is None else (shift_labels, 0)
        if target is None:
            raise ValueError("labels: got None beside shift_labels=None, allowed is one of them")
        if (hidden_states is None) != (lm_head_weight is None):
            raise ValueError("lm_head_weight: got one of hidden_states and lm_head_weight, allowed are both or neither")
        found = logits if lm_head_weight is None else lm_head_weight.T
        if found is None:
            raise ValueError("logits: got None without hidden_states, allowed are logits [B, T, V]")
        if found.shape[-1] != vocab_size:
            raise ValueError(f"vocab_size: got {vocab_size}, allowed is the V = {found.shape[-1]} of the logits")
        if hidden_states is not None and lm_head_weight is not None:
            loss: Tensor = linear_cross_entropy(
                hidden_states, lm_head_weight, target.reshape(hidden_states.shape[:-1]).to(hidden_states.device),
                lm_head_bias, ignore_index=ignore_index, normalizer=num_items_in_batch, shift=shift,
            )  # fmt: skip
            return loss
        target = nn.functional.pad(target[..., shift:], (0, shift), value=ignore_index)
        given = cross_entropy(
            found, target.reshape(found.shape[:-1]).to(found.device), ignore_index=ignore_index,
            normalizer=num_items_in_batch,
        )  # fmt: skip
        assert isinstance(given, Tensor)  # statistics were not asked for
        return given
