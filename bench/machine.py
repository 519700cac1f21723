"""What a result was measured on: written into every results file."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "tokamax", "jax-cce", "transformers", "trl", "verl")
MEASURED = ("core", "torch_impl", "jax_impl", "bench/*.py")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str | None:
    """What git says of the checkout; None where it says nothing, as without its history, or of a commit that it has
    not."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu_name() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def has_changed(since: str, commit: str | None = None, paths: Sequence[str] = MEASURED) -> bool | None:
    """Whether code below ``paths`` differs between the commit ``since`` and this checkout, which is ``commit`` where it
    came without its history; None: not known. Comments and docstrings of Python are no code."""
    if commit is not None:
        return not (commit.startswith(since) or since.startswith(commit))
    changes = _git("diff", "--name-only", since, "--", *paths)
    if changes is None:
        return None
    return any(_differs(since, name) for name in changes.splitlines())


def _differs(since: str, name: str) -> bool:
    before, file = _git("show", f"{since}:{name}"), ROOT / name
    if before is None or not file.exists() or file.suffix != ".py":
        return True
    return code_of(before) != code_of(file.read_text())


def code_of(source: str) -> str:
    """A Python file without comments, docstrings and the way its lines are broken."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_text(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def describe(commit: str | None = None) -> dict[str, object]:
    """Processor, cores, GPU, versions (of other implementations where installed), commit (``commit`` where the checkout
    came without its history) and whether what is measured has changed since (None: not known)."""
    versions: dict[str, str | None] = {}
    for name in ("numpy", "torch", "triton", "jax", "jaxlib"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    installed = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions() if d.name}
    versions |= {name: installed[name] for name in PEERS if name in installed}
    changes = _git("diff", "--name-only", commit or "HEAD", "--", *MEASURED)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "gpu": _gpu_name(),
        "commit": commit or _git("rev-parse", "--short=12", "HEAD") or "unknown",
        "changes_since_commit": None if changes is None else bool(changes),
    }


def gpus_here() -> int:
    """How many GPUs this machine has."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0
