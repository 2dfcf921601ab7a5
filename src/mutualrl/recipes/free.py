"""Whether a key of the recipe may differ: read from the annotations of its sections (`section.Free`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
        sections, in_list = _sections(fields)
        if in_list and parts:
            parts.pop(0)  # the item's name
    inner = not sections and bool(parts)
    return inner and _of_mapping(key, parts, question)


def _answers(field: FieldInfo) -> frozenset[Question]:
    return frozenset[Question]().union(*(each.questions for each in field.metadata if isinstance(each, Free)))


def _sections(fields: Iterable[FieldInfo]) -> tuple[tuple[type[BaseModel], ...], bool]:
    """Return the sections that fields of one key hold, and whether they hold several, by name. A section of several
    kinds, which a key tells apart, is one of each: a key may differ if that of any kind may."""
    found: dict[type[BaseModel], None] = {}
    in_list = False
    for field in fields:
        inside, several = _inside(field.annotation)
        found |= dict.fromkeys(inside)
        in_list |= several
    return tuple(found), in_list and bool(found)


def _inside(annotation: object) -> tuple[list[type[BaseModel]], bool]:
    """Return the sections within an annotation, and whether they are items of a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    parts = [_inside(argument) for argument in get_args(annotation)]
    in_list = get_origin(annotation) in (tuple, list, dict) or any(several for _, several in parts)
    return [section for inside, _ in parts for section in inside], in_list


def _of_mapping(key: str, parts: list[str], question: Question) -> bool:
    """Return whether a key of TRL's configuration may differ: how a batch is divided depends on the machine."""
    of_trainer = "trainer" in key.split(".")
    divides = parts[0].startswith("per_device_") or parts[0] == "gradient_accumulation_steps"
    return of_trainer and divides and question == "machines"
