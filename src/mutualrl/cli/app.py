"""Command line. Each command is a module, which is imported when the command is used."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from mutualrl.cli.output import emit, prose
from mutualrl.console.display import correct_columns, print_text
from mutualrl.process.parent_watch import stop_with_parent

#: the exception that an invalid flag raises, in whichever click Typer uses
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class Entry(NamedTuple):
    """Command: its module below `mutualrl.cli`, its function or Typer application there, and its line in the help."""

    module: str
    attribute: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "init": Entry(
        "init",
        "init",
        "Write pool.yaml, reward.py and a README for your own models and data, after checking all of them.",
    ),
    "train": Entry("train", "train", "Train a pool of policies together, or one policy with recorded texts."),
    "join": Entry(
        "join",
        "join",
        "Train one policy that shares with the others through a bucket; each can start anywhere, at any time.",
    ),
    "watch": Entry(
        "watch",
        "watch",
        "Follow a run: curves, gate, waiting, newest rescues, logs. In a pipe: a line every few seconds until it ends.",
    ),
    "eval": Entry(
        "evaluate", "evaluate", "Evaluate models: one greedy completion per prompt, exact match of the boxed answer."
    ),
    "thl-check": Entry(
        "thl_check",
        "thl_check",
        "Check whether models can exchange traces: their tokenizers, then the paper's tables on THL.",
    ),
    "complementarity": Entry(
        "diagnose",
        "complementarity",
        "Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, a "
        "recommendation; what recorded texts would revive.",
    ),
    "xgrpo-check": Entry(
        "diagnose",
        "xgrpo_check",
        "Do the pooled rewards carry structure? Pooled normalization with the true pool against a shuffled one.",
    ),
    "sgt-check": Entry(
        "diagnose",
        "sgt_check",
        "Where would SGT act, and do the transferred texts belong to the prompt? Gate, success rates, teachers' NLL.",
    ),
    "channels": Entry("diagnose", "channels", "Which of PRP, XGRPO and SGT could each learner use on each prompt?"),
    "cost": Entry("diagnose", "cost", "What would each regime add to a round, in response tokens?"),
    "distill": Entry(
        "distill",
        "distill",
        "Sequential Peer Distillation: fine-tune each policy on its peers' successes, after plain GRPO.",
    ),
    "report": Entry(
        "report",
        "report",
        "Write an HTML report of runs: curves, rescues, regimes side by side, the paper's figures. Works offline.",
    ),
    "export": Entry(
        "export", "export", "Copy the trained models of a run: weights, tokenizer, card, the base's licence, checksums."
    ),
    "sweep": Entry(
        "sweep",
        "sweep",
        "Run a grid of regimes, settings, pools and seeds, and compare the arms. The same command resumes.",
    ),
    "compare": Entry(
        "sweep",
        "compare",
        "Compare arms, paired by seed: differences with intervals, effect sizes, budgets, and declared claims.",
    ),
    "doctor": Entry(
        "doctor",
        "doctor",
        "Check versions, devices, NCCL, vLLM, the hub, shared memory, ports, the file system, and a bucket. Exits with "
        "4 if a check fails.",
    ),
    "runs": Entry("runs", "runs", "Runs: list them, verify the files of one, push its models."),
    "tasks": Entry("tasks", "tasks", "The tasks: their data, and their prompts as a model sees them."),
    "recipes": Entry("recipes", "recipes", "The recipes that ship with mutualrl."),
    "regimes": Entry("regimes", "regimes", "The regimes: rules by which policies share experience."),
    "exchange": Entry("exchange", "exchange", "Inspect the exchange of a run: rounds, bytes, damage."),
}


class LazyCommand(TyperCommand):
    """Command whose module is imported when it is used, not when the commands are listed."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary)
        self._entry = entry

    def load(self) -> Any:
        """Return the command itself."""
        loaded = getattr(import_module(f"mutualrl.cli.{self._entry.module}"), self._entry.attribute)
        if isinstance(loaded, typer.Typer):
            command: Any = get_group(loaded)
        else:
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command()(loaded)
            command = get_command(single)
        command.name = self.name
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


class Commands(TyperGroup):
    """Commands. With `--json`, an invalid flag is reported as one JSON object on stdout, like every other error."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: LazyCommand(name, entry) for name, entry in COMMANDS.items()}

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
