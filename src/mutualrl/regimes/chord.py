"""CHORD: on every prompt with a source's text, its NLL joins the loss, with a weight that falls from imitation to GRPO.

Source: arXiv 2508.11408 (CHORD-mu), with the schedule and the example's values of ms-swift and Trinity-RFT. Its loss is
(1 - mu) * GRPO + mu * SFT; here GRPO + mu / (1 - mu) * NLL, the same up to the factor 1 - mu. Clipping by the norm
removes that factor from gradients above it; Adam alone does not, since the factor rises while mu falls, and its second
moment remembers the large early gradients (docs/differences.md). Further departures: the NLL is of texts on the round's
prompts, a mean of means per text, while CHORD draws an SFT batch of its own and takes the mean over its tokens; the KL
term has GRPO's weight. As there, texts are neither judged by a reward nor gated. The weights of single tokens
(CHORD-phi) are not here.
"""

from __future__ import annotations

import math

from pydantic import model_validator

from mutualrl.regimes.gating import Candidate, DrawKey, EncodedCandidate, draw_uniformly, encode_candidates, nll_row
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.peers import peer_rollouts
from mutualrl.regimes.regime import Regime, setting
from mutualrl.regimes.round import Plan, RoundView, RowStatistics
from mutualrl.rollouts import Rollouts
from mutualrl.storage.metrics import Metric


class Chord(Regime):
    """CHORD-mu on a source's texts."""

    name = "chord"
    summary = "a source's texts are imitated on all prompts, with a weight that falls"
    default_pool = "tiny-recorded"
    metrics = (
        Metric("chord/mu", "weight", "of imitation in the loss (1 - mu) * GRPO + mu * NLL"),
        Metric("chord/rows", "rows", "texts of sources that joined the loss", role="rescues"),
        Metric("chord/unencodable", "rows", "texts that the learner cannot encode"),
        Metric("chord/unrenderable", "rows", "runs with tools that its chat template cannot keep"),
        Metric("chord/nll", "nats per token", "mean NLL of the rows"),
    )

    mu_peak: float = setting(0.9, "largest mu, after the warm-up", ge=0, lt=1)
    mu_valley: float = setting(0.05, "mu after the decay", ge=0, lt=1)
    warmup_rounds: int = setting(0, "rounds in which mu rises from 0, linearly", ge=0)
    decay_rounds: int = setting(200, "rounds in which mu falls along half a cosine", ge=0)

    @model_validator(mode="after")
    def _falling(self) -> Chord:
        if self.mu_valley > self.mu_peak:
            raise ValueError(f"mu_valley ({self.mu_valley}) must not exceed mu_peak ({self.mu_peak})")
        return self

    def needs(self) -> Needs:
        """Return that it learns texts of sources, on all prompts; a run becomes a row."""
        return Needs(source=True, selections=True, everywhere=True, runs=True, renders_runs=True, nll_rows=True)

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return all prompts: a text is wanted on each."""
        return sorted(set(rollouts.prompt_ids))

    def plan(self, view: RoundView) -> Plan:
        """Return one text per prompt that has any, drawn uniformly, under the round's weight."""
        candidates: list[tuple[str, Candidate]] = []
        sources = view.of_sources()
        for rollout in peer_rollouts(sources):
            (written,) = sources.peers[rollout.policy].trajectories([rollout.row])
            if written is not None:
                made = Candidate(rollout.policy, rollout.index, written, rollout.ended)
                candidates.append((rollout.prompt_id, made))
        by_prompt: dict[str, list[EncodedCandidate]] = {}
        lost = {"run": 0, "text": 0}
        for (prompt_id, made), encoded in zip(candidates, encode_candidates(view, candidates), strict=True):
            if encoded is None:
                lost["text" if made.trajectory.is_text else "run"] += 1
            else:
                by_prompt.setdefault(prompt_id, []).append(encoded)
        mu = mu_at(view.round, self)
        rows = []
        for prompt_id, each in sorted(by_prompt.items()):
            drawn = draw_uniformly(each, DrawKey(view.run_seed, view.round, prompt_id, view.learner))
            rows.append(nll_row(prompt_id, drawn, view.round, weight=mu / (1 - mu)))
        metrics = {"chord/mu": mu, "chord/rows": float(len(rows)), "chord/unencodable": float(lost["text"])}
        if view.rollouts.tools():
            metrics["chord/unrenderable"] = float(lost["run"])
        return Plan(rows=tuple(rows), metrics=metrics)

    def row_metrics(self, statistics: RowStatistics) -> dict[str, float]:
        """Return the mean NLL per token of the rows."""
        return {} if statistics.nll is None else {"chord/nll": statistics.nll}


def mu_at(round_index: int, settings: Chord) -> float:
    """Return mu of a round: it rises linearly over the warm-up, then falls along half a cosine from peak to valley."""
    if round_index < settings.warmup_rounds:
        return settings.mu_peak * round_index / settings.warmup_rounds
    place = round_index - settings.warmup_rounds
    if place >= settings.decay_rounds:
        return settings.mu_valley
    share = 0.5 * (1 + math.cos(math.pi * place / settings.decay_rounds))
    return settings.mu_valley + (settings.mu_peak - settings.mu_valley) * share
