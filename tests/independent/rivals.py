"""Rules of rival methods, from their formulas: HACPO, Swarm, further settings of SGT, trust."""

import math

SWARM_EPSILON = 1e-4
HACPO_EPSILON = 1e-6


def _mean(values: list[float]) -> float:
    """Average the values; an empty list is an error."""
    return math.fsum(values) / len(values)


def _numeric(values: list[float]) -> list[float]:
    """Keep the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def _all_equal(values: list[float]) -> bool:
    """Return whether all values are equal; an empty list counts as equal."""
    return all(value == values[0] for value in values)


def _sample_std(values: list[float]) -> float:
    """Compute the standard deviation with divisor n - 1; 0 for equal values or a single one."""
    if len(values) < 2 or _all_equal(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _clip(value: float, low: float, high: float) -> float:
    """Clip the value to the interval."""
    return min(max(value, low), high)


def _exp(value: float) -> float:
    """Compute the exponential, capped to avoid overflow."""
    return math.exp(min(value, 700.0))


def capability(fractions: list[float], window: int) -> float:
    """Average the last rounds' fractions of rewards above 0, with a floor; NaN is left out."""
    return max(_mean(_numeric(fractions[-window:])), 1e-8)


def discrepancy(p_learner: float, p_source: float, low: float = 0.1, high: float = 10.0) -> float:
    """Divide the learner's capability by the source's and clamp."""
    return _clip(p_learner / p_source, low, high)


def hacpo_advantages(
    groups: dict[str, list[float]], learner: str, capability: dict[str, float], warm_up: bool
) -> dict[str, list[float]]:
    """Compute all policies' advantages on a prompt, with a pool baseline weighted by capability."""
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
    """Compute the loss of a peer's row and its derivative with respect to the learner's mean log-prob."""
    difference = _mean(logps) - _mean(source_logps)
    ratio = math.exp(_clip(difference, -bound, bound))
    lower = min(1.0, 1 - low + step * mini_batch)
    clamped = _clip(ratio, lower, 1.0)
    slope = -(clamped ** (1 + alpha)) * discrepancy_weight * advantage
    # The loss is c times a constant c**alpha, and d c / d mean is c: loss and derivative are equal unless c is clamped.
    has_gradient = -bound <= difference <= bound and lower <= ratio <= 1.0
    return slope, slope if has_gradient else 0.0


def gspo_row_loss(
    logps: list[float], old_logps: list[float], advantage: float, low: float = 3e-4, high: float = 4e-4
) -> tuple[float, float]:
    """Compute the loss of a learner's row with a sequence ratio, and its derivative by the mean log-prob."""
    ratio = _exp(_mean(logps) - _mean(old_logps))
    unclipped, clipped = ratio * advantage, _clip(ratio, 1 - low, 1 + high) * advantage
    return -min(unclipped, clipped), -unclipped if unclipped <= clipped else 0.0


def _swarm_group(rewards: list[float], scale: str) -> list[float]:
    """Compute the advantages within a group; a group of equal rewards is dropped."""
    numeric = _numeric(rewards)
    if _all_equal(numeric):
        return []
    if scale not in ("group", "none"):
        raise ValueError(f"scale: found {scale!r}, expected group or none")
    mean = _mean(numeric)
    divisor = _sample_std(numeric) + SWARM_EPSILON if scale == "group" else 1.0
    return [0.0 if math.isnan(reward) else (reward - mean) / divisor for reward in rewards]


def swarm_advantages(
    learner: dict[str, list[float]], external: list[list[float]], scale: str
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Compute the advantages within every learner and external group; a dropped group has an empty list."""
    advantages = {prompt: _swarm_group(rewards, scale) for prompt, rewards in learner.items()}
    return advantages, [_swarm_group(rewards, scale) for rewards in external]


def swarm_loss_mean(learner_losses: list[list[float]], external_losses: list[list[float]]) -> float:
    """Average the losses of the rows of all kept groups; 0 without rows."""
    rows = [loss for losses in learner_losses + external_losses for loss in losses]
    return _mean(rows) if rows else 0.0


def relative_gate(learner: list[float], peers: list[float], margin: float) -> bool:
    """Return whether some peer beats the learner's best reward by more than the margin."""
    numeric = _numeric(learner)
    return bool(numeric) and any(reward - max(numeric) > margin for reward in peers)


def fit_pick(candidates: list[list[float]]) -> int:
    """Return the index of the candidate with the lowest mean negative log-likelihood, the first on a tie."""
    return min(range(len(candidates)), key=lambda index: -_mean(candidates[index]))


def sgt_sum_loss(token_logps: list[list[float]], weight: float, normalize: str, prompts: int) -> float:
    """Sum each pair's negative log-likelihood over its tokens and average over the pairs or the prompts."""
    if normalize not in ("pairs", "prompts"):
        raise ValueError(f"normalize: found {normalize!r}, expected pairs or prompts")
    if not token_logps:
        return 0.0
    total = math.fsum(-math.fsum(logps) for logps in token_logps)
    return weight * total / (len(token_logps) if normalize == "pairs" else prompts)


def scheduled_weight(weight: float, kind: str, round_index: int, rounds: int) -> float:
    """Keep the weight constant or decay it to 0 over the rounds, linearly or along half a cosine."""
    if kind == "constant":
        return weight
    if kind == "linear":
        return weight * max(0.0, 1 - round_index / rounds)
    if kind == "cosine":
        return weight * 0.5 * (1 + math.cos(math.pi * min(1.0, round_index / rounds)))
    raise ValueError(f"kind: found {kind!r}, expected constant, linear or cosine")


def remembered(
    history: list[list[tuple[str, str, int, float]]], now: int, memory: int, above: float
) -> dict[str, list[tuple[str, int, int]]]:
    """List the peers' recent successes per prompt as policy, round and rollout, newest round first."""
    successes: dict[str, list[tuple[str, int, int]]] = {}
    for index in range(max(0, now - memory), now + 1):
        for prompt, policy, rollout, reward in history[index]:
            if reward > above:
                successes.setdefault(prompt, []).append((policy, index, rollout))
    return {prompt: sorted(hits, key=lambda hit: (-hit[1], hit[0], hit[2])) for prompt, hits in successes.items()}


def trusted(
    logps: list[float], behaviour: list[float], covered: list[bool], low: float = 0.2, high: float = 0.2
) -> bool:
    """Return whether the sequence ratio over the covered tokens is in the band."""
    differences = [new - old for new, old, is_covered in zip(logps, behaviour, covered, strict=True) if is_covered]
    return bool(differences) and 1 - low <= _exp(_mean(differences)) <= 1 + high


def effective_sample_size(ratios: list[float]) -> float:
    """Compute the effective sample size as a fraction of the sample."""
    return math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(ratio * ratio for ratio in ratios))


def chi_square(ratios: list[float]) -> float:
    """Estimate the chi-square divergence from the behaviour policy's samples."""
    return _mean([ratio * ratio for ratio in ratios]) - 1


def revived(history: list[dict[str, list[float]]]) -> list[int]:
    """Count per round the dead prompts with a reward above 0; a prompt without a success in a round dies."""
    dead: set[str] = set()
    counts = []
    for groups in history:
        alive = {prompt for prompt, rewards in groups.items() if any(reward > 0 for reward in rewards)}
        counts.append(len(alive & dead))
        dead -= alive
        dead |= {prompt for prompt, rewards in groups.items() if _numeric(rewards)} - alive
    return counts
