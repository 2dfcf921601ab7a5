"""Run a diagnostic: load the rollouts, compute, and write undefined values as null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from mutualrl.console.lines import notify
from mutualrl.diagnostics.channels import channels
from mutualrl.diagnostics.complementarity import Thresholds, complementarity
from mutualrl.diagnostics.cost import cost
from mutualrl.diagnostics.diagnostic_request import DiagnosticRequest, gate_sizes
from mutualrl.diagnostics.hints import hint_rows, with_choice
from mutualrl.diagnostics.hints import result_of as result_of_hints
from mutualrl.diagnostics.load_rollouts import Loaded, ProgressBars, arranged, load_table
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.results import Activation, Channels, Complementarity, Cost, ValueCheck
from mutualrl.diagnostics.revival import result_of, with_task_ids
from mutualrl.diagnostics.rollouts import Rollouts
from mutualrl.diagnostics.sgt_check import activation, teacher_nll
from mutualrl.diagnostics.xgrpo_check import xgrpo_check
from mutualrl.errors import DataError, UsageError
from mutualrl.sources.prepare import Prepared, prepare_sources

Result = Complementarity | ValueCheck | Activation | Channels | Cost


def diagnose(
    which: str, request: DiagnosticRequest, console: Console, *, success: str = "first", gates: str | None = None
) -> dict[str, Any]:
    """Return the result of a diagnostic as plain values; undefined figures are null. See each diagnostic's module.

    Raises UsageError, DataError, ModelError or ExchangeDamagedError.
    """
    bars = ProgressBars(console)
    with bars.progress:
        loaded = load_table(request, bars)
        sources = _sources(request)
        texts = _with_sources(request, loaded, sources) | _with_hints(request, loaded, sources, bars)
        if loaded is None or (texts and len(loaded.table["policy"].unique()) < 2):
            return plain_values({**texts, "origin": request.origin, "seed": request.seed})
        rollouts, pool = arranged(loaded, request, bars)
        if unknown := set(request.thresholds.own) - set(rollouts.policies):
            expected = ", ".join(rollouts.policies)
            raise UsageError(f"no policy {min(unknown)!r} in {rollouts.origin}; expected one of: {expected}")
        results: dict[str, Any] = {**_compute(which, request, rollouts, pool, success, gates)}
    if "hints" in texts:
        results |= with_choice(results, texts["hints"])
    results["rounds"] = len(np.unique(rollouts.rounds))
    results["origin"] = rollouts.origin
    results["left_out_prompts"] = rollouts.left_out
    if loaded.notes:
        results["notes"] = list(loaded.notes)
    results["seed"] = request.seed
    results["thresholds"] = _limits(request.thresholds)
    if request.thresholds.own:
        own = {name: _limits(request.thresholds.of(name)) for name in rollouts.policies}
        results["thresholds"]["own"] = own
    return plain_values({**results, **texts})


def _sources(request: DiagnosticRequest) -> dict[str, Prepared]:
    """Return the request's recorded texts, verified."""
    if (texts := request.sources) is None:
        return {}
    success = request.thresholds.success
    learners = [replace(learner, success_above=success) for learner in texts.learners()]
    return prepare_sources(texts.specs, texts.prompts, (), texts.rewards, learners, texts.timeout, success)


def _with_hints(
    request: DiagnosticRequest, loaded: Loaded | None, sources: Mapping[str, Prepared], bars: ProgressBars
) -> dict[str, Any]:
    """Return what hints would do, if that was asked."""
    if not request.flags.hints or loaded is None or request.sampled is None:
        return {}
    return result_of_hints(
        hint_rows(request, request.sampled, loaded.table, sources, loaded.tokenizers, loaded.contexts, bars)
    )


def _with_sources(request: DiagnosticRequest, loaded: Loaded | None, sources: Mapping[str, Prepared]) -> dict[str, Any]:
    """Return what the request's recorded texts would revive; nothing without any."""
    if (texts := request.sources) is None:
        return {}
    if loaded is None:
        return result_of(None, sources, request.thresholds, request.seed)
    table, unknown = with_task_ids(loaded.table, texts.prompts, request.origin)
    if unknown:
        notify(f"{unknown} prompts of the models' rollouts are not the task's, and left out")
    return result_of(table, sources, request.thresholds, request.seed)


def plain_values(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with null in place of NaN, which JSON lacks."""
    plain: dict[str, Any] = _plain(dict(result))
    return plain


def _limits(rule: Thresholds) -> dict[str, Any]:
    return {"success_above": rule.success, "failure_below": rule.failure}


def _compute(
    which: str, request: DiagnosticRequest, rollouts: Rollouts, pool: ModelPool, success: str, gates: str | None
) -> Result:
    thresholds, seed = request.thresholds, request.seed
    if which == "complementarity":
        samples = rollouts.present_M_P_G.sum(axis=2).min(axis=1).tolist()
        return complementarity(rollouts, thresholds, success, gate_sizes(gates, samples), seed)
    if which == "xgrpo-check":
        return xgrpo_check(rollouts, request.scales, seed)
    if which == "channels":
        return channels(rollouts, thresholds, pool, request.scales, fresh=request.sampled is not None)
    if which == "cost":
        return cost(rollouts, thresholds, pool, seed)
    result = activation(rollouts, thresholds)
    result["nll"], result["nll_needs"] = None, None
    try:
        pool.require("the teachers' NLL")
        result["nll"] = teacher_nll(rollouts, thresholds, pool, seed)
    except (UsageError, DataError) as error:  # optional: the table reports why it is missing
        result["nll_needs"] = str(error)
    return result


def _plain(value: Any) -> Any:
    """Replace NaN, which JSON lacks, with null."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
