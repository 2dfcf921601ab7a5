"""What a command is: the dataclass of its options, and what runs it, imported when it runs.

A diagnostic has no entry in `cli.commands`: its module below `diagnostics/specs` or `paper/specs` is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Command:
    """A command: the dataclass of its options, and its function, MODULE.FUNCTION below `mutualrl.cli`."""

    options: type
    function: str

    @property
    def summary(self) -> str:
        """Return its help in one line."""
        return " ".join((self.options.__doc__ or "").partition("\n\n")[0].split())

    def declared(self) -> type:
        """Return the dataclass of its options."""
        return self.options

    def run(self, options: object) -> None:
        """Import its function, and call it."""
        module, _, name = self.function.rpartition(".")
        getattr(import_module(f"mutualrl.cli.{module}"), name)(options)


@dataclass(frozen=True)
class DiagnosticCommand:
    """A diagnostic as a command: its module below `mutualrl`, its first line, and its request, None for one that only
    its module declares."""

    module: str
    summary: str
    request: type | None = None

    def declared(self) -> type:
        """Return the dataclass of its options: the registered one, else the module's own, imported."""
        if self.request is not None:
            return self.request
        own: type = import_module(f"mutualrl.{self.module}").DIAGNOSTIC.request
        return own

    def run(self, options: object) -> None:
        """Run the diagnostic."""
        import_module("mutualrl.cli.diagnose").run(import_module(f"mutualrl.{self.module}").DIAGNOSTIC, options)


def diagnostics(package: str, requests: Mapping[str, type]) -> dict[str, DiagnosticCommand]:
    """Return the diagnostics in a package below `mutualrl`, by command. `requests`: those that can be read without
    importing the module."""
    commands = {}
    for path in sorted((Path(__file__).parents[1] / package).glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:
            summary = file.readline().strip().removeprefix('"""').removesuffix('"""')
        command, module = path.stem.replace("_", "-"), f"{package.replace('/', '.')}.{path.stem}"
        commands[command] = DiagnosticCommand(module, summary, requests.get(command))
    return commands


class CommandGroup(NamedTuple):
    """Commands under a common name, with the help of the whole."""

    help: str
    commands: Mapping[str, Command | DiagnosticCommand]
