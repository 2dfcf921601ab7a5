"""Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, advice.

Source: paper, Appendix "Cross-policy complementarity and channel decomposition", Tables "Prompt-level complementarity",
"Pool-level success", "Difficulty-conditioned diversity". (The paper's tables disagree: the pool's exactly-one rate must
be the mean over its equal buckets, which is 0.060 and 0.056 in one table; the other has 0.174 and 0.152. Here the two
agree by construction.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.lines import notify
from mutualrl.console.markdown import name, number, sentence, table, with_interval
from mutualrl.diagnostics import dead_prompts, hints, revival
from mutualrl.diagnostics.advice import SGT_CAVEAT, Advice, for_agents, for_one, recommended, with_hints, with_texts
from mutualrl.diagnostics.diagnostic import INLINE, Beside, Diagnostic, Figures, Inputs, Scope
from mutualrl.diagnostics.drawing import legend, short
from mutualrl.diagnostics.gates import Thresholds, successes
from mutualrl.diagnostics.load_rollouts import Loaded, ProgressBars
from mutualrl.diagnostics.overlap import (
    PAIR_RATES,
    POOL_RATES,
    GapBucket,
    GateRow,
    PairRow,
    PoolRates,
    better_rate,
    bucket_rows,
    gate_rows,
    graded,
    pair_rows,
    pool_rates,
)
from mutualrl.diagnostics.plan import DiagnosticPlan
from mutualrl.diagnostics.request import ComplementarityRequest, gate_sizes
from mutualrl.diagnostics.rollouts import ModelRollouts
from mutualrl.diagnostics.statistics import Floats
from mutualrl.sources.prepare import Prepared, prepare_sources

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PAIRS = 400  # rows of the table, enough for 20 models


# ---- the result: each rate has its 95 % bootstrap interval over prompts


@dataclass(frozen=True, slots=True)
class Overlap:
    """Result. `samples`: fewest rollouts per prompt of each model; `graded`: the fraction of prompts whose pooled
    rewards are not all equal."""

    samples: Mapping[str, int]
    success: str
    pairs: list[PairRow]
    pool: PoolRates
    buckets: list[GapBucket]
    gate: list[GateRow]
    graded: float
    advice: Advice = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class OfOne:
    """Advice for one model with recorded texts."""

    advice: Advice = field(metadata=INLINE)


# ---- what it computes


def compute(inputs: Inputs[ComplementarityRequest]) -> Overlap:
    """Return the result; its advice takes recorded texts and hints into account."""
    rollouts, request, plan = inputs.rollouts, inputs.request, inputs.plan
    samples = rollouts.present_M_P_G.sum(axis=2).min(axis=1).tolist()
    k_values = gate_sizes(request.k, samples)
    result = complementarity(rollouts, plan.thresholds, request.success, k_values, plan.seed)
    advice = result.advice
    for beside in inputs.beside.results:
        if isinstance(beside, revival.Revival):
            advice = with_texts(advice, beside.revival)
    if plan.turns is not None:
        advice = for_agents(advice)
    for beside in inputs.beside.results:
        if isinstance(beside, hints.Hints):
            advice = with_hints(advice, beside.hints)
    return replace(result, advice=advice)


def complementarity(
    rollouts: ModelRollouts, thresholds: Thresholds, which: str, gates: Sequence[int], seed: int
) -> Overlap:
    """Return the result for these rollouts. `which`: a model solves a prompt by its `first` rollout, or by `any`."""
    solved = successes(rollouts, thresholds, which)
    pool = pool_rates(solved, seed)
    gate = gate_rows(rollouts, thresholds, gates, seed)
    solved_at_all = successes(rollouts, thresholds, "any")
    advice = recommended(pool, gate, better_rate(rollouts), rollouts, solved_at_all)
    return Overlap(
        samples=_samples(rollouts),
        success=which,
        pairs=pair_rows(rollouts.policies, solved, seed),
        pool=pool,
        buckets=bucket_rows(rollouts, solved),
        gate=gate,
        graded=graded(rollouts),
        advice=replace(advice, caveat=SGT_CAVEAT if advice.recommended != "none" else ""),
    )


def _samples(rollouts: ModelRollouts) -> dict[str, int]:
    counts = rollouts.present_M_P_G.sum(axis=2)
    return {name: int(counts[m].min()) for m, name in enumerate(rollouts.policies)}


# ---- what needs no second model: recorded texts, and hints


def found_beside(plan: DiagnosticPlan, loaded: Loaded | None, bars: ProgressBars) -> Beside:
    """Return what hints would do, and what the request's recorded texts would revive, if that was asked."""
    sources = _sources(plan)
    found: list[tuple[object, str]] = []
    figures: Figures = {}
    if plan.files and loaded is not None:
        dead = dead_prompts.dead_prompts(loaded.table, plan.thresholds)
        command = "" if plan.sources is not None else dead_prompts.next_step(plan.files[0], plan.request.reward)
        found.append((dead, dead_prompts.markdown(dead, command=command)))
        figures = dead_prompts.figures(dead)
    if plan.request.hints and loaded is not None and plan.sampled is not None:
        rows = hints.hint_rows(plan, plan.sampled, loaded, sources, bars)
        found.append((hints.Hints(tuple(rows)), hints.markdown(rows)))
    if (texts := plan.sources) is not None:
        rollouts = None
        if loaded is not None:
            rollouts, unknown = revival.with_task_ids(loaded.table, texts.prompts, plan.origin)
            if unknown:
                held = revival.held_out(unknown, texts.held_out())
                parts = [f"{held:,} held out for validation"] * bool(held)
                parts += [f"{len(unknown) - held:,} not the task's"] * (len(unknown) > held)
                notify(f"prompts of the models' rollouts that are left out: {', '.join(parts)}")
        revived = revival.revival(rollouts, sources, plan.thresholds, plan.seed)
        found.append((revived, revival.markdown(revived)))
        if revived.revival and len({row.learner for row in revived.revival}) == 1:
            advice = for_one(revived.revival)
            for result, _ in found:
                if isinstance(result, hints.Hints):
                    advice = with_hints(advice, result.hints)
            found.append((OfOne(advice), _advice_text(advice)))
    return Beside(tuple(result for result, _ in found), tuple(text for _, text in found), figures)


def _sources(plan: DiagnosticPlan) -> dict[str, Prepared]:
    """Return the request's recorded texts, verified."""
    if (texts := plan.sources) is None:
        return {}
    success = plan.thresholds.success_above
    # a text that is longer than what is sampled here could not be learnt under the same limit
    criterion = texts.criterion()
    learners = [replace(learner, success_above=success) for learner in criterion.learners]
    if (sampled := plan.sampled) is not None:
        learners = [replace(learner, max_completion_length=sampled.sampling.max_new_tokens) for learner in learners]
    return prepare_sources(texts.sources, replace(criterion, learners=learners, success_above=success))


# ---- how it is shown


def markdown(result: Overlap, scope: Scope) -> str:
    """Return the tables of pairs, pool, buckets and gate rates, and the recommendation."""
    parts = [_pair_table(result, scope), _pool_table(result, scope)]
    rows = [
        [b.bucket, str(b.prompts), number(b.mean_reward), number(b.jaccard), number(b.exactly_one)]
        for b in result.buckets
    ]
    head = ["bucket", "prompts", "mean reward", "Jaccard", "exactly one"]
    parts.append(table("Difficulty-conditioned diversity", head, rows))
    parts.append(_gate_table(result.gate))
    return "\n\n".join([*parts, _advice_text(result.advice)])


def _advice_text(advice: Advice) -> str:
    recommendation = f"Recommendation: {sentence(advice.recommendation)}"
    return f"{recommendation}\n\n{advice.caveat}" if advice.caveat else recommendation


def _pair_table(result: Overlap, scope: Scope) -> str:
    pairs, left_out = result.pairs, ""
    if len(pairs) > MOST_PAIRS:
        left_out = f"; the {MOST_PAIRS} of {len(pairs):,} pairs with the most rescues; --json has all"
        pairs = sorted(pairs, key=lambda row: -np.nan_to_num(row.rescue))[:MOST_PAIRS]
    rows = []
    for row in pairs:
        rates = [with_interval(getattr(row, key), getattr(row, f"{key}_ci")) for key in PAIR_RATES]
        rows.append([name(row.learner), name(row.peer), *rates])
    criterion = {"first": "the first rollout", "any": "any rollout"}[result.success] + _own_thresholds(scope)
    return table(
        f"Prompt-level complementarity ({scope.described()}; success: {criterion}{left_out}) [95 % bootstrap]",
        ["learner", "peer", "learner succ.", "peer succ.", "Jaccard", "peer rescues fail"],
        rows,
    )


def _pool_table(result: Overlap, scope: Scope) -> str:
    rates = [with_interval(getattr(result.pool, key), getattr(result.pool, f"{key}_ci")) for key in POOL_RATES]
    return table(
        "Pool-level success",
        ["models", "mean single-model", "any model", "all models", "exactly one", "Jaccard of the pool"],
        [[str(len(scope.policies)), *rates]],
    )


def _gate_table(gate: Sequence[GateRow]) -> str:
    stars = {at.k: "*" if at.extrapolated else "" for at in gate[0].at}
    rows = []
    for row in gate:
        rates = [number(at.rate) for at in row.at]
        rows.append([name(row.learner), with_interval(row.observed, row.observed_ci), *rates])
    text = table(
        "SGT's gate: fraction of prompts that open it, G_n(x), with K rollouts per model",
        ["learner", "in these rollouts", *(f"K = {k}{star}" for k, star in stars.items())],
        rows,
    )
    if any(stars.values()):
        text += "\n\n\\* more than were sampled: (1 - c/n)^K, which counts a prompt without a success as unsolvable"
    return text


def _own_thresholds(scope: Scope) -> str:
    """Return the success thresholds by policy, if they differ."""
    own = scope.thresholds.own
    values = {policy: scope.thresholds.of(policy).success_above for policy in scope.policies} if own else {}
    if len(set(values.values())) < 2:
        return ""
    return " above " + ", ".join(f"{value:g} ({name(policy)})" for policy, value in values.items())


def figures(result: Overlap) -> Figures:
    """Return the overlap and rescue matrices, the buckets, and the gate rate over K."""
    models = len(result.gate)
    return {
        "overlap": ((3 + 2.4 * models, 2 + 1.1 * models), lambda figure: _draw_overlap(figure, result)),
        "buckets": ((6, 4), lambda figure: _draw_buckets(figure.subplots(), result)),
        "gate": ((6, 4), lambda figure: _draw_gate(figure.subplots(), result)),
    }


def _draw_overlap(figure: Figure, result: Overlap) -> None:
    names = [row.learner for row in result.gate]
    overlap, rescue = np.ones((len(names), len(names))), np.full((len(names), len(names)), np.nan)
    for row in result.pairs:
        a, b = names.index(row.learner), names.index(row.peer)
        overlap[a, b], rescue[a, b] = row.jaccard, row.rescue
    left, right = figure.subplots(1, 2)
    _matrix(left, overlap, names, "Jaccard overlap of solved prompts")
    _matrix(right, rescue, names, "P(column solves | row fails)")
    right.set(ylabel="learner", xlabel="peer")


def _matrix(axis: Axes, values: Floats, names: Sequence[str], title: str) -> None:
    axis.imshow(values, vmin=0, vmax=1, cmap="cividis")
    labels = [short(n) for n in names]
    axis.set_xticks(range(len(names)), labels, rotation=30, ha="right", fontsize=8, parse_math=False)
    axis.set_yticks(range(len(names)), labels, fontsize=8, parse_math=False)
    axis.set_title(title, fontsize=10)
    for a, b in np.ndindex(*values.shape):
        if a == b and np.isnan(values[a, b]):
            continue
        text = "NaN" if np.isnan(values[a, b]) else f"{values[a, b]:.2f}"
        axis.text(b, a, text, ha="center", va="center", color="white" if not values[a, b] > 0.6 else "black")


def _draw_buckets(axis: Axes, result: Overlap) -> None:
    positions = np.arange(len(result.buckets))
    for offset, key, label in ((-0.2, "jaccard", "Jaccard overlap"), (0.2, "exactly_one", "solved by exactly one")):
        values = [getattr(bucket, key) for bucket in result.buckets]
        bars = axis.bar(positions + offset, values, 0.4, label=label)
        axis.bar_label(bars, ["NaN" if np.isnan(v) else f"{v:.2f}" for v in values], fontsize=8)
    axis.set_xticks(positions, [f"{b.bucket}\n({b.prompts} prompts)" for b in result.buckets])
    axis.set(ylim=(0, 1.1), ylabel="fraction of prompts", title="Overlap by difficulty")
    legend(axis, fontsize=8)


def _draw_gate(axis: Axes, result: Overlap) -> None:
    for row in result.gate:
        k_values = [at.k for at in row.at]
        rates = np.array([at.rate for at in row.at])
        low, high = np.array([at.rate_ci for at in row.at]).T
        errors = [np.maximum(rates - low, 0), np.maximum(high - rates, 0)]  # rounding may leave the mean outside
        axis.errorbar(k_values, rates, errors, marker="o", capsize=3, label=short(row.learner))
    axis.set_xscale("log", base=2)
    axis.set_xticks(k_values, [str(k) for k in k_values])
    axis.set_ylim(bottom=0)
    axis.set(xlabel="rollouts per model, K", ylabel="fraction of prompts", title="SGT's gate rate, E[G(x)]")
    legend(axis, title="learner", fontsize=8)


DIAGNOSTIC = Diagnostic(ComplementarityRequest, compute, markdown, figures, found_beside)
