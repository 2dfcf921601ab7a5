"""`mutualrl join`: one policy of a run whose exchange is in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.completion import policy_names, recipe_names
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.cli.train import (
    AssignmentsOption,
    DataOption,
    PoolOption,
    RegimeOption,
    ReportOption,
    SeedOption,
    SourceOption,
    StepsOption,
    TaskOption,
)
from mutualrl.console.display import print_text


@reports_errors
def join(
    exchange: Annotated[
        str,
        typer.Argument(help="URL of the run's exchange: s3://, gs:// or az://BUCKET/PREFIX, or file:///DIRECTORY."),
    ],
    policy: Annotated[
        str,
        typer.Option(help="The recipe's policy to train here.", show_default=False, autocompletion=policy_names),
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A recipe (YAML), the same for every policy. Flags override it.",
            show_default=False,
            autocompletion=recipe_names,
        ),
    ] = None,
    regime: RegimeOption = None,
    pool: PoolOption = None,
    source: SourceOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of this policy's files; by default runs/PREFIX-POLICY.", show_default=False),
    ] = None,
    assignments: AssignmentsOption = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Train from the start, even if the exchange has rounds of this policy."),
    ] = False,
    report: ReportOption = True,
    as_json: JsonFlag = False,
) -> None:
    """Train one policy that shares with the others through a bucket; each can start anywhere, at any time.

    The first process creates the run; the others compare their recipe and data with it. The same command resumes
    after a stop or a crash, from this policy's last checkpoint. Example: mutualrl join s3://my-bucket/run-1 --policy
    ada --regime sgt --pool tiny
    """
    from mutualrl.cli.post_run import close
    from mutualrl.cli.resolve_args import default_directory, recipe_to_join
    from mutualrl.cli.results import show_summary
    from mutualrl.launch.supervisor import train as supervise
    from mutualrl.recipes import Request
    from mutualrl.storage.files import read_json, user_path
    from mutualrl.storage.rundir import RunDirectory

    run_dir = run_dir or default_directory(exchange, policy)
    request = Request(
        recipe=recipe,
        regime=regime,
        pool=pool,
        sources=tuple(source or ()),
        task=task,
        data=data,
        steps=steps,
        seed=seed,
        assignments=tuple(assignments or ()),
    )
    console = prose()
    resolved, launch, notes = recipe_to_join(request, exchange, policy, run_dir, restart=restart)
    for note in notes:
        print_text(console, f"Note: {note}")
    if resolved is None:
        if as_json:
            stored = RunDirectory(user_path(run_dir))
            emit({"run_dir": str(stored.root), **(read_json(stored.summary) or {})})
        return
    run, summary = supervise(resolved, console, launch)
    if not as_json:
        show_summary(summary, run.root)
    close(run.root, console, report=report, push_to=None)
    if as_json:
        emit({"run_dir": str(run.root), **summary})
