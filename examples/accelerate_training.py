"""A loop with accelerate and a patched model: ``accelerate launch examples/accelerate_training.py``, or by python."""

import torch

try:
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}: pip install accelerate transformers") from None

from logitless.torch_impl import patch

VOCABULARY, STEPS = 4096, 32  # each sequence is seen eight times


def main() -> float:
    accelerator = Accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    model = patch(LlamaForCausalLM(config))  # the only line that accelerate's own program does not have
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (64, 1)).repeat(8, 1) * 3 ** torch.arange(33) % VOCABULARY
    batches = torch.utils.data.DataLoader(ids, batch_size=16)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for step, batch in enumerate(batches):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            accelerator.print(f"step {step:3d}  loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
