"""Which of the three channels each learner could use on each prompt.

Source: paper, Appendix "Channel decomposition of the three sharing regimes", Table "Joint usability of the three
regimes". The unit is (learner, prompt). PRP is usable when some peer response has exp(mean token log-ratio) in [0.8,
1.2]; XGRPO when pooling changes some advantage by more than 1e-6; SGT when its gate is open. SGT implies XGRPO where
rewards are 0 or 1: with own rewards all 0 and some peer's 1, the pool's mean is not the learner's. Graded rewards can
make the two means equal; such units get a seventh row."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from mutualrl.diagnostics.complementarity import Thresholds, observed_gate
from mutualrl.diagnostics.results import ChannelRow, Channels
from mutualrl.diagnostics.rollouts import Bools, Floats, Rollouts
from mutualrl.diagnostics.voices import Voices
from mutualrl.diagnostics.xgrpo_check import Scales, advantages
from mutualrl.errors import UsageError
from mutualrl.regimes import at_level

LOW, HIGH = 0.8, 1.2
DATA, VALUE, OUTCOME = (at_level(level).name for level in ("data", "value", "outcome"))
CHANGED = 1e-6
#: the six rows of the paper's table, by (PRP, XGRPO, SGT)
ROWS = {
    (False, False, False): "none of the three",
    (False, True, False): "only XGRPO",
    (False, True, True): "XGRPO and SGT, not PRP",
    (True, False, False): "only PRP",
    (True, True, False): "PRP and XGRPO, not SGT",
    (True, True, True): "all three",
}
SEVENTH = "SGT without XGRPO (graded rewards of equal means)"


def usable_values(rollouts: Rollouts, learner: int, scales: Scales) -> Bools:
    """Whether pooling changes an advantage of the learner, shape (P,)."""
    local, pooled = advantages(rollouts, learner, rollouts.peer_rewards(learner), scales)
    return np.asarray((np.abs(pooled - local) > CHANGED).any(axis=1))


def decomposed(prp_M_P: Bools, xgrpo_M_P: Bools, sgt_M_P: Bools) -> list[ChannelRow]:
    """The six rows, `{"usable", "units", "share"}`, and a seventh where there are such units; shares sum to 1."""
    rows: list[ChannelRow] = []
    for (prp, xgrpo, sgt), name in ROWS.items():
        units = int(((prp_M_P == prp) & (xgrpo_M_P == xgrpo) & (sgt_M_P == sgt)).sum())
        rows.append({"usable": name, "units": units, "share": units / prp_M_P.size})
    if units := int((sgt_M_P & ~xgrpo_M_P).sum()):
        rows.append({"usable": SEVENTH, "units": units, "share": units / prp_M_P.size})
    return rows


def channels(rollouts: Rollouts, thresholds: Thresholds, voices: Voices, scales: Scales) -> Channels:
    """`{"policies", "prompts", "rows": the six rows, "learners": [{"learner", a share per regime, "rows"}],
    "responses", "left_out"}`; `left_out` counts peer responses without a ratio, by reason."""
    voices.require("the PRP channel")
    policies = range(len(rollouts.policies))
    ratios, left_out = sequence_ratios(rollouts, voices)
    shape = (len(rollouts.policies), len(rollouts.prompt_ids))
    prp = np.zeros(shape, dtype=bool)
    for (learner, unit), found in ratios.items():
        prp[learner, unit] = any(LOW <= ratio <= HIGH for ratio in found)
    xgrpo = np.stack([usable_values(rollouts, m, scales) for m in policies])
    sgt = np.stack([observed_gate(rollouts, thresholds, m) for m in policies])
    learners: list[dict[str, Any]] = []
    for m, name in enumerate(rollouts.policies):
        shares = {DATA: float(prp[m].mean()), VALUE: float(xgrpo[m].mean()), OUTCOME: float(sgt[m].mean())}
        learners.append(
            {"learner": name, **shares, "rows": decomposed(prp[m : m + 1], xgrpo[m : m + 1], sgt[m : m + 1])}
        )
    return {
        "policies": list(rollouts.policies),
        "prompts": shape[1],
        "rows": decomposed(prp, xgrpo, sgt),
        "learners": learners,
        "responses": sum(map(len, ratios.values())),
        "left_out": left_out,
    }


def sequence_ratios(rollouts: Rollouts, voices: Voices) -> tuple[dict[tuple[int, int], list[float]], dict[str, int]]:
    """exp(mean log-ratio) of every peer response under every learner, by (learner, unit).

    Numerator: the learner's log-probs of its own tokens of the response; denominator: the peer's trace, as recorded or
    scored again by its model, aligned to them. Left out and counted: empty responses, and such as the
    learner's tokenizer changes or its context does not hold."""
    left_out = {"empty": 0, "changed": 0, "too_long": 0}
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for peer in range(len(rollouts.policies)):
        said = _responses(rollouts, voices, peer, left_out)
        traces = _traces(rollouts, voices, peer, said)
        for learner in rollouts.peers_of(peer):
            kept, carried = [], []
            for number, (unit, _, text, _, ended) in enumerate(said):
                found = voices.carried(learner, unit, text, ended)
                if not (found.exact and found.fits and found.ids):
                    left_out["too_long" if found.exact else "changed"] += 1
                    continue
                kept.append(number)
                carried.append(found.ids)
            own = voices.logprobs(learner, [said[n][0] for n in kept], carried)
            for number, ids, values in zip(kept, carried, own, strict=True):
                unit, _, text, source_ids, _ = said[number]
                aligned, covered = voices.align(learner, peer, text, source_ids, traces[number], ids)
                if covered.any():
                    ratios[learner, unit].append(float(np.exp((values - aligned)[covered].mean())))
    return dict(ratios), left_out


#: unit, place, text, the peer's ids, whether it had ended
_Said = tuple[int, int, str, tuple[int, ...], bool]


def _responses(rollouts: Rollouts, voices: Voices, peer: int, left_out: dict[str, int]) -> list[_Said]:
    found: list[_Said] = []
    for unit, place in np.argwhere(rollouts.present_M_P_G[peer]).tolist():
        text = voices.text(peer, unit, place)
        ended = rollouts.ended(peer, unit, place)
        ids = tuple(rollouts.cell("token_ids", peer, unit, place) or ()) if voices.sampled else ()
        if text is None:
            raise UsageError(
                f"{rollouts.origin}: the text of rollout {place} of prompt {rollouts.prompt_ids[unit]!r} by "
                f"{rollouts.policies[peer]!r} is not recorded; PRP looks at every response: train with --exchange full "
                "(or regime prp), add a column 'completion', or sample with --pool"
            )
        if not text:
            left_out["empty"] += 1
            continue
        if not ids:
            carried = voices.carried(peer, unit, text, ended)
            if not (carried.exact and carried.fits):
                left_out["too_long" if carried.exact else "changed"] += 1
                continue
            ids = carried.ids
        prompt = voices.prompt(peer, unit)
        if not prompt or len(prompt) + len(ids) > voices.context(peer):
            left_out["too_long"] += 1
            continue
        found.append((unit, place, text, ids, ended))
    return found


def _traces(rollouts: Rollouts, voices: Voices, peer: int, said: list[_Said]) -> list[Floats]:
    """The peer's log-probs of its own responses: as recorded, else by one forward pass."""
    if rollouts.has("logprobs") and voices.sampled:
        kept = [rollouts.cell("logprobs", peer, unit, place) for unit, place, *_ in said]
        if all(
            trace is not None and len(trace) == len(ids) for trace, (_, _, _, ids, _) in zip(kept, said, strict=True)
        ):
            return [np.array(trace, dtype=np.float64) for trace in kept]
    return voices.logprobs(peer, [unit for unit, *_ in said], [ids for _, _, _, ids, _ in said])
