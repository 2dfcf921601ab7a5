"""Carry out a diagnostic: gather the rollouts, compute, and put what was not defined as null."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rich.console import Console

from mutualrl.diagnostics.channels import channels
from mutualrl.diagnostics.complementarity import complementarity
from mutualrl.diagnostics.cost import cost
from mutualrl.diagnostics.gathering import Bars, gather
from mutualrl.diagnostics.request import DiagnosticRequest, gate_sizes
from mutualrl.diagnostics.results import Activation, Channels, Complementarity, Cost, ValueCheck
from mutualrl.diagnostics.rollouts import Rollouts
from mutualrl.diagnostics.sgt_check import activation, teacher_nll
from mutualrl.diagnostics.voices import Voices
from mutualrl.diagnostics.xgrpo_check import xgrpo_check
from mutualrl.errors import DataError, UsageError

Result = Complementarity | ValueCheck | Activation | Channels | Cost


def diagnose(
    which: str, request: DiagnosticRequest, console: Console, *, success: str = "first", gates: str | None = None
) -> dict[str, Any]:
    """The result of a diagnostic as plain values; figures that are not defined are null. See each diagnostic's module.

    Raises UsageError, DataError, ModelError or ExchangeDamagedError.
    """
    bars = Bars(console)
    with bars.progress:
        rollouts, voices = gather(request, bars)
        found = _computed(which, request, rollouts, voices, success, gates)
    found["rounds"] = len(np.unique(rollouts.rounds))
    found["origin"] = rollouts.origin
    found["left_out_prompts"] = rollouts.left_out
    found["seed"] = request.seed
    found["thresholds"] = {"success_above": request.thresholds.success, "failure_below": request.thresholds.failure}
    plain: dict[str, Any] = _plain(found)
    return plain


def _computed(
    which: str, request: DiagnosticRequest, rollouts: Rollouts, voices: Voices, success: str, gates: str | None
) -> Result:
    thresholds, seed = request.thresholds, request.seed
    if which == "complementarity":
        samples = rollouts.present_M_P_G.sum(axis=2).min(axis=1).tolist()
        return complementarity(rollouts, thresholds, success, gate_sizes(gates, samples), seed)
    if which == "xgrpo-check":
        return xgrpo_check(rollouts, request.scales, seed)
    if which == "channels":
        return channels(rollouts, thresholds, voices, request.scales)
    if which == "cost":
        return cost(rollouts, thresholds, voices, seed)
    found = activation(rollouts, thresholds)
    found["nll"], found["nll_needs"] = None, None
    try:
        voices.require("the teachers' NLL")
        found["nll"] = teacher_nll(rollouts, thresholds, voices, seed)
    except (UsageError, DataError) as error:  # the profile stands without it; the table says why it is missing
        found["nll_needs"] = str(error)
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not defined is null."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
