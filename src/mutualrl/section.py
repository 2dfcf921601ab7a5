"""Base of the sections of a recipe, each in the room that reads it, and what a key says of itself.

Imports pydantic only: `--help` reaches every section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

Question = Literal["resume", "machines", "comparison", "arms"]
QUESTIONS: tuple[Question, ...] = get_args(Question)


class Section(BaseModel):
    """Base class of recipe sections: the object that its room works with."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


@dataclass(frozen=True, slots=True)
class Free:
    """Where a key of the recipe may differ, declared in its annotation.

    Four questions are asked of a key: may it change when a run is resumed (`resume`), differ between the machines of
    one run (`machines`), between runs that are compared (`comparison`), between the arms of a sweep (`arms`)? A key
    that says nothing may not. An answer of a section holds for all of its keys (`recipes.free.may_differ`).
    """

    questions: frozenset[Question]

    @classmethod
    def to(cls, *questions: Question) -> Free:
        """Return the answer to these questions."""
        return cls(frozenset(questions))


#: how a run is kept and watched: it does not affect what the run computes
UPKEEP = Free.to("resume", "machines", "comparison", "arms")
#: the machines that a run has
MACHINES = Free.to("machines", "comparison", "arms")
#: where a run finds its data
PATHS = Free.to("machines")
#: what a comparison compares
FACTOR = Free.to("comparison", "arms")


@dataclass(frozen=True, slots=True)
class UserFile:
    """Mark of a key whose value may be beside the recipe's file: a path, or the import path of code in a file. `words`:
    values that are neither."""

    code: bool = False
    words: tuple[str, ...] = ()


def as_tuple(value: object) -> object:
    """Return one text as a tuple of it, anything else as it is."""
    return (value,) if isinstance(value, str) else value
