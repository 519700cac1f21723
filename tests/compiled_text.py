"""Reading the text of a program that XLA has compiled (``compiled.as_text()``)."""

from __future__ import annotations

import math
import re

# "%name = shape opcode(operands)", the shape an array's or a tuple's.
_COPY = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>.+?) (?:copy|copy-start)\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sizes>[\d,]*)\]")


def copies(program: str, least_bytes: int) -> list[str]:
    """Every instruction that does nothing but copy an array of at least ``least_bytes``, loops and fusions included."""
    return [line.strip() for line in program.splitlines() if _copied_bytes(line) >= least_bytes]


def _copied_bytes(line: str) -> int:
    """Size of the largest array that the instruction on this line copies; −1 where it copies none."""
    found = _COPY.match(line)
    return -1 if found is None else max((_bytes(array) for array in _ARRAY.finditer(found["shape"])), default=-1)


def _bytes(array: re.Match[str]) -> int:
    bits = 8 if array["dtype"] == "pred" else int(array["bits"])
    return math.prod(int(size) for size in array["sizes"].split(",") if size) * bits // 8
