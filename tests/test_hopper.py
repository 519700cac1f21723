"""The kernels of torch_impl/kernels/hopper.py, compiled for sm_90 without a GPU: they cannot be interpreted.

What they compute is judged on a GPU (marker ``gpu``: there tests/implementations.py adds the kernels to every test).
"""

from __future__ import annotations

from typing import Any

import pytest
from compiled_kernels import compiled_by

pytest.importorskip("torch", reason="these tests are about PyTorch")
pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.slow

SHARED_MEMORY = 232448  # bytes a program may have on an H100 or H200
# What is on the way of every training step. A spilled accumulator is what makes such a kernel slow.
PLAIN = (
    "sums",
    "anchored",
    "known",
    "known fp16",
    "hidden",
    "anchored, lent",
    "hidden, lent",
    "hidden, lent, split",
    "weight in place",
    "hidden, split",
    "hidden sum, add",
    "weight",
)
PLAIN += ("hidden, waiting", "hidden, waiting, split", "hidden, waiting, turned", "weight sum", "weight sum, add")
PLAIN += ("anchored, turned", "hidden, turned", "weight, turned", "weight in place, turned")
PLAIN += ("weight and targets", "weight into, add", "weight parted", "weight parted, added")
PLAIN += ("hidden, narrow", "hidden, narrow, waiting, split", "hidden, narrow, lent, turned", "hidden sum, narrow, add")
PLAIN += ("weight, narrow", "weight, narrow, turned", "weight sum, narrow, add", "weight parted, narrow, added")
OTHERS = ("hidden sum", "entropy", "statistics", "anchored, all", "known, all", "hidden, all", "weight, all")
OTHERS += ("weight into narrow", "weight and targets, all")
OTHERS += ("held, entropy", "held, statistics, softcap", "held, turned")
OTHERS += ("weight sum, turned, add", "weight from parts", "anchored, lent, all", "weight in place, all")
# The first three spill the thread's number, once at the start.
OTHERS += ("weight narrowly parted", "weight narrowly parted, added", "weight from narrow parts")
OTHERS += ("weight from narrow parts, narrow",)
OTHERS += ("weight from wide parts", "weight parted, turned, added")


@pytest.fixture(scope="session")
def compiled() -> Any:
    return compiled_by("compile_hopper.py")


@pytest.mark.parametrize("name", PLAIN + OTHERS)
def test_compiles_for_hopper(name: str, compiled: Any) -> None:
    made = compiled[name]
    assert made["wgmma"] > 0
    assert made["shared"] <= SHARED_MEMORY
    assert (made["reductions"] > 0) == name.endswith(", add")


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_spilled(name: str, compiled: Any) -> None:
    assert compiled[name]["spills"] == 0


def test_every_configuration_is_judged(compiled: Any) -> None:
    assert set(compiled) == set(PLAIN + OTHERS)
