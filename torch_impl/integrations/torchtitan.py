"""torchtitan's loss without logits: a loss in the place of its ChunkedLossWrapper.

    loss=LinearCrossEntropyLoss.Config(),  # was: ChunkedLossWrapper.Config(...), in a config_registry.py

torchtitan hands the head to a ChunkedLossWrapper, and hidden states in the place of logits. The loss is computed inside
of the head's forward, so FSDP2 gathers its weight once and reduces its gradient once, by one reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from logitless import spec
from logitless.planning import Preference, check_limits
from logitless.torch_impl.backend import BACKENDS
from logitless.torch_impl.integrations.options import Options
from logitless.torch_impl.integrations.sharded_head import head_cross_entropy

if TYPE_CHECKING:

    class ChunkedLossWrapper:
        """What is used of torchtitan's, which is not always installed."""

        @dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int
            loss_fn: object

        lm_head: nn.Module | None

        def set_lm_head(self, lm_head: nn.Module) -> None: ...

    class CrossEntropyLoss:
        class Config: ...
else:
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """Σ ℓ_i / global_valid_tokens of hidden states [B, L, D], by the head that torchtitan sets."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """``num_chunks`` has no effect: the plan chooses. ``loss_fn`` is torchtitan's CrossEntropyLoss."""

        label_smoothing: float = 0.0
        z_loss: float = 0.0
        plan: Preference | None = None
        memory_budget: int | None = None
        backend: str | None = None

    def __init__(self, config: Config, *, compile_config: object = None) -> None:
        """compile_config has no effect. Raises NotImplementedError for another ``loss_fn``; as the loss's checks."""
        if type(config.loss_fn) is not CrossEntropyLoss.Config:
            raise NotImplementedError(
                f"loss_fn: got {type(config.loss_fn).__qualname__}, allowed is CrossEntropyLoss.Config, which this is: "
                f"for another loss keep ChunkedLossWrapper"
            )
        spec.LossOptions(label_smoothing=config.label_smoothing, z_loss=config.z_loss)
        check_limits(config.plan, config.memory_budget)
        spec.check_backend(config.backend, BACKENDS)
        self.lm_head = None
        self.options: Options = {
            "label_smoothing": config.label_smoothing, "z_loss": config.z_loss, "plan": config.plan,
            "memory_budget": config.memory_budget, "backend": config.backend,
        }  # fmt: skip

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and no metrics. pred [B, L, D], labels [B, L], -100 is ignored; the loss is float32.

        Without global_valid_tokens it is the sum, as torchtitan's is. Raises RuntimeError before ``set_lm_head``.
        """
        if self.lm_head is None:
            raise RuntimeError("lm_head: got none yet, allowed is a loss after set_lm_head")
        options: Options = {**self.options, "reduction": "sum"}
        if global_valid_tokens is not None:
            options |= {"reduction": "mean", "normalizer": global_valid_tokens}
        return head_cross_entropy(self.lm_head, pred, labels, **options), {}
