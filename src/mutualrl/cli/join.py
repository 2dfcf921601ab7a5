"""`mutualrl join`: one policy of a run whose exchange is in a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.cli.command import command
from mutualrl.cli.output import emit, prose
from mutualrl.cli.train import REPORT
from mutualrl.console.display import print_text
from mutualrl.console.options import JSON, Option
from mutualrl.recipes.request import Request


@dataclass(frozen=True, kw_only=True)
class JoinOptions(Request):
    """Options of `join`: those of a recipe, the exchange, and the policy to train here."""

    exchange: Annotated[
        str,
        Option("URL of the run's exchange: s3://, gs:// or az://BUCKET/PREFIX, or file:///DIRECTORY.", argument=True),
    ]
    policy: Annotated[str, Option("The recipe's policy to train here.", complete="policy_names")]
    recipe: Annotated[
        Path | None,
        Option("A recipe (YAML), the same for every policy. Flags override it.", complete="recipe_names"),
    ] = None
    models: tuple[str, ...] = ()
    run_dir: Annotated[Path | None, Option("Directory of this policy's files; by default runs/PREFIX-POLICY.")] = None
    restart: Annotated[bool, Option("Train from the start, even if the exchange has rounds of this policy.")] = False
    report: Annotated[bool, REPORT] = True
    as_json: Annotated[bool, JSON] = False


@command(JoinOptions)
def join(options: JoinOptions) -> None:
    """Train one policy that shares with the others through a bucket; each can start anywhere, at any time.

    The first process creates the run; the others compare their recipe and data with it. The same command resumes
    after a stop or a crash, from this policy's last checkpoint. Example: mutualrl join s3://my-bucket/run-1 --policy
    ada --regime sgt --pool tiny
    """
    from mutualrl.cli.post_run import close
    from mutualrl.cli.resolve_args import default_directory, recipe_to_join
    from mutualrl.cli.results import show_summary
    from mutualrl.launch.supervisor import train as supervise
    from mutualrl.storage.files import read_json, user_path
    from mutualrl.storage.rundir import RunDirectory

    run_dir = options.run_dir or default_directory(options.exchange, options.policy)
    console = prose()
    recipe, launch, notes = recipe_to_join(options, options.exchange, options.policy, run_dir, restart=options.restart)
    for note in notes:
        print_text(console, f"Note: {note}")
    if recipe is None:
        if options.as_json:
            stored = RunDirectory(user_path(run_dir))
            emit({"run_dir": str(stored.root), **(read_json(stored.summary) or {})})
        return
    run, summary = supervise(recipe, console, launch)
    if not options.as_json:
        show_summary(summary, run.root)
    close(run.root, console, report=options.report, push_to=None)
    if options.as_json:
        emit({"run_dir": str(run.root), **summary})
