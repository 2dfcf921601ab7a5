r"""Hinted: where the learner fails entirely and a peer succeeds, it sees the success, answers in its own words, and
learns those of its answers that its rewards confirm, under the prompt without the hint.

A peer's success is often a good hint and a bad target: its words are unlikely under the learner, and the update moves
the learner far for little. Sources of the idea: OPCoD (arXiv 2606.14368), ZPPO (arXiv 2606.18216), STaR's
rationalisation (arXiv 2203.14465; `hint: answer`); self-distillation with hints (arXiv 2605.30070). The gate, and the
weight and the mean of the NLL, are SGT's. `hint: least`, the least hint that works, is NuRL's (arXiv 2509.25666) and
Scaf-GRPO's (arXiv 2510.19807) idea.

With tools, a success is a run of several turns, and a hint of its calls (`hint: plan`; ActGuide-RL, arXiv 2605.12004)
or of all of it. The learner acts itself, with its own template and tools, and learns its own tokens, not the tools'
results (`design/agents.md`).

With `loss: policy_gradient`, y ~ mu = pi(. | x, h) is an off-policy sample for pi(. | x): each token has the weight
min(pi(y_t | x, y_<t) / mu(y_t | y_<t), cap) * A, with A from the group of the n own rollouts and the hinted ones. The
bias is derived in `design/hinted.md`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import field_validator, model_validator

from mutualrl.records import REWARDS_ONLY, PublishSchema, plain_ids
from mutualrl.regimes.advantages import group_by_prompt
from mutualrl.regimes.answers import HintedAnswer, Shown, of_another_prompt, pooled_advantages
from mutualrl.regimes.gating import AllFail, Candidate, gate, require_ordered, successes_of, unsolved_by
from mutualrl.regimes.hints import FOR_AGENTS, KINDS, HintKind, first_words
from mutualrl.regimes.needs import Needs
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
    UpperBound,
)
from mutualrl.regimes.sgt import SGT
from mutualrl.rollouts import Rollouts
from mutualrl.seeds import seeded
from mutualrl.storage.metrics import Metric
from mutualrl.tasks.trajectories import names_of

Hint = Literal["solution", "least", "answer", "plan", "plan_and_answer", "shuffled", "none"]
SHOWN = tuple(name for name, kind in KINDS.items() if kind.is_shown)
#: shares of copied tokens at which confirmed answers are counted
SHARES = (0.5, 0.65, 0.8, 0.95)


class Hinted(AllFail, Regime):
    """Hinted; the gate is SGT's `all`."""

    name = "hinted"
    summary = "where the learner fails entirely, it sees a peer's success and learns its own confirmed answers"
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
        Metric(
            "hinted/sampled_tokens", "tokens", "tokens of the answers sampled with the hint, without tools' results"
        ),
        Metric("hinted/uncalled", "rollouts", "confirmed answers left out: no call, where the hinted run made one"),
        Metric("hinted/followed", "rollouts", "confirmed answers whose calls are those of the hinted run"),
        Metric("hinted/unknown_tools", "prompts", "hints that call a tool which the learner does not have"),
        Metric("hinted/nll", "nats per token", "mean NLL of the learnt answers (and of fallback's pairs)"),
        Metric("hinted/hint_nll", "nats per token", "mean NLL of the hints whose prompts gave an answer to learn"),
        Metric("hinted/ratio", "ratio", "mean over the tokens of policy-gradient rows of pi(. | x) over pi(. | x, h)"),
        Metric("hinted/capped", "fraction", "tokens of policy-gradient rows whose ratio is above `cap`"),
        Metric("hinted/fallback", "rows", "pairs of `fallback: sgt`"),
        Metric("hinted/unrenderable", "rows", "of `fallback: sgt`: runs that the learner's chat template cannot keep"),
    )

    samples: int = setting(4, "answers sampled on each prompt whose gate opened", ge=1)
    hint: Hint = setting(
        "solution",
        "what the learner sees: the success, of a run with tools all of it; its first quarter of words, and as long as "
        "no answer is confirmed half, three quarters and all of it; its final answer; of a run with tools its calls, "
        "without or with the answer; (controls) the success on another prompt, of a run with tools its calls; nothing, "
        "and the answers are then further rollouts of the prompt's group",
        variants=("least", "answer", "plan", "plan_and_answer", "shuffled", "none"),
    )
    loss: Literal["nll", "policy_gradient"] = setting(
        "nll",
        "NLL of the confirmed answers, or the policy gradient of all answers but copies and bare ones, with advantages "
        "over the group with the own rollouts",
        acts_with={"hint": SHOWN},
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
    max_tool_tokens: int = setting(
        128, "of a whole run, maximum length of each tool's result", acts_with={"hint": "solution"}, ge=1
    )
    max_copy: float = setting(
        0.8,
        "an answer is a copy if its longest common substring with the hint has this share of its tokens",
        acts_with={"hint": SHOWN},
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
    def kind(self) -> HintKind:
        """Return what a success gives as a hint."""
        return KINDS[self.hint]

    @property
    def teaching(self) -> SGT:
        """Return SGT with these settings, for prompts without a confirmed answer."""
        return SGT(**self.model_dump(include=set(SGT.model_fields)))

    @property
    def by_policy_gradient(self) -> bool:
        """Return whether answers are learnt by policy gradient: samples without a hint are rollouts like all others."""
        return self.loss == "policy_gradient" or not self.kind.is_shown

    def needs(self) -> Needs:
        """Return that it reads the texts of successes, or without any use for them only the rewards; answers that join
        the advantages of their group cannot be late."""
        unread = not self.kind.is_shown and self.fallback == "nothing"
        return Needs(
            reads=REWARDS_ONLY if unread else PublishSchema.of("text", text_above=self.success_above),
            advantages="adjusts",
            moves=self.by_policy_gradient,
            ratios=self.by_policy_gradient and self.kind.is_shown,
            late=not self.by_policy_gradient,
            renders_runs=self.fallback == "sgt",
            samples=True,
            selections=True,
            runs=True,
            nll_rows=True,
        )

    def ineffective_settings(self) -> list[Problem]:
        """Return the non-default settings without effect, also those that depend on two others."""
        unused: dict[str, str] = {}
        if self.by_policy_gradient and self.fallback == "nothing":
            unused |= dict.fromkeys(("weight", "reduce", "normalize"), "with advantages and without a fallback")
        if not self.kind.is_shown:
            unused |= dict.fromkeys(("hint_template", "max_hint_tokens"), "without a hint")
            unused |= {} if self.fallback == "sgt" else {"pick": "without a hint"}
        defaults = Hinted()
        problems = super().ineffective_settings()
        for key, reason in unused.items():
            if (value := getattr(self, key)) != getattr(defaults, key):
                problems.append((key, f"found {value!r}, which has no effect {reason}; leave it out"))
        return problems

    def turns_problems(self, *, turns: bool) -> list[Problem]:
        """Return why there is no plan without tools, and no first words with them."""
        problems: list[Problem] = []
        if turns and len(self.kind.shares) > 1:
            problem = "found 'least', the first words of a text, not of a run with tools; expected plan or solution"
            problems.append(("regime.hint", problem))
        if not turns and self.kind.is_of_calls:
            problem = (
                f"found {self.hint!r}, calls of tools, of which the task has none; expected task.tools or another hint"
            )
            problems.append(("regime.hint", problem))
        return problems

    def requests(self, view: RoundView) -> Requests:
        """Return the answers to sample, and the hints whose NLL is logged."""
        shown = self.shown(view)
        return Requests(
            nll=tuple(self._hint_passages(view, shown).values()),
            samples=tuple(self.asked(view, shown)),
        )

    def plan(self, view: RoundView) -> Plan:
        """Return the confirmed answers as rows: gate, draw of hints, sampled answers, filters."""
        shown = self.shown(view)
        answers = [
            HintedAnswer.of(sample, drawn, shown[sample.prompt_id].success, self.success_above)
            for sample in self.asked(view, shown)
            if (drawn := view.results.samples.get(sample)) is not None
        ]
        learnable = [answer for answer in answers if not self.kind.is_shown or not answer.is_left_out(self.max_copy)]
        confirmed = [answer for answer in learnable if answer.success]
        advantages = None
        if self.by_policy_gradient:
            rows, advantages = self._policy_gradient(view, learnable, shown)
        else:
            rows = self._nll(view, confirmed, shown)
        fallback, lost = self._fallback(view, {answer.sample.prompt_id for answer in confirmed})
        metrics = {
            "hinted/gate_rate": len(self.opened(view)) / max(len(view.own_groups()), 1),
            "hinted/fallback": float(len(fallback)),
            **lost,
            **self._metrics(answers, confirmed),
            **self._hint_nll(view, shown, confirmed),
            **self._calls(view, shown, answers),
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
        if not self.kind.is_shown:
            return {prompt_id: Shown("", None) for prompt_id in opened}
        candidates = successes_of(view).candidates
        drawn: dict[str, Candidate] = {}
        for prompt_id in opened:
            able = [each for each in candidates(prompt_id, self.success_above) if self.hint_of(each, view).strip()]
            if able:
                successes = sorted(able, key=lambda each: (each.policy, each.rollout))
                drawn[prompt_id] = self._draw(view, prompt_id, successes)
        if self.kind.is_shuffled:
            drawn = of_another_prompt(drawn, view)
        texts = {prompt_id: self.hint_of(success, view) for prompt_id, success in drawn.items()}
        return {prompt_id: Shown(text, drawn[prompt_id]) for prompt_id, text in texts.items() if text.strip()}

    def hint_of(self, success: Candidate, view: RoundView) -> str:
        """Return the hint that a success gives."""
        return self.kind.text(success.trajectory, lambda text: view.transfer.shortened(text, self.max_tool_tokens))

    def _draw(self, view: RoundView, prompt_id: str, successes: Sequence[Candidate]) -> Candidate:
        """Draw a prompt's success: it depends only on (run seed, round, prompt, learner)."""
        if self.pick == "shortest":
            return min(successes, key=lambda candidate: len(candidate.trajectory.text))
        index = seeded(view.run_seed, view.round, f"hint {prompt_id}", view.learner).integers(len(successes))
        return successes[int(index)]

    def asked(self, view: RoundView, shown: Mapping[str, Shown]) -> list[Sample]:
        """Return the answers to sample. With `hint: least`, those on the shortest hints, and on longer ones for prompts
        of which all answers so far are known and none is confirmed."""
        acting = bool(view.rollouts.tools())
        if len(self.kind.shares) == 1:
            return self.samples_on(shown, acting=acting)
        asked: list[Sample] = []
        for prompt_id, hint in shown.items():
            before = ""
            for length in self.kind.shares:
                text = first_words(hint.text, length)
                if text == before:  # too short a success for this step
                    continue
                samples = self.samples_on({prompt_id: replace(hint, text=text)})
                asked += samples
                if not self._in_vain(view, samples, hint.success):
                    break
                before = text
        return asked

    def _in_vain(self, view: RoundView, samples: Sequence[Sample], success: Candidate | None) -> bool:
        """Return whether all of these answers are known and none would be learnt."""
        if any(sample not in view.results.samples for sample in samples):
            return False
        known = [(sample, view.results.samples[sample]) for sample in samples]
        drawn = [(sample, each) for sample, each in known if each is not None]
        answers = [HintedAnswer.of(sample, each, success, self.success_above) for sample, each in drawn]
        return not any(answer.success and not answer.is_left_out(self.max_copy) for answer in answers)

    def samples_on(self, shown: Mapping[str, Shown], *, acting: bool = False) -> list[Sample]:
        """Return the answers to sample; `acting`: with tools."""
        traced = self.needs().ratios
        template = self.hint_template or (FOR_AGENTS if acting else None)
        samples = []
        for prompt_id, hint in shown.items():
            for number in range(self.samples):
                samples.append(Sample(prompt_id, number, hint.text, template, self.max_hint_tokens, logprobs=traced))
        return samples

    def _hint_passages(self, view: RoundView, shown: Mapping[str, Shown]) -> dict[str, Passage]:
        """Return the hints as completions of their prompts, where the learner can encode them."""
        if not self.kind.is_whole:
            return {}
        hints = [
            (prompt_id, hint.success)
            for prompt_id, hint in shown.items()
            if hint.success is not None and hint.success.trajectory.is_text
        ]
        if not hints:
            return {}
        encoded = view.transfer.encode([(success.trajectory.text, success.ended) for _, success in hints])
        pairs = zip(hints, encoded, strict=True)
        return {prompt_id: (prompt_id, plain_ids(ids)) for (prompt_id, _), ids in pairs if ids is not None and len(ids)}

    def _nll(self, view: RoundView, confirmed: Sequence[HintedAnswer], shown: Mapping[str, Shown]) -> list[ExtraRow]:
        """Return the confirmed answers as rows under the prompt without the hint."""
        learnt = [answer for answer in confirmed if answer.drawn.tokens]
        counts = Counter(answer.sample.prompt_id for answer in learnt)
        by_prompt = self.normalize == "prompts"
        rows = []
        for answer in learnt:
            row = self._row(view, answer, shown)
            weight = self.weight / counts[row.prompt_id] if by_prompt else self.weight
            mean: Literal["prompts", "rows"] = "prompts" if by_prompt else "rows"
            rows.append(replace(row, loss="nll", weight=weight, mean=mean, reduce=self.reduce))
        return rows

    def _policy_gradient(
        self, view: RoundView, answers: Sequence[HintedAnswer], shown: Mapping[str, Shown]
    ) -> tuple[list[ExtraRow], tuple[float, ...]]:
        """Return answers as rows, and the own advantages."""
        scored = [answer for answer in answers if not math.isnan(answer.drawn.reward)]
        advantages, graded = pooled_advantages(view, scored)
        rows = []
        for answer, advantage in zip(scored, graded, strict=True):
            row = replace(self._row(view, answer, shown), advantage=advantage, mean="pool")
            if self.kind.is_shown:
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
        encoded = answer.drawn.encoded
        return ExtraRow(
            answer.sample.prompt_id,
            source,
            encoded.ids,
            loss="policy_gradient",
            mask=None if encoded.mask is None else np.array(encoded.mask, dtype=np.bool_),
            trajectory=answer.drawn.trajectory,
            hint=answer.sample.hint if answer.success else "",  # only confirmed answers are rescues
        )

    def _fallback(self, view: RoundView, answered: set[str]) -> tuple[list[ExtraRow], dict[str, float]]:
        """Return SGT's pairs of the prompts without a confirmed answer, and what it could not render."""
        if self.fallback == "nothing":
            return [], {}
        teaching = self.teaching
        gated = teaching.gated(view)
        lost = {"hinted/unrenderable": float(gated.unrenderable)} if view.rollouts.tools() else {}
        return [row for row in teaching.rows(view, gated) if row.prompt_id not in answered], lost

    # ---- metrics

    def _metrics(self, answers: Sequence[HintedAnswer], confirmed: Sequence[HintedAnswer]) -> dict[str, float]:
        successes = [answer for answer in answers if answer.success]
        metrics = {
            "hinted/confirmed": float(len(confirmed)),
            "hinted/samples": float(len(answers)),
            "hinted/success_rate": len(successes) / max(len(answers), 1),
            "hinted/copies": float(sum(answer.copied >= self.max_copy for answer in successes)),
            "hinted/bare": float(sum(answer.bare for answer in successes)),
            "hinted/sampled_tokens": float(sum(answer.drawn.tokens for answer in answers)),
        }
        for share in SHARES:
            count = sum(answer.copied >= share for answer in successes)
            metrics[f"hinted/copies_{round(100 * share)}"] = float(count)
        return metrics

    def _calls(self, view: RoundView, shown: Mapping[str, Shown], answers: Sequence[HintedAnswer]) -> dict[str, float]:
        """Return the metrics of runs with tools; none for a task without."""
        if not (tools := view.rollouts.tools()):
            return {}
        foreign = 0
        for prompt_id, hint in shown.items():
            known = names_of(tools.get(prompt_id, "[]"))
            calls = [] if hint.success is None else hint.success.trajectory.calls
            foreign += any(call.name not in known for call in calls)
        return {
            "hinted/uncalled": float(sum(answer.uncalled for answer in answers)),
            "hinted/followed": float(sum(answer.followed for answer in answers)),
            "hinted/unknown_tools": float(foreign),
        }

    def _hint_nll(
        self, view: RoundView, shown: Mapping[str, Shown], confirmed: Sequence[HintedAnswer]
    ) -> dict[str, float]:
        passages = self._hint_passages(view, shown)
        values = [
            view.results.nll[passages[prompt_id]]
            for prompt_id in dict.fromkeys(answer.sample.prompt_id for answer in confirmed)
            if prompt_id in passages and passages[prompt_id] in view.results.nll
        ]
        return {"hinted/hint_nll": float(np.mean(values))} if values else {}
