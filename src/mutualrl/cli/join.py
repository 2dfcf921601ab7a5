"""`mutualrl join`: one policy of a run whose exchange is in a bucket."""

from __future__ import annotations

from mutualrl.cli.commands import Join
from mutualrl.cli.output import emit, note_all, prose
from mutualrl.cli.resolve_args import default_directory, recipe_to_join
from mutualrl.console.user_path import user_path
from mutualrl.storage.files import read_json
from mutualrl.storage.rundir import RunDirectory


def join(options: Join) -> None:
    """Resolve the recipe of the policy, and run it unless it has finished."""
    run_dir = options.run_dir or default_directory(options.exchange, options.policy)
    recipe, launch, notes = recipe_to_join(options, options.exchange, options.policy, run_dir, restart=options.restart)
    note_all(notes)
    if recipe is not None:
        from mutualrl.cli.run import finish
        from mutualrl.launch.supervisor import train

        directory, summary = train(recipe, prose(), launch)
        finish(directory, summary, report=options.report, as_json=options.as_json)
    elif options.as_json:
        stored = RunDirectory(user_path(run_dir))
        emit({"run_dir": str(stored.root), **(read_json(stored.summary) or {})})
