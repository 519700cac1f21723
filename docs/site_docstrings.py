"""The docstrings of this project as Markdown, for the API pages: an extension of griffe, which reads them.

The docstrings' sections hold free text ("weight, bias: [V, D], [V]; target [2 B, T], already shifted"). griffe's own
parsers would refuse or cut it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=`)")
SECTION = re.compile(r"(Args|Arguments|Raises|Returns|Yields):(?: +(.*))?")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


def as_markdown(docstring: str) -> str:
    """The docstring as Markdown. Sections become lists, and the names of arguments code.

    Formulas are indented by four under an empty line, so they are code in Markdown already.
    """
    converted: list[str] = []
    lines = ROLE.sub("", docstring).splitlines()
    while lines:
        line = lines.pop(0)
        found = SECTION.fullmatch(line)
        if not found:
            converted.append(line)
            continue
        body: list[str] = []
        while lines and (lines[0].startswith("    ") or (not lines[0] and lines[1:] and lines[1].startswith("    "))):
            body.append(lines.pop(0).removeprefix("    "))
        converted += ["", f"**{found[1].replace('Args', 'Arguments')}:** {found[2] or ''}".rstrip()]
        if found[2]:
            converted += [text.strip() for text in body]
        else:
            converted += ["", *(_entries(body) if found[1] in ("Args", "Arguments", "Raises") else body)]
    return "\n".join(converted)


def _entries(body: list[str]) -> list[str]:
    entries: list[str] = []
    for line in body:
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif line:
            named = ENTRY.fullmatch(line)
            entries.append(
                f"- {', '.join(f'`{name}`' for name in named[1].split(', '))}: {named[2]}" if named else f"- {line}"
            )
    return entries


class Docstrings(griffe.Extension):
    """Rewrites every docstring that griffe loads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
