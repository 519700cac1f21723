"""A checkout's packages as ``logitless``, without installing anything."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent


def make_overlay(folder: Path, root: Path = ROOT) -> Path:
    """A folder with a package ``logitless`` made of links to the four packages of a checkout."""
    package = folder / "logitless"
    package.mkdir()
    for source in (*(root / "core").iterdir(), *(root / name for name in ("torch_impl", "jax_impl", "interop"))):
        (package / source.name).symlink_to(source)
    return folder


@contextlib.contextmanager
def packages(root: Path = ROOT) -> Iterator[Path]:
    """While it lasts, a checkout's packages are found as ``logitless``, here and in processes that are started from
    here; so is this checkout's ``bench``. Gives the folder that was made for it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(make_overlay(Path(folder), root)), str(ROOT)]
        inherited = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, PYTHONPATH=inherited), mock.patch.object(sys, "path", [*paths, *sys.path]):
            yield Path(folder)
