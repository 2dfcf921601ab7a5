"""Results of a run: the final table, and a row for lists of runs."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from mutualrl.cli.output import screen, show_table
from mutualrl.console.display import cell, print_text
from mutualrl.runs.overview import Overview
from mutualrl.runs.record import FEW
from mutualrl.storage.files import JsonObject
from mutualrl.storage.run_info import Summary, Validation, measured


def show_summary(summary: Summary, run_dir: Path | str) -> None:
    """Print accuracy before and after training, overall and by group, for every policy."""
    console = screen()
    validations = {name: (result.initial_validation, result.validation) for name, result in summary.policies.items()}
    groups = sorted({group for _, after in validations.values() if after is not None for group in after.by_group})
    shown = groups if 1 < len(groups) <= 4 else []
    table = Table("policy", "all", *map(cell, shown), *(("rescued pairs", "waited") if summary.shares else ()))
    for name, result in summary.policies.items():
        both = validations[name]
        cells = [" -> ".join(map(_accuracy, both))]
        cells += [" -> ".join(_of_group(validation, group) for validation in both) for group in shown]
        if summary.shares:
            cells += [str(result.rescued_pairs), f"{result.wait_seconds:.0f} s"]
        table.add_row(cell(name), *cells)
    ends = [after for _, after in validations.values() if after is not None]
    rewarded = any(after.no_box is None for after in ends)  # by user reward functions
    measure = "Mean reward of greedy completions" if rewarded else "Greedy accuracy"
    heading = (
        f"{measure} on held-out {summary.task}, before -> after training\n"
        f"({summary.regime}, {summary.steps} steps, seed {summary.seed})"
    )
    print_text(console, heading)
    show_table(table)
    for name in summary.lost:
        console.print(f"{cell(name)} was lost during the run; the others continued without it", highlight=False)
    if (count := min((after.n for after in ends), default=0)) and count < FEW:
        print_text(
            console,
            f"{count} held-out prompts decide nothing: one prompt is {1 / count:.0%}. Give more with "
            "task.validation_data, or raise run.validation_limit",
        )
    for note in summary.notes:
        print_text(console, f"Note: {note}")
    print_text(console, f"{summary.seconds:.0f} s in total; the run is in {run_dir!s}")


def _accuracy(validation: Validation | None) -> str:
    if validation is None:
        return ""
    accuracy = measured(validation)
    return "no reward" if accuracy is None else f"{accuracy:.2f}"


def _of_group(validation: Validation | None, group: str) -> str:
    accuracy = None if validation is None else validation.by_group.get(group)
    return "" if accuracy is None else f"{accuracy:.2f}"


def run_row(overview: Overview) -> JsonObject:
    """Return the row of a run in a list of runs."""
    run = overview.run
    return {
        "run": str(run.root),
        "state": run.state,
        "regime": run.arm,
        "pool": run.pool,
        "task": run.task,
        "seed": run.seed,
        "steps": run.planned_steps,
        "policies": {name: policy.model_dump() for name, policy in overview.policies.items()},
        "began": run.info.created or None,
        "notes": list(run.notes),
    }
