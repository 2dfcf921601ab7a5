"""Boxed reward with a delay, for the benchmark of peers of unequal speed; `MUTUALRL_POLICY` names the policy.

- `half_speed`: a round takes 0.5 s longer for `ada` and 1.5 s longer for any other policy, which is about half as fast.
- `uneven`: a round takes up to 4 s longer, by an exponential distribution of mean 0.75 s, drawn for each policy
  and call; every run draws the same delays.
- `steady`: a round takes 0.8 s longer, in which a core is idle.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from mutualrl.seeds import seeded
from mutualrl.tasks.boxed import boxed_reward

POLICY = os.environ.get("MUTUALRL_POLICY", "")
_calls = itertools.count()


def half_speed(completions: list[Any], answer: list[str], **columns: object) -> list[float]:
    """Score completions after a delay that is longer for a slow policy."""
    time.sleep(0.5 if POLICY == "ada" else 1.5)
    return boxed_reward(completions, answer)


def steady(completions: list[Any], answer: list[str], **columns: object) -> list[float]:
    """Score completions after a constant delay."""
    time.sleep(0.8)
    return boxed_reward(completions, answer)


def uneven(completions: list[Any], answer: list[str], **columns: object) -> list[float]:
    """Score completions after a delay that varies from call to call."""
    delay = float(seeded(0, next(_calls), "uneven", POLICY).exponential(0.75))
    time.sleep(min(delay, 4.0))
    return boxed_reward(completions, answer)
