"""Colours of arms and policies, each with a second sign: one per name, the same in every chart, figure and screen.

The colours have a contrast of at least 3 on white and on the page's dark background.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mutualrl.console.display import clean

COLOURS = ("#2f7fc1", "#d1711f", "#2a9d6f", "#a25fb8", "#c8454f", "#8a7a1f", "#3f9fb5", "#8c8c8c", "#b0607f", "#6f7fd0")
#: dashes and gaps of a line, in its widths; empty: solid
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (8, 3, 2, 3), (2, 3), (12, 3), (4, 2, 1, 2, 1, 2), (1, 2))
#: of bars, as matplotlib names them
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++")
#: bars of the models before training, which are no arm and no policy
BEFORE, NEUTRAL, THIN, RINGS = "before training", "#6d757d", (3, 1), "oo"
LONGEST = 1_000  # characters per name


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the parts of `#rrggbb`, 0 to 255."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return red, green, blue


def shown(name: str) -> str:
    """Return a name as charts and figures show it: cleaned, in one line."""
    return clean(name, LONGEST).replace("\n", " ")


@dataclass(slots=True)
class Signs:
    """Signs by name, given in order of first use; `names`: those that are known before, arms and then policies."""

    names: Iterable[str] = ()
    _places: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            self.place(name)

    def place(self, name: str) -> int:
        """Return the number of a name, from 0."""
        return self._places.setdefault(shown(name), len(self._places))

    def colour(self, name: str) -> str:
        """Return its colour."""
        return NEUTRAL if name == BEFORE else COLOURS[self.place(name) % len(COLOURS)]

    def dash(self, name: str) -> tuple[int, ...]:
        """Return its dashes and gaps, in line widths."""
        return THIN if name == BEFORE else DASHES[self.place(name) % len(DASHES)]

    def hatch(self, name: str) -> str:
        """Return the hatch of its bars."""
        return RINGS if name == BEFORE else HATCHES[self.place(name) % len(HATCHES)]

    def to_json(self) -> dict[str, object]:
        """Return colour and dashes of each name, and of what has no place."""
        names = (BEFORE, *self._places)
        return {name: {"colour": self.colour(name), "dash": self.dash(name)} for name in names}
