"""Rules that teach or choose what is taught, from the documents: CHORD, F-TIS, dynamic sampling, least hint, replays.

Written from docs/regimes.md, docs/hints.md, docs/agents.md, docs/differences.md, design/hinted.md, design/agents.md and
the words of `mutualrl regimes show`. A loss comes as its value and its slopes: the derivative by each token's log-prob.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

EPSILON = 1e-4
Floats = npt.NDArray[np.float64]
Group = tuple[str, list[float]]  # a prompt, and its rollouts' rewards
Turn = tuple[int, list[str]]  # of a run: the number of the model's calls, and the roles of what follows
Piece = tuple[Sequence[Any], bool]  # of a run: tokens, and whether the model wrote them

# ---- shared


def _scored(rewards: Sequence[float]) -> list[float]:
    """Keep the rewards that are not NaN."""
    return [reward for reward in rewards if not math.isnan(reward)]


def _deviation(rewards: Sequence[float]) -> float:
    """Compute the sample standard deviation; 0 for fewer than two values."""
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0


def centred(rewards: Sequence[float], scale: str, batch_deviation: float) -> list[float]:
    """Compute a group's advantages; a group of equal rewards and an unscored rollout have 0."""
    scored = _scored(rewards)
    if len(set(scored)) < 2:
        return [0.0] * len(rewards)
    divisors = {"group": _deviation(scored) + EPSILON, "batch": batch_deviation + EPSILON, "none": 1.0}
    middle = math.fsum(scored) / len(scored)
    return [(reward - middle) / divisors[scale] if not math.isnan(reward) else 0.0 for reward in rewards]


def gate_is_open(
    own: Sequence[float], others: Sequence[float], success_above: float = 0.8, failure_below: float = 0.2
) -> bool:
    """Return whether every own rollout failed and some other one succeeded; NaN is neither."""
    return (
        bool(own) and not any(not reward < failure_below for reward in own) and any(r > success_above for r in others)
    )


def nll_of_row(logps: Sequence[float], own: Sequence[bool]) -> tuple[float, list[float]]:
    """Average the NLL over the tokens that count, and return the slopes of all tokens."""
    count = sum(own)
    slopes = [-1.0 / count if counts else 0.0 for counts in own]
    return math.fsum(slope * logp for slope, logp in zip(slopes, logps, strict=True)), slopes


def surrogate_on_policy(rows: Sequence[tuple[list[float], float]]) -> tuple[float, list[list[float]]]:
    """Average -A over rows of the learner's own samples at ratio 1: per row the mean over its tokens; with slopes."""
    value = -math.fsum(advantage for _, advantage in rows) / len(rows)
    return value, [[-advantage / len(logps) / len(rows)] * len(logps) for logps, advantage in rows]


# ---- CHORD


def chord_mu(round_index: int, peak: float = 0.9, valley: float = 0.05, warmup: int = 0, decay: int = 200) -> float:
    """Raise mu linearly from 0 over the warm-up, then lower it along half a cosine from the peak to the valley."""
    if round_index < warmup:
        return peak * (round_index / warmup)
    travelled = 1.0 if decay == 0 else min(1.0, (round_index - warmup) / decay)
    return valley + (peak - valley) * math.cos(travelled * math.pi / 2) ** 2  # (1 + cos 2x) / 2 is the square of cos x


def chord_texts(
    published: Iterable[tuple[str, str, float, str | None]],
    sources: Collection[str],
    prompts: Iterable[str],
    is_usable: Callable[[str], bool],
) -> dict[str, list[str]]:
    """List per prompt the texts of sources that may be imitated, whatever their rewards; a policy's text is none."""
    texts: dict[str, list[str]] = {prompt: [] for prompt in prompts}
    for member, prompt, _reward, text in published:
        if member in sources and prompt in texts and text is not None and is_usable(text):
            texts[prompt].append(text)
    return {prompt: each for prompt, each in texts.items() if each}


def chord_mixture(grpo: Floats, imitated: Sequence[Floats], mu: float) -> Floats:
    """Mix (1 - mu) times GRPO's and mu times the mean of the rows' values; each is a vector (value, gradient ...)."""
    mixture = (1 - mu) * np.asarray(grpo, dtype=float)
    return mixture + mu * np.mean(np.asarray(imitated, dtype=float), axis=0) if len(imitated) else mixture


def adam_step_ratio(
    rounds: int, decay: int, peak: float = 0.9, valley: float = 0.05, slow: float = 0.999, fast: float = 0.9
) -> float:
    """Divide Adam's last step on gradients 1 / (1 - mu) by that on gradients 1: what the factor 1 - mu leaves."""
    gradients = np.array([1 / (1 - chord_mu(index, peak, valley, 0, decay)) for index in range(rounds)])
    ages = np.arange(rounds)[::-1]
    first = ((1 - fast) * fast**ages) @ gradients / (1 - fast**rounds)
    second = ((1 - slow) * slow**ages) @ gradients**2 / (1 - slow**rounds)
    return float(first / math.sqrt(second))


# ---- F-TIS


def capped_token(logp: float, behaviour: float, advantage: float, cap: float) -> tuple[float, float]:
    """Weigh a token's log-prob by its ratio, at most the cap and held constant; return the loss and its slope."""
    weight = math.exp(logp - behaviour) if logp - behaviour < math.log(cap) else cap
    return -advantage * weight * logp, -advantage * weight


def divergence(logps: Sequence[float], behaviour: Sequence[float], covered: Sequence[bool]) -> float:
    """Estimate KL(mu || pi) by the mean of log mu - log pi over a row's tokens with a trace."""
    gaps = [mu - pi for pi, mu, has_trace in zip(logps, behaviour, covered, strict=True) if has_trace]
    return math.fsum(gaps) / len(gaps)


def f_tis_rows(
    own: dict[str, list[float]],
    peers: dict[str, list[float]],
    divergences: dict[str, list[float]],
    scale: str,
    most: float | None,
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[bool]]]:
    """Grade own and peers' rollouts of each prompt as one group, then leave out far rows of negative advantage.

    own: prompt to rewards; peers, divergences: prompt to a number per peer row. Return own advantages per prompt, the
    peers', and for each peer row whether it is left.
    """
    pools = {prompt: [*rewards, *peers.get(prompt, [])] for prompt, rewards in own.items()}
    spread = _deviation(_scored([reward for pool in pools.values() for reward in pool]))
    graded = {prompt: centred(pool, scale, spread) for prompt, pool in pools.items()}
    mine = {prompt: graded[prompt][: len(rewards)] for prompt, rewards in own.items()}
    theirs = {prompt: graded[prompt][len(rewards) :] for prompt, rewards in own.items()}
    stays = {
        prompt: [
            most is None or not (a < 0 and far > most)
            for a, far in zip(theirs[prompt], divergences[prompt], strict=True)
        ]
        for prompt in peers
    }
    return mine, theirs, stays


def f_tis_loss(
    own: Sequence[tuple[list[float], float]],
    peers: Sequence[tuple[list[float], list[float], list[bool], float]],
    cap: float,
    loss_type: str,
    max_length: int,
) -> tuple[float, list[list[float]]]:
    """Take own rows at ratio 1 and the peers' rows that are left into one loss with one normaliser.

    own: (log-probs, advantage) per row; peers: (log-probs, behaviour, covered, advantage) per row. Return the value and
    the slopes of each row's tokens, own rows first.
    """
    rows: list[list[tuple[float, float] | None]] = [[(-advantage, -advantage)] * len(logps) for logps, advantage in own]
    rows += [
        [
            capped_token(pi, mu, advantage, cap) if has_trace else None
            for pi, mu, has_trace in zip(logps, behaviour, covered, strict=True)
        ]
        for logps, behaviour, covered, advantage in peers
    ]
    counts = [sum(token is not None for token in row) for row in rows]
    shares = {
        "grpo": [1 / len(rows) / count for count in counts],
        "luspo": [1 / len(rows)] * len(rows),  # the sum over a row's tokens
        "dr_grpo": [1 / len(rows) / max_length] * len(rows),
        "dapo": [1 / sum(counts)] * len(rows),
        "bnpo": [1 / sum(counts)] * len(rows),
    }[loss_type]
    value = math.fsum(
        share * token[0] for share, row in zip(shares, rows, strict=True) for token in row if token is not None
    )
    return value, [[0.0 if t is None else share * t[1] for t in row] for share, row in zip(shares, rows, strict=True)]


# ---- dynamic sampling


def teaches(rewards: Sequence[float]) -> bool:
    """Return whether a group has an advantage other than 0: two of its scored rewards differ."""
    return len(set(_scored(rewards))) > 1


def filled_places(batches: Sequence[Sequence[Group]]) -> tuple[list[tuple[int, int]], int]:
    """Choose the group at each place, as (batch, place), and count the places whose group teaches nothing.

    batches: the round's own, then those of the attempts; each a list of (prompt, rewards).
    """
    own = batches[0]
    kept = {place for place, (_, rewards) in enumerate(own) if teaches(rewards)}
    trained = {own[place][0] for place in kept}
    supply = []
    for batch, groups in enumerate(batches[1:], 1):
        for place, (prompt, rewards) in enumerate(groups):
            if teaches(rewards) and prompt not in trained:
                trained.add(prompt)
                supply.append((batch, place))
    empty = [place for place in range(len(own)) if place not in kept]
    taken = dict(zip(empty, supply, strict=False))
    return [taken.get(place, (0, place)) for place in range(len(own))], max(0, len(empty) - len(supply))


def next_prompts(
    prompts_in_order: Sequence[str], sampled: Collection[str], trained: Collection[str], count: int
) -> list[str]:
    """List the prompts of an attempt: those the round has not sampled, then those it has dropped, in the given order.

    Where both are fewer than a whole batch, they begin again; without any there is no attempt.
    """
    distinct = list(dict.fromkeys(prompts_in_order))
    usable = [p for p in distinct if p not in sampled] + [p for p in distinct if p in sampled and p not in trained]
    return (usable * count)[:count]


def resampled_round(
    own: Sequence[str], orders: Sequence[Sequence[str]], rewards_of: Callable[[int, int, str], list[float]]
) -> tuple[list[list[Group]], list[tuple[int, int]], int]:
    """Run a round: sample whole batches until every place teaches or the attempts are spent.

    orders: the prompts of the data in each attempt's order; rewards_of(batch, place, prompt). Return the batches, the
    group at each place and the number of places without one.
    """
    batches = [[(prompt, rewards_of(0, place, prompt)) for place, prompt in enumerate(own)]]
    for attempt, order in enumerate(orders, 1):
        places, missing = filled_places(batches)
        if not missing:
            break
        groups = [batches[batch][place] for batch, place in places]
        trained = {prompt for prompt, rewards in groups if teaches(rewards)}
        sampled = {prompt for batch in batches for prompt, _ in batch}
        prompts = next_prompts(order, sampled, trained, len(own))
        if not prompts:
            break
        batches.append([(prompt, rewards_of(attempt, place, prompt)) for place, prompt in enumerate(prompts)])
    return batches, *filled_places(batches)


# ---- hinted: the least hint that works


def shown_lengths(words: int) -> list[int]:
    """List how many of a success's first words are shown, one after another: quarters, rounded up, each once."""
    return sorted({-(-words * quarter // 4) for quarter in (1, 2, 3, 4)})


def longest_shared_run(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest run of tokens in both."""
    for length in range(min(len(a), len(b)), 0, -1):
        runs = {tuple(b[start : start + length]) for start in range(len(b) - length + 1)}
        if any(tuple(a[start : start + length]) in runs for start in range(len(a) - length + 1)):
            return length
    return 0


def is_bare(text: str) -> bool:
    r"""Return whether only a final answer is there: no letter or digit beside the last \boxed{...}, or one word."""
    boxes = list(re.finditer(r"\\boxed\{[^{}]*\}", text))
    if boxes:
        rest = text[: boxes[-1].start()] + text[boxes[-1].end() :]
        return re.search(r"[^\W_]", rest) is None
    return len(text.split()) == 1 and all(ord(character) < 128 for character in text)


def is_learnt(
    text: str,
    ids: Sequence[int],
    hint_ids: Sequence[int],
    reward: float,
    success_above: float = 0.8,
    max_copy: float = 0.8,
) -> bool:
    """Return whether an answer is taken: confirmed by its reward, and neither a copy of what was shown nor bare.

    ids: its tokens without the end token; hint_ids: those of the hint as it was shown.
    """
    is_copy = longest_shared_run(ids, hint_ids) / len(ids) >= max_copy
    return reward > success_above and not is_copy and not is_bare(text)


def least_hint(
    words: int, answer: Callable[[int], list[Any]], is_taken: Callable[[Any], bool]
) -> tuple[list[int], list[tuple[int, Any]]]:
    """Show more of a success only while no answer is taken; return the lengths shown and the answers that were taken.

    answer(length) lists the answers after a hint of that many words, None for a sample without room.
    """
    shown, taken = [], []
    for length in shown_lengths(words):
        shown.append(length)
        taken = [(length, each) for each in answer(length) if each is not None and is_taken(each)]
        if taken:
            break
    return shown, taken


def hinted_group(own: Sequence[float], answers: Sequence[float]) -> tuple[list[float], list[float]]:
    """Grade own rollouts and answers as one group: the advantages of both."""
    pool = centred([*own, *answers], "group", 0.0)
    return pool[: len(own)], pool[len(own) :]


# ---- guided by replays of runs with tools


def replayable(run: Sequence[Turn], most: int) -> int:
    """Return how many of a run's first turns begin a rollout: at most so many, each with a call, with results of tools.

    The last of them has a result, and the run has a further turn, which is left to the learner.
    """
    best = 0
    for turns in range(1, min(most, len(run) - 1) + 1):
        if all(calls and set(roles) <= {"tool"} for calls, roles in run[:turns]) and run[turns - 1][1]:
            best = turns
    return best


def guided_places(group: int, share: float) -> list[int]:
    """List the places of a group that begin with a run's turns: the last ones, a fraction rounded down, never all."""
    count = min(math.floor(Fraction(str(share)) * group), group - 1)
    return list(range(group - count, group))


def turn_numbers(
    total: int, turns: int | None, max_prefix: float | None, round_index: int, decay_rounds: int | None
) -> list[int]:
    """List the numbers of turns that a rollout may begin with, before it is asked which can be replayed."""
    left = Fraction(1) if decay_rounds is None else max(Fraction(0), 1 - Fraction(round_index, decay_rounds))
    if turns is not None:
        return [min(math.ceil(turns * left), total - 1)]
    longest = math.floor(Fraction(str(max_prefix)) * left * total)
    return list(range(1, longest + 1)) or [0]


def remembered_runs(
    rounds: Sequence[dict[str, tuple[list[float], list[tuple[float, Any]]]]], memory: int, success_above: float = 0.8
) -> list[dict[str, tuple[int, Any]]]:
    """Follow the remembered run of each prompt; return, before each round and after the last, prompt to (round, run).

    rounds: per round, prompt to (rewards of rollouts without a prefix, the peers' (reward, run)). A run is remembered
    from the round after its gate opened, for `memory` rounds, until the learner succeeds without a prefix.
    """
    known: dict[str, tuple[int, Any]] = {}
    states: list[dict[str, tuple[int, Any]]] = [{}]
    for now, prompts in enumerate(rounds):
        known = {prompt: hint for prompt, hint in known.items() if now + 1 - hint[0] <= memory}
        for prompt, (own, peers) in prompts.items():
            if any(reward > success_above for reward in own):
                known.pop(prompt, None)
            if gate_is_open(own, [reward for reward, _ in peers], success_above):
                runs = [run for reward, run in peers if reward > success_above and replayable(run, 1)]
                if runs:
                    known[prompt] = (now, runs[0])
        states.append(dict(known))
    return states


def replayed_context(
    prompt: str, run: Sequence[tuple[str, list[tuple[str, str]]]], turns: int, matches: Callable[[str, str], bool]
) -> tuple[str, int]:
    """Concatenate the prompt and a run's first turns with what the tools return now; stop after a result that differs.

    run: per turn its text, and (recorded, returned now) of its results. Return the text and the number of turns.
    """
    text = prompt
    for number, (said, results) in enumerate(run[:turns], 1):
        text += said + "".join(now for _, now in results)
        if not all(matches(recorded, now) for recorded, now in results):
            return text, number
    return text, turns


# ---- sgt on runs with tools


def learnt_pieces(pieces: list[Piece], turns: int | None, ended: bool) -> list[Piece] | None:
    """Keep a run's pieces up to the model's turn of this number; None where a turn that was cut off would be learnt."""
    own = [place for place, (_, is_own) in enumerate(pieces) if is_own]
    if turns is not None and turns < len(own):
        return pieces[: own[turns - 1] + 1]
    return pieces if ended else None


def flat(pieces: Iterable[Piece]) -> tuple[list[Any], list[bool]]:
    """Concatenate the pieces: token ids, and whether each is the model's own."""
    return [token for ids, _ in pieces for token in ids], [is_own for ids, is_own in pieces for _ in ids]


def sgt_on_runs(
    rows: Sequence[tuple[list[float], list[bool]]], weight: float, normalize: str, prompts: int
) -> tuple[float, list[list[float]]]:
    """Average each row's NLL over the model's own tokens, then over the pairs or the prompts; return value and slopes.

    rows: (log-probs, whether each token is the model's own).
    """
    divisor = {"pairs": len(rows), "prompts": prompts}[normalize]
    parts = [nll_of_row(logps, own) for logps, own in rows]
    value = weight / divisor * math.fsum(nll for nll, _ in parts) if rows else 0.0
    return value, [[weight / divisor * slope for slope in slopes] for _, slopes in parts]
