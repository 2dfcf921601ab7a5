"""A command as a function of one dataclass: what a field says is what the command line takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from mutualrl.cli.command import LazyCommand, as_function
from mutualrl.cli.commands import COMMANDS
from mutualrl.cli.declared import Command, CommandGroup, DiagnosticCommand
from mutualrl.console.options import JSON, Option, OptionGroup, arguments_of, declared_options, given, with_values


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options of several commands."""

    pool: Annotated[str | None, Option("A pool.", complete="pool_names")] = None
    rows: Annotated[tuple[Path, ...], Option("Files. Repeatable.", "--row", metavar="FILE")] = ()
    models: Annotated[tuple[str, ...], Option("A model.", "--model")] = ("tiny:ada",)
    internal: int = 7


@dataclass(frozen=True, kw_only=True)
class Options(Shared):
    """Show the options.

    All of them.
    """

    models: tuple[str, ...] = ("hidden",)
    name: Annotated[str, Option("A name.", argument=True)]
    target: Annotated[Path, Option("A directory.")]
    samples: Annotated[int, Option("Samples.", min=1, max=8, variable="SAMPLES")] = 4
    report: Annotated[bool, Option("Write a report.", "--report/--no-report")] = True
    dry_run: Annotated[bool, Option("Start nothing.")] = False


def show(options: Options) -> None:
    values = {**asdict(options), "rows": [str(row) for row in options.rows], "target": str(options.target)}
    typer.echo(json.dumps({**values, "given": given(options)}))


app = typer.Typer()


def helps(options: type) -> dict[str, str]:
    """Return the help of each option by its field."""
    return {entry.name: entry.option.help for entry in declared_options(options)}


@pytest.fixture(autouse=True)
def body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the function of the command where the adapter imports it from."""
    module = ModuleType("mutualrl.cli.shown")
    module.show = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mutualrl.cli.shown", module)


app.command()(as_function(Command(Options, "shown.show")))


def run(*arguments: str, code: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200", **environment})
    assert result.exit_code == code, result.output
    return result.output


def test_defaults_and_required_options() -> None:
    shown = json.loads(run("one", "--target", "here"))
    assert shown == {
        "pool": None, "rows": [], "models": ["hidden"], "internal": 7, "name": "one", "target": "here",
        "samples": 4, "report": True, "dry_run": False, "given": ["name", "--target"],
    }  # fmt: skip
    assert "--target" in run("one", code=2)
    assert "NAME" in run("--target", "here", code=2).upper()


def test_values_flags_and_repeated_options() -> None:
    arguments = ("--row", "a", "--row", "b", "--samples", "8", "--no-report", "--dry-run", "--pool", "tiny")
    shown = json.loads(run("one", "--target", "here", *arguments))
    assert (shown["rows"], shown["samples"], shown["report"], shown["dry_run"]) == (["a", "b"], 8, False, True)
    assert shown["given"] == ["name", "--target", "--pool", "--row", "--samples", "--report/--no-report", "--dry-run"]
    assert json.loads(run("one", "--target", "here", SAMPLES="2"))["samples"] == 2


@pytest.mark.parametrize("arguments", [("--samples", "9"), ("--samples", "0"), ("--model", "x"), ("--internal", "1")])
def test_bounds_and_hidden_options_are_refused(arguments: tuple[str, str]) -> None:
    assert arguments[0] in run("one", "--target", "here", *arguments, code=2)


def test_help_has_every_option_once() -> None:
    text = run("--help")
    for name in ("--pool", "--row", "--target", "--samples", "--no-report", "--dry-run"):
        assert text.count(f" {name} ") == 1, name
    assert "--model" not in text
    assert "FILE" in text
    assert helps(Shared)["rows"] == "Files. Repeatable."


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A command with options of a group; it says another thing of one of them, and does not have another."""

    shared: Annotated[Shared, OptionGroup("pool", "rows", pool=Option("Its pool."))] = Shared()
    samples: Annotated[int, Option("Samples.")] = 4


def test_options_of_a_group_are_the_commands_own() -> None:
    assert helps(Grouped) == {
        "pool": "Its pool.", "rows": "Files. Repeatable.", "samples": "Samples.",
    }  # fmt: skip
    made = with_values(Grouped, {"pool": "tiny", "rows": (Path("a"), Path("b")), "samples": 8, "models": ("x",)})
    assert made == Grouped(shared=Shared(pool="tiny", rows=(Path("a"), Path("b"))), samples=8)
    assert with_values(Grouped, {"samples": 8}) == Grouped(samples=8)
    assert given(made) == ["--pool", "--row", "--samples"]
    assert given(made, "samples", "models") == ["--samples"]
    assert arguments_of(made) == ["--pool", "tiny", "--row", "a", "--row", "b", "--samples", "8"]


def declared() -> dict[str, Command | DiagnosticCommand]:
    """Every command by its name as typed."""
    found: dict[str, Command | DiagnosticCommand] = {}
    for name, entry in COMMANDS.items():
        parts = (
            {f"{name} {part}": command for part, command in entry.commands.items()}
            if isinstance(entry, CommandGroup)
            else {}
        )
        found |= parts or {name: entry}  # type: ignore[dict-item]
    return found


@pytest.mark.parametrize("name", declared())
def test_every_command_has_a_function_and_json_as_its_last_option(name: str) -> None:
    entry = declared()[name]
    if isinstance(entry, Command):
        module, _, attribute = entry.function.rpartition(".")
        assert callable(getattr(import_module(f"mutualrl.cli.{module}"), attribute))
    command = LazyCommand(name, entry).load()
    assert command.name == name
    assert [param.name for param in command.params][-1] == "as_json"
    assert declared_options(entry.declared())[-1].option is JSON
    summary = " ".join(command.help.partition("\n\n")[0].split())
    assert LazyCommand(name, entry).help == summary


def test_a_diagnostic_may_declare_its_options_in_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = declared()["sgt-check"]
    assert isinstance(entry, DiagnosticCommand)
    assert replace(entry, request=None).declared() is entry.declared()  # what the module says


@pytest.mark.parametrize(
    "arguments", [["--help"], ["report", "--help"], ["runs", "ls", "--help"], ["exchange", "gc", "--help"]]
)
def test_help_imports_no_command(arguments: list[str]) -> None:
    code = f"import sys; from mutualrl.cli.app import app\ntry: app({arguments})\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith('mutualrl.')], file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mutualrl.cli.output" in result.stderr
    for module in ("cli.train", "cli.report", "cli.runs", "cli.exchange", "recipes.resolution", "reporting.report"):
        assert f"'mutualrl.{module}'" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--regime", "nothing"],
        ["train", "--pool", "nothing", "--dry-run"],
        ["train", "--set", "trainer.learning_rat=1"],
        ["join", "file:///nowhere/at/all", "--policy", "nobody"],
    ],
)
def test_the_error_of_a_wrong_recipe_imports_no_engine(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mutualrl", *arguments], capture_output=True, text=True
    )
    assert result.returncode == 2, result.stderr[-500:]
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "mutualrl.cli.resolve_args" in imported
    assert not imported & {
        "torch",
        "transformers",
        "datasets",
        "pandas",
        "trl",
        "matplotlib",
        "mutualrl.launch.supervisor",
    }
