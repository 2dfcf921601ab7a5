"""What regimes and sources say of themselves, for those that fit them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: what a regime does to the learner's advantages
Treatment = Literal["keeps", "adjusts", "sets", "builds the batch"]


@dataclass(frozen=True, slots=True)
class SourceTraits:
    """What a source has besides texts and rewards. `every_prompt`: samples on every prompt of a round, drawn whatever
    the rewards are; without, its texts are a selection. `logprobs`: its tokens and their log-probs."""

    every_prompt: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class RegimeTraits:
    """What a run must know of a regime, whatever its settings are."""

    advantages: Treatment = "keeps"
    """What it does to the learner's: "keeps" them, "adjusts" the view's (also those of a preceding regime), "sets" its
    own from one reward per rollout, or "builds the batch", own and extra rows under advantages of their own."""
    weighs_groups: bool = False
    """Whether its advantages include the weight of dropped groups, so that nothing may change them later."""
    shares: bool = True
    """False for the baseline, which plans nothing."""
    reads_peers: bool = True
    """Whether a round waits for the peers (a pool of one is then rejected)."""
    guides: bool = False
    """Whether `prefixes` gives upcoming rollouts a beginning."""
    encodes_all_texts: bool = False
    """Whether a plan encodes every text of the peers; it is then begun while slower peers are awaited."""
    requests_samples: bool = False
    """Whether `requests` may ask for rollouts: not with data that is no `Dataset`."""
    reads_trajectories: bool = False
    """Whether the texts that it reads may be those of trajectories with tools."""
    accepts_sources: bool = False
    """Whether it can use a source whose texts are a selection, on some prompts."""
    adds_nll_rows: bool = False
    """Whether it may add rows under NLL, which is taken at temperature 1: at another one they need whole logits."""

    @classmethod
    def together(cls, parts: Iterable[RegimeTraits]) -> RegimeTraits:
        """Return those of several regimes combined: what the view's advantages are replaced by is the first's that does
        so; anything else holds for all if it does for one."""
        each = list(parts)
        moving = [part.advantages for part in each if part.advantages != "keeps"]
        return cls(
            advantages=moving[0] if moving else "keeps",
            weighs_groups=any(part.weighs_groups for part in each),
            shares=any(part.shares for part in each),
            reads_peers=any(part.reads_peers for part in each),
            guides=any(part.guides for part in each),
            encodes_all_texts=any(part.encodes_all_texts for part in each),
            requests_samples=any(part.requests_samples for part in each),
            reads_trajectories=any(part.reads_trajectories for part in each),
            accepts_sources=any(part.accepts_sources for part in each),
            adds_nll_rows=any(part.adds_nll_rows for part in each),
        )
