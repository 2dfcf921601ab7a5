"""Values that several sections of a recipe have."""

from __future__ import annotations

import re
from pathlib import Path

from mutualrl.console.user_path import user_path
from mutualrl.engines.model_files import ADAPTER, adapter_message
from mutualrl.records import name_problem
from mutualrl.tasks.hub_data import is_hub
from mutualrl.tiny import PREFIX, names

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)


def known_model(value: str) -> str:
    """Validate a model: an embedded one (`tiny:ada`), an existing directory, or a hub id; missing paths are
    rejected."""
    if value.startswith(PREFIX):
        models = [PREFIX + name for name in names()]
        if value not in models:
            raise ValueError(f"no embedded model {value!r}; expected one of {', '.join(models)}")
        return value
    path = user_path(value)
    if path.is_dir():
        if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
            raise ValueError(adapter_message(path))
        if not (path / "config.json").is_file():
            raise ValueError(f"model directory {value} has no config.json; expected the output of save_pretrained")
        return str(path.resolve())
    if path.exists() or HUB_ID.fullmatch(value) is None:
        raise ValueError(f"model not found: {value!r} is neither a directory nor a hub id (owner/name)")
    return value


def free_name(value: str) -> str:
    """Return a policy's name. Raises ValueError for one that collides with names of the run or of another system."""
    if (problem := name_problem(value)) is not None:
        raise ValueError(f"found {value!r}: {problem}; choose another name")
    return value


def absolute(value: str) -> str:
    """Return a path made absolute, so that a resolved recipe is independent of the working directory."""
    return value if is_hub(Path(value)) else str(user_path(value))
