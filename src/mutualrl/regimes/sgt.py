"""Success-Gated Transfer (SGT): if all of the learner's rollouts fail and a peer succeeds, learn the peer's success.

Source: paper, Section "Regime 3: Outcome-level experience sharing" and Appendix "Implementation details for
Success-Gated Transfer". Departure: one row for each gated prompt (equivalent to the appendix's per-example masks, since
all rollouts of a gated prompt failed).

Extensions of the paper: a source's verified text is a success like a peer's; `teacher: source` and `teacher: own` are
controls (the gate opens where a policy succeeded; the text is a source's, or the learner's own later success), and so
is `gate: none` (every prompt with a success); `memory` includes peers' successes of earlier rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import model_validator

from mutualrl.records import REWARDS_ONLY, PublishSchema
from mutualrl.regimes.advantages import group_by_prompt
from mutualrl.regimes.gating import (
    Candidate,
    DrawKey,
    EncodedCandidate,
    Gated,
    draw_candidate,
    encode_candidates,
    gated_prompts,
    memory_after,
    nll_row,
    remembered,
    require_ordered,
    reward_to_exceed,
    successes_of,
    unsolved_by,
)
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.own_success import open_prompts, own_successes, still_open
from mutualrl.regimes.regime import SUCCESS_ABOVE, Problem, Regime, no_turns_problems, setting
from mutualrl.regimes.round import ExtraRow, Passage, Plan, Requests, RoundView, RowStatistics
from mutualrl.rollouts import Rollouts
from mutualrl.storage.metrics import Metric


class SGT(Regime):
    """SGT; the defaults of its settings are the paper's (Section "Hyperparameters")."""

    name = "sgt"
    summary = "where the learner fails entirely, a peer's verified success joins the loss"
    level = "outcome"
    metrics = (
        Metric(
            "sgt/gate_rate",
            "fraction",
            "prompts whose gate opened; bounds SGT's expected perturbation under `normalize: prompts`, not `pairs`",
            role="gate_rate",
        ),
        Metric("sgt/pairs", "rows", "pairs that joined the loss", role="rescues"),
        Metric("sgt/unencodable", "rows", "successes that the learner cannot encode"),
        Metric("sgt/unrenderable", "rows", "runs with tools that the learner's chat template cannot keep"),
        Metric("sgt/remembered", "rows", "pairs with a success of an earlier round"),
        Metric("sgt/nll", "nats per token", "mean NLL of the pairs"),
    )

    weight: float = setting(0.1, "lambda, the weight of the NLL added to the GRPO loss", ge=0)
    success_above: float = setting(
        SUCCESS_ABOVE, "a rollout with a reward above this is a success", acts_with={"gate": ("all", "any", "none")}
    )
    failure_below: float = setting(
        0.2, "a rollout with a reward below this is a failure", acts_with={"gate": ("all", "any")}
    )
    gate: Literal["all", "any", "relative", "none"] = setting(
        "all",
        "own rollouts that must fail; relative: a peer's reward exceeds all own rewards by `margin`; none (a control): "
        "no own rollout needs to fail",
        variants=("none",),
    )
    margin: float = setting(
        0.0, "amount by which a peer must exceed the learner's best reward", acts_with={"gate": "relative"}, ge=0
    )
    pick: Literal["uniform", "shortest", "lowest_nll"] = setting(
        "uniform",
        "choice of the success; lowest_nll: the one with the lowest NLL under the learner",
    )
    teacher: Literal["peer", "source", "own"] = setting(
        "peer",
        "whose text: a success of any other member of the pool; or (controls), where a policy succeeded, that of a "
        "source, or the learner's own within `memory` rounds after the gate opened",
        variants=("source", "own"),
    )
    memory: int = setting(
        0,
        "rounds for which a peer's success on a prompt is remembered",
        acts_with={"teacher": ("peer", "own")},
        ge=0,
    )
    reduce: Literal["mean", "sum"] = setting(
        "mean", "reduction of a pair's NLL over its tokens (sum in the paper's equation)"
    )
    max_uses_per_prompt: int | None = setting(None, "maximum number of pairs per prompt over the run", ge=1)
    turns: int | None = setting(
        None, "of a run with tools, the number of the peer's first turns that are learnt; null: the whole run", ge=1
    )
    normalize: Literal["pairs", "prompts"] = setting(
        "pairs", "unit that the NLL is averaged over; only with prompts does the gate rate bound SGT's perturbation"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SGT:
        require_ordered(self)
        if self.teacher == "own" and self.memory == 0:
            raise ValueError("teacher: own expects memory of 1 or more: the rounds in which the learner may succeed")
        if self.teacher == "own" and self.pick == "lowest_nll":
            raise ValueError("teacher: own has no candidates to compare; expected pick: uniform or shortest")
        if self.teacher == "own" and self.gate in ("relative", "none"):
            raise ValueError("teacher: own trains on rewards above success_above; expected gate: all or any")
        return self

    def needs(self) -> Needs:
        """Return that it reads the texts of successes, with `gate: relative` all texts; with another teacher only
        the rewards. A run becomes a row, or opens the gate for one of the learner's own, which cannot be late."""
        above = -math.inf if self.gate == "relative" else self.success_above
        return Needs(
            reads=PublishSchema.of("text", text_above=above) if self.teacher == "peer" else REWARDS_ONLY,
            late=self.teacher != "own",
            source=self.teacher == "source",
            everywhere=self.gate not in ("all", "any"),
            selections=True,
            runs=True,
            renders_runs=True,
            nll_rows=True,
        )

    def turns_problems(self, *, turns: bool) -> list[Problem]:
        """Return the settings that need tools, or texts."""
        if turns and self.pick == "lowest_nll":
            problem = "found 'lowest_nll', which scores texts, not runs with tools; expected uniform or shortest"
            return [("regime.pick", problem)]
        return [] if turns else no_turns_problems(self.turns)

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return the prompts on which the learner's part of the gate is open."""
        return unsolved_by(group_by_prompt(rollouts.prompt_ids, rollouts.rewards), self)

    def requests(self, view: RoundView) -> Requests:
        """Return the candidates that `pick: lowest_nll` compares, for prompts with more than one."""
        if self.pick != "lowest_nll" or self.teacher == "own":
            return Requests()
        return Requests(nll=tuple(_compared(self.gated(view))))

    def plan(self, view: RoundView) -> Plan:
        """Return the pairs of a round: gate, draw, retokenize. Texts are decoded only for gated prompts."""
        gated = self.gated(view)
        uses: Mapping[str, int] = view.state.get("uses", {})
        state: dict[str, object] = {}
        if self.teacher == "own":
            pending = open_prompts(view, self.memory)
            pairs = own_successes(view, pending, self, uses)
            state["open"] = still_open(view, pending, gated.opened, [prompt_id for prompt_id, _ in pairs])
            rows = tuple(self._row(prompt_id, pair, view.round) for prompt_id, pair in pairs)
        else:
            rows = self.rows(view, gated)
            if self.memory and self.teacher == "peer":
                state["memory"] = memory_after(view.of_policies(), self.memory, self)  # a source has its texts
        if self.max_uses_per_prompt is not None:
            state["uses"] = _counted(uses, rows)
        metrics = _metrics(gated, rows, acting=bool(view.rollouts.tools()))
        if self.memory and self.teacher != "own":
            metrics["sgt/remembered"] = float(sum(row.source.round != view.round for row in rows))
        return Plan(rows=rows, metrics=metrics, state=state or None)

    def row_metrics(self, statistics: RowStatistics) -> dict[str, float]:
        """Return the mean NLL per token of the pairs."""
        return {} if statistics.nll is None else {"sgt/nll": statistics.nll}

    def gated(self, view: RoundView) -> Gated:
        """Return the gated prompts of a round with their candidates."""
        view = view.confirmed()
        own_groups = view.own_groups()
        memory = remembered(view, self.memory) if self.memory and self.teacher == "peer" else {}
        available = successes_of(view.of_policies() if self.teacher == "source" else view, memory)
        texts = successes_of(view.of_sources()) if self.teacher == "source" else available

        def successes(prompt_id: str) -> list[Candidate]:
            return texts.candidates(prompt_id, reward_to_exceed(own_groups[prompt_id], self))

        def encode(candidates: Sequence[tuple[str, Candidate]]) -> list[EncodedCandidate | None]:
            return encode_candidates(view, candidates, self.turns)

        uses: Mapping[str, int] = view.state.get("uses", {})
        return gated_prompts(own_groups, available.rewards, successes, encode, self, uses=uses)

    def rows(self, view: RoundView, gated: Gated) -> tuple[ExtraRow, ...]:
        """Return the pairs of gated prompts: for each, a drawn success."""
        rows = []
        for prompt_id, encoded in gated.encoded:
            nll = {each.ids: view.results.nll.get((prompt_id, each.ids), 0.0) for each in encoded}  # 0: the only text
            key = DrawKey(view.run_seed, view.round, prompt_id, view.learner)
            rows.append(self._row(prompt_id, draw_candidate(encoded, self, key, nll), view.round))
        return tuple(rows)

    def _row(self, prompt_id: str, pair: EncodedCandidate, round_index: int) -> ExtraRow:
        mean: Literal["rows", "prompts"] = "rows" if self.normalize == "pairs" else "prompts"
        return nll_row(prompt_id, pair, round_index, weight=self.weight, mean=mean, reduce=self.reduce)


def _compared(gated: Gated) -> list[Passage]:
    """Return the distinct candidates of the prompts with more than one."""
    passages = []
    for prompt_id, encoded in gated.encoded:
        distinct = sorted({each.ids for each in encoded})
        if len(distinct) > 1:
            passages += [(prompt_id, ids) for ids in distinct]
    return passages


def _metrics(gated: Gated, rows: Sequence[ExtraRow], *, acting: bool) -> dict[str, float]:
    """Return the metrics of a round. `acting`: with tools."""
    metrics = {
        "sgt/gate_rate": gated.gated / max(gated.prompts, 1),
        "sgt/pairs": float(len(rows)),
        "sgt/unencodable": float(gated.unencodable),
    }
    return metrics | ({"sgt/unrenderable": float(gated.unrenderable)} if acting else {})


def _counted(uses: Mapping[str, int], rows: Sequence[ExtraRow]) -> dict[str, int]:
    counts = dict(uses)
    for row in rows:
        counts[row.prompt_id] = counts.get(row.prompt_id, 0) + 1
    return counts
