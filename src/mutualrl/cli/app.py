"""Command line: the commands of `cli.commands`, and what all of them have."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from mutualrl import __version__
from mutualrl.cli.command import lazy
from mutualrl.cli.commands import COMMANDS
from mutualrl.cli.output import emit, prose
from mutualrl.console.display import correct_columns, print_text, shortened
from mutualrl.process.parent_watch import stop_with_parent

#: the exception that an invalid flag raises, in whichever click Typer uses
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class Commands(TyperGroup):
    """Commands. With `--json`, an invalid flag is reported as one JSON object on stdout, like every other error."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: lazy(name, declared) for name, declared in COMMANDS.items()}

    def main(self, args: Sequence[str] | None = None, *names: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line."""
        given = sys.argv[1:] if args is None else args
        arguments = [shortened(each) if each.startswith("-") and "=" not in each else each for each in given]
        if not standalone_mode or "--json" not in arguments:
            return super().main(arguments, *names, standalone_mode=standalone_mode, **extra)  # type: ignore[misc]
        try:
            code = super().main(arguments, *names, standalone_mode=False, **extra)  # type: ignore[misc]
        except _ClickError as error:
            message = shortened(error.format_message())
            emit({"error": {"kind": "usage", "message": message, "exit_code": error.exit_code}})
            print_text(prose(), f"mutualrl: {message}")
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="mutualrl",
    cls=Commands,
    help="Train several language models together with GRPO and let them share what they find.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        from mutualrl.storage.rundir import versions

        libraries = ", ".join(f"{name} {number}" for name, number in versions().items() if name != "mutualrl")
        typer.echo(f"mutualrl {__version__} ({libraries})")
        raise typer.Exit


FIRST = """\
GRPO throws away the prompts on which every rollout fails. mutualrl teaches on them: a peer's success, a recorded
solution, a served model's answer, or the model's own words after a hint.

To see it, without a GPU or a download (two minutes):
  mutualrl train --regime sgt --pool tiny

With one model:
  mutualrl complementarity --rollouts DUMP            dead prompts in a dump of TRL or verifiers
  mutualrl complementarity --model MODEL --source book=recorded:FILE --task dataset --data ROWS
  mutualrl train --regime sgt --model MODEL --source book=recorded:FILE --task dataset --data ROWS

With two or more:
  mutualrl init DIRECTORY                             asks for models and data, and checks them
  mutualrl complementarity --model ONE --model TWO --task dataset --data ROWS
  mutualrl train --regime sgt --model ONE --model TWO --task dataset --data ROWS

All commands: mutualrl --help. This machine: mutualrl doctor."""


@app.callback()
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Mutual reinforcement learning for language models."""
    if context.invoked_subcommand is None:
        typer.echo(FIRST)


def main() -> None:
    """Run the command line. If code that it calls aborts the process, such as the library of a reward function, the
    file, line and function are printed."""
    faulthandler.enable()
    correct_columns(os.environ)
    stop_with_parent()
    app()
