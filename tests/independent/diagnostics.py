"""The paper's measures of how the policies of a pool could help each other."""

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


def _fraction(part: int, total: int) -> float:
    """Divide a count by a total; NaN if the total is 0."""
    return part / total if total else math.nan


def first_success(rewards: Rewards, threshold: float) -> dict[str, set[str]]:
    """Return, for each policy, the prompts whose first rollout is above the threshold."""
    return {
        policy: {prompt for prompt, values in by_prompt.items() if values and values[0] > threshold}
        for policy, by_prompt in rewards.items()
    }


def any_success(rewards: Rewards, threshold: float) -> dict[str, set[str]]:
    """Return, for each policy, the prompts with any rollout above the threshold."""
    return {
        policy: {prompt for prompt, values in by_prompt.items() if any(value > threshold for value in values)}
        for policy, by_prompt in rewards.items()
    }


def overlap(a: set[str], b: set[str]) -> dict[str, float]:
    """Count two success sets, their intersection and their union, and compute their Jaccard index."""
    both, either = len(a & b), len(a | b)
    return {"a": len(a), "b": len(b), "both": both, "either": either, "jaccard": _fraction(both, either)}


def rescue_rate(learner_success: set[str], peer_success: set[str], prompts: Iterable[str]) -> float:
    """Compute the fraction of the learner's failures that the peer solves."""
    failures = set(prompts) - learner_success
    return _fraction(len(failures & peer_success), len(failures))


def sign_flips(before: list[float], after: list[float]) -> float:
    """Compute the fraction of entries that go from above 0 to below, or from below to above."""
    pairs = list(zip(before, after, strict=True))
    return _fraction(sum((old > 0 > new) or (old < 0 < new) for old, new in pairs), len(pairs))


def mean_abs_change(before: list[float], after: list[float]) -> float:
    """Average the absolute change of the entries."""
    changes = [abs(new - old) for old, new in zip(before, after, strict=True)]
    return math.fsum(changes) / len(changes) if changes else math.nan


def gate_profile(rewards: Rewards, learner: str, success_above: float, failure_below: float) -> dict[str, float]:
    """Count the learner's prompts and those where it always fails and some peer succeeds; return their fraction too."""
    opened = 0
    for prompt, learner_rewards in rewards[learner].items():
        peers = [value for policy in rewards if policy != learner for value in rewards[policy].get(prompt, [])]
        failed = bool(learner_rewards) and all(value < failure_below for value in learner_rewards)
        opened += failed and any(value > success_above for value in peers)
    return {"prompts": len(rewards[learner]), "open": opened, "share": _fraction(opened, len(rewards[learner]))}


def channel(prp: bool, xgrpo: bool, sgt: bool) -> str:
    """Return the row name of the joint-usability table."""
    usable = (bool(prp), bool(xgrpo), bool(sgt))
    return CHANNELS.get(usable, "SGT without XGRPO (graded rewards of equal means)")


def sequence_ratio(learner_logps: list[float], aligned: list[float | None]) -> float:
    """Compute the geometric mean of the token ratios over the positions that have an aligned value."""
    differences = [
        learner_logp - peer_logp
        for learner_logp, peer_logp in zip(learner_logps, aligned, strict=True)
        if peer_logp is not None
    ]
    return math.exp(math.fsum(differences) / len(differences)) if differences else math.nan
