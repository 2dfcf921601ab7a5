"""What `mutualrl train --dry-run` shows: the resolved recipe, and where each policy would run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from mutualrl.cli.output import emit
from mutualrl.errors import MutualRLError
from mutualrl.mwra.devices import Machine, this_machine
from mutualrl.mwra.placement import Placement, place
from mutualrl.mwra.requirements import lacking
from mutualrl.recipes import Recipe, dump


def show(recipe: Recipe, *, as_json: bool) -> None:
    """Print the recipe, the placement on the hardware it is for, and the placement on this machine."""
    machine = this_machine()
    planned: dict[str, Placement | str] = {}
    if recipe.hardware.gpus:
        meant = Machine(tuple(str(i) for i in range(recipe.hardware.gpus)), machine.cores)
        planned[f"the recipe's hardware: {recipe.hardware.gpus} GPUs"] = _try(recipe, meant)
    planned[f"this machine: {len(machine.gpus)} GPUs, {machine.cores} CPU cores"] = _try(recipe, machine)
    missing = lacking(recipe, machine)
    if as_json:
        emit({"recipe": recipe.model_dump(mode="json"), "placement": _as_json(planned), "lacking": missing})
        return
    console = Console()
    console.print(dump(recipe), markup=False, highlight=False, soft_wrap=True, end="")
    for where, placement in planned.items():
        console.print(_table(where, placement))
    for line in missing:
        console.print(f"This machine lacks: {line}", markup=False, highlight=False, soft_wrap=True)


def _try(recipe: Recipe, machine: Machine) -> Placement | str:
    try:
        return place(recipe, machine)
    except MutualRLError as error:
        return str(error)


def _as_json(planned: dict[str, Placement | str]) -> dict[str, Any]:
    return {
        where: {"problem": p} if isinstance(p, str) else {"seats": [asdict(s) for s in p.seats], "notes": list(p.notes)}
        for where, p in planned.items()
    }


def _table(where: str, placement: Placement | str) -> Table | str:
    if isinstance(placement, str):
        return f"Placement on {where}: {placement}"
    table = Table(
        "policy", "devices", "strategy", "a round", "an optimizer step", title=f"Placement on {where}",
        title_justify="left", caption="; ".join(placement.notes) or None,
    )  # fmt: skip
    for seat in placement.seats:
        plan = seat.batch
        strategy = seat.strategy if seat.processes > 1 or seat.gpus else "one process"
        table.add_row(
            seat.policy, seat.devices, strategy,
            f"{plan.prompts} prompts x {plan.rollouts} rollouts = {plan.optimizer_steps} step(s)",
            f"{plan.micro_batches} x {plan.per_device} completions x {seat.processes} device(s)",
        )  # fmt: skip
    return table
