"""Linear cross-entropy for PyTorch; the same names as :mod:`logitless.jax_impl`."""

from logitless.torch_impl.api import linear_cross_entropy, linear_log_probs
from logitless.torch_impl.distillation.api import dense_distillation_loss, distillation_loss, sparse_distillation_loss
from logitless.torch_impl.distributed.deferred import DeferredWeightGrad, WeightGradQueue
from logitless.torch_impl.distributed.normalizer import global_normalizer
from logitless.torch_impl.gather import padded_index_gather
from logitless.torch_impl.given_ids.api import linear_token_log_probs, linear_top_k
from logitless.torch_impl.given_logits.api import cross_entropy
from logitless.torch_impl.huggingface.capture import CapturedHead, capture_lm_head
from logitless.torch_impl.huggingface.patch import patch, unpatch
from logitless.torch_impl.losses import clipped_policy_loss, dpo_loss, kto_loss
from logitless.torch_impl.module import LinearCrossEntropy
from logitless.torch_impl.profiling import profile_losses, profile_saved_tensors

__all__ = [
    "CapturedHead",
    "DeferredWeightGrad",
    "LinearCrossEntropy",
    "WeightGradQueue",
    "capture_lm_head",
    "clipped_policy_loss",
    "cross_entropy",
    "dense_distillation_loss",
    "distillation_loss",
    "dpo_loss",
    "global_normalizer",
    "kto_loss",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_token_log_probs",
    "linear_top_k",
    "padded_index_gather",
    "patch",
    "profile_losses",
    "profile_saved_tensors",
    "sparse_distillation_loss",
    "unpatch",
]
