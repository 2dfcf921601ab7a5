"""Seeds that depend on their arguments alone, not on ranks, timing, the order of peers or restarts."""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(*parts: object) -> int:
    """Return a seed below 2**31, derived from `parts`."""
    key = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % (2**31)


def policy_seed(run_seed: int, policy: str, rank: int) -> int:
    """Return the sampling seed of a rank: it differs between policies and between ranks."""
    return seed_of(run_seed, policy, rank)


def seeded(run_seed: int, round_index: int, prompt_id: str, learner: str) -> np.random.Generator:
    """Return the generator of all random choices about one prompt in one round for one learner."""
    key = f"{run_seed}\x1f{round_index}\x1f{prompt_id}\x1f{learner}".encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:16], "big"))
