"""Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, advice.

Source: paper, Appendix "Cross-policy complementarity and channel decomposition", Tables "Prompt-level complementarity",
"Pool-level success", "Difficulty-conditioned diversity". (The paper's tables disagree: the pool's exactly-one rate must
be the mean over its equal buckets, which is 0.060 and 0.056 in one table; the other has 0.174 and 0.152. Here the two
agree by construction.)"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from mutualrl.console.lines import notify
from mutualrl.console.markdown import name, number, sentence, table, with_interval
from mutualrl.console.options import Option, WithPlot
from mutualrl.console.plots import Axes
from mutualrl.diagnostics import hints, revival
from mutualrl.diagnostics.diagnostic import INLINE, Beside, Diagnostic, Figures, Inputs, Interval, Scope
from mutualrl.diagnostics.diagnostic_request import DiagnosticRequest, gate_sizes
from mutualrl.diagnostics.drawing import legend, short
from mutualrl.diagnostics.flags import FAILURE_BELOW, SUCCESS_ABOVE, DiagnosticFlags
from mutualrl.diagnostics.gates import SPARSE, Thresholds, gate_rate, observed_gate, successes
from mutualrl.diagnostics.load_rollouts import Loaded, ProgressBars
from mutualrl.diagnostics.rollouts import Bools, Floats, Rollouts
from mutualrl.diagnostics.statistics import intervals, jaccard, ratio
from mutualrl.errors import UsageError
from mutualrl.regimes import at_level
from mutualrl.regimes.hinted import Hinted
from mutualrl.sources.prepare import Prepared, prepare_sources

BUCKETS = ("easy", "medium", "hard")
#: what was measured against the recommendation of `sgt` (benchmarks/results/text_source.json)
SGT_CAVEAT = (
    "Measured against it: on an embedded pool whose policies have the same skills and write differently, SGT ended "
    "below GRPO, HACPO, guided rollouts and SFT then GRPO, and retained less than GRPO of what was solved before "
    "(docs/text-source.md). Compare with grpo over several seeds (mutualrl sweep)."
)
MOST_PAIRS = 400  # rows of the table, enough for 20 models


@dataclass(frozen=True, kw_only=True)
class Complementarity(DiagnosticFlags, WithPlot):
    """Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, advice.

    Example: mutualrl complementarity --pool 2qwen --task math --data math_train.jsonl --prompts 500 --samples 5
    """

    texts: bool = True
    hints: Annotated[
        bool,
        Option("Also sample where the gate opens, with a peer's success as a hint and without: is `hinted` better?"),
    ] = False
    success: Annotated[str, Option("A model solves a prompt if its `first` rollout does, or `any` rollout.")] = "first"
    k: Annotated[str | None, Option("Rollouts per model for which to compute SGT's gate: 4,8,16.")] = None
    success_above: Annotated[tuple[str, ...], SUCCESS_ABOVE] = ()
    failure_below: Annotated[tuple[str, ...], FAILURE_BELOW] = ()
    pool_models: Annotated[
        tuple[str, ...], Option("Sample from this model. Repeatable.", "--model", metavar="MODEL")
    ] = ()
    sources: Annotated[
        tuple[str, ...],
        Option(
            "Recorded texts (also a file of --rollouts without rewards). Repeatable.",
            "--source",
            metavar="NAME=recorded:FILE",
        ),
    ] = ()
    assignments: Annotated[
        tuple[str, ...],
        Option("A key of a source, such as sources.NAME.columns.text=COLUMN.", "--set", metavar="KEY=VALUE"),
    ] = ()

    def __post_init__(self) -> None:
        """Check what only this diagnostic has. Raises UsageError."""
        if self.success not in ("first", "any"):
            raise UsageError(f"--success {self.success}: expected first or any")
        gate_sizes(self.k, [1])


# ---- the result: each rate has its 95 % bootstrap interval over prompts


@dataclass(frozen=True, slots=True)
class PairRow:
    """Ordered pair: success rates, overlap (Jaccard, of the solved prompts), and the fraction of the learner's failures
    that the peer solves."""

    learner: str
    peer: str
    learner_success: float
    learner_success_ci: Interval
    peer_success: float
    peer_success_ci: Interval
    jaccard: float
    jaccard_ci: Interval
    rescue: float
    rescue_ci: Interval


@dataclass(frozen=True, slots=True)
class PoolRates:
    """Fractions of the prompts: solved by a model, on average; by any; by all; by exactly one; and the overlap of
    all."""

    mean: float
    mean_ci: Interval
    any: float
    any_ci: Interval
    all: float
    all_ci: Interval
    exactly_one: float
    exactly_one_ci: Interval
    jaccard: float
    jaccard_ci: Interval


@dataclass(frozen=True, slots=True)
class Bucket:
    """Third of the prompts by difficulty."""

    bucket: str
    prompts: int
    mean_reward: float
    jaccard: float
    exactly_one: float


@dataclass(frozen=True, slots=True)
class GateAt:
    """Gate rate with K rollouts per policy; `extrapolated`: more than were sampled."""

    k: int
    rate: float
    rate_ci: Interval
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class GateRow:
    """Learner's gate rate in these rollouts, and for each K."""

    learner: str
    observed: float
    observed_ci: Interval
    at: tuple[GateAt, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """One regime, or none, with the reason; its `settings`, and its extra rows per GRPO row."""

    recommended: str
    recommendation: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra_rows: float = 0.0
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Result. `samples`: fewest rollouts per prompt of each model; `graded`: the fraction of prompts whose pooled
    rewards are not all equal."""

    samples: Mapping[str, int]
    success: str
    pairs: list[PairRow]
    pool: PoolRates
    buckets: list[Bucket]
    gate: list[GateRow]
    graded: float
    advice: Advice = field(metadata=INLINE)


# ---- what it computes


def compute(inputs: Inputs[Complementarity]) -> Overlap:
    """Return the result; where hints were tried, its advice takes them into account."""
    rollouts, options = inputs.rollouts, inputs.options
    samples = rollouts.present_M_P_G.sum(axis=2).min(axis=1).tolist()
    k_values = gate_sizes(options.k, samples)
    result = complementarity(rollouts, inputs.request.thresholds, options.success, k_values, inputs.request.seed)
    for found in inputs.beside.results:
        if isinstance(found, hints.Hints):
            result = replace(result, advice=with_hints(result.advice, found.hints))
    return result


def complementarity(rollouts: Rollouts, thresholds: Thresholds, which: str, gates: Sequence[int], seed: int) -> Overlap:
    """Return the result for these rollouts. `which`: a model solves a prompt by its `first` rollout, or by `any`."""
    solved = successes(rollouts, thresholds, which)
    pool = _pool(solved, seed)
    gate = _gate(rollouts, thresholds, gates, seed)
    solved_at_all = successes(rollouts, thresholds, "any")
    advice = _recommended(pool, gate, better_rate(rollouts), rollouts, solved_at_all)
    return Overlap(
        samples=_samples(rollouts),
        success=which,
        pairs=_pairs(rollouts.policies, solved, seed),
        pool=pool,
        buckets=_buckets(rollouts, solved),
        gate=gate,
        graded=_graded(rollouts),
        advice=replace(advice, caveat=SGT_CAVEAT if advice.recommended != "none" else ""),
    )


def _samples(rollouts: Rollouts) -> dict[str, int]:
    counts = rollouts.present_M_P_G.sum(axis=2)
    return {name: int(counts[m].min()) for m, name in enumerate(rollouts.policies)}


def _pairs(policies: Sequence[str], solved: Bools, seed: int) -> list[PairRow]:
    """Return the rows of all ordered pairs, in blocks that bound memory; all blocks use the same resamples."""
    pairs = list(itertools.permutations(range(len(solved)), 2))
    rows: list[PairRow] = []
    for start in range(0, len(pairs), PAIRS_AT_A_TIME):
        rows += _pair_rows(policies, solved, pairs[start : start + PAIRS_AT_A_TIME], seed)
    return rows


def _pair_rows(policies: Sequence[str], solved: Bools, pairs: list[tuple[int, int]], seed: int) -> list[PairRow]:
    units = solved.shape[1]
    learners, peers = solved[[a for a, _ in pairs]], solved[[b for _, b in pairs]]
    columns = np.concatenate([learners, peers, learners & peers]).T.astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        learner, peer, common = np.split(sums, 3, axis=1)
        overlap, rescue = ratio(common, learner + peer - common), ratio(peer - common, units - learner)
        return np.stack([learner / units, peer / units, overlap, rescue], axis=2).reshape(len(sums), -1)

    values = statistic(columns.sum(axis=0)[None])[0]
    bounds = intervals(columns, statistic, seed)
    rows = []
    for pair, (a, b) in enumerate(pairs):
        rates: dict[str, Any] = {}
        for column, key in enumerate(PAIR_RATES, len(PAIR_RATES) * pair):
            rates |= {key: float(values[column]), f"{key}_ci": bounds[column]}
        rows.append(PairRow(policies[a], policies[b], **rates))
    return rows


PAIRS_AT_A_TIME = 1000
PAIR_RATES = ("learner_success", "peer_success", "jaccard", "rescue")
POOL_RATES = ("mean", "any", "all", "exactly_one", "jaccard")


def _pool(solved: Bools, seed: int) -> PoolRates:
    solved_by = solved.sum(axis=0)
    units = solved.shape[1]
    columns = np.stack([solved_by / len(solved), solved_by > 0, solved_by == len(solved), solved_by == 1], axis=1)
    columns = columns.astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        return np.concatenate([sums / units, ratio(sums[:, 2], sums[:, 1])[:, None]], axis=1)

    values = statistic(columns.sum(axis=0)[None])[0]
    rates: dict[str, Any] = {}
    for key, value, interval in zip(POOL_RATES, values, intervals(columns, statistic, seed), strict=True):
        rates |= {key: float(value), f"{key}_ci": interval}
    return PoolRates(**rates)


def _buckets(rollouts: Rollouts, solved: Bools) -> list[Bucket]:
    """Return a row per third of the units, sorted by (mean reward over all models and rollouts, prompt id)."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    means = ratio(np.where(scored, rewards, 0.0).sum(axis=(0, 2)), scored.sum(axis=(0, 2)))
    sort_key = np.where(np.isnan(means), -np.inf, means)  # a unit without a scored rollout is hard
    order = sorted(range(len(means)), key=lambda p: (sort_key[p], rollouts.prompt_ids[p], rollouts.rounds[p]))
    rows: list[Bucket] = []
    thirds = np.array_split(np.array(order, dtype=np.int64), len(BUCKETS))
    for bucket, units in zip(BUCKETS[::-1], thirds, strict=True):
        by_model = solved[:, units]
        rows.append(
            Bucket(
                bucket=bucket,
                prompts=len(units),
                mean_reward=float(ratio(np.nansum(means[units]), (~np.isnan(means[units])).sum())),
                jaccard=jaccard(by_model),
                exactly_one=float(ratio((by_model.sum(axis=0) == 1).sum(), len(units))),
            )
        )
    return rows[::-1]


def _gate(rollouts: Rollouts, thresholds: Thresholds, gates: Sequence[int], seed: int) -> list[GateRow]:
    smallest = int(rollouts.present_M_P_G.sum(axis=2).min())
    columns: list[Floats | Bools] = []
    for m in range(len(rollouts.policies)):
        columns.append(observed_gate(rollouts, thresholds, m))
        columns += [gate_rate(rollouts, thresholds, m, k) for k in gates]
    units = len(rollouts.prompt_ids)
    stacked = np.stack(columns, axis=1).astype(np.float64)
    bounds = intervals(stacked, lambda sums: sums / units, seed)
    means = stacked.mean(axis=0).tolist()
    rows: list[GateRow] = []
    for m, learner in enumerate(rollouts.policies):
        first = m * (1 + len(gates))  # a learner's columns: the observed gate, then one per K
        at = [GateAt(k, means[column], bounds[column], k > smallest) for column, k in enumerate(gates, first + 1)]
        rows.append(GateRow(learner, means[first], bounds[first], tuple(at)))
    return rows


def _graded(rollouts: Rollouts) -> float:
    """Return the fraction of units whose pooled rewards are not all equal, i.e. where value sharing can change an
    advantage."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=(0, 2))
    lowest = np.where(scored, rewards, np.inf).min(axis=(0, 2))
    return float((highest > lowest).mean())


def better_rate(rollouts: Rollouts) -> dict[str, float]:
    """Return, by learner, the fraction of units on which the peers' best reward exceeds the learner's best, i.e. where
    SGT's `gate: relative` opens."""
    rates = {}
    for m, learner in enumerate(rollouts.policies):
        rewards, peer_rewards = rollouts.rewards_M_P_G[m], rollouts.peer_rewards(m)
        best = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
        peer_best = np.where(np.isnan(peer_rewards), -np.inf, peer_rewards).max(axis=1)
        rates[learner] = float((np.isfinite(best) & (peer_best > best)).mean())
    return rates


def _recommended(
    pool: PoolRates, gate: Sequence[GateRow], better: Mapping[str, float], rollouts: Rollouts, solved_at_all: Bools
) -> Advice:
    """Return a regime, or none, with its reason and its predicted cost. `solved_at_all`: by any rollout, shape (M, P).

    Criteria: SGT's gate rate and, with graded rewards, how often a peer does better. Pooling whole batches (prp, hacpo,
    swarm) and sharing only rewards (xgrpo) were not shown to help where SGT's gate stays closed, and some variants were
    shown to do harm (docs/study.md), so they are not recommended.
    """
    prompts, group = len(rollouts.prompt_ids), max(_samples(rollouts).values())
    rates = ", ".join(f"{row.learner} {row.observed:.1%}" for row in gate)
    best = max(gate, key=lambda row: row.observed)
    rewards = rollouts.rewards_M_P_G[~np.isnan(rollouts.rewards_M_P_G)]
    graded = len(np.unique(rewards)) > 2

    def advice(choice: str, text: str, open_rates: Sequence[float] = (), **settings: Any) -> Advice:
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
        return advice(at_level("outcome").name, text, [row.observed for row in gate])
    if graded and max(better.values()) >= SPARSE:
        peer_rates = ", ".join(f"{name} {rate:.1%}" for name, rate in better.items())
        text = f"no learner fails where a peer succeeds ({rates}), but a peer's best reward is higher on {peer_rates}"
        return advice(at_level("outcome").name, text, list(better.values()), gate="relative")
    if best.observed >= SPARSE:
        text = f"SGT's gate opened on {rates} of {prompts} prompts, too few to tell from chance; use more (--prompts)"
        return advice("none", text)
    return advice("none", f"SGT's gate would rarely open ({rates}); these models solve the same prompts")


def _assignments(settings: Mapping[str, Any]) -> str:
    """Return settings as command-line flags."""
    return "".join(f" --set regime.{key}={value}" for key, value in settings.items())


def with_hints(advice: Advice, tried: Sequence[hints.HintRow]) -> Advice:
    """Return advice once hints were tried: `hinted` in place of `sgt` if a hint raises the success of a learner and
    leaves answers to learn; either way, the reason."""
    rows = [row for row in tried if row.samples]
    if advice.recommended == "none" or not rows:
        return advice
    helped = [r for r in rows if r.gated / max(r.prompts, 1) >= SPARSE and r.difference_ci[0] > 0 and r.learnable > 0]
    if not helped and any(row.difference_ci[0] > 0 for row in rows):
        shares = [f"{r.learner} {number(r.copies, 2)} copies, {number(r.bare, 2)} bare" for r in rows]
        reason = f"hints help, but leave next to nothing to learn ({'; '.join(shares)})"
        return replace(advice, recommendation=f"{advice.recommendation}. {reason}")
    if not helped:
        seen = [
            f"{row.learner} {number(row.success_with, 2)}, without {number(row.success_without, 2)}" for row in rows
        ]
        reason = f"hints do not help these models (success with one: {'; '.join(seen)})"
        return replace(advice, recommendation=f"{advice.recommendation}. {reason}")
    best = max(helped, key=lambda row: row.difference)
    reason = (
        f"where the gate opens, {best.learner} solves {best.success_with:.0%} of its answers with a hint, "
        f"{best.success_without:.0%} without, and {best.learnable:.0%} are its own words: "
        f"{best.rescues_per_round:.1f} answers to learn per round, for {best.tokens_per_round:.0f} tokens sampled"
    )
    text = f"{Hinted.name}: {reason}. In place of {advice.recommendation}"
    return Advice(Hinted.name, text, caveat=hints.CAVEAT)


# ---- what needs no second model: recorded texts, and hints


def found_beside(request: DiagnosticRequest, loaded: Loaded | None, bars: ProgressBars) -> Beside:
    """Return what hints would do, and what the request's recorded texts would revive, if that was asked."""
    sources = _sources(request)
    found: list[tuple[object, str]] = []
    if request.flags.hints and loaded is not None and request.sampled is not None:
        rows = hints.hint_rows(
            request, request.sampled, loaded.table, sources, loaded.tokenizers, loaded.contexts, bars
        )
        found.append((hints.Hints(tuple(rows)), hints.markdown(rows)))
    if (texts := request.sources) is not None:
        rollouts = None
        if loaded is not None:
            rollouts, unknown = revival.with_task_ids(loaded.table, texts.prompts, request.origin)
            if unknown:
                notify(f"{unknown} prompts of the models' rollouts are not the task's, and left out")
        revived = revival.revival(rollouts, sources, request.thresholds, request.seed)
        found.append((revived, revival.markdown(revived)))
    return Beside(tuple(result for result, _ in found), tuple(text for _, text in found))


def _sources(request: DiagnosticRequest) -> dict[str, Prepared]:
    """Return the request's recorded texts, verified."""
    if (texts := request.sources) is None:
        return {}
    success = request.thresholds.success
    learners = [replace(learner, success_above=success) for learner in texts.learners()]
    return prepare_sources(texts.specs, texts.prompts, (), texts.rewards, learners, texts.timeout, success)


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
    parts.append(f"Recommendation: {sentence(result.advice.recommendation)}")
    if result.advice.caveat:
        parts.append(result.advice.caveat)
    return "\n\n".join(parts)


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
    values = {policy: scope.thresholds.of(policy).success for policy in scope.policies} if own else {}
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


def _draw_overlap(figure: Any, result: Overlap) -> None:
    names = [row.learner for row in result.gate]
    overlap, rescue = np.ones((len(names), len(names))), np.full((len(names), len(names)), np.nan)
    for row in result.pairs:
        a, b = names.index(row.learner), names.index(row.peer)
        overlap[a, b], rescue[a, b] = row.jaccard, row.rescue
    left, right = figure.subplots(1, 2)
    _matrix(left, overlap, names, "Jaccard overlap of solved prompts")
    _matrix(right, rescue, names, "P(column solves | row fails)")
    right.set(ylabel="learner", xlabel="peer")


def _matrix(axis: Axes, values: Any, names: Sequence[str], title: str) -> None:
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
        low, high = (np.array([at.rate_ci[i] for at in row.at]) for i in (0, 1))
        errors = [np.maximum(rates - low, 0), np.maximum(high - rates, 0)]  # rounding may leave the mean outside
        axis.errorbar(k_values, rates, errors, marker="o", capsize=3, label=short(row.learner))
    axis.set_xscale("log", base=2)
    axis.set_xticks(k_values, [str(k) for k in k_values])
    axis.set_ylim(bottom=0)
    axis.set(xlabel="rollouts per model, K", ylabel="fraction of prompts", title="SGT's gate rate, E[G(x)]")
    legend(axis, title="learner", fontsize=8)


DIAGNOSTIC = Diagnostic(Complementarity, compute, markdown, figures, found_beside)
