"""A pipeline in a V, without idle time: ``torchrun --nproc-per-node 2 examples/torch_pipeline_training.py``.

A rank has two of the stages: rank 0 the first, with the embedding, and the last, with the head. torch's
ScheduleZBVZeroBubble cuts each microbatch's backward in two, B for what the stage before waits for and W for the
weights. The loss leaves the head's gradient in a queue, and W computes it. NCCL is used where there are GPUs, otherwise
gloo.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from logitless import layer_partition
from logitless.torch_impl import WeightGradQueue, linear_cross_entropy

LAYERS, WIDTH, VOCABULARY = 7, 64, 999
TOKENS, MICROBATCHES, STEPS = 512, 8, 40


class Layer(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Sequential):
    """Some layers, behind the embedding on the first stage. The last one also holds the head, which the loss reads."""

    def __init__(self, layers: int, first: bool, last: bool) -> None:
        embedding = [nn.Embedding(VOCABULARY, WIDTH)] if first else []
        super().__init__(*embedding, *(Layer() for _ in range(layers)), *([nn.LayerNorm(WIDTH)] if last else []))
        self.register_parameter("head", nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.02) if last else None)


def train(group: dist.ProcessGroup, device: str = "cpu", steps: int = STEPS) -> list[float]:
    """The loss of every step, on the rank that has it."""
    rank, ranks = group.rank(), group.size()
    last = 2 * ranks - 1
    torch.manual_seed(0)
    costs = {"head_cost": 2.0, "embedding_cost": 2.0}  # a layer has half of the head's parameters
    counts = layer_partition(LAYERS, 2 * ranks, min_layers=0, v_shaped=True, **costs)
    modules = [Stage(layers, stage == 0, stage == last).to(device) for stage, layers in enumerate(counts)]
    queue = WeightGradQueue(limit=2 * ranks)

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        loss, weight_grad = linear_cross_entropy(hidden, modules[last].head, target, defer_weight_grad=True)
        queue.put(weight_grad)
        return loss

    stages = [
        PipelineStage(modules[stage], stage, last + 1, torch.device(device), group=group, dw_builder=builder)
        for stage, builder in ((rank, None), (last - rank, queue.dw_builder() if rank == 0 else None))
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_of)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=3e-3)
    # Something to be learned: every id is followed by its threefold.
    ids = torch.arange(TOKENS, device=device) % VOCABULARY
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found: list[Tensor] = []
        with queue:
            if rank == 0:
                schedule.step(ids, target=ids * 3 % VOCABULARY, losses=found)
            else:
                schedule.step()
        optimizer.step()
        losses += [torch.stack(found).mean().item()] if found else []
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        device = f"cuda:{torch.cuda.current_device()}"
    losses = train(dist.group.WORLD, device)
    if dist.get_rank() == 0:
        for step in (*range(0, STEPS, 10), STEPS - 1):
            print(f"step {step:3d}  loss {losses[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
