"""Divisors of the advantages that diagnostics compute from rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scales:
    """Divisors of the advantages: `group`, `batch` or `none`; `own`: (local, pooled) of single policies, by name."""

    default: str = "group"
    own: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[str, str]:
        """Return the divisors of a policy's local and pooled rules."""
        return self.own.get(policy, (self.default, self.default))

    def described(self) -> str:
        """Return the divisors in use as text."""
        scales = sorted({scale for pair in self.own.values() for scale in pair} or {self.default})
        return ", ".join(scales)
