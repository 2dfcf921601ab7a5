"""Whether a regime may run under the settings of a run: asked by recipes, scripts and the trainer alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mutualrl.regimes import regimes
from mutualrl.regimes.needs import WHATEVER_THE_SETTINGS
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
    needs = regime.needs()
    problems: list[Problem] = []
    if needs.peers and not facts.peers and not facts.sources:
        problems.append(("peers", f"regime {regime.name!r} shares between policies, and there is one"))
    if needs.source and not facts.sources:
        learnt = "from a source's scores" if needs.scores else "a source's texts"
        problems.append(("sources", f"{regime.describe()} learns {learnt}, and there is none"))
    for name, traits in facts.sources.items():
        if (problem := regime.source_problem(traits)) is not None:
            usable = ", ".join(each for each, known in regimes().items() if known().source_problem(traits) is None)
            problems.append((f"sources.{name}", f"{problem}, or a regime that can: {usable}"))
    return problems


def setting_problems(regime: Regime, facts: RunFacts) -> list[Problem]:
    """Return (key, problem) of settings under which the regime would not compute what it declares: `trainer.KEY`,
    `regime.KEY`, `turns`, `staleness`, `resample` or `whiten_advantages`."""
    needs = regime.needs()
    settings = [
        *ratio_problems(facts.trainer, traced=facts.traced or needs.ratios),
        *aggregation_problem(facts.trainer, moves_advantages=needs.changes_advantages),
        *_of_parts(regime, lambda part: part.problems(facts.trainer)),
    ]
    problems = [(f"trainer.{key}", problem) for key, problem in settings]
    if facts.whiten and needs.weighs_groups:
        problem = (
            f"found true, but regime {regime.name!r} sets the advantages of dropped groups to 0 and weighs the others "
            "by their number, which whitening would undo; expected false"
        )
        problems.append(("whiten_advantages", problem))
    if facts.staleness and not needs.late:
        problems.append(("staleness", _staleness_problem(regime, facts.staleness)))
    problems += [("regime", f"needs(): {name} depends on settings; expected one value") for name in _varying(regime)]
    problems += turns_problems(regime, turns=facts.turns)
    problems += [("resample", problem) for problem in _resample_problems(regime, facts)]
    problems += [(f"regime.{key}", problem) for key, problem in regime.ineffective_settings()]
    return problems


def _varying(regime: Regime) -> list[str]:
    """Return what is asked of a regime before its settings are known, and differs with them."""
    known, needs = type(regime)().needs(), regime.needs()
    return [name for name in WHATEVER_THE_SETTINGS if getattr(known, name) != getattr(needs, name)]


def turns_problems(regime: Regime, *, turns: bool) -> list[Problem]:
    """Return (key, problem), with key `turns` or `regime.KEY`, of a task whose rollouts have several turns, with tools
    or an environment, or of one whose rollouts have one."""

    def of_part(part: Regime) -> Sequence[Problem]:
        needs = part.needs()
        if not turns or "text" not in needs.reads.fields or needs.runs:
            return part.turns_problems(turns=turns)
        problem = (
            f"regime {part.name!r} learns texts, not trajectories with tools; expected hinted, which shows a peer's "
            "run as a hint, sgt, which learns it, guided, which begins with its turns, or xgrpo, which shares rewards"
        )
        return [("turns", problem)]

    return _of_parts(regime, of_part)


def _of_parts(regime: Regime, ask: Callable[[Regime], Sequence[Problem]]) -> list[Problem]:
    """Return the problems of a regime's parts, with their settings' full names."""
    problems: list[Problem] = []
    for part in regime.regimes:
        prefix = "regime." if part is regime else f"regime.{part.name}."
        found = ask(part)
        problems += [(key.replace("regime.", prefix), text.replace("regime.", prefix)) for key, text in found]
    return problems


def _staleness_problem(regime: Regime, staleness: int) -> str:
    """Return why peers cannot lag by that many rounds."""
    needs = regime.needs()
    if not needs.peers:
        return f"found {staleness}, but regime {regime.name!r} does not wait for peers; leave it out"
    needed = "sources' texts" if needs.source else "peers' rollouts"
    return (
        f"found {staleness}, but regime {regime.describe()!r} needs the {needed} within the round; "
        "expected 0, or a regime that can use them late (see `mutualrl regimes show NAME`)"
    )


def _resample_problems(regime: Regime, facts: RunFacts) -> list[str]:
    """Return why groups cannot be replaced by those of further prompts."""
    if not facts.resample:
        return []
    needs, problems = regime.needs(), []
    if needs.peers:
        problems.append(f"regime {regime.name!r} reads rollouts on the same prompts, of peers or sources")
    elif needs.guides:
        problems.append(f"regime {regime.name!r} begins rollouts of the round's prompts, which are known before it")
    elif needs.shares:
        problems.append(f"regime {regime.name!r} plans the advantages of all groups, of which some would be dropped")
    refused = [f"found true, but {problem} (leave round.resample out)" for problem in problems]
    return refused + [f"trainer.{key}: {problem}" for key, problem in equal_sums_problem(facts.trainer)]


def equal_sums_problem(trainer: Settings) -> list[Problem]:
    """Return (key, problem) if groups of equal rewards cannot be told by the sums of their rewards."""
    why = "dynamic sampling tells equal groups by their summed rewards"
    return aggregation_problem(trainer, moves_advantages=True, why=why)
