"""Where figures go, and how they are written: one PNG and one SVG each. Needs matplotlib (the extra `report`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mutualrl.errors import MachineError, UsageError
from mutualrl.files import user_path

Axes = Any
#: draws on the figure that it is given
Draw = Callable[[Any], None]


def directory_for(path: Path) -> Path:
    """The directory that figures go to, made before any work is done.

    Raises MachineError when matplotlib is not installed, UsageError when the directory cannot be.
    """
    try:
        import matplotlib
    except ImportError:
        raise MachineError("--plot needs matplotlib; pip install 'mutualrl[report]'") from None
    matplotlib.use("Agg")
    directory = user_path(path)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--plot {directory} is a file, expected a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plot {directory} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise UsageError(f"--plot {directory} cannot be written")
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


def draw_all(figures: Mapping[str, tuple[tuple[float, float], Draw]], directory: Path) -> list[Path]:
    """Draw figures, `{name: (size in inches, what draws it)}`; returns the files."""
    import matplotlib.pyplot as plt

    files = []
    for name, (size, draw) in figures.items():
        figure = plt.figure(figsize=size, layout="constrained")
        draw(figure)
        files += save(figure, directory, name)
    return files
