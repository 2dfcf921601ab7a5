"""What a diagnostic is, and what it is given.

A diagnostic is one module below `specs`: its request, its result (frozen dataclasses, whose fields are the keys of
`--json`), what it computes, its tables and its figures, together in `DIAGNOSTIC`. The module's name is the command's,
its first line the command's summary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from mutualrl.console.markdown import name
from mutualrl.console.plots import Draw
from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.load_rollouts import Loaded, ProgressBars
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.plan import DiagnosticPlan
from mutualrl.diagnostics.rollouts import ModelRollouts
from mutualrl.storage.files import JsonObject

Request = TypeVar("Request")
Result = TypeVar("Result")

#: fraction, or NLL in nats, with its bounds
Interval = tuple[float, float]
#: by name: size in inches, and what draws it
Figures = Mapping[str, tuple[tuple[float, float], Draw]]
#: metadata of a mapping whose keys are keys of the dataclass in JSON
INLINE = {"inline": True}


@dataclass(frozen=True)
class Beside:
    """What is found without comparing models: results, merged in JSON, their tables, in order, and their figures."""

    results: tuple[object, ...] = ()
    tables: tuple[str, ...] = ()
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs(Generic[Request]):
    """What a diagnostic is computed from: its request, the plan of it, the rollouts of all models as arrays, the models
    behind them, and what was found beside."""

    request: Request
    plan: DiagnosticPlan
    rollouts: ModelRollouts
    pool: ModelPool
    beside: Beside = Beside()


@dataclass(frozen=True)
class Scope:
    """Rollouts that a result is of. `left_out_prompts`: those that not every model answered. `notes`: what is missing
    of a run."""

    policies: list[str]
    prompts: int
    rounds: int
    origin: str
    left_out_prompts: int
    seed: int
    thresholds: Thresholds
    notes: tuple[str, ...] = ()

    def described(self) -> str:
        """Return it as the title of a table has it."""
        left_out = f"; {self.left_out_prompts} prompts left out" if self.left_out_prompts else ""
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{name(self.origin)}, {self.prompts} prompts{rounds}{left_out}"

    def plain(self) -> JsonObject:
        """Return it as values of JSON."""
        thresholds: JsonObject = limits(self.thresholds)
        if self.thresholds.own:
            thresholds["own"] = {policy: limits(self.thresholds.of(policy)) for policy in self.policies}
        values: JsonObject = {
            "policies": self.policies,
            "prompts": self.prompts,
            "rounds": self.rounds,
            "origin": self.origin,
            "left_out_prompts": self.left_out_prompts,
            "seed": self.seed,
            "thresholds": thresholds,
        }
        return {**values, "notes": list(self.notes)} if self.notes else values


def limits(rule: Thresholds) -> dict[str, float]:
    """Return thresholds of rewards, as JSON has them."""
    return {"success_above": rule.success_above, "failure_below": rule.failure_below}


def no_figures(result: object) -> Figures:
    """Return none."""
    return {}


@dataclass(frozen=True)
class Diagnostic(Generic[Request, Result]):
    """A diagnostic. `beside`: what it finds without comparing models, from the rollouts (None: there are none)."""

    request: type[Request]
    compute: Callable[[Inputs[Request]], Result]
    markdown: Callable[[Result, Scope], str]
    figures: Callable[[Result], Figures] = no_figures
    beside: Callable[[DiagnosticPlan, Loaded | None, ProgressBars], Beside] = field(
        default=lambda plan, loaded, bars: Beside()
    )


def as_plain(value: object) -> Any:
    """Return a result as values of JSON: dataclasses as objects, NaN, which JSON lacks, as null."""
    if is_dataclass(value):
        plain: JsonObject = {}
        for entry in fields(value):
            own = getattr(value, entry.name)
            plain |= as_plain(own) if entry.metadata.get("inline") else {entry.name: as_plain(own)}
        return plain
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    return [as_plain(item) for item in value] if isinstance(value, list | tuple) else value
