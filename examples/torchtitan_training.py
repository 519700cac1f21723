"""torchtitan's Llama 3 under FSDP2: ``torchrun --nproc-per-node 2 examples/torchtitan_training.py``, on CPUs.

The loop does what torchtitan's trainer does with a ChunkedLossWrapper. With that trainer itself, the change is one line
of a config_registry.py: ``loss=LinearCrossEntropyLoss.Config()``.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

try:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
except ImportError as error:
    raise SystemExit(f"{error}: pip install torchtitan") from None

from logitless.torch_impl.integrations.torchtitan import LinearCrossEntropyLoss

STEPS, LENGTH = 30, 32


def train() -> list[float]:
    """The loss of every step, of all ranks' tokens."""
    rank, ranks, single = dist.get_rank(), dist.get_world_size(), torch.float32
    torch.manual_seed(0)
    config = model_registry("debugmodel").model
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()  # flex is for GPUs
    model = config.build()
    model.init_states()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, param_dtype=single, reduce_dtype=single, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    loss_fn = LinearCrossEntropyLoss.Config(z_loss=1e-4).build()
    loss_fn.set_lm_head(model.lm_head)  # this line and the next are in torchtitan's trainer
    model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, config.vocab_size, (16, 1)) * 3 ** torch.arange(LENGTH + 1) % config.vocab_size
    own = ids.chunk(ranks)[rank]
    losses = []
    for step in range(STEPS):
        loss, _ = loss_fn(model(own[:, :-1]), own[:, 1:], torch.tensor(16.0 * LENGTH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item())
        if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
