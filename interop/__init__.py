"""Between the frameworks: the same bytes as a ``torch.Tensor`` and as a ``jax.Array``.

Importing this package imports neither torch nor jax; each function imports what it needs when it is called.
See ``docs/interop.md`` for what is shared, what is copied and how long the memory lives.
"""

from logitless.interop.dlpack import to_jax, to_torch

__all__ = ["to_jax", "to_torch"]
