"""Peer's log-prob trace on the learner's token grid.

Source: paper, Section "Tokenizer Heterogeneity Layer", trace alignment; Theorem "THL conservation with a derived
residual bound". Departure: except under the anchor `paper`, the places of tokens come from the sampled ids, by bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from mutualrl.errors import AlignmentError, TextMismatchError, TraceError
from mutualrl.thl.offsets import Bools, TokenSpans, place_any, place_tokens, utf8
from mutualrl.thl.paper import paper_units, straddles
from mutualrl.thl.table import Ints, TokenTable, table_of
from mutualrl.thl.text import encode_in_context, end_id
from mutualrl.thl.transfer import AlignedValues, transfer
from mutualrl.thl.units import Floats, Units, segment_units, span_units
from mutualrl.thl.words import UNITS, Unit, byte_positions, character_positions, segment_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Anchor = Literal["paper", "paper-fallback", "word", "span", "char"]
ANCHORS: tuple[Anchor, ...] = get_args(Anchor)
DEFAULT_ANCHOR: Anchor = "span"
_END: tuple[int, str | None] = (-1, None)
#: B of the paper's Assumption "THL span and clipping convention"
BOUND = 50.0


class AlignmentGroup(NamedTuple):
    """Source and target tokens of one unit of the text, by position. Under `word`, neighbours may share a token."""

    source: range
    target: range


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Trace of S source tokens on T target tokens.

    `target_ids`: the target tokens, EOS last exactly when the response had ended (or as they were given).
    `logprobs`, shape (T,), nats: the aligned value of each target token, NaN where uncovered.
    `covered`, shape (T,): where there is a value.
    `residual`: R = source mass that reached no target token, in nats: that of source tokens placed nowhere (special
    tokens without a counterpart), of units without a valid target token, and what the clip at -B took away (`clipped`).
    Always sum(source) = sum(covered logprobs) + residual.
    `mismatched`: the paper's C_mis, how many source tokens the first two parts of the residual come from.
    `exact`: the target ids carry the text; if not, what they changed is uncovered.
    """

    target_ids: tuple[int, ...]
    logprobs: Floats
    covered: Bools
    residual: float
    clipped: float
    mismatched: int
    exact: bool
    anchor: Anchor
    units: Units
    paired: tuple[tuple[int, int], ...]

    @property
    def delta(self) -> float:
        """Return the paper's delta_THL = |R|, nats."""
        return abs(self.residual)

    @property
    def groups(self) -> tuple[AlignmentGroup, ...]:
        """Return the units, in the order of the text, then the pairs of special tokens, EOS last."""
        source, target = self.units.source, self.units.target
        at = np.arange(self.units.count)
        bounds = [
            (np.searchsorted(side.unit, at, "left"), np.searchsorted(side.unit, at, "right"), side.token)
            for side in (source, target)
        ]
        sides = [
            [range(token[a], token[b - 1] + 1) if b > a else range(0) for a, b in zip(first, stop, strict=True)]
            for first, stop, token in bounds
        ]
        groups = [AlignmentGroup(*ranges) for ranges in zip(*sides, strict=True)]
        return (*groups, *(AlignmentGroup(range(s, s + 1), range(t, t + 1)) for s, t in self.paired))


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of an alignment: its ids, where they stand, and whether the last is an end of sequence."""

    ids: Ints
    table: TokenTable
    placed: TokenSpans
    ended: bool


def align_logprobs(
    text: str,
    source_ids: Sequence[int],
    source_logprobs: npt.ArrayLike,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    *,
    target_ids: Sequence[int] | None = None,
    anchor: Anchor = DEFAULT_ANCHOR,
    unit: Unit = "auto",
    bound: float = BOUND,
    source_eos_ids: Collection[int] | None = None,
    target_eos_ids: Collection[int] | None = None,
) -> Alignment:
    """Put the log-probs of a sampled response on the tokens that another tokenizer has for its text.

    `text`: what `source_ids` decode to in a completion (`decode_completion`). `source_logprobs`, shape (S,), nats, one
    for each id. `target_ids`: the learner's tokens of the text, by default `retokenize`'s. Padding belongs in neither.
    `anchor`: what mass is gathered in and spread over:

    - `span`: a group closes where both tokenizations end on the same byte; 1:1 tokens are copied.
    - `word`: words with the whitespace before them (`unit="auto"`: characters in a text with CJK); a token that
      spans several words gives each its part by characters, and gets its part from each.
    - `char`: `word` with every non-whitespace character as a unit.
    - `paper`: the paper's algorithms by position, without the clip; it drifts on real text: for reproduction.
    - `paper-fallback`: `paper`, but `word` for a text that either tokenizer encodes otherwise as a whole than word by
      word: the paper's fallback to the full sequence, with straddling tokens apportioned by characters.

    An end-of-sequence token (an id of `source_eos_ids`, `target_eos_ids`, by default the tokenizers' own) goes to the
    target's; another special token to the same one at the same byte. Log-probs below -`bound` are clipped there.

    Raises TokenError for an id outside a vocabulary, TraceError for a trace that is not one number per id or has a NaN,
    TextMismatchError for a text that the source ids, or given target ids, do not decode to, TokenizerError for a
    tokenizer that is slow or of an unknown kind, AlignmentError for another anchor.
    """
    _check_choices(anchor, unit, bound)
    rule: Anchor = anchor
    if anchor == "paper-fallback":
        rule = "word" if straddles(text, source_tokenizer) or straddles(text, target_tokenizer) else "paper"
    data = utf8(text)
    source = _side(source_ids, table_of(source_tokenizer), data, _ends(source_tokenizer, source_eos_ids))
    ids = source.ids
    trace = check_trace(source_logprobs, len(ids))
    target = _target(text, data, target_ids, target_tokenizer, _ends(target_tokenizer, target_eos_ids), source.ended)
    if rule == "paper":
        units = paper_units(text, source_tokenizer, target_tokenizer, len(ids), len(target.ids))
        moved = transfer(units, trace, len(target.ids), empty_is_zero=True)
        return _result(units, moved, trace, 0.0, target, (), anchor)
    clipped = np.maximum(trace, -bound)
    lost = float((trace - clipped).sum()) if trace.size and trace.min() < -bound else 0.0
    if anchor == "span":
        units = span_units(source.placed, target.placed, len(data))
    else:
        edges = byte_positions(text, data, segment_ends(text, "char" if anchor == "char" else unit))
        units = segment_units(source.placed, target.placed, edges, character_positions(data))
    moved = transfer(units, clipped, len(target.ids), target.placed.changed)
    return _result(units, moved, clipped, lost, target, _pairs(source, target), anchor)


def check_trace(logprobs: npt.ArrayLike, tokens: int) -> Floats:
    """Return `logprobs` in double precision, shape (tokens,). Raises TraceError for another number of them, a NaN or
    +inf."""
    try:
        trace = np.asarray(logprobs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TraceError(f"log-probs: expected a flat list of numbers ({error})") from None
    if trace.shape != (tokens,):
        raise TraceError(f"log-probs of shape {trace.shape} for {tokens} ids, expected one for each: ({tokens},)")
    if tokens and not trace.max() < np.inf:  # NaN compares false
        place = int(np.flatnonzero(np.isnan(trace) | (trace == np.inf))[0])
        raise TraceError(f"log-prob {trace[place]} at position {place}, expected a number")
    return trace


def _check_choices(anchor: str, unit: str, bound: float) -> None:
    for name, value, known in (("anchor", anchor, ANCHORS), ("unit", unit, UNITS)):
        if value not in known:
            raise AlignmentError(f"{name}: found {value!r}, expected one of: {', '.join(known)}")
    if not bound > 0:
        raise AlignmentError(f"bound: found {bound}, expected a number above 0")


def _ends(tokenizer: PreTrainedTokenizerBase, named: Collection[int] | None) -> Collection[int]:
    return [tokenizer.eos_token_id] if named is None else named


def _side(given: Sequence[int], table: TokenTable, data: bytes, ends: Collection[int]) -> _Side:
    """Return ids on the text that they decode to. A last id that is an end is no text, whatever kind of token it is."""
    ids = table.check(given)
    if not len(ids) or int(ids[-1]) not in ends:
        return _Side(ids, table, place_tokens(ids, table, data), False)
    return _Side(ids, table, _with_end(place_tokens(ids[:-1], table, data)), True)


def _with_end(placed: TokenSpans) -> TokenSpans:
    """Return the placement with one more control token, the end."""
    control = np.zeros(len(placed.ends), dtype=np.bool_) if placed.control is None else placed.control
    changed = None if placed.changed is None else np.append(placed.changed, False)
    ends = np.append(placed.ends, placed.ends[-1] if len(placed.ends) else 0)
    return TokenSpans(ends, np.append(control, True), changed, placed.lost)


def _target(
    text: str,
    data: bytes,
    given: Sequence[int] | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    ended: bool,
) -> _Side:
    """Return the target's tokens: those given, or the text's own. Only the tokenizer's own ids may change the text."""
    table = table_of(tokenizer)
    if given is not None:
        try:
            return _side(given, table, data, ends)
        except TextMismatchError:
            ids = table.check(given)
            ended = len(ids) > 0 and int(ids[-1]) in ends
            encoded, _ = encode_in_context(text, tokenizer)
            if ids[: len(ids) - ended].tolist() != encoded:
                raise
        last = ids[-1:] if ended else ids[:0]
    else:
        encoded, _ = encode_in_context(text, tokenizer)
        last = np.array([end_id(tokenizer)] if ended else [], dtype=np.int64)
    body = np.array(encoded, dtype=np.int64)
    placed = place_any(body, table, data)
    return _Side(np.concatenate((body, last)), table, _with_end(placed) if ended else placed, ended)


def _pairs(source: _Side, target: _Side) -> tuple[tuple[int, int], ...]:
    """Return special tokens that correspond: end to end, any other to the same token at the same byte."""
    if source.placed.control is None or target.placed.control is None:
        return ()
    both_end = source.ended and target.ended
    waiting: defaultdict[tuple[int, str | None], list[int]] = defaultdict(list)
    for place_, key in _controls(target, both_end):
        waiting[key].append(place_)
    return tuple((p, waiting[key].pop(0)) for p, key in _controls(source, both_end) if waiting[key])


def _controls(side: _Side, both_end: bool) -> list[tuple[int, tuple[int, str | None]]]:
    """Return control tokens by position, each with what it corresponds by: its byte and content, or that it is the
    end."""
    assert side.placed.control is not None
    positions, last = [], len(side.ids) - 1
    for at in np.flatnonzero(side.placed.control).tolist():
        token = int(side.ids[at])
        if both_end and at == last:
            positions.append((at, _END))
        elif token != side.table.unknown or side.placed.changed is None:  # else it stands for a character of the text
            positions.append((at, (int(side.placed.ends[at]), side.table.names.get(token))))
    return positions


def _result(
    units: Units,
    moved: AlignedValues,
    trace: Floats,
    clipped: float,
    target: _Side,
    pairs: tuple[tuple[int, int], ...],
    anchor: Anchor,
) -> Alignment:
    values, covered = moved.logprobs, moved.covered
    nowhere = np.ones(len(trace), dtype=np.bool_)
    nowhere[units.source.token] = False
    for s, t in pairs:
        values[t], covered[t], nowhere[s] = trace[s], True, False
    return Alignment(
        target_ids=tuple(target.ids.tolist()),
        logprobs=values,
        covered=covered,
        residual=float(trace[nowhere].sum()) + moved.residual + clipped,
        clipped=clipped,
        mismatched=int(nowhere.sum()) + moved.stranded,
        exact=target.placed.changed is None,
        anchor=anchor,
        units=units,
        paired=pairs,
    )
