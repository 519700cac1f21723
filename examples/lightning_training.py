"""Training a patched model with Lightning's Trainer: ``python examples/lightning_training.py``."""

from typing import Any

import torch

try:
    import lightning
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}: pip install lightning transformers") from None

from logitless.torch_impl import patch

VOCABULARY, STEPS = 4096, 32


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
        )
        self.model = patch(LlamaForCausalLM(config))  # the only line that Lightning's own program does not have

    def training_step(self, ids: torch.Tensor, step: int) -> Any:
        loss = self.model(input_ids=ids, labels=ids).loss
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> float:
    torch.manual_seed(0)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (64, 1)).repeat(8, 1) * 3 ** torch.arange(33) % VOCABULARY
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(ids, batch_size=16))
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    main()
