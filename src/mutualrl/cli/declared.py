"""What a command is: the dataclass of its options, and what runs it, imported when it runs.

A diagnostic has no entry in `cli.commands`: its module below `diagnostics/specs` or `paper/specs` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Command:
    """A command: the dataclass of its options, its function, MODULE.FUNCTION below `mutualrl.cli`, and its help, which
    is else the options' docstring."""

    options: type
    function: str
    own_help: str = ""

    @property
    def help(self) -> str:
        """Return its help."""
        return self.own_help or self.options.__doc__ or ""

    def declared(self) -> type:
        """Return the dataclass of its options."""
        return self.options

    def load(self) -> Callable[[object], None]:
        """Import its function, and return it."""
        module, _, name = self.function.rpartition(".")
        function: Callable[[object], None] = getattr(import_module(f"mutualrl.cli.{module}"), name)
        return function


@dataclass(frozen=True)
class DiagnosticCommand:
    """A diagnostic as a command: its module below `mutualrl`, its first line, and its request, None for one that only
    its module declares."""

    module: str
    first_line: str
    request: type | None = None

    @property
    def help(self) -> str:
        """Return its help: the first line, or the docstring of a request that begins with it."""
        of_request = (self.request.__doc__ if self.request is not None else None) or ""
        return of_request if of_request.startswith(self.first_line) else self.first_line

    def declared(self) -> type:
        """Return the dataclass of its options: the registered one, else the module's own, imported."""
        if self.request is not None:
            return self.request
        own: type = import_module(f"mutualrl.{self.module}").DIAGNOSTIC.request
        return own

    def load(self) -> Callable[[object], None]:
        """Import the diagnostic, and return what runs it."""
        return partial(import_module("mutualrl.cli.diagnose").run, import_module(f"mutualrl.{self.module}").DIAGNOSTIC)


def summary(declared: Command | DiagnosticCommand) -> str:
    """Return the first paragraph of a command's help, in one line."""
    return " ".join(declared.help.partition("\n\n")[0].split())


def diagnostics(package: str, requests: Mapping[str, type]) -> dict[str, DiagnosticCommand]:
    """Return the diagnostics in a package below `mutualrl`, by command. `requests`: those that can be read without
    importing the module."""
    commands = {}
    for path in sorted((Path(__file__).parents[1] / package).glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:
            first_line = file.readline().strip().removeprefix('"""').removesuffix('"""')
        command, module = path.stem.replace("_", "-"), f"{package.replace('/', '.')}.{path.stem}"
        commands[command] = DiagnosticCommand(module, first_line, requests.get(command))
    return commands


class CommandGroup(NamedTuple):
    """Commands under a common name, with the help of the whole."""

    help: str
    commands: Mapping[str, Command | DiagnosticCommand]
