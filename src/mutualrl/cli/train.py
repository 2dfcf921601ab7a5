"""`mutualrl train`: start or resume a run, from a recipe or from flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.completion import (
    pool_names,
    recipe_keys,
    recipe_names,
    regime_names,
    run_directories,
    task_names,
)
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors

RecipeOption = Annotated[
    Path | None,
    typer.Argument(help="A recipe (YAML). Flags override it.", show_default=False, autocompletion=recipe_names),
]
RegimeOption = Annotated[
    str | None,
    typer.Option(
        help="Sharing regime (`regimes ls`), or FILE.py:CLASS.",
        show_default=False,
        autocompletion=regime_names,
    ),
]
PoolOption = Annotated[
    str | None,
    typer.Option(
        help="A shipped pool, or a YAML file with `policies:`.", show_default=False, autocompletion=pool_names
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A policy, in place of a pool: a directory, a hub id, or tiny:NAME. Repeatable.",
        show_default=False,
    ),
]
SourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME=recorded:FILE",
        help="Texts to learn from where the policies fail: a file, a directory, hub:OWNER/NAME, or task. Repeatable.",
        show_default=False,
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        help="Task to train on (`tasks ls`), dataset for your own rows, or FILE.py:TASK.",
        show_default=False,
        autocompletion=task_names,
    ),
]
DataOption = Annotated[Path | None, typer.Option(help="Training rows, for tasks that read a file.", show_default=False)]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps.", show_default=False)]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the run.", show_default=False)]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Run directory; by default a new one under runs/.",
        show_default=False,
        autocompletion=run_directories,
    ),
]
AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the recipe, such as trainer.learning_rate=1e-6.",
        show_default=False,
        autocompletion=recipe_keys,
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Resume the run in --run-dir, each policy from its last checkpoint.")
]
CleanOption = Annotated[bool, typer.Option("--clean", help="Delete an existing run in --run-dir first.")]
ExchangeOption = Annotated[
    str | None,
    typer.Option(help="Fields to publish: regime (those it reads), or full.", show_default=False),
]
ReportToOption = Annotated[
    list[str] | None,
    typer.Option(help="Also log to a tracker: trackio, wandb, tensorboard. Repeatable.", show_default=False),
]
ReportOption = Annotated[
    bool,
    typer.Option("--report/--no-report", envvar="MUTUALRL_REPORT", help="Write the HTML report at the end of the run."),
]
PushToHubOption = Annotated[
    str | None,
    typer.Option(help="After the run, upload each model with its card to OWNER on the hub.", show_default=False),
]
DeviceMapOption = Annotated[
    Path | None, typer.Option(help="A YAML file that assigns devices to policies.", show_default=False)
]
LauncherOption = Annotated[
    str, typer.Option(help="Where the policies run: local (this machine), or ray (a Ray cluster).")
]
AddressOption = Annotated[
    str | None, typer.Option(help="The Ray cluster: HOST:PORT, or auto (RAY_ADDRESS).", show_default=False)
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Show recipe and placement, try the reward on two prompts; start nothing."),
]


@reports_errors
def train(
    recipe: RecipeOption = None,
    regime: RegimeOption = None,
    pool: PoolOption = None,
    model: ModelOption = None,
    source: SourceOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    run_dir: RunDirOption = None,
    assignments: AssignmentsOption = None,
    resume: ResumeOption = False,
    clean: CleanOption = False,
    exchange: ExchangeOption = None,
    report_to: ReportToOption = None,
    report: ReportOption = True,
    push_to_hub: PushToHubOption = None,
    device_map: DeviceMapOption = None,
    launcher: LauncherOption = "local",
    address: AddressOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a pool of policies together, or one policy with recorded texts.

    Without arguments: the bundled `tiny` pool with plain GRPO. Example: mutualrl train --regime sgt --pool tiny
    """
    from mutualrl.cli.post_run import close
    from mutualrl.cli.resolve_args import cluster_address, recipe_of
    from mutualrl.launch.session import Launch
    from mutualrl.recipes import Request

    if exchange is not None:
        assignments = [*(assignments or ()), f"run.publish={exchange}"]
    if report_to:
        assignments = [*(assignments or ()), f"run.report_to=[{', '.join(report_to)}]"]
    launch = Launch(resume=resume, clean=clean, device_map=device_map, ray=cluster_address(launcher, address))
    request = Request(
        recipe=recipe,
        regime=regime,
        pool=pool,
        models=tuple(model or ()),
        sources=tuple(source or ()),
        task=task,
        data=data,
        steps=steps,
        seed=seed,
        run_dir=run_dir,
        assignments=tuple(assignments or ()),
    )
    resolved = recipe_of(request, launch)
    if dry_run:
        from mutualrl.cli.dry_run import show

        show(resolved, launch, as_json=as_json)
        return
    from mutualrl.cli.results import show_summary
    from mutualrl.launch.supervisor import train as supervise

    if push_to_hub is not None:
        from mutualrl.reporting.upload import require_hub

        require_hub(push_to_hub)
    console = prose()
    run, summary = supervise(resolved, console, launch)
    if not as_json:
        show_summary(summary, run.root)
    close(run.root, console, report=report, push_to=push_to_hub)
    if as_json:
        emit({"run_dir": str(run.root), **summary})
