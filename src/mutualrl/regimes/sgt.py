"""Success-Gated Transfer (SGT): if all of the learner's rollouts fail and a peer succeeds, learn the peer's success.

Pure functions: rewards in, rows out. Source: paper, Section "Regime 3: Outcome-level experience sharing" and Appendix
"Implementation details for Success-Gated Transfer". Departure: one row for each gated prompt (equivalent to the
appendix's per-example masks, since all rollouts of a gated prompt failed).

Extensions of the paper: `teacher: gold` and `teacher: own` are controls (the same gate; the data's solution, or the
learner's own later success, in place of the peer's); `memory` includes peers' successes of earlier rounds;
`gate: relative` is for graded rewards; `pick: fit` selects the success with the lowest NLL under the learner (GRAPE,
arXiv 2502.04194, finds that fit beats strength).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from mutualrl.records import PublishSchema
from mutualrl.regimes.round import ExtraRow, Needs, PeerRound, Plan, RoundView, RowSource, RowStatistics
from mutualrl.regimes.spec import SUCCESS_ABOVE, Metric, RegimeSettings, RegimeSpec
from mutualrl.seeds import seeded


class SGTSettings(RegimeSettings):
    """Settings of SGT; the defaults are the paper's (Section "Hyperparameters")."""

    weight: float = Field(0.1, ge=0, description="lambda, the weight of the NLL added to the GRPO loss")
    success_above: float = Field(SUCCESS_ABOVE, description="a rollout with a reward above this is a success")
    failure_below: float = Field(0.2, description="a rollout with a reward below this is a failure")
    gate: Literal["all", "any", "relative"] = Field(
        "all", description="own rollouts that must fail; relative: a peer's reward exceeds all own rewards by `margin`"
    )
    margin: float = Field(0.0, ge=0, description="amount by which a peer must exceed the learner's best reward")
    pick: Literal["uniform", "shortest", "fit", "first"] = Field(
        "uniform", description="choice of the success; fit: the one with the lowest NLL under the learner"
    )
    teacher: Literal["peer", "gold", "own"] = Field(
        "peer",
        description="source of the text: a peer's success, or (controls) the solution in the data, or the learner's "
        "own success within `memory` rounds after the gate opened",
    )
    solution: str = Field("solution", description="data column with the solutions; may be set per policy")
    memory: int = Field(0, ge=0, description="rounds for which a peer's success on a prompt is remembered")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay of the weight")
    schedule_rounds: int | None = Field(None, ge=1, description="rounds after which the weight is 0")
    reduce: Literal["mean", "sum"] = Field(
        "mean", description="reduction of a pair's NLL over its tokens (sum in the paper's equation)"
    )
    max_uses_per_prompt: int | None = Field(None, ge=1, description="maximum number of pairs per prompt over the run")
    normalize: Literal["pairs", "prompts"] = Field(
        "pairs",
        description="unit that the NLL is averaged over; only with prompts does the gate rate bound SGT's perturbation",
    )

    @model_validator(mode="after")
    def _consistent(self) -> SGTSettings:
        if self.failure_below > self.success_above:
            raise ValueError(
                f"failure_below ({self.failure_below}) must not exceed success_above ({self.success_above})"
            )
        if self.schedule != "constant" and self.schedule_rounds is None:
            raise ValueError(f"schedule: {self.schedule} expects schedule_rounds, the rounds after which it ends")
        if self.teacher == "own" and self.memory == 0:
            raise ValueError("teacher: own expects memory of 1 or more: the rounds in which the learner may succeed")
        if self.teacher == "own" and self.pick == "fit":
            raise ValueError("teacher: own has no candidates to compare; expected pick: uniform, shortest or first")
        if self.teacher == "own" and self.gate == "relative":
            raise ValueError("teacher: own trains on rewards above success_above; expected gate: all or any")
        return self


GOLD = "(gold)"  # no policy can have this name


@dataclass(frozen=True, slots=True)
class Candidate:
    """Success on a prompt: its source (policy, rollout, round; None: this one) and its text. `ended`: it was not
    truncated. The policy of the data's solution is GOLD."""

    policy: str
    rollout: int
    text: str
    ended: bool
    round: int | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """Candidate in the learner's vocabulary."""

    candidate: Candidate
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gated:
    """Prompts whose gate opened, sorted (`opened`), those with candidates in the learner's vocabulary and these
    candidates (`fitted`), and counts."""

    prompts: int
    opened: tuple[str, ...]
    unencodable: int
    spent: int
    fitted: tuple[tuple[str, tuple[Fitted, ...]], ...]

    @property
    def gated(self) -> int:
        """Return the number of prompts whose gate opened."""
        return len(self.opened)


@dataclass(frozen=True, slots=True)
class Selection:
    """Pairs of a round: prompt and drawn candidate of each, sorted by prompt, and the gate's counts."""

    pairs: tuple[tuple[str, Fitted], ...]
    prompts: int
    gated: int
    unencodable: int
    spent: int


def gate(own_rewards_G: Sequence[float], peer_rewards: Sequence[float], settings: SGTSettings) -> bool:
    """Return whether a prompt is rescued: own rollouts below `failure_below` (all of them, or any with `gate: any`)
    and at least one peer rollout above `success_above`; with `gate: relative`, a peer rollout above every own one by
    more than `margin`. NaN rewards are neither failures nor successes."""
    above = bar(own_rewards_G, settings)
    if settings.gate != "relative":
        failures = [reward < settings.failure_below for reward in own_rewards_G]
        failed = all(failures) if settings.gate == "all" else any(failures)
        if not failures or not failed:
            return False
    return any(reward > above for reward in peer_rewards)


def bar(own_rewards_G: Sequence[float], settings: SGTSettings) -> float:
    """Return the reward above which a peer's rollout may be learnt: infinite if `gate: relative` has no own reward to
    compare with."""
    if settings.gate != "relative":
        return settings.success_above
    best = max((reward for reward in own_rewards_G if not math.isnan(reward)), default=math.inf)
    return best + settings.margin


def weight_at(settings: SGTSettings, round_index: int) -> float:
    """Return the weight of the NLL in a round: `weight`, constant or decayed to 0 over `schedule_rounds`, linearly or
    as half a cosine."""
    if settings.schedule == "constant" or settings.schedule_rounds is None:
        return settings.weight
    progress = min(1.0, round_index / settings.schedule_rounds)
    if settings.schedule == "linear":
        return settings.weight * (1 - progress)
    return settings.weight * 0.5 * (1 + math.cos(math.pi * progress))


def draw_candidate(
    fitted: Sequence[Fitted],
    settings: SGTSettings,
    *,
    run_seed: int,
    round_index: int,
    prompt_id: str,
    learner: str,
    nll: Mapping[tuple[int, ...], float] | None = None,
) -> Fitted:
    """Return one success of the multiset sorted by (policy, round, rollout): a uniform draw, the shortest in tokens,
    the first, or the one with the lowest `nll` (by token ids).

    The draw depends only on (run seed, round, prompt, learner). Raises ValueError if there is none.
    """
    if not fitted:
        raise ValueError("no candidate to draw from")
    ordered = sorted(fitted, key=lambda f: (f.candidate.policy, f.candidate.round or 0, f.candidate.rollout))
    if settings.pick == "shortest":
        return min(ordered, key=lambda f: len(f.ids))
    if settings.pick == "fit":
        scores = nll or {}
        return min(ordered, key=lambda f: scores[f.ids])
    if settings.pick == "first":
        return ordered[0]
    index = seeded(run_seed, round_index, prompt_id, learner).integers(len(ordered))
    return ordered[int(index)]


def gated_prompts(
    own: Mapping[str, Sequence[float]],
    peer_rewards: Mapping[str, Sequence[float]],
    successes: Callable[[str], Sequence[Candidate]],
    fit: Callable[[Candidate], tuple[int, ...] | None],
    settings: SGTSettings,
    *,
    uses: Mapping[str, int],
) -> Gated:
    """Gate every prompt of a round and encode the successes on each gated one in the learner's vocabulary.

    `own` and `peer_rewards` map a prompt id to its rewards (the learner's group; all peers' rollouts together).
    `successes(prompt_id)` returns the successes, called for gated prompts only; `fit` returns one as the learner's ids,
    or None if it is too long or cannot be encoded (removed before the draw). `uses` counts the pairs of each prompt so
    far; a prompt at its cap is skipped.
    """
    fitted_prompts: list[tuple[str, tuple[Fitted, ...]]] = []
    opened: list[str] = []
    unencodable = spent = 0
    for prompt_id in sorted(own):
        if not gate(own[prompt_id], peer_rewards.get(prompt_id, ()), settings):
            continue
        opened.append(prompt_id)
        if settings.max_uses_per_prompt is not None and uses.get(prompt_id, 0) >= settings.max_uses_per_prompt:
            spent += 1
            continue
        candidates = successes(prompt_id)
        fitted = tuple(Fitted(c, ids) for c in candidates if (ids := fit(c)))
        unencodable += len(candidates) - len(fitted)
        if fitted:
            fitted_prompts.append((prompt_id, fitted))
    return Gated(len(own), tuple(opened), unencodable, spent, tuple(fitted_prompts))


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
    """Gate every prompt of a round and draw a success for each rescued one; see `gated_prompts`."""
    gated = gated_prompts(own, peer_rewards, successes, fit, settings, uses=uses)
    return drawn(gated, settings, run_seed=run_seed, round_index=round_index, learner=learner)


def drawn(
    found: Gated,
    settings: SGTSettings,
    *,
    run_seed: int,
    round_index: int,
    learner: str,
    nll: Mapping[str, Mapping[tuple[int, ...], float]] | None = None,
) -> Selection:
    """Draw a success for each gated prompt. `nll`: by prompt and token ids, for `pick: fit`."""
    pairs = []
    for prompt_id, fitted in found.fitted:
        pair = draw_candidate(
            fitted,
            settings,
            run_seed=run_seed,
            round_index=round_index,
            prompt_id=prompt_id,
            learner=learner,
            nll=None if nll is None else nll[prompt_id],
        )
        pairs.append((prompt_id, pair))
    return Selection(tuple(pairs), found.prompts, found.gated, found.unencodable, found.spent)


# ---- memory


#: remembered success: policy, rollout, round, reward, text, ended
Remembered = list[Any]


@dataclass(frozen=True, slots=True)
class AvailableSuccesses:
    """Successes available to a learner in a round, by prompt: of this round and remembered ones, with the rewards that
    open the gate."""

    rewards: Mapping[str, Sequence[float]]
    candidates: Callable[[str, float], list[Candidate]]


def remembered(view: RoundView, settings: SGTSettings) -> dict[str, list[Remembered]]:
    """Return the learner's memory at the start of a round: each peer's newest success on a prompt, from the last
    `memory` rounds."""
    before: Mapping[str, list[Remembered]] = view.state.get("memory", {})
    recent = {
        prompt_id: [entry for entry in entries if entry[2] >= view.round - settings.memory]
        for prompt_id, entries in before.items()
    }
    return {prompt_id: entries for prompt_id, entries in recent.items() if entries}


def memory_after(view: RoundView, settings: SGTSettings) -> dict[str, list[Remembered]]:
    """Return the memory with this round's successes: the best of each peer on a prompt, the first among equals."""
    memory = {prompt_id: list(entries) for prompt_id, entries in remembered(view, settings).items()}
    for name, peer in sorted(view.peers.items()):
        columns = [peer.column(c) for c in ("prompt_id", "rollout", "reward", "ended")]
        texts = peer.texts(range(len(columns[0])))
        best: dict[str, Remembered] = {}
        for (prompt_id, rollout, reward, ended), text in zip(zip(*columns, strict=True), texts, strict=True):
            eligible = text is not None and not math.isnan(reward)
            eligible = eligible and (settings.gate == "relative" or reward > settings.success_above)
            if eligible and (prompt_id not in best or reward > best[prompt_id][3]):
                best[prompt_id] = [name, rollout, view.round, reward, text, ended]
        for prompt_id, entry in best.items():
            others = [other for other in memory.get(prompt_id, []) if other[0] != name]
            memory[prompt_id] = sorted([*others, entry], key=lambda success: (success[0], success[2]))
    return memory


def supply(view: RoundView, settings: SGTSettings) -> AvailableSuccesses:
    """Return the peers' successes of this round, and the remembered ones."""
    rewards: dict[str, list[float]] = {}
    rows: dict[str, dict[str, list[int]]] = {}
    for name, peer in sorted(view.peers.items()):
        rows[name] = {}
        for row, (prompt_id, reward) in enumerate(zip(peer.column("prompt_id"), peer.column("reward"), strict=True)):
            rewards.setdefault(prompt_id, []).append(reward)
            rows[name].setdefault(prompt_id, []).append(row)
    memory = remembered(view, settings) if settings.memory and settings.teacher == "peer" else {}
    for prompt_id, entries in memory.items():
        rewards.setdefault(prompt_id, []).extend(entry[3] for entry in entries)

    def candidates(prompt_id: str, above: float) -> list[Candidate]:
        result: list[Candidate] = []
        for name, by_id in rows.items():
            result += _successes(name, view.peers[name], by_id.get(prompt_id, []), above)
        for name, rollout, round_index, reward, text, ended in memory.get(prompt_id, []):
            if reward > above:
                result.append(Candidate(name, rollout, text, ended, round_index))
        return result

    return AvailableSuccesses(rewards, candidates)


def _successes(name: str, peer: PeerRound, rows: Sequence[int], above: float) -> list[Candidate]:
    """Return a peer's rollouts on a prompt (`rows`) with a reward above a bar."""
    rewards, rollouts, ended = peer.column("reward"), peer.column("rollout"), peer.column("ended")
    successful = [row for row in rows if rewards[row] > above]
    return [
        Candidate(name, rollouts[row], text, ended[row])
        for row, text in zip(successful, peer.texts(successful), strict=True)
        if text is not None
    ]


# ---- a round


def _gated(view: RoundView, settings: SGTSettings) -> Gated:
    """Return the gated prompts of a round with their candidates."""
    own_groups, supplied = view.own_groups(), supply(view, settings)

    def successes(prompt_id: str) -> list[Candidate]:
        if settings.teacher == "gold":
            text = view.solutions.get(prompt_id)
            return [] if text is None else [Candidate(GOLD, 0, text, ended=True)]
        return supplied.candidates(prompt_id, bar(own_groups[prompt_id], settings))

    def fit(candidate: Candidate) -> tuple[int, ...] | None:
        return view.transfer.to_learner_ids(candidate.text, candidate.ended)

    uses: Mapping[str, int] = view.state.get("uses", {})
    return gated_prompts(own_groups, supplied.rewards, successes, fit, settings, uses=uses)


def needs(view: RoundView, settings: RegimeSettings) -> Needs:
    """Return the candidates that `pick: fit` compares, for prompts with more than one."""
    assert isinstance(settings, SGTSettings)
    if settings.pick != "fit" or settings.teacher != "peer" or weight_at(settings, view.round) == 0:
        return Needs()
    return Needs(nll=tuple(_compared(_gated(view, settings))))


def _compared(gated: Gated) -> list[tuple[str, tuple[int, ...]]]:
    passages = []
    for prompt_id, fitted in gated.fitted:
        distinct = sorted({candidate.ids for candidate in fitted})
        if len(distinct) > 1:
            passages += [(prompt_id, ids) for ids in distinct]
    return passages


def plan(view: RoundView, settings: RegimeSettings) -> Plan:
    """Return the pairs of a round: gate, draw, retokenize. Texts are decoded only for gated prompts."""
    assert isinstance(settings, SGTSettings)
    gated = _gated(view, settings)
    if weight_at(settings, view.round) == 0 and settings.weight > 0:  # the schedule has ended
        return Plan(metrics=_metrics(gated, ()))
    if settings.teacher == "own":
        return _own_plan(view, settings, gated)
    nll: dict[str, dict[tuple[int, ...], float]] = {prompt_id: {} for prompt_id, _ in gated.fitted}
    if settings.pick == "fit":
        for (prompt_id, ids), value in zip(_compared(gated), view.answers.nll, strict=True):
            nll[prompt_id][ids] = value
        for prompt_id, fitted in gated.fitted:
            if not nll[prompt_id]:  # only one text
                nll[prompt_id] = {fitted[0].ids: 0.0}
    selection = drawn(gated, settings, run_seed=view.run_seed, round_index=view.round, learner=view.learner, nll=nll)
    rows = tuple(_row(prompt_id, pair, settings, view.round) for prompt_id, pair in selection.pairs)
    state: dict[str, Any] = {}
    if settings.max_uses_per_prompt is not None:
        state["uses"] = _counted(view.state.get("uses", {}), rows)
    if settings.memory and settings.teacher == "peer":
        state["memory"] = memory_after(view, settings)
    metrics = _metrics(gated, rows)
    if settings.memory:
        metrics["sgt/remembered"] = float(sum(row.source.round != view.round for row in rows))
    return Plan(rows=rows, metrics=metrics, state=state or None)


def _own_plan(view: RoundView, settings: SGTSettings, gated: Gated) -> Plan:
    """Return pairs of the learner's own successes on prompts whose gate opened in the last `memory` rounds, one per
    opening."""
    pending: dict[str, int] = {
        prompt_id: opened
        for prompt_id, opened in view.state.get("open", {}).items()
        if opened >= view.round - settings.memory
    }
    uses: Mapping[str, int] = view.state.get("uses", {})
    cap = math.inf if settings.max_uses_per_prompt is None else settings.max_uses_per_prompt
    rows: list[ExtraRow] = []
    for prompt_id in sorted(pending):
        fitted = []
        if uses.get(prompt_id, 0) >= cap:
            continue
        for rollout in view.rollouts:
            own_success = rollout.reward > settings.success_above and rollout.token_ids and not rollout.prefix
            if rollout.prompt_id == prompt_id and own_success:
                assert rollout.token_ids is not None
                text = view.transfer.text_of(rollout.token_ids)
                candidate = Candidate(view.learner, rollout.index, text, rollout.ended)
                fitted.append(Fitted(candidate, tuple(rollout.token_ids)))
        if fitted:
            pair = draw_candidate(
                fitted,
                settings,
                run_seed=view.run_seed,
                round_index=view.round,
                prompt_id=prompt_id,
                learner=view.learner,
            )
            rows.append(_row(prompt_id, pair, settings, view.round))
    learnt = {row.prompt_id for row in rows}
    pending = {prompt_id: opened for prompt_id, opened in pending.items() if prompt_id not in learnt}
    pending |= {prompt_id: view.round for prompt_id in gated.opened if prompt_id not in learnt}
    state: dict[str, Any] = {"open": pending}
    if settings.max_uses_per_prompt is not None:
        state["uses"] = _counted(uses, rows)
    return Plan(rows=tuple(rows), metrics=_metrics(gated, rows), state=state)


def _metrics(gated: Gated, rows: Sequence[ExtraRow]) -> dict[str, float]:
    return {
        "sgt/gate_rate": gated.gated / max(gated.prompts, 1),
        "sgt/pairs": float(len(rows)),
        "sgt/unfit": float(gated.unencodable),
        "sgt/extra_tokens": float(sum(len(row.token_ids) for row in rows)),
    }


def _row(prompt_id: str, pair: Fitted, settings: SGTSettings, round_index: int) -> ExtraRow:
    candidate = pair.candidate
    origin = round_index if candidate.round is None else candidate.round
    return ExtraRow(
        prompt_id=prompt_id,
        source=RowSource(candidate.policy, candidate.rollout, origin),
        token_ids=pair.ids,
        loss="nll",
        weight=weight_at(settings, round_index),
        mean="rows" if settings.normalize == "pairs" else "prompts",
        reduce=settings.reduce,
        text=candidate.text,
    )


def _counted(uses: Mapping[str, int], rows: Sequence[ExtraRow]) -> dict[str, int]:
    counts = dict(uses)
    for row in rows:
        counts[row.prompt_id] = counts.get(row.prompt_id, 0) + 1
    return counts


def _settings(settings: RegimeSettings) -> SGTSettings:
    assert isinstance(settings, SGTSettings)
    return settings


def publishes(settings: SGTSettings) -> PublishSchema:
    """Return the fields that peers read: the texts of successes; with another teacher, only the rewards. With
    `gate: relative` any text may be a success."""
    if settings.teacher != "peer":
        return PublishSchema()
    above = -math.inf if settings.gate == "relative" else settings.success_above
    return PublishSchema.of("text", text_above=above)


def row_metrics(statistics: RowStatistics) -> dict[str, float]:
    """Return the mean NLL per token of the pairs."""
    return {} if statistics.nll is None else {"sgt/nll": statistics.nll}


SPEC = RegimeSpec(
    name="sgt",
    summary="where the learner fails entirely, a peer's verified success joins the loss",
    settings=SGTSettings,
    publishes=publishes,
    plan=plan,
    needs=needs,
    late=lambda settings: _settings(settings).teacher != "own",
    solution_column=lambda settings: _settings(settings).solution if _settings(settings).teacher == "gold" else None,
    metrics=(
        Metric(
            "sgt/gate_rate",
            "fraction",
            "prompts whose gate opened; bounds SGT's expected perturbation under `normalize: prompts`, not `pairs`",
            role="gate_rate",
        ),
        Metric("sgt/pairs", "rows", "pairs that joined the loss", role="rescues"),
        Metric("sgt/unfit", "rows", "successes that the learner cannot encode"),
        Metric("sgt/extra_tokens", "tokens", "tokens of the pairs"),
        Metric("sgt/remembered", "rows", "pairs with a success of an earlier round"),
        Metric("sgt/nll", "nats per token", "mean NLL of the pairs"),
    ),
    row_metrics=row_metrics,
    level="outcome",
    acts_when={
        "pick": ("teacher", ("peer", "own")),
        "memory": ("teacher", ("peer", "own")),
        "margin": ("gate", "relative"),
        "solution": ("teacher", "gold"),
        "failure_below": ("gate", ("all", "any")),
        "success_above": ("gate", ("all", "any")),
        "schedule_rounds": ("schedule", ("linear", "cosine")),
    },
    variants={"teacher": ("gold", "own")},
)
