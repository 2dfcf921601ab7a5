"""Results of a run: the final table, and a row for lists of runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from mutualrl.cli.output import screen, show_table
from mutualrl.console.display import cell, print_text
from mutualrl.reporting.run_reader import Overview
from mutualrl.storage.files import JsonObject
from mutualrl.study.verdict import FEW


def show_summary(summary: JsonObject, run_dir: Path | str) -> None:
    """Print accuracy before and after training, overall and by group, for every policy."""
    console = screen()
    groups = sorted({g for p in summary["policies"].values() for g in p["validation"]["by_group"]})
    shown = groups if 1 < len(groups) <= 4 else []
    sharing = ("rescued pairs", "waited") if summary.get("shares", True) else ()
    table = Table("policy", "all", *map(cell, shown), *sharing)
    for name, result in summary["policies"].items():
        before, after = result["initial_validation"], result["validation"]
        cells = [" -> ".join(map(_accuracy, (before, after)))]
        cells += [f"{before['by_group'][g]:.2f} -> {after['by_group'][g]:.2f}" for g in shown]
        if sharing:
            cells += [str(result["rescued_pairs"]), f"{result['wait_seconds']:.0f} s"]
        table.add_row(cell(name), *cells)
    validations = [result["validation"] for result in summary["policies"].values()]
    rewarded = any(validation.get("no_box", 0.0) is None for validation in validations)  # by user reward functions
    measure = "Mean reward of greedy completions" if rewarded else "Greedy accuracy"
    heading = (
        f"{measure} on held-out {summary['task']}, before -> after training\n"
        f"({summary['regime']}, {summary['steps']} steps, seed {summary['seed']})"
    )
    print_text(console, heading)
    show_table(table)
    for name in summary["lost"]:
        console.print(f"{cell(name)} was lost during the run; the others continued without it", highlight=False)
    if (count := min((validation.get("n", FEW) for validation in validations), default=0)) and count < FEW:
        print_text(
            console,
            f"{count} held-out prompts decide nothing: one prompt is {1 / count:.0%}. Give more with "
            "task.validation_data, or raise run.validation_limit",
        )
    for note in summary.get("notes", ()):
        print_text(console, f"Note: {note}")
    print_text(console, f"{summary['seconds']:.0f} s in total; the run is in {run_dir!s}")


def _accuracy(validation: JsonObject) -> str:
    unscored = validation.get("unscorable") and validation["unscorable"] == validation["n"]
    return "no reward" if unscored else f"{validation['accuracy']:.2f}"


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
        "policies": {name: asdict(policy) for name, policy in overview.policies.items()},
        "began": run.info.get("created"),
        "notes": list(run.notes),
    }
