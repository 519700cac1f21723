"""MaxText's trainer with logitless' loss: ``python examples/maxtext_training.py [option=value ...]``.

The options are MaxText's, and come after those below: a small model on synthetic data, which runs on a CPU.
"""

import sys

try:
    import maxtext
    from absl import app
    from maxtext.trainers.pre_train import train
except ImportError as error:
    raise SystemExit(f"{error}: pip install maxtext[cuda12] or maxtext[tpu]") from None

from logitless.jax_impl.integrations.maxtext import patch_maxtext

OPTIONS = (
    "run_name=logitless", "hardware=cpu", "dataset_type=synthetic", "enable_checkpointing=false", "steps=30",
    "base_output_directory=/tmp/maxtext", "skip_jax_distributed_system=true", "per_device_batch_size=4",
    "max_target_length=64", "base_emb_dim=128", "base_mlp_dim=256", "base_num_decoder_layers=1",
    "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=32", "vocab_size=4096", "learning_rate=0.003",
    "attention=dot_product", "num_vocab_tiling=2",
)  # fmt: skip


def main() -> None:
    patch_maxtext(memory_budget=16 * 2**20)  # without num_vocab_tiling above 1 MaxText computes full logits
    base = f"{maxtext.__path__[0]}/configs/base.yml"
    app.run(train.main, argv=["train", base, *OPTIONS, *sys.argv[1:]])


if __name__ == "__main__":
    main()
