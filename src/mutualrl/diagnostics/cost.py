"""Cost: what each regime adds to a round, in response tokens.

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
from mutualrl.regimes.sgt import Candidate, Fitted, draw_candidate


def tokens_M_P_G(rollouts: Rollouts) -> Ints:
    """Return tokens of every response in its own model's vocabulary; 0 where there is none.

    Raises UsageError when they are not recorded.
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
            f"{rollouts.origin}: the lengths of responses are not recorded; rollouts need 'tokens' or 'token_ids' (a "
            "run of regime prp, or with --exchange full, has them), or sample again with --pool"
        )
    tokens: Ints = counts.astype(np.int64)
    return tokens


def cost(rollouts: Rollouts, thresholds: Thresholds, pool: ModelPool, seed: int) -> Cost:
    """`{"policies", "prompts", "rollout_tokens", "rows": [{"regime", "extra_tokens", "ratio"}], "learners",
    "sequences", "bound"}`.

    ratio: extra response tokens over the rollout tokens of the learners (of all, for `rows`). PRP: every peer's
    rollouts, (M - 1) rollouts per learner, in the peers' tokens. SGT: the drawn teachers, in the learner's tokens where
    its tokenizer is known, else in the peer's. sequences: teachers over all rollouts, at most bound = (M - 1) / (M N),
    N rollouts per prompt and model."""
    lengths = tokens_M_P_G(rollouts)
    of_policy = lengths.sum(axis=(1, 2))
    total = int(of_policy.sum())
    known = counted_by_learner(rollouts, pool)
    successes = list_successes(rollouts, thresholds, pool) if known else {}
    texts = {(s.policy, s.unit, s.place): (s.text, s.ended) for of in successes.values() for s in of} if known else None
    teachers = [_teachers(rollouts, thresholds, pool, lengths, m, seed, texts) for m in range(len(rollouts.policies))]
    learners: list[dict[str, Any]] = [
        {
            "learner": name,
            "rollout_tokens": int(of_policy[m]),
            "teachers": len(teachers[m]),
            VALUE: _extra(0, of_policy[m]),
            OUTCOME: _extra(sum(teachers[m]), of_policy[m]),
            DATA: _extra(total - int(of_policy[m]), of_policy[m]),
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
        "teacher_tokens": "the learner's" if known else "the peer's",
    }


def counted_by_learner(rollouts: Rollouts, pool: ModelPool) -> bool:
    """Return whether teachers can be counted in the learner's tokens: its model is known, and so are the texts."""
    return not pool.missing() and rollouts.has_texts


def _extra(tokens: int, of: int) -> Extra:
    return {"extra_tokens": int(tokens), "ratio": float(tokens / of) if of else float("nan")}


def _teachers(
    rollouts: Rollouts,
    thresholds: Thresholds,
    pool: ModelPool,
    lengths: Ints,
    learner: int,
    seed: int,
    texts: Mapping[tuple[int, int, int], tuple[str, bool]] | None,
) -> list[int]:
    """Return tokens of the teacher that SGT would draw on each gated prompt; of its text under the learner, else
    (`texts` is None) as the peer sampled it."""
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
                    fitted.append(Fitted(Candidate(rollouts.policies[m], number, text, ended), (0,) * size))
        if fitted:
            drawn = draw_candidate(
                fitted,
                rule.settings(),
                run_seed=seed,
                round_index=int(rollouts.rounds[unit]),
                prompt_id=rollouts.prompt_ids[unit],
                learner=name,
            )
            teachers.append(len(drawn.ids))
    return teachers
