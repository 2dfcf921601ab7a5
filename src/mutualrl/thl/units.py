"""Incidence of tokens and units of a text, along which an alignment moves mass.

Mass is summed in a unit and spread over it: a byte-synchronous group of tokens (`span`), a word with the whitespace
before it (`word`), or a character (`char`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutualrl.thl.offsets import Bools, TokenSpans
from mutualrl.thl.table import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Touch:
    """Pairs (token, unit) of one side, sorted by unit, then token. A token may touch several units.

    `token`, `unit`, shape (p,); `share`, shape (p,): the fraction of the token that is in the unit, summing to 1 over
    a token's units; None where every token is in one unit.
    """

    token: Ints
    unit: Ints
    share: Floats | None = None


@dataclass(frozen=True, slots=True)
class Units:
    """Incidence of both sides' tokens on `count` units. `broken`, shape (count,): units with changed text, or None."""

    count: int
    source: Touch
    target: Touch
    broken: Bools | None = None


def span_units(source: TokenSpans, target: TokenSpans, size: int) -> Units:
    """Return byte-synchronous groups: a group ends where a token of each side ends at the same byte. `size`: N.

    A token that covers no byte belongs to the group of the next token, unless the other side has one there too:
    then the two form a group. The end of the text always ends a group.
    """
    of_source, of_target = _text_tokens(source), _text_tokens(target)
    if source.all_text and target.all_text:
        keys, other, scale = source.ends, target.ends, 1
    else:
        keys, other, scale = _keys(source.ends[of_source], target.ends[of_target])
    furthest = max(int(keys[-1]) if len(keys) else 0, int(other[-1]) if len(other) else 0)
    marks = np.zeros(furthest + 1, dtype=np.bool_)
    marks[keys] = True
    closes = other[marks[other]]
    if furthest > (closes[-1] if len(closes) else 0):
        closes = np.append(closes, furthest)
    group, target_group = np.searchsorted(closes, keys), np.searchsorted(closes, other)
    touching = Touch(of_target, target_group)
    return Units(len(closes), Touch(of_source, group), touching, _broken(target, closes // scale, touching))


def _broken(target: TokenSpans, edges: Ints, touching: Touch) -> Bools | None:
    """Return which units, ending at the bytes `edges`, were changed in part; None when the target encodes the text.

    A unit is broken if it lost bytes, or if one of its tokens mixes the text's bytes with others. Inserted tokens cover
    no byte and break nothing.
    """
    if target.lost is None or target.changed is None:
        return None
    lost = np.concatenate(([0], np.cumsum(target.lost)))[np.concatenate(([0], edges))]
    broken: Bools = lost[1:] > lost[:-1]
    mixed = target.changed & (target.ends > target.starts)
    broken[touching.unit[mixed[touching.token]]] = True
    return broken


def _text_tokens(side: TokenSpans) -> Ints:
    """Return indices of the tokens that are text, not control tokens."""
    return np.arange(len(side.ends)) if side.control is None else np.flatnonzero(~side.control)


def _keys(ends: Ints, other: Ints) -> tuple[Ints, Ints, int]:
    """Return positions of token ends that are distinct within a side, and their scale.

    The k-th consecutive token without bytes after byte p is at p * scale + k.
    """
    ranks = [_ranks(side) for side in (ends, other)]
    if ranks[0] is None and ranks[1] is None:
        return ends, other, 1
    scale = 1 + max(int(rank.max(initial=0)) for rank in ranks if rank is not None)
    keys = [side * scale + (0 if rank is None else rank) for side, rank in zip((ends, other), ranks, strict=True)]
    return keys[0], keys[1], scale


def _ranks(ends: Ints) -> Ints | None:
    """Return the index of each token in its run of tokens without bytes (from 1); 0 for a token that covers bytes."""
    lengths = np.diff(ends, prepend=0)
    if lengths.all():
        return None
    positions = np.arange(len(ends))
    last = np.maximum.accumulate(np.where(lengths > 0, positions, -1))
    return positions - last


def segment_units(source: TokenSpans, target: TokenSpans, edges: Ints, characters: Floats) -> Units:
    """Return the segments of the text that end at the bytes `edges`, shape (W,), as units. `characters`, shape
    (N + 1,): `words.character_positions`.

    A token that spans several segments is in each with the fraction of its characters there. A token that covers no
    byte belongs to the segment where the next token starts.
    """
    size = len(characters) - 1
    touched = _touches(source, edges, characters, size)
    touching = _touches(target, edges, characters, size)
    return Units(len(edges), touched, touching, _broken(target, edges, touching))


def _touches(side: TokenSpans, edges: Ints, characters: Floats, size: int) -> Touch:
    of_text = _text_tokens(side)
    if not side.all_text:  # a token without bytes at the end of the text is in no segment
        of_text = of_text[(side.ends[of_text] > side.starts[of_text]) | (side.ends[of_text] < size)]
    ends, starts = side.ends[of_text], side.starts[of_text]
    first = np.searchsorted(edges, starts, side="right")
    last = np.searchsorted(edges, ends, side="left")
    last = np.maximum(first, last)
    extra = last - first
    if not extra.any():
        return Touch(of_text, first)
    token = np.repeat(np.arange(len(ends)), extra + 1)
    within = np.arange(len(token)) - np.repeat(np.cumsum(extra + 1) - (extra + 1), extra + 1)
    unit = first[token] + within
    begin = np.maximum(np.concatenate(([0], edges))[unit], starts[token])
    width = characters[np.minimum(edges[unit], ends[token])] - characters[begin]
    widths = characters[ends] - characters[starts]
    share = width / np.where(widths > 0, widths, 1.0)[token]
    share[extra[token] == 0] = 1.0
    return Touch(of_text[token], unit, share)
