"""Run a diagnostic: load the rollouts, compute, and say what they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from mutualrl.console.lines import notify
from mutualrl.diagnostics.diagnostic import Beside, Diagnostic, Figures, Inputs, Request, Result, Scope, as_plain
from mutualrl.diagnostics.load_rollouts import ProgressBars, arranged, load_table
from mutualrl.diagnostics.plan import DiagnosticPlan, plan_diagnostic
from mutualrl.diagnostics.request import DiagnosticRequest
from mutualrl.diagnostics.rollouts import NoCommonPromptError
from mutualrl.errors import UsageError
from mutualrl.storage.files import JsonObject


@dataclass(frozen=True)
class Diagnosed:
    """Result of a diagnostic. `result` and `scope` are None where fewer than two models could be compared."""

    diagnostic: Diagnostic[Any, Any]
    plan: DiagnosticPlan
    beside: Beside
    result: object | None = None
    scope: Scope | None = None

    def plain(self) -> JsonObject:
        """Return it as values of JSON; undefined figures are null."""
        values: JsonObject = {"origin": self.plan.origin, "seed": self.plan.seed}
        if self.scope is not None:
            values = {**self.scope.plain(), **as_plain(self.result)}
        for found in self.beside.results:
            values |= as_plain(found)
        return values

    def markdown(self) -> str:
        """Return all tables."""
        compared = [] if self.scope is None else [self.diagnostic.markdown(self.result, self.scope)]
        return "\n\n".join([*compared, *self.beside.tables])

    def figures(self) -> Figures:
        """Return the figures of what was found, and those of the comparison."""
        compared = {} if self.scope is None else self.diagnostic.figures(self.result)
        return {**self.beside.figures, **compared}


def diagnose(diagnostic: Diagnostic[Request, Result], request: DiagnosticRequest, console: Console) -> Diagnosed:
    """Return the result of a diagnostic. Raises UsageError, DataError, ModelError or ExchangeDamagedError."""
    plan = plan_diagnostic(request)
    bars = ProgressBars(console)
    with bars.progress:
        loaded = load_table(plan, bars)
        policies = [] if loaded is None else loaded.table["policy"].unique().to_pylist()
        if loaded is not None and (unknown := set(plan.thresholds.own) - set(policies)):
            expected = ", ".join(sorted(policies))
            raise UsageError(f"no policy {min(unknown)!r} in {plan.origin}; expected one of: {expected}")
        beside = diagnostic.beside(plan, loaded, bars)
        if loaded is None or (beside.results and len(policies) < 2):
            return Diagnosed(diagnostic, plan, beside)
        try:
            rollouts, pool = arranged(loaded, plan, bars)
        except NoCommonPromptError as error:  # what needs no second model was found
            if not beside.results:
                raise
            notify(f"the models are not compared: {error}")
            return Diagnosed(diagnostic, plan, beside)
        assert isinstance(request, diagnostic.request)
        result = diagnostic.compute(Inputs(request, plan, rollouts, pool, beside))
    scope = Scope(
        policies=list(rollouts.policies),
        prompts=len(rollouts.prompt_ids),
        rounds=len(np.unique(rollouts.rounds)),
        origin=rollouts.origin,
        left_out_prompts=rollouts.left_out,
        seed=plan.seed,
        thresholds=plan.thresholds,
        notes=tuple(loaded.notes),
    )
    return Diagnosed(diagnostic, plan, beside, result, scope)
