"""`mutualrl tasks`: list the tasks, and show prompts exactly as a model sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mutualrl.cli.completion import task_names
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors, show_table
from mutualrl.console.display import print_text

tasks = typer.Typer(help="The tasks: their data, and their prompts as a model sees them.", no_args_is_help=True)

SHOWN = 3


@tasks.command("ls")
@reports_errors
def ls(as_json: JsonFlag = False) -> None:
    """List the tasks, with the default data of each."""
    from mutualrl.tasks import TASKS

    if as_json:
        emit(
            {"tasks": [{"name": t.name, "reads": t.reads, "max_new_tokens": t.max_new_tokens} for t in TASKS.values()]}
        )
        return
    table = Table("task", "default evaluation data", "max new tokens")
    for task in TASKS.values():
        table.add_row(task.name, task.reads, str(task.max_new_tokens))
    show_table(table)


@tasks.command("show")
@reports_errors
def show(
    task: Annotated[str, typer.Argument(help="The task's name.", show_default=False, autocompletion=task_names)],
    data: Annotated[
        Path | None,
        typer.Option(help="Its rows: a file, a directory, or hub:OWNER/NAME.", show_default=False),
    ] = None,
    split: Annotated[
        str, typer.Option(help="train, or validation (the evaluated prompts). Of a file, all rows are used.")
    ] = "validation",
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Number of prompts ({SHOWN}; all with --json).", show_default=False)
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Task dataset: prompt template, {field} for a field of the row.", show_default=False),
    ] = None,
    answer: Annotated[str, typer.Option(help="Task dataset: field of the answer.")] = "answer",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of generated problems and of a mixture.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Print prompts exactly as a model sees them (before its chat template), with the canonical answers."""
    from mutualrl.errors import UsageError
    from mutualrl.recipes.resolution import data_path
    from mutualrl.tasks import TaskSource, get_task

    if split not in ("train", "validation"):
        raise UsageError(f"--split {split}: expected train or validation")
    if task != "dataset" and (template is not None or answer != "answer"):
        raise UsageError(f"--template and --answer are for task 'dataset'; {task!r} has its own template")
    source = None if data is None else Path(data_path(data))
    complete = split == "validation" or (source is not None and source.is_file())
    read = get_task(task).read(
        "validation" if complete else "train",
        TaskSource(None if complete else source, source if complete else None, seed, template, answer),
    )
    if as_json:
        shown = read.prompts if limit is None else read.prompts[:limit]
        emit(
            {
                "task": task,
                "evaluated": read.origin,
                "n": len(read.prompts),
                "dropped": list(read.dropped),
                "prompts": [_prompt_json(prompt) for prompt in shown],
            }
        )
        return
    _print_prompts(read.prompts[: limit or SHOWN], f"{task}: {len(read.prompts)} prompts from {read.origin}")
    for line in read.dropped:
        print_text(prose(), f"dropped: {line}")


def _prompt_json(prompt: Any) -> dict[str, object]:
    return {
        "id": prompt.id,
        "prompt": prompt.content,
        "answer": prompt.answer,
        "group": prompt.group,
        **({"facets": dict(prompt.facets)} if prompt.facets else {}),
    }


def _print_prompts(prompts: list[Any], title: str) -> None:
    from mutualrl.console.display import clean

    typer.echo(clean(title))
    for prompt in prompts:
        details = f"{prompt.id}  group {prompt.group}  answer {prompt.answer}".replace("\n", " ")
        typer.echo(f"\n--- {clean(details, 600)}")
        if isinstance(prompt.content, str):
            typer.echo(clean(prompt.text, 20_000))
        else:
            for message in prompt.content:
                typer.echo(f"[{message['role']}] {clean(message['content'], 20_000)}")
