"""Command line. Each subcommand is a thin module; torch is imported only in subcommands that need it."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from mutualrl.cli.diagnose import channels, complementarity, cost, sgt_check, xgrpo_check
from mutualrl.cli.distill import distill
from mutualrl.cli.doctor import doctor
from mutualrl.cli.evaluate import evaluate
from mutualrl.cli.exchange import exchange
from mutualrl.cli.export import export
from mutualrl.cli.init import init
from mutualrl.cli.join import join
from mutualrl.cli.output import emit, prose
from mutualrl.cli.recipes import recipes
from mutualrl.cli.regimes import regimes
from mutualrl.cli.report import report
from mutualrl.cli.runs import runs
from mutualrl.cli.sweep import compare, sweep
from mutualrl.cli.tasks import tasks
from mutualrl.cli.thl_check import thl_check
from mutualrl.cli.train import train
from mutualrl.cli.watch import watch
from mutualrl.console.display import correct_columns, print_text
from mutualrl.process.parent_watch import stop_with_parent

#: the exception that an invalid flag raises, in whichever click Typer uses
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class Commands(TyperGroup):
    """Commands. With `--json`, an invalid flag is reported as one JSON object on stdout, like every other error."""

    def main(self, args: Sequence[str] | None = None, *names: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line."""
        arguments = sys.argv[1:] if args is None else args
        if not standalone_mode or "--json" not in arguments:
            return super().main(args, *names, standalone_mode=standalone_mode, **extra)  # type: ignore[misc]
        try:
            code = super().main(args, *names, standalone_mode=False, **extra)  # type: ignore[misc]
        except _ClickError as error:
            message = error.format_message()
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
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("init")(init)
app.command("train")(train)
app.command("join")(join)
app.command("watch")(watch)
app.command("eval")(evaluate)
app.command("thl-check")(thl_check)
app.command("complementarity")(complementarity)
app.command("xgrpo-check")(xgrpo_check)
app.command("sgt-check")(sgt_check)
app.command("channels")(channels)
app.command("cost")(cost)
app.command("distill")(distill)
app.command("report")(report)
app.command("export")(export)
app.command("sweep")(sweep)
app.command("compare")(compare)
app.command("doctor")(doctor)
app.add_typer(runs, name="runs")
app.add_typer(tasks, name="tasks")
app.add_typer(recipes, name="recipes")
app.add_typer(regimes, name="regimes")
app.add_typer(exchange, name="exchange")


def _version(value: bool) -> None:
    if value:
        from mutualrl import __version__
        from mutualrl.storage.rundir import versions

        libraries = ", ".join(f"{name} {number}" for name, number in versions().items() if name != "mutualrl")
        typer.echo(f"mutualrl {__version__} ({libraries})")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Mutual reinforcement learning for language models."""


def main() -> None:
    """Run the command line. If code that it calls aborts the process, such as the library of a reward function, the
    file, line and function are printed."""
    faulthandler.enable()
    correct_columns(os.environ)
    stop_with_parent()
    app()
