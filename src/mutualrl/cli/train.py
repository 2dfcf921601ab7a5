"""`mutualrl train`: start or resume a run, from a recipe or from flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from mutualrl.cli.command import command
from mutualrl.cli.output import emit, prose
from mutualrl.console.options import JSON, Option
from mutualrl.recipes.request import Request

REPORT = Option("Write the HTML report at the end of the run.", "--report/--no-report", variable="MUTUALRL_REPORT")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Request):
    """Options of `train`."""

    resume: Annotated[bool, Option("Resume the run in --run-dir, each policy from its last checkpoint.")] = False
    clean: Annotated[bool, Option("Delete an existing run in --run-dir first.")] = False
    exchange: Annotated[str | None, Option("Fields to publish: regime (those it reads), or full.")] = None
    report_to: Annotated[
        tuple[str, ...], Option("Also log to a tracker: trackio, wandb, tensorboard. Repeatable.")
    ] = ()
    report: Annotated[bool, REPORT] = True
    push_to_hub: Annotated[
        str | None, Option("After the run, upload each model with its card to OWNER on the hub.")
    ] = None
    device_map: Annotated[Path | None, Option("A YAML file that assigns devices to policies.")] = None
    launcher: Annotated[str, Option("Where the policies run: local (this machine), or ray (a Ray cluster).")] = "local"
    address: Annotated[str | None, Option("The Ray cluster: HOST:PORT, or auto (RAY_ADDRESS).")] = None
    dry_run: Annotated[bool, Option("Show recipe and placement, try the reward on two prompts; start nothing.")] = False
    as_json: Annotated[bool, JSON] = False


@command(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a pool of policies together, or one policy with recorded texts.

    Without arguments: the bundled `tiny` pool with plain GRPO. Example: mutualrl train --regime sgt --pool tiny
    """
    from mutualrl.cli.resolve_args import cluster_address, recipe_of
    from mutualrl.launch.session import Launch

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
    from mutualrl.cli.post_run import close
    from mutualrl.cli.results import show_summary
    from mutualrl.launch.supervisor import train as supervise

    if options.push_to_hub is not None:
        from mutualrl.reporting.upload import require_hub

        require_hub(options.push_to_hub)
    console = prose()
    run, summary = supervise(recipe, console, launch)
    if not options.as_json:
        show_summary(summary, run.root)
    close(run.root, console, report=options.report, push_to=options.push_to_hub)
    if options.as_json:
        emit({"run_dir": str(run.root), **summary})
