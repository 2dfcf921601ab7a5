"""Paths that a user typed."""

from __future__ import annotations

from pathlib import Path

from mutualrl.errors import UsageError


def user_path(text: str | Path) -> Path:
    """Return the absolute path that a user typed, `~` expanded; the file need not exist.

    Raises UsageError for a path that cannot be looked up: a NUL, undecodable bytes, an unknown home, a name that is too
    long, a directory without permission.
    """
    shown = repr(str(text))[:120]
    if "\0" in str(text) or not _encodes(str(text)):
        raise UsageError(f"{shown} is not a path: it contains a NUL or bytes that are not UTF-8")
    try:
        path = Path(text).expanduser().absolute()
        path.stat()  # also of a link to itself, which `exists` takes for a missing file
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise UsageError(f"path {shown} cannot be used: {error.strerror or error}") from None
    except RuntimeError as error:  # unknown home directory
        raise UsageError(f"path {shown} cannot be used: {error}") from None
    return path


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
