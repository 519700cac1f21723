"""The demo's data: real text from this machine, a byte-level BPE tokenizer trained on it, and seeded batches."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from logitless.interop.demo.settings import Batches, DemoSettings

# Folders of the standard library that are no part of it, or whose text is chosen to break programs.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
# Written when Python was built: it differs from machine to machine.
_SKIPPED_PREFIX = "_sysconfigdata"

_LONGEST_PIECE = 1000  # characters


@dataclass(frozen=True)
class DemoText:
    """Text to learn from, and in words where it came from."""

    text: str
    source: str


def read_text(path: Path | None, limit_bytes: int) -> DemoText:
    """The first `limit_bytes` of a UTF-8 file, or, for None, of the standard library's sources in sorted order.

    Raises ValueError, beginning with "text:", where there is no text to read.
    """
    return _read_standard_library(limit_bytes) if path is None else _read_file(path, limit_bytes)


def _read_file(path: Path, limit_bytes: int) -> DemoText:
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes)
            cut = bool(file.read(1))
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"text: got {str(path)!r}, which cannot be read ({reason}), allowed is a text file") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        # A limit inside a character is not the file's fault.
        if not (cut and error.reason == "unexpected end of data"):
            raise ValueError(
                f"text: got {str(path)!r}, which is not UTF-8 (byte {error.start}: {error.reason}), "
                "allowed is text in UTF-8"
            ) from error
        text = content[: error.start].decode("utf-8")
    if not text.strip():
        raise ValueError(f"text: got {str(path)!r}, which is empty, allowed is a file with text in it")
    return DemoText(text, f"{'the beginning of ' if cut else ''}{path}")


def _read_standard_library(limit_bytes: int) -> DemoText:
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _SKIPPED_FOLDERS & set(path.relative_to(root).parts) or path.name.startswith(_SKIPPED_PREFIX):
            continue
        try:
            part = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # some old sources are Latin-1; there are enough others
        parts.append(part)
        size += len(part.encode())
        if size >= limit_bytes:
            break
    if not parts:
        raise ValueError(
            f"text: got no file, and no Python source was found in {str(root)!r}, allowed is a file (--text FILE)"
        )
    version = ".".join(map(str, sys.version_info[:2]))
    return DemoText("".join(parts), f"{len(parts)} files of the Python {version} standard library")


def train_tokenizer(text: str, entries: int) -> Tokenizer:
    """A byte-level BPE of at most `entries` entries (fewer for a text with few words); no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_pieces(text), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """All of the text as one row of token ids."""
    pieces = tokenizer.encode_batch_fast(_pieces(text))
    return np.concatenate([np.asarray(piece.ids, dtype=np.int32) for piece in pieces])


def _pieces(text: str) -> list[str]:
    """The lines, cut where they are very long: a "word" of a million letters would cost BPE gigabytes and minutes."""
    lines = text.splitlines(keepends=True)
    return [line[start : start + _LONGEST_PIECE] for line in lines for start in range(0, len(line), _LONGEST_PIECE)]


def make_batches(tokens: NDArray[np.int32], settings: DemoSettings) -> Batches:
    """[steps, batch, sequence + 1] seeded random windows of the text; all runs see the same ones in the same order.

    Windows are whole, so there is no padding and no token without a target.

    Raises ValueError, beginning with "text:", when the text has fewer tokens than one batch.
    """
    window = settings.sequence + 1
    if len(tokens) < settings.batch * window:
        raise ValueError(
            f"text: got {len(tokens)} tokens, allowed is at least {settings.batch * window} "
            f"({settings.batch} sequences of {window})"
        )
    generator = np.random.default_rng(settings.seed + 1)
    starts = generator.integers(0, len(tokens) - window + 1, (settings.steps, settings.batch))
    batches: Batches = tokens[starts[..., None] + np.arange(window)]
    return batches
