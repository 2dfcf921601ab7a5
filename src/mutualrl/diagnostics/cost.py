"""Cost of each regime: the response tokens that it adds to a round.

Source: paper, Appendix "Compute overhead under a fixed rollout budget", Table "Extra compute on the same rollout
batch"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc

from mutualrl.diagnostics.channels import DATA, OUTCOME, VALUE
from mutualrl.diagnostics.complementarity import Thresholds, observed_gate
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.results import Cost, Extra, RegimeExtra
from mutualrl.diagnostics.rollouts import Ints, Rollouts
from mutualrl.diagnostics.sgt_check import list_successes
from mutualrl.errors import UsageError
from mutualrl.regimes.gating import Candidate, EncodedCandidate, draw_candidate


def tokens_M_P_G(rollouts: Rollouts) -> Ints:
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


def cost(rollouts: Rollouts, thresholds: Thresholds, pool: ModelPool, seed: int) -> Cost:
    """Return `{"policies", "prompts", "rollout_tokens", "rows": [{"regime", "extra_tokens", "ratio"}], "learners",
    "sequences", "bound"}`.

    ratio: extra response tokens over the learner's rollout tokens (in `rows`: over all learners'). PRP: all peers'
    rollouts, (M - 1) rollouts per learner, in the peers' tokens. SGT: the drawn teachers, in the learner's tokens if
    its tokenizer is known, else in the peer's. sequences: teachers over all rollouts, at most bound = (M - 1) / (M N),
    with N rollouts per prompt and model."""
    lengths = tokens_M_P_G(rollouts)
    policy_tokens = lengths.sum(axis=(1, 2))
    total = int(policy_tokens.sum())
    texts: dict[tuple[int, int, int], tuple[str, bool]] | None = None
    if can_count_learner_tokens(rollouts, pool):
        texts = {}
        for successes in list_successes(rollouts, thresholds, pool).values():
            texts |= {(s.policy, s.unit, s.place): (s.text, s.ended) for s in successes}
    teachers = [_teachers(rollouts, thresholds, pool, lengths, m, seed, texts) for m in range(len(rollouts.policies))]
    learners: list[dict[str, Any]] = [
        {
            "learner": name,
            "rollout_tokens": int(policy_tokens[m]),
            "teachers": len(teachers[m]),
            VALUE: _extra(0, policy_tokens[m]),
            OUTCOME: _extra(sum(teachers[m]), policy_tokens[m]),
            DATA: _extra(total - int(policy_tokens[m]), policy_tokens[m]),
        }
        for m, name in enumerate(rollouts.policies)
    ]
    rows: list[RegimeExtra] = []
    for regime in (VALUE, OUTCOME, DATA):
        extra = _extra(sum(row[regime]["extra_tokens"] for row in learners), total)
        rows.append({"regime": regime, "extra_tokens": extra["extra_tokens"], "ratio": extra["ratio"]})
    models = len(rollouts.policies)
    smallest = int(rollouts.present_M_P_G.sum(axis=2).min())
    return {
        "policies": list(rollouts.policies),
        "prompts": len(rollouts.prompt_ids),
        "rollout_tokens": total,
        "rows": rows,
        "learners": learners,
        "sequences": sum(map(len, teachers)) / int(rollouts.present_M_P_G.sum()),
        "bound": (models - 1) / (models * smallest),
        "teacher_tokens": "the peer's" if texts is None else "the learner's",
    }


def can_count_learner_tokens(rollouts: Rollouts, pool: ModelPool) -> bool:
    """Return whether teachers can be counted in the learner's tokens: all models and the texts are known."""
    return not pool.missing() and rollouts.has_texts


def _extra(tokens: int, base: int) -> Extra:
    return {"extra_tokens": int(tokens), "ratio": float(tokens / base) if base else float("nan")}


def _teachers(
    rollouts: Rollouts,
    thresholds: Thresholds,
    pool: ModelPool,
    lengths: Ints,
    learner: int,
    seed: int,
    texts: Mapping[tuple[int, int, int], tuple[str, bool]] | None,
) -> list[int]:
    """Return the token counts of the teachers that SGT would draw on the gated prompts: under the learner's tokenizer,
    or as sampled by the peer if `texts` is None."""
    name = rollouts.policies[learner]
    rule = thresholds.of(name)
    teachers = []
    for unit in np.flatnonzero(observed_gate(rollouts, thresholds, learner)).tolist():
        fitted = []
        for m in rollouts.peers_of(learner):
            for place in np.flatnonzero(rollouts.rewards_M_P_G[m, unit] > rule.success).tolist():
                text, ended = (texts or {}).get((m, unit, place), ("", True))
                ids = pool.to_learner_ids(learner, unit, text, ended) if text else None
                size = int(lengths[m, unit, place]) if texts is None else len(ids or ())
                number = int(rollouts.cell("rollout", m, unit, place))
                if size:
                    fitted.append(EncodedCandidate(Candidate(rollouts.policies[m], number, text, ended), (0,) * size))
        if fitted:
            drawn = draw_candidate(
                fitted,
                rule.rule(),
                run_seed=seed,
                round_index=int(rollouts.rounds[unit]),
                prompt_id=rollouts.prompt_ids[unit],
                learner=name,
            )
            teachers.append(len(drawn.ids))
    return teachers
