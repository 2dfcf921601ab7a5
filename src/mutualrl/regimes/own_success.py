"""`sgt` with `teacher: own`, a control: the text is the learner's own success within `memory` rounds after the gate
opened, where the peer's would have been learnt at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mutualrl.records import plain_ids
from mutualrl.regimes.gating import Candidate, DrawKey, EncodedCandidate, GateRule, draw_candidate
from mutualrl.regimes.round import RoundView
from mutualrl.trajectory import Trajectory


def open_prompts(view: RoundView, memory: int) -> dict[str, int]:
    """Return the prompts whose gate opened in the last `memory` rounds and that were not learnt since, with the
    round."""
    opened: Mapping[str, int] = view.state.get("open", {})
    return {prompt_id: number for prompt_id, number in opened.items() if number >= view.round - memory}


def own_successes(
    view: RoundView, pending: Mapping[str, int], rule: GateRule, uses: Mapping[str, int]
) -> list[tuple[str, EncodedCandidate]]:
    """Return one own success for each pending prompt that has one and is below its maximum of uses."""
    most = math.inf if rule.max_uses_per_prompt is None else rule.max_uses_per_prompt
    pairs = []
    for prompt_id in sorted(pending):
        if uses.get(prompt_id, 0) >= most:
            continue
        encoded = _encoded(view, prompt_id, rule.success_above)
        if encoded:
            drawn = draw_candidate(encoded, rule, DrawKey(view.run_seed, view.round, prompt_id, view.learner))
            pairs.append((prompt_id, drawn))
    return pairs


def _encoded(view: RoundView, prompt_id: str, above: float) -> list[EncodedCandidate]:
    encoded = []
    for rollout in view.rollouts:
        own_success = rollout.reward > above and not rollout.prefix
        if rollout.prompt_id == prompt_id and own_success and rollout.token_ids is not None and len(rollout.token_ids):
            written = rollout.trajectory
            if written is None or written.is_text:  # one that was not published was not decoded
                written = Trajectory.of_text(view.transfer.text_of(rollout.token_ids))
            candidate = Candidate(view.learner, rollout.index, written, rollout.ended)
            mask = None if rollout.mask is None else tuple(rollout.mask.tolist())
            encoded.append(EncodedCandidate(candidate, plain_ids(rollout.token_ids), mask))
    return encoded


def still_open(
    view: RoundView, pending: Mapping[str, int], opened: Sequence[str], learnt: Sequence[str]
) -> dict[str, int]:
    """Return the prompts that wait for an own success after this round."""
    waiting = {prompt_id: number for prompt_id, number in pending.items() if prompt_id not in learnt}
    return waiting | {prompt_id: view.round for prompt_id in opened if prompt_id not in learnt}
