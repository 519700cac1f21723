"""GRPO's loop with the head function that verl's models call: ``python examples/verl_training.py``.

verl itself is not needed here. In verl ``patch_verl()`` puts the same function in the place of its own. The reward is
the share of even ids in a text of four, so it is about one half at first.
"""

import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}: pip install transformers") from None

from logitless.torch_impl.integrations.verl import linear_cross_entropy

VOCABULARY, PROMPTS, GROUP, LENGTH, TEMPERATURE, STEPS = 4096, 4, 16, 4, 1.0, 20


def log_probs_of(model: LlamaForCausalLM, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the answers' ids, [texts, LENGTH] each."""
    hidden = model.model(texts).last_hidden_state[:, -LENGTH - 1 : -1]
    labels = texts[:, -LENGTH:]
    found = linear_cross_entropy(hidden, model.lm_head.weight, labels, TEMPERATURE, "none", None)
    return found[0].view_as(labels), found[1].view_as(labels)


def main() -> float:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompts = torch.randint(1, VOCABULARY, (PROMPTS, 4)).repeat_interleave(GROUP, 0)
    settings = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": True, "temperature": TEMPERATURE}
    for step in range(STEPS):
        texts = model.generate(prompts, **settings, top_k=0, pad_token_id=0)
        rewards = (texts[:, -LENGTH:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            before, _ = log_probs_of(model, texts)
        for _ in range(2):
            log_probs, entropy = log_probs_of(model, texts)
            ratio = (log_probs - before).exp()
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -(objective + 1e-3 * entropy).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  reward {rewards.mean():.3f}  entropy {entropy.mean():.2f}")
    return float(rewards.mean())


if __name__ == "__main__":
    main()
