"""The LM head as a module whose forward is the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitless.planning import ChunkPlan, Preference, check_limits
from logitless.spec import LossOptions, Reduction
from logitless.torch_impl.api import linear_cross_entropy


class LinearCrossEntropy(nn.Linear):
    """An LM head: ``forward(hidden, target)`` is :func:`linear_cross_entropy` with the module's weight and bias.

    A subclass of torch.nn.Linear, so its parameters are made, named, initialised, tied and saved as a Linear's are:
    ``weight`` [V, D] and ``bias`` [V] or None. :meth:`logits` gives the plain linear map, for generation.

    Arguments: in_features D; out_features V; bias, device and dtype as for torch.nn.Linear (bias is off by default, as
    LM heads have none); plan a name; the others as for :func:`linear_cross_entropy`, with the same defaults. With a
    process_group out_features is V_r, this rank's entries, and the module's parameters are those.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        plan: Preference | None = None,
        memory_budget: int | None = None,
        backend: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        options = LossOptions(reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap)
        self.options = options.tempered(temperature)
        if class_weight is not None and not isinstance(class_weight, Tensor):
            raise TypeError(f"class_weight: got {type(class_weight).__name__}, allowed is a torch.Tensor or None")
        check_limits(plan, memory_budget)
        self.plan = plan
        self.memory_budget = memory_budget
        self.backend = backend
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.register_buffer("class_weight", class_weight)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        plan: ChunkPlan | Preference | None = None,
        return_stats: bool = False,
        accumulate_into: Tensor | None = None,
        defer_weight_grad: bool = False,
    ) -> Any:
        """The loss of hidden [..., D] against target [...]; see :func:`linear_cross_entropy`.

        A plan that is given here replaces the module's plan and memory_budget.
        """
        o = self.options
        return linear_cross_entropy(
            hidden,
            self.weight,
            target,
            self.bias,
            reduction=o.reduction,
            ignore_index=o.ignore_index,
            token_weight=token_weight,
            class_weight=self.class_weight,
            label_smoothing=o.label_smoothing,
            z_loss=o.z_loss,
            logit_scale=o.logit_scale,
            softcap=o.softcap,
            normalizer=normalizer,
            plan=self.plan if plan is None else plan,
            memory_budget=self.memory_budget if plan is None else None,
            backend=self.backend,
            return_stats=return_stats,
            process_group=self.process_group,
            sequence_parallel=self.sequence_parallel,
            accumulate_into=accumulate_into,
            defer_weight_grad=defer_weight_grad,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """z = f(hidden weightᵀ + bias), [..., V], as the loss has them: held whole, for generation."""
        z = nn.functional.linear(hidden, self.weight, self.bias)
        if self.options.logit_scale != 1.0:
            z = z * self.options.logit_scale
        cap = self.options.softcap
        return z if cap is None else cap * torch.tanh(z / cap)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.options}"
