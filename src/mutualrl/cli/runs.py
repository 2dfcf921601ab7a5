"""`mutualrl runs`: list runs, verify their files, push their models to the hub."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from mutualrl.cli.commands import OfRun, RunsLs, RunsPush
from mutualrl.cli.output import emit, note_all, prose, show_table
from mutualrl.cli.results import run_row
from mutualrl.console.display import cell, print_text
from mutualrl.console.user_path import user_path
from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.process.status import RunState
from mutualrl.reporting import upload
from mutualrl.runs.overview import Overview, read_overview
from mutualrl.runs.read import read_run
from mutualrl.runs.verify import verify_run
from mutualrl.storage.rundir import RunDirectory


def ls(options: RunsLs) -> None:
    """List runs with their steps and accuracies."""
    root = user_path(options.directory)
    if not root.is_dir():
        raise UsageError(f"no directory {options.directory}; runs are under runs/ unless --run-dir was given")
    paths = [root] if _is_run(root) else [path for path in sorted(root.iterdir()) if _is_run(path)]
    readable, unreadable = [], []
    for path in paths:
        try:
            readable.append(read_overview(path))
        except (UsageError, FileDamagedError) as error:
            unreadable.append(str(error))
    readable.sort(key=lambda overview: overview.run.info.created, reverse=True)
    if options.as_json:
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
        own = [
            policy["step"]
            for name, policy in row["policies"].items()
            if name in (run.info.placement or row["policies"])
        ]
        steps = f"{min(own)}/{run.planned_steps}" if own and run.planned_steps is not None else ""
        table.add_row(
            *map(cell, (run.name, _state(overview), run.arm, run.pool, str(run.seed))),
            steps,
            cell("\n".join(accuracies)),
        )
    show_table(table)
    skipped = []
    for overview in readable:
        notes = [note for note in overview.run.notes if "is left out" in note or note.startswith("the script of")]
        skipped += [f"{overview.run.name}: {note}" for note in notes]
    note_all([*unreadable, *skipped])


def _is_run(path: Path) -> bool:
    """Return whether a directory is a run, also one whose run.json is gone, which reading it then says."""
    return (path / "run.json").exists() or ((path / "recipe.yaml").is_file() and (path / "policies").is_dir())


def _state(overview: Overview) -> str:
    """Return a run's state; for one that ended early, also if it has no checkpoint to resume from; of imported texts,
    that they are no run."""
    run = overview.run
    if run.info.command[1:3] == ["exchange", "import"]:
        return "imported texts"
    if run.state in (RunState.RUNNING, RunState.FINISHED, RunState.ELSEWHERE) or overview.has_checkpoint:
        return run.state
    return f"{run.state} before its first checkpoint"


def verify(options: OfRun) -> None:
    """Verify a run, and print each damaged file. Exits with 6 if there is one."""
    result = verify_run(RunDirectory(user_path(options.run)))
    if options.as_json:
        emit(result.to_json())
    else:
        table = Table("files", "checked")
        for kind, count in result.checked.items():
            table.add_row(cell(kind), str(count))
        show_table(table)
    note_all(result.notes)
    for line in result.damaged:
        print_text(prose(), f"damaged: {line}")
    if result.damaged and options.as_json:
        raise typer.Exit(FileDamagedError.exit_code)
    if result.damaged:
        number = "1 damaged item" if len(result.damaged) == 1 else f"{len(result.damaged)} damaged items"
        raise FileDamagedError(f"{number} in the run, which readers refuse; the first: {result.damaged[0]}")


def push(options: RunsPush) -> None:
    """Upload the models, and print their repositories."""
    root = read_run(options.run).root
    upload.require_hub(options.owner)
    pushed = upload.push(root, options.owner)
    if options.as_json:
        emit({"pushed": pushed})
        return
    for repo in pushed:
        typer.echo(repo)
