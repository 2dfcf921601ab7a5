"""Sections within sections of a recipe, read from their annotations, and the one walk over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mutualrl.section import UserFile

Sections = tuple[type[BaseModel], ...]


def sections_in(fields: Iterable[FieldInfo]) -> tuple[Sections, bool]:
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


def anchored(value: object, sections: Sections, anchor: Callable[[UserFile, object], object]) -> object:
    """Return a section as a recipe has it, which may be invalid, with `anchor(mark, value)` in place of each value that
    may be beside the recipe's file. A section may be of several kinds."""
    if not isinstance(value, dict):
        return value
    result: dict[Any, object] = {}
    for key, inner in value.items():
        fields = [section.model_fields[key] for section in sections if key in section.model_fields]
        mark = next((note for field in fields for note in field.metadata if isinstance(note, UserFile)), None)
        within, several = sections_in(fields)
        if mark is not None:
            result[key] = [anchor(mark, each) for each in inner] if isinstance(inner, list) else anchor(mark, inner)
        elif several and isinstance(inner, list):
            result[key] = [anchored(each, within, anchor) for each in inner]
        elif several and isinstance(inner, dict):
            result[key] = {name: anchored({} if each is None else each, within, anchor) for name, each in inner.items()}
        else:
            result[key] = anchored(inner, within, anchor) if within else inner
    return result
