"""`mutualrl runs`: which runs there are, one of them as it goes on, and its models to the hub."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors, screen, show_table, show_verification
from mutualrl.console.display import cell, clean

if TYPE_CHECKING:
    from mutualrl.reporting.run_reader import Overview

runs = typer.Typer(help="Runs: list them, watch one, verify its files, push its models.", no_args_is_help=True)
RunArgument = Annotated[
    Path, typer.Argument(help="The run's directory.", show_default=False, autocompletion=run_directories)
]
WATCH_SECONDS = 0.5
REMOTE_SECONDS = 10.0  # between two looks at a bucket


@runs.command("ls")
@reports_errors
def ls(
    directory: Annotated[Path, typer.Argument(help="Where the runs lie.")] = Path("runs"), as_json: JsonFlag = False
) -> None:
    """List the runs in a directory, the newest first, with what state each is in."""
    from mutualrl.errors import FileDamagedError, UsageError
    from mutualrl.reporting.run_reader import read_overview
    from mutualrl.storage.files import user_path

    root = user_path(directory)
    if not root.is_dir():
        raise UsageError(f"no directory {directory}; runs are under runs/ unless --run-dir named another place")
    paths = [root] if (root / "run.json").exists() else sorted(p.parent for p in root.glob("*/run.json"))
    readable, unreadable = [], []
    for path in paths:
        try:
            readable.append(read_overview(path))
        except (UsageError, FileDamagedError) as error:
            unreadable.append(str(error))
    readable.sort(key=lambda each: str(each.run.info.get("created", "")), reverse=True)
    if as_json:
        emit({"runs": [_row(each) for each in readable], "unreadable": unreadable})
        return
    table = Table("run", "state", "regime", "pool", "seed", "step", "accuracy")
    for each in readable:
        run, summary = each.run, _row(each)
        curves = [
            f"{name} " + ("" if p["before"] is None else f"{p['before']:.2f} -> ") + f"{p['last']:.2f}"
            for name, p in summary["policies"].items()
            if p["last"] is not None
        ]
        step = min((p["step"] for p in summary["policies"].values()), default=0)
        table.add_row(
            *map(cell, (run.name, run.state, run.arm, run.pool, str(run.seed))),
            f"{step}/{run.planned_steps}",
            cell("\n".join(curves)),
        )
    show_table(table)
    left_out = [f"{each.run.name}: {note}" for each in readable for note in each.run.notes if "is left out" in note]
    for line in (*unreadable, *left_out):
        prose().print(f"Note: {clean(line)}", markup=False, highlight=False, soft_wrap=True)


@runs.command("watch")
@reports_errors
def watch(
    run: Annotated[
        str,
        typer.Argument(
            help="The run's directory, or its URL in a bucket.", show_default=False, autocompletion=run_directories
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Follow a run from another terminal until it ends. With --json: how it stands now, once.

    Of a run in a bucket it shows what its policies mirror there, every minute by default.
    """
    from mutualrl.cli.results import show_summary
    from mutualrl.errors import MutualRLError
    from mutualrl.mwra.progress import Progress
    from mutualrl.reporting.remote_run import fetch_run, run_directory
    from mutualrl.reporting.run_reader import read_overview, read_run
    from mutualrl.storage.bucket_url import is_bucket
    from mutualrl.storage.rundir import RunDirectory, holder_of

    with run_directory(run) as path:
        if as_json:
            emit({**_row(read_overview(path)), "run": run if is_bucket(run) else str(path)})
            return
        read = read_run(path, logs=False)
        directory = RunDirectory(read.root)

        def goes_on() -> bool:
            if not is_bucket(run):
                return holder_of(directory.lock) is not None
            fetch_run(run, path)
            return not directory.summary.exists()

        if read.state in ("running", "elsewhere"):
            gate_key = read.rule.metric("gate_rate")
            with Progress(directory, list(read.policies), read.planned_steps or 0, screen(), gate_key) as progress:
                while goes_on():
                    progress.update()
                    time.sleep(REMOTE_SECONDS if is_bucket(run) else WATCH_SECONDS)
            read = read_run(path, logs=False)
        if read.summary is None or read.state != "finished":
            raise MutualRLError(f"the run {clean(run)} is {read.state}: {'; '.join(read.notes)}")
        show_summary(read.summary, run if is_bucket(run) else read.root)


@runs.command("verify")
@reports_errors
def verify(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Compare every file of a run with its recorded checksum. Exits 6 when one is damaged.

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


def _row(overview: Overview) -> dict[str, Any]:
    run = overview.run
    return {
        "run": str(run.root),
        "state": run.state,
        "regime": run.arm,
        "pool": run.pool,
        "task": run.task,
        "seed": run.seed,
        "steps": run.planned_steps,
        "policies": {name: asdict(policy) for name, policy in overview.policies.items()},
        "began": run.info.get("created"),
        "notes": list(run.notes),
    }
