"""Where would SGT act, and do the transferred texts belong to the prompt? Gate, success rates, teachers' NLL.

Source: paper, Appendix "SGT diagnostics: cost, activation profile, and prompt specificity", Tables "SGT activation
profile" and "Matched vs. mismatched teacher NLL".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import name, number, sentence, table, with_interval
from mutualrl.diagnostics.diagnostic import Diagnostic, Figures, Inputs, Interval, Scope
from mutualrl.diagnostics.drawing import legend, short
from mutualrl.diagnostics.gates import Thresholds, observed_gate
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.request import LearnerRequest
from mutualrl.diagnostics.rollouts import Bools, Floats, Ints, ModelRollouts
from mutualrl.diagnostics.statistics import mean_interval, ratio
from mutualrl.errors import DataError, UsageError
from mutualrl.regimes.gating import Candidate, DrawKey, EncodedCandidate, draw_candidate
from mutualrl.seeds import seeded
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_OWN = 512  # scored successes per learner
MOST_TASKS = 12  # columns of the table


# ---- the result


@dataclass(frozen=True, slots=True)
class SuccessRate:
    """Successes among rollouts."""

    successes: int
    rollouts: int
    rate: float


@dataclass(frozen=True, slots=True)
class TaskGate:
    """Gated prompts of a task."""

    gated: int
    prompts: int
    rate: float


@dataclass(frozen=True, slots=True)
class ActivationRow:
    """Prompts on which a learner's gate opens; success of the whole pool on these (`on`) and on the others (`off`)."""

    learner: str
    gated: int
    gate_rate: float
    on: SuccessRate
    off: SuccessRate
    by_task: Mapping[str, TaskGate]


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """Learner's NLL of its teachers on the gated prompts (`lessons`): of the matched ones, of `mismatched` ones, and
    their difference, nats per token. `own`: of its own successes, one per prompt that it solved (`own_successes`)."""

    learner: str
    lessons: int
    matched: float
    mismatched: float
    difference: float
    difference_ci: Interval
    own: float
    own_successes: int


@dataclass(frozen=True, slots=True)
class TeacherNLL:
    """Teachers' NLL of all learners; `without`: gated prompts without a teacher."""

    rows: list[TeacherRow]
    without: int


@dataclass(frozen=True, slots=True)
class Activation:
    """Result. `all_fail`: prompts on which every rollout of every model is below `failure`. `nll` is None where it was
    not measured, for the reason in `nll_needs`."""

    all_fail: int
    rows: list[ActivationRow]
    nll: TeacherNLL | None = None
    nll_needs: str | None = None


# ---- what it computes


def compute(inputs: Inputs[LearnerRequest]) -> Activation:
    """Return the activation profile, and the teachers' NLL where texts and models are known."""
    thresholds = inputs.plan.thresholds
    profile = activation(inputs.rollouts, thresholds)
    try:
        inputs.pool.require("the teachers' NLL")
        nll = teacher_nll(inputs.rollouts, thresholds, inputs.pool, inputs.plan.seed)
    except (UsageError, DataError) as error:  # optional: the table reports why it is missing
        return replace(profile, nll_needs=str(error))
    return replace(profile, nll=nll)


def activation(rollouts: ModelRollouts, thresholds: Thresholds) -> Activation:
    """Return where each learner's gate opens, without the teachers' NLL."""
    rewards, present = rollouts.rewards_M_P_G, rollouts.present_M_P_G
    count = present.sum(axis=(0, 2))
    limits = np.array([thresholds.of(name).failure_below for name in rollouts.policies])
    failed = ((rewards < limits[:, None, None]) | ~present).all(axis=(0, 2))
    tasks, task_index = np.unique(np.array(rollouts.tasks, dtype=object).astype(str), return_inverse=True)
    sizes = np.bincount(task_index, minlength=len(tasks))
    rows: list[ActivationRow] = []
    for m, learner in enumerate(rollouts.policies):
        gate = observed_gate(rollouts, thresholds, m)
        hits = (rewards > thresholds.of(learner).success_above).sum(axis=(0, 2))
        gated = np.bincount(task_index[gate], minlength=len(tasks))
        by_task: dict[str, TaskGate] = {}
        for task, opened, size in zip(tasks, gated, sizes, strict=True):
            by_task[str(task)] = TaskGate(int(opened), int(size), float(opened / size))
        rows.append(
            ActivationRow(
                learner=learner,
                gated=int(gate.sum()),
                gate_rate=float(gate.mean()),
                on=_success_rate(hits, count, gate),
                off=_success_rate(hits, count, ~gate),
                by_task=by_task,
            )
        )
    return Activation(int(failed.sum()), rows)


def _success_rate(hits: Ints, count: Ints, mask: Bools) -> SuccessRate:
    successes, total = int(hits[mask].sum()), int(count[mask].sum())
    return SuccessRate(successes, total, float(ratio(successes, total)))


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


def list_successes(rollouts: ModelRollouts, thresholds: Thresholds, pool: ModelPool) -> dict[int, list[Success]]:
    """Return all rollouts whose text is known and that are a success to some learner, by policy."""
    successes: dict[int, list[Success]] = {}
    lowest = min(thresholds.of(name).success_above for name in rollouts.policies)
    for m in range(len(rollouts.policies)):
        rewards = rollouts.rewards_M_P_G[m]
        for unit, place in np.argwhere(rewards > lowest):
            text = pool.text(m, int(unit), int(place))
            if text:
                index = rollouts.cell("rollout", m, int(unit), int(place))
                ended = rollouts.ended(m, int(unit), int(place))
                row = Success(m, int(unit), int(place), int(index), text, ended, float(rewards[unit, place]))
                successes.setdefault(m, []).append(row)
    return successes


def teacher_pairs(
    rollouts: ModelRollouts,
    thresholds: Thresholds,
    pool: ModelPool,
    seed: int,
    successes: Mapping[int, Sequence[Success]],
) -> tuple[list[TeacherPair], int]:
    """Return a pair for each gated prompt of each learner, and the number of prompts without one: no success fits the
    learner, or no success of that peer on another prompt does. The matched teacher is drawn as in regime `sgt`."""
    pairs: list[TeacherPair] = []
    without = 0
    for learner, policy in enumerate(rollouts.policies):
        rule = thresholds.of(policy)
        by_peer = {m: _above(successes.get(m, []), rule.success_above) for m in rollouts.peers_of(learner)}
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
                EncodedCandidate(Candidate(peer, index, Trajectory.of_text(s.text), s.ended), ids)
                for (peer, index), (s, ids) in fitted.items()
            ]
            drawn = draw_candidate(candidates, rule, DrawKey(seed, round_index, prompt, policy))
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
    rollouts: ModelRollouts, pool: ModelPool, successes: Sequence[Success], learner: int, unit: int, seed: int
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


def teacher_nll(rollouts: ModelRollouts, thresholds: Thresholds, pool: ModelPool, seed: int) -> TeacherNLL:
    """Return the mean over gated prompts of the learner's per-token mean NLL of a teacher's text after the learner's
    own prompt; difference: mismatched minus matched; own: the same of its own successes, as the reference for how well
    a teacher's text fits the learner."""
    if not rollouts.has_texts:
        raise UsageError(
            f"{rollouts.origin}: the teachers' NLL needs texts, and none are recorded; train with --exchange full (or "
            "regime sgt or prp), add a column 'completion', or sample with --pool"
        )
    successes = list_successes(rollouts, thresholds, pool)
    pairs, without = teacher_pairs(rollouts, thresholds, pool, seed, successes)
    rows: list[TeacherRow] = []
    for learner, policy in enumerate(rollouts.policies):
        learner_pairs = [pair for pair in pairs if pair.learner == learner]
        units = [pair.unit for pair in learner_pairs]
        matched = pool.nll(learner, units, [pair.matched for pair in learner_pairs])
        mismatched = pool.nll(learner, units, [pair.mismatched for pair in learner_pairs])
        own = _own_nll(_above(successes.get(learner, []), thresholds.of(policy).success_above), pool, learner)
        rows.append(
            TeacherRow(
                learner=policy,
                lessons=len(learner_pairs),
                matched=_mean(matched),
                mismatched=_mean(mismatched),
                difference=_mean(mismatched - matched),
                difference_ci=mean_interval(mismatched - matched, seed),
                own=_mean(own),
                own_successes=len(own),
            )
        )
    return TeacherNLL(rows, without)


def _own_nll(successes: Sequence[Success], pool: ModelPool, learner: int) -> Floats:
    """Return the NLL of a learner's own successes, the first on each of at most `MOST_OWN` prompts."""
    first: dict[int, tuple[int, ...]] = {}
    for success in successes:
        if success.unit not in first and len(first) < MOST_OWN:
            ids = pool.to_learner_ids(learner, success.unit, success.text, success.ended)
            if ids:
                first[success.unit] = ids
    return pool.nll(learner, list(first), list(first.values()))


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


# ---- how it is shown


def markdown(result: Activation, scope: Scope) -> str:
    """Return the activation profile, also by task if there are several, and the teachers' NLL."""
    rows = []
    for row in result.rows:
        gated, failed = f"{row.gated}/{scope.prompts}", f"{result.all_fail}/{scope.prompts}"
        rows.append([name(row.learner), gated, _fraction(row.on), _fraction(row.off), failed])
    head = ["learner", "SGT prompts", "succ./all (gate on)", "succ./all (gate off)", "all-fail prompts"]
    parts = [table(f"SGT activation profile ({scope.described()})", head, rows)]
    tasks = list(result.rows[0].by_task)
    if 1 < len(tasks) <= MOST_TASKS:
        rows = []
        for row in result.rows:
            rates = [f"{t.gated}/{t.prompts} ({100 * t.rate:.2f} %)" for t in row.by_task.values()]
            rows.append([name(row.learner), *rates])
        parts.append(table("Prompts that open the gate, by task", ["learner", *map(name, tasks)], rows))
    if result.nll is None:
        parts.append(f"Teacher NLL: not measured; {sentence(str(result.nll_needs))}")
    else:
        parts.append(_teacher_table(result.nll))
    return "\n\n".join(parts)


def _teacher_table(nll: TeacherNLL) -> str:
    rows = []
    for row in nll.rows:
        values = [number(row.matched), number(row.mismatched), with_interval(row.difference, row.difference_ci)]
        rows.append([name(row.learner), str(row.lessons), *values, number(row.own)])
    head = ["learner", "prompts", "matched teacher NLL", "mismatched teacher NLL", "difference [95 %]"]
    without = f"; {nll.without} gated prompts without such a pair" if nll.without else ""
    title = f"Matched vs. mismatched teacher, nats per token{without}"
    return table(title, [*head, "NLL of own successes"], rows)


def _fraction(rates: SuccessRate) -> str:
    return f"{rates.successes}/{rates.rollouts} ({number(rates.rate, 3)})"


def figures(result: Activation) -> Figures:
    """Return the success rates with the gate on and off, and the teachers' NLL if measured."""
    drawn: Figures = {"sgt_activation": ((6, 4), lambda figure: _draw_activation(figure.subplots(), result))}
    if (nll := result.nll) is not None:
        drawn = {**drawn, "sgt_teachers": ((6, 4), lambda figure: _draw_teachers(figure.subplots(), nll.rows))}
    return drawn


def _draw_activation(axis: Axes, result: Activation) -> None:
    positions = np.arange(len(result.rows))
    for offset, side in ((-0.2, "on"), (0.2, "off")):
        rates: list[SuccessRate] = [getattr(row, side) for row in result.rows]
        bars = axis.bar(positions + offset, [rate.rate for rate in rates], 0.4, label=f"gate {side}")
        axis.bar_label(bars, [f"{rate.successes}/{rate.rollouts}" for rate in rates], fontsize=8)
    prompts = sum(task.prompts for task in result.rows[0].by_task.values())
    labels = [f"{short(row.learner)}\n{row.gated} of {prompts} prompts" for row in result.rows]
    axis.set_xticks(positions, labels, fontsize=8, parse_math=False)
    axis.set(ylabel="pool-wide success rate", ylim=(0, 1), title="Where SGT acts")
    legend(axis, fontsize=8)


def _draw_teachers(axis: Axes, rows: Sequence[TeacherRow]) -> None:
    positions = np.arange(len(rows))
    labels = {"own": "own successes", "matched": "matched teacher", "mismatched": "mismatched teacher"}
    for offset, (kind, label) in zip((-0.27, 0.0, 0.27), labels.items(), strict=True):
        values = [getattr(row, kind) for row in rows]
        axis.bar_label(axis.bar(positions + offset, values, 0.27, label=label), fmt="%.3f", fontsize=8)
    axis.set_xticks(positions, [short(row.learner) for row in rows], fontsize=8, parse_math=False)
    axis.set(ylabel="NLL, nats per token", title="Is SGT's transfer specific to the prompt?")
    legend(axis, fontsize=8)


DIAGNOSTIC = Diagnostic(LearnerRequest, compute, markdown, figures)
