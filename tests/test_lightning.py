"""A LightningModule whose training step calls a patched model, three steps by Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless.tolerances import CHAIN, error  # noqa: E402
from logitless.torch_impl import patch  # noqa: E402


def make(patched: bool) -> Any:
    """A module with a model of transformers. Lightning takes seconds to import: only where this test runs."""
    import lightning
    import transformers

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = transformers.LlamaConfig(
                vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
            )
            self.model = transformers.LlamaForCausalLM(config)
            self.losses: list[float] = []
            if patched:
                patch(self.model)

        def training_step(self, ids: Any, _: int) -> Any:
            output = self.model(input_ids=ids, labels=ids)
            assert (type(output.logits) is torch.Tensor) != hasattr(self.model.forward, "logitless_patch")
            self.losses.append(float(output.loss.detach()))
            return output.loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return Module()


def test_three_steps(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    pytest.importorskip("transformers", reason="the model is one of transformers")
    losses = []
    for patched in (False, True):
        module = make(patched)
        data = torch.utils.data.DataLoader(torch.arange(96).reshape(6, 16), batch_size=2)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, data)
        losses.append(torch.tensor(module.losses))
    assert len(losses[0]) == 3
    assert error(losses[1], losses[0]) <= CHAIN
