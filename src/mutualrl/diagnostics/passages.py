"""Text passages of the diagnostics: the package's own, or those of a user's file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from mutualrl.console.user_path import user_path
from mutualrl.errors import DataError
from mutualrl.tasks.base import text_field
from mutualrl.tasks.files import read_jsonl
from mutualrl.thl import has_cjk, word_spans

#: last code point of the Latin, Greek and Cyrillic blocks
_LAST_WESTERN = "\u052f"


def load_passages(path: Path | None) -> list[str]:
    """Return the passages of a file (JSON Lines with `text`, or plain text with blank lines between), or the package's.

    Raises DataError when the file is missing, or has no text or an invalid row.
    """
    if path is None:
        with resources.as_file(resources.files("mutualrl.diagnostics") / "default_text.jsonl") as default:
            return [text_field(row, "text", default, number) for number, row in read_jsonl(default)]
    file = user_path(path)
    if not file.is_file():
        problem = "not found"
        if file.is_dir():
            problem = "is a directory"
        elif file.exists():
            problem = "is a pipe or device"
        raise DataError(f"text file {problem}: {file} (expected a file of JSON Lines, or plain text; check --text)")
    if file.suffix == ".jsonl":
        rows = [text_field(row, "text", file, number) for number, row in read_jsonl(file) if not _blank(row)]
        if not rows:
            raise DataError(f"{file}: the file has no rows with text")
        return rows
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start}") from None
    passages = [part for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    if not passages:
        raise DataError(f"{file}: the file has no text")
    return passages


def _blank(row: dict[str, object]) -> bool:
    """Return whether a row's text is only whitespace, as in WikiText."""
    return isinstance(row.get("text"), str) and not str(row["text"]).strip()


def family(text: str) -> str:
    """Return `CJK` for a text with CJK code points; else `Western` when its letters are mostly Latin, Greek or
    Cyrillic."""
    if has_cjk(text):
        return "CJK"
    letters = [c for c in text if c.isalpha()]
    western = sum(c <= _LAST_WESTERN for c in letters)
    return "Western" if letters and 2 * western >= len(letters) else "other"


def pick(passages: Sequence[str], count: int, seed: int) -> list[str]:
    """Return `count` passages in random order; all, in the given order, if there are no more."""
    if len(passages) <= count:
        return list(passages)
    return random.Random(seed).sample(list(passages), count)


class Corpus:
    """All passages as one text, from which contiguous stretches are drawn; it wraps around at its end."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.text = "".join(p if p.endswith("\n") else p + "\n" for p in passages)
        spans = word_spans(self.text)
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def stretch(self, characters: int, rng: random.Random) -> str:
        """Return about `characters` characters from the start of a random word, cut at the end of a word."""
        start = rng.choice(self._starts)
        wraps = 1 + (start + characters) // len(self.text)
        text = (self.text * (wraps + 1))[start : start + characters + 1]
        ends = [end for _, end in word_spans(text)]
        within = [end for end in ends if end <= characters] or ends[:1]
        return text[: within[-1]]

    def words(self, count: int, rng: random.Random) -> str:
        """Return `count` consecutive words from a random position (fewer when the text has fewer)."""
        first = rng.randrange(max(1, len(self._starts) - count))
        last = min(first + count, len(self._ends)) - 1
        return self.text[self._starts[first] : self._ends[last]]
