"""Between the frameworks: the same bytes as a ``torch.Tensor`` and as a ``jax.Array``.

Importing this package imports neither torch nor jax; each function imports what it needs when it is called.
See ``docs/interop.md`` for what is shared, what is copied and how long the memory lives.
"""

from logitless.interop.bridges import jax_in_torch, torch_in_jax
from logitless.interop.exchange import to_jax, to_torch
from logitless.interop.own_arrays import load_case
from logitless.interop.parity import Comparison, compare

__all__ = ["Comparison", "compare", "jax_in_torch", "load_case", "to_jax", "to_torch", "torch_in_jax"]
