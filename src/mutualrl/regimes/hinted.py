r"""Hinted: where the learner fails entirely and a peer succeeds, it sees the success, answers in its own words, and
learns those of its answers that its rewards confirm, under the prompt without the hint.

A peer's success is often a good hint and a bad target: its words are unlikely under the learner, and the update moves
the learner far for little. Sources of the idea: OPCoD (arXiv 2606.14368), ZPPO (arXiv 2606.18216), STaR's
rationalisation (arXiv 2203.14465; `hint: answer`); self-distillation with hints (arXiv 2605.30070). The gate, and the
weight and the mean of the NLL, are SGT's.

With `loss: policy_gradient`, y ~ mu = pi(. | x, h) is an off-policy sample for pi(. | x): each token has the weight
min(pi(y_t | x, y_<t) / mu(y_t | y_<t), cap) * A, with A from the group of the n own rollouts and the hinted ones. The
bias is derived in `design/hinted.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import field_validator, model_validator

from mutualrl.records import PublishSchema, plain_ids
from mutualrl.regimes.advantages import group_by_prompt, pool_advantages, standard_deviation, ungroup
from mutualrl.regimes.gating import AllFail, Candidate, gate, require_ordered, successes_of, unsolved_by
from mutualrl.regimes.regime import SUCCESS_ABOVE, Problem, Regime, setting
from mutualrl.regimes.round import (
    ExtraRow,
    Passage,
    Plan,
    Requests,
    RoundView,
    RowSource,
    RowStatistics,
    Sample,
    Sampled,
    UpperBound,
)
from mutualrl.regimes.sgt import SGT
from mutualrl.rollouts import Rollouts
from mutualrl.seeds import seeded
from mutualrl.storage.metrics import Metric
from mutualrl.tasks.boxed import last_boxed
from mutualrl.traits import RegimeTraits

#: shares of copied tokens at which confirmed answers are counted
SHARES = (0.5, 0.65, 0.8, 0.95)


@dataclass(frozen=True, slots=True)
class Shown:
    """Hint of a prompt: its text, and the success that it is from (None with `hint: none`)."""

    text: str
    success: Candidate | None


@dataclass(frozen=True, slots=True)
class HintedAnswer:
    """Sampled answer: whether it is a success; if so, the share of it that is copied and whether it is bare."""

    sample: Sample
    drawn: Sampled
    success: bool
    copied: float
    bare: bool


class Hinted(AllFail, Regime):
    """Hinted; the gate is SGT's `all`."""

    name = "hinted"
    summary = "where the learner fails entirely, it sees a peer's success and learns its own confirmed answers"
    traits = RegimeTraits(advantages="adjusts", requests_samples=True, accepts_sources=True)
    default_pool = "tiny-hints"
    metrics = (
        Metric("hinted/gate_rate", "fraction", "prompts whose gate opened", role="gate_rate"),
        Metric("hinted/confirmed", "rows", "own answers that joined the loss", role="rescues"),
        Metric("hinted/samples", "rollouts", "answers sampled with the hint"),
        Metric("hinted/success_rate", "fraction", "answers that the rewards confirm, copies and bare ones included"),
        Metric("hinted/copies", "rollouts", "confirmed answers left out as copies of the hint, bare ones among them"),
        *(
            Metric(f"hinted/copies_{round(100 * share)}", "rollouts", f"confirmed answers, {share:.0%} copied")
            for share in SHARES
        ),
        Metric("hinted/bare", "rollouts", "confirmed answers left out since they are nothing but the final answer"),
        Metric("hinted/sampled_tokens", "tokens", "tokens of the answers sampled with the hint"),
        Metric("hinted/nll", "nats per token", "mean NLL of the learnt answers (and of fallback's pairs)"),
        Metric("hinted/hint_nll", "nats per token", "mean NLL of the hints whose prompts gave an answer to learn"),
        Metric("hinted/ratio", "ratio", "mean over the tokens of policy-gradient rows of pi(. | x) over pi(. | x, h)"),
        Metric("hinted/capped", "fraction", "tokens of policy-gradient rows whose ratio is above `cap`"),
        Metric("hinted/fallback", "rows", "pairs of `fallback: sgt`"),
    )

    samples: int = setting(4, "answers sampled on each prompt whose gate opened", ge=1)
    hint: Literal["solution", "answer", "shuffled", "none"] = setting(
        "solution",
        "what the learner sees: the success; its final answer; (controls) the success on another prompt, or nothing, "
        "and the answers are then further rollouts of the prompt's group",
        variants=("answer", "shuffled", "none"),
    )
    loss: Literal["nll", "policy_gradient"] = setting(
        "nll",
        "NLL of the confirmed answers, or the policy gradient of all answers but copies and bare ones, with advantages "
        "over the group with the own rollouts",
        acts_with={"hint": ("solution", "answer", "shuffled")},
    )
    weight: float = setting(0.1, "lambda, the weight of the NLL added to the GRPO loss", ge=0)
    cap: float = setting(
        1.0, "upper bound on the ratio of each token", acts_with={"loss": "policy_gradient"}, gt=0
    )  # fmt: skip
    success_above: float = setting(SUCCESS_ABOVE, "a rollout with a reward above this is a success")
    failure_below: float = setting(0.2, "a rollout with a reward below this is a failure")
    pick: Literal["uniform", "shortest"] = setting("uniform", "choice among several successes; shortest: in characters")
    hint_template: str | None = setting(
        None, "prompt and hint as the learner sees them, with {prompt} and {hint}; null: one for chats, one for texts"
    )
    max_hint_tokens: int | None = setting(
        None, "maximum length of the hint, in the learner's tokens; null: `max_completion_length`", ge=1
    )
    max_copy: float = setting(
        0.8,
        "an answer is a copy if its longest common substring with the hint has this share of its tokens",
        acts_with={"hint": ("solution", "answer", "shuffled")},
        gt=0,
        le=1,
    )
    fallback: Literal["nothing", "sgt"] = setting("nothing", "for prompts without a confirmed answer: SGT's pair")
    reduce: Literal["mean", "sum"] = setting("mean", "reduction of an answer's NLL over its tokens")
    normalize: Literal["pairs", "prompts"] = setting(
        "pairs", "unit that the NLL is averaged over; with prompts, the answers of a prompt share its weight"
    )

    @field_validator("hint_template")
    @classmethod
    def _complete(cls, value: str | None) -> str | None:
        if value is not None and (value.count("{prompt}") != 1 or value.count("{hint}") != 1):
            raise ValueError(f"found {value!r:.80}, expected a text with one {{prompt}} and one {{hint}}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Hinted:
        require_ordered(self)
        return self

    @property
    def by_policy_gradient(self) -> bool:
        """Return whether answers are learnt by policy gradient: samples without a hint are rollouts like all others."""
        return self.loss == "policy_gradient" or self.hint == "none"

    def publishes(self) -> PublishSchema:
        """Return the fields that peers read: the texts of successes; without any use for them, only the rewards."""
        if self.hint == "none" and self.fallback == "nothing":
            return PublishSchema()
        return PublishSchema.of("text", text_above=self.success_above)

    def late(self) -> bool:
        """Return whether a success may arrive late: not where answers join the advantages of their round's group."""
        return not self.by_policy_gradient

    def uses_ratios(self) -> bool:
        """Return whether answers are weighed by ratios to what they were sampled with."""
        return self.by_policy_gradient and self.hint != "none"

    def changes_advantages(self) -> bool:
        """Return whether answers join the advantages of their group."""
        return self.by_policy_gradient

    def ineffective_settings(self) -> list[Problem]:
        """Return the non-default settings without effect, also those that depend on two others."""
        unused: dict[str, str] = {}
        if self.by_policy_gradient and self.fallback == "nothing":
            unused |= dict.fromkeys(("weight", "reduce", "normalize"), "with advantages and without a fallback")
        if self.hint == "none":
            unused |= dict.fromkeys(("hint_template", "max_hint_tokens"), "without a hint")
            unused |= {} if self.fallback == "sgt" else {"pick": "without a hint"}
        defaults = Hinted()
        problems = super().ineffective_settings()
        for key, reason in unused.items():
            if (value := getattr(self, key)) != getattr(defaults, key):
                problems.append((key, f"found {value!r}, which has no effect {reason}; leave it out"))
        return problems

    def requests(self, view: RoundView) -> Requests:
        """Return the answers to sample, and the hints whose NLL is logged."""
        shown = self.shown(view)
        return Requests(nll=tuple(self._hint_passages(view, shown).values()), samples=tuple(self.samples_on(shown)))

    def plan(self, view: RoundView) -> Plan:
        """Return the confirmed answers as rows: gate, draw of hints, sampled answers, filters."""
        shown = self.shown(view)
        answers = [
            self.judged(sample, drawn)
            for sample in self.samples_on(shown)
            if (drawn := view.results.samples.get(sample)) is not None
        ]
        learnable = [answer for answer in answers if self.hint == "none" or not self.leaves_out(answer)]
        confirmed = [answer for answer in learnable if answer.success]
        advantages = None
        if self.by_policy_gradient:
            rows, advantages = self._policy_gradient(view, learnable, shown)
        else:
            rows = self._nll(view, confirmed, shown)
        fallback = self._fallback(view, {answer.sample.prompt_id for answer in confirmed})
        metrics = {
            "hinted/gate_rate": len(self.opened(view)) / max(len(view.own_groups()), 1),
            "hinted/fallback": float(len(fallback)),
            **self._metrics(answers, confirmed),
            **self._hint_nll(view, shown, confirmed),
        }
        return Plan(advantages=advantages, rows=(*rows, *fallback), metrics=metrics)

    def row_metrics(self, statistics: RowStatistics) -> dict[str, float]:
        """Return the mean NLL per token of the rows, and their ratios."""
        metrics = {} if statistics.nll is None else {"hinted/nll": statistics.nll}
        if statistics.ratios.size:
            metrics["hinted/ratio"] = float(statistics.ratios.mean())
            metrics["hinted/capped"] = float((statistics.ratios > self.cap).mean())
        return metrics

    # ---- the gate, and what is shown

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return the prompts on which the learner's part of the gate is open."""
        return unsolved_by(group_by_prompt(rollouts.prompt_ids, rollouts.rewards), self)

    def opened(self, view: RoundView) -> list[str]:
        """Return the prompts whose gate opened, sorted."""
        rewards = successes_of(view).rewards
        own = view.own_groups()
        return [prompt_id for prompt_id in sorted(own) if gate(own[prompt_id], rewards.get(prompt_id, ()), self)]

    def shown(self, view: RoundView) -> dict[str, Shown]:
        """Return the hint of every prompt whose gate opened and that has one."""
        opened = self.opened(view)
        if self.hint == "none":
            return {prompt_id: Shown("", None) for prompt_id in opened}
        candidates = successes_of(view).candidates
        drawn: dict[str, Candidate] = {}
        for prompt_id in opened:
            successes = sorted(candidates(prompt_id, self.success_above), key=lambda c: (c.policy, c.rollout))
            if successes:
                drawn[prompt_id] = self._draw(view, prompt_id, successes)
        if self.hint == "shuffled":
            drawn = _of_another_prompt(drawn, view)
        texts = {prompt_id: final_answer(c.text) if self.hint == "answer" else c.text for prompt_id, c in drawn.items()}
        return {prompt_id: Shown(text, drawn[prompt_id]) for prompt_id, text in texts.items() if text.strip()}

    def _draw(self, view: RoundView, prompt_id: str, successes: Sequence[Candidate]) -> Candidate:
        """Draw a prompt's success: it depends only on (run seed, round, prompt, learner)."""
        if self.pick == "shortest":
            return min(successes, key=lambda candidate: len(candidate.text))
        index = seeded(view.run_seed, view.round, f"hint {prompt_id}", view.learner).integers(len(successes))
        return successes[int(index)]

    def samples_on(self, shown: Mapping[str, Shown]) -> list[Sample]:
        """Return the answers to sample."""
        traced = self.uses_ratios()
        return [
            Sample(prompt_id, number, hint.text, self.hint_template, self.max_hint_tokens, logprobs=traced)
            for prompt_id, hint in shown.items()
            for number in range(self.samples)
        ]

    def _hint_passages(self, view: RoundView, shown: Mapping[str, Shown]) -> dict[str, Passage]:
        """Return the hints as completions of their prompts, where the learner can encode them."""
        if self.hint != "solution":
            return {}
        hints = [(prompt_id, hint.success) for prompt_id, hint in shown.items() if hint.success is not None]
        encoded = view.transfer.encode([(success.text, success.ended) for _, success in hints])
        pairs = zip(hints, encoded, strict=True)
        return {prompt_id: (prompt_id, plain_ids(ids)) for (prompt_id, _), ids in pairs if ids is not None and len(ids)}

    # ---- answers

    def judged(self, sample: Sample, drawn: Sampled) -> HintedAnswer:
        """Return what a sampled answer is."""
        body = drawn.ids[:-1] if drawn.ended else drawn.ids  # a hint has no end token to copy
        success = drawn.reward > self.success_above
        copied = longest_common_substring(body, drawn.hint_ids) / max(len(body), 1) if success else 0.0
        return HintedAnswer(sample, drawn, success, copied, success and is_bare(drawn.text))

    def leaves_out(self, answer: HintedAnswer) -> bool:
        """Return whether an answer is left out: a confirmed one that is a copy, or bare."""
        return answer.copied >= self.max_copy or answer.bare

    def _nll(self, view: RoundView, confirmed: Sequence[HintedAnswer], shown: Mapping[str, Shown]) -> list[ExtraRow]:
        """Return the confirmed answers as rows under the prompt without the hint."""
        counts = _counts(confirmed)
        by_prompt = self.normalize == "prompts"
        rows = []
        for answer in confirmed:
            row = self._row(view, answer, shown)
            weight = self.weight / counts[row.prompt_id] if by_prompt else self.weight
            mean: Literal["prompts", "rows"] = "prompts" if by_prompt else "rows"
            rows.append(replace(row, loss="nll", weight=weight, mean=mean, reduce=self.reduce))
        return rows

    def _policy_gradient(
        self, view: RoundView, answers: Sequence[HintedAnswer], shown: Mapping[str, Shown]
    ) -> tuple[list[ExtraRow], tuple[float, ...]]:
        """Return answers as rows, and the own advantages. Both are over the group of a prompt's own rollouts and
        answers: own advantages change by the difference to those over the own rollouts alone, so that what a regime
        before this one has changed stays. Whitened ones are computed anew (`whitened_plan` whitens them)."""
        own = view.own_groups()
        scored = [answer for answer in answers if not math.isnan(answer.drawn.reward)]
        rewards: dict[str, list[float]] = {prompt_id: [] for prompt_id in own}
        for answer in scored:
            rewards[answer.sample.prompt_id].append(answer.drawn.reward)
        everything = [*view.rewards, *(answer.drawn.reward for answer in scored)]
        alone, together = standard_deviation(view.rewards), standard_deviation(everything)
        changes: dict[str, list[float]] = {}
        graded: dict[str, list[float]] = {}
        for prompt_id, group in rewards.items():
            mine, pool = own[prompt_id], [*own[prompt_id], *group]
            local = pool_advantages(mine, mine, scale=view.scale, batch_standard_deviation=alone)
            deviation = together if group else alone
            pooled = pool_advantages(pool, pool, scale=view.scale, batch_standard_deviation=deviation)
            changes[prompt_id] = (pooled[: len(mine)] - (0.0 if view.whiten else local)).tolist()
            graded[prompt_id] = pooled[len(mine) :].tolist()
        difference = ungroup(view.prompt_ids, changes)
        before = [0.0] * len(difference) if view.whiten else view.advantages
        advantages = tuple(old + new for old, new in zip(before, difference, strict=True))
        places = dict.fromkeys(graded, 0)
        rows = []
        for answer in scored:
            key = answer.sample.prompt_id
            row = replace(self._row(view, answer, shown), advantage=graded[key][places[key]], mean="pool")
            places[key] += 1
            if self.hint != "none":
                row = replace(row, logprobs=answer.drawn.logprobs, bound=UpperBound(self.cap))
            if view.mask_truncated and not answer.drawn.ended:
                row = replace(row, mask=np.zeros(len(row.token_ids), dtype=np.bool_))
            rows.append(row)
        return rows, advantages

    def _row(self, view: RoundView, answer: HintedAnswer, shown: Mapping[str, Shown]) -> ExtraRow:
        hint = shown[answer.sample.prompt_id]
        source = RowSource(view.learner, answer.sample.number, view.round)
        if hint.success is not None:
            source = RowSource(hint.success.policy, hint.success.rollout, view.round)
        return ExtraRow(
            answer.sample.prompt_id,
            source,
            answer.drawn.ids,
            loss="policy_gradient",
            text=answer.drawn.text,
            hint=hint.text if answer.success else "",  # only confirmed answers are rescues
        )

    def _fallback(self, view: RoundView, answered: set[str]) -> list[ExtraRow]:
        """Return SGT's pairs of the prompts without a confirmed answer."""
        if self.fallback == "nothing":
            return []
        keys = ("weight", "success_above", "failure_below", "pick", "reduce", "normalize")
        sgt = SGT(**{key: getattr(self, key) for key in keys})
        return [row for row in sgt.plan(view).rows if row.prompt_id not in answered]

    # ---- metrics

    def _metrics(self, answers: Sequence[HintedAnswer], confirmed: Sequence[HintedAnswer]) -> dict[str, float]:
        successes = [answer for answer in answers if answer.success]
        metrics = {
            "hinted/confirmed": float(len(confirmed)),
            "hinted/samples": float(len(answers)),
            "hinted/success_rate": len(successes) / max(len(answers), 1),
            "hinted/copies": float(sum(answer.copied >= self.max_copy for answer in successes)),
            "hinted/bare": float(sum(answer.bare for answer in successes)),
            "hinted/sampled_tokens": float(sum(len(answer.drawn.ids) for answer in answers)),
        }
        for share in SHARES:
            count = sum(answer.copied >= share for answer in successes)
            metrics[f"hinted/copies_{round(100 * share)}"] = float(count)
        return metrics

    def _hint_nll(
        self, view: RoundView, shown: Mapping[str, Shown], confirmed: Sequence[HintedAnswer]
    ) -> dict[str, float]:
        passages = self._hint_passages(view, shown)
        values = [
            view.results.nll[passages[prompt_id]]
            for prompt_id in _counts(confirmed)
            if prompt_id in passages and passages[prompt_id] in view.results.nll
        ]
        return {"hinted/hint_nll": float(np.mean(values))} if values else {}


def _counts(answers: Sequence[HintedAnswer]) -> dict[str, int]:
    """Return the number of answers of each prompt."""
    counts: dict[str, int] = {}
    for answer in answers:
        counts[answer.sample.prompt_id] = counts.get(answer.sample.prompt_id, 0) + 1
    return counts


def _of_another_prompt(drawn: Mapping[str, Candidate], view: RoundView) -> dict[str, Candidate]:
    """Return for each prompt the success drawn for another one, every success used once: a cycle in random order. A
    single prompt has no other: none."""
    prompts = sorted(drawn)
    if len(prompts) < 2:
        return {}
    order = seeded(view.run_seed, view.round, "shuffled hints", view.learner).permutation(len(prompts))
    cycle = [prompts[place] for place in order]
    return {prompt_id: drawn[cycle[place - 1]] for place, prompt_id in enumerate(cycle)}


def final_answer(text: str) -> str:
    r"""Return a solution's final answer: the content of its last `\boxed{...}`, else its last line with text."""
    boxed = last_boxed(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return boxed if boxed is not None else lines[-1] if lines else ""


def is_bare(text: str) -> bool:
    r"""Return whether an answer is nothing but its final answer: without its last `\boxed{...}`, no letter or digit is
    left; without a box, it has no more than one word (of ASCII: other scripts may have no spaces)."""
    boxed = last_boxed(text)
    if boxed is None:
        return len(text.split()) < 2 and text.isascii()
    before, _, after = text.rpartition(f"\\boxed{{{boxed}}}")
    return not any(character.isalnum() for character in before + after)


def longest_common_substring(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest run of tokens that two sequences share: O(len(a) * len(b)), one row at a
    time."""
    first, second = np.asarray(a), np.asarray(b)
    if not first.size or not second.size:
        return 0
    longest, before = 0, np.zeros(len(second) + 1, dtype=np.int64)
    for token in first:
        row = np.zeros_like(before)
        row[1:] = np.where(second == token, before[:-1] + 1, 0)
        longest = max(longest, int(row.max()))
        before = row
    return longest
