"""Advantages, token losses and the gate of the three regimes, from the paper's formulas."""

import math

EPSILON = 1e-4


def _mean(values: list[float]) -> float:
    """Average the values."""
    return math.fsum(values) / len(values)


def _sample_std(values: list[float]) -> float:
    """Compute the standard deviation with divisor n - 1; 0 for equal values or a single one."""
    if len(values) < 2 or _all_equal(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _all_equal(values: list[float]) -> bool:
    """Return whether all values are equal."""
    return all(value == values[0] for value in values)


def _advantages(rewards: list[float], baseline: float, group_std: float, scale: str, batch_std: float) -> list[float]:
    """Subtract the baseline from each reward and divide according to the scale."""
    differences = [reward - baseline for reward in rewards]
    if scale == "none":
        return differences
    if scale == "group":
        return [difference / (group_std + EPSILON) for difference in differences]
    if scale == "batch":
        return [difference / (batch_std + EPSILON) for difference in differences]
    raise ValueError(f"scale: found {scale!r}, expected group, batch or none")


def _pool_advantages(rewards: list[float], pool: list[float], scale: str, batch_std: float) -> list[float]:
    """Compute advantages from the mean and standard deviation of a pool; a pool of equal rewards gives zeros."""
    if _all_equal(pool):
        return [0.0] * len(rewards)
    return _advantages(rewards, _mean(pool), _sample_std(pool), scale, batch_std)


def group_advantages(rewards: list[float], scale: str, batch_std: float) -> list[float]:
    """Compute the advantages within a group, as GRPO does."""
    return _pool_advantages(rewards, rewards, scale, batch_std)


def prp_advantages(
    learner: list[float], peers: list[float], scale: str, batch_std: float
) -> tuple[list[float], list[float]]:
    """Compute the advantages of learner and peer rollouts as one group, and return both."""
    pool = learner + peers
    return _pool_advantages(learner, pool, scale, batch_std), _pool_advantages(peers, pool, scale, batch_std)


def _ratio(logp: float, behaviour: float) -> float:
    """Compute the importance ratio; infinite on overflow."""
    try:
        return math.exp(logp - behaviour)
    except OverflowError:
        return math.inf


def _clip(value: float, low: float, high: float) -> float:
    """Clip the value to the interval."""
    return min(max(value, low), high)


def ppo_token_loss(
    logp: float, behaviour: float, advantage: float, eps_low: float, eps_high: float, dual: float
) -> tuple[float, float]:
    """Compute a token's clipped surrogate loss and its derivative with respect to the token's log-prob."""
    ratio = _ratio(logp, behaviour)
    bounded = min(ratio, dual) * advantage
    clipped = _clip(ratio, 1 - eps_low, 1 + eps_high) * advantage
    # d ratio / d logp is the ratio; a term clipped by the bound or the band has no gradient.
    has_gradient = ratio <= dual if bounded <= clipped else 1 - eps_low <= ratio <= 1 + eps_high
    return -min(bounded, clipped), -ratio * advantage if has_gradient else 0.0


def band_token_loss(
    logp: float, behaviour: float, advantage: float, eps_low: float, eps_high: float
) -> tuple[float, float]:
    """Compute a token's policy-gradient loss, weighted by the clipped and detached ratio, and its derivative."""
    weight = _clip(_ratio(logp, behaviour), 1 - eps_low, 1 + eps_high)
    return -weight * advantage * logp, -weight * advantage


def xgrpo_advantages(
    learner: list[float],
    peers: list[float],
    lengths: list[int],
    mix: float,
    length_correction: float,
    clip: float,
    scale: str,
    batch_std: float,
) -> list[float]:
    """Mix the local advantage with the pool's, correct for response length and clip."""
    local = group_advantages(learner, scale, batch_std)
    pooled = _pool_advantages(learner, learner + peers, scale, batch_std)
    mean_length = sum(lengths) / len(lengths)
    advantages = []
    for by_group, by_pool, length in zip(local, pooled, lengths, strict=True):
        advantage = (1 - mix) * by_group + mix * by_pool
        advantage *= (mean_length / max(1, length)) ** length_correction
        advantages.append(_clip(advantage, -clip, clip))
    return advantages


def noise_advantages(
    rewards: list[float], shift: float, scale: str, batch_std: float, exempt_equal: bool
) -> list[float]:
    """Compute a group's advantages with a shifted baseline; equal rewards give zeros only if they are exempt."""
    if exempt_equal and _all_equal(rewards):
        return [0.0] * len(rewards)
    baseline = (rewards[0] if _all_equal(rewards) else _mean(rewards)) + shift
    return _advantages(rewards, baseline, _sample_std(rewards), scale, batch_std)


def sgt_gate(
    learner: list[float], peers: list[float], success_above: float, failure_below: float, any_failure: bool = False
) -> bool:
    """Return whether the learner failed and some peer succeeded; NaN is neither failure nor success."""
    failures = [reward < failure_below for reward in learner]
    failed = any(failures) if any_failure else bool(failures) and all(failures)
    return failed and any(reward > success_above for reward in peers)


def sgt_loss(token_logps: list[list[float]], weight: float, normalize: str, prompts: int) -> float:
    """Average each pair's negative log-likelihood per token, then over the pairs or the batch's prompts."""
    if normalize not in ("pairs", "prompts"):
        raise ValueError(f"normalize: found {normalize!r}, expected pairs or prompts")
    if not token_logps:
        return 0.0
    total = math.fsum(-math.fsum(logps) / max(1, len(logps)) for logps in token_logps)
    return weight * total / (len(token_logps) if normalize == "pairs" else prompts)
