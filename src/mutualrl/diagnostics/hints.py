"""Would a hint help? Success with a peer's success in the prompt and without it, where SGT's gate opens.

Nothing is trained. The gate, the hint and the filters are those of the regime `hinted`. The answers without a hint are
fresh: the learner's rollouts that opened the gate failed by selection. Success with a hint minus success without is
what arXiv 2605.30070 finds to predict the gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mutualrl.console.markdown import name, number, table
from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.load_rollouts import Loaded, ProgressBars, completions, rewards_by
from mutualrl.diagnostics.plan import DiagnosticPlan, SampledPool
from mutualrl.diagnostics.statistics import mean_interval, ratio
from mutualrl.engines.sampling import Sampling
from mutualrl.records import Prompt, Rollout
from mutualrl.regimes.answers import HintedAnswer
from mutualrl.regimes.hinted import Hinted
from mutualrl.regimes.hints import shown_hint, with_hint
from mutualrl.regimes.round import RoundView, Sample
from mutualrl.regimes.round import Sampled as Drawn
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.rollouts import Rollouts
from mutualrl.seeds import policy_seed
from mutualrl.sources.prepare import Prepared
from mutualrl.tasks.prompting import as_prompt, prompt_ids
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: what was measured of the recommendation (benchmarks/results/hints.json)
CAVEAT = (
    "Measured: on an embedded pool whose policies follow hints, own words ended above the peer's words (sgt), not more "
    "than .05 below GRPO, and with more solved among 64 samples, over seven seeds; they cost samples (docs/hints.md). "
    "Three seeds of longer runs ended below GRPO (docs/rivals.md). Compare with grpo over several seeds (mutualrl "
    "sweep)."
)


@dataclass(frozen=True, slots=True)
class HintRow:
    """One learner: of `prompts`, those with an open gate and a hint (`gated`); answers sampled to each with the hint,
    and as many without (`samples`), and the fractions that succeed; the difference with its 95 % bootstrap interval
    over prompts. Of the successes with the hint: fractions that are copies, and bare. `learnable`: fraction of the
    answers with the hint that `hinted` would learn. `rescues_per_round`, `tokens_per_round`: expected answers to learn,
    and tokens sampled for them, in a round of the recipe. `too_long`: prompts that leave no room with the hint."""

    learner: str
    prompts: int
    gated: int
    samples: int
    success_with: float
    success_without: float
    difference: float
    difference_ci: tuple[float, float]
    copies: float
    bare: float
    learnable: float
    rescues_per_round: float
    tokens_per_round: float
    too_long: int


def hint_rows(
    plan: DiagnosticPlan,
    sampled: SampledPool,
    loaded: Loaded,
    sources: Mapping[str, Prepared],
    bars: ProgressBars,
) -> list[HintRow]:
    """Return one row per model. `loaded`: the rollouts that were sampled of all of them."""
    names = loaded.table["policy"].unique().to_pylist()
    by_policy = {policy: _rollouts(loaded.table, policy) for policy in names}
    recorded = {key: source.source.table for key, source in sources.items()}
    prompts = {prompt.id: prompt for prompt in sampled.prompts}
    rows = []
    for learner, own in by_policy.items():
        regime = _regime(sampled, learner, plan.thresholds.of(learner))
        peers = {key: each for key, each in by_policy.items() if key != learner}
        peers |= {key: Rollouts.of(_recorded(texts), key) for key, texts in recorded.items()}
        view = RoundView(0, learner, plan.seed, own, peers, sources=dict.fromkeys(recorded, SourceTraits()))
        asked = regime.samples_on(regime.shown(view))
        sampler = _Sampler(plan, sampled, learner, loaded.tokenizers[learner], loaded.contexts[learner], prompts, bars)
        with_hints = sampler.answers(asked, "with hints", 1)
        answers = [HintedAnswer.of(*each, None, regime.success_above) for each in with_hints]
        fitting = {answer.sample.prompt_id for answer in answers}
        bare = [Sample(prompt_id, n) for prompt_id in sorted(fitting) for n in range(regime.samples)]
        without_hints = sampler.answers(bare, "without hints", 2)
        without = [HintedAnswer.of(*each, None, regime.success_above) for each in without_hints]
        rows.append(_row(sampler, own, regime, answers, without, len({s.prompt_id for s in asked})))
    return rows


def _regime(sampled: SampledPool, learner: str, thresholds: Thresholds) -> Hinted:
    """Return the rule with a learner's thresholds, and the settings of its recipe if that names it."""
    regime = sampled.recipe.regime_of(learner)
    known = regime if isinstance(regime, Hinted) else Hinted()
    return known.model_copy(
        update={"success_above": thresholds.success_above, "failure_below": thresholds.failure_below}
    )


def _rollouts(rollouts: pa.Table, policy: str) -> Rollouts:
    """Return a model's sampled rollouts."""
    chosen = rollouts.filter(pc.equal(rollouts["policy"], policy))
    columns = (chosen[key].to_pylist() for key in ("prompt_id", "rollout", "reward", "ended", "y_text"))
    return Rollouts.of(
        [Rollout(p, n, r, e, trajectory=Trajectory.of_text(t)) for p, n, r, e, t in zip(*columns, strict=True)], policy
    )


def _recorded(texts: pa.Table) -> list[Rollout]:
    columns = (texts[key].to_pylist() for key in ("prompt_id", "reward", "y_text"))
    return [
        Rollout(p, n, r, True, trajectory=Trajectory.of_text(t))
        for n, (p, r, t) in enumerate(zip(*columns, strict=True))
    ]


@dataclass(frozen=True)
class _Sampler:
    """Sampling of one learner's answers."""

    plan: DiagnosticPlan
    sampled: SampledPool
    learner: str
    tokenizer: PreTrainedTokenizerBase
    context: int
    prompts: Mapping[str, Prompt]
    bars: ProgressBars

    def answers(self, samples: Sequence[Sample], label: str, stream: int) -> list[tuple[Sample, Drawn]]:
        """Return the rollout of every sample whose prompt leaves room for it. `stream` tells random numbers apart."""
        shown: dict[tuple[str, str], list[Sample]] = {}
        for sample in samples:
            shown.setdefault((sample.prompt_id, sample.hint), []).append(sample)
        hints = {key: shown_hint(key[1], self.tokenizer, self.sampled.sampling.max_new_tokens) for key in shown}
        contents = [
            with_hint(as_prompt(self.prompts[prompt_id].content, self.tokenizer), hints[prompt_id, hint][0])
            for prompt_id, hint in shown
        ]
        template = self.plan.templates.get(self.learner)
        ids = dict(zip(shown, prompt_ids(contents, self.tokenizer, template), strict=True))
        room = self.context - self.sampled.sampling.max_new_tokens
        fitting = [key for key in shown if len(ids[key]) <= room]
        if not fitting:
            return []
        seed = policy_seed(self.plan.seed, self.learner, stream)
        count = len(shown[fitting[0]])
        sampling = Sampling(self.sampled.sampling.max_new_tokens, self.sampled.sampling.temperature, count, seed)
        progress = self.bars.track(f"{self.learner}: {label}", len(fitting))
        groups = completions(self.plan, self.sampled, self.learner, [ids[key] for key in fitting], sampling, progress)
        pairs = [
            (sample, completion)
            for key, group in zip(fitting, groups, strict=True)
            for sample, completion in zip(shown[key], group, strict=True)
        ]
        judged_on = [(self.prompts[sample.prompt_id], completion) for sample, completion in pairs]
        rewards = rewards_by(self.sampled, self.learner, judged_on, self.tokenizer)
        drawn = []
        for (sample, completion), reward in zip(pairs, rewards, strict=True):
            hint_ids = hints[sample.prompt_id, sample.hint][1]
            result = Drawn(
                EncodedRun(completion.token_ids), completion.trajectory, completion.ended, reward, None, hint_ids
            )
            drawn.append((sample, result))
        return drawn


def _row(
    sampler: _Sampler,
    own: Rollouts,
    regime: Hinted,
    answers: Sequence[HintedAnswer],
    without: Sequence[HintedAnswer],
    gated: int,
) -> HintRow:
    prompts = len(set(own.prompt_ids))
    fitting = sorted({answer.sample.prompt_id for answer in answers})
    rates = np.zeros((len(fitting), 2))
    for column, drawn in enumerate((answers, without)):
        for place, prompt_id in enumerate(fitting):
            rates[place, column] = np.mean([a.success for a in drawn if a.sample.prompt_id == prompt_id])
    learnable = [answer for answer in answers if answer.success and not answer.is_left_out(regime.max_copy)]
    successes = [answer for answer in answers if answer.success]
    means = rates.mean(axis=0) if fitting else np.full(2, np.nan)
    round_share = (sampler.sampled.recipe.round.prompts or 1) / max(prompts, 1)
    return HintRow(
        learner=sampler.learner,
        prompts=prompts,
        gated=gated,
        samples=len(answers),
        success_with=float(means[0]),
        success_without=float(means[1]),
        difference=float(means[0] - means[1]),
        difference_ci=mean_interval(rates[:, 0] - rates[:, 1], sampler.plan.seed),
        copies=float(ratio(sum(a.copied >= regime.max_copy for a in successes), len(successes))),
        bare=float(ratio(sum(a.bare for a in successes), len(successes))),
        learnable=float(ratio(len(learnable), len(answers))),
        rescues_per_round=len(learnable) * round_share,
        tokens_per_round=sum(len(answer.drawn.ids) for answer in answers) * round_share,
        too_long=gated - len(fitting),
    )


@dataclass(frozen=True, slots=True)
class Hints:
    """What hints would do."""

    hints: tuple[HintRow, ...]


def markdown(rows: Sequence[HintRow]) -> str:
    """Return the table."""
    head = ["learner", "gate open", "success with hint", "without", "difference [95 %]", "copies", "bare", "to learn"]
    head += ["per round", "tokens per round"]
    cells = []
    for row in rows:
        low, high = row.difference_ci
        cells.append(
            [
                name(row.learner),
                f"{row.gated}/{row.prompts}",
                number(row.success_with, 3),
                number(row.success_without, 3),
                f"{number(row.difference, 3)} [{number(low, 3)}, {number(high, 3)}]",
                number(row.copies, 3),
                number(row.bare, 3),
                number(row.learnable, 3),
                number(row.rescues_per_round, 1),
                number(row.tokens_per_round, 0),
            ]
        )
    return table("A peer's success as a hint, where the gate opens", head, cells)
