"""Which regime to try with a pool, and why: from its gate rates, its rewards, and hints that were tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mutualrl.console.markdown import number
from mutualrl.diagnostics.gates import SPARSE
from mutualrl.diagnostics.hints import CAVEAT as HINTS_CAVEAT
from mutualrl.diagnostics.hints import HintRow
from mutualrl.diagnostics.overlap import GateRow, PoolRates
from mutualrl.diagnostics.revival import ANY, RevivalRow
from mutualrl.diagnostics.rollouts import Bools, ModelRollouts
from mutualrl.regimes.hinted import Hinted
from mutualrl.regimes.sgt import SGT

#: what was measured about the recommendation of `sgt` (benchmarks/results/prediction.json, text_source.json)
SGT_CAVEAT = (
    "Measured on 20 policies of eleven pools: whether this rate predicts SGT's gain is not decided. SGT ended above "
    "GRPO in the mean for 7 of 8 whose gate opened on 30 % of the prompts or more in the first tenth of the run, and "
    "for 5 of 12 with less. Where the policies have the same "
    "skills and write differently, SGT ended below GRPO, HACPO, guided rollouts and SFT then GRPO, and retained less "
    "than GRPO of what was solved before (docs/text-source.md). Compare with grpo over several seeds (mutualrl sweep)."
)


@dataclass(frozen=True, slots=True)
class Advice:
    """One regime, or none, with the reason; its `settings`, and its extra rows per GRPO row."""

    recommended: str
    recommendation: str
    settings: Mapping[str, object] = field(default_factory=dict)
    extra_rows: float = 0.0
    caveat: str = ""


def recommended(
    pool: PoolRates, gate: Sequence[GateRow], better: Mapping[str, float], rollouts: ModelRollouts, solved_at_all: Bools
) -> Advice:
    """Return a regime, or none, with its reason and its predicted cost. `solved_at_all`: by any rollout, shape (M, P).

    Criteria: SGT's gate rate and, with graded rewards, how often a peer does better. Pooling whole batches (prp, hacpo,
    swarm) and sharing only rewards (xgrpo) were not shown to help where SGT's gate stays closed, and some variants were
    shown to do harm (docs/study.md), so they are not recommended.
    """
    prompts, group = len(rollouts.prompt_ids), int(rollouts.present_M_P_G.sum(axis=2).min(axis=1).max())
    rates = ", ".join(f"{row.learner} {row.observed:.1%}" for row in gate)
    best = max(gate, key=lambda row: row.observed)
    rewards = rollouts.rewards_M_P_G[~np.isnan(rollouts.rewards_M_P_G)]
    graded = len(np.unique(rewards)) > 2

    def advice(choice: str, text: str, open_rates: Sequence[float] = (), **settings: object) -> Advice:
        extra = float(np.mean(open_rates)) / group if open_rates else 0.0
        cost = f"; at most {extra:.1%} more rows in the loss than under GRPO" if open_rates else ""
        return Advice(choice, f"{choice}{_assignments(settings)}: {text}{cost}", settings, extra)

    if not solved_at_all.any() and not graded:
        text = (
            f"no model solved any of the {prompts} prompts, so none can teach another; choose easier ones, raise "
            "--max-new-tokens or --samples, or check the reward (mutualrl train --dry-run)"
        )
        return advice("none", text)
    if pool.all == 1 and not graded:
        return advice("none", f"every model solves all {prompts} prompts; choose harder ones")
    if best.observed >= SPARSE and best.observed_ci[0] > 0:
        text = f"its gate would open on {rates} of the prompts, where the learner fails and a peer does not"
        if closed := [row.learner for row in gate if row.observed < SPARSE]:
            text += f"; help is one-way: for {' and '.join(closed)} it would rarely open"
        return advice(SGT.name, text, [row.observed for row in gate])
    if graded and max(better.values()) >= SPARSE:
        peer_rates = ", ".join(f"{name} {rate:.1%}" for name, rate in better.items())
        text = f"no learner fails where a peer succeeds ({rates}), but a peer's best reward is higher on {peer_rates}"
        return advice(SGT.name, text, list(better.values()), gate="relative")
    if best.observed >= SPARSE:
        text = f"SGT's gate opened on {rates} of {prompts} prompts, too few to tell from chance; use more (--prompts)"
        return advice("none", text)
    return advice("none", f"SGT's gate would rarely open ({rates}); these models solve the same prompts")


def _assignments(settings: Mapping[str, object]) -> str:
    """Return settings as command-line flags."""
    return "".join(f" --set regime.{key}={value}" for key, value in settings.items())


AGENTS_CAVEAT = (
    "Measured on the embedded pool tiny-tools (docs/agents.md): a peer's calls as a plan end above GRPO, as does a "
    "peer's run that is learnt itself (sgt); both raise the calls where none is needed."
)


def for_agents(advice: Advice) -> Advice:
    """Return advice for a task with tools: `hinted` with a plan in place of `sgt`, which it equals where both were
    measured and which any chat template serves; where SGT's gate is relative, which `hinted` has not, `sgt`."""
    if advice.recommended != SGT.name:
        return advice
    if advice.settings:  # of SGT's gate
        return replace(advice, caveat=AGENTS_CAVEAT)
    settings = {"hint": "plan"}
    reason = advice.recommendation.partition(": ")[2].partition(";")[0]
    return Advice(Hinted.name, f"{Hinted.name}{_assignments(settings)}: {reason}", settings, caveat=AGENTS_CAVEAT)


def with_texts(advice: Advice, revived: Sequence[RevivalRow]) -> Advice:
    """Return advice with what recorded texts would revive: `sgt` in place of none if a source has a confirmed text on
    some of the prompts that a model failed."""
    rows = [row for row in revived if row.source == ANY] or list(revived)
    if unknown := [row.learner for row in rows if not row.known]:
        learners = " and ".join(dict.fromkeys(unknown))
        return _with_reason(
            advice, f"what {learners} can learn of the texts is unknown, and nothing is recommended on it"
        )
    rows = [row for row in rows if row.prompts and row.revived / row.prompts >= SPARSE and row.rate_ci[0] > 0]
    if not rows:
        return advice
    texts = ", ".join(f"{row.learner} {row.revived} of {row.failed}" for row in rows)
    reason = f"recorded texts revive prompts on which a model fails entirely ({texts})"
    if not all(row.verified for row in rows):
        reason += ", if what their file says of them is true: nothing here has acted them in the environment"
    if any(row.bound is not None for row in rows):
        reason += ", by their length in characters alone"
    if advice.recommended != "none":
        return _with_reason(advice, reason)
    return Advice(SGT.name, f"{SGT.name}: {reason}; without them, {advice.recommendation}", caveat=TEXTS_CAVEAT)


def for_one(revived: Sequence[RevivalRow]) -> Advice:
    """Return advice for one model, which no other can teach, with what recorded texts would revive: `sgt`, or none."""
    counts = ", ".join(f"{row.source} {row.revived} of {row.failed}" for row in revived if row.source != ANY)
    few = f"none: the texts revive few prompts, or none, on which the model fails entirely ({counts})"
    none = Advice("none", few if all(row.known for row in revived) else "none")
    advice = with_texts(none, revived)
    if advice.recommended == "none":
        return advice
    return replace(advice, recommendation=advice.recommendation.partition("; without them")[0])


#: what was measured about a recorded file (benchmarks/results/one_model_seeds.json, rivals-recorded.json)
TEXTS_CAVEAT = (
    "Measured on one tiny model and seven seeds: a file under the gate ended above GRPO after 160 steps "
    "(docs/one-model.md); after 100 steps that was not decided (docs/rivals.md). Compare with grpo over several seeds "
    "(mutualrl sweep)."
)


def with_hints(advice: Advice, tried: Sequence[HintRow]) -> Advice:
    """Return advice once hints were tried: `hinted` in place of `sgt` if a hint raises the success of a learner and
    leaves answers to learn; either way, the reason."""
    rows = [row for row in tried if row.samples]
    if advice.recommended == "none" or not rows:
        return advice
    helped = [r for r in rows if r.gated / max(r.prompts, 1) >= SPARSE and r.difference_ci[0] > 0 and r.learnable > 0]
    if not helped and any(row.difference_ci[0] > 0 for row in rows):
        shares = [f"{r.learner} {number(r.copies, 2)} copies, {number(r.bare, 2)} bare" for r in rows]
        reason = f"hints help, but leave next to nothing to learn ({'; '.join(shares)})"
        return _with_reason(advice, reason)
    if not helped:
        seen = [
            f"{row.learner} {number(row.success_with, 2)}, without {number(row.success_without, 2)}" for row in rows
        ]
        return _with_reason(advice, f"hints do not help here (success with one: {'; '.join(seen)})")
    best = max(helped, key=lambda row: row.difference)
    reason = (
        f"where the gate opens, {best.learner} solves {best.success_with:.0%} of its answers with a hint, "
        f"{best.success_without:.0%} without, and {best.learnable:.0%} are its own words: "
        f"{best.rescues_per_round:.1f} answers to learn per round, for {best.tokens_per_round:.0f} tokens sampled"
    )
    text = f"{Hinted.name}: {reason}. In place of {advice.recommendation}"
    return Advice(Hinted.name, text, caveat=HINTS_CAVEAT)


def _with_reason(advice: Advice, reason: str) -> Advice:
    """Return advice with one more sentence."""
    return replace(advice, recommendation=f"{advice.recommendation}. {reason[0].upper()}{reason[1:]}")
