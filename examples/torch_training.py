"""A training loop in PyTorch with logitless as the last layer: ``python examples/torch_training.py``."""

import torch

from logitless.torch_impl import LinearCrossEntropy

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


def main() -> float:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    body = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
    head = LinearCrossEntropy(WIDTH, VOCABULARY, z_loss=1e-4, memory_budget=16 * 2**20)
    parameters = [*embedding.parameters(), *body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    start = torch.randint(0, VOCABULARY, (16, 1))
    ids = torch.cat([start * 3**power % VOCABULARY for power in range(33)], dim=1)
    for step in range(STEPS):
        hidden, _ = body(embedding(ids[:, :-1]))
        loss = head(hidden, ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
