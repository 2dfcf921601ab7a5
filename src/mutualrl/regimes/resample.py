"""Dead groups, sampled again: dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2). Pure functions.

A group whose rewards are all equal has advantages of 0: it costs its tokens and teaches nothing. It is dropped, and
further prompts are sampled, a whole batch at a time, until every place of the batch has a group whose rewards differ,
or the attempts are spent. A place that is still without one keeps its group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from mutualrl.regimes.advantages import pool_advantages, standard_deviation
from mutualrl.section import Section
from mutualrl.seeds import seed_of

Floats = npt.NDArray[np.float64]


class Resample(Section):
    """Key `round.resample`: drop groups whose rewards are all equal, and sample further prompts until the batch is
    full. Each attempt samples one more whole batch."""

    max_attempts: int = Field(3, ge=1, le=100, description="further batches per round")


def resample_section(value: object) -> object:
    """Return `true` as a section with its defaults, and `false` as none."""
    return ({} if value else None) if isinstance(value, bool) else value


class SampledGroup(NamedTuple):
    """A group that was sampled in a round: the batch (0: the round's own, then the further ones), and its place."""

    batch: int
    place: int


def differing(rewards: npt.ArrayLike, size: int) -> npt.NDArray[np.bool_]:
    """Return for each group whether its rewards differ, shape (groups,). `rewards`: shape (groups x size,), NaN where a
    rollout is unscorable, which does not count."""
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, size)
    scored = ~np.isnan(groups)
    lowest = np.where(scored, groups, np.inf).min(axis=1)
    highest = np.where(scored, groups, -np.inf).max(axis=1)
    return np.asarray(highest > lowest)


def filled(prompts: Sequence[Sequence[str]], live: Sequence[npt.NDArray[np.bool_]]) -> list[SampledGroup]:
    """Return the group at each place of the batch, shape (places,): the round's own if its rewards differ, else the
    next further one whose rewards do, in the order of sampling; the own one where there is none.

    `prompts`: the prompt ids of each batch, by place. `live`: whether the rewards differ. A further prompt is trained
    on once.
    """
    groups = [SampledGroup(0, place) for place in range(len(prompts[0]))]
    used = {prompts[0][place] for place in range(len(groups)) if live[0][place]}
    waiting = [place for place in range(len(groups)) if not live[0][place]]
    for batch in range(1, len(prompts)):
        for place, prompt_id in enumerate(prompts[batch]):
            if waiting and live[batch][place] and prompt_id not in used:
                groups[waiting.pop(0)] = SampledGroup(batch, place)
                used.add(prompt_id)
    return groups


def missing(groups: Sequence[SampledGroup], live: Sequence[npt.NDArray[np.bool_]]) -> int:
    """Return the number of places whose group has equal rewards."""
    return sum(not live[group.batch][group.place] for group in groups)


def order_of(rows: int, seed: int, round_index: int, attempt: int) -> npt.NDArray[np.int64]:
    """Return the order in which an attempt goes through the rows of data: a function of its arguments alone, so that a
    resumed round samples the same prompts."""
    return np.random.default_rng(seed_of("resample", seed, round_index, attempt)).permutation(rows)


def further_rows(
    order: Iterable[int], id_of: Callable[[int], str], sampled: Collection[str], trained: Collection[str], count: int
) -> list[int]:
    """Return the rows of data to sample next, `count` of them: those whose prompts the round has not sampled; where the
    data have no more, those that it has dropped, once more. Empty if all data are trained on.

    `order`: of the rows, read no further than necessary. `sampled`, `trained`: prompt ids of the round.
    """
    fresh: dict[str, int] = {}
    again: dict[str, int] = {}
    for row in order:
        prompt_id = id_of(int(row))
        if prompt_id not in sampled:
            fresh.setdefault(prompt_id, int(row))
        elif prompt_id not in trained:
            again.setdefault(prompt_id, int(row))
        if len(fresh) == count:
            break
    candidates = [*fresh.values(), *again.values()]
    return [candidates[number % len(candidates)] for number in range(count)] if candidates else []


def batch_scaled(rewards: npt.ArrayLike, size: int) -> Floats:
    """Return A_i = (r_i - group mean) / (s + 1e-4) with the standard deviation s of all rewards, shape (groups x
    size,): TRL's `scale_rewards=batch`, whose divisor changes with the groups of the batch. NaN rewards get 0."""
    values = np.asarray(rewards, dtype=np.float64)
    spread = standard_deviation(values)
    groups = values.reshape(-1, size)
    return np.concatenate(
        [pool_advantages(group, group, scale="batch", batch_standard_deviation=spread) for group in groups]
    )
