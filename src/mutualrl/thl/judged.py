"""A model's judgement of another's tokens: log-ratios per byte group of a text that the other sampled.

Source: on-policy distillation (tinker-cookbook; TRL's and ms-swift's log T - log S), across tokenizers by groups of
bytes as in DPCA (arXiv 2606.09456) and rLLM, with the even spread.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutualrl.thl.units import Floats

Ints = npt.NDArray[np.integer]


class Read(NamedTuple):
    """A text on a model's n tokens. `ends`, shape (n,): the byte of the text where each ends, monotone; a control token
    ends where its predecessor does. `logprobs`, shape (n,), nats, at temperature 1. `ended`: the last token ends the
    response, and is no text."""

    ends: Ints
    logprobs: Floats
    ended: bool


class ByteRatios(NamedTuple):
    """Log-ratios of a learner's T tokens. `values`, shape (T,): the mean over its byte group of log T - log S, nats per
    token, 0 where not `judged`, shape (T,). `uneven`, shape (T,): in a group with several tokens of either side."""

    values: Floats
    judged: npt.NDArray[np.bool_]
    uneven: npt.NDArray[np.bool_]


def token_ratios(own: Read, other: Read, max_group: int) -> ByteRatios:
    """Return a teacher's log-probs of a text minus the learner's, on the learner's tokens.

    A byte group is closed where a token of each side ends at the same byte; its difference, the sum of the teacher's
    minus that of the learner's, is divided by the number of the learner's tokens in it. The end token of the learner
    is a group with the teacher's, if both ended. Not judged are groups with more than `max_group` tokens of either
    side, and everything from the first token without bytes on (a control token inside the text). Raises ValueError for
    readings of different texts.
    """
    count = len(own.logprobs)
    values, judged, uneven = np.zeros(count), np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    ends, others = own.ends[: count - own.ended], other.ends[: len(other.logprobs) - other.ended]
    if (ends[-1] if len(ends) else 0) != (others[-1] if len(others) else 0):
        raise ValueError("the two sides read different texts")
    stop, other_stop = _before_controls(ends), _before_controls(others)
    shared, own_places, other_places = np.intersect1d(ends[:stop], others[:other_stop], return_indices=True)
    first = first_other = 0
    for last, last_other in zip(own_places.tolist(), other_places.tolist(), strict=True):
        mine, theirs = slice(first, last + 1), slice(first_other, last_other + 1)
        sizes = (last + 1 - first, last_other + 1 - first_other)
        first, first_other = last + 1, last_other + 1
        if max(sizes) <= max_group:
            values[mine] = (other.logprobs[theirs].sum() - own.logprobs[mine].sum()) / sizes[0]
            judged[mine], uneven[mine] = True, max(sizes) > 1
    whole = len(shared) > 0 and stop == len(ends) and other_stop == len(others)
    if own.ended and other.ended and (whole or not len(ends)):
        values[-1], judged[-1] = other.logprobs[-1] - own.logprobs[-1], True
    return ByteRatios(values, judged, uneven)


#: what is repeated at the end of a text that loops, and the end in which it is looked for, in characters
_LOOP = re.compile(r"(.{1,200}?)\1{3,}\Z", re.DOTALL)
LOOP_CHARACTERS, LOOKED_AT = 64, 2_000


def loops(text: str) -> bool:
    """Return whether a text ends in four or more repetitions of one passage, of 64 characters or more together: a loop
    is likely under any model, whatever it says."""
    found = _LOOP.search(text[-LOOKED_AT:])
    return found is not None and len(found[0]) >= LOOP_CHARACTERS


def _before_controls(ends: Ints) -> int:
    """Return the number of tokens before the first one without bytes."""
    lengths = np.diff(ends, prepend=0)
    empty = np.flatnonzero(lengths == 0)
    return int(empty[0]) if len(empty) else len(ends)
