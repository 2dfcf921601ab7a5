"""Tiny embedded models, shipped with weights after warm-up, so that every machine starts from the same floats.
`mutualrl.paper.embedded` makes them."""

from __future__ import annotations

from pathlib import Path

from mutualrl.errors import UsageError
from mutualrl.references import TINY

_MODELS = Path(__file__).parent / "models"


def names() -> list[str]:
    """Return the names of the embedded models."""
    return sorted(path.parent.name for path in _MODELS.glob("*/config.json"))


def path_of(name: str) -> Path:
    """Return the directory of an embedded model. Raises UsageError for an unknown name."""
    if name not in names():
        raise UsageError(f"no embedded model {name!r}; expected one of: {', '.join(names())}")
    return _MODELS / name


def resolve_path(model: str) -> str:
    """Return what transformers loads for `model`: a directory of the package for `tiny:NAME`, else `model` itself."""
    return str(path_of(model.removeprefix(TINY))) if model.startswith(TINY) else model


def is_embedded(model: str) -> bool:
    """Return whether a model is an embedded one, by its name or by its directory."""
    return model.startswith(TINY) or Path(model).parent == _MODELS
