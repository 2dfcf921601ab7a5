"""Options of the paper's diagnostics, read without importing them: those of `specs/NAME.py` as `NameFlags`."""

from __future__ import annotations

from dataclasses import dataclass

from mutualrl.console.options import WithPlot
from mutualrl.diagnostics.flags import DiagnosticFlags, LearnerFlags


@dataclass(frozen=True, kw_only=True)
class XgrpoCheckFlags(DiagnosticFlags, WithPlot):
    """Do the pooled rewards carry structure? Pooled normalization with the true pool against a shuffled one."""


@dataclass(frozen=True, kw_only=True)
class ChannelsFlags(LearnerFlags, WithPlot):
    """Which of PRP, XGRPO and SGT could each learner use on each prompt?"""


@dataclass(frozen=True, kw_only=True)
class CostFlags(LearnerFlags, WithPlot):
    """What would each regime add to a round, in response tokens?"""
