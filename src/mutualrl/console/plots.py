"""Writing of figures: one PNG and one SVG each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mutualrl.errors import UsageError
from mutualrl.storage.files import user_path

Axes = Any
#: draws on the figure that it is given
Draw = Callable[[Any], None]


def directory_for(path: Path, flag: str = "--plot") -> Path:
    """Return the directory that figures go to, made before any work is done.

    Raises UsageError when the directory cannot be.
    """
    import matplotlib

    matplotlib.use("Agg")
    directory = user_path(path)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{flag} {directory} is a file, expected a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {directory} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise UsageError(f"{flag} {directory} cannot be written")
    return directory


def save(figure: Any, directory: Path, name: str) -> list[Path]:
    """Write a figure as NAME.png and NAME.svg; the same figure gives the same SVG, whatever the date."""
    import matplotlib.pyplot as plt

    files = []
    for suffix in ("png", "svg"):
        path = directory / f"{name}.{suffix}"
        figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
        files.append(path)
    plt.close(figure)
    return files


@contextmanager
def draw_on(size: tuple[float, float], style: Any) -> Iterator[Any]:
    """Yield an empty figure of `size` inches, closed afterwards; `style` are matplotlib's settings while it is
    drawn."""
    import matplotlib.pyplot as plt

    with plt.rc_context(style):
        figure = plt.figure(figsize=size, layout="constrained")
        try:
            yield figure
        finally:
            plt.close(figure)


def draw_all(figures: Mapping[str, tuple[tuple[float, float], Draw]], directory: Path) -> list[Path]:
    """Draw figures, `{name: (size in inches, what draws it)}`; returns the files."""
    import matplotlib.pyplot as plt

    files = []
    for name, (size, draw) in figures.items():
        figure = plt.figure(figsize=size, layout="constrained")
        draw(figure)
        files += save(figure, directory, name)
    return files
