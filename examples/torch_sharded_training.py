"""The demo's model trained on several ranks: ``torchrun --nproc-per-node 2 examples/torch_sharded_training.py``.

Every rank has its own sequences and a slice of everything. FSDP2 splits the body's parameters. The head is a DTensor,
whose placement splits the vocabulary. The head gathers the hidden states of all ranks, so the loss is the mean over the
whole batch, and hidden's gradient comes back as this rank's share. NCCL is used where there are GPUs, else gloo.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from logitless.interop.demo.settings import DemoSettings, initial_parameters
from logitless.interop.demo.torch_model import hidden_states
from logitless.torch_impl import linear_cross_entropy

SETTINGS = DemoSettings(vocabulary=999, width=64, layers=1, heads=2, sequence=32, learning_rate=3e-3)
SEQUENCES, STEPS = 16, 40


class Body(nn.Module):
    """All of the demo's model but its head."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value))
        self.names = list(parameters)

    def forward(self, tokens: Tensor) -> Tensor:
        return hidden_states({name: getattr(self, name.replace(".", "_")) for name in self.names}, tokens, SETTINGS)


def train(mesh: DeviceMesh, steps: int = STEPS) -> list[float]:
    """The loss of every step."""
    rank, ranks, device = mesh.get_local_rank(), mesh.size(), mesh.device_type
    values = initial_parameters(SETTINGS, SETTINGS.vocabulary)
    parameters = {name: torch.from_numpy(value).to(device) for name, value in values.items()}
    head = nn.Parameter(distribute_tensor(parameters.pop("head"), mesh, [Shard(0)]))
    body = Body(parameters)
    fully_shard(body, mesh=mesh)
    body.set_gradient_divide_factor(1.0)  # the loss is of all ranks' tokens already: sum, and do not average
    body.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW([*body.parameters(), head], lr=SETTINGS.learning_rate)
    # Something to be learned: every id is followed by its successor times three.
    start = torch.randint(0, SETTINGS.vocabulary, (SEQUENCES, 1), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([start * 3**power % SETTINGS.vocabulary for power in range(SETTINGS.sequence + 1)], dim=1)
    own = ids.chunk(ranks)[rank].to(device)
    losses = []
    for _ in range(steps):
        hidden = DTensor.from_local(body(own[:, :-1]), mesh, [Shard(0)], run_check=False)
        loss = linear_cross_entropy(hidden, head, ids[:, 1:].to(device), z_loss=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    losses = train(init_device_mesh(device, (dist.get_world_size(),)))
    if dist.get_rank() == 0:
        for step in (*range(0, STEPS, 10), STEPS - 1):
            print(f"step {step:3d}  loss {losses[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
