"""Linear cross-entropy for JAX; the same names as :mod:`logitless.torch_impl`."""

from logitless.jax_impl.api import linear_cross_entropy, linear_log_probs
from logitless.jax_impl.losses import clipped_policy_loss, distillation_loss, dpo_loss
from logitless.jax_impl.parallel import global_normalizer
from logitless.jax_impl.sharded import sharded_linear_cross_entropy, sharded_linear_log_probs

__all__ = [
    "clipped_policy_loss",
    "distillation_loss",
    "dpo_loss",
    "global_normalizer",
    "linear_cross_entropy",
    "linear_log_probs",
    "sharded_linear_cross_entropy",
    "sharded_linear_log_probs",
]
