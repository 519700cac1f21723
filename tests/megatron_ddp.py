"""Megatron's DistributedDataParallel with overlap_grad_reduce around a head that adds its dW to main_grad, one rank.

Run by test_megatron.py: a process of its own, because Megatron keeps its groups in globals and asks CUDA which device
is current, also where there is none. Prints the gradients' errors against torch's own, and what is left in .grad.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from logitless.torch_impl import linear_cross_entropy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(self.body(x), self.head, y, accumulate_into=self.head.main_grad)


def main(store: str) -> None:
    device: Any = torch.device("cpu")
    torch.cuda.current_device = lambda: device
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    shape = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    parallel = DistributedDataParallel(shape, settings, model)
    x, y = torch.randn(6, 4), torch.arange(6)
    errors, left = [], []
    for _ in range(2):
        parallel.zero_grad_buffer()
        for synchronizes in (False, True):  # two micro-batches
            with contextlib.nullcontext() if synchronizes else parallel.no_sync():
                parallel(x, y).backward()
        parallel.finish_grad_sync()
        plain.zero_grad()
        for _ in range(2):
            nn.functional.cross_entropy(plain.body(x) @ plain.head.T, y).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            errors.append(float((ours.main_grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
            left.append(ours.grad is not None)
    print(json.dumps({"errors": errors, "left": left}), flush=True)
    # Megatron keeps some groups, and with them gloo's threads. If one of them drops a tensor while Python ends, the
    # process is aborted.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
