"""A training loop that was written for Liger-Kernel's loss: ``python examples/liger_training.py``."""

import torch

from logitless.torch_impl.integrations.liger import LigerFusedLinearCrossEntropyLoss  # was: liger_kernel.transformers

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


def main() -> float:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    body = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    loss_fn = LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *body.parameters(), *head.parameters()], lr=3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (16, 1)) * 3 ** torch.arange(33) % VOCABULARY
    for step in range(STEPS):
        hidden, _ = body(embedding(ids[:, :-1]))
        loss = loss_fn(head.weight, hidden.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
