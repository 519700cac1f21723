"""A loss without options in fewer operations of PyTorch's than eager.py takes: a small one on a CPU, any on a GPU.

No mirror: XLA fuses what it compiles.
"""

from __future__ import annotations

from logitless.planning import ChunkPlan
from logitless.torch_impl.call import Arrays, Call, Needs


def is_plain(arrays: Arrays, call: Call, needs: Needs) -> bool:
    """Whether nothing is asked for but a loss and its gradients, of ids, a bias and a scale."""
    if call.shard is not None or call.statistics or call.deferred is not None or needs.into is not None:
        return False
    if not isinstance(call.plan, ChunkPlan) or call.plan.order != "tokens":
        return False
    options, weights = call.options, (arrays.token_weight, arrays.class_weight, arrays.temperature)
    if options.label_smoothing or options.z_loss or options.softcap is not None:
        return False
    return all(weight is None for weight in weights)
