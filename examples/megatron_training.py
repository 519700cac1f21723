"""Megatron's GPTModel with patch_megatron: ``torchrun --nproc-per-node 2 examples/megatron_training.py``, on CPUs.

The ranks share the vocabulary and everything else that Megatron's tensor parallelism cuts.
"""

import contextlib

import torch
import torch.distributed as dist

try:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig
except ImportError as error:
    raise SystemExit(f"{error}: pip install megatron-core") from None

from logitless.torch_impl.integrations.megatron_model import patch_megatron

VOCABULARY, LENGTH, STEPS = 4096, 32, 30


def train() -> list[float]:
    """The loss of every step."""
    # Megatron asks CUDA for a device and for random states. These two lines are for CPUs.
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=128, num_attention_heads=4, tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    patch_megatron(model)  # the only line that Megatron's own program does not have
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (16, 1)) * 3 ** torch.arange(LENGTH + 1) % VOCABULARY
    positions, mask = torch.arange(LENGTH).expand(16, LENGTH), torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = []
    for step in range(STEPS):
        loss = model(ids[:, :-1], positions, mask[None, None], labels=ids[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
