"""`mutualrl runs`: list runs, verify their files, push their models to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors, show_table, show_verification
from mutualrl.cli.results import run_row
from mutualrl.console.display import cell, print_text
from mutualrl.process.status import RunState

if TYPE_CHECKING:
    from mutualrl.reporting.run_reader import Overview

runs = typer.Typer(help="Runs: list them, verify the files of one, push its models.", no_args_is_help=True)
RunArgument = Annotated[
    Path, typer.Argument(help="The run directory.", show_default=False, autocompletion=run_directories)
]


@runs.command("ls")
@reports_errors
def ls(
    directory: Annotated[Path, typer.Argument(help="Directory of the runs.")] = Path("runs"), as_json: JsonFlag = False
) -> None:
    """List the runs in a directory, newest first, with their states."""
    from mutualrl.errors import FileDamagedError, UsageError
    from mutualrl.reporting.run_reader import read_overview
    from mutualrl.storage.files import user_path

    root = user_path(directory)
    if not root.is_dir():
        raise UsageError(f"no directory {directory}; runs are under runs/ unless --run-dir was given")
    paths = [root] if (root / "run.json").exists() else sorted(p.parent for p in root.glob("*/run.json"))
    readable, unreadable = [], []
    for path in paths:
        try:
            readable.append(read_overview(path))
        except (UsageError, FileDamagedError) as error:
            unreadable.append(str(error))
    readable.sort(key=lambda overview: str(overview.run.info.get("created", "")), reverse=True)
    if as_json:
        emit({"runs": [run_row(overview) for overview in readable], "unreadable": unreadable})
        return
    table = Table("run", "state", "regime", "pool", "seed", "step", "accuracy")
    for overview in readable:
        run, row = overview.run, run_row(overview)
        accuracies = []
        for name, policy in row["policies"].items():
            if policy["step"] == 0 and policy["last"] is not None and run.state != RunState.FINISHED:
                accuracies.append(f"{name} {policy['last']:.2f} before training")
            elif policy["last"] is not None:
                before = "" if policy["before"] is None else f"{policy['before']:.2f} -> "
                accuracies.append(f"{name} {before}{policy['last']:.2f}")
        step = min((policy["step"] for policy in row["policies"].values()), default=0)
        table.add_row(
            *map(cell, (run.name, _state(overview), run.arm, run.pool, str(run.seed))),
            f"{step}/{run.planned_steps}",
            cell("\n".join(accuracies)),
        )
    show_table(table)
    skipped = []
    for overview in readable:
        skipped += [f"{overview.run.name}: {note}" for note in overview.run.notes if "is left out" in note]
    for line in (*unreadable, *skipped):
        print_text(prose(), f"Note: {line}")


def _state(overview: Overview) -> str:
    """Return a run's state; for one that ended early, also if it has no checkpoint to resume from."""
    run = overview.run
    if run.state in (RunState.RUNNING, RunState.FINISHED, RunState.ELSEWHERE) or overview.has_checkpoint:
        return run.state
    return f"{run.state} before its first checkpoint"


@runs.command("verify")
@reports_errors
def verify(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Verify every file of a run against its recorded checksum. Exits with 6 if one is damaged.

    Recipe, results, metrics, checkpoints, the exchange, the trained models.
    """
    from mutualrl.reporting.verify_run import verify_run
    from mutualrl.storage.files import user_path
    from mutualrl.storage.rundir import RunDirectory

    result = verify_run(RunDirectory(user_path(run)))
    if not as_json:
        table = Table("files", "checked")
        for kind, count in result.checked.items():
            table.add_row(cell(kind), str(count))
        show_table(table)
    show_verification(result, as_json=as_json)


@runs.command("push")
@reports_errors
def push(
    run: RunArgument,
    owner: Annotated[str, typer.Argument(help="User or organisation on the hub.", show_default=False)],
    as_json: JsonFlag = False,
) -> None:
    """Upload the trained models of a run, each with its card, as private repositories OWNER/RUN-POLICY."""
    from mutualrl.reporting.run_reader import read_run
    from mutualrl.reporting.upload import push as upload
    from mutualrl.reporting.upload import require_hub

    root = read_run(run).root
    require_hub(owner)
    pushed = upload(root, owner)
    if as_json:
        emit({"pushed": pushed})
    else:
        for repo in pushed:
            typer.echo(repo)
