"""States of all random generators used in training."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch


class StepEnd(NamedTuple):
    """State that a started round changes before its step is complete: the generators, and TRL's token count."""

    random: RandomState
    tokens: int


RandomState = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


def random_state() -> RandomState:
    """Return the states of all random generators used in training: Python, NumPy, torch, and torch on each GPU."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus


def set_random_state(state: RandomState) -> None:
    """Restore the states of all generators."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])
