"""SGT check: where Success-Gated Transfer would act, and whether the transferred text is specific to the prompt.

Source: paper, Appendix "SGT diagnostics: cost, activation profile, and prompt specificity", Tables "SGT activation
profile" and "Matched vs. mismatched teacher NLL".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mutualrl.diagnostics.complementarity import Thresholds, observed_gate
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.results import (
    Activation,
    ActivationRow,
    Compared,
    SuccessRate,
    TaskGate,
    TeacherNLL,
    TeacherRow,
)
from mutualrl.diagnostics.rollouts import Bools, Floats, Ints, Rollouts
from mutualrl.diagnostics.statistics import intervals, ratio
from mutualrl.errors import UsageError
from mutualrl.regimes.gating import Candidate, EncodedCandidate, draw_candidate
from mutualrl.seeds import seeded

MOST_OWN = 512  # scored successes per learner


def activation(rollouts: Rollouts, thresholds: Thresholds) -> Activation:
    """Return `{"policies", "prompts", "all_fail", "rows": [{"learner", "gated", "on", "off", "by_task"}]}`.

    gated: prompts with the gate open; on, off: [successes, rollouts] of the whole pool on gated and on other prompts;
    all_fail: prompts where every rollout of every model is below `failure`; by_task: [gated, prompts] of each task.
    """
    rewards, present = rollouts.rewards_M_P_G, rollouts.present_M_P_G
    count = present.sum(axis=(0, 2))
    limits = np.array([thresholds.of(name).failure for name in rollouts.policies])
    failed = ((rewards < limits[:, None, None]) | ~present).all(axis=(0, 2))
    tasks, task_index = np.unique(np.array(rollouts.tasks, dtype=object).astype(str), return_inverse=True)
    sizes = np.bincount(task_index, minlength=len(tasks))
    rows: list[ActivationRow] = []
    for m, name in enumerate(rollouts.policies):
        gate = observed_gate(rollouts, thresholds, m)
        hits = (rewards > thresholds.of(name).success).sum(axis=(0, 2))
        gated = np.bincount(task_index[gate], minlength=len(tasks))
        by_task: dict[str, TaskGate] = {}
        for task, opened, size in zip(tasks, gated, sizes, strict=True):
            by_task[str(task)] = {"gated": int(opened), "prompts": int(size), "rate": float(opened / size)}
        rows.append(
            {
                "learner": name,
                "gated": int(gate.sum()),
                "gate_rate": float(gate.mean()),
                "on": _success_rate(hits, count, gate),
                "off": _success_rate(hits, count, ~gate),
                "by_task": by_task,
            }
        )
    return {
        "policies": list(rollouts.policies),
        "prompts": len(rollouts.prompt_ids),
        "all_fail": int(failed.sum()),
        "rows": rows,
    }


def _success_rate(hits: Ints, count: Ints, mask: Bools) -> SuccessRate:
    successes, total = int(hits[mask].sum()), int(count[mask].sum())
    return {"successes": successes, "rollouts": total, "rate": float(ratio(successes, total))}


@dataclass(frozen=True, slots=True)
class TeacherPair:
    """Gated prompt of a learner: the teacher that SGT would draw, and a success of the same peer on another prompt."""

    learner: int
    unit: int
    matched: tuple[int, ...]
    mismatched: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Success:
    """Successful rollout: its position, its text, and its reward."""

    policy: int
    unit: int
    place: int
    rollout: int
    text: str
    ended: bool
    reward: float


def list_successes(rollouts: Rollouts, thresholds: Thresholds, pool: ModelPool) -> dict[int, list[Success]]:
    """Return all rollouts whose text is known and that are a success to some learner, by policy."""
    successes: dict[int, list[Success]] = {}
    lowest = min(thresholds.of(name).success for name in rollouts.policies)
    for m in range(len(rollouts.policies)):
        rewards = rollouts.rewards_M_P_G[m]
        for unit, place in np.argwhere(rewards > lowest):
            text = pool.text(m, int(unit), int(place))
            if text:
                number = rollouts.cell("rollout", m, int(unit), int(place))
                ended = rollouts.ended(m, int(unit), int(place))
                row = Success(m, int(unit), int(place), int(number), text, ended, float(rewards[unit, place]))
                successes.setdefault(m, []).append(row)
    return successes


def teacher_pairs(
    rollouts: Rollouts,
    thresholds: Thresholds,
    pool: ModelPool,
    seed: int,
    successes: Mapping[int, Sequence[Success]],
) -> tuple[list[TeacherPair], int]:
    """Return a pair for each gated prompt of each learner, and the number of prompts without one: no success fits the
    learner, or no success of that peer on another prompt does. The matched teacher is drawn as in regime `sgt`."""
    pairs: list[TeacherPair] = []
    without = 0
    for learner, name in enumerate(rollouts.policies):
        rule = thresholds.of(name)
        by_peer = {m: _above(successes.get(m, []), rule.success) for m in rollouts.peers_of(learner)}
        by_unit: dict[int, list[Success]] = {}
        for peer_successes in by_peer.values():
            for success in peer_successes:
                by_unit.setdefault(success.unit, []).append(success)
        for unit in np.flatnonzero(observed_gate(rollouts, thresholds, learner)):
            prompt, round_index = rollouts.prompt_ids[unit], int(rollouts.rounds[unit])
            fitted = {
                (rollouts.policies[s.policy], s.rollout): (s, ids)
                for s in by_unit.get(int(unit), [])
                if (ids := pool.to_learner_ids(learner, int(unit), s.text, s.ended))
            }
            if not fitted:
                without += 1
                continue
            candidates = [
                EncodedCandidate(Candidate(policy, number, s.text, s.ended), ids)
                for (policy, number), (s, ids) in fitted.items()
            ]
            drawn = draw_candidate(
                candidates,
                rule.rule(),
                run_seed=seed,
                round_index=round_index,
                prompt_id=prompt,
                learner=name,
            )
            teacher = fitted[drawn.candidate.policy, drawn.candidate.rollout][0]
            mismatched = _mismatched(rollouts, pool, by_peer[teacher.policy], learner, int(unit), seed)
            if mismatched is None:
                without += 1
                continue
            pairs.append(TeacherPair(learner, int(unit), drawn.ids, mismatched))
    return pairs, without


def _above(successes: Sequence[Success], limit: float) -> list[Success]:
    return [success for success in successes if success.reward > limit]


def _mismatched(
    rollouts: Rollouts, pool: ModelPool, successes: Sequence[Success], learner: int, unit: int, seed: int
) -> tuple[int, ...] | None:
    """Return the learner's ids of a peer's success on another prompt, drawn uniformly among those that fit after the
    learner's prompt; None if none does."""
    prompt = rollouts.prompt_ids[unit]
    others = [s for s in successes if rollouts.prompt_ids[s.unit] != prompt]
    rng = seeded(seed, int(rollouts.rounds[unit]), prompt, f"{rollouts.policies[learner]}\x1fmismatched")
    for index in rng.permutation(len(others)):
        if ids := pool.to_learner_ids(learner, unit, others[index].text, others[index].ended):
            return ids
    return None


def teacher_nll(rollouts: Rollouts, thresholds: Thresholds, pool: ModelPool, seed: int) -> TeacherNLL:
    """Return `{"rows": [{"learner", "lessons", "matched", "mismatched", "difference", "difference_ci", "own",
    "own_successes"}], "without"}`: mean over gated prompts of the learner's per-token mean NLL of a teacher's text
    after the learner's own prompt, nats per token; difference: mismatched minus matched; own: the same of its own
    successes, one per solved prompt, as the reference for how well a teacher's text fits the learner."""
    if not rollouts.has_texts:
        raise UsageError(
            f"{rollouts.origin}: the teachers' NLL needs texts, and none are recorded; train with --exchange full (or "
            "regime sgt or prp), add a column 'completion', or sample with --pool"
        )
    successes = list_successes(rollouts, thresholds, pool)
    pairs, without = teacher_pairs(rollouts, thresholds, pool, seed, successes)
    rows: list[TeacherRow] = []
    for learner, name in enumerate(rollouts.policies):
        learner_pairs = [pair for pair in pairs if pair.learner == learner]
        units = [pair.unit for pair in learner_pairs]
        nll = {
            "matched": pool.nll(learner, units, [pair.matched for pair in learner_pairs]),
            "mismatched": pool.nll(learner, units, [pair.mismatched for pair in learner_pairs]),
        }
        own_successes = _above(successes.get(learner, []), thresholds.of(name).success)
        own_nll = _own_nll(own_successes, pool, learner)
        rows.append(
            {
                "learner": name,
                "lessons": len(learner_pairs),
                **_compared(nll, seed),
                "own": float(own_nll.mean()) if len(own_nll) else float("nan"),
                "own_successes": len(own_nll),
            }
        )
    return {"rows": rows, "without": without}


def _own_nll(successes: Sequence[Success], pool: ModelPool, learner: int) -> Floats:
    """Return the NLL of a learner's own successes, the first on each of at most `MOST_OWN` prompts."""
    first: dict[int, tuple[int, ...]] = {}
    for success in successes:
        if success.unit not in first and len(first) < MOST_OWN:
            ids = pool.to_learner_ids(learner, success.unit, success.text, success.ended)
            if ids:
                first[success.unit] = ids
    return pool.nll(learner, list(first), list(first.values()))


def _compared(nll: Mapping[str, Floats], seed: int) -> Compared:
    matched, mismatched = nll["matched"], nll["mismatched"]
    if not len(matched):
        nan = float("nan")
        return {"matched": nan, "mismatched": nan, "difference": nan, "difference_ci": [nan, nan]}
    difference = mismatched - matched
    bounds = intervals(difference[:, None], lambda sums: sums / len(difference), seed)
    return {
        "matched": float(matched.mean()),
        "mismatched": float(mismatched.mean()),
        "difference": float(difference.mean()),
        "difference_ci": list(bounds[0]),
    }
