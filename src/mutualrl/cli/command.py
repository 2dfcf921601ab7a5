"""From a dataclass of options (`cli.commands`) to a command that Typer runs, whose function is imported then."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mutualrl.cli.declared import Command, CommandGroup, DiagnosticCommand, summary
from mutualrl.cli.output import reported_errors
from mutualrl.console.options import Declared, declared_options, with_values
from mutualrl.storage.files import JsonObject


class LazyCommand(TyperCommand):
    """Command of which only name and summary are made until it is used."""

    def __init__(self, name: str, declared: Command | DiagnosticCommand) -> None:
        super().__init__(name, help=summary(declared))
        self._declared = declared

    def load(self) -> Any:
        """Return the command itself."""
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name)(as_function(self._declared))
        command = get_command(single)
        command.name = self.name
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


def lazy(name: str, declared: Command | DiagnosticCommand | CommandGroup) -> Any:
    """Return a command or a group of commands as Typer lists it."""
    if not isinstance(declared, CommandGroup):
        return LazyCommand(name, declared)
    commands = {part: lazy(part, command) for part, command in declared.commands.items()}
    return TyperGroup(name=name, commands=commands, help=declared.help, no_args_is_help=True)


def as_function(declared: Command | DiagnosticCommand) -> Callable[..., None]:
    """Return the function that Typer makes a command of: its signature has the options, its docstring is theirs. It
    runs the command, and reports mutualrl's errors."""
    kind = declared.declared()

    def function(**values: object) -> None:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        with reported_errors(as_json=bool(values.get("as_json"))):
            options: object = with_values(kind, {key: value for key, value in values.items() if value is not None})
            declared.load()(options)

    parameters = [_parameter(entry) for entry in declared_options(kind)]
    function.__doc__ = declared.help
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _parameter(declared: Declared) -> inspect.Parameter:
    """Return the parameter that Typer reads. A tuple of any length is a list there, None if not given."""
    hint, option = declared.kind, declared.option
    default = inspect.Parameter.empty if declared.default is MISSING else declared.default
    settings: JsonObject = {
        "help": option.help,
        "metavar": option.metavar,
        "envvar": option.variable,
        "min": option.min,
        "max": option.max,
        "show_default": default not in (None, (), inspect.Parameter.empty),
        "autocompletion": option.complete and _completer(option.complete),
    }
    if get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
        hint = hint if default is inspect.Parameter.empty else hint | None
        default = None if default == () else default
    info: Any = typer.Argument(**settings) if option.argument else typer.Option(*declared.typed, **settings)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(declared.name, kind, default=default, annotation=Annotated[hint, info])


def _completer(name: str) -> Callable[[typer.Context, str], object]:
    """Return a function of `cli.completion`, which is imported when the user presses the key."""

    def complete(context: typer.Context, incomplete: str) -> object:
        return getattr(import_module("mutualrl.cli.completion"), name)(context, incomplete)

    return complete
