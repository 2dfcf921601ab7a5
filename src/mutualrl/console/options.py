"""What a command line says of a field: each option is declared once, as a field of a dataclass.

A field `limit: Annotated[int | None, Option("Number of prompts.", min=1)] = None` is the option `--limit`. A field
without `Option` is no option. A subclass hides an inherited option by declaring the field again without one.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Option:
    """Option of a command. `name`: as typed, by default `--FIELD`, several with spaces between them; None, () and False
    as default mean not given. `complete`: what completes it in a shell, a function of `cli.completion`. `variable`:
    environment variable that also sets it. `argument`: it has no name, and is given by its place."""

    help: str
    name: str | None = None
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    complete: str | None = None
    variable: str | None = None
    argument: bool = False


SEED_LIMIT = 2**31 - 1
ENGINE = Option("transformers or vllm (vllm if it supports the model).")
JSON = Option("Print one JSON object on stdout.", "--json")
TRUST_REMOTE_CODE = Option("Let a hub model run its own code.")


@dataclass(frozen=True, kw_only=True)
class WithJson:
    """What every command has."""

    as_json: Annotated[bool, JSON] = False


@dataclass(frozen=True, kw_only=True)
class WithPlot(WithJson):
    """What a command with figures has."""

    plot: Annotated[Path | None, Option("Write figures to this directory.")] = None


#: a field of a dataclass, its type, and its option
Declared = tuple[Field[Any], Any, Option]


def declared_options(options: type) -> list[Declared]:
    """Return the fields of a dataclass that are options, with their types: first those without a default, last
    `--json`."""
    hints = get_type_hints(options, include_extras=True)
    declared: list[Declared] = []
    for field in fields(options):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, *notes = get_args(hint)
            declared.extend((field, kind, note) for note in notes if isinstance(note, Option))
    return sorted(declared, key=lambda entry: (entry[0].default is not MISSING, entry[2] is JSON))


def typed_names(field: Field[Any], option: Option) -> list[str]:
    """Return an option's names as typed."""
    return (option.name or f"--{field.name.replace('_', '-')}").split()


def given(options: object) -> list[str]:
    """Return the names, as typed, of the options that differ from their defaults."""
    names = []
    for field, _, option in declared_options(type(options)):
        if getattr(options, field.name) != field.default:
            names.append(field.name if option.argument else typed_names(field, option)[0])
    return names


def arguments_of(options: object) -> list[str]:
    """Return the words of a command line that gives these options; those with their defaults are left out."""
    words: list[str] = []
    for field, _, option in declared_options(type(options)):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            if option.argument:
                words.append(str(each))
            else:
                name = typed_names(field, option)[0]
                words += [name] if each is True else [name, str(each)]
    return words


def options_of(options: type) -> dict[str, Option]:
    """Return the options of a dataclass by field, for another one that has some of them."""
    return {field.name: option for field, _, option in declared_options(options)}
