"""What programs share that measure a checkout without installing it, and write one results file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import machine
from bench.gpu_check import make_overlay


def parser(description: str | None, file: str) -> argparse.ArgumentParser:
    """A parser of the arguments that all of them take; ``file``: the results file's name."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--output", type=Path, required=True, help=f"folder for {file}")
    made.add_argument("--commit", help="commit of this checkout, where it has no git history")
    return made


@contextlib.contextmanager
def packages() -> Iterator[None]:
    """The checkout's packages are on the path as ``logitless``."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(make_overlay(Path(folder))))
        yield


@contextlib.contextmanager
def results(file: Path, commit: str | None) -> Iterator[dict[str, Any]]:
    """The results, which begin with the machine; while they are added to, the checkout's packages are on the path as
    ``logitless``. Written at the end, unless something failed; the folder is there from the beginning."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX and torch share the GPU's memory
    with packages():
        found: dict[str, Any] = {"machine": machine.describe(commit)}
        yield found
    file.write_text(json.dumps(found, indent=1) + "\n")
