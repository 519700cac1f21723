"""logitless: linear cross-entropy that never holds the logits. This package imports no array framework.

The implementations: :mod:`logitless.torch_impl` and :mod:`logitless.jax_impl`; bridges: :mod:`logitless.interop`.
"""

from logitless.partition import layer_partition
from logitless.planning import ChunkPlan, plan
from logitless.spec import LossOptions, TokenStats

__version__ = "0.1.0"

__all__ = ["ChunkPlan", "LossOptions", "TokenStats", "__version__", "layer_partition", "plan"]
