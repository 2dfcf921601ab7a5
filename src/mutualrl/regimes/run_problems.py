"""Whether a regime may run under the settings of a run: asked by recipes, scripts and the trainer alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mutualrl.regimes import regimes
from mutualrl.regimes.ratios import aggregation_problem, ratio_problems
from mutualrl.regimes.regime import Problem, Regime, Settings
from mutualrl.traits import SourceTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What decides whether a policy's regime may run."""

    trainer: Settings = field(default_factory=dict)
    """The trainer's settings by TRL's names."""
    traced: bool = False
    """Whether others read the log-probs with which the policy sampled."""
    whiten: bool = False
    """Whether advantages are whitened over the round."""
    staleness: int = 0
    """Rounds by which a peer may lag."""
    turns: bool = False
    """Whether rollouts have several turns, with tools or an environment."""
    resample: bool = False
    """Whether groups of equal rewards are replaced by those of further prompts."""
    peers: int = 0
    """Number of other policies."""
    sources: Mapping[str, SourceTraits] = field(default_factory=dict)
    """What each source that it reads has."""


def member_problems(regime: Regime, facts: RunFacts) -> list[Problem]:
    """Return (key, problem) of the other members, of whom the regime reads: `peers`, `sources`, or `sources.NAME`."""
    problems: list[Problem] = []
    if regime.traits.reads_peers and not facts.peers and not facts.sources:
        problems.append(("peers", f"regime {regime.name!r} shares between policies, and there is one"))
    if regime.needs_source() and not facts.sources:
        problems.append(("sources", f"{regime.describe()} learns a source's texts, and there is none"))
    for name, traits in facts.sources.items():
        if (problem := regime.source_problem(traits)) is not None:
            usable = ", ".join(each for each, known in regimes().items() if known.traits.accepts_sources)
            problems.append((f"sources.{name}", f"{problem}, or a regime that can: {usable}"))
    return problems


def setting_problems(regime: Regime, facts: RunFacts) -> list[Problem]:
    """Return (key, problem) of settings under which the regime would not compute what it declares: `trainer.KEY`,
    `regime.KEY`, `turns`, `staleness`, `resample` or `whiten_advantages`."""
    settings = [
        *ratio_problems(facts.trainer, traced=facts.traced or regime.uses_ratios()),
        *aggregation_problem(facts.trainer, moves_advantages=regime.changes_advantages()),
        *regime.problems(facts.trainer),
    ]
    problems = [(f"trainer.{key}", problem) for key, problem in settings]
    problems += [("whiten_advantages", problem) for problem in regime.whitening_problem(whiten=facts.whiten)]
    if (stale := regime.staleness_problem(facts.staleness)) is not None:
        problems.append(("staleness", stale))
    problems += regime.turns_problems(turns=facts.turns)
    problems += [("resample", problem) for problem in _resample_problems(regime, facts)]
    problems += [(f"regime.{key}", problem) for key, problem in regime.ineffective_settings()]
    return problems


def _resample_problems(regime: Regime, facts: RunFacts) -> list[str]:
    """Return why groups cannot be replaced by those of further prompts."""
    if not facts.resample:
        return []
    problems = []
    if regime.traits.reads_peers:
        problems.append(f"regime {regime.name!r} reads rollouts on the same prompts, of peers or sources")
    elif regime.traits.guides:
        problems.append(f"regime {regime.name!r} begins rollouts of the round's prompts, which are known before it")
    elif regime.traits.shares:
        problems.append(f"regime {regime.name!r} plans the advantages of all groups, of which some would be dropped")
    refused = [f"found true, but {problem} (leave round.resample out)" for problem in problems]
    return refused + [f"trainer.{key}: {problem}" for key, problem in equal_sums_problem(facts.trainer)]


def equal_sums_problem(trainer: Settings) -> list[Problem]:
    """Return (key, problem) if groups of equal rewards cannot be told by the sums of their rewards."""
    why = "dynamic sampling tells equal groups by their summed rewards"
    return aggregation_problem(trainer, moves_advantages=True, why=why)
