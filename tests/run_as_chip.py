"""Run every problem through the kernels of another chip, on a GPU of compute capability 9.0, and print what failed as
JSON: run by test_gpu.py as ``run_as_chip.py 8.0 bfloat16``.

PTX is forward compatible: what Triton compiles for 8.0, 8.6 and 8.9 runs on a Hopper GPU when the driver gets the PTX.
So the tiles, the pointer loads and the instructions of those chips (mma.sync, cp.async) are run; their speed here says
little. A process of its own, because a kernel keeps what it was compiled to.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from implementations import TorchTritonCuda, assert_within, run_case
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from logitless.problems import PROBLEMS
from logitless.torch_impl.kernels import architecture


class AsChip:
    """The machine's driver, but for the target that Triton compiles for."""

    def __init__(self, of: Any, target: GPUTarget) -> None:
        self._of, self._target = of, target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def get_current_target(self) -> GPUTarget:
        return self._target


def load_ptx() -> Any:
    """Compiled kernels hand the driver their PTX, and not the code of a chip that is not here."""
    make = CompiledKernel.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.kernel = self.asm["ptx"].encode() + b"\0"

    return mock.patch.object(CompiledKernel, "__init__", made)


def failures(chip: str, dtype: str) -> dict[str, str]:
    """Problem → what is wrong with it."""
    found: dict[str, str] = {}
    target = GPUTarget("cuda", int(chip.replace(".", "")), 32)
    driver.set_active(AsChip(driver.active, target))
    with mock.patch.object(architecture, "chip_of", return_value=chip), load_ptx():
        for problem in PROBLEMS:
            if "large" in problem.tags:
                continue
            low = problem.with_dtype(dtype)
            try:
                assert_within(low, run_case(TorchTritonCuda(), low.case()))
            except Exception as failure:  # whatever it is, it is printed, and the next problem runs
                found[problem.name] = f"{type(failure).__name__}: {failure}"[:500]
    return found


if __name__ == "__main__":
    print(json.dumps(failures(*sys.argv[1:])))
