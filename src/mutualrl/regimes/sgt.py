"""Success-Gated Transfer (SGT): where a learner fails entirely and a peer succeeded, learn the peer's success.

Pure functions: rewards in, rows out. Source: paper, Section "Regime 3:
Outcome-level experience sharing" and Appendix "Implementation details for Success-Gated Transfer".
Departure: one row for each gated prompt (the appendix's per-example masks come to the same, since all
rollouts of a gated prompt failed). `teacher: gold` is a control of ours: the same gate, and the data's own solution
in place of the peer's, which tells what a peer gives from what any correct text would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from mutualrl.records import PublishSchema
from mutualrl.regimes.round import ExtraRow, PeerRound, Plan, RoundView, RowSource, RowStatistics
from mutualrl.regimes.spec import SUCCESS_ABOVE, Metric, RegimeSettings, RegimeSpec
from mutualrl.seeds import seeded


class SGTSettings(RegimeSettings):
    """Settings of SGT; the defaults are the paper's (Section "Hyperparameters")."""

    weight: float = Field(0.1, ge=0, description="lambda, the weight of the NLL beside the GRPO loss")
    success_above: float = Field(SUCCESS_ABOVE, description="a rollout rewarded above this is a success")
    failure_below: float = Field(0.2, description="a rollout rewarded below this is a failure")
    gate: Literal["all", "any"] = Field("all", description="how many own rollouts must have failed")
    pick: Literal["uniform", "shortest"] = Field("uniform", description="which peer success is drawn")
    teacher: Literal["peer", "gold"] = Field(
        "peer", description="whose text is learnt: a peer's success, or (a control) the solution in the data"
    )
    max_uses_per_prompt: int | None = Field(None, ge=1, description="pairs per prompt may give over the run")
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
    """Peer's success on a prompt: where it is (policy, rollout) and its text. `ended`: it was not truncated. Of the
    data's own solution the policy is GOLD."""

    policy: str
    rollout: int
    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Fitted:
    """Candidate in the learner's vocabulary."""

    candidate: Candidate
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of the gate in a round: prompt and draw of each pair, sorted by prompt, and the counts around them."""

    pairs: tuple[tuple[str, Fitted], ...]
    prompts: int
    gated: int
    unencodable: int
    spent: int


def gate(own_rewards_G: Sequence[float], peer_rewards: Sequence[float], settings: SGTSettings) -> bool:
    """Return whether a prompt is rescued: own rollouts below `failure_below` (all of them, or any with `gate: any`)
    and at least one peer rollout above `success_above`. NaN rewards are neither."""
    failures = [reward < settings.failure_below for reward in own_rewards_G]
    failed = all(failures) if settings.gate == "all" else any(failures)
    return bool(failures) and failed and any(reward > settings.success_above for reward in peer_rewards)


def draw_candidate(
    fitted: Sequence[Fitted], settings: SGTSettings, *, run_seed: int, round_index: int, prompt_id: str, learner: str
) -> Fitted:
    """Return one peer success: uniform over the multiset sorted by (policy, rollout), or the shortest in tokens.

    The draw depends on (run seed, round, prompt, learner) alone. Raises ValueError when there is none.
    """
    if not fitted:
        raise ValueError("no candidate to draw from")
    ordered = sorted(fitted, key=lambda f: (f.candidate.policy, f.candidate.rollout))
    if settings.pick == "shortest":
        return min(ordered, key=lambda f: len(f.ids))
    index = seeded(run_seed, round_index, prompt_id, learner).integers(len(ordered))
    return ordered[int(index)]


def select(
    own: Mapping[str, Sequence[float]],
    peer_rewards: Mapping[str, Sequence[float]],
    successes: Callable[[str], Sequence[Candidate]],
    fit: Callable[[Candidate], tuple[int, ...] | None],
    settings: SGTSettings,
    *,
    run_seed: int,
    round_index: int,
    learner: str,
    uses: Mapping[str, int],
) -> Selection:
    """Gate every prompt of a round and draw a peer success for each rescued one.

    `own` and `peer_rewards` map a prompt id to its rewards (the learner's group; all peers' rollouts
    together). `successes(prompt_id)` gives the peers' successes, asked for gated prompts only; `fit` turns
    one into the learner's ids, or None when it is too long or cannot be carried (taken out before the
    draw). `uses` counts the pairs each prompt has given so far; a prompt at its cap is skipped.
    """
    pairs: list[tuple[str, Fitted]] = []
    gated = unencodable = spent = 0
    for prompt_id in sorted(own):
        if not gate(own[prompt_id], peer_rewards.get(prompt_id, ()), settings):
            continue
        gated += 1
        if settings.max_uses_per_prompt is not None and uses.get(prompt_id, 0) >= settings.max_uses_per_prompt:
            spent += 1
            continue
        candidates = successes(prompt_id)
        fitted = [Fitted(c, ids) for c in candidates if (ids := fit(c))]
        unencodable += len(candidates) - len(fitted)
        if fitted:
            drawn = draw_candidate(
                fitted, settings, run_seed=run_seed, round_index=round_index, prompt_id=prompt_id, learner=learner
            )
            pairs.append((prompt_id, drawn))
    return Selection(tuple(pairs), len(own), gated, unencodable, spent)


def plan(view: RoundView, settings: RegimeSettings) -> Plan:
    """Return the pairs of a round: gate, draw, retokenise. Texts are decoded for gated prompts alone."""
    chosen = _settings(settings)
    rows_of = {name: _successes(peer, chosen.success_above) for name, peer in sorted(view.peers.items())}
    uses: Mapping[str, int] = view.state.get("uses", {})
    selection = select(
        view.own_groups(),
        _rewards_by_prompt(view.peers.values()),
        lambda prompt_id: _candidates(view, chosen, rows_of, prompt_id),
        lambda candidate: view.transfer.to_learner_ids(candidate.text, candidate.ended),
        chosen,
        run_seed=view.run_seed,
        round_index=view.round,
        learner=view.learner,
        uses=uses,
    )
    rows = tuple(_row(prompt_id, drawn, chosen, view.round) for prompt_id, drawn in selection.pairs)
    return Plan(
        rows=rows,
        metrics={
            "sgt/gate_rate": selection.gated / max(selection.prompts, 1),
            "sgt/pairs": float(len(rows)),
            "sgt/unfit": float(selection.unencodable),
            "sgt/extra_tokens": float(sum(len(row.token_ids) for row in rows)),
        },
        state=None if chosen.max_uses_per_prompt is None else {"uses": _counted(uses, rows)},
    )


def _row(prompt_id: str, drawn: Fitted, settings: SGTSettings, round_index: int) -> ExtraRow:
    candidate = drawn.candidate
    return ExtraRow(
        prompt_id=prompt_id,
        source=RowSource(candidate.policy, candidate.rollout, round_index),
        token_ids=drawn.ids,
        loss="nll",
        weight=settings.weight,
        mean="rows" if settings.normalize == "pairs" else "prompts",
        text=candidate.text,
    )


def _counted(uses: Mapping[str, int], rows: Sequence[ExtraRow]) -> dict[str, int]:
    counts = dict(uses)
    for row in rows:
        counts[row.prompt_id] = counts.get(row.prompt_id, 0) + 1
    return counts


def _rewards_by_prompt(peers: Iterable[PeerRound]) -> dict[str, list[float]]:
    """Return the rewards of all peers' rollouts together, by prompt."""
    rewards: dict[str, list[float]] = {}
    for peer in peers:
        for prompt_id, reward in zip(peer.column("prompt_id"), peer.column("reward"), strict=True):
            rewards.setdefault(prompt_id, []).append(reward)
    return rewards


def _successes(peer: PeerRound, above: float) -> dict[str, list[int]]:
    """Return rows of a peer's successes by prompt."""
    rows: dict[str, list[int]] = {}
    for row, (prompt_id, reward) in enumerate(zip(peer.column("prompt_id"), peer.column("reward"), strict=True)):
        if reward > above:
            rows.setdefault(prompt_id, []).append(row)
    return rows


def _candidates(
    view: RoundView, settings: SGTSettings, rows_of: Mapping[str, Mapping[str, list[int]]], prompt_id: str
) -> list[Candidate]:
    """Return the successes on a prompt: the peers', in the order of their names, or the data's own solution."""
    if settings.teacher == "gold":
        text = view.solutions.get(prompt_id)
        return [] if text is None else [Candidate(GOLD, 0, text, ended=True)]
    candidates: list[Candidate] = []
    for name, successes in rows_of.items():
        peer, rows = view.peers[name], successes.get(prompt_id, [])
        rollouts, ended = peer.column("rollout"), peer.column("ended")
        for row, success in zip(rows, peer.texts(rows), strict=True):
            if success is not None:
                candidates.append(Candidate(name, rollouts[row], success, ended[row]))
    return candidates


def _settings(settings: RegimeSettings) -> SGTSettings:
    assert isinstance(settings, SGTSettings)
    return settings


def publishes(settings: SGTSettings) -> PublishSchema:
    """Return what the peers read: the texts of successes; with `teacher: gold` rewards alone open the gate."""
    return (
        PublishSchema.of("text", text_above=settings.success_above) if settings.teacher == "peer" else PublishSchema()
    )


def row_metrics(statistics: RowStatistics) -> dict[str, float]:
    """Return the mean NLL per token of the pairs."""
    return {} if statistics.nll is None else {"sgt/nll": statistics.nll}


SPEC = RegimeSpec(
    name="sgt",
    summary="where the learner fails entirely, a peer's verified success joins the loss",
    settings=SGTSettings,
    publishes=publishes,
    plan=plan,
    needs_solutions=lambda settings: _settings(settings).teacher == "gold",
    metrics=(
        Metric("sgt/gate_rate", "fraction", "prompts whose gate opened", role="gate_rate"),
        Metric("sgt/pairs", "rows", "pairs that joined the loss", role="rescues"),
        Metric("sgt/unfit", "rows", "successes that the learner cannot encode"),
        Metric("sgt/extra_tokens", "tokens", "tokens of the pairs"),
        Metric("sgt/nll", "nats per token", "mean NLL of the pairs"),
    ),
    row_metrics=row_metrics,
    level="outcome",
    acts_when={"pick": ("teacher", "peer")},
    variants={"teacher": ("gold",)},
)
