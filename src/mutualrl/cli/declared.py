"""What a command is: the dataclass of its options, and what runs it, imported when it runs.

A diagnostic has no entry in `cli.commands`: its module below `diagnostics/specs` or `paper/specs` says all of it.
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
    """A diagnostic as a command: its module below `mutualrl`, and its first line."""

    module: str
    summary: str

    def declared(self) -> type:
        """Return the dataclass of its options: that in the package's `flags`, else the module's own, imported."""
        package, _, name = self.module.rpartition(".specs.")
        flags = "".join(part.capitalize() for part in name.split("_")) + "Flags"
        light: type | None = getattr(import_module(f"mutualrl.{package}.flags"), flags, None)
        return light or import_module(f"mutualrl.{self.module}").DIAGNOSTIC.options

    def run(self, options: object) -> None:
        """Run the diagnostic."""
        import_module("mutualrl.cli.diagnose").run(import_module(f"mutualrl.{self.module}").DIAGNOSTIC, options)


def diagnostics(package: str) -> dict[str, DiagnosticCommand]:
    """Return the diagnostics in a package below `mutualrl`, by command."""
    commands = {}
    for path in sorted((Path(__file__).parents[1] / package).glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:
            summary = file.readline().strip().removeprefix('"""').removesuffix('"""')
        commands[path.stem.replace("_", "-")] = DiagnosticCommand(f"{package.replace('/', '.')}.{path.stem}", summary)
    return commands


class CommandGroup(NamedTuple):
    """Commands under a common name, with the help of the whole."""

    help: str
    commands: Mapping[str, Command | DiagnosticCommand]
