"""Incidence of tokens and units of the text: the incidence that an alignment moves mass along.

A unit is what mass is gathered in and spread over: a byte-synchronous group of tokens (`span`), a word with the
whitespace before it (`word`), or a character (`char`).
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

    `token`, `unit`, shape (p,); `share`, shape (p,): the part of the token that lies in the unit, adding up to
    1 over a token's units; None where every token lies in one unit.
    """

    token: Ints
    unit: Ints
    share: Floats | None = None


@dataclass(frozen=True, slots=True)
class Units:
    """Both sides' tokens on `count` units. `broken`, shape (count,): units of which a part was changed, or None."""

    count: int
    source: Touch
    target: Touch
    broken: Bools | None = None


def span_units(source: TokenSpans, target: TokenSpans, size: int) -> Units:
    """Return byte-synchronous groups: a group closes where both tokenizations end on the same byte of the N =
    `size`.

    A token that covers no byte belongs to the group of the next token, unless the other side has one there too:
    then the two are a group. The text's end closes a group in any case.
    """
    of_source, of_target = _text_tokens(source), _text_tokens(target)
    if source.all_text and target.all_text:
        keys, other, scale = source.ends, target.ends, 1
    else:
        keys, other, scale = _keys(source.ends[of_source], target.ends[of_target])
    closes = np.intersect1d(keys, other, assume_unique=True)
    furthest = max(int(keys[-1]) if len(keys) else 0, int(other[-1]) if len(other) else 0)
    if furthest > (closes[-1] if len(closes) else 0):
        closes = np.append(closes, furthest)
    group, target_group = np.searchsorted(closes, keys), np.searchsorted(closes, other)
    touching = Touch(of_target, target_group)
    return Units(len(closes), Touch(of_source, group), touching, _broken(target, closes // scale, touching))


def _broken(target: TokenSpans, edges: Ints, touching: Touch) -> Bools | None:
    """Return units, ending at the bytes `edges`, of which a part was changed; None when the target carries the text.

    Bytes were lost, or a token has others beside the text's own. What was put in between covers no byte and spoils
    nothing.
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
    """Return positions of token ends that are all different within a side, and their scale.

    The k-th token in a row that covers no byte after byte p stands at p * scale + k.
    """
    ranks = [_ranks(side) for side in (ends, other)]
    if ranks[0] is None and ranks[1] is None:
        return ends, other, 1
    scale = 1 + max(int(rank.max(initial=0)) for rank in ranks if rank is not None)
    keys = [side * scale + (0 if rank is None else rank) for side, rank in zip((ends, other), ranks, strict=True)]
    return keys[0], keys[1], scale


def _ranks(ends: Ints) -> Ints | None:
    """Return number of each token among those that cover no byte in a row (from 1); 0 for a token that covers some."""
    lengths = np.diff(ends, prepend=0)
    if lengths.all():
        return None
    place = np.arange(len(ends))
    last = np.maximum.accumulate(np.where(lengths > 0, place, -1))
    return place - last


def segment_units(source: TokenSpans, target: TokenSpans, edges: Ints, characters: Floats) -> Units:
    """Return segments of the text that end at the bytes `edges`, shape (W,); `characters`, shape (N + 1,): see
    `words`.

    A token that spans several segments lies in each by the share of its characters there. A token that covers no byte
    belongs to the segment where the next token starts.
    """
    size = len(characters) - 1
    touched = _touches(source, edges, characters, size)
    touching = _touches(target, edges, characters, size)
    return Units(len(edges), touched, touching, _broken(target, edges, touching))


def _touches(side: TokenSpans, edges: Ints, characters: Floats, size: int) -> Touch:
    of_text = _text_tokens(side)
    if not side.all_text:  # a token that covers no byte and has none behind it is in no segment
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
    left = np.maximum(np.concatenate(([0], edges))[unit], starts[token])
    width = characters[np.minimum(edges[unit], ends[token])] - characters[left]
    widths = characters[ends] - characters[starts]
    share = width / np.where(widths > 0, widths, 1.0)[token]
    share[extra[token] == 0] = 1.0
    return Touch(of_text[token], unit, share)
