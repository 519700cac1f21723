"""The kernels hub's layer ForCausalLMLoss in a training loop: ``python examples/kernels_training.py``.

A folder stands for the hub's repository, so nothing is fetched. No model of transformers calls this layer yet.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

try:
    import kernels
except ImportError as error:
    raise SystemExit(f"{error}: pip install kernels") from None

VOCABULARY, WIDTH, STEPS = 4096, 128, 30
METADATA = {"name": "causal-lm-loss", "id": "causal_lm_loss", "version": 1, "license": "Apache-2.0"}
FILES = {
    "__init__.py": "from . import layers",
    "layers.py": "from logitless.torch_impl.integrations.kernels_hub import ForCausalLMLoss",
    "metadata.json": json.dumps({**METADATA, "python-depends": [], "backend": {"type": "cpu"}}),
}


@kernels.use_kernel_forward_from_hub("ForCausalLMLoss")
class Loss(torch.nn.Module):
    """A loss of logits, as it is without the layer."""

    def forward(
        self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
        shift_labels: Any = None, hidden_states: Any = None, lm_head_weight: Any = None, lm_head_bias: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main() -> float:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    body = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    with tempfile.TemporaryDirectory() as folder:
        (package := Path(folder, "build", "torch-cpu")).mkdir(parents=True)
        for name, text in FILES.items():
            (package / name).write_text(text)
        layer = kernels.LocalLayerRepository(Path(folder), layer_name="ForCausalLMLoss")
        with kernels.use_kernel_mapping({"ForCausalLMLoss": {"cpu": layer}}):
            loss_fn = kernels.kernelize(Loss(), mode=kernels.Mode.TRAINING, device="cpu")
    optimizer = torch.optim.AdamW([*embedding.parameters(), *body.parameters(), *head.parameters()], lr=3e-3)
    # A sequence to be learned: every id is followed by its successor times three.
    ids = torch.randint(0, VOCABULARY, (16, 1)) * 3 ** torch.arange(33) % VOCABULARY
    for step in range(STEPS):
        hidden, _ = body(embedding(ids))
        loss = loss_fn(None, ids, VOCABULARY, hidden_states=hidden, lm_head_weight=head.weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
