"""Training with transformers' Trainer and a patched model: ``python examples/transformers_training.py``."""

import tempfile

import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ImportError as error:
    raise SystemExit(f"{error}: pip install transformers accelerate") from None

from logitless.torch_impl import patch

VOCABULARY, STEPS = 4096, 30


def main() -> float:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    model = patch(LlamaForCausalLM(config))  # the only line that transformers' own program does not have
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (64, 1)) * 3 ** torch.arange(33) % VOCABULARY
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step in (*range(0, STEPS, 10), STEPS - 1):
        print(f"step {step:3d}  loss {losses[step]:.4f}")
    return losses[-1]


if __name__ == "__main__":
    main()
