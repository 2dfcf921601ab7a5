"""Whether a key of the recipe may differ: read from the annotations of its sections (`section.Free`)."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mutualrl.recipes.nesting import sections_in
from mutualrl.section import Free, Question


def may_differ(model: type[BaseModel], key: str, question: Question) -> bool:
    """Return whether a key, dotted, with the items of lists by their names, may differ under a question."""
    sections: tuple[type[BaseModel], ...] = (model,)
    parts = key.split(".")
    while parts and sections:
        part = parts.pop(0)
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not fields:
            return False
        if any(question in _answers(field) for field in fields):
            return True
        sections, in_list = sections_in(fields)
        if in_list and parts:
            parts.pop(0)  # the item's name
    inner = not sections and bool(parts)
    return inner and _of_mapping(key, parts, question)


def _answers(field: FieldInfo) -> frozenset[Question]:
    return frozenset[Question]().union(*(each.questions for each in field.metadata if isinstance(each, Free)))


def _of_mapping(key: str, parts: list[str], question: Question) -> bool:
    """Return whether a key of TRL's configuration may differ: how a batch is divided depends on the machine."""
    of_trainer = "trainer" in key.split(".")
    divides = parts[0].startswith("per_device_") or parts[0] == "gradient_accumulation_steps"
    return of_trainer and divides and question == "machines"
