"""DeepSpeed's ZeRO-3 and a patched model: ``torchrun --nproc-per-node 2 examples/deepspeed_training.py``.

It needs DeepSpeed, and runs on CPUs with ``DS_ACCELERATOR=cpu``.
"""

import torch
import torch.distributed as dist

try:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}: pip install deepspeed transformers") from None

from logitless.torch_impl import patch

VOCABULARY, STEPS = 4096, 30
SETTINGS = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


def train() -> list[float]:
    """The loss of every step, of this rank's tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    model = patch(LlamaForCausalLM(config))  # the only line that DeepSpeed's own program does not have
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, config=SETTINGS, optimizer=optimizer)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (8 * ranks, 1)) * 3 ** torch.arange(33) % VOCABULARY
    own = ids.chunk(ranks)[rank].to(engine.device)
    losses = []
    for step in range(STEPS):
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
