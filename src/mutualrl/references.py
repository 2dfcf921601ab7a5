"""What a recipe names outside itself: models, data, members. Forms only; whether it exists is asked elsewhere
(`recipes.models`)."""

from __future__ import annotations

import re
from pathlib import Path

from mutualrl.console.user_path import user_path

TINY = "tiny:"  # a model, or recorded texts, of this package
HUB = "hub:"  # a data set of the hub
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)

POLICY_NAME = r"^[a-z0-9][a-z0-9._-]*$"  # used in directory names and URLs
_DEVICES = frozenset(("con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))))
_FILES = (".json", ".jsonl", ".yaml", ".lock", ".tmp", ".parquet", ".")


def name_problem(name: str) -> str | None:
    """Return why a policy cannot have a name of the right form: it is one of a run's files, of reports, or of a device
    of another system, to which the run may be copied. None if it can."""
    if name == "all":
        return "reports call the whole pool so"
    if name.partition(".")[0] in _DEVICES:
        return "it is a device on Windows"
    return "it looks like a file of a run" if name.endswith(_FILES) else None


def free_name(value: str) -> str:
    """Return a member's name. Raises ValueError for one that collides with names of the run or of another system."""
    if (problem := name_problem(value)) is not None:
        raise ValueError(f"found {value!r}: {problem}; choose another name")
    return value


def is_hub(path: Path) -> bool:
    """Return whether a data path is a reference to the hub, `hub:OWNER/NAME[:CONFIG[:SPLIT]]`."""
    return str(path).startswith(HUB)


def data_path(path: Path) -> str:
    """Return a data path as a recipe has it: absolute, or a reference to the hub unchanged."""
    return str(path) if is_hub(path) else str(user_path(path))


def model_path(value: str) -> str:
    """Return a model as a recipe has it: the absolute path of a directory; an embedded model (`tiny:ada`), a hub id, or
    what is none of these unchanged."""
    if value.startswith(TINY):
        return value
    path = user_path(value)
    return str(path.resolve()) if path.is_dir() else value
