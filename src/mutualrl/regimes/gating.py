"""The gate: prompts on which the learner failed and a peer succeeded, and the success that is drawn for each.

Pure functions of rewards and texts. Source: paper, Section "Regime 3: Outcome-level experience sharing" and Appendix
"Implementation details for Success-Gated Transfer". `gate: relative` is for graded rewards; `pick: lowest_nll` selects
the success with the lowest NLL under the learner (GRAPE, arXiv 2502.04194, finds that fit beats strength).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from mutualrl.records import Rollout, plain_ids
from mutualrl.regimes.peers import peer_rollouts
from mutualrl.regimes.round import ExtraRow, RoundView, RowSource
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.seeds import seeded
from mutualrl.trajectory import Trajectory


class GateRule(Protocol):
    """When a gate opens, and which success is drawn: the settings of a regime, each as `sgt` describes it."""

    @property
    def success_above(self) -> float:
        """Return the reward above which a rollout is a success."""

    @property
    def failure_below(self) -> float:
        """Return the reward below which a rollout is a failure."""

    @property
    def gate(self) -> Literal["all", "any", "relative", "none"]:
        """Return which own rollouts must fail."""

    @property
    def margin(self) -> float:
        """Return by how much a peer must exceed the learner's best reward, under `gate: relative`."""

    @property
    def pick(self) -> Literal["uniform", "shortest", "lowest_nll"]:
        """Return the choice of the success."""

    @property
    def max_uses_per_prompt(self) -> int | None:
        """Return the maximum number of pairs per prompt over the run; None: no limit."""


class AllFail:
    """The rest of a rule whose regime sets the thresholds only: all own rollouts must fail."""

    gate: ClassVar[Literal["all"]] = "all"
    margin: ClassVar[float] = 0.0
    max_uses_per_prompt: ClassVar[None] = None


def require_ordered(rule: GateRule) -> None:
    """Raise ValueError if a reward could be a failure and a success."""
    if rule.failure_below > rule.success_above:
        raise ValueError(f"failure_below ({rule.failure_below}) must not exceed success_above ({rule.success_above})")


class DrawKey(NamedTuple):
    """What the draw of a success depends on."""

    run_seed: int
    round: int
    prompt_id: str
    learner: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """Success on a prompt: its source (policy, rollout, round; None: this one) and what was written. `ended`: it was
    not truncated."""

    policy: str
    rollout: int
    trajectory: Trajectory
    ended: bool
    round: int | None = None

    def first(self, turns: int | None) -> Trajectory | None:
        """Return it up to the model's message of this number; None for a run that would end with one that was cut
        off."""
        part = self.trajectory.first(turns)
        is_whole = len(part.messages) == len(self.trajectory.messages)
        return part if self.ended or part.is_text or not is_whole else None


@dataclass(frozen=True, slots=True)
class EncodedCandidate:
    """Candidate in the learner's vocabulary. `mask`: of a run, which tokens are the model's turns."""

    candidate: Candidate
    ids: tuple[int, ...]
    mask: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class Gated:
    """Prompts whose gate opened, sorted (`opened`), those with candidates in the learner's vocabulary and these
    candidates (`encoded`), and counts: of texts that are `unencodable`, of runs that are `unrenderable`."""

    prompts: int
    opened: tuple[str, ...]
    unencodable: int
    unrenderable: int
    spent: int
    encoded: tuple[tuple[str, tuple[EncodedCandidate, ...]], ...]

    @property
    def gated(self) -> int:
        """Return the number of prompts whose gate opened."""
        return len(self.opened)


def gate(own_rewards_G: Sequence[float], peer_rewards: Sequence[float], rule: GateRule) -> bool:
    """Return whether a prompt is rescued: own rollouts below `failure_below` (all of them, or any with `gate: any`)
    and at least one peer rollout above `success_above`; with `gate: relative`, a peer rollout above every own one by
    more than `margin`; with `gate: none` the peer's alone. NaN rewards are neither failures nor successes."""
    above = reward_to_exceed(own_rewards_G, rule)
    return failed(own_rewards_G, rule) and any(reward > above for reward in peer_rewards)


def failed(own_rewards_G: Sequence[float], rule: GateRule) -> bool:
    """Return whether the learner's part of the gate is open: a peer's success would be learnt."""
    if rule.gate not in ("all", "any"):
        return True
    failures = [reward < rule.failure_below for reward in own_rewards_G]
    return bool(failures) and (all(failures) if rule.gate == "all" else any(failures))


def unsolved_by(own: Mapping[str, Sequence[float]], rule: GateRule) -> list[str]:
    """Return the prompts, sorted, on which the learner's part of the gate is open."""
    return [prompt_id for prompt_id, rewards in sorted(own.items()) if failed(rewards, rule)]


def reward_to_exceed(own_rewards_G: Sequence[float], rule: GateRule) -> float:
    """Return the reward above which a peer's rollout may be learnt: infinite if `gate: relative` has no own reward to
    compare with."""
    if rule.gate != "relative":
        return rule.success_above
    best = max((reward for reward in own_rewards_G if not math.isnan(reward)), default=math.inf)
    return best + rule.margin


def draw_candidate(
    encoded: Sequence[EncodedCandidate],
    rule: GateRule,
    key: DrawKey,
    nll: Mapping[tuple[int, ...], float] | None = None,
) -> EncodedCandidate:
    """Return one success of the multiset sorted by (policy, round, rollout): a uniform draw, the shortest in tokens, or
    the one with the lowest `nll` (by token ids).

    Raises ValueError if there is none.
    """
    ordered = _ordered(encoded)
    if rule.pick == "shortest":
        return min(ordered, key=lambda e: len(e.ids))
    if rule.pick == "lowest_nll":
        scores = nll or {}
        return min(ordered, key=lambda e: scores[e.ids])
    return draw_uniformly(ordered, key)


def draw_uniformly(encoded: Sequence[EncodedCandidate], key: DrawKey) -> EncodedCandidate:
    """Return one candidate of the multiset sorted by (policy, round, rollout), drawn uniformly. Raises ValueError if
    there is none."""
    ordered = _ordered(encoded)
    return ordered[int(seeded(*key).integers(len(ordered)))]


def nll_row(
    prompt_id: str,
    drawn: EncodedCandidate,
    round_index: int,
    *,
    weight: float,
    mean: Literal["rows", "prompts"] = "rows",
    reduce: Literal["mean", "sum"] = "mean",
) -> ExtraRow:
    """Return a candidate as a row under NLL, in the round of this number; of a run, the model's turns are learnt."""
    candidate = drawn.candidate
    origin = round_index if candidate.round is None else candidate.round
    return ExtraRow(
        prompt_id=prompt_id,
        source=RowSource(candidate.policy, candidate.rollout, origin),
        token_ids=drawn.ids,
        loss="nll",
        weight=weight,
        mean=mean,
        reduce=reduce,
        mask=None if drawn.mask is None else np.array(drawn.mask, dtype=np.bool_),
        trajectory=candidate.trajectory,
    )


def _ordered(encoded: Sequence[EncodedCandidate]) -> list[EncodedCandidate]:
    if not encoded:
        raise ValueError("no candidate to draw from")
    return sorted(encoded, key=lambda e: (e.candidate.policy, e.candidate.round or 0, e.candidate.rollout))


def gated_prompts(
    own: Mapping[str, Sequence[float]],
    peer_rewards: Mapping[str, Sequence[float]],
    successes: Callable[[str], Sequence[Candidate]],
    encode: Callable[[Sequence[tuple[str, Candidate]]], Sequence[EncodedCandidate | None]],
    rule: GateRule,
    *,
    uses: Mapping[str, int],
) -> Gated:
    """Gate every prompt of a round and encode the successes on each gated one in the learner's vocabulary.

    `own` and `peer_rewards` map a prompt id to its rewards (the learner's group; all peers' rollouts together).
    `successes(prompt_id)` returns the successes, called for gated prompts only; `encode` returns all of them, with
    their prompts' ids, in the learner's vocabulary, None for one that is too long or cannot be encoded (removed before
    the draw). `uses` counts the pairs of each prompt so far; a prompt at its maximum is skipped.
    """
    candidates: list[tuple[str, Candidate]] = []
    opened: list[str] = []
    spent = 0
    for prompt_id in sorted(own):
        if not gate(own[prompt_id], peer_rewards.get(prompt_id, ()), rule):
            continue
        opened.append(prompt_id)
        if rule.max_uses_per_prompt is not None and uses.get(prompt_id, 0) >= rule.max_uses_per_prompt:
            spent += 1
            continue
        candidates += [(prompt_id, candidate) for candidate in successes(prompt_id)]
    by_prompt: dict[str, list[EncodedCandidate]] = {}
    unencodable = unrenderable = 0
    for (prompt_id, candidate), each in zip(candidates, encode(candidates), strict=True):
        if each is not None:
            by_prompt.setdefault(prompt_id, []).append(each)
        elif candidate.trajectory.is_text:
            unencodable += 1
        else:
            unrenderable += 1
    encoded = tuple((prompt_id, tuple(each)) for prompt_id, each in by_prompt.items())
    return Gated(len(own), tuple(opened), unencodable, unrenderable, spent, encoded)


def encode_candidates(
    view: RoundView, candidates: Sequence[tuple[str, Candidate]], turns: int | None = None
) -> list[EncodedCandidate | None]:
    """Return candidates, with their prompts' ids, in the learner's vocabulary; None for one that it cannot encode or
    use, such as a run that was cut off. `turns`: of a run, the number of the model's turns that are kept; None: all."""
    parts = [each.first(turns) for _, each in candidates]
    pairs = list(zip(candidates, parts, strict=True))
    texts = [(part.text, each.ended) for (_, each), part in pairs if part is not None and part.is_text]
    runs = [(prompt_id, part) for (prompt_id, _), part in pairs if part is not None and not part.is_text]
    ids_of_texts = iter(view.transfer.encode(texts))
    rows_of_runs = iter(view.transfer.encode_runs(runs) if runs else ())
    results: list[EncodedCandidate | None] = []
    for (_, each), part in pairs:
        row = None
        if part is not None and part.is_text:
            ids = next(ids_of_texts)
            row = None if ids is None or not len(ids) else EncodedRun(plain_ids(ids))
        elif part is not None:
            row = next(rows_of_runs)
        kept = each if part is None else replace(each, trajectory=part)
        results.append(None if row is None else EncodedCandidate(kept, row.ids, row.mask))
    return results


# ---- successes of this round and of earlier ones

#: remembered success: policy, rollout, round, reward, text, ended, and of a run its messages as JSON
Remembered = list[Any]


@dataclass(frozen=True, slots=True)
class Successes:
    """Successes available to a learner in a round, by prompt: of this round and remembered ones, with the rewards that
    open the gate. `candidates(prompt_id, above)`: those with a reward above a number."""

    rewards: Mapping[str, Sequence[float]]
    candidates: Callable[[str, float], list[Candidate]]


def successes_of(view: RoundView, memory: Mapping[str, Sequence[Remembered]] | None = None) -> Successes:
    """Return the peers' successes of this round, and remembered ones. Texts are read for candidates only."""
    memory = memory or {}
    rewards: dict[str, list[float]] = {}
    rollouts: dict[str, list[Rollout]] = {}
    for rollout in peer_rollouts(view):
        if rollout.policy in view.sources and not rollout.ended:
            continue  # an answer that was cut off is no success, whatever its reward
        rewards.setdefault(rollout.prompt_id, []).append(rollout.reward)
        rollouts.setdefault(rollout.prompt_id, []).append(rollout)
    for prompt_id, entries in memory.items():
        rewards.setdefault(prompt_id, []).extend(entry[3] for entry in entries)

    def candidates(prompt_id: str, above: float) -> list[Candidate]:
        result = []
        for rollout in rollouts.get(prompt_id, []):
            if rollout.reward > above:
                (written,) = view.peers[rollout.policy].trajectories([rollout.row])
                if written is not None:
                    result.append(Candidate(rollout.policy, rollout.index, written, rollout.ended))
        for name, index, round_index, reward, text, ended, run in memory.get(prompt_id, []):
            if reward > above and (written := Trajectory.of_stored(text, run)) is not None:
                result.append(Candidate(name, index, written, ended, round_index))
        return result

    return Successes(rewards, candidates)


def remembered(view: RoundView, rounds: int) -> dict[str, list[Remembered]]:
    """Return the learner's memory at the start of a round: each peer's newest success on a prompt, from the last
    `rounds` rounds."""
    before: Mapping[str, list[Remembered]] = view.state.get("memory", {})
    recent = {
        prompt_id: [entry for entry in entries if entry[2] >= view.round - rounds]
        for prompt_id, entries in before.items()
    }
    return {prompt_id: entries for prompt_id, entries in recent.items() if entries}


def memory_after(view: RoundView, rounds: int, rule: GateRule) -> dict[str, list[Remembered]]:
    """Return the memory with this round's successes: the best of each peer on a prompt, the first among equals."""
    memory = {prompt_id: list(entries) for prompt_id, entries in remembered(view, rounds).items()}
    texts = {name: peer.texts() for name, peer in view.peers.items()}  # most are of failures, and not parsed
    best: dict[tuple[str, str], Remembered] = {}
    for rollout in peer_rollouts(view):
        text = texts[rollout.policy][rollout.row]
        eligible = text is not None and not math.isnan(rollout.reward)
        eligible = eligible and (rule.gate == "relative" or rollout.reward > rule.success_above)
        key = rollout.policy, rollout.prompt_id
        if eligible and (key not in best or rollout.reward > best[key][3]):
            (written,) = view.peers[rollout.policy].trajectories([rollout.row])
            run = None if written is None else written.stored
            best[key] = [rollout.policy, rollout.index, view.round, rollout.reward, text, rollout.ended, run]
    for (name, prompt_id), entry in best.items():
        others = [other for other in memory.get(prompt_id, []) if other[0] != name]
        memory[prompt_id] = sorted([*others, entry], key=lambda success: (success[0], success[2]))
    return memory
