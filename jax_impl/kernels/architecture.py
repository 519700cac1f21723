"""What the kernels need of a GPU, and the tiles of their products. Mirror of torch_impl/kernels/architecture.py.

Nothing here imports Pallas, so it can be asked where Pallas cannot be imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os

import jax

from logitless import hardware, spec


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one product, and how its programs walk them."""

    columns: int = 256
    group: int = 8
    """Row tiles that are walked together, for the L2 cache."""
    stages: int = 4
    """Steps whose operands are in shared memory at once."""
    in_turn: bool = False
    """Whether each multiplying warpgroup has every other tile to itself. Else each has half of every tile's rows."""
    loading_registers: int = 40
    """Of a thread that loads."""
    multiplying_registers: int = 232
    """Of a thread that multiplies."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A GPU that the kernels are built for."""

    capability: str
    """How its compute capability begins."""
    multiprocessors: int
    """How many there are where the device is not known yet."""
    logits: Tiles
    logits_in_turn: Tiles
    hidden: Tiles
    hidden_sum: Tiles
    """Where something is added to the result, which takes shared memory from the stages."""
    weight: Tiles
    weight_sum: Tiles
    gradient_columns: tuple[int, ...] = (256, 192)
    """Columns that a gradient's tile may have, the better first."""
    tile_rows: int = 128
    step: int = 64
    """How much of a product's depth one step multiplies."""
    multiplying: int = 2
    """Warpgroups of a program that multiply."""
    skew: int = 1
    """How many steps the second of them lags behind the first."""
    pair: int = 2
    """Programs of a cluster. They work on neighbouring row tiles and share the operand of their columns."""
    tiling: int = 8
    """Rows that are moved together: chunks and slices begin at a multiple."""

    @property
    def warpgroup_rows(self) -> int:
        """Rows of a tile that one warpgroup multiplies, unless the tiles go in turn."""
        return self.tile_rows // self.multiplying


HOPPER = Architecture(
    capability="9.",
    multiprocessors=hardware.HOPPER.multiprocessors,
    logits=Tiles(),
    logits_in_turn=Tiles(columns=192, in_turn=True, loading_registers=24, multiplying_registers=240),
    hidden=Tiles(group=4),
    hidden_sum=Tiles(group=4, stages=3),
    weight=Tiles(),
    weight_sum=Tiles(stages=3),
)


def interpreted() -> bool:
    """Whether a kernel that is traced now is interpreted on the CPU."""
    return os.environ.get("LOGITLESS_PALLAS_INTERPRET") == "1"


def can_interpret() -> bool:
    """Whether this jax has the interpreter."""
    return bool(jax.__version_info__ >= (0, 11))


def pair() -> int:
    """Programs of a pair. The interpreter knows no clusters."""
    return 1 if interpreted() else HOPPER.pair


def programs() -> int:
    """Pairs of persistent programs: one program per multiprocessor."""
    if interpreted():
        return 2
    device = jax.devices()[0]
    return (int(device.core_count) if device.platform == "gpu" else HOPPER.multiprocessors) // pair()


def unusable(device: jax.Device | None, dtype: str, dtypes: tuple[str, ...]) -> str | None:
    """Why kernels for ``dtypes`` cannot run on ``device`` (None: not known while tracing), or None."""
    if importlib.util.find_spec("absl") is None:
        return "absl-py is not installed, which JAX's Pallas modules for GPUs import"
    if dtype not in dtypes:
        return f"its kernels take {', '.join(dtypes[:-1])} and {dtypes[-1]}, not {dtype}"
    if device is None:
        return None
    if device.platform == "cpu" and interpreted():
        return None if can_interpret() else f"jax {jax.__version__} cannot interpret its kernels, 0.11 can"
    if device.platform != "gpu":
        return spec.needs_cuda(device.platform)
    capability = str(getattr(device, "compute_capability", "an unknown one"))
    return None if capability.startswith(HOPPER.capability) else spec.needs_hopper(capability)
