"""Table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from mutualrl.cli.output import screen, show_table
from mutualrl.console.display import cell, clean


def show_summary(summary: dict[str, Any], run_dir: Path | str) -> None:
    """Print accuracy before and after, by group, for every policy."""
    console = screen()
    groups = sorted({g for p in summary["policies"].values() for g in p["validation"]["by_group"]})
    shown = groups if 1 < len(groups) <= 4 else []
    table = Table(
        "policy",
        "all",
        *map(cell, shown),
        "rescued pairs",
        "waited",
    )
    for name, result in summary["policies"].items():
        before, after = result["initial_validation"], result["validation"]
        cells = [f"{before['accuracy']:.2f} -> {after['accuracy']:.2f}"]
        cells += [f"{before['by_group'][g]:.2f} -> {after['by_group'][g]:.2f}" for g in shown]
        table.add_row(cell(name), *cells, str(result["rescued_pairs"]), f"{result['wait_seconds']:.0f} s")
    validations = [result["validation"] for result in summary["policies"].values()]
    rewarded = any(validation.get("no_box", 0.0) is None for validation in validations)  # by own reward functions
    measure = "Mean reward of greedy completions" if rewarded else "Greedy accuracy"
    heading = (
        f"{measure} on held-out {summary['task']}, before -> after training\n"
        f"({summary['regime']}, {summary['steps']} steps, seed {summary['seed']})"
    )
    console.print(clean(heading), markup=False, highlight=False, soft_wrap=True)
    show_table(table)
    for name in summary["lost"]:
        console.print(f"{cell(name)} was lost on the way; the others went on without it", highlight=False)
    console.print(
        f"{summary['seconds']:.0f} s in all; everything is in {clean(str(run_dir))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
