"""Which of PRP, XGRPO and SGT could each learner use on each prompt?

Source: paper, Appendix "Channel decomposition of the three sharing regimes", Table "Joint usability of the three
regimes". The unit is (learner, prompt). PRP is usable when some peer response has exp(mean token log-ratio) in [0.8,
1.2]; XGRPO when pooling changes some advantage by more than 1e-6; SGT when its gate is open. With 0/1 rewards SGT
implies XGRPO: the learner's rewards are all 0 and some peer reward is 1, so the pooled mean differs from the learner's.
Graded rewards can make the two means equal; such units get a seventh row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mutualrl.console.markdown import name, number, significant, table
from mutualrl.diagnostics.diagnostic import INLINE, Diagnostic, Figures, Inputs, Scope
from mutualrl.diagnostics.drawing import legend, short
from mutualrl.diagnostics.gates import Thresholds, observed_gate
from mutualrl.diagnostics.model_pool import ModelPool
from mutualrl.diagnostics.request import LearnerRequest
from mutualrl.diagnostics.rollouts import Bools, Floats, ModelRollouts
from mutualrl.diagnostics.scales import Scales
from mutualrl.errors import UsageError
from mutualrl.paper.specs.xgrpo_check import advantages
from mutualrl.regimes.prp import PRP, RatioMoments, chi_square
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.xgrpo import XGRPO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOW, HIGH = 0.8, 1.2
DATA, VALUE, OUTCOME = PRP.name, XGRPO.name, SGT.name
CHANGED = 1e-6
#: the six rows of the paper's table, keyed by (PRP, XGRPO, SGT)
ROWS = {
    (False, False, False): "none of the three",
    (False, True, False): "only XGRPO",
    (False, True, True): "XGRPO and SGT, not PRP",
    (True, False, False): "only PRP",
    (True, True, False): "PRP and XGRPO, not SGT",
    (True, True, True): "all three",
}
SGT_WITHOUT_XGRPO = "SGT without XGRPO (graded rewards of equal means)"
_COLOURS = ("#BBBBBB", "#CCBB44", "#EE8866", "#4477AA", "#66AA88", "#AA3377", "#222222")


@dataclass(frozen=True, slots=True)
class ChannelRow:
    """Units (learner, prompt) on which the same regimes are usable, and their share of all."""

    usable: str
    units: int
    share: float


@dataclass(frozen=True, slots=True)
class LearnerChannels:
    """A learner's rows, and the fraction of prompts on which it can use each regime, by the regime's name."""

    learner: str
    fractions: Mapping[str, float] = field(metadata=INLINE)
    rows: list[ChannelRow]


@dataclass(frozen=True, slots=True)
class RatioRow:
    """Importance ratios of a peer's tokens under a learner: effective sample size as a fraction, mean square minus 1;
    and the chi-square estimate over its responses (NaN above 1e308)."""

    learner: str
    peer: str
    tokens: int
    effective_sample_size: float
    token_chi_square: float
    responses: int
    response_chi_square: float


@dataclass(frozen=True, slots=True)
class ChannelReport:
    """Result: the rows over all learners, and per learner. `responses`: with a ratio. `rescored`: those of them without
    a recorded trace, whose denominator is the current model (0 for rollouts that these models have just sampled).
    `left_out`: responses without a ratio, by reason."""

    rows: list[ChannelRow]
    learners: list[LearnerChannels]
    responses: int
    rescored: int
    left_out: Mapping[str, int]
    ratios: list[RatioRow]


def xgrpo_usable(rollouts: ModelRollouts, learner: int, scales: Scales) -> Bools:
    """Return whether pooling changes an advantage of the learner, shape (P,)."""
    local, pooled = advantages(rollouts, learner, rollouts.peer_rewards(learner), scales)
    return np.asarray((np.abs(pooled - local) > CHANGED).any(axis=1))


def decomposed(prp_M_P: Bools, xgrpo_M_P: Bools, sgt_M_P: Bools) -> list[ChannelRow]:
    """Return the six rows, plus the seventh if it has units; shares sum to 1."""
    rows = []
    for (prp, xgrpo, sgt), usable in ROWS.items():
        units = int(((prp_M_P == prp) & (xgrpo_M_P == xgrpo) & (sgt_M_P == sgt)).sum())
        rows.append(ChannelRow(usable, units, units / prp_M_P.size))
    if units := int((sgt_M_P & ~xgrpo_M_P).sum()):
        rows.append(ChannelRow(SGT_WITHOUT_XGRPO, units, units / prp_M_P.size))
    return rows


def compute(inputs: Inputs[LearnerRequest]) -> ChannelReport:
    """Return the result."""
    plan, fresh = inputs.plan, inputs.plan.sampled is not None
    return channels(inputs.rollouts, plan.thresholds, inputs.pool, plan.scales, fresh=fresh)


def channels(
    rollouts: ModelRollouts, thresholds: Thresholds, pool: ModelPool, scales: Scales, *, fresh: bool = False
) -> ChannelReport:
    """Return the rows and ratios of all learners. `fresh`: these models have just sampled the rollouts."""
    pool.require("the PRP channel")
    policies = range(len(rollouts.policies))
    measured = response_ratios(rollouts, pool)
    shape = (len(rollouts.policies), len(rollouts.prompt_ids))
    prp = np.zeros(shape, dtype=bool)
    for (learner, unit), ratios in measured.ratios.items():
        prp[learner, unit] = any(LOW <= ratio <= HIGH for ratio in ratios)
    xgrpo = np.stack([xgrpo_usable(rollouts, m, scales) for m in policies])
    sgt = np.stack([observed_gate(rollouts, thresholds, m) for m in policies])
    learners = []
    for m, policy in enumerate(rollouts.policies):
        fractions = {DATA: float(prp[m].mean()), VALUE: float(xgrpo[m].mean()), OUTCOME: float(sgt[m].mean())}
        rows = decomposed(prp[m : m + 1], xgrpo[m : m + 1], sgt[m : m + 1])
        learners.append(LearnerChannels(policy, fractions, rows))
    return ChannelReport(
        rows=decomposed(prp, xgrpo, sgt),
        learners=learners,
        responses=sum(map(len, measured.ratios.values())),
        rescored=0 if fresh else measured.rescored,
        left_out=measured.left_out,
        ratios=ratio_rows(rollouts.policies, measured.moments, measured.log_ratios),
    )


def ratio_rows(
    policies: Sequence[str],
    moments: Mapping[tuple[int, int], Floats],
    log_ratios: Mapping[tuple[int, int], Sequence[float]],
) -> list[RatioRow]:
    """Return the effective sample size and the chi-square estimates per learner and peer, as PRP logs them. `moments`:
    the tokens' RatioMoments by (learner, peer); `log_ratios`: the responses' log-ratios (sums over tokens, nats)."""
    rows = []
    for (learner, peer), sums in sorted(moments.items(), key=lambda entry: entry[0]):
        pair_moments = RatioMoments(*sums.tolist())
        rows.append(
            RatioRow(
                learner=policies[learner],
                peer=policies[peer],
                tokens=int(pair_moments.n),
                effective_sample_size=pair_moments.effective_sample_size,
                token_chi_square=pair_moments.chi_square,
                responses=len(log_ratios[learner, peer]),
                response_chi_square=chi_square(np.array(log_ratios[learner, peer])),
            )
        )
    return rows


class ResponseRatios(NamedTuple):
    """Importance ratios of the peers' responses under the learners.

    `ratios`: exp(mean token log-ratio) of each response, by (learner, unit). `moments`: count, sum and sum of squares
    of the token ratios, and `log_ratios`: the responses' log-ratios (sums over tokens, nats), by (learner, peer).
    `rescored`: responses without a recorded trace. `left_out`: responses without a ratio, by reason."""

    ratios: dict[tuple[int, int], list[float]]
    moments: dict[tuple[int, int], Floats]
    log_ratios: dict[tuple[int, int], list[float]]
    rescored: int
    left_out: dict[str, int]


def response_ratios(rollouts: ModelRollouts, pool: ModelPool) -> ResponseRatios:
    """Return the ratios of each peer response under each learner.

    Numerator: the learner model's log-probs of the response in its own tokens; denominator: the peer's trace, recorded
    or else rescored by its model, aligned to those tokens.

    Left out and counted: empty responses, and those that the learner's tokenizer changes or that exceed its context."""
    left_out = {"empty": 0, "changed": 0, "too_long": 0}
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    moments: dict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(3))
    summed: dict[tuple[int, int], list[float]] = defaultdict(list)
    rescored = 0
    for peer in range(len(rollouts.policies)):
        responses = _responses(rollouts, pool, peer, left_out)
        traces, missing = _traces(rollouts, pool, peer, responses)
        rescored += missing
        for learner in rollouts.peers_of(peer):
            indices, retokenized = [], []
            for place, (unit, _, text, _, ended) in enumerate(responses):
                encoded = pool.retokenized(learner, unit, text, ended)
                if not (encoded.exact and encoded.fits and encoded.ids):
                    left_out["too_long" if encoded.exact else "changed"] += 1
                    continue
                indices.append(place)
                retokenized.append(encoded.ids)
            learner_logprobs = pool.logprobs(learner, [responses[n][0] for n in indices], retokenized)
            for place, ids, values in zip(indices, retokenized, learner_logprobs, strict=True):
                unit, _, text, source_ids, _ = responses[place]
                aligned, covered = pool.align(learner, peer, text, source_ids, traces[place], ids)
                if covered.any():
                    log_ratios = (values - aligned)[covered]
                    ratios[learner, unit].append(float(np.exp(log_ratios.mean())))
                    moments[learner, peer] += np.array(RatioMoments.of(np.exp(log_ratios)))
                    summed[learner, peer].append(float(log_ratios.sum()))
    return ResponseRatios(dict(ratios), dict(moments), dict(summed), rescored, left_out)


#: unit, place in the group, text, the peer's token ids, ended
_PeerResponse = tuple[int, int, str, tuple[int, ...], bool]


def _responses(rollouts: ModelRollouts, pool: ModelPool, peer: int, left_out: dict[str, int]) -> list[_PeerResponse]:
    responses: list[_PeerResponse] = []
    for unit, place in np.argwhere(rollouts.present_M_P_G[peer]).tolist():
        text = pool.text(peer, unit, place)
        ended = rollouts.ended(peer, unit, place)
        ids = tuple(rollouts.cell("token_ids", peer, unit, place) or ()) if pool.sampled else ()
        if text is None:
            raise UsageError(
                f"{rollouts.origin}: the text of rollout {place} of prompt {rollouts.prompt_ids[unit]!r} by "
                f"{rollouts.policies[peer]!r} is not recorded; PRP needs every response: train with --exchange full "
                "(or regime prp), add a column 'completion', or sample with --pool"
            )
        if not text:
            left_out["empty"] += 1
            continue
        if not ids:
            retokenized = pool.retokenized(peer, unit, text, ended)
            if not (retokenized.exact and retokenized.fits):
                left_out["too_long" if retokenized.exact else "changed"] += 1
                continue
            ids = retokenized.ids
        prompt = pool.prompt(peer, unit)
        if not prompt or len(prompt) + len(ids) > pool.context(peer):
            left_out["too_long"] += 1
            continue
        responses.append((unit, place, text, ids, ended))
    return responses


def _traces(
    rollouts: ModelRollouts, pool: ModelPool, peer: int, responses: list[_PeerResponse]
) -> tuple[list[Floats], int]:
    """Return the peer's log-probs of its responses, recorded or else rescored, and the number rescored."""
    traces: dict[int, Floats] = {}
    if rollouts.has("logprobs") and pool.sampled:
        for index, (unit, place, _, ids, _) in enumerate(responses):
            recorded = rollouts.cell("logprobs", peer, unit, place)
            if recorded is not None and len(recorded) == len(ids):
                traces[index] = np.array(recorded, dtype=np.float64)
    missing = [index for index in range(len(responses)) if index not in traces]
    if missing:
        units, rows = [responses[n][0] for n in missing], [responses[n][3] for n in missing]
        traces |= dict(zip(missing, pool.logprobs(peer, units, rows), strict=True))
    return [traces[index] for index in range(len(responses))], len(missing)


def markdown(result: ChannelReport, scope: Scope) -> str:
    """Return the six rows, over all learners and per learner, and the importance ratios."""
    head = ["usable regimes on a prompt", "all learners (%)"]
    shares: list[dict[str, float]] = [{row.usable: row.share for row in result.rows}]
    for learner in result.learners:
        head.append(f"{name(learner.learner)} (%)")
        shares.append({row.usable: row.share for row in learner.rows})
    rows = [[row.usable, *(f"{100 * by_row.get(row.usable, 0.0):.2f}" for by_row in shares)] for row in result.rows]
    parts = [table(f"Joint usability of the three regimes ({scope.described()})", head, rows)]
    if left_out := [f"{reason} {count}" for reason, count in result.left_out.items() if count]:
        parts.append(f"Peer responses without a ratio: {', '.join(left_out)}")
    if result.rescored:
        parts.append(
            f"{result.rescored} of {result.responses} ratios have the current model in the denominator: "
            "no trace of the response was recorded (train with --exchange full)"
        )
    if result.ratios:
        parts.append(_ratio_table(result.ratios))
    return "\n\n".join(parts)


def _ratio_table(ratios: Sequence[RatioRow]) -> str:
    rows = []
    for row in ratios:
        tokens = [f"{row.tokens:,}", number(row.effective_sample_size), significant(row.token_chi_square)]
        responses = [f"{row.responses:,}", significant(row.response_chi_square)]
        rows.append([name(row.learner), name(row.peer), *tokens, *responses])
    head = ["learner", "peer", "tokens", "effective sample size", "chi-square of tokens", "responses"]
    title = "Importance ratios of the peers' tokens and responses, as PRP computes them"
    return table(title, [*head, "chi-square of responses"], rows)


def figures(result: ChannelReport) -> Figures:
    """Return the stacked fractions of the rows, over all learners and per learner."""

    def draw(figure: Figure) -> None:
        """Draw a bar per learner, and one for all."""
        axis = figure.subplots()
        groups = [("all learners", result.rows), *((short(each.learner), each.rows) for each in result.learners)]
        group_shares = [{row.usable: row.share for row in rows} for _, rows in groups]
        starts = np.zeros(len(groups))
        for row, colour in zip(result.rows, _COLOURS, strict=False):
            widths = np.array([100 * shares.get(row.usable, 0.0) for shares in group_shares])
            bars = axis.barh(range(len(groups)), widths, left=starts, color=colour, label=row.usable)
            axis.bar_label(bars, [f"{w:.0f}" if w >= 4 else "" for w in widths], label_type="center", fontsize=8)
            starts += widths
        axis.set_yticks(range(len(groups)), [label for label, _ in groups], fontsize=8, parse_math=False)
        axis.invert_yaxis()
        axis.set(xlabel="prompts (%)", xlim=(0, 100), title="Usable regimes on a prompt")
        legend(axis, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)

    return {"channels": ((8, 2.2 + 0.6 * len(result.learners)), draw)}


DIAGNOSTIC = Diagnostic(LearnerRequest, compute, markdown, figures)
