"""The format of everything that a run stores: its directory, exchange, checkpoints, models and evaluations."""

from __future__ import annotations

FORMAT = 1


def other_format(value: object, where: object) -> str | None:
    """Return what is wrong with the format that a file names; None if this version reads it. `where`: the file."""
    if type(value) is int and value == FORMAT:
        return None
    return f"{where}: format {value!r:.40}, this version reads {FORMAT}; use the mutualrl that wrote it"
