"""Results of a run: the final table, and a row for lists of runs."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from mutualrl.cli.output import screen, show_table
from mutualrl.console.display import cell, print_text
from mutualrl.recipes.agreement import few_held_out
from mutualrl.runs.overview import Overview
from mutualrl.storage.files import JsonObject
from mutualrl.storage.run_info import PolicyFacts, Summary, Validation, measured


def show_summary(summary: Summary, run_dir: Path | str) -> None:
    """Print accuracy before and after training, overall and by group, for every policy."""
    console = screen()
    validations = {name: (result.initial_validation, result.validation) for name, result in summary.policies.items()}
    groups = sorted({group for _, after in validations.values() if after is not None for group in after.by_group})
    shown = groups if 1 < len(groups) <= 4 else []
    facts_of = {name: result.facts or PolicyFacts() for name, result in summary.policies.items()}
    teaches = summary.shares and any(facts.taught is not None for facts in facts_of.values())
    waits = summary.shares and len(summary.policies) > 1
    shared = ["dead prompts", *["texts taught"] * teaches, *["waited"] * waits]
    table = Table("policy", "all", *map(cell, shown), *shared)
    for name, result in summary.policies.items():
        both = validations[name]
        cells = [" -> ".join(map(_accuracy, both))]
        cells += [" -> ".join(_of_group(validation, group) for validation in both) for group in shown]
        facts = facts_of[name]
        cells.append("" if facts.dead is None else f"{facts.dead} (most: {facts.most_dead})")
        cells += ["" if facts.taught is None else str(facts.taught)] * teaches
        cells += [f"{result.wait_seconds:.0f} s"] * waits
        table.add_row(cell(name), *cells)
    measure = "Mean reward of greedy completions" if summary.mean_reward else "Greedy accuracy"
    heading = (
        f"{measure} on held-out {summary.task}, before -> after training\n"
        f"({summary.regime}, {summary.steps} steps, seed {summary.seed})"
    )
    print_text(console, heading)
    show_table(table)
    _show_sources(summary)
    for name in summary.lost:
        console.print(f"{cell(name)} was lost during the run; the others continued without it", highlight=False)
    if (few := few_held_out(summary.data)) is not None:
        print_text(console, few)
    for note in summary.notes:
        print_text(console, f"Note: {note}")
    span = "since it was resumed" if summary.resumed else "in total"
    print_text(console, f"{summary.seconds:.0f} s {span}; the run is in {run_dir!s}")


def _show_sources(summary: Summary) -> None:
    """Print what each source gave and, if it was asked, cost."""
    if not summary.source_facts:
        return
    teaches = any(each.facts is not None and each.facts.taught is not None for each in summary.policies.values())
    if not any(facts.asked for facts in summary.source_facts.values()):
        table = Table("source", "texts taught")
        for name, facts in summary.source_facts.items():
            table.add_row(cell(name), f"{facts.rescues:,}")
        show_table(table)
        return
    priced = any(facts.cost is not None for facts in summary.source_facts.values())
    head = ["source", "questions", "without an answer", "tokens", *["price"] * priced]
    table = Table(*head, *["texts taught", "tokens per text taught"] * teaches)
    for name, facts in summary.source_facts.items():
        per_rescue = facts.tokens_per_rescue
        asked = [f"{facts.sent:,}", f"{facts.failed:,}", f"{facts.tokens:,}"]
        each = "" if per_rescue is None or not facts.asked else f"{per_rescue:,.0f}"
        price = ["" if facts.cost is None else f"{facts.cost:.2f}"] * priced
        taught = [f"{facts.rescues:,}", each] * teaches
        table.add_row(cell(name), *(asked if facts.asked else ("", "", "")), *price, *taught)
    show_table(table)


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
