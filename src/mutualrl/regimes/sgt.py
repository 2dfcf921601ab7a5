"""Success-Gated Transfer (SGT): where a learner fails entirely and a peer succeeded, learn the peer's success.

Pure functions: rewards in, pairs out; token log-probs in, a loss out. Source: paper, Section "Regime 3:
Outcome-level experience sharing" and Appendix "Implementation details for Success-Gated Transfer".
Departure: one pair for each gated prompt (the appendix's per-example masks come to the same, since all
rollouts of a gated prompt failed). `teacher: gold` is a control of ours: the same gate, and the data's own solution
in place of the peer's, which tells what a peer gives from what any right text would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from mutualrl.regimes.base import Pair, PeerRound, RegimeSettings, RegimeSpec, RoundPlan, RoundView, seeded

if TYPE_CHECKING:
    from torch import Tensor


class SGTSettings(RegimeSettings):
    """Settings of SGT; the defaults are the paper's (Section "Hyperparameters")."""

    weight: float = Field(0.1, ge=0, description="lambda, the weight of the NLL beside the GRPO loss")
    success_above: float = Field(0.8, description="a rollout rewarded above this is a success")
    failure_below: float = Field(0.2, description="a rollout rewarded below this is a failure")
    gate: Literal["all", "any"] = Field("all", description="how many own rollouts must have failed")
    pick: Literal["uniform", "shortest"] = Field("uniform", description="which peer success is drawn")
    teacher: Literal["peer", "gold"] = Field(
        "peer", description="whose text is learnt: a peer's success, or (a control) the solution in the data"
    )
    max_uses_per_prompt: int | None = Field(None, ge=1, description="pairs a prompt may give over the run")
    normalize: Literal["pairs", "prompts"] = Field("pairs", description="what the mean NLL is a mean over")

    @model_validator(mode="after")
    def _ordered(self) -> SGTSettings:
        if self.failure_below > self.success_above:
            raise ValueError(
                f"failure_below ({self.failure_below}) must not exceed success_above ({self.success_above})"
            )
        return self


GOLD = "(gold)"  # no policy can have this name


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer's success on a prompt: where it is (policy, rollout) and its text. `ended`: it was not truncated. Of the
    data's own solution the policy is GOLD."""

    policy: str
    rollout: int
    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Fitted:
    """A candidate in the learner's vocabulary."""

    candidate: Candidate
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """What the gate gave in a round: the pairs, sorted by prompt, and the counts around them."""

    pairs: tuple[Pair, ...]
    prompts: int
    gated: int
    unfit: int
    spent: int


def gate(own_rewards_G: Sequence[float], peer_rewards: Sequence[float], settings: SGTSettings) -> bool:
    """Whether a prompt is rescued: own rollouts below `failure_below` (all of them, or any with `gate: any`)
    and at least one peer rollout above `success_above`. NaN rewards are neither."""
    failures = [reward < settings.failure_below for reward in own_rewards_G]
    failed = all(failures) if settings.gate == "all" else any(failures)
    return bool(failures) and failed and any(reward > settings.success_above for reward in peer_rewards)


def draw(
    fitted: Sequence[Fitted], settings: SGTSettings, *, run_seed: int, round_: int, prompt_id: str, learner: str
) -> Fitted:
    """One peer success: uniform over the multiset sorted by (policy, rollout), or the shortest in tokens.

    The draw depends on (run seed, round, prompt, learner) alone. Raises ValueError when there is none.
    """
    if not fitted:
        raise ValueError("no candidate to draw from")
    ordered = sorted(fitted, key=lambda f: (f.candidate.policy, f.candidate.rollout))
    if settings.pick == "shortest":
        return min(ordered, key=lambda f: len(f.ids))
    index = seeded(run_seed, round_, prompt_id, learner).integers(len(ordered))
    return ordered[int(index)]


def select(
    own: Mapping[str, Sequence[float]],
    peer_rewards: Mapping[str, Sequence[float]],
    successes: Callable[[str], Sequence[Candidate]],
    fit: Callable[[Candidate], tuple[int, ...] | None],
    settings: SGTSettings,
    *,
    run_seed: int,
    round_: int,
    learner: str,
    uses: Mapping[str, int],
) -> Selection:
    """Gate every prompt of a round and draw a peer success for each rescued one.

    `own` and `peer_rewards` map a prompt id to its rewards (the learner's group; all peers' rollouts
    together). `successes(prompt_id)` gives the peers' successes, asked for gated prompts only; `fit` turns
    one into the learner's ids, or None when it is too long or cannot be carried (taken out before the
    draw). `uses` counts the pairs each prompt has given so far; a prompt at its cap is passed over.
    """
    pairs: list[Pair] = []
    gated = unfit = spent = 0
    for prompt_id in sorted(own):
        if not gate(own[prompt_id], peer_rewards.get(prompt_id, ()), settings):
            continue
        gated += 1
        if settings.max_uses_per_prompt is not None and uses.get(prompt_id, 0) >= settings.max_uses_per_prompt:
            spent += 1
            continue
        candidates = successes(prompt_id)
        fitted = [Fitted(c, ids) for c in candidates if (ids := fit(c))]
        unfit += len(candidates) - len(fitted)
        if fitted:
            drawn = draw(fitted, settings, run_seed=run_seed, round_=round_, prompt_id=prompt_id, learner=learner)
            candidate = drawn.candidate
            pairs.append(Pair(prompt_id, candidate.policy, candidate.rollout, candidate.text, drawn.ids))
    return Selection(tuple(pairs), len(own), gated, unfit, spent)


def pair_nll(logps_P_T: Tensor, mask_P_T: Tensor) -> Tensor:
    """Per-token mean negative log-likelihood of each pair, shape (pairs,).

    Selection, not multiplication, takes the masked tokens out: a -inf there cannot become NaN. A row
    without tokens gives 0, with gradient 0.
    """
    kept = logps_P_T.masked_fill(~mask_P_T, 0.0)
    return -kept.sum(dim=1) / mask_P_T.sum(dim=1).clamp(min=1)


def sgt_loss(nll_P: Tensor, *, weight: float, count: int, ranks: int) -> Tensor:
    """This micro-batch's share of L_SGT = weight * (1 / count) * sum over the step's pairs of their NLL.

    `count` is the number of pairs (or, with `normalize: prompts`, of prompts) of the optimizer step over
    all ranks and micro-batches. Gradients are averaged over ranks and summed over micro-batches, hence the
    factor `ranks` and no other.
    """
    return nll_P.sum() * (weight * ranks / max(count, 1))


def plan(view: RoundView, settings: RegimeSettings) -> RoundPlan:
    """The pairs of a round: gate, draw, retokenise. Texts are decoded for gated prompts alone."""
    chosen = _settings(settings)
    rows_of = {name: _successes(peer, chosen.success_above) for name, peer in sorted(view.peers.items())}
    peer_rewards: dict[str, list[float]] = {}
    for peer in view.peers.values():
        for prompt_id, reward in zip(peer.column("prompt_id"), peer.column("reward"), strict=True):
            peer_rewards.setdefault(prompt_id, []).append(reward)

    def candidates(prompt_id: str) -> list[Candidate]:
        if chosen.teacher == "gold":
            text = view.solutions.get(prompt_id)
            return [] if text is None else [Candidate(GOLD, 0, text, ended=True)]
        return [
            candidate
            for name, rows in rows_of.items()
            for candidate in _candidates(name, view.peers[name], rows.get(prompt_id, []))
        ]

    selection = select(
        view.own_groups(),
        peer_rewards,
        candidates,
        lambda candidate: view.fit(candidate.text, candidate.ended),
        chosen,
        run_seed=view.run_seed,
        round_=view.round,
        learner=view.learner,
        uses=view.uses,
    )
    metrics = {
        "sgt/gate_rate": selection.gated / max(selection.prompts, 1),
        "sgt/pairs": float(len(selection.pairs)),
        "sgt/unfit": float(selection.unfit),
        "sgt/extra_tokens": float(sum(len(pair.ids) for pair in selection.pairs)),
    }
    return RoundPlan(pairs=selection.pairs, weight=chosen.weight, normalize=chosen.normalize, metrics=metrics)


def _successes(peer: PeerRound, above: float) -> dict[str, list[int]]:
    """Rows of a peer's successes by prompt."""
    rows: dict[str, list[int]] = {}
    for row, (prompt_id, reward) in enumerate(zip(peer.column("prompt_id"), peer.column("reward"), strict=True)):
        if reward > above:
            rows.setdefault(prompt_id, []).append(row)
    return rows


def _candidates(name: str, peer: PeerRound, rows: list[int]) -> list[Candidate]:
    rollouts, ended = peer.column("rollout"), peer.column("ended")
    return [
        Candidate(name, rollouts[row], text, ended[row])
        for row, text in zip(rows, peer.texts(rows), strict=True)
        if text is not None
    ]


def _settings(settings: RegimeSettings) -> SGTSettings:
    assert isinstance(settings, SGTSettings)
    return settings


SPEC = RegimeSpec(
    name="sgt",
    summary="where the learner fails entirely, a peer's verified success joins the loss",
    settings=SGTSettings,
    publishes=lambda settings: frozenset({"y_text"}) if _settings(settings).teacher == "peer" else frozenset(),
    text_above=lambda settings: _settings(settings).success_above,
    reads_peers=True,
    plan=plan,
    needs_solutions=lambda settings: _settings(settings).teacher == "gold",
)
