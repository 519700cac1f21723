"""accumulate_into=param.main_grad under Megatron's own DistributedDataParallel; test_weight_grad_torch.py has its hook
alone, which needs no Megatron."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from logitless.tolerances import TINY

pytest.importorskip("torch", reason="this test is about PyTorch")
if not importlib.util.find_spec("megatron"):  # which is imported by the test's own process alone
    pytest.skip("megatron-core is not installed", allow_module_level=True)


@pytest.mark.case(40)
def test_overlapped_reduction_of_a_main_grad(tmp_path: Path) -> None:
    script = Path(__file__).with_name("megatron_ddp.py")
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert not any(made["left"])
    assert len(made["errors"]) == 6
    assert max(made["errors"]) <= TINY["float32"]
