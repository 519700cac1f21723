"""What the cost of a plan counts in: one record for each architecture, and one number for plain operations.

Measured on an H200 and on a CPU; the kernels' files read the same record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Device = Literal["cpu", "gpu", "tpu"]

# Tokens whose products take as long as reading and writing dW's accumulator once, in plain operations.
# gpu: from one H200, bf16, 16384 × 4096 × 128256 at C = 1024 to 8192 (150 to 163).
# cpu: from a 2-core AVX-512 machine, fp32, 2048 × 512 × 32768 at C = 128 to 1024.
# tpu: not measured; a GPU's.
ACCUMULATOR_TOKENS = {"gpu": 150, "cpu": 12, "tpu": 150}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A GPU that the kernels are built for."""

    tile: tuple[int, int]
    """Rows and columns of a product's tile."""
    narrow_tile: tuple[int, int]
    """Rows and columns of another tile. dX and dW have it where it reaches less far beyond their last column."""
    narrow_time: float
    """How long a narrow tile takes, over the usual one."""
    multiprocessors: int
    """How many tiles are worked on at once: a turn."""
    accumulator_tokens: Mapping[str, int]
    """As ACCUMULATOR_TOKENS, of a chunk of tokens, by kind of backend. The first one's dW is kept in two
    parts, too."""
    last_sum_tokens: Mapping[str, int]
    """What the last chunk takes longer than the others, to make dW of its own and of the sum."""
    programs_together: Mapping[str, int]
    """How many programs go through tiles side by side, by kind of backend."""
    in_place_tokens: int
    """Tokens whose dW takes as long as it takes longer to make dW in place."""
    accumulator_entries: int
    """As ACCUMULATOR_TOKENS, of a slice of the vocabulary: it adds to dX."""
    chunk_overhead_flops: float
    """What the small launches around a chunk of tokens take."""
    listing_flops: float
    """What it takes to find with which chunk each target enters a narrow sum."""
    slice_overhead_flops: Mapping[str, float]
    """What those around a slice of the vocabulary take, by kind of backend."""
    tile_overhead_flops: float
    """What those around a slice and a chunk of tokens take, where a slice's dW is a sum over chunks."""
    full_turns: float
    """Tiles of dX are split along the vocabulary where less than this share of its turns would be used."""
    idle_gain: float
    """By what share of its time a turn is shorter whose multiprocessors are nearly all idle: power and bandwidth are
    left to the others."""
    most_parts: int
    """Parts at most that such a tile is split into."""
    part_entries: int
    """Entries of the vocabulary that a part has at least, where all tiles are split."""
    split_overhead_turns: float
    """What a split takes."""
    idle_flops: float
    """A product of so many is done before the host comes from a step's forward to its backward."""


HOPPER = Architecture(
    tile=(128, 256),
    narrow_tile=(256, 128),
    narrow_time=1.02,  # dX took 1.5 % more in such tiles
    multiprocessors=132,  # of an H100 or H200
    # Triton: from 24 plans of 1 to 32 chunks of 16384 × 4096 × 128256, 8192 × 2304 × 256000 and 32768 × 768 × 128256.
    accumulator_tokens=MappingProxyType({"triton": 110, "pallas": 200}),
    last_sum_tokens=MappingProxyType({"triton": 60, "pallas": 0}),
    programs_together=MappingProxyType({"triton": 1, "pallas": 2}),
    in_place_tokens=70,  # 16 to 4096 tokens of 128256 × 4096: 0.1 to 0.3 ms
    accumulator_entries=240,  # 14 and 31 slices of 16384 × 4096 × 128256: 264
    chunk_overhead_flops=1e10,  # 15 µs at 680 TFLOP/s
    listing_flops=4e10,  # 60 µs
    # 6 µs. JAX's were 28 to 34 µs more than that at three of four sizes, in 16 to 21 slices.
    slice_overhead_flops=MappingProxyType({"triton": 4e9, "pallas": 2.4e10}),
    tile_overhead_flops=2e10,  # 30 µs: nothing of one launch runs beside the next
    full_turns=0.93,
    idle_gain=0.3,
    most_parts=8,
    part_entries=1024,
    split_overhead_turns=0.01,
    idle_flops=2e11,  # 0.3 ms; the host took 0.2 to 0.3
)
