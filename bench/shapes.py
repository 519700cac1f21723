"""The one registry of problems for a GPU: sizes, and the memory budgets at which kernels are measured."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Shape:
    """N × D × V in bfloat16, and the memory budgets [bytes] at which kernels are measured beside their default."""

    tokens: int
    hidden: int
    vocab: int
    budgets: tuple[int, ...] = ()
    pallas_budgets: tuple[int, ...] = ()
    extras: bool = False
    """Also forward only, and with half of the tokens ignored."""

    def sizes(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "hidden": self.hidden, "vocab": self.vocab, "dtype": "bfloat16"}


SHAPES = {
    "liger": Shape(4096, 4096, 128256, extras=True),
    "gist": Shape(32768, 768, 128256, (260 * MIB, 640 * MIB, 1200 * MIB), (640 * MIB, 1200 * MIB)),
    "gemma": Shape(8192, 2304, 256000, (130 * MIB, 800 * MIB, 1300 * MIB), (800 * MIB, 1300 * MIB)),
    "llama": Shape(16384, 4096, 128256, (130 * MIB, 260 * MIB, 640 * MIB, 1100 * MIB), (640 * MIB, 1100 * MIB)),
    "odd": Shape(16384, 2048, 50257),
    "even": Shape(16384, 2048, 50304),
    "small": Shape(2048, 1024, 32768),
    "short": Shape(2048, 4096, 128256),
    "wide": Shape(8192, 8192, 128256),
    "long": Shape(65536, 4096, 128256, (130 * MIB, 640 * MIB)),
}

# One size varies, the others stay: for the plots.
SWEEPS = {
    "tokens": [Shape(tokens, 2048, 65536) for tokens in (1024, 4096, 16384, 65536)],
    "vocab": [Shape(8192, 2048, vocab) for vocab in (8192, 32768, 131072, 262144)],
    "memory": [Shape(16384, 4096, 128256, tuple(mib * MIB for mib in (400, 800, 1600, 2560, 3072, 3800)))],
}


def name_of(text: str) -> str:
    """``text`` where it names a shape, as an argument does."""
    if text not in SHAPES and not re.fullmatch(r"\d+x\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are {', '.join(SHAPES)} and sizes as 4096x4096x128256")
    return text


def named(name: str) -> Shape:
    """A shape by its name, or by its sizes."""
    return SHAPES.get(name) or Shape(*map(int, name.split("x")))


def place(name: str) -> int:
    """Where a shape's rows stand among those of others."""
    return list(SHAPES).index(name) if name in SHAPES else len(SHAPES)
