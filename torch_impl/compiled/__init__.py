"""Calls inside of torch.compile's graphs and torch.func's transforms."""

from collections.abc import Callable
from typing import Any

KEPT_WHOLE: list[Callable[..., Any]] = []
"""The functions that :func:`tracing.kept_whole` decorates."""
