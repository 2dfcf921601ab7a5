"""The paper's measures of what the policies of a pool could give each other."""

import math
from collections.abc import Iterable

Rewards = dict[str, dict[str, list[float]]]

CHANNELS = {
    (False, False, False): "none of the three",
    (False, True, False): "only XGRPO",
    (False, True, True): "XGRPO and SGT, not PRP",
    (True, False, False): "only PRP",
    (True, True, False): "PRP and XGRPO, not SGT",
    (True, True, True): "all three",
}


def _share(part: int, whole: int) -> float:
    """Divide a count by another, with NaN for nothing of nothing."""
    return part / whole if whole else math.nan


def first_success(rewards: Rewards, threshold: float) -> dict[str, set[str]]:
    """Collect, for each policy, the prompts whose first rollout is above the threshold."""
    return {
        policy: {prompt for prompt, values in by_prompt.items() if values and values[0] > threshold}
        for policy, by_prompt in rewards.items()
    }


def any_success(rewards: Rewards, threshold: float) -> dict[str, set[str]]:
    """Collect, for each policy, the prompts of which any rollout is above the threshold."""
    return {
        policy: {prompt for prompt, values in by_prompt.items() if any(value > threshold for value in values)}
        for policy, by_prompt in rewards.items()
    }


def overlap(a: set[str], b: set[str]) -> dict[str, float]:
    """Count two success sets, what they share and what they have together, and divide the one by the other."""
    both, either = len(a & b), len(a | b)
    return {"a": len(a), "b": len(b), "both": both, "either": either, "jaccard": _share(both, either)}


def rescue_rate(learner_success: set[str], peer_success: set[str], prompts: Iterable[str]) -> float:
    """Compute the share of the learner's failures that the peer solves."""
    failures = set(prompts) - learner_success
    return _share(len(failures & peer_success), len(failures))


def sign_flips(before: list[float], after: list[float]) -> float:
    """Compute the share of entries that go from above 0 to below, or from below to above."""
    pairs = list(zip(before, after, strict=True))
    return _share(sum((old > 0 > new) or (old < 0 < new) for old, new in pairs), len(pairs))


def mean_abs_change(before: list[float], after: list[float]) -> float:
    """Average the absolute change of the entries."""
    changes = [abs(new - old) for old, new in zip(before, after, strict=True)]
    return math.fsum(changes) / len(changes) if changes else math.nan


def gate_profile(rewards: Rewards, learner: str, success_above: float, failure_below: float) -> dict[str, float]:
    """Count the learner's prompts, those on which it failed everywhere and some peer succeeded, and their share."""
    opened = 0
    for prompt, own in rewards[learner].items():
        peers = [value for policy in rewards if policy != learner for value in rewards[policy].get(prompt, [])]
        failed = bool(own) and all(value < failure_below for value in own)
        opened += failed and any(value > success_above for value in peers)
    return {"prompts": len(rewards[learner]), "open": opened, "share": _share(opened, len(rewards[learner]))}


def channel(prp: bool, xgrpo: bool, sgt: bool) -> str:
    """Name the row of the table of joint usability."""
    usable = (bool(prp), bool(xgrpo), bool(sgt))
    return CHANNELS.get(usable, "SGT without XGRPO (graded rewards of equal means)")


def sequence_ratio(learner_logps: list[float], aligned: list[float | None]) -> float:
    """Compute the geometric mean of the token ratios over the positions that have an aligned value."""
    differences = [own - peer for own, peer in zip(learner_logps, aligned, strict=True) if peer is not None]
    return math.exp(math.fsum(differences) / len(differences)) if differences else math.nan
