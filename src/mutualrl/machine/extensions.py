"""Locks of the C++ operators that torch and DeepSpeed compile when they are first used."""

from __future__ import annotations

import os
from pathlib import Path


def build_locks() -> list[Path]:
    """Return the locks of builds that run, or that were killed: every later start waits for such a lock, without limit.

    torch puts one into the directory of an operator (`torch.utils.cpp_extension`): below TORCH_EXTENSIONS_DIR, or
    below a directory per Python version and device in ~/.cache/torch_extensions.
    """
    if (chosen := os.environ.get("TORCH_EXTENSIONS_DIR")) is not None:
        return sorted(Path(chosen).glob("*/lock"))
    return sorted((Path.home() / ".cache" / "torch_extensions").glob("*/*/lock"))


def lock_note(lock: Path) -> str:
    """Return what to do about a lock."""
    return (
        f"{lock}: another process compiles DeepSpeed's operator {lock.parent.name!r}, or was killed while it did; "
        f"policies wait for the lock. If no other run starts, remove it: rm {lock}"
    )
