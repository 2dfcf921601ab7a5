"""The one way to write a file safely, and to read JSON back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put `data` at `path` so that a reader sees the old file, or the new one, never a part.

    Steps: temporary file in the same directory, write, fsync, rename over the name, fsync of the directory.
    With `durable=False` the two fsyncs are left out (heartbeats: torn is forbidden, lost is harmless).
    A writer killed in between leaves a `.tmp` file that no reader looks at.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Write `value` as one line of JSON, atomically. NaN and infinities are refused."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=False)
    write_atomic(path, (text + "\n").encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object at `path`, or None when there is no such file. Raises ValueError when it is not one."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
