"""Linear cross-entropy for PyTorch; the same names as :mod:`logitless.jax_impl`."""

from logitless.torch_impl.api import linear_cross_entropy, linear_log_probs
from logitless.torch_impl.capture import CapturedHead, capture_lm_head
from logitless.torch_impl.deferred import DeferredWeightGrad
from logitless.torch_impl.losses import clipped_policy_loss, distillation_loss, dpo_loss
from logitless.torch_impl.module import LinearCrossEntropy
from logitless.torch_impl.parallel import global_normalizer

__all__ = [
    "CapturedHead",
    "DeferredWeightGrad",
    "LinearCrossEntropy",
    "capture_lm_head",
    "clipped_policy_loss",
    "distillation_loss",
    "dpo_loss",
    "global_normalizer",
    "linear_cross_entropy",
    "linear_log_probs",
]
