"""What a user asks of a recipe: the options of `train` and `join`, also for use from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import Option


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options that make a recipe; None and empty mean not given."""

    recipe: Annotated[
        Path | None, Option("A recipe (YAML). Flags override it.", argument=True, complete="recipe_names")
    ] = None
    regime: Annotated[
        str | None, Option("Sharing regime (`regimes ls`), or FILE.py:CLASS.", complete="regime_names")
    ] = None
    pool: Annotated[str | None, Option("A shipped pool, or a YAML file with `policies:`.", complete="pool_names")] = (
        None
    )
    models: Annotated[
        tuple[str, ...],
        Option(
            "A policy, in place of a pool: a directory, a hub id, or tiny:NAME. Repeatable.", "--model", metavar="MODEL"
        ),
    ] = ()
    sources: Annotated[
        tuple[str, ...],
        Option(
            "What to learn from where the policies fail: recorded:FILE (or a directory, hub:OWNER/NAME, task), "
            "served:URL, or frozen:MODEL. Repeatable.",
            "--source",
            metavar="NAME=KIND:WHERE",
        ),
    ] = ()
    task: Annotated[
        str | None,
        Option("Task to train on (`tasks ls`), dataset for your own rows, or FILE.py:TASK.", complete="task_names"),
    ] = None
    data: Annotated[Path | None, Option("Training rows, for tasks that read a file.")] = None
    steps: Annotated[int | None, Option("Optimizer steps.")] = None
    seed: Annotated[int | None, Option("Seed of the run.")] = None
    run_dir: Annotated[
        Path | None, Option("Run directory; by default a new one under runs/.", complete="run_directories")
    ] = None
    assignments: Annotated[
        tuple[str, ...],
        Option(
            "Any key of the recipe, such as trainer.learning_rate=1e-6.",
            "--set",
            metavar="KEY=VALUE",
            complete="recipe_keys",
        ),
    ] = ()
