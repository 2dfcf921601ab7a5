"""The command line. Each subcommand is a thin module; torch is imported only inside the one that needs it."""

from __future__ import annotations

import typer

from mutualrl.cli.diagnose import channels, complementarity, cost, sgt_check, xgrpo_check
from mutualrl.cli.doctor import doctor
from mutualrl.cli.evaluate import evaluate
from mutualrl.cli.exchange import exchange
from mutualrl.cli.recipes import recipes
from mutualrl.cli.tasks import tasks
from mutualrl.cli.thl_check import thl_check
from mutualrl.cli.train import train

app = typer.Typer(
    name="mutualrl",
    help="Train several language models together with GRPO and let them share what they find.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("thl-check")(thl_check)
app.command("complementarity")(complementarity)
app.command("xgrpo-check")(xgrpo_check)
app.command("sgt-check")(sgt_check)
app.command("channels")(channels)
app.command("cost")(cost)
app.command("doctor")(doctor)
app.add_typer(tasks, name="tasks")
app.add_typer(recipes, name="recipes")
app.add_typer(exchange, name="exchange")


def _version(value: bool) -> None:
    if value:
        from mutualrl import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Mutual reinforcement learning for language models."""


def main() -> None:
    """Entry point of the console script."""
    app()
