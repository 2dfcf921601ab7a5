"""`mutualrl train`: start or resume a run, from a recipe or from flags."""

from __future__ import annotations

from dataclasses import replace

from mutualrl.cli.commands import Train
from mutualrl.cli.output import prose
from mutualrl.cli.resolve_args import cluster_address, recipe_of
from mutualrl.launch.session import Launch


def train(options: Train) -> None:
    """Resolve the recipe, and run it or show it. What runs it is imported once the recipe is right."""
    assignments = options.assignments
    if options.exchange is not None:
        assignments = (*assignments, f"run.publish={options.exchange}")
    if options.report_to:
        assignments = (*assignments, f"run.report_to=[{', '.join(options.report_to)}]")
    cluster = cluster_address(options.launcher, options.address)
    launch = Launch(resume=options.resume, clean=options.clean, device_map=options.device_map, ray=cluster)
    recipe = recipe_of(replace(options, assignments=assignments), launch)
    if options.dry_run:
        from mutualrl.cli.dry_run import show

        show(recipe, launch, as_json=options.as_json)
        return
    from mutualrl.cli.run import finish
    from mutualrl.launch.supervisor import train as start
    from mutualrl.reporting.upload import require_hub

    if options.push_to_hub is not None:
        require_hub(options.push_to_hub)
    directory, summary = start(recipe, prose(), launch)
    finish(directory, summary, report=options.report, push_to=options.push_to_hub, as_json=options.as_json)
