"""Where a key of the recipe may differ: declared with the key, in its annotation.

Four questions are asked of a key: may it change when a run is resumed (`resume`), differ between the machines of one
run (`machines`), between runs that are compared (`comparison`), between the arms of a sweep (`arms`)? A key that says
nothing may not. An answer of a section holds for all of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Question = Literal["resume", "machines", "comparison", "arms"]
QUESTIONS: tuple[Question, ...] = get_args(Question)


@dataclass(frozen=True, slots=True)
class Free:
    """Questions that a key answers with yes."""

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


def may_differ(model: type[BaseModel], key: str, question: Question) -> bool:
    """Return whether a key, dotted, with the items of lists by their names, may differ under a question."""
    section: type[BaseModel] | None = model
    parts = key.split(".")
    while parts and section is not None:
        field = section.model_fields.get(parts.pop(0))
        if field is None:
            return False
        if question in _answers(field):
            return True
        section, in_list = _section(field)
        if in_list and parts:
            parts.pop(0)  # the item's name
    inner = section is None and bool(parts)
    return inner and _of_mapping(key, parts, question)


def _answers(field: FieldInfo) -> frozenset[Question]:
    return frozenset[Question]().union(*(each.questions for each in field.metadata if isinstance(each, Free)))


def _section(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that a field holds, if any, and whether it holds several, by name."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument, any(kind in str(annotation) for kind in ("tuple[", "dict["))
    return None, False


def _of_mapping(key: str, parts: list[str], question: Question) -> bool:
    """Return whether a key of TRL's configuration may differ: how a batch is divided depends on the machine."""
    of_trainer = "trainer" in key.split(".")
    divides = parts[0].startswith("per_device_") or parts[0] == "gradient_accumulation_steps"
    return of_trainer and divides and question == "machines"
