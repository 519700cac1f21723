"""Linear cross-entropy for JAX; the same names as :mod:`logitless.torch_impl`."""

from logitless.jax_impl.api import linear_cross_entropy, linear_log_probs

__all__ = ["linear_cross_entropy", "linear_log_probs"]
