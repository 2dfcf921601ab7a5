"""Comparison of arms: paired differences with intervals and effect sizes, matched budgets, and claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mutualrl.storage.files import JsonObject
from mutualrl.study.claims import ClaimResult, RegisteredClaims, difference, evaluate_claims, verdict_counts
from mutualrl.study.outcomes import ALL, Outcome, Outcomes
from mutualrl.study.statistics import MIN_VALUES, Estimate

SIGNALS = ("entropy", "kl", "length")
#: costs of an arm, and their column titles
BUDGET = {
    "generated_tokens": "tokens generated",
    "asked_tokens": "tokens asked of sources",
    "extra_tokens": "extra tokens trained on",
    "seconds": "seconds",
}
#: costs as ratios to the reference's generated tokens: it may have none of them
_OF_GENERATED = ("asked_tokens", "extra_tokens")


@dataclass(frozen=True, slots=True)
class Compared:
    """Results of a comparison. By pool and arm: `final` accuracy by column, the measures `beside` it (pass@k,
    problems retained, the lessons' NLL), `differences` from the `reference` arm by measure, `budget` as ratios to the
    reference's; None where a ratio cannot be computed. `claims`: on all pieces; `unseen`: on those that are not older
    than the claims, empty if none is older. `pieces`: what was compared; `code`: what began their runs."""

    reference: Mapping[str, str]
    seeds: Mapping[str, Mapping[str, Sequence[int]]]
    final: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    differences: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    budget: Mapping[str, Mapping[str, Mapping[str, float | None]]]
    beside: Mapping[str, Mapping[str, Mapping[str, Estimate]]] = field(default_factory=dict)
    claims: Sequence[ClaimResult] = ()
    unseen: Sequence[ClaimResult] = ()
    registered: RegisteredClaims | None = None
    notes: Sequence[str] = field(default=())
    pieces: Sequence[Outcome] = ()
    code: str = ""

    def to_json(self) -> JsonObject:
        """Return the comparison as JSON."""
        registered = self.registered
        return {
            "reference": dict(self.reference),
            "seeds": {pool: {arm: list(seeds) for arm, seeds in arms.items()} for pool, arms in self.seeds.items()},
            "final": _estimates(self.final, effect=False),
            "beside": _estimates(self.beside, effect=False),
            "differences": _estimates(self.differences),
            "budget": {pool: {arm: dict(row) for arm, row in arms.items()} for pool, arms in self.budget.items()},
            "claims": [line.to_json() for line in self.claims],
            "verdicts": verdict_counts(self.claims),
            "claims_unseen": [line.to_json() for line in self.unseen],
            "verdicts_unseen": verdict_counts(self.unseen),
            "registered": None
            if registered is None
            else {"file": registered.name, "sha256": registered.sha256, "changed": registered.changed},
            "code": self.code,
            "notes": list(self.notes),
        }


def _estimates(tree: Mapping[str, Mapping[str, Mapping[str, Estimate]]], *, effect: bool = True) -> JsonObject:
    result: JsonObject = {}
    for pool, arms in tree.items():
        result[pool] = {}
        for arm, row in arms.items():
            result[pool][arm] = {name: estimate.to_json(effect=effect) for name, estimate in row.items()}
    return result


def compare(
    outcomes: Outcomes,
    reference: str | None = None,
    registered: RegisteredClaims | None = None,
    notes: Sequence[str] = (),
) -> Compared:
    """Compare all outcomes. `reference`: the arm that the others are compared with; by default, and in a pool without
    it, the first arm."""
    references = {pool: _reference(outcomes, pool, reference) for pool in outcomes.pools}
    older = [] if registered is None else [o for o in outcomes.by.values() if o.age(registered.changed) == "older"]
    all_notes = [
        *notes,
        *_older(outcomes, older),
        *_undated(outcomes, registered),
        *_few_seeds(outcomes, registered),
        *_other_problems(outcomes),
    ]
    rest = Outcomes([outcome for outcome in outcomes.by.values() if outcome not in older])
    return Compared(
        reference=references,
        seeds={pool: {arm: outcomes.seeds(pool, arm) for arm in outcomes.arms(pool)} for pool in outcomes.pools},
        final={pool: _levels(outcomes, pool, _accuracy_columns(outcomes, pool)) for pool in outcomes.pools},
        beside={pool: _levels(outcomes, pool, _other_columns(outcomes, pool)) for pool in outcomes.pools},
        differences={pool: _differences(outcomes, pool, references[pool]) for pool in outcomes.pools},
        budget={pool: _budget(outcomes, pool, references[pool]) for pool in outcomes.pools},
        claims=() if registered is None else evaluate_claims(outcomes, registered.file),
        unseen=() if registered is None or not older or not rest.by else evaluate_claims(rest, registered.file),
        registered=registered,
        notes=all_notes,
        pieces=list(outcomes.by.values()),
        code=outcomes.code,
    )


def _reference(outcomes: Outcomes, pool: str, requested: str | None) -> str:
    arms = outcomes.arms(pool)
    return requested if requested in arms else arms[0]


def _older(outcomes: Outcomes, older: Sequence[Outcome]) -> Iterator[str]:
    """Yield a note on the pieces that are older than their claims."""
    if not older:
        return
    if len(older) == len(outcomes.by):
        yield f"all {len(older)} pieces are older than the claims, which therefore describe and predict nothing"
        return
    arms = ", ".join(dict.fromkeys(outcome.arm for outcome in older))
    seeds = ", ".join(map(str, sorted({outcome.seed for outcome in older})))
    yield (
        f"{len(older)} of {len(outcomes.by)} pieces are older than the claims, or their results were known when these "
        f"were written: seeds {seeds} of {arms}. The second table of claims leaves them out"
    )


def _undated(outcomes: Outcomes, registered: RegisteredClaims | None) -> Iterator[str]:
    """Yield a note on the pieces of which it is not recorded whether they are older than their claims."""
    if registered is not None:
        ages = [outcome.age(registered.changed) for outcome in outcomes.by.values()]
        if count := ages.count("not recorded"):
            yield f"{count} of {len(ages)} pieces do not record whether they began after the claims were written"


def _few_seeds(outcomes: Outcomes, registered: RegisteredClaims | None) -> Iterator[str]:
    """Yield a note on arms with fewer seeds than the claims declare, or than an interval needs."""
    declared = MIN_VALUES if registered is None else registered.file.seeds
    reason = "declared" if registered is not None else "needed for an interval to decide"
    for pool in outcomes.pools:
        by_count: dict[int, list[str]] = {}
        for arm in outcomes.arms(pool):
            by_count.setdefault(len(outcomes.seeds(pool, arm)), []).append(arm)
        for count, arms in sorted(by_count.items()):
            if count < declared:
                yield f"{pool}: {count} seed{'' if count == 1 else 's'} of {', '.join(arms)}; {declared} {reason}"


def _other_problems(outcomes: Outcomes) -> Iterator[str]:
    """Yield a note on pools whose arms were evaluated on different numbers of problems."""
    for pool in outcomes.pools:
        counts: dict[int, list[str]] = {}
        for (name, arm, _), outcome in outcomes.by.items():
            for problems in {policy.problems for policy in outcome.policies.values() if name == pool}:
                if problems is not None and arm not in counts.setdefault(problems, []):
                    counts[problems].append(arm)
        if len(counts) > 1:
            numbers = "; ".join(f"{count} problems for {', '.join(arms)}" for count, arms in sorted(counts.items()))
            yield f"not matched: {pool}: accuracy is over {numbers}"


#: measures that are fractions, in which no interval leaves 0 to 1; accuracies are where they are no means of rewards
FRACTIONS, ACCURACIES, FRACTION = ("pass_at", "retained", "over_calls"), ("accuracy", "accuracy_at_tokens"), (0.0, 1.0)
Column = tuple[str, str, str | None]  # name, measure, policy (None: mean of the pool)


def _levels(outcomes: Outcomes, pool: str, columns: Sequence[Column]) -> dict[str, dict[str, Estimate]]:
    """Return final measures by arm and column, where the arm's runs have them."""
    table: dict[str, dict[str, Estimate]] = {}
    for arm in outcomes.arms(pool):
        row: dict[str, Estimate] = {}
        for name, measure, policy in columns:
            values = outcomes.by_seed(pool, arm, outcomes.seeds(pool, arm), measure, policy)
            if values is not None:
                kind = measure.partition("/")[0]
                is_fraction = kind in FRACTIONS or (kind in ACCURACIES and not outcomes.measure_rewards(pool))
                bounds = FRACTION if is_fraction else None
                estimate = Estimate.of(values, resolution=outcomes.resolution(pool, measure), bounds=bounds)
                group = measure.partition("/")[2] if kind == "accuracy" else ""
                guessed = bool(group) and estimate.standard_deviation == 0 and outcomes.size(pool, group) is None
                row[name] = replace(estimate, of_guess=guessed)
        table[arm] = row
    return table


def _other_columns(outcomes: Outcomes, pool: str) -> list[Column]:
    """Return pass@k of 1, 8 and the largest k, problems retained, what rollouts with tools are like, and the NLL of
    each policy's lessons."""
    columns: list[Column] = [(f"pass@{k}", f"pass_at/{k}", None) for k in outcomes.shown_k(pool)]
    columns += [("retained", "retained", None)]
    columns += [(name, measure, None) for name, measure in (("turns", "turns"), ("over-calling", "over_calls"))]
    columns += [("uncalled", "uncalled", None), ("attempts per round", "attempts", None)]
    columns.append(("groups of equal rewards left", "equal_groups", None))
    columns += [(f"lesson NLL {policy}", "lesson_nll", policy) for policy in outcomes.policies(pool)]
    return columns


def _accuracy_columns(outcomes: Outcomes, pool: str) -> list[Column]:
    """Return the pool's mean, then every policy and group; for a single group, only the policy."""
    columns: list[Column] = [("pool mean", "accuracy", None)]
    for policy in outcomes.policies(pool):
        groups = outcomes.groups(pool, policy)
        for group in groups if len(groups) != 2 else [ALL]:
            if group == ALL:
                columns.append((policy, "accuracy", policy))
            else:
                columns.append((f"{policy} {group}", f"accuracy/{group}", policy))
    return columns


def _differences(outcomes: Outcomes, pool: str, reference: str) -> dict[str, dict[str, Estimate]]:
    table: dict[str, dict[str, Estimate]] = {}
    for arm in outcomes.arms(pool):
        if arm == reference:
            continue
        row: dict[str, Estimate] = {}
        for name, measure, policy in (
            ("accuracy", "accuracy", None),
            *((f"accuracy/{policy}", "accuracy", policy) for policy in outcomes.policies(pool)),
            *((signal, signal, None) for signal in SIGNALS),
        ):
            estimate = difference(outcomes, pool, arm, reference, measure, policy)
            if estimate is not None:
                row[name] = estimate
        table[arm] = row
    return table


def _budget(outcomes: Outcomes, pool: str, reference: str) -> dict[str, dict[str, float | None]]:
    """Return the costs of each arm, as means over its policies and the seeds that it shares with the reference:
    generated tokens and seconds as ratios to the reference's on these seeds; tokens asked of sources and extra tokens
    trained on, as ratios to its generated tokens. The tokens asked appear only where any were."""
    arms = outcomes.arms(pool)
    asked = any(_mean(outcomes, pool, arm, "asked_tokens", outcomes.seeds(pool, arm)) for arm in arms)
    measures = [measure for measure in BUDGET if asked or measure != "asked_tokens"]
    table: dict[str, dict[str, float | None]] = {}
    for arm in arms:
        seeds = outcomes.seeds(pool, arm, reference)
        row: dict[str, float | None] = {}
        for measure in measures:
            value = _mean(outcomes, pool, arm, measure, seeds)
            of = "generated_tokens" if measure in _OF_GENERATED else measure
            denominator = _mean(outcomes, pool, reference, of, seeds)
            row[measure] = value / denominator if value is not None and denominator else None
        table[arm] = row
    return table


def _mean(outcomes: Outcomes, pool: str, arm: str, measure: str, seeds: Sequence[int]) -> float | None:
    values = outcomes.by_seed(pool, arm, seeds, measure)
    return None if values is None else sum(values) / len(values)


def markdown(compared: Compared) -> str:
    """Return a comparison as Markdown: notes, claims, then the tables of each pool."""
    parts = ["\n".join(f"- {note}" for note in compared.notes), f"Code at the start of the runs: {compared.code}."]
    if compared.registered is not None:
        parts.append(_claim_table(compared, compared.claims))
        if compared.unseen:
            parts.append(_claim_table(compared, compared.unseen, ", without the pieces that are older"))
    for pool in compared.final:
        parts += [_final_table(compared, pool), _beside_table(compared, pool), difference_table(compared, pool)]
    return "\n\n".join(part for part in parts if part)


def _final_table(compared: Compared, pool: str) -> str:
    return _level_table(compared, pool, compared.final[pool], "Greedy accuracy at the end")


def _beside_table(compared: Compared, pool: str) -> str:
    """Return the table of measures other than accuracy; empty if no run has them."""
    rows = compared.beside.get(pool, {})
    return _level_table(compared, pool, rows, "Other measures") if any(rows.values()) else ""


def _level_table(compared: Compared, pool: str, rows: Mapping[str, Mapping[str, Estimate]], title: str) -> str:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    guessed = any(estimate.of_guess for row in rows.values() for estimate in row.values())
    without = "; none where all seeds are equal in a group whose size was not recorded" if guessed else ""
    lines = [f"**{title}, {pool}: mean over seeds [95 % interval{without}]**", ""]
    lines += _header("arm", "seeds", *columns)
    for arm, row in rows.items():
        cells = [_level(row.get(name)) for name in columns]
        lines.append(_row(arm, str(len(compared.seeds[pool][arm])), *cells))
    return "\n".join(lines)


def difference_table(compared: Compared, pool: str) -> str:
    """Return the table of differences from a pool's reference arm, as Markdown; empty if it has no other arm."""
    reference, rows = compared.reference[pool], compared.differences[pool]
    if not rows:
        return ""
    measured = [measure for measure in BUDGET if any(compared.budget[pool][arm].get(measure) for arm in rows)]
    signals = [name for name in SIGNALS if any(name in row for row in rows.values())]
    ratios = "; tokens and seconds as ratios to it" if measured else ""
    lines = [f"**Difference from {reference}, paired by seed: mean [95 % interval], {pool}{ratios}**", ""]
    lines += _header(
        "arm", "seeds", "accuracy", "reading", "effect size (g)", *signals, *(BUDGET[name] for name in measured)
    )
    for arm, row in rows.items():
        accuracy = row.get("accuracy")
        cells = [""] * 4
        if accuracy is not None:
            cells = [str(accuracy.n), str(accuracy), accuracy.reading, _effect(accuracy)]
        cells += [str(row[name]) if name in row else "" for name in signals]
        cells += [_ratio(compared.budget[pool][arm][name]) for name in measured]
        lines.append(_row(arm, *cells))
    return "\n".join(lines)


def _claim_table(compared: Compared, results: Sequence[ClaimResult], which_pieces: str = "") -> str:
    registered = compared.registered
    assert registered is not None
    by_verdict = verdict_counts(results)
    implied = by_verdict.pop("implied")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in by_verdict.items())
    if implied:
        counts += f"; {implied} implied by another claim"
    correction = "Holm-corrected" if registered.file.correction == "holm" else "not corrected for multiple testing"
    which = f"{registered.name} (sha256 {registered.sha256[:12]}, of {registered.changed})"
    lines = [
        f"**Claims of {which}{which_pieces}, {correction}: {counts}**",
        "",
        *_header("claim", "pool", "difference", "p", "verdict"),
    ]
    for line in results:
        values = "; ".join(f"{name} {estimate}" for name, estimate in line.estimates.items())
        p = "" if line.why else f"{line.p:.4f}"
        verdict = f"{line.verdict} (implied by: {line.implied_by})" if line.implied_by else line.verdict
        lines.append(_row(line.claim.text, line.pool, values or line.why, p, verdict))
    return "\n".join(lines)


def _level(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.n < MIN_VALUES or estimate.of_guess:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _effect(estimate: Estimate) -> str:
    if estimate.effect is None:
        return ""
    value, low, high = estimate.effect
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _header(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]
