"""Training PEFT's adapters, one of them on the head, of a patched model: ``python examples/peft_training.py``."""

import torch

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}: pip install peft transformers") from None

from logitless.torch_impl import patch

VOCABULARY, STEPS = 4096, 30


def main() -> float:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    adapters = LoraConfig(r=16, target_modules=["q_proj", "v_proj", "lm_head"])
    model = patch(get_peft_model(LlamaForCausalLM(config), adapters))
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=3e-2)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (16, 1)) * 3 ** torch.arange(33) % VOCABULARY
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
