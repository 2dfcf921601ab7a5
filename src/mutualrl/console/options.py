"""What a command line says of a field: each option is declared once, as a field of a dataclass.

A field `limit: Annotated[int | None, Option("Number of prompts.", min=1)] = None` is the option `--limit`; a field
`sampling: Annotated[SamplingOptions, OptionGroup()] = SamplingOptions()` has the options of that dataclass. Any other
field is none. A subclass hides an inherited option by declaring the field again without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


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


class OptionGroup:
    """Options that several commands have: a field whose type is a dataclass of options, which stand among the command's
    own. `names`: the fields that this command has (none: all). `changed`: what it says of one instead."""

    def __init__(self, *names: str, **changed: Option) -> None:
        self.names, self.changed = names, changed


@dataclass(frozen=True)
class Declared:
    """An option as declared: the names of the fields that lead to it, its type, and its default (MISSING: none)."""

    path: tuple[str, ...]
    kind: Any
    option: Option
    default: Any

    @property
    def name(self) -> str:
        """Return the field's name."""
        return self.path[-1]

    @property
    def typed(self) -> list[str]:
        """Return the option's names as typed."""
        return (self.option.name or f"--{self.name.replace('_', '-')}").split()

    @property
    def shown(self) -> str:
        """Return what an error calls it: its first name as typed, or that of an argument."""
        return self.name if self.option.argument else self.typed[0]

    def of(self, options: object) -> Any:
        """Return its value."""
        return reduce(getattr, self.path, options)


def declared_options(options: type) -> list[Declared]:
    """Return the options of a dataclass, those of its groups included: first those without a default, last `--json`."""
    return sorted(_declared(options, ()), key=lambda entry: (entry.default is not MISSING, entry.option is JSON))


def _declared(options: type, above: tuple[str, ...]) -> Iterator[Declared]:
    """Yield the options of a dataclass in the order of their fields. `above`: the fields that lead to it."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint, path = hints[field.name], (*above, field.name)
        if get_origin(hint) is not Annotated:
            continue
        kind, *notes = get_args(hint)
        for note in notes:
            if isinstance(note, Option):
                yield Declared(path, kind, note, field.default)
            elif isinstance(note, OptionGroup):
                for entry in _declared(kind, path):
                    if not note.names or entry.name in note.names:
                        yield replace(entry, option=note.changed.get(entry.name, entry.option))


def with_values(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Return a dataclass of options with these values, by the options' fields; those not named have their defaults."""
    hints, own = get_type_hints(options), dict[str, Any]()
    of_groups: dict[str, dict[str, Any]] = {}
    for entry in declared_options(options):
        if entry.name in values:
            at = own if len(entry.path) == 1 else of_groups.setdefault(entry.path[0], {})
            at[entry.name] = values[entry.name]
    return options(**own, **{group: with_values(hints[group], given) for group, given in of_groups.items()})


def given(options: object, *names: str) -> list[str]:
    """Return the names, as typed, of the options that differ from their defaults; with `names`, of these fields."""
    declared = [entry for entry in declared_options(type(options)) if not names or entry.name in names]
    return [entry.shown for entry in declared if entry.of(options) != entry.default]


def arguments_of(options: object) -> list[str]:
    """Return the words of a command line that gives these options; those with their defaults are left out."""
    words: list[str] = []
    for entry in declared_options(type(options)):
        value = entry.of(options)
        if value == entry.default:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            if entry.option.argument:
                words.append(str(each))
            else:
                words += [entry.shown] if each is True else [entry.shown, str(each)]
    return words
