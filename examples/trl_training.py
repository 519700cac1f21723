"""Fine-tuning with TRL's trainer and logitless' losses: ``python examples/trl_training.py`` (pip install trl)."""

import tempfile

import torch

try:
    import datasets
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise SystemExit(f"{error}: pip install trl") from None

from logitless.torch_impl.integrations.trl import patch_trl, unpatch_trl

VOCABULARY, WIDTH, STEPS = 4096, 128, 30


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word for every id; the first one is padding."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w0")


def main() -> float:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    # A sequence to be learned: every id is followed by its successor times three.
    starts = torch.randint(1, VOCABULARY, (64,)).tolist()
    texts = [" ".join(f"w{start * 3**power % VOCABULARY}" for power in range(33)) for start in starts]
    patch_trl(memory_budget=16 * 2**20)  # the only line that TRL's own program does not have
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = SFTTrainer(
                transformers.LlamaForCausalLM(config),
                args=SFTConfig(
                    output_dir=folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=3e-3,
                    logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
                ),
                train_dataset=datasets.Dataset.from_dict({"text": texts}),
                processing_class=make_tokenizer(),
            )  # fmt: skip
            trainer.train()
    finally:
        unpatch_trl()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step in (*range(0, STEPS, 10), STEPS - 1):
        print(f"step {step:3d}  loss {losses[step]:.4f}")
    return losses[-1]


if __name__ == "__main__":
    main()
