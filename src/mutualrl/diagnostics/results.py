"""Results of the diagnostics, typed. The keys are those of `--json`; undefined figures are null there.

Source of each table: see the diagnostic's own module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

Interval = list[float]
Columns = dict[str, Any]


def columns_of(row: Mapping[str, object]) -> Columns:
    """Return a row as a dict: a TypedDict can be indexed by literal keys only."""
    return dict(row)


class Header(TypedDict):
    """Keys of every result; `diagnose` adds the optional ones."""

    policies: list[str]
    prompts: int
    rounds: NotRequired[int]
    origin: NotRequired[str]
    left_out_prompts: NotRequired[int]
    seed: NotRequired[int]
    thresholds: NotRequired[dict[str, Any]]
    figures: NotRequired[list[str]]


# ---- complementarity


class PairRow(TypedDict):
    """Ordered pair: success rates, overlap, and the fraction of the learner's failures that the peer solves."""

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


class PoolRates(TypedDict):
    """Rates of a pool over the prompts."""

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


class Bucket(TypedDict):
    """Third of the prompts by difficulty."""

    bucket: str
    prompts: int
    mean_reward: float
    jaccard: float
    exactly_one: float


class GateAt(TypedDict):
    """Gate rate with K rollouts per policy."""

    k: int
    rate: float
    rate_ci: Interval
    extrapolated: bool


class GateRow(TypedDict):
    """Learner's gate rate."""

    learner: str
    observed: float
    observed_ci: Interval
    at: list[GateAt]


class Recommendation(TypedDict):
    """One regime, or none, with the reason; its `settings`, and its extra rows per GRPO row."""

    recommended: str
    recommendation: str
    settings: dict[str, Any]
    extra_rows: float


class Complementarity(Header):
    """Result of `complementarity`."""

    samples: dict[str, int]
    success: str
    pairs: list[PairRow]
    pool: PoolRates
    buckets: list[Bucket]
    gate: list[GateRow]
    recommended: str
    recommendation: str
    caveat: str
    graded: float
    settings: dict[str, Any]
    extra_rows: float


# ---- value sharing


class PoolMeasures(TypedDict):
    """Five measures of a pool of rewards."""

    correlation: float
    sign_flips: float
    sign_changes: float
    advantage_change: float
    signed_change: float


class ValueRow(TypedDict):
    """Measures of a learner under the true and the shuffled pool."""

    learner: str
    true: PoolMeasures
    shuffled: PoolMeasures


class ValueCheck(Header):
    """Result of `xgrpo-check`."""

    scale: str
    rows: list[ValueRow]
    mean: dict[str, dict[str, float]]


# ---- gated transfer


class SuccessRate(TypedDict):
    """Successes among rollouts."""

    successes: int
    rollouts: int
    rate: float


class TaskGate(TypedDict):
    """Gated prompts of a task."""

    gated: int
    prompts: int
    rate: float


class ActivationRow(TypedDict):
    """Prompts on which a learner's gate opens."""

    learner: str
    gated: int
    gate_rate: float
    on: SuccessRate
    off: SuccessRate
    by_task: dict[str, TaskGate]


class Compared(TypedDict):
    """NLL of matched and mismatched teachers, nats per token."""

    matched: float
    mismatched: float
    difference: float
    difference_ci: Interval


class TeacherRow(Compared):
    """Learner's teachers. `own`: NLL of its own successes, one per prompt that it solved (`own_successes`)."""

    learner: str
    lessons: int
    own: float
    own_successes: int


class TeacherNLL(TypedDict):
    """Teachers' NLL of all learners; `without`: gated prompts without a teacher."""

    rows: list[TeacherRow]
    without: int


class Activation(Header):
    """Result of `sgt-check`."""

    all_fail: int
    rows: list[ActivationRow]
    nll: NotRequired[TeacherNLL | None]
    nll_needs: NotRequired[str | None]


# ---- channels and cost


class ChannelRow(TypedDict):
    """Units (learner, prompt) on which the same regimes are usable."""

    usable: str
    units: int
    share: float


class RatioRow(TypedDict):
    """Importance ratios of a peer's tokens under a learner: effective sample size as a fraction, mean square minus 1;
    and the chi-square estimate over its responses (null above 1e308)."""

    learner: str
    peer: str
    tokens: int
    effective_sample_size: float
    token_chi_square: float
    responses: int
    response_chi_square: float


class Channels(Header):
    """Result of `channels`; a learner has `learner`, `rows` and a fraction under each regime's name."""

    rows: list[ChannelRow]
    learners: list[dict[str, Any]]
    responses: int
    rescored: int
    left_out: dict[str, int]
    ratios: list[RatioRow]


class Extra(TypedDict):
    """Response tokens that a regime adds, and their ratio to the rollouts' tokens."""

    extra_tokens: int
    ratio: float


class RegimeExtra(Extra):
    """Regime's extra tokens over all learners."""

    regime: str


class Cost(Header):
    """Result of `cost`; a learner has `learner`, `rollout_tokens`, `teachers` and an `Extra` under each regime's
    name."""

    rollout_tokens: int
    rows: list[RegimeExtra]
    learners: list[dict[str, Any]]
    sequences: float
    bound: float
    teacher_tokens: str


# ---- THL


class LengthRow(TypedDict):
    """Relative error of word mass at one length."""

    target_tokens: int
    mean_target_tokens: float
    sequences: int
    repeating: int
    aligned: float
    paper: float
    naive: float
    reduction: float


class Length(TypedDict):
    """Result of suite `length`."""

    anchor: str
    passages_left_out: int
    corpus_characters: int
    window: int
    rows: list[LengthRow]


class MassRow(TypedDict):
    """Errors of word mass, nats."""

    source: str
    target: str
    anchor: str
    words: int
    source_aligned_mae: float
    source_aligned_max: float
    aligned_target_mae: float
    aligned_target_max: float
    prefix_leak_max: float


class Mass(TypedDict):
    """Result of suite `mass`."""

    spans: int
    passages_left_out: int
    rows: list[MassRow]


class TokenRatioRow(TypedDict):
    """Token ratios under one denominator."""

    denominator: str
    responses: int
    tokens: int
    p99: float
    clip_rate: float
    responses_over_10: float
    histogram: list[int]


class SequenceRatioRow(TypedDict):
    """Sequence ratios under one denominator."""

    denominator: str
    responses: int
    median: float
    p99: float
    clip_rate: float
    log_sum_median: float
    log_sum_p99: float
    sum_clip_rate: float
    histogram: list[int]


class Residual(TypedDict):
    """Losses of an alignment, over responses: delta_THL, nats; C_mis, tokens; the clipped mass, nats; the fraction of
    target tokens without a value."""

    delta_thl: float
    delta_thl_p99: float
    delta_thl_max: float
    mismatched: float
    clipped_mass: float
    uncovered: float


class Ratios(TypedDict):
    """Result of suites `ratio` and `sequence`; `residual` is of the first denominator, `aligned`."""

    responses: int
    left_out: dict[str, int]
    residual: Residual
    rows: list[TokenRatioRow] | list[SequenceRatioRow]


class ExampleWord(TypedDict):
    """Word of a text: tokens with their log-probs (source) or received values (target), and the sums; nats."""

    word: str
    source: list[tuple[str, float]]
    source_mass: float
    target: list[tuple[str, float]]
    target_mass: float


class Example(TypedDict):
    """Result of suite `example`."""

    text: str
    rows: list[ExampleWord]


class ScriptRow(TypedDict):
    """Relative error of each rule in a family of scripts."""

    family: str
    texts: int
    units: int
    word: float
    char: float
    auto: float
    span: float


class Scripts(TypedDict):
    """Result of suite `scripts`."""

    passages_left_out: int
    rows: list[ScriptRow]


class SideFigures(TypedDict):
    """One side's tokens over the passages."""

    tokens: int
    straddling: float
    uncovered: float
    round_trip: float
    eos: str | None
    specials_spelled_stay_text: bool
    paper_drift: float
    paper_cut: float
    word_drift: float


class TokenizerFigures(TypedDict, total=False):
    """Two tokenizers over the passages; empty where they cannot be compared."""

    texts: int
    characters: int
    groups: int
    one_to_one: float
    mean_group: dict[str, float]
    largest_group: dict[str, int]
    group_sizes: dict[str, int]
    end_to_end: float
    source: SideFigures
    target: SideFigures


class TokenizerCheck(TypedDict):
    """Result of checking whether two tokenizers can exchange traces."""

    safe: bool
    reasons: list[str]
    figures: TokenizerFigures


class PairCheck(TypedDict):
    """Pair: its tokenizers, and the requested suites."""

    source: str
    target: str
    safe: bool
    reasons: list[str]
    tokenizers: TokenizerFigures
    mass: NotRequired[Mass]
    length: NotRequired[Length]
    scripts: NotRequired[Scripts]
    ratio: NotRequired[Ratios]
    sequence: NotRequired[Ratios]
    example: NotRequired[Example]


class ThlCheck(TypedDict):
    """Result of `thl-check`."""

    safe: bool
    anchor: str
    seed: int
    text: str | None
    prompts: str | None
    pairs: list[PairCheck]
    figures: NotRequired[list[str]]
