"""The record of a run, as read from its directory."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mutualrl.process.status import RunState
from mutualrl.recipes.agreement import data_note
from mutualrl.references import POLICY_NAME
from mutualrl.regimes import baseline
from mutualrl.regimes.info import RegimeInfo
from mutualrl.regimes.regime import SUCCESS_ABOVE, flat
from mutualrl.regimes.resample import Resample
from mutualrl.storage.files import JsonObject, finite_number
from mutualrl.storage.run_info import PolicyResult, RunInfo, Summary, Validation, is_accuracy, measured

_POLICY = re.compile(POLICY_NAME)


class Record(BaseModel):
    """Base of the records of a run; they do not change."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)


class PolicyRecord(Record):
    """One policy of a run. `before`: validation before training; `result`: None until the policy finishes."""

    name: str
    model: str
    before: Validation | None = None
    result: PolicyResult | None = None

    @property
    def validation(self) -> Validation | None:
        """Return the last validation of a finished policy."""
        return None if self.result is None else self.result.validation

    @property
    def final(self) -> float | None:
        """Return the final accuracy; None for a policy that has not finished, was lost, or has no reward."""
        return measured(self.validation)


class StoredEvaluation(Record):
    """Results of `mutualrl eval --run`. `how`: suite, decoding, and tasks with number of prompts and token limit;
    evaluations are comparable if equal. `accuracy`: by policy, then task. `pass_at`: over all tasks, by policy, then k;
    empty for greedy decoding. `initial`: of the models before training (`--initial`)."""

    how: str
    tasks: tuple[str, ...]
    accuracy: Mapping[str, Mapping[str, float]]
    pass_at: Mapping[str, Mapping[str, float]]
    initial: bool = False


class Run(Record):
    """Run. `name`: name of its directory, with more of the path if ambiguous; `recipe`: its resolved recipe, empty if
    it cannot be read; `summary`: None until it has finished; `notes`: what is damaged or missing; `arm_name`: what its
    sweep calls its arm, empty for a run of no sweep."""

    root: Path
    name: str
    info: RunInfo
    recipe: JsonObject
    policies: Mapping[str, PolicyRecord]
    summary: Summary | None
    state: RunState
    notes: tuple[str, ...]
    evaluations: tuple[StoredEvaluation, ...] = ()
    arm_name: str = ""

    def setting(self, key: str) -> Any:
        """Return a setting of the recipe by its dotted key; None if it has none."""
        value: Any = self.recipe
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def section(self, name: str) -> JsonObject:
        """Return a section of the recipe; empty if it has none."""
        value = self.recipe.get(name)
        return value if isinstance(value, dict) else {}

    @cached_property
    def rule(self) -> RegimeInfo:
        """Return the description of the regime that the run recorded."""
        return RegimeInfo.from_run(self.info.regime, self.info.regime_info)

    @property
    def gates(self) -> set[str]:
        """Return the gates of its policies: values of `gate` of sgt, `none` where the regime declares none."""
        if self.rule.metric("gate_rate") is None:
            return {"none"}
        shared = _gate_in(self.recipe) or "all"
        policies = self.recipe.get("policies")
        return {_gate_in(policy) or shared for policy in (policies if isinstance(policies, list) else [])} or {shared}

    @property
    def gated(self) -> bool:
        """Return whether its regime teaches only where all rollouts of the learner failed."""
        return self.gates == {"all"}

    @property
    def seed(self) -> int | None:
        """Return the run's seed; None if it is not recorded."""
        return self.info.seed if "seed" in self.info.model_fields_set else None

    @property
    def pool(self) -> str:
        """Return the pool's name, else the names of its policies."""
        return self.info.pool or ", ".join(self.policies)

    @property
    def task(self) -> str:
        """Return the task's name."""
        return str(self.setting("task.name") or self.info.fingerprint.get("task") or "unknown")

    @property
    def command(self) -> str:
        """Return the command that started the run."""
        return " ".join(self.info.command) or "unknown"

    @property
    def data(self) -> str:
        """Return what it trained on and validated on; empty for a run that did not record it."""
        try:
            return data_note(self.info.data)
        except (KeyError, TypeError, ValueError):
            return ""

    @property
    def planned_steps(self) -> int | None:
        """Return the planned number of steps."""
        steps = self.setting("run.steps")
        return steps if isinstance(steps, int) else None

    @property
    def measures_accuracy(self) -> bool:
        """Return whether validation measures accuracy rather than a mean reward."""
        return is_accuracy(self.setting("task.reward"))

    @property
    def is_local(self) -> bool:
        """Return whether one command on this machine started the run: over a bucket, each policy has its own."""
        shared = self.setting("exchange.url") is not None or bool(self.info.exchange)
        return self.info.command[1:2] == ["train"] and not shared

    @property
    def accuracy(self) -> float | None:
        """Return the final greedy accuracy, averaged over the policies; None if a policy has none."""
        finals = [policy.final for policy in self.policies.values()]
        known = [value for value in finals if value is not None]
        return statistics.fmean(known) if known and len(known) == len(finals) else None

    def success_above(self, policy: str) -> float:
        """Return the reward above which a rollout is a success for a policy's regime."""
        for section in (self._overrides.get(policy, {}), self.section("regime")):
            for key, value in flat(section).items():  # for several regimes, nested under a name
                number = finite_number(value) if key.rpartition(".")[2] == "success_above" else None
                if number is not None:
                    return number
        return SUCCESS_ABOVE

    @property
    def _overrides(self) -> dict[str, JsonObject]:
        """Return the settings of the regime that a policy has of its own."""
        sections = {entry["name"]: entry.get("regime") for entry in policies_in(self.recipe)}
        return {name: section for name, section in sections.items() if isinstance(section, dict)}

    @property
    def resample(self) -> JsonObject | None:
        """Return the settings of dynamic sampling (`round.resample`); None without."""
        value = self.section("round").get("resample")
        return value if isinstance(value, dict) else None

    @cached_property
    def arm(self) -> str:
        """Return the regime with its non-default settings, `sgt (weight=0.3)`, overrides of a policy, `sgt (bob:
        weight=0.9)`, dynamic sampling, `grpo resampled`, and the sources that it reads, `sgt with book`. In a sweep,
        the user's name for it, unless it is the baseline."""
        label = self.rule.label(self.section("regime"), self._overrides)
        if (resample := self.resample) is not None:
            attempts = resample.get("max_attempts")
            label += " resampled" if attempts == Resample().max_attempts else f" resampled (max_attempts={attempts})"
        sources = ", ".join(sorted({**self.info.sources, **self.info.asked_sources}))
        label = f"{label} with {sources}" if sources else label
        return self.arm_name if self.arm_name and label != baseline().name else label

    @property
    def is_variant(self) -> bool:
        """Return whether the arm is an ablation or a control of a regime for any policy."""
        common = self.section("regime")
        return any(self.rule.is_variant({**common, **own}) for own in ({}, *self._overrides.values()))

    @property
    def has_own_settings(self) -> bool:
        """Return whether a policy has settings of the regime of its own."""
        return any(self._overrides.values())


def policies_in(recipe: JsonObject) -> list[JsonObject]:
    """Return the policies of a recipe with valid names, which are used as directory names."""
    value = recipe.get("policies")
    entries = value if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and is_policy_name(entry.get("name"))]


def is_policy_name(name: object) -> bool:
    """Return whether a value is a valid name of a policy."""
    return isinstance(name, str) and _POLICY.fullmatch(name) is not None


def measure_of(runs: Iterable[Run]) -> str:
    """Return what the validations of all runs measure: with custom reward functions there is no accuracy."""
    return "accuracy" if all(run.measures_accuracy for run in runs) else "reward"


def _gate_in(section: object) -> str | None:
    """Return the gate that a recipe, or a policy of one, sets; None if it sets none."""
    regime = section.get("regime") if isinstance(section, dict) else None
    parts = [regime, *regime.values()] if isinstance(regime, dict) else []  # a combination has its parts' settings
    gates = [part.get("gate") for part in parts if isinstance(part, dict)]
    return next((str(gate) for gate in gates if gate), None)
