"""Claims about arms, declared before the runs, and their verdicts.

A claim file:

    seeds: 10                       # declared; every output notes arms with fewer
    correction: holm                # over all testable claims of the file; none: uncorrected
    claims:
      - text: SGT ends above XGRPO
        one: sgt                    # arms
        other: xgrpo
        measure: accuracy           # see `study.outcomes.Outcomes.value`
        says: above                 # the difference is above or below the margin; within: nearer to 0 than the margin
        margin: 0.0                 # or {share: -0.25, of: grpo}: a fraction of that arm's own value
        who: mean                   # of the pool; each: every policy separately; weakest | strongest before training
        pools: [tiny, tiny-three]   # default: every pool with both arms
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mutualrl.errors import RecipeError
from mutualrl.recipes import yaml_file
from mutualrl.study.outcomes import MEASURES, Outcomes
from mutualrl.study.statistics import ALPHA, MIN_VALUES, Estimate, holm, paired

OF_ARM = ("steps_to", "accuracy_at_tokens")  # measures against another arm's

Verdict = Literal["held", "refuted", "undecided"]


class StudySection(BaseModel):
    """Base class of the sections of a claim file and of a sweep file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Share(StudySection):
    """Margin as a fraction of the magnitude of the measure in arm `of`, per seed."""

    share: float
    of: str


class Claim(StudySection):
    """One claim. Without `other`, `one` is compared with 0. With `minus_pool`, the claim is about the difference
    between pools (`pools` minus it). A negative margin with `above` means: at most that far below."""

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
    def _known_measure(cls, value: str) -> str:
        name, slash, rest = value.partition("/")
        if name not in MEASURES:
            raise ValueError(f"unknown measure, expected one of {', '.join(MEASURES)}")
        if bool(slash and rest) != (name in (*OF_ARM, "pass_at")) and not (name == "accuracy" and rest):
            raise ValueError(
                "expected steps_to/ARM, accuracy_at_tokens/ARM, pass_at/K, accuracy or accuracy/GROUP, or another "
                "measure without a slash"
            )
        return value

    @model_validator(mode="after")
    def _positive_margin(self) -> Claim:
        size = self.margin.share if isinstance(self.margin, Share) else self.margin
        if self.says == "within" and size <= 0:
            raise ValueError("within needs a margin above 0")
        return self

    @property
    def arms(self) -> list[str]:
        """Return the compared arms."""
        return [self.one, *([self.other] if self.other else [])]

    @property
    def named_arms(self) -> list[str]:
        """Return every arm named in the claim."""
        name, _, arm = self.measure.partition("/")
        goal = [arm] if name in OF_ARM else []
        return [*self.arms, *goal, *([self.margin.of] if isinstance(self.margin, Share) else [])]


class ClaimFile(StudySection):
    """Claim file: one family of tests."""

    claims: tuple[Claim, ...] = Field(min_length=1)
    seeds: Annotated[int, Field(ge=MIN_VALUES)] = MIN_VALUES
    correction: Literal["holm", "none"] = "holm"
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    problems: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class RegisteredClaims:
    """Claims as read from a file, with its sha256 and date, to compare with the dates of the runs."""

    file: ClaimFile
    name: str
    text: str
    changed: str

    @property
    def sha256(self) -> str:
        """Return the sha256 of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def to_json(self) -> dict[str, str]:
        """Return the arguments of `parse_claims`."""
        return {"name": self.name, "text": self.text, "changed": self.changed}


def parse_claims(text: str, name: str, changed: str) -> RegisteredClaims:
    """Parse the claims in a YAML text. Raises RecipeError listing every problem."""
    try:
        file = ClaimFile.model_validate(yaml_file.parse_mapping(text, name))
    except ValidationError as error:
        raise RecipeError(
            [f"{name}: {'.'.join(map(str, e['loc']))}: {e['msg']}, found {e['input']!r:.80}" for e in error.errors()]
        ) from None
    return RegisteredClaims(file, Path(name).name, text, changed)


def read_claims(path: Path) -> RegisteredClaims:
    """Read the claims in a YAML file. Raises RecipeError listing every problem."""
    yaml_file.read(path)  # raises for a file that is missing, too large, or not a mapping
    changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
    return parse_claims(path.read_text(encoding="utf-8"), str(path), changed)


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """One claim on one pool: estimates by policy (or `pool`), p-values for held and refuted, number of seeds.
    `why`: why it is untestable. `p`: the smaller p-value, adjusted for the family. `implied_by`: the claim whose
    verdict implies this one's, and with which it counts once; empty if none does."""

    claim: Claim
    pool: str
    estimates: Mapping[str, Estimate]
    held: float
    refuted: float
    seeds: int
    why: str = ""
    p: float = 1.0
    alpha: float = ALPHA
    implied_by: str = ""

    @property
    def verdict(self) -> Verdict:
        """Return held or refuted where the adjusted p-value is below alpha, else undecided; an interval that ends on
        the margin, up to rounding, is undecided."""
        if self.why or self.p >= self.alpha * (1 - 1e-9):
            return "undecided"
        return "refuted" if self.refuted < self.held else "held"

    def to_json(self) -> dict[str, object]:
        """Return the result as JSON."""
        return {
            "claim": self.claim.text,
            "pool": self.pool,
            "verdict": self.verdict,
            "p": self.p,
            "seeds": self.seeds,
            "estimates": {name: estimate.to_json() for name, estimate in self.estimates.items()},
            **({"why": self.why} if self.why else {}),
            **({"implied_by": self.implied_by} if self.implied_by else {}),
        }


def evaluate_claims(outcomes: Outcomes, file: ClaimFile) -> list[ClaimResult]:
    """Test each claim on each pool, corrected over the family.

    A claim enters with the smaller of its two p-values, held and refuted: the family-wise error rate is at most
    2 alpha, as for a two-sided test.
    """
    results = [result for claim in file.claims for result in _results(outcomes, claim, file)]
    smaller = [min(result.held, result.refuted) for result in results if not result.why]
    adjusted = iter(holm(smaller) if file.correction == "holm" else smaller)
    return _with_implications([result if result.why else replace(result, p=next(adjusted)) for result in results])


def entails(one: Claim, other: Claim) -> bool:
    """Return whether the first claim, if true, makes the second true by logic alone: the same difference, and a margin
    that is at least as demanding."""
    same = ("one", "other", "measure", "minus_pool")
    if any(getattr(one, key) != getattr(other, key) for key in same) or one.who not in (other.who, "each"):
        return False
    if isinstance(one.margin, Share) or isinstance(other.margin, Share):
        if not (isinstance(one.margin, Share) and isinstance(other.margin, Share)):
            return False
        if one.margin.of != other.margin.of or one.who != other.who:
            return False
        strong, weak = one.margin.share, other.margin.share
    else:
        strong, weak = one.margin, other.margin
    low = strong if one.says == "above" else -strong if one.says == "within" else None
    high = strong if one.says in ("below", "within") else None
    if other.says == "above":
        return low is not None and low >= weak
    if other.says == "below":
        return high is not None and high <= weak
    return low is not None and high is not None and low >= -weak and high <= weak


def _with_implications(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Mark each decided claim that another one of the same pool and verdict implies. Of two claims that say the same,
    the first stays."""
    marked: list[ClaimResult] = []
    for index, result in enumerate(results):
        implied_by = ""
        for position, candidate in enumerate(results):
            if position == index or (candidate.pool, candidate.verdict) != (result.pool, result.verdict):
                continue
            stronger, weaker = candidate.claim, result.claim
            if result.verdict == "refuted":  # a claim is false if one that it entails is
                stronger, weaker = weaker, stronger
            if result.verdict != "undecided" and entails(stronger, weaker):
                if entails(weaker, stronger) and position > index:
                    continue
                implied_by = candidate.claim.text
                break
        marked.append(replace(result, implied_by=implied_by))
    return marked


class _UntestableError(Exception):
    """Raised where a claim cannot be tested; the message is the reason."""


def _results(outcomes: Outcomes, claim: Claim, file: ClaimFile) -> Iterator[ClaimResult]:
    pools = [label for name in claim.pools for label in _labels(outcomes, name)]
    if not claim.pools:
        pools = [pool for pool in outcomes.pools if set(claim.arms) <= set(outcomes.arms(pool))]
    if not pools:
        yield _untestable(claim, "none", f"no pool has {' and '.join(claim.arms)}")
    for pool in pools:
        try:
            yield _result(outcomes, claim, file, pool)
        except _UntestableError as error:
            yield _untestable(claim, pool, str(error))


def _labels(outcomes: Outcomes, name: str) -> list[str]:
    """Return the pools that match a name, exactly or as the end of a comparison of runs; the name if none match."""
    return [pool for pool in outcomes.pools if pool == name or pool.endswith(f", pool {name}")] or [name]


def _untestable(claim: Claim, pool: str, why: str) -> ClaimResult:
    return ClaimResult(claim, pool, {}, 1.0, 1.0, 0, why)


def _result(outcomes: Outcomes, claim: Claim, file: ClaimFile, pool: str) -> ClaimResult:
    seeds = _seeds(outcomes, claim, pool)
    estimates: dict[str, Estimate] = {}
    held: list[float] = []
    refuted: list[float] = []
    resolution = outcomes.resolution(pool, claim.measure, file.problems)
    for policy in _policies(outcomes, claim, pool):
        differences = [_difference(outcomes, claim, pool, seed, policy) for seed in seeds]
        margins = [_margin(outcomes, claim, pool, seed, policy) for seed in seeds]
        below = Estimate.of(_sums(differences, margins, -1), resolution=resolution, alpha=file.alpha)
        above = Estimate.of(_sums(differences, margins, +1), resolution=resolution, alpha=file.alpha)
        if claim.says == "above":
            p_values = below.p_above(), below.p_below()
        elif claim.says == "below":
            p_values = below.p_below(), below.p_above()
        else:  # two one-sided tests to hold; the test of either side to refute
            p_values = max(above.p_above(), below.p_below()), min(below.p_above(), above.p_below())
        held.append(p_values[0])
        refuted.append(p_values[1])
        estimates[policy or "pool"] = Estimate.of(differences, resolution=resolution, alpha=file.alpha)
    parts = len(refuted) if file.correction == "holm" else 1
    return ClaimResult(claim, pool, estimates, max(held), min(1.0, parts * min(refuted)), len(seeds), alpha=file.alpha)


def _sums(differences: Sequence[float], margins: Sequence[float], sign: int) -> list[float]:
    return [difference + sign * margin for difference, margin in zip(differences, margins, strict=True)]


def _seeds(outcomes: Outcomes, claim: Claim, pool: str) -> list[int]:
    """Return the seeds common to all arms of a claim."""
    pools = [pool, *(_labels(outcomes, claim.minus_pool) if claim.minus_pool else [])]
    seeds: set[int] | None = None
    for name in pools:
        if absent := [arm for arm in dict.fromkeys(claim.named_arms) if arm not in outcomes.arms(name)]:
            raise _UntestableError(f"{name}: no run of {', '.join(absent)}")
        common = set(outcomes.seeds(name, *claim.named_arms))
        seeds = common if seeds is None else seeds & common
    if seeds is None or len(seeds) < MIN_VALUES:
        raise _UntestableError(f"{len(seeds or ())} seeds, at least {MIN_VALUES} are needed")
    return sorted(seeds)


def _policies(outcomes: Outcomes, claim: Claim, pool: str) -> list[str | None]:
    """Return the policies that a claim is about; None stands for the pool's mean."""
    if claim.who == "mean":
        return [None]
    policies = outcomes.policies(pool)
    if claim.minus_pool:
        other = set(outcomes.policies(_labels(outcomes, claim.minus_pool)[0]))
        policies = [policy for policy in policies if policy in other]
    if claim.who == "each" and policies:
        return list(policies)
    if claim.who in ("weakest", "strongest"):
        ranked = outcomes.ranked(pool, claim.arms[-1])
        if not ranked:
            raise _UntestableError(f"{claim.arms[-1]} has no accuracy before training")
        return [ranked[0] if claim.who == "weakest" else ranked[-1]]
    if claim.who not in policies:
        raise _UntestableError(f"who: found {claim.who}, expected one of {', '.join(policies) or 'none'}")
    return [claim.who]


def _difference(outcomes: Outcomes, claim: Claim, pool: str, seed: int, policy: str | None) -> float:
    """Return one - other for a seed, minus the same difference in `minus_pool`."""
    value = _one_minus_other(outcomes, claim, pool, seed, policy)
    if claim.minus_pool:
        value -= _one_minus_other(outcomes, claim, _labels(outcomes, claim.minus_pool)[0], seed, policy)
    return value


def _one_minus_other(outcomes: Outcomes, claim: Claim, pool: str, seed: int, policy: str | None) -> float:
    one = _value(outcomes, claim, pool, claim.one, seed, policy)
    return one if claim.other is None else one - _value(outcomes, claim, pool, claim.other, seed, policy)


def _margin(outcomes: Outcomes, claim: Claim, pool: str, seed: int, policy: str | None) -> float:
    """Return the margin for a seed as a number."""
    if not isinstance(claim.margin, Share):
        return claim.margin
    return claim.margin.share * abs(_value(outcomes, claim, pool, claim.margin.of, seed, policy))


def _value(outcomes: Outcomes, claim: Claim, pool: str, arm: str, seed: int, policy: str | None) -> float:
    value = outcomes.value(pool, arm, seed, claim.measure, policy)
    if value is None:
        raise _UntestableError(f"not every run has {claim.measure}")
    return value


def difference(
    outcomes: Outcomes, pool: str, one: str, other: str, measure: str, policy: str | None = None
) -> Estimate | None:
    """Return one arm minus another, paired by seed; None if they share no seed, or a run lacks the measure."""
    seeds = outcomes.seeds(pool, one, other)
    left, right = (outcomes.by_seed(pool, arm, seeds, measure, policy) for arm in (one, other))
    if left is None or right is None:
        return None
    return paired(left, right, resolution=outcomes.resolution(pool, measure))


def verdict_counts(lines: Sequence[ClaimResult]) -> dict[str, int]:
    """Return how many claims are held, refuted, undecided, and implied by another one (counted only there)."""
    counts: dict[str, int] = dict.fromkeys(("held", "refuted", "undecided", "implied"), 0)
    for line in lines:
        counts["implied" if line.implied_by else line.verdict] += 1
    return counts
