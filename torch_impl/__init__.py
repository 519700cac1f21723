"""Linear cross-entropy for PyTorch; the same names as :mod:`logitless.jax_impl`."""

from logitless.torch_impl.api import linear_cross_entropy, linear_log_probs
from logitless.torch_impl.module import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy", "linear_log_probs"]
