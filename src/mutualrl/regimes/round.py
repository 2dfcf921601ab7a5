"""Input and output of a regime for one round. No TRL, no files, no torch.

`RoundView` in, `Plan` out. A plan has the same form for all regimes: advantages for the learner's own rollouts, extra
rows for the loss, metrics, and the state for the next round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mutualrl.errors import RegimeError
from mutualrl.records import Ids, Score
from mutualrl.regimes.advantages import Scale, group_by_prompt, whiten
from mutualrl.regimes.transfer import EncodedRun, Transfer, UnavailableTransfer
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import NO_TEXT, Trajectory

if TYPE_CHECKING:
    from mutualrl.rollouts import Rollouts

State = Mapping[str, Any]  # of a regime: JSON values by name


Passage = tuple[str, tuple[int, ...]]  # prompt id, the learner's token ids of a completion
Response = tuple[str, str, bool]  # prompt id, text, whether it had ended


class Sample(NamedTuple):
    """Rollout that the learner is to sample on a prompt of its data, judged by its rewards on that prompt.

    `hint`: text shown with the prompt while sampling, cut to `max_hint_tokens` of the learner's tokens; "": none.
    `template`: how prompt and hint are put together, with {prompt} and {hint}; of a chat, the last user message is the
    {prompt}; None: a template for chats, another one for texts. `number`: tells samples of one prompt and hint apart.
    `logprobs`: whether the result has the log-probs of its tokens.
    """

    prompt_id: str
    number: int
    hint: str = ""
    template: str | None = None
    max_hint_tokens: int | None = None
    logprobs: bool = False


class Requests(NamedTuple):
    """What a plan needs beyond the exchange's data.

    `logprobs`, `nll`: passages that the learner scores in one batched forward pass without gradients, at the sampling
    temperature and at temperature 1. `rewards`: responses for the learner's own reward functions. `samples`: rollouts
    that the learner samples now, at the run's sampling settings.
    """

    logprobs: tuple[Passage, ...] = ()
    nll: tuple[Passage, ...] = ()
    rewards: tuple[Response, ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def passages(self) -> int:
        """Return the number of passages that go through the model."""
        return len(self.logprobs) + len(self.nll)

    def without(self, results: Results) -> Requests:
        """Return the requests that have no result yet."""
        return Requests(
            tuple(passage for passage in self.logprobs if passage not in results.logprobs),
            tuple(passage for passage in self.nll if passage not in results.nll),
            tuple(response for response in self.rewards if response not in results.rewards),
            tuple(sample for sample in self.samples if sample not in results.samples),
        )


class Sampled(NamedTuple):
    """Rollout that a regime requested. `encoded`: the completion on the learner's T tokens, with those that were
    sampled; `trajectory`: what they say; `ended`: it was not truncated; `reward`: of the learner's reward functions on
    the prompt without the hint (NaN: unscorable). `logprobs`: shape (T,), nats, at the sampling temperature and under
    the prompt as it was shown; None if not requested. `hint_ids`: the learner's token ids of the hint as it was shown.
    `own_words`: its token ids of what it wrote outside of calls, without the answer of a run; None: all but the end
    token."""

    encoded: EncodedRun
    trajectory: Trajectory
    ended: bool
    reward: float
    logprobs: npt.NDArray[np.float32] | None = None
    hint_ids: tuple[int, ...] = ()
    own_words: tuple[int, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the learner's token ids of the completion."""
        return self.encoded.ids

    @property
    def tokens(self) -> int:
        """Return the number of sampled tokens."""
        return len(self.ids) if self.encoded.mask is None else sum(self.encoded.mask)

    @property
    def words(self) -> tuple[int, ...]:
        """Return the token ids that may be a copy of a hint, which has no end token."""
        if self.own_words is not None:
            return self.own_words
        return self.ids[:-1] if self.ended else self.ids


class Results(NamedTuple):
    """Results of a round's requests so far: log-probs of each token of a passage, shape (T,), nats; its mean NLL per
    token, nats; the reward of a response (NaN: unscorable); the sampled rollout, None if prompt, hint and completion
    could exceed the engine's maximum length, or if its environment did not show the round's prompt."""

    logprobs: Mapping[Passage, npt.NDArray[np.float64]] = {}
    nll: Mapping[Passage, float] = {}
    rewards: Mapping[Response, float] = {}
    samples: Mapping[Sample, Sampled | None] = {}

    def merged(self, other: Results) -> Results:
        """Return these results and others."""
        return Results(
            {**self.logprobs, **other.logprobs},
            {**self.nll, **other.nll},
            {**self.rewards, **other.rewards},
            {**self.samples, **other.samples},
        )


#: how often a regime may make new requests in a round
PHASES = 4


@dataclass(frozen=True, slots=True)
class GuideView:
    """Input of a regime before the learner samples: this rank's upcoming rollouts, in TRL's order.

    `prompt_ids`, `indices`: each rollout's prompt and index in the group. `state`: from the regime's last plan.
    `group`: rollouts per prompt. `max_length`: maximum number of tokens of a completion.
    """

    round: int
    learner: str
    run_seed: int
    prompt_ids: Sequence[str]
    indices: Sequence[int]
    group: int
    max_length: int
    state: State = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundView:
    """Input of a regime: one learner, one round.

    `rollouts`: the learner's own over all its ranks, in TRL's order, with TRL's advantages and their token ids; their
    texts are `transfer.text_of(rollout.token_ids)`. `peers`: by name. `state`: from the regime's last plan. `scale` is
    the trainer's `scale_rewards`, `mask_truncated` its `mask_truncated_completions`, `mean_over` the unit that its loss
    is averaged over; `clip` is (epsilon_low, epsilon_high). `results` are those of the regime's requests so far.
    `other_prompts`: ids of prompts in the learner's data that peers saw in this round and the learner did not.
    `whiten`: advantages are whitened over the round (`round.whiten_advantages`), those of `rollouts` already.
    `sources`: the peers that are sources, with what they have: members that publish and never learn.
    `earned`: by source whose runs with tools have the file's rewards in `peers`, those that its rollouts have earned
    here, in their order; NaN where that was not asked. `scores`: by source, how it reads others' texts.
    """

    round: int
    learner: str
    run_seed: int
    rollouts: Rollouts
    peers: Mapping[str, Rollouts]
    transfer: Transfer = field(default_factory=UnavailableTransfer)
    state: State = field(default_factory=dict)
    scale: Scale = "group"
    mask_truncated: bool = False
    mean_over: Literal["rows", "tokens"] = "rows"
    clip: tuple[float, float] = (0.2, 0.2)
    results: Results = field(default_factory=Results)
    other_prompts: frozenset[str] = frozenset()
    whiten: bool = False
    sources: Mapping[str, SourceTraits] = field(default_factory=dict)
    earned: Mapping[str, Sequence[float]] = field(default_factory=dict)
    scores: Mapping[str, Sequence[Score]] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> list[str]:
        """Return the prompt id of every own rollout."""
        return self.rollouts.prompt_ids

    @property
    def rewards(self) -> list[float]:
        """Return the reward of every own rollout."""
        return self.rollouts.rewards

    @property
    def advantages(self) -> list[float]:
        """Return TRL's advantage of every own rollout."""
        return [advantage or 0.0 for advantage in self.rollouts.advantages]

    @property
    def scored(self) -> list[bool]:
        """Return whether each own rollout has a reward."""
        return [not math.isnan(reward) for reward in self.rewards]

    @property
    def lengths(self) -> list[int]:
        """Return the length of every own rollout, in tokens."""
        return [length or 0 for length in self.rollouts.lengths]

    def own_groups(self) -> dict[str, list[float]]:
        """Return own rewards by prompt."""
        return group_by_prompt(self.prompt_ids, self.rewards)

    def confirmed(self) -> RoundView:
        """Return the view in which no file's word is believed: sources' runs have the rewards that they earned here."""
        peers = dict(self.peers)
        for name in set(self.earned) & set(peers):
            peers[name] = peers[name].with_rewards(self.earned[name])
        return replace(self, peers=peers, earned={})

    def of_policies(self) -> RoundView:
        """Return the view without the sources."""
        return self.without_sources(self.sources)

    def without_sources(self, names: Collection[str]) -> RoundView:
        """Return the view without some sources."""
        peers = {name: peer for name, peer in self.peers.items() if name not in names}
        sources = {name: traits for name, traits in self.sources.items() if name not in names}
        return replace(self, peers=peers, sources=sources)

    def of_sources(self) -> RoundView:
        """Return the view with the sources as the only peers."""
        return replace(self, peers={name: peer for name, peer in self.peers.items() if name in self.sources})


# ---- extra rows


class RowSource(NamedTuple):
    """Origin of the text of an extra row."""

    policy: str
    rollout: int
    round: int


@dataclass(frozen=True, slots=True)
class PPO:
    """TRL's own surrogate, two-sided. `delta`: the dual clip, an upper bound on the ratio where the advantage is
    negative."""

    delta: float = math.inf


@dataclass(frozen=True, slots=True)
class Band:
    """Ratio clipped to the trainer's [1 - epsilon_low, 1 + epsilon_high] and detached: a weight on the score."""


@dataclass(frozen=True, slots=True)
class UpperBound:
    """Ratio clipped at `cap` from above only and detached (truncated importance sampling)."""

    cap: float = 1.0


@dataclass(frozen=True, slots=True)
class Stepwise:
    """One ratio s per row, exp of the mean log-ratio over its tokens, clipped from above at 1 and from below at a bound
    that rises with each mini-batch: c = clamp(s, 1 - low + step * m, 1), m = index of the optimizer step in the round.
    The objective is c * detach(c)^alpha * A. `max_log_ratio` bounds |log s|. Source: HACPO, arXiv 2603.02604."""

    low: float = 0.2
    step: float = 0.025
    alpha: float = 1.0
    max_log_ratio: float = 10.0


Bound = PPO | Band | UpperBound | Stepwise
BOUNDS: tuple[type[Bound], ...] = (PPO, Band, UpperBound, Stepwise)
Mean = Literal["pool", "rows", "prompts"]


@dataclass(frozen=True, slots=True, eq=False)
class ExtraRow:
    """Row that joins the learner's loss along with its own rollouts, on the learner's T tokens.

    loss "nll": weight * NLL at temperature 1, averaged over `mean`: the "rows" or "prompts" of an optimizer step; a
    row's NLL is its mean per token, or its sum with `reduce` "sum".
    loss "policy_gradient": weight * advantage under `bound`, in one mean with the learner's own rollouts (`mean`
    "pool": TRL's normaliser over own and extra rows together).

    `mask`, shape (T,): the tokens in the loss; None: all. `logprobs`, shape (T,), nats: of the behaviour policy; None:
    the learner's own at the start of the round. `trajectory`: what its tokens say, for the log of rescues. `hint`: what
    the learner was shown for it.
    """

    prompt_id: str
    source: RowSource
    token_ids: Sequence[int] | Ids
    loss: Literal["policy_gradient", "nll"]
    weight: float = 1.0
    advantage: float = 0.0
    mask: npt.NDArray[np.bool_] | None = None
    logprobs: npt.NDArray[np.float32] | None = None
    bound: Bound = PPO()
    mean: Mean = "rows"
    reduce: Literal["mean", "sum"] = "mean"
    trajectory: Trajectory = NO_TEXT
    hint: str = ""

    @property
    def covered(self) -> npt.NDArray[np.bool_]:
        """Return the mask as an array."""
        return np.ones(len(self.token_ids), dtype=np.bool_) if self.mask is None else self.mask

    @property
    def tokens(self) -> int:
        """Return the number of its tokens; of a run with tools, of those that were sampled."""
        return len(self.token_ids) if self.trajectory.is_text else int(self.covered.sum())

    @property
    def is_taught(self) -> bool:
        """Return whether the learner is taught its text: nll rows, and own answers after a hint, unless their weight is
        0."""
        return (self.loss == "nll" or bool(self.hint)) and self.weight != 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Output of a regime for the learner's round.

    `advantages`: of the own rollouts, in the view's order, replacing TRL's; None keeps TRL's. `token_advantages`: by
    own rollout, what is added to its advantage on each of its T tokens, shape (T,). `rows` join the loss.
    `metrics` are logged under their names. `state`: JSON values, passed to the next round's view and saved in
    checkpoints; None keeps the current state.
    """

    advantages: tuple[float, ...] | None = None
    rows: tuple[ExtraRow, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: State | None = None
    token_advantages: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of the extra rows of one optimizer step, over all ranks.

    `nll`: mean NLL per token over the nll rows, nats; None without any. `ratios`: learner over behaviour policy, for
    each unmasked token of the policy-gradient rows; empty without any. `low`, `high`: the trainer's clip, 1 -
    epsilon_low and 1 + epsilon_high. `by_policy`: the ratios by source policy. `response_log_ratios`: by source policy,
    the sum of each row's token log-ratios, nats.
    """

    nll: float | None
    ratios: npt.NDArray[np.float64]
    low: float
    high: float
    by_policy: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    response_log_ratios: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)


# ---- validation of plans


def plain_state(state: State, regime: str) -> State:
    """Return the state as restored from a checkpoint, so that a live run and a resumed one see the same.

    Raises RegimeError for a state that JSON does not preserve.
    """
    try:
        copy: State = json.loads(json.dumps(dict(state), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RegimeError(
            f"regime {regime!r}: its state is not JSON ({error}); expected string keys and JSON values"
        ) from None
    if copy != dict(state):
        raise RegimeError(f"regime {regime!r}: its state changes in JSON; expected string keys, lists and no tuples")
    return copy


def whitened_plan(plan: Plan, view: RoundView) -> Plan:
    """Return a plan with its own advantages and those of its rows whitened, with the constants of all of them: a
    regime that makes advantages of its own has made a new batch (`round.whiten_advantages`). A plan that keeps the
    view's advantages, which are whitened already, is returned unchanged."""
    graded = [row for row in plan.rows if row.loss == "policy_gradient"]
    if plan.advantages is None and not graded:
        return plan
    own = view.advantages if plan.advantages is None else plan.advantages
    pool = [value for value, scored in zip(own, view.scored, strict=True) if scored]
    pool += [row.advantage for row in graded]
    values = whiten([row.advantage for row in graded], [True] * len(graded), pool)
    whitened = iter(values.tolist())
    rows = [replace(row, advantage=next(whitened)) if row.loss == "policy_gradient" else row for row in plan.rows]
    return replace(plan, advantages=tuple(whiten(own, view.scored, pool).tolist()), rows=tuple(rows))


def check_plan(plan: object, view: RoundView, regime: str) -> Plan:
    """Return the plan with plain Python numbers and NumPy arrays of the declared types, so that a checkpoint restores
    exactly what was trained on. Raises RegimeError naming its first invalid value."""
    if not isinstance(plan, Plan):
        raise RegimeError(f"regime {regime!r}: plan returned {type(plan).__name__}, expected mutualrl.regimes.Plan")
    advantages = None
    if plan.advantages is not None:
        if len(plan.advantages) != len(view.rollouts):
            raise RegimeError(
                f"regime {regime!r}: {len(plan.advantages)} advantages for {len(view.rollouts)} own rollouts"
            )
        advantages = tuple(float(value) for value in plan.advantages)
        if not all(math.isfinite(value) for value in advantages):
            raise RegimeError(f"regime {regime!r}: an advantage is not finite, expected finite numbers")
    prompts = {*view.prompt_ids, *view.other_prompts}
    rows = []
    for number, row in enumerate(plan.rows):
        try:
            rows.append(_checked_row(row, prompts))
        except (TypeError, ValueError, AttributeError) as error:
            raise RegimeError(f"regime {regime!r}: row {number}: {error}") from error
    metrics = {}
    for key, value in plan.metrics.items():
        if not isinstance(key, str) or not isinstance(value, int | float | np.number):
            raise RegimeError(f"regime {regime!r}: metric {key!r}: found {value!r}, expected a number")
        metrics[key] = float(value)
    state = None if plan.state is None else plain_state(plan.state, regime)
    by_token: dict[int, npt.NDArray[np.float32]] = {}
    lengths = [0 if ids is None else len(ids) for ids in view.rollouts.token_ids] if plan.token_advantages else []
    for number, values in plan.token_advantages.items():
        by_token[int(number)] = np.ascontiguousarray(values, dtype=np.float32)
        wanted = (lengths[number],) if 0 <= number < len(lengths) else ()
        if by_token[number].shape != wanted or not np.isfinite(by_token[number]).all():
            raise RegimeError(
                f"regime {regime!r}: token_advantages of own rollout {number}: found shape {by_token[number].shape}, "
                f"expected {wanted or 'an own rollout'}, finite numbers"
            )
    return Plan(advantages, tuple(rows), metrics, state, by_token)


def _checked_row(row: object, prompts: set[str]) -> ExtraRow:
    """Return a row with plain values. Raises TypeError or ValueError for an invalid one."""
    if not isinstance(row, ExtraRow) or not isinstance(row.trajectory, Trajectory):
        found = type(row.trajectory if isinstance(row, ExtraRow) else row).__name__
        raise TypeError(f"found {found}, expected mutualrl.regimes.ExtraRow, with a Trajectory")
    if row.prompt_id not in prompts:
        raise ValueError(f"prompt {row.prompt_id!r} is not in the round")
    ids = np.ascontiguousarray(row.token_ids)
    if ids.size == 0:
        raise ValueError("has no token ids; leave out rows that the learner cannot encode")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"token_ids: found {ids.dtype} of shape {ids.shape}, expected a flat list of integers")
    mask = None if row.mask is None else np.ascontiguousarray(row.mask, dtype=np.bool_)
    logprobs = None if row.logprobs is None else np.ascontiguousarray(row.logprobs, dtype=np.float32)
    for name, values in (("mask", mask), ("logprobs", logprobs)):
        if values is not None and values.shape != (len(ids),):
            raise ValueError(f"{name} of shape {values.shape}, expected ({len(ids)},)")
    if logprobs is not None and not np.isfinite(logprobs if mask is None else logprobs[mask]).all():
        raise ValueError("logprobs of an unmasked token are not finite")
    weight, advantage = float(row.weight), float(row.advantage)
    if not math.isfinite(weight) or not math.isfinite(advantage):
        raise ValueError(f"weight {weight}, advantage {advantage}, expected finite numbers")
    if row.loss not in ("policy_gradient", "nll"):
        raise ValueError(f"loss {row.loss!r}, expected 'policy_gradient' or 'nll'")
    allowed = ("pool",) if row.loss == "policy_gradient" else ("rows", "prompts")
    if row.mean not in allowed:
        raise ValueError(f"mean {row.mean!r} with loss {row.loss!r}, expected {' or '.join(map(repr, allowed))}")
    if row.reduce not in ("mean", "sum"):
        raise ValueError(f"reduce {row.reduce!r}, expected 'mean' or 'sum'")
    if type(row.bound) not in BOUNDS:
        expected = ", ".join(kind.__name__ for kind in BOUNDS)
        raise TypeError(f"bound {row.bound!r}, expected one of: {expected}")
    policy, rollout, round_index = row.source
    return replace(
        row,
        source=RowSource(str(policy), int(rollout), int(round_index)),
        token_ids=ids.astype(np.int32),
        weight=weight,
        advantage=advantage,
        mask=mask,
        logprobs=logprobs,
        bound=type(row.bound)(**{key: float(value) for key, value in asdict(row.bound).items()}),
        hint=str(row.hint),
    )
