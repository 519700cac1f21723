"""Linear cross-entropy for JAX; the same names as :mod:`logitless.torch_impl`."""

from logitless.jax_impl.api import linear_cross_entropy, linear_log_probs
from logitless.jax_impl.capture.api import CapturedHead, capture_lm_head
from logitless.jax_impl.distillation.api import dense_distillation_loss, distillation_loss, sparse_distillation_loss
from logitless.jax_impl.distributed.normalizer import global_normalizer
from logitless.jax_impl.distributed.sharding import sharded_linear_cross_entropy, sharded_linear_log_probs
from logitless.jax_impl.gather import padded_index_gather
from logitless.jax_impl.given_ids.api import linear_token_log_probs, linear_top_k
from logitless.jax_impl.given_logits.api import cross_entropy
from logitless.jax_impl.losses import clipped_policy_loss, dpo_loss, kto_loss
from logitless.jax_impl.profiling import profile_losses, profile_saved_residuals
from logitless.jax_impl.weight_grad.api import linear_cross_entropy_value_and_grad
from logitless.jax_impl.weight_grad.deferred import DeferredWeightGrad, WeightGradQueue

__all__ = [
    "CapturedHead",
    "DeferredWeightGrad",
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
    "linear_cross_entropy_value_and_grad",
    "linear_log_probs",
    "linear_token_log_probs",
    "linear_top_k",
    "padded_index_gather",
    "profile_losses",
    "profile_saved_residuals",
    "sharded_linear_cross_entropy",
    "sharded_linear_log_probs",
    "sparse_distillation_loss",
]
