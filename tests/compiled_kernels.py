"""What a script beside this file finds in kernels that it compiles for sm_90, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled_by(script: str, *arguments: str) -> Any:
    """The script's JSON; in a process of its own, for Triton decides once whether it interprets."""
    made = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=os.environ | {"TRITON_INTERPRET": "0", "LOGITLESS_CHECK": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout)
