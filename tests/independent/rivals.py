"""Rules of rival ways to share experience, from the formulas alone: HACPO, Swarm, SGT's further knobs, trust."""

import math

SWARM_EPSILON = 1e-4
HACPO_EPSILON = 1e-6


def _mean(values: list[float]) -> float:
    """Average the values; no values are an error."""
    return math.fsum(values) / len(values)


def _numeric(values: list[float]) -> list[float]:
    """Keep the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def _all_equal(values: list[float]) -> bool:
    """Say whether all values are the same, as no values are."""
    return all(value == values[0] for value in values)


def _sample_std(values: list[float]) -> float:
    """Compute the standard deviation with n - 1 below; equal values, or a single one, have 0."""
    if len(values) < 2 or _all_equal(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _clip(value: float, low: float, high: float) -> float:
    """Move the value into the interval."""
    return min(max(value, low), high)


def _exp(value: float) -> float:
    """Compute the exponential, bounded to what a float can hold."""
    return math.exp(min(value, 700.0))


def capability(shares: list[float], window: int) -> float:
    """Average the last rounds' shares of rewards above 0, with a floor; a NaN share is left out."""
    return max(_mean(_numeric(shares[-window:])), 1e-8)


def discrepancy(p_learner: float, p_source: float, low: float = 0.1, high: float = 10.0) -> float:
    """Divide the learner's capability by the source's, and clamp."""
    return _clip(p_learner / p_source, low, high)


def hacpo_advantages(
    groups: dict[str, list[float]], learner: str, capability: dict[str, float], warm_up: bool
) -> dict[str, list[float]]:
    """Grade all policies' rollouts of a prompt by the pool, its baseline weighted by capability."""
    pool = [reward for rewards in groups.values() for reward in _numeric(rewards)]
    if _all_equal(pool):
        baseline = pool[0] if pool else 0.0
    else:
        weights = {name: 1.0 if warm_up else discrepancy(capability[learner], capability[name]) for name in groups}
        baseline = _mean([reward * weights[name] for name, rewards in groups.items() for reward in _numeric(rewards)])
        if baseline > 1:
            baseline = _mean(_numeric(groups[learner]))
    scale = _sample_std(pool) + HACPO_EPSILON
    return {
        policy: [0.0 if math.isnan(reward) else (reward - baseline) / scale for reward in rewards]
        for policy, rewards in groups.items()
    }


def hacpo_row_loss(
    logps: list[float],
    source_logps: list[float],
    advantage: float,
    discrepancy_weight: float,
    mini_batch: int,
    low: float = 0.2,
    step: float = 0.025,
    alpha: float = 1.0,
    bound: float = 10.0,
) -> tuple[float, float]:
    """Compute the loss of a peer's row, and its derivative by the mean of the learner's log-probabilities."""
    difference = _mean(logps) - _mean(source_logps)
    ratio = math.exp(_clip(difference, -bound, bound))
    lower = min(1.0, 1 - low + step * mini_batch)
    clamped = _clip(ratio, lower, 1.0)
    slope = -(clamped ** (1 + alpha)) * discrepancy_weight * advantage
    # The loss has c times a constant c**alpha, and d c / d mean is c: loss and derivative agree where c moves.
    moves = -bound <= difference <= bound and lower <= ratio <= 1.0
    return slope, slope if moves else 0.0


def gspo_row_loss(
    logps: list[float], old_logps: list[float], advantage: float, low: float = 3e-4, high: float = 4e-4
) -> tuple[float, float]:
    """Compute the loss of an own row with a sequence ratio, and its derivative by the mean log-probability."""
    ratio = _exp(_mean(logps) - _mean(old_logps))
    free, clipped = ratio * advantage, _clip(ratio, 1 - low, 1 + high) * advantage
    return -min(free, clipped), -free if free <= clipped else 0.0


def _swarm_group(rewards: list[float], scale: str) -> list[float]:
    """Grade a group by itself; a group of equal rewards is dropped."""
    numeric = _numeric(rewards)
    if _all_equal(numeric):
        return []
    if scale not in ("group", "none"):
        raise ValueError(f"scale is group or none, not {scale!r}")
    mean = _mean(numeric)
    divisor = _sample_std(numeric) + SWARM_EPSILON if scale == "group" else 1.0
    return [0.0 if math.isnan(reward) else (reward - mean) / divisor for reward in rewards]


def swarm_advantages(
    own: dict[str, list[float]], external: list[list[float]], scale: str
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Grade every own and external group by itself; a dropped group has an empty list."""
    graded = {prompt: _swarm_group(rewards, scale) for prompt, rewards in own.items()}
    return graded, [_swarm_group(rewards, scale) for rewards in external]


def swarm_loss_mean(own_losses: list[list[float]], external_losses: list[list[float]]) -> float:
    """Average the losses of the rows of all kept groups; no rows give 0."""
    rows = [loss for losses in own_losses + external_losses for loss in losses]
    return _mean(rows) if rows else 0.0


def relative_gate(own: list[float], peers: list[float], margin: float) -> bool:
    """Say whether some peer beats the learner's best reward by more than the margin."""
    numeric = _numeric(own)
    return bool(numeric) and any(reward - max(numeric) > margin for reward in peers)


def fit_pick(candidates: list[list[float]]) -> int:
    """Find the candidate with the lowest mean negative log-likelihood, the first of equals."""
    return min(range(len(candidates)), key=lambda index: -_mean(candidates[index]))


def sgt_sum_loss(token_logps: list[list[float]], weight: float, normalize: str, prompts: int) -> float:
    """Sum each pair's negative log-likelihood over its tokens, and average over the pairs or the prompts."""
    if normalize not in ("pairs", "prompts"):
        raise ValueError(f"normalize is pairs or prompts, not {normalize!r}")
    if not token_logps:
        return 0.0
    total = math.fsum(-math.fsum(logps) for logps in token_logps)
    return weight * total / (len(token_logps) if normalize == "pairs" else prompts)


def scheduled_weight(weight: float, kind: str, round_index: int, rounds: int) -> float:
    """Keep the weight, or let it fall to 0 over the rounds, in a line or half a cosine."""
    if kind == "constant":
        return weight
    if kind == "linear":
        return weight * max(0.0, 1 - round_index / rounds)
    if kind == "cosine":
        return weight * 0.5 * (1 + math.cos(math.pi * min(1.0, round_index / rounds)))
    raise ValueError(f"kind is constant, linear or cosine, not {kind!r}")


def remembered(
    history: list[list[tuple[str, str, int, float]]], now: int, memory: int, above: float
) -> dict[str, list[tuple[str, int, int]]]:
    """List by prompt the peers' recent successes as policy, round and rollout, the newest round first."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for index in range(max(0, now - memory), now + 1):
        for prompt, policy, rollout, reward in history[index]:
            if reward > above:
                found.setdefault(prompt, []).append((policy, index, rollout))
    return {prompt: sorted(hits, key=lambda hit: (-hit[1], hit[0], hit[2])) for prompt, hits in found.items()}


def trusted(
    logps: list[float], behaviour: list[float], covered: list[bool], low: float = 0.2, high: float = 0.2
) -> bool:
    """Say whether the sequence ratio over the covered tokens lies in the band."""
    differences = [new - old for new, old, counts in zip(logps, behaviour, covered, strict=True) if counts]
    return bool(differences) and 1 - low <= _exp(_mean(differences)) <= 1 + high


def effective_sample_size(ratios: list[float]) -> float:
    """Compute the effective sample size as a fraction of the sample."""
    return math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(ratio * ratio for ratio in ratios))


def chi_square(ratios: list[float]) -> float:
    """Estimate the chi-square divergence from the behaviour policy's samples."""
    return _mean([ratio * ratio for ratio in ratios]) - 1


def revived(history: list[dict[str, list[float]]]) -> list[int]:
    """Count by round the dead prompts that got a reward above 0; a prompt with no success in a round dies."""
    dead: set[str] = set()
    counts = []
    for groups in history:
        alive = {prompt for prompt, rewards in groups.items() if any(reward > 0 for reward in rewards)}
        counts.append(len(alive & dead))
        dead -= alive
        dead |= {prompt for prompt, rewards in groups.items() if _numeric(rewards)} - alive
    return counts
