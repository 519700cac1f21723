"""Training steps of a Llama of transformers with random weights: its own loss, Liger-Kernel's and ours.

``python -m bench hf --output DIR`` needs transformers and writes DIR/hf.json: milliseconds a step (forward, backward,
AdamW), tokens per second, peak memory and, where asked for, the largest batch that fits. Every variant runs in a
process of its own: Liger-Kernel changes transformers' modules for all models. A variant that fails, or is not
installed, says so in its row. ``--tiny`` is for a look on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from bench.registry import Results, register
from bench.timing import median_ms
from bench.variants import described


@dataclasses.dataclass(frozen=True)
class Settings:
    """A model of Llama 3.2 1B's shape, and its batches."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    sequence: int = 8192
    batches: tuple[int, ...] = (1, 4)
    checkpointing: bool = False
    largest: bool = False
    """Also search for the largest batch that fits, up to ``largest_limit``."""
    largest_limit: int = 256
    rounds: int = 5
    device: str = "cuda"
    dtype: str = "bfloat16"


# Of a patch that is to hold little. The least scratch grows with the tokens: this is enough for 15 of the sequences.
BUDGET = 2 << 30

TINY = Settings(32, 64, 1, 4, 2, 256, 16, (2,), rounds=1, device="cpu", dtype="float32")


def _liger(model: Any, **kernels: bool) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, cross_entropy=False, **kernels)


def _ours(model: Any, memory_budget: int | None = None) -> None:
    from logitless.torch_impl import patch

    patch(model, memory_budget=memory_budget)


def _both(model: Any, memory_budget: int | None = None) -> None:
    _liger(model, fused_linear_cross_entropy=False)
    _ours(model, memory_budget)


# What is done to the model: the first four differ in the loss alone, the others have Liger-Kernel's other kernels too.
VARIANTS: dict[str, Callable[[Any], None]] = {
    "transformers": lambda model: None,
    "Liger-Kernel, loss only": lambda model: _liger(
        model, fused_linear_cross_entropy=True, rope=False, rms_norm=False, swiglu=False
    ),
    "logitless": _ours,
    "logitless, 2 GiB": lambda model: _ours(model, BUDGET),
    "Liger-Kernel": lambda model: _liger(model, fused_linear_cross_entropy=True),
    "logitless, and Liger-Kernel's other kernels": _both,
    "logitless, 2 GiB, and Liger-Kernel's other kernels": lambda model: _both(model, BUDGET),
}


class Trainee:
    """The model, its optimiser and one training step on random ids."""

    def __init__(self, settings: Settings, variant: str) -> None:
        import torch
        import transformers

        self.settings, self.torch = settings, torch
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=settings.vocab, hidden_size=settings.hidden, intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers, num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads, max_position_embeddings=settings.sequence,
            tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        with torch.device(settings.device):
            self.model = transformers.LlamaForCausalLM(config).to(getattr(torch, settings.dtype)).train()
        if settings.checkpointing:
            self.model.gradient_checkpointing_enable()
        VARIANTS[variant](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=settings.device == "cuda")

    def step(self, batch: int) -> float:
        """One step; returns the loss when the device is done."""
        generator = self.torch.Generator().manual_seed(batch)
        shape = (batch, self.settings.sequence)
        ids = self.torch.randint(0, self.settings.vocab, shape, generator=generator).to(self.settings.device)
        loss = self.model(ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def forget(self) -> None:
        """After a step that failed: nothing of it stays allocated."""
        self.optimizer.zero_grad()
        if self.settings.device == "cuda":
            self.torch.cuda.empty_cache()

    def fits(self, batch: int) -> bool:
        """Whether a step runs: in the device's memory, and with a plan within the patch's budget."""
        try:
            self.step(batch)
        except self.torch.OutOfMemoryError:
            fits = False
        except ValueError as failure:
            if not str(failure).startswith("memory_budget:"):
                raise
            fits = False
        else:
            fits = True
        self.forget()
        return fits


def measure(variant: str, settings: Settings) -> list[dict[str, Any]]:
    """One row for every batch, and one with ``largest_batch`` where asked for."""
    common = {"variant": variant, **dataclasses.asdict(settings)}
    try:
        trainee = Trainee(settings, variant)
    except ImportError as missing:
        return [common | {"error": f"not installed: {missing}"}]
    rows = []
    for batch in settings.batches:
        try:
            rows.append(common | {"batch": batch, **_timed(trainee, batch)})
        except Exception as failure:  # out of memory, or a peer's own failure: the row says how
            rows.append(common | {"batch": batch, "error": described(failure)})
            trainee.forget()
    if settings.largest:
        rows.append(common | {"largest_batch": largest(trainee.fits, settings.largest_limit)})
    return rows


def _timed(trainee: Trainee, batch: int) -> dict[str, Any]:
    on_gpu, torch = trainee.settings.device == "cuda", trainee.torch
    loss = trainee.step(batch)  # the first one also makes the optimiser's state
    trainee.step(batch)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(trainee.settings.rounds):
        start = time.perf_counter()
        trainee.step(batch)
        times.append((time.perf_counter() - start) * 1e3)
    step_ms = median_ms(times)
    return {
        "first_loss": loss,
        "step_ms": step_ms,
        "tokens_per_s": batch * trainee.settings.sequence / step_ms * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest batch up to ``limit`` that fits, 0 if none does: doubling, then halving the interval."""
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


@register(
    "training steps of a Llama of transformers, with its own loss, Liger-Kernel's and ours",
    rounds=5,
    arguments={
        "--variants": {"nargs": "*", "default": list(VARIANTS), "choices": list(VARIANTS)},
        "--batches": {"nargs": "*", "type": int, "help": f"default: {Settings.batches}"},
        "--sequence": {"type": int, "help": f"default: {Settings.sequence}"},
        "--checkpointing": {"action": "store_true", "help": "gradient checkpointing of the layers"},
        "--largest": {"action": "store_true", "help": "search for the largest batch, on a GPU"},
        "--tiny": {"action": "store_true", "help": "a tiny model on the CPU"},
    },
)
def run(options: argparse.Namespace, results: Results) -> None:
    settings = dataclasses.replace(
        TINY if options.tiny else Settings(),
        rounds=options.rounds, checkpointing=options.checkpointing, largest=options.largest and not options.tiny,
    )  # fmt: skip
    if options.batches is not None:
        settings = dataclasses.replace(settings, batches=tuple(options.batches))
    if options.sequence is not None:
        settings = dataclasses.replace(settings, sequence=options.sequence)
    for variant in options.variants:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            results.add(process.apply(measure, (variant, settings)))
