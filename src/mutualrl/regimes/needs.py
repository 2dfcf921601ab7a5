"""What a regime says of itself, for those that fit it into a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mutualrl.records import REWARDS_ONLY, PublishSchema

#: what a regime does to the learner's advantages
Treatment = Literal["keeps", "adjusts", "sets", "builds the batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a regime with its settings reads, does and needs in a run; of several together, `a | b`."""

    reads: PublishSchema = REWARDS_ONLY
    """The optional fields of a rollout that a policy reads from its peers."""
    advantages: Treatment = "keeps"
    """What it may do to the learner's: "keeps" them, "adjusts" the view's (also those of a preceding regime), "sets"
    its own from one reward per rollout, or "builds the batch", own and extra rows under advantages of their own."""
    moves: bool = True
    """Whether it does so with these settings."""
    weighs_groups: bool = False
    """Whether its advantages include the weight of dropped groups, so that nothing may change them later."""
    shares: bool = True
    """False for the baseline, which plans nothing."""
    peers: bool = True
    """Whether a round waits for the peers (a pool of one is then rejected)."""
    same_prompts: bool = True
    """Whether all policies must see the same prompts in a round."""
    late: bool = False
    """Whether it can use a peer's round after its own round of that number (`exchange.staleness`). It then plans again
    with that peer's rollouts, without the prompts that already gave nll rows; rows and state of that plan are used."""
    guides: bool = False
    """Whether `prefixes` gives upcoming rollouts a beginning."""
    all_texts: bool = False
    """Whether a plan encodes every text of the peers; it is then begun while slower peers are awaited."""
    samples: bool = False
    """Whether `requests` may ask for rollouts: not with data that is no `Dataset`."""
    ratios: bool = False
    """Whether it weighs rows by the ratio to what the learner itself sampled with."""
    nll_rows: bool = False
    """Whether it may add rows under NLL, which is taken at temperature 1: at another one they need whole logits."""
    runs: bool = False
    """Whether the texts that it reads may be runs with tools."""
    renders_runs: bool = False
    """Whether a peer's run with tools becomes the learner's tokens: its chat template must keep it, and a file's run
    must be confirmed before."""
    selections: bool = False
    """Whether it can use a source whose texts are a selection, on some prompts."""
    source: bool = False
    """Whether it cannot run without a source."""
    scores: bool = False
    """Whether it reads how a source scores the learner's own texts, and gives their tokens advantages of their own
    (`Plan.token_advantages`)."""
    everywhere: bool = False
    """Whether it wants a source's texts on all prompts, whatever the rewards (`unsolved`)."""

    @property
    def changes_advantages(self) -> bool:
        """Return whether plans have advantages of their own with these settings."""
        return self.advantages != "keeps" and self.moves

    def __or__(self, other: Needs) -> Needs:
        """Return those of two regimes combined: what the view's advantages are replaced by is the first's that does so;
        anything else holds for both if it does for one, but that late rounds and other prompts suit it."""
        both = {name: getattr(self, name) or getattr(other, name) for name in _FOR_ONE}
        return Needs(
            reads=PublishSchema.union([self.reads, other.reads]),
            advantages=other.advantages if self.advantages == "keeps" else self.advantages,
            moves=self.changes_advantages or other.changes_advantages,
            late=self.late and other.late,
            same_prompts=self.same_prompts and other.same_prompts,
            **both,
        )


#: asked of a regime's defaults, of combinations and before a recipe is resolved: no setting may change them
WHATEVER_THE_SETTINGS = ("advantages", "weighs_groups", "shares", "peers", "guides", "selections")
_FOR_ONE = (
    *("weighs_groups", "shares", "peers", "guides", "all_texts", "samples", "ratios", "nll_rows"),
    *("runs", "renders_runs", "selections", "source", "scores", "everywhere"),
)
