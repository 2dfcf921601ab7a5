"""Guided rollouts: where the gate opened before, some own rollouts begin with a prefix of a peer's success.

Source: POPE (arXiv 2601.18779), BREAD (arXiv 2506.17211), Prefix-RFT (arXiv 2507.01679), with prefixes from peers. If
all of the learner's rollouts on a prompt fail and a peer succeeds, that success is remembered for `memory` rounds, or
until the learner succeeds on the prompt without a prefix. When the prompt recurs, a fraction `share` of its rollouts
start from a prefix of the success, of random length up to the fraction `max_prefix` of it. The prefix is masked from
the loss; the continuation is the learner's own on-policy sample, in one group with the other rollouts.

With tools, a prefix is whole turns of a peer's run. They are replayed in the learner's environment before it samples:
its tools are called with the peer's arguments, and a result that differs from the peer's ends the replay. Sources:
Guided-OPD (arXiv 2606.15912), TCOD (arXiv 2604.24005), ReOPD (arXiv 2607.04763).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import model_validator

from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes.advantages import group_by_prompt
from mutualrl.regimes.gating import (
    AllFail,
    Candidate,
    DrawKey,
    EncodedCandidate,
    Gated,
    draw_candidate,
    encode_candidates,
    gated_prompts,
    require_ordered,
    successes_of,
    unsolved_by,
)
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.regime import SUCCESS_ABOVE, Problem, Regime, Settings, no_turns_problems, setting
from mutualrl.regimes.round import GuideView, Plan, RoundView
from mutualrl.rollouts import Rollouts
from mutualrl.seeds import seeded
from mutualrl.storage.metrics import Metric
from mutualrl.trajectory import Trajectory

ROUNDING = 1e-9  # of products of fractions that are whole numbers: 7 * (1 - 6 / 7) is above 1 in floats


class Guided(AllFail, Regime):
    """Guided rollouts."""

    name = "guided"
    summary = "where the gate opened before, some own rollouts begin with a prefix of a peer's success"
    pick: ClassVar[Literal["uniform"]] = "uniform"
    metrics = (
        Metric("guided/gate_rate", "fraction", "prompts whose gate opened", role="gate_rate"),
        Metric("guided/rollouts", "rollouts", "own rollouts that began with a prefix"),
        Metric("guided/prefix_tokens", "tokens", "tokens of the prefixes; of replayed turns with their results"),
        Metric("guided/hints", "prompts", "prompts with a remembered success"),
        Metric("guided/unencodable", "rows", "successes that the learner cannot encode"),
        Metric("guided/unrenderable", "rows", "runs with tools that its chat template cannot keep, or without a turn"),
        Metric("guided/unguided_reward", "reward", "mean over own rollouts without a prefix", "reward, unguided"),
        Metric("guided/unguided_accuracy", "fraction", "successes among own rollouts without a prefix"),
        Metric("guided/guided_reward", "reward", "mean over own rollouts with a prefix"),
        Metric("guided/guided_accuracy", "fraction", "successes among own rollouts with a prefix"),
    )

    share: float = setting(0.5, "fraction of a prompt's rollouts that begin with a prefix", ge=0, lt=1)
    max_prefix: float = setting(
        0.5,
        "longest prefix, as a fraction of the peer's success: of its tokens, or with tools of its turns",
        acts_with={"turns": None},
        gt=0,
        lt=1,
    )
    turns: int | None = setting(
        None, "of a run with tools, the number of turns that are replayed; null: drawn, up to `max_prefix`", ge=1
    )
    decay_rounds: int | None = setting(
        None, "rounds over which the longest prefix shrinks to nothing, linearly; null: it stays", ge=1
    )
    memory: int = setting(1000, "rounds for which a success is remembered", ge=1)
    success_above: float = setting(SUCCESS_ABOVE, "a rollout with a reward above this is a success")
    failure_below: float = setting(0.2, "a rollout with a reward below this is a failure")

    @model_validator(mode="after")
    def _ordered(self) -> Guided:
        require_ordered(self)
        return self

    def needs(self) -> Needs:
        """Return that it reads the texts of successes, also late ones; a run's turns are rendered by the learner's chat
        template."""
        return Needs(
            reads=PublishSchema.of("text", text_above=self.success_above),
            late=True,
            guides=True,
            selections=True,
            runs=True,
            renders_runs=True,
        )

    def prefixes(self, view: GuideView) -> list[tuple[int, ...]]:
        """Return the prefix of each upcoming rollout: the last rollouts of a group have one if a success is remembered.

        A prefix that fills the completion limit is dropped.
        """
        result: list[tuple[int, ...]] = []
        for success, draw in self._successes(view):
            if success is None or isinstance(success, str):
                result.append(())
                continue
            length = prefix_length(len(success), self.max_prefix * self._left(view.round), draw)
            result.append(tuple(success[:length]) if length < view.max_length else ())
        return result

    def replays(self, view: GuideView) -> list[Trajectory | None]:
        """Return the turns that each upcoming rollout begins with; None for one without: the last rollouts of a group
        have some if a run is remembered."""
        result: list[Trajectory | None] = []
        for success, draw in self._successes(view):
            run = Trajectory.of_json(success if isinstance(success, str) else "")
            total = len(run.turns)
            if self.turns is None:
                number = prefix_length(total, self.max_prefix * self._left(view.round), draw)
            else:
                number = min(math.ceil(self.turns * self._left(view.round) - ROUNDING), total - 1)
            parts = (run.beginning(turns) for turns in range(number, 0, -1))
            result.append(next(filter(None, parts), None))  # of at most so many turns, the most that can be replayed
        return result

    def _successes(self, view: GuideView) -> list[tuple[list[int] | str | None, float]]:
        """Return the success that each upcoming rollout begins with, its tokens or its run as JSON (None: it has none),
        and a draw from [0, 1)."""
        hints = view.state.get("hints", {})
        first_guided = view.group - guided_count(view.group, self.share)
        result: list[tuple[list[int] | str | None, float]] = []
        for prompt_id, index in zip(view.prompt_ids, view.indices, strict=True):
            hint = hints.get(prompt_id)
            if hint is None or index < first_guided or hint[0] < view.round - self.memory:
                result.append((None, 0.0))
                continue
            draw = float(seeded(view.run_seed, view.round, f"{prompt_id}\x1f{index}", view.learner).random())
            result.append((hint[1], draw))
        return result

    def _left(self, round_index: int) -> float:
        """Return the fraction of the longest prefix that is left in a round."""
        return 1.0 if self.decay_rounds is None else max(0.0, 1.0 - round_index / self.decay_rounds)

    def plan(self, view: RoundView) -> Plan:
        """Return the successes to remember, and the rewards of guided and unguided rollouts separately. Advantages are
        TRL's, over the whole group."""
        guided = [rollout for rollout in view.rollouts if rollout.prefix]
        unguided = [rollout for rollout in view.rollouts if not rollout.prefix]
        gated = self._gated(view, unguided)
        before = view.state.get("hints", {})
        hints = self._hints(view, gated, {r.prompt_id for r in unguided if r.reward > self.success_above})
        metrics = {
            "guided/gate_rate": gated.gated / max(gated.prompts, 1),
            "guided/rollouts": float(len(guided)),
            "guided/prefix_tokens": float(sum(rollout.prefix for rollout in guided)),
            "guided/hints": float(len(hints)),
            "guided/unencodable": float(gated.unencodable),
            **({"guided/unrenderable": float(gated.unrenderable)} if view.rollouts.tools() else {}),
            **reward_metrics("unguided", [rollout.reward for rollout in unguided], self.success_above),
            **reward_metrics("guided", [rollout.reward for rollout in guided], self.success_above),
        }
        return Plan(metrics=metrics, state={"hints": hints} if hints != before else None)

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return the prompts on which all rollouts without a prefix failed."""
        own = rollouts.where([not prefix for prefix in rollouts.prefixes])
        return unsolved_by(group_by_prompt(own.prompt_ids, own.rewards), self)

    def turns_problems(self, *, turns: bool) -> list[Problem]:
        """Return the setting that needs tools."""
        return [] if turns else no_turns_problems(self.turns)

    def problems(self, trainer: Settings) -> list[Problem]:
        """Return (key, problem) for a share too small to prefix one rollout of a group."""
        group = int(trainer.get("num_generations", 8))
        if self.share > 0 and guided_count(group, self.share) == 0:
            problem = f"found {group}: regime.share {self.share:g} of it is below one rollout; expected a larger share"
            return [("num_generations", problem)]
        return []

    def _gated(self, view: RoundView, unguided: Sequence[Rollout]) -> Gated:
        """Return the prompts on which all rollouts without a prefix failed and a peer succeeded."""
        rewards = group_by_prompt([r.prompt_id for r in unguided], [r.reward for r in unguided])
        available = successes_of(view.confirmed())

        def successes(prompt_id: str) -> list[Candidate]:
            return available.candidates(prompt_id, self.success_above)

        def encode(candidates: Sequence[tuple[str, Candidate]]) -> list[EncodedCandidate | None]:
            encoded = encode_candidates(view, candidates)
            return [each if each is not None and _can_begin(each.candidate.trajectory) else None for each in encoded]

        return gated_prompts(rewards, available.rewards, successes, encode, self, uses={})

    def _hints(self, view: RoundView, gated: Gated, solved: set[str]) -> dict[str, list[object]]:
        """Return the remembered successes after this round, by prompt: [round, ids]."""
        hints = {}
        for prompt_id, hint in view.state.get("hints", {}).items():
            if hint[0] >= view.round + 1 - self.memory and prompt_id not in solved:
                hints[prompt_id] = hint
        for prompt_id, encoded in gated.encoded:
            drawn = draw_candidate(encoded, self, DrawKey(view.run_seed, view.round, prompt_id, view.learner))
            hints[prompt_id] = [view.round, drawn.candidate.trajectory.stored or list(drawn.ids)]
        return hints


def _can_begin(written: Trajectory) -> bool:
    """Return whether the first turn of a run can be replayed, and another follows it; True for a text."""
    return written.is_text or (len(written.turns) > 1 and written.beginning(1) is not None)


def guided_count(group: int, share: float) -> int:
    """Return how many of a group's rollouts begin with a prefix: the fraction `share`, rounded down, and never all."""
    return min(math.floor(share * group + ROUNDING), group - 1)


def prefix_length(tokens: int, max_prefix: float, draw: float) -> int:
    """Return the length of a prefix of a success of `tokens` tokens: uniform over 1 to max_prefix * tokens, from a draw
    in [0, 1); 0 if that range is empty."""
    longest = math.floor(max_prefix * tokens + ROUNDING)
    return 1 + math.floor(draw * longest) if longest >= 1 else 0


def reward_metrics(group: str, rewards: Sequence[float], success_above: float) -> dict[str, float]:
    """Return the mean reward and the success rate of the scored rollouts; empty without any."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if not scored:
        return {}
    return {
        f"guided/{group}_reward": sum(scored) / len(scored),
        f"guided/{group}_accuracy": sum(reward > success_above for reward in scored) / len(scored),
    }
