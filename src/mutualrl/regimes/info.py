"""Description of a regime in a run's files, so that a run can be read without the regime's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mutualrl.regimes import Metric, Regime, regimes
from mutualrl.regimes.regime import Conditions, Settings, Variants, changed_settings, flat, merged


class RegimeInfo(BaseModel):
    """Regime without its functions: `regime_info` in run.json."""

    model_config = ConfigDict(frozen=True)

    name: str
    summary: str = ""
    level: Literal["none", "data", "value", "outcome"] = "none"
    control: bool = False
    reads_peers: bool = True
    shares: bool = True
    late: bool = False
    defaults: Settings = {}
    metrics: tuple[Metric, ...] = ()
    acts_when: Conditions = {}
    variants: Variants = {}

    @classmethod
    def of(cls, regime: type[Regime]) -> RegimeInfo:
        """Return the data of a regime, without its methods."""
        default = regime()
        needs = default.needs()
        return cls(
            name=regime.name,
            summary=regime.summary,
            level=regime.level,
            control=regime.control,
            reads_peers=needs.peers,
            shares=needs.shares,
            late=needs.late,
            defaults=default.model_dump(mode="json"),
            metrics=regime.metrics,
            acts_when=regime.acts_with(),
            variants=regime.variants(),
        )

    @classmethod
    def from_run(cls, name: str, described: Settings) -> RegimeInfo:
        """Return the regime that run.json names and describes; what is missing is the shipped one's."""
        shipped = cls.of(regimes()[name]) if name in regimes() else cls(name=name)
        try:
            return cls.model_validate({**shipped.model_dump(), **described})
        except ValidationError:
            return shipped

    @property
    def teaches(self) -> bool:
        """Return whether it says which rows it teaches."""
        return self.metric("rescues") is not None

    def metric(self, role: str) -> str | None:
        """Return the key of the metric with that role, if the regime logs one."""
        return next((metric.key for metric in self.metrics if metric.role == role), None)

    def label(self, given: Settings, by_policy: Mapping[str, Settings]) -> str:
        """Return the regime's name with its non-default settings: `sgt (weight=0.3)`; a policy's own settings as
        `sgt (bob: weight=0.9)`."""
        changed = changed_settings(given, self.defaults, self.acts_when)
        for policy, own in by_policy.items():
            of_policy = changed_settings(merged(given, own), self.defaults, self.acts_when)
            changed += [f"{policy}: {setting}" for setting in of_policy if setting.partition("=")[0] in flat(own)]
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    def is_variant(self, given: Settings) -> bool:
        """Return whether an arm is an ablation or a control, rather than the regime as published."""
        values = {**flat(self.defaults), **flat(given)}
        varied = [key for key, variants in self.variants.items() if values.get(key) in variants]
        return self.control or bool(varied)
