"""GRPO of a small model, with and without rounded logits: ``python -m bench grpo``. Runs on a CPU.

The demo's transformer learns the demo's text. GRPO then teaches it to write tokens with the letter "e": the reward of a
completion is the share of such tokens. Parameters are float32, every forward is bfloat16. The sampler makes one token
at a time with a cache of keys and values, and the trainer reads whole sequences. So their hidden states differ by the
rounding of the body, which no head can undo.

A head is "rounded" (logits in bfloat16, their log softmax in float32) or "logitless" (``linear_log_probs``, and
``clipped_policy_loss`` as the loss). ``VARIANTS`` says who has which. All have the same seeds, prompts and noise. The
ratio's old policy is what the sampler said of its tokens, so the ratio should be 1 in the first update of every step.

A row is one run: the means over its steps, and each step's values. These are over all sampled tokens, before the first
update of the step, in nats:

    mismatch                        |log p_trainer − log p_sampler|, mean and largest
    kl                              the mean of r − 1 − log r, r = p_trainer / p_sampler: k3 of KL(sampler ‖ trainer)
    outside                         the share of tokens whose ratio is outside of the clip range
    body                            the mismatch of float64 heads on both sides' hidden states
    same_hidden                     the share of tokens whose hidden states are the same bits on both sides
    trainer_error, sampler_error    |log p − log p of a float64 head| on the same hidden states
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench.registry import Results, register

# The demo's settings; ``steps`` are those of the warm-up on text.
MODEL = {
    "vocabulary": 4096, "width": 64, "layers": 2, "heads": 4, "sequence": 48, "batch": 16, "steps": 400,
    "learning_rate": 3e-3, "text_bytes": 1_000_000,
}  # fmt: skip
LETTER = "e"
PROMPTS, GROUP = 8, 8
PROMPT_TOKENS, NEW_TOKENS = 16, 24
INNER_UPDATES = 2
CLIP = 0.2
LEARNING_RATE = 1e-3
MAX_GRADIENT = 1.0
# The sampler's head and the trainer's.
VARIANTS = {
    "bfloat16 logits in both": ("rounded", "rounded"),
    "logitless in the trainer": ("rounded", "logitless"),
    "logitless in both": ("logitless", "logitless"),
}


class Start(NamedTuple):
    """What all runs begin with."""

    settings: Any
    parameters: dict[str, Any]
    tokens: Any
    """The text, [all] ids."""
    rewarded: Any
    """[V] float32: 1 for a token with the letter."""


# ---------------------------------------------------------------------------------------------------------------------
# Heads: log p(y) [..., T] of hidden [..., T, D] and weight [V, D] in bfloat16


def rounded(hidden: Any, weight: Any, target: Any) -> Any:
    import torch

    log_probs = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float(), dim=-1)
    return log_probs.gather(-1, target[..., None])[..., 0]


def logitless(hidden: Any, weight: Any, target: Any) -> Any:
    from logitless.torch_impl import linear_log_probs

    return linear_log_probs(hidden, weight, target)[0]


def exact(hidden: Any, weight: Any, target: Any) -> Any:
    import torch

    log_probs = torch.log_softmax(hidden.double() @ weight.double().T, dim=-1)
    return log_probs.gather(-1, target[..., None])[..., 0]


HEADS: dict[str, Callable[[Any, Any, Any], Any]] = {"rounded": rounded, "logitless": logitless}


def loss_of(log_prob: Any, advantage: Any, old_log_prob: Any) -> Any:
    """GRPO's loss as ``clipped_policy_loss`` has it, from log-probabilities that are there: arXiv:2402.03300, eq. 3."""
    import torch

    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[:, None])
    return -terms.mean()  # all completions are equally long, so the mean of their means is the mean


def loss_and_log_prob(head: str, hidden: Any, weight: Any, target: Any, advantage: Any, old: Any) -> tuple[Any, Any]:
    """The trainer's loss by its head, and log p of the targets."""
    from logitless.torch_impl import clipped_policy_loss

    if head == "rounded":
        log_prob = rounded(hidden, weight, target)
        return loss_of(log_prob, advantage, old), log_prob.detach()
    loss, stats = clipped_policy_loss(
        hidden, weight, target, advantage=advantage, old_log_prob=old, clip_low=CLIP, clip_high=CLIP,
        aggregation="sequence_mean", return_stats=True,
    )  # type: ignore[misc]  # fmt: skip
    return loss, stats.log_prob


# ---------------------------------------------------------------------------------------------------------------------
# The sampler


def in_bfloat16(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.bfloat16() for name, tensor in parameters.items()}


class Decoder:
    """The demo's transformer one token at a time: the keys and values of the tokens before are kept."""

    def __init__(self, parameters: dict[str, Any], settings: Any, sequences: int) -> None:
        self.parameters, self.settings, self.place = parameters, settings, 0
        size = (settings.layers, 2, sequences, settings.heads, settings.sequence, settings.width // settings.heads)
        self.cache = parameters["embedding"].new_zeros(size)

    def hidden(self, token: Any) -> Any:
        """token [B] at the next place → what the LM head reads [B, D]."""
        from logitless.interop.demo import torch_model

        stream = self.parameters["embedding"][token] + self.parameters["positions"][self.place]
        for layer in range(self.settings.layers):
            stream = stream + self.attention(layer, stream)
            stream = stream + torch_model.feed_forward(self.parameters, layer, stream, self.settings)
        self.place += 1
        return torch_model.rms_norm(stream, self.parameters["final_norm"], self.settings)

    def attention(self, layer: int, stream: Any) -> Any:
        """The branch of ``torch_model.attention`` for one token of each sequence, [B, D] → [B, D]."""
        from torch.nn import functional

        from logitless.interop.demo import torch_model

        normed = torch_model.rms_norm(stream, self.parameters[f"{layer}.attention_norm"], self.settings)
        joined = functional.linear(normed, self.parameters[f"{layer}.attention_in"])
        # [B, 3 D] → three of [B, H, D / H]
        query, key, value = joined.unflatten(-1, (3, self.settings.heads, -1)).transpose(0, 1)
        self.cache[layer, 0, :, :, self.place], self.cache[layer, 1, :, :, self.place] = key, value
        keys, values = self.cache[layer, :, :, :, : self.place + 1]
        mixed = functional.scaled_dot_product_attention(query[:, :, None], keys, values)
        return functional.linear(mixed.flatten(1), self.parameters[f"{layer}.attention_out"])


def sample(parameters: dict[str, Any], settings: Any, head: str, prompts: Any, seed: int) -> tuple[Any, Any]:
    """prompts [B, P] → (tokens [B, P + new], the hidden states [B, new, D] that the new ones were drawn from)."""
    import torch

    noise = torch.Generator().manual_seed(seed)
    decoder, weight, tokens, seen = Decoder(parameters, settings, len(prompts)), parameters["head"], prompts, []
    for place in range(PROMPT_TOKENS + NEW_TOKENS - 1):
        hidden = decoder.hidden(tokens[:, place])
        if place >= PROMPT_TOKENS - 1:
            wide = (hidden, weight) if head == "rounded" else (hidden.float(), weight.float())
            logits = torch.nn.functional.linear(*wide).float()
            # The largest of logits with Gumbel noise is a sample of their softmax.
            drawn = (logits - torch.empty_like(logits).exponential_(generator=noise).log()).argmax(-1)
            tokens = torch.cat((tokens, drawn[:, None]), dim=1)
            seen.append(hidden)
    return tokens, torch.stack(seen, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# The runs


def measured(trainer: Any, sampler: Any, truth: Any, sampler_truth: Any, same: Any) -> dict[str, float]:
    """A step's values from log-probabilities [B, T]: both sides' own, and those of float64 heads. same [B, T]: whether
    both sides' hidden states are."""
    pairs = {
        "mismatch": (trainer, sampler),
        "body": (truth, sampler_truth),
        "trainer_error": (trainer, truth),
        "sampler_error": (sampler, sampler_truth),
    }
    values = {}
    for name, (one, other) in pairs.items():
        size = (one.double() - other.double()).abs()
        values |= {f"{name}_mean": float(size.mean()), f"{name}_max": float(size.max())}
    log_ratio = trainer.double() - sampler.double()
    ratio = log_ratio.exp()
    means = {
        "kl": log_ratio.expm1() - log_ratio,
        "outside": ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).double(),
        "same_hidden": same.double(),
    }
    return values | {name: float(tensor.mean()) for name, tensor in means.items()}


def prepared() -> Start:
    """The model after some steps on the text: its distribution is not uniform any more."""
    import torch

    from logitless.interop.demo import settings as demo
    from logitless.interop.demo import text, torch_model

    settings = demo.DemoSettings(**MODEL)  # type: ignore[arg-type]
    words = text.read_text(None, settings.text_bytes)
    tokenizer = text.train_tokenizer(words.text, settings.vocabulary)
    ids, vocab = text.encode(tokenizer, words.text), tokenizer.get_vocab_size()
    initial = {name: torch.from_numpy(array) for name, array in demo.initial_parameters(settings, vocab).items()}
    batches = text.make_batches(ids, settings)
    trained = torch_model.train(initial, batches, settings, torch_model.logitless_loss, lambda step, loss: None)
    print(f"{words.source}: {len(ids)} tokens, loss {trained.losses[0]:.2f} → {np.mean(trained.losses[-20:]):.2f}")
    rewarded = torch.tensor([float(LETTER in tokenizer.decode([number])) for number in range(vocab)])
    return Start(settings, dict(trained.parameters), torch.from_numpy(ids).long(), rewarded)


def grpo(start: Start, variant: str, seed: int, steps: int) -> list[dict[str, float]]:
    """One run from the beginning: the values of its steps."""
    import torch

    from logitless.interop.demo import torch_model

    sampler, trainer = VARIANTS[variant]
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in start.parameters.items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    places, values = np.random.default_rng(seed), []
    for step in range(steps):
        begins = torch.from_numpy(places.integers(0, len(start.tokens) - PROMPT_TOKENS, (PROMPTS, 1)))
        prompts = start.tokens[begins + torch.arange(PROMPT_TOKENS)].repeat_interleave(GROUP, dim=0)
        with torch.no_grad():
            given = in_bfloat16(parameters)
            tokens, seen = sample(given, start.settings, sampler, prompts, 10_000 * seed + step)
            target = tokens[:, PROMPT_TOKENS:]
            old = HEADS[sampler](seen, given["head"], target)
            reward = start.rewarded[target].mean(1).view(PROMPTS, GROUP)
            spread = reward.std(1, keepdim=True) + 1e-4
            advantage = ((reward - reward.mean(1, keepdim=True)) / spread).flatten()
        for update in range(INNER_UPDATES):
            own = in_bfloat16(parameters)
            hidden = torch_model.hidden_states(own, tokens[:, :-1], start.settings)[:, PROMPT_TOKENS - 1 :]
            loss, log_prob = loss_and_log_prob(trainer, hidden, own["head"], target, advantage, old)
            if update == 0:
                with torch.no_grad():
                    truths = (exact(x, given["head"], target) for x in (hidden, seen))
                    same = (hidden == seen).all(-1)
                    values.append({"reward": float(reward.mean())} | measured(log_prob, old, *truths, same))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRADIENT)
            optimizer.step()
    return values


@register(
    "GRPO of a small model: the trainer's log-probabilities beside the sampler's, by the logits' rounding",
    arguments={
        "--steps": {"type": int, "default": 40, "help": "of every run"},
        "--seeds": {"type": int, "default": 3, "help": "how many runs of every variant"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    start = prepared()
    sizes = {"hidden": start.settings.width, "vocab": len(start.rewarded), "tokens": PROMPTS * GROUP * NEW_TOKENS}
    for seed in range(options.seeds):
        for variant in VARIANTS:
            begin = time.perf_counter()
            steps = grpo(start, variant, seed, options.steps)
            by_step = {name: [float(f"{step[name]:.4g}") for step in steps] for name in steps[0]}
            means = {name: float(np.mean(values)) for name, values in by_step.items()}
            means |= {name: max(by_step[name]) for name in means if name.endswith("_max")}
            named = {"variant": variant, "seed": seed, "seconds": round(time.perf_counter() - begin, 1)}
            last = {"last_reward": float(np.mean(by_step["reward"][-10:]))}
            results.add([named | sizes | means | last | {"by_step": by_step}])
