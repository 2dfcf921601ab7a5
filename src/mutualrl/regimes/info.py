"""Description of a regime in a run's files, so that whoever looks at a run needs none of the regime's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mutualrl.regimes import Metric, RegimeSpec, regimes


class RegimeInfo(BaseModel):
    """Regime without its functions: `regime_info` in run.json."""

    model_config = ConfigDict(frozen=True)

    name: str
    summary: str = ""
    level: Literal["none", "data", "value", "outcome"] = "none"
    control: bool = False
    reads_peers: bool = True
    shares: bool = True
    defaults: dict[str, Any] = {}
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def of(cls, spec: RegimeSpec) -> RegimeInfo:
        """Return the part of a spec that is data."""
        return cls(
            name=spec.name,
            summary=spec.summary,
            level=spec.level,
            control=spec.control,
            reads_peers=spec.reads_peers,
            shares=spec.plan is not None,
            defaults=spec.settings().model_dump(mode="json"),
            metrics=spec.metrics,
        )

    @classmethod
    def from_run(cls, info: Mapping[str, Any]) -> RegimeInfo:
        """Return what run.json says of its regime; of a run without it, what ships under its regime's name."""
        name = str(info.get("regime", "unknown"))
        try:
            return cls.model_validate(info["regime_info"])
        except (KeyError, ValidationError):
            return cls.of(regimes()[name]) if name in regimes() else cls(name=name)

    def metric(self, role: str) -> str | None:
        """Return the key of the metric with that role, if the regime logs one."""
        return next((metric.key for metric in self.metrics if metric.role == role), None)

    def label(self, given: Mapping[str, Any], by_policy: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the regime's name with those of its settings that are not the defaults: `sgt (weight=0.3)`; a
        policy's own as `sgt (bob: weight=0.9)`."""
        changed = self._changed(given)
        for policy, own in by_policy.items():
            changed += [f"{policy}: {setting}" for setting in self._changed(own)]
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    def _changed(self, given: Mapping[str, Any]) -> list[str]:
        changed = []
        for key in sorted(map(str, given)):
            if key in self.defaults and self.defaults[key] != given[key]:
                changed.append(f"{key}={given[key]}")
        return changed
