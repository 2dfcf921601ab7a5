"""Claims about arms, written down before the runs, and what the runs say of them.

A claim file:

    seeds: 10                       # declared; fewer are named in every output
    correction: holm                # over all claims of the file that could be tested; none: each by itself
    claims:
      - text: SGT ends above XGRPO
        one: sgt                    # arms
        other: xgrpo
        measure: accuracy           # see `study.outcomes.Outcomes.value`
        says: above                 # above | below | within, `margin` to either side
        margin: 0.0                 # or {share: 0.25, of: grpo}: a share of what that arm itself has
        who: mean                   # of the pool; each: every policy, by itself; weakest | strongest before training
        pools: [tiny, tiny-three]   # every pool that has both arms, when left out
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mutualrl.errors import RecipeError
from mutualrl.recipes import yaml_file
from mutualrl.study.outcomes import MEASURES, Outcomes
from mutualrl.study.statistics import ALPHA, FEWEST, Estimate, holm, paired

Verdict = Literal["held", "refuted", "undecided"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Share(_Part):
    """Margin as a share of what an arm itself has of the measure, mean over its seeds."""

    share: Annotated[float, Field(gt=0)]
    of: str


class Claim(_Part):
    """One claim. `other` left out: about `one` by itself, against 0. `minus_pool`: about the difference between pools
    (that of `pools` minus that one's)."""

    text: str
    one: str
    other: str | None = None
    measure: str = "accuracy"
    says: Literal["above", "below", "within"] = "above"
    margin: float | Share = 0.0
    who: str = "mean"
    pools: tuple[str, ...] = ()
    minus_pool: str | None = None

    @field_validator("measure")
    @classmethod
    def _known(cls, value: str) -> str:
        if value.partition("/")[0] not in MEASURES:
            raise ValueError(f"unknown measure, expected one of {', '.join(MEASURES)}")
        return value


class ClaimFile(_Part):
    """A file of claims: one family."""

    claims: tuple[Claim, ...] = Field(min_length=1)
    seeds: Annotated[int, Field(ge=FEWEST)] = FEWEST
    correction: Literal["holm", "none"] = "holm"
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    problems: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class RegisteredClaims:
    """Claims, with the sha256 and the date of their file: what a reader compares with the time of the runs."""

    file: ClaimFile
    name: str
    sha256: str
    changed: str


def read_claims(path: Path) -> RegisteredClaims:
    """Return the claims in a YAML file. Raises RecipeError with each thing that is wrong."""
    tree = yaml_file.read(path)
    try:
        file = ClaimFile.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(
            [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}, found {e['input']!r:.80}" for e in error.errors()]
        ) from None
    changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
    return RegisteredClaims(file, path.name, hashlib.sha256(path.read_bytes()).hexdigest(), changed)


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """One claim about one pool: the estimates, by policy or `pool`; p-values that it is held, or refuted; how many
    seeds; `why`: why it could not be tested. `p`: the smaller of the two, adjusted for the family."""

    claim: Claim
    pool: str
    estimates: Mapping[str, Estimate]
    held: float
    refuted: float
    seeds: int
    why: str = ""
    p: float = 1.0
    alpha: float = ALPHA

    @property
    def verdict(self) -> Verdict:
        """Return held or refuted where the adjusted p-value is at most alpha, else undecided."""
        if self.why or self.p > self.alpha:
            return "undecided"
        return "refuted" if self.refuted < self.held else "held"

    def to_json(self) -> dict[str, object]:
        """Return everything."""
        return {
            "claim": self.claim.text,
            "pool": self.pool,
            "verdict": self.verdict,
            "p": self.p,
            "seeds": self.seeds,
            "estimates": {name: estimate.to_json() for name, estimate in self.estimates.items()},
            **({"why": self.why} if self.why else {}),
        }


def assess(outcomes: Outcomes, file: ClaimFile) -> list[ClaimResult]:
    """Return what the outcomes say of each claim, pool by pool, corrected over the family."""
    lines = [line for claim in file.claims for line in _lines(outcomes, claim, file)]
    testable = [line for line in lines if not line.why]
    smaller = [min(line.held, line.refuted) for line in testable]
    adjusted = iter(holm(smaller) if file.correction == "holm" else smaller)
    return [line if line.why else replace(line, p=next(adjusted)) for line in lines]


def _with_p(line: ClaimResult, p: float) -> ClaimResult:
    return ClaimResult(
        line.claim, line.pool, line.estimates, line.held, line.refuted, line.seeds, line.why, p, line.alpha
    )


def _lines(outcomes: Outcomes, claim: Claim, file: ClaimFile) -> Iterator[ClaimResult]:
    wanted = [claim.one, *([claim.other] if claim.other else [])]
    pools = claim.pools or tuple(pool for pool in outcomes.pools if set(wanted) <= set(outcomes.arms(pool)))
    if not pools:
        yield _untestable(claim, "none", f"no pool has {' and '.join(wanted)}")
    for pool in pools:
        absent = [arm for arm in wanted if arm not in outcomes.arms(pool)]
        if absent:
            yield _untestable(claim, pool, f"no run of {', '.join(absent)}")
            continue
        yield _line(outcomes, claim, file, pool)


def _untestable(claim: Claim, pool: str, why: str, seeds: int = 0) -> ClaimResult:
    return ClaimResult(claim, pool, {}, 1.0, 1.0, seeds, why)


def _line(outcomes: Outcomes, claim: Claim, file: ClaimFile, pool: str) -> ClaimResult:
    arms = [claim.one, *([claim.other] if claim.other else [])]
    seeds = outcomes.seeds(pool, *arms)
    if claim.minus_pool:
        seeds = sorted(set(seeds) & set(outcomes.seeds(claim.minus_pool, *arms)))
    if len(seeds) < FEWEST:
        return _untestable(claim, pool, f"{len(seeds)} seeds, at least {FEWEST} are needed", len(seeds))
    estimates: dict[str, Estimate] = {}
    held: list[float] = []
    refuted: list[float] = []
    for policy in _who(outcomes, claim, pool, arms):
        differences = _differences(outcomes, claim, pool, seeds, policy)
        bound = _bound(outcomes, claim, pool, policy)
        if differences is None or bound is None:
            return _untestable(claim, pool, f"not every run has {claim.measure}", len(seeds))
        estimate = Estimate.of(differences, resolution=_resolution(outcomes, claim, file, pool), alpha=file.alpha)
        estimates[policy or "pool"] = estimate
        is_held, is_refuted = _p_values(claim, estimate, bound)
        held.append(is_held)
        refuted.append(is_refuted)
    parts = len(refuted) if file.correction == "holm" else 1
    return ClaimResult(claim, pool, estimates, max(held), min(1.0, parts * min(refuted)), len(seeds), alpha=file.alpha)


def _who(outcomes: Outcomes, claim: Claim, pool: str, arms: Sequence[str]) -> list[str | None]:
    """Return the policies that a claim is about; None stands for the pool's mean."""
    if claim.who == "mean":
        return [None]
    if claim.who == "each":
        return list(outcomes.policies(pool))
    if claim.who in ("weakest", "strongest"):
        ranked = outcomes.ranked(pool, arms[-1])
        return [ranked[0] if claim.who == "weakest" else ranked[-1]]
    if claim.who not in outcomes.policies(pool):
        raise RecipeError(
            [f"claim {claim.text!r}: who: found {claim.who!r}, expected mean, each, weakest, strongest or a policy"]
        )
    return [claim.who]


def _differences(
    outcomes: Outcomes, claim: Claim, pool: str, seeds: Sequence[int], policy: str | None
) -> list[float] | None:
    """Return one - other by seed; None where a run lacks the measure."""
    results = []
    for seed in seeds:
        value = _one_minus_other(outcomes, claim, pool, seed, policy)
        if claim.minus_pool and value is not None:
            base = _one_minus_other(outcomes, claim, claim.minus_pool, seed, policy)
            value = None if base is None else value - base
        if value is None:
            return None
        results.append(value)
    return results


def _one_minus_other(outcomes: Outcomes, claim: Claim, pool: str, seed: int, policy: str | None) -> float | None:
    one = outcomes.value(pool, claim.one, seed, claim.measure, policy)
    if claim.other is None or one is None:
        return one
    other = outcomes.value(pool, claim.other, seed, claim.measure, policy)
    return None if other is None else one - other


def _bound(outcomes: Outcomes, claim: Claim, pool: str, policy: str | None) -> float | None:
    """Return a claim's margin as a number."""
    if not isinstance(claim.margin, Share):
        return claim.margin
    seeds = outcomes.seeds(pool, claim.margin.of)
    values = [outcomes.value(pool, claim.margin.of, seed, claim.measure, policy) for seed in seeds]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    sign = -1.0 if claim.says == "above" else 1.0  # "not more than a share below" or above
    return sign * claim.margin.share * sum(known) / len(known)


def _resolution(outcomes: Outcomes, claim: Claim, file: ClaimFile, pool: str) -> float:
    """Return the smallest step of an accuracy, one problem; 0 of other measures."""
    problems = file.problems or outcomes.problems(pool)
    return 1 / problems if claim.measure.startswith("accuracy") and problems else 0.0


def _p_values(claim: Claim, estimate: Estimate, bound: float) -> tuple[float, float]:
    """Return the p-values that a claim is held, and that it is refuted."""
    if claim.says == "above":
        return estimate.p_above(bound), estimate.p_below(bound)
    if claim.says == "below":
        return estimate.p_below(bound), estimate.p_above(bound)
    return estimate.p_within(bound), estimate.p_outside(bound)


def difference(
    outcomes: Outcomes,
    pool: str,
    one: str,
    other: str,
    measure: str,
    policy: str | None = None,
    *,
    alpha: float = ALPHA,
) -> Estimate | None:
    """Return one arm minus another, paired by seed; None where they share no seed, or a run lacks the measure."""
    seeds = outcomes.seeds(pool, one, other)
    sides: list[list[float]] = []
    for arm in (one, other):
        values = [outcomes.value(pool, arm, seed, measure, policy) for seed in seeds]
        sides.append([value for value in values if value is not None])
    if not seeds or any(len(side) < len(seeds) for side in sides):
        return None
    problems = outcomes.problems(pool)
    resolution = 1 / problems if measure.startswith("accuracy") and problems else 0.0
    return paired(*sides, resolution=resolution)


def verdict_counts(lines: Sequence[ClaimResult]) -> dict[str, int]:
    """Return how many claims are held, refuted, undecided."""
    counts: dict[str, Any] = dict.fromkeys(("held", "refuted", "undecided"), 0)
    for line in lines:
        counts[line.verdict] += 1
    return counts
