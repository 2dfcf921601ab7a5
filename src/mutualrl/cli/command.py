"""A command as a function of one dataclass, whose fields are its options (`console.options`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from mutualrl.cli import completion
from mutualrl.cli.output import reports_errors
from mutualrl.console.options import Option

Options = TypeVar("Options")


def command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator that makes a function of `options` a Typer command, which reports mutualrl's errors."""
    declared = declared_options(options)

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        """Return the command: its signature, which Typer reads, has the options."""

        @functools.wraps(function)
        def called(**values: Any) -> None:
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            function(options(**{name: value for name, value in values.items() if value is not None}))

        parameters = [_parameter(field, hint, option) for field, hint, option in declared]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del called.__wrapped__  # Typer would read the function's own signature
        return reports_errors(called)

    return decorate


def declared_options(options: type) -> list[tuple[Field[Any], Any, Option]]:
    """Return the fields of a dataclass that are options, with their types; those without a default first."""
    hints = get_type_hints(options, include_extras=True)
    declared: list[tuple[Field[Any], Any, Option]] = []
    for field in fields(options):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, *notes = get_args(hint)
            declared.extend((field, kind, note) for note in notes if isinstance(note, Option))
    return sorted(declared, key=lambda entry: entry[0].default is not MISSING)


def _parameter(field: Field[Any], hint: Any, option: Option) -> inspect.Parameter:
    """Return the parameter that Typer reads. A tuple of any length is a list there, None if not given."""
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    settings: dict[str, Any] = {
        "help": option.help,
        "metavar": option.metavar,
        "envvar": option.variable,
        "min": option.min,
        "max": option.max,
        "show_default": default not in (None, (), inspect.Parameter.empty),
        "autocompletion": option.complete and getattr(completion, option.complete),
    }
    if get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
        hint = hint if default is inspect.Parameter.empty else hint | None
        default = None if default == () else default
    info: Any = typer.Argument(**settings) if option.argument else typer.Option(_typed(field, option), **settings)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=default, annotation=Annotated[hint, info])


def _typed(field: Field[Any], option: Option) -> str:
    """Return an option's name as typed."""
    return option.name or f"--{field.name.replace('_', '-')}"


def given(options: object) -> list[str]:
    """Return the names, as typed, of the options that differ from their defaults."""
    names = []
    for field, _, option in declared_options(type(options)):
        if getattr(options, field.name) != field.default:
            names.append(field.name if option.argument else _typed(field, option))
    return names


def options_of(options: type) -> dict[str, Option]:
    """Return the options of a dataclass by field, for another one that has some of them."""
    return {field.name: option for field, _, option in declared_options(options)}
