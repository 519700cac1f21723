"""A GPU architecture that does not exist: its file of products and its record, as a new architecture would have them.

Used by test_architecture.py and compile_architecture.py.
"""

from __future__ import annotations

from typing import Any

from logitless.torch_impl.kernels.architecture import Architecture
from logitless.torch_impl.kernels.portable import Portable
from logitless.torch_impl.kernels.tiles import KERNELS, Tiles, WeightLaunch


class Imaginary(Portable):
    """The portable products. They count their launches."""

    def __init__(self) -> None:
        self.launched = {"logits": 0, "hidden": 0, "weight": 0}

    def logits(self, *arguments: Any) -> Any:
        self.launched["logits"] += 1
        return super().logits(*arguments)

    def hidden(self, *arguments: Any) -> Any:
        self.launched["hidden"] += 1
        return super().hidden(*arguments)

    def weight(self, *arguments: Any) -> WeightLaunch:
        self.launched["weight"] += 1
        launch: WeightLaunch = super().weight(*arguments)
        return launch


def imaginary(products: Imaginary, arithmetic: str, chips: tuple[str, ...] | None) -> Architecture:
    tiles = dict.fromkeys(KERNELS, Tiles(32, 64, 32, stages=2, warps=4))
    return Architecture("imaginary", lambda: products, tiles, arithmetic, chips)
