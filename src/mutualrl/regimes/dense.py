"""Dense teaching at the gate: where the learner fails entirely and a source succeeds, the source judges its own tokens.

On-policy distillation (tinker-cookbook; log T - log S of the learner's tokens as their advantage) on the gated prompts
of SGT only, across tokenizers by byte groups (`thl.judged`); everywhere else it is GRPO, bit for bit. Measured on the
embedded pools: docs/dense.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from mutualrl.records import PublishSchema, Score, plain_ids
from mutualrl.regimes.advantages import group_by_prompt
from mutualrl.regimes.gating import AllFail, require_ordered, unsolved_by
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.regime import SELECTION, SUCCESS_ABOVE, Problem, Regime, Settings, setting
from mutualrl.regimes.round import Passage, Plan, Requests, RoundView
from mutualrl.rollouts import Rollouts
from mutualrl.seeds import seeded
from mutualrl.storage.metrics import Metric
from mutualrl.thl.judged import ByteRatios, Read, token_ratios
from mutualrl.traits import SourceTraits

#: settings of TRL under which an advantage per token would not be what the regime declares, with the value expected
EXPECTED: Mapping[str, object] = {
    "temperature": 1.0,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
}


class JudgedRollout(NamedTuple):
    """An own rollout that a source has scored: its row, and how source and learner read it."""

    row: int
    passage: Passage
    score: Score


class Dense(Regime, AllFail):
    """A source's log-probs of the learner's own tokens, minus the learner's, as their advantages, at the gate."""

    name = "dense"
    summary = "where the learner fails entirely, a model that succeeds judges the learner's own tokens"
    level = "outcome"
    default_pool = "tiny-judge"
    metrics = (
        Metric("dense/gate_rate", "fraction", "prompts on which a source's judgement was used", role="gate_rate"),
        Metric("dense/rollouts", "rollouts", "own rollouts that were judged"),
        Metric("dense/tokens", "tokens", "own tokens that were judged"),
        Metric("dense/ratio", "nats per token", "mean log-prob of the source minus the learner's, before the clip"),
        Metric("dense/largest", "nats per token", "largest absolute log-ratio"),
        Metric("dense/clipped", "fraction", "judged tokens beyond `clip`"),
        Metric("dense/uneven", "fraction", "judged tokens in byte groups of several tokens of either side"),
        Metric("dense/left_out", "fraction", "tokens of judged rollouts in long groups, or after a control token"),
        Metric(
            "dense/unread",
            "rollouts",
            "own rollouts at the gate without a judgement: cut off, looping, or not to be read",
        ),
        Metric("dense/graded", "prompts", "at the gate whose rewards differ: they stay GRPO's"),
    )

    pick: ClassVar[Literal["uniform"]] = "uniform"

    coef: float = setting(0.1, "factor of a token's log-ratio in its advantage; 0 is GRPO", ge=0)
    clip: float = setting(5.0, "largest absolute log-ratio per token, nats", gt=0)
    max_group: int = setting(8, "most tokens of either side in a byte group that is judged", ge=1)
    success_above: float = setting(SUCCESS_ABOVE, "a source's answer with a reward above this is a success")
    failure_below: float = setting(0.2, "an own rollout with a reward below this is a failure")

    @model_validator(mode="after")
    def _consistent(self) -> Dense:
        require_ordered(self)
        return self

    def needs(self) -> Needs:
        """Return that a source reads the learner's texts, all of which are published, and scores them in its round."""
        return Needs(reads=PublishSchema.of("text"), source=True, selections=True, scores=True)

    def source_problem(self, traits: SourceTraits = SELECTION) -> str | None:
        """Return why it cannot use a source: one that does not score given texts."""
        if traits.logprobs:
            return None
        return f"regime {self.name!r} needs a source that scores the learner's texts; expected a source frozen:MODEL"

    def turns_problems(self, *, turns: bool) -> list[Problem]:
        """Return that it judges texts, not runs with tools."""
        problem = f"regime {self.name!r} judges texts, not runs with tools; expected hinted, sgt or guided"
        return [("turns", problem)] if turns else []

    def problems(self, trainer: Settings) -> Sequence[Problem]:
        """Return the trainer's settings under which advantages per token would be something else."""
        problems = [
            (key, f"found {trainer[key]!r}, under which an advantage per token is not what {self.name!r} declares; "
             f"expected {value!r}")
            for key, value in EXPECTED.items()
            if trainer.get(key) is not None and trainer[key] != value
        ]  # fmt: skip
        if trainer.get("loss_type") == "vespo":
            problems.append(("loss_type", f"found 'vespo', which weighs rollouts; expected another for {self.name!r}"))
        return problems

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return the prompts on which all own rollouts fail."""
        return unsolved_by(group_by_prompt(rollouts.prompt_ids, rollouts.rewards), self)

    def requests(self, view: RoundView) -> Requests:
        """Return the judged rollouts, whose log-probs under the learner are needed."""
        return Requests(logprobs=tuple(each.passage for each in self._judged(view, self._gate(view)[0])))

    def plan(self, view: RoundView) -> Plan:
        """Return the advantages per token of the judged rollouts."""
        opened, graded = self._gate(view)
        by_token: dict[int, npt.NDArray[np.float32]] = {}
        found: list[ByteRatios] = []
        for each in self._judged(view, opened):
            prompt_id, ids = each.passage
            own_ends = view.transfer.ends_of(ids[:-1])
            own = Read(np.append(own_ends, own_ends[-1:]), view.results.logprobs[prompt_id, ids], True)
            other = Read(each.score.ends, each.score.logprobs.astype(np.float64), True)
            if int(own.ends[-1] if len(own.ends) else 0) != int(other.ends[-1]):
                continue  # the text that was published is not what these ids spell
            ratios = token_ratios(own, other, self.max_group)
            found.append(ratios)
            by_token[each.row] = (self.coef * np.clip(ratios.values, -self.clip, self.clip)).astype(np.float32)
        used = {view.prompt_ids[row] for row in by_token}
        unread = sum(prompt_id in opened for prompt_id in view.prompt_ids) - len(by_token)
        metrics = {
            "dense/gate_rate": len(used) / max(len(set(view.prompt_ids)), 1),
            "dense/rollouts": float(len(by_token)),
            "dense/unread": float(unread),
            "dense/graded": float(len(graded)),
        }
        return Plan(metrics=metrics | self._ratio_metrics(found), token_advantages=by_token if self.coef else {})

    def _ratio_metrics(self, found: Sequence[ByteRatios]) -> dict[str, float]:
        """Return the statistics of the judged tokens; without any the counts alone."""
        tokens = sum(int(each.judged.sum()) for each in found)
        if not tokens:
            return {"dense/tokens": 0.0}
        values = np.concatenate([each.values[each.judged] for each in found])
        every = sum(len(each.values) for each in found)
        return {
            "dense/tokens": float(tokens),
            "dense/ratio": float(values.mean()),
            "dense/largest": float(np.abs(values).max()),
            "dense/clipped": float((np.abs(values) > self.clip).mean()),
            "dense/uneven": float(np.concatenate([each.uneven[each.judged] for each in found]).mean()),
            "dense/left_out": 1 - tokens / every,
        }

    def _gate(self, view: RoundView) -> tuple[set[str], set[str]]:
        """Return the prompts that all own rollouts fail and a source that scores has solved: those whose own rewards
        are all equal, so that their advantages are 0, and those whose rewards differ, of which GRPO teaches."""
        failed, solved = set(self.unsolved(view.rollouts)), set[str]()
        for name in view.scores.keys() & view.sources.keys() & view.peers.keys():
            peer = view.peers[name]
            for prompt_id, reward, ended in zip(peer.prompt_ids, peer.rewards, peer.ended, strict=True):
                solved |= {prompt_id} if ended and reward > self.success_above else set()
        groups = view.own_groups()
        graded = {prompt_id for prompt_id in failed & solved if len(set(groups[prompt_id])) > 1}
        return (failed & solved) - graded, graded

    def _judged(self, view: RoundView, opened: set[str]) -> list[JudgedRollout]:
        """Return the own rollouts of the opened prompts that a source has scored; of several sources, one is drawn per
        prompt."""
        by_prompt: dict[str, dict[str, list[Score]]] = {}
        for name in sorted(view.scores.keys() & view.sources.keys()):
            for score in view.scores[name]:
                if score.policy == view.learner and score.prompt_id in opened:
                    by_prompt.setdefault(score.prompt_id, {}).setdefault(name, []).append(score)
        own = {(each.prompt_id, each.index): (row, each) for row, each in enumerate(view.rollouts.rows("token_ids"))}
        judged = []
        for prompt_id, by_source in sorted(by_prompt.items()):
            draw = seeded(view.run_seed, view.round, prompt_id, view.learner)
            drawn = sorted(by_source)[int(draw.integers(len(by_source)))]
            for score in by_source[drawn]:
                row, rollout = own[prompt_id, score.index]
                if rollout.ended and rollout.token_ids is not None:
                    judged.append(JudgedRollout(row, (prompt_id, plain_ids(rollout.token_ids)), score))
        return judged
