"""What would each regime add to a round, in response tokens?

Source: paper, Appendix "Compute overhead under a fixed rollout budget", Table "Extra compute on the same rollout
batch"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from mutualrl.console.markdown import name, number, table
from mutualrl.diagnostics.diagnostic import INLINE, Diagnostic, Figures, Inputs, Scope
from mutualrl.diagnostics.gates import Thresholds, observed_gate
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.request import LearnerRequest
from mutualrl.diagnostics.rollouts import Ints, ModelRollouts
from mutualrl.diagnostics.specs.sgt_check import list_successes
from mutualrl.errors import UsageError
from mutualrl.paper.specs.channels import DATA, OUTCOME, VALUE
from mutualrl.regimes.gating import Candidate, DrawKey, EncodedCandidate, draw_candidate
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {DATA: "#4477AA", VALUE: "#CCBB44", OUTCOME: "#EE6677"}


@dataclass(frozen=True, slots=True)
class Extra:
    """Response tokens that a regime adds, and their ratio to the rollouts' tokens."""

    extra_tokens: int
    ratio: float


@dataclass(frozen=True, slots=True)
class RegimeExtra:
    """Regime's extra tokens over all learners."""

    regime: str
    extra: Extra = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class LearnerCost:
    """A learner's rollout tokens, the number of its teachers under SGT, and the extra tokens by regime."""

    learner: str
    rollout_tokens: int
    teachers: int
    extra: Mapping[str, Extra] = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class Cost:
    """Result. `sequences`: teachers over all rollouts, at most `bound` = (M - 1) / (M N), with N rollouts per prompt
    and model. `teacher_tokens`: whose tokens the teachers are counted in."""

    rollout_tokens: int
    rows: list[RegimeExtra]
    learners: list[LearnerCost]
    sequences: float
    bound: float
    teacher_tokens: str


def compute(inputs: Inputs[LearnerRequest]) -> Cost:
    """Return the result."""
    return cost(inputs.rollouts, inputs.plan.thresholds, inputs.pool, inputs.plan.seed)


def tokens_M_P_G(rollouts: ModelRollouts) -> Ints:
    """Return each response's token count under its own model's tokenizer; 0 where there is no rollout.

    Raises UsageError when the counts are not recorded.
    """
    rows = rollouts.rows_M_P_G
    counts = np.full(len(rollouts.table), -1, dtype=np.int64)
    if rollouts.has("tokens"):
        counts = rollouts.table.column("tokens").fill_null(-1).to_numpy().astype(np.int64)
    if rollouts.has("token_ids"):
        lengths = pc.list_value_length(rollouts.table.column("token_ids")).fill_null(-1).to_numpy()
        counts = np.where(lengths >= 0, lengths, counts)
    counts = np.where(rows >= 0, counts[rows], 0)
    if (counts < 0).any():
        raise UsageError(
            f"{rollouts.origin}: response lengths are not recorded; rollouts need 'tokens' or 'token_ids' (recorded by "
            "regime prp and by --exchange full), or sample again with --pool"
        )
    tokens: Ints = counts.astype(np.int64)
    return tokens


def cost(rollouts: ModelRollouts, thresholds: Thresholds, pool: ModelPool, seed: int) -> Cost:
    """Return the extra tokens by regime, over all learners and per learner.

    ratio: extra response tokens over the learner's rollout tokens (in `rows`: over all learners'). PRP: all peers'
    rollouts, (M - 1) rollouts per learner, in the peers' tokens. SGT: the drawn teachers, in the learner's tokens if
    its tokenizer is known, else in the peer's."""
    lengths = tokens_M_P_G(rollouts)
    policy_tokens = lengths.sum(axis=(1, 2))
    total = int(policy_tokens.sum())
    texts: dict[tuple[int, int, int], tuple[str, bool]] | None = None
    if can_count_learner_tokens(rollouts, pool):
        texts = {}
        for successes in list_successes(rollouts, thresholds, pool).values():
            texts |= {(s.policy, s.unit, s.place): (s.text, s.ended) for s in successes}
    counts = TokenCounts(rollouts, pool, lengths, texts)
    teachers = [counts.teachers(m, thresholds, seed) for m in range(len(rollouts.policies))]
    learners = []
    for m, learner in enumerate(rollouts.policies):
        own = int(policy_tokens[m])
        added = {VALUE: 0, OUTCOME: sum(teachers[m]), DATA: total - own}
        extra = {regime: _extra(tokens, own) for regime, tokens in added.items()}
        learners.append(LearnerCost(learner, own, len(teachers[m]), extra))
    rows = []
    for regime in (VALUE, OUTCOME, DATA):
        rows.append(RegimeExtra(regime, _extra(sum(row.extra[regime].extra_tokens for row in learners), total)))
    models = len(rollouts.policies)
    smallest = int(rollouts.present_M_P_G.sum(axis=2).min())
    return Cost(
        rollout_tokens=total,
        rows=rows,
        learners=learners,
        sequences=sum(map(len, teachers)) / int(rollouts.present_M_P_G.sum()),
        bound=(models - 1) / (models * smallest),
        teacher_tokens="the peer's" if texts is None else "the learner's",
    )


def can_count_learner_tokens(rollouts: ModelRollouts, pool: ModelPool) -> bool:
    """Return whether teachers can be counted in the learner's tokens: all models and the texts are known."""
    return not pool.missing() and rollouts.has_texts


def _extra(tokens: int, base: int) -> Extra:
    return Extra(int(tokens), float(tokens / base) if base else float("nan"))


@dataclass(frozen=True)
class TokenCounts:
    """How teachers are counted: in the learner's tokens, by the texts of successes (policy, unit, place), or, where
    these are None, as sampled by the peer (`lengths`, shape (M, P, G))."""

    rollouts: ModelRollouts
    pool: ModelPool
    lengths: Ints
    texts: Mapping[tuple[int, int, int], tuple[str, bool]] | None

    def candidate(self, learner: int, unit: int, peer: int, place: int) -> EncodedCandidate | None:
        """Return a peer's success as a candidate with as many tokens as it is counted with; None if the learner cannot
        encode it."""
        text, ended = (self.texts or {}).get((peer, unit, place), ("", True))
        if self.texts is None:
            size = int(self.lengths[peer, unit, place])
        else:
            size = len(self.pool.to_learner_ids(learner, unit, text, ended) or ()) if text else 0
        number = int(self.rollouts.cell("rollout", peer, unit, place))
        found = Candidate(self.rollouts.policies[peer], number, Trajectory.of_text(text), ended)
        return EncodedCandidate(found, (0,) * size) if size else None

    def teachers(self, learner: int, thresholds: Thresholds, seed: int) -> list[int]:
        """Return the token counts of the teachers that SGT would draw for a learner on the gated prompts."""
        rollouts = self.rollouts
        policy, above = rollouts.policies[learner], thresholds.of(rollouts.policies[learner]).success_above
        counts = []
        for unit in np.flatnonzero(observed_gate(rollouts, thresholds, learner)).tolist():
            successes = [
                (peer, place)
                for peer in rollouts.peers_of(learner)
                for place in np.flatnonzero(rollouts.rewards_M_P_G[peer, unit] > above).tolist()
            ]
            candidates = [self.candidate(learner, unit, peer, place) for peer, place in successes]
            fitted = [each for each in candidates if each is not None]
            if fitted:
                key = DrawKey(seed, int(rollouts.rounds[unit]), rollouts.prompt_ids[unit], policy)
                counts.append(len(draw_candidate(fitted, thresholds.of(policy), key).ids))
        return counts


def markdown(result: Cost, scope: Scope) -> str:
    """Return the extra tokens by regime, over all learners and per learner, and the analytic bound."""
    rows = []
    for row in result.rows:
        rows.append([row.regime.upper(), f"{row.extra.extra_tokens:,}", f"{number(row.extra.ratio)}x rollout"])
    of = f"{scope.described()}; {result.rollout_tokens:,} response tokens"
    head = ["regime", "extra response tokens", "extra cost"]
    parts = [table(f"Extra compute on the same rollouts ({of})", head, rows)]
    rows = []
    for learner in result.learners:
        costs = []
        for regime in (VALUE, OUTCOME, DATA):
            extra = learner.extra[regime]
            costs.append(f"{extra.extra_tokens:,} ({number(extra.ratio)}x)")
        rows.append([name(learner.learner), f"{learner.rollout_tokens:,}", str(learner.teachers), *costs])
    parts.append(table("By learner", ["learner", "rollout tokens", "teachers", "XGRPO", "SGT", "PRP"], rows))
    parts.append(
        f"SGT's teachers are {result.sequences:.4f} of all rollouts; the bound (M-1)/(MN) is {result.bound:.4f}. "
        f"Teachers are counted in {result.teacher_tokens} tokens."
    )
    return "\n\n".join(parts)


def figures(result: Cost) -> Figures:
    """Return the extra cost of each regime, relative to the rollouts."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        regimes, ratios = [row.regime for row in result.rows], [row.extra.ratio for row in result.rows]
        colours = [_COLOURS[regime] for regime in regimes]
        bars = axis.bar([regime.upper() for regime in regimes], ratios, color=colours)
        axis.bar_label(bars, [f"{ratio:.4f}x" for ratio in ratios])
        axis.set(ylabel="extra response tokens / rollout tokens", title="What each regime adds to a round")

    return {"cost": ((5, 4), draw)}


DIAGNOSTIC = Diagnostic(LearnerRequest, compute, markdown, figures)
