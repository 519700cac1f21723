"""What mkdocs.yml cannot say: pages from files outside docs/, text that stands in one place, the API's import paths.

A line of a page may be nothing but a link to a section of the README (``[PyTorch](../README.md#pytorch)``) or to a
table that a program wrote (``[the table](figures/gpu.md)``). The site shows the text itself in place of such a line.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The packages under the names that they are imported by. mkdocstrings reads the docstrings there.
IMPORTABLE = ROOT / "build" / "api"

# Pages of the site that are files of the root.
FROM_ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK_ALONE = re.compile(r"^\[[^\]]+\]\(((?:\.\./README\.md#[\w-]*)|(?:figures/\w+\.md))\)$", flags=re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^()\s]+)\)")


def section(text: str, anchor: str) -> str:
    """The text under the heading with this anchor, up to the next heading of its level or above; without the heading.

    The anchor "" means the part before the first heading of the second level. ValueError: no heading has the anchor.
    """
    if not anchor:
        return text.partition("\n## ")[0].partition("\n")[2].strip()
    level, found = 0, list[str]()
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if level:
            found.append(line)
        elif heading and re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            level = len(heading[1])
    if not level:
        raise ValueError(f"anchor: got {anchor!r}, allowed is that of a heading of the text")
    return "\n".join(found).strip()


def relinked(text: str) -> str:
    """The text of a file of the root, with links that hold in docs/. A link to a source file becomes its name."""
    pages = {source: page for page, source in FROM_ELSEWHERE.items()}

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        target = pages.get(target, target)
        if target.startswith("docs/figures/") and target.endswith(".md"):
            target = "figures.md"  # the tables stand there
        if not target.startswith("docs/") and (ROOT / target).exists():
            return f"{words} (`{target}`)" if words != target else f"`{target}`"
        return f"[{words}]({target.removeprefix('docs/')})"

    return LINK.sub(link, text)


def text_of(source: str) -> str:
    """``FILE`` or ``FILE#anchor`` of the root, as a page of docs/ can hold it."""
    name, _, anchor = source.partition("#")
    text = (ROOT / name).read_text(encoding="utf-8")
    return relinked(section(text, anchor) if "#" in source else text)


def filled(markdown: str) -> str:
    """The page, with the text itself in place of every link that stands alone in its line."""

    def text(found: re.Match[str]) -> str:
        target = found[1]
        return text_of(target.removeprefix("../") if target.startswith("../") else f"docs/{target}")

    sources = {f"../{source}": page for page, source in FROM_ELSEWHERE.items()}
    return LINK.sub(lambda link: f"[{link[1]}]({sources.get(link[2], link[2])})", LINK_ALONE.sub(text, markdown))


def make_importable(folder: Path = IMPORTABLE) -> None:
    """Makes links to every module under ``folder``, by the mapping in pyproject.toml."""
    shutil.rmtree(folder, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package, source in project["tool"]["setuptools"]["package-dir"].items():
        for module in (ROOT / source).rglob("*.py"):
            place = folder.joinpath(*package.split("."), module.relative_to(ROOT / source))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(module)


def on_startup(**_: Any) -> None:
    make_importable()


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in FROM_ELSEWHERE.items():
        files.append(File.generated(config, page, content=text_of(source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)
