"""Three steps of one of TRL's trainers on a tiny model with random weights, on the CPU. Imports TRL."""

from __future__ import annotations

from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

V = 101
KINDS = ("sft", "dpo", "grpo")


def make(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 8
    return model


def words() -> Any:
    ids = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, V)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def data(*parts: str) -> Any:
    """Rows of random text; the prompts' lengths differ, so that batches are padded."""
    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, V, (count,), generator=generator).tolist()) + " "

    sizes = {"prompt": 3, "completion": 5, "chosen": 5, "rejected": 4}
    return datasets.Dataset.from_list([{part: text(sizes[part] + row % 3) for part in parts} for row in range(12)])


def trainer(kind: str, model: Any, folder: Any, **options: Any) -> Any:
    options = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "optim": "sgd", "learning_rate": 0.1,
        "max_grad_norm": 0.0, "bf16": False,
    } | options  # fmt: skip
    if kind == "sft":
        config, rows = trl.SFTConfig(max_length=32, **options), data("prompt", "completion")
        return trl.SFTTrainer(model, args=config, train_dataset=rows, processing_class=words())
    if kind == "dpo":
        config, rows = trl.DPOConfig(max_length=32, **options), data("prompt", "chosen", "rejected")
        return trl.DPOTrainer(model, make(1), args=config, train_dataset=rows, processing_class=words())
    fields = trl.GRPOConfig.__dataclass_fields__
    entropy = {"entropy_coef": 0.1} if "entropy_coef" in fields else {}  # its gradient
    config = trl.GRPOConfig(
        max_completion_length=6, num_generations=2, num_iterations=2, temperature=0.9, **entropy, **options
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, one)) % 7) for one in completions]

    return trl.GRPOTrainer(model, reward, args=config, train_dataset=data("prompt"), processing_class=words())


def train(kind: str, model: Any, folder: Any, **options: Any) -> tuple[list[float], list[dict[str, float]]]:
    """The losses, not rounded, and what was logged in each step."""
    made, losses = trainer(kind, model, folder, **options), []
    compute_loss = made.compute_loss

    def recorded(*arguments: Any, **named: Any) -> Any:
        result = compute_loss(*arguments, **named)
        losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
        return result

    made.compute_loss = recorded
    made.train()
    return losses, made.state.log_history
