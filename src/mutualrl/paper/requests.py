"""Requests of the paper's diagnostics, which are their options, apart from them: their help need not import them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mutualrl.diagnostics.request import DiagnosticRequest, LearnerRequest


@dataclass(frozen=True, kw_only=True)
class XgrpoCheckRequest(DiagnosticRequest):
    """Do the pooled rewards carry structure? Pooled normalization with the true pool against a shuffled one."""


@dataclass(frozen=True, kw_only=True)
class ChannelsRequest(LearnerRequest):
    """Which of PRP, XGRPO and SGT could each learner use on each prompt?"""


@dataclass(frozen=True, kw_only=True)
class CostRequest(LearnerRequest):
    """What would each regime add to a round, in response tokens?"""


REQUESTS: Mapping[str, type[DiagnosticRequest]] = {
    "xgrpo-check": XgrpoCheckRequest,
    "channels": ChannelsRequest,
    "cost": CostRequest,
}
