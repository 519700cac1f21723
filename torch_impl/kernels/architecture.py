"""One record a GPU architecture: the file that has its products, their tiles, and what both need of the GPU.

A new architecture is a row in :data:`ARCHITECTURES`. If the portable kernels are not good enough there, it is a new
file beside portable.py and hopper.py too, with the three products and a class of :class:`Products` that launches them.
Everything here is a function of dtype and device, so that no call tunes anything.

A *chip* is named by its compute capability ("8.0", "9.0") or, for AMD, by its target ("gfx942").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch

from logitless import scratch
from logitless.hardware import HOPPER
from logitless.torch_impl.kernels.tiles import (
    HIDDEN,
    HIDDEN_SUM,
    KERNELS,
    LOGITS,
    LOGITS_MORE,
    SQUARE_GROUP,
    WEIGHT,
    WEIGHT_SUM,
    Products,
    Tiles,
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of GPU, for operands of some dtypes."""

    name: str
    products: Callable[[], Products]
    """Imports the file when it is wanted."""
    tiles: Mapping[str, Tiles]
    """By the names in :data:`KERNELS`."""
    arithmetic: str
    """Of the operands that it takes: "half" (16 bits), or how it multiplies float32, "tf32" or "ieee"."""
    chips: tuple[str, ...] | None = None
    """What the names of its chips begin with; None: any GPU, and the interpreter."""
    aligned: bool = False
    """Whether it only takes operands whose rows start on 16 bytes."""
    descriptors: bool = True
    """Whether tiles are read and written by descriptor. Else by pointers, for chips without tensor memory access."""
    in_place: bool = False
    """Whether dW's product can read exponentials that lie where it writes."""
    turned: bool = True
    """Whether it takes a weight that lies in memory as [D, V]. Tiles that it would make spill registers do not."""
    temperatures: bool = True
    """Whether its first product takes a temperature per token."""
    narrow: Mapping[str, Tiles] | None = None
    """Those of dX and dW for the widths that :func:`scratch.gradient_tile` has narrow tiles for; None: the others."""

    def tiles_of(self, kernel: str, hidden: int) -> Tiles:
        """For a dX or dW with so many columns."""
        is_narrow = scratch.gradient_tile(hidden) != HOPPER.tile
        return (self.narrow if is_narrow and self.narrow is not None else self.tiles)[kernel]

    def takes(self, arithmetic: str, chip: str | None, aligned: bool, turned: bool, each: bool) -> bool:
        here = self.chips is None or (chip is not None and chip.startswith(self.chips))
        fits = (aligned or not self.aligned) and (self.turned or not turned) and (self.temperatures or not each)
        return here and arithmetic == self.arithmetic and fits

    @property
    def precision(self) -> str:
        """Of products, as Triton calls it; those of 16 bits do not read it."""
        return "tf32" if self.arithmetic == "tf32" else "ieee"


def _portable() -> Products:
    from logitless.torch_impl.kernels import portable

    return portable.PRODUCTS


def _hopper() -> Products:
    from logitless.torch_impl.kernels import hopper

    return hopper.PRODUCTS


def _tiles(logits: Tiles, more: Tiles, hidden: Tiles, weight: Tiles) -> dict[str, Tiles]:
    """A record's tiles, where sums have the same ones as results."""
    return {LOGITS: logits, LOGITS_MORE: more, HIDDEN: hidden, HIDDEN_SUM: hidden, WEIGHT: weight, WEIGHT_SUM: weight}


def _gradients(bm: int, bn: int, group: int) -> dict[str, Tiles]:
    """Hopper's tiles of dX and dW; ``group``: of dX."""
    halves = functools.partial(Tiles, bm, bn, 64, halves=2, skew=1)
    return {
        HIDDEN: halves(group=group, stages=4, pace=4),
        HIDDEN_SUM: halves(group=group, split=True),
        WEIGHT: halves(),
        WEIGHT_SUM: halves(split=True),
    }


def _by_pointers(
    name: str, chips: tuple[str, ...], tiles: dict[str, Tiles], aligned: bool = True, arithmetic: str = "half"
) -> Architecture:
    """The portable products. The tiles that read rows on 16 bytes are too large for a turned weight."""
    return Architecture(name, _portable, tiles, arithmetic, chips, aligned, descriptors=False, turned=not aligned)


# Chips, by what their names begin with: Hopper, on which every kernel was run and measured, and the others, for which
# they were compiled and are held against plain operations at the first call (first_check.py).
RUN = ("9.",)
OTHERS = ("8.", "10.", "12.", "gfx942", "gfx950")

# A call takes the first record that fits its operands and its GPU.
ARCHITECTURES = [
    Architecture(
        "hopper",
        _hopper,
        # Three stages leave shared memory for a tile of results on its way out. With them keeping step made a step of
        # several chunks 1 to 1.5 % slower.
        {
            **dict.fromkeys((LOGITS, LOGITS_MORE), Tiles(128, 256, 64, halves=2, skew=1, group=SQUARE_GROUP)),
            **_gradients(128, 256, group=4),
        },
        narrow=_gradients(256, 128, group=2),
        arithmetic="half",
        chips=RUN,
        aligned=True,
        in_place=True,
        temperatures=False,
    ),
    # By pointers, without a spilled register, in no more shared memory than a chip has: 163 KiB (8.0, 8.7), 99 KiB
    # (8.6, 8.9, 12.x), 64 KiB (gfx942), 160 KiB (gfx950). The first product's tile of 16 bits has 256 columns
    # everywhere: a plan's promise counts its partial sums.
    _by_pointers(
        "ampere",
        ("8.0", "8.7"),
        _tiles(
            Tiles(128, 256, 64),
            Tiles(64, 256, 64, stages=4),
            Tiles(128, 128, 64, group=4, stages=4),
            Tiles(128, 128, 32),
        ),
    ),
    _by_pointers(
        "small",
        ("8.", "12."),
        _tiles(
            Tiles(128, 256, 32, stages=4),
            Tiles(64, 256, 64),
            Tiles(128, 128, 64, group=4),
            Tiles(128, 128, 32),
        ),
    ),
    _by_pointers(
        "cdna",
        ("gfx942", "gfx950"),
        _tiles(
            Tiles(128, 256, 32, stages=2),
            Tiles(64, 256, 64, stages=2),
            Tiles(128, 128, 64, group=4, stages=2),
            Tiles(128, 128, 32, stages=2),
        ),
    ),
    # A result of 256 columns leaves too few registers beside it, but for the first product's plain epilogue.
    Architecture(
        "blackwell",
        _portable,
        _tiles(
            Tiles(128, 256, 64, warps=16, split=True, flatten=True),
            Tiles(64, 256, 64),
            Tiles(128, 128, 64, group=4, stages=4),
            Tiles(128, 128, 64),
        ),
        arithmetic="half",
        chips=("10.",),
        aligned=True,
        turned=False,
    ),
    # Where rows start anywhere, or the weight is turned, elements are read one by one, through registers.
    _by_pointers(
        "unaligned",
        OTHERS,
        _tiles(*[Tiles(64, 256, 16, stages=2)] * 2, *[Tiles(64, 64, 32, group=4, stages=2)] * 2),
        aligned=False,
    ),
    _by_pointers(
        "pointers, tf32",
        OTHERS,
        dict.fromkeys(KERNELS, Tiles(64, 64, 32, stages=2)),
        False,
        "tf32",
    ),
    _by_pointers(
        "pointers, float32",
        OTHERS,
        _tiles(
            *[Tiles(64, 64, 16, stages=2, warps=4, deep=32)] * 2,
            *[Tiles(64, 32, 16, stages=2, warps=4, deep=32)] * 2,
        ),
        False,
        "ieee",
    ),
    Architecture(
        "portable, 16 bits",
        _portable,
        {
            LOGITS: Tiles(128, 256, 64, split=True, flatten=True),
            LOGITS_MORE: Tiles(64, 256, 64),
            HIDDEN: Tiles(128, 256, 64, group=4),
            HIDDEN_SUM: Tiles(128, 256, 64, group=4),
            WEIGHT: Tiles(128, 256, 64, split=True, stages=4),
            WEIGHT_SUM: Tiles(128, 256, 64, split=True),  # a float32 tile on its way out leaves room for three stages
        },
        arithmetic="half",
    ),
    Architecture("portable, tf32", _portable, dict.fromkeys(KERNELS, Tiles(128, 128, 32)), arithmetic="tf32"),
    Architecture(
        "portable, float32",
        _portable,
        dict.fromkeys(KERNELS, Tiles(64, 64, 16, stages=2, warps=4, deep=32)),
        arithmetic="ieee",
    ),
]


def arithmetic_of(dtype: torch.dtype, chip: str | None) -> str:
    """float32 products follow PyTorch's own setting. AMD's chips have no tf32."""
    if dtype != torch.float32:
        return "half"
    exact = torch.get_float32_matmul_precision() == "highest" or (chip is not None and chip.startswith("gfx"))
    return "ieee" if exact else "tf32"


# Why the kernels are not used on a device for a dtype, though they are built for its chip: first_check.py says. Under
# True is why calls with a temperature per token do not use them, while others do.
refused: dict[tuple[torch.device, torch.dtype, bool], str] = {}


def unavailable(device: torch.device, dtype: torch.dtype, each: bool = False) -> str | None:
    """Why no record is for this GPU, or why its kernels are not used, or None. ``each``: as :func:`architecture_of`."""
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    chip = chip_of(index)
    if chip is not None and not chip.startswith((*RUN, *OTHERS)):
        return (
            f"its kernels are built for NVIDIA GPUs of compute capability 8.x, 9.x, 10.x and 12.x, and for AMD's "
            f"gfx942 and gfx950, not {chip}"
        )
    return refused.get((device, dtype, False)) or (refused.get((device, dtype, True)) if each else None)


@functools.lru_cache
def chip_of(index: int | None) -> str | None:
    """The chip of a CUDA or ROCm device; None on a CPU."""
    if index is None:
        return None
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"{properties.major}.{properties.minor}"


def was_run(chip: str | None) -> bool:
    """Whether every kernel was run and measured on such a chip; the interpreter counts."""
    return chip is None or chip.startswith(RUN)


@functools.lru_cache
def most_warps(index: int | None) -> int:
    """Of a program: 1024 threads. AMD's warps (wavefronts) have 64 of them."""
    chip = chip_of(index)
    return 16 if chip is not None and chip.startswith("gfx") else 32


@functools.lru_cache
def multiprocessors(index: int | None) -> int:
    """Of a CUDA device; two on a CPU, where kernels are interpreted."""
    return 2 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def has_products(architecture_products: Callable[[], Products]) -> bool:
    """Whether this Triton has what the file of products is written in."""
    try:
        architecture_products()
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
        return False
    return True


def architecture_of(
    dtype: torch.dtype, index: int | None, aligned: bool, turned: bool = False, each: bool = False
) -> Architecture:
    """The first record that takes operands of this dtype on the device.

    aligned: whether every operand's rows start on 16 bytes; turned: whether the weight lies in memory as [D, V]; each:
    whether each token has a temperature of its own.
    """
    chip = chip_of(index)
    arithmetic = arithmetic_of(dtype, chip)
    return next(
        found
        for found in ARCHITECTURES
        if found.takes(arithmetic, chip, aligned, turned, each) and has_products(found.products)
    )
