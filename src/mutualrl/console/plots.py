"""Figures, each written as a PNG and an SVG."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: draws on a given figure
Draw = Callable[["Figure"], None]


def directory_for(path: Path, flag: str = "--plot") -> Path:
    """Create and return the directory for figures, before any other work is done.

    Raises UsageError if it cannot be created or written.
    """
    import matplotlib

    matplotlib.use("Agg")
    directory = user_path(path)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{flag} {directory} is a file, expected a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {directory} cannot be created: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise UsageError(f"{flag} {directory} cannot be written")
    return directory


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write a figure as NAME.png and NAME.svg; the SVG has no date, so the same figure gives the same file."""
    import matplotlib.pyplot as plt

    files = []
    for suffix in ("png", "svg"):
        path = directory / f"{name}.{suffix}"
        figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
        files.append(path)
    plt.close(figure)
    return files


@contextmanager
def draw_on(size: tuple[float, float], style: Any) -> Iterator[Figure]:
    """Yield an empty figure of `size` inches, closed afterwards; `style`: matplotlib settings for the block."""
    import matplotlib.pyplot as plt

    with plt.rc_context(style):
        figure = plt.figure(figsize=size, layout="constrained")
        try:
            yield figure
        finally:
            plt.close(figure)


def draw_all(figures: Mapping[str, tuple[tuple[float, float], Draw]], directory: Path) -> list[Path]:
    """Draw figures, `{name: (size in inches, draw function)}`, and return their files."""
    import matplotlib.pyplot as plt

    files = []
    for name, (size, draw) in figures.items():
        figure = plt.figure(figsize=size, layout="constrained")
        draw(figure)
        files += save(figure, directory, name)
    return files
