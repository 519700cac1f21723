"""What the demo's runs have in common, without a framework: sizes, hyperparameters, initial bytes and result types."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Batches = NDArray[np.int32]
"""[steps, batch, sequence + 1] token ids: a sequence's first T ids are the input, its last T are the targets."""

OnStep = Callable[[int, float], None]
"""Called after every step with its number (from 0) and its loss."""


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the model and of its training.

    As in small language models with a full vocabulary, most of a step's time goes to the last layer and the loss.
    """

    vocabulary: int = 16384
    width: int = 128
    layers: int = 2
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    steps: int = 150
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    # Adam divides by √v + ε: with ε far below 1e-6, rounding noise in the tiny gradients of rare tokens becomes whole
    # steps, and two correct runs drift apart.
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    norm_epsilon: float = 1e-6
    text_bytes: int = 4_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "sequence", "batch", "steps", "text_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed is at least 1")
        if self.vocabulary < 256:
            raise ValueError(f"vocabulary: got {self.vocabulary}, allowed is at least 256, one entry for each byte")
        if self.width % self.heads:
            raise ValueError(f"width: got {self.width}, allowed is a multiple of heads = {self.heads}")


@dataclass(frozen=True)
class TrainingRun:
    """The loss of every step before its update, how long the step took (seconds), and what came of it."""

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    parameters: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    """The trained parameters, in the framework's own arrays."""

    @property
    def median_step_s(self) -> float:
        """Typical step; the first, which compiles or warms up, is left out where there are others."""
        return statistics.median(self.step_times_s[1:] or self.step_times_s)


def initial_parameters(settings: DemoSettings, vocabulary: int) -> dict[str, NDArray[np.float32]]:
    """Seeded initial parameters by name, float32. Every matrix is [outputs, inputs], as torch.nn.Linear stores it.

    Normal with standard deviation 0.02, divided by √(2 · layers) where a branch writes to the residual stream; norm
    scales are 1. So the first logits are small and the first loss is close to log V.
    """
    generator = np.random.default_rng(settings.seed)
    width = settings.width

    def normal(rows: int, columns: int, deviation: float = 0.02) -> NDArray[np.float32]:
        return (deviation * generator.standard_normal((rows, columns))).astype(np.float32)

    branch = 0.02 / (2 * settings.layers) ** 0.5
    parameters = {"embedding": normal(vocabulary, width), "positions": normal(settings.sequence, width)}
    for layer in range(settings.layers):
        parameters |= {
            f"{layer}.attention_norm": np.ones(width, np.float32),
            f"{layer}.attention_in": normal(3 * width, width),
            f"{layer}.attention_out": normal(width, width, branch),
            f"{layer}.feed_forward_norm": np.ones(width, np.float32),
            f"{layer}.feed_forward_in": normal(4 * width, width),
            f"{layer}.feed_forward_out": normal(width, 4 * width, branch),
        }
    return parameters | {"final_norm": np.ones(width, np.float32), "head": normal(vocabulary, width)}
