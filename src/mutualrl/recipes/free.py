"""Whether a key of the recipe may differ: read from the annotations of its sections (`section.Free`)."""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mutualrl.section import Free, Question


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
