"""`mutualrl tasks`: list the tasks, and show prompts exactly as a model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from mutualrl.cli.commands import SHOWN_PROMPTS, TasksShow
from mutualrl.cli.output import emit, prose, show_table
from mutualrl.console.display import clean, print_text
from mutualrl.console.options import WithJson, given
from mutualrl.errors import UsageError
from mutualrl.records import Prompt
from mutualrl.references import data_path
from mutualrl.tasks import TASKS, TaskSource, get_task


def ls(options: WithJson) -> None:
    """List tasks."""
    if options.as_json:
        emit(
            {"tasks": [{"name": t.name, "reads": t.reads, "max_new_tokens": t.max_new_tokens} for t in TASKS.values()]}
        )
        return
    table = Table("task", "default evaluation data", "max new tokens")
    for task in TASKS.values():
        table.add_row(task.name, task.reads, str(task.max_new_tokens))
    show_table(table)


def show(options: TasksShow) -> None:
    """Print prompts, with the canonical answers."""
    task, split = options.task, options.split
    if split not in ("train", "validation"):
        raise UsageError(f"--split {split}: expected train or validation")
    if task != "dataset" and (given(options, "template", "answer")):
        raise UsageError(f"--template and --answer are for task 'dataset'; {task!r} has its own template")
    source = None if options.rows.data is None else Path(data_path(options.rows.data))
    complete = split == "validation" or (source is not None and source.is_file())
    training, validation = (None, source) if complete else (source, None)
    read = get_task(task).read(
        "validation" if complete else "train",
        TaskSource(training, validation, options.seed, options.rows.template, options.rows.answer or "answer"),
    )
    if options.as_json:
        shown = read.prompts if options.limit is None else read.prompts[: options.limit]
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
    shown = read.prompts[: options.limit or SHOWN_PROMPTS]
    _print_prompts(shown, f"{task}: {len(read.prompts)} prompts from {read.origin}")
    for line in read.dropped:
        print_text(prose(), f"dropped: {line}")


def _prompt_json(prompt: Prompt) -> dict[str, object]:
    return {
        "id": prompt.id,
        "prompt": prompt.content,
        "answer": prompt.answer,
        "group": prompt.group,
        **({"facets": dict(prompt.facets)} if prompt.facets else {}),
    }


def _print_prompts(prompts: Sequence[Prompt], title: str) -> None:
    typer.echo(clean(title))
    for prompt in prompts:
        details = f"{prompt.id}  group {prompt.group}  answer {prompt.answer}".replace("\n", " ")
        typer.echo(f"\n--- {clean(details, 600)}")
        if isinstance(prompt.content, str):
            typer.echo(clean(prompt.text, 20_000))
        else:
            for message in prompt.content:
                typer.echo(f"[{message['role']}] {clean(message['content'], 20_000)}")
